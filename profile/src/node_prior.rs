//! What a node takes to run a model, where nobody measured it: from what its maker says of it.

use crate::nodes::ListedNode;
use crate::prior::{
    CONTEXT_TOKENS, GPU_COPY_BYTES_PER_SECOND, GPU_COPY_SECONDS, GPU_EXPERT_SECONDS, GPU_LAYER_SECONDS,
    OPERATIONS_PER_SECOND, READ_BYTES_PER_SECOND, USEFUL_VCPUS,
};
use crate::profile::Profile;
use remoe_model::{Inspection, Outline};
use remoe_planner::{Affine, CpuProfile, GpuProfile, GpuTimes, NodeShape};

/// Share of a specified bandwidth that is reached, of main memory and of GPUs: multiplications with one row
/// reach 60 to 80 %.
const BANDWIDTH_REACHED: f64 = 0.6;
/// Share of specified operations that is reached.
const OPERATIONS_REACHED: f64 = 0.3;
/// Bytes per second for each vCPU of a node that does not state its bandwidth, all vCPUs busy: three quarters
/// of what the two hardware threads of a core of an Ice Lake server have (8 channels of DDR4-3200 for 32 cores).
const SHARED_BYTES_PER_SECOND: f64 = 2.4e9;
/// No node that does not state it reads more: two sockets of that kind, three quarters reached.
const MOST_BYTES_PER_SECOND: f64 = 3e11;
/// Threads that wait for each other twice for an expert.
const CPU_EXPERT_SECONDS: f64 = 2e-5;
/// PCIe 4.0 with 16 lanes, half of it: GPUs with 40 GB and more.
const WIDE_COPY_BYTES_PER_SECOND: f64 = 1.6e10;
const WIDE_COPY_FROM_GB: f64 = 40.0;

/// By the memory of a GPU in GB: what is derived where it is not stated, GB per second and 10^12 operations
/// per second. The slowest data centre GPU with at least so much: T4, L4, A40, A100.
const DERIVED: [(f64, f64, f64); 4] =
    [(16.0, 300.0, 40.0), (24.0, 300.0, 60.0), (48.0, 600.0, 120.0), (f64::INFINITY, 1500.0, 250.0)];

/// The first, the last and the number of vCPUs in a table of a node, and its token counts.
const LEAST_VCPUS: f64 = 0.1;
const VCPU_POINTS: u32 = 48;
const TOKENS: [f64; 8] = [1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16_384.0];

/// The weights of a model as functions hold them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResidentWeights {
    /// Bytes of a routed expert.
    pub expert_bytes: f64,
    /// Its parameters.
    pub expert_parameters: f64,
    /// Bytes that every token is multiplied with besides routed experts; an embedding is looked up.
    pub rest_bytes: f64,
    /// The same in parameters.
    pub rest_parameters: f64,
    /// Layers.
    pub layers: f64,
    /// One token's hidden state.
    pub token_bytes: f64,
    /// Keys and values of a token, all layers: a decode step reads those of its context.
    pub kv_bytes_per_token: f64,
}

impl ResidentWeights {
    /// Those of a checkpoint whose weights are all held in `dtype`, `float32` or one of two bytes, but for experts
    /// that are quantised.
    #[must_use]
    pub fn of(model: &Inspection, dtype: &str) -> Self {
        let element = if dtype == "float32" { 4.0 } else { 2.0 };
        let model = &model.decoded();
        let resident = |bytes: u64| model.resident_bytes(bytes, dtype) as f64;
        let token_bytes = resident(model.token_bytes);
        let layers: u64 = model.non_expert_layer_bytes.iter().sum();
        let rest_bytes = resident(layers) + model.vocab_size as f64 * token_bytes;
        Self {
            expert_bytes: model.resident_expert_bytes(dtype) as f64,
            expert_parameters: resident(model.expert_bytes) / element,
            rest_bytes,
            rest_parameters: rest_bytes / element,
            layers: model.layers as f64,
            token_bytes,
            kv_bytes_per_token: resident(model.kv_bytes_per_token),
        }
    }

    /// Those of a model of which only the configuration is known.
    #[must_use]
    pub fn of_outline(outline: &Outline) -> Self {
        let facts = outline.inspection("");
        let layers: u64 = facts.non_expert_layer_bytes.iter().sum();
        let used = facts.top_k as u64 * facts.moe_layers.len() as u64 * outline.expert_parameters();
        let token_bytes = facts.token_bytes as f64;
        Self {
            expert_bytes: facts.expert_bytes as f64,
            expert_parameters: outline.expert_parameters() as f64,
            rest_bytes: layers as f64 + facts.vocab_size as f64 * token_bytes,
            rest_parameters: outline.active_parameters().saturating_sub(used) as f64,
            layers: facts.layers as f64,
            token_bytes,
            kv_bytes_per_token: facts.kv_bytes_per_token as f64,
        }
    }
}

/// The shape of `node` with the times of a model on it: of `profile` where there is one, whatever machine it
/// was made on, else from the node's facts, on the slow side.
///
/// Several GPUs as one have their bandwidth and operations added: what dividing a model over them costs is not in
/// those times.
#[must_use]
pub fn node_shape(node: &ListedNode, weights: &ResidentWeights, profile: Option<&Profile>) -> NodeShape {
    let cpus = Cpus::of(node);
    let of_gpus = |count: u32| (node.gpus > 0).then(|| Gpus::of(node, count).times(weights, profile));
    NodeShape {
        name: node.name.clone(),
        vcpus: node.vcpus,
        memory_bytes: node.memory_gb * 1e9,
        gpus: node.gpus,
        gpu_bytes: node.gpu_memory_gb.unwrap_or(0.0) * 1e9,
        per_hour: node.per_hour,
        spot: node.spot,
        max: node.max,
        expert_seconds: profile.map_or_else(
            || cpus.table(weights.expert_bytes, weights.expert_parameters, CPU_EXPERT_SECONDS),
            |profile| profile.expert_seconds.clone(),
        ),
        rest_seconds: profile.map_or_else(
            || {
                let waits = weights.layers * CPU_EXPERT_SECONDS;
                cpus.table(weights.rest_bytes, weights.rest_parameters, waits)
            },
            |profile| profile.nonexpert_seconds.clone(),
        ),
        context_seconds: profile.map_or_else(
            || Some(cpus.context(weights.kv_bytes_per_token)),
            |profile| profile.context_seconds.clone(),
        ),
        gpu: of_gpus(1),
        all_gpus: of_gpus(node.gpus),
    }
}

/// What the vCPUs of a node do.
struct Cpus {
    vcpus: f64,
    /// Bytes per second that one reads.
    read_each: f64,
    /// Bytes per second that all of them read, and each its share.
    read_most: f64,
}

impl Cpus {
    fn of(node: &ListedNode) -> Self {
        let derived =
            (node.vcpus * SHARED_BYTES_PER_SECOND).max(node.vcpus.min(USEFUL_VCPUS) * READ_BYTES_PER_SECOND);
        let stated = node.memory_bandwidth_gbs.map(|gb| gb * 1e9 * BANDWIDTH_REACHED);
        let read_most = stated.unwrap_or(derived.min(MOST_BYTES_PER_SECOND));
        Self { vcpus: node.vcpus, read_each: READ_BYTES_PER_SECOND.min(read_most / node.vcpus), read_most }
    }

    /// Seconds of `parameters` in `bytes`: the slower of reading and computing, and `fixed`.
    fn table(&self, bytes: f64, parameters: f64, fixed: f64) -> CpuProfile {
        let vcpus = self.columns();
        let row = |tokens: &f64| {
            let at = |vcpus: &f64| {
                let read = bytes / (self.read_each * vcpus).min(self.read_most);
                let computed = 2.0 * parameters * tokens / (OPERATIONS_PER_SECOND * vcpus);
                fixed + read.max(computed)
            };
            vcpus.iter().map(at).collect()
        };
        CpuProfile { seconds: TOKENS.iter().map(row).collect(), vcpus, tokens: TOKENS.to_vec() }
    }

    /// Seconds of reading `bytes` for each token of context.
    fn context(&self, bytes: f64) -> CpuProfile {
        let vcpus = self.columns();
        let at = |vcpus: &f64| CONTEXT_TOKENS * bytes / (self.read_each * vcpus).min(self.read_most);
        let seconds = vec![vcpus.iter().map(at).collect()];
        CpuProfile { vcpus, tokens: vec![CONTEXT_TOKENS], seconds }
    }

    /// vCPUs from few to all, so close to each other that 1/v is nearly linear between them.
    fn columns(&self) -> Vec<f64> {
        let least = LEAST_VCPUS.min(self.vcpus / 2.0);
        let ratio = self.vcpus / least;
        let point = |step: u32| least * ratio.powf(f64::from(step) / f64::from(VCPU_POINTS - 1));
        (0..VCPU_POINTS).map(point).collect()
    }
}

/// What some GPUs of a node do together.
struct Gpus {
    read: f64,
    operations: f64,
    copy: f64,
}

impl Gpus {
    fn of(node: &ListedNode, count: u32) -> Self {
        let memory = node.gpu_memory_gb.unwrap_or(0.0);
        let derived = DERIVED.iter().find(|(most, _, _)| memory <= *most).unwrap_or(&DERIVED[0]);
        let count = f64::from(count);
        let wide = memory >= WIDE_COPY_FROM_GB;
        Self {
            read: count * node.gpu_bandwidth_gbs.unwrap_or(derived.1) * 1e9 * BANDWIDTH_REACHED,
            operations: count * node.gpu_teraflops.unwrap_or(derived.2) * 1e12 * OPERATIONS_REACHED,
            copy: count * if wide { WIDE_COPY_BYTES_PER_SECOND } else { GPU_COPY_BYTES_PER_SECOND },
        }
    }

    fn seconds(&self, bytes: f64, parameters: f64, tokens: f64) -> f64 {
        (bytes / self.read).max(2.0 * parameters * tokens / self.operations)
    }

    fn times(&self, weights: &ResidentWeights, profile: Option<&Profile>) -> GpuTimes {
        let launches = weights.layers * GPU_LAYER_SECONDS;
        let read = weights.rest_bytes / self.read;
        let expert = |tokens: &f64| {
            GPU_EXPERT_SECONDS + self.seconds(weights.expert_bytes, weights.expert_parameters, *tokens)
        };
        let of_node = GpuTimes {
            rest_prefill_seconds: Affine {
                base: launches + read,
                per_token: 2.0 * weights.rest_parameters / self.operations,
            },
            rest_decode_seconds: launches + self.seconds(weights.rest_bytes, weights.rest_parameters, 1.0),
            context_seconds_per_token: weights.kv_bytes_per_token / self.read,
            swap_seconds: Affine {
                base: GPU_COPY_SECONDS,
                per_token: weights.token_bytes / GPU_COPY_BYTES_PER_SECOND,
            },
            expert_seconds: GpuProfile {
                tokens: TOKENS.to_vec(),
                seconds: TOKENS.iter().map(expert).collect(),
            },
            host_bytes_per_second: self.copy,
        };
        let Some(device) = profile.and_then(|profile| profile.device) else { return of_node };
        let stated = profile.and_then(|profile| profile.gpu_expert_seconds.clone());
        GpuTimes {
            rest_prefill_seconds: device.prefill_seconds,
            rest_decode_seconds: device.decode_seconds,
            context_seconds_per_token: device.context_seconds_per_token,
            swap_seconds: device.swap_seconds,
            expert_seconds: stated.unwrap_or(of_node.expert_seconds),
            ..of_node
        }
    }
}
