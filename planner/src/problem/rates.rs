//! What memory costs per second.

use crate::problem::sizes::GB;
use crate::problem::{Device, Pricing};

impl Pricing {
    /// Memory that brings one vCPU, where functions are sold by their memory.
    #[must_use]
    pub fn vcpu_bytes(&self) -> f64 {
        self.memory_per_vcpu_bytes.unwrap_or(GB)
    }

    /// Dollars per GB-second of memory with the vCPUs that it brings.
    pub(crate) fn coupled_rate(&self) -> f64 {
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
    pub(crate) fn device_rate(&self, device: Device, bytes: f64) -> f64 {
        match device {
            Device::Gpu => self.gpu_rate(bytes),
            Device::Cpu => self.memory_per_gb_second.unwrap_or(self.cpu_per_gb_second) * bytes / GB,
        }
    }

    /// Dollars per second of `bytes` on GPUs: by the GB, or by the whole GPU.
    pub(crate) fn gpu_rate(&self, bytes: f64) -> f64 {
        match (self.gpu_bytes_each, self.gpu_per_second_each) {
            (Some(each), Some(price)) => (bytes / each).ceil() * price,
            _ => self.gpu_per_gb_second.unwrap_or_else(|| self.coupled_rate()) * bytes / GB,
        }
    }

    /// Whether GPU memory has a price of its own.
    #[must_use]
    pub fn has_gpu(&self) -> bool {
        self.gpu_per_gb_second.is_some() || self.gpu_bytes_each.is_some()
    }
}
