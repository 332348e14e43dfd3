//! The pure step, for processes and pods alike: from the desired state, the observed state and the routing that main
//! functions were told to the actions to take.
//!
//! Desired functions start beside those that run. Main functions are told of them when all are ready, and functions
//! that main functions no longer use are ended.

use crate::scene::{
    EndAction, FollowedRouting, FunctionPurpose, HealthSource, Instance, InstanceState, MainReplacement,
    Replacement, ReplicaGroup, ReplicaSlot, RoutingPush, Start, StepInput, StepOutcome,
};
use crate::time::Time;
use remoe_process::Role;
use remoe_proto::v1::LayerExperts;
use std::collections::{BTreeMap, BTreeSet};

/// Returns the outcome of `scene`: functions to end, functions to start, and routing to tell.
pub fn step<E: Ord + Clone>(scene: &StepInput<'_, E>) -> StepOutcome<E> {
    let look = StepView::at(scene);
    let tell = look.tell();
    let succeeded = tell.is_none() && scene.told.is_some() && look.main_functions_serve();
    let (starts, look_again) = look.starts();
    let name = |start: &Start| Some(look.parts.get(start.part)?.places.get(start.place)?.name.as_str());
    let replaced: BTreeSet<&str> = starts.iter().filter_map(name).collect();
    let mut in_use = 0;
    let mut ends = Vec::new();
    for (at, instance) in scene.instances.iter().enumerate() {
        let vacant = look.filled.get(instance.place) == Some(&None);
        let waits = vacant && scene.policy.replacement == Replacement::Beside;
        let end = match instance.state {
            InstanceState::Ended { refused } if refused && vacant => EndAction::GiveUp,
            InstanceState::Ended { .. } => EndAction::Forget,
            // What is wrong goes when something better is there, or comes.
            InstanceState::Faulty { .. } if !waits || replaced.contains(instance.place) => {
                EndAction::Stop(scene.policy.faulty_drain)
            }
            InstanceState::Sound { .. } if look.fills(at, instance) => continue,
            InstanceState::Sound { .. } if scene.asleep || look.may_leave(instance, succeeded) => {
                EndAction::Stop(scene.policy.drain)
            }
            InstanceState::Sound { .. } => {
                in_use += 1;
                continue;
            }
            InstanceState::Faulty { .. } | InstanceState::Leaving => continue,
        };
        ends.push((at, end));
    }
    let is_extra = |start: &Start| look.parts.get(start.part).is_some_and(|part| start.place >= part.needed);
    let settled = starts.iter().all(is_extra)
        && ends.is_empty()
        && tell.is_none()
        && in_use == 0
        && look_again.is_none()
        && look.parts.iter().all(|part| look.is_complete(part))
        && look.main_functions_serve();
    StepOutcome { ends, starts, tell, succeeded, look_again, settled }
}

/// A scene, and which function fills which place.
struct StepView<'a, E> {
    scene: &'a StepInput<'a, E>,
    parts: &'a [ReplicaGroup<'a>],
    /// The function that fills it, by the name of the place.
    filled: BTreeMap<&'a str, Option<usize>>,
}

impl<'a, E: Ord + Clone> StepView<'a, E> {
    fn at(scene: &'a StepInput<'a, E>) -> Self {
        let parts = if scene.asleep { &[] } else { scene.parts.as_slice() };
        let places = parts.iter().flat_map(|part| &part.places);
        let mut filled: BTreeMap<&str, Option<usize>> =
            places.map(|place| (place.name.as_str(), None)).collect();
        // One that is ready rather than another, then the latest; of those that are alike the first.
        let rank = |at: usize| scene.instances.get(at).map(|it| (it.is_ready(), it.incarnation));
        for (at, instance) in scene.instances.iter().enumerate() {
            let Some(best) = filled.get_mut(instance.place) else { continue };
            if matches!(instance.state, InstanceState::Sound { .. })
                && best.is_none_or(|best| rank(best) < rank(at))
            {
                *best = Some(at);
            }
        }
        Self { scene, parts, filled }
    }

    fn fills(&self, at: usize, instance: &Instance<'_, E>) -> bool {
        self.filled.get(instance.place) == Some(&Some(at))
    }

    /// The functions that fill places of `part`.
    fn filling(&self, part: &'a ReplicaGroup<'a>) -> impl Iterator<Item = &'a Instance<'a, E>> {
        let at = |place: &ReplicaSlot| self.filled.get(place.name.as_str()).copied().flatten();
        part.places.iter().filter_map(at).filter_map(|at| self.scene.instances.get(at))
    }

    fn of(&self, role: Role) -> impl Iterator<Item = &'a ReplicaGroup<'a>> {
        self.parts.iter().filter(move |part| part.role == role)
    }

    /// Reports if all needed functions of `part` are ready.
    fn is_complete(&self, part: &'a ReplicaGroup<'a>) -> bool {
        self.filling(part).filter(|instance| instance.is_ready()).count() >= part.needed
    }

    /// Main functions that are there, those on their way out among them.
    fn main_functions(&self) -> impl Iterator<Item = (&'a Instance<'a, E>, bool, FollowedRouting)> {
        self.scene.instances.iter().filter_map(|instance| match (&instance.duty, instance.state) {
            (_, InstanceState::Ended { .. }) | (FunctionPurpose::Remote { .. }, _) => None,
            (FunctionPurpose::Main { current, follows, .. }, _) => Some((instance, *current, *follows)),
        })
    }

    /// Returns the functions to start, and when to look again if time has to pass before that.
    fn starts(&self) -> (Vec<Start>, Option<Time>) {
        let policy = self.scene.policy;
        let starting = self.of(Role::Remote).flat_map(|part| self.filling(part));
        let starting = starting.filter(|instance| !instance.is_ready()).count();
        let mut room = policy.starts_at_once.saturating_sub(starting);
        let mut replacements = policy.replacements;
        let in_the_way = policy.succession != MainReplacement::Surge
            && self.main_functions().any(|(_, current, _)| !current);
        let (mut starts, mut look_again) = (Vec::new(), None::<Time>);
        for (part, its) in self.parts.iter().enumerate() {
            if its.role == Role::Main && in_the_way {
                continue;
            }
            for (place, ReplicaSlot { name, not_before }) in its.places.iter().enumerate() {
                let there = || self.scene.instances.iter().enumerate().filter(|(_, it)| it.place == *name);
                let is_taken = policy.replacement == Replacement::InPlace && there().next().is_some();
                if is_taken || self.filled.get(name.as_str()) != Some(&None) {
                    continue;
                }
                if self.scene.now < *not_before {
                    look_again = Some(look_again.map_or(*not_before, |known| known.min(*not_before)));
                    continue;
                }
                let newest = there().filter(|(_, it)| it.incarnation.is_some());
                let newest = newest.max_by_key(|(_, it)| it.incarnation);
                let faulty = newest.filter(|(_, it)| matches!(it.state, InstanceState::Faulty { .. }));
                let limits = [
                    (its.role == Role::Remote).then_some(&mut room),
                    faulty
                        .is_some_and(|(_, it)| it.state == InstanceState::Faulty { presumed: true })
                        .then_some(&mut replacements),
                ];
                if limits.iter().flatten().any(|left| **left == 0) {
                    continue;
                }
                limits.into_iter().flatten().for_each(|left| *left -= 1);
                starts.push(Start { part, place, instead_of: faulty.map(|(at, _)| at) });
            }
        }
        (starts, look_again)
    }

    /// The generation that main functions are to be told, where what they were told is not what it should be.
    fn tell(&self) -> Option<RoutingPush<E>> {
        let told = self.scene.told.as_ref().filter(|_| !self.scene.asleep)?;
        let stays = |endpoint: &E| {
            let routed = told.endpoints.as_ref().is_some_and(|known| known.contains(endpoint));
            self.scene.policy.sight == HealthSource::Reported && routed
        };
        let mut endpoints = BTreeSet::new();
        let (mut served, mut missed) = (Vec::new(), Vec::new());
        for part in self.of(Role::Remote) {
            let usable = self.filling(part).filter_map(|instance| match &instance.duty {
                FunctionPurpose::Remote { endpoint, .. } => {
                    endpoint.clone().filter(|endpoint| instance.is_ready() || stays(endpoint))
                }
                FunctionPurpose::Main { .. } => None,
            });
            let usable: Vec<E> = usable.collect();
            // A placement begins as a whole, less what rests. Later it does with what there is.
            if told.endpoints.is_none() && part.awaited && usable.len() < part.needed {
                return None;
            }
            match usable.is_empty() && !part.places.is_empty() {
                false => served.extend(part.hosted),
                true if part.missed => missed.extend(part.hosted),
                true => {}
            }
            endpoints.extend(usable);
        }
        if let Some(known) = &told.endpoints {
            if *known == endpoints && told.stands {
                return None;
            }
            // If experts have lost all of their functions, main functions compute them themselves under the generation
            // that they have, until one is back.
            let waits = self.scene.policy.sight == HealthSource::Reported || endpoints.is_subset(known);
            if waits && !missed.iter().all(|set| is_among(set, &served)) {
                return None;
            }
        }
        Some(RoutingPush { number: told.newest.saturating_add(1), endpoints })
    }

    /// Reports if main functions of the desired shape serve: all that are needed, and of those that exist because of
    /// load, hindered ones included, as many as main functions of other shapes serve, which would end.
    fn main_functions_serve(&self) -> bool {
        let others = self.main_functions().filter(|(instance, current, _)| !current && instance.is_ready());
        let others = others.count();
        self.of(Role::Main).all(|part| {
            let follows = |it: &&Instance<'_, E>| {
                matches!(it.duty, FunctionPurpose::Main { current: true, follows: FollowedRouting::Told, .. })
            };
            let serving = self.filling(part).filter(|it| it.is_ready()).filter(follows).count();
            let is_kept =
                |it: &&Instance<'_, E>| it.state == InstanceState::Sound { ready: false, hindered: true };
            let kept = self.filling(part).filter(is_kept).count();
            serving >= part.needed && serving + kept >= others.min(part.places.len())
        })
    }

    /// Reports if an unwanted function is not in use either. `succeeded`: main functions of the desired shape serve.
    fn may_leave(&self, instance: &Instance<'_, E>, succeeded: bool) -> bool {
        match &instance.duty {
            // Serves until those that are to run do, or could.
            FunctionPurpose::Main { current, told, .. } => {
                let gives_way = self.scene.policy.succession == MainReplacement::Recreate { prepared: true };
                let could = || self.of(Role::Remote).all(|part| self.is_complete(part));
                *current || !told || succeeded || (gives_way && could())
            }
            // No request can be sent to it any more.
            FunctionPurpose::Remote { routed, .. } => {
                !routed && self.main_functions().all(|(_, _, follows)| follows != FollowedRouting::Other)
            }
        }
    }
}

/// Reports if `served` together have all experts of `set`.
fn is_among(set: &LayerExperts, served: &[&LayerExperts]) -> bool {
    let served = served.iter().filter(|served| served.layer == set.layer);
    let served: BTreeSet<u32> = served.flat_map(|served| served.experts.iter().copied()).collect();
    set.experts.iter().all(|expert| served.contains(expert))
}
