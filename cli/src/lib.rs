//! The `remoe` command: inspects checkpoints, plans placements, and runs a main function with its remote-expert
//! functions, for one answer or as a service.
//!
//! Every command prints text. With `--json`, it prints one object on standard output, and everything else on standard
//! error.

mod args;
mod commands;
mod constraints;
mod deployment;
mod device;
mod endpoint;
mod exit;
mod files;
mod flags;
mod gpu;
mod libtorch;
mod loading_progress;
mod output;
mod placement_choice;
mod plan_explanation;
mod plan_report;
mod planning;
mod predictors;
mod profile_source;
mod profiling;
mod programs;
mod prompt;
mod remedies;
mod remote_set;
mod resource;
mod running_commands;
mod signals;
mod workload;

pub(crate) use remoe_profiler::machine;

use args::{Cli, Command};
use clap::{ArgMatches, CommandFactory, FromArgMatches};
use exit::CliError;
use output::json;
use output::progress::Progress;
use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

/// Runs the command with `arguments` (the program's name first) and returns its exit code.
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    let as_json = arguments.iter().any(|argument| argument == "--json");
    let matches = match Cli::command().try_get_matches_from(arguments) {
        Ok(matches) => matches,
        Err(error) => return exit_with_clap_error(error, as_json),
    };
    let mut cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => return exit_with_clap_error(error.format(&mut Cli::command()), as_json),
    };
    if let Err(error) = apply_resource_file(&mut cli, &matches) {
        return exit_with_error(&error, as_json);
    }
    match run(&cli) {
        Ok(code) => code,
        Err(error) if error.code == exit::CliExitCode::ClosedOutput => ExitCode::SUCCESS,
        Err(error) => exit_with_error(&error, cli.json),
    }
}

/// Prints clap's help, version or error, and returns the exit code.
fn exit_with_clap_error(error: clap::Error, as_json: bool) -> ExitCode {
    // A closed output must not change the exit code.
    let _closed = error.print();
    if !error.use_stderr() {
        return ExitCode::SUCCESS;
    }
    if as_json {
        json::print_error(&CliError::from(error));
    }
    ExitCode::from(exit::CliExitCode::Arguments as u8)
}

/// Prints the error, and returns its exit code.
fn exit_with_error(error: &CliError, as_json: bool) -> ExitCode {
    if as_json {
        json::print_error(error);
    }
    output::progress::print_error(&error.text());
    ExitCode::from(error.code as u8)
}

/// Sets the options of `up` that the MoEDeployment of `--file` states. Flags in `matches` take precedence.
fn apply_resource_file(cli: &mut Cli, matches: &ArgMatches) -> Result<(), CliError> {
    let (Command::Up(up), Some((_, given))) = (&mut cli.command, matches.subcommand()) else { return Ok(()) };
    let Some(file) = up.file.clone() else { return Ok(()) };
    let ignored_fields = commands::up::fill_from_file(up, &file, given)?;
    if !ignored_fields.is_empty() {
        output::progress::print_warning(&format!("ignored outside a cluster: {}", ignored_fields.join(", ")));
    }
    Ok(())
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
            Some(text) => run_async(cli, async |progress| {
                commands::eval::perplexity::run(args, text, json, progress).await
            })?,
        },
        Command::Pull(args) => commands::models::pull(args, json)?,
        Command::List(args) => commands::models::list(args, json)?,
        Command::Rm(args) => commands::models::remove(args, json)?,
        Command::Ps(args) => {
            run_async(cli, async |_| commands::ps::run(args, json).await)?;
        }
        Command::Stop(args) => commands::ps::stop(args, json)?,
        Command::Doctor(args) => return commands::doctor::run(args, json),
        Command::Check(args) => return commands::check::run(args, json),
        Command::Schema(args) => commands::schema::run(args, json)?,
        Command::Completions(args) => commands::completions::run(args, Cli::command())?,
        Command::Man(args) => commands::completions::man(args, Cli::command())?,
        Command::Run(args) => {
            run_async(cli, async |progress| commands::run::run(args, json, cli.verbose, progress).await)?;
        }
        Command::Logits(args) => {
            run_async(cli, async |progress| commands::logits::run(args, json, progress).await)?;
        }
        Command::Generate(args) => {
            run_async(cli, async |progress| commands::generate::run(args, json, progress).await)?;
        }
        Command::Up(args) => {
            run_async(cli, async |progress| commands::up::run(args, json, progress).await)?;
        }
        Command::Top(args) => {
            run_async(cli, async |_| commands::top::run(args, json).await)?;
        }
        Command::Profile(args) => {
            run_async(cli, async |progress| commands::profile::run(args, json, progress).await)?;
        }
        Command::Record(args) => {
            run_async(cli, async |progress| commands::record::run(args, json, progress).await)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs a command that starts or contacts functions, on an async runtime.
fn run_async(
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
