//! Explanation of a placement in one sentence.

use crate::flags::{DeploymentArgs, RemoteArg};
use remoe_hardware::Origin;
use remoe_planner::{PlanningResult, Problem, StrategyEvaluation, dollars, seconds};

/// Number of requests that shown costs are of. The cost of one request is too small to read.
const MILLION: f64 = 1e6;

/// Explanation of a placement, with its expected latency and cost.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PlacementChoice {
    pub(crate) reason: String,
    /// Expected latencies with their limits. `None` without a plan.
    pub(crate) expected_latency: Option<String>,
    /// Cost of a million requests. `None` without a plan.
    pub(crate) cost_per_million: Option<String>,
}

impl PlacementChoice {
    /// Explains a placement that flags state. `dense`: the model has no routed experts.
    pub(crate) fn from_flags(deployment: &DeploymentArgs, dense: bool) -> Self {
        let reason = match (&deployment.plan, deployment.remote_ratio) {
            _ if dense => "the model has no routed experts".to_owned(),
            (Some(path), _) => format!("as --plan {} says", path.display()),
            (None, Some(ratio)) => format!("as --remote-ratio {ratio} says; a plan would choose by cost"),
            (None, None) => {
                "half of the experts remote, for --replicas; a plan would choose by cost".to_owned()
            }
        };
        Self { reason, expected_latency: None, cost_per_million: None }
    }

    /// Formats the explanation as a line.
    pub(crate) fn sentence(&self) -> String {
        format!("chosen plan: {}", self.reason)
    }

    /// Explains the plan `answer` for `problem`, whose profile is of `origin`.
    pub(crate) fn from_plan(
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
            reason: format!("sized for {concurrency}{assumed}: {}", reason(answer, remote, origin)),
            expected_latency: Some(format!(
                "{}: TTFT {} (limit {}), TPOT {} (limit {})",
                if problem.arrivals.is_some() { "expected" } else { "one request alone" },
                seconds(ttft),
                seconds(problem.slo.ttft_seconds),
                seconds(tpot),
                seconds(problem.slo.tpot_seconds)
            )),
            cost_per_million: Some(format!("{} per million requests", dollars(costs.total_cost * MILLION))),
        }
    }
}

fn reason(answer: &PlanningResult, remote: RemoteArg, origin: Origin) -> String {
    let is_remote = answer.plan.layers.iter().any(|layer| !layer.remote.is_empty());
    let cost = answer.evaluation.total_cost;
    // Compares with the other kind of placement: without remote experts if the plan has some, and vice versa.
    let is_other_kind =
        |rival: &&StrategyEvaluation| rival.feasible && rival.name.has_remote_experts() != is_remote;
    let others = answer.verdict.rivals.iter().filter(is_other_kind);
    let other = others.filter_map(|rival| rival.dollars_per_request).min_by(f64::total_cmp);
    let saving_percent = |dear: f64, cheap: f64| 100.0 * (1.0 - cheap / dear);
    match (is_remote, origin, other) {
        (false, _, _) if remote == RemoteArg::Never => {
            "all experts are local, as --remote never says".to_owned()
        }
        (false, Origin::Prior, _) => "all experts fit in the main function".to_owned(),
        (true, _, Some(other)) if other < cost => format!(
            "the cheapest with remote experts, which --remote always asks for; local ones cost {:.0} % less",
            saving_percent(cost, other)
        ),
        (true, _, Some(other)) => {
            format!(
                "remote experts cost {:.0} % less than all experts in the main function",
                saving_percent(other, cost)
            )
        }
        (true, Origin::Prior, None) if remote == RemoteArg::Always => {
            "remote experts, as --remote always says".to_owned()
        }
        (true, _, None) => "no placement without remote experts meets the limits".to_owned(),
        (false, Origin::Measured, Some(other)) if other > cost => {
            format!(
                "all experts in the main function cost {:.0} % less than remote ones",
                saving_percent(other, cost)
            )
        }
        (false, Origin::Measured, _) => "the cheapest placement that meets the limits".to_owned(),
    }
}
