//! Experts that requests rarely use as groups of their own that end by themselves, while all others stay where they
//! are: with the main function or in groups that are always there.
//!
//! A group costs what it costs a second times the share of the time that it is alive, and that follows from how many
//! requests use any of its experts. So experts go by use per byte, the rarest first: as many of them as requests use
//! with a given chance are cold. Where several groups may be, the rarest of those have one of their own, which sleeps
//! longer.

use super::{Candidate, FeasiblePlan, Slicing};
use remoe_plan::model::Model;
use remoe_plan::plan::{Group, Plan};

/// Chances that a request uses any of the experts that are cold.
const CHANCES: [f64; 8] = [0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95];

/// Plans that are evaluated, at most.
const MOST_PARTED: usize = 20_000;

/// All experts, the rarest first.
struct ByUse {
    /// Layer and expert.
    order: Vec<(usize, u32)>,
    /// The chance that a request uses any of the first experts, by how many.
    used: Vec<f64>,
}

impl ByUse {
    /// With the experts of the layer at `whole` in front of all others, where one is named.
    fn new(model: &Model<'_>, whole: Option<usize>) -> Self {
        let tokens = model.input + model.output;
        let layers = || model.layers.iter().zip(model.shares.iter()).enumerate();
        let mut all: Vec<(f64, usize, u32)> = layers()
            .flat_map(|(layer, (parts, shares))| {
                let per_byte = parts.per_token() / parts.expert_bytes;
                (0..).zip(shares).map(move |(expert, share)| (share * per_byte, layer, expert))
            })
            .collect();
        let behind = |layer: usize| whole.is_some_and(|whole| layer != whole);
        all.sort_by(|a, b| {
            let by_use = a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2)));
            behind(a.1).cmp(&behind(b.1)).then(by_use)
        });
        model.add_work(all.len());
        let (mut of_layers, mut unused) = (vec![0.0_f64; model.layers.len()], 0.0_f64);
        let mut used = vec![0.0];
        for (_, layer, expert) in &all {
            let choices = model.layers[*layer].per_token() * tokens;
            let share = &mut of_layers[*layer];
            unused -= choices * (-share.min(1.0)).ln_1p();
            *share += model.shares[*layer][*expert as usize];
            unused += choices * (-share.min(1.0)).ln_1p();
            // All experts of a layer are used by every request: the logarithm of nothing.
            used.push(if unused.is_finite() { -unused.exp_m1() } else { 1.0 });
        }
        Self { order: all.into_iter().map(|(_, layer, expert)| (layer, expert)).collect(), used }
    }

    /// How many of the first experts are cold, as far as that is worth trying.
    fn cuts(&self, every: bool) -> Vec<usize> {
        if every {
            return (1..=self.order.len()).collect();
        }
        let within = |chance: &f64| self.used.partition_point(|used| used <= chance) - 1;
        let mut cuts: Vec<usize> = CHANCES.iter().map(within).filter(|count| *count > 0).collect();
        cuts.dedup();
        cuts
    }
}

/// All experts by layer, the rarest first by use per byte.
pub(super) fn rarest(model: &Model<'_>) -> Vec<(usize, u32)> {
    ByUse::new(model, None).order
}

impl Slicing<'_, '_> {
    /// The cheapest plan that keeps every limit of those that differ from `base` in that the experts that are used
    /// least are in groups that end after `window` seconds, one group for each step of rarity as long as that is
    /// cheaper. None where none of them is cheaper than `known`.
    pub(crate) fn parted(
        &self,
        candidate: &Candidate,
        base: &Plan,
        known: Option<&FeasiblePlan>,
        window: f64,
    ) -> Option<FeasiblePlan> {
        let mut left = MOST_PARTED;
        let by_use = ByUse::new(self.model, None);
        let mut best = self.parted_by(&by_use, candidate, base, known, window, &mut left);
        // Of few experts a layer may go as a whole, however much it is used: the main function then computes none of
        // it.
        let layers = self.model.layers.len();
        for layer in 0..if self.is_small() && layers > 1 { layers } else { 0 } {
            let by_use = ByUse::new(self.model, Some(layer));
            let known = best.as_ref().or(known);
            best = self.parted_by(&by_use, candidate, base, known, window, &mut left).or(best);
        }
        best
    }

    /// As [`Self::parted`], with the first experts of `by_use`; at most `left` plans are evaluated.
    fn parted_by(
        &self,
        by_use: &ByUse,
        candidate: &Candidate,
        base: &Plan,
        known: Option<&FeasiblePlan>,
        window: f64,
        left: &mut usize,
    ) -> Option<FeasiblePlan> {
        let cuts = by_use.cuts(self.is_small());
        let mut best: Option<FeasiblePlan> = None;
        let mut tried: Vec<Vec<usize>> = cuts.iter().map(|cut| vec![*cut]).collect();
        if self.is_exhaustive(base) {
            // Of few experts two groups may pay where neither of them does alone.
            let pairs = cuts.iter().flat_map(|one| cuts.iter().map(move |other| vec![*one, *other]));
            tried.extend(pairs.filter(|pair| pair[0] < pair[1]));
        }
        loop {
            let mut next = None;
            for bounds in tried {
                if self.model.ends() {
                    return best;
                }
                for plan in self.with_cold(base, by_use, &bounds, window) {
                    if *left == 0 {
                        return best;
                    }
                    *left -= 1;
                    if let Some(found) = self.judged(candidate, plan, best.as_ref().or(known)) {
                        (best, next) = (Some(found), Some(bounds.clone()));
                    }
                }
            }
            let Some(bounds) = next else { return best };
            let further = cuts.iter().filter(|cut| !bounds.contains(cut));
            tried = further
                .map(|cut| {
                    let mut with: Vec<usize> = bounds.iter().chain([cut]).copied().collect();
                    with.sort_unstable();
                    with
                })
                .collect();
        }
    }

    /// Reports if all pairs of groups and all their sizes are tried: few experts, all of which stay with the main
    /// function otherwise.
    fn is_exhaustive(&self, base: &Plan) -> bool {
        self.is_small() && base.groups.is_empty()
    }

    /// `base` with the first experts of `by_use` in groups that end by themselves, cut at `bounds`, in every way of
    /// sizing them that is worth trying; none where there are more groups than there may be.
    fn with_cold(&self, base: &Plan, by_use: &ByUse, bounds: &[usize], window: f64) -> Vec<Plan> {
        let mut plan = base.clone();
        let all = &by_use.order[..bounds.last().copied().unwrap_or(0)];
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
            cold.extend(self.cold_groups(&by_use.order[from..*bound], window));
            from = *bound;
        }
        let most = self.model.problem.limits.max_groups.unwrap_or(0) as usize;
        while plan.groups.len() > 1 && plan.groups.len() + cold.len() > most {
            self.merge(&mut plan.groups);
        }
        if plan.groups.len() + cold.len() > most {
            return Vec::new();
        }
        // Cold groups are as small as they may be, or as quick as others are. Where memory brings vCPUs, all others
        // stay as they are, or are as small as they may be too.
        let least = self.model.remote_sizings(0.0).next().map(|sizing| (sizing.bytes, sizing.stated));
        let like = base.groups.first().map(|group| (group.memory_bytes, group.vcpus));
        let mut sizes: Vec<(f64, Option<f64>)> = least.into_iter().chain(like).collect();
        sizes.dedup();
        let mut plans = Vec::new();
        for (memory_bytes, vcpus) in sizes {
            let cold = cold.iter().map(|group| Group { memory_bytes, vcpus, ..group.clone() });
            let mut large = plan.clone();
            large.groups.extend(cold);
            if self.is_exhaustive(base) && plans.is_empty() {
                plans.extend(self.every_size(&large));
            }
            if large.main_vcpus.is_none() {
                let mut small = large.clone();
                small.main_bytes = 0.0;
                small.groups[..plan.groups.len()].iter_mut().for_each(|group| group.memory_bytes = 0.0);
                plans.extend(self.sized(small));
            }
            plans.extend(self.sized(large));
        }
        plans
    }

    /// `experts` in as few groups as functions can be large; the rarest ones together.
    fn cold_groups(&self, experts: &[(usize, u32)], window: f64) -> Vec<Group> {
        let model = self.model;
        let most = model.remote_sizes.last().copied().unwrap_or(0.0);
        let bytes: f64 = experts.iter().map(|(layer, _)| model.layers[*layer].expert_bytes).sum();
        let room = most - model.problem.function_bytes;
        let parts = if room > 0.0 { (bytes / room).ceil().max(1.0) as usize } else { 1 };
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

    /// Puts the two groups with the fewest bytes together.
    fn merge(&self, groups: &mut Vec<Group>) {
        let bytes = |group: &Group| self.model.weight_bytes(&group.experts);
        groups.sort_by(|a, b| bytes(b).total_cmp(&bytes(a)));
        let (Some(least), Some(into)) = (groups.pop(), groups.last_mut()) else { return };
        for (experts, own) in least.experts.into_iter().zip(&mut into.experts) {
            own.extend(experts);
            own.sort_unstable();
        }
    }
}
