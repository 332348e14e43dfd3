//! The cheapest nodes of an arrangement, or the limit that makes it infeasible.

use super::compiled::{CompiledRental, Device};
use super::load::{Excess, ServingUnit};
use crate::comparison::TIE;
use remoe_plan::serving_strategy::ServingStrategy;
use serde::Serialize;
use std::cmp::Ordering;

/// Places of a model's parts on nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Arrangement {
    /// All weights in the memory of one node's GPUs.
    Gpu,
    /// Layers divided over the GPUs of several nodes (pipeline parallelism).
    Gpus,
    /// Everything on one node's CPUs.
    Cpu,
    /// Layers divided over the CPUs of several nodes (pipeline parallelism).
    Pipeline,
    /// All experts on the CPUs of a node, the non-expert part on its GPU.
    Mix,
    /// Experts of as many layers as fit on a node's GPUs, those of the others on its CPUs.
    Offload,
    /// Experts in the memory of the node, moved to its GPUs when they are used.
    Fetch,
    /// A remote function for each layer, with its less used experts.
    Layers,
    /// Remote functions that each host a slice of the less used experts of every layer.
    Sliced,
}

impl Arrangement {
    /// All arrangements, in the order of preference between equal prices and times.
    pub const ALL: [Self; 9] = [
        Self::Gpu,
        Self::Cpu,
        Self::Mix,
        Self::Offload,
        Self::Fetch,
        Self::Gpus,
        Self::Pipeline,
        Self::Layers,
        Self::Sliced,
    ];

    /// Reports if some experts are in remote functions.
    #[must_use]
    pub fn is_remote(self) -> bool {
        matches!(self, Self::Layers | Self::Sliced)
    }

    /// Reports if Remoe can serve the arrangement: experts on CPUs, whole layers on one node.
    #[must_use]
    pub fn is_served_by_remoe(self) -> bool {
        matches!(self, Self::Cpu | Self::Mix | Self::Layers | Self::Sliced)
    }

    /// Returns the strategy that this arrangement implements.
    #[must_use]
    pub fn strategy(self) -> ServingStrategy {
        match self {
            Self::Gpu | Self::Gpus => ServingStrategy::Gpu,
            Self::Cpu | Self::Pipeline => ServingStrategy::Cpu,
            Self::Mix | Self::Offload => ServingStrategy::Mix,
            Self::Fetch => ServingStrategy::Fetch,
            Self::Layers => ServingStrategy::Layers,
            Self::Sliced => ServingStrategy::Sliced,
        }
    }

    /// Returns the name in words.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Gpus => "layers divided over GPU nodes",
            Self::Pipeline => "layers divided over CPU nodes",
            Self::Offload => "some layers' experts on CPUs, the rest on GPUs",
            other => other.strategy().name(),
        }
    }
}

/// The cheapest nodes that hold an arrangement.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct FoundNodes {
    /// Dollars per hour of all nodes while they are rented.
    pub(super) per_hour: f64,
    /// Mean dollars per hour: `per_hour` times the share of time in which the nodes are rented.
    pub(super) dollars: f64,
    pub(super) unit: ServingUnit,
    /// Number of units, each on its own nodes.
    pub(super) units: u32,
    /// Index of the shape of the main function's node.
    pub(super) main: usize,
    /// Nodes of that shape in a unit, which divide the layers.
    pub(super) stages: u32,
    pub(super) device: Device,
    /// GPUs of each copy on a node.
    pub(super) gpus: u32,
    /// Bytes of a copy on the GPUs of each node; 0 without GPUs.
    pub(super) on_gpu: f64,
    /// Bytes of the main function on each host, without the non-expert part.
    pub(super) on_host: f64,
    /// Bytes of weights that each node of a main function loads in a cold start.
    pub(super) loaded: f64,
    /// Local experts of every layer.
    pub(super) local: usize,
    /// Layers with their experts on CPUs, if other layers have them on GPUs.
    pub(super) hosted_layers: usize,
    /// Number of remote functions.
    pub(super) functions: usize,
    /// Experts of a layer in the largest remote function.
    pub(super) experts_each: usize,
    /// Memory of the largest remote function, in bytes.
    pub(super) function_bytes: f64,
    /// Nodes of remote functions: index of the shape, number of nodes, functions that fit on one.
    pub(super) hosts: Vec<(usize, u32, usize)>,
}

impl FoundNodes {
    /// Returns the nodes with `units` units.
    pub(super) fn with(&self, units: u32) -> Self {
        let per_hour = self.per_hour * f64::from(units) / f64::from(self.units);
        Self { per_hour, units, ..self.clone() }
    }
}

/// Reason that an arrangement is infeasible, at the shape that comes closest.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Infeasibility {
    /// No shape is of the required kind.
    Absent(&'static str),
    /// The memory is too small.
    Memory { shape: usize, what: &'static str, needed: f64, usable: f64 },
    /// The list allows too few nodes.
    Count,
    /// It breaks a latency limit, or cannot serve the load.
    Slow { shape: usize, limit: &'static str, value: f64, allowed: f64 },
}

impl Infeasibility {
    pub(super) fn too_slow(shape: usize, excess: Excess) -> Self {
        let Excess { limit, value, allowed } = excess;
        Self::Slow { shape, limit, value, allowed }
    }

    pub(super) fn is_closer_than(&self, other: &Self) -> bool {
        self.rank() < other.rank()
    }

    /// Orders reasons by kind, then by the missing factor: too slow is closer to feasible than too large.
    fn rank(&self) -> (u8, f64) {
        match self {
            Self::Slow { value, allowed, .. } => (0, value / allowed),
            Self::Count => (1, 1.0),
            Self::Memory { needed, usable, .. } => (2, needed / usable.max(1.0)),
            Self::Absent(_) => (3, 1.0),
        }
    }
}

/// The best nodes of an arrangement so far, and the reason that is closest to feasible.
#[derive(Debug, Clone)]
pub(super) struct BestNodes {
    pub(super) found: Option<FoundNodes>,
    pub(super) infeasibility: Infeasibility,
}

/// Compares `(dollars, tpot, ttft)` by price, and equal prices by the time per output token, then to first token.
pub(super) fn cheaper_then_faster(a: (f64, f64, f64), b: (f64, f64, f64)) -> Ordering {
    // Infinite prices are equal, too.
    if a.0 == b.0 || (a.0 - b.0).abs() <= TIE * a.0.max(b.0) {
        a.1.total_cmp(&b.1).then(a.2.total_cmp(&b.2))
    } else {
        a.0.total_cmp(&b.0)
    }
}

impl FoundNodes {
    fn price_and_times(&self) -> (f64, f64, f64) {
        (self.dollars, self.unit.times.alone(), self.unit.times.prefill)
    }
}

impl BestNodes {
    pub(super) fn none(missing: &'static str) -> Self {
        Self { found: None, infeasibility: Infeasibility::Absent(missing) }
    }

    /// Returns the mean dollars per hour of the best nodes; infinite without any.
    pub(super) fn bound(&self) -> f64 {
        self.found.as_ref().map_or(f64::INFINITY, |found| found.dollars)
    }

    pub(super) fn record_infeasible(&mut self, infeasibility: Infeasibility) {
        if infeasibility.is_closer_than(&self.infeasibility) {
            self.infeasibility = infeasibility;
        }
    }

    /// Reports if `found` is better than the best nodes so far.
    pub(super) fn is_beaten_by(&self, found: &FoundNodes) -> bool {
        let found = found.price_and_times();
        self.found.as_ref().is_none_or(|known| cheaper_then_faster(found, known.price_and_times()).is_lt())
    }

    /// Keeps `found` if it is better.
    pub(super) fn offer(&mut self, found: FoundNodes) {
        if self.is_beaten_by(&found) {
            self.found = Some(found);
        }
    }
}

impl CompiledRental<'_> {
    /// Returns the seconds of a cold start of `found` on running nodes.
    pub(super) fn start_seconds(&self, found: &FoundNodes) -> f64 {
        self.rental.starts.map_or(0.0, |starts| starts.seconds(found.loaded, found.function_bytes))
    }

    /// Returns `found` with its mean dollars per hour.
    pub(super) fn priced(&self, found: FoundNodes) -> FoundNodes {
        let load = self.stated_load(&found.unit, found.units, self.start_seconds(&found));
        FoundNodes { dollars: found.per_hour * load.map_or(1.0, |load| load.share), ..found }
    }
}
