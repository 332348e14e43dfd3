//! Constants of the time model of nodes. A node list may replace each of them.
//!
//! A decode step reads weights, keys and values from memory, and a prefill multiplies with them. Both take the longer of
//! reading at a share of the specified bandwidth and computing at a share of the specified operations per second, plus a
//! fixed time per layer: kernel launches on GPUs, thread synchronization on CPUs. GPUs that compute a layer together also
//! exchange hidden states twice per layer.
//!
//! Defaults are calibrated on the published measurements in `tests/fixtures/measurements.json`
//! (`tests/it/published.rs` compares).

use crate::error::NodesError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Figures of the time model. Absent ones are those of the list, else [`Timing::default`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeTiming {
    /// Source of these figures, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Share of the specified memory bandwidth that decode steps reach on one CPU socket. Where absent, 0.7 up to 100 GB/s
    /// (two channels, few cores), 0.5 from 200 GB/s on (many channels, several domains of memory), and between them on the
    /// line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
    pub cpu_bandwidth_share: Option<f64>,
    /// Bandwidth of two sockets over that of one: threads read weights from the other socket's memory, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 2.0), extend("exclusiveMinimum" = 0))]
    pub cpu_second_socket: Option<f64>,
    /// GB per second that one vCPU reads at most.
    #[serde(rename = "cpuGBsPerVcpu", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 10000.0), extend("exclusiveMinimum" = 0))]
    pub cpu_gbs_per_vcpu: Option<f64>,
    /// 10^9 operations per second of each vCPU in a prefill.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1000000.0), extend("exclusiveMinimum" = 0))]
    pub cpu_gigaflops_per_vcpu: Option<f64>,
    /// Microseconds for each layer on CPUs besides reading and computing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1000000.0))]
    pub cpu_layer_microseconds: Option<f64>,
    /// Share of the specified bandwidth that GPUs reach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
    pub gpu_bandwidth_share: Option<f64>,
    /// Share of the specified operations that GPUs reach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
    pub gpu_arithmetic_share: Option<f64>,
    /// Microseconds for each layer on GPUs besides reading and computing: launches of kernels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1000000.0))]
    pub gpu_layer_microseconds: Option<f64>,
    /// Microseconds that each further request adds to a layer of a decode step, besides reading and computing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1000000.0))]
    pub gpu_row_microseconds: Option<f64>,
    /// Microseconds of an exchange between GPUs that compute a layer together, twice in each layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1000000.0))]
    pub gpu_exchange_microseconds: Option<f64>,
    /// GB per second from main memory to each GPU.
    #[serde(rename = "hostToGpuGBs", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 10000.0), extend("exclusiveMinimum" = 0))]
    pub host_to_gpu_gbs: Option<f64>,
    /// Microseconds of handing hidden states from a GPU to the host or back, besides moving them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1000000.0))]
    pub swap_microseconds: Option<f64>,
}

/// Constants of the time model for one node, in seconds, bytes and operations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Timing {
    /// Share of the specified memory bandwidth that decode steps reach on one CPU socket; if `None`, it depends on that
    /// bandwidth.
    pub(crate) cpu_bandwidth_share: Option<f64>,
    /// Bandwidth of two sockets over that of one.
    pub(crate) cpu_second_socket: f64,
    /// Bytes per second that one vCPU reads at most.
    pub(crate) cpu_read_per_vcpu: f64,
    /// Operations per second of one vCPU in a prefill.
    pub(crate) cpu_operations_per_vcpu: f64,
    /// Seconds per layer on CPUs besides reading and computing.
    pub(crate) cpu_layer_seconds: f64,
    /// Share of the specified bandwidth that GPUs reach.
    pub(crate) gpu_bandwidth_share: f64,
    /// Share of the specified operations per second that GPUs reach.
    pub(crate) gpu_arithmetic_share: f64,
    /// Seconds per layer on GPUs besides reading and computing.
    pub(crate) gpu_layer_seconds: f64,
    /// Seconds that each further request adds to a layer of a decode step.
    pub(crate) gpu_row_seconds: f64,
    /// Seconds of one exchange among GPUs; if `None`, it depends on their link.
    pub(crate) gpu_exchange_seconds: Option<f64>,
    /// Bytes per second from main memory to each GPU; if `None`, they depend on the GPU's memory.
    pub(crate) host_to_gpu: Option<f64>,
    /// Seconds of a move between GPU and host besides its bytes.
    pub(crate) swap_seconds: f64,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            cpu_bandwidth_share: None,
            cpu_second_socket: 1.1,
            cpu_read_per_vcpu: 1e10,
            cpu_operations_per_vcpu: 5e10,
            cpu_layer_seconds: 6e-5,
            gpu_bandwidth_share: 0.7,
            gpu_arithmetic_share: 0.25,
            gpu_layer_seconds: 9e-5,
            gpu_row_seconds: 8e-7,
            gpu_exchange_seconds: None,
            host_to_gpu: None,
            swap_seconds: 3e-5,
        }
    }
}

impl NodeTiming {
    /// Returns true if no figure is stated.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Lists the figures: name, value if stated, exclusive lower bound (-1 if 0 is valid), and upper bound.
    fn figures(&self) -> [(&'static str, Option<f64>, f64, f64); 12] {
        [
            ("cpuBandwidthShare", self.cpu_bandwidth_share, 0.0, 1.0),
            ("cpuSecondSocket", self.cpu_second_socket, 0.0, 2.0),
            ("cpuGBsPerVcpu", self.cpu_gbs_per_vcpu, 0.0, 1e4),
            ("cpuGigaflopsPerVcpu", self.cpu_gigaflops_per_vcpu, 0.0, 1e6),
            ("cpuLayerMicroseconds", self.cpu_layer_microseconds, -1.0, 1e6),
            ("gpuBandwidthShare", self.gpu_bandwidth_share, 0.0, 1.0),
            ("gpuArithmeticShare", self.gpu_arithmetic_share, 0.0, 1.0),
            ("gpuLayerMicroseconds", self.gpu_layer_microseconds, -1.0, 1e6),
            ("gpuRowMicroseconds", self.gpu_row_microseconds, -1.0, 1e6),
            ("gpuExchangeMicroseconds", self.gpu_exchange_microseconds, -1.0, 1e6),
            ("hostToGpuGBs", self.host_to_gpu_gbs, 0.0, 1e4),
            ("swapMicroseconds", self.swap_microseconds, -1.0, 1e6),
        ]
    }

    /// Checks that the stated figures are within their bounds; `place` is the path of this object in error messages.
    pub(crate) fn check(&self, place: &str) -> Result<(), NodesError> {
        for (name, stated, above, most) in self.figures() {
            let Some(value) = stated else { continue };
            // Only times may be 0.
            let is_valid =
                if above < 0.0 { (0.0..=most).contains(&value) } else { value > 0.0 && value <= most };
            if !is_valid {
                let least = if above < 0.0 { "0" } else { "above 0" };
                let message = format!("is {value}, expected {least} to {most}");
                return Err(NodesError { field: format!("{place}.{name}"), message });
            }
        }
        Ok(())
    }
}

impl Timing {
    /// Returns the constants of a node: its own, otherwise those of its list, otherwise the defaults.
    pub(crate) fn of(node: &NodeTiming, list: &NodeTiming) -> Self {
        let default = Self::default();
        let stated = |of: fn(&NodeTiming) -> Option<f64>, unit: f64| {
            of(node).or_else(|| of(list)).map(|value| value * unit)
        };
        Self {
            cpu_bandwidth_share: stated(|timing| timing.cpu_bandwidth_share, 1.0),
            cpu_second_socket: stated(|timing| timing.cpu_second_socket, 1.0)
                .unwrap_or(default.cpu_second_socket),
            cpu_read_per_vcpu: stated(|timing| timing.cpu_gbs_per_vcpu, 1e9)
                .unwrap_or(default.cpu_read_per_vcpu),
            cpu_operations_per_vcpu: stated(|timing| timing.cpu_gigaflops_per_vcpu, 1e9)
                .unwrap_or(default.cpu_operations_per_vcpu),
            cpu_layer_seconds: stated(|timing| timing.cpu_layer_microseconds, 1e-6)
                .unwrap_or(default.cpu_layer_seconds),
            gpu_bandwidth_share: stated(|timing| timing.gpu_bandwidth_share, 1.0)
                .unwrap_or(default.gpu_bandwidth_share),
            gpu_arithmetic_share: stated(|timing| timing.gpu_arithmetic_share, 1.0)
                .unwrap_or(default.gpu_arithmetic_share),
            gpu_layer_seconds: stated(|timing| timing.gpu_layer_microseconds, 1e-6)
                .unwrap_or(default.gpu_layer_seconds),
            gpu_row_seconds: stated(|timing| timing.gpu_row_microseconds, 1e-6)
                .unwrap_or(default.gpu_row_seconds),
            gpu_exchange_seconds: stated(|timing| timing.gpu_exchange_microseconds, 1e-6),
            host_to_gpu: stated(|timing| timing.host_to_gpu_gbs, 1e9),
            swap_seconds: stated(|timing| timing.swap_microseconds, 1e-6).unwrap_or(default.swap_seconds),
        }
    }
}
