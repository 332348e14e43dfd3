//! Verdict of a plan: if remote experts pay off.

use crate::planning::numbers::rounded;
use remoe_api::{MAX_VERDICT, PlanVerdict, ServingWay, WayCost};
use remoe_planner::{PlacementComparison, ServingStrategy, StrategyEvaluation};

/// Converts `verdict` to the form of a plan.
pub(super) fn to_plan_verdict(verdict: &PlacementComparison) -> PlanVerdict {
    let cheapest = verdict.best.and_then(|best| verdict.rivals.iter().find(|rival| rival.name == best));
    let is_other = |rival: &&StrategyEvaluation| {
        rival.feasible
            && Some(rival.name.has_remote_experts()) != verdict.best.map(ServingStrategy::has_remote_experts)
    };
    let others = verdict.rivals.iter().filter(is_other).filter_map(cost);
    let rival = others.min_by(|a, b| a.cost.total_cmp(&b.cost)).filter(|_| cheapest.is_some());
    PlanVerdict {
        pays: verdict.pays,
        sentence: verdict.sentence.chars().take(MAX_VERDICT).collect(),
        cheapest: cheapest.and_then(cost),
        rival,
    }
}

fn cost(rival: &StrategyEvaluation) -> Option<WayCost> {
    let way = match rival.name {
        ServingStrategy::Sliced => ServingWay::Sliced,
        ServingStrategy::Layers => ServingWay::Layers,
        ServingStrategy::Mix => ServingWay::Mix,
        ServingStrategy::Cpu => ServingWay::Cpu,
        ServingStrategy::Gpu => ServingWay::Gpu,
        ServingStrategy::Fetch => ServingWay::Fetch,
    };
    Some(WayCost { way, cost: rounded(rival.dollars_per_request?) })
}
