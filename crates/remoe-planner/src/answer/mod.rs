//! The choice: modes, robustness and hysteresis around the search.

mod asleep;
pub(crate) mod explain;
pub(crate) mod hysteresis;
mod near;
pub(crate) mod preallocated;

use crate::answer::explain::{Explanation, explain};
use crate::answer::hysteresis::{Inertia, PlanChange, PreviousPlan, aligned, decide};
use crate::flip_search::FlipSearch;
use crate::infeasible::remedy::sufficient;
use crate::infeasible::{Infeasible, device_too_small, on_prediction, worst_case};
use crate::plan_error::PlanError;
use crate::plans::{Effort, Inputs};
use crate::plans::{candidates, violations_of};
use crate::preallocation::{WalkStep, walk};
use crate::remote::Remote;
use crate::search::Counters;
use crate::search::selection::{Candidate, by_ratio};
use crate::search::tables::LayerTable;
use crate::slicing::{FeasiblePlan, Sturdiness};
use crate::verdict::{Verdict, VerdictFlips, rivals};
use crate::ways::{factors, go_on, tables, ways};
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

/// Recorded requests beyond which a simulation of them takes tens of milliseconds.
const LONG_RECORD: usize = 10_000;
/// Beyond so many experts in all, [`compare`] searches coarsely.
const MOST_COMPARED: usize = 1000;

/// How to plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Options {
    /// Policy on remote experts.
    pub remote: Remote,
    /// Set if the limits must also hold when predictions err as far as they do in 5 % of the cases.
    pub robust: bool,
    /// By which share a new plan must be cheaper than a previous one to replace it.
    pub hysteresis: f64,
    /// Seconds that a new plan is expected to stand: what it saves by then must be more than what it costs to load
    /// what its functions do not have.
    pub stands_seconds: f64,
    /// By which share of the cost a plan may be dearer to keep limits when figures are wrong; 0: the
    /// cheapest for the figures as they are.
    pub sturdy: f64,
    /// Set if the verdict says what would turn it: a search for every figure that might.
    pub turns: bool,
}

impl Options {
    fn inertia(&self) -> Inertia {
        Inertia { hysteresis: self.hysteresis, stands_seconds: self.stands_seconds }
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
            turns: false,
        }
    }
}

/// A plan, what it is expected to cost, what else it could have been, and why it is this one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlanningResult {
    /// The plan.
    pub plan: Plan,
    /// Times and cost of the plan.
    pub evaluation: Evaluation,
    /// Costs of the request without remote experts.
    pub baselines: Baselines,
    /// Every remote ratio in the worst case.
    pub walk: Vec<WalkStep>,
    /// Why it is this plan.
    pub explanation: Explanation,
    /// Verdict on remote experts, beside every rival.
    pub verdict: Verdict,
    /// Effect of wrong figures on the plan, where that was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sturdiness: Option<Sturdiness>,
    /// Differences from the previous plan, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<PlanChange>,
    /// How much was searched.
    pub search: Counters,
    /// Set if the plan is the previous one or near it ([`replan`]), not the result of a full search.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub incremental: bool,
    /// Dollars that no plan of the searched family costs less than; known of an incremental plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_bound: Option<f64>,
    /// False if the budget ended the search.
    pub complete: bool,
}

/// How the main function starts before anything is known about the request's experts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Preallocation {
    /// Every remote ratio, the largest first.
    pub walk: Vec<WalkStep>,
    /// Memory of the main function.
    #[serde(serialize_with = "whole_bytes")]
    pub main_bytes: f64,
    /// The remote ratio times the experts of the largest layer.
    pub i: usize,
}

/// How much memory the main function starts with, without a prediction (MMP; Remoe paper,
/// Algorithm 2).
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

/// The evaluation of a plan: times, cost and the limits that it does not keep.
///
/// # Errors
/// An invalid problem, or a plan that is not one for it.
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

/// The cheapest plan that keeps every limit, or the previous one where that is close enough.
///
/// # Errors
/// An invalid problem, a previous plan that is not one for it, or no plan at all.
pub fn solve(
    problem: &Problem,
    previous: Option<&PlanDraft>,
    options: &Options,
) -> Result<PlanningResult, PlanError> {
    solve_within(problem, previous, options, Budget::UNLIMITED)
}

/// [`solve`] within `budget`.
///
/// A search that is told to finish returns the best plan so far that keeps every limit, which may be `previous`, with
/// its evaluation, the baselines and a verdict on what is known. If none is known yet, it goes on until the first one.
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

/// A plan near `previous` for shares that have changed, within `budget`: milliseconds where [`solve`] takes seconds.
///
/// The arrangement of `previous` is dealt again by the new shares. Then numbers of remote experts, sizes and numbers of
/// groups are improved. The plan keeps every limit, and where `previous` does, it costs no more. Hysteresis and toll
/// are those of [`solve`]. If no plan near `previous` keeps the limits, the answer is that of [`solve_within`].
///
/// [`PlanningResult::walk`] is empty, and the verdict does not say what turns it.
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

/// Refuses a problem that is invalid, or that has no room for what `options` ask for.
fn check(problem: &Problem, options: &Options) -> Result<(), PlanError> {
    problem.check().map_err(PlanError::Problem)?;
    if options.remote == Remote::Always {
        problem.check_room().map_err(PlanError::Problem)?;
    }
    Ok(())
}

/// The full search of a checked problem.
fn full<'p>(
    problem: &'p Problem,
    previous: Option<&PlanDraft>,
    options: &Options,
    meter: &Rc<Meter<'p>>,
) -> Result<PlanningResult, PlanError> {
    meter.limit_at(usize::MAX);
    match attempt(problem, previous, options, Scope::All, meter) {
        Err(PlanError::Infeasible(mut why)) => {
            let simple = Options { sturdy: 0.0, turns: false, ..*options };
            // From here on a search that is to finish has nothing to find.
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

/// Where plans are searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    All,
    /// Near the previous plan.
    Near,
}

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
    let (terms, own_sets) = (OnceCell::new(), OnceCell::new());
    let inputs = Inputs {
        model: &model,
        tables: &tables,
        terms: &terms,
        own_sets: &own_sets,
        factors,
        violations: &violations,
        remote: options.remote,
        candidates: &candidates,
    };
    // These are known in any case, so that a search that is told to finish has them.
    let unsplit = AllLocalTimes::new(&model);
    let without = WithoutRemote::new(&model, &unsplit);
    let kept = previous.map(|previous| PreviousPlan::new(&model, previous, options.remote, &violations));
    if kept.as_ref().is_some_and(|kept| kept.stands) {
        meter.found_plan();
    }
    let mut plans = match kept.as_ref().filter(|_| is_near) {
        Some(kept) => inputs.near(kept),
        None => inputs.plans(Effort::Full),
    };
    go_on(&model)?;
    let rivals = rivals(&model, &without, &plans);
    let mut counters = plans.counters;
    counters.work = model.work_done();
    let turns = |pays: bool| {
        let (turns, work) = FlipSearch::new(&inputs, &unsplit, &plans, pays).turns();
        counters.work += work;
        turns
    };
    let verdict = Verdict::new(rivals, (options.turns && !is_near).then_some(turns));
    let mut best = plans.best().cloned();
    let mut sturdiness = None;
    go_on(&model)?;
    if let Some(planned) = best.as_mut().filter(|_| options.sturdy > 0.0) {
        let before = model.work_done();
        let (sturdier, figures) = inputs.sturdier(planned, &plans, options.sturdy);
        counters.work += model.work_done() - before;
        *planned = sturdier;
        sturdiness = figures;
    }
    go_on(&model)?;
    if let (Some(best), Some(kept)) = (&mut best, &kept) {
        keep_places(&model, best, &kept.plan, &violations);
    }
    let change = kept.as_ref().map(|kept| decide(&model, kept, best.as_ref(), options.inertia()));
    let keeps = change.as_ref().is_some_and(|change| change.kept);
    let baselines = without.baselines;
    let (plan, evaluation, explanation) = match (best, kept) {
        (best, Some(PreviousPlan { plan, evaluation, .. })) if keeps => {
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
            let mut why = no_plan(&model, &tables, &candidates, options.remote, violations);
            why.verdict = Some(verdict);
            return Err(PlanError::Infeasible(Box::new(why)));
        }
    };
    go_on(&model)?;
    let complete = !meter.is_cut();
    meter.conclude();
    let evaluation = concluded(&model, &plan, evaluation);
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

/// Every way to serve the model beside the others, whether or not any plan keeps the limits.
///
/// Up to a thousand experts in all this is the verdict of [`solve`]. Beyond, plans with remote experts come from a
/// coarse search, which is a hundredth of the work and never finds cheaper ones; the other ways are those of
/// [`solve`] for any model.
///
/// # Errors
/// An invalid problem, or a device that does not hold what is no expert.
pub fn compare(problem: &Problem) -> Result<Verdict, PlanError> {
    compare_within(problem, Budget::UNLIMITED)
}

/// [`compare`] within `budget`. If that ends the search, plans with remote experts are the cheapest so far.
///
/// # Errors
/// As [`compare`], and [`PlanError::Cancelled`].
pub fn compare_within(problem: &Problem, budget: Budget<'_>) -> Result<Verdict, PlanError> {
    let experts: usize = problem.layers.iter().map(|layer| layer.experts as usize).sum();
    let effort = if experts > MOST_COMPARED { Effort::Coarse } else { Effort::Full };
    let (rivals, _) = ways(problem, Remote::Auto, false, effort, &Rc::new(Meter::new(budget)))?;
    Ok(Verdict::new(rivals, None::<fn(bool) -> VerdictFlips>))
}

/// Gives the groups of `best` that are those of `previous` the places that they have there.
fn keep_places(
    model: &Model<'_>,
    best: &mut FeasiblePlan,
    previous: &Plan,
    violations: &dyn Fn(&Plan, &Evaluation) -> Vec<Violation>,
) {
    let plan = aligned(&best.plan, previous);
    if plan == best.plan {
        return;
    }
    // Sums in another order may differ in their last bits.
    let evaluation = model.evaluate(&plan);
    if violations(&plan, &evaluation).is_empty() {
        (best.plan, best.evaluation) = (plan, evaluation);
    }
}

/// The evaluation of the plan of an answer, which the search has seen as `known`.
fn concluded(model: &Model<'_>, plan: &Plan, known: Evaluation) -> Evaluation {
    let Some(arrivals) = &model.problem.arrivals else { return known };
    // A search that was told to finish does not wait for a long record.
    let is_long = arrivals.recorded_seconds.as_ref().is_some_and(|times| times.len() > LONG_RECORD);
    if is_long && model.meter.is_finishing() { known } else { model.evaluate_fully(plan) }
}

fn no_plan(
    model: &Model<'_>,
    tables: &[LayerTable],
    candidates: &[Candidate],
    remote: Remote,
    violations: impl Fn(&Plan, &Evaluation) -> Vec<Violation>,
) -> Infeasible {
    let mut ratios = by_ratio(model);
    ratios.retain(|candidate| remote.allows(model, &candidate.counts));
    // Without remote experts the worst case is not asked for.
    let in_the_worst_case = (remote != Remote::Never).then(|| worst_case(model, &ratios)).flatten();
    let why = in_the_worst_case.or_else(|| on_prediction(model, tables, candidates, violations));
    why.unwrap_or_else(|| Infeasible::unknown(model))
}
