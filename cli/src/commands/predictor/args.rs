//! The command line of `remoe predictor`.

use clap::{Args, Subcommand};
use remoe_hub::ModelArgs;
use remoe_predictor::{DEFAULT_DIMENSIONS, TrainingOptions, TreeOptions};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct PredictorArgs {
    #[command(subcommand)]
    pub(crate) action: Action,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Action {
    /// Fit a predictor to activation records and save it
    #[command(after_help = BUILD_EXAMPLES)]
    Build(BuildArgs),
    /// Compare predictors on held-out recorded prompts
    #[command(after_help = EVAL_EXAMPLES)]
    Eval(EvalArgs),
    /// Show the predicted experts of a prompt, and the past prompts behind the prediction
    #[command(after_help = EXPLAIN_EXAMPLES)]
    Explain(ExplainArgs),
}

#[derive(Debug, Args)]
pub(crate) struct BuildArgs {
    /// Activation records of the model
    #[arg(long, value_name = "FILE", required_unless_present = "convert")]
    pub(crate) history: Option<PathBuf>,
    /// Folder of a predictor without the part for gateways, from an older version: writes it, and fits nothing
    #[arg(long, value_name = "DIR", conflicts_with = "history")]
    pub(crate) convert: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) source: ModelArgs,
    /// Folder to save the predictor in
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Dimensions of the sketch of the embedding that gateways predict with; less where the vocabulary has no room
    #[arg(long, value_name = "N", default_value_t = DEFAULT_DIMENSIONS)]
    pub(crate) dimensions: usize,
    #[command(flatten)]
    pub(crate) tree: TreeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct EvalArgs {
    /// Activation records to learn from
    #[arg(long, value_name = "FILE")]
    pub(crate) train: PathBuf,
    /// Activation records to predict; several files are reported together and one by one
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    pub(crate) test: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) source: ModelArgs,
    /// Folder for methods.svg and correlation.svg
    #[arg(long, value_name = "DIR")]
    pub(crate) plots: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) tree: TreeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    pub(crate) source: ModelArgs,
    /// Folder of a predictor from `remoe predictor build` [default: MODEL/predictor]
    #[arg(long, value_name = "DIR")]
    pub(crate) predictor: Option<PathBuf>,
    /// Prompt as text
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_ids", conflicts_with = "prompt_ids")]
    pub(crate) prompt: Option<String>,
    /// Prompt as token ids, used as they are
    #[arg(long, value_name = "ID,ID,..", value_delimiter = ',', num_args = 1)]
    pub(crate) prompt_ids: Vec<u32>,
}

/// Search for similar prompts.
#[derive(Debug, Args)]
pub(crate) struct TreeArgs {
    /// Past prompts per prediction
    #[arg(long, value_name = "N", default_value_t = 15)]
    alpha: usize,
    /// Maximum prompts per leaf of the tree; must be greater than --alpha
    #[arg(long, value_name = "N", default_value_t = 150)]
    beta: usize,
    /// Minimum number of past prompts that a search considers. If above --rerank, a comparison of sketches (shortened
    /// vectors) selects those to compare in full
    #[arg(long, value_name = "N", default_value_t = 1500)]
    breadth: usize,
    /// Considered prompts that are compared in full
    #[arg(long, value_name = "N", default_value_t = 100)]
    rerank: usize,
    /// Maximum children per node of the tree
    #[arg(long, value_name = "N", default_value_t = 64)]
    forks: usize,
    /// Random seed; equal seeds give equal predictors
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
}

impl TreeArgs {
    pub(crate) fn options(&self) -> TrainingOptions {
        let Self { alpha, beta, breadth, rerank, forks, seed } = *self;
        TrainingOptions { alpha, tree: TreeOptions { beta, breadth, rerank, forks, seed } }
    }
}

const BUILD_EXAMPLES: &str = "Examples:
  remoe predictor build --history history.npy --model ./model --out ./model/predictor
  remoe predictor build --convert ./model/predictor --model ./model --out ./model/predictor";

const EVAL_EXAMPLES: &str = "Examples:
  remoe predictor eval --train train.npy --test test.npy --model ./model
  remoe predictor eval --train train.npy --test a.npy b.npy --model ./model --plots plots --json";

const EXPLAIN_EXAMPLES: &str = "Examples:
  remoe predictor explain --model ./model --prompt 'Once upon a time'
  remoe predictor explain --model ./model --predictor ./saved --prompt-ids 1,2,3 --json";
