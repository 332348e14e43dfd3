//! Memory of processes between two decisions: restarts and routing.

use crate::action::{Action, Route};
use crate::backoff::Backoff;
use crate::launcher::FunctionId;
use crate::time::Time;
use std::collections::BTreeMap;
use std::time::Duration;

/// The pause before the first restart.
pub const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// The pauses double up to this.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(10);
const PAUSES: Backoff = Backoff { first: FIRST_PAUSE, longest: LONGEST_PAUSE };
/// A function that lived this long is taken for sound: its next restart comes after the first pause.
pub const STABLE_AFTER: Duration = Duration::from_secs(20);
/// The pause before a routing that could not be put in force is tried again.
pub const ROUTING_PAUSE: Duration = Duration::from_secs(1);

/// Restarts by place, and the routing so far.
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
    /// In a row.
    failures: u32,
    not_before: Time,
    /// Set if its function was asked to end, for no fault of its own.
    leaving: bool,
    /// Set if it ended that way and has not failed since: after a sleep it starts with the others.
    rested: bool,
}

impl RestartMemory {
    /// Takes note that `action` was begun at `now`.
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

    /// Takes note that the function in place `name` ended, or could not be started.
    pub fn ended(&mut self, name: &str, now: Time) {
        let place = self.places.entry(name.to_owned()).or_default();
        place.rested = std::mem::take(&mut place.leaving);
        if place.rested {
            // It may be wanted again at once, and what came before is forgotten.
            (place.failures, place.not_before) = (0, now);
            return;
        }
        let stable = now.saturating_sub(place.started) >= STABLE_AFTER;
        place.failures = if stable { 1 } else { place.failures.saturating_add(1) };
        place.not_before = now + PAUSES.after(place.failures);
    }

    /// Takes note of what became of the generation that was being pushed.
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

    /// Notes that a main function has `generation` in force, and returns true if this process did not push that
    /// generation: then nothing is in force, and the next push has a greater number.
    pub fn found(&mut self, generation: u64, now: Time) -> bool {
        // What is being pushed may be in force before its answer is here.
        if self.pushing.is_some() || generation <= self.generation {
            return false;
        }
        self.generation = generation;
        self.in_force = None;
        self.route_not_before = now + ROUTING_PAUSE;
        true
    }

    /// The largest number that was pushed or found so far.
    pub(crate) fn newest(&self) -> u64 {
        self.generation
    }

    /// When the function in place `name` may be started.
    pub fn not_before(&self, name: &str) -> Time {
        self.places.get(name).map_or(Time::ZERO, |place| place.not_before)
    }

    /// Reports if the function in place `name` starts after a sleep and has not failed since. `failed`: an existing one
    /// has failed, and that is not noted yet.
    pub(crate) fn wakes(&self, name: &str, failed: bool) -> bool {
        self.places.get(name).is_some_and(|place| place.leaving || (place.rested && !failed))
    }

    /// Reports if a generation was in force at any time: the deployment has worked as it is.
    pub fn settled(&self) -> bool {
        self.settled
    }

    /// Returns the generation in force and its route.
    pub fn in_force(&self) -> Option<(u64, &Route)> {
        self.in_force.as_ref().map(|(generation, route)| (*generation, route))
    }

    /// Reports if a generation may be pushed at `now`: not during another push, nor in the pause after a push that
    /// failed.
    pub(crate) fn may_push(&self, now: Time) -> bool {
        self.pushing.is_none() && now >= self.route_not_before
    }

    /// Reports if the main function `id` is putting a generation in force.
    pub(crate) fn pushes_to(&self, id: &FunctionId) -> bool {
        self.pushing.as_ref().is_some_and(|route| route.main == *id)
    }

    /// Reports if requests may still reach the function through the route of a main function that `is_left`.
    pub(crate) fn routes_to(&self, id: &FunctionId, is_left: impl Fn(&FunctionId) -> bool) -> bool {
        let in_force = self.in_force.as_ref().map(|(_, route)| route);
        let mut routes = [in_force, self.pushing.as_ref()].into_iter().flatten();
        routes.any(|route| route.endpoints.contains(id) && is_left(&route.main))
    }
}
