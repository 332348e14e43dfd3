//! Search for plans with a function for each layer, over remote counts and main sizes: branch and bound, best bound first.

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
use crate::search::improve::{Effort, Improved, improve, improve_any, local_times};
use crate::search::options::{CostTerms, OptionChoice, TermPrices};
use crate::search::selection::{Candidate, Selection};
use crate::search::tables::LayerTable;
use remoe_plan::cost::{Evaluation, Violation};
use remoe_plan::model::Model;
use remoe_plan::plan::Plan;
use remoe_plan::problem::ErrorFactor;

/// Costs that differ by less are equal.
pub(crate) const COST_TIE: f64 = 1e-12;
/// Share of the best cost that plans must save, by work done: solved pairs times layers.
const REQUIRED_SAVING: [(usize, f64); 3] = [(600, 1e-6), (2_500, 1e-5), (10_000, 1e-4)];
/// Number of main sizes that share one bound in the first pass.
const CHUNK: usize = 16;

/// A plan with its evaluation, its candidate and its sizing.
#[derive(Debug, Clone)]
pub(crate) struct EvaluatedPlan {
    pub(crate) candidate: Candidate,
    /// Index of the main size.
    pub(crate) main: usize,
    pub(crate) choices: Vec<Option<OptionChoice>>,
    pub(crate) plan: Plan,
    pub(crate) evaluation: Evaluation,
}

impl EvaluatedPlan {
    fn cost(&self) -> f64 {
        self.evaluation.total_cost
    }

    /// Reports if this plan is cheaper than `other`, or as cheap with fewer replicas, then with less memory.
    pub(crate) fn beats(&self, other: &Self) -> bool {
        let (own, others) = (self.cost(), other.cost());
        if (own - others).abs() > COST_TIE * others.abs() {
            return own < others;
        }
        let rank = |found: &Self| (found.plan.replicas(), found.plan.bytes());
        rank(self) < rank(other)
    }
}

/// Search for plans with a function for each layer: its inputs, and the best plan so far.
pub(crate) struct Search<'m> {
    pub(crate) model: &'m Model<'m>,
    pub(crate) tables: &'m [LayerTable],
    /// Prediction errors that plans must tolerate; absent unless plans must be robust.
    pub(crate) factors: Option<&'m [ErrorFactor]>,
    /// Returns the limits that a plan breaks, given its evaluation.
    pub(crate) violations: &'m dyn Fn(&Plan, &Evaluation) -> Vec<Violation>,
    pub(crate) best: Option<EvaluatedPlan>,
    /// Lagrangian multipliers of the limits in the latest solved pair.
    pub(crate) multipliers: Multipliers,
    /// Pairs that were solved quickly, and may have a cheaper sizing.
    pub(crate) open: Vec<OpenPair>,
    /// Maximum number of solved pairs.
    pub(crate) max_solved: usize,
    /// Cost above which no plan is considered, in dollars.
    pub(crate) cutoff: f64,
    pub(crate) counters: Counters,
}

/// A pair of candidate and main size that may have a cheaper sizing than the known one.
#[derive(Debug)]
pub(crate) struct OpenPair {
    candidate: Candidate,
    main: usize,
    /// Lower bound of the cost of its sizings, in dollars.
    bound: f64,
}

/// Counters of a search.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    /// Candidates: choices of remote counts.
    pub candidates: usize,
    /// Pairs of candidate and main size.
    pub pairs: usize,
    /// Bounds over several pairs at once.
    pub bounds: usize,
    /// Pairs whose sizes and replicas were solved.
    pub solved: usize,
    /// Summed terms of experts, layers and sizes, which the time of a search is proportional to.
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

/// A candidate with the lower bounds of its main sizes.
struct BoundedCandidate {
    candidate: Candidate,
    /// First and last main size of each chunk, and the lower bound of its cost.
    chunks: Vec<(usize, usize, f64)>,
    least: f64,
}

impl<'m> Search<'m> {
    /// Returns the cost above which no plan is considered: that of the best plan, and less after much work.
    fn cost_limit(&self) -> f64 {
        if self.counters.solved >= self.max_solved || self.model.ends() {
            return f64::NEG_INFINITY;
        }
        let work = self.counters.solved * self.model.layers.len();
        let saving =
            REQUIRED_SAVING.iter().filter(|(after, _)| work >= *after).map(|(_, saving)| *saving).next_back();
        let factor = saving.map_or(1.0 + COST_TIE, |saving| 1.0 - saving);
        self.best.as_ref().map_or(f64::INFINITY, |best| best.cost() * factor).min(self.cutoff)
    }

    /// Searches all `candidates`. The worst case of ratios must have been checked before.
    pub(crate) fn run(&mut self, candidates: Vec<Candidate>) {
        let mut bounded: Vec<BoundedCandidate> =
            candidates.into_iter().filter_map(|candidate| self.bounded(candidate)).collect();
        bounded.sort_by(|a, b| a.least.total_cmp(&b.least));
        for entry in bounded {
            if entry.least > self.cost_limit() {
                break;
            }
            // The worst case of candidates across layers is checked here.
            let passes = entry.candidate.selection != Selection::AcrossLayers
                || WorstCase::new(self.model, entry.candidate.counts.clone()).passes();
            if passes {
                self.explore(entry);
            }
        }
        self.solve_open_pairs();
    }

    /// Computes the lower bounds of `candidate`, or returns `None` if no main size is feasible.
    fn bounded(&mut self, candidate: Candidate) -> Option<BoundedCandidate> {
        self.counters.candidates += 1;
        self.model.add_work(self.model.layers.len() * self.model.main_sizes.len() / CHUNK);
        if self.model.ends() {
            return None;
        }
        let sides = CandidateSides::new(self.model, self.tables, &candidate, self.factors)?;
        let sizes = self.model.main_sizes.len();
        let mut chunks = Vec::new();
        // The bound of a range of sizes uses the times of the largest, so it needs isotonic times.
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
        (!chunks.is_empty()).then_some(BoundedCandidate { candidate, chunks, least })
    }

    /// Solves the promising main sizes of a candidate.
    fn explore(&mut self, mut entry: BoundedCandidate) {
        let Some(mut sides) = CandidateSides::new(self.model, self.tables, &entry.candidate, self.factors)
        else {
            return;
        };
        entry.chunks.sort_by(|a, b| a.2.total_cmp(&b.2));
        for (low, high, bound) in entry.chunks {
            if bound <= self.cost_limit() {
                self.bisect(&mut sides, &entry.candidate, low, high);
            }
        }
    }

    /// Bisects a range of main sizes as long as its bounds allow a better plan, the more promising half first.
    fn bisect(&mut self, sides: &mut CandidateSides<'m>, candidate: &Candidate, low: usize, high: usize) {
        if low == high {
            self.solve(sides, candidate, low);
            return;
        }
        let middle = low.midpoint(high);
        let mut halves = [(low, middle), (middle + 1, high)].map(|(low, high)| {
            self.counters.bounds += 1;
            let quick = sides.quick_bound(low, high);
            let bound = if quick > self.cost_limit() {
                quick
            } else {
                quick.max(sides.bound(low, high, self.multipliers))
            };
            (bound, low, high)
        });
        halves.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (bound, low, high) in halves {
            if bound <= self.cost_limit() {
                self.bisect(sides, candidate, low, high);
            }
        }
    }

    /// Solves the pair of `candidate` and the main size at `main`, and keeps its plan if it is better.
    pub(crate) fn solve_pair(&mut self, candidate: &Candidate, main: usize) {
        self.counters.candidates += 1;
        self.counters.pairs += 1;
        if let Some(mut sides) = CandidateSides::new(self.model, self.tables, candidate, self.factors) {
            self.solve(&mut sides, candidate, main);
        }
    }

    /// Solves one pair with [`Effort::Quick`], and keeps its plan if it is better.
    fn solve(&mut self, sides: &mut CandidateSides<'m>, candidate: &Candidate, main: usize) {
        self.counters.solved += 1;
        self.model.add_work(self.model.layers.len() * self.model.remote_sizes.len());
        let sized = size(sides, main, self.multipliers, self.cost_limit(), Effort::Quick);
        // Neighbouring pairs have similar multipliers.
        self.multipliers = sized.multipliers;
        if sized.improved.as_ref().is_some_and(|improved| improved.open) {
            self.open.push(OpenPair { candidate: candidate.clone(), main, bound: sized.bound });
        }
        self.keep(sides, candidate, main, sized);
    }

    /// Solves the open pairs with [`Effort::Full`], the most promising first, until no bound is below the best cost.
    pub(crate) fn solve_open_pairs(&mut self) {
        let mut open = std::mem::take(&mut self.open);
        open.sort_by(|a, b| a.bound.total_cmp(&b.bound));
        for OpenPair { candidate, main, bound } in open {
            if bound > self.cost_limit() {
                return;
            }
            let sides = CandidateSides::new(self.model, self.tables, &candidate, self.factors);
            let Some(mut sides) = sides else { continue };
            self.counters.solved += 1;
            let sized = size(&mut sides, main, self.multipliers, self.cost_limit(), Effort::Full);
            self.keep(&sides, &candidate, main, sized);
        }
    }

    /// Keeps the plan of `sized` if it is better than the best one.
    fn keep(&mut self, sides: &CandidateSides<'m>, candidate: &Candidate, main: usize, sized: SizedPair) {
        let found = sized
            .improved
            .and_then(|improved| self.found(sides, candidate, main, &improved.sizing, self.cost_limit()));
        if let Some(found) = found
            && self.best.as_ref().is_none_or(|best| found.beats(best))
        {
            self.best = Some(found);
        }
    }

    /// Returns the best plan of one pair.
    pub(crate) fn alternative(
        &self,
        sides: &mut CandidateSides<'m>,
        candidate: &Candidate,
        main: usize,
    ) -> Option<EvaluatedPlan> {
        let sized = size(sides, main, self.multipliers, f64::INFINITY, Effort::Quick);
        self.found(sides, candidate, main, &sized.improved?.sizing, f64::INFINITY)
    }

    /// Evaluates the plan of a sizing, and returns it if it costs at most `cutoff` and keeps every limit.
    ///
    /// The sums of a sizing may differ from the evaluation in their last bits: the evaluation decides.
    pub(crate) fn found(
        &self,
        sides: &CandidateSides<'m>,
        candidate: &Candidate,
        main: usize,
        sizing: &Sizing,
        cutoff: f64,
    ) -> Option<EvaluatedPlan> {
        // Evaluations visit every expert: skips plans that are too dear anyway.
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
        // If the search ended meanwhile, latencies of the plan may not have been simulated.
        let is_complete = keeps && !self.model.ends();
        is_complete.then(|| {
            self.model.meter.found_plan();
            found
        })
    }
}

/// Result of sizing one pair.
struct SizedPair {
    improved: Option<Improved>,
    bound: f64,
    multipliers: Multipliers,
}

/// Chooses memory and replicas for one candidate and one main size, if a plan below `cutoff` may exist.
fn size(
    sides: &mut CandidateSides<'_>,
    main: usize,
    hint: Multipliers,
    cutoff: f64,
    effort: Effort,
) -> SizedPair {
    if sides.model.is_reserved() {
        let improved = size_reserved(sides, main).map(|sizing| Improved { sizing, open: false });
        return SizedPair { improved, bound: f64::NEG_INFINITY, multipliers: hint };
    }
    let prices = sides.invocation_prices(main);
    let dual = Dual::solve(sides, main, prices, hint, cutoff);
    let (bound, multipliers) = (dual.bound, dual.multipliers);
    let is_excluded = bound > cutoff || bound == f64::INFINITY;
    SizedPair { improved: if is_excluded { None } else { improve(dual, effort) }, bound, multipliers }
}

/// Chooses memory and replicas under reserved billing, where the cost is not a sum over layers.
///
/// Linearises the cost at the previous sizing, from several starts, until it falls no further. Exact moves follow.
fn size_reserved(sides: &mut CandidateSides<'_>, main: usize) -> Option<Sizing> {
    let output = sides.model.output;
    let rate = sides.model.coupled_main_rate(sides.model.main_sizes[main]);
    let mut best: Option<(f64, Sizing)> = None;
    for mut weight in [1.0, 1e3, 1e-3] {
        let mut before = f64::INFINITY;
        while !sides.model.ends() {
            // Weight of a second against a dollar per second of the bill.
            let prices = TermPrices {
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
    let locals = local_times(sides, main);
    let cost = |terms: &CostTerms| (rate + terms.bill) * (terms.prefill + output * terms.step);
    improve_any(sides, &locals, &mut sizing, cost);
    Some(sizing)
}
