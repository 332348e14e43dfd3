//! The search over remote sets and main sizes: best bound first, and nothing is solved that its
//! bound excludes.

pub(crate) mod candidate;
pub(crate) mod continuous;
pub(crate) mod dual;
pub(crate) mod improve;
pub(crate) mod mixed;
pub(crate) mod options;
pub(crate) mod remote_set;
pub(crate) mod selection;
pub(crate) mod tables;

use crate::preallocation::WorstCase;
use crate::search::candidate::{CandidateSides, Multipliers};
use crate::search::dual::{Dual, Sizing};
use crate::search::improve::{Effort, Improved, improve, improve_any, locals};
use crate::search::options::{OptionChoice, Prices, Terms};
use crate::search::selection::{Candidate, Selection};
use crate::search::tables::LayerTable;
use remoe_plan::cost::{Evaluation, Violation};
use remoe_plan::model::Model;
use remoe_plan::plan::Plan;
use remoe_plan::problem::ErrorFactor;

/// Costs that differ by less are equal.
pub(crate) const COST_TIE: f64 = 1e-12;
/// After how many solved pairs, times layers, only plans count that save at least this share.
const PATIENCE: [(usize, f64); 3] = [(600, 1e-6), (2_500, 1e-5), (10_000, 1e-4)];
/// Main sizes that share one bound of the first pass.
const CHUNK: usize = 16;

/// A plan with its evaluation, and how it came about.
#[derive(Debug, Clone)]
pub(crate) struct EvaluatedPlan {
    pub(crate) candidate: Candidate,
    pub(crate) main: usize,
    pub(crate) choices: Vec<Option<OptionChoice>>,
    pub(crate) plan: Plan,
    pub(crate) evaluation: Evaluation,
}

impl EvaluatedPlan {
    fn cost(&self) -> f64 {
        self.evaluation.total_cost
    }

    /// Cheaper; of equal ones fewer replicas, then less memory.
    pub(crate) fn beats(&self, other: &Self) -> bool {
        let (cost, than) = (self.cost(), other.cost());
        if (cost - than).abs() > COST_TIE * than.abs() {
            return cost < than;
        }
        let rank = |found: &Self| (found.plan.replicas(), found.plan.bytes());
        rank(self) < rank(other)
    }
}

/// Everything that the search reads.
pub(crate) struct Search<'m> {
    pub(crate) model: &'m Model<'m>,
    pub(crate) tables: &'m [LayerTable],
    /// How far remote shares may exceed their prediction, where plans must bear it.
    pub(crate) factors: Option<&'m [ErrorFactor]>,
    /// The limits that a plan does not keep, given its evaluation.
    pub(crate) violations: &'m dyn Fn(&Plan, &Evaluation) -> Vec<Violation>,
    pub(crate) best: Option<EvaluatedPlan>,
    /// Multipliers of the limits in the pair that was solved last.
    pub(crate) multipliers: Multipliers,
    /// Pairs that are searched further.
    pub(crate) open: Vec<OpenPair>,
    /// Pairs that may be solved.
    pub(crate) most_solved: usize,
    /// Cost above which no plan is considered, whatever else is known.
    pub(crate) cutoff: f64,
    pub(crate) counters: Counters,
}

/// A pair whose cheapest sizing may be cheaper than the one that is known.
#[derive(Debug)]
pub(crate) struct OpenPair {
    candidate: Candidate,
    main: usize,
    /// No sizing of it costs less.
    bound: f64,
}

/// How much work a search was.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    /// Choices of how many experts of each layer are remote.
    pub candidates: usize,
    /// Pairs of such a choice and a main size.
    pub pairs: usize,
    /// Bounds over several pairs at once.
    pub bounds: usize,
    /// Pairs whose sizes and replicas were solved.
    pub solved: usize,
    /// Terms of experts, layers and sizes that were summed for the plan and its verdict: what time goes by.
    pub work: usize,
}

impl Counters {
    pub(crate) fn add(&mut self, other: Self) {
        self.candidates += other.candidates;
        self.pairs += other.pairs;
        self.bounds += other.bounds;
        self.solved += other.solved;
        self.work += other.work;
    }
}

/// A candidate with the bounds of its main sizes, chunk by chunk.
struct Bounded {
    candidate: Candidate,
    /// First and last main size of each chunk, and what it costs at least.
    chunks: Vec<(usize, usize, f64)>,
    least: f64,
}

impl<'m> Search<'m> {
    /// Returns the cost above which no plan is considered: the cost of the best one, and a little less after much
    /// work, when there are many pairs that hardly differ.
    fn limit(&self) -> f64 {
        if self.counters.solved >= self.most_solved || self.model.ends() {
            return f64::NEG_INFINITY;
        }
        let work = self.counters.solved * self.model.layers.len();
        let gain = PATIENCE.iter().filter(|(after, _)| work >= *after).map(|(_, gain)| *gain).next_back();
        let factor = gain.map_or(1.0 + COST_TIE, |gain| 1.0 - gain);
        self.best.as_ref().map_or(f64::INFINITY, |best| best.cost() * factor).min(self.cutoff)
    }

    /// Searches all `candidates`, which have passed the worst case or need not.
    pub(crate) fn run(&mut self, candidates: Vec<Candidate>) {
        let mut bounded: Vec<Bounded> =
            candidates.into_iter().filter_map(|candidate| self.bounded(candidate)).collect();
        bounded.sort_by(|a, b| a.least.total_cmp(&b.least));
        for entry in bounded {
            if entry.least > self.limit() {
                break;
            }
            // Only a ratio's worst case is known already.
            let passes = entry.candidate.selection != Selection::AcrossLayers
                || WorstCase::new(self.model, entry.candidate.counts.clone()).passes();
            if passes {
                self.explore(entry);
            }
        }
        self.close();
    }

    fn bounded(&mut self, candidate: Candidate) -> Option<Bounded> {
        self.counters.candidates += 1;
        self.model.add_work(self.model.layers.len() * self.model.main_sizes.len() / CHUNK);
        if self.model.ends() {
            return None;
        }
        let sides = CandidateSides::new(self.model, self.tables, &candidate, self.factors)?;
        let sizes = self.model.main_sizes.len();
        let mut chunks = Vec::new();
        // The bound of a range takes its largest size for the fastest.
        let chunk = if self.model.is_isotonic { CHUNK } else { 1 };
        let mut low = sides.first_main;
        self.counters.pairs += sizes - low.min(sizes);
        while low < sizes {
            let high = (low + chunk - 1).min(sizes - 1);
            let bound = sides.quick_bound(low, high);
            self.counters.bounds += 1;
            if bound < f64::INFINITY {
                chunks.push((low, high, bound));
            }
            low = high + 1;
        }
        let least = chunks.iter().map(|(_, _, bound)| *bound).fold(f64::INFINITY, f64::min);
        (!chunks.is_empty()).then_some(Bounded { candidate, chunks, least })
    }

    fn explore(&mut self, mut entry: Bounded) {
        let Some(mut sides) = CandidateSides::new(self.model, self.tables, &entry.candidate, self.factors)
        else {
            return;
        };
        entry.chunks.sort_by(|a, b| a.2.total_cmp(&b.2));
        for (low, high, bound) in entry.chunks {
            if bound <= self.limit() {
                self.narrow(&mut sides, &entry.candidate, low, high);
            }
        }
    }

    /// Halves a range of main sizes for as long as its bounds allow a better plan, the more promising
    /// half first.
    fn narrow(&mut self, sides: &mut CandidateSides<'m>, candidate: &Candidate, low: usize, high: usize) {
        if low == high {
            self.solve(sides, candidate, low);
            return;
        }
        let middle = low.midpoint(high);
        let mut halves = [(low, middle), (middle + 1, high)].map(|(low, high)| {
            self.counters.bounds += 1;
            let quick = sides.quick_bound(low, high);
            let bound = if quick > self.limit() {
                quick
            } else {
                quick.max(sides.bound(low, high, self.multipliers))
            };
            (bound, low, high)
        });
        halves.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (bound, low, high) in halves {
            if bound <= self.limit() {
                self.narrow(sides, candidate, low, high);
            }
        }
    }

    /// Solves the pair of `candidate` and the main size at `main`, and keeps the plan if it is better.
    pub(crate) fn try_one(&mut self, candidate: &Candidate, main: usize) {
        self.counters.candidates += 1;
        self.counters.pairs += 1;
        if let Some(mut sides) = CandidateSides::new(self.model, self.tables, candidate, self.factors) {
            self.solve(&mut sides, candidate, main);
        }
    }

    /// Solves one pair quickly and keeps the plan if it is better.
    fn solve(&mut self, sides: &mut CandidateSides<'m>, candidate: &Candidate, main: usize) {
        self.counters.solved += 1;
        self.model.add_work(self.model.layers.len() * self.model.remote_sizes.len());
        let sized = size(sides, main, self.multipliers, self.limit(), Effort::Quick);
        // Neighbouring pairs have similar ones.
        self.multipliers = sized.multipliers;
        if sized.improved.as_ref().is_some_and(|improved| improved.open) {
            self.open.push(OpenPair { candidate: candidate.clone(), main, bound: sized.bound });
        }
        self.keep(sides, candidate, main, sized);
    }

    /// Solves the open pairs in full, the most promising first, for as long as a bound is below the
    /// best cost.
    pub(crate) fn close(&mut self) {
        let mut open = std::mem::take(&mut self.open);
        open.sort_by(|a, b| a.bound.total_cmp(&b.bound));
        for OpenPair { candidate, main, bound } in open {
            if bound > self.limit() {
                return;
            }
            let sides = CandidateSides::new(self.model, self.tables, &candidate, self.factors);
            let Some(mut sides) = sides else { continue };
            self.counters.solved += 1;
            let sized = size(&mut sides, main, self.multipliers, self.limit(), Effort::Full);
            self.keep(&sides, &candidate, main, sized);
        }
    }

    fn keep(&mut self, sides: &CandidateSides<'m>, candidate: &Candidate, main: usize, sized: Sized) {
        let found = sized
            .improved
            .and_then(|improved| self.found(sides, candidate, main, &improved.sizing, self.limit()));
        if let Some(found) = found
            && self.best.as_ref().is_none_or(|best| found.beats(best))
        {
            self.best = Some(found);
        }
    }

    /// The best plan of one pair.
    pub(crate) fn alternative(
        &self,
        sides: &mut CandidateSides<'m>,
        candidate: &Candidate,
        main: usize,
    ) -> Option<EvaluatedPlan> {
        let sized = size(sides, main, self.multipliers, f64::INFINITY, Effort::Quick);
        self.found(sides, candidate, main, &sized.improved?.sizing, f64::INFINITY)
    }

    /// The plan of a sizing, if it costs at most `cutoff` and keeps every limit: sums in another order
    /// may differ in their last bits, so the evaluation has the last word.
    pub(crate) fn found(
        &self,
        sides: &CandidateSides<'m>,
        candidate: &Candidate,
        main: usize,
        sizing: &Sizing,
        cutoff: f64,
    ) -> Option<EvaluatedPlan> {
        // The evaluation goes over every expert: not for what is not cheaper anyway.
        if sides.cost(main, &sizing.totals) > cutoff * (1.0 + 1e-9) || self.model.ends() {
            return None;
        }
        let plan = sides.plan(main, &sizing.choices);
        let evaluation = self.model.evaluate(&plan);
        let found = EvaluatedPlan {
            candidate: candidate.clone(),
            main,
            choices: sizing.choices.clone(),
            plan,
            evaluation,
        };
        let keeps = (self.violations)(&found.plan, &found.evaluation).is_empty();
        // Where the search ends meanwhile, latencies of the plan may be unknown.
        let stands = keeps && !self.model.ends();
        stands.then(|| {
            self.model.meter.found_plan();
            found
        })
    }
}

/// Result of sizing one pair.
struct Sized {
    improved: Option<Improved>,
    bound: f64,
    multipliers: Multipliers,
}

/// Memory and replicas for one candidate and one main size, where a plan below `cutoff` may exist.
fn size(
    sides: &mut CandidateSides<'_>,
    main: usize,
    hint: Multipliers,
    cutoff: f64,
    effort: Effort,
) -> Sized {
    if sides.model.is_reserved() {
        let improved = size_reserved(sides, main).map(|sizing| Improved { sizing, open: false });
        return Sized { improved, bound: f64::NEG_INFINITY, multipliers: hint };
    }
    let prices = sides.invocation_prices(main);
    let dual = Dual::solve(sides, main, prices, hint, cutoff);
    let (bound, multipliers) = (dual.bound, dual.multipliers);
    let hopeless = bound > cutoff || bound == f64::INFINITY;
    Sized { improved: if hopeless { None } else { improve(dual, effort) }, bound, multipliers }
}

/// Reserved billing is no sum over layers: the cost is linearised at the sizing before, from the
/// cheapest and from the fastest sizing, and exact moves follow.
fn size_reserved(sides: &mut CandidateSides<'_>, main: usize) -> Option<Sizing> {
    let output = sides.model.output;
    let rate = sides.model.coupled_main_rate(sides.model.main_sizes[main]);
    let mut best: Option<(f64, Sizing)> = None;
    for mut weight in [1.0, 1e3, 1e-3] {
        let mut before = f64::INFINITY;
        while !sides.model.ends() {
            // One second costs `weight` times one dollar per second.
            let prices = Prices {
                prefill: weight,
                step: weight * output,
                bill: 1.0,
                limit_prefill: 0.0,
                limit_step: 0.0,
            };
            let dual = Dual::solve(sides, main, prices, Multipliers::default(), f64::INFINITY);
            if dual.bound == f64::INFINITY {
                return None;
            }
            let Some(Improved { sizing, .. }) = improve(dual, Effort::Full) else { break };
            let cost = sides.cost(main, &sizing.totals);
            let seconds = sizing.totals.prefill + output * sizing.totals.step;
            weight = (rate + sizing.totals.bill) / seconds.max(f64::MIN_POSITIVE);
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                best = Some((cost, sizing));
            }
            if cost >= before - before.abs() * COST_TIE {
                break;
            }
            before = cost;
        }
    }
    let (_, mut sizing) = best?;
    let locals = locals(sides, main);
    let cost = |terms: &Terms| (rate + terms.bill) * (terms.prefill + output * terms.step);
    improve_any(sides, &locals, &mut sizing, cost);
    Some(sizing)
}
