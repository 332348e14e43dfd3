//! Prices, and what memory costs per second.

use super::bounds::{LARGEST, SMALLEST};
use super::check::MAX_EXPERTS;
use crate::problem::Device;
use crate::problem::sizes::GB;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Prices in dollars.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Pricing {
    /// Dollars for 1 GB (1e9 bytes) of CPU memory for one second, with the vCPU that comes with it. Counts for nothing
    /// beside `cpu_per_core_second` and may be absent then.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub cpu_per_gb_second: f64,
    /// Dollars for 1 GB of CPU memory for one second that brings no vCPU: on device `cpu`, what is there beside the
    /// main function's size. `cpu_per_gb_second` where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = SMALLEST, max = LARGEST))]
    pub memory_per_gb_second: Option<f64>,
    /// Dollars for one vCPU for one second, where vCPUs are sold apart from memory; `cpu_per_gb_second` counts for
    /// nothing then. Needed beside `specs.main_vcpus`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = SMALLEST, max = LARGEST))]
    pub cpu_per_core_second: Option<f64>,
    /// Bytes of memory that bring one vCPU, where they are sold together: 1e9 where absent, 1.769e9 on AWS Lambda.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1.0, max = LARGEST))]
    pub memory_per_vcpu_bytes: Option<f64>,
    /// Dollars for 1 GB of GPU memory for one second; the CPU's price where absent (a cluster without a GPU).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = SMALLEST, max = LARGEST))]
    pub gpu_per_gb_second: Option<f64>,
    /// Bytes of one GPU where GPUs are billed whole; only with `gpu_per_second_each`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1.0, max = LARGEST))]
    pub gpu_bytes_each: Option<f64>,
    /// Dollars for one whole GPU for one second; only with `gpu_bytes_each`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = SMALLEST, max = LARGEST))]
    pub gpu_per_second_each: Option<f64>,
    /// Basis on which remote functions are billed.
    #[serde(default)]
    pub billing: Billing,
    /// Number of main functions that share the remote ones, under reserved billing.
    #[serde(default = "super::one")]
    #[schemars(range(min = 1, max = MAX_EXPERTS))]
    pub main_replicas: u32,
}

/// Basis on which remote functions are billed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Billing {
    /// The seconds in which they work (Remoe paper, equations 8 and 9).
    #[default]
    Invocation,
    /// As long as they exist: a plain cluster.
    Reserved,
}

impl Pricing {
    /// Memory that brings one vCPU, where functions are sold by their memory.
    #[must_use]
    pub fn vcpu_bytes(&self) -> f64 {
        self.memory_per_vcpu_bytes.unwrap_or(GB)
    }

    /// Dollars per GB-second of memory with the vCPUs that it brings.
    pub fn coupled_rate(&self) -> f64 {
        match (self.cpu_per_core_second, self.memory_per_gb_second) {
            (Some(core), Some(memory)) => core * GB / self.vcpu_bytes() + memory,
            _ => self.cpu_per_gb_second,
        }
    }

    /// Dollars per second of a function with `bytes` of memory, and with `vcpus` where they are a decision of their
    /// own.
    #[must_use]
    pub fn function_rate(&self, bytes: f64, vcpus: Option<f64>) -> f64 {
        match (vcpus, self.cpu_per_core_second, self.memory_per_gb_second) {
            (Some(vcpus), Some(core), Some(memory)) => core * vcpus + memory * bytes / GB,
            _ => self.coupled_rate() * bytes / GB,
        }
    }

    /// Dollars per second of `bytes` of everything but experts on `device`. On CPUs they are main memory
    /// beside the size that brings the vCPUs, whatever GPUs cost.
    pub fn device_rate(&self, device: Device, bytes: f64) -> f64 {
        match device {
            Device::Gpu => self.gpu_rate(bytes),
            Device::Cpu => self.memory_per_gb_second.unwrap_or(self.cpu_per_gb_second) * bytes / GB,
        }
    }

    /// Dollars per second of `bytes` on GPUs: by the GB, or by the whole GPU.
    pub fn gpu_rate(&self, bytes: f64) -> f64 {
        match (self.gpu_bytes_each, self.gpu_per_second_each) {
            (Some(each), Some(price)) => (bytes / each).ceil() * price,
            _ => self.gpu_per_gb_second.unwrap_or_else(|| self.coupled_rate()) * bytes / GB,
        }
    }

    /// Reports if GPU memory has a price of its own.
    #[must_use]
    pub fn has_gpu(&self) -> bool {
        self.gpu_per_gb_second.is_some() || self.gpu_bytes_each.is_some()
    }
}
