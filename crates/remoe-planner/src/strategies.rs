//! Evaluation of all strategies to serve a model, each at its cheapest.

use crate::best_plans::{Effort, SearchInputs, candidates, violations_of};
use crate::comparison::{StrategyEvaluation, evaluate_rivals};
use crate::infeasible::device_too_small;
use crate::plan_error::PlanError;
use crate::preallocation::walk;
use crate::remote::Remote;
use crate::search::tables::LayerTable;
use remoe_plan::budget::Meter;
use remoe_plan::cost::Evaluation;
use remoe_plan::cost::baselines::{AllLocalTimes, WithoutRemote};
use remoe_plan::error::FieldError;
use remoe_plan::model::Model;
use remoe_plan::plan::Plan;
use remoe_plan::problem::{ErrorFactor, Problem};
use std::cell::OnceCell;
use std::rc::Rc;

/// Evaluates all strategies for `problem`, each at the cheapest that `effort` finds. Returns them with the work done.
pub(crate) fn evaluate_strategies<'p>(
    problem: &'p Problem,
    remote: Remote,
    robust: bool,
    effort: Effort,
    meter: &Rc<Meter<'p>>,
) -> Result<(Vec<StrategyEvaluation>, usize), PlanError> {
    problem.check().map_err(PlanError::Problem)?;
    let factors = robust.then(|| factors(problem)).transpose().map_err(PlanError::Problem)?;
    let model = Model::with_prediction(problem).map_err(PlanError::Problem)?.metered(meter);
    if let Some(infeasible) = device_too_small(&model) {
        return Err(PlanError::Infeasible(Box::new(infeasible)));
    }
    let tables = tables(&model)?;
    let candidates = candidates(&model, remote, &walk(&model));
    let violations = |plan: &Plan, evaluation: &Evaluation| violations_of(&model, factors, plan, evaluation);
    let (expert_times, own_sets) = (OnceCell::new(), OnceCell::new());
    let inputs = SearchInputs {
        model: &model,
        tables: &tables,
        expert_times: &expert_times,
        own_sets: &own_sets,
        factors,
        violations: &violations,
        remote,
        candidates: &candidates,
    };
    let all_local = AllLocalTimes::new(&model);
    let without_remote = WithoutRemote::new(&model, &all_local);
    let plans = inputs.plans(effort);
    check_cancelled(&model)?;
    Ok((evaluate_rivals(&model, &without_remote, &plans), model.work_done()))
}

/// Fails if the search is cancelled.
pub(crate) fn check_cancelled(model: &Model<'_>) -> Result<(), PlanError> {
    if model.meter.is_cancelled() { Err(PlanError::Cancelled) } else { Ok(()) }
}

/// Computes the tables of all layers.
pub(crate) fn tables(model: &Model<'_>) -> Result<Vec<LayerTable>, PlanError> {
    let mut tables = Vec::with_capacity(model.layers.len());
    for (layer, parts) in model.layers.iter().enumerate() {
        model.meter.count(parts.experts);
        check_cancelled(model)?;
        tables.push(LayerTable::new(model, layer));
    }
    Ok(tables)
}

/// Returns the error factors that the prediction exceeds in 5 % of the cases.
pub(crate) fn factors(problem: &Problem) -> Result<&[ErrorFactor], FieldError> {
    problem.prediction_p95.as_deref().ok_or_else(|| {
        let message = "is missing: robust plans need the predictor's error; add a factor per layer, or a list per layer with one for 0, 1, .. remote experts";
        FieldError::new("prediction_p95", message)
    })
}
