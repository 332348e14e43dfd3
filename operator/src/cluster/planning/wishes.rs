use super::PlanningError;
use super::memory::MainMemory;
use crate::cluster::api::{MemoryRange, MoEDeploymentSpec, WorkloadSpec, default_concurrency};
use crate::cluster::quantity::MB;
use remoe_model::Inspection;
use remoe_planner::{Limits, Pricing, Request, SizeRange, Slo, Specs};
use remoe_profile::Wishes;
use std::time::Duration;

/// Tokens of the largest request where the spec says nothing and the model's context has room.
const MAX_INPUT: u32 = 4096;
const MAX_OUTPUT: u32 = 1024;
/// A typical request against the largest: 512 and 205 tokens of 4096 and 1024.
const INPUT_SHARE: u32 = 8;
const OUTPUT_SHARE: u32 = 5;

/// Sizes of requests: the spec's, else what the model's context has room for.
///
/// # Errors
/// The largest request does not fit into the model's context.
pub fn workload(spec: &MoEDeploymentSpec, model: &Inspection) -> Result<WorkloadSpec, PlanningError> {
    let context = u32::try_from(model.context_length).unwrap_or(u32::MAX);
    let Some(workload) = spec.workload else {
        let output = MAX_OUTPUT.min(context / 4).max(1);
        let input = MAX_INPUT.min(context.saturating_sub(output)).max(1);
        return Ok(WorkloadSpec {
            max_input_tokens: input,
            max_output_tokens: output,
            typical_input_tokens: input.div_ceil(INPUT_SHARE),
            typical_output_tokens: output.div_ceil(OUTPUT_SHARE),
            concurrency: default_concurrency(),
        });
    };
    let longest = u64::from(workload.max_input_tokens) + u64::from(workload.max_output_tokens);
    if longest > u64::from(context) {
        let message = format!(
            "has requests of up to {longest} tokens (maxInputTokens + maxOutputTokens), the model's context \
             has {context}; lower one of them"
        );
        return Err(PlanningError::Spec { field: "workload".to_owned(), message });
    }
    Ok(workload)
}

pub(super) fn request(workload: &WorkloadSpec) -> Request {
    // The first token comes out of the prefill.
    let steps = |tokens: u32| f64::from(tokens.saturating_sub(1));
    Request {
        input_tokens: f64::from(workload.typical_input_tokens),
        output_tokens: steps(workload.typical_output_tokens),
        max_input_tokens: Some(f64::from(workload.max_input_tokens)),
        max_output_tokens: Some(steps(workload.max_output_tokens)),
        concurrency: workload.concurrency,
    }
}

pub(super) fn wishes(
    spec: &MoEDeploymentSpec,
    request: Request,
    pricing: Pricing,
    memory: &MainMemory,
) -> Wishes {
    let seconds = |duration: kube::core::Duration| Duration::from(duration).as_secs_f64();
    let gpus = spec.main.gpu.as_ref().map(|gpu| f64::from(gpu.count));
    let gpu_bytes = gpus.zip(pricing.gpu_bytes_each).map(|(count, each)| count * each);
    Wishes {
        request,
        slo: Slo::new(seconds(spec.slo.ttft), seconds(spec.slo.tpot)),
        pricing,
        specs: Specs::new(sizes(spec.main.memory_mb), sizes(spec.remote_experts.memory_mb)),
        limits: Limits {
            payload_bytes: spec.remote_experts.payload_limit_mb.map(|limit| f64::from(limit) * MB as f64),
            max_replicas: spec.remote_experts.max_replicas,
            max_groups: None,
            gpu_bytes,
        },
        prediction: None,
        arrivals: None,
        prediction_p95: None,
        fallback_bytes: memory.fallback_bytes.saturating_add(memory.growth_bytes) as f64,
        // Functions run as long as the deployment exists: no request waits for a start.
        cold_start_seconds: 0.0,
    }
}

fn sizes(range: MemoryRange) -> SizeRange {
    let bytes = |megabytes: u32| f64::from(megabytes) * MB as f64;
    SizeRange { min_bytes: bytes(range.min), max_bytes: bytes(range.max), step_bytes: bytes(range.step) }
}
