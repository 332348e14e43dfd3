//! What past requests used, by tenant: no tenant's predictions lean on another's requests.

use crate::quality::Balance;
use crate::store::Stored;
use remoe_predictor::{
    ByPhase, Embedding, Experience, Learned, Phase, PredictError, Shares, SimilarPrompts, TrainingOptions,
};
use std::collections::{BTreeMap, HashMap, HashSet};

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
    next: u64,
}

#[derive(Debug)]
struct Past {
    similar: SimilarPrompts,
    /// The number of the request in each slot in use.
    numbers: HashMap<u32, u64>,
    /// Requests when the tree was grown; 0: there is none.
    planted: usize,
    /// The number of its latest request.
    latest: u64,
    balance: ByPhase<Balance>,
}

impl Memory {
    /// Nothing yet, and never more than `capacity` requests, at least one for every tenant.
    pub(crate) fn new(embedding: Embedding, capacity: usize) -> Self {
        let options = TrainingOptions::default();
        Self { embedding, options, capacity: capacity.max(1), tenants: BTreeMap::new(), next: 0 }
    }

    /// Takes in what was stored.
    pub(crate) fn restore(&mut self, stored: Stored) -> Result<(), PredictError> {
        self.next = self.next.max(stored.number.saturating_add(1));
        self.take_in(&stored)
    }

    /// Learns what a request of `tenant` used.
    pub(crate) fn learn(&mut self, tenant: Tenant, experience: Experience) -> Result<Stored, PredictError> {
        let stored = Stored { number: self.next, tenant, experience };
        self.next += 1;
        self.take_in(&stored)?;
        Ok(stored)
    }

    fn take_in(&mut self, stored: &Stored) -> Result<(), PredictError> {
        let Stored { number, tenant, experience } = stored;
        if !self.tenants.contains_key(tenant) {
            self.admit(*tenant, experience)?;
        }
        let share = self.share();
        let Some(past) = self.tenants.get_mut(tenant) else { return Ok(()) };
        past.latest = *number;
        if past.numbers.is_empty() {
            let first = past.similar.history().slots().next();
            past.numbers.extend(first.map(|slot| (slot, *number)));
            return Ok(());
        }
        let Learned { slot, left } = past.similar.learn_from(experience, share, SEMANTIC)?;
        for slot in left {
            past.numbers.remove(&slot);
        }
        past.numbers.insert(slot, *number);
        let grown = past.numbers.len();
        if grown >= PLANTED && grown >= past.planted.saturating_mul(REPLANTED) {
            past.similar = past.similar.planted(self.options.tree)?;
            past.planted = grown;
        }
        Ok(())
    }

    /// Begins the past of a new tenant; the others give room, their oldest requests first.
    fn admit(&mut self, tenant: Tenant, first: &Experience) -> Result<(), PredictError> {
        let similar = SimilarPrompts::begin("sps", self.embedding.clone(), first, self.options.alpha)?;
        let similar = similar.tempered("sps", ByPhase::both(TEMPERATURE));
        if self.tenants.len() >= MOST_TENANTS.min(self.capacity) {
            let silent = self.tenants.iter().min_by_key(|(_, past)| past.latest).map(|(tenant, _)| *tenant);
            silent.map(|tenant| self.tenants.remove(&tenant));
        }
        let balance = ByPhase::both(Balance::default());
        self.tenants
            .insert(tenant, Past { similar, numbers: HashMap::new(), planted: 0, latest: 0, balance });
        let share = self.share();
        for past in self.tenants.values_mut() {
            let surplus = past.numbers.len().saturating_sub(share);
            let mut oldest: Vec<(u64, u32)> =
                past.numbers.iter().map(|(slot, number)| (*number, *slot)).collect();
            oldest.sort_unstable();
            for (_, slot) in oldest.into_iter().take(surplus) {
                past.similar.forget(slot);
                past.numbers.remove(&slot);
            }
        }
        Ok(())
    }

    /// Requests that each tenant may have.
    fn share(&self) -> usize {
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
        self.tenants.values().map(|past| past.numbers.len()).sum()
    }

    /// The numbers of all of them.
    pub(crate) fn numbers(&self) -> HashSet<u64> {
        self.tenants.values().flat_map(|past| past.numbers.values().copied()).collect()
    }

    /// Bytes that the requests take.
    pub(crate) fn bytes(&self) -> u64 {
        self.tenants.values().map(|past| past.similar.history().bytes()).sum()
    }
}
