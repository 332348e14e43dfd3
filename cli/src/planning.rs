//! Planning for a model and a hardware profile, shared by `plan`, `up` and `generate`.

mod ranges;

pub(crate) use ranges::{size_range, vcpu_range};
pub(crate) use remoe_local::STURDY;

use crate::constraints;
use crate::deployment::{DesiredDeployment, fallback_bytes};
use crate::device::MainDevice;
use crate::exit::CliError;
use crate::files::{file_error, read};
use crate::flags::{DeploymentArgs, Dtype, RemoteArg};
use crate::machine;
use crate::output::progress::print_warning;
use crate::predictors::PredictorModel;
use crate::profiling;
use crate::prompt;
use crate::resource::{self, spec_error};
use crate::workload::WorkloadArgs;
use clap::Args;
use ranges::{millicores, sizes};
use remoe_hardware::{
    DeploymentRequirements, ModelId, Origin, Prices, PricesError, ProblemError, Profile, search_by_origin,
};
use remoe_model::{Checkpoint, Inspection};
use remoe_planner::{
    Arrivals, ErrorFactor, FieldError, Limits, Options, PlanningResult, Pricing, Problem, Quantile,
    SizeRange, Slo, Specs, VcpuRange, solve, useful_vcpus,
};
use remoe_predictor::{ByPhase, TrainedPredictor};
use remoe_process::parse_duration;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const MB: f64 = 1e6;
/// Limit of `--max-replicas` and `--max-groups`.
const MAX_COUNT: u32 = 64;

/// Inputs of the planner.
#[derive(Debug, Clone, Args)]
pub(crate) struct PlanningArgs {
    /// Profile of the model on this machine, from `remoe profile` [default: the one in the cache folder]
    #[arg(long, value_name = "FILE", help_heading = "Planning")]
    pub(crate) profile: Option<PathBuf>,
    /// Folder of a predictor from `remoe predictor build` [default: MODEL/predictor; without a predictor, plans
    /// assume uniform expert usage]
    #[arg(long, value_name = "DIR", help_heading = "Planning")]
    pub(crate) predictor: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
    /// Limit of the time to first token, cold start excluded
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration, help_heading = "Planning")]
    pub(crate) ttft: Duration,
    /// Limit of the time per output token
    #[arg(long, value_name = "TIME", default_value = "200ms", value_parser = parse_duration, help_heading = "Planning")]
    pub(crate) tpot: Duration,
    /// Limit of the time to first token of a cold request (one that wakes a sleeping model). Needs `arrivals` in the
    /// file of --workload, with `idleSeconds` or with another idle window, such as --idle of `up` [default: no limit]
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "Planning")]
    pub(crate) cold_ttft: Option<Duration>,
    /// Maximum share of cold requests (those that wake a sleeping model), such as 0.05 or 5%. Needs what --cold-ttft
    /// needs [default: no limit]
    #[arg(long, value_name = "SHARE", value_parser = share, help_heading = "Planning")]
    pub(crate) cold_share: Option<f64>,
    /// Quantile of requests that --ttft, --tpot and --cold-ttft limit: p50, p95 or p99. Needs `arrivals` in the file of
    /// --workload [default: the mean]
    #[arg(long, value_name = "QUANTILE", value_parser = quantile, help_heading = "Planning")]
    pub(crate) quantile: Option<Quantile>,
    /// Price list (examples/pricing) [default: $0.04 per core hour, $0.004 per GB hour, $1 per GPU hour]
    #[arg(long, value_name = "FILE", help_heading = "Planning")]
    pub(crate) pricing: Option<PathBuf>,
    /// Memory sizes that the plan may choose for the main function: MIN:MAX:STEP in MB or with units [default: up to
    /// the machine's memory, in steps of 100]
    #[arg(long, value_name = "MB", value_parser = sizes, help_heading = "Planning")]
    pub(crate) main_memory_mb: Option<SizeRange>,
    /// Memory sizes that the plan may choose for remote functions: MIN:MAX:STEP in MB or with units; ignored if
    /// --remote-memory is set
    #[arg(long, value_name = "MB", default_value = "100:5000:100", value_parser = sizes, help_heading = "Planning")]
    pub(crate) remote_memory_mb: SizeRange,
    /// Maximum number of replicas of a layer's or group's remote function
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_COUNT)), help_heading = "Planning")]
    pub(crate) max_replicas: u32,
    /// Let the plan divide every layer's remote experts among up to N remote groups [default: no groups: the remote
    /// experts of each layer are in a function of their own]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_COUNT)), help_heading = "Planning")]
    pub(crate) max_groups: Option<u32>,
    /// vCPUs that the plan may choose for the main function: MIN:MAX:STEP in millicores, priced separately from memory;
    /// requires --remote-cpu [default: 1000 per GB of memory, or as --pricing states]
    #[arg(long, value_name = "M", value_parser = millicores, requires = "remote_cpu", help_heading = "Planning")]
    pub(crate) main_cpu: Option<VcpuRange>,
    /// vCPUs that the plan may choose for remote functions: MIN:MAX:STEP in millicores, priced separately from memory;
    /// requires --main-cpu [default: 1000 per GB of memory, or as --pricing states]
    #[arg(long, value_name = "M", value_parser = millicores, requires = "main_cpu", help_heading = "Planning")]
    pub(crate) remote_cpu: Option<VcpuRange>,
}

/// Parses the name of a quantile.
fn quantile(text: &str) -> Result<Quantile, String> {
    let all = [Quantile::P50, Quantile::P95, Quantile::P99];
    let found = all.into_iter().find(|quantile| quantile.name() == text);
    found.ok_or_else(|| format!("expected p50, p95 or p99, got {text:?}"))
}

/// Makes an argument of [`PlanningArgs`] conflict with `other`, with which it would have no effect. The predictor does
/// not conflict, because it also selects the remote experts of `--remote-ratio`.
pub(crate) fn conflicting_with(other: &'static str, argument: clap::Arg) -> clap::Arg {
    const PLANNING_ARGUMENTS: [&str; 14] = [
        "profile",
        "workload",
        "ttft",
        "tpot",
        "cold_ttft",
        "cold_share",
        "quantile",
        "pricing",
        "main_memory_mb",
        "remote_memory_mb",
        "max_replicas",
        "max_groups",
        "main_cpu",
        "remote_cpu",
    ];
    match PLANNING_ARGUMENTS.contains(&argument.get_id().as_str()) {
        true => argument.conflicts_with(other),
        false => argument,
    }
}

/// Inputs of a planning problem beside the model and the flags.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ProblemInputs<'a> {
    /// Prompt to predict expert usage for. `None`: the mean of the history.
    pub(crate) prompt: Option<&'a str>,
    /// Concurrent requests. `None`: as the workload states.
    pub(crate) concurrency: Option<u32>,
    /// Idle window of the deployment, if the workload states none.
    pub(crate) idle: Option<Duration>,
    /// Idle window of a single group, if the workload states none.
    pub(crate) remote_idle: Option<Duration>,
}

impl PlanningArgs {
    /// Returns the profile for main functions on `device`: that of `--profile`, else the one in the cache, if any.
    pub(crate) fn known_profile(
        &self,
        model: &ModelId,
        device: &MainDevice,
    ) -> Result<Option<Profile>, CliError> {
        select_profile(self.given_profile()?, model, device)
    }

    /// Reads the profile of `--profile`.
    pub(crate) fn given_profile(&self) -> Result<Option<Profile>, CliError> {
        self.profile.as_deref().map(read_profile).transpose()
    }

    /// Builds the problem of serving the model of `desired` on the machine of `profile`.
    pub(crate) fn problem_on(
        &self,
        profile: &Profile,
        wanted: &DesiredDeployment,
        args: &DeploymentArgs,
        inputs: ProblemInputs<'_>,
    ) -> Result<Problem, CliError> {
        let mut problem =
            self.problem(&wanted.checkpoint, &wanted.inspection, profile, args.dtype, inputs)?;
        constraints::apply(args, &mut problem)?;
        Ok(problem)
    }

    /// Builds the problem of serving `model`. With a prompt, its expert usage and length are those of the request.
    pub(crate) fn problem(
        &self,
        checkpoint: &Arc<Checkpoint>,
        model: &Inspection,
        profile: &Profile,
        dtype: Option<Dtype>,
        inputs: ProblemInputs<'_>,
    ) -> Result<Problem, CliError> {
        let prompt = inputs.prompt;
        let dtype = dtype.map_or_else(|| profile.model.dtype.clone(), |dtype| dtype.name().to_owned());
        profile
            .check_model(model, &dtype)
            .map_err(|error| CliError::arguments("--profile", error.to_string()))?;
        let mut request = self.workload.request(model, inputs.concurrency)?;
        let ids = prompt.map(|text| self.tokens(checkpoint, text)).transpose()?;
        if let Some(ids) = &ids {
            request.input_tokens = ids.len() as f64;
            request.max_input_tokens = request.max_input_tokens.map(|limit| limit.max(request.input_tokens));
        }
        let trained = self.trained(checkpoint)?;
        let mut prediction = None;
        let mut p95 = None;
        if let Some(trained) = &trained {
            let tokens = ByPhase { prefill: request.input_tokens, decode: request.output_tokens };
            let expected = trained.expectation(ids.as_deref(), tokens)?;
            p95 =
                expected.least_used_p95.map(|layers| layers.into_iter().map(ErrorFactor::ByCount).collect());
            prediction = Some(expected.shares.to_rows());
        }
        let pricing = self.pricing_of(&self.prices(&MainDevice::of_profile(profile))?)?;
        let arrivals = self.workload.arrivals(inputs.idle)?;
        let fallback_bytes = fallback_bytes(model, &profile.model.dtype) as f64;
        let machine_bytes = machine::memory_bytes().max(1 << 30) as f64;
        let requirements = DeploymentRequirements {
            request,
            slo: self.slo(arrivals.as_ref())?,
            pricing,
            specs: Specs {
                main: self.main_memory_mb.unwrap_or(SizeRange {
                    min_bytes: 100.0 * MB,
                    max_bytes: (machine_bytes / (100.0 * MB)).floor() * 100.0 * MB,
                    step_bytes: 100.0 * MB,
                }),
                remote: self.remote_memory_mb,
                main_vcpus: self.main_cpu,
                remote_vcpus: self.remote_cpu,
            },
            limits: Limits {
                payload_bytes: None,
                max_replicas: self.max_replicas,
                max_groups: self.max_groups,
                // A main function uses one GPU.
                gpu_bytes: pricing.gpu_bytes_each.filter(|_| profile.device.is_some()),
            },
            prediction,
            arrivals,
            remote_idle_seconds: self.remote_idle(inputs.remote_idle)?.map(|idle| idle.as_secs_f64()),
            prediction_p95: p95,
            fallback_bytes,
            cold_start_seconds: 0.0,
        };
        let mut problem = remoe_hardware::problem(model, profile, &requirements).map_err(|error| {
            let flag = if error == ProblemError::NoGpuPrice { "--pricing" } else { "--model" };
            CliError::arguments(flag, error.to_string())
        })?;
        if profile.origin == Origin::Measured
            && profile.device.is_some()
            && profile.gpu_expert_seconds.is_none()
        {
            print_warning(
                "GPU expert times were not measured; GPU baselines assume half of an NVIDIA T4; state \
                 gpu_expert_seconds in the profile",
            );
        }
        if self.main_memory_mb.is_none() && self.main_cpu.is_none() && problem.request.concurrency > 1 {
            raise_min_size_for_batch(&mut problem, profile.machine.cores);
        }
        Ok(problem)
    }

    /// Returns the idle window of a group: `from_flag`, else the one that the workload states.
    pub(crate) fn remote_idle(&self, from_flag: Option<Duration>) -> Result<Option<Duration>, CliError> {
        let Some(seconds) = self.workload.remote_idle_seconds()? else { return Ok(from_flag) };
        let idle = Duration::try_from_secs_f64(seconds).map_err(|error| {
            CliError::arguments("--workload", format!("arrivals.remoteIdleSeconds is {seconds}: {error}"))
        })?;
        Ok(from_flag.or(Some(idle)))
    }

    /// Returns the latency limits of the flags. Some require `arrivals` in the workload.
    pub(crate) fn slo(&self, arrivals: Option<&Arrivals>) -> Result<Slo, CliError> {
        let has_idle_window = arrivals.is_some_and(|arrivals| arrivals.idle_seconds.is_some());
        let flags = [("--cold-ttft", self.cold_ttft.is_some()), ("--cold-share", self.cold_share.is_some())];
        if let Some((flag, _)) = flags.into_iter().find(|(_, is_given)| *is_given && !has_idle_window) {
            let message = format!(
                "cannot apply {flag}: functions never sleep in this workload; state arrivals with an idle window, such \
                 as arrivals: {{perHour: 20, idleSeconds: 60}}, in the file of --workload"
            );
            return Err(CliError::arguments(flag, message));
        }
        if self.quantile.is_some() && arrivals.is_none() {
            let message = "cannot apply --quantile: without arrivals every request runs alone; state arrivals, such as \
                           arrivals: {perHour: 20}, in the file of --workload";
            return Err(CliError::arguments("--quantile", message));
        }
        Ok(Slo {
            quantile: self.quantile,
            cold_ttft_seconds: self.cold_ttft.map(|limit| limit.as_secs_f64()),
            cold_share: self.cold_share,
            ..Slo::new(self.ttft.as_secs_f64(), self.tpot.as_secs_f64())
        })
    }

    /// Reads the price list of `--pricing`. Without one, returns the default prices of `device`.
    pub(crate) fn prices(&self, device: &MainDevice) -> Result<Prices, CliError> {
        match &self.pricing {
            None => Ok(device.default_prices()),
            Some(path) => {
                let text = read("--pricing", path)?;
                parse_prices(&text).map_err(|error| file_error("--pricing", path, &error))
            }
        }
    }

    /// Converts `prices` for the planner.
    pub(crate) fn pricing_of(&self, prices: &Prices) -> Result<Pricing, CliError> {
        let pricing = if self.main_cpu.is_some() { prices.separate_pricing() } else { prices.pricing() };
        pricing.map_err(|error| CliError::arguments("--pricing", error.to_string()))
    }

    fn trained(&self, checkpoint: &Arc<Checkpoint>) -> Result<Option<TrainedPredictor>, CliError> {
        PredictorModel::predictor_of(checkpoint, self.predictor.as_deref())
    }

    fn tokens(&self, checkpoint: &Checkpoint, text: &str) -> Result<Vec<u32>, CliError> {
        prompt::tokens(checkpoint, text, true, "--prompt")
    }
}

/// Raises the minimum size of the main function to the number of vCPUs that speed up decode steps of the whole batch, at
/// most the machine's `cores`. Otherwise the planner chooses the fewest vCPUs that meet the limits of one request, which
/// concurrent requests would then share.
fn raise_min_size_for_batch(problem: &mut Problem, cores: u32) {
    let vcpus = useful_vcpus(problem, f64::from(cores.max(1)));
    let main = &mut problem.specs.main;
    let steps = ((vcpus as f64 * problem.pricing.vcpu_bytes()).min(main.max_bytes) - main.min_bytes)
        / main.step_bytes;
    main.min_bytes += steps.floor().max(0.0) * main.step_bytes;
}

/// Finds the cheapest plan, on a blocking thread. With an assumed profile, the plan may violate limits.
pub(crate) async fn plan(
    problem: &Problem,
    remote: RemoteArg,
    origin: Origin,
) -> Result<PlanningResult, CliError> {
    let problem = problem.clone();
    let solved = tokio::task::spawn_blocking(move || {
        search_by_origin(&problem, origin, remote.into(), |problem, remote| {
            solve(problem, None, &Options { remote, sturdy: STURDY, ..Options::default() })
        })
    });
    let (answer, _may_violate_limits) =
        solved.await.map_err(|error| CliError::runtime(format!("cannot plan: {error}")))??;
    Ok(answer)
}

/// Returns `given`, else the profile in the cache, if any. Warns about implausible figures.
///
/// # Errors
/// The profile `given` is of another device.
pub(crate) fn select_profile(
    given: Option<Profile>,
    model: &ModelId,
    device: &MainDevice,
) -> Result<Option<Profile>, CliError> {
    let profile = match given {
        Some(profile) => {
            let checked = profile.check_device(&device.name);
            checked.map_err(|error| CliError::arguments("--profile", error.to_string()))?;
            profile
        }
        None => {
            let path = profiling::default_path(model, device);
            if !path.exists() {
                return Ok(None);
            }
            let profile = read_profile(&path)?;
            // Ignores a file of another device, which a user may have copied there.
            if profile.check_device(&device.name).is_err() {
                return Ok(None);
            }
            profile
        }
    };
    profiling::doubts(&profile).iter().for_each(|doubt| print_warning(doubt));
    Ok(Some(profile))
}

fn read_profile(path: &Path) -> Result<Profile, CliError> {
    let text = read("--profile", path)?;
    Profile::from_json(&text).map_err(|error| file_error("--profile", path, &error))
}

/// Parses a price list, or `spec.pricing` of a MoEDeployment.
pub(crate) fn parse_prices(text: &str) -> Result<Prices, FieldError> {
    let to_field_error = |PricesError { field, message }| FieldError { field, message };
    match resource::parse_resource(text)? {
        None => Prices::from_yaml(text).map_err(to_field_error),
        Some(resource) => Prices::from_yaml(&resource.section("pricing")?)
            .map_err(|error| spec_error("pricing", to_field_error(error))),
    }
}

/// Parses a share, such as `0.05` or `5%`.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    let invalid = || "expected a share such as 0.05 or 5%".to_owned();
    let (number, divisor) = text.strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
    let share = number.trim().parse::<f64>().map_err(|_| invalid())? / divisor;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err(invalid()) }
}
