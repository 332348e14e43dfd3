//! A plan whose experts are dealt again by other shares: groups, their sizes and how many experts of each layer they
//! have stay as they are.

use super::Slicing;
use super::cold::rarest;
use super::deal::slices_of;
use remoe_plan::plan::{Group, Plan};

impl Slicing<'_, '_> {
    /// `plan`, which is in groups, with the least used experts of every layer dealt to its groups. Groups that end by
    /// themselves get the rarest experts of all layers. None where no size holds what a group has then.
    pub(crate) fn dealt_again(&self, plan: &Plan) -> Option<Plan> {
        let (asleep, awake): (Vec<usize>, Vec<usize>) =
            (0..plan.groups.len()).partition(|index| self.model.may_sleep(&plan.groups[*index]));
        let mut dealt = plan.clone();
        let layers = plan.layers.len();
        for group in &mut dealt.groups {
            group.experts = vec![Vec::new(); layers];
        }
        let mut is_cold: Vec<Vec<bool>> =
            self.model.layers.iter().map(|layer| vec![false; layer.experts]).collect();
        let size = |index: usize| plan.groups[index].experts.iter().map(Vec::len).sum::<usize>();
        let mut rare = rarest(self.model).into_iter();
        for index in asleep {
            for (layer, expert) in rare.by_ref().take(size(index)) {
                is_cold[layer][expert as usize] = true;
                dealt.groups[index].experts[layer].push(expert);
            }
        }
        let mut bytes: Vec<f64> = vec![0.0; plan.groups.len()];
        for (layer, is_cold) in is_cold.iter().enumerate() {
            let hosts = || awake.iter().filter(|index| !plan.groups[**index].experts[layer].is_empty());
            let count: usize = hosts().map(|index| plan.groups[*index].experts[layer].len()).sum();
            let table = &self.tables[layer];
            let warm = (0..table.order.len()).filter(|at| !is_cold[table.order[*at] as usize]);
            let items: Vec<usize> = warm.take(count).collect();
            let mut bins = slices_of(self.model, table, layer, &items, hosts().count());
            // The bin with the most experts goes to the group with the fewest bytes so far.
            bins.sort_by_key(|bin| std::cmp::Reverse(bin.len()));
            let mut order: Vec<usize> = hosts().copied().collect();
            order.sort_by(|a, b| bytes[*a].total_cmp(&bytes[*b]));
            for (group, bin) in order.into_iter().zip(bins) {
                bytes[group] += bin.len() as f64 * self.model.layers[layer].expert_bytes;
                dealt.groups[group].experts[layer] = bin;
            }
        }
        for (layer, part) in dealt.layers.iter_mut().enumerate() {
            part.remote =
                dealt.groups.iter().flat_map(|group: &Group| &group.experts[layer]).copied().collect();
            part.remote.sort_unstable();
            for group in &mut dealt.groups {
                group.experts[layer].sort_unstable();
            }
        }
        self.sized(dealt)
    }
}
