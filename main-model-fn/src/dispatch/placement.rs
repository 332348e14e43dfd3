//! Placement of every expert in one routing generation.

use super::background_loads::{BackgroundLoads, ExpertSlot};
use super::hosts::{LayerHosts, layer_hosts};
use super::link::Link;
use crate::routing_check::RemoteSets;
use prometheus::IntGauge;
use remoe_kernels::PackedExpert;
use remoe_proto::v1::LayerExperts;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// Packed local experts, by layer and expert id. Some may still be loading.
#[derive(Clone, Default)]
pub(crate) struct LocalExperts {
    layers: BTreeMap<usize, BTreeMap<u32, ExpertSlot>>,
    background_loads: Option<Arc<BackgroundLoads>>,
}

impl LocalExperts {
    /// Adds a loaded expert.
    pub(crate) fn insert(&mut self, layer: usize, expert: u32, packed: Arc<PackedExpert>) {
        self.layers.entry(layer).or_default().insert(expert, Arc::new(OnceLock::from(packed)));
    }

    /// Adds `experts` (layer, expert) that are still to be loaded, by calling the returned value. `gauge` shows how many
    /// remain.
    pub(crate) fn add_loading(&mut self, experts: &[(usize, u32)], gauge: IntGauge) -> Arc<BackgroundLoads> {
        let slots: BTreeMap<_, _> = experts.iter().map(|&key| (key, ExpertSlot::default())).collect();
        for (&(layer, expert), slot) in &slots {
            self.layers.entry(layer).or_default().insert(expert, slot.clone());
        }
        let loads = Arc::new(BackgroundLoads::new(slots, gauge));
        self.background_loads = Some(loads.clone());
        loads
    }

    /// Returns the expert if it is loaded.
    pub(crate) fn get(&self, layer: usize, expert: u32) -> Option<&Arc<PackedExpert>> {
        self.layers.get(&layer)?.get(&expert)?.get()
    }

    /// Reports if the expert is local, loaded or not.
    pub(crate) fn has(&self, layer: usize, expert: u32) -> bool {
        self.layers.get(&layer).is_some_and(|experts| experts.contains_key(&expert))
    }

    /// Returns the loads in progress, if the placement came into force before all experts were loaded.
    pub(crate) fn background_loads(&self) -> Option<&BackgroundLoads> {
        self.background_loads.as_deref()
    }

    /// Returns the number of experts that are not loaded yet.
    pub(crate) fn loading_count(&self) -> usize {
        self.layers.values().flat_map(BTreeMap::values).filter(|slot| slot.get().is_none()).count()
    }

    /// Returns the loaded experts of `layer` with their ids.
    pub(crate) fn loaded_in_layer(&self, layer: usize) -> impl Iterator<Item = (u32, &Arc<PackedExpert>)> {
        let experts = self.layers.get(&layer).into_iter().flatten();
        experts.filter_map(|(&expert, slot)| Some((expert, slot.get()?)))
    }

    /// Lists the ids of all local experts, loaded or not, ascending.
    pub(crate) fn listing(&self) -> Vec<LayerExperts> {
        self.layers
            .iter()
            .map(|(&layer, experts)| LayerExperts {
                layer: layer as u32,
                experts: experts.keys().copied().collect(),
            })
            .collect()
    }

    /// Returns the number of local experts, loaded or not.
    pub(crate) fn count(&self) -> usize {
        self.layers.values().map(BTreeMap::len).sum()
    }

    /// Returns the bytes of the loaded experts' packed weights.
    pub(crate) fn bytes(&self) -> usize {
        let experts = self.layers.values().flat_map(BTreeMap::values);
        experts.filter_map(|slot| slot.get()).map(|packed| packed.bytes()).sum()
    }
}

/// One routing generation in force.
#[derive(Default)]
pub(crate) struct Placement {
    pub(crate) generation: u64,
    pub(crate) local: LocalExperts,
    pub(crate) links: Vec<Link>,
    /// Hosts of the remote experts, as indices of `links`, for each layer with remote experts.
    hosts: BTreeMap<usize, LayerHosts>,
}

impl Placement {
    /// Creates the placement in which each of `links` hosts its part of `remote`.
    pub(crate) fn new(generation: u64, local: LocalExperts, remote: &RemoteSets, links: Vec<Link>) -> Self {
        let hosts = layer_hosts(remote, links.iter().map(Link::sets));
        Self { generation, local, links, hosts }
    }

    /// Returns the hosts of the remote experts of `layer`; `None` if all are local.
    pub(crate) fn hosts(&self, layer: usize) -> Option<&LayerHosts> {
        self.hosts.get(&layer)
    }

    /// Returns the indices of the links that host the experts of a layer's class.
    pub(crate) fn hosts_of_class(&self, layer: usize, class: usize) -> &[usize] {
        self.hosts(layer).map_or(&[], |hosts| hosts.hosts_of_class(class))
    }
}
