//! A layer call in portions, between which the engine can decode: one layer of a prompt may take seconds.
//!
//! Local pairs are computed expert by expert. A portion that ends within an expert suspends it, so that no weights are
//! read twice. Remote pairs are taken token by token, and a portion ends when its messages are answered. The sum is
//! computed when all rows are there, so portions cannot change an answer.

use super::dispatcher::{ComputedRows, DRIVE_INTERVAL, ExpertDispatcher, LayerCall, local_slots};
use super::error::ExpertError;
use super::hosts::LayerHosts;
use super::outstanding::ReplicaReply;
use super::split::{remote_slots, work_units};
use crate::routing::Routed;
use remoe_kernels::{PackedExpert, SuspendedRows};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Progress of a layer call: the remaining pairs, and the rows that are computed.
pub(crate) struct Portions {
    /// Generation of the placement by which the remaining pairs are split.
    generation: u64,
    /// Remaining slots of local experts, by expert.
    local: BTreeMap<u32, Vec<u32>>,
    /// Slots of local experts whose computation is suspended.
    suspended: Option<(Vec<u32>, SuspendedRows)>,
    inputs: Arc<[u8]>,
    /// Remaining slots of remote experts by host class; ascending.
    remote: Vec<Vec<u32>>,
    computed: Vec<ComputedRows>,
    replies: Vec<ReplicaReply>,
}

impl Portions {
    /// Reports if every pair has its row.
    pub(crate) fn is_done(&self) -> bool {
        self.local.is_empty() && self.suspended.is_none() && !self.has_remote()
    }

    /// Reports if pairs for remote functions remain.
    pub(crate) fn has_remote(&self) -> bool {
        self.remote.iter().any(|slots| !slots.is_empty())
    }

    /// Splits the remaining pairs into local and remote ones by the placement of `generation`.
    fn resplit(&mut self, routed: &Routed, hosts: Option<&LayerHosts>, generation: u64) {
        let remaining: BTreeSet<u32> =
            self.local.values().chain(&self.remote).flat_map(|slots| slots.iter().copied()).collect();
        *self = Self {
            suspended: self.suspended.take(),
            computed: std::mem::take(&mut self.computed),
            replies: std::mem::take(&mut self.replies),
            ..Self::new(routed, hosts, generation, self.inputs.clone())
        };
        self.local
            .values_mut()
            .chain(&mut self.remote)
            .for_each(|slots| slots.retain(|slot| remaining.contains(slot)));
        self.local.retain(|_, slots| !slots.is_empty());
    }

    fn new(routed: &Routed, hosts: Option<&LayerHosts>, generation: u64, inputs: Arc<[u8]>) -> Self {
        let remote = hosts.map(|hosts| remote_slots(routed, hosts)).unwrap_or_default();
        let local = local_slots(routed, hosts);
        let (computed, replies) = (Vec::new(), Vec::new());
        Self { generation, local, suspended: None, inputs, remote, computed, replies }
    }

    /// Takes the remote pairs of the next tokens: at most `max_units` units of work, but at least
    /// [`MIN_PORTION_TOKENS`] tokens. Returns the slots by host class, and their units.
    fn take_remote(&mut self, routed: &Routed, max_units: u64) -> (Vec<Vec<u32>>, u64) {
        let token = |slot: u32| slot as usize / routed.top_k;
        let mut next: Vec<u32> = self.remote.concat();
        next.sort_unstable();
        let (mut experts, mut sum, mut end_token) = (BTreeSet::new(), 0, 0);
        for (taken, pairs) in next.chunk_by(|a, b| token(*a) == token(*b)).enumerate() {
            let expert = |slot: &u32| routed.experts[*slot as usize];
            let unread = pairs.iter().filter(|slot| !experts.contains(&expert(slot))).count() as u64;
            let more = pairs.len() as u64 + unread * work_units(0);
            if taken >= MIN_PORTION_TOKENS && sum + more > max_units {
                break;
            }
            sum += more;
            experts.extend(pairs.iter().map(expert));
            end_token = token(pairs[0]) + 1;
        }
        let take = |slots: &mut Vec<u32>| {
            let rest = slots.split_off(slots.partition_point(|&slot| token(slot) < end_token));
            std::mem::replace(slots, rest)
        };
        (self.remote.iter_mut().map(take).collect(), sum)
    }
}

/// Fewest tokens of a portion's messages: remote functions read the weights again for every message.
const MIN_PORTION_TOKENS: usize = 32;

/// Rows of one call of the kernels: experts with fewer rows are computed together.
const MIN_KERNEL_ROWS: usize = 512;

/// Remote work of one portion.
pub(crate) struct RemoteUnits {
    /// Units of work ([`work_units`]).
    pub(crate) units: u64,
    /// True if the answers arrived before the local experts were done, so that their time is unknown.
    pub(crate) is_hidden: bool,
}

impl ExpertDispatcher {
    /// Splits the remaining pairs again if another placement is in force.
    pub(crate) fn follow_placement(&self, call: &LayerCall<'_>, portions: &mut Portions) {
        let placement = &self.placement;
        if portions.generation != placement.generation {
            portions.resplit(call.routed, placement.hosts(call.layer), placement.generation);
        }
    }

    /// Begins `call`, whose inputs are `inputs`, in portions.
    pub(crate) fn begin_portions(&self, call: &LayerCall<'_>, inputs: Arc<[u8]>) -> Portions {
        let placement = &self.placement;
        Portions::new(call.routed, placement.hosts(call.layer), placement.generation, inputs)
    }

    /// Computes one portion: about `max_remote_units` units of remote pairs, and local pairs until `is_over` returns true.
    ///
    /// The kernels call `is_over` about once a millisecond. The portions must be split by the placement in force, by
    /// [`begin_portions`](Self::begin_portions) or [`follow_placement`](Self::follow_placement).
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub(crate) fn compute_portion(
        &mut self,
        call: &LayerCall<'_>,
        portions: &mut Portions,
        max_remote_units: u64,
        is_over: &mut dyn FnMut() -> bool,
    ) -> Result<RemoteUnits, ExpertError> {
        let (remote, remote_units) = match portions.has_remote() {
            true => portions.take_remote(call.routed, max_remote_units),
            false => (Vec::new(), 0),
        };
        let slots = remote.iter().flatten();
        self.metrics.activity.count_pairs(call.layer, slots.map(|&slot| call.routed.experts[slot as usize]));
        let mut outstanding = self.exchange.dispatch(&self.placement, call, &remote, &mut self.fallback);
        let (started, waited_before) = (Instant::now(), self.time.waited);
        let still_loading = self.advance_local(call, portions, is_over)?;
        for (&expert, slots) in &still_loading {
            self.metrics.activity.count_pairs(call.layer, slots.iter().map(|_| expert));
        }
        let mut computed = self.compute_and_collect(call, &mut outstanding, still_loading)?;
        let is_hidden = 10 * (self.time.waited - waited_before) < started.elapsed();
        if computed[0].slots.is_empty() {
            // The next call reuses the buffer.
            self.local_rows = computed.swap_remove(0).rows;
        }
        portions.computed.extend(computed);
        portions.replies.append(&mut outstanding.replies);
        Ok(RemoteUnits { units: remote_units, is_hidden })
    }

    /// Computes local experts that are loaded, until `must_stop` returns true or none remains.
    ///
    /// If experts remain but none of them is loaded, returns the slots of one, for which the caller has to wait.
    fn advance_local(
        &mut self,
        call: &LayerCall<'_>,
        portions: &mut Portions,
        must_stop: &mut dyn FnMut() -> bool,
    ) -> Result<BTreeMap<u32, Vec<u32>>, ExpertError> {
        let (layer, started, mut is_over) = (call.layer, Instant::now(), false);
        let had_local = !portions.local.is_empty() || portions.suspended.is_some();
        if had_local && portions.suspended.is_none() && portions.computed.is_empty() {
            tracing::trace!(layer, "local kernels start");
        }
        let mut last_driven = started;
        while !is_over {
            if portions.suspended.is_none() {
                let loaded = |expert: u32| self.placement.local.get(layer, expert).cloned();
                let next = portions.local.keys().filter_map(|&expert| Some((expert, loaded(expert)?)));
                let mut missing_rows = MIN_KERNEL_ROWS;
                let is_needed = |(expert, _): &(u32, Arc<PackedExpert>)| {
                    let before = missing_rows;
                    missing_rows = missing_rows.saturating_sub(portions.local[expert].len());
                    before > 0
                };
                let next: Vec<_> = next.take_while(is_needed).collect();
                if next.is_empty() {
                    break;
                }
                let (mut slots, mut jobs) = (Vec::new(), Vec::with_capacity(next.len()));
                for (expert, packed) in next {
                    let expert_slots = portions.local.remove(&expert).unwrap_or_default();
                    let tokens = expert_slots.iter().map(|&slot| slot / call.routed.top_k as u32);
                    jobs.push((packed, tokens.collect()));
                    self.metrics.reads.inc();
                    self.metrics.activity.count_pairs(layer, expert_slots.iter().map(|_| expert));
                    slots.extend(expert_slots);
                }
                portions.suspended = Some((slots, SuspendedRows::new(jobs, portions.inputs.clone())));
            }
            let Some((slots, mut rows)) = portions.suspended.take() else { break };
            let mut must_suspend = || {
                if last_driven.elapsed() >= DRIVE_INTERVAL && !self.placement.links.is_empty() {
                    self.exchange.drive();
                    last_driven = Instant::now();
                }
                is_over = is_over || must_stop();
                is_over
            };
            let done = self.pool.advance(&mut rows, &mut must_suspend);
            if done.map_err(|source| ExpertError::Kernel { layer, source })? {
                self.count(call, &slots, "local", |tally| &mut tally.local);
                portions.computed.push(ComputedRows { slots, rows: rows.into_output() });
            } else {
                portions.suspended = Some((slots, rows));
            }
        }
        if had_local && portions.local.is_empty() && portions.suspended.is_none() {
            tracing::trace!(layer, "local kernels done");
        }
        let took = started.elapsed();
        self.time.local += took;
        self.metrics.activity.record_local(took);
        match portions.suspended.is_none() && !is_over {
            true => Ok(portions.local.pop_first().into_iter().collect()),
            false => Ok(BTreeMap::new()),
        }
    }

    /// Sums the rows that all portions of `call` have computed for `tokens`, and the `shared` contribution. Writes tokens x
    /// hidden elements to `output`.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub(crate) fn reduce_portions(
        &self,
        call: &LayerCall<'_>,
        portions: &Portions,
        tokens: Range<usize>,
        shared: Option<&[u8]>,
        output: &mut [u8],
    ) -> Result<(), ExpertError> {
        self.reduce(call, (&portions.computed, &portions.replies), tokens, shared, output)
    }
}
