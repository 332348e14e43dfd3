//! State under a model's lock, and what follows from it: the phase, the next request, and its backend. No clock and no
//! socket.

use super::entry::Waiting;
use super::history::History;
use super::running::{ApartGroup, Backend, DesiredState, Directive, LauncherOrder, RunningFunctions};
use crate::prefix_index::ModelPrefixIndex;
use crate::queue::FairQueue;
use crate::timeline::ColdStart;
use remoe_autoscale::scale_to_zero::{ScalingPhase, StepInputs};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A backend that could not be reached gets no request for so long, and for twice as long each time that it cannot be
/// right after.
const PAUSE: Duration = Duration::from_millis(100);
/// But never longer.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A backend that has seen what begins like a request may have this part of its room more in use than others.
const SHARE_OF_ROOM: usize = 4;
/// Wakes that the next one is predicted from.
const WAKES: usize = 8;

/// State of a model. Waiting requests get a grant `G`.
pub(super) struct ModelRuntime<G> {
    pub(super) phase: ScalingPhase,
    /// Decision that was made elsewhere; none: the model decides itself.
    pub(super) directive: Option<Directive>,
    pub(super) order: u64,
    /// The order of the latest change between asleep and awake: what runs by an older one is on its way out.
    life: u64,
    pub(super) idle: Option<Duration>,
    pub(super) engine: Option<u32>,
    pub(super) queue: FairQueue<Waiting<G>>,
    pub(super) in_flight: usize,
    /// How long requests have waited or been worked on until `counted`, all together, and how many there are since.
    pub(super) occupied: Duration,
    counted: (Instant, usize),
    /// The latest time that anything was decided at: see [`Self::at`].
    clock: Instant,
    pub(super) last_active: Instant,
    /// When the latest wake was decided.
    pub(super) decided: Option<Instant>,
    pub(super) running: RunningFunctions,
    pub(super) places: Vec<BackendSlot>,
    prefix_index: ModelPrefixIndex,
    pub(super) recent: VecDeque<Duration>,
    pub(super) cold_start: Option<ColdStart>,
    pub(super) history: History,
    pub(super) wakes: u64,
    /// Wakes of remote groups while the model was awake.
    pub(super) group_wakes: u64,
    /// Remote groups that the main function may say nothing of.
    pub(super) groups: Vec<ApartGroup>,
    pub(super) closed: bool,
}

/// A backend, and what it is given.
pub(super) struct BackendSlot {
    pub(super) backend: Backend,
    pub(super) in_flight: usize,
    not_before: Instant,
    /// How long the latest pause was.
    pause: Duration,
}

impl<G> ModelRuntime<G> {
    /// Makes the state of a model whose functions are being started and whose waiting requests may keep
    /// `waiting_bytes`.
    pub(super) fn new(waiting_bytes: usize, prefix_index: ModelPrefixIndex) -> Self {
        Self {
            phase: ScalingPhase::Waking,
            directive: None,
            order: 0,
            life: 0,
            idle: None,
            engine: None,
            queue: FairQueue::new(waiting_bytes),
            in_flight: 0,
            occupied: Duration::ZERO,
            counted: (Instant::now(), 0),
            clock: Instant::now(),
            last_active: Instant::now(),
            decided: Some(Instant::now()),
            running: RunningFunctions::default(),
            places: Vec::new(),
            prefix_index,
            recent: VecDeque::new(),
            cold_start: None,
            history: History::begin(ScalingPhase::Waking, Instant::now()),
            wakes: 0,
            group_wakes: 0,
            groups: Vec::new(),
            closed: false,
        }
    }

    /// Returns `now`, or the time of the latest decision if that is later. A thread that read the clock and then waited
    /// for the lock may come after others that read it later: by its time, a window would be open that has closed
    /// since.
    pub(super) fn at(&mut self, now: Instant) -> Instant {
        self.clock = self.clock.max(now);
        self.clock
    }

    /// A request came or ended.
    pub(super) fn active_at(&mut self, now: Instant) {
        self.last_active = self.at(now);
    }

    /// Takes note of what runs. Places that go on keep what they are given.
    pub(super) fn runs(&mut self, running: RunningFunctions, now: Instant) {
        let mut old = std::mem::take(&mut self.places);
        self.places = running
            .backends
            .iter()
            .map(|backend| {
                let known = old.iter().position(|place| place.backend.id == backend.id);
                known.map_or_else(
                    || BackendSlot {
                        backend: backend.clone(),
                        in_flight: 0,
                        not_before: now,
                        pause: Duration::ZERO,
                    },
                    // Remote functions behind it may have changed.
                    |at| BackendSlot { backend: backend.clone(), ..old.swap_remove(at) },
                )
            })
            .collect();
        self.running = running;
    }

    /// One of `backend`'s requests is over, whatever became of it.
    pub(super) fn release(&mut self, backend: u64, now: Instant) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.active_at(now);
        if let Some(place) = self.places.iter_mut().find(|place| place.backend.id == backend) {
            place.in_flight = place.in_flight.saturating_sub(1);
        }
    }

    /// Circuit breaker: `backend` could not be reached, so it gets no request for a moment, longer each time.
    pub(super) fn pause(&mut self, backend: u64, now: Instant) {
        if let Some(place) = self.places.iter_mut().find(|place| place.backend.id == backend) {
            if now < place.not_before {
                // It is known already: several requests found out.
                return;
            }
            let is_again = now < place.not_before + 2 * place.pause;
            place.pause = if is_again { (2 * place.pause).min(LONGEST_PAUSE) } else { PAUSE };
            place.not_before = now + place.pause;
        }
    }

    /// Reports if what runs was started for the present phase and takes requests.
    pub(super) fn is_serving(&self) -> bool {
        self.is_current() && matches!(self.phase, ScalingPhase::Active | ScalingPhase::Draining)
    }

    fn is_current(&self) -> bool {
        self.running.order >= self.life && !self.places.is_empty()
    }

    pub(super) fn seen(&self, now: Instant, wake_limit: Duration) -> StepInputs {
        StepInputs {
            waiting: self.queue.len(),
            in_flight: self.in_flight,
            quiet: now.saturating_duration_since(self.last_active),
            idle: self.idle,
            wake_limit,
            serving: self.is_current(),
            engine: self.engine,
        }
    }

    /// The phase by what was decided elsewhere: requests go on once there is a backend, and not before.
    pub(super) fn directed(&self, phase: ScalingPhase) -> ScalingPhase {
        match phase {
            ScalingPhase::Active | ScalingPhase::Waking
                if self.phase == ScalingPhase::Active || !self.places.is_empty() =>
            {
                ScalingPhase::Active
            }
            ScalingPhase::Active | ScalingPhase::Waking => ScalingPhase::Waking,
            ScalingPhase::Draining | ScalingPhase::Asleep => phase,
        }
    }

    /// Changes the phase; how long the wake from sleep took that ends with it.
    pub(super) fn enter(&mut self, phase: ScalingPhase, now: Instant) -> Option<Duration> {
        let before = std::mem::replace(&mut self.phase, phase);
        self.order += 1;
        self.history.enter(phase, now);
        match phase {
            ScalingPhase::Draining => self.engine = None,
            ScalingPhase::Asleep => {
                self.life = self.order;
                // What starts next has seen nothing.
                self.prefix_index.forget();
            }
            ScalingPhase::Waking => {
                self.life = self.order;
                self.decided = Some(now);
            }
            ScalingPhase::Active => {
                self.last_active = now;
                if before == ScalingPhase::Waking {
                    let began = self.decided.unwrap_or(now);
                    let wake = now.saturating_duration_since(began);
                    if self.recent.is_empty() {
                        // The first start planned as well: what starts again does not.
                        let began = self.running.wake.started.unwrap_or(began);
                        self.recent.push_back(now.saturating_duration_since(began));
                        return None;
                    }
                    self.wakes += 1;
                    if self.recent.len() == WAKES {
                        self.recent.pop_front();
                    }
                    self.recent.push_back(wake);
                    return Some(wake);
                }
            }
        }
        None
    }

    pub(super) fn want(&self) -> LauncherOrder {
        let wanted = match self.phase {
            ScalingPhase::Active | ScalingPhase::Waking => DesiredState::Awake,
            ScalingPhase::Draining => DesiredState::Recheck,
            ScalingPhase::Asleep => DesiredState::Asleep,
        };
        LauncherOrder { order: self.order, wanted }
    }

    /// The slowest of the latest wakes, less what the present one has taken so far.
    pub(super) fn time_to_wake(&self, now: Instant) -> Duration {
        let whole = self.recent.iter().max().copied().unwrap_or_default();
        let begun = self.decided.filter(|_| self.phase == ScalingPhase::Waking);
        whole.saturating_sub(begun.map_or(Duration::ZERO, |begun| now.saturating_duration_since(begun)))
    }

    /// Counts the time of requests until `now`, by what there was since the last time, and what there is from now on.
    pub(super) fn occupy(&mut self, now: Instant) {
        let (since, requests) = self.counted;
        let requests = u32::try_from(requests).unwrap_or(u32::MAX);
        let passed = now.saturating_duration_since(since).saturating_mul(requests);
        self.occupied = self.occupied.saturating_add(passed);
        self.counted = (now.max(since), self.queue.len() + self.in_flight);
    }

    /// Returns the next request and its backend: of the backends with room the one that has seen a similar beginning,
    /// or else the one with the least work in flight; and if it was the former.
    pub(super) fn next_grant(&mut self, now: Instant) -> Option<(Waiting<G>, Backend, bool)> {
        if self.phase != ScalingPhase::Active || !self.is_current() || self.queue.len() == 0 {
            return None;
        }
        let is_free =
            |place: &BackendSlot| place.in_flight < place.backend.capacity && place.not_before <= now;
        let free = self.places.iter().filter(|place| is_free(place));
        let idlest = free.clone().min_by_key(|place| place.in_flight)?.backend.id;
        let most = (self.places.iter().map(|place| place.backend.capacity).min()? / SHARE_OF_ROOM).max(1);
        let waiting = self.queue.pop()?;
        let holder = if self.places.len() > 1 {
            let loads = free.map(|place| (place.backend.id, place.in_flight));
            self.prefix_index.holder(&waiting.beginning, loads, most)
        } else {
            None
        };
        let chosen = holder.unwrap_or(idlest);
        // Also of an only one: there may be others later.
        self.prefix_index.seen(&waiting.beginning, chosen);
        let place = self.places.iter_mut().find(|place| place.backend.id == chosen)?;
        place.in_flight += 1;
        let backend = place.backend.clone();
        self.in_flight += 1;
        Some((waiting, backend, holder.is_some()))
    }

    pub(super) fn deadline(&self, now: Instant, wake_limit: Duration) -> Option<Instant> {
        if self.queue.len() > 0 {
            return self.places.iter().map(|place| place.not_before).filter(|at| *at > now).min();
        }
        let idle = self.idle.filter(|_| self.in_flight == 0)?;
        match self.phase {
            ScalingPhase::Active => Some(self.last_active + idle),
            ScalingPhase::Waking => Some(self.last_active + idle.max(wake_limit)),
            ScalingPhase::Draining | ScalingPhase::Asleep => None,
        }
    }
}
