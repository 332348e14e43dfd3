//! The cheapest nodes of an arrangement, or the limit that stands in its way.

use super::compiled::{Compiled, Device};
use super::load::{Excess, Unit};
use crate::verdict::TIE;
use remoe_plan::way::Way;
use serde::Serialize;
use std::cmp::Ordering;

/// Where the parts of a model are.
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
    /// All experts on the CPUs of the node whose GPU has the rest.
    Mix,
    /// The experts of as many layers on a node's GPUs as fit, those of the others on its CPUs.
    Offload,
    /// Experts in the memory of the node, moved to its GPUs when they are used.
    Fetch,
    /// A remote function per layer with the less used experts of it.
    Layers,
    /// Groups of remote functions that each hold a slice of the less used experts of every layer.
    Sliced,
}

impl Arrangement {
    /// In the order in which equally cheap and equally quick ones are preferred.
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

    /// Reports if this project serves that way: experts on CPUs, whole layers on one node.
    #[must_use]
    pub fn is_served_by_remoe(self) -> bool {
        matches!(self, Self::Cpu | Self::Mix | Self::Layers | Self::Sliced)
    }

    /// Returns the way to serve that this is one form of.
    #[must_use]
    pub fn way(self) -> Way {
        match self {
            Self::Gpu | Self::Gpus => Way::Gpu,
            Self::Cpu | Self::Pipeline => Way::Cpu,
            Self::Mix | Self::Offload => Way::Mix,
            Self::Fetch => Way::Fetch,
            Self::Layers => Way::Layers,
            Self::Sliced => Way::Sliced,
        }
    }

    /// Returns the name in words.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Gpus => "layers divided over GPU nodes",
            Self::Pipeline => "layers divided over CPU nodes",
            Self::Offload => "some layers' experts on CPUs, the rest on GPUs",
            other => other.way().name(),
        }
    }
}

/// The cheapest nodes that hold an arrangement.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct FoundNodes {
    /// Dollars per hour of all nodes while they are there.
    pub(super) per_hour: f64,
    /// That, times the share of time in which they are.
    pub(super) dollars: f64,
    pub(super) unit: Unit,
    /// Units, each on nodes of its own.
    pub(super) units: u32,
    /// Shape of the main function's node.
    pub(super) main: usize,
    /// Nodes of that shape in a unit: more than one divide the layers.
    pub(super) stages: u32,
    pub(super) device: Device,
    /// GPUs of each copy on a node.
    pub(super) gpus: u32,
    /// Bytes of a copy on its GPUs, on each node; 0 without.
    pub(super) on_gpu: f64,
    /// Bytes of the main function on each host, without the non-expert part.
    pub(super) on_host: f64,
    /// Bytes of weights that a main function, or each of its nodes, loads at its start.
    pub(super) loaded: f64,
    /// Experts of every layer beside the main function.
    pub(super) local: usize,
    /// Layers with their experts on CPUs where others have them on GPUs.
    pub(super) hosted_layers: usize,
    /// Remote functions.
    pub(super) functions: usize,
    /// Experts of a layer in the largest remote function.
    pub(super) experts_each: usize,
    /// Memory of the largest remote function, in bytes.
    pub(super) function_bytes: f64,
    /// Nodes of remote functions: shape, count, functions that one has room for.
    pub(super) hosts: Vec<(usize, u32, usize)>,
}

impl FoundNodes {
    /// Returns the same with `units` units.
    pub(super) fn with(&self, units: u32) -> Self {
        let per_hour = self.per_hour * f64::from(units) / f64::from(self.units);
        Self { per_hour, units, ..self.clone() }
    }
}

/// Why an arrangement is not possible, at the shape that comes closest.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Miss {
    /// No shape is of the kind that is needed.
    Absent(&'static str),
    /// It does not fit.
    Memory { shape: usize, what: &'static str, needed: f64, usable: f64 },
    /// There are not enough nodes.
    Count,
    /// It fits and is too slow, for a request or for all that come.
    Slow { shape: usize, limit: &'static str, value: f64, allowed: f64 },
}

impl Miss {
    pub(super) fn slow(shape: usize, excess: Excess) -> Self {
        let Excess { limit, value, allowed } = excess;
        Self::Slow { shape, limit, value, allowed }
    }

    pub(super) fn is_closer_than(&self, other: &Self) -> bool {
        self.rank() < other.rank()
    }

    /// Too slow before too large, and then by the factor that is missing.
    fn rank(&self) -> (u8, f64) {
        match self {
            Self::Slow { value, allowed, .. } => (0, value / allowed),
            Self::Count => (1, 1.0),
            Self::Memory { needed, usable, .. } => (2, needed / usable.max(1.0)),
            Self::Absent(_) => (3, 1.0),
        }
    }
}

/// The best of an arrangement so far, and the closest miss.
#[derive(Debug, Clone)]
pub(super) struct BestNodes {
    pub(super) found: Option<FoundNodes>,
    pub(super) miss: Miss,
}

/// Compares by price, and of equal prices by the time per output token, then to the first: `(dollars, tpot, ttft)`.
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
        Self { found: None, miss: Miss::Absent(missing) }
    }

    /// Dollars per hour that another one has to be below, in the mean over all time.
    pub(super) fn bound(&self) -> f64 {
        self.found.as_ref().map_or(f64::INFINITY, |found| found.dollars)
    }

    pub(super) fn missed(&mut self, miss: Miss) {
        if miss.is_closer_than(&self.miss) {
            self.miss = miss;
        }
    }

    /// Returns true if `found` is better than what is known.
    pub(super) fn is_worse_than(&self, found: &FoundNodes) -> bool {
        let found = found.price_and_times();
        self.found.as_ref().is_none_or(|known| cheaper_then_faster(found, known.price_and_times()).is_lt())
    }

    /// Keeps the better one.
    pub(super) fn offer(&mut self, found: FoundNodes) {
        if self.is_worse_than(&found) {
            self.found = Some(found);
        }
    }
}

impl Compiled<'_> {
    /// Seconds from nothing to ready of the functions of `found`, on nodes that are there.
    pub(super) fn start_seconds(&self, found: &FoundNodes) -> f64 {
        self.rental.starts.map_or(0.0, |starts| starts.seconds(found.loaded, found.function_bytes))
    }

    /// `found` with its mean cost over all time.
    pub(super) fn priced(&self, found: FoundNodes) -> FoundNodes {
        let load = self.stated_load(&found.unit, found.units, self.start_seconds(&found));
        FoundNodes { dollars: found.per_hour * load.map_or(1.0, |load| load.share), ..found }
    }
}
