//! Local search over arrangements near that of a plan: over numbers of remote experts, of groups and of replicas.
//!
//! It begins with a coarse grid, then takes steps from the best arrangement. Arrangements with the lowest bounds are
//! explored first, so that most are never explored.

use super::arrangement::GroupArrangement;
use super::assignment::GroupLayout;
use super::{ArrangementFamily, CandidatePlan, GroupSearch};
use crate::search::selection::{Candidate, Selection, ratio_candidate, whole_layers};
use remoe_plan::plan::Plan;
use std::collections::BTreeSet;

/// Maximum number of arrangements of the grid that are explored.
const MAX_GRID_EXPLORED: usize = 8;
/// Number of remote ratios in the grid.
const GRID_RATIOS: usize = 8;
/// Number of grid points at which each layer is wholly remote or wholly local.
const GRID_WHOLE_LAYERS: usize = 6;
/// Assumed work so far: only savings of a ten-thousandth count; see [`super::REQUIRED_SAVING`].
const ASSUMED_WORK: usize = 5_000;
/// Steps of the remote count of every layer, as divisors of the most experts of a layer. The last step is one expert.
const LAYER_STEP_DIVISORS: [usize; 5] = [4, 10, 25, 64, usize::MAX];
/// Steps of the remote count over all layers, as divisors of the number of experts.
const TOTAL_STEP_DIVISORS: [usize; 4] = [6, 16, 50, 200];
/// Steps of the number of groups.
const GROUP_STEPS: [usize; 3] = [1, 2, 4];

/// Parameters of an arrangement.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct ArrangementShape {
    /// Remote experts of each layer.
    counts: Vec<usize>,
    blocks: usize,
    slices: usize,
    replicas: u32,
}

impl ArrangementShape {
    /// Returns the arrangement that is closest to `plan`, which must have groups.
    fn nearest_to(plan: &Plan) -> Self {
        let hosts = |layer: usize| plan.groups.iter().filter(move |group| !group.experts[layer].is_empty());
        let slices = (0..plan.layers.len()).map(|layer| hosts(layer).count()).max().unwrap_or(0).max(1);
        Self {
            counts: plan.remote_counts(),
            blocks: (plan.groups.len() / slices).clamp(1, plan.layers.len().max(1)),
            slices,
            replicas: plan.groups.iter().map(|group| group.replicas).max().unwrap_or(1).max(1),
        }
    }

    fn candidate(&self) -> Candidate {
        let i = self.counts.iter().copied().max().unwrap_or(0);
        Candidate { selection: Selection::Mixed, i, counts: self.counts.clone() }
    }

    fn with_counts(&self, counts: Vec<usize>) -> Self {
        Self { counts, ..self.clone() }
    }

    fn layout(&self) -> GroupLayout {
        GroupLayout { blocks: self.blocks, slices: self.slices }
    }
}

/// Result of a local search.
pub(crate) struct LocalSearchResult {
    pub(crate) best: Option<CandidatePlan>,
    /// Lower bound in dollars of the cost of every plan of the considered arrangements.
    pub(crate) bound: f64,
}

/// State of a local search.
struct LocalSearch<'c, 's, 'm> {
    group_search: &'c mut GroupSearch<'s, 'm>,
    family: ArrangementFamily,
    seen: BTreeSet<ArrangementShape>,
    bound: f64,
}

impl GroupSearch<'_, '_> {
    /// Searches the cheapest feasible plan of the arrangements near that of `plan`, which must have groups.
    pub(crate) fn search_near(&mut self, plan: &Plan, family: ArrangementFamily) -> LocalSearchResult {
        let start = ArrangementShape::nearest_to(plan);
        let mut search =
            LocalSearch { group_search: self, family, seen: BTreeSet::new(), bound: f64::INFINITY };
        let grid = search.grid(&start);
        let best_of_grid = search.explore_best(grid, MAX_GRID_EXPLORED);
        // The best arrangement of the grid is not always the best start.
        for mut current in best_of_grid.into_iter().chain([start]) {
            while !search.group_search.model.ends() {
                let neighbours = search.neighbours(&current);
                match search.explore_best(neighbours, usize::MAX) {
                    Some(better) => current = better,
                    None => break,
                }
            }
        }
        let bound = search.bound;
        LocalSearchResult { best: self.best.clone(), bound }
    }
}

impl LocalSearch<'_, '_, '_> {
    /// Explores up to `most` of `shapes` in the order of their bounds. Returns the best one that improves the best plan.
    ///
    /// If `most` is `usize::MAX`, it stops at the first improvement.
    fn explore_best(&mut self, shapes: Vec<ArrangementShape>, most: usize) -> Option<ArrangementShape> {
        let mut promising: Vec<(f64, ArrangementShape)> = Vec::new();
        for shape in shapes {
            let allowed = self.group_search.remote.allows(self.group_search.model, &shape.counts);
            if !allowed || !self.seen.insert(shape.clone()) {
                continue;
            }
            // The terms of a bound and of a bill.
            self.group_search.model.meter.count(2 * shape.counts.len() + 20);
            let candidate = shape.candidate();
            let Some(bounds) = self.group_search.lower_bounds(&candidate) else { continue };
            let bound = self.group_search.bound(&candidate, &bounds, shape.layout(), shape.replicas);
            self.bound = self.bound.min(bound);
            if bound < f64::INFINITY {
                promising.push((bound, shape));
            }
        }
        promising.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut better = None;
        for (bound, shape) in promising.into_iter().take(most) {
            if bound > self.group_search.cost_limit(ASSUMED_WORK) || (better.is_some() && most == usize::MAX)
            {
                break;
            }
            let candidate = shape.candidate();
            let (layout, replicas) = (shape.layout(), shape.replicas);
            let arrangement = GroupArrangement { candidate: &candidate, layout, replicas, bound };
            let found = self.group_search.explore(&arrangement, ASSUMED_WORK);
            let best = self.group_search.best.as_ref();
            if let Some(found) = found.filter(|found| best.is_none_or(|best| found.beats(best))) {
                self.group_search.best = Some(found);
                better = Some(shape);
            }
        }
        better
    }

    fn max_groups(&self) -> usize {
        self.group_search.model.problem.limits.max_groups.unwrap_or(1) as usize
    }

    /// Returns a coarse grid over remote counts and numbers of groups, and `start`.
    fn grid(&self, start: &ArrangementShape) -> Vec<ArrangementShape> {
        let model = self.group_search.model;
        let most = model.most_experts();
        let mut counts: Vec<Vec<usize>> = vec![start.counts.clone()];
        for part in 1..=GRID_RATIOS {
            let ratio = ratio_candidate(model, part * most / GRID_RATIOS);
            counts.push(
                self.across_layers(&vec![0; ratio.counts.len()], ratio.counts.iter().sum::<usize>() as isize),
            );
            counts.push(ratio.counts);
        }
        let whole_layers = whole_layers(model);
        let step = whole_layers.len().div_ceil(GRID_WHOLE_LAYERS).max(1);
        counts.extend(whole_layers.into_iter().step_by(step).map(|candidate| candidate.counts));
        counts.retain(|counts| counts.iter().any(|count| *count > 0));
        let mut shapes = vec![start.clone()];
        for counts in counts {
            for (blocks, slices) in self.grid_layouts(start) {
                let replicas = [1, start.replicas];
                shapes.extend(replicas.map(|replicas| ArrangementShape {
                    counts: counts.clone(),
                    blocks,
                    slices,
                    replicas,
                }));
            }
        }
        shapes
    }

    fn grid_layouts(&self, start: &ArrangementShape) -> Vec<(usize, usize)> {
        let layers = self.group_search.model.layers.len();
        if self.family == ArrangementFamily::PerLayer {
            return vec![(layers, 1)];
        }
        let most = self.max_groups();
        let powers = (0..usize::BITS).map(|power| 1_usize << power).take_while(|slices| *slices < most);
        let mut layouts: Vec<(usize, usize)> = powers.chain([most]).map(|slices| (1, slices)).collect();
        layouts.push((start.blocks, start.slices));
        if layers <= most {
            layouts.push((layers, 1));
        }
        layouts.retain(|(blocks, slices)| blocks * slices <= most.max(start.blocks * start.slices));
        layouts
    }

    /// Returns the arrangements that are one step away from `from`.
    fn neighbours(&self, from: &ArrangementShape) -> Vec<ArrangementShape> {
        let model = self.group_search.model;
        let mut shapes = Vec::new();
        let all = model.experts();
        for parts in LAYER_STEP_DIVISORS {
            let step = (model.most_experts() / parts).max(1);
            let more = |count: usize, experts: usize| (count + step).min(experts);
            let fewer = |count: usize, _: usize| count.saturating_sub(step);
            shapes.push(from.with_counts(self.each_count(&from.counts, more)));
            shapes.push(from.with_counts(self.each_count(&from.counts, fewer)));
        }
        for parts in TOTAL_STEP_DIVISORS {
            let step = (all / parts).max(1) as isize;
            shapes.extend([step, -step].map(|step| from.with_counts(self.across_layers(&from.counts, step))));
        }
        let remote: usize = from.counts.iter().sum();
        shapes.push(from.with_counts(self.across_layers(&vec![0; from.counts.len()], remote as isize)));
        shapes.extend(self.with_whole_layers(from));
        if self.family == ArrangementFamily::Sliced {
            let most = self.max_groups();
            for step in GROUP_STEPS {
                let fewer = from.slices.saturating_sub(step);
                for slices in [from.slices + step, fewer] {
                    shapes.push(ArrangementShape { slices, ..from.clone() });
                }
            }
            // Other numbers of groups may need other remote counts: both change at once.
            let fine = LAYER_STEP_DIVISORS[1..].iter().map(|parts| (model.most_experts() / parts).max(1));
            for step in fine.collect::<BTreeSet<usize>>() {
                let more = self.each_count(&from.counts, |count, experts| (count + step).min(experts));
                let fewer = self.each_count(&from.counts, |count, _| count.saturating_sub(step));
                for slices in [from.slices + 1, from.slices.saturating_sub(1)] {
                    let with =
                        |counts: &Vec<usize>| ArrangementShape { slices, ..from.with_counts(counts.clone()) };
                    shapes.extend([with(&more), with(&fewer)]);
                }
            }
            for blocks in [from.blocks * 2, from.blocks / 2] {
                let slices = (from.blocks * from.slices).checked_div(blocks).unwrap_or(0);
                shapes.push(ArrangementShape { blocks, slices, ..from.clone() });
            }
            let layers = model.layers.len();
            shapes.retain(|shape| {
                let groups = shape.blocks * shape.slices;
                shape.blocks <= layers && (1..=most).contains(&groups)
            });
        }
        let most_replicas = model.problem.limits.max_replicas;
        for replicas in [from.replicas + 1, from.replicas - 1] {
            if (1..=most_replicas).contains(&replicas) {
                shapes.push(ArrangementShape { replicas, ..from.clone() });
            }
        }
        shapes.retain(|shape| shape.counts.iter().any(|count| *count > 0));
        shapes
    }

    /// Applies `change` to the count and the number of experts of every layer.
    fn each_count(&self, counts: &[usize], change: impl Fn(usize, usize) -> usize) -> Vec<usize> {
        let layers = counts.iter().zip(&self.group_search.model.layers);
        layers.map(|(count, layer)| change(*count, layer.experts)).collect()
    }

    /// Returns `counts` with `change` more remote experts in all, those with the least use per byte.
    ///
    /// If `change` is negative, the remote experts with the greatest use per byte become local.
    fn across_layers(&self, counts: &[usize], change: isize) -> Vec<usize> {
        let model = self.group_search.model;
        let mut counts = counts.to_vec();
        let use_of = |layer: usize, at: usize| {
            let table = &self.group_search.tables[layer];
            table.tokens[at] / model.layers[layer].expert_bytes
        };
        let grows = change > 0;
        let key = |layer: usize, count: usize| {
            let table = &self.group_search.tables[layer];
            match grows {
                true => (count < table.order.len()).then(|| use_of(layer, count)),
                false => count.checked_sub(1).map(|at| -use_of(layer, at)),
            }
        };
        let mut next_experts: BTreeSet<(u64, usize)> = BTreeSet::new();
        let entry = |layer: usize, count: usize| key(layer, count).map(|value| (order_bits(value), layer));
        next_experts.extend((0..counts.len()).filter_map(|layer| entry(layer, counts[layer])));
        for _ in 0..change.unsigned_abs() {
            let Some((_, layer)) = next_experts.pop_first() else { break };
            counts[layer] = if grows { counts[layer] + 1 } else { counts[layer] - 1 };
            next_experts.extend(entry(layer, counts[layer]));
        }
        model.meter.count(change.unsigned_abs());
        counts
    }

    /// Returns `from` with one more layer that is wholly remote, and with one more that is wholly local.
    fn with_whole_layers(&self, from: &ArrangementShape) -> Vec<ArrangementShape> {
        let layers = &self.group_search.model.layers;
        let has_local = |layer: &usize| from.counts[*layer] < layers[*layer].experts;
        let has_remote = |layer: &usize| from.counts[*layer] > 0;
        let count = |layer: &usize| from.counts[*layer];
        let all = 0..layers.len();
        let to_remote =
            all.clone().filter(has_local).max_by_key(|layer| (count(layer), std::cmp::Reverse(*layer)));
        let to_local = all.filter(has_remote).min_by_key(|layer| (count(layer), std::cmp::Reverse(*layer)));
        let with = |layer: usize, count: usize| {
            let mut counts = from.counts.clone();
            counts[layer] = count;
            from.with_counts(counts)
        };
        let remote = to_remote.map(|layer| with(layer, layers[layer].experts));
        remote.into_iter().chain(to_local.map(|layer| with(layer, 0))).collect()
    }
}

/// Returns an integer for `value` such that integers compare as values do.
fn order_bits(value: f64) -> u64 {
    let bits = value.to_bits();
    if value.is_sign_negative() { !bits } else { bits | (1 << 63) }
}
