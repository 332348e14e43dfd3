//! The form: a model, requests, limits, and node shapes with what each takes.

use super::slowest::MOST_TOP_K;
use remoe_plan::error::FieldError;
use remoe_plan::problem::check::{check_arrivals, check_request, check_start};
use remoe_plan::problem::{
    Affine, Arrivals, CpuProfile, GpuProfile, Request, Slo, Starts, Transport, WindowedCache,
};

const MOST_SHAPES: usize = 1024;
const MOST_LAYERS: usize = 4096;
const MOST_EXPERTS: usize = 4096;
const LARGEST: f64 = 1e18;

/// Requirements, prices and times from which nodes to rent are chosen. Units: seconds, bytes, dollars.
#[derive(Debug, Clone, PartialEq)]
pub struct Rental {
    /// Model to serve.
    pub model: ResidentModel,
    /// Typical and largest requests. Without arrivals `concurrency` of them are in flight all the time; with arrivals
    /// their rate says how many are, and `concurrency` has no effect.
    pub request: Request,
    /// Promised limits.
    pub slo: Slo,
    /// When requests come: limits hold under that load. Where absent, `request.concurrency` requests are in flight all
    /// the time, and nodes are there all the time.
    pub arrivals: Option<Arrivals>,
    /// How long functions take to start on a node that is there, which is paid for; needed beside
    /// [`Arrivals::idle_seconds`].
    pub starts: Option<Starts>,
    /// Node shapes that can be rented.
    pub shapes: Vec<NodeShape>,
    /// Resources of a node that are not there for functions.
    pub reserve: Reserve,
    /// Which functions may live on spot nodes.
    pub spot: Spot,
    /// Between nodes.
    pub transport: Transport,
    /// Resident bytes of the main function besides weights, keys and values.
    pub runtime_bytes: f64,
    /// Memory of a main function with remote experts, for experts that no remote function answers for.
    pub fallback_bytes: f64,
    /// Resident bytes of a remote function besides experts.
    pub function_bytes: f64,
    /// Share of a layer's assignments that goes to each expert, in any order, mean over layers; all alike
    /// where absent.
    pub usage: Option<Vec<f64>>,
}

/// A model in the memory of its functions.
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
    /// Bytes of everything but routed experts.
    pub rest_bytes: f64,
    /// Bytes of everything but routed experts as main functions of this project hold it on CPUs.
    pub main_rest_bytes: f64,
    /// Bytes of everything but routed experts as main functions of this project hold it on a GPU.
    pub device_rest_bytes: f64,
    /// Bytes of keys and values per token in the layers that keep all tokens.
    pub kv_bytes_per_token: f64,
    /// Keys and values in the layers that release tokens behind a window, if any.
    pub kv_windowed: Option<WindowedCache>,
    /// Bytes of one token's hidden state.
    pub token_bytes: f64,
}

/// A node as it is sold, with what it takes to run the model.
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
    /// Memory of each of them.
    pub gpu_bytes: f64,
    /// Dollars per hour.
    pub per_hour: f64,
    /// Set if it may be taken back at any time.
    pub spot: bool,
    /// Never more of them.
    pub max: Option<u32>,
    /// One routed expert on its CPUs.
    pub expert_seconds: CpuProfile,
    /// Everything but routed experts, all layers, on its CPUs.
    pub rest_seconds: CpuProfile,
    /// Seconds that attention to the context adds to a decode step for each request in it, on its CPUs, over tokens
    /// of context; absent where `rest_seconds` includes it.
    pub context_seconds: Option<CpuProfile>,
    /// Times of one of its GPUs in a main function of this project; absent without any.
    pub gpu: Option<GpuTimes>,
    /// Times of its GPUs with other engines, which divide every layer over groups of them (tensor parallelism): one
    /// entry for each size of a group.
    pub gpu_groups: Vec<GpuGroup>,
}

/// GPUs of a node that compute one copy of a model together.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuGroup {
    /// GPUs in the group.
    pub gpus: u32,
    /// Times of all of them together.
    pub times: GpuTimes,
}

/// Times of a model on GPUs.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuTimes {
    /// Prefill of everything but routed experts, over tokens.
    pub rest_prefill_seconds: Affine,
    /// Decode step of one request for everything but routed experts, without context.
    pub rest_decode_seconds: f64,
    /// Seconds that each further request adds to it, without context.
    pub rest_row_seconds: f64,
    /// Seconds that every token of context adds to it for each request in it.
    pub context_seconds_per_token: f64,
    /// Hidden states of one layer to the host, or back, over tokens.
    pub swap_seconds: Affine,
    /// One routed expert. What a layer takes once, whatever the number of experts, is in the rest.
    pub expert_seconds: GpuProfile,
    /// Bytes per second from the host's memory.
    pub host_bytes_per_second: f64,
}

/// Resources of a node for its system, Kubernetes and working memory, and not for functions.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Reserve {
    /// Main memory of every node, in bytes.
    pub memory_bytes: f64,
    /// Share of main memory on top.
    pub memory_share: f64,
    /// Share of GPU memory.
    pub gpu_memory_share: f64,
    /// vCPUs of every node.
    pub vcpus: f64,
    /// Share of vCPUs on top.
    pub vcpu_share: f64,
}

impl Default for Reserve {
    /// 1 GB and 5 % of main memory, 8 % of GPU memory, 0.1 and 1 % of vCPUs: what managed Kubernetes keeps for
    /// itself on large nodes, and some for daemons.
    fn default() -> Self {
        Self { memory_bytes: 1e9, memory_share: 0.05, gpu_memory_share: 0.08, vcpus: 0.1, vcpu_share: 0.01 }
    }
}

/// Which functions may live on nodes that can be taken back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Spot {
    /// No functions.
    Never,
    /// Functions with remote experts: while one is gone, the main function loads its experts.
    #[default]
    Remote,
    /// All, also main functions, whose requests end with the node.
    Everything,
}

impl NodeShape {
    /// Main memory for functions.
    pub(super) fn usable_bytes(&self, reserve: &Reserve) -> f64 {
        (self.memory_bytes * (1.0 - reserve.memory_share) - reserve.memory_bytes).max(0.0)
    }

    /// Memory of one GPU for functions; 0 without any.
    pub(super) fn usable_gpu_bytes(&self, reserve: &Reserve) -> f64 {
        f64::from(self.gpus.min(1)) * self.gpu_bytes * (1.0 - reserve.gpu_memory_share)
    }

    /// vCPUs for functions, in thousandths as Kubernetes counts them.
    pub(super) fn usable_vcpus(&self, reserve: &Reserve) -> f64 {
        let vcpus = self.vcpus * (1.0 - reserve.vcpu_share) - reserve.vcpus;
        (vcpus.max(self.vcpus / 2.0) * 1000.0).floor() / 1000.0
    }
}

impl Rental {
    /// Checks what the search relies on.
    ///
    /// # Errors
    /// The first field with an invalid value.
    pub fn check(&self) -> Result<(), FieldError> {
        let model = &self.model;
        for (field, value, most) in [
            ("layers", model.layers, MOST_LAYERS),
            ("experts", model.experts, MOST_EXPERTS),
            ("top_k", model.top_k, MOST_TOP_K.min(model.experts)),
        ] {
            if !(1..=most).contains(&value) {
                return Err(FieldError::new(field, format!("is {value}, expected 1 to {most}")));
            }
        }
        if !(1..=MOST_SHAPES).contains(&self.shapes.len()) {
            let message = format!("lists {} shapes, expected 1 to {MOST_SHAPES}", self.shapes.len());
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
