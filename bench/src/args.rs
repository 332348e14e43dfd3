//! The command line.

use crate::checkpoint::ModelShape;
use crate::device::DeviceArgs;
use crate::parts::PartName;
use clap::{Args, Parser, Subcommand};
use remoe_process::sizes;
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
    /// Make one check of main functions on a device, print JSON: a part of scripts/gpu_check
    Device(DeviceArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CheckpointArgs {
    #[command(flatten)]
    pub(crate) shape: ModelShape,
    /// Random seed; equal seeds give equal weights
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Maximum size of one weights file
    #[arg(long, value_name = "SIZE", default_value_t = 2_000_000_000, value_parser = sizes::<u64>(1..=u64::MAX))]
    pub(crate) shard_bytes: u64,
    /// Output folder
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Measure only these parts
    #[arg(long, value_enum, value_name = "PART", value_delimiter = ',')]
    pub(crate) only: Vec<PartName>,
    /// Run fewer and shorter rounds: a smoke test, not a measurement
    #[arg(long)]
    pub(crate) quick: bool,
    /// Time limit of the run, in seconds; parts reduce their rounds to fit, to at least one
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub(crate) time_limit: u32,
    /// File for the report as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Folder of the programs to measure [default: that of this program]
    #[arg(long, value_name = "DIR")]
    pub(crate) programs: Option<PathBuf>,
    /// Folder to keep generated checkpoints in, 5 GB
    #[arg(long, value_name = "DIR", default_value = "target/bench/models")]
    pub(crate) models: PathBuf,
    /// Python interpreter; torch is measured beside the kernels when it has torch
    #[arg(long, value_name = "PATH", env = "REMOE_BENCH_PYTHON", default_value = "python3")]
    pub(crate) python: PathBuf,
    /// Layers of the whole model (shape of OLMoE); each takes about 1 GB per deployment
    #[arg(long, default_value_t = 4)]
    pub(crate) layers: usize,
    /// llama-bench of llama.cpp, to compare with the whole model
    #[arg(long, value_name = "PATH", requires = "gguf")]
    pub(crate) llama_bench: Option<PathBuf>,
    /// GGUF models of the same shape for llama-bench, one per quantisation to compare
    #[arg(long, value_name = "FILE", num_args = 1.., requires = "llama_bench")]
    pub(crate) gguf: Vec<PathBuf>,
}
