//! The problem: a model, a workload, a platform and what they must achieve.
//!
//! Units: seconds, bytes, dollars; 1 GB is 1e9 bytes. A function with memory `m` has `m` / 1 GB
//! vCPUs (Remoe paper, section III-A).

pub(crate) mod check;
pub(crate) mod contention;
pub(crate) mod curve;
pub(crate) mod model;
mod rates;
pub(crate) mod sizes;
pub(crate) mod sizing;
pub(crate) mod wrong;

pub use contention::Contention;

use crate::error::FieldError;
use serde::{Deserialize, Serialize};

/// Bytes of one MB.
const MB: f64 = 1e6;

/// Everything that a plan is made from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// Version of this form: 1.
    #[serde(default = "first_version")]
    pub version: u32,
    /// Where the non-expert part runs.
    #[serde(default)]
    pub device: Device,
    /// The request, or a workload class's typical one.
    pub request: Request,
    /// Predicted share of each layer's token-to-expert assignments, per layer and expert; each row
    /// sums to 1. Pre-allocation does without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<Vec<Vec<f64>>>,
    /// Per layer, the 95th percentile of the remote set's true share over its predicted one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction_p95: Option<Vec<ErrorFactor>>,
    /// The Mixture-of-Experts layers in order; dense layers are folded into the next of them.
    pub layers: Vec<Layer>,
    /// Bytes of one token's hidden state (D in the Remoe paper).
    pub token_bytes: f64,
    /// Bytes of embeddings and head.
    pub head_bytes: f64,
    /// Resident bytes of the main function besides experts.
    pub runtime_bytes: f64,
    /// Resident bytes of a remote function besides experts.
    pub function_bytes: f64,
    /// Between main and remote functions.
    pub transport: Transport,
    /// Between device and host, one way.
    pub swap_seconds: Affine,
    /// Time from nothing to ready functions, in seconds.
    pub cold_start_seconds: f64,
    /// What memory costs.
    pub pricing: Pricing,
    /// When requests come. Costs are those of what is alive then; where absent, those of one request on
    /// functions that nothing else uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrivals: Option<Arrivals>,
    /// How long functions take to start; needed beside [`Arrivals::idle_seconds`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub starts: Option<Starts>,
    /// Sizes that functions may have.
    pub specs: Specs,
    /// Whether less than one vCPU is a quota of time on a whole core, as containers have it: a function that
    /// rests meanwhile computes as quickly as with one. Needs [`Specs::main_vcpus`] and
    /// [`Specs::remote_vcpus`]; where it does not hold, functions compute at the speed of their vCPUs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cpu_quotas: bool,
    /// Cores of the machine that all functions run on, where it is one: groups that work at the same time share
    /// them. Where absent, every function has its vCPUs to itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_cores: Option<f64>,
    /// How functions slow each other down where they share a machine; counted beside [`Self::shared_cores`], for groups. Where
    /// absent, not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contention: Option<Contention>,
    /// Groups of remote functions may end by themselves after so many seconds without a request that uses any of their
    /// experts, while the main function is always there. Where absent they live and die with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_idle_seconds: Option<f64>,
    /// What was promised.
    pub slo: Slo,
    /// What the platform allows.
    pub limits: Limits,
}

fn first_version() -> u32 {
    1
}

/// Token counts. Times and cost use the typical ones, memory the maxima and what runs at once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// Tokens of the prompt.
    pub input_tokens: f64,
    /// Decode steps: generated tokens without the first, which comes out of the prefill.
    pub output_tokens: f64,
    /// The longest prompt that must fit; the typical one where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_input_tokens: Option<f64>,
    /// The most decode steps that must fit; the typical ones where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_output_tokens: Option<f64>,
    /// Requests that run at once. Memory has room for the tokens of as many typical ones; times and cost
    /// are those of one.
    #[serde(default = "one")]
    pub concurrency: u32,
}

impl Request {
    /// The longest prompt that must fit.
    pub(crate) fn largest_input(&self) -> f64 {
        self.max_input_tokens.unwrap_or(self.input_tokens)
    }

    /// Tokens of context that a decode step of the typical request has in the mean: the prompt and what is generated by
    /// then.
    pub fn mean_context(&self) -> f64 {
        self.input_tokens + (self.output_tokens + 1.0) / 2.0
    }

    /// Tokens that must fit in all: those of the largest request, or of as many typical ones as run at
    /// once.
    pub(crate) fn tokens_in_memory(&self) -> f64 {
        self.tokens_in_memory_of(self.concurrency)
    }

    /// The same for `concurrency` requests at once.
    pub(crate) fn tokens_in_memory_of(&self, concurrency: u32) -> f64 {
        let largest = self.largest_input() + self.max_output_tokens.unwrap_or(self.output_tokens);
        match concurrency {
            0 | 1 => largest,
            many => largest.max(f64::from(many) * (self.input_tokens + self.output_tokens)),
        }
    }
}

/// How far the share of a layer's remote set may exceed its prediction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ErrorFactor {
    /// Whatever the set.
    Any(f64),
    /// At index m for the m experts that are predicted to be used least; index 0, the empty set, counts for
    /// nothing.
    ByCount(Vec<f64>),
}

impl ErrorFactor {
    /// The factor for a set of `count` experts.
    pub(crate) fn of(&self, count: usize) -> f64 {
        match self {
            Self::Any(factor) => *factor,
            // Checked problems have one for every count.
            Self::ByCount(factors) => factors.get(count).copied().unwrap_or(1.0),
        }
    }
}

/// One Mixture-of-Experts layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Layer {
    /// Routed experts (K).
    pub experts: u32,
    /// Experts per token (top-k).
    pub top_k: u32,
    /// Bytes of one routed expert.
    pub expert_bytes: f64,
    /// Bytes of everything else in the layer, shared experts included.
    pub nonexpert_bytes: f64,
    /// KV cache bytes per token.
    pub kv_bytes_per_token: f64,
    /// Prefill seconds of the non-expert part on the device, over tokens.
    pub nonexpert_prefill_seconds: Affine,
    /// Decode seconds of the non-expert part on the device, per token.
    pub nonexpert_decode_seconds: f64,
    /// Seconds of one expert on CPUs, in the main function.
    pub expert_seconds: CpuProfile,
    /// Seconds of one expert in a remote function, where that differs: other machines, or a CPU quota
    /// that idle functions save up. `expert_seconds` where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_expert_seconds: Option<CpuProfile>,
    /// Seconds of one expert on the GPU; two baselines need it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_expert_seconds: Option<GpuProfile>,
    /// Seconds of the non-expert part on CPUs; one baseline needs it, and the device `cpu`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_nonexpert_seconds: Option<CpuProfile>,
    /// Seconds that attention to the context adds to a decode step on CPUs for each request in it, over tokens of context.
    /// Decode steps of `cpu_nonexpert_seconds` are those without context then; where absent, those of any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_context_seconds: Option<CpuProfile>,
    /// The same on the device, per token of context, beside `nonexpert_decode_seconds`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub context_seconds_per_token: f64,
}

fn is_zero(seconds: &f64) -> bool {
    *seconds == 0.0
}

/// When requests come, and how long functions stay without any.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Arrivals {
    /// Requests per second, in the mean.
    pub per_second: f64,
    /// Requests that come together, in the mean: bursts come at random moments (a Poisson process), and
    /// the sizes of bursts are geometrically distributed.
    #[serde(default = "one_request")]
    pub burst: f64,
    /// Times of recorded requests in seconds, ascending; they stand for what is to come, and `per_second`
    /// and `burst` for nothing then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorded_seconds: Option<Vec<f64>>,
    /// Without requests for so long, all functions end; they start again with the next request. Never
    /// where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_seconds: Option<f64>,
}

fn one_request() -> f64 {
    1.0
}

/// How long functions take from nothing to ready.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Starts {
    /// The main function.
    pub main: Start,
    /// A remote function.
    pub remote: Start,
}

impl Starts {
    /// Seconds from nothing to ready of functions with so many bytes, which start at the same time; no remote one where
    /// those are 0.
    #[must_use]
    pub fn seconds(self, main_bytes: f64, remote_bytes: f64) -> f64 {
        let remote = if remote_bytes > 0.0 { self.remote.seconds(remote_bytes) } else { 0.0 };
        self.main.seconds(main_bytes).max(remote)
    }
}

/// From nothing to ready.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// Seconds to a process, before it reads weights.
    pub process_seconds: f64,
    /// Weights that it reads and packs in a second.
    pub load_bytes_per_second: f64,
}

impl Start {
    /// Seconds to a process with `bytes` of weights.
    #[must_use]
    pub fn seconds(self, bytes: f64) -> f64 {
        self.process_seconds + bytes / self.load_bytes_per_second
    }
}

/// Where the non-expert part of the main function runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// A device of its own, whose times no size of the main function changes.
    #[default]
    Gpu,
    /// The main function's CPUs: its size changes these times too. They are
    /// [`Layer::cpu_nonexpert_seconds`] then.
    Cpu,
}

/// `base + per_token * tokens`, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Affine {
    /// Seconds whatever the count.
    pub base: f64,
    /// Seconds per token.
    pub per_token: f64,
}

impl Affine {
    /// Seconds for `tokens`.
    #[must_use]
    pub fn at(self, tokens: f64) -> f64 {
        self.base + self.per_token * tokens
    }

    /// What takes `factor` times as long.
    #[must_use]
    pub fn scaled(self, factor: f64) -> Self {
        Self { base: self.base * factor, per_token: self.per_token * factor }
    }
}

/// Measured seconds over token counts and vCPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CpuProfile {
    /// vCPUs, ascending.
    pub vcpus: Vec<f64>,
    /// Token counts, ascending; an expert's start at 1.
    pub tokens: Vec<f64>,
    /// Seconds, `[token][vcpu]`.
    pub seconds: Vec<Vec<f64>>,
}

/// Measured seconds over token counts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuProfile {
    /// Token counts, ascending.
    pub tokens: Vec<f64>,
    /// Seconds, `[token]`.
    pub seconds: Vec<f64>,
}

/// What moves between the main function and a remote one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Transport {
    /// Bytes of a token on its way to a remote function.
    pub token_bytes_up: f64,
    /// Bytes of one expert's row for one token on its way back.
    pub token_bytes_down: f64,
    /// Bytes per second on the way.
    pub bytes_per_second: f64,
    /// Seconds of one invocation besides transfer and computation.
    pub invoke_seconds: f64,
    /// Seconds that the main function takes to send one layer's calls, before it goes on with its own
    /// work.
    #[serde(default)]
    pub send_seconds: f64,
    /// CPU seconds of the main function per call, to send it and to take its answer: they count against its
    /// quota of CPU time, whether or not anything waits for them.
    #[serde(default)]
    pub main_cpu_seconds: f64,
    /// CPU seconds of the remote function per call besides computing experts.
    #[serde(default)]
    pub function_cpu_seconds: f64,
}

impl Transport {
    /// Seconds of an invocation with one token, besides computation and the way back.
    pub(crate) fn round_trip(&self) -> f64 {
        self.invoke_seconds + self.token_bytes_up / self.bytes_per_second
    }
}

/// Prices in dollars.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Pricing {
    /// 1 GB of CPU memory for one second, with the vCPU that comes with it. Counts for nothing beside
    /// `cpu_per_core_second` and may be absent then.
    #[serde(default)]
    pub cpu_per_gb_second: f64,
    /// 1 GB of CPU memory for one second that brings no vCPU: on device `cpu`, what is there beside the
    /// main function's size. `cpu_per_gb_second` where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_per_gb_second: Option<f64>,
    /// One vCPU for one second, where vCPUs are sold apart from memory; `cpu_per_gb_second` counts for
    /// nothing then. Needed beside [`Specs::main_vcpus`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_per_core_second: Option<f64>,
    /// Memory that brings one vCPU, where they are sold together: 1 GB where absent, 1.769 GB on AWS Lambda.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_per_vcpu_bytes: Option<f64>,
    /// 1 GB of GPU memory for one second; the CPU's price where absent (a cluster without a GPU).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_per_gb_second: Option<f64>,
    /// Bytes of one GPU where GPUs are billed whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_bytes_each: Option<f64>,
    /// One whole GPU for one second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_per_second_each: Option<f64>,
    /// What remote functions are billed for.
    #[serde(default)]
    pub billing: Billing,
    /// Main functions that share the remote ones, under reserved billing.
    #[serde(default = "one")]
    pub main_replicas: u32,
}

fn one() -> u32 {
    1
}

/// What remote functions are billed for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Billing {
    /// The seconds in which they work (Remoe paper, equations 8 and 9).
    #[default]
    Invocation,
    /// As long as they exist: a plain cluster.
    Reserved,
}

/// Sizes that functions may have.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Specs {
    /// Of the main function.
    pub main: SizeRange,
    /// Of a remote function.
    pub remote: SizeRange,
    /// vCPUs of the main function, where they are a decision apart from its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub main_vcpus: Option<VcpuRange>,
    /// The same of a remote function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_vcpus: Option<VcpuRange>,
}

impl Specs {
    /// Sizes that bring the vCPUs of their memory.
    #[must_use]
    pub fn new(main: SizeRange, remote: SizeRange) -> Self {
        Self { main, remote, main_vcpus: None, remote_vcpus: None }
    }
}

/// `min + i * step` vCPUs, up to `max`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct VcpuRange {
    /// The fewest.
    pub min: f64,
    /// Never more.
    pub max: f64,
    /// From one number to the next.
    pub step: f64,
}

/// `min_bytes + i * step_bytes`, up to `max_bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SizeRange {
    /// The smallest size.
    pub min_bytes: f64,
    /// No size is larger.
    pub max_bytes: f64,
    /// From one size to the next.
    pub step_bytes: f64,
}

/// Service-level objectives.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Slo {
    /// Time to first token, cold start included.
    pub ttft_seconds: f64,
    /// Time per output token.
    pub tpot_seconds: f64,
    /// Time to first token of a request that finds everything asleep; no limit where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold_ttft_seconds: Option<f64>,
    /// Share of requests that may wait for a start; no limit where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold_share: Option<f64>,
}

impl Slo {
    /// Limits of what warm functions take.
    #[must_use]
    pub fn new(ttft_seconds: f64, tpot_seconds: f64) -> Self {
        Self { ttft_seconds, tpot_seconds, cold_ttft_seconds: None, cold_share: None }
    }
}

/// What the platform allows.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of one invocation's tokens; none where absent.
    #[serde(default)]
    pub payload_bytes: Option<f64>,
    /// Replicas of a layer's remote function.
    pub max_replicas: u32,
    /// Groups of remote functions that each hold a part of every layer, at most. Where absent every layer
    /// has a remote function of its own (the Remoe paper's form).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_groups: Option<u32>,
    /// Memory of the device; none where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_bytes: Option<f64>,
}

impl Problem {
    /// Reads a problem and checks that it can be one.
    ///
    /// # Errors
    /// The first field that is missing, of the wrong type or out of range.
    pub fn from_json(text: &str) -> Result<Self, FieldError> {
        let mut parser = serde_json::Deserializer::from_str(text);
        let problem: Self = serde_path_to_error::deserialize(&mut parser).map_err(FieldError::from_json)?;
        parser.end().map_err(|error| FieldError::new("", format!("invalid JSON: {error}")))?;
        problem.check()?;
        Ok(problem)
    }

    /// The same problem with the main function's size decided: `bytes` of memory, and `vcpus` where those are chosen apart
    /// from memory; as many as it may have where none are given.
    #[must_use]
    pub fn with_main(&self, bytes: f64, vcpus: Option<f64>) -> Self {
        let main = SizeRange { min_bytes: bytes, max_bytes: bytes, step_bytes: MB };
        let decided = |range: VcpuRange| {
            let vcpus = vcpus.unwrap_or_else(|| range.largest());
            VcpuRange { min: vcpus, max: vcpus, ..range }
        };
        let main_vcpus = self.specs.main_vcpus.map(decided);
        Self { specs: Specs { main, main_vcpus, ..self.specs }, ..self.clone() }
    }
}
