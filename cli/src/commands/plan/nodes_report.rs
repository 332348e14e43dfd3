//! Nodes to rent, in the form that people read.

use super::nodes::Quantised;
use super::nodes_model::KnownModel;
use super::nodes_prices::ApiCost;
use crate::output::table;
use remoe_planner::{
    ArrangementEvaluation, Device, ExpectedTimes, NodesAnswer, NodesComparison, NodesLayout, Rental,
    RentedNodes, amount, dollars,
};

/// Figures that stand beside an answer.
pub(super) struct ReportContext<'a> {
    pub(super) api: Option<ApiCost>,
    pub(super) quantised: &'a [Quantised],
    pub(super) assumptions: &'a [String],
}

/// The nodes, what is on them, what they cost, and every rival.
pub(super) fn answer(
    model: &KnownModel,
    rental: &Rental,
    answer: &NodesAnswer,
    beside: &ReportContext<'_>,
) -> String {
    let mut parts = vec![facts(model), answer.verdict.sentence.clone()];
    parts.extend(slower_together(rental, answer));
    parts.push(nodes(rental, answer));
    parts.extend(answer.layout.as_ref().map(|layout| placement(layout, rental)));
    parts.extend(answer.expected.map(|expected| times(rental, expected)));
    parts.push(rivals(rental, answer));
    parts.extend(quantised(beside.quantised));
    parts.extend(beside.api.map(|api| beside_api(api, answer)));
    parts.push(changes(&answer.verdict));
    parts.extend(another_server(answer));
    parts.push(list("Assumed", beside.assumptions));
    parts.join("\n\n")
}

/// Why no nodes of the list will do.
pub(super) fn infeasible(
    model: &KnownModel,
    rental: &Rental,
    answer: &NodesAnswer,
    smaller: &[Quantised],
    assumptions: &[String],
) -> String {
    let slo = &rental.slo;
    let limits = format!(
        "limits: TTFT {}, TPOT {}",
        amount("ttft", slo.ttft_seconds),
        amount("tpot", slo.tpot_seconds)
    );
    let mut parts = vec![facts(model), rivals(rental, answer), limits];
    parts.extend(quantised(smaller));
    parts.push(list("Assumed", assumptions));
    parts.join("\n\n")
}

fn facts(model: &KnownModel) -> String {
    let billions = |parameters: u64| match parameters {
        0..=999_999_999 => format!("{:.1} million", parameters as f64 / 1e6),
        _ => format!("{:.1} billion", parameters as f64 / 1e9),
    };
    let seen = match (model.weights_seen, model.runs) {
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
        ("weights", seen),
        (
            "bytes",
            format!(
                "{}: {} in {} x {} experts, {} in the non-expert part; {}",
                table::bytes(model.total_bytes),
                table::bytes(experts),
                model.moe_layers,
                model.experts,
                table::bytes(model.rest_bytes),
                model.counted
            ),
        ),
    ];
    if let Some(because) = &model.because {
        pairs.push(("", because.clone()));
    }
    table::of_pairs(&pairs)
}

fn nodes(rental: &Rental, answer: &NodesAnswer) -> String {
    let mains = answer.layout.map_or(1, |layout| layout.mains);
    let rows = answer.nodes.iter().map(|node| {
        let each =
            rental.shapes.iter().find(|shape| shape.name == node.shape).map_or(0.0, |shape| shape.per_hour);
        vec![
            format!("{} x {}", node.count, node.shape),
            hosts(node, mains),
            dollars(f64::from(node.count) * each),
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

/// `main`, or `group-0 to group-3, 2 of each, up to 4 on each node`.
fn hosts(node: &RentedNodes, mains: u32) -> String {
    let (Some(first), Some(last)) = (node.hosts.first(), node.hosts.last()) else { return String::new() };
    let all = node.hosts.len() * mains as usize;
    let each = all.div_ceil(node.count.max(1) as usize);
    let mut text = if node.hosts.len() == 1 { first.clone() } else { format!("{first} to {last}") };
    if mains > 1 {
        text.push_str(&format!(", {mains} of each"));
    }
    if node.count > 1 && each > 1 {
        text.push_str(&format!(", up to {each} on each node"));
    }
    text
}

/// Says that requests which all decode at once miss the limit of TPOT, where they do.
fn slower_together(rental: &Rental, answer: &NodesAnswer) -> Option<String> {
    let (layout, expected) = (answer.layout?, answer.expected?);
    let at_once = layout.slots.saturating_mul(layout.mains.max(1)).saturating_mul(layout.copies.max(1));
    let wanted = rental.request.concurrency;
    let allowed = amount("tpot", rental.slo.tpot_seconds);
    if expected.busy_tpot_seconds > rental.slo.tpot_seconds {
        let busy = amount("tpot", expected.busy_tpot_seconds);
        return Some(format!(
            "Beyond the limit: a decode step of all requests at once takes {busy}, more than the {allowed} of --tpot."
        ));
    }
    (rental.arrivals.is_none() && at_once < wanted).then(|| {
        format!(
            "Beyond the limit: {wanted} requests at once decode slower than the {allowed} of --tpot; it holds for \
             {at_once} at a time, and the others wait for their turn."
        )
    })
}

fn placement(layout: &NodesLayout, rental: &Rental) -> String {
    let bytes = |bytes: f64| amount("main", bytes);
    let mut pairs = match layout.device {
        Device::Gpu => {
            let gpus = format!("{} of {}", counted(layout.gpus, "GPU"), bytes(layout.gpu_bytes_each));
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
    pairs.push(("batch", format!("{} at most", counted(layout.slots, "request"))));
    let several = |mains: u32| if mains > 1 { format!("{mains}, each with ") } else { String::new() };
    pairs.push((
        if layout.mains > 1 { "main functions" } else { "main function" },
        format!(
            "{}{} of {} experts of every layer, {} and {:.1} vCPUs",
            several(layout.mains),
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
    let (met, alone) = (expected.under_load, |value: f64| amount("tpot", value));
    let limited = rental.slo.quantile.map_or("mean", remoe_planner::Quantile::name);
    let (ttft, tpot) = met.latency.map_or((met.ttft_seconds, met.tpot_seconds), |latency| {
        (latency.ttft.at(rental.slo.quantile), latency.tpot.at(rental.slo.quantile))
    });
    let mut rows = vec![
        row(&format!("TTFT, {limited} under the load"), ttft, rental.slo.ttft_seconds),
        row(&format!("TPOT, {limited} under the load"), tpot, rental.slo.tpot_seconds),
    ];
    if let Some(latency) = met.latency {
        for (name, of) in [("TTFT", latency.ttft), ("TPOT", latency.tpot)] {
            let quantiles = format!("{} / {} / {}", alone(of.p50), alone(of.p95), alone(of.p99));
            rows.push(vec![format!("{name}, p50 / p95 / p99"), quantiles, String::new()]);
        }
    }
    rows.push(vec!["TTFT, single request".to_owned(), alone(expected.ttft_seconds), String::new()]);
    rows.push(vec!["TPOT, single request".to_owned(), alone(expected.tpot_seconds), String::new()]);
    if met.cold_share > 0.0 {
        let cold = format!("TTFT of cold requests ({:.1} %)", 100.0 * met.cold_share);
        rows.push(vec![cold, format!("{}, node provisioned", alone(met.cold_ttft_seconds)), String::new()]);
    }
    let at_once = expected.in_flight;
    rows.push(vec!["requests in flight".to_owned(), format!("{at_once:.1}"), String::new()]);
    rows.push(vec![
        "throughput at full batches".to_owned(),
        format!("{:.0} tokens/s", expected.full_load_tokens_per_second),
        String::new(),
    ]);
    table::with_header(&["expected", "takes", "allowed"], rows)
}

fn rivals(rental: &Rental, answer: &NodesAnswer) -> String {
    let verdict = &answer.verdict;
    // Idle nodes cost as much as busy ones, so that the price of a token depends on how many are wanted.
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
        let seconds = |of: fn(&ExpectedTimes) -> f64| {
            rival.expected.as_ref().map_or_else(|| "-".to_owned(), |expected| amount("ttft", of(expected)))
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

/// Prices with quantised experts; none where the form of experts was asked for.
fn quantised(all: &[Quantised]) -> Option<String> {
    let line = |one: &Quantised| {
        let of = match &one.cheapest {
            Some(rival) => format!(
                "{} per hour, {} ({})",
                dollars(rival.dollars_per_hour.unwrap_or_default()),
                rival.name.meaning(),
                rival.why
            ),
            None => "no nodes on this list meet the limits".to_owned(),
        };
        format!("--experts-dtype {}: {of}", one.experts_dtype.name())
    };
    let lines: Vec<String> = all.iter().map(line).collect();
    (!lines.is_empty()).then(|| list("With quantised experts, which change answers a little", &lines))
}

/// The line that compares with an API provider.
fn beside_api(api: ApiCost, answer: &NodesAnswer) -> String {
    let requests = match answer.requests_per_second {
        Some(_) => "the same requests",
        None => "as many requests as these nodes serve when they are full",
    };
    let hourly = dollars(api.dollars_per_hour);
    let even = api.break_even_requests_per_hour.map_or_else(String::new, |rate| {
        format!(
            " It costs as much as these nodes at {rate:.0} requests per hour; they serve {:.0} at most.",
            api.most_requests_per_hour
        )
    });
    format!("An API at the stated prices costs {hourly} per hour for {requests}.{even}")
}

fn changes(verdict: &NodesComparison) -> String {
    match verdict.flips.as_slice() {
        [] => "No change of TPOT limit, GPU price, model size or request rate within a factor of 10 changes whether remote experts pay."
            .to_owned(),
        flips => list(
            "What changes whether remote experts pay",
            &flips.iter().map(|flip| flip.sentence.clone()).collect::<Vec<_>>(),
        ),
    }
}

/// The best way may be one that this project does not serve.
fn another_server(answer: &NodesAnswer) -> Option<String> {
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

/// So many of a thing.
fn counted(count: u32, one: &str) -> String {
    format!("{count} {one}{}", if count == 1 { "" } else { "s" })
}

fn list(title: &str, lines: &[String]) -> String {
    let lines = lines.iter().map(|line| format!("  - {line}"));
    std::iter::once(format!("{title}:")).chain(lines).collect::<Vec<_>>().join("\n")
}
