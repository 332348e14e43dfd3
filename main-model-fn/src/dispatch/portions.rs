//! A layer call in portions, between which other work can be done: a prompt's layer may take seconds.
//!
//! Local pairs are computed expert by expert, each suspended where a portion ends, so that no weight is read twice;
//! remote pairs are taken token by token. A portion's messages are answered before it ends, and the sum is made when
//! all rows are there, so that portions change no answer.

use super::error::ExpertError;
use super::hosts::LayerHosts;
use super::join::{Computed, DRIVEN_EVERY, Experts, LayerCall, local_slots};
use super::outstanding::ReplicaReply;
use super::split::{remote_slots, units};
use crate::routing::Routed;
use remoe_kernels::{PackedExpert, SuspendedRows};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// A layer call in portions: the pairs that are left, and the rows of those that are computed.
pub(crate) struct Portions {
    /// The placement that the rest is split by.
    generation: u64,
    /// Slots by expert.
    local: BTreeMap<u32, Vec<u32>>,
    /// The slots of local experts whose computation has begun.
    begun: Option<(Vec<u32>, SuspendedRows)>,
    inputs: Arc<[u8]>,
    /// Slots by class of the layer's hosts, ascending.
    remote: Vec<Vec<u32>>,
    computed: Vec<Computed>,
    answers: Vec<ReplicaReply>,
}

impl Portions {
    /// True once every pair has been computed.
    pub(crate) fn is_done(&self) -> bool {
        self.local.is_empty() && self.begun.is_none() && !self.has_remote()
    }

    /// True while pairs are left for remote functions.
    pub(crate) fn has_remote(&self) -> bool {
        self.remote.iter().any(|slots| !slots.is_empty())
    }

    /// Splits the pairs that are left by who computes them under the placement of `generation`.
    fn split_again(&mut self, routed: &Routed, hosts: Option<&LayerHosts>, generation: u64) {
        let left: BTreeSet<u32> =
            self.local.values().chain(&self.remote).flat_map(|slots| slots.iter().copied()).collect();
        *self = Self {
            begun: self.begun.take(),
            computed: std::mem::take(&mut self.computed),
            answers: std::mem::take(&mut self.answers),
            ..Self::new(routed, hosts, generation, self.inputs.clone())
        };
        self.local
            .values_mut()
            .chain(&mut self.remote)
            .for_each(|slots| slots.retain(|it| left.contains(it)));
        self.local.retain(|_, slots| !slots.is_empty());
    }

    fn new(routed: &Routed, hosts: Option<&LayerHosts>, generation: u64, inputs: Arc<[u8]>) -> Self {
        let remote = hosts.map(|hosts| remote_slots(routed, hosts)).unwrap_or_default();
        let local = local_slots(routed, hosts);
        Self { generation, local, begun: None, inputs, remote, computed: Vec::new(), answers: Vec::new() }
    }

    /// Takes the remote pairs of the next tokens, of at most `most` units, but of [`LEAST_TOKENS`] at least.
    fn take_remote(&mut self, routed: &Routed, most: u64) -> (Vec<Vec<u32>>, u64) {
        let token = |slot: u32| slot as usize / routed.top_k;
        let mut next: Vec<u32> = self.remote.concat();
        next.sort_unstable();
        let (mut experts, mut sum, mut bound) = (BTreeSet::new(), 0, 0);
        for (taken, pairs) in next.chunk_by(|a, b| token(*a) == token(*b)).enumerate() {
            let of = |slot: &u32| routed.experts[*slot as usize];
            let unread = pairs.iter().filter(|slot| !experts.contains(&of(slot))).count() as u64;
            let more = pairs.len() as u64 + unread * units(0);
            if taken >= LEAST_TOKENS && sum + more > most {
                break;
            }
            sum += more;
            experts.extend(pairs.iter().map(of));
            bound = token(pairs[0]) + 1;
        }
        let cut = |slots: &mut Vec<u32>| {
            let rest = slots.split_off(slots.partition_point(|&slot| token(slot) < bound));
            std::mem::replace(slots, rest)
        };
        (self.remote.iter_mut().map(cut).collect(), sum)
    }
}

/// Tokens that a portion's messages have at least: remote functions read their experts again for every message.
const LEAST_TOKENS: usize = 32;

/// Rows that are worth a call of the kernels: experts with fewer are computed together.
const WORTH_A_CALL: usize = 512;

/// The remote pairs of a portion.
pub(crate) struct RemoteUnits {
    pub(crate) units: u64,
    /// Their answers had come before the local experts were done: how long they took is not known.
    pub(crate) hidden: bool,
}

impl Experts {
    /// Splits what is left of `portions` again if another placement is in force.
    pub(crate) fn follow_placement(&self, call: &LayerCall<'_>, portions: &mut Portions) {
        let placement = &self.placement;
        if portions.generation != placement.generation {
            portions.split_again(call.routed, placement.hosts(call.layer), placement.generation);
        }
    }

    /// Begins `call`, whose inputs are `inputs`, in portions.
    pub(crate) fn portions(&self, call: &LayerCall<'_>, inputs: Arc<[u8]>) -> Portions {
        let placement = &self.placement;
        Portions::new(call.routed, placement.hosts(call.layer), placement.generation, inputs)
    }

    /// Computes a portion under the placement that [`portions`](Self::portions) or
    /// [`follow_placement`](Self::follow_placement) have split by: remote pairs of at most about `most_remote` units,
    /// and local ones until `until` is true, which is asked about once a millisecond.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub(crate) fn compute_portion(
        &mut self,
        call: &LayerCall<'_>,
        portions: &mut Portions,
        most_remote: u64,
        until: &mut dyn FnMut() -> bool,
    ) -> Result<RemoteUnits, ExpertError> {
        let (remote, remote_units) = match portions.has_remote() {
            true => portions.take_remote(call.routed, most_remote),
            false => (Vec::new(), 0),
        };
        let slots = remote.iter().flatten();
        self.metrics.activity.routed(call.layer, slots.map(|&slot| call.routed.experts[slot as usize]));
        let mut outstanding = self.exchange.send_off(&self.placement, call, &remote, &mut self.fallback);
        let (started, before) = (Instant::now(), self.time.waited);
        let awaited = self.advance_local(call, portions, until)?;
        for (&expert, slots) in &awaited {
            self.metrics.activity.routed(call.layer, slots.iter().map(|_| expert));
        }
        let mut computed = self.compute_all(call, &mut outstanding, awaited)?;
        let hidden = 10 * (self.time.waited - before) < started.elapsed();
        if computed[0].0.is_empty() {
            // The next iteration uses the memory again.
            self.local_rows = computed.swap_remove(0).1;
        }
        portions.computed.extend(computed);
        portions.answers.append(&mut outstanding.answers);
        Ok(RemoteUnits { units: remote_units, hidden })
    }

    /// Computes local experts that are there until `until` is true or none is left. Where none is there although some
    /// are left, returns the slots of one of them, which has to be waited for.
    fn advance_local(
        &mut self,
        call: &LayerCall<'_>,
        portions: &mut Portions,
        until: &mut dyn FnMut() -> bool,
    ) -> Result<BTreeMap<u32, Vec<u32>>, ExpertError> {
        let (layer, started, mut is_over) = (call.layer, Instant::now(), false);
        let had_local = !portions.local.is_empty() || portions.begun.is_some();
        if had_local && portions.begun.is_none() && portions.computed.is_empty() {
            tracing::trace!(layer, "local kernels start");
        }
        let mut driven = started;
        while !is_over {
            if portions.begun.is_none() {
                let there = |expert: u32| self.placement.local.get(layer, expert).cloned();
                let next = portions.local.keys().filter_map(|&expert| Some((expert, there(expert)?)));
                let mut left = WORTH_A_CALL;
                let enough = |(expert, _): &(u32, Arc<PackedExpert>)| {
                    let before = left;
                    left = left.saturating_sub(portions.local[expert].len());
                    before > 0
                };
                let next: Vec<_> = next.take_while(enough).collect();
                if next.is_empty() {
                    break;
                }
                let (mut slots, mut jobs) = (Vec::new(), Vec::with_capacity(next.len()));
                for (expert, packed) in next {
                    let these = portions.local.remove(&expert).unwrap_or_default();
                    jobs.push((packed, these.iter().map(|&slot| slot / call.routed.top_k as u32).collect()));
                    self.metrics.reads.inc();
                    self.metrics.activity.routed(layer, these.iter().map(|_| expert));
                    slots.extend(these);
                }
                portions.begun = Some((slots, SuspendedRows::new(jobs, portions.inputs.clone())));
            }
            let Some((slots, mut rows)) = portions.begun.take() else { break };
            let mut is_late = || {
                if driven.elapsed() >= DRIVEN_EVERY && !self.placement.links.is_empty() {
                    self.exchange.drive();
                    driven = Instant::now();
                }
                is_over = is_over || until();
                is_over
            };
            let done = self.pool.advance(&mut rows, &mut is_late);
            if done.map_err(|source| ExpertError::Kernel { layer, source })? {
                self.count(call, &slots, "local", |tally| &mut tally.local);
                portions.computed.push((slots, rows.into_output()));
            } else {
                portions.begun = Some((slots, rows));
            }
        }
        if had_local && portions.local.is_empty() && portions.begun.is_none() {
            tracing::trace!(layer, "local kernels done");
        }
        let took = started.elapsed();
        self.time.local += took;
        self.metrics.activity.computed_here(took);
        match portions.begun.is_none() && !is_over {
            true => Ok(portions.local.pop_first().into_iter().collect()),
            false => Ok(BTreeMap::new()),
        }
    }

    /// Sums what all portions of `call` have computed for the tokens `tokens`, and `shared`, their shared experts'
    /// rows, where the layer has some. Writes tokens x hidden elements to `output`.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub(crate) fn join_portions(
        &self,
        call: &LayerCall<'_>,
        portions: &Portions,
        tokens: Range<usize>,
        shared: Option<&[u8]>,
        output: &mut [u8],
    ) -> Result<(), ExpertError> {
        self.reduce(call, (&portions.computed, &portions.answers), tokens, shared, output)
    }
}
