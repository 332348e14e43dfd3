//! Where every expert lives in one routing generation.

use super::arrivals::{Arrivals, ExpertSlot};
use super::hosts::{LayerHosts, layer_hosts};
use super::link::Link;
use crate::routing_check::RemoteSets;
use prometheus::IntGauge;
use remoe_kernels::PackedExpert;
use remoe_proto::v1::LayerExperts;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// Packed experts beside the engine, by layer id and expert id. Some may still be on their way.
#[derive(Clone, Default)]
pub(crate) struct LocalExperts {
    layers: BTreeMap<usize, BTreeMap<u32, ExpertSlot>>,
    arrivals: Option<Arc<Arrivals>>,
}

impl LocalExperts {
    pub(crate) fn insert(&mut self, layer: usize, expert: u32, packed: Arc<PackedExpert>) {
        self.layers.entry(layer).or_default().insert(expert, Arc::new(OnceLock::from(packed)));
    }

    /// Adds `experts` (layer, expert) that will be here as well: the holder of the returned value brings them.
    /// `shown` tells how many are left.
    pub(crate) fn expect(&mut self, experts: &[(usize, u32)], shown: IntGauge) -> Arc<Arrivals> {
        let places: BTreeMap<_, _> = experts.iter().map(|&key| (key, ExpertSlot::default())).collect();
        for (&(layer, expert), place) in &places {
            self.layers.entry(layer).or_default().insert(expert, place.clone());
        }
        let arrivals = Arc::new(Arrivals::new(places, shown));
        self.arrivals = Some(arrivals.clone());
        arrivals
    }

    /// The expert, where it is there.
    pub(crate) fn get(&self, layer: usize, expert: u32) -> Option<&Arc<PackedExpert>> {
        self.layers.get(&layer)?.get(&expert)?.get()
    }

    /// Reports if the expert is here or will be.
    pub(crate) fn has(&self, layer: usize, expert: u32) -> bool {
        self.layers.get(&layer).is_some_and(|experts| experts.contains_key(&expert))
    }

    /// Returns the arrivals of experts that were not here at first.
    pub(crate) fn arrivals(&self) -> Option<&Arrivals> {
        self.arrivals.as_deref()
    }

    /// How many are on their way.
    pub(crate) fn arriving(&self) -> usize {
        self.layers.values().flat_map(BTreeMap::values).filter(|place| place.get().is_none()).count()
    }

    /// The experts of `layer` that are there, with their ids.
    pub(crate) fn of(&self, layer: usize) -> impl Iterator<Item = (u32, &Arc<PackedExpert>)> {
        let experts = self.layers.get(&layer).into_iter().flatten();
        experts.filter_map(|(&expert, place)| Some((expert, place.get()?)))
    }

    /// Lists the experts that are here or will be, ascending.
    pub(crate) fn listing(&self) -> Vec<LayerExperts> {
        self.layers
            .iter()
            .map(|(&layer, experts)| LayerExperts {
                layer: layer as u32,
                experts: experts.keys().copied().collect(),
            })
            .collect()
    }

    /// How many are here or will be.
    pub(crate) fn count(&self) -> usize {
        self.layers.values().map(BTreeMap::len).sum()
    }

    /// Bytes of packed weights that are there.
    pub(crate) fn bytes(&self) -> usize {
        let experts = self.layers.values().flat_map(BTreeMap::values);
        experts.filter_map(|place| place.get()).map(|packed| packed.bytes()).sum()
    }
}

/// One routing generation in force.
#[derive(Default)]
pub(crate) struct Placement {
    pub(crate) generation: u64,
    pub(crate) local: LocalExperts,
    pub(crate) links: Vec<Link>,
    /// Hosts of the remote experts of each layer that has any, as indices of `links`.
    hosts: BTreeMap<usize, LayerHosts>,
}

impl Placement {
    /// The placement in which each of `links` hosts its sets of `remote`.
    pub(crate) fn new(generation: u64, local: LocalExperts, remote: &RemoteSets, links: Vec<Link>) -> Self {
        let hosts = layer_hosts(remote, links.iter().map(Link::sets));
        Self { generation, local, links, hosts }
    }

    /// Returns the hosts of the remote experts of `layer`; `None` if all are local.
    pub(crate) fn hosts(&self, layer: usize) -> Option<&LayerHosts> {
        self.hosts.get(&layer)
    }

    /// Indices of the links that host every expert of the layer's class.
    pub(crate) fn hosts_of(&self, layer: usize, class: usize) -> &[usize] {
        self.hosts(layer).map_or(&[], |hosts| hosts.of(class))
    }
}
