use remoe_api::{ComputeDtype, Device, WorkloadSpec};
use remoe_model::Inspection;
use remoe_planner::PAGE_POSITIONS;

/// The cache for experts that no remote function answers for has room for one layer, up to this.
const MAX_FALLBACK: u64 = 1_000_000_000;

/// Memory of a main function besides experts, non-expert weights and runtime, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MainMemory {
    /// For experts that no remote function answers for.
    pub(super) fallback_bytes: u64,
    /// For keys and values of the largest request, or of all typical ones that run at once, in whole pages.
    pub(super) kv_cache_bytes: u64,
    /// Bytes of the pages that are not filled; the planner counts the keys and values themselves.
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
        let held = kv.of(largest).max(kv.of(typical).saturating_mul(workload.concurrency.into()));
        // Of each request's last page.
        let unfilled = u64::from(PAGE_POSITIONS - 1)
            .saturating_mul(workload.concurrency.into())
            .saturating_mul(kv.all_bytes_per_token());
        Self {
            fallback_bytes: layer.min(MAX_FALLBACK),
            kv_cache_bytes: held.saturating_add(unfilled),
            unfilled_bytes: match device {
                Device::Cpu => unfilled,
                // Keys and values are in the GPU's memory.
                Device::Cuda => 0,
            },
        }
    }
}
