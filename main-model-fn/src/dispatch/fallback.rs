//! Local fallback: loads experts that are placed remotely but that no replica computes.
//!
//! Separate threads load them, so that the engine's thread never waits for a disk. Each expert is loaded once for all
//! rows that need it. Experts in memory and in loading stay within one limit. A call that needs more gets its experts in
//! portions, each after the previous one was computed.

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

/// Number of loading threads: while one packs, another reads. More threads would only share the same cores.
const LOADERS: std::ops::RangeInclusive<usize> = 2..=4;

/// Shortest timeout of a load.
const MIN_LOAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Layer and expert.
type ExpertKey = (usize, u32);

/// Loaded experts; the least recently used is evicted first.
struct ExpertCache {
    bytes: usize,
    /// Logical time: number of uses so far.
    clock: u64,
    /// Time of the last use, and the expert.
    experts: HashMap<ExpertKey, (u64, Arc<PackedExpert>)>,
}

impl ExpertCache {
    fn new() -> Self {
        Self { bytes: 0, clock: 0, experts: HashMap::new() }
    }

    fn get(&mut self, key: ExpertKey) -> Option<Arc<PackedExpert>> {
        self.clock += 1;
        let (last_use, packed) = self.experts.get_mut(&key)?;
        *last_use = self.clock;
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

    /// Evicts experts that are not in `needed` until at most `max_bytes` remain. Returns false if the needed experts alone
    /// take more.
    fn evict_to(&mut self, max_bytes: usize, needed: &BTreeSet<ExpertKey>) -> bool {
        while self.bytes > max_bytes {
            let evictable = self.experts.iter().filter(|(key, _)| !needed.contains(key));
            let Some(key) = evictable.min_by_key(|(_, (last_use, _))| *last_use).map(|(&key, _)| key) else {
                return false;
            };
            self.remove(key);
        }
        true
    }
}

/// A load that has ended.
pub(super) struct EndedLoad {
    key: ExpertKey,
    outcome: Result<Arc<PackedExpert>, LoadError>,
    took: Duration,
}

/// Loads fallback experts and keeps them in memory.
pub(super) struct FallbackExperts {
    /// Most bytes of experts in memory and in loading.
    limit_bytes: usize,
    cache: ExpertCache,
    /// Experts that the current layer call needs.
    needed: BTreeSet<ExpertKey>,
    /// Needed experts for which there is no memory yet, in order of request.
    queue: VecDeque<ExpertKey>,
    /// Experts in loading, with their sizes in bytes.
    loading: HashMap<ExpertKey, usize>,
    load_requests: blocking::Sender<ExpertKey>,
    ended_loads: mpsc::UnboundedReceiver<EndedLoad>,
    /// Seconds per byte.
    pace: ReplicaPace,
    checkpoint: Arc<Checkpoint>,
    class: NumericsClass,
    metrics: ExpertMetrics,
}

impl FallbackExperts {
    /// Starts the loading threads, which end when this value is dropped. `compute_threads` bounds their number.
    ///
    /// # Errors
    /// Fails if a thread cannot be started.
    pub(super) fn start(
        checkpoint: Arc<Checkpoint>,
        class: NumericsClass,
        limit_bytes: usize,
        compute_threads: usize,
        metrics: ExpertMetrics,
    ) -> std::io::Result<Self> {
        let (load_requests, queue) = blocking::channel::<ExpertKey>();
        let queue = Arc::new(Mutex::new(queue));
        let (results, ended_loads) = mpsc::unbounded_channel();
        for loader in 0..compute_threads.clamp(*LOADERS.start(), *LOADERS.end()) {
            let (queue, results, checkpoint) = (queue.clone(), results.clone(), checkpoint.clone());
            std::thread::Builder::new().name(format!("expert-loader-{loader}")).spawn(move || {
                loop {
                    // The thread that waits for a request holds the lock; the others wait for the lock.
                    let request = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok((layer, expert)) = request else { return };
                    let started = Instant::now();
                    tracing::trace!(layer, expert, "load starts");
                    let outcome = load_expert(&checkpoint, layer, expert, class).map(Arc::new);
                    let ended = EndedLoad { key: (layer, expert), outcome, took: started.elapsed() };
                    if results.send(ended).is_err() {
                        return;
                    }
                }
            })?;
        }
        Ok(Self {
            limit_bytes,
            cache: ExpertCache::new(),
            needed: BTreeSet::new(),
            queue: VecDeque::new(),
            loading: HashMap::new(),
            load_requests,
            ended_loads,
            pace: ReplicaPace::default(),
            checkpoint,
            class,
            metrics,
        })
    }

    /// Begins a layer call, which needs no experts yet. Loads in progress continue.
    pub(super) fn begin_call(&mut self) {
        self.needed.clear();
        self.queue.clear();
        while let Ok(ended) = self.ended_loads.try_recv() {
            // A failed load of an earlier call does not matter any more.
            let _earlier_call = self.finish_load(ended);
        }
        self.evict_unneeded();
    }

    /// Requests `expert` of `layer` for the call. It is loaded when there is memory, unless it is in memory or in loading.
    pub(super) fn request(&mut self, layer: usize, expert: u32) {
        let key = (layer, expert);
        if self.needed.insert(key) && self.cache.get(key).is_none() && !self.loading.contains_key(&key) {
            self.queue.push_back(key);
            self.start_loads();
        }
    }

    /// Releases `expert` of `layer`, which the call does not need any more.
    pub(super) fn release(&mut self, layer: usize, expert: u32) {
        self.needed.remove(&(layer, expert));
        self.queue.retain(|&key| key != (layer, expert));
        self.evict_unneeded();
        self.start_loads();
    }

    /// Returns those of `experts` of `layer` that are in memory.
    pub(super) fn loaded(
        &mut self,
        layer: usize,
        experts: impl Iterator<Item = u32>,
    ) -> Vec<(u32, Arc<PackedExpert>)> {
        experts.filter_map(|expert| Some((expert, self.cache.get((layer, expert))?))).collect()
    }

    /// Returns the next load that has ended, if any.
    pub(super) fn try_next(&mut self) -> Option<EndedLoad> {
        self.ended_loads.try_recv().ok()
    }

    /// Waits for the next load to end.
    pub(super) async fn next(&mut self) -> Option<EndedLoad> {
        self.ended_loads.recv().await
    }

    /// Records a load that has ended. An expert that the call does not need is kept only while there is memory.
    ///
    /// # Errors
    /// Returns layer, expert and error of a failed load.
    pub(super) fn finish_load(&mut self, ended: EndedLoad) -> Result<(), (usize, u32, LoadError)> {
        let key = ended.key;
        self.loading.remove(&key);
        let outcome = match ended.outcome {
            Ok(packed) => {
                self.pace.observe(packed.bytes() as u64, ended.took);
                self.cache.insert(key, packed);
                Ok(())
            }
            Err(error) => {
                self.needed.remove(&key);
                Err((key.0, key.1, error))
            }
        };
        self.evict_unneeded();
        self.start_loads();
        outcome
    }

    /// Returns how long to wait for the loads in progress.
    pub(super) fn load_timeout(&self) -> Duration {
        let bytes: usize = self.loading.values().sum();
        self.pace.timeout(bytes as u64, MIN_LOAD_TIMEOUT)
    }

    /// Starts queued loads while there is memory. A single expert is loaded even if it exceeds the limit: the call cannot
    /// finish without it.
    fn start_loads(&mut self) {
        while let Some(&key) = self.queue.front() {
            // If the size cannot be computed, the load fails and reports why.
            let bytes = expert_shape(&self.checkpoint, key.0, key.1, self.class)
                .map_or(0, |shape| shape.packed_bytes());
            let loading_bytes = self.loading.values().sum::<usize>().saturating_add(bytes);
            let cache_bytes = self.limit_bytes.checked_sub(loading_bytes);
            let fits = cache_bytes.is_some_and(|bytes| self.cache.evict_to(bytes, &self.needed));
            if !fits && !self.is_stuck() {
                return;
            }
            self.queue.pop_front();
            self.loading.insert(key, bytes);
            self.metrics.loads.inc();
            // The threads end only after this sender is dropped, so sending cannot fail.
            let _threads_ended = self.load_requests.send(key);
        }
    }

    /// Reports if the call has no expert in memory and none in loading, so that it would wait for ever.
    fn is_stuck(&mut self) -> bool {
        self.loading.is_empty() && self.cache.evict_to(0, &self.needed)
    }

    /// Evicts experts that the call does not need, down to the limit.
    fn evict_unneeded(&mut self) {
        let cache_bytes = self.limit_bytes.saturating_sub(self.loading.values().sum());
        self.cache.evict_to(cache_bytes, &self.needed);
        self.metrics.fallback_bytes.set(i64::try_from(self.cache.bytes).unwrap_or(i64::MAX));
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
    fn least_recently_used_expert_is_evicted_unless_needed() {
        let one = packed().bytes();
        let none = BTreeSet::new();
        let mut held = ExpertCache::new();
        (0..3).for_each(|expert| held.insert((0, expert), packed()));
        assert!(held.get((0, 0)).is_some());
        assert!(held.evict_to(2 * one, &none));
        assert_eq!(held.bytes, 2 * one);
        assert!(held.get((0, 1)).is_none(), "least recently used");
        held.insert((0, 2), packed());
        assert_eq!(held.bytes, 2 * one, "inserting the same expert again takes no more memory");
        assert!(!held.evict_to(0, &BTreeSet::from([(0, 0)])));
        assert!(held.get((0, 0)).is_some() && held.get((0, 2)).is_none());
        assert!(held.evict_to(0, &none));
        assert_eq!(held.bytes, 0);
    }

    /// Runs two calls that need all experts of a layer, with memory for `room` experts. After each step, `check` gets the
    /// number of experts in memory and in loading.
    fn run_in_portions(room: f64, check: impl Fn(usize)) {
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
            fallback.begin_call();
            (0..experts).for_each(|expert| fallback.request(LAYER, expert));
            let mut left: BTreeSet<u32> = (0..experts).collect();
            while !left.is_empty() {
                let ready = fallback.loaded(LAYER, left.iter().copied());
                check(
                    ready.len().max((fallback.cache.bytes + fallback.loading.values().sum::<usize>()) / one),
                );
                if ready.is_empty() {
                    let ended = fallback.ended_loads.blocking_recv().unwrap();
                    fallback.finish_load(ended).map_err(|(_, _, error)| error).unwrap();
                }
                for (expert, packed) in ready {
                    assert_eq!(packed.bytes(), one);
                    left.remove(&expert);
                    drop(packed);
                    fallback.release(LAYER, expert);
                }
            }
            assert!(fallback.queue.is_empty() && fallback.loading.is_empty(), "round {round}");
            assert!(fallback.cache.bytes <= limit, "{} bytes stay, limit {limit}", fallback.cache.bytes);
        }
    }

    #[test]
    fn call_over_memory_limit_loads_experts_in_portions() {
        run_in_portions(2.5, |experts| assert!(experts <= 2, "{experts} experts at the same time"));
        // If not even one expert fits, experts are loaded one by one, and none stays.
        run_in_portions(0.5, |experts| assert!(experts <= 1, "{experts} experts at the same time"));
        run_in_portions(0.0, |experts| assert!(experts <= 1, "{experts} experts at the same time"));
        run_in_portions(1000.0, |_| ());
    }
}
