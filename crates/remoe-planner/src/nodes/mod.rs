//! Nodes as they are sold: which shapes to rent for a model within its limits, and what is on them.
//!
//! Memory and vCPUs are not bought by the GB but by the node. [`rent`] prices every arrangement of a model's
//! parts ([`Arrangement`]) as whole nodes of a list, and says whether remote experts pay, why every other way
//! is dearer or impossible, and what would have to be different for another answer.
//!
//! Every arrangement has its own best batch, division of GPUs and nodes, and number of copies under the same load and
//! limits. The load is the arrival rate, or a number of requests that are in flight all the time. The search is exact
//! for equal functions but for one thing: how many experts of a layer stay beside the main function is tried at a few
//! numbers.
//!
//! | file | content |
//! | --- | --- |
//! | `form.rs` | the form of a question: model, requests, limits, node shapes with their times |
//! | `batches.rs`, `compiled.rs` | times of every arrangement over the batch size |
//! | `load.rs` | the fewest copies that serve the load within the limits |
//! | `whole.rs`, `remote.rs` | search over arrangements without and with remote functions |
//! | `found.rs`, `cover.rs` | the best so far; the cheapest nodes that hold equal functions |
//! | `verdict.rs` | whether remote experts pay, and what would turn that |

mod batches;
mod compiled;
mod cover;
mod form;
mod found;
mod load;
mod remote;
mod slowest;
mod verdict;
mod whole;

use compiled::Compiled;
pub use form::{GpuGroup, GpuTimes, NodeShape, Rental, Reserve, ResidentModel, Spot};
pub use found::Arrangement;
use found::{BestNodes, FoundNodes};
use remoe_plan::alive::{Latency, mean_per_second};
use remoe_plan::error::FieldError;
use remoe_plan::problem::Device;
use serde::Serialize;
pub use verdict::{BrokenLimit, Flip, FlipCause, NodesVerdict, RivalNodes};

/// Nodes to rent, and the reasons.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodesAnswer {
    /// The nodes of the best arrangement; none where nothing keeps the limits.
    pub nodes: Vec<RentedNodes>,
    /// Dollars per hour of all nodes, times the share of time in which they are there.
    pub dollars_per_hour: Option<f64>,
    /// Requests per second in the mean, where they have a rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests_per_second: Option<f64>,
    /// Share of time in which the nodes are there: 1 without arrivals or idle windows.
    pub alive_share: f64,
    /// Layout of the functions on them.
    pub layout: Option<NodesLayout>,
    /// Expected times of typical requests.
    pub expected: Option<ExpectedTimes>,
    /// Resources that are not there for functions.
    pub reserve: Reserve,
    /// Verdict on remote experts here.
    pub verdict: NodesVerdict,
    /// The cheapest way in which this project itself serves the model, where the best one is another.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_of_remoe: Option<RivalNodes>,
}

/// Nodes of one shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RentedNodes {
    /// Name of the shape.
    pub shape: String,
    /// How many.
    pub count: u32,
    /// The functions on all of them together: `main`, `group-0`, or `layer-0` by position; `stage-0` where nodes
    /// divide the layers. Of each there are as many as there are main functions ([`NodesLayout::mains`]).
    pub hosts: Vec<String>,
    /// Set if they may be taken back.
    pub spot: bool,
}

/// Layout of functions: what each of them holds. Units: bytes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct NodesLayout {
    /// Main functions that share the load. Each has as many remote functions, stages and copies as are counted below.
    pub mains: u32,
    /// Requests that each copy runs at once.
    pub slots: u32,
    /// Copies of the model in each: groups of GPUs of one node, or batches in different stages.
    pub copies: u32,
    /// Nodes that divide the layers.
    pub stages: u32,
    /// Layers with their experts on CPUs, where the rest is on GPUs.
    pub hosted_layers: usize,
    /// Where the non-expert part runs: `gpu` or `cpu`.
    pub device: Device,
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
    /// A decode step at full load, without prefills: of as many requests as keep the limit of TPOT with them, at most
    /// [`NodesLayout::slots`], or of as many as are in flight.
    pub busy_tpot_seconds: f64,
    /// Requests in flight, all main functions together. With arrivals it follows from their rate (Little's law).
    pub in_flight: f64,
    /// Means of the requests under the load. The limits are about them.
    pub met: MetTimes,
    /// Output tokens in a second when every slot always has a request.
    pub full_load_tokens_per_second: f64,
}

/// Means of the requests under the load. Those that waited for a start are served beside each other and are slower
/// until that is over.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MetTimes {
    /// Seconds to the first token of a request that finds functions awake, the wait for its turn included.
    pub ttft_seconds: f64,
    /// Seconds per output token, for the same.
    pub tpot_seconds: f64,
    /// Quantiles of both; absent without arrivals.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<Latency>,
    /// Share of the requests that wait for functions to start.
    pub cold_share: f64,
    /// Seconds to the first token of a request that finds everything asleep, on nodes that are there: how long a
    /// cloud takes to hand over a node is not in it.
    pub cold_ttft_seconds: f64,
}

/// The cheapest nodes for `rental`, beside every rival.
///
/// # Errors
/// An invalid figure, by field. That nothing keeps the limits is an answer.
pub fn rent(rental: &Rental) -> Result<NodesAnswer, FieldError> {
    rental.check()?;
    let compiled = Compiled::new(rental);
    let all = on_threads(Arrangement::ALL.into(), |name| {
        (name, Compiled::new(rental).best(name, f64::INFINITY, false))
    });
    let verdict = verdict::verdict(&compiled, &all);
    let found = |name: Arrangement| all.iter().find(|(one, _)| *one == name)?.1.found.as_ref();
    let best = verdict.rivals.iter().find(|rival| Some(rival.name) == verdict.best);
    let alive_share =
        best.and_then(|best| found(best.name)).map_or(1.0, |found| found.dollars / found.per_hour);
    let of_remoe = verdict.rivals.iter().filter(|rival| rival.name.is_served_by_remoe() && rival.feasible);
    let of_remoe = of_remoe.min_by(|a, b| a.order(b));
    Ok(NodesAnswer {
        nodes: best.map(|best| best.nodes.clone()).unwrap_or_default(),
        dollars_per_hour: best.and_then(|best| best.dollars_per_hour),
        requests_per_second: rental.arrivals.as_ref().map(mean_per_second),
        alive_share,
        layout: best.and_then(|best| best.layout),
        expected: best.and_then(|best| best.expected),
        reserve: rental.reserve,
        best_of_remoe: of_remoe.filter(|rival| Some(rival.name) != verdict.best).cloned(),
        verdict,
    })
}

/// The cheapest arrangement for `rental`, without what would turn the verdict; none where nothing keeps the limits.
///
/// # Errors
/// An invalid figure, by field.
pub fn cheapest_nodes(rental: &Rental) -> Result<Option<RivalNodes>, FieldError> {
    rental.check()?;
    let compiled = Compiled::new(rental);
    let rivals =
        Arrangement::ALL.map(|name| compiled.rival(name, &compiled.best(name, f64::INFINITY, false)));
    Ok(rivals.into_iter().filter(|rival| rival.feasible).min_by(RivalNodes::order))
}

/// Results of `search` for each of `subjects`, in their order, each on a thread of its own.
fn on_threads<S: Send, R: Send>(subjects: Vec<S>, search: impl Fn(S) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let search = &search;
        let running: Vec<_> =
            subjects.into_iter().map(|subject| scope.spawn(move || search(subject))).collect();
        let ended = running.into_iter().map(|thread| match thread.join() {
            Ok(found) => found,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        ended.collect()
    })
}

impl Compiled<'_> {
    /// The cheapest nodes for `arrangement`, below `bound` dollars per hour in the mean where it has remote functions;
    /// with `any` the first ones of these that are found.
    fn best(&self, arrangement: Arrangement, bound: f64, any: bool) -> BestNodes {
        match arrangement.is_remote() {
            true => self.with_remote(arrangement, bound, any),
            false => self.without_remote(arrangement),
        }
    }

    fn expected(&self, found: &FoundNodes) -> ExpectedTimes {
        let (unit, met) = (&found.unit, self.met(&found.unit, found.units));
        let start_seconds = self.start_seconds(found);
        let load = self.stated_load(unit, found.units, start_seconds);
        let latency = self.latency(unit, found.units);
        let ttft = latency.map_or(met.ttft, |latency| latency.ttft.mean);
        let sleeps = self.rental.arrivals.as_ref().is_some_and(|arrivals| arrivals.idle_seconds.is_some());
        let copies = f64::from(found.units) * f64::from(unit.copies);
        let full = match self.rental.arrivals {
            Some(_) => self.at_full_load(unit),
            None => load::Unit { slots: unit.slots.min((met.in_flight / copies).ceil() as u32), ..*unit },
        };
        // The first token of a request is the prefill's.
        let steps = self.rental.request.output_tokens;
        ExpectedTimes {
            ttft_seconds: unit.times.prefill,
            tpot_seconds: unit.times.alone(),
            busy_tpot_seconds: full.times.step(full.slots),
            in_flight: met.in_flight,
            met: MetTimes {
                ttft_seconds: ttft,
                tpot_seconds: latency.map_or(met.tpot, |latency| latency.tpot.mean),
                latency,
                cold_share: load.map_or(0.0, |load| load.cold_share),
                cold_ttft_seconds: ttft + if sleeps { start_seconds } else { 0.0 },
            },
            full_load_tokens_per_second: (steps + 1.0) * f64::from(found.units) * full.most_per_second(steps),
        }
    }

    fn rented(&self, found: &FoundNodes, arrangement: Arrangement) -> Vec<RentedNodes> {
        let node = |shape: usize, count: u32, hosts: Vec<String>| RentedNodes {
            shape: self.shapes[shape].node.name.clone(),
            count: count * found.units,
            hosts,
            spot: self.shapes[shape].node.spot,
        };
        let mains = match found.stages {
            1 => vec!["main".to_owned()],
            stages => (0..stages).map(|stage| format!("stage-{stage}")).collect(),
        };
        let kind = if arrangement == Arrangement::Layers { "layer" } else { "group" };
        let mut nodes = vec![node(found.main, found.stages, mains)];
        let mut named = 0;
        for &(shape, count, capacity) in &found.hosts {
            let until = (named + count as usize * capacity).min(found.functions);
            nodes.push(node(shape, count, (named..until).map(|index| format!("{kind}-{index}")).collect()));
            named = until;
        }
        nodes
    }

    fn layout(&self, found: &FoundNodes, arrangement: Arrangement) -> NodesLayout {
        let main = &self.shapes[found.main];
        let on_gpu = found.device == compiled::Device::Gpu;
        let vcpus = |(shape, _, capacity): &(usize, u32, usize)| self.shapes[*shape].vcpus / *capacity as f64;
        let slots = found.unit.slots;
        NodesLayout {
            mains: found.units,
            slots,
            copies: found.unit.copies,
            stages: found.stages,
            hosted_layers: found.hosted_layers,
            device: if on_gpu { Device::Gpu } else { Device::Cpu },
            local_experts: found.local,
            main_bytes: found.on_host,
            rest_bytes: match arrangement.is_served_by_remoe() {
                true => self.main_rest_bytes(found.device, slots),
                false => self.rest_bytes(slots),
            },
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
