//! The `remoe` command: looks into checkpoints, and runs a main function with its remote-expert
//! functions for one answer or as a service.
//!
//! Every command prints for people, or with `--json` one object on standard output and everything
//! else on standard error.

mod args;
mod choice;
mod commands;
mod constraints;
mod deployment;
mod endpoint;
mod exit;
mod figures;
mod files;
mod flags;
mod loading;
mod machine;
mod output;
mod plan_report;
mod plan_words;
mod planning;
mod predictors;
mod profiling;
mod programs;
mod prompt;
mod remedies;
mod remote_set;
mod resource;
mod running;
mod signals;
mod workload;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use exit::CliError;
use output::json;
use output::progress::Progress;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

/// Runs the command with `arguments` (the program's name first) and returns its exit code.
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    let as_json = arguments.iter().any(|argument| argument == "--json");
    let arguments = match with_resource(arguments) {
        Ok(arguments) => arguments,
        Err(error) => return failed(&error, as_json),
    };
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => {
            // Help and version. Nothing is left to be done where they cannot be printed.
            let _closed = error.print();
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            let _closed = error.print();
            if as_json {
                json::print_error(&CliError::from(error));
            }
            return ExitCode::from(exit::Code::Arguments as u8);
        }
    };
    match run(&cli) {
        Ok(code) => code,
        Err(error) if error.code == exit::Code::ClosedOutput => ExitCode::SUCCESS,
        Err(error) => failed(&error, cli.json),
    }
}

fn failed(error: &CliError, as_json: bool) -> ExitCode {
    if as_json {
        json::print_error(error);
    }
    output::progress::print_error(&error.text());
    ExitCode::from(error.code as u8)
}

/// The arguments with those that the resource of `up --file` means.
fn with_resource(mut arguments: Vec<OsString>) -> Result<Vec<OsString>, CliError> {
    // What is wrong with them is said where they are parsed.
    let Ok(matches) = Cli::command().try_get_matches_from(&arguments) else { return Ok(arguments) };
    let Some(("up", up)) = matches.subcommand() else { return Ok(arguments) };
    let Some(file) = up.get_one::<PathBuf>("file") else { return Ok(arguments) };
    let resource = resource::expand(file, up)?;
    if !resource.left_out.is_empty() {
        let fields = resource.left_out.join(", ");
        output::progress::print_warning(&format!("ignored outside a cluster: {fields}"));
    }
    // Before any `--`: behind the command, which follows flags without values.
    let command =
        arguments.iter().skip(1).position(|argument| argument == "up").map_or(arguments.len(), |at| at + 2);
    arguments.splice(command..command, resource.arguments);
    Ok(arguments)
}

fn run(cli: &Cli) -> Result<ExitCode, CliError> {
    let json = cli.json;
    match &cli.command {
        Command::Plan(args) => return commands::plan::run(args, json, cli.verbose),
        Command::Cost(args) => return commands::cost::run(args, json),
        Command::Dashboards(args) => commands::dashboards::run(args, json)?,
        Command::Inspect(args) => commands::inspect::run(args, json)?,
        Command::Convert(args) => commands::convert::run(args, json)?,
        Command::Predictor(args) => commands::predictor::run(args, json)?,
        Command::Eval(args) => match &args.perplexity {
            None => commands::eval::run(args, json)?,
            Some(text) => with_functions(cli, async |progress| {
                commands::eval::perplexity::run(args, text, json, progress).await
            })?,
        },
        Command::Pull(args) => commands::models::pull(args, json)?,
        Command::List(args) => commands::models::list(args, json)?,
        Command::Rm(args) => commands::models::remove(args, json)?,
        Command::Ps(args) => {
            with_functions(cli, async |_| commands::ps::run(args, json).await)?;
        }
        Command::Stop(args) => commands::ps::stop(args, json)?,
        Command::Doctor(args) => return commands::doctor::run(args, json),
        Command::Check(args) => return commands::check::run(args, json),
        Command::Schema(args) => commands::schema::run(args, json)?,
        Command::Completions(args) => commands::completions::run(args, Cli::command())?,
        Command::Man(args) => commands::completions::man(args, Cli::command())?,
        Command::Run(args) => {
            with_functions(cli, async |progress| {
                commands::run::run(args, json, cli.verbose, progress).await
            })?;
        }
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
