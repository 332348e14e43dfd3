//! Pre-allocation of the main function for predicted requests: its size is bounded before their plan is known.

use crate::answer::explain::Explanation;
use crate::answer::{PlanningResult, final_evaluation};
use crate::best_plans::violations_of;
use crate::best_plans::{BestPlans, SearchInputs};
use crate::comparison::{PlacementComparison, evaluate_rivals};
use crate::infeasible::{Infeasible, device_too_small};
use crate::plan_error::PlanError;
use crate::preallocation::hoeffding::assignments_bound;
use crate::remote::Remote;
use crate::search::selection::{Candidate, Selection};
use crate::slicing::in_groups;
use crate::strategies::{check_cancelled, tables};
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
/// Every layer keeps its number of remote experts, which are reassigned by the predicted shares. The main function gets the
/// cheapest size that keeps every limit for the prediction and in two worst cases. In these the share of the remote experts
/// is larger or smaller by the error factors of the problem, or without_remote factors by the 95 % bound of Hoeffding's
/// inequality. A later plan for these requests can keep that size.
///
/// [`PlanningResult::walk`] is empty, and [`PlanningResult::verdict`] has only the strategies without remote experts.
///
/// # Errors
/// An invalid problem, a previous plan that does not belong to it, or no size that keeps the limits.
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
    let (expert_times, own_sets) = (OnceCell::new(), OnceCell::new());
    let inputs = SearchInputs {
        model: &model,
        tables: &tables,
        expert_times: &expert_times,
        own_sets: &own_sets,
        factors: None,
        violations: &violations,
        remote: Remote::Auto,
        candidates: &[],
    };
    let group_search = inputs.new_group_search();
    let grouped = in_groups(&previous);
    let reassigned = group_search.reassigned(&grouped).unwrap_or(grouped);
    let unknown = || PlanError::Infeasible(Box::new(Infeasible::unknown(&model)));
    let sized = with_robust_main_size(&model, problem, &reassigned).ok_or_else(unknown)?;
    let counts = sized.remote_counts();
    let i = counts.iter().copied().max().unwrap_or(0);
    let planned = group_search.evaluated(&Candidate { selection: Selection::Mixed, i, counts }, sized);
    let planned = match problem.limits.max_groups {
        Some(_) => planned,
        None => inputs.in_layers(&planned).unwrap_or(planned),
    };
    check_cancelled(&model)?;
    let all_local = AllLocalTimes::new(&model);
    let without_remote = WithoutRemote::new(&model, &all_local);
    let verdict = PlacementComparison::new(
        evaluate_rivals(&model, &without_remote, &BestPlans::none()),
        None::<fn(bool) -> _>,
    );
    let explanation = Explanation::of_groups(&planned, &without_remote.baselines, None);
    let evaluation = final_evaluation(&model, &planned.plan, planned.evaluation);
    Ok(PlanningResult {
        plan: planned.plan,
        evaluation,
        baselines: without_remote.baselines,
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

/// Returns `plan` with the main size that costs least of those that keep every limit in the worst case of the prediction.
fn with_robust_main_size(model: &Model<'_>, problem: &Problem, plan: &Plan) -> Option<Plan> {
    let worst_cases: Vec<Model<'_>> = match worst_case_factors(model, problem, plan) {
        Some(cases) => cases.iter().map(|factors| stressed(model, factors, plan)).collect(),
        None => Vec::new(),
    };
    let mut options = model.useful_main_options(model.main_needed(&plan.remote_counts()));
    options.sort_by(|a, b| a.vcpus.total_cmp(&b.vcpus).then(a.rate.total_cmp(&b.rate)));
    // Of sizes with the same vCPUs only the cheapest can be chosen.
    options.dedup_by(|next, first| next.vcpus == first.vcpus);
    let with = |sizing: &Sizing| Plan { main_bytes: sizing.bytes, main_vcpus: sizing.stated, ..plan.clone() };
    let is_feasible = |case: &Model<'_>, plan: &Plan| case.evaluate(plan).violations.is_empty();
    let mut found: Vec<(f64, Plan)> = options
        .iter()
        .map(with)
        .filter_map(|plan| {
            let evaluation = model.evaluate(&plan);
            evaluation.violations.is_empty().then_some((evaluation.total_cost, plan))
        })
        .collect();
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found
        .into_iter()
        .map(|(_, plan)| plan)
        .find(|plan| worst_cases.iter().all(|case| is_feasible(case, plan)))
}

/// Returns factors of each layer's remote share for both worst cases: the largest and the smallest share.
///
/// Returns `None` if no expert is remote.
fn worst_case_factors(model: &Model<'_>, problem: &Problem, plan: &Plan) -> Option<[Vec<ErrorFactor>; 2]> {
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
        // Assignments above the mean that the set may get under uniform routing.
        let bound = assignments_bound(tokens, set, parts.per_token(), experts);
        let deviation = (bound - set * pairs / experts).max(0.0);
        1.0 + deviation / (share * pairs)
    };
    let factors: Vec<f64> = (0..plan.layers.len()).map(factor).collect();
    let larger = factors.iter().map(|factor| ErrorFactor::Any(*factor)).collect();
    let smaller = factors.iter().map(|factor| ErrorFactor::Any(1.0 / factor.max(1.0))).collect();
    Some([larger, smaller])
}
