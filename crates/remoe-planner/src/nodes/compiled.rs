//! Compiled rental: node shapes with times in a form that can be summed.

use super::batches::{BATCHES, BatchTimes, ByBatch, by_batch};
use super::rental::{GpuGroup, GpuTimes, NodeShape, Rental, ResidentModel, SpotPolicy};
use super::slowest::least_slowest;
use remoe_plan::alive::simplified_arrivals;
use remoe_plan::cost::slowest::{MAX_EXACT_TOP_K, Path, expected_slowest};
use remoe_plan::problem::Arrivals;
use remoe_plan::problem::curve::{Column, Curve};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// Maximum number of functions on one node.
pub(super) const MAX_FUNCTIONS_PER_NODE: usize = 64;

/// Varied figures of a rental, in a search for flips.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Variation {
    /// Limit of the time per output token, in seconds.
    pub(super) tpot: f64,
    /// Factor on the prices of nodes with GPUs.
    pub(super) gpu_price: f64,
    /// Factor on the bytes and the seconds of all weights.
    pub(super) model_size: f64,
    /// Factor on the arrival rate.
    pub(super) arrival_rate: f64,
}

/// Device that computes the non-expert part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Device {
    Gpu,
    Cpu,
}

/// A compiled rental under one [`Variation`].
pub(super) struct CompiledRental<'a> {
    pub(super) rental: &'a Rental,
    pub(super) shapes: Rc<[CompiledNode<'a>]>,
    usage: Rc<LayerUsage>,
    pub(super) variation: Variation,
    /// Simplified arrivals, for a search.
    pub(super) arrivals: Option<Rc<Arrivals>>,
    /// Stated arrivals, at the rate of the variation.
    pub(super) stated: Option<Rc<Arrivals>>,
    /// Lower bound of the share of time in which nodes are rented.
    pub(super) least_share: f64,
    /// Cache of [`Self::split`], by split and bits of the model size. Shared by all variations of prices and limits.
    split_cache: Rc<RefCell<HashMap<(RemoteSplit, u64), BatchTimes>>>,
    step_cache: Rc<RefCell<StepCache>>,
    /// Times of the non-expert part by shape and device, at the varied model size.
    nonexpert: Vec<[BatchTimes; 2]>,
}

/// Cache of [`CompiledRental::expert_steps`]: by shape, functions on the node, and range of experts.
type StepCache = HashMap<(usize, usize, usize, usize), ByBatch>;

/// Maximum number of entries of each cache. Beyond it the cache is cleared.
const MAX_CACHED: usize = 1 << 18;

/// Usage of a layer's experts, the most used first.
struct LayerUsage {
    /// `[count]`: share of assignments of the `count` most used experts.
    shares: Vec<f64>,
    /// `[count]`: expected number of the `count` most used experts that a step uses, for each batch.
    used: Vec<ByBatch>,
    /// `[count]`: variance of that number.
    variances: Vec<ByBatch>,
}

/// Experts of a layer in a decode step: number of used experts, and tokens of each used expert, for each batch.
#[derive(Debug, Clone, Copy)]
struct StepUse {
    experts: ByBatch,
    tokens: ByBatch,
}

impl LayerUsage {
    fn new(shares: &[f64], top_k: usize) -> Self {
        let mut used = vec![[0.0; BATCHES.len()]];
        let mut variances = used.clone();
        // Normalises the shares: their sum may differ from 1 by rounding.
        let total: f64 = shares.iter().sum();
        let shares: Vec<f64> = shares.iter().map(|share| share / total).collect();
        for share in &shares {
            let called = (top_k as f64 * share).min(1.0);
            let used_share = by_batch(|index| 1.0 - (1.0 - called).powi(BATCHES[index].cast_signed()));
            let (mean, variance) = (used[used.len() - 1], variances[variances.len() - 1]);
            used.push(by_batch(|index| mean[index] + used_share[index]));
            variances.push(by_batch(|index| variance[index] + used_share[index] * (1.0 - used_share[index])));
        }
        Self { shares: prefix_sums(shares.into_iter()), used, variances }
    }

    /// Returns the busiest group's share of the used experts `from` to `to` in a step, which are divided among `groups`.
    ///
    /// Approximates it by the maximum of independent normal variables.
    fn busiest_share(&self, from: usize, to: usize, groups: usize) -> ByBatch {
        let number = groups as f64;
        by_batch(|index| {
            let all = self.used[to][index] - self.used[from][index];
            let variance = (self.variances[to][index] - self.variances[from][index]).max(0.0);
            let most = (to - from).div_ceil(groups) as f64;
            let busiest = all / number + mean_of_max_normal(groups) * (variance / number).sqrt();
            busiest.min(most) / all.max(f64::MIN_POSITIVE)
        })
    }

    /// Returns the use of the experts `from` to `to` in the order of use.
    fn range(&self, from: usize, to: usize, top_k: usize) -> StepUse {
        let share = self.shares[to] - self.shares[from];
        let experts = by_batch(|index| self.used[to][index] - self.used[from][index]);
        let tokens = by_batch(|index| {
            f64::from(BATCHES[index]) * top_k as f64 * share / experts[index].max(f64::MIN_POSITIVE)
        });
        StepUse { experts, tokens: tokens.map(|tokens| if tokens.is_finite() { tokens } else { 0.0 }) }
    }
}

/// A compiled node shape.
pub(super) struct CompiledNode<'a> {
    pub(super) node: &'a NodeShape,
    /// Main memory that functions can use, in bytes.
    pub(super) memory: f64,
    /// Memory of one GPU that functions can use, in bytes.
    pub(super) gpu_memory: f64,
    pub(super) vcpus: f64,
    /// Times of one expert on its CPUs, over tokens and vCPUs.
    expert: Curve,
    /// Experts of the main function on this node, then of each of 2, 3, .. remote functions on it.
    speeds: Vec<ExpertSpeed>,
    nonexpert_prefill: f64,
    nonexpert_steps: ByBatch,
    /// Groups of its GPUs with their times.
    pub(super) groups: Vec<GpuReplica<'a>>,
}

/// A group of GPUs that compute one copy of the model.
pub(super) struct GpuReplica<'a> {
    pub(super) form: &'a GpuGroup,
    /// Seconds of attention to the context for each request in a decode step.
    context: f64,
    expert: Curve,
    /// `[count]`: prefill seconds of the `count` most used experts of a layer.
    prefill: Vec<f64>,
}

/// Seconds of experts on the vCPUs of one function.
struct ExpertSpeed {
    /// Position of its vCPUs on the curve of experts.
    column: Column,
    /// Seconds of one expert with one token.
    decode: f64,
    /// `[count]`: prefill seconds of the `count` most used experts of a layer.
    prefill: Vec<f64>,
}

impl<'a> CompiledRental<'a> {
    pub(super) fn new(rental: &'a Rental) -> Self {
        let (model, input) = (&rental.model, rental.request.input_tokens);
        let mut usage =
            rental.usage.clone().unwrap_or_else(|| vec![1.0 / model.experts as f64; model.experts]);
        usage.sort_by(|a, b| b.total_cmp(a));
        let tokens: Vec<f64> = usage.iter().map(|share| input * model.top_k as f64 * share).collect();
        let shapes = rental.shapes.iter().map(|node| CompiledNode::new(node, rental, &tokens)).collect();
        let variation =
            Variation { tpot: rental.slo.tpot_seconds, gpu_price: 1.0, model_size: 1.0, arrival_rate: 1.0 };
        let usage = Rc::new(LayerUsage::new(&usage, model.top_k));
        let (split_cache, step_cache) = (Rc::default(), Rc::default());
        let (arrivals, stated, least_share, nonexpert) = (None, None, 1.0, Vec::new());
        let compiled = Self {
            rental,
            shapes,
            usage,
            variation,
            arrivals,
            stated,
            least_share,
            split_cache,
            step_cache,
            nonexpert,
        };
        compiled.with(variation)
    }

    /// Returns the rental compiled under another variation.
    pub(super) fn with(&self, variation: Variation) -> Self {
        let at_rate = |arrivals: Arrivals| {
            let recorded = arrivals.recorded_seconds.as_ref();
            Rc::new(Arrivals {
                per_second: arrivals.per_second * variation.arrival_rate,
                recorded_seconds: recorded
                    .map(|times| times.iter().map(|seconds| seconds / variation.arrival_rate).collect()),
                ..arrivals
            })
        };
        let stated = self.rental.arrivals.as_ref();
        let arrivals = stated.map(|arrivals| at_rate(simplified_arrivals(arrivals).into_owned()));
        let stated = stated.map(|arrivals| at_rate(arrivals.clone()));
        let mut compiled = Self {
            rental: self.rental,
            shapes: self.shapes.clone(),
            usage: self.usage.clone(),
            variation,
            arrivals,
            stated,
            least_share: 1.0,
            split_cache: self.split_cache.clone(),
            step_cache: self.step_cache.clone(),
            nonexpert: Vec::new(),
        };
        compiled.least_share = compiled.least_alive_share();
        let shapes = 0..compiled.shapes.len();
        compiled.nonexpert = shapes
            .map(|shape| [Device::Gpu, Device::Cpu].map(|device| compiled.nonexpert_times(shape, device)))
            .collect();
        compiled
    }

    pub(super) fn model(&self) -> &ResidentModel {
        &self.rental.model
    }

    fn layers(&self) -> f64 {
        self.model().layers as f64
    }

    /// Returns the dollars per hour of one node.
    pub(super) fn per_hour(&self, shape: usize) -> f64 {
        let node = self.shapes[shape].node;
        node.per_hour * if node.gpus > 0 { self.variation.gpu_price } else { 1.0 }
    }

    /// Returns the bytes of `per_layer` experts of every layer.
    pub(super) fn expert_bytes(&self, per_layer: usize) -> f64 {
        per_layer as f64 * self.layers() * self.one_expert_bytes()
    }

    pub(super) fn one_expert_bytes(&self) -> f64 {
        self.model().expert_bytes * self.variation.model_size
    }

    /// Returns the bytes of the non-expert part in other engines, with the KV cache of `slots` requests.
    pub(super) fn rest_bytes(&self, slots: u32) -> f64 {
        self.rest_weights() + self.context_bytes(slots)
    }

    /// Returns the bytes of the non-expert weights in other engines.
    pub(super) fn rest_weights(&self) -> f64 {
        self.model().rest_bytes * self.variation.model_size
    }

    /// Returns the bytes of the non-expert part in Remoe's main function, with the KV cache of `slots` requests.
    pub(super) fn main_rest_bytes(&self, device: Device, slots: u32) -> f64 {
        self.main_weights(device) + self.context_bytes(slots)
    }

    /// Returns the bytes of the non-expert weights in Remoe's main function.
    pub(super) fn main_weights(&self, device: Device) -> f64 {
        let bytes = match device {
            Device::Cpu => self.model().main_rest_bytes,
            Device::Gpu => self.model().device_rest_bytes,
        };
        bytes * self.variation.model_size
    }

    fn context_bytes(&self, slots: u32) -> f64 {
        let model = self.model();
        let request = &self.rental.request;
        request.kv_bytes_in_memory_of(slots, model.kv_bytes_per_token, model.kv_windowed.as_slice())
            + request.tokens_in_memory_of(slots) * model.token_bytes
    }

    /// Returns the host memory besides weights and KV cache: runtime and hidden states.
    pub(super) fn host_bytes(&self, slots: u32) -> f64 {
        let tokens = self.rental.request.tokens_in_memory_of(slots);
        self.rental.runtime_bytes + tokens * self.model().token_bytes
    }

    /// Returns the memory of a main function for the local fallback of remote experts.
    pub(super) fn fallback_bytes(&self) -> f64 {
        self.rental.fallback_bytes * self.variation.model_size
    }

    /// Returns the largest batch that the load can fill.
    pub(super) fn most_slots(&self) -> u32 {
        let largest = BATCHES[BATCHES.len() - 1];
        match self.arrivals {
            Some(_) => largest,
            None => self.rental.request.concurrency.max(1).next_power_of_two().min(largest),
        }
    }

    pub(super) fn may_host_main(&self, shape: usize) -> bool {
        !self.shapes[shape].node.spot || self.rental.spot == SpotPolicy::Everything
    }

    pub(super) fn may_host_remote(&self, shape: usize) -> bool {
        let node = self.shapes[shape].node;
        node.gpus == 0 && (!node.spot || self.rental.spot != SpotPolicy::Never)
    }

    /// Returns the seconds of sending the hidden states of `tokens` from one node to another.
    pub(super) fn hop_seconds(&self, tokens: f64) -> f64 {
        let transport = &self.rental.transport;
        transport.invoke_seconds / 2.0 + tokens * transport.token_bytes_up / transport.bytes_per_second
    }

    /// Returns the times of the non-expert part in a main function, with the moves between GPU and host.
    pub(super) fn nonexpert(&self, shape: usize, device: Device) -> BatchTimes {
        let [on_gpu, on_cpus] = self.nonexpert[shape];
        if device == Device::Gpu { on_gpu } else { on_cpus }
    }

    fn nonexpert_times(&self, shape: usize, device: Device) -> BatchTimes {
        let (shape, size) = (&self.shapes[shape], self.variation.model_size);
        match (device, &shape.node.gpu) {
            (Device::Gpu, Some(gpu)) => {
                let context = self.context_seconds(gpu);
                let layers = self.layers();
                self.times(
                    gpu.rest_prefill_seconds.at(self.rental.request.input_tokens) * size
                        + 2.0 * layers * gpu.swap_seconds.at(self.rental.request.input_tokens),
                    |index| {
                        let rows = f64::from(BATCHES[index]);
                        nonexpert_step(gpu, rows, context) * size + 2.0 * layers * gpu.swap_seconds.at(rows)
                    },
                )
            }
            _ => self.times(shape.nonexpert_prefill * size, |index| shape.nonexpert_steps[index] * size),
        }
    }

    fn context_seconds(&self, gpu: &GpuTimes) -> f64 {
        gpu.context_seconds_per_token * self.rental.request.mean_context()
    }

    /// Returns times with the given prefill and steps; steps are 0 if requests have no decode steps.
    fn times(&self, prefill: f64, step: impl Fn(usize) -> f64) -> BatchTimes {
        let decodes = self.rental.request.output_tokens > 0.0;
        BatchTimes { prefill, steps: by_batch(|index| if decodes { step(index) } else { 0.0 }) }
    }

    /// Returns the steps of the experts `from` to `to` of a layer in one of `per_node` functions on a node of `shape`.
    fn expert_steps(&self, shape: usize, per_node: usize, from: usize, to: usize) -> ByBatch {
        let size = self.variation.model_size;
        let key = (shape, per_node, from, to);
        let mut cache = self.step_cache.borrow_mut();
        if cache.len() >= MAX_CACHED {
            cache.clear();
        }
        let steps = cache.entry(key).or_insert_with(|| {
            let used = self.usage.range(from, to, self.model().top_k);
            let (expert, column) = (&self.shapes[shape].expert, self.speed(shape, per_node).column);
            by_batch(|index| used.experts[index] * expert.seconds(used.tokens[index], column))
        });
        steps.map(|seconds| seconds * size)
    }

    /// Returns the times of a main function with all experts local.
    pub(super) fn all_local(&self, shape: usize, device: Device) -> BatchTimes {
        let (nonexpert, layers, size) =
            (self.nonexpert(shape, device), self.layers(), self.variation.model_size);
        let steps = self.expert_steps(shape, 1, 0, self.model().experts);
        let shape = &self.shapes[shape];
        self.times(nonexpert.prefill + layers * size * last(&shape.speeds[0].prefill), |index| {
            nonexpert.steps[index] + layers * steps[index]
        })
    }

    /// Returns the times of a model on a group of GPUs, with the experts of `on_host` layers on the node's CPUs.
    ///
    /// In a prefill these experts may be moved to the GPUs, if that is faster.
    pub(super) fn on_group(&self, shape: usize, group: &GpuReplica<'_>, on_host: usize) -> BatchTimes {
        let (model, size, gpu) = (self.model(), self.variation.model_size, &group.form.times);
        let (layers, hosted) = ((model.layers - on_host) as f64, on_host as f64);
        let used = self.usage.range(0, model.experts, model.top_k);
        let (number, shape) = (shape, &self.shapes[shape]);
        let input = self.rental.request.input_tokens;
        let one = group.expert.column(1.0);
        let (mut host_prefill, mut host_steps) = (0.0, [0.0; BATCHES.len()]);
        if on_host > 0 {
            let moved =
                self.copy_seconds(model.experts as f64, gpu) / self.layers() + size * last(&group.prefill);
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
                (nonexpert_step(gpu, rows, group.context) + layers * used.experts[index] * expert) * size
                    + hosted * host_steps[index]
            },
        )
    }

    /// Returns the seconds of copying `experts` of every layer from host memory to the GPUs.
    pub(super) fn copy_seconds(&self, experts: f64, gpu: &GpuTimes) -> f64 {
        experts * self.one_expert_bytes() * self.layers() / gpu.host_bytes_per_second
    }

    /// Returns the number of used experts of a layer besides the `cached` most used ones, for each batch.
    pub(super) fn cache_misses(&self, cached: usize) -> ByBatch {
        self.usage.range(cached, self.model().experts, self.model().top_k).experts
    }

    /// Returns the times of a main function with remote functions, arranged as in `at`. Results are cached.
    pub(super) fn split(&self, at: &RemoteSplit) -> BatchTimes {
        let key = (*at, self.variation.model_size.to_bits());
        if let Some(times) = self.split_cache.borrow().get(&key) {
            return *times;
        }
        let times = self.split_times(at, expected_slowest, BATCHES.len());
        let mut cache = self.split_cache.borrow_mut();
        if cache.len() >= MAX_CACHED {
            cache.clear();
        }
        cache.insert(key, times);
        times
    }

    /// Returns lower bounds of [`Self::split`].
    pub(super) fn least_split(&self, at: &RemoteSplit) -> BatchTimes {
        self.split_times(at, self.slowest_bound(), BATCHES.len())
    }

    /// Returns lower bounds of [`Self::split`] for a request that runs alone. Steps of larger batches are not computed.
    pub(super) fn least_alone(&self, at: &RemoteSplit) -> BatchTimes {
        self.split_times(at, self.slowest_bound(), 1)
    }

    /// Returns the lower bound of the slowest path, or its value if that is an approximation, which may be below the bound.
    fn slowest_bound(&self) -> fn(usize, &[Path]) -> f64 {
        if self.model().top_k > MAX_EXACT_TOP_K { expected_slowest } else { least_slowest }
    }

    fn split_times(
        &self,
        at: &RemoteSplit,
        slowest: fn(usize, &[Path]) -> f64,
        batches: usize,
    ) -> BatchTimes {
        let (model, rental, size) = (self.model(), self.rental, self.variation.model_size);
        let nonexpert = self.nonexpert(at.main, at.device);
        let (main, host) = (self.speed(at.main, 1), self.speed(at.host, at.per_node));
        let remote = model.experts - at.local;
        let local_share = self.usage.shares[at.local];
        let transport = &rental.transport;
        let down = transport.token_bytes_down / transport.bytes_per_second;
        // Groups of the mean size: they differ by at most one expert.
        let group = Path {
            share: (1.0 - local_share) / at.groups as f64,
            seconds: host.decode * size + down,
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
            + rows * down
            + sent * transport.token_bytes_up / transport.bytes_per_second
            + transport.invoke_seconds;
        let prefill = (main.prefill[at.local] * size).max(group) + transport.send_seconds;
        let layers = self.layers();
        if batches == 1 {
            let alone = nonexpert.steps[0] + layers * (step + called * transport.send_seconds);
            return self.times(nonexpert.prefill + layers * prefill, |_| alone);
        }
        let local_steps = self.expert_steps(at.main, 1, 0, at.local);
        let remote_steps = self.expert_steps(at.host, at.per_node, at.local, model.experts);
        let busiest = self.usage.busiest_share(at.local, model.experts, at.groups);
        let reached = 1.0 - (1.0 - (1.0 - local_share) * largest).powi(model.top_k as i32);
        let up = transport.token_bytes_up / transport.bytes_per_second;
        self.times(nonexpert.prefill + layers * prefill, |index| {
            let rows = f64::from(BATCHES[index]);
            let answered = rows * model.top_k as f64 * (1.0 - local_share) * largest * down;
            // The round trip includes the transfer of one token.
            let sent = (rows * reached - 1.0).max(0.0) * up;
            let moved = answered + sent + transport.round_trip();
            let mean = local_steps[index].max(remote_steps[index] * busiest[index] + moved);
            let send = if index == 0 { called } else { 1.0 } * transport.send_seconds;
            let slower = if index == 0 { step } else { mean.max(step) };
            nonexpert.steps[index] + layers * (slower + send)
        })
    }

    /// Reports if experts are no slower on shape `a` than on shape `b`, however many functions share the node.
    pub(super) fn is_no_slower(&self, a: usize, b: usize) -> bool {
        let quick = |(a, b): (&ExpertSpeed, &ExpertSpeed)| {
            a.decode <= b.decode && last(&a.prefill) <= last(&b.prefill)
        };
        self.shapes[a].speeds.iter().zip(&self.shapes[b].speeds).all(quick)
    }

    fn speed(&self, shape: usize, per_node: usize) -> &ExpertSpeed {
        let speeds = &self.shapes[shape].speeds;
        &speeds[per_node.clamp(1, speeds.len()) - 1]
    }
}

/// Arrangement of a main function and of equal groups on one kind of node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct RemoteSplit {
    /// Shape of the main function's node.
    pub(super) main: usize,
    pub(super) device: Device,
    /// Number of local experts of every layer: the most used ones.
    pub(super) local: usize,
    /// Groups that compute at the same time.
    pub(super) groups: usize,
    /// Shape of the groups' nodes.
    pub(super) host: usize,
    /// Groups on each node.
    pub(super) per_node: usize,
}

impl<'a> CompiledNode<'a> {
    fn new(node: &'a NodeShape, rental: &Rental, tokens: &[f64]) -> Self {
        let reserve = &rental.reserve;
        let vcpus = node.usable_vcpus(reserve);
        let (expert, rest) = (Curve::of_cpu(&node.expert_seconds), Curve::of_cpu(&node.rest_seconds));
        let speed = |functions: usize| {
            let column = expert.column(vcpus / functions as f64);
            ExpertSpeed {
                column,
                decode: expert.seconds(1.0, column),
                prefill: prefix_sums(map_runs(tokens, |tokens| expert.seconds(tokens, column))),
            }
        };
        // Remote functions run on nodes without GPUs only.
        let max_functions = if node.gpus > 0 { 1 } else { MAX_FUNCTIONS_PER_NODE };
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
                prefill: prefix_sums(map_runs(tokens, |tokens| curve.seconds(tokens, one))),
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
            speeds: (1..=max_functions).map(speed).collect(),
            expert,
            nonexpert_prefill: rest.seconds(rental.request.input_tokens, column),
            nonexpert_steps: steps,
            groups: node.gpu_groups.iter().map(group).collect(),
        }
    }
}

/// Returns the seconds of the non-expert part in a decode step. `context`: seconds of attention for each request.
fn nonexpert_step(gpu: &GpuTimes, rows: f64, context: f64) -> f64 {
    gpu.rest_decode_seconds + (rows - 1.0) * gpu.rest_row_seconds + rows * context
}

/// Maps `values` by `function`, which is called once for equal neighbours.
fn map_runs(values: &[f64], function: impl Fn(f64) -> f64) -> impl Iterator<Item = f64> {
    values.iter().scan((f64::NAN, 0.0), move |(last, result), value| {
        if *last != *value {
            (*last, *result) = (*value, function(*value));
        }
        Some(*result)
    })
}

/// Returns the mean of the maximum of `count` independent standard normal variables (Teichroew 1956).
fn mean_of_max_normal(count: usize) -> f64 {
    const MEANS: [f64; 17] = [
        0.0, 0.0, 0.564, 0.846, 1.029, 1.163, 1.267, 1.352, 1.424, 1.485, 1.539, 1.586, 1.629, 1.668, 1.703,
        1.736, 1.766,
    ];
    MEANS[count.min(MEANS.len() - 1)]
}

/// Returns the prefix sums: 0, the first value, the sum of the first two, ..
fn prefix_sums(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let sums = values.scan(0.0, |sum, value| {
        *sum += value;
        Some(*sum)
    });
    std::iter::once(0.0).chain(sums).collect()
}

fn last(values: &[f64]) -> f64 {
    values.last().copied().unwrap_or(0.0)
}
