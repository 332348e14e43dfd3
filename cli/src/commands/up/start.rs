//! One model of `up`: what runs where is decided, and started.

use super::args::{StartOrder, UpArgs};
use super::measuring::MeasuredModel;
use super::statement::ProblemStatement;
use crate::choice::PlacementChoice;
use crate::deployment::{self, DesiredDeployment, Launch, ratio_of};
use crate::exit::CliError;
use crate::figures::{Unmeasured, check_contention};
use crate::flags::DeploymentArgs;
use crate::output::progress::Progress;
use crate::plan_report;
use crate::planning::plan;
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

/// Share of remote experts where only the number of replicas is given.
const HALF: f64 = 0.5;

/// A model that answers.
pub(super) struct Started {
    pub(super) wanted: DesiredDeployment,
    pub(super) supervisor: Supervisor,
    pub(super) status: Status,
    pub(super) times: StartTimes,
    pub(super) function_prices: FunctionPrices,
    /// Ends when all that ran is accounted for.
    pub(super) accounted: JoinHandle<()>,
    /// Sends the tariff of the functions to the task that accounts for their cost.
    pub(super) tell: watch::Sender<Option<FunctionPrices>>,
    /// Inputs from which another placement would be made.
    pub(super) basis: PlacementBasis,
    /// Why it is placed as it is.
    pub(super) choice: PlacementChoice,
    /// Measurement to make beside it, with the receiver of its result.
    pub(super) measurement: Option<(MeasuredModel, oneshot::Receiver<Measured>)>,
}

/// The parts of a cold start, one after the other, in seconds. They add up to the whole.
#[derive(Debug, Default, Serialize)]
pub(crate) struct StartTimes {
    /// Facts of the checkpoint, profile and prediction: what a plan is made from.
    pub(super) facts_s: f64,
    /// The plan, as far as it was waited for.
    pub(super) plan_s: f64,
    /// From the first function's start to the moment in which all of them listen.
    pub(super) functions_s: f64,
    /// Until the placement was in force: local experts packed, remote functions connected.
    pub(super) placement_s: f64,
}

impl StartTimes {
    pub(super) fn whole(&self) -> f64 {
        self.facts_s + self.plan_s + self.functions_s + self.placement_s
    }
}

/// Settings of one model, from the arguments.
pub(super) struct ModelSettings {
    deployment: DeploymentArgs,
    /// Set if no flag says which experts are remote.
    is_planned: bool,
    pub(super) wanted: DesiredDeployment,
    /// Time that reading its facts took.
    facts: Duration,
}

/// Reads the facts of the model at `location`, to be called `name` or as its place is. Its main function answers
/// clients that have `key`.
pub(super) fn ask(
    args: &UpArgs,
    location: &ModelLocation,
    name: Option<String>,
    key: &str,
) -> Result<ModelSettings, CliError> {
    let begun = Instant::now();
    let (source, deployment) = (args.source.at(location), args.deployment.clone());
    let is_planned =
        deployment.plan.is_none() && deployment.remote_ratio.is_none() && deployment.replicas.is_none();
    let prediction = PredictionSource { predictor: args.planning.predictor.as_deref(), prompt: None };
    let mut wanted = match is_planned {
        true => deployment::unplaced(&source, &deployment)?,
        false => deployment::wanted(&source, &deployment, HALF, prediction)?,
    };
    wanted.options.served_model_name = name;
    wanted.options.gateway_key = Some(key.to_owned());
    wanted.options.body_limit = args.body_limit;
    wanted.options.max_requests = args.max_requests;
    wanted.options.target_itl = args.target_itl.or(is_planned.then_some(args.planning.tpot));
    wanted.options.queue_deadline = args.queue_deadline;
    wanted.options.chat_template_kwargs.clone_from(&args.chat_template_kwargs);
    if let Some(requests) = args.concurrency.concurrency {
        if let Some(most) = deployment.max_batch.filter(|most| *most < requests as usize) {
            let message =
                format!("invalid --concurrency: expected at most {most} (--max-batch), got {requests}");
            return Err(CliError::arguments("--concurrency", message));
        }
        wanted.run_at_once(requests);
    }
    wanted.serves_http = true;
    Ok(ModelSettings { deployment, is_planned, wanted, facts: begun.elapsed() })
}

/// Decides what runs where, for requests like those that are `remembered` where any are, and starts it.
pub(super) async fn start(
    args: &UpArgs,
    asked: ModelSettings,
    (costs, pricing): (&CostRecorder, &Pricing),
    remembered: Option<&UsageShares>,
    as_json: bool,
    progress: &Arc<Progress>,
) -> Result<Started, CliError> {
    let ModelSettings { deployment, is_planned, mut wanted, facts } = asked;
    let mut clock = Stopwatch::start();
    let mut times = StartTimes::default();
    let stated = match is_planned && !wanted.moe_layers.is_empty() {
        true => Some(StatedProblem::new(args, &deployment, &wanted, remembered, progress).await?),
        false => None,
    };
    let problem = stated.as_ref().map(|stated| stated.problem.clone());
    let mut choice = PlacementChoice::asked(&deployment, wanted.moe_layers.is_empty());
    times.facts_s = facts.as_secs_f64() + clock.lap();
    let tell = watch::Sender::new(None);
    let account =
        |supervisor: &Supervisor| tokio::spawn(costs.clone().follow(supervisor.status(), tell.subscribe()));
    let origin = stated.as_ref().map_or(Origin::Measured, |stated| stated.origin);
    let (supervisor, accounted) = match (&problem, args.start) {
        // Bounds on assumed speeds say nothing.
        (Some(problem), StartOrder::Preallocated) if origin == Origin::Measured => {
            let main_bytes = preallocate(problem)?.main_bytes;
            wanted.size_main(MainSize::of(problem, main_bytes, None));
            let supervisor = wanted.launch(main_alone(wanted.desired()), progress)?;
            let accounted = account(&supervisor);
            let problem = problem.with_main(main_bytes, None);
            let answer = plan(&problem, args.remote, origin).await?;
            wanted.place_as_planned(&problem, &answer)?;
            show_plan(&problem, &answer, as_json, progress);
            choice = PlacementChoice::planned(&problem, &answer, args.remote, origin);
            times.plan_s = clock.lap();
            supervisor.change(wanted.desired());
            (supervisor, accounted)
        }
        (problem, order) => {
            if let Some(problem) = problem {
                let answer = plan(problem, args.remote, origin).await?;
                wanted.place_as_planned(problem, &answer)?;
                show_plan(problem, &answer, as_json, progress);
                choice = PlacementChoice::planned(problem, &answer, args.remote, origin);
            }
            times.plan_s = clock.lap();
            let desired = wanted.desired();
            if order == StartOrder::Sequential {
                let supervisor = wanted.launch(main_alone(desired.clone()), progress)?;
                let accounted = account(&supervisor);
                one_after_the_other(&supervisor, desired).await;
                (supervisor, accounted)
            } else {
                let supervisor = wanted.launch(desired, progress)?;
                let accounted = account(&supervisor);
                (supervisor, accounted)
            }
        }
    };
    let function_prices = FunctionPrices::of(&wanted, pricing);
    tell.send_replace(Some(function_prices.clone()));
    let functions = wanted.desired().functions.len();
    all_listen(&supervisor, functions).await;
    times.functions_s = clock.lap();
    let status = wanted.ready(&supervisor, progress).await?;
    times.placement_s = clock.lap();
    let basis = match problem {
        Some(problem) => PlacementBasis::Planned(Box::new(problem), args.remote.into()),
        None => PlacementBasis::Ratio(ratio_of(&deployment, HALF)),
    };
    let measurement = stated.and_then(|stated| stated.measurement(&wanted));
    Ok(Started {
        wanted,
        supervisor,
        status,
        times,
        function_prices,
        accounted,
        tell,
        basis,
        choice,
        measurement,
    })
}

/// A problem, and what its figures stand on.
struct StatedProblem {
    statement: ProblemStatement,
    problem: Problem,
    origin: Origin,
    /// The figures are assumed, or other programs disturbed their measurement.
    is_unsure: bool,
}

impl StatedProblem {
    async fn new(
        args: &UpArgs,
        deployment: &DeploymentArgs,
        wanted: &DesiredDeployment,
        remembered: Option<&UsageShares>,
        progress: &Arc<Progress>,
    ) -> Result<Self, CliError> {
        let unmeasured = if args.profile_first { Unmeasured::Measure } else { Unmeasured::Assume };
        let profile = args.planning.profile_of(wanted, deployment, unmeasured, progress).await?;
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
        check_contention(&profile, &problem, progress);
        let disturbed = profile.disturbed.is_some() && args.planning.profile.is_none();
        let is_unsure = disturbed || (profile.origin == Origin::Prior && args.planning.profile.is_none());
        Ok(Self { statement, problem, origin: profile.certainty(), is_unsure })
    }

    /// Returns the measurement to make beside `wanted`, with the receiver of its result; none where figures are neither
    /// assumed nor disturbed.
    fn measurement(self, wanted: &DesiredDeployment) -> Option<(MeasuredModel, oneshot::Receiver<Measured>)> {
        if !self.is_unsure {
            return None;
        }
        let request = self.statement.measurement(&self.problem, wanted);
        let (tell, told) = oneshot::channel();
        Some((MeasuredModel { statement: self.statement, wanted: wanted.clone(), request, tell }, told))
    }
}

/// Only the main function, until it is decided what else there is.
fn main_alone(mut desired: Desired) -> Desired {
    desired.functions.retain(|function| function.role == Role::Main);
    desired.placed = false;
    desired
}

/// Starts each remote function when those before it listen; the main function is started.
async fn one_after_the_other(supervisor: &Supervisor, desired: Desired) {
    for count in 2..=desired.functions.len() {
        all_listen(supervisor, count - 1).await;
        let mut some = Desired { placed: false, ..desired.clone() };
        some.functions.truncate(count);
        supervisor.change(some);
    }
    all_listen(supervisor, desired.functions.len()).await;
    supervisor.change(desired);
}

/// Returns when `count` functions are wanted and all of them listen, or when that will not be.
async fn all_listen(supervisor: &Supervisor, count: usize) {
    let mut status = supervisor.status();
    // A failure is reported by the task that waits for readiness.
    let _ended = status
        .wait_for(|status| {
            let listening = status.functions.iter().filter(|function| function.grpc.is_some()).count();
            status.failure.is_some() || (listening == count && status.functions.len() == count)
        })
        .await;
}

fn show_plan(problem: &Problem, answer: &PlanningResult, as_json: bool, progress: &Progress) {
    if !as_json && progress.is_verbose() {
        progress.line(&format!("{}\n", plan_report::answer(problem, answer, false)));
    }
}

/// Measures consecutive parts.
struct Stopwatch(Instant);

impl Stopwatch {
    fn start() -> Self {
        Self(Instant::now())
    }

    /// Seconds since the last lap.
    fn lap(&mut self) -> f64 {
        let now = Instant::now();
        let seconds = (now - self.0).as_secs_f64();
        self.0 = now;
        seconds
    }
}
