//! Search for cold groups: groups of rarely used experts that scale to zero after an idle window.
//!
//! A group costs its rate times the share of the time in which it is alive. That share depends on how many requests use
//! any of its experts. So experts are ordered by use per byte, and the first of them are cold: as many as requests use
//! with a given probability. If several groups are allowed, the rarest experts get their own, which sleeps longer.

use super::{Candidate, CandidatePlan, GroupSearch};
use remoe_plan::model::Model;
use remoe_plan::plan::{Group, Plan};

/// Probabilities that a request uses any of the cold experts, which are tried.
const USE_PROBABILITIES: [f64; 8] = [0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95];

/// Maximum number of evaluated plans.
const MAX_EVALUATED: usize = 20_000;

/// All experts by use per byte, the rarest first.
struct UseOrder {
    /// Layer and id of each expert.
    order: Vec<(usize, u32)>,
    /// `[count]`: probability that a request uses any of the first `count` experts.
    used: Vec<f64>,
}

impl UseOrder {
    /// Orders all experts by use. The experts of `first_layer`, if any, come before all others.
    fn new(model: &Model<'_>, first_layer: Option<usize>) -> Self {
        let tokens = model.input + model.output;
        let layers = || model.layers.iter().zip(model.shares.iter()).enumerate();
        let mut all: Vec<(f64, usize, u32)> = layers()
            .flat_map(|(layer, (parts, shares))| {
                let per_byte = parts.per_token() / parts.expert_bytes;
                (0..).zip(shares).map(move |(expert, share)| (share * per_byte, layer, expert))
            })
            .collect();
        let is_later = |layer: usize| first_layer.is_some_and(|first| layer != first);
        all.sort_by(|a, b| {
            let by_use = a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2)));
            is_later(a.1).cmp(&is_later(b.1)).then(by_use)
        });
        model.add_work(all.len());
        // A request uses none of a layer's experts with total share s with probability (1 - s)^choices.
        let (mut layer_shares, mut log_unused) = (vec![0.0_f64; model.layers.len()], 0.0_f64);
        let mut used = vec![0.0];
        for (_, layer, expert) in &all {
            let choices = model.layers[*layer].per_token() * tokens;
            let share = &mut layer_shares[*layer];
            log_unused -= choices * (-share.min(1.0)).ln_1p();
            *share += model.shares[*layer][*expert as usize];
            log_unused += choices * (-share.min(1.0)).ln_1p();
            // Every request uses some expert of a whole layer: the logarithm of 0 is not finite.
            used.push(if log_unused.is_finite() { -log_unused.exp_m1() } else { 1.0 });
        }
        Self { order: all.into_iter().map(|(_, layer, expert)| (layer, expert)).collect(), used }
    }

    /// Returns the numbers of cold experts that are tried; all numbers if `every`.
    fn prefix_lengths(&self, every: bool) -> Vec<usize> {
        if every {
            return (1..=self.order.len()).collect();
        }
        let within = |chance: &f64| self.used.partition_point(|used| used <= chance) - 1;
        let mut lengths: Vec<usize> =
            USE_PROBABILITIES.iter().map(within).filter(|count| *count > 0).collect();
        lengths.dedup();
        lengths
    }
}

/// Returns layer and id of all experts, the rarest first by use per byte.
pub(super) fn rarest(model: &Model<'_>) -> Vec<(usize, u32)> {
    UseOrder::new(model, None).order
}

impl GroupSearch<'_, '_> {
    /// Searches the cheapest feasible plan in which the rarest experts of `base` are in groups with an idle window.
    ///
    /// `window`: idle window in seconds. Adds groups of rarer experts as long as that is cheaper. Returns `None` if no plan
    /// beats `known`.
    pub(crate) fn with_best_cold_groups(
        &self,
        candidate: &Candidate,
        base: &Plan,
        known: Option<&CandidatePlan>,
        window: f64,
    ) -> Option<CandidatePlan> {
        let mut left = MAX_EVALUATED;
        let order = UseOrder::new(self.model, None);
        let mut best = self.with_best_cold_prefix(&order, candidate, base, known, window, &mut left);
        // With few experts whole layers are tried as well, however often they are used.
        let layers = self.model.layers.len();
        for layer in 0..if self.is_small() && layers > 1 { layers } else { 0 } {
            let order = UseOrder::new(self.model, Some(layer));
            let known = best.as_ref().or(known);
            best = self.with_best_cold_prefix(&order, candidate, base, known, window, &mut left).or(best);
        }
        best
    }

    /// Searches as [`Self::with_best_cold_groups`] among the first experts of `order`, with up to `left` evaluations.
    fn with_best_cold_prefix(
        &self,
        order: &UseOrder,
        candidate: &Candidate,
        base: &Plan,
        known: Option<&CandidatePlan>,
        window: f64,
        left: &mut usize,
    ) -> Option<CandidatePlan> {
        let lengths = order.prefix_lengths(self.is_small());
        let mut best: Option<CandidatePlan> = None;
        let mut tried: Vec<Vec<usize>> = lengths.iter().map(|layout| vec![*layout]).collect();
        if self.is_exhaustive(base) {
            // Two groups may save cost even if neither of them does alone.
            let pairs = lengths.iter().flat_map(|one| lengths.iter().map(move |other| vec![*one, *other]));
            tried.extend(pairs.filter(|pair| pair[0] < pair[1]));
        }
        loop {
            let mut next = None;
            for bounds in tried {
                if self.model.ends() {
                    return best;
                }
                for plan in self.cold_group_plans(base, order, &bounds, window) {
                    if *left == 0 {
                        return best;
                    }
                    *left -= 1;
                    if let Some(found) = self.evaluate_if_better(candidate, plan, best.as_ref().or(known)) {
                        (best, next) = (Some(found), Some(bounds.clone()));
                    }
                }
            }
            let Some(bounds) = next else { return best };
            let further = lengths.iter().filter(|layout| !bounds.contains(layout));
            tried = further
                .map(|layout| {
                    let mut with: Vec<usize> = bounds.iter().chain([layout]).copied().collect();
                    with.sort_unstable();
                    with
                })
                .collect();
        }
    }

    /// Reports if all pairs of groups and all their sizes are tried: if experts are few and all local in `base`.
    fn is_exhaustive(&self, base: &Plan) -> bool {
        self.is_small() && base.groups.is_empty()
    }

    /// Returns plans with the first experts of `order` in cold groups, with the sizes that are tried.
    ///
    /// `bounds`: positions in `order` at which a group ends, ascending. Returns no plans if there are too many groups.
    fn cold_group_plans(&self, base: &Plan, order: &UseOrder, bounds: &[usize], window: f64) -> Vec<Plan> {
        let mut plan = base.clone();
        let all = &order.order[..bounds.last().copied().unwrap_or(0)];
        let mut is_cold: Vec<Vec<bool>> =
            self.model.layers.iter().map(|layer| vec![false; layer.experts]).collect();
        for (layer, expert) in all {
            is_cold[*layer][*expert as usize] = true;
        }
        for (layer, is_cold) in is_cold.iter().enumerate() {
            for group in &mut plan.groups {
                group.experts[layer].retain(|expert| !is_cold[*expert as usize]);
            }
            let remote = &mut plan.layers[layer].remote;
            remote.retain(|expert| !is_cold[*expert as usize]);
            remote.extend((0..).zip(is_cold).filter(|(_, is_cold)| **is_cold).map(|(expert, _)| expert));
            remote.sort_unstable();
        }
        if !self.remote.allows(self.model, &plan.remote_counts()) {
            return Vec::new();
        }
        plan.groups.retain(|group| group.experts.iter().any(|experts| !experts.is_empty()));
        let mut cold = Vec::new();
        let mut from = 0;
        for bound in bounds {
            cold.extend(self.cold_groups(&order.order[from..*bound], window));
            from = *bound;
        }
        let most = self.model.problem.limits.max_groups.unwrap_or(0) as usize;
        while plan.groups.len() > 1 && plan.groups.len() + cold.len() > most {
            self.merge_smallest(&mut plan.groups);
        }
        if plan.groups.len() + cold.len() > most {
            return Vec::new();
        }
        // Cold groups get the least size, or the size of other groups. If vCPUs come with memory, all other functions
        // keep their sizes, or get the least size as well.
        let least = self.model.remote_sizings(0.0).next().map(|sizing| (sizing.bytes, sizing.stated));
        let first = base.groups.first().map(|group| (group.memory_bytes, group.vcpus));
        let mut sizes: Vec<(f64, Option<f64>)> = least.into_iter().chain(first).collect();
        sizes.dedup();
        let mut plans = Vec::new();
        for (memory_bytes, vcpus) in sizes {
            let cold = cold.iter().map(|group| Group { memory_bytes, vcpus, ..group.clone() });
            let mut large = plan.clone();
            large.groups.extend(cold);
            if self.is_exhaustive(base) && plans.is_empty() {
                plans.extend(self.all_sizings(&large));
            }
            if large.main_vcpus.is_none() {
                let mut small = large.clone();
                small.main_bytes = 0.0;
                small.groups[..plan.groups.len()].iter_mut().for_each(|group| group.memory_bytes = 0.0);
                plans.extend(self.with_fitting_sizes(small));
            }
            plans.extend(self.with_fitting_sizes(large));
        }
        plans
    }

    /// Divides `experts` among as few groups as the largest function size allows, the rarest together.
    fn cold_groups(&self, experts: &[(usize, u32)], window: f64) -> Vec<Group> {
        let model = self.model;
        let largest = model.remote_sizes.last().copied().unwrap_or(0.0);
        let bytes: f64 = experts.iter().map(|(layer, _)| model.layers[*layer].expert_bytes).sum();
        let capacity = largest - model.problem.function_bytes;
        let parts = if capacity > 0.0 { (bytes / capacity).ceil().max(1.0) as usize } else { 1 };
        let chunks = experts.chunks(experts.len().div_ceil(parts).max(1));
        let group = |chunk: &[(usize, u32)]| {
            let mut experts = vec![Vec::new(); model.layers.len()];
            for (layer, expert) in chunk {
                experts[*layer].push(*expert);
            }
            experts.iter_mut().for_each(|experts| experts.sort_unstable());
            Group { experts, memory_bytes: 0.0, vcpus: None, replicas: 1, idle_seconds: Some(window) }
        };
        chunks.map(group).collect()
    }

    /// Merges the two groups with the fewest bytes.
    fn merge_smallest(&self, groups: &mut Vec<Group>) {
        let bytes = |group: &Group| self.model.weight_bytes(&group.experts);
        groups.sort_by(|a, b| bytes(b).total_cmp(&bytes(a)));
        let (Some(least), Some(into)) = (groups.pop(), groups.last_mut()) else { return };
        for (experts, own) in least.experts.into_iter().zip(&mut into.experts) {
            own.extend(experts);
            own.sort_unstable();
        }
    }
}
