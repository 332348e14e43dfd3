//! Pure step for processes and pods alike: computes the actions from the desired state, the observed state and the
//! pushed routing.
//!
//! Desired functions start beside the running ones. When all are ready, the new routing is pushed to main functions,
//! and functions that they no longer use are ended.

use crate::step_types::{
    EndAction, FollowedRouting, FunctionPurpose, HealthSource, Instance, InstanceState, MainReplacement,
    Replacement, ReplicaGroup, ReplicaSlot, RoutingPush, Start, StepInput, StepOutcome,
};
use crate::time::Time;
use remoe_process::Role;
use remoe_proto::v1::LayerExperts;
use std::collections::{BTreeMap, BTreeSet};

/// Returns the functions to end and to start, and the routing to push.
pub fn step<E: Ord + Clone>(input: &StepInput<'_, E>) -> StepOutcome<E> {
    let view = StepView::new(input);
    let push = view.push();
    let succeeded = push.is_none() && input.pushed.is_some() && view.main_functions_serve();
    let (starts, next_step_at) = view.starts();
    let name = |start: &Start| Some(view.groups.get(start.group)?.slots.get(start.slot)?.name.as_str());
    let replaced: BTreeSet<&str> = starts.iter().filter_map(name).collect();
    let mut in_use = 0;
    let mut ends = Vec::new();
    for (at, instance) in input.instances.iter().enumerate() {
        let vacant = view.filled.get(instance.slot) == Some(&None);
        let keeps_generation = vacant && input.policy.replacement == Replacement::Beside;
        let end = match instance.state {
            InstanceState::Ended { refused } if refused && vacant => EndAction::GiveUp,
            InstanceState::Ended { .. } => EndAction::Forget,
            // A faulty function ends when a replacement exists or starts.
            InstanceState::Faulty { .. } if !keeps_generation || replaced.contains(instance.slot) => {
                EndAction::Stop(input.policy.faulty_drain)
            }
            InstanceState::Healthy { .. } if view.fills_slot(at, instance) => continue,
            InstanceState::Healthy { .. } if input.asleep || view.may_leave(instance, succeeded) => {
                EndAction::Stop(input.policy.drain)
            }
            InstanceState::Healthy { .. } => {
                in_use += 1;
                continue;
            }
            InstanceState::Faulty { .. } | InstanceState::Terminating => continue,
        };
        ends.push((at, end));
    }
    let is_extra =
        |start: &Start| view.groups.get(start.group).is_some_and(|group| start.slot >= group.needed);
    let settled = starts.iter().all(is_extra)
        && ends.is_empty()
        && push.is_none()
        && in_use == 0
        && next_step_at.is_none()
        && view.groups.iter().all(|group| view.is_complete(group))
        && view.main_functions_serve();
    StepOutcome { ends, starts, push, succeeded, next_step_at, settled }
}

/// Input of a step, with the function that fills each slot.
struct StepView<'a, E> {
    input: &'a StepInput<'a, E>,
    groups: &'a [ReplicaGroup<'a>],
    /// Index of the function that fills each slot, by the name of the slot.
    filled: BTreeMap<&'a str, Option<usize>>,
}

impl<'a, E: Ord + Clone> StepView<'a, E> {
    fn new(input: &'a StepInput<'a, E>) -> Self {
        let groups = if input.asleep { &[] } else { input.groups.as_slice() };
        let slots = groups.iter().flat_map(|group| &group.slots);
        let mut filled: BTreeMap<&str, Option<usize>> =
            slots.map(|slot| (slot.name.as_str(), None)).collect();
        // Ready functions rank first, then the latest; among equal ones the first wins.
        let rank = |at: usize| input.instances.get(at).map(|it| (it.is_ready(), it.incarnation));
        for (at, instance) in input.instances.iter().enumerate() {
            let Some(best) = filled.get_mut(instance.slot) else { continue };
            if matches!(instance.state, InstanceState::Healthy { .. })
                && best.is_none_or(|best| rank(best) < rank(at))
            {
                *best = Some(at);
            }
        }
        Self { input, groups, filled }
    }

    fn fills_slot(&self, at: usize, instance: &Instance<'_, E>) -> bool {
        self.filled.get(instance.slot) == Some(&Some(at))
    }

    /// Returns the functions that fill slots of `group`.
    fn functions_of(&self, group: &'a ReplicaGroup<'a>) -> impl Iterator<Item = &'a Instance<'a, E>> {
        let at = |slot: &ReplicaSlot| self.filled.get(slot.name.as_str()).copied().flatten();
        group.slots.iter().filter_map(at).filter_map(|at| self.input.instances.get(at))
    }

    fn groups_of_role(&self, role: Role) -> impl Iterator<Item = &'a ReplicaGroup<'a>> {
        self.groups.iter().filter(move |group| group.role == role)
    }

    /// Returns whether all needed functions of `group` are ready.
    fn is_complete(&self, group: &'a ReplicaGroup<'a>) -> bool {
        self.functions_of(group).filter(|instance| instance.is_ready()).count() >= group.needed
    }

    /// Returns the main functions that exist, terminating ones included.
    fn main_functions(&self) -> impl Iterator<Item = (&'a Instance<'a, E>, bool, FollowedRouting)> {
        self.input.instances.iter().filter_map(|instance| match (&instance.purpose, instance.state) {
            (_, InstanceState::Ended { .. }) | (FunctionPurpose::Remote { .. }, _) => None,
            (FunctionPurpose::Main { current, followed, .. }, _) => Some((instance, *current, *followed)),
        })
    }

    /// Returns the functions to start, and the time of the next step if time has to pass before more can start.
    fn starts(&self) -> (Vec<Start>, Option<Time>) {
        let policy = self.input.policy;
        let starting = self.groups_of_role(Role::Remote).flat_map(|group| self.functions_of(group));
        let starting = starting.filter(|instance| !instance.is_ready()).count();
        let mut room = policy.starts_at_once.saturating_sub(starting);
        let mut replacements = policy.replacements;
        let must_wait_for_old_mains = policy.main_replacement != MainReplacement::Surge
            && self.main_functions().any(|(_, current, _)| !current);
        let (mut starts, mut next_step_at) = (Vec::new(), None::<Time>);
        for (group_index, group) in self.groups.iter().enumerate() {
            if group.role == Role::Main && must_wait_for_old_mains {
                continue;
            }
            for (slot, ReplicaSlot { name, not_before }) in group.slots.iter().enumerate() {
                let in_slot = || self.input.instances.iter().enumerate().filter(|(_, it)| it.slot == *name);
                let is_taken = policy.replacement == Replacement::InPlace && in_slot().next().is_some();
                if is_taken || self.filled.get(name.as_str()) != Some(&None) {
                    continue;
                }
                if self.input.now < *not_before {
                    next_step_at = Some(next_step_at.map_or(*not_before, |known| known.min(*not_before)));
                    continue;
                }
                let newest = in_slot().filter(|(_, it)| it.incarnation.is_some());
                let newest = newest.max_by_key(|(_, it)| it.incarnation);
                let faulty = newest.filter(|(_, it)| matches!(it.state, InstanceState::Faulty { .. }));
                let limits = [
                    (group.role == Role::Remote).then_some(&mut room),
                    faulty
                        .is_some_and(|(_, it)| it.state == InstanceState::Faulty { presumed: true })
                        .then_some(&mut replacements),
                ];
                if limits.iter().flatten().any(|left| **left == 0) {
                    continue;
                }
                limits.into_iter().flatten().for_each(|left| *left -= 1);
                starts.push(Start { group: group_index, slot, replaces: faulty.map(|(at, _)| at) });
            }
        }
        (starts, next_step_at)
    }

    /// Returns the generation to push, if the pushed one is outdated.
    fn push(&self) -> Option<RoutingPush<E>> {
        let pushed = self.input.pushed.as_ref().filter(|_| !self.input.asleep)?;
        let stays = |endpoint: &E| {
            let routed = pushed.endpoints.as_ref().is_some_and(|known| known.contains(endpoint));
            self.input.policy.health_source == HealthSource::Reported && routed
        };
        let mut endpoints = BTreeSet::new();
        let (mut served, mut missed) = (Vec::new(), Vec::new());
        for group in self.groups_of_role(Role::Remote) {
            let usable = self.functions_of(group).filter_map(|instance| match &instance.purpose {
                FunctionPurpose::Remote { endpoint, .. } => {
                    endpoint.clone().filter(|endpoint| instance.is_ready() || stays(endpoint))
                }
                FunctionPurpose::Main { .. } => None,
            });
            let usable: Vec<E> = usable.collect();
            // A new placement waits for all awake groups. Later, routing uses the functions that exist.
            if pushed.endpoints.is_none() && group.awaited && usable.len() < group.needed {
                return None;
            }
            match usable.is_empty() && !group.slots.is_empty() {
                false => served.extend(group.hosted),
                true if group.missed => missed.extend(group.hosted),
                true => {}
            }
            endpoints.extend(usable);
        }
        if let Some(known) = &pushed.endpoints {
            if *known == endpoints && pushed.is_current {
                return None;
            }
            // If all functions of some experts are lost, main functions compute those experts themselves under the
            // current generation until one is back.
            let keeps_generation =
                self.input.policy.health_source == HealthSource::Reported || endpoints.is_subset(known);
            if keeps_generation && !missed.iter().all(|set| includes_all(set, &served)) {
                return None;
            }
        }
        Some(RoutingPush { number: pushed.newest.saturating_add(1), endpoints })
    }

    /// Returns whether main functions of the desired specification serve: all needed ones, and at least as many as
    /// serve of other specifications, which would end. Blocked ones count for the latter.
    fn main_functions_serve(&self) -> bool {
        let others = self.main_functions().filter(|(instance, current, _)| !current && instance.is_ready());
        let others = others.count();
        self.groups_of_role(Role::Main).all(|group| {
            let followed = |it: &&Instance<'_, E>| {
                matches!(
                    it.purpose,
                    FunctionPurpose::Main { current: true, followed: FollowedRouting::Pushed, .. }
                )
            };
            let serving = self.functions_of(group).filter(|it| it.is_ready()).filter(followed).count();
            let is_kept =
                |it: &&Instance<'_, E>| it.state == InstanceState::Healthy { ready: false, blocked: true };
            let blocked_count = self.functions_of(group).filter(is_kept).count();
            serving >= group.needed && serving + blocked_count >= others.min(group.slots.len())
        })
    }

    /// Returns whether an unwanted function may end because it is not in use. `succeeded` is set if main functions of
    /// the desired specification serve.
    fn may_leave(&self, instance: &Instance<'_, E>, succeeded: bool) -> bool {
        match &instance.purpose {
            // It serves until the desired ones do, or could.
            FunctionPurpose::Main { current, pushed, .. } => {
                let recreates =
                    self.input.policy.main_replacement == MainReplacement::Recreate { prepared: true };
                let all_remotes_complete =
                    || self.groups_of_role(Role::Remote).all(|group| self.is_complete(group));
                *current || !pushed || succeeded || (recreates && all_remotes_complete())
            }
            // No request can be routed to it any more.
            FunctionPurpose::Remote { routed, .. } => {
                !routed && self.main_functions().all(|(_, _, followed)| followed != FollowedRouting::Other)
            }
        }
    }
}

/// Returns whether `served` together have all experts of `set`.
fn includes_all(set: &LayerExperts, served: &[&LayerExperts]) -> bool {
    let served = served.iter().filter(|served| served.layer == set.layer);
    let served: BTreeSet<u32> = served.flat_map(|served| served.experts.iter().copied()).collect();
    set.experts.iter().all(|expert| served.contains(expert))
}
