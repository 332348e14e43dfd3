//! Arrangements near that of a plan: a local search over numbers of remote experts, groups and functions.
//!
//! A coarse grid comes first, then steps from the best arrangement. Those with the lowest bounds are explored first, so
//! that most are never built.

use super::arrangement::Arrangement;
use super::deal::Cut;
use super::{ArrangementFamily, FeasiblePlan, Slicing};
use crate::search::selection::{Candidate, Selection, ratio_candidate, whole_layers};
use remoe_plan::plan::Plan;
use std::collections::BTreeSet;

/// Arrangements of the first grid that are explored, at most.
const FIRST: usize = 8;
/// Parts of all experts that the first grid's numbers of remote experts differ by.
const GRID: usize = 8;
/// Choices of whole layers in the first grid.
const WHOLE: usize = 6;
/// Work after which only savings of a ten-thousandth count; see [`super::PATIENCE`].
const SETTLED: usize = 5_000;
/// Steps in experts of the largest layer, as divisors of its number; the last step is one expert.
const STEPS: [usize; 5] = [4, 10, 25, 64, usize::MAX];
/// Steps in experts of all layers, as divisors of their number.
const STEPS_ACROSS: [usize; 4] = [6, 16, 50, 200];
/// Steps in groups.
const STEPS_OF_GROUPS: [usize; 3] = [1, 2, 4];

/// An arrangement, before anything about it is worked out.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct ArrangementShape {
    counts: Vec<usize>,
    blocks: usize,
    slices: usize,
    replicas: u32,
}

impl ArrangementShape {
    /// The arrangement that comes closest to that of `plan`, which is in groups.
    fn of(plan: &Plan) -> Self {
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

    fn cut(&self) -> Cut {
        Cut { blocks: self.blocks, slices: self.slices }
    }
}

/// Result of a local search.
pub(crate) struct Climbed {
    pub(crate) best: Option<FeasiblePlan>,
    /// No plan of the arrangements that were looked at costs less, in dollars.
    pub(crate) bound: f64,
}

/// A local search.
struct Climb<'c, 's, 'm> {
    slicing: &'c mut Slicing<'s, 'm>,
    family: ArrangementFamily,
    seen: BTreeSet<ArrangementShape>,
    bound: f64,
}

impl Slicing<'_, '_> {
    /// The cheapest plan of the arrangements near that of `plan`, which is in groups, that keeps every limit.
    pub(crate) fn climbed(&mut self, plan: &Plan, family: ArrangementFamily) -> Climbed {
        let start = ArrangementShape::of(plan);
        let mut climb = Climb { slicing: self, family, seen: BTreeSet::new(), bound: f64::INFINITY };
        let grid = climb.grid(&start);
        let first = climb.look(grid, FIRST);
        // The best of a coarse grid is not always the best start.
        for mut at in first.into_iter().chain([start]) {
            while !climb.slicing.model.ends() {
                let near = climb.near(&at);
                match climb.look(near, usize::MAX) {
                    Some(better) => at = better,
                    None => break,
                }
            }
        }
        let bound = climb.bound;
        Climbed { best: self.best.clone(), bound }
    }
}

impl Climb<'_, '_, '_> {
    /// Explores the most promising of `shapes`: `most` of them, or up to the first that is better. Returns the best one
    /// that is better than what was known.
    fn look(&mut self, shapes: Vec<ArrangementShape>, most: usize) -> Option<ArrangementShape> {
        let mut promising: Vec<(f64, ArrangementShape)> = Vec::new();
        for shape in shapes {
            let allowed = self.slicing.remote.allows(self.slicing.model, &shape.counts);
            if !allowed || !self.seen.insert(shape.clone()) {
                continue;
            }
            // What a bound is summed from, and a bill.
            self.slicing.model.meter.count(2 * shape.counts.len() + 20);
            let candidate = shape.candidate();
            let Some(least) = self.slicing.least(&candidate) else { continue };
            let bound = self.slicing.bound(&candidate, &least, shape.cut(), shape.replicas);
            self.bound = self.bound.min(bound);
            if bound < f64::INFINITY {
                promising.push((bound, shape));
            }
        }
        promising.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut better = None;
        for (bound, shape) in promising.into_iter().take(most) {
            if bound > self.slicing.limit(SETTLED) || (better.is_some() && most == usize::MAX) {
                break;
            }
            let candidate = shape.candidate();
            let (cut, replicas) = (shape.cut(), shape.replicas);
            let arrangement = Arrangement { candidate: &candidate, cut, replicas, bound };
            let found = self.slicing.explore(&arrangement, SETTLED);
            let best = self.slicing.best.as_ref();
            if let Some(found) = found.filter(|found| best.is_none_or(|best| found.beats(best))) {
                self.slicing.best = Some(found);
                better = Some(shape);
            }
        }
        better
    }

    fn most_groups(&self) -> usize {
        self.slicing.model.problem.limits.max_groups.unwrap_or(1) as usize
    }

    /// Coarse steps over numbers of experts and groups, and `start`.
    fn grid(&self, start: &ArrangementShape) -> Vec<ArrangementShape> {
        let model = self.slicing.model;
        let most = model.most_experts();
        let mut counts: Vec<Vec<usize>> = vec![start.counts.clone()];
        for part in 1..=GRID {
            let ratio = ratio_candidate(model, part * most / GRID);
            counts
                .push(self.across(&vec![0; ratio.counts.len()], ratio.counts.iter().sum::<usize>() as isize));
            counts.push(ratio.counts);
        }
        let whole = whole_layers(model);
        let step = whole.len().div_ceil(WHOLE).max(1);
        counts.extend(whole.into_iter().step_by(step).map(|candidate| candidate.counts));
        counts.retain(|counts| counts.iter().any(|count| *count > 0));
        let mut shapes = vec![start.clone()];
        for counts in counts {
            for (blocks, slices) in self.first_cuts(start) {
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

    fn first_cuts(&self, start: &ArrangementShape) -> Vec<(usize, usize)> {
        let layers = self.slicing.model.layers.len();
        if self.family == ArrangementFamily::PerLayer {
            return vec![(layers, 1)];
        }
        let most = self.most_groups();
        let powers = (0..usize::BITS).map(|power| 1_usize << power).take_while(|slices| *slices < most);
        let mut cuts: Vec<(usize, usize)> = powers.chain([most]).map(|slices| (1, slices)).collect();
        cuts.push((start.blocks, start.slices));
        if layers <= most {
            cuts.push((layers, 1));
        }
        cuts.retain(|(blocks, slices)| blocks * slices <= most.max(start.blocks * start.slices));
        cuts
    }

    /// Arrangements a step away.
    fn near(&self, from: &ArrangementShape) -> Vec<ArrangementShape> {
        let model = self.slicing.model;
        let mut shapes = Vec::new();
        let all = model.experts();
        for parts in STEPS {
            let step = (model.most_experts() / parts).max(1);
            let more = |count: usize, experts: usize| (count + step).min(experts);
            let fewer = |count: usize, _: usize| count.saturating_sub(step);
            shapes.push(from.with_counts(self.each(&from.counts, more)));
            shapes.push(from.with_counts(self.each(&from.counts, fewer)));
        }
        for parts in STEPS_ACROSS {
            let step = (all / parts).max(1) as isize;
            shapes.extend([step, -step].map(|step| from.with_counts(self.across(&from.counts, step))));
        }
        let remote: usize = from.counts.iter().sum();
        shapes.push(from.with_counts(self.across(&vec![0; from.counts.len()], remote as isize)));
        shapes.extend(self.whole(from));
        if self.family == ArrangementFamily::Sliced {
            let most = self.most_groups();
            for step in STEPS_OF_GROUPS {
                let fewer = from.slices.saturating_sub(step);
                for slices in [from.slices + step, fewer] {
                    shapes.push(ArrangementShape { slices, ..from.clone() });
                }
            }
            // Groups of another size want another number of experts.
            let fine = STEPS[1..].iter().map(|parts| (model.most_experts() / parts).max(1));
            for step in fine.collect::<BTreeSet<usize>>() {
                let more = self.each(&from.counts, |count, experts| (count + step).min(experts));
                let fewer = self.each(&from.counts, |count, _| count.saturating_sub(step));
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

    fn each(&self, counts: &[usize], change: impl Fn(usize, usize) -> usize) -> Vec<usize> {
        let layers = counts.iter().zip(&self.slicing.model.layers);
        layers.map(|(count, layer)| change(*count, layer.experts)).collect()
    }

    /// `counts` with so many more experts remote in all, those of the least use per byte; or with so many fewer, those
    /// of the greatest.
    fn across(&self, counts: &[usize], more: isize) -> Vec<usize> {
        let model = self.slicing.model;
        let mut counts = counts.to_vec();
        let use_of = |layer: usize, at: usize| {
            let table = &self.slicing.tables[layer];
            table.tokens[at] / model.layers[layer].expert_bytes
        };
        let grows = more > 0;
        let key = |layer: usize, count: usize| {
            let table = &self.slicing.tables[layer];
            match grows {
                true => (count < table.order.len()).then(|| use_of(layer, count)),
                false => count.checked_sub(1).map(|at| -use_of(layer, at)),
            }
        };
        let mut open: BTreeSet<(u64, usize)> = BTreeSet::new();
        let entry = |layer: usize, count: usize| key(layer, count).map(|value| (ordered(value), layer));
        open.extend((0..counts.len()).filter_map(|layer| entry(layer, counts[layer])));
        for _ in 0..more.unsigned_abs() {
            let Some((_, layer)) = open.pop_first() else { break };
            counts[layer] = if grows { counts[layer] + 1 } else { counts[layer] - 1 };
            open.extend(entry(layer, counts[layer]));
        }
        model.meter.count(more.unsigned_abs());
        counts
    }

    /// `from` with one layer more that is wholly remote, or wholly local.
    fn whole(&self, from: &ArrangementShape) -> Vec<ArrangementShape> {
        let layers = &self.slicing.model.layers;
        let open = |layer: &usize| from.counts[*layer] < layers[*layer].experts;
        let away = |layer: &usize| from.counts[*layer] > 0;
        let count = |layer: &usize| from.counts[*layer];
        let all = 0..layers.len();
        let to_remote =
            all.clone().filter(open).max_by_key(|layer| (count(layer), std::cmp::Reverse(*layer)));
        let to_local = all.filter(away).min_by_key(|layer| (count(layer), std::cmp::Reverse(*layer)));
        let with = |layer: usize, count: usize| {
            let mut counts = from.counts.clone();
            counts[layer] = count;
            from.with_counts(counts)
        };
        let remote = to_remote.map(|layer| with(layer, layers[layer].experts));
        remote.into_iter().chain(to_local.map(|layer| with(layer, 0))).collect()
    }
}

/// Bits of a number, in the order of numbers.
fn ordered(value: f64) -> u64 {
    let bits = value.to_bits();
    if value.is_sign_negative() { !bits } else { bits | (1 << 63) }
}
