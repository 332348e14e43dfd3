//! Checks of main functions on a device. `scripts/gpu_check` runs them one after the other, each with its own deadline.

mod batch;
mod expected;
mod failing;
mod function;
mod parity;
mod recording;
mod shapes;

use crate::error::{ErrorContext, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::Value;
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of a check.
#[derive(Debug, Clone, Args)]
pub(crate) struct DeviceArgs {
    /// Check to make
    #[arg(long, value_enum)]
    check: Check,
    /// Device of the main functions
    #[arg(long, default_value = "cuda")]
    device: String,
    /// Program of the main functions
    #[arg(long, value_name = "FILE")]
    main: PathBuf,
    /// Program of the remote functions
    #[arg(long, value_name = "FILE")]
    remote: PathBuf,
    /// Folder of the reference models
    #[arg(long, value_name = "DIR", default_value = "tests/fixtures")]
    fixtures: PathBuf,
    /// Folder to keep generated checkpoints in
    #[arg(long, value_name = "DIR", default_value = "target/bench/models")]
    models: PathBuf,
    /// Folder for files of the check
    #[arg(long, value_name = "DIR", default_value = ".")]
    scratch: PathBuf,
    /// Use small shapes, and few reference models: a test of the check itself
    #[arg(long)]
    small: bool,
    /// Program that counts launches and copies: it writes them to a file
    #[arg(long)]
    recorded: bool,
}

/// Check, by its name on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Check {
    /// Logits, routing and tokens of all reference models in float32
    ParityFloat32,
    /// Logits of all reference models in bfloat16
    ParityBfloat16,
    /// A mixed batch beside each request alone
    Batch,
    /// Reuse of a computed prefix
    Prefix,
    /// Rows behind a cached prefix beside the whole prompt
    PrefixRows,
    /// A remote function that is killed within an answer
    Killed,
    /// Requests and caches that do not fit
    Memory,
    /// Times of OLMoE-1B-7B's shape
    ShapeOlmoe,
    /// Times of Qwen3-30B-A3B's shape
    ShapeQwen3,
}

/// Outcome of a check.
#[derive(Debug, Default, Serialize)]
struct CheckOutcome {
    /// Violations; empty if the check holds.
    failures: Vec<String>,
    /// Figures by name.
    figures: serde_json::Map<String, Value>,
}

impl CheckOutcome {
    /// Adds `failure` unless the condition `holds`.
    fn require(&mut self, holds: bool, failure: impl FnOnce() -> String) {
        if !holds {
            self.failures.push(failure());
        }
    }

    fn set_figure(&mut self, name: &str, value: impl Into<Value>) {
        self.figures.insert(name.to_owned(), value.into());
    }
}

/// Runs a check and prints its outcome as JSON. The exit code is 1 if the check fails.
pub(crate) fn run(args: DeviceArgs) -> Result<ExitCode> {
    let runtime = tokio::runtime::Runtime::new().doing(|| "starting threads")?;
    let outcome = runtime.block_on(async {
        match args.check {
            Check::ParityFloat32 => parity::float32(&args).await,
            Check::ParityBfloat16 => parity::bfloat16(&args).await,
            Check::Batch => batch::mixed(&args).await,
            Check::Prefix => batch::prefix(&args).await,
            Check::PrefixRows => batch::prefix_rows(&args).await,
            Check::Killed => failing::killed(&args).await,
            Check::Memory => failing::memory(&args).await,
            Check::ShapeOlmoe => shapes::olmoe(&args).await,
            Check::ShapeQwen3 => shapes::qwen3(&args).await,
        }
    })?;
    println!("{}", serde_json::to_string(&outcome).doing(|| "writing the outcome")?);
    Ok(if outcome.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
