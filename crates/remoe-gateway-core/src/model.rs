//! One model behind the gateway: which requests wait, where they are served, and if the model is to be awake.
//!
//! Everything is decided under one lock ([`ModelRuntime`]): a request cannot slip between the last look and the sleep.

mod entry;
mod history;
mod running;
mod state;
mod waiting;

pub(crate) use entry::{AdmissionRequest, Refused};
pub(crate) use history::SleepView;
pub use running::{
    ApartGroup, Backend, DesiredState, Directive, FunctionLine, LauncherOrder, ModelLoad, RunningFunctions,
};
pub(crate) use waiting::{Grant, QueuedRequest, Wake};

use crate::cost_accounting::Billing;
use crate::metrics::{ModelMetrics, WakeCause};
use crate::prefix_index::PrefixIndex;
use crate::privacy::Privacy;
use crate::queue::{Pushed, Ticket};
use crate::timeline::{ColdStart, RequestTimeline, WakeMarks};
use crate::usage_observer::{ObservedRequest, UsageObserver};
use bytes::Bytes;
use entry::{Waiting, closed, full, late};
use history::LastWake;
use remoe_autoscale::scale_to_zero::{ScalingPhase, step};
use remoe_proto::ServiceError;
use serde::Serialize;
use state::ModelRuntime;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::sleep_until;
use waiting::{GrantReply, Places, answer};

/// Longest wait for a place while the model is awake.
const LONGEST_WAIT: Duration = Duration::from_secs(600);

/// Name and limits of a model.
#[derive(Debug, Clone)]
pub struct ModelOptions {
    /// Unique name in requests and answers.
    pub name: String,
    /// Shorter names, which mean it where no other model that the caller may use has the same.
    pub short_names: Vec<String>,
    /// Positions of its context; 0: not known yet.
    pub context_length: usize,
    /// Requests that run or wait, all together.
    pub max_requests: usize,
    /// Bytes of the bodies that wait.
    pub waiting_bytes: usize,
    /// How long a wake may take.
    pub wake_limit: Duration,
}

/// A model as people are shown it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ModelStatus {
    pub(crate) model: String,
    pub(crate) state: ScalingPhase,
    pub(crate) in_flight: usize,
    pub(crate) waiting: usize,
    pub(crate) waiting_bytes: usize,
    pub(crate) quiet_s: f64,
    pub(crate) idle_s: Option<f64>,
    pub(crate) wakes: u64,
    pub(crate) group_wakes: u64,
    pub(crate) last_wake_s: Option<f64>,
    pub(crate) functions: Vec<FunctionLine>,
}

/// A model behind the gateway.
pub struct Model {
    options: ModelOptions,
    /// Short names, and the context length in positions.
    described: RwLock<(Arc<[String]>, usize)>,
    /// A longer context that it had, and the functions that had it too.
    longer: Mutex<Option<LongerContext>>,
    state: Mutex<ModelRuntime<Grant>>,
    want: watch::Sender<LauncherOrder>,
    load: watch::Sender<ModelLoad>,
    /// A deadline may have changed.
    moved: Notify,
    metrics: ModelMetrics,
    usage_observer: OnceLock<Arc<dyn UsageObserver>>,
}

/// A context that was longer, which functions may still have.
struct LongerContext {
    positions: usize,
    /// Their ids.
    functions: BTreeSet<u64>,
}

impl Model {
    /// A model whose functions are being started; it does not sleep until [`Self::sleep_when_idle`]. `prefix_index` is
    /// shared by all models of the process.
    pub fn new(
        options: ModelOptions,
        metrics: &crate::GatewayMetrics,
        prefix_index: &PrefixIndex,
    ) -> Arc<Self> {
        let state = ModelRuntime::new(options.waiting_bytes, prefix_index.of_model());
        Arc::new(Self {
            metrics: metrics.of_model(&options.name),
            described: RwLock::new((options.short_names.clone().into(), options.context_length)),
            longer: Mutex::default(),
            options,
            state: Mutex::new(state),
            want: watch::Sender::new(LauncherOrder { order: 0, wanted: DesiredState::Awake }),
            load: watch::Sender::new(ModelLoad::default()),
            moved: Notify::new(),
            usage_observer: OnceLock::new(),
        })
    }

    /// Returns the model's name.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// Replaces the short names and the context length.
    pub fn describe(&self, short_names: Vec<String>, context_length: usize) {
        let serving = self.longest_context();
        let mut described = self.described.write().unwrap_or_else(PoisonError::into_inner);
        *described = (short_names.into(), context_length);
        drop(described);
        if context_length < serving {
            let functions = self.state().places.iter().map(|place| place.backend.id).collect();
            *self.longer() = Some(LongerContext { positions: serving, functions });
        }
    }

    /// Returns the positions of the longest context that a function of it may have: while a shorter one is rolled out,
    /// those that are there already still have theirs. 0: not known.
    pub(crate) fn longest_context(&self) -> usize {
        let (_, described) = self.described();
        let mut longer = self.longer();
        let state = self.state();
        longer.take_if(|known| !state.places.iter().any(|place| known.functions.contains(&place.backend.id)));
        drop(state);
        let longer = longer.as_ref().map_or(0, |known| known.positions);
        if described == 0 { 0 } else { described.max(longer) }
    }

    fn longer(&self) -> MutexGuard<'_, Option<LongerContext>> {
        // It is replaced as a whole.
        self.longer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has `usage_observer` told of all requests from now on. Only the first call has an effect.
    pub fn tell(&self, usage_observer: Arc<dyn UsageObserver>) {
        self.usage_observer.get_or_init(|| usage_observer);
    }

    /// Tells the model's witness of a request; none without a witness.
    pub(crate) fn sight(&self, tenant: &str, privacy: Privacy, body: &Bytes) -> Option<ObservedRequest> {
        ObservedRequest::begin(self.usage_observer.get()?.clone(), tenant, privacy, body)
    }

    /// Returns the short names, and the context length in positions.
    pub(crate) fn described(&self) -> (Arc<[String]>, usize) {
        self.described.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns how long a wake of the model may take.
    pub(crate) fn wake_limit(&self) -> Duration {
        self.options.wake_limit
    }

    /// Watches the state that is wanted of the launcher, now and whenever it changes.
    pub fn want(&self) -> watch::Receiver<LauncherOrder> {
        self.want.subscribe()
    }

    /// Lets the model sleep when it had no request for `idle`, from now on; zero counts as a millisecond.
    pub fn sleep_when_idle(self: &Arc<Self>, idle: Duration) {
        let now = Instant::now();
        let mut state = self.state();
        state.idle = Some(idle.max(Duration::from_millis(1)));
        state.active_at(now);
        drop(state);
        self.changed(now);
    }

    /// Takes note of what runs.
    pub fn runs(self: &Arc<Self>, running: RunningFunctions) {
        let now = Instant::now();
        self.state().runs(running, now);
        self.changed(now);
    }

    /// Takes note of what was decided elsewhere and of what runs; from now on nothing is decided here.
    pub fn follow(self: &Arc<Self>, directive: Directive, backends: Vec<Backend>, wake: WakeMarks) {
        self.state().directive = Some(directive);
        // All listed backends were started for the present phase: the decider leaves the others out.
        self.runs(RunningFunctions { order: u64::MAX, backends, wake, functions: Vec::new() });
    }

    /// Takes note of remote groups that sleep while the main function runs, or start beside it, and of how many (token,
    /// expert) pairs asked for those that sleep since this was last said.
    pub fn groups_are(&self, groups: Vec<ApartGroup>, pairs: u64) {
        let mut state = self.state();
        if state.closed {
            return;
        }
        self.metrics.groups_sleep(groups.iter().filter(|group| group.asleep).count());
        self.metrics.pairs_slept(pairs);
        state.groups = groups;
    }

    /// Remote groups that the main function may say nothing of.
    pub(crate) fn groups(&self) -> Vec<ApartGroup> {
        self.state().groups.clone()
    }

    /// Takes note of a remote group that wakes.
    pub fn group_woke(&self, cause: WakeCause) {
        self.metrics.group_woke(cause);
        self.state().group_wakes += 1;
    }

    /// Answers a [`DesiredState::Recheck`] of number `order`: the engine has `requests`.
    pub fn rechecked(self: &Arc<Self>, order: u64, requests: u32) {
        let mut state = self.state();
        if state.order == order && state.phase == ScalingPhase::Draining {
            state.engine = Some(requests);
        }
        drop(state);
        self.changed(Instant::now());
    }

    /// Takes no further request. Those that wait go on where functions answer, and are refused where not.
    pub fn close(self: &Arc<Self>) {
        let mut state = self.state();
        state.closed = true;
        state.groups.clear();
        self.metrics.groups_sleep(0);
        let mut refused = Vec::new();
        if !state.is_serving() {
            while let Some(waiting) = state.queue.pop() {
                refused.push((waiting.answer, Err(closed())));
            }
        }
        drop(state);
        answer(refused);
        self.changed(Instant::now());
    }

    /// Ends a model whose functions are gone for good. Waiting requests are refused, and so are requests that come
    /// again because a function broke off.
    pub fn end(self: &Arc<Self>) {
        let mut state = self.state();
        state.places.clear();
        if let Some(directive) = &mut state.directive {
            directive.phase = ScalingPhase::Asleep;
        }
        drop(state);
        self.close();
    }

    /// Requests that wait, and requests that functions work on.
    pub fn load(&self) -> (usize, usize) {
        let state = self.state();
        (state.queue.len(), state.in_flight)
    }

    /// How long requests have waited or been worked on so far, all together.
    pub fn occupied(&self) -> Duration {
        let mut state = self.state();
        state.occupy(Instant::now());
        state.occupied
    }

    /// Watches the model's load, now and whenever it changes.
    pub fn loads(&self) -> watch::Receiver<ModelLoad> {
        self.load.subscribe()
    }

    /// How long ago a request last came or ended, or the model woke up.
    pub fn quiet(&self) -> Duration {
        self.state().last_active.elapsed()
    }

    /// Where the time went of the first request that was answered after the latest wake of which one was.
    pub fn cold_start(&self) -> Option<ColdStart> {
        self.state().cold_start
    }

    fn started_cold(&self, told: ColdStart) {
        let mut state = self.state();
        if state.cold_start.as_ref().is_none_or(|known| told.is_of_a_later_wake(known)) {
            state.cold_start = Some(told);
        }
    }

    /// Where it is between awake and asleep.
    pub fn phase(&self) -> ScalingPhase {
        self.state().phase
    }

    /// Reports if requests are answered, at once or after a wake.
    pub(crate) fn takes_requests(&self) -> bool {
        let state = self.state();
        !state.closed && !state.recent.is_empty()
    }

    /// Returns how many requests the backends that serve now can have at the same time.
    pub(crate) fn capacity(&self) -> usize {
        let state = self.state();
        let serving = state.is_serving();
        state.places.iter().filter(|_| serving).map(|place| place.backend.capacity).sum()
    }

    /// Returns the backends that serve now.
    pub(crate) fn backends(&self) -> Vec<Backend> {
        let state = self.state();
        let awake = state.is_serving();
        state.places.iter().filter(|_| awake).map(|place| place.backend.clone()).collect()
    }

    /// Returns the rates of the functions behind the model now, awake or not.
    pub(crate) fn billings(&self) -> Vec<Arc<Billing>> {
        self.state().places.iter().filter_map(|place| place.backend.billing.clone()).collect()
    }

    pub(crate) fn status(&self) -> ModelStatus {
        let state = self.state();
        ModelStatus {
            model: self.options.name.clone(),
            state: state.phase,
            in_flight: state.in_flight,
            waiting: state.queue.len(),
            waiting_bytes: state.queue.bytes(),
            quiet_s: state.last_active.elapsed().as_secs_f64(),
            idle_s: state.idle.map(|idle| idle.as_secs_f64()),
            wakes: state.wakes,
            group_wakes: state.group_wakes,
            last_wake_s: state.recent.back().map(Duration::as_secs_f64),
            functions: state.running.functions.clone(),
        }
    }

    /// Returns when it slept and woke of late, and when it sleeps next.
    pub(crate) fn sleep_view(&self) -> SleepView {
        let state = self.state();
        let now = Instant::now();
        SleepView {
            quiet_s: now.saturating_duration_since(state.last_active).as_secs_f64(),
            idle_s: state.idle.map(|idle| idle.as_secs_f64()),
            history: state.history.changes(now),
            wake: state.cold_start.as_ref().map(|start| LastWake::of(start, now)),
        }
    }

    /// Lets time pass: deadlines of the model are kept while this runs, which never ends.
    pub async fn keep_time(self: &Arc<Self>) {
        loop {
            match self.advance(Instant::now()) {
                Some(next) => tokio::select! {
                    () = self.moved.notified() => {}
                    () = sleep_until(next.into()) => {}
                },
                None => self.moved.notified().await,
            }
        }
    }

    /// Lets a request in, to wait for its grant.
    ///
    /// # Errors
    /// Too many wait, or the client would not wait long enough for the model to wake. That wakes it
    /// nevertheless: it was asked for.
    pub(crate) fn enter(self: &Arc<Self>, entry: &AdmissionRequest) -> Result<QueuedRequest, Refused> {
        let now = Instant::now();
        let mut state = self.state();
        let now = state.at(now);
        let cold = !state.is_serving();
        if state.closed && (cold || !entry.again) {
            return Err(Refused { error: closed(), retry_after: Duration::from_secs(1) });
        }
        if let (true, Some(until)) = (cold, entry.last()) {
            let missing = state.time_to_wake(now);
            if until < now + missing {
                state.active_at(now);
                drop(state);
                self.changed(now);
                let error = ServiceError::new(
                    late(entry.is_queue_deadline_first()),
                    format!(
                        "cannot wake the model within the {}: the cold start takes {:.1} s; retry later",
                        if entry.is_queue_deadline_first() { "queue deadline" } else { "request timeout" },
                        missing.as_secs_f64()
                    ),
                );
                return Err(Refused { error, retry_after: missing });
            }
        }
        let (sender, receiver) = oneshot::channel();
        let beginning = entry.beginning.clone();
        let waiting = Waiting { arrived: entry.arrived, cold, beginning, answer: sender };
        let most = self.options.max_requests.saturating_sub(state.in_flight);
        let (ticket, displaced) = match state.queue.push(&entry.client, entry.bytes, waiting, most) {
            Pushed::Waits(ticket) => (ticket, None),
            Pushed::Displaced(ticket, other) => (ticket, Some(other)),
            // It was not let in, and does not wake the model.
            Pushed::Full(_) => return Err(Refused { error: full(), retry_after: Duration::from_secs(1) }),
        };
        state.active_at(now);
        drop(state);
        if let Some(other) = displaced {
            answer(vec![(other.answer, Err(full()))]);
        }
        self.changed(now);
        let limit = if cold { self.options.wake_limit } else { LONGEST_WAIT };
        let until = entry.last().map_or(now + limit, |until| until.min(now + limit));
        let by_queue_deadline = entry.is_queue_deadline_first() && entry.last() == Some(until);
        Ok(QueuedRequest { places: self.clone(), ticket, cold, until, by_queue_deadline, receiver })
    }

    fn state(&self) -> MutexGuard<'_, ModelRuntime<Grant>> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something is different: takes the steps that follow, and has the next deadline kept.
    fn changed(self: &Arc<Self>, now: Instant) {
        self.advance(now);
        self.moved.notify_one();
    }

    /// Takes all steps that can be taken at `now`; the time of the next one that only time brings.
    fn advance(self: &Arc<Self>, now: Instant) -> Option<Instant> {
        let mut state = self.state();
        let now = state.at(now);
        let limit = self.options.wake_limit;
        loop {
            let phase = match state.directive {
                Some(directive) => state.directed(directive.phase),
                None => step(state.phase, &state.seen(now, limit)),
            };
            if phase == state.phase {
                break;
            }
            if let Some(wake) = state.enter(phase, now) {
                self.metrics.woke(wake);
            }
        }
        let mut granted: Vec<GrantReply> = Vec::new();
        while let Some((waiting, backend, is_seen)) = state.next_grant(now) {
            if is_seen {
                self.metrics.sent_where_seen();
            }
            let decided = state.decided.filter(|_| waiting.cold);
            let parts = RequestTimeline::new(waiting.arrived, decided, &state.running.wake, now);
            if waiting.cold {
                self.metrics.started_cold(&parts);
            }
            let grant = Grant { places: self.clone(), backend, parts, woken: decided };
            granted.push((waiting.answer, Ok(grant)));
        }
        state.occupy(now);
        let turn = state.directive.map_or(0, |directive| directive.turn);
        let load = ModelLoad { waiting: state.queue.len(), in_flight: state.in_flight, turn };
        replace(&self.load, load);
        replace(&self.want, state.want());
        self.metrics.load(state.queue.len(), state.in_flight, state.phase);
        let next = state.deadline(now, limit);
        drop(state);
        answer(granted);
        next
    }
}

impl Places for Model {
    fn leave(self: Arc<Self>, ticket: Ticket) {
        let left = self.state().queue.remove(ticket);
        // It is dropped without the lock.
        if left.is_some() {
            self.changed(Instant::now());
        }
    }

    fn release(self: Arc<Self>, backend: u64) {
        let now = Instant::now();
        self.state().release(backend, now);
        self.changed(now);
    }

    fn pause(&self, backend: u64) {
        self.state().pause(backend, Instant::now());
    }

    fn woke(&self, cold_start: ColdStart) {
        self.started_cold(cold_start);
    }
}

/// Sends `value` to the watchers if it differs from the last one.
fn replace<T: PartialEq>(told: &watch::Sender<T>, value: T) {
    told.send_if_modified(|known| {
        let changed = *known != value;
        *known = value;
        changed
    });
}

#[cfg(test)]
mod tests;
