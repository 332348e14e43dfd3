//! Moves of many experts at once: groups that become one, and all that a layer has in one place.

use super::Slicing;
use remoe_plan::plan::{Group, Plan};

/// Where experts of a layer may be: with the main function, or in a group; the number behind the last group stands for
/// a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpertHome {
    Home,
    Group(usize),
}

impl Slicing<'_, '_> {
    /// At most `most` plans in which two groups of `plan` are one, or in which experts that a layer has in one place,
    /// or all of them, are in another one.
    pub(super) fn block_moves(&self, plan: &Plan, most: usize) -> Vec<Plan> {
        let mut plans = Vec::new();
        let groups = plan.groups.len();
        for one in 0..groups {
            for other in one + 1..groups {
                if self.has_enough(&plans, most) {
                    break;
                }
                plans.extend(self.sized(merged(plan, one, other)));
            }
        }
        let most_groups = self.model.problem.limits.max_groups.unwrap_or(1) as usize;
        let with_new = (groups + 1).min(most_groups.max(groups));
        for layer in 0..plan.layers.len() {
            let places = || std::iter::once(ExpertHome::Home).chain((0..groups).map(ExpertHome::Group));
            for from in places().map(Some).chain([None]) {
                for to in std::iter::once(ExpertHome::Home).chain((0..with_new).map(ExpertHome::Group)) {
                    if self.has_enough(&plans, most) {
                        break;
                    }
                    let moved = self.block_moved(plan, layer, from, to);
                    plans.extend(moved.and_then(|moved| self.sized(moved)));
                }
            }
        }
        // A plan with nothing remote is another way to serve.
        plans.retain(|plan| plan.replicas() > 0 && self.remote.allows(self.model, &plan.remote_counts()));
        plans
    }

    /// `plan` with what `layer` has at `from`, or all of its experts, at `to`; none where that changes nothing, or one
    /// expert alone.
    fn block_moved(
        &self,
        plan: &Plan,
        layer: usize,
        from: Option<ExpertHome>,
        to: ExpertHome,
    ) -> Option<Plan> {
        let all = 0..self.model.layers[layer].experts as u32;
        let at = |place: ExpertHome| -> Vec<u32> {
            match place {
                ExpertHome::Home => {
                    let remote = &plan.layers[layer].remote;
                    all.clone().filter(|expert| remote.binary_search(expert).is_err()).collect()
                }
                ExpertHome::Group(group) => {
                    plan.groups.get(group).map_or_else(Vec::new, |group| group.experts[layer].clone())
                }
            }
        };
        let there = at(to);
        let moving: Vec<u32> = match from {
            Some(from) if from == to => return None,
            Some(from) => at(from),
            None => all.filter(|expert| there.binary_search(expert).is_err()).collect(),
        };
        if moving.len() < 2 {
            return None;
        }
        let mut moved = plan.clone();
        for group in &mut moved.groups {
            group.experts[layer].retain(|expert| moving.binary_search(expert).is_err());
        }
        let remote = &mut moved.layers[layer].remote;
        remote.retain(|expert| moving.binary_search(expert).is_err());
        if let ExpertHome::Group(group) = to {
            remote.extend(&moving);
            remote.sort_unstable();
            if group == moved.groups.len() {
                moved.groups.push(self.new_group(plan));
            }
            let own = &mut moved.groups[group].experts[layer];
            own.extend(&moving);
            own.sort_unstable();
        }
        Some(moved)
    }

    /// A group without experts, with the vCPUs of those that `plan` has.
    pub(super) fn new_group(&self, plan: &Plan) -> Group {
        let like = plan.groups.first();
        let least = || self.model.remote_sizings(0.0).next().and_then(|sizing| sizing.stated);
        Group {
            experts: vec![Vec::new(); plan.layers.len()],
            memory_bytes: 0.0,
            vcpus: like.map_or_else(least, |group| group.vcpus),
            replicas: 1,
            idle_seconds: like.and_then(|group| group.idle_seconds),
        }
    }
}

/// `plan` with the experts of the group at `other` in the one at `one`.
fn merged(plan: &Plan, one: usize, other: usize) -> Plan {
    let mut merged = plan.clone();
    let gone = merged.groups.remove(other);
    for (own, more) in merged.groups[one].experts.iter_mut().zip(gone.experts) {
        own.extend(more);
        own.sort_unstable();
    }
    merged
}
