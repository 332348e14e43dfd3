//! Formatting of node recommendations.

use super::nodes::QuantisedNodes;
use super::nodes_model::KnownModel;
use super::nodes_prices::ApiCost;
use crate::output::table;
use remoe_planner::{
    ArrangementEvaluation, Device, ExpectedTimes, NodesAnswer, NodesComparison, NodesLayout, Rental,
    RentedNodes, amount, dollars,
};

/// Additional content of a report.
pub(super) struct ReportContext<'a> {
    pub(super) api: Option<ApiCost>,
    pub(super) quantised: &'a [QuantisedNodes],
    pub(super) assumptions: &'a [String],
}

/// Formats a recommendation: nodes, placement, expected times, and compared arrangements.
pub(super) fn answer(
    model: &KnownModel,
    rental: &Rental,
    answer: &NodesAnswer,
    context: &ReportContext<'_>,
) -> String {
    let mut parts = vec![model_table(model), answer.verdict.sentence.clone()];
    parts.extend(full_batch_warning(rental, answer));
    parts.push(nodes_table(rental, answer));
    parts.extend(answer.layout.as_ref().map(|layout| placement(layout, rental)));
    parts.extend(answer.expected.map(|expected| times(rental, expected)));
    parts.push(rivals_table(rental, answer));
    parts.extend(quantised(context.quantised));
    parts.extend(context.api.map(|api| api_comparison(api, answer)));
    parts.push(sensitivity(&answer.verdict));
    parts.extend(other_engine_note(answer));
    parts.push(list("Assumed", context.assumptions));
    parts.join("\n\n")
}

/// Explains why no nodes of the list meet the limits.
pub(super) fn infeasible(
    model: &KnownModel,
    rental: &Rental,
    answer: &NodesAnswer,
    alternatives: &[QuantisedNodes],
    assumptions: &[String],
) -> String {
    let slo = &rental.slo;
    let limits = format!(
        "limits: TTFT {}, TPOT {}",
        amount("ttft", slo.ttft_seconds),
        amount("tpot", slo.tpot_seconds)
    );
    let mut parts = vec![model_table(model), rivals_table(rental, answer), limits];
    parts.extend(quantised(alternatives));
    parts.push(list("Assumed", assumptions));
    parts.join("\n\n")
}

fn model_table(model: &KnownModel) -> String {
    let billions = |parameters: u64| match parameters {
        0..=999_999_999 => format!("{:.1} million", parameters as f64 / 1e6),
        _ => format!("{:.1} billion", parameters as f64 / 1e9),
    };
    let weights = match (model.weights_seen, model.runs) {
        (true, _) => "headers read".to_owned(),
        (false, true) => "not read: sizes from config.json".to_owned(),
        (false, false) => "not read: sizes from config.json; this version cannot run the model".to_owned(),
    };
    let experts = model.moe_layers as u64 * model.experts as u64 * model.expert_bytes;
    let mut pairs = vec![
        (
            "model",
            format!(
                "{}, {} parameters, {} active per token",
                model.family,
                billions(model.parameters),
                billions(model.active_parameters)
            ),
        ),
        ("weights", weights),
        (
            "bytes",
            format!(
                "{}: {} in {} x {} experts, {} in the non-expert part; {}",
                table::bytes(model.total_bytes),
                table::bytes(experts),
                model.moe_layers,
                model.experts,
                table::bytes(model.rest_bytes),
                model.counted_as
            ),
        ),
    ];
    if let Some(because) = &model.because {
        pairs.push(("", because.clone()));
    }
    table::of_pairs(&pairs)
}

fn nodes_table(rental: &Rental, answer: &NodesAnswer) -> String {
    let mains = answer.layout.map_or(1, |layout| layout.mains);
    let rows = answer.nodes.iter().map(|node| {
        let price_per_hour =
            rental.shapes.iter().find(|shape| shape.name == node.shape).map_or(0.0, |shape| shape.per_hour);
        vec![
            format!("{} x {}", node.count, node.shape),
            hosts(node, mains),
            dollars(f64::from(node.count) * price_per_hour),
            if node.spot { "spot" } else { "" }.to_owned(),
        ]
    });
    let mut rows: Vec<Vec<String>> = rows.collect();
    let total = answer.dollars_per_hour.map_or_else(String::new, dollars);
    let share = match answer.alive_share < 1.0 {
        true => format!("used {:.0} % of the time", 100.0 * answer.alive_share),
        false => String::new(),
    };
    rows.push(vec!["total".to_owned(), share, total, String::new()]);
    table::with_header(&["nodes", "functions", "$/hour", ""], rows)
}

/// Formats the functions on nodes, such as `main`, or `group-0 to group-3, 2 of each, up to 4 on each node`.
fn hosts(node: &RentedNodes, mains: u32) -> String {
    let (Some(first), Some(last)) = (node.hosts.first(), node.hosts.last()) else { return String::new() };
    let functions = node.hosts.len() * mains as usize;
    let per_node = functions.div_ceil(node.count.max(1) as usize);
    let mut text = if node.hosts.len() == 1 { first.clone() } else { format!("{first} to {last}") };
    if mains > 1 {
        text.push_str(&format!(", {mains} of each"));
    }
    if node.count > 1 && per_node > 1 {
        text.push_str(&format!(", up to {per_node} on each node"));
    }
    text
}

/// Warns if a full batch exceeds the TPOT limit.
fn full_batch_warning(rental: &Rental, answer: &NodesAnswer) -> Option<String> {
    let (layout, expected) = (answer.layout?, answer.expected?);
    let max_batch = layout.slots.saturating_mul(layout.mains.max(1)).saturating_mul(layout.copies.max(1));
    let concurrency = rental.request.concurrency;
    let allowed = amount("tpot", rental.slo.tpot_seconds);
    if expected.busy_tpot_seconds > rental.slo.tpot_seconds {
        let busy = amount("tpot", expected.busy_tpot_seconds);
        return Some(format!(
            "Beyond the limit: a decode step of all requests at once takes {busy}, more than the {allowed} of --tpot."
        ));
    }
    (rental.arrivals.is_none() && max_batch < concurrency).then(|| {
        format!(
            "Beyond the limit: {concurrency} requests at once decode slower than the {allowed} of --tpot; it holds for \
             {max_batch} at a time, and the others wait for their turn."
        )
    })
}

fn placement(layout: &NodesLayout, rental: &Rental) -> String {
    let bytes = |bytes: f64| amount("main", bytes);
    let mut pairs = match layout.device {
        Device::Gpu => {
            let gpus = format!("{} of {}", with_noun(layout.gpus, "GPU"), bytes(layout.gpu_bytes_each));
            vec![("GPU memory", format!("{} on {gpus}, KV cache included", bytes(layout.gpu_bytes)))]
        }
        Device::Cpu => {
            let rest = bytes(layout.rest_bytes);
            vec![("non-expert part", format!("{rest} in main memory, KV cache included"))]
        }
    };
    if layout.hosted_layers > 0 && layout.gpu_bytes > layout.rest_bytes {
        let hosted = format!("of {} of {} layers on the CPUs", layout.hosted_layers, rental.model.layers);
        pairs.push(("experts", hosted));
    }
    if layout.stages > 1 {
        pairs.push(("layers", format!("divided over {} nodes", layout.stages)));
    }
    let copies = layout.copies / layout.stages.max(1);
    if copies > 1 {
        pairs.push(("copies of the model", format!("{copies} on each node")));
    }
    pairs.push(("batch", format!("{} at most", with_noun(layout.slots, "request"))));
    let multiple = |mains: u32| if mains > 1 { format!("{mains}, each with ") } else { String::new() };
    pairs.push((
        if layout.mains > 1 { "main functions" } else { "main function" },
        format!(
            "{}{} of {} experts of every layer, {} and {:.1} vCPUs",
            multiple(layout.mains),
            layout.local_experts,
            rental.model.experts,
            bytes(layout.main_bytes),
            layout.main_vcpus
        ),
    ));
    if layout.remote_functions > 0 {
        pairs.push((
            "remote functions",
            format!(
                "{}{} with up to {} experts of a layer each, {} and {:.1} vCPUs",
                if layout.mains > 1 { format!("{} times ", layout.mains) } else { String::new() },
                layout.remote_functions,
                layout.remote_experts,
                bytes(layout.remote_bytes),
                layout.remote_vcpus
            ),
        ));
    }
    table::of_pairs(&pairs)
}

fn times(rental: &Rental, expected: ExpectedTimes) -> String {
    let row = |name: &str, value: f64, allowed: f64| {
        vec![name.to_owned(), amount("ttft", value), amount("ttft", allowed)]
    };
    let (load, format_time) = (expected.under_load, |value: f64| amount("tpot", value));
    let statistic = rental.slo.quantile.map_or("mean", remoe_planner::Quantile::name);
    let (ttft, tpot) = load.latency.map_or((load.ttft_seconds, load.tpot_seconds), |latency| {
        (latency.ttft.at(rental.slo.quantile), latency.tpot.at(rental.slo.quantile))
    });
    let mut rows = vec![
        row(&format!("TTFT, {statistic} under the load"), ttft, rental.slo.ttft_seconds),
        row(&format!("TPOT, {statistic} under the load"), tpot, rental.slo.tpot_seconds),
    ];
    if let Some(latency) = load.latency {
        for (name, of) in [("TTFT", latency.ttft), ("TPOT", latency.tpot)] {
            let quantiles =
                format!("{} / {} / {}", format_time(of.p50), format_time(of.p95), format_time(of.p99));
            rows.push(vec![format!("{name}, p50 / p95 / p99"), quantiles, String::new()]);
        }
    }
    rows.push(vec!["TTFT, single request".to_owned(), format_time(expected.ttft_seconds), String::new()]);
    rows.push(vec!["TPOT, single request".to_owned(), format_time(expected.tpot_seconds), String::new()]);
    if load.cold_share > 0.0 {
        let cold = format!("TTFT of cold requests ({:.1} %)", 100.0 * load.cold_share);
        rows.push(vec![
            cold,
            format!("{}, node provisioned", format_time(load.cold_ttft_seconds)),
            String::new(),
        ]);
    }
    let in_flight = expected.in_flight;
    rows.push(vec!["requests in flight".to_owned(), format!("{in_flight:.1}"), String::new()]);
    rows.push(vec![
        "throughput at full batches".to_owned(),
        format!("{:.0} tokens/s", expected.full_load_tokens_per_second),
        String::new(),
    ]);
    table::with_header(&["expected", "takes", "allowed"], rows)
}

fn rivals_table(rental: &Rental, answer: &NodesAnswer) -> String {
    let verdict = &answer.verdict;
    // Idle nodes cost as much as busy ones, so that the cost per token depends on the request rate.
    let per_hour =
        answer.requests_per_second.map(|rate| 3600.0 * rate * (rental.request.output_tokens + 1.0));
    let header = match per_hour {
        Some(_) => "$ per million tokens, at this rate",
        None => "$ per million tokens, full batches",
    };
    let per_million = |rival: &ArrangementEvaluation| match per_hour {
        Some(tokens) => rival.dollars_per_hour.map(|dollars| dollars / tokens * 1e6),
        None => rival.dollars_per_million_tokens,
    };
    let row = |rival: &ArrangementEvaluation| {
        let seconds = |select: fn(&ExpectedTimes) -> f64| {
            rival
                .expected
                .as_ref()
                .map_or_else(|| "-".to_owned(), |expected| amount("ttft", select(expected)))
        };
        let best = if verdict.best == Some(rival.name) { "* " } else { "  " };
        vec![
            format!("{best}{}", rival.name.meaning()),
            rival.dollars_per_hour.map_or_else(|| "-".to_owned(), dollars),
            per_million(rival).map_or_else(|| "-".to_owned(), dollars),
            seconds(|expected| expected.under_load.ttft_seconds),
            seconds(|expected| expected.under_load.tpot_seconds),
            if rival.feasible { rival.why.clone() } else { format!("no: {}", rival.why) },
        ]
    };
    let rows = verdict.rivals.iter().map(row).collect();
    table::with_header(&["  placement", "$/hour", header, "TTFT", "TPOT", "nodes"], rows)
}

/// Formats the cheapest nodes with quantised experts. Returns `None` for an empty list.
fn quantised(all: &[QuantisedNodes]) -> Option<String> {
    let line = |alternative: &QuantisedNodes| {
        let nodes = match &alternative.cheapest {
            Some(rival) => format!(
                "{} per hour, {} ({})",
                dollars(rival.dollars_per_hour.unwrap_or_default()),
                rival.name.meaning(),
                rival.why
            ),
            None => "no nodes on this list meet the limits".to_owned(),
        };
        format!("--experts-dtype {}: {nodes}", alternative.experts_dtype.name())
    };
    let lines: Vec<String> = all.iter().map(line).collect();
    (!lines.is_empty()).then(|| list("With quantised experts, which change answers a little", &lines))
}

/// Formats the comparison with an API provider.
fn api_comparison(api: ApiCost, answer: &NodesAnswer) -> String {
    let requests = match answer.requests_per_second {
        Some(_) => "the same requests",
        None => "as many requests as these nodes serve when they are full",
    };
    let hourly = dollars(api.dollars_per_hour);
    let break_even = api.break_even_requests_per_hour.map_or_else(String::new, |rate| {
        format!(
            " It costs as much as these nodes at {rate:.0} requests per hour; they serve {:.0} at most.",
            api.most_requests_per_hour
        )
    });
    format!("An API at the stated prices costs {hourly} per hour for {requests}.{break_even}")
}

fn sensitivity(verdict: &NodesComparison) -> String {
    match verdict.flips.as_slice() {
        [] => "No change of TPOT limit, GPU price, model size or request rate within a factor of 10 changes whether remote experts pay."
            .to_owned(),
        flips => list(
            "What changes whether remote experts pay",
            &flips.iter().map(|flip| flip.sentence.clone()).collect::<Vec<_>>(),
        ),
    }
}

/// Notes that the best arrangement requires another engine, if Remoe does not serve it.
fn other_engine_note(answer: &NodesAnswer) -> Option<String> {
    answer.verdict.best.filter(|best| !best.is_served_by_remoe())?;
    let ours = answer.best_of_remoe.as_ref();
    let ours = ours.and_then(|rival| Some((rival, rival.dollars_per_hour?)));
    let engine = "Remoe computes experts on CPUs; serve this placement with another engine.";
    Some(match ours {
        Some((rival, hourly)) => format!(
            "{engine} The cheapest placement of Remoe is {} ({}) for {} per hour; --manifest prints it.",
            rival.name.meaning(),
            rival.why,
            dollars(hourly),
        ),
        None => format!("{engine} No placement of Remoe meets the limits."),
    })
}

/// Formats a count with its noun in singular or plural.
fn with_noun(count: u32, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

fn list(title: &str, lines: &[String]) -> String {
    let lines = lines.iter().map(|line| format!("  - {line}"));
    std::iter::once(format!("{title}:")).chain(lines).collect::<Vec<_>>().join("\n")
}
