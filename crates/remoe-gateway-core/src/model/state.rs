//! State under a model's lock, and the decisions that follow from it: the phase, the next request, and its backend.
//! Uses no clock and no socket.

use super::entry::WaitingRequest;
use super::history::PhaseHistory;
use super::running::{Backend, DesiredState, Directive, InactiveGroup, LauncherOrder, RunningFunctions};
use crate::prefix_index::ModelPrefixIndex;
use crate::queue::FairQueue;
use crate::timeline::ColdStart;
use remoe_autoscale::scale_to_zero::{ScalingPhase, StepInputs};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Circuit breaker: first pause of a backend that could not be reached. Each failure right after a pause doubles the
/// next one.
const PAUSE: Duration = Duration::from_millis(100);
/// Longest pause of a backend that could not be reached.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Divisor of a backend's slots: for a prefix match, a backend may have this fraction of its slots more in use than
/// the idlest one.
const IMBALANCE_DIVISOR: usize = 4;
/// Number of latest wakes from which the duration of the next is predicted.
const MAX_RECENT_WAKES: usize = 8;

/// State of a model. Waiting requests get a grant of type `G`.
pub(super) struct ModelRuntime<G> {
    pub(super) phase: ScalingPhase,
    /// Operator's decision; `None`: the model decides itself.
    pub(super) directive: Option<Directive>,
    /// Number of the latest order to the launcher.
    pub(super) order: u64,
    /// Number of the order of the latest sleep or wake. Functions that run by an older order are about to end.
    oldest_current_order: u64,
    pub(super) idle_window: Option<Duration>,
    /// Requests that the engines had at the recheck before sleep; `None`: not reported yet.
    pub(super) engine_requests: Option<u32>,
    pub(super) queue: FairQueue<WaitingRequest<G>>,
    pub(super) in_flight: usize,
    /// Total time that requests have waited or been in flight until `request_time_counted_at`.
    pub(super) total_request_time: Duration,
    request_time_counted_at: Instant,
    /// Waiting requests and requests in flight since `request_time_counted_at`.
    counted_requests: usize,
    /// Latest time of any decision: see [`Self::monotonic`].
    clock: Instant,
    pub(super) last_active: Instant,
    /// Time at which the latest wake was decided.
    pub(super) wake_decided_at: Option<Instant>,
    pub(super) running: RunningFunctions,
    pub(super) slots: Vec<BackendSlots>,
    prefix_index: ModelPrefixIndex,
    /// Durations of the latest wakes, in order of time. Empty until the first start is complete.
    pub(super) recent_wakes: VecDeque<Duration>,
    pub(super) cold_start: Option<ColdStart>,
    pub(super) history: PhaseHistory,
    pub(super) wakes: u64,
    /// Wakes of remote groups while the model was awake.
    pub(super) group_wakes: u64,
    /// Remote groups that sleep or are being started while the main function runs.
    pub(super) inactive_groups: Vec<InactiveGroup>,
    pub(super) closed: bool,
}

/// A backend and the slots of it that are in use.
pub(super) struct BackendSlots {
    pub(super) backend: Backend,
    pub(super) in_flight: usize,
    /// End of the latest pause.
    paused_until: Instant,
    /// Duration of the latest pause.
    pause: Duration,
}

/// Waiting request that gets a slot, and the backend of the slot.
pub(super) struct Assignment<G> {
    pub(super) request: WaitingRequest<G>,
    pub(super) backend: Backend,
    /// Set if the backend was chosen because it has had requests with the same prefix.
    pub(super) is_prefix_match: bool,
}

impl<G> ModelRuntime<G> {
    /// Makes the state of a model whose functions are being started. Bodies of waiting requests may have
    /// `waiting_bytes` together.
    pub(super) fn new(waiting_bytes: usize, prefix_index: ModelPrefixIndex) -> Self {
        Self {
            phase: ScalingPhase::Waking,
            directive: None,
            order: 0,
            oldest_current_order: 0,
            idle_window: None,
            engine_requests: None,
            queue: FairQueue::new(waiting_bytes),
            in_flight: 0,
            total_request_time: Duration::ZERO,
            request_time_counted_at: Instant::now(),
            counted_requests: 0,
            clock: Instant::now(),
            last_active: Instant::now(),
            wake_decided_at: Some(Instant::now()),
            running: RunningFunctions::default(),
            slots: Vec::new(),
            prefix_index,
            recent_wakes: VecDeque::new(),
            cold_start: None,
            history: PhaseHistory::begin(ScalingPhase::Waking, Instant::now()),
            wakes: 0,
            group_wakes: 0,
            inactive_groups: Vec::new(),
            closed: false,
        }
    }

    /// Returns `now`, or the time of the latest decision if that is later. A thread may read the clock, wait for the
    /// lock, and get it after a thread with a later time. Time must not run backwards then: an idle window that has
    /// ended would seem open again.
    pub(super) fn monotonic(&mut self, now: Instant) -> Instant {
        self.clock = self.clock.max(now);
        self.clock
    }

    /// Records that a request arrived or ended, which begins the idle window again.
    pub(super) fn record_activity(&mut self, now: Instant) {
        self.last_active = self.monotonic(now);
    }

    /// Replaces the running functions. Backends that still run keep their requests in flight and their pauses.
    pub(super) fn set_running_functions(&mut self, running: RunningFunctions, now: Instant) {
        let mut old = std::mem::take(&mut self.slots);
        self.slots = running
            .backends
            .iter()
            .map(|backend| {
                let old_index = old.iter().position(|slot| slot.backend.id == backend.id);
                old_index.map_or_else(
                    || BackendSlots {
                        backend: backend.clone(),
                        in_flight: 0,
                        paused_until: now,
                        pause: Duration::ZERO,
                    },
                    // The prices may differ: its remote functions may have changed.
                    |index| BackendSlots { backend: backend.clone(), ..old.swap_remove(index) },
                )
            })
            .collect();
        self.running = running;
    }

    /// Frees a slot of `backend`, whose request has ended.
    pub(super) fn release(&mut self, backend: u64, now: Instant) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.record_activity(now);
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.backend.id == backend) {
            slot.in_flight = slot.in_flight.saturating_sub(1);
        }
    }

    /// Circuit breaker: sends no requests to `backend`, which could not be reached, for a while; longer each time.
    pub(super) fn pause(&mut self, backend: u64, now: Instant) {
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.backend.id == backend) {
            if now < slot.paused_until {
                // Another request has reported this failure.
                return;
            }
            let is_repeated = now < slot.paused_until + 2 * slot.pause;
            slot.pause = if is_repeated { (2 * slot.pause).min(LONGEST_PAUSE) } else { PAUSE };
            slot.paused_until = now + slot.pause;
        }
    }

    /// Reports if main functions that were started for the present phase serve requests.
    pub(super) fn is_serving(&self) -> bool {
        self.is_current() && matches!(self.phase, ScalingPhase::Active | ScalingPhase::Draining)
    }

    fn is_current(&self) -> bool {
        self.running.order >= self.oldest_current_order && !self.slots.is_empty()
    }

    /// Returns the inputs of the decision about the next phase.
    pub(super) fn step_inputs(&self, now: Instant, wake_limit: Duration) -> StepInputs {
        StepInputs {
            waiting: self.queue.len(),
            in_flight: self.in_flight,
            quiet: now.saturating_duration_since(self.last_active),
            idle: self.idle_window,
            wake_limit,
            serving: self.is_current(),
            engine: self.engine_requests,
        }
    }

    /// Returns the phase for a directive of `phase`. The model becomes active once there is a backend.
    pub(super) fn phase_by_directive(&self, phase: ScalingPhase) -> ScalingPhase {
        match phase {
            ScalingPhase::Active | ScalingPhase::Waking
                if self.phase == ScalingPhase::Active || !self.slots.is_empty() =>
            {
                ScalingPhase::Active
            }
            ScalingPhase::Active | ScalingPhase::Waking => ScalingPhase::Waking,
            ScalingPhase::Draining | ScalingPhase::Asleep => phase,
        }
    }

    /// Enters `phase`. Returns the duration of the wake from sleep that this completes, if it does.
    pub(super) fn enter_phase(&mut self, phase: ScalingPhase, now: Instant) -> Option<Duration> {
        let previous_phase = std::mem::replace(&mut self.phase, phase);
        self.order += 1;
        self.history.enter(phase, now);
        match phase {
            ScalingPhase::Draining => self.engine_requests = None,
            ScalingPhase::Asleep => {
                self.oldest_current_order = self.order;
                // The prefix caches end with the functions.
                self.prefix_index.forget();
            }
            ScalingPhase::Waking => {
                self.oldest_current_order = self.order;
                self.wake_decided_at = Some(now);
            }
            ScalingPhase::Active => {
                self.last_active = now;
                if previous_phase == ScalingPhase::Waking {
                    let decided_at = self.wake_decided_at.unwrap_or(now);
                    let wake_time = now.saturating_duration_since(decided_at);
                    if self.recent_wakes.is_empty() {
                        // The first start includes planning, which later wakes do not: count from the first process.
                        let started_at = self.running.wake.started.unwrap_or(decided_at);
                        self.recent_wakes.push_back(now.saturating_duration_since(started_at));
                        return None;
                    }
                    self.wakes += 1;
                    if self.recent_wakes.len() == MAX_RECENT_WAKES {
                        self.recent_wakes.pop_front();
                    }
                    self.recent_wakes.push_back(wake_time);
                    return Some(wake_time);
                }
            }
        }
        None
    }

    pub(super) fn launcher_order(&self) -> LauncherOrder {
        let wanted = match self.phase {
            ScalingPhase::Active | ScalingPhase::Waking => DesiredState::Awake,
            ScalingPhase::Draining => DesiredState::Recheck,
            ScalingPhase::Asleep => DesiredState::Asleep,
        };
        LauncherOrder { order: self.order, wanted }
    }

    /// Predicts the time until the model is awake: the slowest recent wake, less the time that a present wake has
    /// taken.
    pub(super) fn time_to_wake(&self, now: Instant) -> Duration {
        let slowest = self.recent_wakes.iter().max().copied().unwrap_or_default();
        let waking_since = self.wake_decided_at.filter(|_| self.phase == ScalingPhase::Waking);
        let elapsed = waking_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        slowest.saturating_sub(elapsed)
    }

    /// Adds the time of all requests since the last call, and counts the requests for the next one.
    pub(super) fn add_request_time(&mut self, now: Instant) {
        let since = self.request_time_counted_at;
        let requests = u32::try_from(self.counted_requests).unwrap_or(u32::MAX);
        let added = now.saturating_duration_since(since).saturating_mul(requests);
        self.total_request_time = self.total_request_time.saturating_add(added);
        self.request_time_counted_at = now.max(since);
        self.counted_requests = self.queue.len() + self.in_flight;
    }

    /// Assigns the next waiting request to a backend with a free slot: to one that has had a request with the same
    /// prefix, if it is not much busier, else to the one with the fewest requests in flight.
    pub(super) fn next_assignment(&mut self, now: Instant) -> Option<Assignment<G>> {
        if self.phase != ScalingPhase::Active || !self.is_current() || self.queue.len() == 0 {
            return None;
        }
        let is_free =
            |slot: &BackendSlots| slot.in_flight < slot.backend.capacity && slot.paused_until <= now;
        let free = self.slots.iter().filter(|slot| is_free(slot));
        let idlest = free.clone().min_by_key(|slot| slot.in_flight)?.backend.id;
        let smallest_capacity = self.slots.iter().map(|slot| slot.backend.capacity).min()?;
        let max_imbalance = (smallest_capacity / IMBALANCE_DIVISOR).max(1);
        let request = self.queue.pop()?;
        let holder = if self.slots.len() > 1 {
            let loads = free.map(|slot| (slot.backend.id, slot.in_flight));
            self.prefix_index.holder(&request.prefix, loads, max_imbalance)
        } else {
            None
        };
        let chosen = holder.unwrap_or(idlest);
        // A single backend is recorded, too: others may be added later.
        self.prefix_index.record(&request.prefix, chosen);
        let slot = self.slots.iter_mut().find(|slot| slot.backend.id == chosen)?;
        slot.in_flight += 1;
        let backend = slot.backend.clone();
        self.in_flight += 1;
        Some(Assignment { request, backend, is_prefix_match: holder.is_some() })
    }

    /// Returns the time after `now` at which a decision may change without any event, if there is one.
    pub(super) fn next_deadline(&self, now: Instant, wake_limit: Duration) -> Option<Instant> {
        if self.queue.len() > 0 {
            return self.slots.iter().map(|slot| slot.paused_until).filter(|end| *end > now).min();
        }
        let idle_window = self.idle_window.filter(|_| self.in_flight == 0)?;
        match self.phase {
            ScalingPhase::Active => Some(self.last_active + idle_window),
            ScalingPhase::Waking => Some(self.last_active + idle_window.max(wake_limit)),
            ScalingPhase::Draining | ScalingPhase::Asleep => None,
        }
    }
}
