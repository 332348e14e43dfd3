//! Choice of nodes: which node shapes to rent for a model within its limits, and which functions run on them.
//!
//! Clouds sell nodes, not single GB and vCPUs. [`rent`] prices every arrangement of a model's parts ([`Arrangement`]) as
//! whole nodes of a list. It reports whether remote experts pay, why every other arrangement is more expensive or infeasible, and
//! which changes would flip the result.
//!
//! Every arrangement has its own best batch, division of GPUs and nodes, and number of copies under the same load and
//! limits. The load is an arrival rate, or a constant number of requests in flight. The search is exact for equal functions,
//! except that only a few numbers of local experts are tried.
//!
//! | file | content |
//! | --- | --- |
//! | `rental.rs` | the input: model, requests, limits, node shapes with their times |
//! | `batches.rs`, `compiled.rs` | times of every arrangement over the batch size |
//! | `load.rs` | the fewest copies that serve the load within the limits |
//! | `without_remote.rs`, `with_remote.rs` | search over arrangements without and with remote functions |
//! | `best_nodes.rs`, `node_cover.rs` | the best nodes so far; the cheapest nodes that hold equal functions |
//! | `comparison.rs` | whether remote experts pay, and which changes would flip that |

mod batches;
mod best_nodes;
mod comparison;
mod compiled;
mod load;
mod node_cover;
mod rental;
mod slowest;
mod with_remote;
mod without_remote;

pub use best_nodes::Arrangement;
use best_nodes::{BestNodes, FoundNodes};
pub use comparison::{ArrangementEvaluation, BrokenLimit, NodesComparison, NodesFlip, NodesFlipFigure};
use compiled::CompiledRental;
use remoe_plan::alive::{Latency, mean_per_second};
use remoe_plan::error::FieldError;
use remoe_plan::problem::Device;
pub use rental::{GpuGroup, GpuTimes, NodeShape, Rental, Reserve, ResidentModel, SpotPolicy};
use serde::Serialize;

/// Nodes to rent, with the comparison of all arrangements.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodesAnswer {
    /// Nodes of the best arrangement; empty if no arrangement keeps the limits.
    pub nodes: Vec<RentedNodes>,
    /// Dollars per hour of all nodes, times the share of time in which they are rented.
    pub dollars_per_hour: Option<f64>,
    /// Mean requests per second, with arrivals.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests_per_second: Option<f64>,
    /// Share of time in which the nodes are rented: 1 without arrivals or idle windows.
    pub alive_share: f64,
    /// Layout of the functions on them.
    pub layout: Option<NodesLayout>,
    /// Expected times of typical requests.
    pub expected: Option<ExpectedTimes>,
    /// Resources of each node that functions cannot use.
    pub reserve: Reserve,
    /// Comparison of all arrangements, and whether remote experts pay.
    pub verdict: NodesComparison,
    /// The cheapest arrangement that Remoe itself can serve, if the best one is another.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_of_remoe: Option<ArrangementEvaluation>,
}

/// Nodes of one shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RentedNodes {
    /// Name of the shape.
    pub shape: String,
    /// Number of nodes.
    pub count: u32,
    /// Names of the functions on these nodes: `main`, `group-0`, or `layer-0` by position; `stage-0` if nodes divide the
    /// layers. There are [`NodesLayout::mains`] of each.
    pub hosts: Vec<String>,
    /// Set if the cloud may reclaim them.
    pub spot: bool,
}

/// Layout of functions: what each of them holds. Sizes are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct NodesLayout {
    /// Main functions that share the load. The numbers below are those of one main function.
    pub mains: u32,
    /// Requests that each copy runs at once.
    pub slots: u32,
    /// Copies of the model in each: groups of GPUs of one node, or batches in different stages.
    pub copies: u32,
    /// Nodes that divide the layers.
    pub stages: u32,
    /// Layers with their experts on CPUs, if the other layers are on GPUs.
    pub hosted_layers: usize,
    /// Where the non-expert part runs: `gpu` or `cpu`.
    pub device: Device,
    /// Local experts of every layer.
    pub local_experts: usize,
    /// Main memory of the main function, without the non-expert part: buffers, and experts that are not on GPUs.
    pub main_bytes: f64,
    /// Non-expert part and KV cache, on the device.
    pub rest_bytes: f64,
    /// GPU memory in use; 0 without GPUs.
    pub gpu_bytes: f64,
    /// vCPUs of the main function.
    pub main_vcpus: f64,
    /// Remote functions.
    pub remote_functions: usize,
    /// Largest number of experts of a layer in a remote function.
    pub remote_experts: usize,
    /// Memory of a remote function.
    pub remote_bytes: f64,
    /// vCPUs of a remote function, on the node with the most of them.
    pub remote_vcpus: f64,
    /// GPUs of the main function.
    pub gpus: u32,
    /// Memory of each GPU.
    pub gpu_bytes_each: f64,
}

/// Latencies of typical requests, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ExpectedTimes {
    /// Time to first token of a request that runs alone.
    pub ttft_seconds: f64,
    /// Time per output token of a request that runs alone.
    pub tpot_seconds: f64,
    /// Decode step at full load, without prefills. With arrivals its batch is the largest that keeps the TPOT limit, up to
    /// [`NodesLayout::slots`]; without them it is the number of requests in flight.
    pub busy_tpot_seconds: f64,
    /// Requests in flight at all main functions. With arrivals it follows from their rate (Little's law).
    pub in_flight: f64,
    /// Latencies under the load, which are compared with the limits.
    #[serde(rename = "met")]
    pub under_load: LoadedTimes,
    /// Output tokens per second if every slot always has a request.
    pub full_load_tokens_per_second: f64,
}

/// Mean latencies of requests under the load.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LoadedTimes {
    /// Time to first token of a warm request, including its wait in the queue.
    pub ttft_seconds: f64,
    /// Time per output token of a warm request.
    pub tpot_seconds: f64,
    /// Quantiles of both; absent without arrivals.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<Latency>,
    /// Share of the requests that wait for a cold start.
    pub cold_share: f64,
    /// Time to first token of a cold request on running nodes. It excludes the time in which a cloud provides a node.
    pub cold_ttft_seconds: f64,
}

/// Chooses the cheapest nodes for `rental`, and compares all arrangements.
///
/// If no arrangement keeps the limits, the result has no nodes.
///
/// # Errors
/// An invalid field.
pub fn rent(rental: &Rental) -> Result<NodesAnswer, FieldError> {
    rental.check()?;
    let compiled = CompiledRental::new(rental);
    let all = on_threads(Arrangement::ALL.into(), |name| {
        (name, CompiledRental::new(rental).best(name, f64::INFINITY, false))
    });
    let verdict = comparison::compare(&compiled, &all);
    let found = |name: Arrangement| all.iter().find(|(one, _)| *one == name)?.1.found.as_ref();
    let best = verdict.rivals.iter().find(|rival| Some(rival.name) == verdict.best);
    let alive_share =
        best.and_then(|best| found(best.name)).map_or(1.0, |found| found.dollars / found.per_hour);
    let served_by_remoe =
        verdict.rivals.iter().filter(|rival| rival.name.is_served_by_remoe() && rival.feasible);
    let served_by_remoe = served_by_remoe.min_by(|a, b| a.order(b));
    Ok(NodesAnswer {
        nodes: best.map(|best| best.nodes.clone()).unwrap_or_default(),
        dollars_per_hour: best.and_then(|best| best.dollars_per_hour),
        requests_per_second: rental.arrivals.as_ref().map(mean_per_second),
        alive_share,
        layout: best.and_then(|best| best.layout),
        expected: best.and_then(|best| best.expected),
        reserve: rental.reserve,
        best_of_remoe: served_by_remoe.filter(|rival| Some(rival.name) != verdict.best).cloned(),
        verdict,
    })
}

/// Returns the cheapest arrangement for `rental`, or `None` if none keeps the limits. It does not search flips.
///
/// # Errors
/// An invalid field.
pub fn cheapest_nodes(rental: &Rental) -> Result<Option<ArrangementEvaluation>, FieldError> {
    rental.check()?;
    let compiled = CompiledRental::new(rental);
    let rivals =
        Arrangement::ALL.map(|name| compiled.evaluation(name, &compiled.best(name, f64::INFINITY, false)));
    Ok(rivals.into_iter().filter(|rival| rival.feasible).min_by(ArrangementEvaluation::order))
}

/// Runs `search` for each of `subjects` on its own thread, and returns the results in order.
fn on_threads<S: Send, R: Send>(subjects: Vec<S>, search: impl Fn(S) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let search = &search;
        let running: Vec<_> =
            subjects.into_iter().map(|subject| scope.spawn(move || search(subject))).collect();
        let results = running.into_iter().map(|thread| match thread.join() {
            Ok(found) => found,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        results.collect()
    })
}

impl CompiledRental<'_> {
    /// Searches the cheapest nodes for `arrangement`.
    ///
    /// With remote functions: only nodes below `bound` mean dollars per hour; if `any`, the first ones that are found.
    fn best(&self, arrangement: Arrangement, bound: f64, any: bool) -> BestNodes {
        match arrangement.is_remote() {
            true => self.with_remote(arrangement, bound, any),
            false => self.without_remote(arrangement),
        }
    }

    /// Returns the expected latencies on `found`.
    fn expected(&self, found: &FoundNodes) -> ExpectedTimes {
        let (unit, mean) = (&found.unit, self.mean_latency(&found.unit, found.units));
        let start_seconds = self.start_seconds(found);
        let load = self.stated_load(unit, found.units, start_seconds);
        let latency = self.latency(unit, found.units);
        let ttft = latency.map_or(mean.ttft, |latency| latency.ttft.mean);
        let sleeps = self.rental.arrivals.as_ref().is_some_and(|arrivals| arrivals.idle_seconds.is_some());
        let copies = f64::from(found.units) * f64::from(unit.copies);
        let full = match self.rental.arrivals {
            Some(_) => self.at_full_load(unit),
            None => {
                load::ServingUnit { slots: unit.slots.min((mean.in_flight / copies).ceil() as u32), ..*unit }
            }
        };
        // The prefill generates the first token.
        let steps = self.rental.request.output_tokens;
        ExpectedTimes {
            ttft_seconds: unit.times.prefill,
            tpot_seconds: unit.times.alone(),
            busy_tpot_seconds: full.times.step(full.slots),
            in_flight: mean.in_flight,
            under_load: LoadedTimes {
                ttft_seconds: ttft,
                tpot_seconds: latency.map_or(mean.tpot, |latency| latency.tpot.mean),
                latency,
                cold_share: load.map_or(0.0, |load| load.cold_share),
                cold_ttft_seconds: ttft + if sleeps { start_seconds } else { 0.0 },
            },
            full_load_tokens_per_second: (steps + 1.0) * f64::from(found.units) * full.most_per_second(steps),
        }
    }

    /// Lists the nodes of `found` with the functions on them.
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

    /// Describes the functions on `found`.
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
