//! Replica counts of functions that follow load.
//!
//! Pure: the counts of main functions ([`main_replicas`]) and of remote functions ([`remote_replicas`]) depend only
//! on recent reports ([`LoadHistory`]) and targets ([`ScalingPolicy`]). Load is averaged over a window, and over a
//! tenth of it in a burst, as in Knative's autoscaler. Replicas of remote functions are placed by MoEless' rule
//! ([`balance_replicas`]). Replicas are added at once. They are removed only if fewer suffice with a margin, and a
//! window has passed since the last addition, so that a steady load changes nothing.

mod balance;
mod history;

pub use balance::{ReplicaGroup, balance_replicas};
pub use history::{GatewayReport, LoadHistory, RemoteWorkReport};

use std::time::Duration;

/// Targets of scaling.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScalingPolicy {
    /// Target utilisation of a replica, above 0 and at most 1.
    pub target: f64,
    /// Time over which load is averaged.
    pub window: Duration,
}

/// Factor of [`ScalingPolicy::target`] for scaling down: fewer replicas must suffice at this lower utilisation before
/// any is removed.
const SCALE_DOWN_FACTOR: f64 = 0.8;
/// Divisor of the window over which bursts are averaged.
const BURST_DIVISOR: u32 = 10;
/// Factor of the present replicas that a load must need to count as a burst.
const SURGE_FACTOR: u32 = 2;

impl ScalingPolicy {
    fn burst_window(&self) -> Duration {
        self.window / BURST_DIVISOR
    }

    fn scale_down_target(&self) -> f64 {
        self.target * SCALE_DOWN_FACTOR
    }
}

/// Main functions of a deployment, and the bounds of their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MainReplicas<'a> {
    /// Name under which [`LoadHistory`] records them.
    pub name: &'a str,
    /// Number that runs now.
    pub present: u32,
    /// Smallest number.
    pub least: u32,
    /// Largest number.
    pub most: u32,
    /// Request slots of one main function.
    pub room: u32,
    /// Set if at least one of them serves.
    pub serves: bool,
}

/// Returns the number of main functions that should run at `now`, by the clock of the gateways' reports: enough slots
/// for the requests that wait or run.
#[must_use]
pub fn main_replicas(
    policy: &ScalingPolicy,
    history: &LoadHistory,
    mains: MainReplicas<'_>,
    now: Duration,
) -> u32 {
    let MainReplicas { name, present, least, most, room, serves } = mains;
    let needed = |requests: f64, target: f64| {
        let replicas = (requests / (f64::from(room.max(1)) * target) - f64::EPSILON).ceil();
        (replicas as u32).clamp(least, most.max(least))
    };
    let stable = history.requests(now, policy.window);
    let burst = history.requests(now, policy.burst_window());
    // Waiting requests count in full, not averaged. While a main function serves, a short wait is ignored.
    let waiting = history.delayed_requests(now, if serves { policy.burst_window() } else { Duration::ZERO });
    let burst_counts = needed(burst, policy.target);
    let is_burst = burst_counts > present && burst_counts >= present.saturating_mul(SURGE_FACTOR).min(most);
    let load = waiting.map_or(if is_burst { burst } else { stable }, |waiting| waiting.max(stable));
    let may_lower = history.may_lower(name, now, policy.window);
    // More may run than `most`, because another writer changed the count.
    with_hysteresis(present, needed(load, policy.target), needed(load, policy.scale_down_target()), may_lower)
        .clamp(least, most.max(least))
}

/// Remote function with replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteReplicas<'a> {
    /// Name under which [`LoadHistory`] records it.
    pub name: &'a str,
    /// Addresses at which main functions call its replicas.
    pub addresses: &'a [String],
    /// Number of replicas that run now.
    pub present: u32,
    /// Number of replicas in the plan, the smallest number.
    pub least: u32,
    /// Largest number of replicas.
    pub most: u32,
    /// Memory of a replica in bytes.
    pub bytes: u64,
}

/// Returns the number of replicas of each of `functions` that should run at `now`, by the clock of the gateways'
/// reports. Replicas beyond those of the plan use at most `memory` bytes together.
#[must_use]
pub fn remote_replicas(
    policy: &ScalingPolicy,
    history: &LoadHistory,
    functions: &[RemoteReplicas<'_>],
    memory: u64,
    now: Duration,
) -> Vec<u32> {
    let needed = |load: &dyn Fn(&RemoteReplicas<'_>) -> f64, target: f64| {
        let groups = functions.iter().map(|function| ReplicaGroup {
            load: load(function),
            least: function.least,
            most: function.most,
            bytes: function.bytes,
        });
        balance_replicas(&groups.collect::<Vec<_>>(), target, memory)
    };
    let stable = |function: &RemoteReplicas<'_>| history.busy(function.addresses, now, policy.window);
    // Main functions report rarely, and the reported load of a replica cannot exceed 1. So a burst is estimated from
    // the growth of requests, which are assumed to use experts as earlier ones did.
    let requests = history.requests(now, policy.window);
    let growth = if requests > 0.0 { history.requests(now, policy.burst_window()) / requests } else { 1.0 };
    let burst = |function: &RemoteReplicas<'_>| stable(function) * growth.max(1.0);
    let burst_counts = needed(&burst, policy.target);
    let is_burst = functions.iter().zip(&burst_counts).any(|(function, replicas)| {
        *replicas >= function.present.saturating_mul(SURGE_FACTOR) && *replicas > function.least
    });
    let (up, down) = if is_burst {
        (burst_counts, needed(&burst, policy.scale_down_target()))
    } else {
        (needed(&stable, policy.target), needed(&stable, policy.scale_down_target()))
    };
    let bounds = up.iter().zip(down);
    let mut chosen: Vec<u32> = functions
        .iter()
        .zip(bounds)
        .map(|(function, (up, down))| {
            let RemoteReplicas { name, present, least, most, .. } = *function;
            let may_lower = history.may_lower(name, now, policy.window);
            with_hysteresis(present.max(least), *up, down, may_lower).clamp(least, most.max(least))
        })
        .collect();
    // If all replicas together exceed `memory`, unneeded ones are removed first.
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

/// Applies hysteresis: keeps `present` if it lies between `needed` and `needed_with_margin`. Removes replicas only if
/// `may_lower`.
fn with_hysteresis(present: u32, needed: u32, needed_with_margin: u32, may_lower: bool) -> u32 {
    let max = if may_lower { needed_with_margin.max(needed) } else { u32::MAX };
    present.clamp(needed, max)
}
