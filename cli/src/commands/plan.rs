//! `remoe plan`: plans the placement of experts, with its latency and cost.

mod manifest;
mod nodes;
mod nodes_model;
mod nodes_prices;
mod nodes_report;

use crate::device::MainDevice;
use crate::exit::{CliError, CliExitCode};
use crate::files;
use crate::flags::{Dtype, RemoteArg, check_experts_dtype, default_dtype};
use crate::output::json;
use crate::output::progress::print_error;
use crate::placement_choice::PlacementChoice;
use crate::plan_explanation;
use crate::plan_report;
use crate::planning::{self, PlanningArgs, ProblemInputs};
use crate::remedies::{infeasible, with_flag};
use crate::workload::ConcurrencyArgs;
use clap::Args;
use nodes::{NodesArgs, NodesInputs};
use nodes_model::WeightDtypes;
use remoe_hardware::{ModelId, Origin, TimeFactors, TimeRatios};
use remoe_hub::ModelArgs;
use remoe_model::{DenseDtype, ExpertsDtype, KvCacheDtype};
use remoe_planner::{
    Budget, FieldError, Options, PlanDraft, PlanError, PlanningResult, Problem, Proceed, evaluate,
    preallocate, replan, solve, solve_within,
};
use remoe_process::parse_duration;
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Default of `--max-groups`.
const DEFAULT_MAX_GROUPS: u32 = 16;
/// Share of a deadline that the search may take. The rest is for evaluating the plan that it found.
const SEARCH_SHARE: f64 = 0.8;

// A problem file replaces the model and the planning flags.
#[derive(Debug, Args)]
#[command(mut_args(|argument| planning::conflicting_with("problem", argument)))]
#[command(mut_arg("predictor", |predictor| predictor.conflicts_with("problem")))]
#[command(mut_arg("concurrency", |concurrency| concurrency.conflicts_with("problem")))]
#[command(mut_args(help_for_plan))]
pub(crate) struct PlanArgs {
    /// Problem file (JSON) with model, workload, prices and limits: the value of `problem` in the output of `plan MODEL
    /// --json`
    #[arg(long, value_name = "FILE", conflicts_with = "model_source")]
    problem: Option<PathBuf>,
    /// Plan for this model on the machine of its profile
    #[command(flatten)]
    source: Option<ModelArgs>,
    /// Compute dtype [default: that of the profile]
    #[arg(long, value_enum, requires = "model_source")]
    dtype: Option<Dtype>,
    /// Plan for routed experts quantised to int8, int4 or mxfp4 at load time, or for stored fp8 experts
    /// [default: the compute dtype]
    #[arg(long, value_name = "int8|int4|mxfp4|fp8", requires = "model_source")]
    experts_dtype: Option<ExpertsDtype>,
    /// Plan for this dtype of all weights but routed experts (embedding, attention, dense layers, shared experts,
    /// head): int8 or int4 on CPUs, or the compute dtype [default: int8 on CPUs if --experts-dtype is int8, int4 or
    /// mxfp4, else the compute dtype]
    #[arg(long, value_name = "int8|int4|bfloat16|float32", requires = "model_source")]
    dense_dtype: Option<DenseDtype>,
    /// Plan for this form of the KV cache of main functions on CPUs [default: the compute dtype]
    #[arg(long, value_name = "int8", requires = "model_source")]
    kv_cache_dtype: Option<KvCacheDtype>,
    /// Plan for this prompt instead of the average of the prompts the predictor was built from
    #[arg(long, value_name = "TEXT", requires = "model_source")]
    prompt: Option<String>,
    #[command(flatten)]
    planning: PlanningArgs,
    #[command(flatten)]
    concurrency: ConcurrencyArgs,
    /// Explain the plan in plain words
    #[arg(long)]
    explain: bool,
    /// Size only the main function, for the worst case of expert usage; the first step of `up --start preallocated`
    #[arg(long, conflicts_with_all = ["evaluate", "previous", "robust", "remote", "explain"])]
    preallocate: bool,
    /// Evaluate the plan in this file (from `plan --json`) instead of making one
    #[arg(long, value_name = "PLAN", conflicts_with_all = ["previous", "remote", "explain"])]
    evaluate: Option<PathBuf>,
    /// Plan in use (a file from `plan --json`); kept unless the new one saves more than --hysteresis
    #[arg(long, value_name = "PLAN")]
    previous: Option<PathBuf>,
    /// Share of the cost that a new plan must save to replace the previous one
    #[arg(long, value_name = "H", default_value_t = 0.05, value_parser = share, allow_negative_numbers = true)]
    hysteresis: f64,
    /// Time that a new plan is expected to stay in use. To replace the previous plan, the new one must also save more
    /// in this time than its functions cost while they load
    #[arg(long, value_name = "TIME", default_value = "3600s", value_parser = parse_duration)]
    stands: Duration,
    /// Time that planning may take. With --previous, the planner searches near that plan only; without it, the full search
    /// ends at the deadline and returns the best plan so far
    #[arg(long, value_name = "TIME", value_parser = parse_duration, conflicts_with_all = ["evaluate", "preallocate"])]
    deadline: Option<Duration>,
    /// Meet the limits even if remote experts are used more than predicted, by as much as the 95th percentile of past
    /// prediction errors. --sturdy considers other errors too
    #[arg(long)]
    robust: bool,
    /// Spend up to this share more than the cheapest plan (0.02 = 2%) to break limits in fewer of these cases: a time is
    /// 30% longer, remote experts are used more than predicted, requests double. --robust considers usage alone
    /// [default: 0.02 with a model, 0 with --problem]
    #[arg(long, value_name = "SHARE", value_parser = share, allow_negative_numbers = true)]
    sturdy: Option<f64>,
    /// Use of remote experts in the plan
    #[arg(long, value_enum, value_name = "WHEN", default_value_t)]
    remote: RemoteArg,
    /// File of responses of `remoe up`, one JSON object per line; the requests must have set `include_figures`.
    /// Multiplies the profile's times by the median of measured / expected time, clamped to 0.5-2; fewer than 10
    /// responses have no effect
    #[arg(long, value_name = "FILE", requires = "model_source")]
    measured: Option<PathBuf>,
    #[command(flatten)]
    nodes: NodesArgs,
}

/// Result for a model, with its problem. With this plan file, `up` and `generate` compare requests with the plan.
#[derive(Serialize)]
struct WithProblem<'a, T> {
    problem: &'a Problem,
    /// Ratios of measured times to the profile's, from `--measured`.
    #[serde(skip_serializing_if = "Option::is_none")]
    factors: Option<TimeFactors>,
    #[serde(flatten)]
    answer: TimedResult<T>,
}

/// Result, with the time that planning took if it had a deadline.
#[derive(Serialize)]
struct TimedResult<T> {
    #[serde(skip_serializing_if = "Option::is_none")]
    elapsed_seconds: Option<f64>,
    #[serde(flatten)]
    answer: T,
}

/// Adapts the help of shared arguments to `plan`, which needs no model with `--problem`, and starts no functions.
fn help_for_plan(argument: clap::Arg) -> clap::Arg {
    match argument.get_id().as_str() {
        "model_positional" => argument.help(
            "Model, required here or as --model unless --problem is given: a Hugging Face folder, \
             hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX or https://HOST/PATH",
        ),
        "remote_memory_mb" => {
            argument.help("Memory sizes that the plan may choose for remote functions: MIN:MAX:STEP in MB or with units")
        }
        "max_groups" => argument.help(
            "Let the plan divide every layer's remote experts among up to N remote groups [default: 16; in `up` and \
             `generate`: no groups]",
        ),
        _ => argument,
    }
}

fn share(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if (0.0..=1.0).contains(&value) { Ok(value) } else { Err("expected 0 to 1".to_owned()) }
}

/// Plans, evaluates or pre-allocates, and prints the result. An infeasible problem is reported as a result, with its own
/// exit code.
pub(crate) fn run(args: &PlanArgs, as_json: bool, verbose: bool) -> Result<ExitCode, CliError> {
    if let Some(list) = &args.nodes.nodes {
        let inputs = NodesInputs {
            args: &args.nodes,
            list,
            source: args.source.as_ref(),
            forms: WeightDtypes { dtype: args.dtype, experts: args.experts_dtype, dense: args.dense_dtype },
            planning: &args.planning,
            concurrency: args.concurrency,
        };
        return nodes::run(&inputs, as_json);
    }
    let factors = args.measured.as_deref().map(read_factors).transpose()?;
    let mut run =
        PlanRun { args, problem: args.read_problem(factors)?, factors, as_json, elapsed_seconds: None };
    let problem = &run.problem;
    if args.robust && args.problem.is_none() && problem.prediction_p95.is_none() {
        let message = "cannot apply --robust: the error of predictions is unknown; give --predictor a predictor whose \
                       history has decode steps and enough prompts to hold some out (`remoe predictor build`)";
        return Err(CliError::arguments("--robust", message));
    }
    if args.preallocate {
        return run.print_result(preallocate(problem), plan_report::preallocation);
    }
    if let Some(path) = &args.evaluate {
        let draft = read_plan("--evaluate", path)?;
        let evaluation = evaluate(problem, &draft, args.robust);
        return run.print_result(evaluation, |answer| plan_report::evaluation(problem, answer));
    }
    let previous = args.previous.as_ref().map(|path| read_plan("--previous", path)).transpose()?;
    let sturdy = args.sturdy.unwrap_or(if args.problem.is_some() { 0.0 } else { planning::STURDY });
    let options = Options {
        remote: args.remote.into(),
        robust: args.robust,
        hysteresis: args.hysteresis,
        stands_seconds: args.stands.as_secs_f64(),
        sturdy,
        flips: true,
    };
    let solved = match args.deadline {
        None => solve(problem, previous.as_ref(), &options),
        Some(deadline) => {
            let start = Instant::now();
            let solved = plan_until_deadline(deadline, problem, previous.as_ref(), &options);
            run.elapsed_seconds = Some(start.elapsed().as_secs_f64());
            solved
        }
    };
    let problem = &run.problem;
    run.print_result(solved, |answer| match args.explain {
        true => plan_explanation::explain(problem, answer),
        false => {
            let choice = PlacementChoice::from_plan(problem, answer, args.remote, Origin::Measured);
            format!("{}\n\n{}", choice.sentence(), plan_report::plan(problem, answer, verbose))
        }
    })
}

/// Searches for a plan until the deadline, near the `previous` plan if there is one.
fn plan_until_deadline(
    deadline: Duration,
    problem: &Problem,
    previous: Option<&PlanDraft>,
    options: &Options,
) -> Result<PlanningResult, PlanError> {
    let start = Instant::now();
    let budget_left = || match start.elapsed() < deadline.mul_f64(SEARCH_SHARE) {
        true => Proceed::Continue,
        false => Proceed::Finish,
    };
    let budget = Budget::new(&budget_left);
    match previous {
        Some(previous) => replan(problem, previous, options, budget),
        None => solve_within(problem, None, options, budget),
    }
}

impl PlanArgs {
    /// Reads the problem file, or builds the problem for the model. `factors` scale the times of the profile.
    fn read_problem(&self, factors: Option<TimeFactors>) -> Result<Problem, CliError> {
        if let Some(path) = &self.problem {
            let text = files::read("--problem", path)?;
            return Problem::from_json(&text).map_err(|error| file_error(error, Some(path)));
        }
        let Some(source) = &self.source else {
            let message = "missing --model or --problem: expected a model, or a file that states the problem";
            return Err(CliError::arguments("--model", message));
        };
        let checkpoint = Arc::new(source.open()?.checkpoint);
        let experts_dtype = self.experts_dtype;
        check_experts_dtype(&checkpoint, experts_dtype, self.dtype)?;
        // The device is that of `--profile`, if given.
        let given = self.planning.given_profile()?;
        let device = given.as_ref().map_or_else(|| MainDevice::resolve(None, None), MainDevice::of_profile);
        let mut inspection = checkpoint.inspect()?.kept_as(experts_dtype, self.dense_dtype, &device.name);
        inspection.kv_cache_dtype = self.kv_cache_dtype;
        let dtype = self.dtype.map_or_else(|| default_dtype(&inspection), Dtype::name);
        let id = ModelId::of(&inspection, dtype);
        let profile = planning::select_profile(given, &id, &device)?;
        let profile = profile.ok_or_else(|| {
            let message = format!(
                "missing --profile: no profile of this model in {} on {} of this machine; run `remoe profile --model {} \
                 --dtype {}{}{}`",
                id.precision(),
                device.name,
                source.model,
                id.dtype,
                id.experts_dtype.map_or_else(String::new, |experts| format!(" --experts-dtype {}", experts.name())),
                self.dense_dtype.map_or_else(String::new, |dense| format!(" --dense-dtype {}", dense.name()))
            );
            CliError::arguments("--profile", message)
        })?;
        let profile = factors.map_or_else(|| profile.clone(), |factors| factors.applied(&profile));
        let prompt = self.prompt.as_deref();
        let inputs =
            ProblemInputs { prompt, concurrency: self.concurrency.concurrency, ..ProblemInputs::default() };
        let mut problem = self.planning.problem(&checkpoint, &inspection, &profile, self.dtype, inputs)?;
        problem.limits.max_groups.get_or_insert(DEFAULT_MAX_GROUPS);
        Ok(problem)
    }
}

/// Invocation of the command, with its problem.
struct PlanRun<'a> {
    args: &'a PlanArgs,
    problem: Problem,
    factors: Option<TimeFactors>,
    as_json: bool,
    /// Seconds of planning. `None` without a deadline.
    elapsed_seconds: Option<f64>,
}

impl PlanRun<'_> {
    fn print_result<T: Serialize>(
        &self,
        result: Result<T, PlanError>,
        format: impl Fn(&T) -> String,
    ) -> Result<ExitCode, CliError> {
        let args = self.args;
        match result {
            Ok(answer) => {
                let elapsed_seconds = self.elapsed_seconds;
                match (self.as_json, &args.source) {
                    (true, Some(_)) => {
                        let answer = TimedResult { elapsed_seconds, answer };
                        json::print(&WithProblem { problem: &self.problem, factors: self.factors, answer })?;
                    }
                    (true, None) => json::print(&TimedResult { elapsed_seconds, answer })?,
                    (false, _) => {
                        let mut out = anstream::stdout().lock();
                        if let Some(TimeFactors { prefill, decode }) = &self.factors {
                            writeln!(out, "prefills take {}", prefill.in_words())?;
                            writeln!(out, "decode steps take {}\n", decode.in_words())?;
                        }
                        writeln!(out, "{}", format(&answer))?;
                    }
                }
                Ok(ExitCode::SUCCESS)
            }
            Err(PlanError::Infeasible(reason)) => {
                if self.as_json {
                    json::print(&serde_json::json!({ "infeasible": reason }))?;
                }
                print_error(&infeasible(&reason, args.problem.is_some()));
                if let Some(verdict) = reason.verdict.as_ref().filter(|_| !self.as_json) {
                    writeln!(anstream::stdout().lock(), "{}", plan_report::verdict(verdict))?;
                }
                Ok(ExitCode::from(CliExitCode::Infeasible as u8))
            }
            Err(PlanError::Problem(error)) => Err(match args.problem.as_deref() {
                Some(path) => file_error(error, Some(path)),
                None => file_error(with_flag(error), None),
            }),
            Err(PlanError::Plan(error)) => {
                let path = args.evaluate.as_ref().or(args.previous.as_ref()).or(args.problem.as_ref());
                Err(file_error(error, path.map(PathBuf::as_path)))
            }
            Err(error @ PlanError::Cancelled) => Err(error.into()),
        }
    }
}

/// Converts an error of a problem or plan file, which counts as an invalid argument.
fn file_error(error: FieldError, path: Option<&Path>) -> CliError {
    let path_prefix = path.map(|path| format!("{}: ", path.display())).unwrap_or_default();
    let message = format!("{path_prefix}{error}");
    let field = Some(error.field).filter(|field| !field.is_empty());
    CliError { path: path.map(Path::to_owned), field, ..CliError::arguments("", message) }
}

fn read_factors(path: &Path) -> Result<TimeFactors, CliError> {
    let ratios = TimeRatios::read(&files::read("--measured", path)?);
    Ok(TimeFactors::of(&ratios.map_err(|error| files::file_error("--measured", path, &error))?))
}

fn read_plan(flag: &str, path: &Path) -> Result<PlanDraft, CliError> {
    PlanDraft::from_json(&files::read(flag, path)?).map_err(|error| file_error(error, Some(path)))
}
