//! Expert usage of past requests, by tenant: no tenant's predictions depend on another's requests.

use crate::growth::{Grower, Growing, TreeState};
use crate::numbers::RecordNumbers;
use crate::quality::Balance;
use crate::store::StoredRequest;
use crate::tenant::Tenant;
use remoe_predictor::{
    ByPhase, Embedding, Experience, History, Learned, Phase, PredictError, Shares, SimilarPrompts,
    TrainingOptions,
};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::RangeInclusive;

/// Tenants that are remembered apart, at most; beyond them the one that was silent for longest is forgotten.
const MOST_TENANTS: usize = 64;
/// Weight of prompts in redundancy, from 0, the activations alone, to 1, the prompts alone.
const SEMANTIC: f32 = 0.5;
/// Requests that are compared one by one; with more there is a tree.
const PLANTED: usize = 512;
/// Requests that are compared one by one, at most, while there is no tree yet: another tenant's may be growing.
const MOST_COMPARED: usize = 4 * PLANTED;
/// A tree whose leaves are deeper is grown again before its time: requests have come in an order that it does not suit.
const DEEPEST: usize = 48;
/// Temperature of the softmax over similar prompts, as it is fitted on the demo model.
const TEMPERATURE: f32 = 0.03;

/// Lengths of the vectors of prompts, which are 1 but for rounding.
const LENGTHS: RangeInclusive<f32> = 0.99..=1.01;

/// The past of all tenants, within a number of requests.
#[derive(Debug)]
pub(crate) struct RequestMemory {
    embedding: Embedding,
    alpha: usize,
    grower: Grower,
    capacity: usize,
    tenants: BTreeMap<Tenant, TenantHistory>,
    numbers: RecordNumbers,
}

#[derive(Debug)]
struct TenantHistory {
    similar: SimilarPrompts,
    slots: Slots,
    /// Requests that the tree was last grown among; 0: there is none.
    planted: usize,
    /// Requests that have come since.
    came: usize,
    /// One of them was deep in it.
    deep: bool,
    /// The next tree: predictions go through the one before until it has grown.
    growing: Option<Growing>,
    /// The number of its latest request.
    latest: u64,
    balance: ByPhase<Balance>,
}

impl TenantHistory {
    /// Forgets the request in `slot`, which has left.
    fn leaves(&mut self, slot: u32) {
        self.slots.remove(slot);
        self.changes(slot);
    }

    /// A tree that grows knows `slot` as it was.
    fn changes(&mut self, slot: u32) {
        if let Some(growing) = &mut self.growing {
            growing.changes(slot);
        }
    }
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
        if count == 0 {
            // Each new tenant asks it of all others.
            return Vec::new();
        }
        let mut slots: Vec<(u64, u32)> = self.numbers.iter().map(|(slot, number)| (*number, *slot)).collect();
        slots.sort_unstable();
        slots.into_iter().take(count).map(|(_, slot)| slot).collect()
    }
}

impl RequestMemory {
    /// Nothing yet, and never more than `capacity` requests, at least one for every tenant.
    pub(crate) fn new(embedding: Embedding, capacity: usize) -> Self {
        let options = TrainingOptions::default();
        Self {
            embedding,
            alpha: options.alpha,
            grower: Grower::new(options.tree),
            capacity: capacity.max(1),
            tenants: BTreeMap::new(),
            numbers: RecordNumbers::new(),
        }
    }

    /// Takes in what was stored.
    pub(crate) fn restore(&mut self, stored: StoredRequest) -> Result<(), PredictError> {
        self.numbers.passed(stored.number);
        self.take_in(&stored)
    }

    /// Finishes the restore: grows the trees here, as no request waits yet.
    pub(crate) fn restored(&mut self) -> Result<(), PredictError> {
        for past in self.tenants.values_mut().filter(|past| past.slots.len() >= PLANTED) {
            past.similar.plant(self.grower.options)?;
            (past.planted, past.came) = (past.slots.len(), 0);
        }
        Ok(())
    }

    /// Learns what a request of `tenant` used.
    pub(crate) fn learn(
        &mut self,
        tenant: Tenant,
        experience: Experience,
    ) -> Result<StoredRequest, PredictError> {
        let stored = StoredRequest { number: self.numbers.draw(), tenant, experience };
        self.take_in(&stored)?;
        self.grow(tenant);
        Ok(stored)
    }

    /// Learns what another gateway tells. False where that is known already, or is no request's: a vector of another length
    /// would be like every prompt.
    pub(crate) fn share(&mut self, stored: &StoredRequest) -> Result<bool, PredictError> {
        let length = stored.experience.vector.iter().map(|value| value * value).sum::<f32>().sqrt();
        let past = self.tenants.get(&stored.tenant);
        let is_known = past.is_some_and(|past| past.slots.known.contains(&stored.number));
        if is_known || !LENGTHS.contains(&length) {
            return Ok(false);
        }
        self.take_in(stored)?;
        self.grow(stored.tenant);
        Ok(true)
    }

    /// The tree of `tenant` grows on, or begins to where as many requests have come as the last one was grown among.
    fn grow(&mut self, tenant: Tenant) {
        let Some(past) = self.tenants.get_mut(&tenant) else { return };
        if let Some(growing) = &mut past.growing {
            match growing.step(&past.similar) {
                TreeState::Underway => return,
                TreeState::Grown(tree) => past.similar.search_through(*tree),
                TreeState::Failed => {}
            }
            past.growing = None;
        }
        let requests = past.slots.len();
        let due = if past.deep { past.planted.min(PLANTED) } else { past.planted };
        if requests >= PLANTED && past.came >= due {
            past.growing = self.grower.begin(&past.similar);
            if past.growing.is_some() {
                (past.planted, past.came, past.deep) = (requests, 0, false);
            }
        }
    }

    /// Forgets the past of `tenant`.
    pub(crate) fn forget(&mut self, tenant: Tenant) {
        self.tenants.remove(&tenant);
    }

    fn take_in(&mut self, stored: &StoredRequest) -> Result<(), PredictError> {
        let StoredRequest { number, tenant, experience } = stored;
        if !self.tenants.contains_key(tenant) {
            return self.admit(*tenant, experience, *number);
        }
        let share = self.share_of_each();
        let Some(past) = self.tenants.get_mut(tenant) else { return Ok(()) };
        past.latest = past.latest.max(*number);
        let Learned { slot, left } = past.similar.learn_from(experience, share, SEMANTIC)?;
        for slot in left {
            past.leaves(slot);
        }
        past.slots.insert(slot, *number);
        past.changes(slot);
        past.deep |= past.similar.depth_of(slot) > DEEPEST;
        past.came += 1;
        Ok(())
    }

    /// Begins the past of a new tenant; the others give room, their oldest requests first.
    fn admit(&mut self, tenant: Tenant, first: &Experience, number: u64) -> Result<(), PredictError> {
        let similar = SimilarPrompts::begin("sps", self.embedding.clone(), first, self.alpha, MOST_COMPARED)?;
        let similar = similar.tempered("sps", ByPhase::both(TEMPERATURE));
        if self.tenants.len() >= MOST_TENANTS.min(self.capacity) {
            let silent = self.tenants.iter().min_by_key(|(_, past)| past.latest).map(|(tenant, _)| *tenant);
            silent.map(|tenant| self.tenants.remove(&tenant));
        }
        let mut slots = Slots::default();
        similar.history().slots().for_each(|slot| slots.insert(slot, number));
        let balance = ByPhase::both(Balance::default());
        let past = TenantHistory {
            similar,
            slots,
            planted: 0,
            came: 0,
            deep: false,
            growing: None,
            latest: number,
            balance,
        };
        self.tenants.insert(tenant, past);
        let share = self.share_of_each();
        for past in self.tenants.values_mut() {
            for slot in past.slots.oldest(past.slots.len().saturating_sub(share)) {
                past.similar.forget(slot);
                past.leaves(slot);
            }
        }
        Ok(())
    }

    /// Requests that each tenant may have.
    fn share_of_each(&self) -> usize {
        (self.capacity / self.tenants.len().max(1)).max(1)
    }

    /// Requests of `tenant` that are remembered; none where it has no past.
    pub(crate) fn history(&self, tenant: Tenant) -> Option<&History> {
        self.tenants.get(&tenant).map(|past| &**past.similar.history())
    }

    /// Predicts the usage of a prompt with this vector from the past of `tenant`; `None` if it has no past.
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

#[cfg(test)]
mod tests {
    use super::*;
    use remoe_predictor::{Index, Regrowth};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Sender, channel};

    const TENANT: Tenant = Tenant(1);

    /// Three dimensions in use and as many zeros: a tree's sketches keep half of the dimensions, which then lose nothing.
    const WIDTH: usize = 6;

    /// The vector of request `number`, of length 1; all are about as far apart.
    fn vector(number: usize) -> Vec<f32> {
        let angle = number as f32 * 2.399_963;
        let height = (number as f32 * 0.618_034).fract() * 1.6 - 0.8;
        let radius = (1.0 - height * height).sqrt();
        vec![radius * angle.cos(), radius * angle.sin(), height, 0.0, 0.0, 0.0]
    }

    /// The expert that requests like `number` use: there is one for each octant.
    fn expert(number: usize) -> usize {
        vector(number)[..3].iter().fold(0, |octant, value| 2 * octant + usize::from(*value > 0.0))
    }

    fn experience(number: usize) -> Experience {
        let mut weights = vec![0.0; 2 * 8];
        (weights[expert(number)], weights[8 + expert(number)]) = (1.0, 1.0);
        let prefill = Shares::from_weights(8, weights).unwrap();
        Experience { vector: vector(number), prefill, decode: None }
    }

    /// A memory whose trees grow when they are let, and how many have begun.
    fn memory(capacity: usize) -> (RequestMemory, Sender<()>, Arc<AtomicUsize>) {
        let embedding = Embedding::from_rows(WIDTH, &[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]).unwrap();
        let (let_grow, may_grow) = channel();
        let may_grow = std::sync::Mutex::new(may_grow);
        let begun = Arc::new(AtomicUsize::new(0));
        let counted = begun.clone();
        let options = TrainingOptions::default().tree;
        let grower = Grower::running(options, move |regrowth: Regrowth| {
            counted.fetch_add(1, Ordering::SeqCst);
            may_grow.lock().unwrap().recv().map_err(|gone| PredictError::Thread(gone.to_string()))?;
            regrowth.run()
        });
        (RequestMemory { grower, ..RequestMemory::new(embedding, capacity) }, let_grow, begun)
    }

    fn learn(memory: &mut RequestMemory, numbers: std::ops::Range<usize>) {
        for number in numbers {
            memory.learn(TENANT, experience(number)).unwrap();
        }
    }

    fn has_tree(memory: &RequestMemory) -> bool {
        matches!(memory.tenants[&TENANT].similar.index(), Index::Tree(_))
    }

    /// Counts the requests of `numbers` for which the expert that they use is predicted most.
    fn recognised(memory: &RequestMemory, numbers: std::ops::Range<usize>) -> usize {
        let is_known = |number: &usize| {
            let shares = memory.predict(TENANT, &vector(*number)).unwrap().unwrap().prefill;
            let row = &shares.values()[..8];
            row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 == expert(*number)
        };
        numbers.filter(is_known).count()
    }

    #[test]
    fn predictions_continue_during_tree_build_and_records_join_it() {
        let (mut memory, let_grow, begun) = memory(2000);
        learn(&mut memory, 0..PLANTED);
        while begun.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        // It grows until it is let: all of this is answered, and learned, meanwhile.
        assert!(!has_tree(&memory));
        let before = recognised(&memory, 0..100);
        learn(&mut memory, PLANTED..1500);
        assert!(!has_tree(&memory) && begun.load(Ordering::SeqCst) == 1, "one at a time");
        assert_eq!(memory.len(), 1500);
        let (old, new) = (recognised(&memory, 0..100), recognised(&memory, 1400..1500));
        let_grow.send(()).unwrap();
        let mut more = 1500;
        while !has_tree(&memory) {
            learn(&mut memory, more..more + 1);
            more += 1;
            assert!(more < 2000 || memory.len() == 2000);
        }
        let Index::Tree(tree) = memory.tenants[&TENANT].similar.index() else { panic!("no tree") };
        assert_eq!(
            tree.leaf_sizes().iter().sum::<usize>(),
            memory.len(),
            "every remembered request is in it"
        );
        // Before, all requests were compared with.
        assert!(before > 80 && old > 80 && new > 80, "{before} {old} {new}");
        // However many requests came meanwhile, it finds what one that is planted at once does.
        let through = |memory: &RequestMemory| [recognised(memory, 0..100), recognised(memory, 1400..1500)];
        let grown = through(&memory);
        memory.restored().unwrap();
        let planted = through(&memory);
        assert!(grown.iter().chain(&planted).all(|recognised| *recognised > 80), "{grown:?} {planted:?}");
    }

    #[test]
    fn what_leaves_while_a_tree_grows_is_not_in_it() {
        let (mut memory, let_grow, _) = memory(PLANTED + 100);
        learn(&mut memory, 0..PLANTED + 400);
        assert_eq!(memory.len(), PLANTED + 100);
        let_grow.send(()).unwrap();
        let mut more = PLANTED + 400;
        while !has_tree(&memory) {
            learn(&mut memory, more..more + 1);
            more += 1;
        }
        let past = &memory.tenants[&TENANT];
        let Index::Tree(tree) = past.similar.index() else { panic!("no tree") };
        assert_eq!(tree.leaf_sizes().iter().sum::<usize>(), PLANTED + 100);
        assert_eq!(past.similar.history().len(), past.slots.len());
    }

    #[test]
    fn a_tenant_that_is_forgotten_while_its_tree_grows_begins_anew() {
        let (mut memory, let_grow, begun) = memory(2000);
        learn(&mut memory, 0..PLANTED);
        memory.forget(TENANT);
        learn(&mut memory, 0..PLANTED + 10);
        assert!(!has_tree(&memory) && begun.load(Ordering::SeqCst) <= 1);
        let_grow.send(()).unwrap();
        let_grow.send(()).unwrap();
        let mut more = PLANTED + 10;
        while !has_tree(&memory) {
            learn(&mut memory, more..more + 1);
            more += 1;
        }
        // A third one may have begun when the second took long.
        assert!(begun.load(Ordering::SeqCst) >= 2, "the first one was not thrown away");
    }

    #[test]
    fn what_was_stored_is_behind_a_tree_at_once() {
        let (mut memory, _let_grow, begun) = memory(2000);
        for number in 0..700 {
            let stored =
                StoredRequest { number: number as u64 + 1, tenant: TENANT, experience: experience(number) };
            memory.restore(stored).unwrap();
        }
        memory.restored().unwrap();
        assert!(has_tree(&memory) && begun.load(Ordering::SeqCst) == 0);
    }
}
