//! Search for flips: changes of one figure that change whether remote experts pay, found by planning changed problems.
//!
//! One feasible plan that costs less than every strategy without remote experts proves that they pay; the costs of those
//! strategies are exact. Only a full search proves that they do not pay; it runs if enough work is left. Work is counted in
//! summed terms, never in time, so that results are the same on every machine.

use crate::best_plans::{BestPlans, Effort, SearchInputs};
use crate::best_plans::{candidates, violations_of};
use crate::comparison::{ComparisonFlip, ComparisonFlips, FlipFigure, cheapest_strategy, evaluate_rivals};
use crate::infeasible::device_too_small;
use crate::preallocation::walk;
use crate::search::selection::Candidate;
use crate::search::tables::LayerTable;
use crate::slicing::{ArrangementFamily, CandidatePlan, LayerExpertTimes};
use crate::strategies::evaluate_strategies;
use crate::words::{rounded_up, seconds};
use remoe_plan::cost::Evaluation;
use remoe_plan::cost::baselines::{AllLocalTimes, WithoutRemote};
use remoe_plan::model::Model;
use remoe_plan::plan::Plan;
use remoe_plan::problem::{CpuProfile, Device, Problem};
use remoe_plan::serving_strategy::ServingStrategy;
use std::cell::OnceCell;
use std::rc::Rc;

/// Largest change of a figure, as a power of 2.
const DOUBLINGS: u32 = 6;
/// Bisection steps of the factor's logarithm: to 2 %.
const BISECTIONS: usize = 5;
/// Maximum work of the search for all flips, in summed terms.
const MAX_WORK: usize = 9_000_000;
/// Assumed work of a full search of a changed problem, as a multiple of that of the original problem.
const FULL_SEARCH_FACTOR: usize = 3;
/// Assumed lower bound of the cost of plans, as a share of the cost that a coarse search finds.
const COARSE_SHARE: f64 = 0.9;
/// Maximum number of known plans that are tried on a changed problem before a search.
const MAX_CARRIED: usize = 3;

/// Error: the search needs more work than is left.
struct WorkLimitReached;

/// Search for flips, with everything that is the same for all changed problems.
pub(crate) struct FlipSearch<'a, 'm> {
    inputs: &'a SearchInputs<'a, 'm>,
    all_local: &'a AllLocalTimes,
    /// Set if remote experts pay for the original problem.
    pays: bool,
    /// Remote counts that are searched.
    choices: Vec<Candidate>,
    /// Plans with remote experts that were the cheapest of some problem, the latest first.
    carried: Vec<(ArrangementFamily, CandidatePlan)>,
    /// Dollars of the cheapest plan with remote experts for the original problem; infinite without one.
    least: f64,
    /// Cache of [`Self::least_cost_at_end`].
    end_costs: Vec<(FlipFigure, f64)>,
    /// Work of the original search.
    original_work: usize,
    work: usize,
}

impl<'a, 'm> FlipSearch<'a, 'm> {
    /// `plans`: the cheapest plans of the problem of `inputs`. `pays`: set if remote experts pay for it.
    pub(crate) fn new(
        inputs: &'a SearchInputs<'a, 'm>,
        all_local: &'a AllLocalTimes,
        plans: &BestPlans<'_>,
        pays: bool,
    ) -> Self {
        let known =
            [(ArrangementFamily::Sliced, &plans.sliced), (ArrangementFamily::PerLayer, &plans.per_layer)];
        let known = known.into_iter().filter_map(|(family, plan)| Some((family, plan.clone()?)));
        let mut carried: Vec<(ArrangementFamily, CandidatePlan)> =
            known.filter(|(_, planned)| planned.plan.replicas() > 0).collect();
        carried.sort_by(|a, b| a.1.cost().total_cmp(&b.1.cost()));
        Self {
            inputs,
            all_local,
            pays,
            choices: inputs.coarse_choices(),
            least: carried.first().map_or(f64::INFINITY, |(_, planned)| planned.cost()),
            end_costs: Vec::new(),
            carried,
            original_work: inputs.model.work_done(),
            work: 0,
        }
    }

    /// Finds the smallest flip of each figure. Returns the flips and the work of the search.
    pub(crate) fn run(mut self) -> (ComparisonFlips, usize) {
        let mut flips = ComparisonFlips::default();
        let all = [FlipFigure::ArrivalRate, FlipFigure::Tpot, FlipFigure::ModelSize, FlipFigure::GpuPrice];
        for (index, cause) in all.into_iter().enumerate() {
            // Divides the remaining work among the remaining figures.
            let share = (MAX_WORK.saturating_sub(self.work)) / (all.len() - index);
            match self.find_flip(cause, self.work + share) {
                Ok(flip) => flips.found.extend(flip),
                Err(WorkLimitReached) => flips.undecided.push(cause),
            }
        }
        (flips, self.work)
    }

    /// Finds the smallest flip of `cause`. `max_work`: limit of the total work.
    fn find_flip(
        &mut self,
        cause: FlipFigure,
        max_work: usize,
    ) -> Result<Option<ComparisonFlip>, WorkLimitReached> {
        let factor =
            |is_larger: bool, logarithm: f64| if is_larger { logarithm.exp2() } else { (-logarithm).exp2() };
        // The result may flip and flip back: powers of 2 first, then bisection between the last unflipped and the first
        // flipped power.
        let mut first = Vec::new();
        for power in 1..=DOUBLINGS {
            for is_larger in [true, false] {
                let factor = factor(is_larger, f64::from(power));
                if let Some(strategy) = self.flipped_to(cause, factor, max_work)? {
                    first.push((is_larger, f64::from(power), strategy));
                }
            }
            if !first.is_empty() {
                break;
            }
        }
        let mut nearest: Option<(bool, f64, ServingStrategy)> = None;
        for (is_larger, power, strategy) in first {
            let (mut unflipped, mut flipped, mut best) = (power - 1.0, power, strategy);
            for _ in 0..BISECTIONS {
                let middle = f64::midpoint(unflipped, flipped);
                match self.flipped_to(cause, factor(is_larger, middle), max_work) {
                    Ok(Some(strategy)) => (best, flipped) = (strategy, middle),
                    Ok(None) => unflipped = middle,
                    // The flip is known, but not to the last percent.
                    Err(WorkLimitReached) => break,
                }
            }
            if nearest.is_none_or(|(_, known, _)| flipped < known) {
                nearest = Some((is_larger, flipped, best));
            }
        }
        let Some((is_larger, logarithm, best)) = nearest else { return Ok(None) };
        let factor = factor(is_larger, logarithm);
        let best = self.confirm(cause, factor, best)?;
        let (at, words) = cause.describe(self.inputs.model.problem, factor);
        Ok(Some(ComparisonFlip { cause, factor, at, best, words }))
    }

    /// Returns the cheapest strategy with the figure `factor` times as large, if that flips whether remote experts pay.
    fn flipped_to(
        &mut self,
        cause: FlipFigure,
        factor: f64,
        max_work: usize,
    ) -> Result<Option<ServingStrategy>, WorkLimitReached> {
        let Some(changed) = cause.apply(self.inputs.model.problem, factor) else { return Ok(None) };
        if self.work >= max_work || self.inputs.model.ends() {
            return Err(WorkLimitReached);
        }
        let best = self.cheapest(cause, factor, &changed);
        if self.inputs.model.ends() {
            return Err(WorkLimitReached);
        }
        Ok(best.filter(|strategy| strategy.has_remote_experts() != self.pays))
    }

    /// Confirms by a full search that the figure `factor` times as large is a flip, and returns the cheapest strategy.
    ///
    /// If too little work is left, returns `found` where a plan proves the flip.
    fn confirm(
        &mut self,
        cause: FlipFigure,
        factor: f64,
        found: ServingStrategy,
    ) -> Result<ServingStrategy, WorkLimitReached> {
        if self.work + FULL_SEARCH_FACTOR * self.original_work > MAX_WORK {
            return if self.pays { Err(WorkLimitReached) } else { Ok(found) };
        }
        let Some(changed) = cause.apply(self.inputs.model.problem, factor) else {
            return Err(WorkLimitReached);
        };
        let robust = self.inputs.factors.is_some();
        let meter = &self.inputs.model.meter;
        let Ok((rivals, work)) =
            evaluate_strategies(&changed, self.inputs.remote, robust, Effort::Full, meter)
        else {
            return Err(WorkLimitReached);
        };
        self.work += work;
        if meter.ends() {
            return Err(WorkLimitReached);
        }
        let best = cheapest_strategy(&rivals).map(|(strategy, _)| strategy);
        best.filter(|strategy| strategy.has_remote_experts() != self.pays).ok_or(WorkLimitReached)
    }

    /// Returns the cheapest strategy for `changed`. Of plans with remote experts few are searched.
    fn cheapest(&mut self, cause: FlipFigure, factor: f64, changed: &Problem) -> Option<ServingStrategy> {
        if self.inputs.model.ends() {
            return None;
        }
        changed.check().ok()?;
        let model = self.inputs.model.beside(changed).with_used(Rc::clone(self.inputs.model.used()));
        if device_too_small(&model).is_some() {
            return None;
        }
        let own_unsplit = cause.changes_experts().then(|| AllLocalTimes::new(&model));
        let all_local = own_unsplit.as_ref().unwrap_or(self.all_local);
        let without_remote = cheapest_strategy(&evaluate_rivals(
            &model,
            &WithoutRemote::new(&model, all_local),
            &BestPlans::none(),
        ));
        let cutoff = without_remote.map_or(f64::INFINITY, |(_, cost)| cost);
        // A lower bound of plans with remote experts may make the search unnecessary.
        let found = match self.pays || cutoff > self.cost_floor(cause, factor) {
            true => self.find_below(cause, &model, cutoff),
            false => None,
        };
        self.count_work(&model);
        found.map(ArrangementFamily::strategy).or(without_remote.map(|(strategy, _)| strategy))
    }

    /// Counts the work of `model`, and of compiling its problem.
    fn count_work(&mut self, model: &Model<'_>) {
        self.work += model.work_done() + model.experts();
    }

    /// Returns the assumed least dollars of plans with remote experts with the figure `factor` times as large.
    fn cost_floor(&mut self, cause: FlipFigure, factor: f64) -> f64 {
        match (cause, factor > 1.0) {
            // More requests never lower the cost of an hour.
            (FlipFigure::ArrivalRate, true) => self.least / factor,
            (FlipFigure::ArrivalRate, false) => {
                self.least_cost_at_end(cause) * (-f64::from(DOUBLINGS)).exp2() / factor
            }
            // These changes make plans more expensive or infeasible.
            (FlipFigure::Tpot, false) | (FlipFigure::ModelSize | FlipFigure::GpuPrice, true) => self.least,
            // Plans are cheapest at the largest change. The GPU price is only a part of their cost.
            (FlipFigure::Tpot, true) | (FlipFigure::ModelSize, false) => self.least_cost_at_end(cause),
            (FlipFigure::GpuPrice, false) => self.least_cost_at_end(cause).max(self.least * factor),
        }
    }

    /// Returns the assumed least dollars of plans with remote experts after the largest change of `cause` that lowers cost.
    fn least_cost_at_end(&mut self, cause: FlipFigure) -> f64 {
        if let Some((_, known)) = self.end_costs.iter().find(|(known, _)| *known == cause) {
            return *known;
        }
        let power = f64::from(DOUBLINGS);
        let factor = if cause == FlipFigure::Tpot { power.exp2() } else { (-power).exp2() };
        let found = cause.apply(self.inputs.model.problem, factor).filter(|changed| changed.check().is_ok());
        let least = found.map_or(0.0, |changed| {
            let model = self.inputs.model.beside(&changed).with_used(Rc::clone(self.inputs.model.used()));
            let found = self.search(cause, &model, f64::INFINITY);
            self.count_work(&model);
            found.map_or(f64::INFINITY, |(_, planned)| planned.cost() * COARSE_SHARE)
        });
        self.end_costs.push((cause, least));
        least
    }

    /// Finds a plan with remote experts that costs less than `cutoff`, and returns its family.
    fn find_below(&mut self, cause: FlipFigure, model: &Model<'_>, cutoff: f64) -> Option<ArrangementFamily> {
        let factors = self.inputs.factors;
        let violations =
            |plan: &Plan, evaluation: &Evaluation| violations_of(model, factors, plan, evaluation);
        let inputs = SearchInputs { model, violations: &violations, ..*self.inputs };
        let mut carried = self.carried.iter();
        let known = carried
            .find(|(_, planned)| inputs.carry_over(planned).is_some_and(|planned| planned.cost() < cutoff))
            .map(|(family, _)| *family);
        known.or_else(|| {
            let (family, planned) = self.search(cause, model, cutoff)?;
            self.carried.insert(0, (family, planned));
            self.carried.truncate(MAX_CARRIED);
            Some(family)
        })
    }

    /// Runs a coarse search for the cheapest plan with remote experts below `cutoff`.
    fn search(
        &self,
        cause: FlipFigure,
        model: &Model<'_>,
        cutoff: f64,
    ) -> Option<(ArrangementFamily, CandidatePlan)> {
        let changes_experts = cause.changes_experts();
        let factors = self.inputs.factors;
        let violations =
            |plan: &Plan, evaluation: &Evaluation| violations_of(model, factors, plan, evaluation);
        let own_expert_times = OnceCell::new();
        let expert_times: &OnceCell<Option<Vec<LayerExpertTimes>>> =
            if changes_experts { &own_expert_times } else { self.inputs.expert_times };
        let own_tables: Option<Vec<LayerTable>> = changes_experts.then(|| {
            model.add_work(model.experts());
            (0..model.layers.len()).map(|layer| LayerTable::new(model, layer)).collect()
        });
        let tables = own_tables.as_deref().unwrap_or(self.inputs.tables);
        let inputs = SearchInputs { model, tables, expert_times, violations: &violations, ..*self.inputs };
        let in_layers = if inputs.may_prefer_per_layer() {
            model.add_work(model.most_experts() * model.layers.len());
            candidates(model, inputs.remote, &walk(model))
        } else {
            Vec::new()
        };
        SearchInputs { candidates: &in_layers, ..inputs }.search_below(cutoff, &self.choices)
    }
}

impl ArrangementFamily {
    fn strategy(self) -> ServingStrategy {
        match self {
            Self::Sliced => ServingStrategy::Sliced,
            Self::PerLayer => ServingStrategy::Layers,
        }
    }
}

impl FlipFigure {
    /// Returns `problem` with the figure `factor` times as large, or `None` without that figure.
    fn apply(self, problem: &Problem, factor: f64) -> Option<Problem> {
        let mut changed = problem.clone();
        match self {
            Self::ArrivalRate => {
                let arrivals = changed.arrivals.as_mut()?;
                arrivals.per_second *= factor;
                if let Some(times) = &mut arrivals.recorded_seconds {
                    times.iter_mut().for_each(|time| *time /= factor);
                }
            }
            Self::GpuPrice if problem.device == Device::Cpu && !problem.pricing.has_gpu() => return None,
            Self::GpuPrice => {
                let pricing = &mut changed.pricing;
                let prices = [&mut pricing.gpu_per_gb_second, &mut pricing.gpu_per_second_each];
                prices.into_iter().flatten().for_each(|price| *price *= factor);
                if !problem.pricing.has_gpu() {
                    return None;
                }
            }
            Self::ModelSize => {
                for layer in &mut changed.layers {
                    layer.expert_bytes *= factor;
                    scale(&mut layer.expert_seconds, factor);
                    layer.remote_expert_seconds.iter_mut().for_each(|profile| scale(profile, factor));
                    let on_gpu = layer.gpu_expert_seconds.iter_mut();
                    on_gpu.flat_map(|profile| &mut profile.seconds).for_each(|seconds| *seconds *= factor);
                }
            }
            Self::Tpot if problem.request.output_tokens == 0.0 => return None,
            Self::Tpot => changed.slo.tpot_seconds *= factor,
        }
        Some(changed)
    }

    /// Reports if the figure changes the times of experts, so that cached times do not hold.
    fn changes_experts(self) -> bool {
        self == Self::ModelSize
    }

    /// Returns the name of the figure.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::ArrivalRate => "request rate",
            Self::GpuPrice => "GPU price",
            Self::ModelSize => "expert size",
            Self::Tpot => "TPOT limit",
        }
    }

    /// Returns the changed value and a description of the change.
    fn describe(self, problem: &Problem, factor: f64) -> (f64, String) {
        match self {
            Self::ArrivalRate => {
                let rate = problem.arrivals.as_ref().map_or(0.0, remoe_plan::alive::mean_per_second) * factor;
                let hourly = rounded_up(rate * 3600.0);
                (rate * 3600.0, format!("{hourly} requests per hour"))
            }
            Self::GpuPrice => (factor, format!("a GPU that costs {factor:.2} times as much")),
            Self::ModelSize => (factor, format!("experts that are {factor:.2} times as large")),
            Self::Tpot => {
                let at = problem.slo.tpot_seconds * factor;
                (at, format!("a TPOT limit of {}", seconds(at)))
            }
        }
    }
}

fn scale(profile: &mut CpuProfile, factor: f64) {
    profile.seconds.iter_mut().flatten().for_each(|seconds| *seconds *= factor);
}
