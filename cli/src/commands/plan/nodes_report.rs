//! Nodes to rent, in the form that people read.

use super::nodes::KnownModel;
use crate::output::table;
use remoe_planner::{
    Device, ExpectedTimes, NodesAnswer, NodesLayout, NodesVerdict, Rental, RentedNodes, RivalNodes, amount,
};

/// The nodes, what is on them, what they cost, and every rival.
pub(super) fn answer(
    model: &KnownModel,
    rental: &Rental,
    answer: &NodesAnswer,
    assumptions: &[String],
) -> String {
    let mut parts = vec![facts(model), answer.verdict.sentence.clone(), nodes(rental, answer)];
    parts.extend(answer.layout.as_ref().map(|layout| placement(layout, rental)));
    parts.extend(answer.expected.map(|expected| times(rental, expected)));
    parts.push(rivals(&answer.verdict));
    parts.push(changes(&answer.verdict));
    parts.extend(another_server(answer));
    parts.push(list("Assumed", assumptions));
    parts.join("\n\n")
}

/// Why no nodes of the list will do.
pub(super) fn infeasible(
    model: &KnownModel,
    rental: &Rental,
    answer: &NodesAnswer,
    assumptions: &[String],
) -> String {
    let slo = &rental.slo;
    let limits = format!(
        "limits: first token within {}, every further one within {}",
        amount("ttft", slo.ttft_seconds),
        amount("tpot", slo.tpot_seconds)
    );
    [facts(model), rivals(&answer.verdict), limits, list("Assumed", assumptions)].join("\n\n")
}

fn facts(model: &KnownModel) -> String {
    let billions = |parameters: u64| match parameters {
        0..=999_999_999 => format!("{:.1} million", parameters as f64 / 1e6),
        _ => format!("{:.1} billion", parameters as f64 / 1e9),
    };
    let seen = match (model.weights_seen, model.runs) {
        (true, _) => "their headers were read".to_owned(),
        (false, true) => "NOT SEEN: sizes follow from config.json alone".to_owned(),
        (false, false) => {
            "NOT SEEN: sizes follow from config.json alone, and this version does not run the model"
                .to_owned()
        }
    };
    let experts = model.moe_layers as u64 * model.experts as u64 * model.expert_bytes;
    let mut pairs = vec![
        (
            "model",
            format!(
                "{}, {} parameters, {} of them active for a token",
                model.family,
                billions(model.parameters),
                billions(model.active_parameters)
            ),
        ),
        ("weights", seen),
        (
            "bytes",
            format!(
                "{}: {} in {} x {} experts, {} in everything else; {}",
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
            money(f64::from(node.count) * each),
            if node.spot { "spot" } else { "" }.to_owned(),
        ]
    });
    let mut rows: Vec<Vec<String>> = rows.collect();
    let total = answer.dollars_per_hour.map_or_else(String::new, money);
    let share = match answer.alive_share < 1.0 {
        true => format!("there for {:.0} % of the time", 100.0 * answer.alive_share),
        false => String::new(),
    };
    rows.push(vec!["in all".to_owned(), share, total, String::new()]);
    table::with_header(&["nodes", "on them", "$ per hour", ""], rows)
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

fn placement(layout: &NodesLayout, rental: &Rental) -> String {
    let bytes = |bytes: f64| amount("main", bytes);
    let mut pairs = match layout.device {
        Device::Gpu => {
            let gpus = format!("{} GPU(s) of {}", layout.gpus, bytes(layout.gpu_bytes_each));
            vec![("GPU memory", format!("{} on {gpus}, keys and values included", bytes(layout.gpu_bytes)))]
        }
        Device::Cpu => {
            let rest = bytes(layout.rest_bytes);
            vec![("everything but experts", format!("{rest} in main memory, keys and values included"))]
        }
    };
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
    let mut rows = vec![
        row("first token", expected.ttft_seconds, rental.slo.ttft_seconds),
        row("every further token", expected.tpot_seconds, rental.slo.tpot_seconds),
    ];
    if let Some(met) = expected.met {
        rows = vec![
            row("first token, requests as they come", met.ttft_seconds, rental.slo.ttft_seconds),
            row("every further token", met.tpot_seconds, rental.slo.tpot_seconds),
            vec![
                "the same of a request alone".to_owned(),
                amount("tpot", expected.tpot_seconds),
                String::new(),
            ],
        ];
        if met.cold_share > 0.0 {
            let cold =
                format!("first token of the {:.1} % that find functions asleep", 100.0 * met.cold_share);
            rows.push(vec![
                cold,
                format!("{}, node there", amount("ttft", met.cold_ttft_seconds)),
                String::new(),
            ]);
        }
    }
    let at_once = rental.request.concurrency;
    if at_once > 1 {
        let busy = amount("tpot", expected.busy_tpot_seconds);
        rows.push(vec![
            format!("the same while {at_once} requests decode"),
            format!("about {busy}"),
            String::new(),
        ]);
        rows.push(vec![
            "all of them together".to_owned(),
            format!("about {:.0} tokens a second", expected.full_load_tokens_per_second),
            String::new(),
        ]);
    }
    table::with_header(&["expected", "takes", "allowed"], rows)
}

fn rivals(verdict: &NodesVerdict) -> String {
    let row = |rival: &RivalNodes| {
        let seconds = |of: fn(&ExpectedTimes) -> f64| {
            rival.expected.as_ref().map_or_else(|| "-".to_owned(), |expected| amount("ttft", of(expected)))
        };
        let best = if verdict.best == Some(rival.name) { "* " } else { "  " };
        vec![
            format!("{best}{}", rival.name.meaning()),
            rival.dollars_per_hour.map_or_else(|| "-".to_owned(), money),
            rival.dollars_per_million_tokens.map_or_else(|| "-".to_owned(), money),
            seconds(|expected| expected.ttft_seconds),
            seconds(|expected| expected.tpot_seconds),
            if rival.feasible { rival.why.clone() } else { format!("no: {}", rival.why) },
        ]
    };
    let rows = verdict.rivals.iter().map(row).collect();
    table::with_header(&["  way", "$ per hour", "$ per million tokens, busy", "TTFT", "TPOT", "on"], rows)
}

fn changes(verdict: &NodesVerdict) -> String {
    match verdict.flips.as_slice() {
        [] => "No change of the TPOT limit, of GPU prices or of the model's size within a factor of 10 turns this \
               answer."
            .to_owned(),
        flips => list(
            "What would turn this answer",
            &flips.iter().map(|flip| flip.sentence.clone()).collect::<Vec<_>>(),
        ),
    }
}

/// The best way may be one that this project does not serve.
fn another_server(answer: &NodesAnswer) -> Option<String> {
    answer.verdict.best.filter(|best| !best.is_served_by_remoe())?;
    let ours = answer.best_of_remoe.as_ref();
    let ours = ours.and_then(|rival| Some((rival, rival.dollars_per_hour?)));
    let engine = "Remoe computes experts on CPUs: another engine has to serve this one.";
    Some(match ours {
        Some((rival, dollars)) => format!(
            "{engine} Remoe's cheapest way is {} ({}) for ${dollars:.2} an hour; --manifest prints that one.",
            rival.name.meaning(),
            rival.why
        ),
        None => format!("{engine} No way of Remoe's keeps the limits."),
    })
}

fn list(title: &str, lines: &[String]) -> String {
    let lines = lines.iter().map(|line| format!("  - {line}"));
    std::iter::once(format!("{title}:")).chain(lines).collect::<Vec<_>>().join("\n")
}

fn money(dollars: f64) -> String {
    format!("{dollars:.2}")
}
