//! Between the gateway and the functions of one model: orders go one way, what runs the other.

use super::cashier::Cashier;
use super::following::{Answering, Following, taken};
use super::replan::Better;
use super::report::{Report, serving_processes};
use super::tariff::Tariff;
use crate::exit::CliError;
use axum::http::HeaderValue;
use remoe_function::Role;
use remoe_gateway::{Backend, FunctionLine, Model, Running, WakeMarks, Want, Wanted};
use remoe_launcher::decide::Desired;
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
    /// None where the placement stays as it is.
    pub(super) following: Option<Following>,
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
    /// The generation that a revision is to replace, until it has.
    revising: Option<u64>,
    /// A revision is to be said when it is in force.
    revised: bool,
    /// Whether there is a better placement than the one that runs is being worked out.
    answering: Option<Answering>,
}

impl Keeper {
    /// Says that the model is ready, follows orders and reports until `end` says how long the functions may
    /// take to end.
    pub(super) async fn run(mut self, first: Status, mut end: End) -> Result<(), CliError> {
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

    async fn keep(&mut self, first: &Status) -> Result<(), CliError> {
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
            revising: None,
            revised: false,
            answering: None,
        };
        let pause = self.following.as_ref().map_or(Duration::MAX, |following| following.pause);
        let mut next = Instant::now().checked_add(pause);
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
            let due = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            let answered = async {
                match &mut seen.answering {
                    Some(answering) => answering.await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                answered = answered => {
                    seen.answering = None;
                    if let Some(better) = taken(answered) {
                        self.revise(better, &mut seen);
                    }
                }
                () = due => {
                    next = Instant::now().checked_add(pause);
                    let may_revise = !seen.asleep && seen.revising.is_none() && seen.answering.is_none();
                    if let Some(following) = self.following.as_mut().filter(|_| may_revise) {
                        seen.answering = following.ask(&self.report.wanted);
                    }
                }
                changed = orders.changed() => if changed.is_err() {
                    return Err(CliError::runtime("the gateway ended"));
                },
                changed = changes.changed() => if changed.is_err() {
                    return Err(CliError::runtime("the supervision of the functions ended"));
                },
            }
        }
    }

    async fn follow(&mut self, want: Want, seen: &mut Seen) {
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
            // What was asked about the placement before is of no use any more.
            (seen.revising, seen.answering) = (None, None);
            if !asleep
                && self.is_gone(seen.change)
                && let Some(following) = &self.following
                && let Some(better) = following.for_waiters(&self.report.wanted).await
            {
                following.metrics.replanned("wake");
                self.adopt(better, "those who wait");
            }
            let mut desired = self.report.wanted.desired();
            desired.asleep = asleep;
            seen.change = self.supervisor.change(desired);
            seen.asleep = asleep;
            seen.wake = WakeMarks::default();
        }
        seen.order = want.order;
    }

    /// Whether all functions have ended since the change of that number.
    fn is_gone(&self, change: u64) -> bool {
        let status = self.supervisor.status();
        let status = status.borrow();
        status.change == change && status.functions.iter().all(|function| function.pid.is_none())
    }

    /// Has a better placement take over from the one that runs.
    fn revise(&mut self, better: Better, seen: &mut Seen) {
        let (before, desired) = (self.report.wanted.desired(), better.wanted.desired());
        let main = |desired: &Desired| {
            desired.functions.iter().find(|function| function.role == Role::Main).cloned()
        };
        // One that would begin anew loses what it serves: that waits for the next wake.
        if main(&before) != main(&desired) {
            return;
        }
        if let Some(following) = &self.following {
            following.metrics.replanned("drift");
        }
        self.adopt(better, "what was used of late");
        seen.revising = self.supervisor.status().borrow().generation;
        seen.revised = true;
        seen.change = self.supervisor.change(desired);
    }

    /// Another placement counts from now on.
    fn adopt(&mut self, better: Better, followed: &str) {
        let Better { wanted, why } = better;
        self.report.wanted = wanted;
        let status = self.supervisor.status();
        let status = status.borrow();
        let running = status.functions.iter().map(|function| function.name.as_str());
        if let Some(following) = &self.following {
            let tariff = Tariff::of(&self.report.wanted, &following.pricing);
            self.tariff = tariff.beside(&self.tariff, running);
            following.tell.send_replace(Some(self.tariff.clone()));
        }
        self.report.note(&format!("another placement follows {followed}: {why}"));
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
        if seen.revising != status.generation {
            seen.revising = None;
        }
        let serving = serving_processes(status);
        let revised = std::mem::take(&mut seen.revised);
        if revised || !serving.is_subset(&seen.serving) {
            let event = match (std::mem::take(&mut seen.said_asleep), revised) {
                (true, _) => "awake",
                (false, true) => "replanned",
                (false, false) => "restarted",
            };
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
