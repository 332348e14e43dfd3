//! `remoe convert`: converts dense checkpoints to Mixture-of-Experts checkpoints.

use crate::exit::CliError;
use crate::output::{json, table};
use clap::{Args, Subcommand};
use remoe_convert::{ConversionSummary, ConvertError, SplitOptions, gpt2_moe};
use remoe_hub::{ModelArgs, ModelLocation, SourceArgs};
use remoe_model::{Checkpoint, Inspection};
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    #[command(subcommand)]
    to: ConvertTarget,
}

#[derive(Debug, Subcommand)]
enum ConvertTarget {
    /// Split each feed-forward network of a GPT-2 into experts, with a router computed from their weights
    #[command(after_help = EXAMPLES)]
    Gpt2Moe(Gpt2MoeArgs),
}

const EXAMPLES: &str = "\
Examples:
  remoe convert gpt2-moe gpt2 gpt2-moe
  remoe convert gpt2-moe hf://openai-community/gpt2 gpt2-moe --experts 16 --top-k 4";

#[derive(Debug, Args)]
struct Gpt2MoeArgs {
    /// GPT-2 checkpoint: a Hugging Face folder, hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX or
    /// https://HOST/PATH
    #[arg(value_name = "FROM", value_parser = remoe_hub::location_parser())]
    from: ModelLocation,
    /// Output folder; created if missing, else it must be empty
    #[arg(value_name = "TO")]
    to: PathBuf,
    /// Experts per layer; a divisor of the layer's neurons
    #[arg(long, value_name = "N", default_value_t = 8)]
    experts: usize,
    /// Experts per token (top-k); with all experts the model equals the dense one
    #[arg(long, value_name = "K", default_value_t = 2)]
    top_k: usize,
    /// Cache folder of fetched models; processes may share it [env: REMOE_MODEL_CACHE] [default: remoe/models in the
    /// user's cache folder]
    #[arg(long, value_name = "DIR")]
    model_cache: Option<PathBuf>,
    #[command(flatten)]
    sources: SourceArgs,
}

/// Sizes of the converted checkpoint.
#[derive(Serialize)]
struct Report {
    model: PathBuf,
    layers: usize,
    experts: usize,
    top_k: usize,
    expert_width: usize,
    expert_bytes: u64,
    total_bytes: u64,
}

impl Report {
    fn new(args: &Gpt2MoeArgs, summary: ConversionSummary, inspection: &Inspection) -> Self {
        Self {
            model: args.to.clone(),
            layers: summary.layers,
            experts: inspection.experts,
            top_k: inspection.top_k,
            expert_width: summary.expert_width,
            expert_bytes: inspection.expert_bytes,
            total_bytes: inspection.total_bytes,
        }
    }

    fn to_table(&self) -> String {
        let experts = format!("{} per layer, {} per token", self.experts, self.top_k);
        table::of_pairs(&[
            ("model", self.model.display().to_string()),
            ("layers", self.layers.to_string()),
            ("experts", experts),
            ("neurons per expert", self.expert_width.to_string()),
            ("one expert", table::bytes(self.expert_bytes)),
            ("total", table::bytes(self.total_bytes)),
        ])
    }
}

/// Converts a checkpoint, and prints its sizes.
pub(crate) fn run(args: &ConvertArgs, as_json: bool) -> Result<(), CliError> {
    let ConvertTarget::Gpt2Moe(args) = &args.to;
    let (model_cache, sources) = (args.model_cache.clone(), args.sources.clone());
    let source = ModelArgs { model: args.from.clone(), model_cache, sources };
    let (store, _) = source.store()?;
    let options = SplitOptions { experts: args.experts, top_k: args.top_k };
    let converted = gpt2_moe(&*store, &args.to, options).map_err(conversion_error)?;
    let report = Report::new(args, converted, &Checkpoint::open(&args.to)?.inspect()?);
    if as_json {
        return Ok(json::print(&report)?);
    }
    Ok(writeln!(anstream::stdout().lock(), "{}", report.to_table())?)
}

fn conversion_error(error: ConvertError) -> CliError {
    match error {
        ConvertError::Checkpoint(error) => error.into(),
        ConvertError::Option { name, .. } => CliError::arguments(&format!("--{name}"), format!("--{error}")),
        ConvertError::Occupied(_) => CliError::arguments("TO", error.to_string()),
        ConvertError::Write { .. } => CliError::runtime(error.to_string()),
    }
}
