//! One model behind the gateway: its request queue, its main functions, and its scale to zero.
//!
//! All decisions are made under one lock ([`ModelRuntime`]). So no request can arrive unnoticed between the decision
//! to sleep and the sleep.

mod entry;
mod history;
mod running;
mod state;
mod waiting;

pub(crate) use entry::{AdmissionRefusal, AdmissionRequest};
pub(crate) use history::SleepView;
pub use running::{
    Backend, DesiredState, Directive, FunctionLine, InactiveGroup, LauncherOrder, ModelLoad, RunningFunctions,
};
pub(crate) use waiting::{AwaitedWake, Grant, QueuedRequest};

use crate::cost_accounting::Billing;
use crate::metrics::{ModelMetrics, WakeCause};
use crate::prefix_index::PrefixIndex;
use crate::privacy::Privacy;
use crate::queue::{Pushed, Ticket};
use crate::timeline::{ColdStart, RequestTimeline, WakeMarks};
use crate::usage_observer::{ObservedRequest, UsageObserver};
use bytes::Bytes;
use entry::{WaitingRequest, deadline_error_code, queue_full_error, shutting_down_error};
use history::LastWake;
use remoe_autoscale::scale_to_zero::{ScalingPhase, step};
use remoe_proto::ServiceError;
use serde::Serialize;
use state::{Assignment, ModelRuntime};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::sleep_until;
use waiting::{GrantReply, SlotOwner, send_replies};

/// Longest wait of a request for a slot while the model is awake.
const LONGEST_WAIT: Duration = Duration::from_secs(600);

/// Name and limits of a model.
#[derive(Debug, Clone)]
pub struct ModelOptions {
    /// Unique name in requests and answers.
    pub name: String,
    /// Short names. One selects this model unless another model that the caller may use has the same short name.
    pub short_names: Vec<String>,
    /// Context length in tokens; 0: not known yet.
    pub context_length: usize,
    /// Largest number of requests that run or wait.
    pub max_requests: usize,
    /// Largest size of the bodies of waiting requests, in bytes.
    pub waiting_bytes: usize,
    /// Longest time that a cold start may take.
    pub wake_limit: Duration,
}

/// State of a model, as `/status` shows it.
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
    /// Short names, and the context length in tokens.
    description: RwLock<(Arc<[String]>, usize)>,
    /// Context before it was shortened, while functions that were started with it still serve.
    longer_context: Mutex<Option<LongerContext>>,
    state: Mutex<ModelRuntime<Grant>>,
    launcher_order: watch::Sender<LauncherOrder>,
    load: watch::Sender<ModelLoad>,
    /// Wakes [`Self::run_deadlines`] when the next deadline may have changed.
    deadline_changed: Notify,
    metrics: ModelMetrics,
    usage_observer: OnceLock<Arc<dyn UsageObserver>>,
}

/// Context that was longer than the present one.
struct LongerContext {
    length: usize,
    /// Ids of the main functions that were started with it.
    backends: BTreeSet<u64>,
}

impl Model {
    /// Makes a model whose functions are being started. It does not scale to zero until [`Self::sleep_when_idle`].
    /// `prefix_index` is shared by all models of the process.
    pub fn new(
        options: ModelOptions,
        metrics: &crate::GatewayMetrics,
        prefix_index: &PrefixIndex,
    ) -> Arc<Self> {
        let state = ModelRuntime::new(options.waiting_bytes, prefix_index.of_model());
        Arc::new(Self {
            metrics: metrics.of_model(&options.name),
            description: RwLock::new((options.short_names.clone().into(), options.context_length)),
            longer_context: Mutex::default(),
            options,
            state: Mutex::new(state),
            launcher_order: watch::Sender::new(LauncherOrder { order: 0, wanted: DesiredState::Awake }),
            load: watch::Sender::new(ModelLoad::default()),
            deadline_changed: Notify::new(),
            usage_observer: OnceLock::new(),
        })
    }

    /// Returns the model's name.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// Replaces the short names and the context length in tokens.
    pub fn describe(&self, short_names: Vec<String>, context_length: usize) {
        let length_before = self.longest_context();
        let mut description = self.description.write().unwrap_or_else(PoisonError::into_inner);
        *description = (short_names.into(), context_length);
        drop(description);
        if context_length < length_before {
            let backends = self.state().slots.iter().map(|slot| slot.backend.id).collect();
            *self.longer_context() = Some(LongerContext { length: length_before, backends });
        }
    }

    /// Returns the longest context of any main function that serves, in tokens; 0: not known. During the rollout of a
    /// shorter context, older functions keep the longer one.
    pub(crate) fn longest_context(&self) -> usize {
        let (_, present) = self.description();
        let mut longer = self.longer_context();
        let state = self.state();
        longer.take_if(|old| !state.slots.iter().any(|slot| old.backends.contains(&slot.backend.id)));
        drop(state);
        let longer = longer.as_ref().map_or(0, |old| old.length);
        if present == 0 { 0 } else { present.max(longer) }
    }

    fn longer_context(&self) -> MutexGuard<'_, Option<LongerContext>> {
        // A panic cannot leave it half changed, so a poisoned lock is used as it is.
        self.longer_context.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports all requests from now on to `usage_observer`. Only the first call has an effect.
    pub fn set_usage_observer(&self, usage_observer: Arc<dyn UsageObserver>) {
        self.usage_observer.get_or_init(|| usage_observer);
    }

    /// Reports the start of a request to the usage observer. Returns `None` if there is no observer, or if it does not
    /// observe this request.
    pub(crate) fn observe_request(
        &self,
        tenant: &str,
        privacy: Privacy,
        body: &Bytes,
    ) -> Option<ObservedRequest> {
        ObservedRequest::begin(self.usage_observer.get()?.clone(), tenant, privacy, body)
    }

    /// Returns the short names, and the context length in tokens.
    pub(crate) fn description(&self) -> (Arc<[String]>, usize) {
        self.description.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the longest time that a cold start may take.
    pub(crate) fn wake_limit(&self) -> Duration {
        self.options.wake_limit
    }

    /// Watches the desired state of the model's functions, which its launcher has to reach.
    pub fn launcher_orders(&self) -> watch::Receiver<LauncherOrder> {
        self.launcher_order.subscribe()
    }

    /// Scales the model to zero whenever it has had no request for the idle window `idle_window`, of 1 ms at least.
    pub fn sleep_when_idle(self: &Arc<Self>, idle_window: Duration) {
        let now = Instant::now();
        let mut state = self.state();
        state.idle_window = Some(idle_window.max(Duration::from_millis(1)));
        state.record_activity(now);
        drop(state);
        self.apply_changes(now);
    }

    /// Replaces the functions that run for the model, as its launcher reports them.
    pub fn set_running_functions(self: &Arc<Self>, running: RunningFunctions) {
        let now = Instant::now();
        self.state().set_running_functions(running, now);
        self.apply_changes(now);
    }

    /// Sets the phase that the operator decided, and the main functions that run. From now on this model decides no
    /// phase itself.
    pub fn follow_directive(self: &Arc<Self>, directive: Directive, backends: Vec<Backend>, wake: WakeMarks) {
        self.state().directive = Some(directive);
        // The operator lists only backends that were started for the present phase, so every order is current.
        let running = RunningFunctions { order: u64::MAX, backends, wake, functions: Vec::new() };
        self.set_running_functions(running);
    }

    /// Sets the remote groups that sleep or are being started while the main function runs. `sleeping_pairs` is the
    /// number of (token, expert) pairs of sleeping groups since the last call.
    pub fn set_inactive_groups(&self, groups: Vec<InactiveGroup>, sleeping_pairs: u64) {
        let mut state = self.state();
        if state.closed {
            return;
        }
        self.metrics.set_sleeping_groups(groups.iter().filter(|group| group.asleep).count());
        self.metrics.add_sleeping_pairs(sleeping_pairs);
        state.inactive_groups = groups;
    }

    /// Returns the remote groups that sleep or are being started while the main function runs.
    pub(crate) fn inactive_groups(&self) -> Vec<InactiveGroup> {
        self.state().inactive_groups.clone()
    }

    /// Counts the wake of a remote group.
    pub fn record_group_wake(&self, cause: WakeCause) {
        self.metrics.record_group_wake(cause);
        self.state().group_wakes += 1;
    }

    /// Takes the launcher's answer to order number `order`, a [`DesiredState::Recheck`]: the main functions' engines
    /// have `requests`.
    pub fn rechecked(self: &Arc<Self>, order: u64, requests: u32) {
        let mut state = self.state();
        if state.order == order && state.phase == ScalingPhase::Draining {
            state.engine_requests = Some(requests);
        }
        drop(state);
        self.apply_changes(Instant::now());
    }

    /// Refuses all further requests. Waiting requests are still served if main functions serve now; otherwise they
    /// are refused as well.
    pub fn close(self: &Arc<Self>) {
        let mut state = self.state();
        state.closed = true;
        state.inactive_groups.clear();
        self.metrics.set_sleeping_groups(0);
        let mut refusals = Vec::new();
        if !state.is_serving() {
            while let Some(waiting) = state.queue.pop() {
                refusals.push((waiting.reply, Err(shutting_down_error())));
            }
        }
        drop(state);
        send_replies(refusals);
        self.apply_changes(Instant::now());
    }

    /// Ends a model that is removed together with its functions. Refuses waiting requests, and requests that are
    /// retried because a main function failed.
    pub fn end(self: &Arc<Self>) {
        let mut state = self.state();
        state.slots.clear();
        if let Some(directive) = &mut state.directive {
            directive.phase = ScalingPhase::Asleep;
        }
        drop(state);
        self.close();
    }

    /// Returns the numbers of waiting requests and of requests in flight.
    pub fn load(&self) -> (usize, usize) {
        let state = self.state();
        (state.queue.len(), state.in_flight)
    }

    /// Returns the total time that all requests so far have waited or been in flight.
    pub fn total_request_time(&self) -> Duration {
        let mut state = self.state();
        state.add_request_time(Instant::now());
        state.total_request_time
    }

    /// Watches the model's load.
    pub fn watch_load(&self) -> watch::Receiver<ModelLoad> {
        self.load.subscribe()
    }

    /// Returns the time since a request last arrived or ended, or the model woke.
    pub fn idle_time(&self) -> Duration {
        self.state().last_active.elapsed()
    }

    /// Returns the time to first token of the latest cold start, in its parts.
    pub fn cold_start(&self) -> Option<ColdStart> {
        self.state().cold_start
    }

    /// Returns the phase of the model between active and asleep.
    pub fn phase(&self) -> ScalingPhase {
        self.state().phase
    }

    /// Reports if requests are admitted, with a cold start if needed.
    pub(crate) fn takes_requests(&self) -> bool {
        let state = self.state();
        !state.closed && !state.recent_wakes.is_empty()
    }

    /// Returns the number of request slots of all main functions that serve now.
    pub(crate) fn capacity(&self) -> usize {
        let state = self.state();
        let is_serving = state.is_serving();
        state.slots.iter().filter(|_| is_serving).map(|slot| slot.backend.capacity).sum()
    }

    /// Returns the main functions that serve now.
    pub(crate) fn backends(&self) -> Vec<Backend> {
        let state = self.state();
        let is_serving = state.is_serving();
        state.slots.iter().filter(|_| is_serving).map(|slot| slot.backend.clone()).collect()
    }

    /// Returns the prices of the functions of each main function that runs, even if the model serves no requests now.
    pub(crate) fn billings(&self) -> Vec<Arc<Billing>> {
        self.state().slots.iter().filter_map(|slot| slot.backend.billing.clone()).collect()
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
            idle_s: state.idle_window.map(|window| window.as_secs_f64()),
            wakes: state.wakes,
            group_wakes: state.group_wakes,
            last_wake_s: state.recent_wakes.back().map(Duration::as_secs_f64),
            functions: state.running.functions.clone(),
        }
    }

    /// Returns the recent phase changes, and what decides when the model sleeps next.
    pub(crate) fn sleep_view(&self) -> SleepView {
        let state = self.state();
        let now = Instant::now();
        SleepView {
            quiet_s: now.saturating_duration_since(state.last_active).as_secs_f64(),
            idle_s: state.idle_window.map(|window| window.as_secs_f64()),
            history: state.history.changes(now),
            wake: state.cold_start.as_ref().map(|start| LastWake::new(start, now)),
        }
    }

    /// Changes the model's phase when a deadline passes, such as that of its idle window. Never returns.
    pub async fn run_deadlines(self: &Arc<Self>) {
        loop {
            match self.advance(Instant::now()) {
                Some(deadline) => tokio::select! {
                    () = self.deadline_changed.notified() => {}
                    () = sleep_until(deadline.into()) => {}
                },
                None => self.deadline_changed.notified().await,
            }
        }
    }

    /// Admits a request to the queue, where it waits for a [`Grant`]. Wakes the model if it sleeps.
    ///
    /// # Errors
    /// The queue is full, or the request's deadline comes before the end of the cold start. In the latter case the
    /// model wakes nevertheless, for a later retry.
    pub(crate) fn admit(
        self: &Arc<Self>,
        request: &AdmissionRequest,
    ) -> Result<QueuedRequest, AdmissionRefusal> {
        let now = Instant::now();
        let mut state = self.state();
        let now = state.monotonic(now);
        let is_cold = !state.is_serving();
        if state.closed && (is_cold || !request.is_retry) {
            let error = shutting_down_error();
            return Err(AdmissionRefusal { error, retry_after: Duration::from_secs(1) });
        }
        if let (true, Some(deadline)) = (is_cold, request.deadline()) {
            let time_to_wake = state.time_to_wake(now);
            if deadline < now + time_to_wake {
                state.record_activity(now);
                drop(state);
                self.apply_changes(now);
                let error = ServiceError::new(
                    deadline_error_code(request.is_queue_deadline_first()),
                    format!(
                        "cannot wake the model within the {}: the cold start takes {:.1} s; retry later",
                        if request.is_queue_deadline_first() { "queue deadline" } else { "request timeout" },
                        time_to_wake.as_secs_f64()
                    ),
                );
                return Err(AdmissionRefusal { error, retry_after: time_to_wake });
            }
        }
        let (sender, receiver) = oneshot::channel();
        let waiting = WaitingRequest {
            arrived: request.arrived,
            is_cold,
            prefix: request.prefix.clone(),
            reply: sender,
        };
        let max_waiting = self.options.max_requests.saturating_sub(state.in_flight);
        let (ticket, displaced) = match state.queue.push(&request.client, request.bytes, waiting, max_waiting)
        {
            Pushed::Waits(ticket) => (ticket, None),
            Pushed::Displaced(ticket, other) => (ticket, Some(other)),
            // A refused request does not wake the model.
            Pushed::Full(_) => {
                let error = queue_full_error();
                return Err(AdmissionRefusal { error, retry_after: Duration::from_secs(1) });
            }
        };
        state.record_activity(now);
        drop(state);
        if let Some(other) = displaced {
            send_replies(vec![(other.reply, Err(queue_full_error()))]);
        }
        self.apply_changes(now);
        let limit = if is_cold { self.options.wake_limit } else { LONGEST_WAIT };
        let deadline = request.deadline().map_or(now + limit, |deadline| deadline.min(now + limit));
        let is_queue_deadline = request.is_queue_deadline_first() && request.deadline() == Some(deadline);
        Ok(QueuedRequest { owner: self.clone(), ticket, is_cold, deadline, is_queue_deadline, receiver })
    }

    fn state(&self) -> MutexGuard<'_, ModelRuntime<Grant>> {
        // Code that holds the lock does not panic, so a poisoned lock is used as it is.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Acts on a change of the state, and has [`Self::run_deadlines`] look at the next deadline again.
    fn apply_changes(self: &Arc<Self>, now: Instant) {
        self.advance(now);
        self.deadline_changed.notify_one();
    }

    /// Changes the phase, and grants slots to waiting requests, as far as that is possible at `now`. Returns the next
    /// deadline, if there is one.
    fn advance(self: &Arc<Self>, now: Instant) -> Option<Instant> {
        let mut state = self.state();
        let now = state.monotonic(now);
        let wake_limit = self.options.wake_limit;
        loop {
            let phase = match state.directive {
                Some(directive) => state.phase_by_directive(directive.phase),
                None => step(state.phase, &state.step_inputs(now, wake_limit)),
            };
            if phase == state.phase {
                break;
            }
            if let Some(wake_time) = state.enter_phase(phase, now) {
                self.metrics.record_wake(wake_time);
            }
        }
        let mut replies: Vec<GrantReply> = Vec::new();
        while let Some(Assignment { request, backend, is_prefix_match }) = state.next_assignment(now) {
            if is_prefix_match {
                self.metrics.count_prefix_match();
            }
            let wake_decided_at = state.wake_decided_at.filter(|_| request.is_cold);
            let timeline = RequestTimeline::new(request.arrived, wake_decided_at, &state.running.wake, now);
            if request.is_cold {
                self.metrics.record_cold_start(&timeline);
            }
            let grant = Grant { owner: self.clone(), backend, timeline, wake_decided_at };
            replies.push((request.reply, Ok(grant)));
        }
        state.add_request_time(now);
        let turn = state.directive.map_or(0, |directive| directive.turn);
        let load = ModelLoad { waiting: state.queue.len(), in_flight: state.in_flight, turn };
        send_if_changed(&self.load, load);
        send_if_changed(&self.launcher_order, state.launcher_order());
        self.metrics.set_load(state.queue.len(), state.in_flight, state.phase);
        let next_deadline = state.next_deadline(now, wake_limit);
        drop(state);
        send_replies(replies);
        next_deadline
    }
}

impl SlotOwner for Model {
    fn leave(self: Arc<Self>, ticket: Ticket) {
        // The request is dropped after the lock is released: its reply channel may hold a grant, whose drop takes it.
        let removed = self.state().queue.remove(ticket);
        if removed.is_some() {
            self.apply_changes(Instant::now());
        }
    }

    fn release(self: Arc<Self>, backend: u64) {
        let now = Instant::now();
        self.state().release(backend, now);
        self.apply_changes(now);
    }

    fn pause(&self, backend: u64) {
        self.state().pause(backend, Instant::now());
    }

    fn record_cold_start(&self, cold_start: ColdStart) {
        let mut state = self.state();
        if state.cold_start.as_ref().is_none_or(|latest| cold_start.is_of_a_later_wake(latest)) {
            state.cold_start = Some(cold_start);
        }
    }
}

/// Sends `value` to the watchers if it differs from the last value.
fn send_if_changed<T: PartialEq>(sender: &watch::Sender<T>, value: T) {
    sender.send_if_modified(|last| {
        let is_changed = *last != value;
        *last = value;
        is_changed
    });
}

#[cfg(test)]
mod tests;
