//! Nodes as they are sold: which shapes to rent for a model within its limits, and what is on them.
//!
//! Memory and vCPUs are not bought by the GB but by the node. [`rent`] prices every arrangement of a model's
//! parts ([`Arrangement`]) as whole nodes of a list, and says whether remote experts pay, why every other way
//! is dearer or impossible, and what would have to be different for another answer.
//!
//! Times are those of one typical request that runs alone, or, where the rental says when requests come, what they
//! meet in the mean; memory has room for as many as run at once. The search is exact for equal functions but for one
//! thing: how many experts of a layer stay beside the main function is tried at a few numbers. So is how many main
//! functions there are, where one does not serve all that comes.

mod compiled;
mod cover;
mod form;
mod found;
mod remote;
mod slowest;
mod verdict;
mod whole;

use crate::alive::alive;
use crate::error::FieldError;
use compiled::Compiled;
pub use form::{GpuTimes, NodeShape, Rental, Reserve, ResidentModel, Spot};
pub use found::Arrangement;
use found::{Best, Found};
use serde::Serialize;
pub use verdict::{BrokenLimit, Flip, FlipCause, NodesVerdict, RivalNodes};

/// What to rent, and why.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodesAnswer {
    /// The nodes of the best arrangement; none where nothing keeps the limits.
    pub nodes: Vec<RentedNodes>,
    /// What they cost, times the share of time in which they are there.
    pub dollars_per_hour: Option<f64>,
    /// Share of time in which the nodes are there: 1 without arrivals or idle windows.
    pub alive_share: f64,
    /// What is on them.
    pub layout: Option<NodesLayout>,
    /// Expected times of typical requests.
    pub expected: Option<ExpectedTimes>,
    /// What is not there for functions.
    pub reserve: Reserve,
    /// Whether remote experts pay here.
    pub verdict: NodesVerdict,
    /// The cheapest way in which this project itself serves the model, where the best one is another.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_of_remoe: Option<RivalNodes>,
}

/// Nodes of one shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RentedNodes {
    /// Its name.
    pub shape: String,
    /// How many.
    pub count: u32,
    /// The functions on all of them together: `main`, `group-0`, or `layer-0` by position. Of each there are as many replicas as
    /// there are main functions.
    pub hosts: Vec<String>,
    /// Whether they may be taken back.
    pub spot: bool,
}

/// What is in which function. Units: bytes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct NodesLayout {
    /// Main functions that share what comes. Each has as many remote functions as are counted below.
    pub mains: u32,
    /// Where the non-expert part runs: `gpu` or `cpu`.
    pub device: crate::problem::Device,
    /// Experts of every layer beside the main function.
    pub local_experts: usize,
    /// Main memory of the main function, without the non-expert part: buffers, and experts that are not on
    /// GPUs.
    pub main_bytes: f64,
    /// The non-expert part with keys and values, on the device.
    pub rest_bytes: f64,
    /// Everything that is on the GPUs; 0 without any.
    pub gpu_bytes: f64,
    /// vCPUs of the main function.
    pub main_vcpus: f64,
    /// Remote functions.
    pub remote_functions: usize,
    /// Experts of a layer in one of them, at most.
    pub remote_experts: usize,
    /// Memory of a remote function.
    pub remote_bytes: f64,
    /// vCPUs of a remote function, on the node with the most of them.
    pub remote_vcpus: f64,
    /// GPUs of the main function.
    pub gpus: u32,
    /// Memory of each.
    pub gpu_bytes_each: f64,
}

/// Times of typical requests, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ExpectedTimes {
    /// To the first token of a request that runs alone.
    pub ttft_seconds: f64,
    /// Per output token of a request that runs alone.
    pub tpot_seconds: f64,
    /// About what an output token takes while as many requests as run at once all decode. The limit is not
    /// about it.
    pub busy_tpot_seconds: f64,
    /// What requests meet in the mean, where the rental says when they come. The limits are about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub met: Option<MetTimes>,
    /// Output tokens in a second when as many requests as may run at once always do.
    pub full_load_tokens_per_second: f64,
}

/// What requests meet that come as an arrival process says: means. Those that waited for a start are served beside each
/// other and are slower until that is over.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MetTimes {
    /// Seconds to the first token of a request that finds functions awake, the wait for its turn included.
    pub ttft_seconds: f64,
    /// Seconds per output token, for the same.
    pub tpot_seconds: f64,
    /// Share of the requests that wait for functions to start.
    pub cold_share: f64,
    /// Seconds to the first token of a request that finds everything asleep, on nodes that are there: how long a
    /// cloud takes to hand over a node is not in it.
    pub cold_ttft_seconds: f64,
}

/// Numbers of main functions that are tried where requests come: one as long as it serves them, and more where these are
/// cheaper or the only ones to serve all.
const MAINS: [u32; 12] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];

/// The cheapest nodes for `rental`, beside every rival.
///
/// # Errors
/// A figure that cannot be, by field. That nothing keeps the limits is an answer.
pub fn rent(rental: &Rental) -> Result<NodesAnswer, FieldError> {
    rental.check()?;
    let compiled = Compiled::new(rental);
    let all: Vec<(Arrangement, Best)> =
        Arrangement::ALL.map(|name| (name, compiled.best(name, f64::INFINITY, false))).into();
    let verdict = verdict::verdict(&compiled, &all);
    let found = |name: Arrangement| all.iter().find(|(one, _)| *one == name)?.1.found.as_ref();
    let best = verdict.rivals.iter().find(|rival| Some(rival.name) == verdict.best);
    let alive_share =
        best.and_then(|best| found(best.name)).map_or(1.0, |found| found.dollars / found.per_hour);
    let of_remoe = verdict.rivals.iter().filter(|rival| rival.name.is_served_by_remoe() && rival.feasible);
    let of_remoe = of_remoe.min_by(|a, b| a.order().total_cmp(&b.order()));
    Ok(NodesAnswer {
        nodes: best.map(|best| best.nodes.clone()).unwrap_or_default(),
        dollars_per_hour: best.and_then(|best| best.dollars_per_hour),
        alive_share,
        layout: best.and_then(|best| best.layout),
        expected: best.and_then(|best| best.expected),
        reserve: rental.reserve,
        best_of_remoe: of_remoe.filter(|rival| Some(rival.name) != verdict.best).cloned(),
        verdict,
    })
}

impl Compiled<'_> {
    /// The cheapest nodes for `arrangement` with as many main functions as make it so, below `bound` dollars per hour in the
    /// mean; with `any` the first ones that are found.
    fn best(&self, arrangement: Arrangement, bound: f64, any: bool) -> Best {
        let mut best = self.with_these_mains(arrangement, bound, any);
        let mut before = best.clone();
        for mains in MAINS.into_iter().filter(|mains| *mains > self.mains) {
            if self.rental.arrivals.is_none() || (any && best.bound() < bound) {
                break;
            }
            let more = self.with_mains(mains);
            let cheapest = (0..more.shapes.len()).filter(|shape| more.may_host_main(*shape));
            let least = cheapest.map(|shape| more.per_hour(shape)).fold(f64::INFINITY, f64::min);
            if more.least_dollars(least) >= bound.min(best.bound()) {
                break;
            }
            let found = more.with_these_mains(arrangement, bound.min(best.bound()), any);
            let is_closer = found.is_closer_than(&before);
            before = found.clone();
            match found.found {
                Some(found) => best.offer(found),
                // More of what does not serve one request in time do not either.
                None if best.found.is_none() && !is_closer => break,
                None if best.found.is_none() => best.missed(found.miss),
                None => {}
            }
        }
        best
    }

    fn with_these_mains(&self, arrangement: Arrangement, bound: f64, any: bool) -> Best {
        match arrangement.is_remote() {
            true => self.with_remote(arrangement, bound, any),
            false => self.on_one_node(arrangement),
        }
    }

    /// Seconds from nothing to ready of what `found` consists of, on nodes that are there.
    fn start_seconds(&self, found: &Found) -> f64 {
        let main = found.on_gpu + found.on_host;
        self.rental.starts.map_or(0.0, |starts| starts.seconds(main, found.function_bytes))
    }

    /// `found` with what it costs in the mean over all time.
    fn priced(&self, found: Found) -> Found {
        let load = self.under_load(found.times, self.start_seconds(&found));
        Found { dollars: found.per_hour * load.map_or(1.0, |load| load.share), ..found }
    }

    /// The least that nodes cost in the mean over all time that cost `per_hour` while they are there.
    fn least_dollars(&self, per_hour: f64) -> f64 {
        per_hour * self.least_share
    }

    fn expected(&self, found: &Found) -> ExpectedTimes {
        // The first token of a request is the prefill's.
        let tokens = self.rental.request.output_tokens + 1.0;
        ExpectedTimes {
            ttft_seconds: found.times.ttft,
            tpot_seconds: found.times.tpot,
            busy_tpot_seconds: found.times.busy,
            met: self.met_times(found),
            full_load_tokens_per_second: tokens * self.most_per_second(found.times),
        }
    }

    fn met_times(&self, found: &Found) -> Option<MetTimes> {
        let (arrivals, service) = (self.rental.arrivals.as_ref()?, self.service(found.times));
        let (awake, start_seconds) = (self.met(found.times), self.start_seconds(found));
        Some(MetTimes {
            ttft_seconds: awake.ttft,
            tpot_seconds: awake.tpot,
            cold_share: alive(arrivals, &service, start_seconds).cold_share,
            cold_ttft_seconds: awake.ttft + arrivals.idle_seconds.map_or(0.0, |_| start_seconds),
        })
    }

    fn rented(&self, found: &Found, arrangement: Arrangement) -> Vec<RentedNodes> {
        let node = |shape: usize, count: u32, hosts: Vec<String>| RentedNodes {
            shape: self.shapes[shape].node.name.clone(),
            count: count * found.mains,
            hosts,
            spot: self.shapes[shape].node.spot,
        };
        let kind = if arrangement == Arrangement::Layers { "layer" } else { "group" };
        let mut nodes = vec![node(found.main, 1, vec!["main".to_owned()])];
        let mut named = 0;
        for &(shape, count, capacity) in &found.hosts {
            let until = (named + count as usize * capacity).min(found.functions);
            nodes.push(node(shape, count, (named..until).map(|index| format!("{kind}-{index}")).collect()));
            named = until;
        }
        nodes
    }

    fn layout(&self, found: &Found) -> NodesLayout {
        let main = &self.shapes[found.main];
        let on_gpu = found.device == compiled::Device::Gpu;
        let vcpus = |(shape, _, capacity): &(usize, u32, usize)| self.shapes[*shape].vcpus / *capacity as f64;
        NodesLayout {
            mains: found.mains,
            device: if on_gpu { crate::problem::Device::Gpu } else { crate::problem::Device::Cpu },
            local_experts: found.local,
            main_bytes: found.on_host,
            rest_bytes: self.rest_bytes(),
            gpu_bytes: found.on_gpu,
            main_vcpus: main.vcpus,
            remote_functions: found.functions,
            remote_experts: found.experts_each,
            remote_bytes: found.function_bytes,
            remote_vcpus: found.hosts.iter().map(vcpus).fold(f64::INFINITY, f64::min).min(1e6),
            gpus: if on_gpu { found.gpus } else { 0 },
            gpu_bytes_each: main.node.gpu_bytes,
        }
    }
}
