//! The `remoe` command: looks into checkpoints, and runs a main function with its remote-expert
//! functions for one answer or as a service.
//!
//! Every command prints for people, or with `--json` one object on standard output and everything
//! else on standard error.

mod args;
mod commands;
mod deployment;
mod exit;
mod output;
mod programs;
mod prompt;
mod signals;

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
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if cli.json {
                json::print_error(&error);
            }
            output::progress::print_error(&error.message);
            ExitCode::from(error.code as u8)
        }
    }
}

fn run(cli: &Cli) -> Result<(), CliError> {
    let progress = Arc::new(Progress::new(cli.verbose));
    if let Command::Inspect(args) = &cli.command {
        return commands::inspect::run(args, cli.json);
    }
    let runtime = tokio::runtime::Runtime::new()
        .map_err(|error| CliError::runtime(format!("cannot start the runtime: {error}")))?;
    let result = runtime.block_on(async {
        match &cli.command {
            Command::Inspect(args) => commands::inspect::run(args, cli.json),
            Command::Logits(args) => commands::logits::run(args, cli.json, &progress).await,
            Command::Generate(args) => commands::generate::run(args, cli.json, &progress).await,
            Command::Up(args) => commands::up::run(args, cli.json, &progress).await,
        }
    });
    progress.clear();
    result
}
