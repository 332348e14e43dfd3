//! The planning problem of a model on a machine.

use crate::error::ProblemError;
use crate::prior::gpu_expert_seconds;
use crate::profile::Profile;
use remoe_model::Inspection;
use remoe_planner::{
    Affine, Arrivals, CpuProfile, Device, ErrorFactor, Layer, Limits, Pricing, Problem, Request, Slo, Specs,
    WindowedCache,
};
use serde::{Deserialize, Serialize};

/// Requirements of a deployment, beside the facts of model and machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeploymentRequirements {
    /// Typical and largest requests.
    pub request: Request,
    /// Service level objectives that were promised.
    pub slo: Slo,
    /// Prices of memory and processors.
    pub pricing: Pricing,
    /// Sizes that functions may have.
    pub specs: Specs,
    /// When requests come, where that is known.
    pub arrivals: Option<Arrivals>,
    /// Without a request that uses its experts for so many seconds a group may end by itself; none: none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_idle_seconds: Option<f64>,
    /// Limits of the platform.
    pub limits: Limits,
    /// Predicted share of each MoE layer's assignments per expert; `None`: all experts alike.
    pub prediction: Option<Vec<Vec<f64>>>,
    /// Per MoE layer, the 95th percentile of a remote set's true share over its predicted one.
    pub prediction_p95: Option<Vec<ErrorFactor>>,
    /// Memory of the main function for experts that no remote function answers for, in bytes.
    pub fallback_bytes: f64,
    /// Seconds from nothing to ready functions that count towards the first token.
    pub cold_start_seconds: f64,
}

/// The problem of running `model` as `wishes` say, on a machine of which `profile` was made.
///
/// A dense layer is folded into the MoE layer after it (behind the last one: before it), and what is outside of layers,
/// embedding and head, into the times of all of them alike: only sums matter there. The problem has times of experts on
/// the device if the profile has them.
///
/// # Errors
/// The model has no routed experts, the profile has a GPU without a price, or a figure is none that the planner takes.
pub fn problem(
    model: &Inspection,
    profile: &Profile,
    wishes: &DeploymentRequirements,
) -> Result<Problem, ProblemError> {
    let count = model.moe_layers.len();
    if count == 0 || model.experts == 0 {
        return Err(ProblemError::NoExperts { family: model.family.clone() });
    }
    if profile.device.is_some() && !wishes.pricing.has_gpu() {
        return Err(ProblemError::NoGpuPrice);
    }
    let on_gpu = profile.device.map(|_| {
        let stated = profile.gpu_expert_seconds.clone();
        stated.unwrap_or_else(|| gpu_expert_seconds(model, &profile.model.dtype))
    });
    // Weights and cache live in the compute dtype, whatever they are at rest, unless they are quantised; a GPU has
    // plain ones outside of experts.
    let dense_dtype = model.dense_dtype.filter(|_| profile.device.is_none());
    let kv_cache_dtype = model.kv_cache_dtype.filter(|_| profile.device.is_none());
    let model = &Inspection { dense_dtype, kv_cache_dtype, ..model.clone() };
    let resident = |bytes: u64| model.resident_bytes(bytes, &profile.model.dtype) as f64;
    let kv = model.resident_kv(&profile.model.dtype);
    let kv_layer = |bytes: u64, layers: usize| bytes as f64 / model.layers.max(1) as f64 * layers as f64;
    let share = 1.0 / count as f64;
    let on_cpus = scaled(&profile.nonexpert_seconds, share);
    let context = profile.context_seconds.as_ref().map(|table| scaled(table, share));
    let context_on_device = profile.device.map_or(0.0, |device| device.context_seconds_per_token * share);
    let token_bytes = resident(model.token_bytes);
    let layer_bytes = model.resident_layer_bytes(&profile.model.dtype);
    let layers = folded(model, &layer_bytes).map(|(bytes, layers)| Layer {
        // Shapes of real models fit by far.
        experts: u32::try_from(model.experts).unwrap_or(u32::MAX),
        top_k: u32::try_from(model.top_k).unwrap_or(u32::MAX),
        expert_bytes: model.resident_expert_bytes(&profile.model.dtype) as f64,
        nonexpert_bytes: bytes as f64,
        kv_bytes_per_token: kv_layer(kv.bytes_per_token, layers),
        kv_windowed: (kv.windowed_bytes_per_token > 0).then(|| WindowedCache {
            bytes_per_token: kv_layer(kv.windowed_bytes_per_token, layers),
            most_tokens: kv.most_windowed_tokens as f64,
        }),
        nonexpert_prefill_seconds: profile
            .device
            .map_or(Affine { base: 0.0, per_token: 0.0 }, |device| device.prefill_seconds.scaled(share)),
        nonexpert_decode_seconds: profile.device.map_or(0.0, |device| device.decode_seconds * share),
        expert_seconds: profile.expert_seconds.clone(),
        remote_expert_seconds: profile.remote_expert_seconds.clone(),
        gpu_expert_seconds: on_gpu.clone(),
        cpu_nonexpert_seconds: Some(on_cpus.clone()),
        cpu_context_seconds: context.clone(),
        context_seconds_per_token: context_on_device,
    });
    let uniform = || vec![vec![1.0 / model.experts as f64; model.experts]; count];
    let problem = Problem {
        version: 1,
        device: if profile.device.is_some() { Device::Gpu } else { Device::Cpu },
        request: wishes.request.clone(),
        prediction: Some(wishes.prediction.clone().unwrap_or_else(uniform)),
        prediction_p95: wishes.prediction_p95.clone(),
        layers: layers.collect(),
        token_bytes,
        head_bytes: model.resident_outside_bytes(&profile.model.dtype) as f64,
        runtime_bytes: profile.memory.main_bytes + wishes.fallback_bytes,
        function_bytes: profile.function_bytes(model),
        transport: profile.transport.of_rows(token_bytes),
        swap_seconds: profile
            .device
            .map_or(Affine { base: 0.0, per_token: 0.0 }, |device| device.swap_seconds),
        cold_start_seconds: wishes.cold_start_seconds,
        pricing: wishes.pricing,
        arrivals: wishes.arrivals.clone(),
        starts: Some(profile.starts),
        specs: wishes.specs,
        // What containers and control groups give.
        cpu_quotas: wishes.specs.main_vcpus.is_some() && wishes.specs.remote_vcpus.is_some(),
        shared_cores: None,
        contention: profile.contention,
        remote_idle_seconds: wishes.remote_idle_seconds,
        slo: wishes.slo,
        limits: wishes.limits,
    };
    problem.check()?;
    Ok(problem)
}

/// Per MoE layer, the non-expert bytes of it and of the dense layers that are folded into it, and how
/// many layers that are.
fn folded<'a>(model: &'a Inspection, layer_bytes: &'a [u64]) -> impl Iterator<Item = (u64, usize)> {
    let last = model.moe_layers.len() - 1;
    let mut next = 0;
    model.moe_layers.iter().enumerate().map(move |(index, &layer)| {
        let end = if index == last { model.layers } else { layer + 1 };
        let range = next..end.max(next);
        next = range.end;
        let bytes = layer_bytes.get(range.clone()).unwrap_or_default();
        (bytes.iter().sum(), range.len())
    })
}

fn scaled(profile: &CpuProfile, factor: f64) -> CpuProfile {
    let scale = |row: &Vec<f64>| row.iter().map(|seconds| seconds * factor).collect();
    CpuProfile { seconds: profile.seconds.iter().map(scale).collect(), ..profile.clone() }
}
