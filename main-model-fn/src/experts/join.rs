//! One layer call: what is outstanding, and what is done about answers that fail or stay away.

use super::error::ExpertError;
use super::fallback::{Fallback, Loaded, Loader};
use super::link::LinkEvent;
use super::metrics::ExpertMetrics;
use super::placement::Placement;
use super::reduce::{ExpertRows, reduce};
use super::routing::Routed;
use super::split::{Message, messages, remote_slots, split};
use crate::engine::request::ExpertTally;
use bytes::Bytes;
use remoe_kernels::{Dtype, Job, PackedExpert, Pool};
use remoe_wire::v1::{Cancel, Code, ForwardReply, ForwardRequest, Work};
use remoe_wire::v1::{forward_reply::Outcome, forward_request::Body};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// One attempt at a replica.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(2);
/// All attempts at a layer, local load included.
const LAYER_LIMIT: Duration = Duration::from_secs(10);
/// Messages have left when the socket has taken them; a peer that reads slowly must not keep the
/// local kernels waiting for longer than this.
const LEAVE_LIMIT: Duration = Duration::from_millis(20);
/// Up to this many tokens a call counts as decoding and goes to one replica.
const DECODE_TOKENS: usize = 16;
/// How long the engine polls for answers before it sleeps: waking a thread costs ten times a
/// loopback exchange.
const POLL: Duration = Duration::from_micros(100);

/// One call of a layer.
pub(crate) struct LayerCall<'a> {
    /// The model's layer id.
    pub(crate) layer: usize,
    /// tokens x hidden elements, compute dtype, little endian.
    pub(crate) inputs: &'a [u8],
    /// Which experts for which token.
    pub(crate) routed: &'a Routed,
}

/// The experts of the model, local and remote.
pub(crate) struct Experts {
    runtime: Rc<Runtime>,
    pool: Pool,
    dtype: Dtype,
    hidden: usize,
    placement: Placement,
    link_events: mpsc::UnboundedReceiver<LinkEvent>,
    loaded: mpsc::UnboundedReceiver<Loaded>,
    loader: Loader,
    fallback: Fallback,
    next_id: u64,
    rotation: usize,
    metrics: ExpertMetrics,
    tally: Vec<ExpertTally>,
    local_rows: Vec<u8>,
}

/// A message that waits for its answer.
struct Part {
    message: Message,
    /// Index of the link in the placement.
    link: usize,
    tried: BTreeSet<usize>,
    deadline: Instant,
}

/// The remote half of a layer call.
#[derive(Default)]
struct Outstanding {
    parts: HashMap<u64, Part>,
    /// Answers: each slot's buffer and row in it.
    answers: Vec<(Bytes, Vec<u32>)>,
    /// Slots that no replica will answer.
    orphans: Vec<u32>,
}

/// Where the engine's links and loads report.
pub(crate) struct Inlets {
    pub(crate) link_events: mpsc::UnboundedReceiver<LinkEvent>,
    pub(crate) loaded: mpsc::UnboundedReceiver<Loaded>,
}

impl Experts {
    pub(crate) fn new(
        runtime: Rc<Runtime>,
        pool: Pool,
        dtype: Dtype,
        hidden: usize,
        loader: Loader,
        inlets: Inlets,
        fallback_bytes: usize,
        metrics: ExpertMetrics,
    ) -> Self {
        Self {
            runtime,
            pool,
            dtype,
            hidden,
            placement: Placement::default(),
            link_events: inlets.link_events,
            loaded: inlets.loaded,
            loader,
            fallback: Fallback::new(fallback_bytes),
            next_id: 0,
            rotation: 0,
            metrics,
            tally: Vec::new(),
            local_rows: Vec::new(),
        }
    }

    /// Puts a routing generation in force; the old one's links close.
    pub(crate) fn switch(&mut self, placement: Placement) {
        self.placement = placement;
        self.rotation = 0;
    }

    pub(crate) fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Starts counting for an iteration of `rows` rows.
    pub(crate) fn begin_iteration(&mut self, rows: usize) {
        self.tally.clear();
        self.tally.resize(rows, ExpertTally::default());
    }

    /// Where the experts of each row of the iteration were computed, all layers together.
    pub(crate) fn tally(&self) -> &[ExpertTally] {
        &self.tally
    }

    /// Computes one layer. `shared` gives the shared experts' rows, if the layer has some; it runs
    /// while remote functions work. Writes tokens x hidden elements to `output`.
    ///
    /// # Errors
    /// No replica and no local load delivered in time, or the kernels refuse.
    pub(crate) fn forward<E: From<ExpertError>>(
        &mut self,
        call: &LayerCall<'_>,
        shared: impl FnOnce() -> Result<Option<Vec<u8>>, E>,
        output: &mut [u8],
    ) -> Result<(), E> {
        let deadline = Instant::now() + LAYER_LIMIT;
        self.discard_stale_events();
        let layer = call.layer;
        let slots = remote_slots(call.routed, |expert| self.placement.is_remote(layer, expert));
        let mut outstanding = self.dispatch(call, &slots);
        let shared = shared()?;
        let mut local_rows = std::mem::take(&mut self.local_rows);
        tracing::trace!(layer, "local kernels start");
        let local = self.compute_local(call, &mut local_rows)?;
        tracing::trace!(layer, "local kernels done");
        self.collect(call, &mut outstanding, deadline)?;
        let fallback = self.compute_orphans(call, &outstanding.orphans, deadline)?;
        let row_bytes = self.row_bytes();
        let empty: &[u8] = &[];
        let mut rows = vec![empty; call.routed.experts.len()];
        place(&mut rows, &local, &local_rows, row_bytes);
        place(&mut rows, &fallback.0, &fallback.1, row_bytes);
        for (bytes, slots) in &outstanding.answers {
            place(&mut rows, slots, bytes, row_bytes);
        }
        let rows = ExpertRows { rows: &rows, dtype: self.dtype, hidden: self.hidden };
        reduce(call.routed, &rows, shared.as_deref(), output);
        self.local_rows = local_rows;
        Ok(())
    }

    fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.bytes()
    }

    /// Returns when a connection has changed or an answer has come that nobody waits for. For the
    /// time between requests.
    pub(crate) async fn connections_changed(&mut self) {
        // The sending halves live as long as the links and this end of the engine.
        if self.link_events.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
    }

    /// Answers and failures of earlier calls have no one waiting for them.
    fn discard_stale_events(&mut self) {
        while self.link_events.try_recv().is_ok() {}
        while let Ok(loaded) = self.loaded.try_recv() {
            self.keep(loaded).ok();
        }
    }

    /// Sends the remote pairs on their way and sees them leave.
    fn dispatch(&mut self, call: &LayerCall<'_>, slots: &[u32]) -> Outstanding {
        let mut outstanding = Outstanding::default();
        if slots.is_empty() {
            return outstanding;
        }
        let ready = self.candidates(call.layer, &BTreeSet::new());
        if ready.is_empty() {
            outstanding.orphans = slots.to_vec();
            return outstanding;
        }
        let parts = if call.routed.tokens() <= DECODE_TOKENS {
            vec![slots.to_vec()]
        } else {
            split(call.routed, slots, ready.len())
        };
        let before: Vec<u64> = self.placement.links.iter().map(|link| link.written()).collect();
        let mut payload = vec![0_u64; before.len()];
        for (part, &link) in parts.iter().zip(&ready) {
            for message in messages(call.routed, part, call.inputs, self.row_bytes()) {
                payload[link] += message.rows.len() as u64;
                self.send(call, message, BTreeSet::new(), &mut outstanding, Some(link));
            }
        }
        self.see_off(&before, &payload);
        outstanding
    }

    /// Ready links that serve `layer` and are not in `tried`, rotated from call to call so that
    /// replicas share the decoding.
    fn candidates(&mut self, layer: usize, tried: &BTreeSet<usize>) -> Vec<usize> {
        let links = &self.placement.links;
        let mut ready: Vec<usize> = (0..links.len())
            .filter(|index| !tried.contains(index))
            .filter(|&index| links[index].serves(layer as u32) && links[index].is_ready())
            .collect();
        self.rotation = self.rotation.wrapping_add(1);
        if !ready.is_empty() {
            let turn = self.rotation % ready.len();
            ready.rotate_left(turn);
        }
        ready
    }

    /// Sends `message` to `link`, or to the next replica that takes it; without any, its slots
    /// become orphans.
    fn send(
        &mut self,
        call: &LayerCall<'_>,
        message: Message,
        mut tried: BTreeSet<usize>,
        outstanding: &mut Outstanding,
        mut link: Option<usize>,
    ) {
        loop {
            let Some(index) = link.or_else(|| self.candidates(call.layer, &tried).first().copied()) else {
                outstanding.orphans.extend(&message.slots);
                return;
            };
            tried.insert(index);
            link = None;
            self.next_id += 1;
            let id = self.next_id;
            let work = Work {
                id,
                generation: self.placement.generation,
                layer: call.layer as u32,
                budget_us: ATTEMPT_LIMIT.as_micros() as u32,
                rows: message.rows.clone(),
                counts: message.counts.clone(),
                experts: message.experts.clone(),
            };
            if self.placement.links[index].send(ForwardRequest { body: Some(Body::Work(work)) }) {
                self.metrics.messages.inc();
                let deadline = Instant::now() + ATTEMPT_LIMIT;
                let part = Part { message, link: index, tried, deadline };
                outstanding.parts.insert(id, part);
                return;
            }
        }
    }

    /// Drives the connections until the messages have left this process.
    fn see_off(&self, before: &[u64], payload: &[u64]) {
        let limit = Instant::now() + LEAVE_LIMIT;
        let links = &self.placement.links;
        self.runtime.block_on(async {
            let left = |index: usize| links[index].written() >= before[index] + payload[index];
            while !(0..links.len())
                .all(|index| payload[index] == 0 || left(index) || !links[index].is_ready())
                && Instant::now() < limit
            {
                tokio::task::yield_now().await;
            }
        });
    }

    /// Runs the local kernels. Returns the slots of the rows written to `rows`, in order.
    fn compute_local(&mut self, call: &LayerCall<'_>, rows: &mut Vec<u8>) -> Result<Vec<u32>, ExpertError> {
        let mut by_expert: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (slot, &expert) in (0..).zip(&call.routed.experts) {
            if !self.placement.is_remote(call.layer, expert) {
                by_expert.entry(expert).or_default().push(slot);
            }
        }
        let mut work = Vec::with_capacity(by_expert.len());
        for (expert, slots) in by_expert {
            let packed = self.placement.local.get(call.layer, expert).ok_or(ExpertError::Unplaced {
                layer: call.layer,
                expert,
                generation: self.placement.generation,
            })?;
            work.push((packed.clone(), slots));
        }
        let slots = self.compute(call, &work, rows)?;
        for &slot in &slots {
            self.tally[slot as usize / call.routed.top_k].local += 1;
        }
        self.metrics.pairs.with_label_values(&["local"]).inc_by(slots.len() as u64);
        Ok(slots)
    }

    /// Computes each packed expert for its slots; rows land in `rows` in the order that is returned.
    fn compute(
        &mut self,
        call: &LayerCall<'_>,
        work: &[(Arc<PackedExpert>, Vec<u32>)],
        rows: &mut Vec<u8>,
    ) -> Result<Vec<u32>, ExpertError> {
        let row_bytes = self.row_bytes();
        let slots: Vec<u32> = work.iter().flat_map(|(_, slots)| slots.iter().copied()).collect();
        let tokens: Vec<u32> = slots.iter().map(|&slot| slot / call.routed.top_k as u32).collect();
        rows.resize(slots.len() * row_bytes, 0);
        let mut jobs = Vec::with_capacity(work.len());
        let (mut tokens, mut output) = (tokens.as_slice(), rows.as_mut_slice());
        for (expert, slots) in work {
            let (these, others) = tokens.split_at(slots.len());
            let (this, other) = output.split_at_mut(slots.len() * row_bytes);
            jobs.push(Job { expert, inputs: call.inputs, row_index: these, output: this });
            (tokens, output) = (others, other);
        }
        if !jobs.is_empty() {
            self.pool
                .forward(&mut jobs)
                .map_err(|source| ExpertError::Kernel { layer: call.layer, source })?;
        }
        Ok(slots)
    }

    /// Waits for answers; failed ones are sent to the next replica, lost ones become orphans.
    fn collect(
        &mut self,
        call: &LayerCall<'_>,
        outstanding: &mut Outstanding,
        deadline: Instant,
    ) -> Result<(), ExpertError> {
        let started = Instant::now();
        while !outstanding.parts.is_empty() {
            let now = Instant::now();
            if now >= deadline {
                return Err(
                    self.late(call, outstanding.parts.values().map(|part| part.message.slots.len()).sum())
                );
            }
            let next = outstanding.parts.values().map(|part| part.deadline).fold(deadline, Instant::min);
            match self.next_link_event(started + POLL, next) {
                Some(LinkEvent::Reply(reply)) => self.take_reply(call, reply, outstanding),
                Some(LinkEvent::Broken { link, message }) => {
                    let lost = self.parts_on(outstanding, |part, links| links[part.link].id() == link);
                    self.retry(call, lost, outstanding, &message);
                }
                Some(LinkEvent::Settled) => (),
                None => self.expire(call, outstanding),
            }
        }
        self.metrics.wait.observe(started.elapsed().as_secs_f64());
        Ok(())
    }

    fn late(&self, call: &LayerCall<'_>, missing: usize) -> ExpertError {
        ExpertError::Deadline { layer: call.layer, missing, limit: LAYER_LIMIT }
    }

    /// The next event, polled for until `poll_until`, then slept for until `deadline`.
    fn next_link_event(&mut self, poll_until: Instant, deadline: Instant) -> Option<LinkEvent> {
        let events = &mut self.link_events;
        self.runtime.block_on(async {
            loop {
                if let Ok(event) = events.try_recv() {
                    return Some(event);
                }
                if Instant::now() >= poll_until.min(deadline) {
                    break;
                }
                tokio::task::yield_now().await;
            }
            tokio::time::timeout_at(deadline.into(), events.recv()).await.ok().flatten()
        })
    }

    fn take_reply(&mut self, call: &LayerCall<'_>, reply: ForwardReply, outstanding: &mut Outstanding) {
        // A late answer to an attempt that was given up: another one won.
        let Some(part) = outstanding.parts.remove(&reply.id) else {
            return;
        };
        let link = &self.placement.links[part.link];
        match reply.outcome {
            Some(Outcome::Rows(rows)) if rows.rows.len() == part.message.slots.len() * self.row_bytes() => {
                for &slot in &part.message.slots {
                    self.tally[slot as usize / call.routed.top_k].remote += 1;
                }
                self.metrics.pairs.with_label_values(&["remote"]).inc_by(part.message.slots.len() as u64);
                outstanding.answers.push((rows.rows, part.message.slots));
            }
            Some(Outcome::Failure(failure)) => {
                let (code, message) = (failure.code(), failure.message);
                tracing::warn!(address = link.address(), layer = call.layer, ?code, %message, "remote function refused");
                if code == Code::Draining {
                    link.rest();
                }
                if failure.retryable {
                    self.retry(call, vec![part], outstanding, &message);
                } else {
                    outstanding.orphans.extend(part.message.slots);
                }
            }
            outcome => {
                let bytes = match &outcome {
                    Some(Outcome::Rows(rows)) => rows.rows.len(),
                    _ => 0,
                };
                tracing::error!(
                    address = link.address(),
                    layer = call.layer,
                    bytes,
                    "answer of the wrong size"
                );
                link.give_up("answer of the wrong size");
                self.retry(call, vec![part], outstanding, "answer of the wrong size");
            }
        }
    }

    fn parts_on(
        &self,
        outstanding: &mut Outstanding,
        matches: impl Fn(&Part, &[super::link::Link]) -> bool,
    ) -> Vec<Part> {
        let links = &self.placement.links;
        outstanding.parts.extract_if(|_, part| matches(part, links)).map(|(_, part)| part).collect()
    }

    /// Gives up on every replica whose answer is overdue.
    fn expire(&mut self, call: &LayerCall<'_>, outstanding: &mut Outstanding) {
        let now = Instant::now();
        for (&id, part) in outstanding.parts.iter().filter(|(_, part)| part.deadline <= now) {
            let link = &self.placement.links[part.link];
            link.send(ForwardRequest { body: Some(Body::Cancel(Cancel { id })) });
            link.give_up("no answer in time");
        }
        let overdue = self.parts_on(outstanding, |part, _| part.deadline <= now);
        self.retry(call, overdue, outstanding, "no answer in time");
    }

    fn retry(&mut self, call: &LayerCall<'_>, parts: Vec<Part>, outstanding: &mut Outstanding, reason: &str) {
        for part in parts {
            let orphans = outstanding.orphans.len();
            let tokens: BTreeSet<u32> =
                part.message.slots.iter().map(|&slot| slot / call.routed.top_k as u32).collect();
            self.send(call, part.message, part.tried, outstanding, None);
            if outstanding.orphans.len() == orphans {
                self.metrics.retries.inc();
                // One message may carry rows of several requests: each of them sees the retry, on
                // its first row.
                if let Some(&first) = tokens.first() {
                    self.tally[first as usize].retries += 1;
                }
            } else {
                tracing::warn!(layer = call.layer, reason, "no replica is left; computing locally");
            }
        }
    }

    /// Loads and computes what no replica will.
    fn compute_orphans(
        &mut self,
        call: &LayerCall<'_>,
        orphans: &[u32],
        deadline: Instant,
    ) -> Result<(Vec<u32>, Vec<u8>), ExpertError> {
        let mut by_expert: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for &slot in orphans {
            by_expert.entry(call.routed.experts[slot as usize]).or_default().push(slot);
        }
        let mut work = Vec::with_capacity(by_expert.len());
        let mut ordered = BTreeSet::new();
        for (&expert, slots) in &by_expert {
            match self.fallback.get(call.layer, expert) {
                Some(packed) => work.push((packed, slots.clone())),
                None => {
                    self.metrics.loads.inc();
                    self.loader.order(call.layer, expert);
                    ordered.insert(expert);
                }
            }
        }
        while !ordered.is_empty() {
            let loaded = &mut self.loaded;
            let next = self.runtime.block_on(async {
                tokio::time::timeout_at(deadline.into(), loaded.recv()).await.ok().flatten()
            });
            let Some(loaded) = next else {
                return Err(self.late(call, ordered.iter().map(|expert| by_expert[expert].len()).sum()));
            };
            let (layer, expert) = (loaded.layer, loaded.expert);
            let packed = self.keep(loaded)?;
            if layer == call.layer && ordered.remove(&expert) {
                work.push((packed, by_expert[&expert].clone()));
            }
        }
        let mut rows = Vec::new();
        let slots = self.compute(call, &work, &mut rows)?;
        for &slot in &slots {
            self.tally[slot as usize / call.routed.top_k].fallback += 1;
        }
        self.metrics.pairs.with_label_values(&["fallback"]).inc_by(slots.len() as u64);
        Ok((slots, rows))
    }

    fn keep(&mut self, loaded: Loaded) -> Result<Arc<PackedExpert>, ExpertError> {
        let packed = loaded.outcome.map_err(|error| ExpertError::Load {
            layer: loaded.layer,
            expert: loaded.expert,
            message: error.to_string(),
        })?;
        self.fallback.insert(loaded.layer, loaded.expert, packed.clone());
        self.metrics.fallback_bytes.set(self.fallback.bytes() as i64);
        Ok(packed)
    }
}

/// Points the slots at their rows in `bytes`.
fn place<'a>(rows: &mut [&'a [u8]], slots: &[u32], bytes: &'a [u8], row_bytes: usize) {
    for (&slot, row) in slots.iter().zip(bytes.chunks_exact(row_bytes)) {
        rows[slot as usize] = row;
    }
}
