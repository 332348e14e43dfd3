//! Input of the choice of nodes: a model, requests, limits, and node shapes with their times.

use super::slowest::MAX_TOP_K;
use remoe_plan::error::FieldError;
use remoe_plan::problem::check::{check_arrivals, check_request, check_start};
use remoe_plan::problem::{
    Affine, Arrivals, CpuProfile, GpuProfile, Request, Slo, Starts, Transport, WindowedCache,
};

const MAX_SHAPES: usize = 1024;
const MAX_LAYERS: usize = 4096;
const MAX_EXPERTS: usize = 4096;
const LARGEST: f64 = 1e18;

/// Requirements, prices and times from which nodes to rent are chosen. Units: seconds, bytes, dollars.
#[derive(Debug, Clone, PartialEq)]
pub struct Rental {
    /// Model to serve.
    pub model: ResidentModel,
    /// Typical and largest requests. `concurrency` is used only without arrivals.
    pub request: Request,
    /// Latency limits.
    pub slo: Slo,
    /// Arrivals under which the limits must hold. If absent, `request.concurrency` requests are always in flight, and nodes
    /// are always rented.
    pub arrivals: Option<Arrivals>,
    /// Cold starts of functions on a running node, which are billed. Required with [`Arrivals::idle_seconds`].
    pub starts: Option<Starts>,
    /// Node shapes that can be rented.
    pub shapes: Vec<NodeShape>,
    /// Resources of a node that functions cannot use.
    pub reserve: Reserve,
    /// Functions that may run on spot nodes.
    pub spot: SpotPolicy,
    /// Transport between nodes.
    pub transport: Transport,
    /// Resident bytes of the main function besides weights and KV cache.
    pub runtime_bytes: f64,
    /// Memory of a main function for the local fallback of remote experts.
    pub fallback_bytes: f64,
    /// Resident bytes of a remote function besides experts.
    pub function_bytes: f64,
    /// Share of a layer's assignments that goes to each expert, in any order, in the mean over layers. Uniform if absent.
    pub usage: Option<Vec<f64>>,
}

/// Sizes of a model in the memory of its functions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResidentModel {
    /// Layers with routed experts.
    pub layers: usize,
    /// Routed experts per layer.
    pub experts: usize,
    /// Routed experts per token.
    pub top_k: usize,
    /// Bytes of one routed expert.
    pub expert_bytes: f64,
    /// Bytes of the non-expert part in other engines.
    pub rest_bytes: f64,
    /// Bytes of the non-expert part in Remoe's main function on CPUs.
    pub main_rest_bytes: f64,
    /// Bytes of the non-expert part in Remoe's main function on a GPU.
    pub device_rest_bytes: f64,
    /// KV cache bytes per token in the layers that keep all tokens.
    pub kv_bytes_per_token: f64,
    /// KV cache in the layers that release tokens behind a window, if any.
    pub kv_windowed: Option<WindowedCache>,
    /// Bytes of one token's hidden state.
    pub token_bytes: f64,
}

/// Kind of node that can be rented, with the times of the model on it.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeShape {
    /// Name of the shape.
    pub name: String,
    /// vCPUs.
    pub vcpus: f64,
    /// Main memory.
    pub memory_bytes: f64,
    /// Number of GPUs.
    pub gpus: u32,
    /// Memory of each GPU.
    pub gpu_bytes: f64,
    /// Dollars per hour.
    pub per_hour: f64,
    /// Set if the cloud may reclaim it at any time.
    pub spot: bool,
    /// Maximum number of such nodes.
    pub max: Option<u32>,
    /// Seconds of one routed expert on its CPUs.
    pub expert_seconds: CpuProfile,
    /// Seconds of the non-expert part of all layers on its CPUs.
    pub rest_seconds: CpuProfile,
    /// Seconds that attention to the context adds to a decode step for each request, on its CPUs, over tokens of context.
    /// Absent if `rest_seconds` includes them.
    pub context_seconds: Option<CpuProfile>,
    /// Times of one of its GPUs in Remoe's main function; absent without GPUs.
    pub gpu: Option<GpuTimes>,
    /// Times of its GPUs in other engines with tensor parallelism: one entry for each size of a group of GPUs.
    pub gpu_groups: Vec<GpuGroup>,
}

/// GPUs of a node that compute one copy of a model together.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuGroup {
    /// GPUs in the group.
    pub gpus: u32,
    /// Times of all GPUs of the group together.
    pub times: GpuTimes,
}

/// Times of a model on GPUs.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuTimes {
    /// Prefill of the non-expert part, over tokens.
    pub rest_prefill_seconds: Affine,
    /// Decode step of one request for the non-expert part, without context.
    pub rest_decode_seconds: f64,
    /// Seconds that each additional request adds to the step, without context.
    pub rest_row_seconds: f64,
    /// Seconds that every token of context adds to the step for each request.
    pub context_seconds_per_token: f64,
    /// Move of the hidden states of one layer to the host, or back, over tokens.
    pub swap_seconds: Affine,
    /// Seconds of one routed expert. Fixed costs of a layer's experts are in the non-expert part.
    pub expert_seconds: GpuProfile,
    /// Bytes per second of copies from the host's memory.
    pub host_bytes_per_second: f64,
}

/// Resources of a node that its operating system, Kubernetes and working memory use.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Reserve {
    /// Main memory of every node, in bytes.
    pub memory_bytes: f64,
    /// Share of main memory, in addition to `memory_bytes`.
    pub memory_share: f64,
    /// Share of GPU memory.
    pub gpu_memory_share: f64,
    /// vCPUs of every node.
    pub vcpus: f64,
    /// Share of vCPUs, in addition to `vcpus`.
    pub vcpu_share: f64,
}

impl Default for Reserve {
    /// Returns 1 GB and 5 % of main memory, 8 % of GPU memory, and 0.1 vCPUs and 1 % of vCPUs: what managed Kubernetes
    /// reserves on large nodes, and some for daemons.
    fn default() -> Self {
        Self { memory_bytes: 1e9, memory_share: 0.05, gpu_memory_share: 0.08, vcpus: 0.1, vcpu_share: 0.01 }
    }
}

/// Functions that may run on spot nodes, which the cloud may reclaim.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SpotPolicy {
    /// No functions.
    Never,
    /// Remote functions: while one is gone, the main function's local fallback computes its experts.
    #[default]
    Remote,
    /// All functions, also main functions, whose requests are lost with the node.
    Everything,
}

impl NodeShape {
    /// Returns the main memory that functions can use.
    pub(super) fn usable_bytes(&self, reserve: &Reserve) -> f64 {
        (self.memory_bytes * (1.0 - reserve.memory_share) - reserve.memory_bytes).max(0.0)
    }

    /// Returns the memory of one GPU that functions can use; 0 without GPUs.
    pub(super) fn usable_gpu_bytes(&self, reserve: &Reserve) -> f64 {
        f64::from(self.gpus.min(1)) * self.gpu_bytes * (1.0 - reserve.gpu_memory_share)
    }

    /// Returns the vCPUs that functions can use, in thousandths as Kubernetes counts them.
    pub(super) fn usable_vcpus(&self, reserve: &Reserve) -> f64 {
        let vcpus = self.vcpus * (1.0 - reserve.vcpu_share) - reserve.vcpus;
        (vcpus.max(self.vcpus / 2.0) * 1000.0).floor() / 1000.0
    }
}

impl Rental {
    /// Checks all fields.
    ///
    /// # Errors
    /// The first field with an invalid value.
    pub fn check(&self) -> Result<(), FieldError> {
        let model = &self.model;
        for (field, value, most) in [
            ("layers", model.layers, MAX_LAYERS),
            ("experts", model.experts, MAX_EXPERTS),
            ("top_k", model.top_k, MAX_TOP_K.min(model.experts)),
        ] {
            if !(1..=most).contains(&value) {
                return Err(FieldError::new(field, format!("is {value}, expected 1 to {most}")));
            }
        }
        if !(1..=MAX_SHAPES).contains(&self.shapes.len()) {
            let message = format!("lists {} shapes, expected 1 to {MAX_SHAPES}", self.shapes.len());
            return Err(FieldError::new("nodes", message));
        }
        let positive = |field: &str, value: f64| match value > 0.0 && value <= LARGEST {
            true => Ok(()),
            false => Err(FieldError::new(field, format!("is {value}, expected above 0 and up to {LARGEST}"))),
        };
        positive("expert_bytes", model.expert_bytes)?;
        positive("rest_bytes", model.rest_bytes)?;
        positive("main_rest_bytes", model.main_rest_bytes)?;
        positive("device_rest_bytes", model.device_rest_bytes)?;
        positive("slo.ttft_seconds", self.slo.ttft_seconds)?;
        positive("slo.tpot_seconds", self.slo.tpot_seconds)?;
        check_request(&self.request)?;
        if let Some(starts) = self.starts {
            check_start("starts.main", starts.main)?;
            check_start("starts.remote", starts.remote)?;
        }
        if let Some(arrivals) = &self.arrivals {
            check_arrivals(arrivals)?;
            if arrivals.idle_seconds.is_some() && self.starts.is_none() {
                let message = "is missing: arrivals.idle_seconds needs the times of a start; add it, \
                               or leave idle_seconds out";
                return Err(FieldError::new("starts", message));
            }
        }
        for (index, shape) in self.shapes.iter().enumerate() {
            positive(&format!("nodes[{index}].vcpus"), shape.vcpus)?;
            positive(&format!("nodes[{index}].memory_bytes"), shape.memory_bytes)?;
            positive(&format!("nodes[{index}].per_hour"), shape.per_hour)?;
        }
        if let Some(usage) = &self.usage {
            let sum: f64 = usage.iter().sum();
            let possible = usage.iter().all(|share| *share >= 0.0) && (sum - 1.0).abs() < 1e-3;
            if usage.len() != model.experts || !possible {
                let (shares, experts) = (usage.len(), model.experts);
                let message = format!(
                    "has {shares} shares with a sum of {sum}, expected {experts} from 0 up with a sum of 1"
                );
                return Err(FieldError::new("usage", message));
            }
        }
        Ok(())
    }
}
