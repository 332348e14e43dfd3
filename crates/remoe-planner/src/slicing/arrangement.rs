//! Arrangements of remote experts in groups, and a lower bound of the cost of each.

use super::assignment::GroupLayout;
use super::{ArrangementFamily, GroupSearch};
use crate::search::selection::Candidate;
use remoe_plan::cost::running::{PhaseTimes, ServingFunctions};

/// One arrangement: remote counts, layout of groups and replicas of each group.
pub(super) struct GroupArrangement<'c> {
    pub(super) candidate: &'c Candidate,
    pub(super) layout: GroupLayout,
    pub(super) replicas: u32,
    /// Lower bound of its cost in dollars; infinite if it breaks a latency limit.
    pub(super) bound: f64,
}

/// Lower bounds of a candidate's times and rates that hold for every arrangement.
pub(super) struct LowerBounds {
    /// Dollars per second of the smallest main function.
    main_rate: f64,
    /// Times of the non-expert part.
    nonexpert: PhaseTimes,
    layers: Vec<LayerBounds>,
    /// Set if no expert is remote.
    is_local: bool,
}

struct LayerBounds {
    /// Prefill seconds of the local experts.
    local_prefill: f64,
    /// Prefill seconds of the remote experts on one function.
    remote_prefill: f64,
    /// Expected seconds of a token's local experts in a decode step.
    local_step: f64,
    /// Expected number of a token's remote experts.
    remote_experts: f64,
    /// Seconds of one remote expert with one token.
    remote_expert_step: f64,
}

impl GroupSearch<'_, '_> {
    /// Returns the layouts of `family` that are tried.
    pub(super) fn layouts(&self, family: ArrangementFamily) -> Vec<GroupLayout> {
        let layers = self.model.layers.len();
        let max_groups = self.model.problem.limits.max_groups.unwrap_or(1) as usize;
        let single = GroupLayout { blocks: layers, slices: 1 };
        if family == ArrangementFamily::PerLayer {
            return vec![single];
        }
        let powers = std::iter::successors(Some(1), |blocks| Some(blocks * 2));
        // Under invocation billing functions that host fewer layers are cheaper: also one block for each layer.
        let blocks =
            powers.take_while(|blocks| *blocks < layers.max(2)).chain((layers > 1).then_some(layers));
        let with_slices = |blocks: usize| {
            slice_counts(max_groups / blocks).map(move |slices| GroupLayout { blocks, slices })
        };
        blocks.flat_map(with_slices).collect()
    }

    /// Returns the lower bounds of every layer of `candidate`, at the largest sizes.
    pub(super) fn lower_bounds(&self, candidate: &Candidate) -> Option<LowerBounds> {
        let model = self.model;
        let mains = model.main_options(model.main_needed(&candidate.counts));
        let (smallest, largest) = (mains.first()?, mains.last()?);
        let most_vcpus = model.cpu_speed(largest.vcpus).vcpus;
        let remote_vcpus =
            model.cpu_speed(model.remote_sizings(0.0).last().map_or(1.0, |sizing| sizing.vcpus)).vcpus;
        let layers = model.layers.iter().zip(self.tables).zip(&candidate.counts);
        let layers = layers.map(|((layer, table), count)| {
            let (curve, remote_curve) = (&layer.curve, layer.remote_curve());
            let (main_column, remote_column) = (curve.column(most_vcpus), remote_curve.column(remote_vcpus));
            let share = table.share[*count].min(1.0);
            let remote_cpu = remote_column.least_of(table.remote_prefill_columns(*count));
            LayerBounds {
                local_prefill: main_column.least_of(table.local_prefill_columns(*count)),
                remote_prefill: remote_cpu + table.token_sum[*count] * model.down,
                local_step: layer.per_token() * (1.0 - share) * curve.seconds(1.0, main_column),
                remote_experts: layer.per_token() * share,
                remote_expert_step: remote_curve.seconds(1.0, remote_column) + model.down,
            }
        });
        model.add_work(model.layers.len());
        Some(LowerBounds {
            main_rate: model.gpu_rate + smallest.rate,
            nonexpert: self.nonexpert.times(most_vcpus, true),
            layers: layers.collect(),
            is_local: candidate.counts.iter().all(|count| *count == 0),
        })
    }

    /// Returns a lower bound of the cost of every plan of an arrangement: infinite if it must break a latency limit.
    ///
    /// Times are those of the largest sizes with evenly spread work, rates are those of the smallest sizes.
    pub(super) fn bound(
        &self,
        candidate: &Candidate,
        bounds: &LowerBounds,
        layout: GroupLayout,
        replicas: u32,
    ) -> f64 {
        let model = self.model;
        let mut remote_rate = 0.0;
        if !bounds.is_local {
            let Some(groups) = self.group_count(candidate, layout) else { return f64::INFINITY };
            let Some(rate) = self.least_remote_rate(candidate, groups as f64) else { return f64::INFINITY };
            if model.is_reserved() {
                remote_rate = rate * f64::from(replicas);
            }
        }
        let parallel_functions = (layout.slices * replicas as usize) as f64;
        let mut times = bounds.nonexpert.clone();
        let (mut prefill, mut step) = (0.0, 0.0);
        for layer in &bounds.layers {
            prefill += layer.local_prefill.max(layer.remote_prefill / parallel_functions);
            let remote_step = layer.remote_experts / layout.slices as f64 * layer.remote_expert_step;
            step += layer.local_step.max(remote_step);
        }
        let batches = times.steps.len();
        times.add(prefill, std::iter::repeat(step));
        // Four of these terms take as long as one term of an evaluation.
        model.add_work((bounds.layers.len() + batches) / 4 + 1);
        let running = ServingFunctions { remote_rate, ..ServingFunctions::of_main(times, bounds.main_rate) };
        let bill = model.quick_bill(&running);
        if self.breaks_latency_limit(&bill) { f64::INFINITY } else { bill.total() }
    }

    /// Counts the groups that host experts. Returns `None` if a layout with fewer slices gives the same groups.
    ///
    /// Experts of a layer go to the groups with the fewest bytes, so that there may be more groups than any layer has
    /// remote experts.
    fn group_count(&self, candidate: &Candidate, layout: GroupLayout) -> Option<usize> {
        let layers = candidate.counts.len();
        let mut block_experts = vec![0; layout.blocks];
        for (layer, count) in candidate.counts.iter().enumerate() {
            block_experts[layout.block(layer, layers)] += count;
        }
        block_experts.iter_mut().for_each(|experts: &mut usize| *experts = (*experts).min(layout.slices));
        block_experts.contains(&layout.slices).then(|| block_experts.iter().sum())
    }

    /// Returns a lower bound of the dollars per second of `groups` functions that host all remote experts.
    fn least_remote_rate(&self, candidate: &Candidate, groups: f64) -> Option<f64> {
        let model = self.model;
        let bytes = candidate
            .counts
            .iter()
            .zip(&model.layers)
            .map(|(count, layer)| *count as f64 * layer.expert_bytes);
        let bytes = bytes.sum::<f64>() + groups * model.problem.function_bytes;
        let least = model.remote_sizings(bytes / groups * (1.0 - 1e-12)).next()?;
        let smallest = model.remote_sizings(0.0).next().map_or(0.0, |sizing| sizing.rate);
        // Sizes cost in proportion to their bytes, beside the vCPUs.
        let per_byte = (model.remote_rate(2e9, least.stated) - model.remote_rate(1e9, least.stated)) / 1e9;
        let vcpus = model.remote_rate(0.0, least.stated);
        Some((groups * smallest).max(bytes * per_byte + groups * vcpus))
    }
}

/// Returns the numbers of slices that are tried: all up to 16, then steps of a quarter, up to `most`.
fn slice_counts(most: usize) -> impl Iterator<Item = usize> {
    let next = |number: &usize| Some(number + if *number < 16 { 1 } else { number / 4 });
    std::iter::successors(Some(1), next).take_while(move |number| *number <= most)
}
