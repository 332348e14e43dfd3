//! Control loop of a local deployment: observe, decide, act.

use crate::action::{Action, Route};
use crate::activity::Activity;
use crate::control;
use crate::decide::{Desired, Instance, decide};
use crate::event::{EventSink, RolloutEvent};
use crate::launcher::{Ending, FunctionId, FunctionPhase, FunctionSpec, Launcher};
use crate::memory::RestartMemory;
use crate::probe::{ProbeResult, probe};
use crate::status::{FunctionState, FunctionStatus, StartFailure, Status};
use crate::time::Time;
use remoe_proto::v1::{Endpoint, Routing, RoutingAck};
use remoe_proto::{ErrorCode, ServiceError};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// Longest time between two iterations of the loop.
const MAX_ITERATION_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum time that one iteration counts for. Time in which this process itself did not run (it was stopped, or the
/// machine slept) must not count against the functions.
const MAX_COUNTED_ITERATION: Duration = Duration::from_secs(1);

/// Window in which noted progress keeps an unready function from being late.
const PROGRESS_WINDOW: Duration = Duration::from_secs(1);

/// Failure of a deployment to become ready.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotReady {
    /// A function refused to start.
    #[error(transparent)]
    Failed(#[from] StartFailure),
    /// The time ran out.
    #[error("not ready after {after:?}: {missing}; raise --ready-timeout to wait longer")]
    TimedOut {
        /// Allowed time without progress.
        after: Duration,
        /// Problem of the routing, or functions that were not ready.
        missing: String,
    },
    /// The loop ended.
    #[error("the deployment was stopped")]
    Stopped,
}

/// Supervisor that keeps a deployment in its desired state until it is shut down or dropped.
pub struct Supervisor {
    status: watch::Receiver<Status>,
    changes: watch::Sender<(u64, Option<Desired>)>,
    shutdown: watch::Sender<Option<Duration>>,
    activity: Activity,
    task: JoinHandle<()>,
}

impl Supervisor {
    /// Starts a supervisor that keeps `desired` through `launcher`.
    pub fn spawn(launcher: impl Launcher, desired: Desired, events: EventSink) -> Self {
        Self::spawn_with(launcher, desired, events, Activity::default())
    }

    /// Starts a supervisor whose functions are not late as long as `activity` notes progress.
    pub fn spawn_with(
        launcher: impl Launcher,
        desired: Desired,
        events: EventSink,
        activity: Activity,
    ) -> Self {
        let (publish, status) = watch::channel(Status::default());
        let (shutdown, shutdown_requests) = watch::channel(None);
        let (changes, changed) = watch::channel((0, None));
        let (answer_sender, answers) = mpsc::channel(64);
        let (routing_sender, routings) = mpsc::channel(1);
        let supervision = Supervision {
            launcher,
            desired,
            unwanted: Vec::new(),
            events,
            memory: RestartMemory::default(),
            tracked: BTreeMap::new(),
            now: Time::ZERO,
            change: 0,
            publish,
            failure: None,
            routing_problem: None,
            answer_sender,
            routing_sender,
            activity: activity.clone(),
        };
        let task = tokio::spawn(supervision.run(changed, shutdown_requests, answers, routings));
        Self { status, changes, shutdown, activity, task }
    }

    /// Replaces the desired state. Functions that are in both states keep running. Returns the number of the change:
    /// a status of at least that number includes it.
    pub fn change(&self, desired: Desired) -> u64 {
        let mut number = 0;
        self.changes.send_modify(|change| {
            number = change.0 + 1;
            *change = (number, Some(desired));
        });
        number
    }

    /// Returns a receiver of the status of the deployment.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Waits until a generation is in force.
    ///
    /// # Errors
    /// The deployment was given up, or made no progress for `silence`.
    pub async fn ready(&self, silence: Duration) -> Result<Status, NotReady> {
        let mut status = self.status.clone();
        let started = Instant::now();
        let silence_passed = async {
            loop {
                let deadline = self.activity.deadline(started, silence);
                if deadline <= Instant::now() {
                    return;
                }
                sleep_until(deadline).await;
            }
        };
        let settled = status.wait_for(|status| status.generation.is_some() || status.failure.is_some());
        let settled = tokio::select! {
            settled = settled => Some(settled),
            () = silence_passed => None,
        };
        if let Some(settled) = settled {
            let settled = settled.map_err(|_closed| NotReady::Stopped)?.clone();
            return match settled.failure {
                Some(failure) => Err(failure.into()),
                None => Ok(settled),
            };
        }
        let status = self.status.borrow();
        let is_up =
            |state| matches!(state, FunctionState::Ready | FunctionState::Serving | FunctionState::Asleep);
        let unready = status.functions.iter().filter(|function| !is_up(function.state));
        let names: Vec<&str> = unready.map(|function| function.name.as_str()).collect();
        let missing = match (&status.routing_problem, names.is_empty()) {
            (Some(problem), _) => problem.clone(),
            (None, true) => "the placement is not in force".to_owned(),
            (None, false) => format!("waiting for {}", names.join(", ")),
        };
        let missing = match self.activity.what().as_str() {
            "" => missing,
            what => format!("no progress: {what}; {missing}"),
        };
        Err(NotReady::TimedOut { after: silence, missing })
    }

    /// Stops the main function, then the remote ones. Each may drain for `grace`, and is killed after that.
    pub async fn shutdown(mut self, grace: Duration) {
        self.shutdown.send_replace(Some(grace));
        // Two drains, and the time that the kernel takes to end processes.
        let deadline = grace * 2 + Duration::from_secs(5);
        // After the deadline, dropping the launcher kills the remaining functions.
        let _overdue = timeout(deadline, &mut self.task).await;
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Supervision<L> {
    launcher: L,
    desired: Desired,
    /// Unwanted slots whose functions still exist.
    unwanted: Vec<FunctionSpec>,
    events: EventSink,
    memory: RestartMemory,
    tracked: BTreeMap<FunctionId, Tracked>,
    now: Time,
    /// Number of the latest change of the desired state.
    change: u64,
    publish: watch::Sender<Status>,
    failure: Option<StartFailure>,
    routing_problem: Option<String>,
    answer_sender: mpsc::Sender<ProbeResult>,
    routing_sender: mpsc::Sender<RoutingResult>,
    activity: Activity,
}

type RoutingResult = Result<RoutingAck, ServiceError>;

struct Tracked {
    instance: Instance,
    asked_to_end: bool,
    probe: Option<AbortHandle>,
}

impl Drop for Tracked {
    fn drop(&mut self) {
        if let Some(probe) = &self.probe {
            probe.abort();
        }
    }
}

impl<L: Launcher> Supervision<L> {
    async fn run(
        mut self,
        mut changes: watch::Receiver<(u64, Option<Desired>)>,
        mut shutdown: watch::Receiver<Option<Duration>>,
        mut answers: mpsc::Receiver<ProbeResult>,
        mut routings: mpsc::Receiver<RoutingResult>,
    ) {
        let mut iteration_started = Instant::now();
        loop {
            if let Some(grace) = *shutdown.borrow_and_update() {
                self.desire_nothing(grace);
            }
            self.observe().await;
            let instances: Vec<Instance> =
                self.tracked.values().map(|tracked| tracked.instance.clone()).collect();
            let actions = decide(&self.desired, &instances, &self.memory, self.now);
            for action in actions {
                self.memory.note(&action, self.now);
                self.act(action).await;
            }
            self.publish_status();
            if self.desired.functions.is_empty() && self.tracked.is_empty() {
                return;
            }
            tokio::select! {
                () = self.launcher.changed() => {}
                () = sleep(MAX_ITERATION_INTERVAL) => {}
                Some(answer) = answers.recv() => self.record_answer(&answer),
                Some(result) = routings.recv() => self.record_push_result(result),
                Ok(()) = shutdown.changed() => {}
                Ok(()) = changes.changed() => {
                    let (number, desired) = changes.borrow_and_update().clone();
                    self.change = number;
                    if let Some(desired) = desired {
                        self.set_desired(desired);
                    }
                }
            }
            self.now += iteration_started.elapsed().min(MAX_COUNTED_ITERATION);
            iteration_started = Instant::now();
        }
    }

    fn set_desired(&mut self, desired: Desired) {
        let before = std::mem::replace(&mut self.desired, desired);
        let wanted = |spec: &FunctionSpec| self.desired.functions.iter().any(|other| other.name == spec.name);
        self.unwanted.extend(before.functions);
        self.unwanted.retain(|spec| !wanted(spec));
    }

    fn desire_nothing(&mut self, grace: Duration) {
        self.desired.functions.clear();
        self.desired.drain = grace;
    }

    /// Updates the tracked functions to the launcher's list.
    async fn observe(&mut self) {
        let listed = self.launcher.list().await;
        self.tracked.retain(|id, _| listed.iter().any(|observed| observed.id == *id));
        self.unwanted.retain(|spec| listed.iter().any(|observed| observed.name == spec.name));
        for observed in listed {
            let now = self.now;
            let tracked = self.tracked.entry(observed.id.clone()).or_insert_with(|| Tracked {
                instance: Instance { observed: observed.clone(), answered: now, unready_since: Some(now) },
                asked_to_end: false,
                probe: None,
            });
            if let (FunctionPhase::Listening { grpc, .. }, None) = (&observed.phase, &tracked.probe) {
                tracked.instance.answered = now;
                let probing = probe(observed.id.clone(), observed.role, *grpc, self.answer_sender.clone());
                tracked.probe = Some(tokio::spawn(probing).abort_handle());
            }
            tracked.instance.observed = observed;
        }
    }

    fn record_answer(&mut self, answer: &ProbeResult) {
        let Some(tracked) = self.tracked.get_mut(&answer.id) else { return };
        let instance = &mut tracked.instance;
        instance.answered = self.now;
        // A function that makes progress is not late.
        let makes_progress = self.activity.moved_within(PROGRESS_WINDOW);
        instance.unready_since = match (answer.ready, instance.unready_since) {
            (true, _) => None,
            (false, since) => since.filter(|_| !makes_progress).or(Some(self.now)),
        };
        self.observe_generation(answer.generation);
    }

    /// Reports a main function with a foreign generation.
    fn observe_generation(&mut self, generation: u64) {
        if self.memory.found(generation, self.now) {
            (self.events)(&RolloutEvent::Overruled { generation });
        }
    }

    async fn act(&mut self, action: Action) {
        match action {
            Action::Start { name } => {
                let spec = self.desired.functions.iter().find(|spec| spec.name == name);
                let Some(spec) = spec else { return };
                match self.launcher.start(spec).await {
                    Ok(_id) => (self.events)(&RolloutEvent::Started { name }),
                    Err(error) => self.not_started(name, error.message),
                }
            }
            Action::Stop { id, name, grace, fault } => {
                self.launcher.stop(&id, grace).await;
                if let Some(tracked) = self.tracked.get_mut(&id) {
                    tracked.asked_to_end = true;
                }
                if let Some(fault) = fault {
                    (self.events)(&RolloutEvent::Unhealthy { name, fault });
                }
            }
            Action::Forget { id, name, ending } => {
                self.launcher.stop(&id, Duration::ZERO).await;
                let requested = self.tracked.get(&id).is_some_and(|tracked| tracked.asked_to_end);
                (self.events)(&if requested {
                    RolloutEvent::Stopped { name, ending }
                } else {
                    RolloutEvent::Ended { name, ending }
                });
            }
            Action::Route { generation, route } => self.push(generation, &route),
            Action::GiveUp { id, name, ending } => {
                self.launcher.stop(&id, Duration::ZERO).await;
                self.give_up(name, ending);
            }
        }
    }

    fn not_started(&mut self, name: String, message: String) {
        self.memory.ended(&name, self.now);
        let ending = Ending { cause: Some(message), ..Ending::default() };
        if self.memory.settled() {
            (self.events)(&RolloutEvent::Ended { name, ending });
        } else {
            self.give_up(name, ending);
        }
    }

    fn give_up(&mut self, name: String, ending: Ending) {
        self.failure.get_or_insert(StartFailure { name, ending });
        self.desire_nothing(Duration::ZERO);
    }

    /// Pushes a generation in the background; probing continues meanwhile.
    fn push(&self, generation: u64, route: &Route) {
        let address = self.address(&route.main);
        let routing = Routing {
            generation,
            endpoints: route.endpoints.iter().filter_map(|id| self.endpoint(id)).collect(),
            remote: self.desired.remote.clone(),
            account: self.desired.account.clone(),
        };
        let deadline = self.desired.timeouts.ready;
        let results = self.routing_sender.clone();
        tokio::spawn(async move {
            let result = match address {
                Some(address) => control::set_routing(address, routing, deadline).await,
                None => {
                    Err(ServiceError::new(ErrorCode::Unavailable, "cannot reach the main function: it ended"))
                }
            };
            // Closed: the supervisor has ended.
            let _unwanted = results.send(result).await;
        });
    }

    fn endpoint(&self, id: &FunctionId) -> Option<Endpoint> {
        let name = &self.tracked.get(id)?.instance.observed.name;
        let spec = self.desired.functions.iter().find(|spec| spec.name == *name)?;
        // Complete sets are named by their layers alone; the routing lists their experts.
        let is_whole = spec.hosted.iter().all(|set| self.desired.remote.contains(set));
        let (layers, experts) = match is_whole {
            true => (spec.hosted.iter().map(|set| set.layer).collect(), Vec::new()),
            false => (Vec::new(), spec.hosted.clone()),
        };
        Some(Endpoint { address: self.address(id)?.to_string(), layers, experts })
    }

    fn address(&self, id: &FunctionId) -> Option<SocketAddr> {
        match self.tracked.get(id)?.instance.observed.phase {
            FunctionPhase::Listening { grpc, .. } => Some(grpc),
            _ => None,
        }
    }

    fn record_push_result(&mut self, result: RoutingResult) {
        let is_foreign = result.as_ref().is_ok_and(|ack| ack.generation > self.memory.newest());
        self.memory.routed(result.is_ok() && !is_foreign, self.now);
        let event = match result {
            // A later generation is in force, and this one had no effect.
            Ok(ack) if is_foreign => return self.observe_generation(ack.generation),
            Ok(ack) => {
                self.routing_problem = None;
                let problems = ack.problems.iter();
                RolloutEvent::Routed {
                    generation: ack.generation,
                    problems: problems
                        .map(|problem| format!("{}: {}", problem.address, problem.message))
                        .collect(),
                }
            }
            Err(error) => {
                self.routing_problem = Some(error.message.clone());
                if error.code == ErrorCode::InvalidArgument && !self.memory.settled() {
                    // The same routing would be rejected again.
                    let cause = Some(format!("rejected the placement: {}", error.message));
                    let ending = Ending { cause, ..Ending::default() };
                    self.give_up("main".to_owned(), ending);
                }
                RolloutEvent::RoutingFailed { message: error.message }
            }
        };
        (self.events)(&event);
    }

    fn publish_status(&self) {
        let instance_of = |name: &str| {
            let mut instances = self.tracked.values().map(|tracked| &tracked.instance);
            instances.rfind(|instance| instance.observed.name == name)
        };
        let in_force = self.memory.in_force().filter(|(_, route)| self.address(&route.main).is_some());
        let route = in_force.map(|(_, route)| route);
        let specs = self.desired.functions.iter().chain(&self.unwanted);
        let status = Status {
            change: self.change,
            generation: in_force.map(|(generation, _)| generation),
            functions: specs
                .map(|spec| {
                    let rests = !self.desired.asleep && self.desired.rests(spec);
                    FunctionStatus::of(spec, instance_of(&spec.name), route, rests)
                })
                .collect(),
            failure: self.failure.clone(),
            routing_problem: self.routing_problem.clone(),
        };
        self.publish.send_if_modified(|known| {
            let changed = *known != status;
            *known = status;
            changed
        });
    }
}
