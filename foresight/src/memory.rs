//! What past requests used, by tenant: no tenant's predictions lean on another's requests.

use crate::numbers::Numbers;
use crate::quality::Balance;
use crate::store::Stored;
use remoe_predictor::{
    ByPhase, Embedding, Experience, Learned, Phase, PredictError, Shares, SimilarPrompts, TrainingOptions,
};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::RangeInclusive;

/// Tenants that are remembered apart, at most; beyond them the one that was silent for longest is forgotten.
const MOST_TENANTS: usize = 64;
/// What counts for redundancy, from 0, the activations alone, to 1, the prompts alone.
const SEMANTIC: f32 = 0.5;
/// Requests that are compared one by one; with more there is a tree.
const PLANTED: usize = 512;
/// The tree is grown anew when there are so many times as many.
const REPLANTED: usize = 4;
/// Temperature of the softmax over similar prompts, as it is fitted on the demo model.
const TEMPERATURE: f32 = 0.03;

/// Lengths of the vectors of prompts, which are 1 but for rounding.
const LENGTHS: RangeInclusive<f32> = 0.99..=1.01;

/// A tenant, by a number that its name gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Tenant(pub(crate) u64);

impl Tenant {
    /// The tenant called `name`; those without a name are one.
    #[must_use]
    pub fn named(name: &str) -> Self {
        // FNV-1a: the same in every process, so that stores are understood.
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        Self(name.bytes().fold(0xcbf2_9ce4_8422_2325, step))
    }
}

/// The past of all tenants, within a number of requests.
#[derive(Debug)]
pub(crate) struct Memory {
    embedding: Embedding,
    options: TrainingOptions,
    capacity: usize,
    tenants: BTreeMap<Tenant, Past>,
    numbers: Numbers,
}

#[derive(Debug)]
struct Past {
    similar: SimilarPrompts,
    slots: Slots,
    /// Requests when the tree was grown; 0: there is none.
    planted: usize,
    /// The number of its latest request.
    latest: u64,
    balance: ByPhase<Balance>,
}

/// The number of the request in each slot in use.
#[derive(Debug, Default)]
struct Slots {
    numbers: HashMap<u32, u64>,
    known: HashSet<u64>,
}

impl Slots {
    fn insert(&mut self, slot: u32, number: u64) {
        self.remove(slot);
        self.numbers.insert(slot, number);
        self.known.insert(number);
    }

    fn remove(&mut self, slot: u32) {
        if let Some(number) = self.numbers.remove(&slot) {
            self.known.remove(&number);
        }
    }

    fn len(&self) -> usize {
        self.numbers.len()
    }

    /// So many slots, those of the oldest requests.
    fn oldest(&self, count: usize) -> Vec<u32> {
        let mut slots: Vec<(u64, u32)> = self.numbers.iter().map(|(slot, number)| (*number, *slot)).collect();
        slots.sort_unstable();
        slots.into_iter().take(count).map(|(_, slot)| slot).collect()
    }
}

impl Memory {
    /// Nothing yet, and never more than `capacity` requests, at least one for every tenant.
    pub(crate) fn new(embedding: Embedding, capacity: usize) -> Self {
        let options = TrainingOptions::default();
        Self {
            embedding,
            options,
            capacity: capacity.max(1),
            tenants: BTreeMap::new(),
            numbers: Numbers::new(),
        }
    }

    /// Takes in what was stored.
    pub(crate) fn restore(&mut self, stored: Stored) -> Result<(), PredictError> {
        self.numbers.passed(stored.number);
        self.take_in(&stored)
    }

    /// Learns what a request of `tenant` used.
    pub(crate) fn learn(&mut self, tenant: Tenant, experience: Experience) -> Result<Stored, PredictError> {
        let stored = Stored { number: self.numbers.draw(), tenant, experience };
        self.take_in(&stored)?;
        Ok(stored)
    }

    /// Learns what another gateway tells. False where that is known already, or is no request's: a vector of another length
    /// would be like every prompt.
    pub(crate) fn share(&mut self, stored: &Stored) -> Result<bool, PredictError> {
        let length = stored.experience.vector.iter().map(|value| value * value).sum::<f32>().sqrt();
        let past = self.tenants.get(&stored.tenant);
        let is_known = past.is_some_and(|past| past.slots.known.contains(&stored.number));
        if is_known || !LENGTHS.contains(&length) {
            return Ok(false);
        }
        self.take_in(stored)?;
        Ok(true)
    }

    /// Forgets the past of `tenant`.
    pub(crate) fn forget(&mut self, tenant: Tenant) {
        self.tenants.remove(&tenant);
    }

    fn take_in(&mut self, stored: &Stored) -> Result<(), PredictError> {
        let Stored { number, tenant, experience } = stored;
        if !self.tenants.contains_key(tenant) {
            return self.admit(*tenant, experience, *number);
        }
        let share = self.share_of_each();
        let Some(past) = self.tenants.get_mut(tenant) else { return Ok(()) };
        past.latest = past.latest.max(*number);
        let Learned { slot, left } = past.similar.learn_from(experience, share, SEMANTIC)?;
        for slot in left {
            past.slots.remove(slot);
        }
        past.slots.insert(slot, *number);
        let grown = past.slots.len();
        if grown >= PLANTED && grown >= past.planted.saturating_mul(REPLANTED) {
            past.similar = past.similar.planted(self.options.tree)?;
            past.planted = grown;
        }
        Ok(())
    }

    /// Begins the past of a new tenant; the others give room, their oldest requests first.
    fn admit(&mut self, tenant: Tenant, first: &Experience, number: u64) -> Result<(), PredictError> {
        let similar = SimilarPrompts::begin("sps", self.embedding.clone(), first, self.options.alpha)?;
        let similar = similar.tempered("sps", ByPhase::both(TEMPERATURE));
        if self.tenants.len() >= MOST_TENANTS.min(self.capacity) {
            let silent = self.tenants.iter().min_by_key(|(_, past)| past.latest).map(|(tenant, _)| *tenant);
            silent.map(|tenant| self.tenants.remove(&tenant));
        }
        let mut slots = Slots::default();
        similar.history().slots().for_each(|slot| slots.insert(slot, number));
        let balance = ByPhase::both(Balance::default());
        self.tenants.insert(tenant, Past { similar, slots, planted: 0, latest: number, balance });
        let share = self.share_of_each();
        for past in self.tenants.values_mut() {
            for slot in past.slots.oldest(past.slots.len().saturating_sub(share)) {
                past.similar.forget(slot);
                past.slots.remove(slot);
            }
        }
        Ok(())
    }

    /// Requests that each tenant may have.
    fn share_of_each(&self) -> usize {
        (self.capacity / self.tenants.len().max(1)).max(1)
    }

    /// What the past of `tenant` says of a prompt with this vector; none where it has no past.
    pub(crate) fn predict(
        &self,
        tenant: Tenant,
        vector: &[f32],
    ) -> Result<Option<ByPhase<Shares>>, PredictError> {
        let past = self.tenants.get(&tenant);
        past.map(|past| past.similar.predict_by_vector(vector)).transpose()
    }

    /// Mean shares of all requests that are remembered; none where there are none.
    pub(crate) fn mean(&self) -> Result<Option<ByPhase<Shares>>, PredictError> {
        let mut histories = self.tenants.values().map(|past| past.similar.history()).peekable();
        let Some(first) = histories.peek() else { return Ok(None) };
        let (cells, experts) = (first.layers() * first.experts(), first.experts());
        let mut sums = ByPhase::both(vec![0.0_f32; cells]);
        for history in histories {
            for (slot, phase) in history.slots().flat_map(|slot| Phase::ALL.map(|phase| (slot, phase))) {
                let pairs = sums.of_mut(phase).iter_mut().zip(history.share_row(slot, phase));
                pairs.for_each(|(sum, share)| *sum += share);
            }
        }
        ByPhase::try_each(|phase| Shares::from_weights(experts, sums.of(phase).clone())).map(Some)
    }

    /// Which of two ways has been nearer for `tenant`; to be told what turned out.
    pub(crate) fn balance(&mut self, tenant: Tenant) -> Option<&mut ByPhase<Balance>> {
        self.tenants.get_mut(&tenant).map(|past| &mut past.balance)
    }

    /// The weight of the tenant's own past in a prediction of `phase`, from 0 to 1.
    pub(crate) fn weight_of_own(&self, tenant: Tenant, phase: Phase) -> f64 {
        self.tenants.get(&tenant).map_or(0.0, |past| past.balance.of(phase).of_own())
    }

    /// Requests that are remembered.
    pub(crate) fn len(&self) -> usize {
        self.tenants.values().map(|past| past.slots.len()).sum()
    }

    /// The numbers of all of them.
    pub(crate) fn numbers(&self) -> HashSet<u64> {
        self.tenants.values().flat_map(|past| past.slots.known.iter().copied()).collect()
    }

    /// Bytes that the requests take.
    pub(crate) fn bytes(&self) -> u64 {
        self.tenants.values().map(|past| past.similar.history().bytes()).sum()
    }
}
