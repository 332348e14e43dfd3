//! Between the gateway and the functions of one model: orders go one way, what runs the other. A wake from zero (cold
//! start), sleep and rollout of a new placement go through it.

mod revising;

use crate::cost::CostRecorder;
use crate::error::LocalError;
use crate::following::{PendingReplan, PlacementFollower, taken};
use crate::groups::{GroupUpdate, Tiers};
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
use revising::{Planning, Revision, RevisionCause};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

/// Longest time in which the main function answers how many requests it has.
const ASK: Duration = Duration::from_secs(1);

/// Most pauses that a revision adds which came to nothing or was undone by the next one.
const MOST_PAUSES: u32 = 64;

/// Set when functions are to end: the time that they may drain.
pub type ShutdownSignal = watch::Receiver<Option<Duration>>;

/// Keeps the functions of a model as its gateway wants them.
pub struct ModelSupervisor {
    /// The model as clients see it.
    pub model: Arc<Model>,
    /// Placement of the model, and the reporter of changes.
    pub report: Report,
    /// Supervisor of its functions.
    pub supervisor: Supervisor,
    /// Value of `Authorization` that the main function requires.
    pub authorization: HeaderValue,
    /// Without requests for so long the model sleeps.
    pub idle: Option<Duration>,
    /// Without use for so long a remote group sleeps while the main function runs.
    pub remote_idle: Option<Duration>,
    /// Recorder of what the functions cost.
    pub costs: CostRecorder,
    /// Rates of the functions.
    pub function_prices: FunctionPrices,
    /// Ends when all that ran is accounted for.
    pub accounted: JoinHandle<()>,
    /// Source of another placement.
    pub basis: PlacementBasis,
    /// Prices of functions without a plan.
    pub pricing: Pricing,
    /// Tells the recorder of costs the present rates.
    pub tell: watch::Sender<Option<FunctionPrices>>,
    /// Absent where the placement does not follow requests.
    pub following: Option<PlacementFollower>,
    /// Tells what was measured beside the model; none where nothing is.
    pub measured: Option<oneshot::Receiver<Measured>>,
    /// A plan with another main function, for its next start.
    pub next: Option<BetterPlacement>,
}

/// State of the keeper between two looks.
struct SupervisorState {
    /// The number of the latest order that was followed.
    order: u64,
    /// The number of the change that it made.
    change: u64,
    asleep: bool,
    /// The last report was that it sleeps.
    said_asleep: bool,
    generation: Option<u64>,
    /// Names of functions by their processes.
    serving: BTreeMap<u32, String>,
    /// Names of all that have served since it was awake last.
    served: BTreeSet<String>,
    main: Option<u32>,
    wake: WakeMarks,
    /// A placement that is not in force yet.
    revision: Option<Revision>,
    /// Until the next look for a better placement.
    pause: Duration,
    /// Remote experts before the last revision.
    replaced: Option<Vec<LayerExperts>>,
    /// Search for a better placement than the one that runs.
    answering: Option<PendingReplan>,
    /// A plan on measurements that is being worked out.
    planning: Option<Planning>,
    /// Absent if remote groups sleep with their main function.
    tiers: Option<Tiers>,
    /// Places that have rested and not served since, and whether that was said.
    rested: BTreeMap<String, bool>,
}

impl ModelSupervisor {
    /// Says that the model is ready, follows orders and reports until `end` says how long the functions may
    /// take to end.
    ///
    /// # Errors
    /// The gateway or the supervisor is gone, or a report cannot be written.
    pub async fn run(mut self, first: Status, mut end: ShutdownSignal) -> Result<(), LocalError> {
        let ending = async {
            let grace = end.wait_for(Option::is_some).await;
            grace.ok().and_then(|grace| *grace).unwrap_or_default()
        };
        let grace = tokio::select! {
            kept = self.keep(&first) => return kept,
            grace = ending => grace,
        };
        self.supervisor.shutdown(grace).await;
        let _joined = self.accounted.await;
        Ok(())
    }

    async fn keep(&mut self, first: &Status) -> Result<(), LocalError> {
        let (mut orders, mut changes) = (self.model.launcher_orders(), self.supervisor.status());
        let mut seen = SupervisorState {
            order: 0,
            change: 0,
            asleep: false,
            said_asleep: false,
            generation: first.generation,
            served: report::serving(first).into_values().collect(),
            serving: report::serving(first),
            main: None,
            wake: WakeMarks::default(),
            revision: None,
            pause: self.following.as_ref().map_or(Duration::MAX, |following| following.pause),
            replaced: None,
            answering: None,
            planning: None,
            tiers: self.remote_idle.map(Tiers::new),
            rested: BTreeMap::new(),
        };
        if let Some(tiers) = &mut seen.tiers {
            tiers.begin(&self.report.wanted, None);
        }
        let mut next = Instant::now().checked_add(seen.pause);
        self.look(first, &mut seen)?;
        self.report.say("ready", first)?;
        if let Some(idle) = self.idle {
            self.model.sleep_when_idle(idle);
        }
        loop {
            let want = *orders.borrow_and_update();
            if want.order != seen.order {
                self.follow(want, &mut seen).await;
            }
            let status = changes.borrow_and_update().clone();
            self.look(&status, &mut seen)?;
            let due = until(next);
            let late = until(seen.revision.as_ref().and_then(|revision| revision.until));
            let can_revise = seen.revision.is_none() && seen.answering.is_none() && seen.planning.is_none();
            let planned = async {
                match &mut seen.planning {
                    Some(planning) => planning.planned().await,
                    None => std::future::pending().await,
                }
            };
            let answered = async {
                match &mut seen.answering {
                    Some(answering) => answering.answered().await,
                    None => std::future::pending().await,
                }
            };
            let rests = seen.asleep || seen.revision.is_some();
            let main = status.functions.iter().find(|function| function.role == Role::Main);
            let main = main.filter(|_| !rests && status.generation.is_some());
            let main = main.and_then(|main| Some((main.pid?, main.grpc?)));
            let present = self.following.as_ref().map(|following| following.usage.present());
            let looked = async {
                match &mut seen.tiers {
                    Some(tiers) => tiers.look(main, present).await,
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
                    seen.planning = measured.ok().and_then(|measured| self.plan_again(measured));
                }
                planned = planned => {
                    if let Some(planning) = seen.planning.take() {
                        self.follow_plan(planning, planned, &mut seen);
                    }
                }
                looked = looked => {
                    let Some((tiers, looked)) = seen.tiers.as_mut().zip(looked) else { continue };
                    let change = tiers.note(&looked, &self.report.wanted, &status);
                    self.groups(&change, &mut seen);
                }
                answered = answered => {
                    seen.answering = None;
                    if let Some(better) = taken(&self.report, answered) {
                        self.revise(better, RevisionCause::Drift, &mut seen);
                    }
                }
                () = late => self.take_back("the new functions did not start in time", &mut seen),
                () = due => {
                    next = Instant::now().checked_add(seen.pause);
                    let may_revise = !seen.asleep && can_revise;
                    if let Some(following) = self.following.as_mut().filter(|_| may_revise) {
                        seen.answering = following.ask(&self.basis, &self.report.wanted);
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

    async fn follow(&mut self, want: LauncherOrder, seen: &mut SupervisorState) {
        let asleep = match want.wanted {
            DesiredState::Awake => false,
            DesiredState::Asleep => true,
            DesiredState::Recheck => {
                let main = self.supervisor.status().borrow().functions.iter().find_map(main_address);
                // One that does not answer has no request that anybody waits for.
                let requests = match main {
                    Some(main) => control::requests_in_flight(main, ASK).await.unwrap_or(0),
                    None => 0,
                };
                seen.order = want.order;
                return self.model.rechecked(want.order, requests);
            }
        };
        if asleep != seen.asleep {
            // What was asked about the placement before is of no use any more. What measurements led to waits for the next
            // wake.
            if let Some(revision) = seen.revision.take()
                && revision.cause == RevisionCause::Measurements
            {
                self.next.get_or_insert(revision.better);
            }
            seen.answering = None;
            self.charge_for_those_before();
            if !asleep && self.is_gone(seen.change) {
                self.take_next();
            }
            let mix = match &self.following {
                Some(following) if !asleep => following.usage.present().mix().await,
                _ => None,
            };
            // Where nothing is known of those who wait, what was used of late.
            let of_late = || self.following.as_ref().filter(|_| !asleep)?.usage.of_late();
            let expected = mix.as_ref().map(|mix| mix.shares.clone()).or_else(of_late);
            if let Some(shares) = expected.clone()
                && self.is_gone(seen.change)
            {
                self.plan_wake(shares, seen).await;
            }
            if let Some(tiers) = &mut seen.tiers {
                tiers.begin(&self.report.wanted, mix.as_ref());
                self.model.set_inactive_groups(if asleep { Vec::new() } else { tiers.groups() }, 0);
            }
            let mut desired = self.desired(seen);
            desired.asleep = asleep;
            if let Some(shares) = expected {
                need::by_need(&mut desired.functions, &self.report.wanted.moe_layers, &shares.to_rows());
            }
            seen.change = self.supervisor.change(desired);
            seen.asleep = asleep;
            seen.wake = WakeMarks::default();
        }
        seen.order = want.order;
    }

    /// Plans a wake for waiting requests that use experts by `shares`, as the operator does: the main function starts with
    /// the size that it is pre-allocated, and the remote functions are planned while it starts.
    async fn plan_wake(&mut self, shares: UsageShares, seen: &mut SupervisorState) {
        let Some(following) = &self.following else { return };
        let started = Instant::now();
        let preallocated = following.preallocated(&self.basis, &self.report, shares.clone()).await;
        let preallocating = started.elapsed();
        if let Some(sized) = preallocated {
            self.charge(&sized.wanted);
            self.adopt(sized, "waiting requests");
        }
        let mut first = self.desired(seen);
        first.functions.retain(|function| function.role == Role::Main);
        (first.placed, first.asleep) = (false, false);
        seen.change = self.supervisor.change(first);
        let Some(following) = &self.following else { return };
        let asked = Instant::now();
        let better = following.for_waiters(&self.basis, &self.report, shares).await;
        let planning = asked.elapsed();
        if let Some(better) = better {
            following.metrics.count_replan("wake");
            self.charge(&better.wanted);
            self.adopt(better, "waiting requests");
        }
        self.report.note(&format!(
            "wake planned while the main function starts: preallocate {:.1} ms, plan {:.1} ms",
            preallocating.as_secs_f64() * 1e3,
            planning.as_secs_f64() * 1e3
        ));
    }

    /// Returns the functions that are to run, without those that rest.
    fn desired(&self, seen: &mut SupervisorState) -> Desired {
        let mut desired = self.report.wanted.desired();
        if let Some(tiers) = &seen.tiers {
            desired.resting = tiers.resting();
            for place in &desired.resting {
                seen.rested.entry(place.clone()).or_insert(false);
            }
        }
        desired
    }

    /// Has groups end and start as was decided.
    fn groups(&mut self, change: &GroupUpdate, seen: &mut SupervisorState) {
        change.wakes.iter().for_each(|cause| self.model.record_group_wake(*cause));
        self.model
            .set_inactive_groups(seen.tiers.as_ref().map_or_else(Vec::new, Tiers::groups), change.pairs);
        if change.sleeps || !change.wakes.is_empty() {
            let desired = self.desired(seen);
            seen.change = self.supervisor.change(desired);
        }
    }

    /// Reports if all functions have ended since the change of that number.
    fn is_gone(&self, change: u64) -> bool {
        let status = self.supervisor.status();
        let status = status.borrow();
        status.change == change && status.functions.iter().all(|function| function.pid.is_none())
    }

    /// Tells the gateway what runs, and the user what changed.
    fn look(&mut self, status: &Status, seen: &mut SupervisorState) -> Result<(), LocalError> {
        if status.change < seen.change {
            return Ok(());
        }
        let main = status.functions.iter().find(|function| function.role == Role::Main);
        let pid = main.and_then(|main| main.pid);
        if !seen.asleep && pid != seen.main {
            seen.wake = WakeMarks { started: pid.map(|_| Instant::now()), ..WakeMarks::default() };
        }
        let began_anew = seen.main.is_some() && pid != seen.main;
        seen.main = pid;
        if began_anew && seen.revision.is_some() {
            // It would begin with the revision, whose functions may never come.
            self.take_back("the main function restarted", seen);
            return Ok(());
        }
        mark(&mut seen.wake, status);
        let serving = main.filter(|_| !seen.asleep && status.generation.is_some());
        self.model.set_running_functions(RunningFunctions {
            order: seen.order,
            backends: serving.and_then(|main| self.backend(main, status)).into_iter().collect(),
            wake: seen.wake,
            functions: status.functions.iter().map(line).collect(),
        });
        self.say(status, seen)
    }

    fn say(&mut self, status: &Status, seen: &mut SupervisorState) -> Result<(), LocalError> {
        if seen.asleep {
            let gone = status.functions.iter().all(|function| function.pid.is_none());
            if gone && !seen.said_asleep {
                seen.said_asleep = true;
                self.report.say("asleep", status)?;
            }
            return Ok(());
        }
        self.say_rest(status, seen)?;
        if status.generation == seen.generation || status.generation.is_none() {
            return Ok(());
        }
        seen.generation = status.generation;
        let in_force = seen.revision.take_if(|revision| revision.replaces != status.generation);
        let revised = in_force.is_some();
        if let Some(Revision { better, cause, .. }) = in_force {
            self.complete(better, cause, seen);
        }
        let serving = report::serving(status);
        let more: BTreeSet<String> = (serving.iter())
            .filter(|(process, _)| !seen.serving.contains_key(process))
            .map(|(_, name)| name.clone())
            .collect();
        if revised || !more.is_empty() {
            let event = match (std::mem::take(&mut seen.said_asleep), revised) {
                (true, _) => {
                    seen.served.clear();
                    "awake"
                }
                (false, true) => "replanned",
                (false, false) if more.iter().all(|name| seen.rested.contains_key(name)) => "resumed",
                (false, false) if more.is_disjoint(&seen.served) => "joined",
                (false, false) => "restarted",
            };
            self.report.say(event, status)?;
            seen.served.extend(serving.values().cloned());
            seen.rested.retain(|name, _| !more.contains(name));
            seen.serving = serving;
        }
        Ok(())
    }

    /// Says that groups sleep, once their functions are gone.
    fn say_rest(&self, status: &Status, seen: &mut SupervisorState) -> Result<(), LocalError> {
        let asleep = |name: &str| {
            let of = |function: &&FunctionStatus| function.name == name;
            let function = status.functions.iter().find(of);
            function.is_some_and(|function| function.state == FunctionState::Asleep)
        };
        let mut is_new = false;
        for (name, said) in &mut seen.rested {
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

async fn until(instant: Option<Instant>) {
    match instant {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

fn main_address(function: &FunctionStatus) -> Option<std::net::SocketAddr> {
    (function.role == Role::Main).then_some(function.grpc).flatten()
}

fn line(function: &FunctionStatus) -> FunctionLine {
    FunctionLine { name: function.name.clone(), state: function.state.name(), pid: function.pid }
}

/// Notes what was reached.
fn mark(wake: &mut WakeMarks, status: &Status) {
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
