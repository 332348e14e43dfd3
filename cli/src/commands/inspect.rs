//! `remoe inspect`: shows the architecture and sizes of a checkpoint.

use crate::exit::CliError;
use crate::output::{json, table};
use clap::Args;
use remoe_hub::ModelArgs;
use remoe_kernels::{Pool, PoolConfig};
use remoe_model::{Checkpoint, ExpertsDtype, Ignored, Inspection};
use remoe_weights::{LoadError, QuantisationError, quantisation_errors};
use serde::Serialize;
use std::io::Write;

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) source: ModelArgs,
    /// Measure the error of int8, int4 and MXFP4 experts; reads some weights of each layer
    #[arg(long)]
    pub(crate) quantization_error: bool,
}

/// Number of experts per layer whose quantisation error is measured, at equal distances.
const COMPARED_EXPERTS: usize = 4;
/// Number of random input rows for each of these experts.
const COMPARED_ROWS: usize = 16;

/// Output of the command as JSON.
#[derive(Serialize)]
struct InspectOutput<'a> {
    #[serde(flatten)]
    inspection: &'a Inspection,
    #[serde(skip_serializing_if = "Option::is_none")]
    revision: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    quantization_error: Option<QuantisationReport>,
}

/// Errors of quantised experts.
#[derive(Serialize)]
struct QuantisationReport {
    experts_per_layer: usize,
    rows: usize,
    /// Distribution that the rows are drawn from.
    drawn_from: &'static str,
    layers: Vec<LayerErrors>,
}

#[derive(Serialize)]
struct LayerErrors {
    layer: usize,
    int8: RelativeErrors,
    int4: RelativeErrors,
    mxfp4: RelativeErrors,
}

/// Relative errors: root mean square of the differences, divided by that of the values.
#[derive(Serialize)]
struct RelativeErrors {
    weights: f64,
    outputs: f64,
}

/// Inspects a checkpoint, and prints the result.
pub(crate) fn run(args: &InspectArgs, as_json: bool) -> Result<(), CliError> {
    let opened = args.source.open()?;
    let inspection = opened.checkpoint.inspect()?;
    let quantised = args
        .quantization_error
        .then(|| QuantisationReport::measure(&opened.checkpoint, &inspection))
        .transpose()?;
    if as_json {
        json::print(&InspectOutput {
            inspection: &inspection,
            revision: opened.revision.as_deref(),
            quantization_error: quantised,
        })?;
        return Ok(());
    }
    let mut out = anstream::stdout().lock();
    writeln!(out, "{}", to_table(&inspection))?;
    if let Some(quantised) = quantised {
        writeln!(out, "\n{}", quantised.to_table())?;
    }
    Ok(())
}

impl QuantisationReport {
    fn measure(checkpoint: &Checkpoint, inspection: &Inspection) -> Result<Self, CliError> {
        let pool = Pool::new(PoolConfig::default()).map_err(|error| CliError::runtime(error.to_string()))?;
        let count = COMPARED_EXPERTS.min(inspection.experts);
        let experts: Vec<u32> = (0..count).map(|index| (index * inspection.experts / count) as u32).collect();
        let to_relative =
            |error: QuantisationError| RelativeErrors { weights: error.weights, outputs: error.outputs };
        let formats = [ExpertsDtype::Int8, ExpertsDtype::Int4, ExpertsDtype::Mxfp4];
        let layers = inspection.moe_layers.iter().map(|&layer| {
            match quantisation_errors(checkpoint, layer, &experts, formats, COMPARED_ROWS, &pool) {
                Ok(errors) => {
                    let [int8, int4, mxfp4] = errors.map(to_relative);
                    Ok(LayerErrors { layer, int8, int4, mxfp4 })
                }
                Err(LoadError::Checkpoint(error)) => Err(CliError::from(error)),
                Err(error) => Err(CliError::runtime(error.to_string())),
            }
        });
        Ok(Self {
            experts_per_layer: count,
            rows: COMPARED_ROWS,
            drawn_from: "standard normal",
            layers: layers.collect::<Result<_, _>>()?,
        })
    }

    fn to_table(&self) -> String {
        let percent = |share: f64| format!("{:.2} %", 100.0 * share);
        let rows = self.layers.iter().map(|layer| {
            let errors = [&layer.int8, &layer.int4, &layer.mxfp4]
                .map(|errors| [errors.weights, errors.outputs].map(percent));
            std::iter::once(layer.layer.to_string()).chain(errors.into_iter().flatten()).collect()
        });
        let header = [
            "layer",
            "int8 weights",
            "int8 outputs",
            "int4 weights",
            "int4 outputs",
            "mxfp4 weights",
            "mxfp4 outputs",
        ];
        format!(
            "Quantisation error (relative RMS), {} experts per layer, outputs of {} standard normal rows\n{}",
            self.experts_per_layer,
            self.rows,
            table::with_header(&header, rows.collect())
        )
    }
}

fn to_table(inspection: &Inspection) -> String {
    let non_expert: u64 = inspection.non_expert_layer_bytes.iter().sum();
    let all_experts = inspection.moe_layers.len() as u64 * inspection.experts as u64;
    let dtype = match &inspection.stored_as {
        None => inspection.dtype.clone(),
        Some(stored) => {
            let decoded = table::bytes(stored.decoded_total_bytes);
            format!("{}, stored as {} ({decoded} in {0})", inspection.dtype, stored.form)
        }
    };
    let context = match inspection.served_context() {
        served if served < inspection.context_length => {
            format!("{} tokens, of which {served} are served", inspection.context_length)
        }
        all => format!("{all} tokens"),
    };
    let mut rows = vec![
        ("family", inspection.family.clone()),
        ("dtype", dtype),
        ("fingerprint", inspection.fingerprint.clone()),
        ("layers", format!("{}, of which {} with experts", inspection.layers, inspection.moe_layers.len())),
        ("experts", format!("{} per layer, {} per token", inspection.experts, inspection.top_k)),
        ("shared experts", inspection.shared_experts.to_string()),
        ("hidden size", inspection.hidden_size.to_string()),
        ("vocabulary", inspection.vocab_size.to_string()),
        ("context", context),
        ("", String::new()),
        ("one expert", table::bytes(inspection.expert_bytes)),
        ("all experts", table::bytes(all_experts * inspection.expert_bytes)),
        ("other layer weights", table::bytes(non_expert)),
        ("embedding and head", table::bytes(inspection.outside_bytes)),
        ("total", table::bytes(inspection.total_bytes)),
    ];
    if let Some(ignored) = &inspection.ignored {
        rows.push(("ignored", format!("{}, {}", describe_ignored(ignored), table::bytes(ignored.bytes))));
    }
    rows.extend([
        ("", String::new()),
        ("KV cache per token", table::bytes(inspection.kv_bytes_per_token)),
        ("hidden state per token", table::bytes(inspection.token_bytes)),
    ]);
    table::of_pairs(&rows)
}

/// Describes the ignored tensors of a checkpoint.
fn describe_ignored(ignored: &Ignored) -> String {
    match ignored.prediction_layers.as_slice() {
        [] => "recomputed buffers".to_owned(),
        [layer] => format!("layer {layer} (predicts further tokens)"),
        [first, .., last] => format!("layers {first} to {last} (predict further tokens)"),
    }
}
