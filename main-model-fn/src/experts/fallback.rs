//! Experts that must be computed here although they are placed remotely.

use remoe_experts::{LoadError, load_expert};
use remoe_kernels::{Dtype, PackedExpert};
use remoe_model::Checkpoint;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc as blocking;
use tokio::sync::mpsc;

/// Experts that are placed remotely but had to be loaded here: least recently used ones leave when
/// the memory is full.
pub(crate) struct Fallback {
    limit: usize,
    held: usize,
    clock: u64,
    experts: HashMap<(usize, u32), (u64, Arc<PackedExpert>)>,
}

impl Fallback {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, held: 0, clock: 0, experts: HashMap::new() }
    }

    pub(crate) fn get(&mut self, layer: usize, expert: u32) -> Option<Arc<PackedExpert>> {
        self.clock += 1;
        let (used, packed) = self.experts.get_mut(&(layer, expert))?;
        *used = self.clock;
        Some(packed.clone())
    }

    pub(crate) fn insert(&mut self, layer: usize, expert: u32, packed: Arc<PackedExpert>) {
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
    pub(crate) fn bytes(&self) -> usize {
        self.held
    }
}

/// What became of one load.
pub(crate) struct Loaded {
    pub(crate) layer: usize,
    pub(crate) expert: u32,
    pub(crate) outcome: Result<Arc<PackedExpert>, LoadError>,
}

/// A thread that loads experts, so that the engine's own never waits for a disk.
pub(crate) struct Loader {
    orders: blocking::Sender<(usize, u32)>,
}

impl Loader {
    /// Starts the thread; results go to `results`. It ends when the loader is dropped.
    pub(crate) fn start(
        checkpoint: Arc<Checkpoint>,
        dtype: Dtype,
        results: mpsc::UnboundedSender<Loaded>,
    ) -> std::io::Result<Self> {
        let (orders, queue) = blocking::channel();
        std::thread::Builder::new().name("expert-loader".to_owned()).spawn(move || {
            while let Ok((layer, expert)) = queue.recv() {
                let outcome = load_expert(&checkpoint, layer, expert, dtype).map(Arc::new);
                let loaded = Loaded { layer, expert, outcome };
                if results.send(loaded).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { orders })
    }

    /// Orders one expert; the caller orders each only once at a time.
    pub(crate) fn order(&self, layer: usize, expert: u32) {
        // The thread outlives every sender, so this cannot fail while the loader exists.
        let _thread_gone = self.orders.send((layer, expert));
    }
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
