//! Dispatch of one layer call, from its inputs to the reduction.

use super::calls::{CallTotals, TracedRequest};
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

/// Interval at which connections are driven while local experts are computed.
pub(super) const DRIVE_INTERVAL: Duration = Duration::from_micros(200);
/// Interval if all expected answers fit into the sockets' buffers: new connections and closed ones can wait.
const IDLE_DRIVE_INTERVAL: Duration = Duration::from_millis(20);
/// Bytes of answers that fit into the sockets' buffers, even if all come through one socket.
const SOCKET_BUFFER_BYTES: usize = 32 << 10;

/// Output rows that were computed by this process.
pub(super) struct ComputedRows {
    /// Slot of each row: index of its (token, expert) pair in [`Routed`].
    pub(super) slots: Vec<u32>,
    /// Rows, one after the other: compute dtype, little endian.
    pub(super) rows: Vec<u8>,
}

/// Inputs and routing of one layer.
pub(crate) struct LayerCall<'a> {
    /// The layer's index in the model.
    pub(crate) layer: usize,
    /// tokens x hidden elements, compute dtype, little endian.
    pub(crate) inputs: &'a [u8],
    /// Experts of each token.
    pub(crate) routed: &'a Routed,
}

/// Computes the routed experts of the model, local and remote.
pub(crate) struct ExpertDispatcher {
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
    /// Totals of the calls to each link, in an iteration with traced requests.
    call_totals: Vec<CallTotals>,
    /// Buffer of the local kernels' output, kept for the next call.
    pub(super) local_rows: Vec<u8>,
}

/// Parts of an [`ExpertDispatcher`].
pub(crate) struct DispatcherParts {
    /// The engine's runtime, which drives the links.
    pub(crate) runtime: Rc<Runtime>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) class: NumericsClass,
    /// Elements of a hidden state.
    pub(crate) hidden: usize,
    pub(crate) checkpoint: Arc<Checkpoint>,
    /// Events of all links.
    pub(crate) link_events: mpsc::UnboundedReceiver<LinkEvent>,
    /// Limit of the memory for fallback experts.
    pub(crate) fallback_bytes: usize,
    /// Time for which the engine polls for answers before it sleeps.
    pub(crate) poll: Duration,
    pub(crate) metrics: ExpertMetrics,
}

impl ExpertDispatcher {
    /// Creates a dispatcher without experts.
    ///
    /// # Errors
    /// Fails if a loading thread cannot be started.
    pub(crate) fn new(parts: DispatcherParts) -> io::Result<Self> {
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
            call_totals: Vec::new(),
            local_rows: Vec::new(),
        })
    }

    /// Puts a routing generation in force and closes the previous one's links.
    pub(crate) fn switch(&mut self, placement: Placement) {
        self.exchange.set_links(&placement.links);
        self.placement = placement;
    }

    pub(crate) fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Sets the traced requests of the next iteration.
    pub(crate) fn set_traced_requests(&mut self, traced: Vec<TracedRequest>) {
        self.exchange.traced_requests = traced;
    }

    /// Returns the traced requests of the last iteration, with the times at which messages first named them.
    pub(crate) fn take_traced_requests(&mut self) -> Vec<TracedRequest> {
        std::mem::take(&mut self.exchange.traced_requests)
    }

    /// Returns the totals of the calls over each link in the iteration, all layers together, in the order of the
    /// placement's links. Empty if no request is [traced](Self::set_traced_requests).
    pub(crate) fn call_totals(&self) -> &[CallTotals] {
        &self.call_totals
    }

    /// Resets the counts for an iteration of `rows` rows.
    pub(crate) fn begin_iteration(&mut self, rows: usize) {
        self.tally.clear();
        self.tally.resize(rows, ExpertTally::default());
        self.time = ExpertTime::default();
        self.pairs.begin(rows, self.placement.links.len());
        self.call_totals.clear();
        if !self.exchange.traced_requests.is_empty() {
            self.call_totals.resize(self.placement.links.len(), CallTotals::default());
        }
    }

    /// Returns where each row's experts were computed in the iteration, all layers together.
    pub(crate) fn take_tally(&mut self) -> Vec<ExpertTally> {
        std::mem::take(&mut self.tally)
    }

    /// Returns which links answered for which rows in the iteration, all layers together.
    pub(crate) fn pairs(&self) -> &PairCounts {
        &self.pairs
    }

    /// Returns the time that the iteration's experts took, all layers together.
    pub(crate) fn time(&self) -> ExpertTime {
        self.time
    }

    /// Sends the messages for the remote pairs of `call`. [`finish`](Self::finish) completes the call.
    pub(crate) fn dispatch(&mut self, call: &LayerCall<'_>) -> Outstanding {
        let slots = match self.placement.hosts(call.layer) {
            Some(hosts) => remote_slots(call.routed, hosts),
            None => Vec::new(),
        };
        self.exchange.dispatch(&self.placement, call, &slots, &mut self.fallback)
    }

    /// Computes the local experts of a layer, collects the `outstanding` rows, and reduces all rows.
    ///
    /// `shared` is the shared contribution: tokens x hidden. Writes tokens x hidden elements to `output`.
    ///
    /// # Errors
    /// Fails if neither a replica nor the local fallback delivered in time, or if a kernel fails.
    pub(crate) fn finish(
        &mut self,
        call: &LayerCall<'_>,
        mut outstanding: Outstanding,
        shared: Option<&[u8]>,
        output: &mut [u8],
    ) -> Result<(), ExpertError> {
        let local = local_slots(call.routed, self.placement.hosts(call.layer));
        let mut computed = self.compute_and_collect(call, &mut outstanding, local)?;
        let tokens = 0..call.routed.tokens();
        self.reduce(call, (&computed, &outstanding.replies), tokens, shared, output)?;
        self.metrics.activity.count_pairs(call.layer, call.routed.experts.iter().copied());
        // The first entry is the local kernels' output; its buffer is reused.
        self.local_rows = computed.swap_remove(0).rows;
        Ok(())
    }

    /// Computes the `local` slots, by expert, and collects the `outstanding` rows. Replies stay in `outstanding`.
    ///
    /// Returns the rows that this process computed; the first entry is the local kernels' output.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub(super) fn compute_and_collect(
        &mut self,
        call: &LayerCall<'_>,
        outstanding: &mut Outstanding,
        local: BTreeMap<u32, Vec<u32>>,
    ) -> Result<Vec<ComputedRows>, ExpertError> {
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
        // Local work is no waiting: the time of the remote part starts when the engine begins to listen.
        let remote_start = Instant::now();
        let collected = self.collect(call, outstanding);
        for call in &outstanding.completed_calls {
            self.call_totals[call.link].add(call);
        }
        let computed_later = collected?;
        self.time += ExpertTime {
            local: remote_start - local_start,
            waited: remote_start.elapsed(),
            remote: outstanding.remote_compute_time,
            calls: outstanding.answered_messages,
        };
        for reply in &outstanding.replies {
            self.count(call, &reply.slots, "remote", |tally| &mut tally.remote);
            self.pairs.count(reply.link, &reply.slots, call.routed.top_k);
        }
        for &slot in &outstanding.retried {
            // A message may carry rows of several requests; the retry counts for its first row.
            self.tally[slot as usize / call.routed.top_k].retries += 1;
        }
        self.metrics.activity.record_local(remote_start - local_start);
        let mut computed = vec![ComputedRows { slots, rows: local_rows }];
        computed.extend(computed_later);
        if !outstanding.non_finite_rows.is_empty() {
            let rows = rows_by_slot(call, &computed, &outstanding.replies, self.row_bytes());
            self.exchange.drop_faulty_links(
                &self.placement.links,
                layer,
                &outstanding.non_finite_rows,
                &rows,
            );
        }
        Ok(computed)
    }

    /// Sums the rows of the pairs of `tokens`, and the `shared` contribution, into `output`.
    ///
    /// # Errors
    /// Fails if a pair has no row.
    pub(super) fn reduce(
        &self,
        call: &LayerCall<'_>,
        (computed, replies): (&[ComputedRows], &[ReplicaReply]),
        tokens: Range<usize>,
        shared: Option<&[u8]>,
        output: &mut [u8],
    ) -> Result<(), ExpertError> {
        let layer = call.layer;
        let slots = tokens.start * call.routed.top_k..tokens.end * call.routed.top_k;
        let rows = rows_by_slot(call, computed, replies, self.row_bytes());
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
            part = call.routed.slice(tokens);
            &part
        };
        reduce(routed, &rows, shared, output, &self.pool)
            .map_err(|source| ExpertError::Kernel { layer, source })
    }

    fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.bytes()
    }

    /// Waits until a connection changed or an answer arrived that no call waits for. For use between iterations.
    pub(crate) async fn connections_changed(&mut self) {
        // Links and this dispatcher hold senders, so events end only when the engine stops.
        if !self.exchange.next_idle_event().await {
            std::future::pending::<()>().await;
        }
    }

    /// Runs the local kernels for the slots of `by_expert`. Writes the output to `rows` and returns the slot of each row.
    /// Slots of experts that are still being loaded are added to `outstanding`.
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
                    if let Some(loads) = local.background_loads() {
                        loads.prioritise(call.layer, expert);
                    }
                    outstanding.loading_slots.insert(expert, slots);
                }
                None => {
                    let generation = self.placement.generation;
                    return Err(ExpertError::Unplaced { layer: call.layer, expert, generation });
                }
            }
        }
        // Answers to a prompt are larger than the sockets' buffers: to keep replicas from waiting for the local kernels,
        // connections are driven often, also while a message has not left. Small answers fit into the buffers.
        let expected_bytes = outstanding.pairs() * self.row_bytes();
        let is_busy = expected_bytes > SOCKET_BUFFER_BYTES || !outstanding.have_left(&self.placement.links);
        let drive_interval = if is_busy { DRIVE_INTERVAL } else { IDLE_DRIVE_INTERVAL };
        let slots = self.compute(call, &work, rows, drive_interval)?;
        self.count(call, &slots, "local", |tally| &mut tally.local);
        Ok(slots)
    }

    /// Computes each packed expert for its slots. Writes the output to `rows` and returns the slot of each row.
    /// Connections are driven every `drive_interval` meanwhile.
    fn compute(
        &mut self,
        call: &LayerCall<'_>,
        work: &[(Arc<PackedExpert>, Vec<u32>)],
        rows: &mut Vec<u8>,
        drive_interval: Duration,
    ) -> Result<Vec<u32>, ExpertError> {
        let row_bytes = self.row_bytes();
        let slots: Vec<u32> = work.iter().flat_map(|(_, slots)| slots.iter().copied()).collect();
        let tokens: Vec<u32> = slots.iter().map(|&slot| slot / call.routed.top_k as u32).collect();
        rows.resize(slots.len() * row_bytes, 0);
        let mut jobs = Vec::with_capacity(work.len());
        let (mut tokens, mut output) = (tokens.as_slice(), rows.as_mut_slice());
        for (expert, slots) in work {
            let (expert_tokens, other_tokens) = tokens.split_at(slots.len());
            let (expert_output, other_output) = output.split_at_mut(slots.len() * row_bytes);
            jobs.push(ExpertJob {
                expert,
                inputs: call.inputs,
                row_index: expert_tokens,
                output: expert_output,
            });
            (tokens, output) = (other_tokens, other_output);
        }
        self.metrics.reads.inc_by(jobs.len() as u64);
        if jobs.is_empty() {
            return Ok(slots);
        }
        let (exchange, has_links, mut last_driven) =
            (&self.exchange, !self.placement.links.is_empty(), Instant::now());
        let mut drive = || {
            if has_links && last_driven.elapsed() >= drive_interval {
                exchange.drive();
                last_driven = Instant::now();
            }
        };
        let computed = self.pool.forward_beside(&mut jobs, &mut drive);
        computed.map_err(|source| ExpertError::Kernel { layer: call.layer, source })?;
        Ok(slots)
    }

    /// Counts the pairs `slots`, per row and in the metrics.
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

    /// Waits until every remote pair has its row, from a replica or the local fallback, whichever is first, and every
    /// local pair whose expert was still being loaded. Returns the rows that this process computed.
    fn collect(
        &mut self,
        call: &LayerCall<'_>,
        outstanding: &mut Outstanding,
    ) -> Result<Vec<ComputedRows>, ExpertError> {
        let started = Instant::now();
        self.exchange.listen(&self.placement.links, outstanding);
        let mut computed = Vec::new();
        loop {
            let ready = self.fallback.loaded(call.layer, outstanding.fallback_slots.keys().copied());
            if !ready.is_empty() {
                computed.push(self.compute_fallback(call, ready, outstanding)?);
                continue;
            }
            let loaded = self.take_loaded(call.layer, outstanding);
            if !loaded.is_empty() {
                computed.push(self.compute_loaded(call, &loaded)?);
                continue;
            }
            if outstanding.is_complete() {
                self.metrics.wait.observe(started.elapsed().as_secs_f64());
                return Ok(computed);
            }
            let Self { exchange, placement, fallback, .. } = self;
            exchange.process_event(&mut RemoteCall { placement, call, outstanding, fallback })?;
        }
    }

    /// Takes the slots of `outstanding` whose local experts have been loaded by now.
    fn take_loaded(&self, layer: usize, outstanding: &mut Outstanding) -> Vec<(Arc<PackedExpert>, Vec<u32>)> {
        let local = &self.placement.local;
        let experts = outstanding.loading_slots.keys();
        let loaded = experts.filter_map(|&expert| Some((expert, local.get(layer, expert)?.clone())));
        let loaded: Vec<_> = loaded.collect();
        let work = loaded.into_iter();
        work.filter_map(|(expert, packed)| Some((packed, outstanding.loading_slots.remove(&expert)?)))
            .collect()
    }

    /// Computes local experts that were loaded during the call.
    fn compute_loaded(
        &mut self,
        call: &LayerCall<'_>,
        work: &[(Arc<PackedExpert>, Vec<u32>)],
    ) -> Result<ComputedRows, ExpertError> {
        let mut rows = Vec::new();
        let slots = self.compute(call, work, &mut rows, DRIVE_INTERVAL)?;
        self.count(call, &slots, "local", |tally| &mut tally.local);
        Ok(ComputedRows { slots, rows })
    }

    /// Computes remote experts that were loaded as fallback.
    fn compute_fallback(
        &mut self,
        call: &LayerCall<'_>,
        ready: Vec<(u32, Arc<PackedExpert>)>,
        outstanding: &mut Outstanding,
    ) -> Result<ComputedRows, ExpertError> {
        let experts: Vec<u32> = ready.iter().map(|&(expert, _)| expert).collect();
        let work = ready.into_iter();
        let work =
            work.filter_map(|(expert, packed)| Some((packed, outstanding.fallback_slots.remove(&expert)?)));
        let work: Vec<_> = work.collect();
        let mut rows = Vec::new();
        let slots = self.compute(call, &work, &mut rows, DRIVE_INTERVAL)?;
        self.count(call, &slots, "fallback", |tally| &mut tally.fallback);
        if let Some(hosts) = self.placement.hosts(call.layer) {
            let is_unhosted = |slot: &&u32| {
                let expert = call.routed.experts.get(**slot as usize);
                expert
                    .and_then(|expert| hosts.class_of(*expert))
                    .is_some_and(|class| hosts.hosts_of_class(class).is_empty())
            };
            self.metrics.unhosted.inc_by(slots.iter().filter(is_unhosted).count() as u64);
        }
        // Drop these experts before others are loaded in their place.
        drop(work);
        for expert in experts {
            self.fallback.release(call.layer, expert);
        }
        self.exchange.cancel_computed(&self.placement.links, outstanding, &slots);
        Ok(ComputedRows { slots, rows })
    }
}

/// Returns the slots of local experts, by expert; ascending.
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

/// Returns the row of every slot; empty if there is none.
fn rows_by_slot<'a>(
    call: &LayerCall<'_>,
    computed: &'a [ComputedRows],
    replies: &'a [ReplicaReply],
    row_bytes: usize,
) -> Vec<&'a [u8]> {
    let empty: &[u8] = &[];
    let mut by_slot = vec![empty; call.routed.experts.len()];
    for ComputedRows { slots, rows } in computed {
        assign_rows(&mut by_slot, slots, rows, row_bytes);
    }
    for reply in replies {
        assign_rows(&mut by_slot, &reply.slots, &reply.rows, row_bytes);
    }
    by_slot
}

/// Points each of `slots` to its row in `rows`.
fn assign_rows<'a>(by_slot: &mut [&'a [u8]], slots: &[u32], rows: &'a [u8], row_bytes: usize) {
    for (&slot, row) in slots.iter().zip(rows.chunks_exact(row_bytes)) {
        by_slot[slot as usize] = row;
    }
}
