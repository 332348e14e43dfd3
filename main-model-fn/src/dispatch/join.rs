//! A layer call from its inputs to the reduction: the remote half and the local half at the same
//! time.

use super::calls::{Calls, TracedRequest};
use super::error::ExpertError;
use super::exchange::{Exchange, RemoteCall};
use super::fallback::FallbackExperts;
use super::hosts::LayerHosts;
use super::link::LinkEvent;
use super::metrics::ExpertMetrics;
use super::outstanding::{Outstanding, ReplicaReply};
use super::placement::Placement;
use super::reduce::{ExpertRows, reduce};
use super::split::remote_slots;
use super::tally::{ExpertTally, ExpertTime};
use crate::routing::Routed;
use remoe_billing::PairCounts;
use remoe_kernels::{Dtype, ExpertJob, NumericsClass, PackedExpert, Pool};
use remoe_model::Checkpoint;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// Connections are driven so often while local experts are computed.
pub(super) const DRIVEN_EVERY: Duration = Duration::from_micros(200);
/// As [`DRIVEN_EVERY`], if no more is expected than sockets hold: peers that connect or close meanwhile have time.
const DRIVEN_SELDOM: Duration = Duration::from_millis(20);
/// Answers of so many bytes together fit into the sockets that they come through, even through one.
const HELD_BY_SOCKETS: usize = 32 << 10;

/// Slots, and the row of each, one after the other.
pub(super) type Computed = (Vec<u32>, Vec<u8>);

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
    pub(super) pool: Arc<Pool>,
    dtype: Dtype,
    hidden: usize,
    pub(super) placement: Placement,
    pub(super) exchange: Exchange,
    pub(super) fallback: FallbackExperts,
    pub(super) metrics: ExpertMetrics,
    tally: Vec<ExpertTally>,
    pub(super) time: ExpertTime,
    pairs: PairCounts,
    /// Calls to each link, while a request is followed.
    calls: Vec<Calls>,
    pub(super) local_rows: Vec<u8>,
}

/// Parts of the experts' half of the engine.
pub(crate) struct ExpertParts {
    /// Drives the links; the engine's own.
    pub(crate) runtime: Rc<Runtime>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) class: NumericsClass,
    /// Elements of a hidden state.
    pub(crate) hidden: usize,
    pub(crate) checkpoint: Arc<Checkpoint>,
    /// Where links report.
    pub(crate) link_events: mpsc::UnboundedReceiver<LinkEvent>,
    /// Bytes of experts held because no replica answered.
    pub(crate) fallback_bytes: usize,
    /// How long the engine polls for answers before it sleeps.
    pub(crate) poll: Duration,
    pub(crate) metrics: ExpertMetrics,
}

impl Experts {
    /// # Errors
    /// A loading thread cannot be started.
    pub(crate) fn new(parts: ExpertParts) -> io::Result<Self> {
        let dtype = parts.class.dtype;
        let row_bytes = parts.hidden * dtype.bytes();
        Ok(Self {
            exchange: Exchange::new(
                parts.runtime.clone(),
                parts.link_events,
                row_bytes,
                dtype,
                parts.poll,
                parts.metrics.clone(),
            ),
            dtype,
            hidden: parts.hidden,
            placement: Placement::default(),
            fallback: FallbackExperts::start(
                parts.checkpoint,
                parts.class,
                parts.fallback_bytes,
                parts.pool.threads(),
                parts.metrics.clone(),
            )?,
            pool: parts.pool,
            metrics: parts.metrics,
            tally: Vec::new(),
            time: ExpertTime::default(),
            pairs: PairCounts::default(),
            calls: Vec::new(),
            local_rows: Vec::new(),
        })
    }

    /// Puts a routing generation in force; the old one's links close.
    pub(crate) fn switch(&mut self, placement: Placement) {
        self.exchange.switched(&placement.links);
        self.placement = placement;
    }

    pub(crate) fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The traced requests of the iteration to come.
    pub(crate) fn follow(&mut self, followed: Vec<TracedRequest>) {
        self.exchange.followed = followed;
    }

    /// The traced requests of the iteration that is over, with whom messages told of them.
    pub(crate) fn take_followed(&mut self) -> Vec<TracedRequest> {
        std::mem::take(&mut self.exchange.followed)
    }

    /// Returns the totals of the calls to each remote function in the iteration, all layers together, in the order of
    /// the placement's links; empty if no request is [followed](Self::follow).
    pub(crate) fn calls(&self) -> &[Calls] {
        &self.calls
    }

    /// Starts counting for an iteration of `rows` rows.
    pub(crate) fn begin_iteration(&mut self, rows: usize) {
        self.tally.clear();
        self.tally.resize(rows, ExpertTally::default());
        self.time = ExpertTime::default();
        self.pairs.begin(rows, self.placement.links.len());
        self.calls.clear();
        if !self.exchange.followed.is_empty() {
            self.calls.resize(self.placement.links.len(), Calls::default());
        }
    }

    /// Where the experts of each row of the iteration were computed, all layers together.
    pub(crate) fn take_tally(&mut self) -> Vec<ExpertTally> {
        std::mem::take(&mut self.tally)
    }

    /// Which remote functions answered for which rows of the iteration, all layers together.
    pub(crate) fn pairs(&self) -> &PairCounts {
        &self.pairs
    }

    /// Returns the time that the iteration's experts took, all layers together.
    pub(crate) fn time(&self) -> ExpertTime {
        self.time
    }

    /// Sends the remote pairs of `call` off; [`finish`](Self::finish) takes the rest from there.
    pub(crate) fn send_off(&mut self, call: &LayerCall<'_>) -> Outstanding {
        let slots = match self.placement.hosts(call.layer) {
            Some(hosts) => remote_slots(call.routed, hosts),
            None => Vec::new(),
        };
        self.exchange.send_off(&self.placement, call, &slots, &mut self.fallback)
    }

    /// Computes the local experts of a layer, joins them with what is `outstanding` and with `shared`, the shared
    /// experts' rows, where the layer has some. Writes tokens x hidden elements to `output`.
    ///
    /// # Errors
    /// No replica and no local load delivered in time, or the kernels refuse.
    pub(crate) fn finish(
        &mut self,
        call: &LayerCall<'_>,
        mut outstanding: Outstanding,
        shared: Option<&[u8]>,
        output: &mut [u8],
    ) -> Result<(), ExpertError> {
        let local = local_slots(call.routed, self.placement.hosts(call.layer));
        let mut computed = self.compute_all(call, &mut outstanding, local)?;
        let tokens = 0..call.routed.tokens();
        self.reduce(call, (&computed, &outstanding.answers), tokens, shared, output)?;
        self.metrics.activity.routed(call.layer, call.routed.experts.iter().copied());
        // The first rows are those of the local kernels: their memory is used again.
        self.local_rows = computed.swap_remove(0).1;
        Ok(())
    }

    /// Computes the pairs `local`, by expert, and takes in what is `outstanding`, whose answers stay there. Returns
    /// what was computed here, the rows of the local kernels first.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub(super) fn compute_all(
        &mut self,
        call: &LayerCall<'_>,
        outstanding: &mut Outstanding,
        local: BTreeMap<u32, Vec<u32>>,
    ) -> Result<Vec<Computed>, ExpertError> {
        let layer = call.layer;
        let mut local_rows = std::mem::take(&mut self.local_rows);
        let has_local = !local.is_empty();
        if has_local {
            tracing::trace!(layer, "local kernels start");
        }
        let local_start = Instant::now();
        let slots = self.compute_local(call, outstanding, local, &mut local_rows)?;
        if has_local {
            tracing::trace!(layer, "local kernels done");
        }
        // Local work is not waiting: the clock of the remote half starts when the engine begins to listen.
        let remote_start = Instant::now();
        let collected = self.collect(call, outstanding);
        for call in &outstanding.calls {
            self.calls[call.link].add(call);
        }
        let later = collected?;
        self.time += ExpertTime {
            local: remote_start - local_start,
            waited: remote_start.elapsed(),
            remote: outstanding.computed,
            calls: outstanding.replies,
        };
        for answer in &outstanding.answers {
            self.count(call, &answer.slots, "remote", |tally| &mut tally.remote);
            self.pairs.count(answer.link, &answer.slots, call.routed.top_k);
        }
        for &slot in &outstanding.retried {
            // One message may carry rows of several requests: its first row stands for it.
            self.tally[slot as usize / call.routed.top_k].retries += 1;
        }
        self.metrics.activity.computed_here(remote_start - local_start);
        let mut computed = vec![(slots, local_rows)];
        computed.extend(later);
        if !outstanding.accused.is_empty() {
            let rows = rows_of(call, &computed, &outstanding.answers, self.row_bytes());
            self.exchange.convict(&self.placement.links, layer, &outstanding.accused, &rows);
        }
        Ok(computed)
    }

    /// Sums the rows of the pairs of `tokens`, and those of `shared` experts, into `output`.
    ///
    /// # Errors
    /// A pair has no row.
    pub(super) fn reduce(
        &self,
        call: &LayerCall<'_>,
        (computed, answers): (&[Computed], &[ReplicaReply]),
        tokens: Range<usize>,
        shared: Option<&[u8]>,
        output: &mut [u8],
    ) -> Result<(), ExpertError> {
        let layer = call.layer;
        let slots = tokens.start * call.routed.top_k..tokens.end * call.routed.top_k;
        let rows = rows_of(call, computed, answers, self.row_bytes());
        let rows = &rows[slots.clone()];
        if let Some(slot) = rows.iter().position(|row| row.is_empty()) {
            let expert = call.routed.experts[slots.start + slot];
            return Err(ExpertError::Unplaced { layer, expert, generation: self.placement.generation });
        }
        let rows = ExpertRows { rows, dtype: self.dtype, hidden: self.hidden };
        let part;
        let routed = if tokens == (0..call.routed.tokens()) {
            call.routed
        } else {
            part = call.routed.part(tokens);
            &part
        };
        reduce(routed, &rows, shared, output, &self.pool)
            .map_err(|source| ExpertError::Kernel { layer, source })
    }

    fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.bytes()
    }

    /// Returns when a connection has changed or an answer has come that no call waits for. For the time between
    /// requests.
    pub(crate) async fn connections_changed(&mut self) {
        // The sending halves live as long as the links and this end of the engine.
        if !self.exchange.event().await {
            std::future::pending::<()>().await;
        }
    }

    /// Runs the local kernels for the slots of `by_expert`. Returns the slots of the rows written to `rows`, in
    /// order. Slots whose expert is still being read are awaited.
    fn compute_local(
        &mut self,
        call: &LayerCall<'_>,
        outstanding: &mut Outstanding,
        by_expert: BTreeMap<u32, Vec<u32>>,
        rows: &mut Vec<u8>,
    ) -> Result<Vec<u32>, ExpertError> {
        let mut work = Vec::with_capacity(by_expert.len());
        let local = &self.placement.local;
        for (expert, slots) in by_expert {
            match local.get(call.layer, expert) {
                Some(packed) => work.push((packed.clone(), slots)),
                None if local.has(call.layer, expert) => {
                    if let Some(arrivals) = local.arrivals() {
                        arrivals.hurry(call.layer, expert);
                    }
                    outstanding.awaited.insert(expert, slots);
                }
                None => {
                    let generation = self.placement.generation;
                    return Err(ExpertError::Unplaced { layer: call.layer, expert, generation });
                }
            }
        }
        // A prompt's answers are larger than sockets hold: the replicas that send them must not wait for the local
        // kernels, nor must a message that has yet to leave. Small answers are in the sockets when these are done,
        // however seldom connections are driven.
        let owed = outstanding.pairs() * self.row_bytes();
        let often = owed > HELD_BY_SOCKETS || !outstanding.have_left(&self.placement.links);
        let driven_every = if often { DRIVEN_EVERY } else { DRIVEN_SELDOM };
        let slots = self.compute(call, &work, rows, driven_every)?;
        self.count(call, &slots, "local", |tally| &mut tally.local);
        Ok(slots)
    }

    /// Computes each packed expert for its slots; rows land in `rows` in the order that is returned. Connections are
    /// driven `driven_every` so long meanwhile.
    fn compute(
        &mut self,
        call: &LayerCall<'_>,
        work: &[(Arc<PackedExpert>, Vec<u32>)],
        rows: &mut Vec<u8>,
        driven_every: Duration,
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
            jobs.push(ExpertJob { expert, inputs: call.inputs, row_index: these, output: this });
            (tokens, output) = (others, other);
        }
        self.metrics.reads.inc_by(jobs.len() as u64);
        if jobs.is_empty() {
            return Ok(slots);
        }
        let (exchange, drives, mut driven) =
            (&self.exchange, !self.placement.links.is_empty(), Instant::now());
        let mut between = || {
            if drives && driven.elapsed() >= driven_every {
                exchange.drive();
                driven = Instant::now();
            }
        };
        let computed = self.pool.forward_beside(&mut jobs, &mut between);
        computed.map_err(|source| ExpertError::Kernel { layer: call.layer, source })?;
        Ok(slots)
    }

    /// Counts the pairs `slots` for their rows and in the metrics.
    pub(super) fn count(
        &mut self,
        call: &LayerCall<'_>,
        slots: &[u32],
        placement: &str,
        counter: impl Fn(&mut ExpertTally) -> &mut u64,
    ) {
        for &slot in slots {
            *counter(&mut self.tally[slot as usize / call.routed.top_k]) += 1;
        }
        self.metrics.pairs.with_label_values(&[placement]).inc_by(slots.len() as u64);
    }

    /// Waits until every remote pair has its row: from a replica, or from an expert that was loaded for it, whichever
    /// comes first; and every local pair whose expert was still being read. Returns what was computed here.
    fn collect(
        &mut self,
        call: &LayerCall<'_>,
        outstanding: &mut Outstanding,
    ) -> Result<Vec<Computed>, ExpertError> {
        let started = Instant::now();
        self.exchange.listen(&self.placement.links, outstanding);
        let mut computed = Vec::new();
        loop {
            let ready = self.fallback.ready(call.layer, outstanding.orphans.keys().copied());
            if !ready.is_empty() {
                computed.push(self.compute_orphans(call, ready, outstanding)?);
                continue;
            }
            let arrived = self.arrived(call.layer, outstanding);
            if !arrived.is_empty() {
                computed.push(self.compute_arrived(call, &arrived)?);
                continue;
            }
            if outstanding.is_settled() {
                self.metrics.wait.observe(started.elapsed().as_secs_f64());
                return Ok(computed);
            }
            let Self { exchange, placement, fallback, .. } = self;
            exchange.step(&mut RemoteCall { placement, call, outstanding, fallback })?;
        }
    }

    /// Takes those awaited pairs whose experts are there by now.
    fn arrived(&self, layer: usize, outstanding: &mut Outstanding) -> Vec<(Arc<PackedExpert>, Vec<u32>)> {
        let local = &self.placement.local;
        let awaited = outstanding.awaited.keys();
        let there = awaited.filter_map(|&expert| Some((expert, local.get(layer, expert)?.clone())));
        let there: Vec<_> = there.collect();
        let work = there.into_iter();
        work.filter_map(|(expert, packed)| Some((packed, outstanding.awaited.remove(&expert)?))).collect()
    }

    /// Computes awaited pairs whose experts have been read.
    fn compute_arrived(
        &mut self,
        call: &LayerCall<'_>,
        work: &[(Arc<PackedExpert>, Vec<u32>)],
    ) -> Result<Computed, ExpertError> {
        let mut rows = Vec::new();
        let slots = self.compute(call, work, &mut rows, DRIVEN_EVERY)?;
        self.count(call, &slots, "local", |tally| &mut tally.local);
        Ok((slots, rows))
    }

    /// Computes the orphans of the experts `ready`.
    fn compute_orphans(
        &mut self,
        call: &LayerCall<'_>,
        ready: Vec<(u32, Arc<PackedExpert>)>,
        outstanding: &mut Outstanding,
    ) -> Result<Computed, ExpertError> {
        let experts: Vec<u32> = ready.iter().map(|&(expert, _)| expert).collect();
        let work = ready.into_iter();
        let work = work.filter_map(|(expert, packed)| Some((packed, outstanding.orphans.remove(&expert)?)));
        let work: Vec<_> = work.collect();
        let mut rows = Vec::new();
        let slots = self.compute(call, &work, &mut rows, DRIVEN_EVERY)?;
        self.count(call, &slots, "fallback", |tally| &mut tally.fallback);
        if let Some(hosts) = self.placement.hosts(call.layer) {
            let is_unhosted = |slot: &&u32| {
                let expert = call.routed.experts.get(**slot as usize);
                expert
                    .and_then(|expert| hosts.class_of(*expert))
                    .is_some_and(|class| hosts.of(class).is_empty())
            };
            self.metrics.unhosted.inc_by(slots.iter().filter(is_unhosted).count() as u64);
        }
        // The experts leave before others take their place.
        drop(work);
        for expert in experts {
            self.fallback.release(call.layer, expert);
        }
        self.exchange.computed_here(&self.placement.links, outstanding, &slots);
        Ok((slots, rows))
    }
}

/// (token, expert) pairs of local experts, by expert: slots of [`Routed`], ascending.
pub(super) fn local_slots(routed: &Routed, hosts: Option<&LayerHosts>) -> BTreeMap<u32, Vec<u32>> {
    let mut by_expert: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let is_remote = |expert| hosts.is_some_and(|hosts| hosts.class_of(expert).is_some());
    for (slot, &expert) in (0..).zip(&routed.experts) {
        if !is_remote(expert) {
            by_expert.entry(expert).or_default().push(slot);
        }
    }
    by_expert
}

/// The row of every slot, wherever it lies; empty where there is none.
fn rows_of<'a>(
    call: &LayerCall<'_>,
    computed: &'a [Computed],
    answers: &'a [ReplicaReply],
    row_bytes: usize,
) -> Vec<&'a [u8]> {
    let empty: &[u8] = &[];
    let mut rows = vec![empty; call.routed.experts.len()];
    for (slots, bytes) in computed {
        place(&mut rows, slots, bytes, row_bytes);
    }
    for answer in answers {
        place(&mut rows, &answer.slots, &answer.rows, row_bytes);
    }
    rows
}

/// Points the slots at their rows in `bytes`.
fn place<'a>(rows: &mut [&'a [u8]], slots: &[u32], bytes: &'a [u8], row_bytes: usize) {
    for (&slot, row) in slots.iter().zip(bytes.chunks_exact(row_bytes)) {
        rows[slot as usize] = row;
    }
}
