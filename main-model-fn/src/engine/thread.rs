//! The engine's thread: who comes, who waits, and what goes on between two iterations.

mod admission;
mod iteration;
mod memory;
mod prefill;

use super::handle::{EngineHandle, Job, RequestLimits};
use super::pace::PrefillPace;
use super::request::Event;
use super::scheduler::PrefillOrder;
use super::sequence::{ActiveRequest, Vocabulary};
use super::switch::{PendingSwitch, Switch};
use crate::dispatch::{ExpertMetrics, ExpertParts, Experts, Link, LinkEvent, RemoteRequirements};
use crate::metrics::EngineMetrics;
use crate::pages::Pages;
use crate::records::Recorder;
use crate::transformer::Model;
use memory::MemoryLimits;
use prefill::Prefill;
use remoe_billing::Attribution;
use remoe_kernels::{NumericsClass, Pool};
use remoe_model::Checkpoint;
use remoe_proto::{ErrorCode, ServiceError};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// How many rows an iteration takes and how much may be in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EngineSettings {
    pub(crate) limits: RequestLimits,
    /// Sequences that run at the same time.
    pub(crate) max_batch: usize,
    /// The inter-token latency that running streams keep beside prompts; none: some times what they take alone.
    pub(crate) target_itl: Option<Duration>,
    /// Positions beyond its known tokens that a sequence is thought to need soon, when it is decided
    /// whether another request can start beside it.
    pub(crate) headroom: usize,
    /// Bytes of experts held because no replica answered.
    pub(crate) fallback_bytes: usize,
    /// How long the engine polls for answers before it sleeps.
    pub(crate) poll: Duration,
}

/// Parts of the engine.
pub(crate) struct EngineParts {
    pub(crate) model: Box<dyn Model>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) checkpoint: Arc<Checkpoint>,
    /// Numerics of experts; everything else is computed in its dtype.
    pub(crate) class: NumericsClass,
    pub(crate) vocabulary: Vocabulary,
    /// Properties that remote functions must agree on, sets left empty.
    pub(crate) expected: RemoteRequirements,
    pub(crate) expert_metrics: ExpertMetrics,
    pub(crate) metrics: EngineMetrics,
    /// Where activations are recorded.
    pub(crate) recorder: Option<Recorder>,
}

/// Signals that end the engine.
#[derive(Clone, Default)]
pub(crate) struct EngineStop {
    /// It ends once its requests are done. An engine that ends otherwise (a panic) cancels this.
    pub(crate) finish: CancellationToken,
    /// It fails its requests and ends, between two iterations.
    pub(crate) halt: CancellationToken,
    /// Cancelled by the engine if its device does not answer any more: it fails its requests and ends.
    pub(crate) device_lost: CancellationToken,
}

/// Starts the engine's thread. It ends as `stop` says, or when every handle is gone.
pub(crate) fn start(
    settings: EngineSettings,
    parts: EngineParts,
    stop: EngineStop,
) -> io::Result<(EngineHandle, mpsc::UnboundedSender<Switch>, JoinHandle<()>)> {
    let (handle, jobs) = EngineHandle::new(settings.limits);
    let (switch_sender, switches) = mpsc::unbounded_channel();
    let guard = stop.finish.clone().drop_guard();
    // Here, so that what the system refuses is the caller's error.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
        let _end_of_engine_ends_process = guard;
        parts.model.enter_thread();
        match Engine::new(settings, parts, runtime, jobs, switches, stop) {
            Ok(engine) => engine.run(),
            Err(error) => tracing::error!(%error, "engine start failed"),
        }
    })?;
    Ok((handle, switch_sender, thread))
}

struct Engine {
    settings: EngineSettings,
    model: Box<dyn Model>,
    pages: Pages,
    page_bytes: usize,
    pool: Arc<Pool>,
    vocabulary: Vocabulary,
    experts: Experts,
    expected: RemoteRequirements,
    metrics: EngineMetrics,
    recorder: Option<Recorder>,
    runtime: Rc<Runtime>,
    jobs: mpsc::UnboundedReceiver<Job>,
    switches: mpsc::UnboundedReceiver<Switch>,
    link_events: mpsc::UnboundedSender<LinkEvent>,
    pending_switch: Option<PendingSwitch>,
    next_link: u64,
    waiting: VecDeque<Job>,
    /// Requests that had to give their cache back, in the order of admission. They go before those
    /// that wait.
    paused: VecDeque<ActiveRequest>,
    /// In the order of admission.
    running: Vec<ActiveRequest>,
    /// Requests that were ever admitted.
    admitted: u64,
    /// Layered prefills under way, in the order in which they began.
    prefills: Vec<Prefill>,
    passes_begun: u64,
    memory_limits: MemoryLimits,
    turns: PrefillOrder,
    pace: PrefillPace,
    /// Set if the running requests that were set back take their turn next.
    apart: bool,
    stop: EngineStop,
    row_bytes: usize,
    attribution: Attribution,
}

impl Engine {
    fn new(
        settings: EngineSettings,
        parts: EngineParts,
        runtime: Runtime,
        jobs: mpsc::UnboundedReceiver<Job>,
        switches: mpsc::UnboundedReceiver<Switch>,
        stop: EngineStop,
    ) -> io::Result<Self> {
        let runtime = Rc::new(runtime);
        let (link_events, link_inlet) = mpsc::unbounded_channel();
        let hidden = parts.model.hidden();
        let experts = Experts::new(ExpertParts {
            runtime: runtime.clone(),
            pool: parts.pool.clone(),
            class: parts.class,
            hidden,
            checkpoint: parts.checkpoint,
            link_events: link_inlet,
            fallback_bytes: settings.fallback_bytes,
            poll: settings.poll,
            metrics: parts.expert_metrics,
        })?;
        Ok(Self {
            settings,
            pages: Pages::new(settings.limits.cache_pages, settings.limits.page_needs),
            page_bytes: parts.model.page_bytes(),
            model: parts.model,
            pool: parts.pool,
            vocabulary: parts.vocabulary,
            experts,
            expected: parts.expected,
            metrics: parts.metrics,
            recorder: parts.recorder,
            runtime,
            jobs,
            switches,
            link_events,
            pending_switch: None,
            next_link: 0,
            waiting: VecDeque::new(),
            paused: VecDeque::new(),
            running: Vec::new(),
            admitted: 0,
            prefills: Vec::new(),
            passes_begun: 0,
            memory_limits: MemoryLimits::new(settings.max_batch),
            turns: PrefillOrder::default(),
            pace: PrefillPace::default(),
            apart: false,
            stop,
            row_bytes: hidden * parts.class.dtype.bytes(),
            attribution: Attribution::new(Instant::now()),
        })
    }

    fn run(mut self) {
        loop {
            self.receive();
            if self.stop.halt.is_cancelled() {
                self.refuse_all("the server is shutting down");
                return;
            }
            if self.stop.device_lost.is_cancelled() {
                self.refuse_all("the device is lost; retry later");
                return;
            }
            self.settle_switch();
            self.admit();
            if self.running.is_empty() {
                if self.stop.finish.is_cancelled() && self.waiting.is_empty() {
                    return;
                }
                if !self.wait() {
                    return;
                }
                self.attribution.record_idle(Instant::now());
                continue;
            }
            if let Some(until) = self.resting() {
                self.rest(until);
                continue;
            }
            let decoded = self.iterate();
            if !self.prefill() && !decoded && !self.running.is_empty() {
                // Requests wait for each other's rest.
                self.rest(Instant::now() + Duration::from_millis(1));
            }
        }
    }

    /// Until when every request that runs rests after a failed iteration.
    fn resting(&self) -> Option<Instant> {
        let until = |running: &ActiveRequest| match &running.pass {
            Some(_) => None,
            None => running.failure_backoff().map(|failure_backoff| failure_backoff.until),
        };
        let first = self.running.iter().map(until).min().flatten();
        first.filter(|&first| first > Instant::now())
    }

    /// Lets connections go on, until `until` at most.
    fn rest(&mut self, until: Instant) {
        /// Longest time until arrivals for the engine are noticed.
        const SLICE: Duration = Duration::from_millis(20);
        let until = until.min(Instant::now() + SLICE);
        let experts = &mut self.experts;
        // Time that has passed is all that is waited for; a connection may come back meanwhile.
        self.runtime.block_on(async {
            let _changed = tokio::time::timeout_at(until.into(), experts.connections_changed()).await;
        });
    }

    /// Takes what has arrived, without waiting.
    fn receive(&mut self) {
        while let Ok(job) = self.jobs.try_recv() {
            self.wait_for(job);
        }
        while let Ok(switch) = self.switches.try_recv() {
            self.begin_switch(switch);
        }
        // Requests whose client has gone give their slots back, running or not.
        self.waiting.retain(|job| !job.events.is_closed());
        self.paused.retain(|paused| !paused.is_abandoned());
        while let Some(index) = self.running.iter().position(ActiveRequest::is_abandoned) {
            drop(self.take_out(index));
        }
        self.end_overdue(Instant::now());
        self.metrics.waiting.set((self.waiting.len() + self.paused.len()) as i64);
        self.metrics.running.set(self.running.len() as i64);
        self.metrics.batch_limit.set(i64::try_from(self.memory_limits.max_batch()).unwrap_or(i64::MAX));
        self.measure_caches();
    }

    /// Takes a request out of those that run, and of its prefill.
    fn take_out(&mut self, index: usize) -> ActiveRequest {
        self.leave_prefill(index);
        self.running.remove(index)
    }

    fn measure_caches(&self) {
        let bytes = self.pages.held() * self.page_bytes;
        self.metrics.cache_bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    /// Fails every request that has not ended, and says why.
    fn refuse_all(&mut self, why: &str) {
        let error = ServiceError::new(ErrorCode::Unavailable, format!("cannot complete the answer: {why}"));
        for job in self.waiting.drain(..) {
            let _client_gone = job.events.try_send(Event::Failed(error.clone()));
        }
        while !self.running.is_empty() {
            self.take_out(0).fail(error.clone());
        }
        for paused in self.paused.drain(..) {
            paused.fail(error.clone());
        }
    }

    /// Sleeps until something arrives; connections go on meanwhile. False when nothing ever will.
    fn wait(&mut self) -> bool {
        let runtime = self.runtime.clone();
        let deadline = self.pending_switch.as_ref().map(PendingSwitch::deadline);
        let (jobs, switches) = (&mut self.jobs, &mut self.switches);
        let experts = &mut self.experts;
        let stop = self.stop.clone();
        let (job, switch) = runtime.block_on(async {
            let timeout = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                job = jobs.recv() => (job, None),
                // The control server may end before HTTP has drained: then no switch comes any more.
                Some(switch) = switches.recv() => (None, Some(switch)),
                () = experts.connections_changed() => (None, None),
                () = timeout => (None, None),
                () = stop.finish.cancelled() => (None, None),
                () = stop.halt.cancelled() => (None, None),
            }
        });
        let closed = job.is_none() && self.jobs.is_closed() && self.jobs.is_empty();
        job.into_iter().for_each(|job| self.wait_for(job));
        if let Some(switch) = switch {
            self.begin_switch(switch);
        }
        !closed
    }

    fn begin_switch(&mut self, switch: Switch) {
        let links = switch
            .endpoints
            .iter()
            .map(|(address, sets)| {
                self.next_link += 1;
                let expected = RemoteRequirements { sets: sets.clone(), ..self.expected.clone() };
                let events = self.link_events.clone();
                Link::open(&self.runtime, self.next_link, address.clone(), expected, events)
            })
            .collect();
        // Placements are brought into force one at a time, so none is pending.
        self.pending_switch = Some(PendingSwitch::new(switch, links));
    }

    fn settle_switch(&mut self) {
        // Links make progress only while the runtime is driven.
        self.runtime.block_on(tokio::task::yield_now());
        if let Some(pending) = self.pending_switch.take_if(|pending| pending.is_settled()) {
            let remote = pending.remote();
            let (placement, answer) = pending.settle();
            tracing::info!(
                generation = placement.generation,
                remote_functions = placement.links.len(),
                local_experts = placement.local.count(),
                "routing generation in force"
            );
            self.metrics.generation.set(placement.generation as i64);
            for (place, experts) in [("local", placement.local.count()), ("remote", remote)] {
                self.metrics.experts.with_label_values(&[place]).set(experts as i64);
            }
            self.attribution.set_links(placement.links.iter().map(Link::address), Instant::now());
            self.experts.switch(placement);
            answer();
        }
    }
}
