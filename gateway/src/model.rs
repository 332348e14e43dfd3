//! One model behind the gateway: who waits, who is served where, and whether it is to be awake.
//!
//! Everything is decided under one lock: a request cannot slip between the last look and the sleep.

use crate::beginnings::{Beginning, Beginnings, ModelBeginnings};
use crate::books::Billing;
use crate::keys::Privacy;
use crate::metrics::{ModelMetrics, WakeCause};
use crate::queue::{FairQueue, Pushed, Ticket};
use crate::timeline::{Parts, WakeMarks};
use crate::witness::{Sighting, Witness};
use axum::http::HeaderValue;
use bytes::Bytes;
use remoe_sleep::{Phase, Seen, step};
use remoe_wire::{ErrorCode, ServiceError};
use serde::Serialize;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{sleep_until, timeout_at};

/// Longest wait for a place while the model is awake.
const LONGEST_WAIT: Duration = Duration::from_secs(600);
/// A backend that could not be reached gets no request for so long.
const PAUSE: Duration = Duration::from_millis(100);
/// A backend that has seen what begins like a request may have this part of its room more in use than others.
const SHARE_OF_ROOM: usize = 4;
/// Wakes that the next one is predicted from.
const WAKES: usize = 8;

/// What a model is called and what it may take.
#[derive(Debug, Clone)]
pub struct ModelOptions {
    /// Its name in requests and answers, which no other model has.
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

/// Something that answers for a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backend {
    /// Differs from that of every other one there was.
    pub id: u64,
    /// Where it speaks HTTP.
    pub address: SocketAddr,
    /// Requests that it has at the same time; further ones wait here, where turns are fair.
    pub room: usize,
    /// What it wants to see as `Authorization`.
    pub authorization: Option<HeaderValue>,
    /// What its functions cost; none where nobody asks.
    pub billing: Option<Arc<Billing>>,
}

/// A function, as people are shown it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FunctionLine {
    /// Its place.
    pub name: String,
    /// What it is doing.
    pub state: &'static str,
    /// Its process, where there is one.
    pub pid: Option<u32>,
}

/// What runs for a model, as its launcher says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Running {
    /// The number of the [`Want`] that this follows.
    pub order: u64,
    /// What takes requests.
    pub backends: Vec<Backend>,
    /// How the latest start went.
    pub wake: WakeMarks,
    /// All functions.
    pub functions: Vec<FunctionLine>,
}

/// What is wanted of a launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// The functions run.
    Awake,
    /// They run, and the launcher says through [`Model::rechecked`] how many requests the engine has.
    Recheck,
    /// Nothing runs.
    Asleep,
}

/// A numbered order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Want {
    /// Grows with every change.
    pub order: u64,
    /// What is wanted.
    pub wanted: Wanted,
}

/// What somebody else decided about a model, for a gateway that keeps no functions itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Directive {
    /// Where the model is to be; it is `Waking` until there is a backend, whatever is said.
    pub phase: Phase,
    /// The number of the decision.
    pub turn: u64,
}

/// What a model has to do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that wait.
    pub waiting: usize,
    /// Requests that functions work on.
    pub in_flight: usize,
    /// The number of the [`Directive`] that all of these came after, or are counted with.
    pub turn: u64,
}

impl Load {
    /// Whether somebody waits or is served.
    pub fn is_busy(self) -> bool {
        self.waiting + self.in_flight > 0
    }
}

/// A model as people are shown it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ModelStatus {
    pub(crate) model: String,
    pub(crate) state: Phase,
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
    /// Its short names and the positions of its context.
    described: RwLock<(Arc<[String]>, usize)>,
    state: Mutex<State>,
    want: watch::Sender<Want>,
    load: watch::Sender<Load>,
    /// A deadline may have changed.
    moved: Notify,
    metrics: ModelMetrics,
    witness: OnceLock<Arc<dyn Witness>>,
}

struct State {
    phase: Phase,
    /// What somebody else decided; none: the model decides itself.
    directive: Option<Directive>,
    order: u64,
    /// The order of the latest change between asleep and awake: what runs by an older one is on its way out.
    life: u64,
    idle: Option<Duration>,
    engine: Option<u32>,
    queue: FairQueue<Waiting>,
    in_flight: usize,
    /// How long requests have waited or been worked on until `counted`, all together, and how many there are since.
    occupied: Duration,
    counted: (Instant, usize),
    last_active: Instant,
    /// When the latest wake was decided.
    decided: Option<Instant>,
    running: Running,
    places: Vec<Place>,
    beginnings: ModelBeginnings,
    recent: VecDeque<Duration>,
    wakes: u64,
    /// Of remote groups, while the model was awake.
    group_wakes: u64,
    closed: bool,
}

struct Place {
    backend: Backend,
    in_flight: usize,
    not_before: Instant,
}

struct Waiting {
    arrived: Instant,
    cold: bool,
    beginning: Beginning,
    answer: oneshot::Sender<Result<Grant, ServiceError>>,
}

type Answer = (oneshot::Sender<Result<Grant, ServiceError>>, Result<Grant, ServiceError>);

/// A request that asks to be let in.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// Whose turn it takes.
    pub(crate) client: Arc<str>,
    /// What it keeps in memory.
    pub(crate) bytes: usize,
    pub(crate) arrived: Instant,
    /// Until when its client waits, where it said so.
    pub(crate) until: Option<Instant>,
    /// It was let in before, and its backend broke off.
    pub(crate) again: bool,
    /// What backends may have seen the like of.
    pub(crate) beginning: Beginning,
}

/// Why a request was not let in.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) error: ServiceError,
    pub(crate) retry_after: Duration,
}

impl Model {
    /// A model whose functions are being started; it does not sleep until [`Self::sleep_when_idle`]. `beginnings` are those
    /// of all models of the process.
    pub fn new(options: ModelOptions, metrics: &crate::GatewayMetrics, beginnings: &Beginnings) -> Arc<Self> {
        let state = State {
            phase: Phase::Waking,
            directive: None,
            order: 0,
            life: 0,
            idle: None,
            engine: None,
            queue: FairQueue::new(options.waiting_bytes),
            in_flight: 0,
            occupied: Duration::ZERO,
            counted: (Instant::now(), 0),
            last_active: Instant::now(),
            decided: Some(Instant::now()),
            running: Running::default(),
            places: Vec::new(),
            beginnings: beginnings.of_model(),
            recent: VecDeque::new(),
            wakes: 0,
            group_wakes: 0,
            closed: false,
        };
        Arc::new(Self {
            metrics: metrics.of_model(&options.name),
            described: RwLock::new((options.short_names.clone().into(), options.context_length)),
            options,
            state: Mutex::new(state),
            want: watch::Sender::new(Want { order: 0, wanted: Wanted::Awake }),
            load: watch::Sender::new(Load::default()),
            moved: Notify::new(),
            witness: OnceLock::new(),
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// Has it other short names, and another length of its context.
    pub fn describe(&self, short_names: Vec<String>, context_length: usize) {
        let mut described = self.described.write().unwrap_or_else(PoisonError::into_inner);
        *described = (short_names.into(), context_length);
    }

    /// Has `witness` told of all requests from now on. Only the first one is.
    pub fn tell(&self, witness: Arc<dyn Witness>) {
        self.witness.get_or_init(|| witness);
    }

    /// Tells its witness of a request; none where it has none.
    pub(crate) fn sight(&self, tenant: &str, privacy: Privacy, body: &Bytes) -> Option<Sighting> {
        Sighting::begin(self.witness.get()?.clone(), tenant, privacy, body)
    }

    /// Its short names and the positions of its context.
    pub(crate) fn described(&self) -> (Arc<[String]>, usize) {
        self.described.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What is wanted of its launcher, now and whenever it changes.
    pub fn want(&self) -> watch::Receiver<Want> {
        self.want.subscribe()
    }

    /// Lets the model sleep when it had no request for `idle`, from now on; zero counts as a millisecond.
    pub fn sleep_when_idle(self: &Arc<Self>, idle: Duration) {
        let now = Instant::now();
        let mut state = self.state();
        state.idle = Some(idle.max(Duration::from_millis(1)));
        state.last_active = now;
        drop(state);
        self.changed(now);
    }

    /// Takes note of what runs.
    pub fn runs(self: &Arc<Self>, running: Running) {
        let now = Instant::now();
        let mut state = self.state();
        let mut old = std::mem::take(&mut state.places);
        state.places = running
            .backends
            .iter()
            .map(|backend| {
                let known = old.iter().position(|place| place.backend.id == backend.id);
                known.map_or_else(
                    || Place { backend: backend.clone(), in_flight: 0, not_before: now },
                    // Remote functions behind it may have changed.
                    |at| Place { backend: backend.clone(), ..old.swap_remove(at) },
                )
            })
            .collect();
        state.running = running;
        drop(state);
        self.changed(now);
    }

    /// Takes note of what was decided elsewhere and of what runs; from now on nothing is decided here.
    pub fn follow(self: &Arc<Self>, directive: Directive, backends: Vec<Backend>, wake: WakeMarks) {
        self.state().directive = Some(directive);
        // Whatever is listed was started for the present phase: the one who decides leaves the others out.
        self.runs(Running { order: u64::MAX, backends, wake, functions: Vec::new() });
    }

    /// Takes note of remote groups that sleep while the main function runs: how many do, and how many (token, expert) pairs
    /// asked for such since this was last said.
    pub fn groups_sleep(&self, asleep: usize, pairs: u64) {
        self.metrics.groups_sleep(asleep);
        self.metrics.pairs_slept(pairs);
    }

    /// Takes note of a remote group that wakes.
    pub fn group_woke(&self, cause: WakeCause) {
        self.metrics.group_woke(cause);
        self.state().group_wakes += 1;
    }

    /// Answers a [`Wanted::Recheck`] of number `order`: the engine has `requests`.
    pub fn rechecked(self: &Arc<Self>, order: u64, requests: u32) {
        let mut state = self.state();
        if state.order == order && state.phase == Phase::Draining {
            state.engine = Some(requests);
        }
        drop(state);
        self.changed(Instant::now());
    }

    /// Takes no further request. Those that wait go on where functions answer, and are refused where not.
    pub fn close(self: &Arc<Self>) {
        let mut state = self.state();
        state.closed = true;
        let mut refused = Vec::new();
        if !state.is_serving() {
            while let Some(waiting) = state.queue.pop() {
                refused.push((waiting.answer, Err(closed())));
            }
        }
        drop(state);
        answer(refused);
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

    /// What it has to do, now and whenever it changes.
    pub fn loads(&self) -> watch::Receiver<Load> {
        self.load.subscribe()
    }

    /// How long ago a request last came or ended, or the model woke up.
    pub fn quiet(&self) -> Duration {
        self.state().last_active.elapsed()
    }

    /// Where it is between awake and asleep.
    pub fn phase(&self) -> Phase {
        self.state().phase
    }

    /// Whether requests are answered, be it after a wake.
    pub(crate) fn takes_requests(&self) -> bool {
        let state = self.state();
        !state.closed && !state.recent.is_empty()
    }

    /// Requests that what answers for it now can have at the same time.
    pub(crate) fn room(&self) -> usize {
        let state = self.state();
        let serving = state.is_serving();
        state.places.iter().filter(|_| serving).map(|place| place.backend.room).sum()
    }

    /// What answers for it now.
    pub(crate) fn backends(&self) -> Vec<Backend> {
        let state = self.state();
        let awake = state.is_serving();
        state.places.iter().filter(|_| awake).map(|place| place.backend.clone()).collect()
    }

    /// What the functions behind it cost now, awake or not.
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
    pub(crate) fn enter(self: &Arc<Self>, entry: &Entry) -> Result<Waiter, Refused> {
        let now = Instant::now();
        let mut state = self.state();
        let cold = !state.is_serving();
        if state.closed && (cold || !entry.again) {
            return Err(Refused { error: closed(), retry_after: Duration::from_secs(1) });
        }
        state.last_active = now;
        if let (true, Some(until)) = (cold, entry.until) {
            let missing = state.time_to_wake(now);
            if until < now + missing {
                drop(state);
                self.changed(now);
                let error = ServiceError::new(
                    ErrorCode::Unavailable,
                    format!(
                        "the model is asleep and needs {:.1} s to wake, longer than the request may take; try again later",
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
            Pushed::Full(_) => return Err(Refused { error: full(), retry_after: Duration::from_secs(1) }),
        };
        drop(state);
        if let Some(other) = displaced {
            answer(vec![(other.answer, Err(full()))]);
        }
        self.changed(now);
        let limit = if cold { self.options.wake_limit } else { LONGEST_WAIT };
        let until = entry.until.map_or(now + limit, |until| until.min(now + limit));
        Ok(Waiter { model: self.clone(), ticket, cold, until, receiver })
    }

    fn state(&self) -> MutexGuard<'_, State> {
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
        let mut granted: Vec<Answer> = Vec::new();
        while let Some((waiting, backend, is_seen)) = state.next_grant(now) {
            if is_seen {
                self.metrics.sent_where_seen();
            }
            let decided = state.decided.filter(|_| waiting.cold);
            let parts = Parts::new(waiting.arrived, decided, &state.running.wake, now);
            if waiting.cold {
                self.metrics.started_cold(&parts);
            }
            let grant = Grant { model: self.clone(), backend, parts, cold: waiting.cold };
            granted.push((waiting.answer, Ok(grant)));
        }
        state.occupy(now);
        let turn = state.directive.map_or(0, |directive| directive.turn);
        let load = Load { waiting: state.queue.len(), in_flight: state.in_flight, turn };
        replace(&self.load, load);
        replace(&self.want, state.want());
        self.metrics.load(state.queue.len(), state.in_flight, state.phase);
        let next = state.deadline(now, limit);
        drop(state);
        answer(granted);
        next
    }

    /// A request is over, whatever became of it.
    fn release(self: &Arc<Self>, backend: u64) {
        let now = Instant::now();
        let mut state = self.state();
        state.in_flight = state.in_flight.saturating_sub(1);
        state.last_active = now;
        if let Some(place) = state.places.iter_mut().find(|place| place.backend.id == backend) {
            place.in_flight = place.in_flight.saturating_sub(1);
        }
        drop(state);
        self.changed(now);
    }
}

/// Tells who watches, where it is another value.
fn replace<T: PartialEq>(told: &watch::Sender<T>, value: T) {
    told.send_if_modified(|known| {
        let changed = *known != value;
        *known = value;
        changed
    });
}

/// Tells waiting requests. Not under the lock: what nobody receives is dropped, and takes it.
fn answer(answers: Vec<Answer>) {
    for (sender, answer) in answers {
        let _client_gone = sender.send(answer);
    }
}

fn closed() -> ServiceError {
    ServiceError::new(ErrorCode::Unavailable, "the server is shutting down; try again later")
}

fn full() -> ServiceError {
    ServiceError::new(ErrorCode::ResourceExhausted, "too many requests run or wait; try again later")
}

impl State {
    /// What runs was started for the present phase, and takes requests.
    fn is_serving(&self) -> bool {
        self.is_current() && matches!(self.phase, Phase::Active | Phase::Draining)
    }

    fn is_current(&self) -> bool {
        self.running.order >= self.life && !self.places.is_empty()
    }

    fn seen(&self, now: Instant, wake_limit: Duration) -> Seen {
        Seen {
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
    fn directed(&self, phase: Phase) -> Phase {
        match phase {
            Phase::Active | Phase::Waking if self.phase == Phase::Active || !self.places.is_empty() => {
                Phase::Active
            }
            Phase::Active | Phase::Waking => Phase::Waking,
            Phase::Draining | Phase::Asleep => phase,
        }
    }

    /// Changes the phase; how long the wake from sleep took that ends with it.
    fn enter(&mut self, phase: Phase, now: Instant) -> Option<Duration> {
        let before = std::mem::replace(&mut self.phase, phase);
        self.order += 1;
        match phase {
            Phase::Draining => self.engine = None,
            Phase::Asleep => {
                self.life = self.order;
                // What starts next has seen nothing.
                self.beginnings.forget();
            }
            Phase::Waking => {
                self.life = self.order;
                self.decided = Some(now);
            }
            Phase::Active => {
                self.last_active = now;
                if before == Phase::Waking {
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

    fn want(&self) -> Want {
        let wanted = match self.phase {
            Phase::Active | Phase::Waking => Wanted::Awake,
            Phase::Draining => Wanted::Recheck,
            Phase::Asleep => Wanted::Asleep,
        };
        Want { order: self.order, wanted }
    }

    /// The slowest of the latest wakes, less what the present one has taken so far.
    fn time_to_wake(&self, now: Instant) -> Duration {
        let whole = self.recent.iter().max().copied().unwrap_or_default();
        let begun = self.decided.filter(|_| self.phase == Phase::Waking);
        whole.saturating_sub(begun.map_or(Duration::ZERO, |begun| now.saturating_duration_since(begun)))
    }

    /// Counts the time of requests until `now`, by what there was since the last time, and what there is from now on.
    fn occupy(&mut self, now: Instant) {
        let (since, requests) = self.counted;
        let requests = u32::try_from(requests).unwrap_or(u32::MAX);
        let passed = now.saturating_duration_since(since).saturating_mul(requests);
        self.occupied = self.occupied.saturating_add(passed);
        self.counted = (now.max(since), self.queue.len() + self.in_flight);
    }

    /// Who is next, and of the backends with room the one that has seen what begins likewise, or else the one with the least
    /// work in flight; and whether it was the former.
    fn next_grant(&mut self, now: Instant) -> Option<(Waiting, Backend, bool)> {
        if self.phase != Phase::Active || !self.is_current() || self.queue.len() == 0 {
            return None;
        }
        let is_free = |place: &Place| place.in_flight < place.backend.room && place.not_before <= now;
        let free = self.places.iter().filter(|place| is_free(place));
        let idlest = free.clone().min_by_key(|place| place.in_flight)?.backend.id;
        let most = (self.places.iter().map(|place| place.backend.room).min()? / SHARE_OF_ROOM).max(1);
        let waiting = self.queue.pop()?;
        let holder = if self.places.len() > 1 {
            let loads = free.map(|place| (place.backend.id, place.in_flight));
            self.beginnings.holder(&waiting.beginning, loads, most)
        } else {
            None
        };
        let chosen = holder.unwrap_or(idlest);
        // Also of an only one: there may be others later.
        self.beginnings.seen(&waiting.beginning, chosen);
        let place = self.places.iter_mut().find(|place| place.backend.id == chosen)?;
        place.in_flight += 1;
        let backend = place.backend.clone();
        self.in_flight += 1;
        Some((waiting, backend, holder.is_some()))
    }

    fn deadline(&self, now: Instant, wake_limit: Duration) -> Option<Instant> {
        if self.queue.len() > 0 {
            return self.places.iter().map(|place| place.not_before).filter(|at| *at > now).min();
        }
        let idle = self.idle.filter(|_| self.in_flight == 0)?;
        match self.phase {
            Phase::Active => Some(self.last_active + idle),
            Phase::Waking => Some(self.last_active + idle.max(wake_limit)),
            Phase::Draining | Phase::Asleep => None,
        }
    }
}

/// A request in the queue. It leaves when this is dropped.
pub(crate) struct Waiter {
    model: Arc<Model>,
    ticket: Ticket,
    cold: bool,
    until: Instant,
    receiver: oneshot::Receiver<Result<Grant, ServiceError>>,
}

impl Waiter {
    /// Nothing answered when it came.
    pub(crate) fn is_cold(&self) -> bool {
        self.cold
    }

    /// Waits for a backend with room.
    ///
    /// # Errors
    /// None was found in time, the request gave way to others, or the server shuts down.
    pub(crate) async fn granted(mut self) -> Result<Grant, ServiceError> {
        match timeout_at(self.until.into(), &mut self.receiver).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_dropped)) => Err(closed()),
            Err(_late) => Err(ServiceError::new(
                ErrorCode::Unavailable,
                "no function was ready within the time that the request may take; try again later",
            )),
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        // What was granted meanwhile is given back with the receiver.
        if self.model.state().queue.remove(self.ticket).is_some() {
            self.model.changed(Instant::now());
        }
    }
}

/// Leave to use a backend, until it is dropped.
pub(crate) struct Grant {
    model: Arc<Model>,
    backend: Backend,
    parts: Parts,
    cold: bool,
}

impl Grant {
    pub(crate) fn backend(&self) -> &Backend {
        &self.backend
    }

    /// The parts of the request's time so far.
    pub(crate) fn parts(&self) -> &Parts {
        &self.parts
    }

    /// The request waited for functions to start.
    pub(crate) fn is_cold(&self) -> bool {
        self.cold
    }

    /// The backend could not be reached, or broke off: it gets no request for a moment.
    pub(crate) fn failed(&self) {
        let mut state = self.model.state();
        let place = state.places.iter_mut().find(|place| place.backend.id == self.backend.id);
        if let Some(place) = place {
            place.not_before = Instant::now() + PAUSE;
        }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.model.release(self.backend.id);
    }
}

#[cfg(test)]
mod tests;
