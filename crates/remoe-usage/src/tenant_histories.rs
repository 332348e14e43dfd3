//! Training history of each tenant in memory. No tenant's predictions depend on another tenant's requests (invariant
//! 11 of ARCHITECTURE.md).

use crate::history_store::StoredRequest;
use crate::quality::ErrorComparison;
use crate::record_numbers::RecordNumberGenerator;
use crate::tenant::Tenant;
use crate::tree_build::{BuildState, TreeBuild, TreeBuilder};
use remoe_predictor::{
    ByPhase, Embedding, History, Phase, PredictError, SimilarPrompts, SlotUpdate, TrainingOptions,
    UsageSample, UsageShares,
};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::RangeInclusive;

/// Largest number of tenants. Beyond it, the tenant without requests for the longest time is evicted.
const MAX_TENANTS: usize = 64;
/// Weight of prompt similarity in redundancy: 0 compares activations alone, 1 prompts alone.
const PROMPT_SIMILARITY_WEIGHT: f32 = 0.5;
/// Number of requests from which on a tree is built; fewer are searched linearly.
const MIN_TREE_REQUESTS: usize = 512;
/// Largest number of requests in a linear search. It applies until the first tree is built.
const MAX_LINEAR_SEARCH: usize = 4 * MIN_TREE_REQUESTS;
/// Leaf depth that triggers an early rebuild: the order of the requests suits the tree badly.
const MAX_LEAF_DEPTH: usize = 48;
/// Temperature of the softmax over similar prompts, fitted on the demo model.
const TEMPERATURE: f32 = 0.03;

/// Accepted lengths of prompt vectors, which are 1 but for rounding.
const VECTOR_LENGTHS: RangeInclusive<f32> = 0.99..=1.01;

/// Training histories of all tenants, with a common limit of requests.
#[derive(Debug)]
pub(crate) struct TenantHistories {
    embedding: Embedding,
    alpha: usize,
    builder: TreeBuilder,
    capacity: usize,
    tenants: BTreeMap<Tenant, TenantHistory>,
    numbers: RecordNumberGenerator,
}

#[derive(Debug)]
struct TenantHistory {
    similar: SimilarPrompts,
    slots: SlotNumbers,
    /// Requests in the last tree when it was built. 0 if there is no tree.
    tree_requests: usize,
    /// Requests that were added since.
    added: usize,
    /// True if such a request is in a leaf deeper than [`MAX_LEAF_DEPTH`].
    has_deep_leaf: bool,
    /// Build of the next tree. Searches use the present index until it is ready.
    next_tree: Option<TreeBuild>,
    /// Number of the latest request.
    latest_number: u64,
    comparison: ByPhase<ErrorComparison>,
}

impl TenantHistory {
    /// Removes the number of the request in `slot`, which was evicted.
    fn remove_slot(&mut self, slot: u32) {
        self.slots.remove(slot);
        self.mark_changed(slot);
    }

    /// Marks `slot` as changed for the tree under construction.
    fn mark_changed(&mut self, slot: u32) {
        if let Some(next_tree) = &mut self.next_tree {
            next_tree.mark_changed(slot);
        }
    }
}

/// Number of the request in each occupied slot.
#[derive(Debug, Default)]
struct SlotNumbers {
    numbers: HashMap<u32, u64>,
    known_numbers: HashSet<u64>,
}

impl SlotNumbers {
    fn insert(&mut self, slot: u32, number: u64) {
        self.remove(slot);
        self.numbers.insert(slot, number);
        self.known_numbers.insert(number);
    }

    fn remove(&mut self, slot: u32) {
        if let Some(number) = self.numbers.remove(&slot) {
            self.known_numbers.remove(&number);
        }
    }

    fn len(&self) -> usize {
        self.numbers.len()
    }

    /// Returns the slots of the `count` oldest requests.
    fn oldest(&self, count: usize) -> Vec<u32> {
        if count == 0 {
            // The common case: all other tenants are checked for each new tenant.
            return Vec::new();
        }
        let mut slots: Vec<(u64, u32)> = self.numbers.iter().map(|(slot, number)| (*number, *slot)).collect();
        slots.sort_unstable();
        slots.into_iter().take(count).map(|(_, slot)| slot).collect()
    }
}

impl TenantHistories {
    /// Creates empty histories for at most `capacity` requests, with at least one for each tenant.
    pub(crate) fn new(embedding: Embedding, capacity: usize) -> Self {
        let options = TrainingOptions::default();
        Self {
            embedding,
            alpha: options.alpha,
            builder: TreeBuilder::new(options.tree),
            capacity: capacity.max(1),
            tenants: BTreeMap::new(),
            numbers: RecordNumberGenerator::new(),
        }
    }

    /// Adds a stored request.
    pub(crate) fn restore(&mut self, stored: StoredRequest) -> Result<(), PredictError> {
        self.numbers.advance_past(stored.number);
        self.insert(&stored)
    }

    /// Builds the trees after all stored requests were added. Blocks: no request waits yet.
    pub(crate) fn finish_restore(&mut self) -> Result<(), PredictError> {
        for history in self.tenants.values_mut().filter(|history| history.slots.len() >= MIN_TREE_REQUESTS) {
            history.similar.build_tree(self.builder.options)?;
            (history.tree_requests, history.added) = (history.slots.len(), 0);
        }
        Ok(())
    }

    /// Adds a new request of `tenant` and returns its record.
    pub(crate) fn learn(
        &mut self,
        tenant: Tenant,
        usage: UsageSample,
    ) -> Result<StoredRequest, PredictError> {
        let stored = StoredRequest { number: self.numbers.next_number(), tenant, usage };
        self.insert(&stored)?;
        self.grow(tenant);
        Ok(stored)
    }

    /// Adds a request of another gateway. Returns false if it is known or its vector has not length 1: such a vector
    /// would resemble every prompt.
    pub(crate) fn insert_shared(&mut self, stored: &StoredRequest) -> Result<bool, PredictError> {
        let length = stored.usage.vector.iter().map(|value| value * value).sum::<f32>().sqrt();
        let history = self.tenants.get(&stored.tenant);
        let is_known = history.is_some_and(|history| history.slots.known_numbers.contains(&stored.number));
        if is_known || !VECTOR_LENGTHS.contains(&length) {
            return Ok(false);
        }
        self.insert(stored)?;
        self.grow(stored.tenant);
        Ok(true)
    }

    /// Advances the tree build of `tenant`. Starts a new build once as many requests were added as the last tree had.
    fn grow(&mut self, tenant: Tenant) {
        let Some(history) = self.tenants.get_mut(&tenant) else { return };
        if let Some(next_tree) = &mut history.next_tree {
            match next_tree.advance(&history.similar) {
                BuildState::Building => return,
                BuildState::Ready(tree) => history.similar.set_tree(*tree),
                BuildState::Failed => {}
            }
            history.next_tree = None;
        }
        let requests = history.slots.len();
        let rebuild_at = if history.has_deep_leaf {
            history.tree_requests.min(MIN_TREE_REQUESTS)
        } else {
            history.tree_requests
        };
        if requests >= MIN_TREE_REQUESTS && history.added >= rebuild_at {
            history.next_tree = self.builder.start(&history.similar);
            if history.next_tree.is_some() {
                (history.tree_requests, history.added, history.has_deep_leaf) = (requests, 0, false);
            }
        }
    }

    /// Removes the history of `tenant`.
    pub(crate) fn forget(&mut self, tenant: Tenant) {
        self.tenants.remove(&tenant);
    }

    fn insert(&mut self, stored: &StoredRequest) -> Result<(), PredictError> {
        let StoredRequest { number, tenant, usage } = stored;
        if !self.tenants.contains_key(tenant) {
            return self.add_tenant(*tenant, usage, *number);
        }
        let share = self.requests_per_tenant();
        let Some(history) = self.tenants.get_mut(tenant) else { return Ok(()) };
        history.latest_number = history.latest_number.max(*number);
        let SlotUpdate { slot, evicted } =
            history.similar.learn_from(usage, share, PROMPT_SIMILARITY_WEIGHT)?;
        for slot in evicted {
            history.remove_slot(slot);
        }
        history.slots.insert(slot, *number);
        history.mark_changed(slot);
        history.has_deep_leaf |= history.similar.depth_of(slot) > MAX_LEAF_DEPTH;
        history.added += 1;
        Ok(())
    }

    /// Adds a new tenant with its first request and evicts the oldest requests of tenants above their new share.
    fn add_tenant(&mut self, tenant: Tenant, first: &UsageSample, number: u64) -> Result<(), PredictError> {
        let similar = SimilarPrompts::from_first_request(
            "sps",
            self.embedding.clone(),
            first,
            self.alpha,
            MAX_LINEAR_SEARCH,
        )?;
        let similar = similar.with_temperature("sps", ByPhase::both(TEMPERATURE));
        if self.tenants.len() >= MAX_TENANTS.min(self.capacity) {
            let least_recent = self
                .tenants
                .iter()
                .min_by_key(|(_, history)| history.latest_number)
                .map(|(tenant, _)| *tenant);
            least_recent.map(|tenant| self.tenants.remove(&tenant));
        }
        let mut slots = SlotNumbers::default();
        similar.history().slots().for_each(|slot| slots.insert(slot, number));
        let comparison = ByPhase::both(ErrorComparison::default());
        let history = TenantHistory {
            similar,
            slots,
            tree_requests: 0,
            added: 0,
            has_deep_leaf: false,
            next_tree: None,
            latest_number: number,
            comparison,
        };
        self.tenants.insert(tenant, history);
        let share = self.requests_per_tenant();
        for history in self.tenants.values_mut() {
            for slot in history.slots.oldest(history.slots.len().saturating_sub(share)) {
                history.similar.remove(slot);
                history.remove_slot(slot);
            }
        }
        Ok(())
    }

    /// Returns the number of requests that each tenant may keep.
    fn requests_per_tenant(&self) -> usize {
        (self.capacity / self.tenants.len().max(1)).max(1)
    }

    /// Returns the history of `tenant`, if it has one.
    pub(crate) fn history(&self, tenant: Tenant) -> Option<&History> {
        self.tenants.get(&tenant).map(|history| &**history.similar.history())
    }

    /// Predicts the usage of a prompt with this vector from the history of `tenant`. Returns `None` if there is no
    /// history.
    pub(crate) fn predict(
        &self,
        tenant: Tenant,
        vector: &[f32],
    ) -> Result<Option<ByPhase<UsageShares>>, PredictError> {
        let history = self.tenants.get(&tenant);
        history.map(|history| history.similar.predict_by_vector(vector)).transpose()
    }

    /// Returns the mean shares of all requests. Returns `None` if there are none.
    pub(crate) fn mean(&self) -> Result<Option<ByPhase<UsageShares>>, PredictError> {
        let mut histories = self.tenants.values().map(|history| history.similar.history()).peekable();
        let Some(first) = histories.peek() else { return Ok(None) };
        let (cells, experts) = (first.layers() * first.experts(), first.experts());
        let mut sums = ByPhase::both(vec![0.0_f32; cells]);
        for history in histories {
            for (slot, phase) in history.slots().flat_map(|slot| Phase::ALL.map(|phase| (slot, phase))) {
                let pairs = sums.get_mut(phase).iter_mut().zip(history.share_row(slot, phase));
                pairs.for_each(|(sum, share)| *sum += share);
            }
        }
        ByPhase::try_each(|phase| UsageShares::from_weights(experts, sums.get(phase).clone())).map(Some)
    }

    /// Returns the comparison of the predictions for `tenant`, for recording errors.
    pub(crate) fn comparison(&mut self, tenant: Tenant) -> Option<&mut ByPhase<ErrorComparison>> {
        self.tenants.get_mut(&tenant).map(|history| &mut history.comparison)
    }

    /// Returns the weight of the tenant's own history in a prediction of `phase`, from 0 to 1.
    pub(crate) fn own_history_weight(&self, tenant: Tenant, phase: Phase) -> f64 {
        self.tenants.get(&tenant).map_or(0.0, |history| history.comparison.get(phase).own_weight())
    }

    /// Returns the number of requests.
    pub(crate) fn len(&self) -> usize {
        self.tenants.values().map(|history| history.slots.len()).sum()
    }

    /// Returns the numbers of all requests.
    pub(crate) fn numbers(&self) -> HashSet<u64> {
        self.tenants.values().flat_map(|history| history.slots.known_numbers.iter().copied()).collect()
    }

    /// Returns the memory of the requests, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.tenants.values().map(|history| history.similar.history().bytes()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoe_predictor::{PromptIndex, TreeRebuild};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Sender, channel};

    const TENANT: Tenant = Tenant(1);

    /// Three dimensions with values and three zeros: sketches keep half of the dimensions and lose nothing.
    const WIDTH: usize = 6;

    /// Returns the unit vector of request `number`. All vectors are about equally far apart.
    fn vector(number: usize) -> Vec<f32> {
        let angle = number as f32 * 2.399_963;
        let height = (number as f32 * 0.618_034).fract() * 1.6 - 0.8;
        let radius = (1.0 - height * height).sqrt();
        vec![radius * angle.cos(), radius * angle.sin(), height, 0.0, 0.0, 0.0]
    }

    /// Returns the expert that request `number` uses: one for each octant.
    fn expert(number: usize) -> usize {
        vector(number)[..3].iter().fold(0, |octant, value| 2 * octant + usize::from(*value > 0.0))
    }

    fn usage(number: usize) -> UsageSample {
        let mut weights = vec![0.0; 2 * 8];
        (weights[expert(number)], weights[8 + expert(number)]) = (1.0, 1.0);
        let prefill = UsageShares::from_weights(8, weights).unwrap();
        UsageSample { vector: vector(number), prefill, decode: None }
    }

    /// Creates histories whose tree builds wait for a message. Also returns the sender of that message and the count
    /// of started builds.
    fn memory(capacity: usize) -> (TenantHistories, Sender<()>, Arc<AtomicUsize>) {
        let embedding = Embedding::from_rows(WIDTH, &[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]).unwrap();
        let (allow_build, build_allowed) = channel();
        let build_allowed = std::sync::Mutex::new(build_allowed);
        let started_builds = Arc::new(AtomicUsize::new(0));
        let build_count = started_builds.clone();
        let options = TrainingOptions::default().tree;
        let builder = TreeBuilder::with_build_function(options, move |rebuild: TreeRebuild| {
            build_count.fetch_add(1, Ordering::SeqCst);
            build_allowed.lock().unwrap().recv().map_err(|gone| PredictError::Thread(gone.to_string()))?;
            rebuild.run()
        });
        (
            TenantHistories { builder, ..TenantHistories::new(embedding, capacity) },
            allow_build,
            started_builds,
        )
    }

    fn learn(memory: &mut TenantHistories, numbers: std::ops::Range<usize>) {
        for number in numbers {
            memory.learn(TENANT, usage(number)).unwrap();
        }
    }

    fn has_tree(memory: &TenantHistories) -> bool {
        matches!(memory.tenants[&TENANT].similar.index(), PromptIndex::Tree(_))
    }

    /// Counts the requests of `numbers` whose expert gets the largest predicted share.
    fn recognised(memory: &TenantHistories, numbers: std::ops::Range<usize>) -> usize {
        let is_known = |number: &usize| {
            let shares = memory.predict(TENANT, &vector(*number)).unwrap().unwrap().prefill;
            let row = &shares.values()[..8];
            row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 == expert(*number)
        };
        numbers.filter(is_known).count()
    }

    #[test]
    fn predictions_continue_during_tree_build_and_records_join_it() {
        let (mut memory, allow_build, started_builds) = memory(2000);
        learn(&mut memory, 0..MIN_TREE_REQUESTS);
        while started_builds.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        // The build waits for its message. Meanwhile requests are predicted and learned.
        assert!(!has_tree(&memory));
        let before = recognised(&memory, 0..100);
        learn(&mut memory, MIN_TREE_REQUESTS..1500);
        assert!(!has_tree(&memory) && started_builds.load(Ordering::SeqCst) == 1, "one at a time");
        assert_eq!(memory.len(), 1500);
        let (old, new) = (recognised(&memory, 0..100), recognised(&memory, 1400..1500));
        allow_build.send(()).unwrap();
        let mut next_number = 1500;
        while !has_tree(&memory) {
            learn(&mut memory, next_number..next_number + 1);
            next_number += 1;
            assert!(next_number < 2000 || memory.len() == 2000);
        }
        let PromptIndex::Tree(tree) = memory.tenants[&TENANT].similar.index() else { panic!("no tree") };
        assert_eq!(
            tree.leaf_sizes().iter().sum::<usize>(),
            memory.len(),
            "every remembered request is in it"
        );
        // The linear search before compared all requests.
        assert!(before > 80 && old > 80 && new > 80, "{before} {old} {new}");
        // The tree finds what a tree built from scratch finds, despite the requests added meanwhile.
        let counts = |memory: &TenantHistories| [recognised(memory, 0..100), recognised(memory, 1400..1500)];
        let grown = counts(&memory);
        memory.finish_restore().unwrap();
        let rebuilt = counts(&memory);
        assert!(grown.iter().chain(&rebuilt).all(|recognised| *recognised > 80), "{grown:?} {rebuilt:?}");
    }

    #[test]
    fn slots_evicted_during_a_tree_build_are_not_in_it() {
        let (mut memory, allow_build, _) = memory(MIN_TREE_REQUESTS + 100);
        learn(&mut memory, 0..MIN_TREE_REQUESTS + 400);
        assert_eq!(memory.len(), MIN_TREE_REQUESTS + 100);
        allow_build.send(()).unwrap();
        let mut next_number = MIN_TREE_REQUESTS + 400;
        while !has_tree(&memory) {
            learn(&mut memory, next_number..next_number + 1);
            next_number += 1;
        }
        let history = &memory.tenants[&TENANT];
        let PromptIndex::Tree(tree) = history.similar.index() else { panic!("no tree") };
        assert_eq!(tree.leaf_sizes().iter().sum::<usize>(), MIN_TREE_REQUESTS + 100);
        assert_eq!(history.similar.history().len(), history.slots.len());
    }

    #[test]
    fn removed_tenant_discards_its_tree_build() {
        let (mut memory, allow_build, started_builds) = memory(2000);
        learn(&mut memory, 0..MIN_TREE_REQUESTS);
        memory.forget(TENANT);
        learn(&mut memory, 0..MIN_TREE_REQUESTS + 10);
        assert!(!has_tree(&memory) && started_builds.load(Ordering::SeqCst) <= 1);
        allow_build.send(()).unwrap();
        allow_build.send(()).unwrap();
        let mut next_number = MIN_TREE_REQUESTS + 10;
        while !has_tree(&memory) {
            learn(&mut memory, next_number..next_number + 1);
            next_number += 1;
        }
        // A third build may have started if the second took long.
        assert!(started_builds.load(Ordering::SeqCst) >= 2, "the first one was not thrown away");
    }

    #[test]
    fn restored_history_has_a_tree_at_once() {
        let (mut memory, _let_grow, started_builds) = memory(2000);
        for number in 0..700 {
            let stored = StoredRequest { number: number as u64 + 1, tenant: TENANT, usage: usage(number) };
            memory.restore(stored).unwrap();
        }
        memory.finish_restore().unwrap();
        assert!(has_tree(&memory) && started_builds.load(Ordering::SeqCst) == 0);
    }
}
