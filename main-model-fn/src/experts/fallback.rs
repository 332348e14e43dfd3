//! Experts that must be computed here although they are placed remotely.

use super::metrics::ExpertMetrics;
use remoe_experts::{LoadError, load_expert};
use remoe_kernels::{Dtype, PackedExpert};
use remoe_model::Checkpoint;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc as blocking;
use std::time::Instant;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// Loaded experts within a memory limit: least recently used ones leave when it is reached.
struct Fallback {
    limit: usize,
    held: usize,
    clock: u64,
    experts: HashMap<(usize, u32), (u64, Arc<PackedExpert>)>,
}

impl Fallback {
    fn new(limit: usize) -> Self {
        Self { limit, held: 0, clock: 0, experts: HashMap::new() }
    }

    fn get(&mut self, layer: usize, expert: u32) -> Option<Arc<PackedExpert>> {
        self.clock += 1;
        let (used, packed) = self.experts.get_mut(&(layer, expert))?;
        *used = self.clock;
        Some(packed.clone())
    }

    fn insert(&mut self, layer: usize, expert: u32, packed: Arc<PackedExpert>) {
        let bytes = packed.bytes();
        if bytes > self.limit {
            return;
        }
        if let Some((_, replaced)) = self.experts.remove(&(layer, expert)) {
            self.held -= replaced.bytes();
        }
        while self.held + bytes > self.limit {
            let oldest = self.experts.iter().min_by_key(|(_, (used, _))| *used);
            let Some(key) = oldest.map(|(&key, _)| key) else {
                break;
            };
            if let Some((_, packed)) = self.experts.remove(&key) {
                self.held -= packed.bytes();
            }
        }
        self.clock += 1;
        self.held += bytes;
        self.experts.insert((layer, expert), (self.clock, packed));
    }

    /// Bytes of packed experts held.
    fn bytes(&self) -> usize {
        self.held
    }
}

/// What became of one load.
struct Loaded {
    layer: usize,
    expert: u32,
    outcome: Result<Arc<PackedExpert>, LoadError>,
}

/// Experts that the engine needs although they are placed remotely. A thread of its own loads them,
/// so that the engine's never waits for a disk; each is ordered once however many rows wait for it.
pub(super) struct FallbackExperts {
    cache: Fallback,
    orders: blocking::Sender<(usize, u32)>,
    loaded: mpsc::UnboundedReceiver<Loaded>,
    ordered: BTreeSet<(usize, u32)>,
    runtime: Rc<Runtime>,
    metrics: ExpertMetrics,
}

impl FallbackExperts {
    /// Starts the loading thread, which ends with this value.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(
        checkpoint: Arc<Checkpoint>,
        dtype: Dtype,
        limit: usize,
        runtime: Rc<Runtime>,
        metrics: ExpertMetrics,
    ) -> std::io::Result<Self> {
        let (orders, queue) = blocking::channel();
        let (results, loaded) = mpsc::unbounded_channel();
        std::thread::Builder::new().name("expert-loader".to_owned()).spawn(move || {
            while let Ok((layer, expert)) = queue.recv() {
                let outcome = load_expert(&checkpoint, layer, expert, dtype).map(Arc::new);
                let loaded = Loaded { layer, expert, outcome };
                if results.send(loaded).is_err() {
                    return;
                }
            }
        })?;
        let cache = Fallback::new(limit);
        Ok(Self { cache, orders, loaded, ordered: BTreeSet::new(), runtime, metrics })
    }

    /// Has `expert` of `layer` loaded, unless it is there or on its way.
    pub(super) fn order(&mut self, layer: usize, expert: u32) {
        if self.cache.get(layer, expert).is_none() && self.ordered.insert((layer, expert)) {
            self.metrics.loads.inc();
            // The thread outlives every sender, so this cannot fail while this value exists.
            let _thread_gone = self.orders.send((layer, expert));
        }
    }

    /// The experts `wanted` of `layer`, in any order, once all are loaded.
    ///
    /// # Errors
    /// One cannot be loaded, or `deadline` passes: then those that are missing.
    pub(super) fn take(
        &mut self,
        layer: usize,
        wanted: impl Iterator<Item = u32>,
        deadline: Instant,
    ) -> Result<Vec<(u32, Arc<PackedExpert>)>, FallbackError> {
        while let Ok(loaded) = self.loaded.try_recv() {
            // Ordered for an earlier call, perhaps; whether it failed is no longer of interest.
            self.keep(&loaded);
        }
        let mut experts = Vec::new();
        let mut awaited = BTreeSet::new();
        for expert in wanted {
            match self.cache.get(layer, expert) {
                Some(packed) => experts.push((expert, packed)),
                None => {
                    self.order(layer, expert);
                    awaited.insert(expert);
                }
            }
        }
        while !awaited.is_empty() {
            let loaded = &mut self.loaded;
            let next = self.runtime.block_on(async {
                tokio::time::timeout_at(deadline.into(), loaded.recv()).await.ok().flatten()
            });
            let Some(loaded) = next else {
                return Err(FallbackError::Missing(awaited));
            };
            self.keep(&loaded);
            if loaded.layer == layer && awaited.remove(&loaded.expert) {
                let packed =
                    loaded.outcome.map_err(|error| FallbackError::Load { expert: loaded.expert, error })?;
                experts.push((loaded.expert, packed));
            }
        }
        Ok(experts)
    }

    /// Takes note of a finished load, and keeps the expert while there is room.
    fn keep(&mut self, loaded: &Loaded) {
        self.ordered.remove(&(loaded.layer, loaded.expert));
        if let Ok(packed) = &loaded.outcome {
            self.cache.insert(loaded.layer, loaded.expert, packed.clone());
            self.metrics.fallback_bytes.set(self.cache.bytes() as i64);
        }
    }
}

/// Why experts are not there.
pub(super) enum FallbackError {
    /// These were not loaded in time.
    Missing(BTreeSet<u32>),
    /// One cannot be loaded.
    Load { expert: u32, error: LoadError },
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use remoe_kernels::{Activation, ExpertShape, StoredDtype};

    fn packed() -> Arc<PackedExpert> {
        let shape = ExpertShape::new(2, 1, Dtype::F32, Activation::Silu).unwrap();
        Arc::new(PackedExpert::pack(shape, StoredDtype::F32, &[0; 8], &[0; 8], &[0; 8]).unwrap())
    }

    #[test]
    fn the_least_recently_used_leaves_and_the_limit_holds() {
        let one = packed().bytes();
        let mut cache = Fallback::new(2 * one);
        cache.insert(0, 0, packed());
        cache.insert(0, 1, packed());
        assert!(cache.get(0, 0).is_some());
        cache.insert(1, 0, packed());
        assert_eq!(cache.bytes(), 2 * one);
        assert!(cache.get(0, 1).is_none(), "used longest ago");
        assert!(cache.get(0, 0).is_some() && cache.get(1, 0).is_some());
        cache.insert(1, 0, packed());
        assert_eq!(cache.bytes(), 2 * one, "the same expert again takes no more room");
    }

    #[test]
    fn an_expert_larger_than_the_limit_is_not_kept() {
        let mut cache = Fallback::new(packed().bytes() - 1);
        cache.insert(0, 0, packed());
        assert_eq!(cache.bytes(), 0);
    }
}
