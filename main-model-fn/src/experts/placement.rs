//! Where every expert lives in one routing generation.

use super::hosts::{LayerHosts, layer_hosts};
use super::link::Link;
use crate::routing_check::RemoteSets;
use remoe_kernels::PackedExpert;
use remoe_wire::v1::LayerExperts;
use std::collections::BTreeMap;
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

    /// How many are held.
    pub(crate) fn count(&self) -> usize {
        self.layers.values().map(BTreeMap::len).sum()
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
    pub(crate) links: Vec<Link>,
    /// Who hosts the remote experts of each layer that has any, as indices of `links`.
    hosts: BTreeMap<usize, LayerHosts>,
}

impl Placement {
    /// The placement in which each of `links` hosts its sets of `remote`.
    pub(crate) fn new(generation: u64, local: LocalExperts, remote: &RemoteSets, links: Vec<Link>) -> Self {
        let hosts = layer_hosts(remote, links.iter().map(Link::sets));
        Self { generation, local, links, hosts }
    }

    /// Who hosts the remote experts of `layer`; none where all are local.
    pub(crate) fn hosts(&self, layer: usize) -> Option<&LayerHosts> {
        self.hosts.get(&layer)
    }

    /// Indices of the links that host every expert of the layer's class.
    pub(crate) fn hosts_of(&self, layer: usize, class: usize) -> &[usize] {
        self.hosts(layer).map_or(&[], |hosts| hosts.of(class))
    }
}
