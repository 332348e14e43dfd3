//! The problem in the form that everything computes with: curves instead of grids, rates instead of
//! prices, lists of sizes.

pub mod latencies;
pub mod sizing;

use crate::budget::Meter;
use crate::error::FieldError;
use crate::problem::curve::Curve;
use crate::problem::sizes::GB;
use crate::problem::{Billing, Device, Layer, Problem};
use std::borrow::Cow;
use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;

use self::latencies::Latencies;

/// A checked problem, compiled.
#[derive(Debug)]
pub struct Model<'p> {
    /// Problem that was compiled.
    pub problem: &'p Problem,
    /// Layers in order.
    pub layers: Vec<LayerModel>,
    /// Set if a larger main function is never slower. It may be where requests are longer than what was
    /// measured; then no size stands for those above it.
    pub is_isotonic: bool,
    /// Predicted shares per layer and expert; no rows where there is no prediction.
    pub shares: Cow<'p, [Vec<f64>]>,
    /// Prompt tokens, for times and cost.
    pub input: f64,
    /// Decode steps, for times and cost.
    pub output: f64,
    /// Prompt tokens that must fit in memory.
    pub memory_input: f64,
    /// Tokens that must fit in memory, in all.
    pub memory_tokens: f64,
    /// Seconds per token on its way to a remote function (U).
    pub up: f64,
    /// Seconds per row on its way back (V).
    pub down: f64,
    /// Seconds per invocation.
    pub invoke: f64,
    /// Seconds of the main function per layer that is called.
    pub send: f64,
    /// CPU seconds of the main function per call.
    pub main_cpu: f64,
    /// CPU seconds of the remote function per call, besides experts.
    pub function_cpu: f64,
    /// Memory of the device in bytes (M^g; Remoe paper, equation 7); main memory on device `cpu`.
    pub gpu_bytes: f64,
    /// Dollars per second of that.
    pub gpu_rate: f64,
    /// Bytes of all weights but routed experts.
    pub nonexpert_bytes: f64,
    /// Dollars per GB-second of CPU memory with the vCPUs that it brings.
    pub cpu_price: f64,
    /// Share of the time for which groups are paid: 1, or what a search for groups that end by themselves expects of all.
    pub remote_share: f64,
    /// Memory that brings one vCPU.
    pub vcpu_bytes: f64,
    /// Bytes that a main function may have, ascending.
    pub main_sizes: Vec<f64>,
    /// Bytes that a remote function may have, ascending.
    pub remote_sizes: Vec<f64>,
    /// Limit of the time to first token, in seconds.
    pub ttft_limit: f64,
    /// Limit of the time per output token, in seconds.
    pub tpot_limit: f64,
    /// Functions have rested before the request: quotas then slow it down less than lasting load.
    pub is_rested: bool,
    /// See [`Self::used`]; that of these shares.
    pub used: OnceCell<Rc<UsedInSteps>>,
    /// See [`Self::work_done`].
    pub work: Cell<usize>,
    /// Counter of all work of the search that this model belongs to.
    pub meter: Rc<Meter<'p>>,
    /// Latencies under load that were simulated.
    pub latencies: RefCell<Latencies>,
}

/// Use of every expert in a decode step, per batch but the first and layer.
pub type UsedInSteps = Vec<Vec<Vec<ExpertUse>>>;

/// One layer of a [`Model`].
#[derive(Debug)]
pub struct LayerModel {
    /// Number of routed experts.
    pub experts: usize,
    /// Experts that each token uses.
    pub top_k: usize,
    /// Bytes of one expert.
    pub expert_bytes: f64,
    /// Seconds of one expert on the main function's CPUs.
    pub curve: Curve,
    /// Curve on a remote function's CPUs, where it differs.
    remote: Option<Curve>,
    rest: NonExpertTime,
    /// Seconds of every further request in a decode step, for the device, its context and the moves.
    row_seconds: f64,
}

/// The non-expert part and two moves of hidden states.
#[derive(Debug)]
enum NonExpertTime {
    /// On a device: always the same.
    Device(Seconds),
    /// On the main function's CPUs: seconds over tokens and vCPUs, and the moves.
    Cpus { curve: Curve, context: Option<Box<ContextCost>>, input: f64, moves: Seconds },
}

/// Time that attention to the context adds to decode steps on CPUs.
#[derive(Debug)]
struct ContextCost {
    curve: Curve,
    /// Tokens of it in the mean.
    tokens: f64,
}

impl ContextCost {
    /// Seconds for each request in a step, with `vcpus`.
    fn seconds(&self, vcpus: f64) -> f64 {
        self.curve.seconds(self.tokens, self.curve.column(vcpus))
    }
}

/// Seconds of a prefill and of one decode step.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seconds {
    /// Seconds of a prefill.
    pub prefill: f64,
    /// Seconds of a decode step.
    pub step: f64,
}

impl Seconds {
    /// Adds two pairs.
    pub fn plus(self, other: Self) -> Self {
        Self { prefill: self.prefill + other.prefill, step: self.step + other.step }
    }
}

impl LayerModel {
    fn new(layer: &Layer, problem: &Problem) -> Self {
        let input = problem.request.input_tokens;
        let moves = Seconds {
            prefill: 2.0 * problem.swap_seconds.at(input),
            step: 2.0 * problem.swap_seconds.at(1.0),
        };
        let on_cpus = layer.cpu_nonexpert_seconds.as_ref().filter(|_| problem.device == Device::Cpu);
        let context = problem.request.mean_context();
        let of_context = context * layer.context_seconds_per_token;
        Self {
            experts: layer.experts as usize,
            top_k: layer.top_k as usize,
            expert_bytes: layer.expert_bytes,
            curve: Curve::of_cpu(&layer.expert_seconds),
            remote: layer.remote_expert_seconds.as_ref().map(Curve::of_cpu),
            row_seconds: 2.0 * problem.swap_seconds.per_token
                + on_cpus.map_or(layer.nonexpert_prefill_seconds.per_token + of_context, |_| 0.0),
            rest: match on_cpus {
                Some(profile) => NonExpertTime::Cpus {
                    curve: Curve::of_cpu(profile),
                    context: layer.cpu_context_seconds.as_ref().map(|profile| {
                        Box::new(ContextCost { curve: Curve::of_cpu(profile), tokens: context })
                    }),
                    input,
                    moves,
                },
                None => NonExpertTime::Device(Seconds {
                    prefill: layer.nonexpert_prefill_seconds.at(input) + moves.prefill,
                    step: layer.nonexpert_decode_seconds + of_context + moves.step,
                }),
            },
        }
    }

    /// Seconds of one expert on a remote function's CPUs.
    pub fn remote_curve(&self) -> &Curve {
        self.remote.as_ref().unwrap_or(&self.curve)
    }

    /// Curve of remote functions where it differs from the main function's.
    pub fn own_remote_curve(&self) -> Option<&Curve> {
        self.remote.as_ref()
    }

    /// Seconds of everything but routed experts, in a main function with `vcpus`.
    pub fn fixed(&self, vcpus: f64) -> Seconds {
        match &self.rest {
            NonExpertTime::Device(seconds) => *seconds,
            NonExpertTime::Cpus { input, moves, .. } => {
                Seconds { prefill: self.computing(vcpus, *input), step: self.step_computing(vcpus, 1.0) }
                    .plus(*moves)
            }
        }
    }

    /// Seconds of everything but routed experts in one decode step of `rows` requests, in a main function
    /// with `vcpus`.
    pub fn fixed_step(&self, vcpus: f64, rows: f64) -> f64 {
        let one = match &self.rest {
            NonExpertTime::Device(seconds) => seconds.step,
            NonExpertTime::Cpus { moves, .. } => self.step_computing(vcpus, rows) + moves.step,
        };
        one + self.row_seconds * (rows - 1.0)
    }

    /// The vCPUs at which that was measured; one of them where a device does it.
    pub fn rest_vcpus(&self) -> impl Iterator<Item = f64> {
        let (rest, context): (&[f64], &[f64]) = match &self.rest {
            NonExpertTime::Device(_) => (&[1.0], &[]),
            NonExpertTime::Cpus { curve, context, .. } => {
                (curve.vcpus(), context.as_ref().map_or(&[][..], |context| context.curve.vcpus()))
            }
        };
        rest.iter().chain(context).copied()
    }

    /// Seconds of that on the main function's CPUs for a prompt of `tokens`; 0 where a device computes.
    pub fn computing(&self, vcpus: f64, tokens: f64) -> f64 {
        match &self.rest {
            NonExpertTime::Device(_) => 0.0,
            NonExpertTime::Cpus { curve, .. } => curve.seconds(tokens, curve.column(vcpus)),
        }
    }

    /// As above for a decode step of `rows` requests.
    pub fn step_computing(&self, vcpus: f64, rows: f64) -> f64 {
        let context = match &self.rest {
            NonExpertTime::Device(_) => None,
            NonExpertTime::Cpus { context, .. } => context.as_ref(),
        };
        self.computing(vcpus, rows) + context.map_or(0.0, |context| rows * context.seconds(vcpus))
    }

    /// Reports if the main function's part never takes longer with more memory.
    fn is_isotonic(&self) -> bool {
        let rest = match &self.rest {
            NonExpertTime::Device(_) => true,
            NonExpertTime::Cpus { curve, context, .. } => {
                let of_context = context.as_ref().is_none_or(|context| context.curve.is_isotonic_beyond());
                curve.is_isotonic_beyond() && of_context
            }
        };
        rest && self.curve.is_isotonic_beyond()
    }

    /// Top-k as a number.
    pub fn per_token(&self) -> f64 {
        self.top_k as f64
    }

    /// With what probability any of `rows` tokens uses an expert of a function that hosts `share` of the
    /// assignments, so that it is called.
    pub fn called(&self, share: f64, rows: f64) -> f64 {
        1.0 - (1.0 - share.min(1.0)).powf(rows * self.per_token())
    }
}

impl<'p> Model<'p> {
    /// `problem` must have passed its check.
    pub fn new(problem: &'p Problem) -> Self {
        let request = &problem.request;
        let (input, output) = (request.input_tokens, request.output_tokens);
        let (memory_input, memory_tokens) = (request.largest_input(), request.tokens_in_memory());
        let layers: Vec<_> = problem.layers.iter().map(|layer| LayerModel::new(layer, problem)).collect();
        let nonexpert: f64 = problem.layers.iter().map(|layer| layer.nonexpert_bytes).sum();
        let gpu_bytes = memory_tokens * problem.token_bytes
            + problem.kv_bytes_in_memory()
            + nonexpert
            + problem.head_bytes;
        let transport = &problem.transport;
        Self {
            is_isotonic: layers.iter().all(LayerModel::is_isotonic),
            layers,
            shares: Cow::Borrowed(problem.prediction.as_deref().unwrap_or_default()),
            input,
            output,
            memory_input,
            memory_tokens,
            up: transport.token_bytes_up / transport.bytes_per_second,
            down: transport.token_bytes_down / transport.bytes_per_second,
            invoke: transport.invoke_seconds,
            send: transport.send_seconds,
            main_cpu: transport.main_cpu_seconds,
            function_cpu: transport.function_cpu_seconds,
            gpu_bytes,
            nonexpert_bytes: nonexpert + problem.head_bytes,
            gpu_rate: problem.pricing.device_rate(problem.device, gpu_bytes),
            cpu_price: problem.pricing.coupled_rate(),
            remote_share: 1.0,
            vcpu_bytes: problem.pricing.vcpu_bytes(),
            main_sizes: problem.specs.main.sizes(),
            remote_sizes: problem.specs.remote.sizes(),
            ttft_limit: problem.slo.ttft_seconds,
            tpot_limit: problem.slo.tpot_seconds,
            is_rested: false,
            used: OnceCell::new(),
            work: Cell::new(0),
            meter: Rc::default(),
            latencies: RefCell::default(),
            problem,
        }
    }

    /// Fails where there is no prediction.
    pub fn with_prediction(problem: &'p Problem) -> Result<Self, FieldError> {
        if problem.prediction.is_none() {
            let message = "is missing: only preallocation works without it; add one row of shares per layer";
            return Err(FieldError::new("prediction", message));
        }
        Ok(Self::new(problem))
    }

    /// Copies the model as a part of the search that `meter` counts.
    pub fn metered(self, meter: &Rc<Meter<'p>>) -> Self {
        Self { meter: Rc::clone(meter), ..self }
    }

    /// The model of `problem` as a part of the same search.
    pub fn beside<'t>(&self, problem: &'t Problem) -> Model<'t>
    where
        'p: 't,
    {
        let meter: Rc<Meter<'t>> = self.meter.clone();
        Model { meter, ..Model::new(problem) }
    }

    /// Returns true if the search is to return what it has.
    pub fn ends(&self) -> bool {
        self.meter.ends()
    }

    /// Copies the model where the use of experts is known: `used` is that of a model with the same shares, top-k and
    /// batches.
    pub fn with_used(self, used: Rc<UsedInSteps>) -> Self {
        Self { used: OnceCell::from(used), ..self }
    }

    /// How every expert is used in decode steps of several requests, at each of [`Self::batches`] but the first.
    pub fn used(&self) -> &Rc<UsedInSteps> {
        self.used.get_or_init(|| {
            let of_layer = |rows: f64, layer: &LayerModel, shares: &Vec<f64>| {
                shares.iter().map(|share| used(rows, layer.per_token() * share)).collect()
            };
            let of_batch = |rows: &f64| {
                let layers = self.layers.iter().zip(self.shares.iter());
                layers.map(|(layer, shares)| of_layer(*rows, layer, shares)).collect()
            };
            let batches = self.batches();
            self.add_work(self.experts() * batches.len());
            Rc::new(batches[1..].iter().map(of_batch).collect())
        })
    }

    /// As [`Self::used`] in a step of `rows` requests, where that is one of those batches.
    pub fn used_in(&self, rows: f64) -> Option<&Vec<Vec<ExpertUse>>> {
        let batch = self.batches()[1..].iter().position(|batch| *batch == rows)?;
        self.used().get(batch)
    }

    /// Counts `terms` that were summed: the unit in which work is measured, the same on every machine.
    pub fn add_work(&self, terms: usize) {
        self.work.set(self.work.get().saturating_add(terms));
        self.meter.count(terms);
    }

    /// Terms that were summed with this model so far.
    pub fn work_done(&self) -> usize {
        self.work.get()
    }

    /// Dollars per second while a main function runs with `main_bytes` that bring its vCPUs (H^w).
    pub fn coupled_main_rate(&self, main_bytes: f64) -> f64 {
        self.gpu_rate + self.cpu_price * main_bytes / GB
    }

    /// Bytes that the main function needs besides experts: tokens and runtime.
    pub fn main_base(&self) -> f64 {
        self.memory_tokens * self.problem.token_bytes + self.problem.runtime_bytes
    }

    /// Bytes that the main function needs when `remote` experts of each layer are elsewhere.
    pub fn main_needed(&self, remote: &[usize]) -> f64 {
        self.main_base() + self.local_expert_bytes(remote)
    }

    /// Bytes of the experts that stay local, where `remote` counts the others by layer.
    pub fn local_expert_bytes(&self, remote: &[usize]) -> f64 {
        let layers = self.layers.iter().zip(remote);
        layers.map(|(layer, remote)| (layer.experts - remote) as f64 * layer.expert_bytes).sum()
    }

    /// Bytes that a remote function of `layer` needs for `set` experts with `share` of the
    /// assignments.
    pub fn remote_needed(&self, layer: usize, set: usize, share: f64) -> f64 {
        let model = &self.layers[layer];
        let rows = (set as f64).min(model.per_token()).min(model.per_token() * share);
        set as f64 * model.expert_bytes
            + self.problem.token_bytes * self.memory_input * rows
            + self.problem.function_bytes
    }

    /// Routed experts of all layers.
    pub fn experts(&self) -> usize {
        self.layers.iter().map(|layer| layer.experts).sum()
    }

    /// Bytes of the weights of `experts` of each layer.
    pub fn weight_bytes(&self, experts: &[Vec<u32>]) -> f64 {
        let layers = experts.iter().zip(&self.layers);
        layers.map(|(experts, layer)| experts.len() as f64 * layer.expert_bytes).sum()
    }

    /// Bytes that a function needs for `experts` of each layer: their weights, and the tokens of the layer
    /// that brings it the most rows.
    pub fn group_needed(&self, experts: &[Vec<u32>]) -> f64 {
        let layers = experts.iter().enumerate().filter(|(_, experts)| !experts.is_empty());
        let (weights, rows) = layers.fold((0.0, 0.0_f64), |(weights, rows), (layer, experts)| {
            let share = self.share_of(layer, experts);
            let needed = self.remote_needed(layer, experts.len(), share) - self.problem.function_bytes;
            let own = experts.len() as f64 * self.layers[layer].expert_bytes;
            (weights + own, rows.max(needed - own))
        });
        weights + rows + self.problem.function_bytes
    }

    /// Sum of the predicted shares of `experts`; 0 without a prediction.
    pub fn share_of(&self, layer: usize, experts: &[u32]) -> f64 {
        let Some(shares) = self.shares.get(layer) else { return 0.0 };
        experts.iter().map(|expert| shares[*expert as usize]).sum()
    }

    /// Most experts of a layer.
    pub fn most_experts(&self) -> usize {
        self.layers.iter().map(|layer| layer.experts).max().unwrap_or(0)
    }

    /// Seconds per token of an invocation in decode besides computation.
    pub fn round_trip(&self) -> f64 {
        self.problem.transport.round_trip()
    }

    /// Reports if functions are paid while they live, not while they work.
    pub fn is_reserved(&self) -> bool {
        self.problem.pricing.billing == Billing::Reserved
    }

    /// The most replicas of a layer with `set` remote experts that can help.
    pub fn useful_replicas(&self, set: usize) -> usize {
        set.min(self.problem.limits.max_replicas as usize).max(1)
    }
}

/// With what probability an expert is used in a step, and how many tokens it has then.
pub type ExpertUse = (f64, f64);

/// With what probability any of `rows` tokens uses an expert that each of them uses with probability
/// `chance`, and how many of them do then.
pub fn used(rows: f64, chance: f64) -> ExpertUse {
    let chance = chance.min(1.0);
    let used = 1.0 - (1.0 - chance).powf(rows);
    if used > 0.0 { (used, rows * chance / used) } else { (0.0, 1.0) }
}
