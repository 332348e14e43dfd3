//! Converts the spec of a deployment into requirements of the planner.

use super::PlanningError;
use super::memory::MainMemory;
use crate::quantity::MB;
use remoe_api::{
    ArrivalsSpec, Billing, CpuRange, MemoryRange, MoEDeploymentSpec, WorkloadSpec, default_concurrency,
};
use remoe_hardware::{DeploymentRequirements, Prices, PricesBilling};
use remoe_model::Inspection;
use remoe_planner::{Arrivals, Limits, Pricing, Request, SizeRange, Slo, Specs, VcpuRange};
use std::time::Duration;

/// Default token limits of a request, if the model's context has room.
const DEFAULT_MAX_INPUT_TOKENS: u32 = 4096;
const DEFAULT_MAX_OUTPUT_TOKENS: u32 = 1024;
/// Ratio of the largest to the typical request: 512 of 4096 input tokens, 205 of 1024 output tokens.
const INPUT_RATIO: u32 = 8;
const OUTPUT_RATIO: u32 = 5;
const HOUR_SECONDS: f64 = 3600.0;
/// Maximum requests per hour, and per burst.
const MAX_REQUESTS_PER_HOUR: f64 = 1e9;
const MAX_BURST: f64 = 1e6;

/// Returns the sizes of requests: the spec's, else defaults that fit the model's context.
///
/// # Errors
/// The largest request does not fit into the model's context.
pub(crate) fn workload(spec: &MoEDeploymentSpec, model: &Inspection) -> Result<WorkloadSpec, PlanningError> {
    let context = u32::try_from(model.served_context()).unwrap_or(u32::MAX);
    let Some(workload) = spec.workload.clone() else {
        let output = DEFAULT_MAX_OUTPUT_TOKENS.min(context / 4).max(1);
        let input = DEFAULT_MAX_INPUT_TOKENS.min(context.saturating_sub(output)).max(1);
        return Ok(WorkloadSpec {
            max_input_tokens: input,
            max_output_tokens: output,
            typical_input_tokens: input.div_ceil(INPUT_RATIO),
            typical_output_tokens: output.div_ceil(OUTPUT_RATIO),
            concurrency: default_concurrency(),
            arrivals: None,
        });
    };
    let longest = u64::from(workload.max_input_tokens) + u64::from(workload.max_output_tokens);
    if longest > u64::from(context) {
        let message = format!(
            "has requests of up to {longest} tokens (maxInputTokens + maxOutputTokens), expected at most \
             {context}, the context length of the model; lower one of them"
        );
        return Err(PlanningError::Spec { field: "workload".to_owned(), message });
    }
    Ok(workload)
}

fn request(workload: &WorkloadSpec) -> Request {
    // The prefill yields the first token.
    let steps = |tokens: u32| f64::from(tokens.saturating_sub(1));
    Request {
        input_tokens: f64::from(workload.typical_input_tokens),
        output_tokens: steps(workload.typical_output_tokens),
        max_input_tokens: Some(f64::from(workload.max_input_tokens)),
        max_output_tokens: Some(steps(workload.max_output_tokens)),
        concurrency: workload.concurrency,
    }
}

/// Returns the requirements of the deployment, for requests of `workload`.
///
/// # Errors
/// A field of the spec has an invalid value.
pub(super) fn requirements(
    spec: &MoEDeploymentSpec,
    workload: &WorkloadSpec,
    memory: &MainMemory,
) -> Result<DeploymentRequirements, PlanningError> {
    let seconds = |duration: remoe_api::Duration| Duration::from(duration).as_secs_f64();
    let (main_vcpus, remote_vcpus) = vcpus(spec)?;
    let pricing = pricing(spec)?;
    let gpus = spec.main.gpu.as_ref().map(|gpu| f64::from(gpu.count));
    let gpu_bytes = gpus.zip(pricing.gpu_bytes_each).map(|(count, each)| count * each);
    Ok(DeploymentRequirements {
        request: request(workload),
        slo: Slo {
            cold_ttft_seconds: spec.slo.cold_ttft.map(seconds),
            cold_share: spec.slo.cold_percent.as_deref().map(share).transpose()?,
            ..Slo::new(seconds(spec.slo.ttft), seconds(spec.slo.tpot))
        },
        pricing,
        specs: Specs {
            main: sizes(spec.main.memory_mb),
            remote: sizes(spec.remote_experts.memory_mb),
            main_vcpus,
            remote_vcpus,
        },
        limits: Limits {
            payload_bytes: spec.remote_experts.payload_limit_mb.map(|limit| f64::from(limit) * MB as f64),
            max_replicas: spec.remote_experts.max_replicas,
            max_groups: Some(spec.remote_experts.max_groups),
            gpu_bytes,
        },
        // The expected expert usage is part of the basis.
        prediction: None,
        arrivals: workload.arrivals.as_ref().map(|it| arrivals(it, spec.idle_window())).transpose()?,
        remote_idle_seconds: spec.scaling.remote_idle_window.map(|idle| Duration::from(idle).as_secs_f64()),
        prediction_p95: None,
        fallback_bytes: memory.fallback_bytes.saturating_add(memory.unfilled_bytes) as f64,
        // The arrivals model the wait for a cold start.
        cold_start_seconds: 0.0,
    })
}

fn sizes(range: MemoryRange) -> SizeRange {
    let bytes = |megabytes: u32| f64::from(megabytes) * MB as f64;
    SizeRange { min_bytes: bytes(range.min), max_bytes: bytes(range.max), step_bytes: bytes(range.step) }
}

/// Returns the vCPU ranges of main and remote functions, if the spec sets them apart from memory.
fn vcpus(spec: &MoEDeploymentSpec) -> Result<(Option<VcpuRange>, Option<VcpuRange>), PlanningError> {
    let (main, remote) = (spec.main.cpu, spec.remote_experts.cpu);
    for (here, there, field, other) in
        [(main, remote, "remoteExperts.cpu", "main.cpu"), (remote, main, "main.cpu", "remoteExperts.cpu")]
    {
        if here.is_some() && there.is_none() {
            return Err(invalid(field, format!("is missing; set it together with spec.{other}")));
        }
    }
    let range = |field: &str, range: CpuRange| {
        let CpuRange { min, max, step } = range;
        if min == 0 || max < min || step == 0 {
            let message = format!(
                "is {min} to {max} by {step} millicores, expected 1 <= min <= max, and a step of 1 or more"
            );
            return Err(invalid(field, message));
        }
        let vcpus = |millicores: u32| f64::from(millicores) / 1000.0;
        Ok(VcpuRange { min: vcpus(min), max: vcpus(max), step: vcpus(step) })
    };
    Ok((
        main.map(|cpu| range("main.cpu", cpu)).transpose()?,
        remote.map(|cpu| range("remoteExperts.cpu", cpu)).transpose()?,
    ))
}

/// Parses a percentage into a share.
fn share(percent: &str) -> Result<f64, PlanningError> {
    let value = decimal("slo.coldPercent", percent)?;
    if !(0.0..=100.0).contains(&value) {
        return Err(invalid("slo.coldPercent", format!("is {value}, expected 0 to 100")));
    }
    Ok(value / 100.0)
}

/// Parses the arrivals; `idle` is the idle window of the deployment.
fn arrivals(arrivals: &ArrivalsSpec, idle: Option<Duration>) -> Result<Arrivals, PlanningError> {
    let (rate, burst) = ("workload.arrivals.perHour", "workload.arrivals.burst");
    let per_hour = decimal(rate, &arrivals.per_hour)?;
    if !(per_hour > 0.0 && per_hour <= MAX_REQUESTS_PER_HOUR) {
        let message =
            format!("is {per_hour}, expected requests per hour above 0 and up to {MAX_REQUESTS_PER_HOUR}");
        return Err(invalid(rate, message));
    }
    let burst_requests = decimal(burst, &arrivals.burst)?;
    if !(1.0..=MAX_BURST).contains(&burst_requests) {
        return Err(invalid(burst, format!("is {burst_requests}, expected 1 to {MAX_BURST} requests")));
    }
    Ok(Arrivals {
        per_second: per_hour / HOUR_SECONDS,
        burst: burst_requests,
        recorded_seconds: None,
        idle_seconds: idle.map(|idle| idle.as_secs_f64()),
        input_variation: 0.0,
        output_variation: 0.0,
    })
}

fn pricing(spec: &MoEDeploymentSpec) -> Result<Pricing, PlanningError> {
    let number = |field: &str, text: &str| decimal(&format!("pricing.{field}"), text);
    let prices = Prices {
        billing: match spec.pricing.billing {
            Billing::Reserved => PricesBilling::Reserved,
            Billing::Invocation => PricesBilling::Invocation,
        },
        cpu_core_hour: number("cpuCoreHour", &spec.pricing.cpu_core_hour)?,
        memory_gb_hour: number("memoryGBHour", &spec.pricing.memory_gb_hour)?,
        gpu_hour: spec.pricing.gpu_hour.as_deref().map(|text| number("gpuHour", text)).transpose()?,
        gpu_memory_mb: spec.pricing.gpu_memory_mb.map(f64::from),
        ..Prices::default()
    };
    let priced = if spec.main.cpu.is_some() { prices.separate_pricing() } else { prices.pricing() };
    let pricing = priced.map_err(|error| invalid(&format!("pricing.{}", error.field), error.message))?;
    Ok(Pricing { main_replicas: spec.main_functions(), ..pricing })
}

fn decimal(field: &str, text: &str) -> Result<f64, PlanningError> {
    text.parse().map_err(|_| invalid(field, format!("is {text:?}, expected a decimal number")))
}

fn invalid(field: &str, message: String) -> PlanningError {
    PlanningError::Spec { field: field.to_owned(), message }
}
