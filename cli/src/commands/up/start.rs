//! Start of one model of `up`: decides the placement and starts the functions.

use super::args::{StartOrder, UpArgs};
use super::background_measurement::UnmeasuredModel;
use super::problem_statement::ProblemStatement;
use crate::deployment::{self, DesiredDeployment, Launch, ratio_of};
use crate::exit::CliError;
use crate::flags::DeploymentArgs;
use crate::output::progress::Progress;
use crate::placement_choice::PlacementChoice;
use crate::plan_report;
use crate::planning::plan;
use crate::profile_source::{MissingProfile, warn_missing_contention};
use crate::remote_set::PredictionSource;
use remoe_hardware::Origin;
use remoe_hub::ModelLocation;
use remoe_local::{CostRecorder, FunctionPrices, Measured, PlacementBasis};
use remoe_planner::{MainSize, PlanningResult, Pricing, Problem, preallocate};
use remoe_predictor::UsageShares;
use remoe_process::Role;
use remoe_rollout::decide::Desired;
use remoe_rollout::{Status, Supervisor};
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

/// Default share of remote experts if only the number of replicas is given.
const DEFAULT_REMOTE_RATIO: f64 = 0.5;

/// A model that is ready for requests.
pub(super) struct StartedModel {
    pub(super) wanted: DesiredDeployment,
    pub(super) supervisor: Supervisor,
    pub(super) status: Status,
    pub(super) times: StartTimes,
    pub(super) function_prices: FunctionPrices,
    /// Task that records the costs of the functions. It ends when all costs are recorded.
    pub(super) cost_task: JoinHandle<()>,
    /// Sends the prices of the functions to the task that records their costs.
    pub(super) price_sender: watch::Sender<Option<FunctionPrices>>,
    /// Inputs for a later placement.
    pub(super) basis: PlacementBasis,
    /// Reason for the placement.
    pub(super) choice: PlacementChoice,
    /// Measurement to run in the background, with the receiver of its result.
    pub(super) measurement: Option<(UnmeasuredModel, oneshot::Receiver<Measured>)>,
}

/// Durations of the consecutive phases of a cold start, in seconds.
#[derive(Debug, Default, Serialize)]
pub(crate) struct StartTimes {
    /// Reading the inputs of the plan: checkpoint, profile and prediction.
    pub(super) facts_s: f64,
    /// Waiting for the plan.
    pub(super) plan_s: f64,
    /// From the start of the first function until all functions listen.
    pub(super) functions_s: f64,
    /// From then until the placement is active: local experts are packed and remote functions are connected.
    pub(super) placement_s: f64,
}

impl StartTimes {
    pub(super) fn total(&self) -> f64 {
        self.facts_s + self.plan_s + self.functions_s + self.placement_s
    }
}

/// Settings of one model, from the arguments.
pub(super) struct ModelSettings {
    deployment: DeploymentArgs,
    /// Set if no flag determines the remote experts.
    is_planned: bool,
    pub(super) wanted: DesiredDeployment,
    /// Time that reading the checkpoint took.
    read_time: Duration,
}

/// Inspects the checkpoint at `location`. The model is served as `name`, or else under the name of its folder. Its main
/// function accepts requests with `key`.
pub(super) fn prepare_model(
    args: &UpArgs,
    location: &ModelLocation,
    name: Option<String>,
    key: &str,
) -> Result<ModelSettings, CliError> {
    let start = Instant::now();
    let (source, deployment) = (args.source.at(location), args.deployment.clone());
    let is_planned =
        deployment.plan.is_none() && deployment.remote_ratio.is_none() && deployment.replicas.is_none();
    let prediction = PredictionSource { predictor: args.planning.predictor.as_deref(), prompt: None };
    let mut wanted = match is_planned {
        true => deployment::unplaced_deployment(&source, &deployment)?,
        false => deployment::desired_deployment(&source, &deployment, DEFAULT_REMOTE_RATIO, prediction)?,
    };
    wanted.options.served_model_name = name;
    wanted.options.gateway_key = Some(key.to_owned());
    wanted.options.body_limit = args.body_limit;
    wanted.options.max_requests = args.max_requests;
    wanted.options.target_itl = args.target_itl.or(is_planned.then_some(args.planning.tpot));
    wanted.options.queue_deadline = args.queue_deadline;
    wanted.options.chat_template_kwargs.clone_from(&args.chat_template_kwargs);
    if let Some(requests) = args.concurrency.concurrency {
        if let Some(limit) = deployment.max_batch.filter(|limit| *limit < requests as usize) {
            let message =
                format!("invalid --concurrency: expected at most {limit} (--max-batch), got {requests}");
            return Err(CliError::arguments("--concurrency", message));
        }
        wanted.run_at_once(requests);
    }
    wanted.serves_http = true;
    Ok(ModelSettings { deployment, is_planned, wanted, read_time: start.elapsed() })
}

/// Decides the placement and starts the functions. The expert usage `remembered` from earlier requests replaces the
/// prediction.
pub(super) async fn start(
    args: &UpArgs,
    settings: ModelSettings,
    (costs, pricing): (&CostRecorder, &Pricing),
    remembered: Option<&UsageShares>,
    as_json: bool,
    progress: &Arc<Progress>,
) -> Result<StartedModel, CliError> {
    let ModelSettings { deployment, is_planned, mut wanted, read_time } = settings;
    let mut clock = Stopwatch::start();
    let mut times = StartTimes::default();
    let stated = match is_planned && !wanted.moe_layers.is_empty() {
        true => Some(StatedProblem::new(args, &deployment, &wanted, remembered, progress).await?),
        false => None,
    };
    let problem = stated.as_ref().map(|stated| stated.problem.clone());
    let mut choice = PlacementChoice::from_flags(&deployment, wanted.moe_layers.is_empty());
    times.facts_s = read_time.as_secs_f64() + clock.lap();
    let price_sender = watch::Sender::new(None);
    let record_costs = |supervisor: &Supervisor| {
        tokio::spawn(costs.clone().follow(supervisor.status(), price_sender.subscribe()))
    };
    let origin = stated.as_ref().map_or(Origin::Measured, |stated| stated.origin);
    let (supervisor, cost_task) = match (&problem, args.start) {
        // The worst case needs measured speeds.
        (Some(problem), StartOrder::Preallocated) if origin == Origin::Measured => {
            let main_bytes = preallocate(problem)?.main_bytes;
            wanted.size_main(MainSize::of(problem, main_bytes, None));
            let supervisor = wanted.launch(only_main_function(wanted.desired()), progress)?;
            let cost_task = record_costs(&supervisor);
            let problem = problem.with_main(main_bytes, None);
            let result = plan(&problem, args.remote, origin).await?;
            wanted.place_as_planned(&problem, &result)?;
            show_plan(&problem, &result, as_json, progress);
            choice = PlacementChoice::from_plan(&problem, &result, args.remote, origin);
            times.plan_s = clock.lap();
            supervisor.change(wanted.desired());
            (supervisor, cost_task)
        }
        (problem, order) => {
            if let Some(problem) = problem {
                let result = plan(problem, args.remote, origin).await?;
                wanted.place_as_planned(problem, &result)?;
                show_plan(problem, &result, as_json, progress);
                choice = PlacementChoice::from_plan(problem, &result, args.remote, origin);
            }
            times.plan_s = clock.lap();
            let desired = wanted.desired();
            if order == StartOrder::Sequential {
                let supervisor = wanted.launch(only_main_function(desired.clone()), progress)?;
                let cost_task = record_costs(&supervisor);
                start_sequentially(&supervisor, desired).await;
                (supervisor, cost_task)
            } else {
                let supervisor = wanted.launch(desired, progress)?;
                let cost_task = record_costs(&supervisor);
                (supervisor, cost_task)
            }
        }
    };
    let function_prices = FunctionPrices::of(&wanted, pricing);
    price_sender.send_replace(Some(function_prices.clone()));
    let functions = wanted.desired().functions.len();
    wait_until_listening(&supervisor, functions).await;
    times.functions_s = clock.lap();
    let status = wanted.ready(&supervisor, progress).await?;
    times.placement_s = clock.lap();
    let basis = match problem {
        Some(problem) => PlacementBasis::Planned(Box::new(problem), args.remote.into()),
        None => PlacementBasis::Ratio(ratio_of(&deployment, DEFAULT_REMOTE_RATIO)),
    };
    let measurement = stated.and_then(|stated| stated.measurement(&wanted));
    Ok(StartedModel {
        wanted,
        supervisor,
        status,
        times,
        function_prices,
        cost_task,
        price_sender,
        basis,
        choice,
        measurement,
    })
}

/// A planning problem, with its inputs.
struct StatedProblem {
    statement: ProblemStatement,
    problem: Problem,
    origin: Origin,
    /// Set if the speeds are assumed, or if other programs disturbed their measurement.
    is_uncertain: bool,
}

impl StatedProblem {
    async fn new(
        args: &UpArgs,
        deployment: &DeploymentArgs,
        wanted: &DesiredDeployment,
        remembered: Option<&UsageShares>,
        progress: &Arc<Progress>,
    ) -> Result<Self, CliError> {
        let missing = if args.profile_first { MissingProfile::Measure } else { MissingProfile::Assume };
        let profile = args.planning.resolve_profile(wanted, deployment, missing, progress).await?;
        let statement = ProblemStatement {
            planning: args.planning.clone(),
            deployment: deployment.clone(),
            remote: args.remote,
            concurrency: args.concurrency.concurrency,
            idle: args.idle,
            remote_idle: args.remote_idle,
            remembered: remembered.cloned(),
        };
        let problem = statement.problem(&profile, wanted)?;
        warn_missing_contention(&profile, &problem, progress);
        let disturbed = profile.disturbed.is_some() && args.planning.profile.is_none();
        let is_uncertain = disturbed || (profile.origin == Origin::Prior && args.planning.profile.is_none());
        Ok(Self { statement, problem, origin: profile.certainty(), is_uncertain })
    }

    /// Returns the measurement to run while `wanted` serves, with the receiver of its result. There is none if the
    /// speeds were measured without disturbance.
    fn measurement(
        self,
        wanted: &DesiredDeployment,
    ) -> Option<(UnmeasuredModel, oneshot::Receiver<Measured>)> {
        if !self.is_uncertain {
            return None;
        }
        let request = self.statement.measurement(&self.problem, wanted);
        let (result_sender, result) = oneshot::channel();
        let model =
            UnmeasuredModel { statement: self.statement, wanted: wanted.clone(), request, result_sender };
        Some((model, result))
    }
}

/// Reduces `desired` to its main function, to start it before the plan is known.
fn only_main_function(mut desired: Desired) -> Desired {
    desired.functions.retain(|function| function.role == Role::Main);
    desired.placed = false;
    desired
}

/// Starts each remote function once all earlier ones listen. The main function is already started.
async fn start_sequentially(supervisor: &Supervisor, desired: Desired) {
    for count in 2..=desired.functions.len() {
        wait_until_listening(supervisor, count - 1).await;
        let mut started = Desired { placed: false, ..desired.clone() };
        started.functions.truncate(count);
        supervisor.change(started);
    }
    wait_until_listening(supervisor, desired.functions.len()).await;
    supervisor.change(desired);
}

/// Waits until there are `count` functions and all of them listen, or until the deployment fails.
async fn wait_until_listening(supervisor: &Supervisor, count: usize) {
    let mut status = supervisor.status();
    // The wait for readiness reports a failure.
    let _ended = status
        .wait_for(|status| {
            let listening = status.functions.iter().filter(|function| function.grpc.is_some()).count();
            status.failure.is_some() || (listening == count && status.functions.len() == count)
        })
        .await;
}

fn show_plan(problem: &Problem, result: &PlanningResult, as_json: bool, progress: &Progress) {
    if !as_json && progress.is_verbose() {
        progress.line(&format!("{}\n", plan_report::plan(problem, result, false)));
    }
}

/// Measures the durations of consecutive phases.
struct Stopwatch(Instant);

impl Stopwatch {
    fn start() -> Self {
        Self(Instant::now())
    }

    /// Returns the seconds since the last lap.
    fn lap(&mut self) -> f64 {
        let now = Instant::now();
        let seconds = (now - self.0).as_secs_f64();
        self.0 = now;
        seconds
    }
}
