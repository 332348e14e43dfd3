//! How much of the time functions are alive, how many requests find them asleep, and what load those
//! that run are under.
//!
//! A deployment has some main functions; remote functions live and die with them. It sleeps when no
//! request has been there for [`Arrivals::idle_seconds`], and the next request starts it. Requests go to
//! one of the mains by chance, as a Kubernetes Service sends them; each main serves up to
//! [`Service::concurrency`] at once and lets others wait, first come first served.
//!
//! `load.rs` says how fast a main serves n requests, `poisson.rs` what random arrivals make of that in
//! the mean, `recorded.rs` replays recorded ones, `alone.rs` is a group that ends by itself. `latency.rs` has times of
//! requests with their quantiles, from the iterations of `engine.rs`.

mod alone;
mod engine;
mod latency;
mod load;
mod poisson;
mod recorded;

pub use alone::{Alone, AloneTime};
pub use latency::latency_unless;
pub use latency::{Latency, Quantiles, latency};
pub use load::Service;

use crate::problem::Arrivals;
use load::Mains;
use std::borrow::Cow;

/// Recorded times that a search replays for every candidate.
const LONG_RECORD: usize = 64;

/// Life of a deployment under its arrivals: means over all time.
///
/// In seconds and requests per second. Cost is [`Self::share`] times the price of what is alive.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Alive {
    /// Share of the time in which functions are alive; starts and idle windows included.
    pub share: f64,
    /// Starts from nothing, per second.
    pub wakes_per_second: f64,
    /// Share of the requests that wait for a start.
    pub cold_share: f64,
    /// How long they wait for it in the mean; 0 where there are none.
    pub cold_wait_seconds: f64,
    /// Requests that one main serves, over all time: asleep it serves none.
    pub in_flight: f64,
    /// From the moment a request has a slot of a ready main to its last token, over all requests.
    pub service_seconds: f64,
    /// From that moment to its first token: the iteration that runs, prompts that stand before its own, and the
    /// iteration of its own prompt.
    pub first_token_seconds: f64,
    /// Per decode step: what a request takes beyond a prefill of its own, so other requests' prefills
    /// are in it. 0 where requests have no decode steps.
    pub tpot_seconds: f64,
    /// For a slot of a ready main, over all requests; infinite where saturated.
    pub wait_seconds: f64,
    /// Arrivals over what the mains can serve at most.
    pub utilisation: f64,
    /// More requests come than the mains can serve: figures are those of mains that are always full.
    pub saturated: bool,
}

/// Life under `arrivals` of mains that serve as `service` says and take `start_seconds` from nothing to
/// ready, the slowest function counted.
///
/// Recorded times are replayed, in time proportional to their number. For others the time is that of
/// some operations for each number of requests that is at all likely to be there at once: microseconds.
///
/// Figures are as good as their inputs: those of a checked problem are finite and not negative. Without
/// arrivals (none per second; fewer than two distinct recorded times) the deployment sleeps for good.
#[must_use]
pub fn alive(arrivals: &Arrivals, service: &Service, start_seconds: f64) -> Alive {
    alive_beside(arrivals, service, start_seconds, None)
}

/// As [`alive`], for mains that aim at an inter-token latency of `target_itl` seconds beside prompts.
pub fn alive_beside(
    arrivals: &Arrivals,
    service: &Service,
    start_seconds: f64,
    target_itl: Option<f64>,
) -> Alive {
    let mains = Mains::paced(service, target_itl);
    let per_second = mean_per_second(arrivals);
    if per_second <= 0.0 {
        return mains.unused(arrivals.idle_seconds.is_none());
    }
    let utilisation = per_second / mains.most_per_second();
    if utilisation >= 1.0 {
        return mains.full(utilisation);
    }
    let time = match &arrivals.recorded_seconds {
        Some(times) => recorded::replay(times, arrivals.idle_seconds, start_seconds, &mains),
        None => poisson::expect(arrivals, start_seconds, &mains),
    };
    mains.figures(per_second, utilisation, &time)
}

/// Requests per second, in the mean.
pub fn mean_per_second(arrivals: &Arrivals) -> f64 {
    match &arrivals.recorded_seconds {
        Some(times) => recorded::per_second(times),
        None => arrivals.per_second,
    }
}

/// `arrivals` for a search, which would replay a long record for every candidate: requests come as often at random then.
pub fn quick(arrivals: &Arrivals) -> Cow<'_, Arrivals> {
    match &arrivals.recorded_seconds {
        Some(times) if times.len() > LONG_RECORD => Cow::Owned(Arrivals {
            per_second: mean_per_second(arrivals),
            burst: 1.0,
            recorded_seconds: None,
            ..arrivals.clone()
        }),
        _ => Cow::Borrowed(arrivals),
    }
}

/// Where time goes, in the mean.
#[derive(Debug, Clone, Copy, Default)]
struct Time {
    /// Share of it in which functions are alive.
    alive: f64,
    /// Starts per second.
    wakes: f64,
    /// Requests per second that wait for a start.
    cold: f64,
    /// Requests that wait for a start at once.
    awaiting_start: f64,
    /// Requests that one main serves at once.
    served: f64,
    /// Requests that are served only because prompts that came with theirs go first.
    held_up: f64,
    /// Prompts that came together with a request's and go first.
    before: f64,
    /// Requests that wait for a slot of one ready main at once.
    queued: f64,
}
