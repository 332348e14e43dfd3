//! Assumed machine, and the profile of a model on it.

use crate::shape::Shape;
use remoe_hardware::{DeviceTimes, Memory, Profile, Start, Starts, Transport};
use remoe_planner::{Affine, CpuProfile, GpuProfile};
use serde::Serialize;

/// Throughputs and overheads of an assumed machine.
///
/// Times follow a roofline model: the slower of reading weights and of computing, plus the overhead of a call.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Machine {
    /// Processors.
    pub cpu: Cpu,
    /// GPU.
    pub gpu: Gpu,
    /// Bytes per second between main and remote functions.
    pub network_bytes_per_second: f64,
    /// One invocation of a remote function besides transfer and computation, in seconds.
    pub invoke_seconds: f64,
    /// Start of a container until it can load weights, in seconds.
    pub container_seconds: f64,
    /// Weights that one function loads per second, in bytes.
    pub load_bytes_per_second: f64,
    /// Resident bytes of a main function besides weights.
    pub main_bytes: f64,
    /// Resident bytes of a remote function besides weights.
    pub function_bytes: f64,
}

/// Throughput of vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cpu {
    /// Weights that one vCPU reads per second, in bytes.
    pub bytes_per_second_each: f64,
    /// Weights that all vCPUs of a function together read per second, in bytes.
    pub bytes_per_second_most: f64,
    /// Multiplications and additions of one vCPU per second, each counted.
    pub operations_per_second_each: f64,
    /// Scaling of one expert over vCPUs.
    pub scaling: CpuScaling,
}

/// Scaling of the time of one expert over vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuScaling {
    /// All vCPUs of a function make an expert faster, up to the memory bandwidth: kernels split one product over output
    /// columns, as Remoe's kernels do.
    Wide,
    /// Two vCPUs read the weights of an expert; more make only its computation faster.
    ///
    /// The Remoe paper fits exp(-2.4363 y) to an expert of DeepSeek-V2-Lite and exp(-11.8665 y) to one of GPT2-moe over y
    /// vCPUs (figure 6): at 2 vCPUs at most 0.8 % of the decay is left.
    Narrow,
}

impl CpuScaling {
    /// Both scalings.
    pub const ALL: [Self; 2] = [Self::Wide, Self::Narrow];

    /// Returns the name in tables and file names.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Wide => "wide",
            Self::Narrow => "narrow",
        }
    }

    /// Returns a short description.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Wide => "CPUs on which one expert uses all vCPUs",
            Self::Narrow => "CPUs on which reading an expert uses 2 vCPUs at most",
        }
    }

    fn useful_vcpus(self) -> f64 {
        match self {
            Self::Wide => f64::INFINITY,
            Self::Narrow => 2.0,
        }
    }
}

/// Throughputs and overheads of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Gpu {
    /// Weights that it reads per second, in bytes.
    pub bytes_per_second: f64,
    /// Multiplications and additions per second, each counted.
    pub operations_per_second: f64,
    /// Seconds that launching the operators of one layer without routed experts takes.
    pub layer_seconds: f64,
    /// Seconds that launching the operators of one expert takes.
    pub expert_seconds: f64,
    /// Bytes per second from or to the host.
    pub host_bytes_per_second: f64,
    /// One move from or to the host besides its bytes, in seconds.
    pub host_seconds: f64,
}

impl Cpu {
    /// Returns the seconds in which `vcpus` multiply `tokens` rows with `bytes` of weights of `element_bytes` each.
    fn seconds(self, bytes: f64, element_bytes: f64, tokens: f64, vcpus: f64) -> f64 {
        let reading = vcpus.min(self.scaling.useful_vcpus());
        let read = bytes / (self.bytes_per_second_each * reading).min(self.bytes_per_second_most);
        let operations = 2.0 * bytes / element_bytes * tokens;
        read.max(operations / (self.operations_per_second_each * vcpus))
    }
}

impl Gpu {
    fn seconds(self, bytes: f64, element_bytes: f64, tokens: f64) -> f64 {
        let operations = 2.0 * bytes / element_bytes * tokens;
        (bytes / self.bytes_per_second).max(operations / self.operations_per_second)
    }
}

impl Machine {
    /// Returns the server of the Remoe paper (section V-A: two Intel Xeon Gold 6348, NVIDIA A100 with 80 GB), from data
    /// sheets:
    ///
    /// - a vCPU is a hardware thread; a function keeps to one socket, 28 cores with eight channels of
    ///   DDR4-3200 (204.8 GB/s, three quarters of it reached) and 64 float32 operations a cycle and
    ///   core at 2 GHz, half of it reached and shared by two threads;
    /// - the GPU reads 1,935 GB/s (70 % reached) and computes 312 Tera-operations in bfloat16
    ///   (40 % reached); an operator takes 10 us to launch, 25 of them a layer without routed experts,
    ///   5 an expert; PCIe 4.0 x16 moves 25 GB/s;
    /// - functions talk over 10 Gbit/s with 1 ms a call, start in 3 s and load 1 GB/s.
    #[must_use]
    pub fn reference(scaling: CpuScaling) -> Self {
        Self {
            cpu: Cpu {
                bytes_per_second_each: 8e9,
                bytes_per_second_most: 0.75 * 204.8e9,
                operations_per_second_each: 0.5 * 64.0 * 2e9 / 2.0,
                scaling,
            },
            gpu: Gpu {
                bytes_per_second: 0.7 * 1935e9,
                operations_per_second: 0.4 * 312e12,
                layer_seconds: 250e-6,
                expert_seconds: 50e-6,
                host_bytes_per_second: 25e9,
                host_seconds: 20e-6,
            },
            network_bytes_per_second: 1.25e9,
            invoke_seconds: 1e-3,
            container_seconds: 3.0,
            load_bytes_per_second: 1e9,
            main_bytes: 300e6,
            function_bytes: 30e6,
        }
    }

    /// Returns the profile of `shape` on this machine, in its own dtype.
    #[must_use]
    pub fn profile(&self, shape: &Shape) -> Profile {
        let facts = &shape.facts;
        let start = Start {
            process_seconds: self.container_seconds,
            load_bytes_per_second: self.load_bytes_per_second,
        };
        Profile {
            expert_seconds: self.on_cpus(facts.expert_bytes as f64, shape.element_bytes()),
            remote_expert_seconds: None,
            nonexpert_seconds: self.on_cpus(multiplied_bytes(shape), shape.element_bytes()),
            // The paper has one time of a decode step, whatever its context.
            context_seconds: None,
            device: Some(self.device(shape)),
            transport: Transport {
                over: "assumed".to_owned(),
                bytes_per_second: self.network_bytes_per_second,
                invoke_seconds: self.invoke_seconds,
                send_seconds: 0.0,
                main_cpu_seconds: 0.0,
                function_cpu_seconds: 0.0,
            },
            starts: Starts { main: start, remote: start },
            memory: Memory { main_bytes: self.main_bytes, function_bytes: self.function_bytes },
            ..Profile::prior(facts, &facts.dtype)
        }
    }

    /// Returns the times of the non-expert part on this machine's GPU.
    #[must_use]
    pub fn device(&self, shape: &Shape) -> DeviceTimes {
        let (gpu, element_bytes) = (self.gpu, shape.element_bytes());
        let bytes = multiplied_bytes(shape);
        let launches = shape.facts.layers as f64 * gpu.layer_seconds;
        DeviceTimes {
            prefill_seconds: Affine {
                base: launches + bytes / gpu.bytes_per_second,
                per_token: 2.0 * bytes / element_bytes / gpu.operations_per_second,
            },
            decode_seconds: launches + gpu.seconds(bytes, element_bytes, 1.0),
            context_seconds_per_token: 0.0,
            swap_seconds: Affine {
                base: gpu.host_seconds,
                per_token: shape.facts.token_bytes as f64 / gpu.host_bytes_per_second,
            },
            assumed: false,
        }
    }

    /// Returns the seconds of one expert of `shape` on this machine's GPU.
    #[must_use]
    pub fn gpu_expert_seconds(&self, shape: &Shape) -> GpuProfile {
        let bytes = shape.facts.expert_bytes as f64;
        let seconds =
            |tokens: &f64| self.gpu.expert_seconds + self.gpu.seconds(bytes, shape.element_bytes(), *tokens);
        let tokens = token_counts();
        GpuProfile { seconds: tokens.iter().map(seconds).collect(), tokens }
    }

    fn on_cpus(&self, bytes: f64, element_bytes: f64) -> CpuProfile {
        let vcpus = vcpus();
        let tokens = token_counts();
        let row = |tokens: &f64| {
            vcpus.iter().map(|vcpus| self.cpu.seconds(bytes, element_bytes, *tokens, *vcpus)).collect()
        };
        CpuProfile { seconds: tokens.iter().map(row).collect(), vcpus, tokens }
    }
}

/// Returns the bytes of the non-expert weights that every token is multiplied with.
///
/// The embedding is looked up; the head, which has its size, is multiplied.
fn multiplied_bytes(shape: &Shape) -> f64 {
    let facts = &shape.facts;
    let layers: u64 = facts.non_expert_layer_bytes.iter().sum();
    layers as f64 + facts.vocab_size as f64 * facts.token_bytes as f64
}

/// Returns grid points from 0.1 to 112 vCPUs, close enough that 1/v is nearly linear between two of them.
fn vcpus() -> Vec<f64> {
    const FIRST: f64 = 0.1;
    const LAST: f64 = 112.0;
    const STEPS: u32 = 39;
    let ratio = LAST / FIRST;
    let mut vcpus: Vec<f64> =
        (0..=STEPS).map(|step| FIRST * ratio.powf(f64::from(step) / f64::from(STEPS))).collect();
    // The slope changes at 2 vCPUs, where more of them stop to help.
    vcpus.push(2.0);
    vcpus.sort_by(f64::total_cmp);
    vcpus
}

fn token_counts() -> Vec<f64> {
    (0..=12).map(|power| f64::from(1 << power)).collect()
}
