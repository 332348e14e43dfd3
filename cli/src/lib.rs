//! The `remoe` command: looks into checkpoints, and runs a main function with its remote-expert
//! functions for one answer or as a service.
//!
//! Every command prints for people, or with `--json` one object on standard output and everything
//! else on standard error.

mod args;
mod commands;
mod constraints;
mod deployment;
mod exit;
mod machine;
mod output;
mod plan_report;
mod planning;
mod programs;
mod prompt;
mod remote_set;
mod signals;
mod workload;

use args::{Cli, Command};
use clap::Parser;
use exit::CliError;
use output::json;
use output::progress::Progress;
use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

/// Runs the command with `arguments` (the program's name first) and returns its exit code.
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => {
            // Help and version. Nothing is left to be done where they cannot be printed.
            let _closed = error.print();
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            let _closed = error.print();
            if arguments.iter().any(|argument| argument == "--json") {
                json::print_error(&CliError::from(error));
            }
            return ExitCode::from(exit::Code::Arguments as u8);
        }
    };
    match run(&cli) {
        Ok(code) => code,
        Err(error) if error.code == exit::Code::ClosedOutput => ExitCode::SUCCESS,
        Err(error) => {
            if cli.json {
                json::print_error(&error);
            }
            output::progress::print_error(&error.message);
            ExitCode::from(error.code as u8)
        }
    }
}

fn run(cli: &Cli) -> Result<ExitCode, CliError> {
    let json = cli.json;
    match &cli.command {
        Command::Plan(args) => return commands::plan::run(args, json),
        Command::Cost(args) => commands::cost::run(args, json)?,
        Command::Dashboards(args) => commands::dashboards::run(args, json)?,
        Command::Inspect(args) => commands::inspect::run(args, json)?,
        Command::Predictor(args) => commands::predictor::run(args, json)?,
        Command::Eval(args) => commands::eval::run(args, json)?,
        Command::Logits(args) => {
            with_functions(cli, async |progress| commands::logits::run(args, json, progress).await)?;
        }
        Command::Generate(args) => {
            with_functions(cli, async |progress| commands::generate::run(args, json, progress).await)?;
        }
        Command::Up(args) => {
            with_functions(cli, async |progress| commands::up::run(args, json, progress).await)?;
        }
        Command::Top(args) => {
            with_functions(cli, async |_| commands::top::run(args, json).await)?;
        }
        Command::Profile(args) => {
            with_functions(cli, async |progress| commands::profile::run(args, json, progress).await)?;
        }
        Command::Record(args) => {
            with_functions(cli, async |progress| commands::record::run(args, json, progress).await)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs a command that drives functions.
fn with_functions(
    cli: &Cli,
    work: impl AsyncFnOnce(&Arc<Progress>) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let progress = Arc::new(Progress::new(cli.verbose));
    let runtime = tokio::runtime::Runtime::new()
        .map_err(|error| CliError::runtime(format!("cannot start the runtime: {error}")))?;
    let result = runtime.block_on(work(&progress));
    progress.clear();
    result
}
