//! Moves of many experts at once: merging two groups, and moving all experts that a layer has in one place.

use super::GroupSearch;
use remoe_plan::plan::{Group, Plan};

/// Place of experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpertPlace {
    /// The main function.
    Local,
    /// The group at this index; the number of groups stands for a new group.
    Group(usize),
}

impl GroupSearch<'_, '_> {
    /// Returns up to `most` plans that merge two groups of `plan`, or that move the experts of one layer.
    ///
    /// A move takes the experts that the layer has in one place, or all of them, to another place.
    pub(super) fn bulk_moves(&self, plan: &Plan, most: usize) -> Vec<Plan> {
        let mut plans = Vec::new();
        let groups = plan.groups.len();
        for one in 0..groups {
            for other in one + 1..groups {
                if self.has_enough(&plans, most) {
                    break;
                }
                plans.extend(self.with_fitting_sizes(merge_groups(plan, one, other)));
            }
        }
        let most_groups = self.model.problem.limits.max_groups.unwrap_or(1) as usize;
        let with_new = (groups + 1).min(most_groups.max(groups));
        for layer in 0..plan.layers.len() {
            let places = || std::iter::once(ExpertPlace::Local).chain((0..groups).map(ExpertPlace::Group));
            for from in places().map(Some).chain([None]) {
                for to in std::iter::once(ExpertPlace::Local).chain((0..with_new).map(ExpertPlace::Group)) {
                    if self.has_enough(&plans, most) {
                        break;
                    }
                    let moved = self.with_layer_moved(plan, layer, from, to);
                    plans.extend(moved.and_then(|moved| self.with_fitting_sizes(moved)));
                }
            }
        }
        // Plans without remote experts are searched as a strategy of their own.
        plans.retain(|plan| plan.replicas() > 0 && self.remote.allows(self.model, &plan.remote_counts()));
        plans
    }

    /// Returns `plan` with the experts that `layer` has at `from` moved to `to`; all its experts if `from` is `None`.
    ///
    /// Returns `None` if fewer than two experts move.
    fn with_layer_moved(
        &self,
        plan: &Plan,
        layer: usize,
        from: Option<ExpertPlace>,
        to: ExpertPlace,
    ) -> Option<Plan> {
        let all = 0..self.model.layers[layer].experts as u32;
        let experts_at = |place: ExpertPlace| -> Vec<u32> {
            match place {
                ExpertPlace::Local => {
                    let remote = &plan.layers[layer].remote;
                    all.clone().filter(|expert| remote.binary_search(expert).is_err()).collect()
                }
                ExpertPlace::Group(group) => {
                    plan.groups.get(group).map_or_else(Vec::new, |group| group.experts[layer].clone())
                }
            }
        };
        let staying = experts_at(to);
        let moving: Vec<u32> = match from {
            Some(from) if from == to => return None,
            Some(from) => experts_at(from),
            None => all.filter(|expert| staying.binary_search(expert).is_err()).collect(),
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
        if let ExpertPlace::Group(group) = to {
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

    /// Returns a group without experts, with the vCPUs and idle window of the first group of `plan`.
    pub(super) fn new_group(&self, plan: &Plan) -> Group {
        let first = plan.groups.first();
        let least = || self.model.remote_sizings(0.0).next().and_then(|sizing| sizing.stated);
        Group {
            experts: vec![Vec::new(); plan.layers.len()],
            memory_bytes: 0.0,
            vcpus: first.map_or_else(least, |group| group.vcpus),
            replicas: 1,
            idle_seconds: first.and_then(|group| group.idle_seconds),
        }
    }
}

/// Returns `plan` with the experts of the group at `other` in the group at `one`.
fn merge_groups(plan: &Plan, one: usize, other: usize) -> Plan {
    let mut merged = plan.clone();
    let removed = merged.groups.remove(other);
    for (own, more) in merged.groups[one].experts.iter_mut().zip(removed.experts) {
        own.extend(more);
        own.sort_unstable();
    }
    merged
}
