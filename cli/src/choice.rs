//! Why a model is placed as it is, in a sentence.

use crate::flags::{DeploymentArgs, RemoteArg};
use remoe_hardware::Origin;
use remoe_planner::{PlanningResult, Problem, StrategyEvaluation, dollars, seconds};

/// Costs of single requests are too small to read.
const MILLION: f64 = 1e6;

/// Why a model is placed as it is, and what that takes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PlacementChoice {
    pub(crate) why: String,
    /// Latencies beside their limits; none without a plan.
    pub(crate) expected: Option<String>,
    /// Cost of a million requests.
    pub(crate) per_million: Option<String>,
}

impl PlacementChoice {
    /// Names the flags that ask for a placement; `dense`: the model has no experts to place.
    pub(crate) fn asked(deployment: &DeploymentArgs, dense: bool) -> Self {
        let why = match (&deployment.plan, deployment.remote_ratio) {
            _ if dense => "the model has no routed experts".to_owned(),
            (Some(path), _) => format!("as --plan {} says", path.display()),
            (None, Some(ratio)) => format!("as --remote-ratio {ratio} says; a plan would choose by cost"),
            (None, None) => {
                "half of the experts remote, for --replicas; a plan would choose by cost".to_owned()
            }
        };
        Self { why, expected: None, per_million: None }
    }

    /// The choice in a line that stands alone.
    pub(crate) fn sentence(&self) -> String {
        format!("chosen plan: {}", self.why)
    }

    /// Explains `answer` to `problem`, whose figures are of `origin`.
    pub(crate) fn planned(
        problem: &Problem,
        answer: &PlanningResult,
        remote: RemoteArg,
        origin: Origin,
    ) -> Self {
        let concurrency = match problem.request.concurrency {
            0 | 1 => "1 request at a time".to_owned(),
            count => format!("{count} requests at once"),
        };
        let assumed = if origin == Origin::Prior { ", on assumed speeds" } else { "" };
        let costs = &answer.evaluation;
        let (ttft, tpot) = (costs.ttft_seconds, costs.tpot_seconds);
        Self {
            why: format!("sized for {concurrency}{assumed}: {}", reason(answer, remote, origin)),
            expected: Some(format!(
                "{}: TTFT {} (limit {}), TPOT {} (limit {})",
                if problem.arrivals.is_some() { "expected" } else { "one request alone" },
                seconds(ttft),
                seconds(problem.slo.ttft_seconds),
                seconds(tpot),
                seconds(problem.slo.tpot_seconds)
            )),
            per_million: Some(format!("{} per million requests", dollars(costs.total_cost * MILLION))),
        }
    }
}

fn reason(answer: &PlanningResult, remote: RemoteArg, origin: Origin) -> String {
    let is_remote = answer.plan.layers.iter().any(|layer| !layer.remote.is_empty());
    let cost = answer.evaluation.total_cost;
    // Of the other kind: without remote experts where the plan has some, with some where it has none.
    let other = |rival: &&StrategyEvaluation| rival.feasible && rival.name.has_remote_experts() != is_remote;
    let others = answer.verdict.rivals.iter().filter(other);
    let other = others.filter_map(|rival| rival.dollars_per_request).min_by(f64::total_cmp);
    let less = |dear: f64, cheap: f64| 100.0 * (1.0 - cheap / dear);
    match (is_remote, origin, other) {
        (false, _, _) if remote == RemoteArg::Never => {
            "all experts are local, as --remote never says".to_owned()
        }
        (false, Origin::Prior, _) => "all experts fit in the main function".to_owned(),
        (true, _, Some(other)) if other < cost => format!(
            "the cheapest with remote experts, which --remote always asks for; local ones cost {:.0} % less",
            less(cost, other)
        ),
        (true, _, Some(other)) => {
            format!(
                "remote experts cost {:.0} % less than all experts in the main function",
                less(other, cost)
            )
        }
        (true, Origin::Prior, None) if remote == RemoteArg::Always => {
            "remote experts, as --remote always says".to_owned()
        }
        (true, _, None) => "no placement without remote experts meets the limits".to_owned(),
        (false, Origin::Measured, Some(other)) if other > cost => {
            format!("all experts in the main function cost {:.0} % less than remote ones", less(other, cost))
        }
        (false, Origin::Measured, _) => "the cheapest placement that meets the limits".to_owned(),
    }
}
