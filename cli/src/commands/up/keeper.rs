//! Between the gateway and the functions of one model: orders go one way, what runs the other.

use super::cashier::Cashier;
use super::report::{Report, serving_processes};
use super::tariff::Tariff;
use crate::exit::CliError;
use axum::http::HeaderValue;
use remoe_function::Role;
use remoe_gateway::{Backend, FunctionLine, Model, Running, WakeMarks, Want, Wanted};
use remoe_launcher::functions::DEFAULT_MAX_BATCH;
use remoe_launcher::{FunctionState, FunctionStatus, Status, Supervisor, control};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What the main function may take to say how many requests it has.
const ASK: Duration = Duration::from_secs(1);

/// Set when functions are to end: the time that they may drain.
pub(super) type End = watch::Receiver<Option<Duration>>;

/// Keeps the functions of a model as its gateway wants them.
pub(super) struct Keeper {
    pub(super) model: Arc<Model>,
    pub(super) report: Report,
    pub(super) supervisor: Supervisor,
    /// What the main function wants to see as `Authorization`.
    pub(super) authorization: HeaderValue,
    /// Without requests for so long the model sleeps.
    pub(super) idle: Option<Duration>,
    pub(super) cashier: Cashier,
    pub(super) tariff: Tariff,
    /// Ends when all that ran is accounted for.
    pub(super) accounted: JoinHandle<()>,
}

/// What the keeper remembers between two looks.
struct Seen {
    /// The number of the latest order that was followed.
    order: u64,
    /// The number of the change that it made.
    change: u64,
    asleep: bool,
    /// What was last said of it is that it sleeps.
    said_asleep: bool,
    generation: Option<u64>,
    serving: BTreeSet<u32>,
    main: Option<u32>,
    wake: WakeMarks,
}

impl Keeper {
    /// Says that the model is ready, follows orders and reports until `end` says how long the functions may
    /// take to end.
    pub(super) async fn run(self, first: Status, mut end: End) -> Result<(), CliError> {
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

    async fn keep(&self, first: &Status) -> Result<(), CliError> {
        let (mut orders, mut changes) = (self.model.want(), self.supervisor.status());
        let mut seen = Seen {
            order: 0,
            change: 0,
            asleep: false,
            said_asleep: false,
            generation: first.generation,
            serving: serving_processes(first),
            main: None,
            wake: WakeMarks::default(),
        };
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
            tokio::select! {
                changed = orders.changed() => if changed.is_err() {
                    return Err(CliError::runtime("the gateway ended"));
                },
                changed = changes.changed() => if changed.is_err() {
                    return Err(CliError::runtime("the supervision of the functions ended"));
                },
            }
        }
    }

    async fn follow(&self, want: Want, seen: &mut Seen) {
        let asleep = match want.wanted {
            Wanted::Awake => false,
            Wanted::Asleep => true,
            Wanted::Recheck => {
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
            let mut desired = self.report.wanted.desired();
            desired.asleep = asleep;
            seen.change = self.supervisor.change(desired);
            seen.asleep = asleep;
            seen.wake = WakeMarks::default();
        }
        seen.order = want.order;
    }

    /// Tells the gateway what runs, and the user what changed.
    fn look(&self, status: &Status, seen: &mut Seen) -> Result<(), CliError> {
        if status.change < seen.change {
            return Ok(());
        }
        let main = status.functions.iter().find(|function| function.role == Role::Main);
        let pid = main.and_then(|main| main.pid);
        if !seen.asleep && pid != seen.main {
            seen.wake = WakeMarks { started: pid.map(|_| Instant::now()), ..WakeMarks::default() };
        }
        seen.main = pid;
        mark(&mut seen.wake, status);
        let serving = main.filter(|_| !seen.asleep && status.generation.is_some());
        self.model.runs(Running {
            order: seen.order,
            backends: serving.and_then(|main| self.backend(main, status)).into_iter().collect(),
            wake: seen.wake,
            functions: status.functions.iter().map(line).collect(),
        });
        self.say(status, seen)
    }

    fn say(&self, status: &Status, seen: &mut Seen) -> Result<(), CliError> {
        if seen.asleep {
            let gone = status.functions.iter().all(|function| function.pid.is_none());
            if gone && !seen.said_asleep {
                seen.said_asleep = true;
                self.report.say("asleep", status)?;
            }
            return Ok(());
        }
        if status.generation == seen.generation || status.generation.is_none() {
            return Ok(());
        }
        seen.generation = status.generation;
        let serving = serving_processes(status);
        if !serving.is_subset(&seen.serving) {
            let event = if std::mem::take(&mut seen.said_asleep) { "awake" } else { "restarted" };
            self.report.say(event, status)?;
            seen.serving = serving;
        }
        Ok(())
    }

    fn backend(&self, main: &FunctionStatus, status: &Status) -> Option<Backend> {
        let address = main.http?;
        Some(Backend {
            id: u64::from(main.pid?) << 16 | u64::from(address.port()),
            address,
            room: self.report.wanted.options.max_batch.unwrap_or(DEFAULT_MAX_BATCH),
            authorization: Some(self.authorization.clone()),
            billing: Some(self.cashier.billing(status, &self.tariff)),
        })
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
        !matches!(function.state, FunctionState::Waiting | FunctionState::Stopping)
    };
    let functions = &status.functions;
    let now = Instant::now();
    if functions.iter().any(runs) {
        wake.started.get_or_insert(now);
    }
    if functions.iter().all(|function| runs(function) && function.grpc.is_some()) {
        wake.listening.get_or_insert(now);
    }
    if status.generation.is_some() {
        wake.serving.get_or_insert(now);
    }
}
