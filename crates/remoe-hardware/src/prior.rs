//! A profile without measurements, for the first plan on a machine that was not measured.

use crate::function_memory;
use crate::profile::{
    CpuLimit, DeviceTimes, Kernels, Machine, Made, Memory, ModelId, Origin, Profile, Transport, VERSION,
};
use remoe_model::Inspection;
use remoe_planner::{Affine, CpuProfile, GpuProfile, Start, Starts};

/// Weights that one vCPU reads per second. Half of what one core of a server of the last ten years
/// reads.
pub(crate) const READ_BYTES_PER_SECOND: f64 = 4e9;
/// Multiplications and additions that one vCPU makes per second, each counted: AVX2 at a third of its
/// peak.
pub(crate) const OPERATIONS_PER_SECOND: f64 = 2e10;
/// No more vCPUs help: memory bandwidth of a socket is shared.
pub(crate) const USEFUL_VCPUS: f64 = 8.0;
/// A cluster network of 10 Gbit/s, half of it.
const NETWORK_BYTES_PER_SECOND: f64 = 6e8;
/// One call over a cluster network with everything around it.
const INVOKE_SECONDS: f64 = 1e-3;
/// Handing a layer's messages to the kernel.
const SEND_SECONDS: f64 = 1e-4;
/// Sending a message through the kernel and taking another, on either side.
const CALL_CPU_SECONDS: f64 = 1e-4;
/// A container from image to process, with an image that is on the node.
const PROCESS_SECONDS: f64 = 3.0;
/// Weights at rest from a network volume.
const LOAD_BYTES_PER_SECOND: f64 = 2e8;
/// Tokenizer, buffers, code: 2e7 with the demo model, more with large vocabularies and wide layers.
const MAIN_BYTES: f64 = 1.5e8;
/// LibTorch and CUDA beside them, where a GPU computes: 1.2 GB from the first use of CUDA (pytorch issue 106511, 2023),
/// 250 MB of LibTorch and 50 MB of pinned buffers. If the driver loads kernels lazily, as it does since CUDA 12.2, CUDA
/// takes less (0.1 GB for one tensor in pytorch issue 113326). If it loads all of them, it takes 2.4 GB (pytorch issue
/// 70416).
const CUDA_PROCESS_BYTES: f64 = 1.5e9;
/// Bytes that a GPU reads from its memory per second. Half of what an NVIDIA T4 is specified for
/// (320 GB/s), the slowest one that clouds rent out.
const GPU_READ_BYTES_PER_SECOND: f64 = 1.6e11;
/// Operations that a GPU makes per second: half of a T4's peak in float32 (8.1e12), whatever the dtype.
const GPU_OPERATIONS_PER_SECOND: f64 = 4e12;
/// Starting the some 30 kernels of one layer's non-expert part, 10 us each.
pub(crate) const GPU_LAYER_SECONDS: f64 = 3e-4;
/// Starting the three kernels of one expert, 10 us each.
pub(crate) const GPU_EXPERT_SECONDS: f64 = 3e-5;
/// One copy between GPU and host, with the wait for it.
pub(crate) const GPU_COPY_SECONDS: f64 = 5e-5;
/// PCIe 3.0 with 16 lanes, half of it.
pub(crate) const GPU_COPY_BYTES_PER_SECOND: f64 = 8e9;

const VCPUS: [f64; 6] = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0];
/// Any: the time is in proportion to it.
pub(crate) const CONTEXT_TOKENS: f64 = 1024.0;
const TOKENS: [f64; 5] = [1.0, 16.0, 64.0, 256.0, 1024.0];

impl Profile {
    /// Figures that almost every machine keeps, from the sizes of `model` in `dtype`; its docs name
    /// them. A plan made from it is on the safe side and may cost more than needed.
    #[must_use]
    pub fn prior(model: &Inspection, dtype: &str) -> Self {
        let expert = model.resident_expert_bytes(dtype) as f64;
        // Quantising is not thought to make arithmetic faster.
        let computed = model.resident_bytes(model.decoded().expert_bytes, dtype) as f64;
        let (rest, rest_computed) = non_expert_bytes(model, dtype);
        // What is read is what lies there; starts are by the bytes that come of it.
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
            expert_seconds: table(expert, computed),
            remote_expert_seconds: None,
            nonexpert_seconds: table(rest, rest_computed),
            context_seconds: Some(context(model, dtype)),
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

    /// Returns assumed memory of functions beside weights, in bytes, for a machine without measurements: the main
    /// one's, and a remote one's.
    #[must_use]
    pub fn memory_prior(model: &Inspection, dtype: &str) -> Memory {
        Memory { main_bytes: MAIN_BYTES, function_bytes: function_memory::least_bytes(model, dtype) }
    }

    /// Returns the prior on `machine`, of which only its sizes are known: for as many vCPUs as it has cores, and no more.
    #[must_use]
    pub fn prior_of_machine(model: &Inspection, dtype: &str, machine: Machine) -> Self {
        let prior = match machine.device.as_str() {
            "cpu" => Self::prior(model, dtype),
            _ => Self::prior_on_gpu(model, dtype),
        };
        let cores = f64::from(machine.cores.max(1));
        Self {
            expert_seconds: with_cores(prior.expert_seconds, cores),
            nonexpert_seconds: with_cores(prior.nonexpert_seconds, cores),
            context_seconds: prior.context_seconds.map(|table| with_cores(table, cores)),
            machine: Machine { vcpus_by: CpuLimit::Assumed, ..machine },
            ..prior
        }
    }

    /// As [`Self::prior`], where a GPU computes the non-expert part.
    #[must_use]
    pub fn prior_on_gpu(model: &Inspection, dtype: &str) -> Self {
        let prior = Self::prior(model, dtype);
        let (_, rest) = non_expert_bytes(model, dtype);
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

/// Reading the keys and values of the context; what is computed with them is thought to hide behind that.
fn context(model: &Inspection, dtype: &str) -> CpuProfile {
    let bytes = model.resident_bytes(model.kv_bytes_per_token, dtype) as f64;
    let at = |vcpus: &f64| CONTEXT_TOKENS * bytes / (READ_BYTES_PER_SECOND * vcpus.min(USEFUL_VCPUS));
    CpuProfile {
        vcpus: VCPUS.to_vec(),
        tokens: vec![CONTEXT_TOKENS],
        seconds: vec![VCPUS.iter().map(at).collect()],
    }
}

/// `table` with a column for `cores` vCPUs, of which at most [`USEFUL_VCPUS`] help.
fn with_cores(table: CpuProfile, cores: f64) -> CpuProfile {
    let CpuProfile { mut vcpus, tokens, mut seconds } = table;
    let at = vcpus.partition_point(|known| *known < cores);
    let helps = at > 0 && vcpus.get(at).is_some_and(|next| *next > cores);
    if helps {
        let before = vcpus[at - 1];
        for row in &mut seconds {
            row.insert(at, row[at - 1] * before / cores);
        }
        vcpus.insert(at, cores);
    }
    // A plan for more would start more threads than there are cores.
    let there = vcpus.partition_point(|known| *known <= cores).max(1);
    vcpus.truncate(there);
    seconds.iter_mut().for_each(|row| row.truncate(there));
    CpuProfile { vcpus, tokens, seconds }
}

/// Returns the assumed times of one routed expert on a GPU without stated ones: half of an NVIDIA T4, as everything
/// else that is assumed of GPUs here. A GPU that holds quantised experts reads them quantised, and computes as with
/// others.
pub(crate) fn gpu_expert_seconds(model: &Inspection, dtype: &str) -> GpuProfile {
    let held = model.resident_expert_bytes(dtype) as f64;
    let bytes = model.resident_bytes(model.decoded().expert_bytes, dtype) as f64;
    let at = |tokens: &f64| {
        let (read, computed) = (held / GPU_READ_BYTES_PER_SECOND, bytes * tokens / GPU_OPERATIONS_PER_SECOND);
        GPU_EXPERT_SECONDS + read.max(computed)
    };
    GpuProfile { tokens: TOKENS.to_vec(), seconds: TOKENS.iter().map(at).collect() }
}

/// As they are resident, and as they would be without being quantised.
fn non_expert_bytes(model: &Inspection, dtype: &str) -> (f64, f64) {
    let plain = model.decoded();
    let bytes = plain.non_expert_layer_bytes.iter().sum::<u64>() + plain.outside_bytes;
    (model.resident_non_expert_bytes(dtype) as f64, model.resident_bytes(bytes, dtype) as f64)
}

/// The slower of reading `bytes` of weights and of multiplying with them, which take `computed` bytes where they
/// are bfloat16 or float32: an operation counts two bytes of weight, which is on the slow side for float32.
fn table(bytes: f64, computed: f64) -> CpuProfile {
    let seconds = TOKENS.iter().map(|tokens| {
        let at = |vcpus: &f64| {
            let vcpus = vcpus.min(USEFUL_VCPUS);
            (bytes / READ_BYTES_PER_SECOND).max(computed * tokens / OPERATIONS_PER_SECOND) / vcpus
        };
        VCPUS.iter().map(at).collect()
    });
    CpuProfile { vcpus: VCPUS.to_vec(), tokens: TOKENS.to_vec(), seconds: seconds.collect() }
}
