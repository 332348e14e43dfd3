//! The command line.

use crate::checkpoint::Shape;
use crate::parts::PartName;
use clap::{Args, Parser, Subcommand};
use remoe_function::sizes;
use std::path::PathBuf;

/// Measures Remoe's parts against the machine's limits, and makes checkpoints to measure with.
#[derive(Debug, Parser)]
#[command(name = "remoe-bench", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Write a checkpoint of a shape with random weights
    Checkpoint(CheckpointArgs),
    /// Measure, print a Markdown table, write JSON
    Run(RunArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CheckpointArgs {
    #[command(flatten)]
    pub(crate) shape: Shape,
    /// The same seed gives the same weights
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Weights in one file, at most
    #[arg(long, value_name = "SIZE", default_value_t = 2_000_000_000, value_parser = sizes::<u64>(1..=u64::MAX))]
    pub(crate) shard_bytes: u64,
    /// Folder to write to
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Measure only these parts
    #[arg(long, value_enum, value_name = "PART", value_delimiter = ',')]
    pub(crate) only: Vec<PartName>,
    /// Fewer and shorter rounds: shows that everything works, not how fast it is
    #[arg(long)]
    pub(crate) quick: bool,
    /// Time for the whole run: parts take fewer rounds where it would not do, each at least one
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub(crate) time_limit: u32,
    /// File for the report as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Folder of the programs to measure [default: this program's own]
    #[arg(long, value_name = "DIR")]
    pub(crate) programs: Option<PathBuf>,
    /// Folder to keep generated checkpoints in, 5 GB
    #[arg(long, value_name = "DIR", default_value = "target/bench/models")]
    pub(crate) models: PathBuf,
    /// Python interpreter; torch is measured beside the kernels when it has torch
    #[arg(long, value_name = "PATH", env = "REMOE_BENCH_PYTHON", default_value = "python3")]
    pub(crate) python: PathBuf,
    /// Layers of the whole model, which has OLMoE's shape; 4 take 1 GB each and deployment
    #[arg(long, default_value_t = 4)]
    pub(crate) layers: usize,
    /// llama.cpp's llama-bench, to run beside the whole model
    #[arg(long, value_name = "PATH", requires = "gguf")]
    pub(crate) llama_bench: Option<PathBuf>,
    /// Models for llama-bench, of the same shape: one for each form that ours is to stand beside
    #[arg(long, value_name = "FILE", num_args = 1.., requires = "llama_bench")]
    pub(crate) gguf: Vec<PathBuf>,
}
