//! MoEDeployment manifest of a node recommendation.

use super::nodes_model::{KnownModel, WeightDtypes};
use remoe_hub::{ModelArgs, ModelLocation};
use remoe_planner::{
    Arrangement, ArrangementEvaluation, Device, NodeShape, NodesAnswer, NodesLayout, Rental, RentedNodes,
    dollars,
};
use remoe_process::format_duration;
use std::fmt::Write;
use std::time::Duration;

/// Step of memory sizes in a MoEDeployment, in bytes.
const MEMORY_STEP_BYTES: f64 = 1e8;
/// Limit of the length of a resource's name.
const MAX_NAME_LENGTH: usize = 40;

/// Inputs of a manifest.
pub(super) struct ManifestInputs<'a> {
    pub(super) source: &'a ModelArgs,
    pub(super) forms: WeightDtypes,
    pub(super) rental: &'a Rental,
    pub(super) answer: &'a NodesAnswer,
    pub(super) model: &'a KnownModel,
}

/// Formats the manifest of the cheapest arrangement that Remoe serves, with its node pools in comments. Returns `None` if
/// no such arrangement meets the limits.
pub(super) fn format_manifest(inputs: &ManifestInputs<'_>) -> Option<String> {
    let ManifestInputs { answer, rental, .. } = inputs;
    let best = answer.verdict.rivals.iter().find(|rival| Some(rival.name) == answer.verdict.best);
    let chosen = best.filter(|rival| rival.name.is_served_by_remoe()).or(answer.best_of_remoe.as_ref())?;
    let layout = chosen.layout.as_ref()?;
    let mut text = String::new();
    // Writing into a string cannot fail.
    let _infallible = write_comments(&mut text, inputs, best, chosen)
        .and_then(|()| write_resource(&mut text, inputs, chosen, layout, rental));
    Some(text)
}

fn write_comments(
    text: &mut String,
    inputs: &ManifestInputs<'_>,
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
    if !inputs.model.runs {
        writeln!(text, "# This version of Remoe cannot run this model; the operator rejects it.")?;
    }
    if matches!(inputs.source.model, ModelLocation::Folder(_)) {
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
    inputs: &ManifestInputs<'_>,
    chosen: &ArrangementEvaluation,
    layout: &NodesLayout,
    rental: &Rental,
) -> std::fmt::Result {
    let name = resource_name(&inputs.source.model);
    writeln!(
        text,
        "apiVersion: remoe.dev/v1alpha1\nkind: MoEDeployment\nmetadata:\n  name: {name}\nspec:\n  model:"
    )?;
    write_model(text, &inputs.source.model, &name)?;
    if let Some(dtype) = inputs.forms.dtype {
        writeln!(text, "    dtype: {}", dtype.name())?;
    }
    if let Some(experts) = inputs.forms.experts {
        writeln!(text, "    expertsDtype: {}", experts.name())?;
    }
    if let Some(dense) = inputs.forms.dense {
        writeln!(text, "    denseDtype: {}", dense.name())?;
    }
    let (slo, request) = (&rental.slo, &rental.request);
    writeln!(
        text,
        "  slo:\n    ttft: {}\n    tpot: {}",
        format_seconds(slo.ttft_seconds),
        format_seconds(slo.tpot_seconds)
    )?;
    writeln!(text, "  workload:")?;
    writeln!(text, "    typicalInputTokens: {}", request.input_tokens)?;
    writeln!(text, "    typicalOutputTokens: {}", request.output_tokens + 1.0)?;
    writeln!(text, "    maxInputTokens: {}", request.max_input_tokens.unwrap_or(request.input_tokens))?;
    let max_output = request.max_output_tokens.unwrap_or(request.output_tokens + 1.0);
    writeln!(text, "    maxOutputTokens: {}", max_output.max(request.output_tokens + 1.0))?;
    writeln!(text, "    concurrency: {}", layout.slots)?;
    // A MoEDeployment cannot contain recorded arrivals.
    if let Some(arrivals) = rental.arrivals.as_ref().filter(|arrivals| arrivals.recorded_seconds.is_none()) {
        let (hourly, burst) = (format_decimal(arrivals.per_second * 3600.0), format_decimal(arrivals.burst));
        writeln!(text, "    arrivals: {{perHour: \"{hourly}\", burst: \"{burst}\"}}")?;
    }
    let mains = layout.mains;
    match rental.arrivals.as_ref().and_then(|arrivals| arrivals.idle_seconds) {
        Some(idle) => {
            writeln!(text, "  scaling: {{min: 0, max: {mains}, idleWindow: {}}}", format_seconds(idle))?;
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

/// Formats a decimal number without an exponent, as MoEDeployments require.
fn format_decimal(value: f64) -> String {
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

/// Writes ranges with a single size: the one for which the nodes were chosen, rounded to 100 MB and 100 millicores.
fn write_size(text: &mut String, bytes: f64, vcpus: f64) -> std::fmt::Result {
    let megabytes = (bytes / MEMORY_STEP_BYTES).ceil().max(1.0) * 100.0;
    let millicores = ((vcpus * 10.0).floor() * 100.0).max(100.0);
    writeln!(text, "    memoryMB: {{min: {megabytes}, max: {megabytes}, step: 100}}")?;
    writeln!(text, "    cpu: {{min: {millicores}, max: {millicores}, step: 100}}")
}

/// Writes unit prices that add up to the prices of the nodes. A node's price without GPUs is divided equally between its
/// vCPUs and its memory. With GPUs, the rest of the price is theirs.
fn write_prices(
    text: &mut String,
    nodes: &[RentedNodes],
    layout: &NodesLayout,
    shapes: &[NodeShape],
) -> std::fmt::Result {
    let shape = |node: &RentedNodes| shapes.iter().find(|shape| shape.name == node.shape);
    let rented: Vec<&NodeShape> = nodes.iter().filter_map(shape).collect();
    let without_gpu = rented.iter().rev().find(|shape| shape.gpus == 0);
    let (core, gigabyte) = without_gpu.map_or((0.03, 0.004), |shape| {
        (shape.per_hour / 2.0 / shape.vcpus, shape.per_hour / 2.0 / (shape.memory_bytes / 1e9))
    });
    writeln!(text, "  pricing:\n    billing: Reserved")?;
    writeln!(text, "    cpuCoreHour: \"{core:.6}\"\n    memoryGBHour: \"{gigabyte:.6}\"")?;
    let Some(main) = rented.first().filter(|_| layout.device == Device::Gpu) else { return Ok(()) };
    let host = core * main.vcpus + gigabyte * main.memory_bytes / 1e9;
    let gpu = (main.per_hour - host).max(main.per_hour / 10.0) / f64::from(main.gpus.max(1));
    writeln!(text, "    gpuHour: \"{gpu:.6}\"\n    gpuMemoryMB: {}", (main.gpu_bytes / 1e6).floor())
}

/// Converts the name of the model to a DNS label that starts with a letter.
fn resource_name(model: &ModelLocation) -> String {
    let name = model.name().to_lowercase();
    let dashed: String =
        name.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' }).collect();
    let label = dashed.trim_start_matches(|letter: char| !letter.is_ascii_lowercase());
    let label: String = label.chars().take(MAX_NAME_LENGTH).collect();
    match label.trim_end_matches('-') {
        "" => "model".to_owned(),
        label => label.to_owned(),
    }
}

/// Formats `seconds` as a duration of custom resources, rounded to microseconds.
fn format_seconds(seconds: f64) -> String {
    format_duration(Duration::from_micros((seconds * 1e6).round().max(1.0) as u64))
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}
