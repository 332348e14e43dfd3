//! Queueing model of a deployment: share of the time in which its functions are alive, share of cold requests, and load.
//!
//! A deployment has one or more main functions; remote functions start and stop with them. It scales to zero if there was
//! no request for [`Arrivals::idle_seconds`], and the next request starts it. Requests go to a random main function, as with
//! a Kubernetes Service. Each main function serves up to [`Service::concurrency`] requests at once; others wait in a queue,
//! first come, first served.
//!
//! `load.rs` has the speed of a main function with n requests, `poisson.rs` the means under random arrivals, `recorded.rs`
//! replays recorded arrivals, `scaling_group.rs` models a group that scales to zero. `latency.rs` simulates latencies with
//! quantiles, with the iterations of `engine.rs`.

mod engine;
mod latency;
mod load;
mod poisson;
mod recorded;
mod scaling_group;

pub use latency::latency_unless;
pub use latency::{Latency, Quantiles, latency};
pub use load::Service;
pub use scaling_group::{ScalingGroup, ScalingGroupTime};

use crate::problem::Arrivals;
use load::MainFunctions;
use std::borrow::Cow;

/// Largest number of recorded times that a search replays for every candidate.
const MAX_REPLAYED: usize = 64;

/// Time alive and load of a deployment under its arrivals: means over all time.
///
/// Units: seconds, requests per second. The cost per second is [`Self::share`] times the price of all functions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Alive {
    /// Share of the time in which functions are alive, including starts and idle windows.
    pub share: f64,
    /// Cold starts per second.
    pub wakes_per_second: f64,
    /// Share of the requests that wait for a cold start.
    pub cold_share: f64,
    /// Mean seconds that these requests wait for the start; 0 without them.
    pub cold_wait_seconds: f64,
    /// Mean number of requests that a main function serves, over all time.
    pub in_flight: f64,
    /// Mean seconds from the admission of a request to its last token.
    pub service_seconds: f64,
    /// Mean seconds from the admission of a request to its first token: the running iteration, prompts before its own, and its
    /// own prefill.
    pub first_token_seconds: f64,
    /// Mean seconds per decode step, including the prefills of other requests. 0 if requests have no decode steps.
    pub tpot_seconds: f64,
    /// Mean seconds that requests wait for admission to a ready main function; infinite if saturated.
    pub wait_seconds: f64,
    /// Arrival rate divided by the largest rate that the main functions can serve.
    pub utilisation: f64,
    /// Set if more requests arrive than can be served: then figures are those of full main functions.
    pub saturated: bool,
}

/// Computes time alive and load of a deployment under `arrivals`, with cold starts of `start_seconds`.
///
/// Recorded arrivals are replayed, in time proportional to their number. For random arrivals it takes microseconds.
///
/// Inputs must be those of a checked problem: finite and not negative. Without arrivals (a rate of 0, or fewer than two
/// distinct recorded times) the deployment stays at zero.
#[must_use]
pub fn alive(arrivals: &Arrivals, service: &Service, start_seconds: f64) -> Alive {
    alive_beside(arrivals, service, start_seconds, None)
}

/// Computes [`alive`] for main functions with a target inter-token latency of `target_itl` seconds during prefills.
pub fn alive_beside(
    arrivals: &Arrivals,
    service: &Service,
    start_seconds: f64,
    target_itl: Option<f64>,
) -> Alive {
    let mains = MainFunctions::with_target(service, target_itl);
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
        None => poisson::expected_time_shares(arrivals, start_seconds, &mains),
    };
    mains.latencies(per_second, utilisation, &time)
}

/// Returns the mean number of requests per second.
pub fn mean_per_second(arrivals: &Arrivals) -> f64 {
    match &arrivals.recorded_seconds {
        Some(times) => recorded::per_second(times),
        None => arrivals.per_second,
    }
}

/// Simplifies `arrivals` for a search: replaces a long record by random arrivals at the same rate.
pub fn simplified_arrivals(arrivals: &Arrivals) -> Cow<'_, Arrivals> {
    match &arrivals.recorded_seconds {
        Some(times) if times.len() > MAX_REPLAYED => Cow::Owned(Arrivals {
            per_second: mean_per_second(arrivals),
            burst: 1.0,
            recorded_seconds: None,
            ..arrivals.clone()
        }),
        _ => Cow::Borrowed(arrivals),
    }
}

/// Mean state of a deployment over time.
#[derive(Debug, Clone, Copy, Default)]
struct TimeShares {
    /// Share of the time in which functions are alive.
    alive: f64,
    /// Cold starts per second.
    wakes: f64,
    /// Requests per second that wait for a cold start.
    cold: f64,
    /// Number of requests that wait for a cold start.
    awaiting_start: f64,
    /// Number of requests that one main function serves.
    served: f64,
    /// Number of served requests that wait for prompts of the same burst.
    held_up: f64,
    /// Prompts of the same burst that are before that of a request.
    before: f64,
    /// Number of requests that wait for admission to one ready main function.
    queued: f64,
}
