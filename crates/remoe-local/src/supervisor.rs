//! Supervisor between the gateway and the functions of one model: orders go one way, status the other. It handles
//! wakes from zero (cold starts), sleep, and the rollout of new placements.

mod revision;

use crate::cost::CostRecorder;
use crate::error::LocalError;
use crate::following::{PendingReplan, PlacementFollower, result_or_warn};
use crate::groups::{GroupUpdate, SleepGroups};
use crate::rates::FunctionPrices;
use crate::replan::{BetterPlacement, Measured, PlacementBasis};
use crate::report::{self, Report};
use http::HeaderValue;
use remoe_gateway_core::{
    Backend, DesiredState, FunctionLine, LauncherOrder, Model, RunningFunctions, WakeMarks,
};
use remoe_planner::Pricing;
use remoe_predictor::UsageShares;
use remoe_process::Role;
use remoe_proto::v1::LayerExperts;
use remoe_rollout::decide::Desired;
use remoe_rollout::functions::DEFAULT_MAX_BATCH;
use remoe_rollout::{FunctionState, FunctionStatus, Status, Supervisor, control, need};
use revision::{Planning, Revision, RevisionCause};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

/// Timeout of asking a main function for its number of requests.
const REQUEST_COUNT_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum factor by which the pause grows after revisions that failed or were reverted.
const MAX_PAUSE_FACTOR: u32 = 64;

/// Request to end the functions, with the time that they may drain.
pub type ShutdownSignal = watch::Receiver<Option<Duration>>;

/// Keeps the functions of a model as its gateway orders.
pub struct ModelSupervisor {
    /// Model in the gateway.
    pub model: Arc<Model>,
    /// Placement of the model, and the reporter of changes.
    pub report: Report,
    /// Supervisor of its functions.
    pub supervisor: Supervisor,
    /// Value of `Authorization` that the main function requires.
    pub authorization: HeaderValue,
    /// Idle window after which the model scales to zero.
    pub idle: Option<Duration>,
    /// Idle window after which a remote group sleeps while the main function runs.
    pub remote_idle: Option<Duration>,
    /// Recorder of the functions' costs.
    pub costs: CostRecorder,
    /// Prices of the functions.
    pub function_prices: FunctionPrices,
    /// Task that ends when all costs are recorded.
    pub accounted: JoinHandle<()>,
    /// Basis for replanning.
    pub basis: PlacementBasis,
    /// Price list for functions without a plan.
    pub pricing: Pricing,
    /// Sends the current prices to the cost recorder.
    pub tell: watch::Sender<Option<FunctionPrices>>,
    /// Follower of expert usage; absent if the placement does not follow requests.
    pub following: Option<PlacementFollower>,
    /// Receives the measurement that runs beside the model; absent without one.
    pub measured: Option<oneshot::Receiver<Measured>>,
    /// Plan with another main function, for its next start.
    pub next: Option<BetterPlacement>,
}

/// State of the supervision loop.
struct SupervisorState {
    /// Number of the latest order that was applied.
    order: u64,
    /// Number of the latest change of the desired state.
    change: u64,
    asleep: bool,
    /// Set if the last report was that the model sleeps.
    reported_asleep: bool,
    generation: Option<u64>,
    /// Names of serving functions by process id.
    serving: BTreeMap<u32, String>,
    /// Names of all functions that have served since the last wake.
    served: BTreeSet<String>,
    main: Option<u32>,
    wake: WakeMarks,
    /// Placement that is not in force yet.
    revision: Option<Revision>,
    /// Pause until the next search for a better placement.
    pause: Duration,
    /// Remote experts before the last revision, to detect oscillation.
    previous_remote: Option<Vec<LayerExperts>>,
    /// Search in progress for a better placement.
    pending_replan: Option<PendingReplan>,
    /// Replanning in progress after a measurement.
    planning: Option<Planning>,
    /// Sleep groups; absent if remote groups sleep only with their main function.
    sleep_groups: Option<SleepGroups>,
    /// Slots that slept and have not served since, and whether their sleep was reported.
    slept: BTreeMap<String, bool>,
}

impl ModelSupervisor {
    /// Reports that the model is ready, applies orders and reports changes until `end` sends the drain time of the
    /// functions.
    ///
    /// # Errors
    /// The gateway or the supervisor stopped, or a report cannot be written.
    pub async fn run(mut self, first: Status, mut end: ShutdownSignal) -> Result<(), LocalError> {
        let ending = async {
            let grace = end.wait_for(Option::is_some).await;
            grace.ok().and_then(|grace| *grace).unwrap_or_default()
        };
        let grace = tokio::select! {
            kept = self.supervise(&first) => return kept,
            grace = ending => grace,
        };
        self.supervisor.shutdown(grace).await;
        let _joined = self.accounted.await;
        Ok(())
    }

    async fn supervise(&mut self, first: &Status) -> Result<(), LocalError> {
        let (mut orders, mut changes) = (self.model.launcher_orders(), self.supervisor.status());
        let mut state = SupervisorState {
            order: 0,
            change: 0,
            asleep: false,
            reported_asleep: false,
            generation: first.generation,
            served: report::serving(first).into_values().collect(),
            serving: report::serving(first),
            main: None,
            wake: WakeMarks::default(),
            revision: None,
            pause: self.following.as_ref().map_or(Duration::MAX, |following| following.pause),
            previous_remote: None,
            pending_replan: None,
            planning: None,
            sleep_groups: self.remote_idle.map(SleepGroups::new),
            slept: BTreeMap::new(),
        };
        if let Some(sleep_groups) = &mut state.sleep_groups {
            sleep_groups.begin(&self.report.wanted, None);
        }
        let mut next = Instant::now().checked_add(state.pause);
        self.publish_status(first, &mut state)?;
        self.report.say("ready", first)?;
        if let Some(idle) = self.idle {
            self.model.sleep_when_idle(idle);
        }
        loop {
            let want = *orders.borrow_and_update();
            if want.order != state.order {
                self.apply_order(want, &mut state).await;
            }
            let status = changes.borrow_and_update().clone();
            self.publish_status(&status, &mut state)?;
            let search_due = sleep_until(next);
            let revision_deadline = sleep_until(state.revision.as_ref().and_then(|revision| revision.until));
            let can_revise =
                state.revision.is_none() && state.pending_replan.is_none() && state.planning.is_none();
            let planned = async {
                match &mut state.planning {
                    Some(planning) => planning.planned().await,
                    None => std::future::pending().await,
                }
            };
            let answered = async {
                match &mut state.pending_replan {
                    Some(pending_replan) => pending_replan.result().await,
                    None => std::future::pending().await,
                }
            };
            let rests = state.asleep || state.revision.is_some();
            let main = status.functions.iter().find(|function| function.role == Role::Main);
            let main = main.filter(|_| !rests && status.generation.is_some());
            let main = main.and_then(|main| Some((main.pid?, main.grpc?)));
            let present = self.following.as_ref().map(|following| following.usage.present());
            let polled = async {
                match &mut state.sleep_groups {
                    Some(sleep_groups) => sleep_groups.poll(main, present).await,
                    None => std::future::pending().await,
                }
            };
            let measured = async {
                match self.measured.as_mut().filter(|_| can_revise) {
                    Some(measured) => measured.await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                measured = measured => {
                    self.measured = None;
                    state.planning = measured.ok().and_then(|measured| self.plan_on_measurements(measured));
                }
                planned = planned => {
                    if let Some(planning) = state.planning.take() {
                        self.apply_measured_plan(planning, planned, &mut state);
                    }
                }
                polled = polled => {
                    let Some((sleep_groups, polled)) = state.sleep_groups.as_mut().zip(polled) else { continue };
                    let change = sleep_groups.apply_poll(&polled, &self.report.wanted, &status);
                    self.groups(&change, &mut state);
                }
                answered = answered => {
                    state.pending_replan = None;
                    if let Some(better) = result_or_warn(&self.report, answered) {
                        self.revise(better, RevisionCause::Drift, &mut state);
                    }
                }
                () = revision_deadline => self.roll_back("the new functions did not start in time", &mut state),
                () = search_due => {
                    next = Instant::now().checked_add(state.pause);
                    let may_revise = !state.asleep && can_revise;
                    if let Some(following) = self.following.as_mut().filter(|_| may_revise) {
                        state.pending_replan = following.start_search(&self.basis, &self.report.wanted);
                    }
                }
                changed = orders.changed() => if changed.is_err() {
                    return Err(LocalError::GatewayStopped);
                },
                changed = changes.changed() => if changed.is_err() {
                    return Err(LocalError::SupervisorStopped);
                },
            }
        }
    }

    async fn apply_order(&mut self, want: LauncherOrder, state: &mut SupervisorState) {
        let asleep = match want.wanted {
            DesiredState::Awake => false,
            DesiredState::Asleep => true,
            DesiredState::Recheck => {
                let main = self.supervisor.status().borrow().functions.iter().find_map(main_address);
                // A main function that does not answer has no request to wait for.
                let requests = match main {
                    Some(main) => control::requests_in_flight(main, REQUEST_COUNT_TIMEOUT).await.unwrap_or(0),
                    None => 0,
                };
                state.order = want.order;
                return self.model.rechecked(want.order, requests);
            }
        };
        if asleep != state.asleep {
            // Searches for the old placement are void. A result of measurements is kept for the next wake.
            if let Some(revision) = state.revision.take()
                && revision.cause == RevisionCause::Measurements
            {
                self.next.get_or_insert(revision.better);
            }
            state.pending_replan = None;
            self.reset_prices();
            if !asleep && self.all_ended(state.change) {
                self.adopt_next_plan();
            }
            let mix = match &self.following {
                Some(following) if !asleep => following.usage.present().mix().await,
                _ => None,
            };
            // If nothing is known of waiting requests, recent usage applies.
            let recent_usage = || self.following.as_ref().filter(|_| !asleep)?.usage.recent();
            let expected = mix.as_ref().map(|mix| mix.shares.clone()).or_else(recent_usage);
            if let Some(shares) = expected.clone()
                && self.all_ended(state.change)
            {
                self.plan_wake(shares, state).await;
            }
            if let Some(sleep_groups) = &mut state.sleep_groups {
                sleep_groups.begin(&self.report.wanted, mix.as_ref());
                self.model.set_inactive_groups(if asleep { Vec::new() } else { sleep_groups.groups() }, 0);
            }
            let mut desired = self.desired(state);
            desired.asleep = asleep;
            if let Some(shares) = expected {
                need::by_need(&mut desired.functions, &self.report.wanted.moe_layers, &shares.to_rows());
            }
            state.change = self.supervisor.change(desired);
            state.asleep = asleep;
            state.wake = WakeMarks::default();
        }
        state.order = want.order;
    }

    /// Plans a wake for waiting requests with expert usage `shares`, as the operator does: the main function starts
    /// with its pre-allocated size, and the remote functions are planned while it starts.
    async fn plan_wake(&mut self, shares: UsageShares, state: &mut SupervisorState) {
        let Some(following) = &self.following else { return };
        let started = Instant::now();
        let preallocated = following.preallocated(&self.basis, &self.report, shares.clone()).await;
        let preallocation_time = started.elapsed();
        if let Some(sized) = preallocated {
            self.set_prices(&sized.wanted);
            self.adopt(sized, "waiting requests");
        }
        let mut first = self.desired(state);
        first.functions.retain(|function| function.role == Role::Main);
        (first.placed, first.asleep) = (false, false);
        state.change = self.supervisor.change(first);
        let Some(following) = &self.following else { return };
        let asked = Instant::now();
        let better = following.for_waiting_requests(&self.basis, &self.report, shares).await;
        let planning = asked.elapsed();
        if let Some(better) = better {
            following.metrics.count_replan("wake");
            self.set_prices(&better.wanted);
            self.adopt(better, "waiting requests");
        }
        self.report.note(&format!(
            "wake planned while the main function starts: preallocate {:.1} ms, plan {:.1} ms",
            preallocation_time.as_secs_f64() * 1e3,
            planning.as_secs_f64() * 1e3
        ));
    }

    /// Returns the desired state, with the sleeping groups.
    fn desired(&self, state: &mut SupervisorState) -> Desired {
        let mut desired = self.report.wanted.desired();
        if let Some(sleep_groups) = &state.sleep_groups {
            desired.resting = sleep_groups.resting();
            for place in &desired.resting {
                state.slept.entry(place.clone()).or_insert(false);
            }
        }
        desired
    }

    /// Starts and stops sleep groups as decided.
    fn groups(&mut self, change: &GroupUpdate, state: &mut SupervisorState) {
        change.wakes.iter().for_each(|cause| self.model.record_group_wake(*cause));
        self.model.set_inactive_groups(
            state.sleep_groups.as_ref().map_or_else(Vec::new, SleepGroups::groups),
            change.pairs,
        );
        if change.sleeps || !change.wakes.is_empty() {
            let desired = self.desired(state);
            state.change = self.supervisor.change(desired);
        }
    }

    /// Returns whether all functions have ended after the change of this number.
    fn all_ended(&self, change: u64) -> bool {
        let status = self.supervisor.status();
        let status = status.borrow();
        status.change == change && status.functions.iter().all(|function| function.pid.is_none())
    }

    /// Reports the running functions to the gateway, and changes to the user.
    fn publish_status(&mut self, status: &Status, state: &mut SupervisorState) -> Result<(), LocalError> {
        if status.change < state.change {
            return Ok(());
        }
        let main = status.functions.iter().find(|function| function.role == Role::Main);
        let pid = main.and_then(|main| main.pid);
        if !state.asleep && pid != state.main {
            state.wake = WakeMarks { started: pid.map(|_| Instant::now()), ..WakeMarks::default() };
        }
        let main_restarted = state.main.is_some() && pid != state.main;
        state.main = pid;
        if main_restarted && state.revision.is_some() {
            // It would start with the revision, whose functions may never become ready.
            self.roll_back("the main function restarted", state);
            return Ok(());
        }
        record_wake_stages(&mut state.wake, status);
        let serving = main.filter(|_| !state.asleep && status.generation.is_some());
        self.model.set_running_functions(RunningFunctions {
            order: state.order,
            backends: serving.and_then(|main| self.backend(main, status)).into_iter().collect(),
            wake: state.wake,
            functions: status.functions.iter().map(function_line).collect(),
        });
        self.report_changes(status, state)
    }

    fn report_changes(&mut self, status: &Status, state: &mut SupervisorState) -> Result<(), LocalError> {
        if state.asleep {
            let gone = status.functions.iter().all(|function| function.pid.is_none());
            if gone && !state.reported_asleep {
                state.reported_asleep = true;
                self.report.say("asleep", status)?;
            }
            return Ok(());
        }
        self.report_sleeping_groups(status, state)?;
        if status.generation == state.generation || status.generation.is_none() {
            return Ok(());
        }
        state.generation = status.generation;
        let in_force = state.revision.take_if(|revision| revision.replaces != status.generation);
        let revised = in_force.is_some();
        if let Some(Revision { better, cause, .. }) = in_force {
            self.complete(better, cause, state);
        }
        let serving = report::serving(status);
        let more: BTreeSet<String> = (serving.iter())
            .filter(|(process, _)| !state.serving.contains_key(process))
            .map(|(_, name)| name.clone())
            .collect();
        if revised || !more.is_empty() {
            let event = match (std::mem::take(&mut state.reported_asleep), revised) {
                (true, _) => {
                    state.served.clear();
                    "awake"
                }
                (false, true) => "replanned",
                (false, false) if more.iter().all(|name| state.slept.contains_key(name)) => "resumed",
                (false, false) if more.is_disjoint(&state.served) => "joined",
                (false, false) => "restarted",
            };
            self.report.say(event, status)?;
            state.served.extend(serving.values().cloned());
            state.slept.retain(|name, _| !more.contains(name));
            state.serving = serving;
        }
        Ok(())
    }

    /// Reports that groups sleep, once their functions have ended.
    fn report_sleeping_groups(&self, status: &Status, state: &mut SupervisorState) -> Result<(), LocalError> {
        let asleep = |name: &str| {
            let of = |function: &&FunctionStatus| function.name == name;
            let function = status.functions.iter().find(of);
            function.is_some_and(|function| function.state == FunctionState::Asleep)
        };
        let mut is_new = false;
        for (name, said) in &mut state.slept {
            if !*said && asleep(name) {
                (*said, is_new) = (true, true);
            }
        }
        if is_new { self.report.say("resting", status) } else { Ok(()) }
    }

    fn backend(&self, main: &FunctionStatus, status: &Status) -> Option<Backend> {
        let address = main.http?;
        Some(Backend {
            id: u64::from(main.pid?) << 16 | u64::from(address.port()),
            address,
            identity: None,
            capacity: self.report.wanted.options.max_batch.unwrap_or(DEFAULT_MAX_BATCH),
            authorization: Some(self.authorization.clone()),
            billing: Some(self.costs.billing(status, &self.function_prices)),
        })
    }
}

async fn sleep_until(instant: Option<Instant>) {
    match instant {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

fn main_address(function: &FunctionStatus) -> Option<std::net::SocketAddr> {
    (function.role == Role::Main).then_some(function.grpc).flatten()
}

fn function_line(function: &FunctionStatus) -> FunctionLine {
    FunctionLine { name: function.name.clone(), state: function.state.name(), pid: function.pid }
}

/// Records the stages of a wake that were reached.
fn record_wake_stages(wake: &mut WakeMarks, status: &Status) {
    let runs = |function: &FunctionStatus| {
        !matches!(function.state, FunctionState::Waiting | FunctionState::Asleep | FunctionState::Stopping)
    };
    let functions = || status.functions.iter().filter(|function| function.state != FunctionState::Asleep);
    let now = Instant::now();
    if functions().any(&runs) {
        wake.started.get_or_insert(now);
    }
    if functions().all(|function| runs(function) && function.grpc.is_some()) {
        wake.listening.get_or_insert(now);
    }
    if status.generation.is_some() {
        wake.serving.get_or_insert(now);
    }
}
