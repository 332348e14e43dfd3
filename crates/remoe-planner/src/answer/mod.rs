//! Planning: the search with its modes, robustness and hysteresis.

pub(crate) mod explain;
pub(crate) mod hysteresis;
mod near_previous;
pub(crate) mod preallocated;
mod sleeping_groups;

use crate::answer::explain::{Explanation, explain};
use crate::answer::hysteresis::{
    HysteresisPolicy, PlanChange, PreviousPlan, compare_with_previous, with_group_positions,
};
use crate::best_plans::{Effort, SearchInputs};
use crate::best_plans::{candidates, violations_of};
use crate::comparison::{ComparisonFlips, PlacementComparison, evaluate_rivals};
use crate::flip_search::FlipSearch;
use crate::infeasible::remedy::sufficient;
use crate::infeasible::{Infeasible, device_too_small, on_prediction, worst_case};
use crate::plan_error::PlanError;
use crate::preallocation::{WalkStep, walk};
use crate::remote::Remote;
use crate::search::Counters;
use crate::search::selection::{Candidate, by_ratio};
use crate::search::tables::LayerTable;
use crate::slicing::{CandidatePlan, SensitivityAnalysis};
use crate::strategies::{check_cancelled, evaluate_strategies, factors, tables};
use remoe_plan::budget::{Budget, Meter};
use remoe_plan::cost::baselines::{AllLocalTimes, Baselines, WithoutRemote};
use remoe_plan::cost::stress::all_violations;
use remoe_plan::cost::{Evaluation, Violation};
use remoe_plan::model::Model;
use remoe_plan::plan::{Plan, PlanDraft, whole_bytes};
use remoe_plan::problem::Problem;
use serde::Serialize;
use std::cell::OnceCell;
use std::rc::Rc;

/// Number of recorded requests from which a simulation takes tens of milliseconds.
const LONG_RECORD: usize = 10_000;
/// Largest number of experts, over all layers, for which [`compare`] searches in full.
const MAX_FULLY_COMPARED_EXPERTS: usize = 1000;

/// Options of a search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Options {
    /// Policy on remote experts.
    pub remote: Remote,
    /// Set if the limits must also hold if predictions err as far as they do in 5 % of the cases.
    pub robust: bool,
    /// Share of the cost that a new plan must save to replace the previous one.
    pub hysteresis: f64,
    /// Seconds for which a new plan is expected to be used. Within this time it must save more than the change costs.
    pub stands_seconds: f64,
    /// Share of the cost by which a plan may be more expensive to keep its limits if an input is misestimated. 0: the cheapest plan.
    pub sturdy: f64,
    /// Set if the result includes changes that would change whether remote experts pay: a search for each figure.
    pub flips: bool,
}

impl Options {
    fn hysteresis_policy(&self) -> HysteresisPolicy {
        HysteresisPolicy { hysteresis: self.hysteresis, stands_seconds: self.stands_seconds }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            remote: Remote::Auto,
            robust: false,
            hysteresis: 0.05,
            stands_seconds: 3600.0,
            sturdy: 0.0,
            flips: false,
        }
    }
}

/// Result of a search: the plan, its evaluation, its alternatives and its explanation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlanningResult {
    /// The plan.
    pub plan: Plan,
    /// Times and cost of the plan.
    pub evaluation: Evaluation,
    /// Costs without remote experts.
    pub baselines: Baselines,
    /// Worst case of every remote ratio.
    pub walk: Vec<WalkStep>,
    /// Explanation of the choice.
    pub explanation: Explanation,
    /// Comparison of all strategies, and whether remote experts pay.
    pub verdict: PlacementComparison,
    /// Effect of misestimated inputs on the plan, if [`Options::sturdy`] is above 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sturdiness: Option<SensitivityAnalysis>,
    /// Differences from the previous plan, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<PlanChange>,
    /// Counters of the search.
    pub search: Counters,
    /// Set if the plan is the result of a search near the previous one ([`replan`]).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub incremental: bool,
    /// Lower bound in dollars of the cost of every plan of the searched family; only for incremental plans.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_bound: Option<f64>,
    /// False if the budget ended the search.
    pub complete: bool,
}

/// Size of the main function before the use of experts is predicted.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Preallocation {
    /// Worst case of every remote ratio, the largest first.
    pub walk: Vec<WalkStep>,
    /// Memory of the main function in bytes.
    #[serde(serialize_with = "whole_bytes")]
    pub main_bytes: f64,
    /// Remote ratio times the experts of the largest layer.
    pub i: usize,
}

/// Chooses the memory that the main function starts with, without a prediction (main-model pre-allocation, MMP; Remoe
/// paper, Algorithm 2).
///
/// # Errors
/// An invalid problem, or one where no remote ratio keeps the limits in the worst case.
pub fn preallocate(problem: &Problem) -> Result<Preallocation, PlanError> {
    problem.check().map_err(PlanError::Problem)?;
    let model = Model::new(problem);
    if let Some(infeasible) = device_too_small(&model) {
        return Err(PlanError::Infeasible(Box::new(infeasible)));
    }
    let walk = walk(&model);
    let first =
        walk.iter().find_map(|step| step.main_bytes.filter(|_| step.fits).map(|bytes| (bytes, step.i)));
    match first {
        Some((main_bytes, i)) => Ok(Preallocation { walk, main_bytes, i }),
        None => {
            let why = worst_case(&model, &by_ratio(&model)).unwrap_or_else(|| Infeasible::unknown(&model));
            Err(PlanError::Infeasible(Box::new(why)))
        }
    }
}

/// Evaluates a plan: times, cost and broken limits.
///
/// # Errors
/// An invalid problem, or a plan that does not belong to it.
pub fn evaluate(problem: &Problem, plan: &PlanDraft, robust: bool) -> Result<Evaluation, PlanError> {
    problem.check().map_err(PlanError::Problem)?;
    let model = Model::with_prediction(problem).map_err(PlanError::Problem)?;
    let factors = robust.then(|| factors(problem)).transpose().map_err(PlanError::Problem)?;
    let plan = model.plan(plan).map_err(PlanError::Plan)?;
    let mut evaluation = model.evaluate_fully(&plan);
    if let Some(factors) = factors {
        evaluation.violations = all_violations(&model, factors, &plan, &evaluation);
    }
    Ok(evaluation)
}

/// Searches the cheapest plan that keeps every limit. The previous plan is kept if the new one saves too little.
///
/// # Errors
/// An invalid problem, a previous plan that does not belong to it, or no feasible plan.
pub fn solve(
    problem: &Problem,
    previous: Option<&PlanDraft>,
    options: &Options,
) -> Result<PlanningResult, PlanError> {
    solve_within(problem, previous, options, Budget::UNLIMITED)
}

/// Searches as [`solve`] within `budget`.
///
/// If the budget asks it to finish, the search returns the best feasible plan so far, which may be `previous`, with the
/// baselines and a comparison of what is known. If no feasible plan is known yet, it continues until the first one.
///
/// # Errors
/// As [`solve`], and [`PlanError::Cancelled`].
pub fn solve_within(
    problem: &Problem,
    previous: Option<&PlanDraft>,
    options: &Options,
    budget: Budget<'_>,
) -> Result<PlanningResult, PlanError> {
    check(problem, options)?;
    full(problem, previous, options, &Rc::new(Meter::new(budget)))
}

/// Searches a plan near `previous` for changed shares, within `budget`: in milliseconds, where [`solve`] takes seconds.
///
/// Reassigns the experts of `previous` by the new shares, then improves remote counts, sizes and numbers of groups. The
/// plan keeps every limit. It costs no more than `previous`, if `previous` is feasible. Hysteresis and the cost of the
/// change are those of [`solve`]. If no plan near `previous` is feasible, the result is that of [`solve_within`].
///
/// [`PlanningResult::walk`] and [`PlacementComparison::flips`] are empty.
///
/// # Errors
/// As [`solve_within`].
pub fn replan(
    problem: &Problem,
    previous: &PlanDraft,
    options: &Options,
    budget: Budget<'_>,
) -> Result<PlanningResult, PlanError> {
    check(problem, options)?;
    let meter = Rc::new(Meter::new(budget));
    match attempt(problem, Some(previous), options, Scope::Near, &meter) {
        Err(PlanError::Infeasible(_)) => full(problem, Some(previous), options, &meter),
        answer => answer,
    }
}

/// Checks `problem`, and that it can have the remote experts that `options` demand.
fn check(problem: &Problem, options: &Options) -> Result<(), PlanError> {
    problem.check().map_err(PlanError::Problem)?;
    if options.remote == Remote::Always {
        problem.check_remote_capacity().map_err(PlanError::Problem)?;
    }
    Ok(())
}

/// Runs the full search of a checked problem.
fn full<'p>(
    problem: &'p Problem,
    previous: Option<&PlanDraft>,
    options: &Options,
    meter: &Rc<Meter<'p>>,
) -> Result<PlanningResult, PlanError> {
    meter.limit_at(usize::MAX);
    match attempt(problem, previous, options, Scope::All, meter) {
        Err(PlanError::Infeasible(mut why)) => {
            let simple = Options { sturdy: 0.0, flips: false, ..*options };
            // There is no plan to wait for: from here on the budget may end the search at once.
            meter.found_plan();
            sufficient(problem, &mut why, |raised| {
                match attempt(raised, None, &simple, Scope::All, &meter.clone()) {
                    Err(PlanError::Infeasible(why)) if !meter.ends() => Some(why.remedy),
                    _ => None,
                }
            });
            if meter.is_cancelled() { Err(PlanError::Cancelled) } else { Err(PlanError::Infeasible(why)) }
        }
        answer => answer,
    }
}

/// Part of all plans that is searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    All,
    /// Plans near the previous one.
    Near,
}

/// Runs one search of a checked problem.
fn attempt<'p>(
    problem: &'p Problem,
    previous: Option<&PlanDraft>,
    options: &Options,
    scope: Scope,
    meter: &Rc<Meter<'p>>,
) -> Result<PlanningResult, PlanError> {
    let model = Model::with_prediction(problem).map_err(PlanError::Problem)?.metered(meter);
    let factors = options.robust.then(|| factors(problem)).transpose().map_err(PlanError::Problem)?;
    let previous = previous.map(|draft| model.plan(draft)).transpose().map_err(PlanError::Plan)?;
    if let Some(infeasible) = device_too_small(&model) {
        return Err(PlanError::Infeasible(Box::new(infeasible)));
    }
    let is_near = scope == Scope::Near;
    let walk = if is_near { Vec::new() } else { walk(&model) };
    let tables = tables(&model)?;
    let candidates = if is_near { Vec::new() } else { candidates(&model, options.remote, &walk) };
    let violations = |plan: &Plan, evaluation: &Evaluation| violations_of(&model, factors, plan, evaluation);
    let (expert_times, own_sets) = (OnceCell::new(), OnceCell::new());
    let inputs = SearchInputs {
        model: &model,
        tables: &tables,
        expert_times: &expert_times,
        own_sets: &own_sets,
        factors,
        violations: &violations,
        remote: options.remote,
        candidates: &candidates,
    };
    // Computed first, so that a search that the budget ends early has them.
    let all_local = AllLocalTimes::new(&model);
    let without_remote = WithoutRemote::new(&model, &all_local);
    let kept = previous.map(|previous| PreviousPlan::new(&model, previous, options.remote, &violations));
    if kept.as_ref().is_some_and(|kept| kept.is_feasible) {
        meter.found_plan();
    }
    let mut plans = match kept.as_ref().filter(|_| is_near) {
        Some(kept) => inputs.best_near(kept),
        None => inputs.plans(Effort::Full),
    };
    check_cancelled(&model)?;
    let rivals = evaluate_rivals(&model, &without_remote, &plans);
    let mut counters = plans.counters;
    counters.work = model.work_done();
    let find_flips = |pays: bool| {
        let (flips, work) = FlipSearch::new(&inputs, &all_local, &plans, pays).run();
        counters.work += work;
        flips
    };
    let verdict = PlacementComparison::new(rivals, (options.flips && !is_near).then_some(find_flips));
    let mut best = plans.best().cloned();
    let mut sturdiness = None;
    check_cancelled(&model)?;
    if let Some(planned) = best.as_mut().filter(|_| options.sturdy > 0.0) {
        let before = model.work_done();
        let (least_sensitive, analysis) = inputs.least_sensitive(planned, &plans, options.sturdy);
        counters.work += model.work_done() - before;
        *planned = least_sensitive;
        sturdiness = analysis;
    }
    check_cancelled(&model)?;
    if let (Some(best), Some(kept)) = (&mut best, &kept) {
        keep_group_positions(&model, best, &kept.plan, &violations);
    }
    let change = kept
        .as_ref()
        .map(|kept| compare_with_previous(&model, kept, best.as_ref(), options.hysteresis_policy()));
    let is_kept = change.as_ref().is_some_and(|change| change.kept);
    let baselines = without_remote.baselines;
    let (plan, evaluation, explanation) = match (best, kept) {
        (best, Some(PreviousPlan { plan, evaluation, .. })) if is_kept => {
            let explanation = Explanation::of_kept(&evaluation, &baselines, best.as_ref());
            (plan, evaluation, explanation)
        }
        (Some(best), _) => {
            let found = plans.found.take().filter(|found| found.plan == best.plan && !model.ends());
            match (found, &plans.search) {
                (Some(found), Some(search)) => {
                    let (best, explanation) = explain(search, found, &candidates, &baselines);
                    (best.plan, best.evaluation, explanation)
                }
                _ => {
                    let explanation = Explanation::of_groups(&best, &baselines, plans.per_layer.as_ref());
                    (best.plan, best.evaluation, explanation)
                }
            }
        }
        (None, _) => {
            let mut why = explain_infeasible(&model, &tables, &candidates, options.remote, violations);
            why.verdict = Some(verdict);
            return Err(PlanError::Infeasible(Box::new(why)));
        }
    };
    check_cancelled(&model)?;
    let complete = !meter.is_cut();
    meter.conclude();
    let evaluation = final_evaluation(&model, &plan, evaluation);
    let cost = evaluation.total_cost;
    Ok(PlanningResult {
        plan,
        evaluation,
        baselines,
        walk,
        explanation,
        verdict,
        sturdiness,
        change,
        search: counters,
        incremental: is_near,
        cost_bound: plans.bound.map(|bound| bound.min(cost)),
        complete,
    })
}

/// Compares all strategies to serve the model, also if no plan keeps the limits.
///
/// Up to a thousand experts in all, the result is that of [`solve`]. Beyond, plans with remote experts come from a coarse
/// search, which takes a hundredth of the work and never finds cheaper ones.
///
/// # Errors
/// An invalid problem, or a GPU that does not hold the non-expert part.
pub fn compare(problem: &Problem) -> Result<PlacementComparison, PlanError> {
    compare_within(problem, Budget::UNLIMITED)
}

/// Compares as [`compare`] within `budget`. If the budget ends the search, plans with remote experts are the best so far.
///
/// # Errors
/// As [`compare`], and [`PlanError::Cancelled`].
pub fn compare_within(problem: &Problem, budget: Budget<'_>) -> Result<PlacementComparison, PlanError> {
    let experts: usize = problem.layers.iter().map(|layer| layer.experts as usize).sum();
    let effort = if experts > MAX_FULLY_COMPARED_EXPERTS { Effort::Coarse } else { Effort::Full };
    let (rivals, _) =
        evaluate_strategies(problem, Remote::Auto, false, effort, &Rc::new(Meter::new(budget)))?;
    Ok(PlacementComparison::new(rivals, None::<fn(bool) -> ComparisonFlips>))
}

/// Gives groups of `best` that are also in `previous` the positions that they have there.
fn keep_group_positions(
    model: &Model<'_>,
    best: &mut CandidatePlan,
    previous: &Plan,
    violations: &dyn Fn(&Plan, &Evaluation) -> Vec<Violation>,
) {
    let plan = with_group_positions(&best.plan, previous);
    if plan == best.plan {
        return;
    }
    // Sums in another order may differ in their last bits, and so may broken limits.
    let evaluation = model.evaluate(&plan);
    if violations(&plan, &evaluation).is_empty() {
        (best.plan, best.evaluation) = (plan, evaluation);
    }
}

/// Evaluates the plan of a result with simulated latencies. `searched`: its evaluation during the search.
fn final_evaluation(model: &Model<'_>, plan: &Plan, searched: Evaluation) -> Evaluation {
    let Some(arrivals) = &model.problem.arrivals else { return searched };
    // If the budget asks to finish, a long record is not simulated again.
    let is_long = arrivals.recorded_seconds.as_ref().is_some_and(|times| times.len() > LONG_RECORD);
    if is_long && model.meter.is_finishing() { searched } else { model.evaluate_fully(plan) }
}

/// Explains why no plan keeps the limits.
fn explain_infeasible(
    model: &Model<'_>,
    tables: &[LayerTable],
    candidates: &[Candidate],
    remote: Remote,
    violations: impl Fn(&Plan, &Evaluation) -> Vec<Violation>,
) -> Infeasible {
    let mut ratios = by_ratio(model);
    ratios.retain(|candidate| remote.allows(model, &candidate.counts));
    // The worst case matters only with remote experts.
    let in_worst_case = (remote != Remote::Never).then(|| worst_case(model, &ratios)).flatten();
    let why = in_worst_case.or_else(|| on_prediction(model, tables, candidates, violations));
    why.unwrap_or_else(|| Infeasible::unknown(model))
}
