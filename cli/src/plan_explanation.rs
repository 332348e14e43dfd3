//! Explanation of a plan in plain sentences: placement, latency, cost, and alternatives.

use crate::output::table;
use crate::plan_report::{bytes, percent};
use remoe_planner::{Binding, Plan, PlanningResult, Problem, StrategyEvaluation, dollars, limit_name};

/// Number of requests that shown costs are of. The cost of one request is too small to read.
const MILLION: f64 = 1e6;

/// Formats the paragraphs of the explanation.
pub(crate) fn explain(problem: &Problem, answer: &PlanningResult) -> String {
    let mut parts = vec![placement(problem, &answer.plan), speed(problem, answer), cost(answer)];
    parts.push(answer.verdict.sentence.clone());
    parts.extend(rivals(answer));
    parts.extend(answer.explanation.binding.as_ref().map(binding));
    parts.extend(answer.explanation.next_best.as_ref().filter(|next| next.above > 0.0).map(|next| {
        format!(
            "The next best plan ({} of main function memory, {}) costs {} more.",
            bytes(next.main_bytes),
            remote_functions(next.replicas),
            percent(next.above)
        )
    }));
    parts.extend(answer.sturdiness.as_ref().map(|sturdy| match sturdy.broken {
        0 => format!("It meets its limits in all {} cases with wrong figures.", sturdy.tried),
        broken => {
            format!("It violates a limit in {broken} of {} cases with wrong figures.", sturdy.tried)
        }
    }));
    parts.join("\n\n")
}

fn placement(problem: &Problem, plan: &Plan) -> String {
    let all_experts: usize = problem.layers.iter().map(|layer| layer.experts as usize).sum();
    let remote_experts: usize = plan.layers.iter().map(|layer| layer.remote.len()).sum();
    let memory = bytes(plan.main_bytes);
    if remote_experts == 0 {
        return format!("The main function holds all {all_experts} experts in {memory} of memory.");
    }
    let division = match plan.groups.len() {
        0 => "each layer has its own".to_owned(),
        1 => "replicas of one group".to_owned(),
        groups => format!("{groups} groups, each with a slice of every layer"),
    };
    let division = if plan.replicas() > 1 { format!(": {division}") } else { String::new() };
    format!(
        "The main function holds the {} most used of {all_experts} experts in {memory} of memory. The other {remote_experts} are in \
         {}{division}.",
        all_experts - remote_experts,
        remote_functions(plan.replicas()),
    )
}

fn remote_functions(count: u64) -> String {
    match count {
        1 => "1 remote function".to_owned(),
        count => format!("{count} remote functions"),
    }
}

fn speed(problem: &Problem, answer: &PlanningResult) -> String {
    let (request, slo, evaluation) = (&problem.request, &problem.slo, &answer.evaluation);
    format!(
        "A typical request ({:.0} tokens in, {:.0} out) has a time to first token of {} (limit {}) and a time per \
         output token of {} (limit {}).",
        request.input_tokens,
        request.output_tokens + 1.0,
        format_time(evaluation.ttft_seconds),
        format_time(slo.ttft_seconds),
        format_time(evaluation.tpot_seconds),
        format_time(slo.tpot_seconds),
    )
}

fn cost(answer: &PlanningResult) -> String {
    let costs = &answer.evaluation;
    let million = |cost: f64| dollars(cost * MILLION);
    let parts = match answer.plan.replicas() {
        0 => String::new(),
        _ => format!(
            ": {} for the main function and {} for remote functions",
            million(costs.main_cost),
            million(costs.remote_cost)
        ),
    };
    format!("A million such requests cost {}{parts}.", million(costs.total_cost))
}

fn rivals(answer: &PlanningResult) -> Option<String> {
    let line = |rival: &StrategyEvaluation| {
        let price = rival.price();
        let summary = if price.is_empty() { rival.why.clone() } else { format!("{price}; {}", rival.why) };
        vec![format!("  {}", rival.name.name()), summary.trim_end_matches("; ").to_owned()]
    };
    let lines: Vec<_> = answer.verdict.rivals.iter().map(line).collect();
    (!lines.is_empty()).then(|| format!("Compared placements:\n{}", table::of_rows(lines)))
}

fn binding(binding: &Binding) -> String {
    format!(
        "The binding limit is the {}: relaxing it by one step would save {} per million requests.",
        limit_name(&binding.limit),
        dollars(binding.would_save * MILLION)
    )
}

/// Formats a time with three significant digits.
fn format_time(seconds: f64) -> String {
    let (value, unit) = if seconds < 1.0 { (seconds * 1e3, "ms") } else { (seconds, "s") };
    let text = match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    };
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_significant_digits() {
        assert_eq!(
            [0.0021, 0.2, 0.0357, 10.0, 123.4].map(format_time),
            ["2.1 ms", "200 ms", "35.7 ms", "10 s", "123 s"]
        );
    }
}
