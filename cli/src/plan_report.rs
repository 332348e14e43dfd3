//! Formatting of plans as tables.

use crate::output::table;
use remoe_planner::{
    Alternative, Baseline, Device, Evaluation, Explanation, Latency, Layer, LayerPlan, Life,
    MisestimatedCase, PlacementComparison, Plan, PlanChange, PlanningResult, Preallocation, Problem,
    Quantiles, Refusal, ReplacementReason, Selection, SensitivityAnalysis, ServingStrategy, Violation,
    amount, dollars, limit_name,
};

/// Formats a plan with its evaluation and comparisons. With `verbose`, adds how it was found, in terms of the Remoe
/// paper.
pub(crate) fn plan(problem: &Problem, answer: &PlanningResult, verbose: bool) -> String {
    let mut parts = vec![
        table::of_pairs(&[
            ("sized for", sized_for(problem)),
            ("main function", size(answer.plan.main_bytes, answer.plan.main_vcpus)),
            ("remote", remote_summary(&answer.plan)),
        ]),
        layers(problem, Some(&answer.plan), &answer.evaluation),
    ];
    parts.extend(groups(&answer.plan, &answer.evaluation));
    parts.extend([times(problem, &answer.evaluation), costs(&answer.evaluation)]);
    parts.extend(answer.evaluation.life.as_ref().map(life));
    parts.push(baselines(problem, answer));
    parts.extend(verbose.then(|| explanation(&answer.explanation)));
    parts.extend(answer.sturdiness.as_ref().map(sturdiness));
    parts.extend(answer.change.as_ref().map(change));
    parts.push(verdict(&answer.verdict));
    parts.join("\n\n")
}

/// Formats the requests that a plan is sized for, and the requests that its latency and cost are of.
fn sized_for(problem: &Problem) -> String {
    let request = &problem.request;
    let tokens =
        format!("of {:.0} tokens in and {:.0} out", request.input_tokens, request.output_tokens + 1.0);
    let count = match request.concurrency {
        0 | 1 => format!("1 request at a time {tokens}"),
        count => format!("{count} requests at once {tokens}"),
    };
    match problem.arrivals {
        Some(_) => format!("{count}, which arrive as stated"),
        None => format!("{count}; times and costs are of a request alone"),
    }
}

/// Formats the evaluation of a given plan.
pub(crate) fn evaluation(problem: &Problem, evaluation: &Evaluation) -> String {
    let mut parts = vec![layers(problem, None, evaluation), times(problem, evaluation), costs(evaluation)];
    parts.extend(evaluation.life.as_ref().map(life));
    parts.push(match evaluation.violations.as_slice() {
        [] => "All limits are met.".to_owned(),
        violations => table::with_header(
            &["limit exceeded", "value", "allowed"],
            violations.iter().map(violation).collect(),
        ),
    });
    parts.join("\n\n")
}

/// Formats the pre-allocation: each step of the walk over remote ratios, and the result.
pub(crate) fn preallocation(answer: &Preallocation) -> String {
    let rows = answer.walk.iter().map(|step| {
        vec![
            step.i.to_string(),
            step.remote_experts.iter().sum::<usize>().to_string(),
            if step.fits { "yes" } else { "no" }.to_owned(),
            bytes(step.needed_bytes),
            step.main_bytes.map_or_else(|| "none".to_owned(), bytes),
            step.ttft_seconds.map_or_else(String::new, seconds),
            step.tpot_seconds.map_or_else(String::new, seconds),
        ]
    });
    let header = ["i", "remote experts", "fits", "expert memory", "main function", "TTFT", "TPOT"];
    let walk = table::with_header(&header, rows.collect());
    format!("main function of {} at i = {}, in the worst case\n\n{walk}", bytes(answer.main_bytes), answer.i)
}

fn remote_summary(plan: &Plan) -> String {
    let sets = plan.layers.iter().filter(|layer| !layer.remote.is_empty());
    let (layers, experts) =
        sets.fold((0, 0), |(layers, experts), layer| (layers + 1, experts + layer.remote.len()));
    match experts {
        0 => "none: all experts are in the main function".to_owned(),
        experts if plan.groups.is_empty() => {
            format!("{experts} experts of {layers} layers, {} replicas", plan.replicas())
        }
        experts => {
            let (groups, functions) = (plan.groups.len(), plan.replicas());
            format!("{experts} experts of {layers} layers in {groups} groups, {functions} functions")
        }
    }
}

/// Formats each layer's terms of latency and cost. With a `plan`, adds the placement of the experts.
fn layers(problem: &Problem, plan: Option<&Plan>, evaluation: &Evaluation) -> String {
    let all_local = LayerPlan::default();
    let terms = problem.layers.iter().zip(&evaluation.layers).enumerate();
    let rows = terms.map(|(index, (layer, terms))| {
        let mut row = vec![index.to_string()];
        if let Some(plan) = plan {
            let layer_plan = plan.layers.get(index).unwrap_or(&all_local);
            let local: Vec<u32> =
                (0..layer.experts).filter(|expert| !layer_plan.remote.contains(expert)).collect();
            // Groups host experts of several layers, and have a separate table.
            let has_function = !layer_plan.remote.is_empty() && plan.groups.is_empty();
            let if_has_function = |text: String| if has_function { text } else { String::new() };
            row.extend([
                ids(&local),
                ids(&layer_plan.remote),
                if_has_function(bytes(layer_plan.memory_bytes)),
                if_has_function(layer_plan.replicas.to_string()),
            ]);
        }
        row.extend([
            percent(terms.remote_share),
            seconds(terms.local_prefill),
            seconds(terms.remote_prefill),
            seconds(terms.decode),
            dollars(terms.main_cost + terms.remote_cost),
        ]);
        row
    });
    let placement_columns: &[&str] =
        if plan.is_some() { &["local experts", "remote experts", "memory", "replicas"] } else { &[] };
    let header: Vec<&str> = ["layer"]
        .iter()
        .chain(placement_columns)
        .chain(&["remote share", "local prefill", "remote prefill", "decode step", "cost"])
        .copied()
        .collect();
    table::with_header(&header, rows.collect())
}

/// Formats the memory of a function, and its vCPUs if the plan chose them separately.
fn size(memory: f64, vcpus: Option<f64>) -> String {
    match vcpus {
        Some(vcpus) => format!("{}, {vcpus:.2} vCPUs", bytes(memory)),
        None => bytes(memory),
    }
}

/// Formats the groups of a plan. Returns `None` for a plan without groups.
fn groups(plan: &Plan, evaluation: &Evaluation) -> Option<String> {
    let has_idle_windows = plan.groups.iter().any(|group| group.idle_seconds.is_some());
    let rows = plan.groups.iter().zip(&evaluation.groups).enumerate().map(|(index, (group, terms))| {
        let experts: usize = group.experts.iter().map(Vec::len).sum();
        let layers = group.experts.iter().filter(|experts| !experts.is_empty()).count();
        let idle_cell = has_idle_windows.then(|| match (group.idle_seconds, terms.life) {
            (Some(idle), Some(life)) => format!(
                "{}: alive {} of the time, {} cold requests",
                seconds(idle),
                percent(life.alive_share),
                percent(life.cold_share)
            ),
            _ => "none".to_owned(),
        });
        let cells = [
            format!("group-{index}"),
            format!("{experts} of {layers} layers"),
            percent(terms.share),
            size(group.memory_bytes, group.vcpus),
            group.replicas.to_string(),
            format!("{}/hour", dollars(terms.rate * 3600.0)),
        ];
        cells.into_iter().chain(idle_cell).collect()
    });
    let rows: Vec<Vec<String>> = rows.collect();
    let mut header = vec!["group", "experts", "share of pairs", "memory", "replicas", "cost while alive"];
    header.extend(has_idle_windows.then_some("idle window"));
    (!plan.groups.is_empty()).then(|| table::with_header(&header, rows))
}

fn life(life: &Life) -> String {
    let cold = format!("{} of requests, TTFT {}", percent(life.cold_share), seconds(life.cold_ttft_seconds));
    let quantiles = |times: &Quantiles| {
        format!("p50 {}, p95 {}, p99 {}", seconds(times.p50), seconds(times.p95), seconds(times.p99))
    };
    let latency = life.latency.iter().flat_map(|latency| {
        [("TTFT, quantiles", quantiles(&latency.ttft)), ("TPOT, quantiles", quantiles(&latency.tpot))]
    });
    let mut rows = vec![
        (
            "alive",
            format!("{} of the time, {:.1} wakes per hour", percent(life.alive_share), life.wakes_per_hour),
        ),
        ("cold", cold),
        (
            "load",
            format!(
                "utilisation {}, {:.2} concurrent requests, queue wait {}",
                percent(life.utilisation),
                life.in_flight,
                seconds(life.wait_seconds)
            ),
        ),
        ("cost per hour", dollars(life.dollars_per_hour)),
    ];
    rows.extend(latency);
    table::of_pairs(&rows)
}

/// Formats the robustness of a plan of groups to wrong figures.
fn sturdiness(sturdy: &SensitivityAnalysis) -> String {
    let SensitivityAnalysis { tried, broken, worst_above, broken_of_cheapest, above_cheapest, cases } =
        sturdy;
    let cheapest = match above_cheapest {
        none if *none <= 0.0 => "no other plan of its kind is cheaper".to_owned(),
        above => {
            format!(
                "costs {} more than the cheapest of its kind, which violates limits in {broken_of_cheapest}",
                percent(*above)
            )
        }
    };
    let figure_names = |selects: &dyn Fn(&MisestimatedCase) -> bool| {
        let names: Vec<&str> =
            cases.iter().filter(|case| selects(case)).map(|case| case.figure.name()).collect();
        names.join(", ")
    };
    let breaks = figure_names(&|case| !case.broken.is_empty());
    let survives = figure_names(&|case| case.broken.is_empty() && !case.broken_of_cheapest.is_empty());
    let rows = [
        (
            "robustness to wrong figures",
            format!(
                "violates limits in {broken} of {tried} cases, costs up to {} more than planned; {cheapest}",
                percent(*worst_above)
            ),
        ),
        ("robust where the cheapest plan is not", survives),
        ("violates limits with", breaks),
    ];
    let non_empty: Vec<(&str, String)> = rows.into_iter().filter(|(_, text)| !text.is_empty()).collect();
    table::of_pairs(&non_empty)
}

/// Formats the compared placements, and the conclusion in a sentence.
pub(crate) fn verdict(verdict: &PlacementComparison) -> String {
    let rows = verdict.rivals.iter().map(|rival| {
        let optional = |value: Option<f64>, format: fn(f64) -> String| value.map_or_else(String::new, format);
        vec![
            rival.name.name().to_owned(),
            rival.price(),
            optional(rival.ttft_seconds, seconds),
            optional(rival.tpot_seconds, seconds),
            match (rival.dollars_per_request, rival.feasible) {
                (None, _) => "-",
                (_, true) => "yes",
                (_, false) => "no",
            }
            .to_owned(),
            rival.why.clone(),
        ]
    });
    let header = ["placement", "cost", "TTFT", "TPOT", "meets the limits", "reason"];
    format!("{}\n\n{}", table::with_header(&header, rows.collect()), verdict.sentence)
}

fn times(problem: &Problem, evaluation: &Evaluation) -> String {
    let with_limit = |value: f64, limit: f64| {
        format!("{} of {} ({})", seconds(value), seconds(limit), percent(value / limit))
    };
    let latency = evaluation.life.and_then(|life| life.latency);
    let quantile = problem.slo.quantile.zip(latency);
    let name = |name: &str| match quantile {
        Some((quantile, _)) => format!("{name}, {}", quantile.name()),
        None => name.to_owned(),
    };
    let limited_value = |mean: f64, select: fn(&Latency) -> &Quantiles| {
        quantile.map_or(mean, |(quantile, latency)| select(&latency).at(Some(quantile)))
    };
    let ttft = limited_value(evaluation.ttft_seconds, |latency| &latency.ttft);
    let tpot = limited_value(evaluation.tpot_seconds, |latency| &latency.tpot);
    table::of_pairs(&[
        (name("TTFT").as_str(), with_limit(ttft, problem.slo.ttft_seconds)),
        (name("TPOT").as_str(), with_limit(tpot, problem.slo.tpot_seconds)),
        ("prefill", seconds(evaluation.prefill_seconds)),
        ("decode", seconds(evaluation.decode_seconds)),
    ])
}

fn costs(evaluation: &Evaluation) -> String {
    let part = |cost: f64| match evaluation.total_cost {
        total if total > 0.0 => format!("{} ({})", dollars(cost), percent(cost / total)),
        _ => dollars(cost),
    };
    table::of_pairs(&[
        ("cost of the main function", part(evaluation.main_cost)),
        ("cost of remote functions", part(evaluation.remote_cost)),
        ("total cost", dollars(evaluation.total_cost)),
    ])
}

fn baselines(problem: &Problem, answer: &PlanningResult) -> String {
    let (baselines, saving) = (&answer.baselines, &answer.explanation.saving);
    let row = |name: &str, baseline: &Baseline, saving: Option<f64>| {
        vec![
            name.to_owned(),
            dollars(baseline.total_cost),
            saving.map_or_else(String::new, percent),
            bytes(baseline.main_bytes),
            seconds(baseline.ttft_seconds),
            seconds(baseline.tpot_seconds),
            match baseline.violations.as_slice() {
                [] => "yes".to_owned(),
                violations => {
                    let names = violations.iter().map(|limit| limit_name(limit));
                    format!("no: {}", names.collect::<Vec<_>>().join(", "))
                }
            },
        ]
    };
    let on_gpu = |layer: &Layer| layer.gpu_expert_seconds.is_some();
    let on_cpus = |layer: &Layer| layer.cpu_nonexpert_seconds.is_some();
    let too_large = "no main function size has enough memory";
    let without_cpu = match problem.layers.iter().all(on_cpus) {
        true => too_large,
        false => "missing cpu_nonexpert_seconds",
    };
    let without_gpu = match (problem.layers.iter().all(on_gpu), problem.device) {
        (true, _) => too_large,
        (false, Device::Cpu) => "the main function has no GPU",
        (false, Device::Gpu) => "missing gpu_expert_seconds",
    };
    let compared = [
        (ServingStrategy::Mix.baseline_name(), &baselines.mix, saving.mix, too_large),
        (ServingStrategy::Cpu.baseline_name(), &baselines.cpu, saving.cpu, without_cpu),
        (ServingStrategy::Gpu.baseline_name(), &baselines.gpu, saving.gpu, without_gpu),
        (ServingStrategy::Fetch.baseline_name(), &baselines.fetch, saving.fetch, without_gpu),
    ];
    let header =
        ["baseline", "cost", "saving of the plan", "main function", "TTFT", "TPOT", "meets the limits"];
    let known = compared
        .iter()
        .filter_map(|(name, baseline, saving, _)| Some(row(name, baseline.as_ref()?, *saving)));
    let known: Vec<Vec<String>> = known.collect();
    let absent = compared.iter().filter(|(_, baseline, ..)| baseline.is_none());
    let absent: Vec<String> =
        absent.map(|(name, .., reason)| format!("not compared: {name}: {reason}")).collect();
    let table = (!known.is_empty()).then(|| table::with_header(&header, known));
    table.into_iter().chain(absent).collect::<Vec<_>>().join("\n")
}

fn explanation(explanation: &Explanation) -> String {
    let alternative = |next: &Alternative, comparison: &str| {
        let (cost, main) = (dollars(next.total_cost), bytes(next.main_bytes));
        let difference = percent(next.above.abs());
        format!("{cost} ({difference} {comparison}) with i = {} and a main function of {main}", next.i)
    };
    let selection = match (explanation.selection, explanation.i) {
        (Some(Selection::Ratio), Some(i)) => format!("the same ratio in every layer, i = {i}"),
        (Some(Selection::AcrossLayers), Some(i)) => {
            format!("the least used of all layers, within the bytes of i = {i}")
        }
        (Some(Selection::Mixed), _) => "chosen for every layer by itself".to_owned(),
        // The previous plan stays. The only alternative is the best new plan, which saves too little.
        _ => {
            let new = explanation.next_best.as_ref();
            let new = new.map_or_else(|| "none".to_owned(), |new| alternative(new, "less"));
            return table::of_pairs(&[
                ("remote experts", "unchanged from the previous plan".to_owned()),
                ("best now", new),
            ]);
        }
    };
    let binding = explanation.binding.as_ref().map_or_else(
        || "none: local optimum".to_owned(),
        |binding| {
            let save = dollars(binding.would_save);
            format!("{}: relaxing it by one step would save {save}", limit_name(&binding.limit))
        },
    );
    let next =
        explanation.next_best.as_ref().map_or_else(|| "none".to_owned(), |next| alternative(next, "more"));
    let continuous_form = explanation.continuous.as_ref().map(|form| match (form.above, form.refused) {
        (Some(above), _) => format!("{} more", percent(above)),
        (None, Some(refusal)) => format!("does not apply: {}", refusal_text(refusal)),
        (None, None) => "violates a limit".to_owned(),
    });
    let mut pairs = vec![("remote experts", selection), ("binding limit", binding), ("next best", next)];
    pairs.extend(continuous_form.map(|text| ("continuous form", text)));
    table::of_pairs(&pairs)
}

fn refusal_text(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::PoorFit => "no exponential decay fits some layer's times (R2 below 0.95)",
        Refusal::NotConvex => "the objective is not convex in some layer",
        Refusal::ReservedBilling => "reserved billing is not separable by layer",
        Refusal::TooSlow => "no memory size meets the TPOT limit",
    }
}

fn change(change: &PlanChange) -> String {
    let decision = match change.reason {
        ReplacementReason::Unchanged => "Keeps the previous plan: it is optimal.",
        ReplacementReason::WithinHysteresis => {
            "Keeps the previous plan: the best one saves less than the hysteresis."
        }
        ReplacementReason::MovesTooMuch => {
            "Keeps the previous plan: loading the best one costs more than it saves over its expected lifetime."
        }
        ReplacementReason::Cheaper => "Replaces the previous plan: the saving exceeds the hysteresis.",
        ReplacementReason::PreviousFails => "Replaces the previous plan: it violates the limits.",
        ReplacementReason::NoNewPlan => "Keeps the previous plan: it meets all limits, and no new plan does.",
    };
    let mut lines = vec![decision.to_owned()];
    lines.push(match change.new_cost {
        Some(new) => format!("previous {}, best {}", dollars(change.previous_cost), dollars(new)),
        None => format!("previous {}", dollars(change.previous_cost)),
    });
    if let Some([from, to]) = change.main_bytes {
        lines.push(format!("main function {} -> {}", bytes(from.0), bytes(to.0)));
    }
    if let Some(moved) = change.moved_bytes.filter(|moved| moved.0 > 0.0) {
        let starts = change.starts.unwrap_or_default();
        let functions = if starts == 1.0 { "function" } else { "functions" };
        lines.push(format!("{starts} {functions} would start, {} would be loaded", bytes(moved.0)));
    }
    if let Some(toll) = change.change_cost.filter(|cost| cost.seconds > 0.0) {
        lines.push(format!(
            "loading takes {} and costs {}; saves {} after that",
            seconds(toll.seconds),
            dollars(toll.dollars),
            dollars(toll.saves)
        ));
    }
    let rows = change.layers.iter().map(|layer| {
        let [from, to] = layer.memory_bytes;
        vec![
            layer.layer.to_string(),
            ids(&layer.to_remote),
            ids(&layer.to_local),
            format!("{} -> {}", bytes(from.0), bytes(to.0)),
            format!("{} -> {}", layer.replicas[0], layer.replicas[1]),
        ]
    });
    let rows: Vec<Vec<String>> = rows.collect();
    if !rows.is_empty() {
        let header = ["would change in layer", "to remote", "to local", "memory", "replicas"];
        lines.push(table::with_header(&header, rows));
    }
    lines.join("\n")
}

fn violation(violation: &Violation) -> Vec<String> {
    let with_unit = |value| amount(&violation.limit, value);
    vec![limit_name(&violation.limit), with_unit(violation.value), with_unit(violation.allowed)]
}

/// Formats ascending ids, with runs as ranges: `0-3,7`.
fn ids(ids: &[u32]) -> String {
    if ids.is_empty() {
        return "-".to_owned();
    }
    let runs = ids.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run.iter().map(u32::to_string).collect(),
    });
    runs.collect::<Vec<_>>().join(",")
}

pub(crate) fn bytes(count: f64) -> String {
    // Plans have sizes far below 2^63.
    table::bytes(count as u64)
}

pub(crate) fn seconds(value: f64) -> String {
    match value {
        0.0 => "0 s".to_owned(),
        value if value < 1e-3 => format!("{:.1} us", value * 1e6),
        value if value < 1.0 => format!("{:.2} ms", value * 1e3),
        value => format!("{value:.3} s"),
    }
}

pub(crate) fn percent(share: f64) -> String {
    match format!("{:.1} %", share * 100.0) {
        text if text == "-0.0 %" => "0.0 %".to_owned(),
        text => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_shown_as_ranges() {
        assert_eq!(ids(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        assert_eq!(ids(&[]), "-");
    }

    #[test]
    fn percent_has_no_negative_zero() {
        assert_eq!([-1e-9, 0.0, -0.012].map(percent), ["0.0 %", "0.0 %", "-1.2 %"]);
    }
}
