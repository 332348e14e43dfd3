//! Experts that must be computed here although they are placed remotely.
//!
//! Threads of their own load them, so that the engine's never waits for a disk; each expert is ordered
//! once however many rows wait for it. What is held and what is on its way stay within one limit: a
//! call that needs more gets its experts in portions, the next when one has been computed.

use super::metrics::ExpertMetrics;
use super::pace::ReplicaPace;
use remoe_kernels::{NumericsClass, PackedExpert};
use remoe_model::Checkpoint;
use remoe_weights::{LoadError, expert_shape, load_expert};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::mpsc as blocking;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Threads that load: while one packs, another reads. More than a few only share the same cores.
const LOADERS: std::ops::RangeInclusive<usize> = 2..=4;

/// A load may take so long in any case.
const LEAST_LOAD_LIMIT: Duration = Duration::from_secs(10);

/// Layer and expert.
type ExpertKey = (usize, u32);

/// Loaded experts, those that were used longest ago first to leave.
struct ExpertCache {
    bytes: usize,
    clock: u64,
    experts: HashMap<ExpertKey, (u64, Arc<PackedExpert>)>,
}

impl ExpertCache {
    fn new() -> Self {
        Self { bytes: 0, clock: 0, experts: HashMap::new() }
    }

    fn get(&mut self, key: ExpertKey) -> Option<Arc<PackedExpert>> {
        self.clock += 1;
        let (used, packed) = self.experts.get_mut(&key)?;
        *used = self.clock;
        Some(packed.clone())
    }

    fn insert(&mut self, key: ExpertKey, packed: Arc<PackedExpert>) {
        self.remove(key);
        self.clock += 1;
        self.bytes += packed.bytes();
        self.experts.insert(key, (self.clock, packed));
    }

    fn remove(&mut self, key: ExpertKey) {
        if let Some((_, packed)) = self.experts.remove(&key) {
            self.bytes -= packed.bytes();
        }
    }

    /// Lets experts go that are not among `wanted`, those used longest ago first, until there are
    /// `most` bytes at most. False when what is wanted alone is more.
    fn shrink(&mut self, most: usize, wanted: &BTreeSet<ExpertKey>) -> bool {
        while self.bytes > most {
            let idle = self.experts.iter().filter(|(key, _)| !wanted.contains(key));
            let Some(key) = idle.min_by_key(|(_, (used, _))| *used).map(|(&key, _)| key) else {
                return false;
            };
            self.remove(key);
        }
        true
    }
}

/// Outcome of one load.
pub(super) struct Loaded {
    key: ExpertKey,
    outcome: Result<Arc<PackedExpert>, LoadError>,
    took: Duration,
}

/// Loads experts for the engine and holds them.
pub(super) struct FallbackExperts {
    limit: usize,
    held: ExpertCache,
    /// Experts that the layer call in progress needs.
    wanted: BTreeSet<ExpertKey>,
    /// Needed experts that have no room yet, in the order in which they were ordered.
    queue: VecDeque<ExpertKey>,
    /// Experts that are being loaded, with their sizes in bytes.
    loading: HashMap<ExpertKey, usize>,
    orders: blocking::Sender<ExpertKey>,
    loaded: mpsc::UnboundedReceiver<Loaded>,
    /// Per byte.
    pace: ReplicaPace,
    checkpoint: Arc<Checkpoint>,
    class: NumericsClass,
    metrics: ExpertMetrics,
}

impl FallbackExperts {
    /// Starts the loading threads, which end with this value. `threads` are those that compute; `limit`
    /// is in bytes.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(super) fn start(
        checkpoint: Arc<Checkpoint>,
        class: NumericsClass,
        limit: usize,
        threads: usize,
        metrics: ExpertMetrics,
    ) -> std::io::Result<Self> {
        let (orders, queue) = blocking::channel::<ExpertKey>();
        let queue = Arc::new(Mutex::new(queue));
        let (results, loaded) = mpsc::unbounded_channel();
        for loader in 0..threads.clamp(*LOADERS.start(), *LOADERS.end()) {
            let (queue, results, checkpoint) = (queue.clone(), results.clone(), checkpoint.clone());
            std::thread::Builder::new().name(format!("expert-loader-{loader}")).spawn(move || {
                loop {
                    // The lock is held while waiting: the others wait for the lock instead.
                    let order = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok((layer, expert)) = order else { return };
                    let started = Instant::now();
                    tracing::trace!(layer, expert, "load starts");
                    let outcome = load_expert(&checkpoint, layer, expert, class).map(Arc::new);
                    let loaded = Loaded { key: (layer, expert), outcome, took: started.elapsed() };
                    if results.send(loaded).is_err() {
                        return;
                    }
                }
            })?;
        }
        Ok(Self {
            limit,
            held: ExpertCache::new(),
            wanted: BTreeSet::new(),
            queue: VecDeque::new(),
            loading: HashMap::new(),
            orders,
            loaded,
            pace: ReplicaPace::default(),
            checkpoint,
            class,
            metrics,
        })
    }

    /// A layer call begins: it needs nothing yet. Loads that are on their way go on.
    pub(super) fn begin(&mut self) {
        self.wanted.clear();
        self.queue.clear();
        while let Ok(loaded) = self.loaded.try_recv() {
            // Whether a load failed that an earlier call ordered is no longer of interest.
            let _earlier = self.arrive(loaded);
        }
        self.tidy();
    }

    /// The call needs `expert` of `layer`: it is loaded when there is room, unless it is there or on
    /// its way.
    pub(super) fn order(&mut self, layer: usize, expert: u32) {
        let key = (layer, expert);
        if self.wanted.insert(key) && self.held.get(key).is_none() && !self.loading.contains_key(&key) {
            self.queue.push_back(key);
            self.load();
        }
    }

    /// The call does not need `expert` of `layer` any more: it was computed, here or elsewhere.
    pub(super) fn release(&mut self, layer: usize, expert: u32) {
        self.wanted.remove(&(layer, expert));
        self.queue.retain(|&key| key != (layer, expert));
        self.tidy();
        self.load();
    }

    /// Returns those of `experts` of `layer` that are here.
    pub(super) fn ready(
        &mut self,
        layer: usize,
        experts: impl Iterator<Item = u32>,
    ) -> Vec<(u32, Arc<PackedExpert>)> {
        experts.filter_map(|expert| Some((expert, self.held.get((layer, expert))?))).collect()
    }

    /// The next load that has ended, if one has.
    pub(super) fn try_next(&mut self) -> Option<Loaded> {
        self.loaded.try_recv().ok()
    }

    /// Waits for the end of the next load.
    pub(super) async fn next(&mut self) -> Option<Loaded> {
        self.loaded.recv().await
    }

    /// Takes note of a load that has ended. What the call needs is kept for it, anything else while
    /// there is room.
    ///
    /// # Errors
    /// It failed: layer, expert and why.
    pub(super) fn arrive(&mut self, loaded: Loaded) -> Result<(), (usize, u32, LoadError)> {
        let key = loaded.key;
        self.loading.remove(&key);
        let arrived = match loaded.outcome {
            Ok(packed) => {
                self.pace.observe(packed.bytes() as u64, loaded.took);
                self.held.insert(key, packed);
                Ok(())
            }
            Err(error) => {
                self.wanted.remove(&key);
                Err((key.0, key.1, error))
            }
        };
        self.tidy();
        self.load();
        arrived
    }

    /// How long to wait for a load, once nothing else can be waited for.
    pub(super) fn patience(&self) -> Duration {
        let bytes: usize = self.loading.values().sum();
        self.pace.patience(bytes as u64, LEAST_LOAD_LIMIT)
    }

    /// Starts loads while there is room. One expert is loaded even if it alone is beyond the limit:
    /// without it there is no answer.
    fn load(&mut self) {
        while let Some(&key) = self.queue.front() {
            // A size that cannot be computed fails the load, which says why.
            let bytes = expert_shape(&self.checkpoint, key.0, key.1, self.class)
                .map_or(0, |shape| shape.packed_bytes());
            let taken = self.loading.values().sum::<usize>().saturating_add(bytes);
            let room = self.limit.checked_sub(taken);
            let fits = room.is_some_and(|room| self.held.shrink(room, &self.wanted));
            if !fits && !self.is_alone() {
                return;
            }
            self.queue.pop_front();
            self.loading.insert(key, bytes);
            self.metrics.loads.inc();
            // The threads outlive every sender, so this cannot fail while this value exists.
            let _threads_gone = self.orders.send(key);
        }
    }

    /// Reports if the call has no expert here and none on its way, so that it would wait for ever.
    fn is_alone(&mut self) -> bool {
        self.loading.is_empty() && self.held.shrink(0, &self.wanted)
    }

    /// Keeps within the limit what the call does not need.
    fn tidy(&mut self) {
        let room = self.limit.saturating_sub(self.loading.values().sum());
        self.held.shrink(room, &self.wanted);
        self.metrics.fallback_bytes.set(i64::try_from(self.held.bytes).unwrap_or(i64::MAX));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use prometheus::Registry;
    use remoe_kernels::{Activation, Dtype, ExpertShape, StoredDtype};
    use std::path::Path;

    fn packed() -> Arc<PackedExpert> {
        let shape = ExpertShape::new(2, 1, Dtype::F32, Activation::Silu).unwrap();
        Arc::new(PackedExpert::pack(shape, StoredDtype::F32, &[0; 8], &[0; 8], &[0; 8]).unwrap())
    }

    #[test]
    fn the_least_recently_used_leaves_unless_it_is_wanted() {
        let one = packed().bytes();
        let none = BTreeSet::new();
        let mut held = ExpertCache::new();
        (0..3).for_each(|expert| held.insert((0, expert), packed()));
        assert!(held.get((0, 0)).is_some());
        assert!(held.shrink(2 * one, &none));
        assert_eq!(held.bytes, 2 * one);
        assert!(held.get((0, 1)).is_none(), "used longest ago");
        held.insert((0, 2), packed());
        assert_eq!(held.bytes, 2 * one, "the same expert again takes no more room");
        assert!(!held.shrink(0, &BTreeSet::from([(0, 0)])));
        assert!(held.get((0, 0)).is_some() && held.get((0, 2)).is_none());
        assert!(held.shrink(0, &none));
        assert_eq!(held.bytes, 0);
    }

    /// Experts of a layer as a call takes them, with room for `room` experts; after each step `check`
    /// gets what is held and on its way, in experts.
    fn portions(room: f64, check: impl Fn(usize)) {
        const LAYER: usize = 0;
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/mixtral-basic");
        let checkpoint = Arc::new(Checkpoint::open(&folder).unwrap());
        let one = expert_shape(&checkpoint, LAYER, 0, Dtype::F32).unwrap().packed_bytes();
        let experts = checkpoint.config().moe(LAYER).unwrap().experts as u32;
        assert!(experts >= 4, "too few experts for portions");
        let limit = (one as f64 * room) as usize;
        let metrics = ExpertMetrics::new(&Registry::new()).unwrap();
        let mut fallback = FallbackExperts::start(checkpoint, Dtype::F32.into(), limit, 2, metrics).unwrap();
        for round in 0..2 {
            fallback.begin();
            (0..experts).for_each(|expert| fallback.order(LAYER, expert));
            let mut left: BTreeSet<u32> = (0..experts).collect();
            while !left.is_empty() {
                let ready = fallback.ready(LAYER, left.iter().copied());
                check(
                    ready.len().max((fallback.held.bytes + fallback.loading.values().sum::<usize>()) / one),
                );
                if ready.is_empty() {
                    let loaded = fallback.loaded.blocking_recv().unwrap();
                    fallback.arrive(loaded).map_err(|(_, _, error)| error).unwrap();
                }
                for (expert, packed) in ready {
                    assert_eq!(packed.bytes(), one);
                    left.remove(&expert);
                    drop(packed);
                    fallback.release(LAYER, expert);
                }
            }
            assert!(fallback.queue.is_empty() && fallback.loading.is_empty(), "round {round}");
            assert!(fallback.held.bytes <= limit, "{} bytes stay, {limit} may", fallback.held.bytes);
        }
    }

    #[test]
    fn call_over_memory_limit_loads_experts_in_portions() {
        portions(2.5, |experts| assert!(experts <= 2, "{experts} experts at the same time"));
        // Less than one expert's room: one after the other, and none stays.
        portions(0.5, |experts| assert!(experts <= 1, "{experts} experts at the same time"));
        portions(0.0, |experts| assert!(experts <= 1, "{experts} experts at the same time"));
        portions(1000.0, |_| ());
    }
}
