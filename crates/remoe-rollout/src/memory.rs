//! State between two decisions about processes: restarts and routing.

use crate::action::{Action, Route};
use crate::backoff::Backoff;
use crate::launcher::FunctionId;
use crate::time::Time;
use std::collections::BTreeMap;
use std::time::Duration;

/// Pause before the first restart.
pub const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Maximum pause before a restart; pauses double up to it.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(10);
const PAUSES: Backoff = Backoff { first: FIRST_PAUSE, longest: LONGEST_PAUSE };
/// Lifetime after which a function counts as stable: its next restart comes after the first pause.
pub const STABLE_AFTER: Duration = Duration::from_secs(20);
/// Pause before a failed push of routing is retried.
pub const ROUTING_PAUSE: Duration = Duration::from_secs(1);

/// Restart history of each slot, and the routing so far.
#[derive(Debug, Clone, Default)]
pub struct RestartMemory {
    places: BTreeMap<String, ReplicaHistory>,
    generation: u64,
    pushing: Option<Route>,
    in_force: Option<(u64, Route)>,
    route_not_before: Time,
    settled: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct ReplicaHistory {
    started: Time,
    /// Consecutive failures.
    failures: u32,
    not_before: Time,
    /// Set if its function was asked to end without a fault.
    leaving: bool,
    /// Set if it ended that way and has not failed since: after a sleep it starts together with the others.
    rested: bool,
}

impl RestartMemory {
    /// Records that `action` began at `now`.
    pub fn note(&mut self, action: &Action, now: Time) {
        match action {
            Action::Start { name } => self.places.entry(name.clone()).or_default().started = now,
            Action::Forget { name, .. } => self.ended(name, now),
            Action::Route { generation, route } => {
                self.generation = *generation;
                self.pushing = Some(route.clone());
            }
            Action::Stop { name, fault: None, .. } => {
                self.places.entry(name.clone()).or_default().leaving = true
            }
            Action::Stop { .. } | Action::GiveUp { .. } => {}
        }
    }

    /// Records that the function in slot `name` ended, or could not be started.
    pub fn ended(&mut self, name: &str, now: Time) {
        let place = self.places.entry(name.to_owned()).or_default();
        place.rested = std::mem::take(&mut place.leaving);
        if place.rested {
            // It may be wanted again at once; its history is cleared.
            (place.failures, place.not_before) = (0, now);
            return;
        }
        let stable = now.saturating_sub(place.started) >= STABLE_AFTER;
        place.failures = if stable { 1 } else { place.failures.saturating_add(1) };
        place.not_before = now + PAUSES.after(place.failures);
    }

    /// Records the outcome of the push in progress.
    pub fn routed(&mut self, in_force: bool, now: Time) {
        let Some(route) = self.pushing.take() else { return };
        if in_force {
            self.in_force = Some((self.generation, route));
            self.settled = true;
            self.places.values_mut().for_each(|place| place.rested = false);
        } else {
            self.route_not_before = now + ROUTING_PAUSE;
        }
    }

    /// Records that a main function has `generation` in force. Returns true if this process did not push it: then no
    /// own generation is in force, and the next push has a higher number.
    pub fn found(&mut self, generation: u64, now: Time) -> bool {
        // The push in progress may take effect before its answer arrives.
        if self.pushing.is_some() || generation <= self.generation {
            return false;
        }
        self.generation = generation;
        self.in_force = None;
        self.route_not_before = now + ROUTING_PAUSE;
        true
    }

    /// Returns the highest number that was pushed or observed.
    pub(crate) fn newest(&self) -> u64 {
        self.generation
    }

    /// Returns the earliest start of the function in slot `name`.
    pub fn not_before(&self, name: &str) -> Time {
        self.places.get(name).map_or(Time::ZERO, |place| place.not_before)
    }

    /// Returns whether the function in slot `name` starts after a sleep and has not failed since. `failed` is set if
    /// an existing one failed and that is not recorded yet.
    pub(crate) fn wakes(&self, name: &str, failed: bool) -> bool {
        self.places.get(name).is_some_and(|place| place.leaving || (place.rested && !failed))
    }

    /// Returns whether any generation was ever in force, that is, whether the deployment has worked.
    pub fn settled(&self) -> bool {
        self.settled
    }

    /// Returns the generation in force and its route.
    pub fn in_force(&self) -> Option<(u64, &Route)> {
        self.in_force.as_ref().map(|(generation, route)| (*generation, route))
    }

    /// Returns whether a generation may be pushed at `now`: not during another push, nor in the pause after a failed
    /// one.
    pub(crate) fn may_push(&self, now: Time) -> bool {
        self.pushing.is_none() && now >= self.route_not_before
    }

    /// Returns whether a push to the main function `id` is in progress.
    pub(crate) fn pushes_to(&self, id: &FunctionId) -> bool {
        self.pushing.as_ref().is_some_and(|route| route.main == *id)
    }

    /// Returns whether requests may still reach the function through the route of a main function for which `is_left`
    /// is true.
    pub(crate) fn routes_to(&self, id: &FunctionId, is_left: impl Fn(&FunctionId) -> bool) -> bool {
        let in_force = self.in_force.as_ref().map(|(_, route)| route);
        let mut routes = [in_force, self.pushing.as_ref()].into_iter().flatten();
        routes.any(|route| route.endpoints.contains(id) && is_left(&route.main))
    }
}
