//! Pre-allocation of the main function for predicted requests: its size is bounded before their plan is known.

use crate::answer::explain::Explanation;
use crate::answer::{PlanningResult, concluded};
use crate::infeasible::{Infeasible, device_too_small};
use crate::plan_error::PlanError;
use crate::plans::violations_of;
use crate::plans::{Inputs, Plans};
use crate::preallocation::hoeffding::assignments_bound;
use crate::remote::Remote;
use crate::search::selection::{Candidate, Selection};
use crate::slicing::in_groups;
use crate::verdict::{Verdict, rivals};
use crate::ways::{go_on, tables};
use remoe_plan::budget::{Budget, Meter};
use remoe_plan::cost::Evaluation;
use remoe_plan::cost::baselines::{AllLocalTimes, WithoutRemote};
use remoe_plan::cost::stress::stressed;
use remoe_plan::model::Model;
use remoe_plan::model::sizing::Sizing;
use remoe_plan::plan::{Plan, PlanDraft};
use remoe_plan::problem::{ErrorFactor, Problem};
use std::cell::OnceCell;
use std::rc::Rc;

/// Pre-allocates the main function for the requests that `problem` predicts, before their plan is known (MMP; Remoe
/// paper, Algorithm 2), starting from the plan `previous`.
///
/// Every layer keeps its number of remote experts. They are dealt again by the predicted shares. The main function gets
/// the cheapest size that keeps every limit for the prediction and in the worst case on both sides of it: the remote
/// experts' share is larger or smaller by the error factors of the problem, or by the 95 % bound of Hoeffding's
/// inequality if it has none. A later plan for these requests can keep that size.
///
/// [`PlanningResult::walk`] is empty, and [`PlanningResult::verdict`] knows the other ways only.
///
/// # Errors
/// An invalid problem, a previous plan that is not one for it, or no size that keeps the limits.
pub fn preallocate_for(problem: &Problem, previous: &PlanDraft) -> Result<PlanningResult, PlanError> {
    problem.check().map_err(PlanError::Problem)?;
    let meter = Rc::new(Meter::new(Budget::UNLIMITED));
    let model = Model::with_prediction(problem).map_err(PlanError::Problem)?.metered(&meter);
    let previous = model.plan(previous).map_err(PlanError::Plan)?;
    if let Some(infeasible) = device_too_small(&model) {
        return Err(PlanError::Infeasible(Box::new(infeasible)));
    }
    let tables = tables(&model)?;
    let violations = |plan: &Plan, evaluation: &Evaluation| violations_of(&model, None, plan, evaluation);
    let (terms, own_sets) = (OnceCell::new(), OnceCell::new());
    let inputs = Inputs {
        model: &model,
        tables: &tables,
        terms: &terms,
        own_sets: &own_sets,
        factors: None,
        violations: &violations,
        remote: Remote::Auto,
        candidates: &[],
    };
    let slicing = inputs.new_slicing();
    let grouped = in_groups(&previous);
    let dealt = slicing.dealt_again(&grouped).unwrap_or(grouped);
    let unknown = || PlanError::Infeasible(Box::new(Infeasible::unknown(&model)));
    let sized = sized(&model, problem, &dealt).ok_or_else(unknown)?;
    let counts = sized.remote_counts();
    let i = counts.iter().copied().max().unwrap_or(0);
    let planned = slicing.unjudged(&Candidate { selection: Selection::Mixed, i, counts }, sized);
    let planned = match problem.limits.max_groups {
        Some(_) => planned,
        None => inputs.in_layers(&planned).unwrap_or(planned),
    };
    go_on(&model)?;
    let unsplit = AllLocalTimes::new(&model);
    let without = WithoutRemote::new(&model, &unsplit);
    let verdict = Verdict::new(rivals(&model, &without, &Plans::none()), None::<fn(bool) -> _>);
    let explanation = Explanation::of_groups(&planned, &without.baselines, None);
    let evaluation = concluded(&model, &planned.plan, planned.evaluation);
    Ok(PlanningResult {
        plan: planned.plan,
        evaluation,
        baselines: without.baselines,
        walk: Vec::new(),
        explanation,
        verdict,
        sturdiness: None,
        change: None,
        search: crate::search::Counters { work: model.work_done(), ..Default::default() },
        incremental: true,
        cost_bound: None,
        complete: true,
    })
}

/// Returns `plan` with the main function with which it costs least and keeps every limit in the worst case of the
/// prediction.
fn sized(model: &Model<'_>, problem: &Problem, plan: &Plan) -> Option<Plan> {
    let cases: Vec<Model<'_>> = match bounds(model, problem, plan) {
        Some(bounds) => bounds.iter().map(|factors| stressed(model, factors, plan)).collect(),
        None => Vec::new(),
    };
    let mut options = model.useful_main_options(model.main_needed(&plan.remote_counts()));
    options.sort_by(|a, b| a.vcpus.total_cmp(&b.vcpus).then(a.rate.total_cmp(&b.rate)));
    // Memory beyond what is needed helps by its vCPUs alone.
    options.dedup_by(|next, first| next.vcpus == first.vcpus);
    let with = |sizing: &Sizing| Plan { main_bytes: sizing.bytes, main_vcpus: sizing.stated, ..plan.clone() };
    let keeps = |of: &Model<'_>, plan: &Plan| of.evaluate(plan).violations.is_empty();
    let mut found: Vec<(f64, Plan)> = options
        .iter()
        .map(with)
        .filter_map(|plan| {
            let evaluation = model.evaluate(&plan);
            evaluation.violations.is_empty().then_some((evaluation.total_cost, plan))
        })
        .collect();
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found.into_iter().map(|(_, plan)| plan).find(|plan| cases.iter().all(|case| keeps(case, plan)))
}

/// Factors of each layer's remote share: as large and as small as it may be. None if nothing is remote.
fn bounds(model: &Model<'_>, problem: &Problem, plan: &Plan) -> Option<[Vec<ErrorFactor>; 2]> {
    if plan.layers.iter().all(|layer| layer.remote.is_empty()) {
        return None;
    }
    let tokens = (model.input + model.output).max(1.0);
    let factor = |layer: usize| {
        let (parts, remote) = (&model.layers[layer], &plan.layers[layer].remote);
        let share = model.share_of(layer, remote);
        if let Some(stated) = problem.prediction_p95.as_ref().and_then(|factors| factors.get(layer)) {
            return stated.of(remote.len());
        }
        if share <= 0.0 {
            return 1.0;
        }
        let (set, experts) = (remote.len() as f64, parts.experts as f64);
        let pairs = tokens * parts.per_token();
        // By how much more than its mean the set gets, where all experts are used alike.
        let bound = assignments_bound(tokens, set, parts.per_token(), experts);
        let deviation = (bound - set * pairs / experts).max(0.0);
        1.0 + deviation / (share * pairs)
    };
    let factors: Vec<f64> = (0..plan.layers.len()).map(factor).collect();
    let larger = factors.iter().map(|factor| ErrorFactor::Any(*factor)).collect();
    let smaller = factors.iter().map(|factor| ErrorFactor::Any(1.0 / factor.max(1.0))).collect();
    Some([larger, smaller])
}
