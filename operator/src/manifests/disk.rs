//! Limits of ephemeral storage of pods.

use crate::quantity::megabytes;
use k8s_openapi::api::core::v1::PodSpec;
use remoe_api::{ComputeDtype, DenseDtype, ExpertsDtype, MoEDeployment, MoEPlanSpec, PlannedModel};

/// Size of `/tmp`, which programs hardly use.
const TEMPORARY_MB: u32 = 1_000;
/// Size of headers, indexes and tokenizers, which are fetched before any weights.
const HEADER_FILES_MB: u32 = 2_000;
/// Maximum bits of a weight in a checkpoint: float32.
const STORED_BITS: u64 = 32;

/// Disk limits of one pod. They are not part of a function's identity: running pods keep theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DiskLimits {
    cache_mb: u32,
}

impl DiskLimits {
    /// Limits of a pod that reads only headers.
    pub(super) const HEADERS: Self = Self { cache_mb: HEADER_FILES_MB };

    /// Returns the limits of a function of `plan`. Over time it may fetch the whole checkpoint, since plans change
    /// and main functions load experts whose remote function fails. All functions together hold all weights in memory
    /// in the dtypes of the plan; the checkpoint has at most 32 bits per weight.
    pub(super) fn of_plan(owner: &MoEDeployment, plan: &MoEPlanSpec) -> Self {
        let remote = plan.remote.iter().map(|remote| u64::from(remote.memory_mb));
        let groups = plan.groups.iter().map(|group| u64::from(group.memory_mb));
        let (spec, gpu) = (&owner.spec, owner.spec.main.gpu.as_ref());
        let device = gpu.map_or(0, |gpu| {
            u64::from(gpu.count) * u64::from(spec.pricing.gpu_memory_mb.unwrap_or_default())
        });
        let memory = remote.chain(groups).chain([plan.main.limit_mb.into(), device]).sum::<u64>();
        let stored = memory.saturating_mul(STORED_BITS / min_weight_bits(&plan.model));
        Self { cache_mb: u32::try_from(stored).unwrap_or(u32::MAX).saturating_add(HEADER_FILES_MB) }
    }

    /// Limits the emptyDir volumes of `spec`.
    pub(super) fn apply(self, spec: &mut PodSpec) {
        for volume in spec.volumes.iter_mut().flatten() {
            if let Some(folder) = &mut volume.empty_dir {
                let limit =
                    if volume.name == super::pod::CACHE_VOLUME { self.cache_mb } else { TEMPORARY_MB };
                folder.size_limit = Some(megabytes(limit));
            }
        }
    }
}

/// Returns the minimum bits of a weight in memory.
fn min_weight_bits(model: &PlannedModel) -> u64 {
    let experts = model.experts_dtype.map(|dtype| match dtype {
        ExpertsDtype::Int4 | ExpertsDtype::Mxfp4 => 4,
        ExpertsDtype::Int8 | ExpertsDtype::Fp8 => 8,
    });
    let dense = model.dense_dtype.map(|dtype| match dtype {
        DenseDtype::Int4 => 4,
        DenseDtype::Int8 => 8,
        DenseDtype::Bfloat16 => 16,
        DenseDtype::Float32 => 32,
    });
    let compute = match model.dtype {
        ComputeDtype::Bfloat16 => 16,
        ComputeDtype::Float32 => 32,
    };
    // If experts are quantised, other weights may be int8 as well.
    let other_weights = experts.map_or(compute, |_| 8);
    [experts.unwrap_or(compute), dense.unwrap_or(other_weights), compute].into_iter().min().unwrap_or(compute)
}
