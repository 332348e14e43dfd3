//! Shapes with their times ready to be added up.

use super::batches::{BATCHES, ByBatch, Times, by_batch};
use super::form::{GpuGroup, GpuTimes, NodeShape, Rental, ResidentModel, Spot};
use super::slowest::least_slowest;
use remoe_plan::alive::quick;
use remoe_plan::cost::slowest::{MOST_EXACT, Path, expected_slowest};
use remoe_plan::problem::Arrivals;
use remoe_plan::problem::curve::{Column, Curve};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// Functions on one node, at most.
pub(super) const MOST_PER_NODE: usize = 64;

/// Figures that are varied to find where an answer changes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Setting {
    /// Limit of the time per output token, in seconds.
    pub(super) tpot: f64,
    /// Factor on the prices of nodes with GPUs.
    pub(super) gpu_price: f64,
    /// Factor on the bytes of all weights, and on the time that they take.
    pub(super) size: f64,
    /// Factor on the rate of requests.
    pub(super) rate: f64,
}

/// Device of the non-expert part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Device {
    Gpu,
    Cpu,
}

pub(super) struct Compiled<'a> {
    pub(super) rental: &'a Rental,
    pub(super) shapes: Rc<[CompiledNode<'a>]>,
    usage: Rc<LayerUsage>,
    pub(super) setting: Setting,
    /// When requests come, for a search that asks very often.
    pub(super) arrivals: Option<Rc<Arrivals>>,
    /// Arrivals as they were stated, at the rate of the setting.
    pub(super) stated: Option<Rc<Arrivals>>,
    /// Share of time in which nodes are there, at least.
    pub(super) least_share: f64,
    /// Times that were asked for, with the bits of the size that they are for: other prices and limits ask for the same
    /// ones.
    known: Rc<RefCell<HashMap<(Split, u64), Times>>>,
    known_steps: Rc<RefCell<KnownSteps>>,
    /// Times of the rest by shape and device, at the present size.
    rests: Vec<[Times; 2]>,
}

/// Steps of experts by shape, functions on it, and range of experts.
type KnownSteps = HashMap<(usize, usize, usize, usize), ByBatch>;

/// Times that are kept, at most.
const MOST_KNOWN: usize = 1 << 18;

/// Usage of a layer's experts, the most used first.
struct LayerUsage {
    /// Sums of the shares of assignments, from no expert to all.
    shares: Vec<f64>,
    /// Sums of the expected numbers of experts that a step uses, by its batch.
    used: Vec<ByBatch>,
    /// Sums of the variances of these numbers.
    variances: Vec<ByBatch>,
}

/// Experts of a layer in a decode step: how many are used, and tokens of each of these, by batch.
#[derive(Debug, Clone, Copy)]
struct StepUse {
    experts: ByBatch,
    tokens: ByBatch,
}

impl LayerUsage {
    fn new(shares: &[f64], top_k: usize) -> Self {
        let mut used = vec![[0.0; BATCHES.len()]];
        let mut variances = used.clone();
        // Rounding may leave their sum beside 1.
        let total: f64 = shares.iter().sum();
        let shares: Vec<f64> = shares.iter().map(|share| share / total).collect();
        for share in &shares {
            let called = (top_k as f64 * share).min(1.0);
            let of = by_batch(|index| 1.0 - (1.0 - called).powi(BATCHES[index].cast_signed()));
            let (mean, variance) = (used[used.len() - 1], variances[variances.len() - 1]);
            used.push(by_batch(|index| mean[index] + of[index]));
            variances.push(by_batch(|index| variance[index] + of[index] * (1.0 - of[index])));
        }
        Self { shares: sums(shares.into_iter()), used, variances }
    }

    /// Share of the experts that all of `groups` groups use in a step which the busiest of them uses, of `from` to
    /// `to`: the greatest of so many independent normal variables.
    fn busiest(&self, from: usize, to: usize, groups: usize) -> ByBatch {
        let number = groups as f64;
        by_batch(|index| {
            let all = self.used[to][index] - self.used[from][index];
            let variance = (self.variances[to][index] - self.variances[from][index]).max(0.0);
            let most = (to - from).div_ceil(groups) as f64;
            let busiest = all / number + greatest_normal(groups) * (variance / number).sqrt();
            busiest.min(most) / all.max(f64::MIN_POSITIVE)
        })
    }

    /// Experts `from` to `to` of the order.
    fn between(&self, from: usize, to: usize, top_k: usize) -> StepUse {
        let share = self.shares[to] - self.shares[from];
        let experts = by_batch(|index| self.used[to][index] - self.used[from][index]);
        let tokens = by_batch(|index| {
            f64::from(BATCHES[index]) * top_k as f64 * share / experts[index].max(f64::MIN_POSITIVE)
        });
        StepUse { experts, tokens: tokens.map(|tokens| if tokens.is_finite() { tokens } else { 0.0 }) }
    }
}

pub(super) struct CompiledNode<'a> {
    pub(super) node: &'a NodeShape,
    pub(super) memory: f64,
    /// Memory of one GPU.
    pub(super) gpu_memory: f64,
    pub(super) vcpus: f64,
    /// Times of one expert on its CPUs, over tokens and vCPUs.
    expert: Curve,
    /// Experts of the main function here, then of each of 2, 3, .. remote functions.
    speeds: Vec<Speed>,
    rest_prefill: f64,
    rest_steps: ByBatch,
    /// Groups of its GPUs with their times.
    pub(super) groups: Vec<GpuReplica<'a>>,
}

/// GPUs that compute one copy of the model together.
pub(super) struct GpuReplica<'a> {
    pub(super) form: &'a GpuGroup,
    /// Seconds per decode step and request of attending to its context.
    context: f64,
    expert: Curve,
    /// The most used experts of a layer in a prefill, from none to all.
    prefill: Vec<f64>,
}

/// Experts on the vCPUs of one function.
struct Speed {
    /// Place of its vCPUs in the times of experts.
    column: Column,
    /// One expert, one token.
    decode: f64,
    /// The most used experts one after another in a prefill, from none to all.
    prefill: Vec<f64>,
}

impl<'a> Compiled<'a> {
    pub(super) fn new(rental: &'a Rental) -> Self {
        let (model, input) = (&rental.model, rental.request.input_tokens);
        let mut usage =
            rental.usage.clone().unwrap_or_else(|| vec![1.0 / model.experts as f64; model.experts]);
        usage.sort_by(|a, b| b.total_cmp(a));
        let tokens: Vec<f64> = usage.iter().map(|share| input * model.top_k as f64 * share).collect();
        let shapes = rental.shapes.iter().map(|node| CompiledNode::new(node, rental, &tokens)).collect();
        let setting = Setting { tpot: rental.slo.tpot_seconds, gpu_price: 1.0, size: 1.0, rate: 1.0 };
        let usage = Rc::new(LayerUsage::new(&usage, model.top_k));
        let (known, known_steps) = (Rc::default(), Rc::default());
        let (arrivals, stated, least_share, rests) = (None, None, 1.0, Vec::new());
        let compiled =
            Self { rental, shapes, usage, setting, arrivals, stated, least_share, known, known_steps, rests };
        compiled.with(setting)
    }

    /// Returns the rental compiled under another setting.
    pub(super) fn with(&self, setting: Setting) -> Self {
        let at_rate = |arrivals: Arrivals| {
            let recorded = arrivals.recorded_seconds.as_ref();
            Rc::new(Arrivals {
                per_second: arrivals.per_second * setting.rate,
                recorded_seconds: recorded
                    .map(|times| times.iter().map(|seconds| seconds / setting.rate).collect()),
                ..arrivals
            })
        };
        let stated = self.rental.arrivals.as_ref();
        let arrivals = stated.map(|arrivals| at_rate(quick(arrivals).into_owned()));
        let stated = stated.map(|arrivals| at_rate(arrivals.clone()));
        let mut compiled = Self {
            rental: self.rental,
            shapes: self.shapes.clone(),
            usage: self.usage.clone(),
            setting,
            arrivals,
            stated,
            least_share: 1.0,
            known: self.known.clone(),
            known_steps: self.known_steps.clone(),
            rests: Vec::new(),
        };
        compiled.least_share = compiled.share_of_nothing();
        let shapes = 0..compiled.shapes.len();
        compiled.rests = shapes
            .map(|shape| [Device::Gpu, Device::Cpu].map(|device| compiled.rest_of(shape, device)))
            .collect();
        compiled
    }

    pub(super) fn model(&self) -> &ResidentModel {
        &self.rental.model
    }

    fn layers(&self) -> f64 {
        self.model().layers as f64
    }

    /// Dollars per hour of one node.
    pub(super) fn per_hour(&self, shape: usize) -> f64 {
        let node = self.shapes[shape].node;
        node.per_hour * if node.gpus > 0 { self.setting.gpu_price } else { 1.0 }
    }

    /// Bytes of so many experts of every layer.
    pub(super) fn expert_bytes(&self, per_layer: usize) -> f64 {
        per_layer as f64 * self.layers() * self.one_expert_bytes()
    }

    pub(super) fn one_expert_bytes(&self) -> f64 {
        self.model().expert_bytes * self.setting.size
    }

    /// Everything but experts as engines in general hold it, with keys and values of `slots` requests.
    pub(super) fn rest_bytes(&self, slots: u32) -> f64 {
        self.rest_weights() + self.context_bytes(slots)
    }

    /// Bytes of the weights besides experts as engines in general hold them.
    pub(super) fn rest_weights(&self) -> f64 {
        self.model().rest_bytes * self.setting.size
    }

    /// Returns the bytes of everything but experts as main functions of this project hold it, with keys and values of
    /// `slots` requests.
    pub(super) fn main_rest_bytes(&self, device: Device, slots: u32) -> f64 {
        self.main_weights(device) + self.context_bytes(slots)
    }

    /// Bytes of the weights besides experts in a main function of this project.
    pub(super) fn main_weights(&self, device: Device) -> f64 {
        let bytes = match device {
            Device::Cpu => self.model().main_rest_bytes,
            Device::Gpu => self.model().device_rest_bytes,
        };
        bytes * self.setting.size
    }

    fn context_bytes(&self, slots: u32) -> f64 {
        let model = self.model();
        let request = &self.rental.request;
        request.kv_bytes_in_memory_of(slots, model.kv_bytes_per_token, model.kv_windowed.as_slice())
            + request.tokens_in_memory_of(slots) * model.token_bytes
    }

    /// Memory on the host besides experts and the rest.
    pub(super) fn host_bytes(&self, slots: u32) -> f64 {
        let tokens = self.rental.request.tokens_in_memory_of(slots);
        self.rental.runtime_bytes + tokens * self.model().token_bytes
    }

    /// Memory that a main function with remote experts keeps for those that no remote function answers for.
    pub(super) fn fallback_bytes(&self) -> f64 {
        self.rental.fallback_bytes * self.setting.size
    }

    /// Largest batch that the load can fill.
    pub(super) fn most_slots(&self) -> u32 {
        let largest = BATCHES[BATCHES.len() - 1];
        match self.arrivals {
            Some(_) => largest,
            None => self.rental.request.concurrency.max(1).next_power_of_two().min(largest),
        }
    }

    pub(super) fn may_host_main(&self, shape: usize) -> bool {
        !self.shapes[shape].node.spot || self.rental.spot == Spot::Everything
    }

    pub(super) fn may_host_remote(&self, shape: usize) -> bool {
        let node = self.shapes[shape].node;
        node.gpus == 0 && (!node.spot || self.rental.spot != Spot::Never)
    }

    /// Seconds of moving the hidden states of `tokens` tokens from one node to another.
    pub(super) fn hop_seconds(&self, tokens: f64) -> f64 {
        let transport = &self.rental.transport;
        transport.invoke_seconds / 2.0 + tokens * transport.token_bytes_up / transport.bytes_per_second
    }

    /// The part that is no expert in a main function, with the moves between device and host.
    pub(super) fn rest(&self, shape: usize, device: Device) -> Times {
        let [on_gpu, on_cpus] = self.rests[shape];
        if device == Device::Gpu { on_gpu } else { on_cpus }
    }

    fn rest_of(&self, shape: usize, device: Device) -> Times {
        let (shape, size) = (&self.shapes[shape], self.setting.size);
        match (device, &shape.node.gpu) {
            (Device::Gpu, Some(gpu)) => {
                let context = self.context_seconds(gpu);
                let layers = self.layers();
                self.times(
                    gpu.rest_prefill_seconds.at(self.rental.request.input_tokens) * size
                        + 2.0 * layers * gpu.swap_seconds.at(self.rental.request.input_tokens),
                    |index| {
                        let rows = f64::from(BATCHES[index]);
                        rest_step(gpu, rows, context) * size + 2.0 * layers * gpu.swap_seconds.at(rows)
                    },
                )
            }
            _ => self.times(shape.rest_prefill * size, |index| shape.rest_steps[index] * size),
        }
    }

    fn context_seconds(&self, gpu: &GpuTimes) -> f64 {
        gpu.context_seconds_per_token * self.rental.request.mean_context()
    }

    /// Times with steps of nothing where requests have none.
    fn times(&self, prefill: f64, step: impl Fn(usize) -> f64) -> Times {
        let decodes = self.rental.request.output_tokens > 0.0;
        Times { prefill, steps: by_batch(|index| if decodes { step(index) } else { 0.0 }) }
    }

    /// Steps of the experts `from` to `to` of a layer in one of `per_node` functions on a node of `shape`.
    fn expert_steps(&self, shape: usize, per_node: usize, from: usize, to: usize) -> ByBatch {
        let size = self.setting.size;
        let key = (shape, per_node, from, to);
        let mut known = self.known_steps.borrow_mut();
        if known.len() >= MOST_KNOWN {
            known.clear();
        }
        let steps = known.entry(key).or_insert_with(|| {
            let used = self.usage.between(from, to, self.model().top_k);
            let (expert, column) = (&self.shapes[shape].expert, self.speed(shape, per_node).column);
            by_batch(|index| used.experts[index] * expert.seconds(used.tokens[index], column))
        });
        steps.map(|seconds| seconds * size)
    }

    /// A main function with all experts beside it.
    pub(super) fn all_local(&self, shape: usize, device: Device) -> Times {
        let (rest, layers, size) = (self.rest(shape, device), self.layers(), self.setting.size);
        let steps = self.expert_steps(shape, 1, 0, self.model().experts);
        let shape = &self.shapes[shape];
        self.times(rest.prefill + layers * size * last(&shape.speeds[0].prefill), |index| {
            rest.steps[index] + layers * steps[index]
        })
    }

    /// Everything on a group of GPUs but the experts of the last `on_host` layers, which the node's CPUs compute.
    ///
    /// Prompts may also take these experts to the GPUs, whichever is quicker.
    pub(super) fn on_group(&self, shape: usize, group: &GpuReplica<'_>, on_host: usize) -> Times {
        let (model, size, gpu) = (self.model(), self.setting.size, &group.form.times);
        let (layers, hosted) = ((model.layers - on_host) as f64, on_host as f64);
        let used = self.usage.between(0, model.experts, model.top_k);
        let (number, shape) = (shape, &self.shapes[shape]);
        let input = self.rental.request.input_tokens;
        let one = group.expert.column(1.0);
        let (mut host_prefill, mut host_steps) = (0.0, [0.0; BATCHES.len()]);
        if on_host > 0 {
            let moved = self.moving(model.experts as f64, gpu) / self.layers() + size * last(&group.prefill);
            let swaps = 2.0 * gpu.swap_seconds.at(input);
            host_prefill = (size * last(&shape.speeds[0].prefill) + swaps).min(moved);
            let steps = self.expert_steps(number, 1, 0, model.experts);
            host_steps =
                by_batch(|index| steps[index] + 2.0 * gpu.swap_seconds.at(f64::from(BATCHES[index])));
        }
        self.times(
            gpu.rest_prefill_seconds.at(input) * size
                + layers * size * last(&group.prefill)
                + hosted * host_prefill,
            |index| {
                let rows = f64::from(BATCHES[index]);
                let expert = group.expert.seconds(used.tokens[index], one);
                (rest_step(gpu, rows, group.context) + layers * used.experts[index] * expert) * size
                    + hosted * host_steps[index]
            },
        )
    }

    /// Seconds in which so many experts of every layer come from the host's memory.
    pub(super) fn moving(&self, experts: f64, gpu: &GpuTimes) -> f64 {
        experts * self.one_expert_bytes() * self.layers() / gpu.host_bytes_per_second
    }

    /// Experts of a layer that a step uses besides the `cached` most used ones, by batch.
    pub(super) fn used_beside(&self, cached: usize) -> ByBatch {
        self.usage.between(cached, self.model().experts, self.model().top_k).experts
    }

    /// The main function with the `local` most used experts of every layer, and the others in `groups` that work at the
    /// same time, each on a node of `host` with `per_node` of them.
    pub(super) fn split(&self, at: &Split) -> Times {
        let key = (*at, self.setting.size.to_bits());
        if let Some(times) = self.known.borrow().get(&key) {
            return *times;
        }
        let times = self.timed(at, expected_slowest, BATCHES.len());
        let mut known = self.known.borrow_mut();
        if known.len() >= MOST_KNOWN {
            known.clear();
        }
        known.insert(key, times);
        times
    }

    /// The times that [`Self::split`] is not below.
    pub(super) fn least_split(&self, at: &Split) -> Times {
        self.timed(at, self.least(), BATCHES.len())
    }

    /// Returns the times that [`Self::split`] is not below for a request that runs alone; steps of larger batches are
    /// not computed.
    pub(super) fn least_alone(&self, at: &Split) -> Times {
        self.timed(at, self.least(), 1)
    }

    /// The bound of the slowest path; the value itself where that is an approximation, which may be below the bound.
    fn least(&self) -> fn(usize, &[Path]) -> f64 {
        if self.model().top_k > MOST_EXACT { expected_slowest } else { least_slowest }
    }

    fn timed(&self, at: &Split, slowest: fn(usize, &[Path]) -> f64, batches: usize) -> Times {
        let (model, rental, size) = (self.model(), self.rental, self.setting.size);
        let rest = self.rest(at.main, at.device);
        let (main, host) = (self.speed(at.main, 1), self.speed(at.host, at.per_node));
        let remote = model.experts - at.local;
        let local_share = self.usage.shares[at.local];
        let transport = &rental.transport;
        let back = transport.token_bytes_down / transport.bytes_per_second;
        // Groups of the mean size: they differ by one expert at most.
        let group = Path {
            share: (1.0 - local_share) / at.groups as f64,
            seconds: host.decode * size + back,
            trip: transport.round_trip(),
            count: at.groups,
        };
        let local = Path { share: local_share, seconds: main.decode * size, trip: 0.0, count: 1 };
        let step = slowest(model.top_k, &[group, local]);
        let called = 1.0 - local_share.min(1.0).powi(model.top_k as i32);
        let largest = remote.div_ceil(at.groups) as f64 / remote.max(1) as f64;
        let rows = rental.request.input_tokens * model.top_k as f64 * (1.0 - local_share) * largest;
        let sent = rows.min(rental.request.input_tokens);
        let group = (last(&host.prefill) - host.prefill[at.local]) * size * largest
            + rows * back
            + sent * transport.token_bytes_up / transport.bytes_per_second
            + transport.invoke_seconds;
        let prefill = (main.prefill[at.local] * size).max(group) + transport.send_seconds;
        let layers = self.layers();
        if batches == 1 {
            let alone = rest.steps[0] + layers * (step + called * transport.send_seconds);
            return self.times(rest.prefill + layers * prefill, |_| alone);
        }
        let beside = self.expert_steps(at.main, 1, 0, at.local);
        let away = self.expert_steps(at.host, at.per_node, at.local, model.experts);
        let busiest = self.usage.busiest(at.local, model.experts, at.groups);
        let reached = 1.0 - (1.0 - (1.0 - local_share) * largest).powi(model.top_k as i32);
        let up = transport.token_bytes_up / transport.bytes_per_second;
        self.times(rest.prefill + layers * prefill, |index| {
            let rows = f64::from(BATCHES[index]);
            let answered = rows * model.top_k as f64 * (1.0 - local_share) * largest * back;
            // The round trip has one token on its way there.
            let sent = (rows * reached - 1.0).max(0.0) * up;
            let moved = answered + sent + transport.round_trip();
            let mean = beside[index].max(away[index] * busiest[index] + moved);
            let send = if index == 0 { called } else { 1.0 } * transport.send_seconds;
            let slower = if index == 0 { step } else { mean.max(step) };
            rest.steps[index] + layers * (slower + send)
        })
    }

    /// Reports if experts take no longer on `a` than on `b`, however many functions share the node.
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

impl<'a> CompiledNode<'a> {
    fn new(node: &'a NodeShape, rental: &Rental, tokens: &[f64]) -> Self {
        let reserve = &rental.reserve;
        let vcpus = node.usable_vcpus(reserve);
        let (expert, rest) = (Curve::of_cpu(&node.expert_seconds), Curve::of_cpu(&node.rest_seconds));
        let speed = |functions: usize| {
            let column = expert.column(vcpus / functions as f64);
            Speed {
                column,
                decode: expert.seconds(1.0, column),
                prefill: sums(runs(tokens, |tokens| expert.seconds(tokens, column))),
            }
        };
        // Remote functions are on nodes without GPUs.
        let densities = if node.gpus > 0 { 1 } else { MOST_PER_NODE };
        let column = rest.column(vcpus);
        let context_tokens = rental.request.mean_context();
        let context = node.context_seconds.as_ref().map_or(0.0, |profile| {
            let curve = Curve::of_cpu(profile);
            curve.seconds(context_tokens, curve.column(vcpus))
        });
        let group = |form: &'a GpuGroup| {
            let curve = Curve::of_gpu(&form.times.expert_seconds);
            let one = curve.column(1.0);
            GpuReplica {
                form,
                context: form.times.context_seconds_per_token * context_tokens,
                prefill: sums(runs(tokens, |tokens| curve.seconds(tokens, one))),
                expert: curve,
            }
        };
        let steps = by_batch(|index| {
            let rows = f64::from(BATCHES[index]);
            rest.seconds(rows, column) + rows * context
        });
        Self {
            node,
            memory: node.usable_bytes(reserve),
            gpu_memory: node.usable_gpu_bytes(reserve),
            vcpus,
            speeds: (1..=densities).map(speed).collect(),
            expert,
            rest_prefill: rest.seconds(rental.request.input_tokens, column),
            rest_steps: steps,
            groups: node.gpu_groups.iter().map(group).collect(),
        }
    }
}

/// Everything but experts in a decode step of `rows` requests, each of which attends for `context` seconds.
fn rest_step(gpu: &GpuTimes, rows: f64, context: f64) -> f64 {
    gpu.rest_decode_seconds + (rows - 1.0) * gpu.rest_row_seconds + rows * context
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

/// Mean of the greatest of `count` independent standard normal variables (Teichroew 1956).
fn greatest_normal(count: usize) -> f64 {
    const MEANS: [f64; 17] = [
        0.0, 0.0, 0.564, 0.846, 1.029, 1.163, 1.267, 1.352, 1.424, 1.485, 1.539, 1.586, 1.629, 1.668, 1.703,
        1.736, 1.766,
    ];
    MEANS[count.min(MEANS.len() - 1)]
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
