//! The prior: an assumed profile for the first plan on a machine without measurements.

use crate::function_memory;
use crate::profile::{
    CpuLimit, DeviceTimes, Kernels, Machine, Made, Memory, ModelId, Origin, Profile, Transport, VERSION,
};
use remoe_model::Inspection;
use remoe_planner::{Affine, CpuProfile, GpuProfile, Start, Starts};

/// Bytes of weights that one vCPU reads per second: half of the rate of one core of a server of the last ten years.
pub(crate) const READ_BYTES_PER_SECOND: f64 = 4e9;
/// Multiplications plus additions of one vCPU per second: a third of the peak of AVX2.
pub(crate) const OPERATIONS_PER_SECOND: f64 = 2e10;
/// vCPUs beyond which times do not decrease, since vCPUs share the memory bandwidth of a socket.
pub(crate) const USEFUL_VCPUS: f64 = 8.0;
/// Bandwidth between functions: half of a cluster network of 10 Gbit/s.
const NETWORK_BYTES_PER_SECOND: f64 = 6e8;
/// Seconds of one call over a cluster network, besides its payload.
const INVOKE_SECONDS: f64 = 1e-3;
/// Seconds of handing the messages of one layer to the operating system.
const SEND_SECONDS: f64 = 1e-4;
/// CPU seconds of sending one message and receiving another, on either side.
const CALL_CPU_SECONDS: f64 = 1e-4;
/// Seconds of starting a container whose image is on the node.
const PROCESS_SECONDS: f64 = 3.0;
/// Bytes of a checkpoint that are read from a network volume per second.
const LOAD_BYTES_PER_SECOND: f64 = 2e8;
/// Bytes of the main function's tokenizer, buffers and code: 2e7 for the demo model, more for large vocabularies and wide
/// layers.
const MAIN_BYTES: f64 = 1.5e8;
/// Host bytes of CUDA and LibTorch in a main function on a GPU: 1.2 GB at the first use of CUDA (pytorch issue 106511,
/// 2023), 250 MB of LibTorch and 50 MB of pinned buffers. If the driver loads kernels lazily, as it does since CUDA 12.2,
/// CUDA takes less (0.1 GB for one tensor in pytorch issue 113326). If it loads all of them, it takes 2.4 GB (pytorch
/// issue 70416).
const CUDA_PROCESS_BYTES: f64 = 1.5e9;
/// Bytes that a GPU reads from its memory per second: half of the specification of an NVIDIA T4 (320 GB/s), the slowest
/// one that clouds offer.
const GPU_READ_BYTES_PER_SECOND: f64 = 1.6e11;
/// Operations of a GPU per second in any dtype: half of the peak of a T4 in float32 (8.1e12).
const GPU_OPERATIONS_PER_SECOND: f64 = 4e12;
/// Seconds of launching about 30 kernels for the non-expert part of one layer, 10 us each.
pub(crate) const GPU_LAYER_SECONDS: f64 = 3e-4;
/// Seconds of launching the three kernels of one expert, 10 us each.
pub(crate) const GPU_EXPERT_SECONDS: f64 = 3e-5;
/// Seconds of one copy between GPU and host besides its bytes.
pub(crate) const GPU_COPY_SECONDS: f64 = 5e-5;
/// Bandwidth between GPU and host: half of PCIe 3.0 with 16 lanes.
pub(crate) const GPU_COPY_BYTES_PER_SECOND: f64 = 8e9;

/// Columns of the tables.
const VCPUS: [f64; 6] = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0];
/// The row of the table of context. One is enough, since the time is proportional to the tokens.
pub(crate) const CONTEXT_TOKENS: f64 = 1024.0;
/// Rows of the tables.
const TOKENS: [f64; 5] = [1.0, 16.0, 64.0, 256.0, 1024.0];

impl Profile {
    /// Returns the prior of `model` in `dtype`: times that almost every machine keeps, from the constants in this module.
    /// Plans made from it keep the latency limits and may cost more than necessary.
    #[must_use]
    pub fn prior(model: &Inspection, dtype: &str) -> Self {
        let expert = model.resident_expert_bytes(dtype) as f64;
        // Quantised weights take less time to read, and as much to compute with.
        let computed = model.resident_bytes(model.decoded().expert_bytes, dtype) as f64;
        let (rest, rest_computed) = nonexpert_bytes(model, dtype);
        // Loading reads the bytes of the checkpoint, and the planner states starts in resident bytes.
        let loading = |resident: f64, at_rest: u64| Start {
            process_seconds: PROCESS_SECONDS,
            load_bytes_per_second: LOAD_BYTES_PER_SECOND * resident / at_rest.max(1) as f64,
        };
        Self {
            version: VERSION,
            origin: Origin::Prior,
            made: Made { date: String::new(), version: env!("CARGO_PKG_VERSION").to_owned() },
            machine: Machine {
                cpu: String::new(),
                cores: 0,
                memory_bytes: 0,
                device: "cpu".to_owned(),
                gpu: None,
                vcpus_by: CpuLimit::Assumed,
            },
            model: ModelId::of(model, dtype),
            kernels: Kernels { numerics_class: String::new(), instruction_path: String::new() },
            expert_seconds: weight_seconds(expert, computed),
            remote_expert_seconds: None,
            nonexpert_seconds: weight_seconds(rest, rest_computed),
            context_seconds: Some(context_seconds(model, dtype)),
            device: None,
            gpu_expert_seconds: None,
            transport: Transport {
                over: "assumed".to_owned(),
                bytes_per_second: NETWORK_BYTES_PER_SECOND,
                invoke_seconds: INVOKE_SECONDS,
                send_seconds: SEND_SECONDS,
                main_cpu_seconds: CALL_CPU_SECONDS,
                function_cpu_seconds: CALL_CPU_SECONDS,
            },
            contention: None,
            starts: Starts {
                main: loading(model.resident_total_bytes(dtype) as f64, model.total_bytes),
                remote: loading(expert, model.expert_bytes),
            },
            memory: Self::memory_prior(model, dtype),
            disturbed: None,
            fit: None,
        }
    }

    /// Returns the assumed memory of functions besides weights, for a machine without measurements.
    #[must_use]
    pub fn memory_prior(model: &Inspection, dtype: &str) -> Memory {
        Memory { main_bytes: MAIN_BYTES, function_bytes: function_memory::required_bytes(model, dtype) }
    }

    /// Returns the prior for `machine`, with times for at most as many vCPUs as it has cores.
    #[must_use]
    pub fn prior_of_machine(model: &Inspection, dtype: &str, machine: Machine) -> Self {
        let prior = match machine.device.as_str() {
            "cpu" => Self::prior(model, dtype),
            _ => Self::prior_on_gpu(model, dtype),
        };
        let cores = f64::from(machine.cores.max(1));
        Self {
            expert_seconds: limited_to_cores(prior.expert_seconds, cores),
            nonexpert_seconds: limited_to_cores(prior.nonexpert_seconds, cores),
            context_seconds: prior.context_seconds.map(|table| limited_to_cores(table, cores)),
            machine: Machine { vcpus_by: CpuLimit::Assumed, ..machine },
            ..prior
        }
    }

    /// Returns the prior of `model` in `dtype` for a main function that computes the non-expert part on a GPU.
    #[must_use]
    pub fn prior_on_gpu(model: &Inspection, dtype: &str) -> Self {
        let prior = Self::prior(model, dtype);
        let (_, rest) = nonexpert_bytes(model, dtype);
        let step = model.layers as f64 * GPU_LAYER_SECONDS + rest / GPU_READ_BYTES_PER_SECOND;
        let token_bytes = model.resident_bytes(model.token_bytes, dtype) as f64;
        let device = DeviceTimes {
            prefill_seconds: Affine { base: step, per_token: rest / GPU_OPERATIONS_PER_SECOND },
            decode_seconds: step,
            context_seconds_per_token: model.resident_bytes(model.kv_bytes_per_token, dtype) as f64
                / GPU_READ_BYTES_PER_SECOND,
            swap_seconds: Affine {
                base: GPU_COPY_SECONDS,
                per_token: token_bytes / GPU_COPY_BYTES_PER_SECOND,
            },
            assumed: true,
        };
        Self {
            machine: Machine { device: "cuda".to_owned(), ..prior.machine },
            device: Some(device),
            memory: Memory { main_bytes: MAIN_BYTES + CUDA_PROCESS_BYTES, ..prior.memory },
            gpu_expert_seconds: Some(gpu_expert_seconds(model, dtype)),
            ..prior
        }
    }
}

/// Returns the seconds of attention to the context on CPUs: those of reading its keys and values, which hide the
/// arithmetic.
fn context_seconds(model: &Inspection, dtype: &str) -> CpuProfile {
    let bytes = model.resident_bytes(model.kv_bytes_per_token, dtype) as f64;
    let at = |vcpus: &f64| CONTEXT_TOKENS * bytes / (READ_BYTES_PER_SECOND * vcpus.min(USEFUL_VCPUS));
    CpuProfile {
        vcpus: VCPUS.to_vec(),
        tokens: vec![CONTEXT_TOKENS],
        seconds: vec![VCPUS.iter().map(at).collect()],
    }
}

/// Returns `table` with columns up to `cores` vCPUs, and one of exactly `cores` if that is up to [`USEFUL_VCPUS`].
fn limited_to_cores(table: CpuProfile, cores: f64) -> CpuProfile {
    let CpuProfile { mut vcpus, tokens, mut seconds } = table;
    let at = vcpus.partition_point(|known| *known < cores);
    let is_new = at > 0 && vcpus.get(at).is_some_and(|next| *next > cores);
    if is_new {
        let before = vcpus[at - 1];
        for row in &mut seconds {
            row.insert(at, row[at - 1] * before / cores);
        }
        vcpus.insert(at, cores);
    }
    // With more vCPUs a function would start more threads than there are cores.
    let kept = vcpus.partition_point(|known| *known <= cores).max(1);
    vcpus.truncate(kept);
    seconds.iter_mut().for_each(|row| row.truncate(kept));
    CpuProfile { vcpus, tokens, seconds }
}

/// Returns the assumed times of one routed expert on a GPU: half of the speed of an NVIDIA T4. A GPU reads quantised
/// experts in their quantised size, and computes as with others.
pub(crate) fn gpu_expert_seconds(model: &Inspection, dtype: &str) -> GpuProfile {
    let held = model.resident_expert_bytes(dtype) as f64;
    let bytes = model.resident_bytes(model.decoded().expert_bytes, dtype) as f64;
    let at = |tokens: &f64| {
        let (read, computed) = (held / GPU_READ_BYTES_PER_SECOND, bytes * tokens / GPU_OPERATIONS_PER_SECOND);
        GPU_EXPERT_SECONDS + read.max(computed)
    };
    GpuProfile { tokens: TOKENS.to_vec(), seconds: TOKENS.iter().map(at).collect() }
}

/// Returns the bytes of all weights but routed experts in memory, and those that they would have without quantisation.
fn nonexpert_bytes(model: &Inspection, dtype: &str) -> (f64, f64) {
    let plain = model.decoded();
    let bytes = plain.non_expert_layer_bytes.iter().sum::<u64>() + plain.outside_bytes;
    (model.resident_non_expert_bytes(dtype) as f64, model.resident_bytes(bytes, dtype) as f64)
}

/// Returns the seconds of computing with weights of `bytes` in memory: the longer of reading them and of the arithmetic.
/// `computed` is their bytes without quantisation. One operation is counted for each of these bytes, which is exact for
/// bfloat16 and an overestimate for float32.
fn weight_seconds(bytes: f64, computed: f64) -> CpuProfile {
    let seconds = TOKENS.iter().map(|tokens| {
        let at = |vcpus: &f64| {
            let vcpus = vcpus.min(USEFUL_VCPUS);
            (bytes / READ_BYTES_PER_SECOND).max(computed * tokens / OPERATIONS_PER_SECOND) / vcpus
        };
        VCPUS.iter().map(at).collect()
    });
    CpuProfile { vcpus: VCPUS.to_vec(), tokens: TOKENS.to_vec(), seconds: seconds.collect() }
}
