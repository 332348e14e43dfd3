//! The MoEDeployment that an answer about nodes means.

use super::nodes_model::{Forms, KnownModel};
use remoe_hub::{ModelArgs, ModelLocation};
use remoe_planner::{
    Arrangement, ArrangementEvaluation, Device, NodeShape, NodesAnswer, NodesLayout, Rental, RentedNodes,
    dollars,
};
use remoe_process::format_duration;
use std::fmt::Write;
use std::time::Duration;

/// Sizes in a resource go by steps of 100 MB.
const STEP: f64 = 1e8;
/// Longest name of a resource.
const LONGEST_NAME: usize = 40;

/// Inputs of a manifest.
pub(super) struct ManifestInputs<'a> {
    pub(super) source: &'a ModelArgs,
    pub(super) forms: Forms,
    pub(super) rental: &'a Rental,
    pub(super) answer: &'a NodesAnswer,
    pub(super) model: &'a KnownModel,
}

/// The resource in YAML, with the node pools it means in comments: of the cheapest way in which Remoe itself
/// serves the model. `None` where no such way keeps the limits.
pub(super) fn of(subject: &ManifestInputs<'_>) -> Option<String> {
    let ManifestInputs { answer, rental, .. } = subject;
    let best = answer.verdict.rivals.iter().find(|rival| Some(rival.name) == answer.verdict.best);
    let chosen = best.filter(|rival| rival.name.is_served_by_remoe()).or(answer.best_of_remoe.as_ref())?;
    let layout = chosen.layout.as_ref()?;
    let mut text = String::new();
    // Writing into a string cannot fail.
    let _infallible = write_comments(&mut text, subject, best, chosen)
        .and_then(|()| write_resource(&mut text, subject, chosen, layout, rental));
    Some(text)
}

fn write_comments(
    text: &mut String,
    subject: &ManifestInputs<'_>,
    best: Option<&ArrangementEvaluation>,
    chosen: &ArrangementEvaluation,
) -> std::fmt::Result {
    let cost = |rival: &ArrangementEvaluation| rival.dollars_per_hour.unwrap_or(0.0);
    writeln!(text, "# {}: {} per hour", capitalised(chosen.name.meaning()), dollars(cost(chosen)))?;
    if let Some(best) = best.filter(|best| best.name != chosen.name) {
        let message = "is cheaper, but not served by Remoe";
        writeln!(text, "# ({} {message}: {} per hour).", best.name.meaning(), dollars(cost(best)))?;
    }
    writeln!(text, "# Node pools of this plan; pods select nodes by their memory, CPU and GPU requests:")?;
    for node in &chosen.nodes {
        writeln!(
            text,
            "#   {} x {}{}: {}",
            node.count,
            node.shape,
            if node.spot { " (spot)" } else { "" },
            hosts(node)
        )?;
    }
    if !subject.model.runs {
        writeln!(text, "# This version of Remoe cannot run this model; the operator rejects it.")?;
    }
    if matches!(subject.source.model, ModelLocation::Folder(_)) {
        writeln!(
            text,
            "# The model is a local folder: copy it into a PersistentVolumeClaim named \"models\" first."
        )?;
    }
    Ok(())
}

fn hosts(node: &RentedNodes) -> String {
    match (node.hosts.first(), node.hosts.last()) {
        (Some(first), Some(last)) if first != last => format!("{first} to {last}"),
        (first, _) => first.cloned().unwrap_or_default(),
    }
}

fn write_resource(
    text: &mut String,
    subject: &ManifestInputs<'_>,
    chosen: &ArrangementEvaluation,
    layout: &NodesLayout,
    rental: &Rental,
) -> std::fmt::Result {
    let name = resource_name(&subject.source.model);
    writeln!(
        text,
        "apiVersion: remoe.dev/v1alpha1\nkind: MoEDeployment\nmetadata:\n  name: {name}\nspec:\n  model:"
    )?;
    write_model(text, &subject.source.model, &name)?;
    if let Some(dtype) = subject.forms.dtype {
        writeln!(text, "    dtype: {}", dtype.name())?;
    }
    if let Some(experts) = subject.forms.experts {
        writeln!(text, "    expertsDtype: {}", experts.name())?;
    }
    if let Some(dense) = subject.forms.dense {
        writeln!(text, "    denseDtype: {}", dense.name())?;
    }
    let (slo, request) = (&rental.slo, &rental.request);
    writeln!(
        text,
        "  slo:\n    ttft: {}\n    tpot: {}",
        duration(slo.ttft_seconds),
        duration(slo.tpot_seconds)
    )?;
    writeln!(text, "  workload:")?;
    writeln!(text, "    typicalInputTokens: {}", request.input_tokens)?;
    writeln!(text, "    typicalOutputTokens: {}", request.output_tokens + 1.0)?;
    writeln!(text, "    maxInputTokens: {}", request.max_input_tokens.unwrap_or(request.input_tokens))?;
    let most_output = request.max_output_tokens.unwrap_or(request.output_tokens + 1.0);
    writeln!(text, "    maxOutputTokens: {}", most_output.max(request.output_tokens + 1.0))?;
    writeln!(text, "    concurrency: {}", layout.slots)?;
    // Recorded times have no place in the resource.
    if let Some(arrivals) = rental.arrivals.as_ref().filter(|arrivals| arrivals.recorded_seconds.is_none()) {
        let (hourly, burst) = (decimal(arrivals.per_second * 3600.0), decimal(arrivals.burst));
        writeln!(text, "    arrivals: {{perHour: \"{hourly}\", burst: \"{burst}\"}}")?;
    }
    let mains = layout.mains;
    match rental.arrivals.as_ref().and_then(|arrivals| arrivals.idle_seconds) {
        Some(idle) => {
            writeln!(text, "  scaling: {{min: 0, max: {mains}, idleWindow: {}}}", duration(idle))?;
        }
        None if mains > 1 => writeln!(text, "  replicas: {mains}")?,
        None => {}
    }
    let device = if layout.device == Device::Gpu { "cuda" } else { "cpu" };
    writeln!(text, "  main:\n    device: {device}")?;
    if layout.device == Device::Gpu {
        writeln!(text, "    gpu: {{count: {}}}", layout.gpus)?;
    }
    write_size(text, layout.main_bytes, layout.main_vcpus)?;
    writeln!(text, "  remoteExperts:")?;
    match layout.remote_functions {
        0 => writeln!(text, "    mode: Never")?,
        count => {
            writeln!(text, "    mode: Always")?;
            write_size(text, layout.remote_bytes, layout.remote_vcpus)?;
            writeln!(text, "    maxReplicas: {mains}")?;
            if chosen.name == Arrangement::Sliced {
                writeln!(text, "    maxGroups: {count}")?;
            }
        }
    }
    write_prices(text, &chosen.nodes, layout, &rental.shapes)
}

/// A decimal number without an exponent, as the resource takes it.
fn decimal(value: f64) -> String {
    let text = format!("{value:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn write_model(text: &mut String, model: &ModelLocation, name: &str) -> std::fmt::Result {
    match model {
        ModelLocation::Folder(_) => writeln!(text, "    source: pvc://models/{name}"),
        ModelLocation::Hub { repository, revision } => {
            writeln!(text, "    source: hf://{repository}")?;
            revision.iter().try_for_each(|revision| writeln!(text, "    revision: {revision}"))
        }
        other => writeln!(text, "    source: {other}"),
    }
}

/// One size is allowed: the one that the nodes were chosen for, in steps of 100 MB and 100 thousandths of a vCPU.
fn write_size(text: &mut String, bytes: f64, vcpus: f64) -> std::fmt::Result {
    let megabytes = (bytes / STEP).ceil().max(1.0) * 100.0;
    let millicores = ((vcpus * 10.0).floor() * 100.0).max(100.0);
    writeln!(text, "    memoryMB: {{min: {megabytes}, max: {megabytes}, step: 100}}")?;
    writeln!(text, "    cpu: {{min: {millicores}, max: {millicores}, step: 100}}")
}

/// Unit prices that come to what the nodes cost: of a node without GPUs half for its vCPUs and half for its
/// memory; of one with GPUs the rest of its price for them.
fn write_prices(
    text: &mut String,
    nodes: &[RentedNodes],
    layout: &NodesLayout,
    shapes: &[NodeShape],
) -> std::fmt::Result {
    let shape = |node: &RentedNodes| shapes.iter().find(|shape| shape.name == node.shape);
    let rented: Vec<&NodeShape> = nodes.iter().filter_map(shape).collect();
    let plain = rented.iter().rev().find(|shape| shape.gpus == 0);
    let (core, gigabyte) = plain.map_or((0.03, 0.004), |shape| {
        (shape.per_hour / 2.0 / shape.vcpus, shape.per_hour / 2.0 / (shape.memory_bytes / 1e9))
    });
    writeln!(text, "  pricing:\n    billing: Reserved")?;
    writeln!(text, "    cpuCoreHour: \"{core:.6}\"\n    memoryGBHour: \"{gigabyte:.6}\"")?;
    let Some(main) = rented.first().filter(|_| layout.device == Device::Gpu) else { return Ok(()) };
    let host = core * main.vcpus + gigabyte * main.memory_bytes / 1e9;
    let gpu = (main.per_hour - host).max(main.per_hour / 10.0) / f64::from(main.gpus.max(1));
    writeln!(text, "    gpuHour: \"{gpu:.6}\"\n    gpuMemoryMB: {}", (main.gpu_bytes / 1e6).floor())
}

/// A DNS label that starts with a letter, after the model.
fn resource_name(model: &ModelLocation) -> String {
    let name = model.name().to_lowercase();
    let dashed: String =
        name.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' }).collect();
    let label = dashed.trim_start_matches(|letter: char| !letter.is_ascii_lowercase());
    let label: String = label.chars().take(LONGEST_NAME).collect();
    match label.trim_end_matches('-') {
        "" => "model".to_owned(),
        label => label.to_owned(),
    }
}

/// Returns `seconds`, to the microsecond, as custom resources take it.
fn duration(seconds: f64) -> String {
    format_duration(Duration::from_micros((seconds * 1e6).round().max(1.0) as u64))
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}
