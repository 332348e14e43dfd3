//! What an arrangement comes to on the nodes of a list: the cheapest nodes that hold it, or what stands in its
//! way.

use super::compiled::{Compiled, Device, Times};
use crate::verdict::Way;
use serde::Serialize;

/// Where the parts of a model are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Arrangement {
    /// All weights in the memory of one node's GPUs.
    Gpu,
    /// Everything on one node's CPUs.
    Cpu,
    /// All experts on the CPUs of the node whose GPUs have the rest.
    Mix,
    /// Experts in the memory of the node, moved to its GPUs when they are used.
    Fetch,
    /// A remote function per layer with the less used experts of it.
    Layers,
    /// Groups of remote functions that each hold a slice of the less used experts of every layer.
    Sliced,
}

impl Arrangement {
    /// In the order in which equally cheap ones are preferred.
    pub const ALL: [Self; 6] = [Self::Gpu, Self::Cpu, Self::Mix, Self::Fetch, Self::Layers, Self::Sliced];

    /// Whether some experts are in remote functions.
    #[must_use]
    pub fn is_remote(self) -> bool {
        matches!(self, Self::Layers | Self::Sliced)
    }

    /// Whether this project computes experts that way: on CPUs only.
    #[must_use]
    pub fn is_served_by_remoe(self) -> bool {
        !matches!(self, Self::Gpu | Self::Fetch)
    }

    /// Returns the way to serve that this is on nodes.
    #[must_use]
    pub fn way(self) -> Way {
        match self {
            Self::Gpu => Way::Gpu,
            Self::Cpu => Way::Cpu,
            Self::Mix => Way::Mix,
            Self::Fetch => Way::Fetch,
            Self::Layers => Way::Layers,
            Self::Sliced => Way::Sliced,
        }
    }

    /// Returns the name in words, the same as that of [`Self::way`].
    #[must_use]
    pub fn meaning(self) -> &'static str {
        self.way().name()
    }
}

/// The cheapest nodes that hold an arrangement.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Found {
    /// What all nodes cost while they are there.
    pub(super) per_hour: f64,
    /// That, times the share of time in which they are.
    pub(super) dollars: f64,
    pub(super) times: Times,
    /// Main functions, each with the remote functions below.
    pub(super) mains: u32,
    /// The shape of a main function's node.
    pub(super) main: usize,
    pub(super) device: Device,
    /// GPUs that it uses there.
    pub(super) gpus: u32,
    /// Bytes on its GPUs; 0 without.
    pub(super) on_gpu: f64,
    /// Bytes of the main function on its host, without the non-expert part.
    pub(super) on_host: f64,
    /// Experts of every layer beside the main function.
    pub(super) local: usize,
    /// Remote functions.
    pub(super) functions: usize,
    /// Experts of a layer in the largest remote function.
    pub(super) experts_each: usize,
    /// Memory of the largest remote function, in bytes.
    pub(super) function_bytes: f64,
    /// Nodes of remote functions: shape, how many, functions that one has room for.
    pub(super) hosts: Vec<(usize, u32, usize)>,
}

/// Why an arrangement is not possible, at the shape that comes closest.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Miss {
    /// No shape is of the kind that is needed.
    Absent(&'static str),
    /// It does not fit.
    Memory { shape: usize, what: &'static str, needed: f64, usable: f64 },
    /// There are not enough nodes for the remote functions.
    Count,
    /// It fits and is too slow, for a request or for all that come.
    Slow { shape: usize, limit: &'static str, value: f64, allowed: f64 },
}

impl Miss {
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
pub(super) struct Best {
    pub(super) found: Option<Found>,
    pub(super) miss: Miss,
}

impl Best {
    pub(super) fn none(missing: &'static str) -> Self {
        Self { found: None, miss: Miss::Absent(missing) }
    }

    /// Dollars per hour that another one has to be below, in the mean over all time.
    pub(super) fn bound(&self) -> f64 {
        self.found.as_ref().map_or(f64::INFINITY, |found| found.dollars)
    }

    /// Whether this is nearer to keeping the limits than `other`, where neither does.
    pub(super) fn is_closer_than(&self, other: &Self) -> bool {
        self.found.is_none() && other.found.is_none() && self.miss.is_closer_than(&other.miss)
    }

    pub(super) fn missed(&mut self, miss: Miss) {
        if miss.is_closer_than(&self.miss) {
            self.miss = miss;
        }
    }

    /// Keeps the cheaper one; of equally cheap ones the quicker.
    pub(super) fn offer(&mut self, found: Found) {
        let order = |one: &Found| (one.dollars, one.times.tpot, one.times.ttft);
        if self.found.as_ref().is_none_or(|known| order(&found) < order(known)) {
            self.found = Some(found);
        }
    }
}

impl Compiled<'_> {
    /// The limit that `times` break furthest, with the shape that they are of.
    pub(super) fn slow(&self, shape: usize, times: Times) -> Miss {
        let miss = |limit, value, allowed| Miss::Slow { shape, limit, value, allowed };
        let met = self.met(times);
        let ttft = miss("ttft", met.ttft, self.rental.slo.ttft_seconds);
        let tpot = miss("tpot", met.tpot, self.setting.tpot);
        let load = miss("load", self.utilisation(times), 1.0);
        [tpot, load].into_iter().fold(ttft, |worst, other| match worst.is_closer_than(&other) {
            true => other,
            false => worst,
        })
    }
}
