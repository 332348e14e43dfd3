//! The engine's thread: its state and main loop.

mod admission;
mod iteration;
mod memory;
mod prefill;

use super::active_request::{ActiveRequest, Vocabulary};
use super::handle::{EngineHandle, QueuedRequest, RequestLimits};
use super::pace::PrefillPace;
use super::request::Event;
use super::scheduler::PrefillOrder;
use super::switch::{PendingSwitch, Switch};
use crate::dispatch::{
    DispatcherParts, ExpertDispatcher, ExpertMetrics, Link, LinkEvent, RemoteRequirements,
};
use crate::metrics::EngineMetrics;
use crate::pages::KvPagePool;
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

/// Settings of the engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EngineSettings {
    pub(crate) limits: RequestLimits,
    /// Most sequences that run at the same time.
    pub(crate) max_batch: usize,
    /// Target inter-token latency while prompts advance; `None`: a multiple of a decode iteration.
    pub(crate) target_itl: Option<Duration>,
    /// Positions beyond its known tokens that admission expects a sequence to need soon.
    pub(crate) headroom: usize,
    /// Limit of the memory for fallback experts, in bytes.
    pub(crate) fallback_bytes: usize,
    /// Time for which the engine polls for answers before it sleeps.
    pub(crate) poll: Duration,
}

/// Parts that the engine is assembled from.
pub(crate) struct EngineParts {
    pub(crate) model: Box<dyn Model>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) checkpoint: Arc<Checkpoint>,
    /// Numerics of the experts. Everything else is computed in its dtype.
    pub(crate) class: NumericsClass,
    pub(crate) vocabulary: Vocabulary,
    /// Properties that remote functions must have; the sets of experts are filled in per endpoint.
    pub(crate) expected: RemoteRequirements,
    pub(crate) expert_metrics: ExpertMetrics,
    pub(crate) metrics: EngineMetrics,
    /// Recorder of activations, if they are recorded.
    pub(crate) recorder: Option<Recorder>,
}

/// Signals between the engine and the process.
#[derive(Clone, Default)]
pub(crate) struct EngineStop {
    /// Cancelled to end the engine once its requests are done (draining). An engine that ends by itself cancels it, too.
    pub(crate) finish: CancellationToken,
    /// Cancelled to end the engine after the current iteration. It fails the remaining requests.
    pub(crate) halt: CancellationToken,
    /// Cancelled by the engine if its device stopped answering. The engine then fails its requests and ends.
    pub(crate) device_lost: CancellationToken,
}

/// Starts the engine's thread. It ends by a signal of `stop`, or when all handles are dropped.
pub(crate) fn start(
    settings: EngineSettings,
    parts: EngineParts,
    stop: EngineStop,
) -> io::Result<(EngineHandle, mpsc::UnboundedSender<Switch>, JoinHandle<()>)> {
    let (handle, queue) = EngineHandle::new(settings.limits);
    let (switch_sender, switches) = mpsc::unbounded_channel();
    let guard = stop.finish.clone().drop_guard();
    // Built here rather than on the thread, so that the caller gets the error.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
        let _cancels_finish_at_the_end = guard;
        parts.model.enter_thread();
        match Engine::new(settings, parts, runtime, queue, switches, stop) {
            Ok(engine) => engine.run(),
            Err(error) => tracing::error!(%error, "engine start failed"),
        }
    })?;
    Ok((handle, switch_sender, thread))
}

/// State of the engine's thread.
struct Engine {
    settings: EngineSettings,
    model: Box<dyn Model>,
    pages: KvPagePool,
    page_bytes: usize,
    pool: Arc<Pool>,
    vocabulary: Vocabulary,
    experts: ExpertDispatcher,
    expected: RemoteRequirements,
    metrics: EngineMetrics,
    recorder: Option<Recorder>,
    runtime: Rc<Runtime>,
    queue: mpsc::UnboundedReceiver<QueuedRequest>,
    switches: mpsc::UnboundedReceiver<Switch>,
    link_events: mpsc::UnboundedSender<LinkEvent>,
    pending_switch: Option<PendingSwitch>,
    last_link_id: u64,
    waiting: VecDeque<QueuedRequest>,
    /// Preempted requests, in the order of admission. They are admitted again before waiting ones.
    paused: VecDeque<ActiveRequest>,
    /// Running requests, in the order of admission.
    running: Vec<ActiveRequest>,
    /// Id of the last admitted request.
    last_request_id: u64,
    /// Layered prefills under way, in the order of their beginnings.
    prefills: Vec<Prefill>,
    last_prefill_id: u64,
    memory_limits: MemoryLimits,
    prefill_order: PrefillOrder,
    pace: PrefillPace,
    /// True if requests that retry after a failed iteration go first in the next one.
    prefer_retries: bool,
    stop: EngineStop,
    row_bytes: usize,
    attribution: Attribution,
}

impl Engine {
    fn new(
        settings: EngineSettings,
        parts: EngineParts,
        runtime: Runtime,
        queue: mpsc::UnboundedReceiver<QueuedRequest>,
        switches: mpsc::UnboundedReceiver<Switch>,
        stop: EngineStop,
    ) -> io::Result<Self> {
        let runtime = Rc::new(runtime);
        let (link_events, received_link_events) = mpsc::unbounded_channel();
        let hidden = parts.model.hidden();
        let experts = ExpertDispatcher::new(DispatcherParts {
            runtime: runtime.clone(),
            pool: parts.pool.clone(),
            class: parts.class,
            hidden,
            checkpoint: parts.checkpoint,
            link_events: received_link_events,
            fallback_bytes: settings.fallback_bytes,
            poll: settings.poll,
            metrics: parts.expert_metrics,
        })?;
        Ok(Self {
            settings,
            pages: KvPagePool::new(settings.limits.cache_pages, settings.limits.page_needs),
            page_bytes: parts.model.page_bytes(),
            model: parts.model,
            pool: parts.pool,
            vocabulary: parts.vocabulary,
            experts,
            expected: parts.expected,
            metrics: parts.metrics,
            recorder: parts.recorder,
            runtime,
            queue,
            switches,
            link_events,
            pending_switch: None,
            last_link_id: 0,
            waiting: VecDeque::new(),
            paused: VecDeque::new(),
            running: Vec::new(),
            last_request_id: 0,
            prefills: Vec::new(),
            last_prefill_id: 0,
            memory_limits: MemoryLimits::new(settings.max_batch),
            prefill_order: PrefillOrder::default(),
            pace: PrefillPace::default(),
            prefer_retries: false,
            stop,
            row_bytes: hidden * parts.class.dtype.bytes(),
            attribution: Attribution::new(Instant::now()),
        })
    }

    /// Runs the engine until it is stopped.
    fn run(mut self) {
        loop {
            self.receive();
            if self.stop.halt.is_cancelled() {
                self.fail_all("the server is shutting down");
                return;
            }
            if self.stop.device_lost.is_cancelled() {
                self.fail_all("the device is lost; retry later");
                return;
            }
            self.settle_switch();
            self.admit();
            if self.running.is_empty() {
                if self.stop.finish.is_cancelled() && self.waiting.is_empty() {
                    return;
                }
                if !self.wait_for_work() {
                    return;
                }
                self.attribution.record_idle(Instant::now());
                continue;
            }
            if let Some(until) = self.next_retry() {
                self.drive_links_until(until);
                continue;
            }
            let decoded = self.iterate();
            if !self.prefill() && !decoded && !self.running.is_empty() {
                // All requests that could advance wait for others.
                self.drive_links_until(Instant::now() + Duration::from_millis(1));
            }
        }
    }

    /// Returns the time of the next retry, if every running request waits for one after a failed iteration.
    fn next_retry(&self) -> Option<Instant> {
        let retry = |running: &ActiveRequest| match &running.prefill {
            Some(_) => None,
            None => running.failure_backoff().map(|backoff| backoff.until),
        };
        let first = self.running.iter().map(retry).min().flatten();
        first.filter(|&first| first > Instant::now())
    }

    /// Drives the connections until `until`, for a short time at most.
    fn drive_links_until(&mut self, until: Instant) {
        /// Longest time until arrivals for the engine are noticed.
        const SLICE: Duration = Duration::from_millis(20);
        let until = until.min(Instant::now() + SLICE);
        let experts = &mut self.experts;
        // Ends early if a connection changes, as its remote function may be back.
        self.runtime.block_on(async {
            let _changed = tokio::time::timeout_at(until.into(), experts.connections_changed()).await;
        });
    }

    /// Receives arrivals without waiting, and drops requests that are abandoned or overdue.
    fn receive(&mut self) {
        while let Ok(queued) = self.queue.try_recv() {
            self.enqueue(queued);
        }
        while let Ok(switch) = self.switches.try_recv() {
            self.begin_switch(switch);
        }
        // Requests whose client is gone release their permits.
        self.waiting.retain(|queued| !queued.events.is_closed());
        self.paused.retain(|paused| !paused.is_abandoned());
        while let Some(index) = self.running.iter().position(ActiveRequest::is_abandoned) {
            drop(self.take_out(index));
        }
        self.fail_overdue(Instant::now());
        self.metrics.waiting.set((self.waiting.len() + self.paused.len()) as i64);
        self.metrics.running.set(self.running.len() as i64);
        self.metrics.batch_limit.set(i64::try_from(self.memory_limits.max_batch()).unwrap_or(i64::MAX));
        self.record_cache_bytes();
    }

    /// Removes a running request, also from its prefill.
    fn take_out(&mut self, index: usize) -> ActiveRequest {
        self.leave_prefill(index);
        self.running.remove(index)
    }

    fn record_cache_bytes(&self) {
        let bytes = self.pages.held_pages() * self.page_bytes;
        self.metrics.cache_bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    /// Fails all requests for the reason `why`.
    fn fail_all(&mut self, why: &str) {
        let error = ServiceError::new(ErrorCode::Unavailable, format!("cannot complete the answer: {why}"));
        for queued in self.waiting.drain(..) {
            let _client_gone = queued.events.try_send(Event::Failed(error.clone()));
        }
        while !self.running.is_empty() {
            self.take_out(0).fail(error.clone());
        }
        for paused in self.paused.drain(..) {
            paused.fail(error.clone());
        }
    }

    /// Waits for arrivals while connections make progress. Returns false if nothing can arrive any more.
    fn wait_for_work(&mut self) -> bool {
        let runtime = self.runtime.clone();
        let deadline = self.pending_switch.as_ref().map(PendingSwitch::deadline);
        let (queue, switches) = (&mut self.queue, &mut self.switches);
        let experts = &mut self.experts;
        let stop = self.stop.clone();
        let (queued, switch) = runtime.block_on(async {
            let timeout = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                queued = queue.recv() => (queued, None),
                // The control server may end before HTTP has drained: then no switch arrives any more.
                Some(switch) = switches.recv() => (None, Some(switch)),
                () = experts.connections_changed() => (None, None),
                () = timeout => (None, None),
                () = stop.finish.cancelled() => (None, None),
                () = stop.halt.cancelled() => (None, None),
            }
        });
        let is_closed = queued.is_none() && self.queue.is_closed() && self.queue.is_empty();
        queued.into_iter().for_each(|queued| self.enqueue(queued));
        if let Some(switch) = switch {
            self.begin_switch(switch);
        }
        !is_closed
    }

    /// Opens the links of the next routing generation.
    fn begin_switch(&mut self, switch: Switch) {
        let links = switch
            .endpoints
            .iter()
            .map(|(address, sets)| {
                self.last_link_id += 1;
                let expected = RemoteRequirements { sets: sets.clone(), ..self.expected.clone() };
                let events = self.link_events.clone();
                Link::open(&self.runtime, self.last_link_id, address.clone(), expected, events)
            })
            .collect();
        // The caller switches one generation at a time, so none is pending.
        self.pending_switch = Some(PendingSwitch::new(switch, links));
    }

    /// Puts the pending generation in force once its links are settled.
    fn settle_switch(&mut self) {
        // Links make progress only while the runtime is driven.
        self.runtime.block_on(tokio::task::yield_now());
        if let Some(pending) = self.pending_switch.take_if(|pending| pending.is_settled()) {
            let remote = pending.remote_experts();
            let (placement, report) = pending.settle();
            tracing::info!(
                generation = placement.generation,
                remote_functions = placement.links.len(),
                local_experts = placement.local.count(),
                "routing generation in force"
            );
            self.metrics.generation.set(placement.generation as i64);
            for (location, experts) in [("local", placement.local.count()), ("remote", remote)] {
                self.metrics.experts.with_label_values(&[location]).set(experts as i64);
            }
            self.attribution.set_links(placement.links.iter().map(Link::address), Instant::now());
            self.experts.switch(placement);
            report();
        }
    }
}
