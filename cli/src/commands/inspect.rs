//! `remoe inspect`: what a checkpoint is.

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

/// Experts of each layer that are compared with themselves quantised, at equal distances.
const COMPARED_EXPERTS: usize = 4;
/// Rows that these compute.
const COMPARED_ROWS: usize = 16;

/// The facts, and the commit of the hub that they are of.
#[derive(Serialize)]
struct WithRevision<'a> {
    #[serde(flatten)]
    inspection: &'a Inspection,
    #[serde(skip_serializing_if = "Option::is_none")]
    revision: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    quantization_error: Option<Quantisation>,
}

/// Errors of quantised experts.
#[derive(Serialize)]
struct Quantisation {
    experts_per_layer: usize,
    rows: usize,
    /// Distribution that the rows are drawn from.
    drawn_from: &'static str,
    layers: Vec<LayerErrors>,
}

#[derive(Serialize)]
struct LayerErrors {
    layer: usize,
    int8: Errors,
    int4: Errors,
    mxfp4: Errors,
}

/// Root mean squares of differences over those of the values.
#[derive(Serialize)]
struct Errors {
    weights: f64,
    outputs: f64,
}

/// Reads the facts and prints them.
pub(crate) fn run(args: &InspectArgs, as_json: bool) -> Result<(), CliError> {
    let opened = args.source.open()?;
    let inspection = opened.checkpoint.inspect()?;
    let quantised =
        args.quantization_error.then(|| Quantisation::of(&opened.checkpoint, &inspection)).transpose()?;
    if as_json {
        json::print(&WithRevision {
            inspection: &inspection,
            revision: opened.revision.as_deref(),
            quantization_error: quantised,
        })?;
        return Ok(());
    }
    let mut out = anstream::stdout().lock();
    writeln!(out, "{}", for_people(&inspection))?;
    if let Some(quantised) = quantised {
        writeln!(out, "\n{}", quantised.for_people())?;
    }
    Ok(())
}

impl Quantisation {
    fn of(checkpoint: &Checkpoint, facts: &Inspection) -> Result<Self, CliError> {
        let pool = Pool::new(PoolConfig::default()).map_err(|error| CliError::runtime(error.to_string()))?;
        let count = COMPARED_EXPERTS.min(facts.experts);
        let experts: Vec<u32> = (0..count).map(|index| (index * facts.experts / count) as u32).collect();
        let errors = |error: QuantisationError| Errors { weights: error.weights, outputs: error.outputs };
        let formats = [ExpertsDtype::Int8, ExpertsDtype::Int4, ExpertsDtype::Mxfp4];
        let layers = facts.moe_layers.iter().map(|&layer| {
            match quantisation_errors(checkpoint, layer, &experts, formats, COMPARED_ROWS, &pool) {
                Ok(of_formats) => {
                    let [int8, int4, mxfp4] = of_formats.map(errors);
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

    fn for_people(&self) -> String {
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

fn for_people(facts: &Inspection) -> String {
    let non_expert: u64 = facts.non_expert_layer_bytes.iter().sum();
    let experts_in_all = facts.moe_layers.len() as u64 * facts.experts as u64;
    let dtype = match &facts.stored_as {
        None => facts.dtype.clone(),
        Some(stored) => {
            let decoded = table::bytes(stored.decoded_total_bytes);
            format!("{}, stored as {} ({decoded} in {0})", facts.dtype, stored.form)
        }
    };
    let context = match facts.served_context() {
        served if served < facts.context_length => {
            format!("{} tokens, of which {served} are served", facts.context_length)
        }
        all => format!("{all} tokens"),
    };
    let mut rows = vec![
        ("family", facts.family.clone()),
        ("dtype", dtype),
        ("fingerprint", facts.fingerprint.clone()),
        ("layers", format!("{}, of which {} with experts", facts.layers, facts.moe_layers.len())),
        ("experts", format!("{} per layer, {} per token", facts.experts, facts.top_k)),
        ("shared experts", facts.shared_experts.to_string()),
        ("hidden size", facts.hidden_size.to_string()),
        ("vocabulary", facts.vocab_size.to_string()),
        ("context", context),
        ("", String::new()),
        ("one expert", table::bytes(facts.expert_bytes)),
        ("all experts", table::bytes(experts_in_all * facts.expert_bytes)),
        ("other layer weights", table::bytes(non_expert)),
        ("embedding and head", table::bytes(facts.outside_bytes)),
        ("total", table::bytes(facts.total_bytes)),
    ];
    if let Some(ignored) = &facts.ignored {
        rows.push(("ignored", format!("{}, {}", besides(ignored), table::bytes(ignored.bytes))));
    }
    rows.extend([
        ("", String::new()),
        ("KV cache per token", table::bytes(facts.kv_bytes_per_token)),
        ("hidden state per token", table::bytes(facts.token_bytes)),
    ]);
    table::of_pairs(&rows)
}

/// Describes what is in the files besides the model.
fn besides(ignored: &Ignored) -> String {
    match ignored.prediction_layers.as_slice() {
        [] => "recomputed buffers".to_owned(),
        [layer] => format!("layer {layer} (predicts further tokens)"),
        [first, .., last] => format!("layers {first} to {last} (predict further tokens)"),
    }
}
