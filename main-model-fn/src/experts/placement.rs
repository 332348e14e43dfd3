//! Where every expert lives in one routing generation.

use super::link::Link;
use remoe_kernels::PackedExpert;
use remoe_wire::v1::LayerExperts;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Packed experts beside the engine, by layer id and expert id.
#[derive(Clone, Default)]
pub(crate) struct LocalExperts {
    layers: BTreeMap<usize, BTreeMap<u32, Arc<PackedExpert>>>,
}

impl LocalExperts {
    pub(crate) fn insert(&mut self, layer: usize, expert: u32, packed: Arc<PackedExpert>) {
        self.layers.entry(layer).or_default().insert(expert, packed);
    }

    pub(crate) fn get(&self, layer: usize, expert: u32) -> Option<&Arc<PackedExpert>> {
        self.layers.get(&layer)?.get(&expert)
    }

    /// The experts of `layer` with their ids.
    pub(crate) fn of(&self, layer: usize) -> impl Iterator<Item = (u32, &Arc<PackedExpert>)> {
        self.layers.get(&layer).into_iter().flatten().map(|(&expert, packed)| (expert, packed))
    }

    /// What is held, ascending.
    pub(crate) fn listing(&self) -> Vec<LayerExperts> {
        self.layers
            .iter()
            .map(|(&layer, experts)| LayerExperts {
                layer: layer as u32,
                experts: experts.keys().copied().collect(),
            })
            .collect()
    }

    /// Bytes of packed weights.
    pub(crate) fn bytes(&self) -> usize {
        let experts = self.layers.values().flat_map(BTreeMap::values);
        experts.map(|packed| packed.bytes()).sum()
    }
}

/// One routing generation in force.
#[derive(Default)]
pub(crate) struct Placement {
    pub(crate) generation: u64,
    pub(crate) local: LocalExperts,
    pub(crate) remote: BTreeMap<usize, BTreeSet<u32>>,
    pub(crate) links: Vec<Link>,
}

impl Placement {
    pub(crate) fn is_remote(&self, layer: usize, expert: u32) -> bool {
        self.remote.get(&layer).is_some_and(|set| set.contains(&expert))
    }
}
