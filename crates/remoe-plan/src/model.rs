//! Compiled form of a problem: curves instead of grids, rates instead of prices, lists of sizes.

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
    /// Set if a larger main function is never slower. It can be slower for requests that are longer than the measured ones.
    /// Then the times of a size are no bound for larger ones.
    pub is_isotonic: bool,
    /// `[layer][expert]`: predicted shares; empty without a prediction.
    pub shares: Cow<'p, [Vec<f64>]>,
    /// Prompt tokens that times and cost are computed for.
    pub input: f64,
    /// Decode steps that times and cost are computed for.
    pub output: f64,
    /// Prompt tokens that must fit in memory.
    pub memory_input: f64,
    /// Tokens of prompt and output that must fit in memory.
    pub memory_tokens: f64,
    /// Seconds per token sent to a remote function (U).
    pub up: f64,
    /// Seconds per row that a remote function returns (V).
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
    /// Dollars per second of the GPU memory.
    pub gpu_rate: f64,
    /// Bytes of all weights but routed experts.
    pub nonexpert_bytes: f64,
    /// Dollars per GB-second of CPU memory with the vCPUs that come with it.
    pub cpu_price: f64,
    /// Share of the time for which groups are billed: 1, or less in a search for groups that scale to zero.
    pub remote_share: f64,
    /// Bytes of memory that come with one vCPU.
    pub vcpu_bytes: f64,
    /// Bytes that a main function may have, ascending.
    pub main_sizes: Vec<f64>,
    /// Bytes that a remote function may have, ascending.
    pub remote_sizes: Vec<f64>,
    /// Limit of the time to first token, in seconds.
    pub ttft_limit: f64,
    /// Limit of the time per output token, in seconds.
    pub tpot_limit: f64,
    /// Set if functions were idle before the request: unused CPU quota then makes it faster than under lasting load.
    pub is_rested: bool,
    /// Cache of [`Self::used`].
    pub used: OnceCell<Rc<UsedInSteps>>,
    /// See [`Self::work_done`].
    pub work: Cell<usize>,
    /// Counter of all work of the search that this model belongs to.
    pub meter: Rc<Meter<'p>>,
    /// Cache of simulated latencies.
    pub latencies: RefCell<Latencies>,
}

/// `[batch][layer][expert]`: use of every expert in a decode step, for each batch but the first.
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
    /// Seconds of one expert on a remote function's CPUs, if they differ.
    remote: Option<Curve>,
    nonexpert: NonExpertTime,
    /// Seconds that each additional request adds to a decode step, on the device and for moves.
    row_seconds: f64,
}

/// Seconds of the non-expert part and of two moves of hidden states.
#[derive(Debug)]
enum NonExpertTime {
    /// On a GPU: a constant.
    Device(Seconds),
    /// On the main function's CPUs: seconds over tokens and vCPUs, and seconds of the moves.
    Cpus { curve: Curve, context: Option<Box<ContextCost>>, input: f64, moves: Seconds },
}

/// Time that attention to the context adds to decode steps on CPUs.
#[derive(Debug)]
struct ContextCost {
    curve: Curve,
    /// Mean tokens of the context.
    tokens: f64,
}

impl ContextCost {
    /// Returns the seconds of each request in a step, with `vcpus`.
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
    /// Returns the sum of both.
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
            nonexpert: match on_cpus {
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

    /// Returns the seconds of one expert on a remote function's CPUs.
    pub fn remote_curve(&self) -> &Curve {
        self.remote.as_ref().unwrap_or(&self.curve)
    }

    /// Returns the curve of remote functions, or `None` if it is that of the main function.
    pub fn own_remote_curve(&self) -> Option<&Curve> {
        self.remote.as_ref()
    }

    /// Returns the seconds of the non-expert part in a main function with `vcpus`.
    pub fn fixed(&self, vcpus: f64) -> Seconds {
        match &self.nonexpert {
            NonExpertTime::Device(seconds) => *seconds,
            NonExpertTime::Cpus { input, moves, .. } => Seconds {
                prefill: self.nonexpert_cpu(vcpus, *input),
                step: self.nonexpert_step_cpu(vcpus, 1.0),
            }
            .plus(*moves),
        }
    }

    /// Returns the seconds of the non-expert part in one decode step of `rows` requests, with `vcpus`.
    pub fn fixed_step(&self, vcpus: f64, rows: f64) -> f64 {
        let one = match &self.nonexpert {
            NonExpertTime::Device(seconds) => seconds.step,
            NonExpertTime::Cpus { moves, .. } => self.nonexpert_step_cpu(vcpus, rows) + moves.step,
        };
        one + self.row_seconds * (rows - 1.0)
    }

    /// Returns the vCPUs at which the non-expert part was measured: 1 on a GPU.
    pub fn nonexpert_vcpus(&self) -> impl Iterator<Item = f64> {
        let (nonexpert, context): (&[f64], &[f64]) = match &self.nonexpert {
            NonExpertTime::Device(_) => (&[1.0], &[]),
            NonExpertTime::Cpus { curve, context, .. } => {
                (curve.vcpus(), context.as_ref().map_or(&[][..], |context| context.curve.vcpus()))
            }
        };
        nonexpert.iter().chain(context).copied()
    }

    /// Returns the CPU seconds of the non-expert part for a prompt of `tokens`: 0 on a GPU.
    pub fn nonexpert_cpu(&self, vcpus: f64, tokens: f64) -> f64 {
        match &self.nonexpert {
            NonExpertTime::Device(_) => 0.0,
            NonExpertTime::Cpus { curve, .. } => curve.seconds(tokens, curve.column(vcpus)),
        }
    }

    /// Returns the CPU seconds of the non-expert part in a decode step of `rows` requests: 0 on a GPU.
    pub fn nonexpert_step_cpu(&self, vcpus: f64, rows: f64) -> f64 {
        let context = match &self.nonexpert {
            NonExpertTime::Device(_) => None,
            NonExpertTime::Cpus { context, .. } => context.as_ref(),
        };
        self.nonexpert_cpu(vcpus, rows) + context.map_or(0.0, |context| rows * context.seconds(vcpus))
    }

    /// Reports if the main function is never slower with more memory.
    fn is_isotonic(&self) -> bool {
        let nonexpert = match &self.nonexpert {
            NonExpertTime::Device(_) => true,
            NonExpertTime::Cpus { curve, context, .. } => {
                let of_context = context.as_ref().is_none_or(|context| context.curve.is_isotonic_beyond());
                curve.is_isotonic_beyond() && of_context
            }
        };
        nonexpert && self.curve.is_isotonic_beyond()
    }

    /// Returns top-k as a float.
    pub fn per_token(&self) -> f64 {
        self.top_k as f64
    }

    /// Returns the probability that a function with `share` of the assignments is called in a step of `rows` tokens.
    pub fn call_probability(&self, share: f64, rows: f64) -> f64 {
        1.0 - (1.0 - share.min(1.0)).powf(rows * self.per_token())
    }
}

impl<'p> Model<'p> {
    /// Compiles `problem`, which must have passed its check.
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

    /// Compiles `problem`, which must have passed its check.
    ///
    /// # Errors
    /// A problem without a prediction.
    pub fn with_prediction(problem: &'p Problem) -> Result<Self, FieldError> {
        if problem.prediction.is_none() {
            let message = "is missing: only preallocation works without it; add one row of shares per layer";
            return Err(FieldError::new("prediction", message));
        }
        Ok(Self::new(problem))
    }

    /// Returns the model as a part of the search whose work `meter` counts.
    pub fn metered(self, meter: &Rc<Meter<'p>>) -> Self {
        Self { meter: Rc::clone(meter), ..self }
    }

    /// Compiles `problem` as a part of the same search.
    pub fn beside<'t>(&self, problem: &'t Problem) -> Model<'t>
    where
        'p: 't,
    {
        let meter: Rc<Meter<'t>> = self.meter.clone();
        Model { meter, ..Model::new(problem) }
    }

    /// Reports if the search must end and return its best plan so far.
    pub fn ends(&self) -> bool {
        self.meter.ends()
    }

    /// Returns the model with a known use of experts: `used` of a model with the same shares, top-k and batches.
    pub fn with_used(self, used: Rc<UsedInSteps>) -> Self {
        Self { used: OnceCell::from(used), ..self }
    }

    /// Returns the use of every expert in decode steps at each of [`Self::batches`] but the first.
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

    /// Returns `[layer][expert]` of [`Self::used`] in a step of `rows` requests, or `None` if `rows` is no such batch.
    pub fn used_in(&self, rows: f64) -> Option<&Vec<Vec<ExpertUse>>> {
        let batch = self.batches()[1..].iter().position(|batch| *batch == rows)?;
        self.used().get(batch)
    }

    /// Counts `terms` summed terms of work. The unit is the same on every machine.
    pub fn add_work(&self, terms: usize) {
        self.work.set(self.work.get().saturating_add(terms));
        self.meter.count(terms);
    }

    /// Returns the work of this model so far, in summed terms.
    pub fn work_done(&self) -> usize {
        self.work.get()
    }

    /// Returns the dollars per second of a main function whose vCPUs come with `main_bytes` (H^w).
    pub fn coupled_main_rate(&self, main_bytes: f64) -> f64 {
        self.gpu_rate + self.cpu_price * main_bytes / GB
    }

    /// Returns the bytes that the main function needs besides experts: tokens and runtime.
    pub fn main_base(&self) -> f64 {
        self.memory_tokens * self.problem.token_bytes + self.problem.runtime_bytes
    }

    /// Returns the bytes that the main function needs. `remote`: number of remote experts of each layer.
    pub fn main_needed(&self, remote: &[usize]) -> f64 {
        self.main_base() + self.local_expert_bytes(remote)
    }

    /// Returns the bytes of the local experts. `remote`: number of remote experts of each layer.
    pub fn local_expert_bytes(&self, remote: &[usize]) -> f64 {
        let layers = self.layers.iter().zip(remote);
        layers.map(|(layer, remote)| (layer.experts - remote) as f64 * layer.expert_bytes).sum()
    }

    /// Returns the bytes that a remote function of `layer` needs for `experts` with `share` of the assignments.
    pub fn remote_needed(&self, layer: usize, experts: usize, share: f64) -> f64 {
        let model = &self.layers[layer];
        let rows = (experts as f64).min(model.per_token()).min(model.per_token() * share);
        experts as f64 * model.expert_bytes
            + self.problem.token_bytes * self.memory_input * rows
            + self.problem.function_bytes
    }

    /// Returns the number of routed experts of all layers.
    pub fn experts(&self) -> usize {
        self.layers.iter().map(|layer| layer.experts).sum()
    }

    /// Returns the bytes of the weights of `experts`: `[layer]` of ids.
    pub fn weight_bytes(&self, experts: &[Vec<u32>]) -> f64 {
        let layers = experts.iter().zip(&self.layers);
        layers.map(|(experts, layer)| experts.len() as f64 * layer.expert_bytes).sum()
    }

    /// Returns the bytes that a function needs for `experts`, `[layer]` of ids: their weights, and the rows of the layer with
    /// the most rows.
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

    /// Returns the sum of the predicted shares of `experts`; 0 without a prediction.
    pub fn share_of(&self, layer: usize, experts: &[u32]) -> f64 {
        let Some(shares) = self.shares.get(layer) else { return 0.0 };
        experts.iter().map(|expert| shares[*expert as usize]).sum()
    }

    /// Returns the largest number of experts of a layer.
    pub fn most_experts(&self) -> usize {
        self.layers.iter().map(|layer| layer.experts).max().unwrap_or(0)
    }

    /// Returns the seconds of a call in a decode step besides computation.
    pub fn round_trip(&self) -> f64 {
        self.problem.transport.round_trip()
    }

    /// Reports if functions are billed for the time that they are alive, not for their busy time.
    pub fn is_reserved(&self) -> bool {
        self.problem.pricing.billing == Billing::Reserved
    }

    /// Returns the largest number of replicas that can speed up a layer with `experts` remote experts.
    pub fn useful_replicas(&self, experts: usize) -> usize {
        experts.min(self.problem.limits.max_replicas as usize).max(1)
    }
}

/// Probability that an expert is used in a step, and its mean number of tokens if it is.
pub type ExpertUse = (f64, f64);

/// Returns the use of an expert in a step of `rows` tokens, each of which uses it with `probability`.
pub fn used(rows: f64, probability: f64) -> ExpertUse {
    let probability = probability.min(1.0);
    let used = 1.0 - (1.0 - probability).powf(rows);
    if used > 0.0 { (used, rows * probability / used) } else { (0.0, 1.0) }
}
