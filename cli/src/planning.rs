//! From a model, a profile and wishes to a plan: what `plan --model`, `up` and `generate` share.

mod ranges;

pub(crate) use ranges::{size_range, vcpu_range};
pub(crate) use remoe_local::STURDY;

use crate::constraints;
use crate::deployment::{DesiredDeployment, fallback_bytes};
use crate::device::MainDevice;
use crate::exit::CliError;
use crate::files::{in_file, read};
use crate::flags::{DeploymentArgs, Dtype, RemoteArg};
use crate::machine;
use crate::output::progress::print_warning;
use crate::predictors::PredictorModel;
use crate::profiling;
use crate::prompt;
use crate::resource::{self, in_spec};
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
use remoe_predictor::{ByPhase, Trained};
use remoe_process::parse_duration;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const MB: f64 = 1e6;
/// Replicas of a function and groups of a plan, at most.
const MOST_COUNT: u32 = 64;

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
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_COUNT)), help_heading = "Planning")]
    pub(crate) max_replicas: u32,
    /// Let the plan divide every layer's remote experts among up to N remote groups [default: no groups: the remote
    /// experts of each layer are in a function of their own]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_COUNT)), help_heading = "Planning")]
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

/// Reads the name of a quantile.
fn quantile(text: &str) -> Result<Quantile, String> {
    let all = [Quantile::P50, Quantile::P95, Quantile::P99];
    let found = all.into_iter().find(|quantile| quantile.name() == text);
    found.ok_or_else(|| format!("expected p50, p95 or p99, got {text:?}"))
}

/// Lets an argument of [`PlanningArgs`] stand only without `other`, beside which it would mean nothing.
/// The predictor is none of them: it also says which experts a ratio sends away.
pub(crate) fn not_beside(other: &'static str, argument: clap::Arg) -> clap::Arg {
    const OF_PLANS: [&str; 14] = [
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
    match OF_PLANS.contains(&argument.get_id().as_str()) {
        true => argument.conflicts_with(other),
        false => argument,
    }
}

/// Facts that a problem is stated for, beside the model.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ProblemInputs<'a> {
    /// One prompt, instead of the mean of the history.
    pub(crate) prompt: Option<&'a str>,
    /// Requests that run at once; the workload's where absent.
    pub(crate) concurrency: Option<u32>,
    /// Without requests for so long functions end, where the workload does not say.
    pub(crate) idle: Option<Duration>,
    /// As `idle`, for a group by itself, while the main function goes on.
    pub(crate) remote_idle: Option<Duration>,
}

impl PlanningArgs {
    /// The profile to plan with for main functions on `device`: the given one, or the one in the cache; `None` where
    /// that does not exist yet.
    pub(crate) fn known_profile(
        &self,
        model: &ModelId,
        device: &MainDevice,
    ) -> Result<Option<Profile>, CliError> {
        given_or_kept(self.given_profile()?, model, device)
    }

    /// Reads the profile that was given.
    pub(crate) fn given_profile(&self) -> Result<Option<Profile>, CliError> {
        self.profile.as_deref().map(read_profile).transpose()
    }

    /// States the problem of serving `wanted`'s model as `asked` on the machine of `profile`.
    pub(crate) fn problem_on(
        &self,
        profile: &Profile,
        wanted: &DesiredDeployment,
        args: &DeploymentArgs,
        asked: ProblemInputs<'_>,
    ) -> Result<Problem, CliError> {
        let mut problem = self.problem(&wanted.checkpoint, &wanted.inspection, profile, args.dtype, asked)?;
        constraints::apply(args, &mut problem)?;
        Ok(problem)
    }

    /// The problem of serving `model`. With a prompt it is that of this one request.
    pub(crate) fn problem(
        &self,
        checkpoint: &Arc<Checkpoint>,
        model: &Inspection,
        profile: &Profile,
        dtype: Option<Dtype>,
        asked: ProblemInputs<'_>,
    ) -> Result<Problem, CliError> {
        let prompt = asked.prompt;
        let dtype = dtype.map_or_else(|| profile.model.dtype.clone(), |dtype| dtype.name().to_owned());
        profile
            .check_model(model, &dtype)
            .map_err(|error| CliError::arguments("--profile", error.to_string()))?;
        let mut request = self.workload.request(model, asked.concurrency)?;
        let ids = prompt.map(|text| self.tokens(checkpoint, text)).transpose()?;
        if let Some(ids) = &ids {
            request.input_tokens = ids.len() as f64;
            request.max_input_tokens = request.max_input_tokens.map(|most| most.max(request.input_tokens));
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
        let pricing = self.pricing_of(&self.prices(&MainDevice::of(profile))?)?;
        let arrivals = self.workload.arrivals(asked.idle)?;
        let fallback_bytes = fallback_bytes(model, &profile.model.dtype) as f64;
        let machine = machine::memory_bytes().max(1 << 30) as f64;
        let wishes = DeploymentRequirements {
            request,
            slo: self.slo(arrivals.as_ref())?,
            pricing,
            specs: Specs {
                main: self.main_memory_mb.unwrap_or(SizeRange {
                    min_bytes: 100.0 * MB,
                    max_bytes: (machine / (100.0 * MB)).floor() * 100.0 * MB,
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
                // Layers are not divided over several GPUs.
                gpu_bytes: pricing.gpu_bytes_each.filter(|_| profile.device.is_some()),
            },
            prediction,
            arrivals,
            remote_idle_seconds: self.remote_idle(asked.remote_idle)?.map(|idle| idle.as_secs_f64()),
            prediction_p95: p95,
            fallback_bytes,
            cold_start_seconds: 0.0,
        };
        let mut problem = remoe_hardware::problem(model, profile, &wishes).map_err(|error| {
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
            share_cores(&mut problem, profile.machine.cores);
        }
        Ok(problem)
    }

    /// Without a use of its experts for so long a group sleeps: `asked`, or what the workload says.
    pub(crate) fn remote_idle(&self, asked: Option<Duration>) -> Result<Option<Duration>, CliError> {
        let Some(seconds) = self.workload.remote_idle_seconds()? else { return Ok(asked) };
        let idle = Duration::try_from_secs_f64(seconds).map_err(|error| {
            CliError::arguments("--workload", format!("arrivals.remoteIdleSeconds is {seconds}: {error}"))
        })?;
        Ok(asked.or(Some(idle)))
    }

    /// The limits that were given, of requests that come as `arrivals` say.
    pub(crate) fn slo(&self, arrivals: Option<&Arrivals>) -> Result<Slo, CliError> {
        let sleeps = arrivals.is_some_and(|arrivals| arrivals.idle_seconds.is_some());
        let flags = [("--cold-ttft", self.cold_ttft.is_some()), ("--cold-share", self.cold_share.is_some())];
        if let Some((flag, _)) = flags.into_iter().find(|(_, is_given)| *is_given && !sleeps) {
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

    /// The prices that were given, or the default ones of `device`.
    pub(crate) fn prices(&self, device: &MainDevice) -> Result<Prices, CliError> {
        match &self.pricing {
            None => Ok(device.prices()),
            Some(path) => {
                let text = read("--pricing", path)?;
                prices_of(&text).map_err(|error| in_file("--pricing", path, &error))
            }
        }
    }

    /// The planner's form of `prices`.
    pub(crate) fn pricing_of(&self, prices: &Prices) -> Result<Pricing, CliError> {
        let pricing = if self.main_cpu.is_some() { prices.separate_pricing() } else { prices.pricing() };
        pricing.map_err(|error| CliError::arguments("--pricing", error.to_string()))
    }

    fn trained(&self, checkpoint: &Arc<Checkpoint>) -> Result<Option<Trained>, CliError> {
        PredictorModel::predictor_of(checkpoint, self.predictor.as_deref())
    }

    fn tokens(&self, checkpoint: &Checkpoint, text: &str) -> Result<Vec<u32>, CliError> {
        prompt::tokens(checkpoint, text, true, "--prompt")
    }
}

/// Starts the sizes of the main function at as many vCPUs as help the decode steps of all requests that
/// run at once, of the machine's `cores`. The cheapest size for one request has the fewest vCPUs that keep
/// its limits, and several requests would share those.
fn share_cores(problem: &mut Problem, cores: u32) {
    let vcpus = useful_vcpus(problem, f64::from(cores.max(1)));
    let main = &mut problem.specs.main;
    let steps = ((vcpus as f64 * problem.pricing.vcpu_bytes()).min(main.max_bytes) - main.min_bytes)
        / main.step_bytes;
    main.min_bytes += steps.floor().max(0.0) * main.step_bytes;
}

/// The cheapest plan; on assumed figures one that may miss limits. It takes a moment: a thread of its own makes it.
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
    let (answer, _may_miss) =
        solved.await.map_err(|error| CliError::runtime(format!("cannot plan: {error}")))??;
    Ok(answer)
}

/// Returns `given` if it is of `device`, else the profile in the cache; `None` where there is neither. Warns of figures that
/// look unsound.
pub(crate) fn given_or_kept(
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
            // One that was put there by hand may be of another device.
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
    Profile::from_json(&text).map_err(|error| in_file("--profile", path, &error))
}

/// Reads a price list, or the prices of a MoEDeployment.
pub(crate) fn prices_of(text: &str) -> Result<Prices, FieldError> {
    let wrong = |PricesError { field, message }| FieldError { field, message };
    match resource::of_text(text)? {
        None => Prices::from_yaml(text).map_err(wrong),
        Some(resource) => {
            Prices::from_yaml(&resource.part("pricing")?).map_err(|error| in_spec("pricing", wrong(error)))
        }
    }
}

/// Parses a share of a whole, `0.05` or `5%`.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    let wrong = || "expected a share such as 0.05 or 5%".to_owned();
    let (number, whole) = text.strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
    let share = number.trim().parse::<f64>().map_err(|_| wrong())? / whole;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err(wrong()) }
}
