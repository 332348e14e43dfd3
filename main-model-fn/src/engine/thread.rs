use super::handle::{EngineHandle, Job, RequestLimits};
use super::request::{Event, InspectLevel};
use super::room::expected_pages;
use super::sampling::make_all;
use super::scheduler::{Pending, plan};
use super::sequence::{Running, Share, Vocabulary};
use super::setback::takes_part;
use super::switch::{PendingSwitch, Switch};
use crate::dispatch::{Expected, ExpertMetrics, ExpertParts, Experts, Followed, Link, LinkEvent};
use crate::metrics::EngineMetrics;
use crate::pages::Pages;
use crate::records::Recorder;
use crate::transformer::{ForwardError, Model, Segment};
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
            Err(error) => tracing::error!(%error, "the engine cannot start"),
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
            "the server is shutting down; the answer could not be completed",
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

    /// The rows of the next iteration, per request and sequence.
    fn plan(&self) -> Vec<Vec<usize>> {
        let setbacks: Vec<_> = self.running.iter().map(Running::setback).collect();
        let taking_part = takes_part(&setbacks, self.apart, Instant::now());
        let pending: Vec<Vec<Pending>> = (self.running.iter().zip(taking_part))
            .map(|(running, takes_part)| {
                let mut pending = running.pending(self.settings.prompt_chunk);
                if !takes_part {
                    pending.iter_mut().for_each(|pending| pending.rows = 0);
                }
                pending
            })
            .collect();
        let mut rows = plan(&pending.concat(), self.settings.iteration_rows).into_iter();
        pending.iter().map(|pending| rows.by_ref().take(pending.len()).collect()).collect()
    }

    /// The rows of the next iteration, with pages for them. Where there are not enough for all, the requests that were
    /// admitted last give way: they go on later from what is still kept of them then.
    fn make_room(&mut self) -> Vec<Vec<usize>> {
        loop {
            let rows = self.plan();
            let lacking: usize =
                self.running.iter().zip(&rows).map(|(running, rows)| running.lacking(rows)).sum();
            if self.pages.make_free(lacking) {
                for (running, rows) in self.running.iter_mut().zip(&rows) {
                    // Cannot fail: as many as they lack are free.
                    let _has_room = running.reserve(rows, &mut self.pages);
                }
                self.measure_caches();
                return rows;
            }
            let Some(mut last) = self.running.pop() else {
                return rows;
            };
            self.metrics.preemptions.inc();
            last.pause();
            if self.running.is_empty() {
                // What a request may come to hold was checked when it was submitted.
                last.fail(ServiceError::new(
                    ErrorCode::Internal,
                    "a request alone lacks room for its keys and values",
                ));
            } else {
                self.paused.push_front(last);
            }
        }
    }

    /// One forward for all rows, and a step for every request that took part. Never a part of another function's code:
    /// its instructions are counted by its name.
    #[inline(never)]
    fn iterate(&mut self) {
        let rows = self.make_room();
        self.apart = !self.apart;
        if self.running.is_empty() {
            return;
        }
        let inspect = self.running.iter().filter_map(|running| running.request().inspect).max();
        let counts = self.running.iter().any(Running::wants_routing);
        let trace = inspect.or(counts.then_some(InspectLevel::Routing));
        let followed = self.followed(&rows);
        let started = Instant::now();
        let mut segments: Vec<Segment<'_>> = Vec::new();
        // Per request: its segments' rows, and what is wanted of them.
        let mut shares = Vec::with_capacity(self.running.len());
        for (running, rows) in self.running.iter_mut().zip(&rows) {
            let mut lent = Vec::new();
            running.rows(rows, &mut lent);
            shares.push(Share::of(&lent));
            segments.extend(lent.into_iter().map(|rows| Segment {
                tokens: rows.tokens,
                cache: rows.cache,
                wanted: rows.wanted,
            }));
        }
        self.experts.follow(followed);
        let outcome = self.model.forward(&mut segments, &mut self.experts, trace);
        drop(segments);
        self.metrics.iterations.inc();
        self.metrics.rows.inc_by(shares.iter().map(|share| share.rows as u64).sum());
        self.metrics.iteration_seconds.observe(started.elapsed().as_secs_f64());
        let passed = self.attribution.passed(Instant::now());
        self.note_calls(&shares);
        match outcome {
            Ok(output) => {
                let rows = shares.iter().map(|share| share.rows);
                self.attribution.share(passed, &mut self.running, rows, self.experts.pairs());
                self.advance(output, &shares);
            }
            Err(error) => self.set_back(&shares, error, started),
        }
    }

    /// The traced requests among those with `rows` in the iteration, one entry per sequence.
    fn followed(&mut self, rows: &[Vec<usize>]) -> Vec<Followed> {
        let links = &self.experts.placement().links;
        let (mut followed, mut first) = (Vec::new(), 0);
        for (request, (running, rows)) in self.running.iter_mut().zip(rows).enumerate() {
            let rows = first..first + rows.iter().sum::<usize>();
            first = rows.end;
            if let Some(spans) = running.spans.as_mut().filter(|_| !rows.is_empty()) {
                let contexts = links.iter().map(|link| spans.context(link.address())).collect();
                followed.push(Followed { request, rows, contexts, told: vec![None; links.len()] });
            }
        }
        followed
    }

    /// Tells the spans of requests what was asked of remote functions for them, whether the iteration succeeded or not.
    fn note_calls(&mut self, shares: &[Share]) {
        for followed in self.experts.take_followed() {
            let spans = self.running.get_mut(followed.request).and_then(|running| running.spans.as_mut());
            let Some(spans) = spans else { continue };
            for (link, told) in self.experts.placement().links.iter().zip(followed.told) {
                told.into_iter().for_each(|at| spans.told(link.address(), at));
            }
        }
        let (pairs, links) = (self.experts.pairs(), &self.experts.placement().links);
        let all = 0..shares.iter().map(|share| share.rows).sum();
        for (link, calls) in self.experts.calls().iter().enumerate().filter(|(_, calls)| calls.is_any()) {
            let all = pairs.of(link, all.clone());
            let mut first = 0;
            for (running, share) in self.running.iter_mut().zip(shares) {
                let rows = first..first + share.rows;
                first = rows.end;
                let own = pairs.of(link, rows);
                // Where nothing was answered nobody knows whose the messages were: of all that took part.
                let took_part = own > 0 || (all == 0 && share.rows > 0);
                if let Some(spans) = running.spans.as_mut().filter(|_| took_part) {
                    spans.asked(links[link].address(), calls, own, all);
                }
            }
        }
    }

    fn advance(&mut self, output: crate::transformer::Output, shares: &[Share]) {
        let mut logits = output.logits.as_slice();
        let parts: Vec<&[f32]> = shares
            .iter()
            .map(|share| {
                let (these, others) = logits.split_at(share.logits * output.vocab);
                logits = others;
                these
            })
            .collect();
        let hidden = self.model.hidden();
        let mut states = output.states.as_slice();
        for (running, share) in self.running.iter_mut().zip(shares) {
            let (these, others) = states.split_at(share.states * hidden);
            running.add_states(these, hidden);
            states = others;
        }
        let mut draws = Vec::new();
        let mut counts = Vec::with_capacity(shares.len());
        for ((running, share), logits) in self.running.iter_mut().zip(shares).zip(&parts) {
            let drawn = match share.rows {
                0 => 0,
                _ => running.draws(logits, output.vocab, &mut draws),
            };
            counts.push(drawn);
        }
        let mut outcomes = make_all(draws, &self.pool).into_iter();
        let mut first = 0;
        let running = std::mem::take(&mut self.running);
        for (((mut running, share), logits), drawn) in running.into_iter().zip(shares).zip(parts).zip(counts)
        {
            if share.rows == 0 {
                self.running.push(running);
                continue;
            }
            let outcomes = outcomes.by_ref().take(drawn).collect();
            let tally = &self.experts.tally()[first..first + share.rows];
            running.count(tally, self.experts.time(), output.trace.as_ref(), first);
            if let Some(trace) = &output.trace {
                running.keep_trace(trace, first, share.rows, self.row_bytes);
            }
            first += share.rows;
            running.keep(&mut self.pages);
            match running.step(logits, outcomes, output.vocab, &self.vocabulary, self.model.as_mut()) {
                Ok(true) => {
                    if let (Some(recorder), Some(recording)) = (&self.recorder, running.into_recording()) {
                        recorder.finish(recording);
                    }
                }
                Ok(false) => self.running.push(running),
                Err(error) => running.fail(error.into()),
            }
        }
    }

    /// After a failed iteration, which has changed nothing. Where weights were out of reach it is done
    /// again, without those that need them or with those only, who fail once that has gone on for too
    /// long; after anything else its requests fail.
    fn set_back(&mut self, shares: &[Share], error: ForwardError, started: Instant) {
        let out_of_reach = error.out_of_reach(shares.iter().map(|share| share.rows).sum());
        tracing::error!(%error, again = out_of_reach.is_some(), "iteration failed");
        let error = ServiceError::from(error);
        let mut first = 0;
        let running = std::mem::take(&mut self.running);
        for (mut running, share) in running.into_iter().zip(shares) {
            let rows = first..first + share.rows;
            first = rows.end;
            let goes_on = match &out_of_reach {
                _ if rows.is_empty() => true,
                None => false,
                Some(out_of_reach) => {
                    !out_of_reach.iter().any(|row| rows.contains(row)) || running.set_back(started)
                }
            };
            match goes_on {
                true => self.running.push(running),
                false => running.fail(error.clone()),
            }
        }
        self.metrics.repeated.inc_by(u64::from(!self.running.is_empty()));
    }
}
