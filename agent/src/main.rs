//! `remoe-agent` inspects a model, or measures the hardware for it, in a pod of the model's namespace, where the
//! operator has no access. It prints one JSON object on standard output.

use clap::{Parser, Subcommand};
use remoe_hub::ModelArgs;
use remoe_model::{CheckpointError, DenseDtype, ExpertsDtype, Inspection, StoredDtype};
use remoe_process::shutdown_on_signal;
use remoe_profiler::{BelowOne, Gate, OnDevice, ProfileError, ProfileRequest, Reporter, doubts, measure};
use remoe_rollout::LogLine;
use remoe_rollout::process::Programs;
use serde::Serialize;
use serde_json::json;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

/// Exit code of a permanent fault of the checkpoint.
const EXIT_CHECKPOINT: u8 = 4;
/// Environment variable with the folder of the function programs; defaults to this program's folder.
const FOLDER_VARIABLE: &str = "REMOE_BIN_DIR";

#[derive(Parser)]
#[command(name = "remoe-agent", version, about = "Finds out about a model what the operator cannot see")]
struct Arguments {
    #[command(subcommand)]
    command: AgentCommand,
}

#[derive(Subcommand)]
enum AgentCommand {
    /// Print the facts of a checkpoint
    Inspect(ModelArgs),
    /// Measure this machine for a model, print the profile
    Profile(ProfileArgs),
}

#[derive(clap::Args)]
struct ProfileArgs {
    #[command(flatten)]
    source: ModelArgs,
    /// Compute dtype
    #[arg(long, value_parser = ["float32", "bfloat16"])]
    dtype: String,
    /// Quantise routed experts at load time [default: the compute dtype]
    #[arg(long, value_name = "int8|int4|mxfp4|fp8")]
    experts_dtype: Option<ExpertsDtype>,
    /// Dtype of all weights but routed experts
    #[arg(long, value_name = "int8|int4|bfloat16|float32")]
    dense_dtype: Option<DenseDtype>,
    /// Device of the main function
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Assume the times on the device instead of measuring them: it belongs to a main function that serves
    #[arg(long)]
    assume_device: bool,
}

/// Failure of a command.
#[derive(Debug, thiserror::Error)]
enum AgentError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Profile(#[from] ProfileError),
    #[error("cannot find the folder of this program: {0}; set {FOLDER_VARIABLE}")]
    Folder(io::Error),
    #[error("cannot start the runtime: {0}")]
    Runtime(io::Error),
    #[error("cannot write the output: {0}")]
    Output(io::Error),
}

impl AgentError {
    /// Returns the field that the error is about: `credentials` or `source` for faults of the model source.
    fn field(&self) -> Option<&str> {
        match self {
            Self::Checkpoint(error) => error.field(),
            _ => None,
        }
    }

    /// Returns the machine-readable kind of the error, and the exit code.
    fn code(&self) -> (&'static str, u8) {
        match self {
            Self::Checkpoint(error) if !error.is_transient() => ("checkpoint", EXIT_CHECKPOINT),
            _ => ("runtime", 1),
        }
    }
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) if error.use_stderr() => {
            print_error("arguments", None, &error.to_string());
            error.exit()
        }
        Err(help) => help.exit(),
    };
    let done = match arguments.command {
        AgentCommand::Inspect(source) => inspect(&source),
        AgentCommand::Profile(args) => profile(&args),
    };
    let Err(error) = done else { return ExitCode::SUCCESS };
    let (kind, code) = error.code();
    print_error(kind, error.field(), &error.to_string());
    tell(&format!("error: {error}"));
    ExitCode::from(code)
}

/// Prints the error object that the operator reads.
fn print_error(code: &str, field: Option<&str>, message: &str) {
    // If the output is closed, the exit code alone reports the failure.
    let _closed = print(&json!({"error": {"code": code, "message": message, "field": field}}));
}

/// Facts of a checkpoint, and its commit if it is from the hub.
#[derive(Serialize)]
struct Facts<'a> {
    #[serde(flatten)]
    inspection: &'a Inspection,
    #[serde(skip_serializing_if = "Option::is_none")]
    revision: Option<&'a str>,
}

fn inspect(source: &ModelArgs) -> Result<(), AgentError> {
    let opened = source.open()?;
    let inspection = opened.checkpoint.inspect()?;
    print(&Facts { inspection: &inspection, revision: opened.revision.as_deref() })
}

fn profile(args: &ProfileArgs) -> Result<(), AgentError> {
    let opened = args.source.open()?;
    let computed_in = if args.dtype == "float32" { StoredDtype::F32 } else { StoredDtype::Bf16 };
    opened.checkpoint.check_experts_dtype(args.experts_dtype, computed_in)?;
    let inspection = opened.checkpoint.inspect()?;
    let inspection = inspection.kept_as(args.experts_dtype, args.dense_dtype, &args.device);
    let request = ProfileRequest {
        source: args.source.pinned(&opened),
        inspection,
        dtype: args.dtype.clone(),
        device: args.device.clone(),
        gpu: None,
        on_device: if args.assume_device { OnDevice::Assume } else { OnDevice::Measure },
        quick: true,
        address: None,
        below_one: BelowOne { main: true, remote: true },
    };
    let programs = programs()?;
    let runtime = tokio::runtime::Runtime::new().map_err(AgentError::Runtime)?;
    let profile = runtime.block_on(async {
        let shutdown = shutdown_on_signal().map_err(AgentError::Runtime)?;
        tokio::select! {
            profile = measure(request, programs, Gate::new(true), Arc::new(Lines)) => Ok(profile?),
            // The measured functions end with the runtime.
            () = shutdown.cancelled() => Err(ProfileError::Interrupted.into()),
        }
    });
    let profile = match profile {
        Ok(profile) => profile,
        Err(error) => {
            runtime.shutdown_background();
            return Err(error);
        }
    };
    doubts(&profile).iter().for_each(|doubt| tell(&format!("warning: {doubt}")));
    print(&profile)
}

/// Finds the function programs next to this one. Every image has a main function of this name, whatever its backend.
fn programs() -> Result<Programs, AgentError> {
    let folder = match std::env::var_os(FOLDER_VARIABLE) {
        Some(folder) => PathBuf::from(folder),
        None => std::env::current_exe().map_err(AgentError::Folder)?.with_file_name(""),
    };
    Ok(Programs { main: folder.join("main-model-fn"), remote: folder.join("remote-expert-fn") })
}

/// Reporter of lines on standard error.
struct Lines;

impl Reporter for Lines {
    fn expect(&self, _steps: usize) {}

    fn doing(&self, what: String) {
        tell(&what);
    }

    fn clear(&self) {}

    fn line(&self, text: &str) {
        tell(text);
    }

    fn log(&self, line: LogLine<'_>) {
        // Debug and info lines of measured functions are not useful.
        let is_shown =
            !line.text.contains("\"level\":\"INFO\"") && !line.text.contains("\"level\":\"DEBUG\"");
        if is_shown && !line.text.is_empty() {
            tell(&format!("{}: {}", line.name, line.text));
        }
    }
}

fn print(value: &impl Serialize) -> Result<(), AgentError> {
    let mut out = io::stdout().lock();
    let written = serde_json::to_writer(&mut out, value).map_err(io::Error::from);
    written.and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()).map_err(AgentError::Output)
}

fn tell(text: &str) {
    // A closed standard error must not abort the measurement.
    let _closed = writeln!(io::stderr().lock(), "{text}");
}
