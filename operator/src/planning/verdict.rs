//! Verdict of a plan: if remote experts pay off.

use crate::planning::numbers::rounded;
use remoe_api::{MAX_VERDICT, PlanVerdict, ServingWay, WayCost};
use remoe_planner::{Rival, Verdict, Way};

/// Converts `verdict` to the form of a plan.
pub(super) fn to_plan_verdict(verdict: &Verdict) -> PlanVerdict {
    let cheapest = verdict.best.and_then(|best| verdict.rivals.iter().find(|rival| rival.name == best));
    let is_other = |rival: &&Rival| {
        rival.feasible && Some(rival.name.has_remote_experts()) != verdict.best.map(Way::has_remote_experts)
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

fn cost(rival: &Rival) -> Option<WayCost> {
    let way = match rival.name {
        Way::Sliced => ServingWay::Sliced,
        Way::Layers => ServingWay::Layers,
        Way::Mix => ServingWay::Mix,
        Way::Cpu => ServingWay::Cpu,
        Way::Gpu => ServingWay::Gpu,
        Way::Fetch => ServingWay::Fetch,
    };
    Some(WayCost { way, cost: rounded(rival.dollars_per_request?) })
}
