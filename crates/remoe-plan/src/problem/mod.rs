//! Planning problems: a model, its workload, the platform with its prices, and latency limits.
//!
//! Units: seconds, bytes, dollars; 1 GB is 1e9 bytes. Unless stated otherwise, a function with memory `m` has `m` / 1 GB
//! vCPUs (Remoe paper, section III-A).

mod bounds;
pub mod check;
pub mod contention;
pub mod curve;
mod layer;
pub mod misestimated;
mod rates;
pub mod sizes;
mod slo;
pub mod stressed;

pub use contention::Contention;
pub use layer::{Affine, CpuProfile, GpuProfile, Layer, WindowedCache};
pub use rates::{Billing, Pricing};
pub use slo::{Quantile, Slo};

use crate::error::FieldError;
use crate::read::from_json;
use bounds::{LARGEST, MAX_TOKENS, SMALLEST};
use check::{
    MAX_BURST, MAX_CONCURRENCY, MAX_GROUPS, MAX_LAYERS, MAX_RECORDED, MAX_REPLICAS, MAX_SHARE, MAX_VARIATION,
    MAX_VCPUS, MIN_VCPUS,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Bytes of one MB.
const MB: f64 = 1e6;

/// Everything that a plan is made from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Problem {
    /// Version of this form: 1.
    #[serde(default = "first_version")]
    #[schemars(range(min = 1, max = 1))]
    pub version: u32,
    /// Where the non-expert part runs.
    #[serde(default)]
    pub device: Device,
    /// The request, or a workload class's typical one.
    pub request: Request,
    /// Predicted share of each layer's token-to-expert assignments, per layer and expert; each row
    /// sums to 1. Pre-allocation does without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(inner(inner(range(min = 0.0, max = MAX_SHARE))))]
    pub prediction: Option<Vec<Vec<f64>>>,
    /// Per layer, the 95th percentile of the remote set's true share over its predicted one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction_p95: Option<Vec<ErrorFactor>>,
    /// The Mixture-of-Experts layers in order; dense layers are folded into the next of them.
    #[schemars(length(min = 1, max = MAX_LAYERS))]
    pub layers: Vec<Layer>,
    /// Bytes of one token's hidden state (D in the Remoe paper).
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub token_bytes: f64,
    /// Bytes of embeddings and head.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub head_bytes: f64,
    /// Resident bytes of the main function besides experts.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub runtime_bytes: f64,
    /// Resident bytes of a remote function besides experts.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub function_bytes: f64,
    /// Calls between main and remote functions.
    pub transport: Transport,
    /// Seconds of one way between device and host, over tokens.
    pub swap_seconds: Affine,
    /// Seconds from nothing to ready functions; part of the time to first token.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub cold_start_seconds: f64,
    /// Prices in dollars.
    pub pricing: Pricing,
    /// When requests come. Costs are those of what is alive then; where absent, those of one request on
    /// functions that nothing else uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrivals: Option<Arrivals>,
    /// Seconds and rates with which functions start; needed beside `arrivals.idle_seconds` and `remote_idle_seconds`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub starts: Option<Starts>,
    /// Sizes that functions may have.
    pub specs: Specs,
    /// True if less than one vCPU is a quota of time on a whole core, as containers have it: a function that
    /// rests meanwhile computes as quickly as with one. Needs `specs.main_vcpus` and `specs.remote_vcpus`; where it does not
    /// hold, functions compute at the speed of their vCPUs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cpu_quotas: bool,
    /// Cores of the machine that all functions run on, where it is one: groups that work at the same time share
    /// them. Where absent, every function has its vCPUs to itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1.0, max = MAX_VCPUS))]
    pub shared_cores: Option<f64>,
    /// Slowdown of functions that share a machine; counted beside `shared_cores`, for groups. None where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contention: Option<Contention>,
    /// Seconds without a request that uses any of its experts after which a group of remote functions may end by itself,
    /// while the main function is always there. Where absent groups live and die with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub remote_idle_seconds: Option<f64>,
    /// Latency limits.
    pub slo: Slo,
    /// Limits of the platform.
    pub limits: Limits,
}

fn first_version() -> u32 {
    1
}

/// Token counts. Times and cost use the typical ones, memory the maxima and what runs at once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Tokens of the prompt.
    #[schemars(range(min = 1.0, max = MAX_TOKENS))]
    pub input_tokens: f64,
    /// Decode steps: generated tokens without the first, which comes out of the prefill.
    #[schemars(range(min = 0.0, max = MAX_TOKENS))]
    pub output_tokens: f64,
    /// Tokens of the longest prompt that must fit, at least `input_tokens`; those where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = MAX_TOKENS))]
    pub max_input_tokens: Option<f64>,
    /// Most decode steps that must fit, at least `output_tokens`; those where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = MAX_TOKENS))]
    pub max_output_tokens: Option<f64>,
    /// Number of requests that run at once. Memory has room for the tokens of as many typical ones; times and cost
    /// are those of one.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = MAX_CONCURRENCY))]
    pub concurrency: u32,
}

impl Problem {
    /// Returns the bytes of the keys and values of all layers that the main function must have room for.
    pub fn kv_bytes_in_memory(&self) -> f64 {
        let per_token = self.layers.iter().map(|layer| layer.kv_bytes_per_token).sum();
        let windowed: Vec<_> = self.layers.iter().filter_map(|layer| layer.kv_windowed).collect();
        self.request.kv_bytes_in_memory_of(self.request.concurrency, per_token, &windowed)
    }

    /// Returns the bytes of the keys and values of a token in all layers.
    pub fn kv_bytes_per_token(&self) -> f64 {
        let of = |layer: &Layer| {
            layer.kv_bytes_per_token + layer.kv_windowed.map_or(0.0, |cache| cache.bytes_per_token)
        };
        self.layers.iter().map(of).sum()
    }
}

impl Request {
    /// Returns the tokens of the longest prompt that must fit.
    pub fn largest_input(&self) -> f64 {
        self.max_input_tokens.unwrap_or(self.input_tokens)
    }

    /// Returns the mean tokens of context of the typical request's decode steps: the prompt and the tokens generated so
    /// far.
    pub fn mean_context(&self) -> f64 {
        self.input_tokens + (self.output_tokens + 1.0) / 2.0
    }

    /// Returns the tokens that must fit in total: those of the largest request, or of as many typical ones as run at once
    /// if these are more.
    pub fn tokens_in_memory(&self) -> f64 {
        self.tokens_in_memory_of(self.concurrency)
    }

    /// Returns the tokens that must fit in total if `concurrency` requests run at once.
    pub fn tokens_in_memory_of(&self, concurrency: u32) -> f64 {
        let largest = self.largest_input() + self.max_output_tokens.unwrap_or(self.output_tokens);
        match concurrency {
            0 | 1 => largest,
            many => largest.max(f64::from(many) * (self.input_tokens + self.output_tokens)),
        }
    }

    /// Returns the bytes of the keys and values of these requests: `per_token` in layers that keep all tokens, and those of
    /// the `windowed` caches.
    pub fn kv_bytes_in_memory_of(&self, concurrency: u32, per_token: f64, windowed: &[WindowedCache]) -> f64 {
        let of = |requests: f64, tokens: f64| {
            let held = |cache: &WindowedCache| cache.bytes_per_token * tokens.min(cache.most_tokens);
            per_token * (requests * tokens) + requests * windowed.iter().map(held).sum::<f64>()
        };
        let largest = of(1.0, self.largest_input() + self.max_output_tokens.unwrap_or(self.output_tokens));
        match concurrency {
            0 | 1 => largest,
            many => largest.max(of(f64::from(many), self.input_tokens + self.output_tokens)),
        }
    }
}

/// Factor by which the share of a layer's remote set may exceed its prediction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a factor, or a list of one for each number of remote experts")]
pub enum ErrorFactor {
    /// Factor of any set.
    Any(#[schemars(range(min = 0.0, max = LARGEST))] f64),
    /// Factors of sets, at index m for the m experts that are predicted to be used least; index 0, the empty set, counts
    /// for nothing.
    ByCount(#[schemars(inner(range(min = 0.0, max = LARGEST)))] Vec<f64>),
}

impl ErrorFactor {
    /// Returns the factor for a set of `count` experts.
    pub fn of(&self, count: usize) -> f64 {
        match self {
            Self::Any(factor) => *factor,
            // Checked problems have one for every count.
            Self::ByCount(factors) => factors.get(count).copied().unwrap_or(1.0),
        }
    }
}

/// When requests come, and how long functions stay without any.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Arrivals {
    /// Requests per second, in the mean.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub per_second: f64,
    /// Number of requests that come together, in the mean: bursts come at random moments (a Poisson process), and
    /// the sizes of bursts are geometrically distributed.
    #[serde(default = "one_request")]
    #[schemars(range(min = 1.0, max = MAX_BURST))]
    pub burst: f64,
    /// Times of recorded requests in seconds, ascending; they stand for what is to come, and `per_second`
    /// and `burst` for nothing then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = MAX_RECORDED), inner(range(min = 0.0, max = LARGEST)))]
    pub recorded_seconds: Option<Vec<f64>>,
    /// Seconds without requests after which all functions end; they start again with the next request. Never
    /// where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub idle_seconds: Option<f64>,
    /// Standard deviation of prompts' lengths over their mean; 0 where absent: all alike.
    #[serde(default, skip_serializing_if = "layer::is_zero")]
    #[schemars(range(min = 0.0, max = MAX_VARIATION))]
    pub input_variation: f64,
    /// Standard deviation of decode steps per request over their mean; 0 where absent: all alike.
    #[serde(default, skip_serializing_if = "layer::is_zero")]
    #[schemars(range(min = 0.0, max = MAX_VARIATION))]
    pub output_variation: f64,
}

fn one_request() -> f64 {
    1.0
}

/// How long functions take from nothing to ready.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Starts {
    /// The main function.
    pub main: Start,
    /// A remote function.
    pub remote: Start,
}

impl Starts {
    /// Returns the seconds until functions with so many bytes of weights are ready if they start at the same time. There is
    /// no remote one if `remote_bytes` is 0.
    #[must_use]
    pub fn seconds(self, main_bytes: f64, remote_bytes: f64) -> f64 {
        let remote = if remote_bytes > 0.0 { self.remote.seconds(remote_bytes) } else { 0.0 };
        self.main.seconds(main_bytes).max(remote)
    }
}

/// From nothing to ready.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// Seconds to a process, before it reads weights.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub process_seconds: f64,
    /// Bytes of weights that it reads and packs in a second.
    #[schemars(range(min = 1.0, max = LARGEST))]
    pub load_bytes_per_second: f64,
}

impl Start {
    /// Returns the seconds until a process with `bytes` of weights is ready.
    #[must_use]
    pub fn seconds(self, bytes: f64) -> f64 {
        self.process_seconds + bytes / self.load_bytes_per_second
    }
}

/// Where the non-expert part of the main function runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// A device of its own, whose times no size of the main function changes.
    #[default]
    Gpu,
    /// The main function's CPUs: its size changes these times too. They are
    /// [`Layer::cpu_nonexpert_seconds`] then.
    Cpu,
}

/// Bytes and time of messages between the main function and a remote one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Transport {
    /// Bytes of a token on its way to a remote function.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub token_bytes_up: f64,
    /// Bytes of one expert's row for one token on its way back.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub token_bytes_down: f64,
    /// Bytes per second on the way.
    #[schemars(range(min = 1.0, max = LARGEST))]
    pub bytes_per_second: f64,
    /// Seconds of one invocation besides transfer and computation.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub invoke_seconds: f64,
    /// Seconds that the main function takes to send one layer's calls, before it goes on with its own
    /// work.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub send_seconds: f64,
    /// CPU seconds of the main function per call, to send it and to take its answer: they count against its
    /// quota of CPU time, whether or not anything waits for them.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub main_cpu_seconds: f64,
    /// CPU seconds of the remote function per call besides computing experts.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub function_cpu_seconds: f64,
}

impl Transport {
    /// Returns the seconds of an invocation with one token, besides computation and the transfer of its result.
    pub fn round_trip(&self) -> f64 {
        self.invoke_seconds + self.token_bytes_up / self.bytes_per_second
    }
}

fn one() -> u32 {
    1
}

/// Sizes that functions may have.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Specs {
    /// Memory of the main function.
    pub main: SizeRange,
    /// Memory of a remote function.
    pub remote: SizeRange,
    /// vCPUs of the main function, where they are a decision apart from its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub main_vcpus: Option<VcpuRange>,
    /// vCPUs of a remote function, where they are a decision apart from its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_vcpus: Option<VcpuRange>,
}

impl Specs {
    /// Builds specs whose vCPUs follow from memory.
    #[must_use]
    pub fn new(main: SizeRange, remote: SizeRange) -> Self {
        Self { main, remote, main_vcpus: None, remote_vcpus: None }
    }
}

/// `min + i * step` vCPUs, up to `max`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VcpuRange {
    /// Fewest vCPUs.
    #[schemars(range(min = MIN_VCPUS, max = MAX_VCPUS))]
    pub min: f64,
    /// Most vCPUs.
    #[schemars(range(min = MIN_VCPUS, max = MAX_VCPUS))]
    pub max: f64,
    /// vCPUs from one number to the next; at most 10,000 numbers.
    #[schemars(range(min = MIN_VCPUS, max = MAX_VCPUS))]
    pub step: f64,
}

/// `min_bytes + i * step_bytes`, up to `max_bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SizeRange {
    /// Bytes of the smallest size.
    #[schemars(range(min = 1.0, max = LARGEST))]
    pub min_bytes: f64,
    /// Bytes that no size exceeds.
    #[schemars(range(min = 1.0, max = LARGEST))]
    pub max_bytes: f64,
    /// Bytes from one size to the next; at most 10,000 sizes.
    #[schemars(range(min = 1.0, max = LARGEST))]
    pub step_bytes: f64,
}

/// Limits of the platform.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Bytes of one invocation's tokens; no limit where absent.
    #[serde(default)]
    #[schemars(range(min = SMALLEST, max = LARGEST))]
    pub payload_bytes: Option<f64>,
    /// Number of replicas of a layer's or group's remote function, at most.
    #[schemars(range(min = 1, max = MAX_REPLICAS))]
    pub max_replicas: u32,
    /// Number of groups of remote functions that each hold a part of every layer, at most. Where absent every layer
    /// has a remote function of its own (the Remoe paper's form).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = MAX_GROUPS))]
    pub max_groups: Option<u32>,
    /// Bytes of memory of the device; no limit where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = SMALLEST, max = LARGEST))]
    pub gpu_bytes: Option<f64>,
}

impl Problem {
    /// Reads and checks a problem.
    ///
    /// # Errors
    /// The first field that is missing, unknown, stated twice, of the wrong type or out of range.
    pub fn from_json(text: &str) -> Result<Self, FieldError> {
        let problem: Self = from_json(text)?;
        problem.check()?;
        Ok(problem)
    }

    /// Copies the problem with one main size: `bytes` of memory, and `vcpus` if these are chosen separately. Without `vcpus`,
    /// the largest number is taken.
    #[must_use]
    pub fn with_main(&self, bytes: f64, vcpus: Option<f64>) -> Self {
        let main = SizeRange { min_bytes: bytes, max_bytes: bytes, step_bytes: MB };
        let fixed = |range: VcpuRange| {
            let vcpus = vcpus.unwrap_or_else(|| range.largest());
            VcpuRange { min: vcpus, max: vcpus, ..range }
        };
        let main_vcpus = self.specs.main_vcpus.map(fixed);
        Self { specs: Specs { main, main_vcpus, ..self.specs }, ..self.clone() }
    }
}
