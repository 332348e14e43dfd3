//! Reassignment of a plan's experts for changed shares: groups, their sizes and their numbers of experts stay.

use super::GroupSearch;
use super::assignment::assign_to_slices;
use super::cold_groups::rarest;
use remoe_plan::plan::{Group, Plan};

impl GroupSearch<'_, '_> {
    /// Returns `plan`, which must have groups, with the least used experts of every layer assigned to its groups.
    ///
    /// Groups with an idle window get the rarest experts of all layers. Returns `None` if no size holds the new experts
    /// of a group.
    pub(crate) fn reassigned(&self, plan: &Plan) -> Option<Plan> {
        let (idle_groups, reserved_groups): (Vec<usize>, Vec<usize>) =
            (0..plan.groups.len()).partition(|index| self.model.may_sleep(&plan.groups[*index]));
        let mut reassigned = plan.clone();
        let layers = plan.layers.len();
        for group in &mut reassigned.groups {
            group.experts = vec![Vec::new(); layers];
        }
        let mut is_cold: Vec<Vec<bool>> =
            self.model.layers.iter().map(|layer| vec![false; layer.experts]).collect();
        let size = |index: usize| plan.groups[index].experts.iter().map(Vec::len).sum::<usize>();
        let mut rare = rarest(self.model).into_iter();
        for index in idle_groups {
            for (layer, expert) in rare.by_ref().take(size(index)) {
                is_cold[layer][expert as usize] = true;
                reassigned.groups[index].experts[layer].push(expert);
            }
        }
        let mut bytes: Vec<f64> = vec![0.0; plan.groups.len()];
        for (layer, is_cold) in is_cold.iter().enumerate() {
            let hosts =
                || reserved_groups.iter().filter(|index| !plan.groups[**index].experts[layer].is_empty());
            let count: usize = hosts().map(|index| plan.groups[*index].experts[layer].len()).sum();
            let table = &self.tables[layer];
            let warm = (0..table.order.len()).filter(|at| !is_cold[table.order[*at] as usize]);
            let items: Vec<usize> = warm.take(count).collect();
            let mut bins = assign_to_slices(self.model, table, layer, &items, hosts().count());
            // The bin with the most experts goes to the group with the fewest bytes so far.
            bins.sort_by_key(|bin| std::cmp::Reverse(bin.len()));
            let mut order: Vec<usize> = hosts().copied().collect();
            order.sort_by(|a, b| bytes[*a].total_cmp(&bytes[*b]));
            for (group, bin) in order.into_iter().zip(bins) {
                bytes[group] += bin.len() as f64 * self.model.layers[layer].expert_bytes;
                reassigned.groups[group].experts[layer] = bin;
            }
        }
        for (layer, part) in reassigned.layers.iter_mut().enumerate() {
            part.remote =
                reassigned.groups.iter().flat_map(|group: &Group| &group.experts[layer]).copied().collect();
            part.remote.sort_unstable();
            for group in &mut reassigned.groups {
                group.experts[layer].sort_unstable();
            }
        }
        self.with_fitting_sizes(reassigned)
    }
}
