//! Experts that the function hosts, packed in memory.

use remoe_kernels::{NumericsClass, PackedExpert};
use remoe_model::Checkpoint;
use remoe_process::address_space_left;
use remoe_proto::v1::LayerExperts;
use remoe_proto::{IntakeLimits, MAX_MESSAGE, MAX_PAYLOAD};
use remoe_weights::{LoadError, expert_shape, load_experts};
use std::collections::BTreeMap;

/// Memory of code, runtime and connection buffers, in bytes.
pub(crate) const BASE_BYTES: u64 = 16 << 20;
/// Least memory for requests and answers in flight, in bytes: one of the largest.
pub(crate) const MIN_IN_FLIGHT_BYTES: u64 = 2 * MAX_MESSAGE as u64;

/// Stack of a thread, in bytes, which takes only address space.
const STACK_BYTES: u64 = 2 << 20;

/// Limits of connections, streams and incomplete messages. Connections and streams take some tens of KiB each, within
/// [`BASE_BYTES`].
pub(crate) const INTAKE: IntakeLimits = IntakeLimits {
    connections: 128,
    streams: 128,
    connection_streams: 32,
    message_bytes: MAX_MESSAGE,
    unfinished_bytes: 4 * MAX_MESSAGE,
};

/// Reason that a set of experts cannot be hosted.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The experts do not exist or cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The set is empty.
    #[error("invalid --experts: expected at least one expert")]
    Empty,
    /// The set does not fit into the memory limit.
    #[error(
        "cannot host {experts} experts: they take {needed} bytes ({working} of them working memory), the limit is \
         {limit}: {} bytes too many; raise --memory-bytes (`remoe`: --remote-memory), or host fewer experts",
        needed - limit
    )]
    TooLarge {
        /// Number of requested experts.
        experts: usize,
        /// Packed weights and the least working memory, in bytes.
        needed: u64,
        /// Part of `needed` that is working memory, in bytes.
        working: u64,
        /// Memory limit, in bytes.
        limit: u64,
    },
    /// The limit on address space is too small.
    #[error(
        "cannot reserve {needed} bytes of address space (weights, working memory, stacks): the limit of the process \
         leaves {left}; raise it (ulimit -v), or host fewer experts"
    )]
    AddressSpace {
        /// Address space still needed, in bytes.
        needed: u64,
        /// Address space left by the limit, in bytes.
        left: u64,
    },
}

/// Checks that the process may use `needed` more bytes of address space.
pub(crate) fn check_address_space(needed: u64) -> Result<(), HostError> {
    match address_space_left().filter(|&left| needed > left) {
        Some(left) => Err(HostError::AddressSpace { needed, left }),
        None => Ok(()),
    }
}

/// Packed experts by layer and id.
pub struct HostedExperts {
    layers: BTreeMap<u32, BTreeMap<u32, PackedExpert>>,
    memory_bytes: u64,
    spare_bytes: Option<u64>,
}

impl HostedExperts {
    /// Reads and packs the experts in `sets` on `threads` threads, within `limit` bytes.
    ///
    /// # Errors
    /// The set is empty, does not exist or does not fit (nothing is read then), or the checkpoint cannot be read.
    pub fn load(
        checkpoint: &Checkpoint,
        sets: &[LayerExperts],
        class: NumericsClass,
        limit: Option<u64>,
        threads: usize,
    ) -> Result<Self, HostError> {
        let mut wanted = Vec::new();
        let mut weights = 0;
        let mut scratch = 0;
        for set in sets {
            for &expert in &set.experts {
                let layer = set.layer as usize;
                let shape = expert_shape(checkpoint, layer, expert, class)?;
                weights += shape.packed_bytes() as u64;
                // Scratch memory of the kernels for the largest request with a permitted answer, and its rows in
                // another order.
                let pairs = MAX_PAYLOAD / shape.row_bytes();
                let request_scratch = pairs * shape.scratch_bytes_per_row() + MAX_PAYLOAD;
                scratch = scratch.max(request_scratch as u64);
                wanted.push((layer, expert));
            }
        }
        if wanted.is_empty() {
            return Err(HostError::Empty);
        }
        let working = BASE_BYTES + INTAKE.unfinished_bytes as u64 + MIN_IN_FLIGHT_BYTES + scratch;
        let needed = weights + working;
        if let Some(limit) = limit.filter(|&limit| needed > limit) {
            return Err(HostError::TooLarge { experts: wanted.len(), needed, working, limit });
        }
        check_address_space(needed + threads as u64 * STACK_BYTES)?;
        let mut layers: BTreeMap<u32, BTreeMap<u32, PackedExpert>> = BTreeMap::new();
        for (layer, expert, packed) in load_experts(checkpoint, &wanted, class, threads)? {
            layers.entry(layer as u32).or_default().insert(expert, packed);
        }
        Ok(Self { layers, memory_bytes: needed, spare_bytes: limit.map(|limit| limit - needed) })
    }

    /// Returns the packed expert, if it is hosted.
    pub fn get(&self, layer: u32, expert: u32) -> Option<&PackedExpert> {
        self.layers.get(&layer)?.get(&expert)
    }

    /// Returns the hosted experts by layer, ascending.
    pub fn listing(&self) -> Vec<LayerExperts> {
        self.layers
            .iter()
            .map(|(&layer, experts)| LayerExperts { layer, experts: experts.keys().copied().collect() })
            .collect()
    }

    /// Returns the packed weights and the least working memory, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Returns the limit of bytes in flight: `wanted`, or less if the memory limit leaves less.
    pub fn in_flight_bytes(&self, wanted: usize) -> usize {
        let spare = self.spare_bytes.unwrap_or(u64::MAX);
        let available = usize::try_from(MIN_IN_FLIGHT_BYTES.saturating_add(spare)).unwrap_or(usize::MAX);
        wanted.min(available)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::{HostError, HostedExperts};
    use remoe_hardware::Profile;
    use remoe_kernels::{Dtype, NumericsClass};
    use remoe_model::Checkpoint;
    use remoe_proto::v1::LayerExperts;
    use remoe_test_support::checkpoint::{Sizes, generate};

    /// A plan must give a function at least the memory that it starts with.
    #[test]
    fn planned_function_bytes_cover_the_working_memory() {
        for (hidden, width) in [(64, 32), (128, 64), (128, 1024), (512, 64), (1024, 2048), (64, 192)] {
            let sizes = Sizes { layers: 1, hidden, width, experts: 2, top_k: 1, vocabulary: 64, context: 64 };
            let folder = generate(sizes);
            let checkpoint = Checkpoint::open(folder.path()).unwrap();
            let model = checkpoint.inspect().unwrap();
            let sets = [LayerExperts { layer: 0, experts: vec![0] }];
            for (dtype, name) in [(Dtype::F32, "float32"), (Dtype::Bf16, "bfloat16")] {
                let class = NumericsClass::from(dtype);
                let refused = HostedExperts::load(&checkpoint, &sets, class, Some(0), 1);
                let Err(HostError::TooLarge { working, .. }) = refused else {
                    panic!("it has no memory at all")
                };
                let planned = Profile::memory_prior(&model, name).function_bytes;
                let required = working as f64;
                assert!(
                    required <= planned && planned <= 1.5 * required,
                    "{hidden} x {width} in {name}: {planned} bytes are planned, {required} required"
                );
            }
        }
    }
}
