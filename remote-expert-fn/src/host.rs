//! The experts that a function holds in memory.

use remoe_experts::{LoadError, expert_shape, load_experts};
use remoe_kernels::{Dtype, PackedExpert};
use remoe_model::Checkpoint;
use remoe_wire::v1::LayerExperts;
use std::collections::BTreeMap;

/// What a function takes beside packed weights: code, runtime, connections, buffers in flight.
const WORKING_BYTES: u64 = 24 << 20;

/// Why a set of experts cannot be hosted.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// Experts that do not exist or cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The set is empty.
    #[error("--experts names no expert")]
    Empty,
    /// The set does not fit.
    #[error(
        "{experts} experts take {needed} bytes ({working} of them working memory), the limit is {limit}: {} bytes too many; raise --memory-bytes or host fewer experts", needed - limit
    )]
    TooLarge {
        /// Experts asked for.
        experts: usize,
        /// Packed weights and working memory.
        needed: u64,
        /// The working memory in it.
        working: u64,
        /// The limit.
        limit: u64,
    },
}

/// Packed experts by layer and id.
pub struct Host {
    layers: BTreeMap<u32, BTreeMap<u32, PackedExpert>>,
    memory_bytes: u64,
}

impl Host {
    /// Reads and packs `sets` on `threads` threads, within `limit` bytes.
    ///
    /// # Errors
    /// The set is empty, does not exist or does not fit (nothing is read then), or the checkpoint
    /// cannot be read.
    pub fn load(
        checkpoint: &Checkpoint,
        sets: &[LayerExperts],
        dtype: Dtype,
        limit: Option<u64>,
        threads: usize,
    ) -> Result<Self, HostError> {
        let mut wanted = Vec::new();
        let mut needed = WORKING_BYTES;
        for set in sets {
            for &expert in &set.experts {
                let layer = set.layer as usize;
                let shape = expert_shape(checkpoint, layer, expert, dtype)?;
                needed += shape.packed_bytes() as u64;
                wanted.push((layer, expert));
            }
        }
        if wanted.is_empty() {
            return Err(HostError::Empty);
        }
        if let Some(limit) = limit.filter(|&limit| needed > limit) {
            return Err(HostError::TooLarge { experts: wanted.len(), needed, working: WORKING_BYTES, limit });
        }
        let mut layers: BTreeMap<u32, BTreeMap<u32, PackedExpert>> = BTreeMap::new();
        for (layer, expert, packed) in load_experts(checkpoint, &wanted, dtype, threads)? {
            layers.entry(layer as u32).or_default().insert(expert, packed);
        }
        Ok(Self { layers, memory_bytes: needed })
    }

    /// The packed expert, if it is hosted.
    pub fn get(&self, layer: u32, expert: u32) -> Option<&PackedExpert> {
        self.layers.get(&layer)?.get(&expert)
    }

    /// What is hosted, ascending.
    pub fn listing(&self) -> Vec<LayerExperts> {
        self.layers
            .iter()
            .map(|(&layer, experts)| LayerExperts { layer, experts: experts.keys().copied().collect() })
            .collect()
    }

    /// Packed weights and working memory in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }
}
