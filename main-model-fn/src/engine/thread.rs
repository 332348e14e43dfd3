//! The engine's thread: who comes, who waits, and what goes on between two iterations.

mod iteration;

use super::handle::{EngineHandle, Job, RequestLimits};
use super::request::Event;
use super::room::expected_pages;
use super::sequence::{Running, Vocabulary};
use super::switch::{PendingSwitch, Switch};
use crate::dispatch::{Expected, ExpertMetrics, ExpertParts, Experts, Link, LinkEvent};
use crate::metrics::EngineMetrics;
use crate::pages::Pages;
use crate::records::Recorder;
use crate::transformer::Model;
use remoe_kernels::{NumericsClass, Pool};
use remoe_ledger::Attribution;
use remoe_model::Checkpoint;
use remoe_wire::{ErrorCode, ServiceError};
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
    /// Rows of one iteration.
    pub(crate) iteration_rows: usize,
    /// Positions beyond its known tokens that a sequence is thought to need soon, when it is decided
    /// whether another request can start beside it.
    pub(crate) headroom: usize,
    /// Rows of one prompt in one iteration.
    pub(crate) prompt_chunk: usize,
    /// Bytes of experts held because no replica answered.
    pub(crate) fallback_bytes: usize,
    /// How long the engine polls for answers before it sleeps.
    pub(crate) poll: Duration,
}

/// What the engine is made of.
pub(crate) struct EngineParts {
    pub(crate) model: Box<dyn Model>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) checkpoint: Arc<Checkpoint>,
    /// What experts are computed as; everything else in its dtype.
    pub(crate) class: NumericsClass,
    pub(crate) vocabulary: Vocabulary,
    /// What remote functions must agree on, sets left empty.
    pub(crate) expected: Expected,
    pub(crate) expert_metrics: ExpertMetrics,
    pub(crate) metrics: EngineMetrics,
    /// Where activations are recorded.
    pub(crate) recorder: Option<Recorder>,
}

/// What ends the engine.
#[derive(Clone, Default)]
pub(crate) struct EngineStop {
    /// It ends once its requests are done. An engine that ends otherwise (a panic) cancels this.
    pub(crate) finish: CancellationToken,
    /// It fails its requests and ends, between two iterations.
    pub(crate) halt: CancellationToken,
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
    expected: Expected,
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
    paused: VecDeque<Running>,
    /// In the order of admission.
    running: Vec<Running>,
    /// Whether those of them that were set back take their turn next.
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
            pages: Pages::new(settings.limits.cache_pages),
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
                self.refuse_all();
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
                self.attribution.rested(Instant::now());
                continue;
            }
            if let Some(until) = self.resting() {
                self.rest(until);
                continue;
            }
            self.iterate();
        }
    }

    /// Until when every request that runs rests after a failed iteration.
    fn resting(&self) -> Option<Instant> {
        let until = |running: &Running| running.setback().map(|setback| setback.until);
        let first = self.running.iter().map(until).min().flatten();
        first.filter(|&first| first > Instant::now())
    }

    /// Lets connections go on, until `until` at most.
    fn rest(&mut self, until: Instant) {
        /// What arrives for the engine is noticed after so long.
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
            self.waiting.push_back(job);
        }
        while let Ok(switch) = self.switches.try_recv() {
            self.begin_switch(switch);
        }
        // Requests whose client has gone give their slots back, running or not.
        self.waiting.retain(|job| !job.events.is_closed());
        self.paused.retain(|paused| !paused.is_abandoned());
        self.running.retain(|running| !running.is_abandoned());
        self.metrics.waiting.set((self.waiting.len() + self.paused.len()) as i64);
        self.metrics.running.set(self.running.len() as i64);
        self.measure_caches();
    }

    /// Pages that running requests hold.
    fn held_pages(&self) -> usize {
        self.pages.held(self.running.iter().flat_map(Running::caches))
    }

    fn measure_caches(&self) {
        let bytes = self.held_pages() * self.page_bytes;
        self.metrics.cache_bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    /// Fails every request that has not ended.
    fn refuse_all(&mut self) {
        let error = ServiceError::new(
            ErrorCode::Unavailable,
            "cannot complete the answer: the server is shutting down",
        );
        for job in self.waiting.drain(..) {
            let _client_gone = job.events.try_send(Event::Failed(error.clone()));
        }
        for running in self.running.drain(..).chain(self.paused.drain(..)) {
            running.fail(error.clone());
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
        self.waiting.extend(job);
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
                let expected = Expected { sets: sets.clone(), ..self.expected.clone() };
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
            self.attribution.switched(placement.links.iter().map(Link::address), Instant::now());
            self.experts.switch(placement);
            answer();
        }
    }

    /// Starts waiting requests, in order, while batch and cache have room and experts are placed.
    fn admit(&mut self) {
        // What comes before the first placement waits for it; HTTP takes nothing until then.
        if self.experts.placement().generation == 0 {
            return;
        }
        loop {
            let headroom = self.settings.headroom;
            let paused = self.paused.front().map(|it| (it.request().choices, it.growth(headroom)));
            let waiting = || {
                let request = &self.waiting.front()?.request;
                Some((request.choices, expected_pages(request, headroom)))
            };
            let Some((choices, pages)) = paused.or_else(waiting) else {
                return;
            };
            let batch: usize = self.running.iter().map(|running| running.request().choices).sum();
            let growth: usize = self.running.iter().map(|running| running.growth(headroom)).sum();
            let fits = batch + choices <= self.settings.max_batch
                && self.held_pages() + growth + pages <= self.pages.limit();
            if !fits && !self.running.is_empty() {
                return;
            }
            let next = match self.paused.pop_front() {
                Some(paused) => Some(paused),
                None => self.waiting.pop_front().map(|job| {
                    let recording =
                        self.recorder.as_ref().map(|recorder| recorder.begin(&job.request.prompt));
                    Running::new(job, &self.vocabulary, recording, Instant::now())
                }),
            };
            if let Some(mut next) = next {
                next.begin(&mut self.pages);
                let (asked, found) = next.prefix();
                self.metrics.prefix_tokens.inc_by(asked as u64);
                self.metrics.prefix_tokens_found.inc_by(found as u64);
                self.running.push(next);
            }
        }
    }
}
