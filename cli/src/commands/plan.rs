//! `remoe plan`: where every expert lives, and what that costs.

use crate::exit::{CliError, Code};
use crate::output::json;
use crate::plan_report;
use clap::{Args, ValueEnum};
use remoe_planner::{
    FieldError, Options, PlanDraft, PlanError, Problem, Remote, evaluate, preallocate, solve,
};
use serde::Serialize;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// No problem or plan is longer; a thousand layers of 512 experts are a tenth of it.
const FILE_LIMIT: u64 = 256 << 20;

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// File that states model, workload, prices and limits
    #[arg(long, value_name = "FILE")]
    problem: PathBuf,
    /// Only size the main function, without a prediction
    #[arg(long, conflicts_with_all = ["evaluate", "previous", "robust", "remote"])]
    preallocate: bool,
    /// Evaluate this plan instead of making one
    #[arg(long, value_name = "PLAN", conflicts_with_all = ["previous", "remote"])]
    evaluate: Option<PathBuf>,
    /// The plan that runs: it stays unless the new one is cheaper by more than the hysteresis
    #[arg(long, value_name = "PLAN")]
    previous: Option<PathBuf>,
    /// Share of the cost that a new plan must save to replace the previous one
    #[arg(long, value_name = "H", default_value_t = 0.05, value_parser = share, allow_negative_numbers = true)]
    hysteresis: f64,
    /// Keep the limits also when predictions err as far as they do in 5 % of the cases
    #[arg(long)]
    robust: bool,
    /// Whether experts may be remote
    #[arg(long, value_enum, default_value_t)]
    remote: RemoteArg,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum RemoteArg {
    /// Where it is cheaper
    #[default]
    Auto,
    /// In every layer with more experts than a token uses
    Always,
    /// Nowhere
    Never,
}

fn share(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "is not a number".to_owned())?;
    if (0.0..=1.0).contains(&value) { Ok(value) } else { Err("must be between 0 and 1".to_owned()) }
}

/// Plans, evaluates or pre-allocates, and prints the answer. That nothing fits is an answer too, with
/// an exit code of its own.
pub(crate) fn run(args: &PlanArgs, as_json: bool) -> Result<ExitCode, CliError> {
    let problem = Problem::from_json(&read("--problem", &args.problem)?)
        .map_err(|error| in_file(error, &args.problem))?;
    if args.preallocate {
        return answer(args, preallocate(&problem), as_json, plan_report::preallocation);
    }
    if let Some(path) = &args.evaluate {
        let draft = read_plan("--evaluate", path)?;
        let evaluation = evaluate(&problem, &draft, args.robust);
        return answer(args, evaluation, as_json, |answer| plan_report::evaluation(&problem, answer));
    }
    let previous = args.previous.as_ref().map(|path| read_plan("--previous", path)).transpose()?;
    let options = Options {
        remote: match args.remote {
            RemoteArg::Auto => Remote::Auto,
            RemoteArg::Always => Remote::Always,
            RemoteArg::Never => Remote::Never,
        },
        robust: args.robust,
        hysteresis: args.hysteresis,
    };
    let solved = solve(&problem, previous.as_ref(), &options);
    answer(args, solved, as_json, |answer| plan_report::answer(&problem, answer))
}

fn answer<T: Serialize>(
    args: &PlanArgs,
    result: Result<T, PlanError>,
    as_json: bool,
    for_people: impl Fn(&T) -> String,
) -> Result<ExitCode, CliError> {
    match result {
        Ok(answer) => {
            if as_json {
                json::print(&answer)?;
            } else {
                writeln!(anstream::stdout().lock(), "{}", for_people(&answer))?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(PlanError::Infeasible(why)) => {
            if as_json {
                json::print(&serde_json::json!({ "infeasible": why }))?;
            }
            crate::output::progress::print_error(&why.to_string());
            Ok(ExitCode::from(Code::Infeasible as u8))
        }
        Err(PlanError::Problem(error)) => Err(in_file(error, &args.problem)),
        Err(PlanError::Plan(error)) => {
            let path = args.evaluate.as_ref().or(args.previous.as_ref()).unwrap_or(&args.problem);
            Err(in_file(error, path))
        }
    }
}

/// A problem or plan is an argument: one that cannot be ends with the code of arguments.
fn in_file(error: FieldError, path: &Path) -> CliError {
    let message = format!("{}: {error}", path.display());
    let field = Some(error.field).filter(|field| !field.is_empty());
    CliError { path: Some(path.to_owned()), field, ..CliError::arguments("", message) }
}

fn read_plan(flag: &str, path: &Path) -> Result<PlanDraft, CliError> {
    PlanDraft::from_json(&read(flag, path)?).map_err(|error| in_file(error, path))
}

fn read(flag: &str, path: &Path) -> Result<String, CliError> {
    let wrong = |message: String| CliError {
        path: Some(path.to_owned()),
        ..CliError::arguments(flag, format!("cannot read {}: {message}", path.display()))
    };
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(FILE_LIMIT + 1).read_to_string(&mut text))
        .map_err(|error| wrong(error.to_string()))?;
    if text.len() as u64 > FILE_LIMIT {
        return Err(wrong(format!("it is longer than {FILE_LIMIT} bytes")));
    }
    Ok(text)
}
