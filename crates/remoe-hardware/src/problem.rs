//! Construction of the planning problem from a model, a profile and the requirements of a deployment.

use crate::error::ProblemError;
use crate::prior::gpu_expert_seconds;
use crate::profile::Profile;
use remoe_model::Inspection;
use remoe_planner::{
    Affine, Arrivals, CpuProfile, Device, ErrorFactor, Layer, Limits, Pricing, Problem, Request, Slo, Specs,
    WindowedCache,
};
use serde::{Deserialize, Serialize};

/// Inputs of planning that are properties neither of the model nor of the machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeploymentRequirements {
    /// Typical and largest requests.
    pub request: Request,
    /// Latency limits.
    pub slo: Slo,
    /// Prices of memory and processors.
    pub pricing: Pricing,
    /// Sizes that functions may have.
    pub specs: Specs,
    /// Arrival rate of requests and the idle time after which functions end, if known.
    pub arrivals: Option<Arrivals>,
    /// Seconds without a request for its experts after which a group scales to zero on its own; if `None`, none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_idle_seconds: Option<f64>,
    /// Limits of the platform.
    pub limits: Limits,
    /// Predicted share of assignments of each expert, by MoE layer; if `None`, all experts of a layer have the same.
    pub prediction: Option<Vec<Vec<f64>>>,
    /// 95th percentile of a remote set's actual share over the predicted one, by MoE layer.
    pub prediction_p95: Option<Vec<ErrorFactor>>,
    /// Bytes of the main function for experts that it loads when a remote function fails.
    pub fallback_bytes: f64,
    /// Seconds of a cold start that count towards the time to first token.
    pub cold_start_seconds: f64,
}

/// Builds the planning problem of serving `model` on the machine of `profile` with `requirements`.
///
/// A dense layer is counted with the next MoE layer, or with the last one if none follows. The times of embedding and head
/// are distributed equally over the layers. Neither changes the plan, since only sums over layers matter.
///
/// # Errors
/// The model has no routed experts, the profile has a GPU and the prices do not, or the planner rejects a field.
pub fn problem(
    model: &Inspection,
    profile: &Profile,
    requirements: &DeploymentRequirements,
) -> Result<Problem, ProblemError> {
    let count = model.moe_layers.len();
    if count == 0 || model.experts == 0 {
        return Err(ProblemError::NoExperts { family: model.family.clone() });
    }
    if profile.device.is_some() && !requirements.pricing.has_gpu() {
        return Err(ProblemError::NoGpuPrice);
    }
    let gpu_expert_seconds_of_layer = profile.device.map(|_| {
        let stated = profile.gpu_expert_seconds.clone();
        stated.unwrap_or_else(|| gpu_expert_seconds(model, &profile.model.dtype))
    });
    // Weights and KV cache are held in the compute dtype unless they are quantised. On a GPU only experts are quantised.
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
    let layers = fold_dense_layers(model, &layer_bytes).map(|(bytes, layers)| Layer {
        // Real models have far fewer.
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
        gpu_expert_seconds: gpu_expert_seconds_of_layer.clone(),
        cpu_nonexpert_seconds: Some(on_cpus.clone()),
        cpu_context_seconds: context.clone(),
        context_seconds_per_token: context_on_device,
    });
    let uniform = || vec![vec![1.0 / model.experts as f64; model.experts]; count];
    let problem = Problem {
        version: 1,
        device: if profile.device.is_some() { Device::Gpu } else { Device::Cpu },
        request: requirements.request.clone(),
        prediction: Some(requirements.prediction.clone().unwrap_or_else(uniform)),
        prediction_p95: requirements.prediction_p95.clone(),
        layers: layers.collect(),
        token_bytes,
        head_bytes: model.resident_outside_bytes(&profile.model.dtype) as f64,
        runtime_bytes: profile.memory.main_bytes + requirements.fallback_bytes,
        function_bytes: profile.function_bytes(model),
        transport: profile.transport.of_rows(token_bytes),
        swap_seconds: profile
            .device
            .map_or(Affine { base: 0.0, per_token: 0.0 }, |device| device.swap_seconds),
        cold_start_seconds: requirements.cold_start_seconds,
        pricing: requirements.pricing,
        arrivals: requirements.arrivals.clone(),
        starts: Some(profile.starts),
        specs: requirements.specs,
        // Containers with a choice of vCPUs get them as CPU quotas.
        cpu_quotas: requirements.specs.main_vcpus.is_some() && requirements.specs.remote_vcpus.is_some(),
        shared_cores: None,
        contention: profile.contention,
        remote_idle_seconds: requirements.remote_idle_seconds,
        slo: requirements.slo,
        limits: requirements.limits,
    };
    problem.check()?;
    Ok(problem)
}

/// Returns for each MoE layer the non-expert bytes of it and of the dense layers that are counted with it, and the number
/// of these layers.
fn fold_dense_layers<'a>(
    model: &'a Inspection,
    layer_bytes: &'a [u64],
) -> impl Iterator<Item = (u64, usize)> {
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

/// Returns `profile` with all times multiplied by `factor`.
fn scaled(profile: &CpuProfile, factor: f64) -> CpuProfile {
    let scale = |row: &Vec<f64>| row.iter().map(|seconds| seconds * factor).collect();
    CpuProfile { seconds: profile.seconds.iter().map(scale).collect(), ..profile.clone() }
}
