//! How many replicas of each function follow load.
//!
//! Pure: [`History`] has what gateways and main functions said of late, [`Policy`] what functions are to be kept at, and what follows for
//! main functions ([`mains`]) and for remote ones ([`remote`]) depends on nothing else. Load is an average over a window,
//! and over a tenth of it in a burst, as in Knative's autoscaler; among remote functions replicas go where MoEless' rule
//! has them ([`balance`]). Replicas are added at once. They are taken away where fewer would do with room to spare, a
//! window after any of the same function were added: a load that stays as it is moves nothing.

mod balance;
mod history;

pub use balance::{ReplicaBalance, balance};
pub use history::{GatewayReport, History, Worked};

use std::time::Duration;

/// Targets that functions are kept at.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// The share of what a replica can do that it is to do, above 0 and at most 1.
    pub target: f64,
    /// Load is averaged over so long.
    pub window: Duration,
}

/// Fewer replicas have to do at this share of [`Policy::target`] before any is taken away.
const EASE: f64 = 0.8;
/// A burst is averaged over this part of the window.
const BURST: u32 = 10;
/// It is one where it needs so many times the replicas that there are.
const SURGE: u32 = 2;

impl Policy {
    fn burst(&self) -> Duration {
        self.window / BURST
    }

    fn eased(&self) -> f64 {
        self.target * EASE
    }
}

/// Main functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mains<'a> {
    /// Name in the history.
    pub name: &'a str,
    /// That run now.
    pub present: u32,
    /// That run at least.
    pub least: u32,
    /// That run at most.
    pub most: u32,
    /// Requests that one has at the same time.
    pub room: u32,
    /// One of them serves by now.
    pub serves: bool,
}

/// Main functions that are to run at `now`, on the clock that gateways' times are of: as many as have room for the requests
/// that wait or run.
#[must_use]
pub fn mains(policy: &Policy, history: &History, mains: Mains<'_>, now: Duration) -> u32 {
    let Mains { name, present, least, most, room, serves } = mains;
    let needed = |requests: f64, target: f64| {
        let replicas = (requests / (f64::from(room.max(1)) * target) - f64::EPSILON).ceil();
        (replicas as u32).clamp(least, most.max(least))
    };
    let stable = history.requests(now, policy.window);
    let burst = history.requests(now, policy.burst());
    // Who waits is not averaged away; where some serve it may be over in a moment.
    let waiting = history.requests_that_wait(now, if serves { policy.burst() } else { Duration::ZERO });
    let at_once = needed(burst, policy.target);
    let surges = at_once > present && at_once >= present.saturating_mul(SURGE).min(most);
    let load = waiting.map_or(if surges { burst } else { stable }, |waiting| waiting.max(stable));
    let may_lower = history.may_lower(name, now, policy.window);
    // More may run than may be asked for: another writer has put it there.
    settled(present, needed(load, policy.target), needed(load, policy.eased()), may_lower)
        .clamp(least, most.max(least))
}

/// A remote function of which there may be several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remote<'a> {
    /// Name in the history.
    pub name: &'a str,
    /// Where main functions reach its replicas.
    pub addresses: &'a [String],
    /// Replicas that run now.
    pub present: u32,
    /// Replicas that its plan has.
    pub least: u32,
    /// Replicas at most.
    pub most: u32,
    /// Memory of one, in bytes.
    pub bytes: u64,
}

/// Replicas of each of `functions` that are to run at `now`, on the clock that gateways' times are of; those beyond a plan's
/// take at most `memory` bytes all together.
#[must_use]
pub fn remote(
    policy: &Policy,
    history: &History,
    functions: &[Remote<'_>],
    memory: u64,
    now: Duration,
) -> Vec<u32> {
    let needed = |load: &dyn Fn(&Remote<'_>) -> f64, target: f64| {
        let groups = functions.iter().map(|function| ReplicaBalance {
            load: load(function),
            least: function.least,
            most: function.most,
            bytes: function.bytes,
        });
        balance(&groups.collect::<Vec<_>>(), target, memory)
    };
    let stable = |function: &Remote<'_>| history.busy(function.addresses, now, policy.window);
    // Main functions tell rarely how busy remote ones are, and a function is busy all the time at most: growth is seen by the
    // requests first, which use what those before them used.
    let requests = history.requests(now, policy.window);
    let growth = if requests > 0.0 { history.requests(now, policy.burst()) / requests } else { 1.0 };
    let burst = |function: &Remote<'_>| stable(function) * growth.max(1.0);
    let at_once = needed(&burst, policy.target);
    let surges = functions.iter().zip(&at_once).any(|(function, replicas)| {
        *replicas >= function.present.saturating_mul(SURGE) && *replicas > function.least
    });
    let (up, down) = if surges {
        (at_once, needed(&burst, policy.eased()))
    } else {
        (needed(&stable, policy.target), needed(&stable, policy.eased()))
    };
    let bounds = up.iter().zip(down);
    let mut chosen: Vec<u32> = functions
        .iter()
        .zip(bounds)
        .map(|(function, (up, down))| {
            let Remote { name, present, least, most, .. } = *function;
            let may_lower = history.may_lower(name, now, policy.window);
            settled(present.max(least), *up, down, may_lower).clamp(least, most.max(least))
        })
        .collect();
    // What is there and not needed makes way where all together would take more than they may.
    let extra = |chosen: &[u32]| -> u64 {
        let each = functions.iter().zip(chosen);
        each.map(|(function, count)| {
            u64::from(count - function.least.min(*count)).saturating_mul(function.bytes)
        })
        .fold(0, u64::saturating_add)
    };
    for index in 0..chosen.len() {
        while chosen[index] > up[index] && extra(&chosen) > memory {
            chosen[index] -= 1;
        }
    }
    chosen
}

/// Between what is needed and what is needed with room to spare everything stays as it is.
fn settled(present: u32, needed: u32, with_room: u32, may_lower: bool) -> u32 {
    let most = if may_lower { with_room.max(needed) } else { u32::MAX };
    present.clamp(needed, most)
}
