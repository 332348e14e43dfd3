//! Shapes with their times ready to be added up.

use super::form::{GpuTimes, NodeShape, Rental, ResidentModel, Spot};
use super::slowest::least_slowest;
use crate::alive::{Alive, Service, alive, mean_per_second, quick};
use crate::cost::slowest::{Path, expected_slowest};
use crate::problem::Arrivals;
use crate::problem::curve::Curve;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// Functions on one node, at most.
pub(super) const MOST_PER_NODE: usize = 64;

/// What is varied to see when an answer would be another one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Setting {
    /// Limit of the time per output token.
    pub(super) tpot: f64,
    /// Factor on the prices of nodes with GPUs.
    pub(super) gpu_price: f64,
    /// Factor on the bytes of all weights, and on the time that they take.
    pub(super) size: f64,
}

/// Times of a typical request that runs alone, and what a step takes when all run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Times {
    pub(super) ttft: f64,
    pub(super) tpot: f64,
    /// A decode step of as many requests as run at once, about: the mean of every path.
    pub(super) busy: f64,
}

impl Times {
    /// The slower of each.
    pub(super) fn slower(self, other: Self) -> Self {
        Self {
            ttft: self.ttft.max(other.ttft),
            tpot: self.tpot.max(other.tpot),
            busy: self.busy.max(other.busy),
        }
    }
}

/// Where the non-expert part runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Device {
    Gpu,
    Cpu,
}

pub(super) struct Compiled<'a> {
    pub(super) rental: &'a Rental,
    pub(super) shapes: Rc<[Shape<'a>]>,
    /// Sums of the shares of the most used experts, from none to all.
    pub(super) used: Rc<[f64]>,
    /// How one request's steps compare with what is promised.
    pub(super) setting: Setting,
    /// Main functions that share what comes, each with remote functions of its own.
    pub(super) mains: u32,
    /// When requests come, for a search that asks very often.
    arrivals: Option<Rc<Arrivals>>,
    /// Share of time in which nodes are there, at least.
    pub(super) least_share: f64,
    /// Times that were asked for, with the bits of the size that they are for: other prices and limits ask
    /// for the same ones.
    known: Rc<RefCell<HashMap<(Split, u64), Times>>>,
}

/// Times that are kept, at most.
const MOST_KNOWN: usize = 1 << 20;

pub(super) struct Shape<'a> {
    pub(super) node: &'a NodeShape,
    pub(super) memory: f64,
    /// Of one GPU.
    pub(super) gpu_memory: f64,
    pub(super) vcpus: f64,
    /// Experts of the main function here, then of each of 2, 3, .. remote functions.
    speeds: Vec<Speed>,
    rest_prefill: f64,
    rest_decode: f64,
    rest_busy: f64,
    /// What the context adds to a decode step for each request in it: one GPU, and all of them.
    context_on_gpu: f64,
    context_on_gpus: f64,
    /// All experts on the GPU: prefill of a layer, and a decode step's.
    gpu_prefill: f64,
    gpu_decode: f64,
    gpu_busy: f64,
}

/// Experts on the vCPUs of one function.
struct Speed {
    /// One expert, one token.
    decode: f64,
    /// One expert, the tokens that it has when all requests run.
    busy: f64,
    /// The most used experts one after another, from none to all.
    prefill: Vec<f64>,
}

impl<'a> Compiled<'a> {
    pub(super) fn new(rental: &'a Rental) -> Self {
        let (model, input) = (&rental.model, rental.request.input_tokens);
        let mut usage =
            rental.usage.clone().unwrap_or_else(|| vec![1.0 / model.experts as f64; model.experts]);
        usage.sort_by(|a, b| b.total_cmp(a));
        let tokens: Vec<f64> = usage.iter().map(|share| input * model.top_k as f64 * share).collect();
        let shapes = rental.shapes.iter().map(|node| Shape::new(node, rental, &tokens)).collect();
        let setting = Setting { tpot: rental.slo.tpot_seconds, gpu_price: 1.0, size: 1.0 };
        let arrivals = rental.arrivals.as_ref().map(|arrivals| Rc::new(quick(arrivals).into_owned()));
        let used = sums(usage.into_iter()).into();
        let known = Rc::default();
        Self { rental, shapes, used, setting, mains: 1, arrivals, least_share: 1.0, known }.with_mains(1)
    }

    /// The same with so many main functions.
    pub(super) fn with_mains(&self, mains: u32) -> Self {
        let mut compiled = Self { mains, ..self.with(self.setting) };
        let nothing = Times { ttft: 0.0, tpot: 0.0, busy: 0.0 };
        compiled.least_share = compiled.under_load(nothing, 0.0).map_or(1.0, |load| load.share);
        compiled
    }

    /// The same under another setting.
    pub(super) fn with(&self, setting: Setting) -> Self {
        Self {
            rental: self.rental,
            shapes: self.shapes.clone(),
            used: self.used.clone(),
            setting,
            mains: self.mains,
            arrivals: self.arrivals.clone(),
            least_share: self.least_share,
            known: self.known.clone(),
        }
    }

    pub(super) fn model(&self) -> &ResidentModel {
        &self.rental.model
    }

    /// Dollars per hour of one node for each main function.
    pub(super) fn per_hour(&self, shape: usize) -> f64 {
        let node = self.shapes[shape].node;
        f64::from(self.mains) * node.per_hour * if node.gpus > 0 { self.setting.gpu_price } else { 1.0 }
    }

    /// How many nodes of a shape there may be for each main function.
    pub(super) fn most_nodes(&self, shape: usize) -> Option<u32> {
        self.shapes[shape].node.max.map(|max| max / self.mains)
    }

    /// Bytes of so many experts of every layer.
    pub(super) fn expert_bytes(&self, per_layer: usize) -> f64 {
        per_layer as f64 * self.model().layers as f64 * self.one_expert_bytes()
    }

    pub(super) fn one_expert_bytes(&self) -> f64 {
        self.model().expert_bytes * self.setting.size
    }

    /// Everything but experts, with keys and values of all requests that run at once.
    pub(super) fn rest_bytes(&self) -> f64 {
        let model = self.model();
        let tokens = self.rental.request.tokens_in_memory();
        model.rest_bytes * self.setting.size + tokens * (model.kv_bytes_per_token + model.token_bytes)
    }

    /// What a main function keeps on the host besides experts and the rest.
    pub(super) fn host_bytes(&self) -> f64 {
        let tokens = self.rental.request.tokens_in_memory();
        self.rental.runtime_bytes + tokens * self.model().token_bytes
    }

    /// What a main function with remote experts keeps for those that no remote function answers for.
    pub(super) fn fallback_bytes(&self) -> f64 {
        self.rental.fallback_bytes * self.setting.size
    }

    pub(super) fn may_host_main(&self, shape: usize) -> bool {
        let may_end = self.shapes[shape].node.spot && self.rental.spot != Spot::Everything;
        !may_end && self.most_nodes(shape) != Some(0)
    }

    pub(super) fn may_host_remote(&self, shape: usize) -> bool {
        let node = self.shapes[shape].node;
        node.gpus == 0 && (!node.spot || self.rental.spot != Spot::Never)
    }

    /// Whether `times` keep the limits under the load that comes.
    pub(super) fn holds(&self, times: Times) -> bool {
        let kept = |times: Times| {
            times.ttft <= self.rental.slo.ttft_seconds + 1e-9 && times.tpot <= self.setting.tpot + 1e-12
        };
        kept(times) && self.utilisation(times) < 1.0 && kept(self.met(times))
    }

    /// What requests meet in the mean: those of `times` alone where nobody says when they come.
    pub(super) fn met(&self, times: Times) -> Times {
        match self.under_load(times, 0.0) {
            Some(load) if !load.saturated => Times {
                ttft: times.ttft.max(load.first_token_seconds + load.wait_seconds),
                tpot: times.tpot.max(load.tpot_seconds),
                ..times
            },
            _ => times,
        }
    }

    /// What the load that comes makes of functions with `times` that take `start_seconds` to start.
    pub(super) fn under_load(&self, times: Times, start_seconds: f64) -> Option<Alive> {
        self.arrivals.as_ref().map(|arrivals| alive(arrivals, &self.service(times), start_seconds))
    }

    /// Main functions with `times`.
    pub(super) fn service(&self, times: Times) -> Service {
        let request = &self.rental.request;
        // Between one request and as many as run at once, a step grows evenly.
        let most = request.concurrency.max(1);
        let part = |rows: u32| f64::from(rows - 1) / f64::from((most - 1).max(1));
        let step = |rows| times.tpot + part(rows) * (times.busy - times.tpot).max(0.0);
        Service {
            prefill_seconds: times.ttft,
            step_seconds: (1..=most).map(step).collect(),
            steps: request.output_tokens,
            concurrency: most,
            mains: self.mains,
        }
    }

    /// Requests in a second when as many as may run at once always do: every prefill holds up all of them.
    pub(super) fn most_per_second(&self, times: Times) -> f64 {
        let request = &self.rental.request;
        let at_once = f64::from(request.concurrency.max(1));
        f64::from(self.mains) * at_once / (at_once * times.ttft + request.output_tokens * times.busy)
    }

    /// Arrivals over what can be served at most; 0 where nobody says when requests come.
    pub(super) fn utilisation(&self, times: Times) -> f64 {
        let arrivals = self.rental.arrivals.as_ref();
        arrivals.map_or(0.0, |arrivals| mean_per_second(arrivals) / self.most_per_second(times))
    }

    /// The part that is no expert, with the moves between device and host.
    fn rest(&self, shape: usize, device: Device) -> Times {
        let (shape, size, layers) = (&self.shapes[shape], self.setting.size, self.model().layers as f64);
        let decodes = self.decodes();
        match (device, &shape.node.gpu) {
            (Device::Gpu, Some(gpu)) => Times {
                ttft: gpu.rest_prefill_seconds.at(self.rental.request.input_tokens) * size
                    + 2.0 * layers * gpu.swap_seconds.at(self.rental.request.input_tokens),
                tpot: decodes
                    * ((gpu.rest_decode_seconds + shape.context_on_gpu) * size
                        + 2.0 * layers * gpu.swap_seconds.at(1.0)),
                busy: decodes
                    * ((gpu.rest_prefill_seconds.at(self.at_once()) + self.at_once() * shape.context_on_gpu)
                        * size
                        + 2.0 * layers * gpu.swap_seconds.at(self.at_once())),
            },
            _ => Times {
                ttft: shape.rest_prefill * size,
                tpot: decodes * shape.rest_decode * size,
                busy: decodes * shape.rest_busy * size,
            },
        }
    }

    /// Everything with all experts beside the main function.
    pub(super) fn all_local(&self, shape: usize, device: Device) -> Times {
        let (rest, layers, size) = (self.rest(shape, device), self.model().layers as f64, self.setting.size);
        let speed = &self.shapes[shape].speeds[0];
        Times {
            ttft: rest.ttft + layers * size * last(&speed.prefill),
            tpot: rest.tpot + self.decodes() * layers * self.model().top_k as f64 * speed.decode * size,
            busy: rest.busy + self.decodes() * layers * self.used_at_once() * speed.busy * size,
        }
    }

    /// Everything on the GPUs.
    pub(super) fn all_on_gpu(&self, shape: usize, gpu: &GpuTimes) -> Times {
        let (model, size) = (self.model(), self.setting.size);
        let layers = model.layers as f64;
        let shape = &self.shapes[shape];
        let context = shape.context_on_gpus;
        let step = gpu.rest_decode_seconds + context + layers * model.top_k as f64 * shape.gpu_decode;
        let prefill = gpu.rest_prefill_seconds.at(self.rental.request.input_tokens);
        let busy = gpu.rest_prefill_seconds.at(self.at_once())
            + self.at_once() * context
            + layers * self.used_at_once() * shape.gpu_busy;
        Times {
            ttft: (prefill + layers * shape.gpu_prefill) * size,
            tpot: self.decodes() * step * size,
            busy: self.decodes() * busy * size,
        }
    }

    /// Seconds in which so many experts of every layer come from the host's memory.
    pub(super) fn moving(&self, experts: f64, gpu: &GpuTimes) -> f64 {
        experts * self.one_expert_bytes() * self.model().layers as f64 / gpu.host_bytes_per_second
    }

    /// Requests that run at once.
    fn at_once(&self) -> f64 {
        f64::from(self.rental.request.concurrency.max(1))
    }

    /// Experts of a layer that a step of all requests uses.
    pub(super) fn used_at_once(&self) -> f64 {
        used_at_once(self.rental)
    }

    fn decodes(&self) -> f64 {
        if self.rental.request.output_tokens > 0.0 { 1.0 } else { 0.0 }
    }

    /// The main function with the `local` most used experts of every layer, and the others in `groups` that
    /// work at the same time, each on a node of `host` with `per_node` of them.
    pub(super) fn split(&self, at: &Split) -> Times {
        let key = (*at, self.setting.size.to_bits());
        if let Some(times) = self.known.borrow().get(&key) {
            return *times;
        }
        let times = self.timed(at, expected_slowest);
        let mut known = self.known.borrow_mut();
        if known.len() >= MOST_KNOWN {
            known.clear();
        }
        known.insert(key, times);
        times
    }

    /// The times that [`Self::split`] is not below.
    pub(super) fn least_split(&self, at: &Split) -> Times {
        self.timed(at, least_slowest)
    }

    fn timed(&self, at: &Split, slowest: fn(usize, &[Path]) -> f64) -> Times {
        let (model, rental, size) = (self.model(), self.rental, self.setting.size);
        let rest = self.rest(at.main, at.device);
        let (main, host) = (&self.shapes[at.main].speeds[0], self.speed(at.host, at.per_node));
        let remote = model.experts - at.local;
        let local_share = self.used[at.local];
        let transport = &rental.transport;
        let back = transport.token_bytes_down / transport.bytes_per_second;
        let path = |experts: usize, count: usize| Path {
            share: (1.0 - local_share) * experts as f64 / remote.max(1) as f64,
            seconds: host.decode * size + back,
            trip: transport.round_trip(),
            count,
        };
        let local = Path { share: local_share, seconds: main.decode * size, trip: 0.0, count: 1 };
        // Groups of equal size as far as the number of experts allows.
        let (least, larger) = (remote / at.groups, remote % at.groups);
        let step = slowest(model.top_k, &[local, path(least, at.groups - larger), path(least + 1, larger)]);
        let called = 1.0 - local_share.min(1.0).powi(model.top_k as i32);
        let largest = remote.div_ceil(at.groups) as f64 / remote.max(1) as f64;
        let rows = rental.request.input_tokens * model.top_k as f64 * (1.0 - local_share) * largest;
        let sent = rows.min(rental.request.input_tokens);
        let group = (last(&host.prefill) - host.prefill[at.local]) * size * largest
            + rows * back
            + sent * transport.token_bytes_up / transport.bytes_per_second
            + transport.invoke_seconds;
        let prefill = (main.prefill[at.local] * size).max(group) + transport.send_seconds;
        let used = self.used_at_once();
        let answered = self.at_once() * model.top_k as f64 * (1.0 - local_share) * largest * back;
        let busy = (local_share * used * main.busy * size)
            .max((1.0 - local_share) * largest * used * host.busy * size + answered + transport.round_trip());
        let layers = model.layers as f64;
        Times {
            ttft: rest.ttft + layers * prefill,
            tpot: rest.tpot + self.decodes() * layers * (step + called * transport.send_seconds),
            busy: rest.busy + self.decodes() * layers * (busy + transport.send_seconds),
        }
    }

    /// Whether experts take no longer on `a` than on `b`, however many functions share the node.
    pub(super) fn no_slower(&self, a: usize, b: usize) -> bool {
        let quick = |(a, b): (&Speed, &Speed)| a.decode <= b.decode && last(&a.prefill) <= last(&b.prefill);
        self.shapes[a].speeds.iter().zip(&self.shapes[b].speeds).all(quick)
    }

    fn speed(&self, shape: usize, per_node: usize) -> &Speed {
        let speeds = &self.shapes[shape].speeds;
        &speeds[per_node.clamp(1, speeds.len()) - 1]
    }
}

/// A main function and groups on one kind of node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Split {
    pub(super) main: usize,
    pub(super) device: Device,
    pub(super) local: usize,
    /// Groups that work at the same time.
    pub(super) groups: usize,
    pub(super) host: usize,
    pub(super) per_node: usize,
}

impl<'a> Shape<'a> {
    fn new(node: &'a NodeShape, rental: &Rental, tokens: &[f64]) -> Self {
        let reserve = &rental.reserve;
        let vcpus = node.usable_vcpus(reserve);
        let (expert, rest) = (Curve::of_cpu(&node.expert_seconds), Curve::of_cpu(&node.rest_seconds));
        let at_once = f64::from(rental.request.concurrency.max(1));
        let busy_tokens = at_once * rental.model.top_k as f64 / used_at_once(rental);
        let speed = |functions: usize| {
            let column = expert.column(vcpus / functions as f64);
            Speed {
                decode: expert.seconds(1.0, column),
                busy: expert.seconds(busy_tokens, column),
                prefill: sums(runs(tokens, |tokens| expert.seconds(tokens, column))),
            }
        };
        // Remote functions are on nodes without GPUs.
        let densities = if node.gpus > 0 { 1 } else { MOST_PER_NODE };
        let on_gpu = node.all_gpus.as_ref().map(|gpu| {
            let curve = Curve::of_gpu(&gpu.expert_seconds);
            let one = curve.column(1.0);
            let prefill: f64 = runs(tokens, |tokens| curve.seconds(tokens, one)).sum();
            (prefill, curve.seconds(1.0, one), curve.seconds(busy_tokens, one))
        });
        let column = rest.column(vcpus);
        let tokens = rental.request.mean_context();
        let context = node.context_seconds.as_ref().map_or(0.0, |profile| {
            let curve = Curve::of_cpu(profile);
            curve.seconds(tokens, curve.column(vcpus))
        });
        let on_gpus =
            |gpus: &Option<GpuTimes>| gpus.as_ref().map_or(0.0, |gpu| gpu.context_seconds_per_token * tokens);
        Self {
            node,
            memory: node.usable_bytes(reserve),
            gpu_memory: node.usable_gpu_bytes(reserve),
            vcpus,
            speeds: (1..=densities).map(speed).collect(),
            rest_prefill: rest.seconds(rental.request.input_tokens, column),
            rest_decode: rest.seconds(1.0, column) + context,
            rest_busy: rest.seconds(at_once, column) + at_once * context,
            context_on_gpu: on_gpus(&node.gpu),
            context_on_gpus: on_gpus(&node.all_gpus),
            gpu_prefill: on_gpu.map_or(0.0, |(prefill, _, _)| prefill),
            gpu_decode: on_gpu.map_or(0.0, |(_, decode, _)| decode),
            gpu_busy: on_gpu.map_or(0.0, |(_, _, busy)| busy),
        }
    }
}

/// Experts of a layer that one token of each request that runs at once uses, in the mean: all alike, and
/// tokens independent.
fn used_at_once(rental: &Rental) -> f64 {
    let (experts, top_k) = (rental.model.experts as f64, rental.model.top_k as f64);
    experts * (1.0 - (1.0 - top_k / experts).powi(rental.request.concurrency.max(1).cast_signed()))
}

/// `of` every value; equal neighbours are asked once.
fn runs(values: &[f64], of: impl Fn(f64) -> f64) -> impl Iterator<Item = f64> {
    values.iter().scan((f64::NAN, 0.0), move |(last, result), value| {
        if *last != *value {
            (*last, *result) = (*value, of(*value));
        }
        Some(*result)
    })
}

/// 0, then the sum of the first, of the first two, ..
fn sums(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let sums = values.scan(0.0, |sum, value| {
        *sum += value;
        Some(*sum)
    });
    std::iter::once(0.0).chain(sums).collect()
}

fn last(values: &[f64]) -> f64 {
    values.last().copied().unwrap_or(0.0)
}
