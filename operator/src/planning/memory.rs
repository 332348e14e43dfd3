//! Memory of a main function besides weights.

use remoe_api::{ComputeDtype, Device, WorkloadSpec};
use remoe_model::Inspection;
use remoe_planner::PAGE_POSITIONS;

/// Maximum bytes of the fallback cache. It has room for the experts of one layer, for calls that no remote function
/// answers.
const MAX_FALLBACK_BYTES: u64 = 1_000_000_000;

/// Memory of a main function besides experts, non-expert weights and runtime, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MainMemory {
    /// Fallback cache, for experts whose remote function does not answer.
    pub(super) fallback_bytes: u64,
    /// KV cache for the largest request, or for all concurrent typical ones, in whole pages.
    pub(super) kv_cache_bytes: u64,
    /// Unfilled bytes of KV-cache pages; the planner counts the filled ones.
    pub(super) unfilled_bytes: u64,
}

impl MainMemory {
    pub(super) fn new(
        model: &Inspection,
        dtype: ComputeDtype,
        device: Device,
        workload: &WorkloadSpec,
    ) -> Self {
        let layer = model.resident_expert_bytes(dtype.name()).saturating_mul(model.experts as u64);
        let tokens = |input: u32, output: u32| u64::from(input) + u64::from(output);
        let largest = tokens(workload.max_input_tokens, workload.max_output_tokens);
        let typical = tokens(workload.typical_input_tokens, workload.typical_output_tokens);
        let kv = model.resident_kv(dtype.name());
        let cache_bytes = kv.of(largest).max(kv.of(typical).saturating_mul(workload.concurrency.into()));
        // Unfilled part of each request's last page.
        let unfilled = u64::from(PAGE_POSITIONS - 1)
            .saturating_mul(workload.concurrency.into())
            .saturating_mul(kv.all_bytes_per_token());
        Self {
            fallback_bytes: layer.min(MAX_FALLBACK_BYTES),
            kv_cache_bytes: cache_bytes.saturating_add(unfilled),
            unfilled_bytes: match device {
                Device::Cpu => unfilled,
                // The KV cache is in GPU memory.
                Device::Cuda => 0,
            },
        }
    }
}
