//! One Mixture-of-Experts layer: sizes and times.

use super::bounds::{LARGEST, MAX_POINTS, MAX_TOKENS, SMALLEST};
use super::check::MAX_EXPERTS;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// KV cache that holds some tokens of a request at a time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WindowedCache {
    /// Bytes per token.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub bytes_per_token: f64,
    /// Most tokens of a request that are held at a time.
    #[schemars(range(min = 0.0, max = MAX_TOKENS))]
    pub most_tokens: f64,
}

/// One Mixture-of-Experts layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// Number of routed experts (K).
    #[schemars(range(min = 1, max = MAX_EXPERTS))]
    pub experts: u32,
    /// Number of experts per token (top-k), at most `experts`.
    #[schemars(range(min = 1, max = MAX_EXPERTS))]
    pub top_k: u32,
    /// Bytes of one routed expert.
    #[schemars(range(min = SMALLEST, max = LARGEST))]
    pub expert_bytes: f64,
    /// Bytes of everything else in the layer, shared experts included.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub nonexpert_bytes: f64,
    /// KV cache bytes per token.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub kv_bytes_per_token: f64,
    /// KV cache of layers that release tokens behind a window, beside `kv_bytes_per_token`; none where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_windowed: Option<WindowedCache>,
    /// Prefill seconds of the non-expert part on the device, over tokens.
    pub nonexpert_prefill_seconds: Affine,
    /// Seconds of one decode step of the non-expert part on the device.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub nonexpert_decode_seconds: f64,
    /// Seconds of one expert on CPUs, in the main function; `tokens` starts at 1.
    pub expert_seconds: CpuProfile,
    /// Seconds of one expert in a remote function, where that differs: other machines, or a CPU quota
    /// that idle functions save up. `expert_seconds` where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_expert_seconds: Option<CpuProfile>,
    /// Seconds of one expert on the GPU; two baselines need it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_expert_seconds: Option<GpuProfile>,
    /// Seconds of the non-expert part on CPUs; one baseline needs it, and the device `cpu`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_nonexpert_seconds: Option<CpuProfile>,
    /// Seconds that attention to the context adds to a decode step on CPUs for each request in it, over tokens of context.
    /// Decode steps of `cpu_nonexpert_seconds` are those without context then; where absent, those of any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_context_seconds: Option<CpuProfile>,
    /// Seconds per token of context that attention adds to a decode step on the device, beside
    /// `nonexpert_decode_seconds`.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub context_seconds_per_token: f64,
}

pub(super) fn is_zero(seconds: &f64) -> bool {
    *seconds == 0.0
}

/// `base + per_token * tokens`, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Affine {
    /// Seconds whatever the number of tokens.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub base: f64,
    /// Seconds per token.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub per_token: f64,
}

impl Affine {
    /// Seconds for `tokens`.
    #[must_use]
    pub fn at(self, tokens: f64) -> f64 {
        self.base + self.per_token * tokens
    }

    /// Returns what takes `factor` times as long.
    #[must_use]
    pub fn scaled(self, factor: f64) -> Self {
        Self { base: self.base * factor, per_token: self.per_token * factor }
    }
}

/// Measured seconds over token counts and vCPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CpuProfile {
    /// Numbers of vCPUs, ascending.
    #[schemars(length(min = 1, max = MAX_POINTS), inner(range(min = SMALLEST, max = MAX_TOKENS)))]
    pub vcpus: Vec<f64>,
    /// Token counts, ascending; an expert's start at 1.
    #[schemars(length(min = 1, max = MAX_POINTS), inner(range(min = SMALLEST, max = MAX_TOKENS)))]
    pub tokens: Vec<f64>,
    /// Seconds, `[token][vcpu]`.
    #[schemars(length(min = 1, max = MAX_POINTS))]
    #[schemars(inner(length(min = 1, max = MAX_POINTS), inner(range(min = 0.0, max = LARGEST))))]
    pub seconds: Vec<Vec<f64>>,
}

/// Measured seconds over token counts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GpuProfile {
    /// Token counts, ascending.
    #[schemars(length(min = 1, max = MAX_POINTS), inner(range(min = SMALLEST, max = MAX_TOKENS)))]
    pub tokens: Vec<f64>,
    /// Seconds, `[token]`.
    #[schemars(length(min = 1, max = MAX_POINTS), inner(range(min = 0.0, max = LARGEST)))]
    pub seconds: Vec<f64>,
}
