//! Times of a model on a node without measurements, from the specification of the node and the time model of
//! [`crate::NodeTiming`].

use crate::node_timing::{NodeTiming, Timing};
use crate::nodes::{Commitment, ListedNode, NodeList};
use crate::prior::{
    CONTEXT_TOKENS, GPU_COPY_BYTES_PER_SECOND, GPU_COPY_SECONDS, GPU_EXPERT_SECONDS, GPU_LAYER_SECONDS,
    READ_BYTES_PER_SECOND, USEFUL_VCPUS,
};
use crate::profile::Profile;
use remoe_model::{Inspection, Outline};
use remoe_planner::{Affine, CpuProfile, GpuGroup, GpuProfile, GpuTimes, NodeShape};

/// Bytes per second and vCPU of a node without a stated bandwidth if all vCPUs read: three quarters of the share of a
/// hardware thread of an Ice Lake server (8 channels of DDR4-3200 for 32 cores with two threads each).
const BYTES_PER_SECOND_PER_VCPU: f64 = 2.4e9;
/// Upper bound of the bytes per second of a node without a stated bandwidth: three quarters of two such sockets.
const MAX_BYTES_PER_SECOND: f64 = 3e11;
/// Specified bytes per second of a slow and of a fast socket, each with the share of them that is reached; the share is
/// interpolated between the two, and constant outside.
const SLOW_SOCKET_SHARE: (f64, f64) = (100e9, 0.7);
const FAST_SOCKET_SHARE: (f64, f64) = (200e9, 0.5);
/// Largest specified bytes per second of one socket (12 channels of DDR5-6400). Nodes above it are taken to have two, unless
/// they state their number.
const MAX_SOCKET_BYTES_PER_SECOND: f64 = 6.2e11;
/// Seconds for which threads wait for each other at the end of an expert.
const CPU_EXPERT_SECONDS: f64 = 2e-6;
/// Bytes per second between host and GPU: three quarters of PCIe 4.0 with 16 lanes for GPUs of 40 GB and more, and of
/// PCIe 3.0 for others.
const WIDE_COPY_BYTES_PER_SECOND: f64 = 2.4e10;
const NARROW_COPY_BYTES_PER_SECOND: f64 = 1.2e10;
const WIDE_COPY_FROM_GB: f64 = 40.0;
/// Memory of a GPU in GB and GPUs of a node from which the GPUs are taken to be linked by NVLink; otherwise by PCIe.
const NVLINK_FROM: (f64, u32) = (40.0, 8);
/// Bytes per second that each GPU sends, and seconds of one exchange.
const NVLINK: (f64, f64) = (3e11, 1.5e-5);
/// As [`NVLINK`], for PCIe.
const PCIE: (f64, f64) = (2e10, 5e-5);
/// Bytes per second of a link from which an exchange takes as long as with NVLink.
const FAST_LINK_BYTES_PER_SECOND: f64 = 1e11;

/// Speeds of GPUs that state none: largest memory in GB, GB per second, and 10^12 operations per second. They are those of
/// the slowest data centre GPU of that size: T4, L4, A40, A100.
const DERIVED_SPEEDS: [(f64, f64, f64); 4] =
    [(16.0, 300.0, 40.0), (24.0, 300.0, 60.0), (48.0, 600.0, 120.0), (f64::INFINITY, 1500.0, 250.0)];

/// Smallest number of vCPUs in a table of a node.
const MIN_VCPUS: f64 = 0.1;
/// Columns of such a table.
const VCPU_POINTS: u32 = 48;
/// Rows of such a table.
const TOKENS: [f64; 8] = [1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16_384.0];

/// Sizes of a model's weights in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResidentWeights {
    /// Bytes of a routed expert.
    pub expert_bytes: f64,
    /// Parameters of a routed expert.
    pub expert_parameters: f64,
    /// Bytes of the weights besides routed experts that each token is multiplied with, as common inference engines hold
    /// them. The embedding is not one of them, since it is looked up.
    pub rest_bytes: f64,
    /// Bytes of these weights as main functions of this project hold them on CPUs.
    pub main_rest_bytes: f64,
    /// Bytes of these weights as main functions of this project hold them on a GPU.
    pub device_rest_bytes: f64,
    /// Parameters of the same weights.
    pub rest_parameters: f64,
    /// Number of layers.
    pub layers: f64,
    /// Bytes of the hidden state of a token.
    pub token_bytes: f64,
    /// Bytes of the keys and values of a token in all layers; a decode step reads those of its context.
    pub kv_bytes_per_token: f64,
}

impl ResidentWeights {
    /// Returns the sizes of a checkpoint's weights in `dtype` (`float32`, or one with two bytes); weights that the
    /// inspection states as quantised keep their quantised size.
    #[must_use]
    pub fn of(model: &Inspection, dtype: &str) -> Self {
        let element = if dtype == "float32" { 4.0 } else { 2.0 };
        let plain = &model.decoded();
        let resident = |bytes: u64| plain.resident_bytes(bytes, dtype) as f64;
        let token_bytes = resident(plain.token_bytes);
        let layers: u64 = plain.non_expert_layer_bytes.iter().sum();
        let parameters = (resident(layers) + plain.vocab_size as f64 * token_bytes) / element;
        // Embedding and head have one size, and only the head is multiplied with.
        let held = model.resident_layer_bytes(dtype).iter().sum::<u64>() as f64;
        let head = model.resident_outside_bytes(dtype) as f64
            * (plain.vocab_size as f64 * token_bytes / resident(plain.outside_bytes).max(1.0)).min(1.0);
        Self {
            expert_bytes: model.resident_expert_bytes(dtype) as f64,
            expert_parameters: resident(plain.expert_bytes) / element,
            rest_bytes: held + head,
            main_rest_bytes: held + head,
            device_rest_bytes: held + head,
            rest_parameters: parameters,
            layers: model.layers as f64,
            token_bytes,
            kv_bytes_per_token: resident(plain.kv_bytes_per_token),
        }
    }

    /// Returns the sizes of the weights of a model of which only the configuration is known, in their stored dtype.
    #[must_use]
    pub fn of_outline(outline: &Outline) -> Self {
        let facts = outline.inspection("");
        let layers: u64 = facts.non_expert_layer_bytes.iter().sum();
        let used = facts.top_k as u64 * facts.moe_layers.len() as u64 * outline.expert_parameters();
        let token_bytes = facts.token_bytes as f64;
        let rest_bytes = layers as f64 + facts.vocab_size as f64 * token_bytes;
        Self {
            expert_bytes: facts.expert_bytes as f64,
            expert_parameters: outline.expert_parameters() as f64,
            rest_bytes,
            main_rest_bytes: rest_bytes,
            device_rest_bytes: rest_bytes,
            rest_parameters: outline.active_parameters().saturating_sub(used) as f64,
            layers: facts.layers as f64,
            token_bytes,
            kv_bytes_per_token: facts.kv_bytes_per_token as f64,
        }
    }
}

/// Returns the shapes of `list` with the times of a model, at the prices of `commitment`. A node with a spot price is
/// listed a second time at that price, with the name `NAME (spot)`.
#[must_use]
pub fn node_shapes(
    list: &NodeList,
    commitment: Commitment,
    weights: &ResidentWeights,
    profile: Option<&Profile>,
) -> Vec<NodeShape> {
    let shapes = list.nodes.iter().flat_map(|node| {
        let shape = node_shape(node, &list.timing, commitment, weights, profile);
        let spot = node.spot_per_hour.map(|per_hour| NodeShape {
            name: format!("{} (spot)", node.name),
            per_hour,
            spot: true,
            ..shape.clone()
        });
        std::iter::once(shape).chain(spot)
    });
    shapes.collect()
}

/// Returns the shape of `node` with the times of a model on it: those of `profile` if there is one, whatever its machine;
/// otherwise times derived from the node's specification and `timing`.
#[must_use]
pub fn node_shape(
    node: &ListedNode,
    timing: &NodeTiming,
    commitment: Commitment,
    weights: &ResidentWeights,
    profile: Option<&Profile>,
) -> NodeShape {
    let timing = Timing::of(&node.timing, timing);
    let cpus = NodeCpus::of(node, &timing);
    let gpus = |count: u32| GpuSet::of(node, count, &timing);
    let sizes = (0..=node.gpus.checked_ilog2().unwrap_or(0)).map(|power| 1 << power).chain([node.gpus]);
    let mut sizes: Vec<u32> = sizes.filter(|size| *size > 0 && node.gpus.is_multiple_of(*size)).collect();
    sizes.dedup();
    NodeShape {
        name: node.name.clone(),
        vcpus: node.vcpus,
        memory_bytes: node.memory_gb * 1e9,
        gpus: node.gpus,
        gpu_bytes: node.gpu_memory_gb.unwrap_or(0.0) * 1e9,
        per_hour: node.dollars_per_hour(commitment),
        spot: node.spot,
        max: node.max,
        expert_seconds: profile.map_or_else(
            || cpus.table(weights.expert_bytes, weights.expert_parameters, CPU_EXPERT_SECONDS),
            |profile| profile.expert_seconds.clone(),
        ),
        rest_seconds: profile.map_or_else(
            || {
                let waits = weights.layers * timing.cpu_layer_seconds;
                cpus.table(weights.main_rest_bytes, weights.rest_parameters, waits)
            },
            |profile| profile.nonexpert_seconds.clone(),
        ),
        context_seconds: profile.map_or_else(
            || Some(cpus.context(weights.kv_bytes_per_token)),
            |profile| profile.context_seconds.clone(),
        ),
        gpu: (node.gpus > 0).then(|| gpus(1).of_main_function(weights, profile)),
        gpu_groups: sizes
            .into_iter()
            .map(|size| GpuGroup { gpus: size, times: gpus(size).of_engines(weights, &timing) })
            .collect(),
    }
}

/// Speeds of the vCPUs of a node.
struct NodeCpus {
    vcpus: f64,
    /// Bytes per second that one vCPU reads while all others read as well.
    read_per_vcpu: f64,
    /// Bytes per second that all vCPUs read together.
    read_together: f64,
    /// Operations per second of one vCPU.
    operations: f64,
}

impl NodeCpus {
    /// Returns the speeds of the vCPUs of `node`: from its stated bandwidth, or derived from the number of vCPUs.
    fn of(node: &ListedNode, timing: &Timing) -> Self {
        let derived = (node.vcpus * BYTES_PER_SECOND_PER_VCPU)
            .max(node.vcpus.min(USEFUL_VCPUS) * READ_BYTES_PER_SECOND);
        let stated = node.memory_bandwidth_gbs.map(|gb| reached_bandwidth(gb * 1e9, node.sockets, timing));
        let read_together = stated.unwrap_or(derived.min(MAX_BYTES_PER_SECOND));
        // A node without a stated bandwidth is taken to be a slow one.
        let read_alone = if stated.is_some() { timing.cpu_read_per_vcpu } else { READ_BYTES_PER_SECOND };
        // Functions on one node read at once, so that each gets its share of the bandwidth.
        let read_per_vcpu = read_alone.min(read_together / node.vcpus);
        Self { vcpus: node.vcpus, read_per_vcpu, read_together, operations: timing.cpu_operations_per_vcpu }
    }

    /// Returns the seconds of computing with `parameters` held in `bytes`: the longer of reading and arithmetic, plus
    /// `fixed`.
    fn table(&self, bytes: f64, parameters: f64, fixed: f64) -> CpuProfile {
        let vcpus = self.columns();
        let row = |tokens: &f64| {
            let at = |vcpus: &f64| {
                let read = bytes / (self.read_per_vcpu * vcpus).min(self.read_together);
                let computed = 2.0 * parameters * tokens / (self.operations * vcpus);
                fixed + read.max(computed)
            };
            vcpus.iter().map(at).collect()
        };
        CpuProfile { seconds: TOKENS.iter().map(row).collect(), vcpus, tokens: TOKENS.to_vec() }
    }

    /// Returns the seconds of attention to the context, which reads `bytes` for each of its tokens.
    fn context(&self, bytes: f64) -> CpuProfile {
        let vcpus = self.columns();
        let at = |vcpus: &f64| CONTEXT_TOKENS * bytes / (self.read_per_vcpu * vcpus).min(self.read_together);
        let seconds = vec![vcpus.iter().map(at).collect()];
        CpuProfile { vcpus, tokens: vec![CONTEXT_TOKENS], seconds }
    }

    /// Returns the columns of a table: vCPUs up to all of the node, in steps so small that 1/v is nearly linear between two.
    fn columns(&self) -> Vec<f64> {
        let least = MIN_VCPUS.min(self.vcpus / 2.0);
        let ratio = self.vcpus / least;
        let point = |step: u32| least * ratio.powf(f64::from(step) / f64::from(VCPU_POINTS - 1));
        (0..VCPU_POINTS).map(point).collect()
    }
}

/// Returns the bytes per second that decode steps reach of `specified`, the bandwidth of all sockets.
fn reached_bandwidth(specified: f64, sockets: Option<u32>, timing: &Timing) -> f64 {
    let sockets =
        f64::from(sockets.unwrap_or(if specified > MAX_SOCKET_BYTES_PER_SECOND { 2 } else { 1 }).max(1));
    let per_socket = specified / sockets;
    let (small, large) = (SLOW_SOCKET_SHARE, FAST_SOCKET_SHARE);
    let part = ((per_socket - small.0) / (large.0 - small.0)).clamp(0.0, 1.0);
    let share = timing.cpu_bandwidth_share.unwrap_or(small.1 + part * (large.1 - small.1));
    let together = if sockets > 1.0 { timing.cpu_second_socket * sockets / 2.0 } else { 1.0 };
    per_socket * share * together
}

/// Speeds of GPUs of a node that compute every layer together.
struct GpuSet {
    /// Bytes per second that they read from their memory.
    read: f64,
    /// Operations per second.
    operations: f64,
    /// Bytes per second between host and GPUs.
    copy: f64,
    /// Seconds of exchanging hidden states, by bytes. In a ring all-reduce each of n GPUs sends 2 (n - 1) / n of its data.
    exchange: Affine,
}

impl GpuSet {
    /// Returns the speeds of `count` GPUs of `node`.
    fn of(node: &ListedNode, count: u32, timing: &Timing) -> Self {
        let memory = node.gpu_memory_gb.unwrap_or(0.0);
        let derived =
            DERIVED_SPEEDS.iter().find(|(most, _, _)| memory <= *most).unwrap_or(&DERIVED_SPEEDS[0]);
        let wide = memory >= WIDE_COPY_FROM_GB;
        let number = f64::from(count);
        let linked = memory >= NVLINK_FROM.0 && node.gpus >= NVLINK_FROM.1;
        let (link, seconds) = match node.gpu_link_gbs {
            Some(gb) => (gb * 1e9, if gb * 1e9 >= FAST_LINK_BYTES_PER_SECOND { NVLINK.1 } else { PCIE.1 }),
            None if linked => NVLINK,
            None => PCIE,
        };
        let copy = if wide { WIDE_COPY_BYTES_PER_SECOND } else { NARROW_COPY_BYTES_PER_SECOND };
        Self {
            read: number * node.gpu_bandwidth_gbs.unwrap_or(derived.1) * 1e9 * timing.gpu_bandwidth_share,
            operations: number * node.gpu_teraflops.unwrap_or(derived.2) * 1e12 * timing.gpu_arithmetic_share,
            copy: number * timing.host_to_gpu.unwrap_or(copy),
            exchange: match count {
                1 => Affine { base: 0.0, per_token: 0.0 },
                _ => Affine {
                    base: timing.gpu_exchange_seconds.unwrap_or(seconds),
                    per_token: 2.0 * (number - 1.0) / number / link,
                },
            },
        }
    }

    /// Returns the seconds of computing `tokens` with `parameters` held in `bytes`: the longer of reading and arithmetic.
    fn seconds(&self, bytes: f64, parameters: f64, tokens: f64) -> f64 {
        (bytes / self.read).max(2.0 * parameters * tokens / self.operations)
    }

    /// Returns the times of common inference engines, which replay recorded launches (CUDA graphs) and compute all experts
    /// of a layer in one launch.
    fn of_engines(&self, weights: &ResidentWeights, timing: &Timing) -> GpuTimes {
        let exchange = Affine {
            base: 2.0 * weights.layers * self.exchange.base,
            per_token: 2.0 * weights.layers * self.exchange.per_token * weights.token_bytes,
        };
        let fixed = weights.layers * timing.gpu_layer_seconds + exchange.base;
        let read = weights.rest_bytes / self.read;
        let per_token = 2.0 * weights.rest_parameters / self.operations + exchange.per_token;
        let expert = |tokens: &f64| self.seconds(weights.expert_bytes, weights.expert_parameters, *tokens);
        GpuTimes {
            rest_prefill_seconds: Affine { base: fixed + read, per_token },
            rest_decode_seconds: fixed + read,
            rest_row_seconds: per_token + weights.layers * timing.gpu_row_seconds,
            context_seconds_per_token: weights.kv_bytes_per_token / self.read,
            swap_seconds: Affine { base: timing.swap_seconds, per_token: weights.token_bytes / self.copy },
            expert_seconds: GpuProfile {
                tokens: TOKENS.to_vec(),
                seconds: TOKENS.iter().map(expert).collect(),
            },
            host_bytes_per_second: self.copy,
        }
    }

    /// Returns the times of a main function of this project, which launches each operation separately: those of `profile`
    /// if it has some.
    fn of_main_function(&self, weights: &ResidentWeights, profile: Option<&Profile>) -> GpuTimes {
        let launches = weights.layers * GPU_LAYER_SECONDS;
        let read = weights.device_rest_bytes / self.read;
        let expert = |tokens: &f64| {
            GPU_EXPERT_SECONDS + self.seconds(weights.expert_bytes, weights.expert_parameters, *tokens)
        };
        let of_node = GpuTimes {
            rest_prefill_seconds: Affine {
                base: launches + read,
                per_token: 2.0 * weights.rest_parameters / self.operations,
            },
            rest_decode_seconds: launches
                + self.seconds(weights.device_rest_bytes, weights.rest_parameters, 1.0),
            rest_row_seconds: 2.0 * weights.rest_parameters / self.operations,
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
            rest_row_seconds: device.prefill_seconds.per_token,
            context_seconds_per_token: device.context_seconds_per_token,
            swap_seconds: device.swap_seconds,
            expert_seconds: stated.unwrap_or(of_node.expert_seconds),
            ..of_node
        }
    }
}
