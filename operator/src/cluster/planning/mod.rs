//! From a spec and what is known of model and hardware to a plan. Pure.

mod memory;
mod shown;
mod wishes;

use self::memory::MainMemory;
use self::shown::shown;
use self::wishes::{request, wishes};
use super::api::{
    ComputeDtype, Device, MainPlan, MoEDeploymentSpec, MoEPlanSpec, PerBaseline, PlanCosts, PlanNumbers,
    PlanTimes, PlannedModel, ProfileSource, RemoteMode, RemotePlan,
};
use super::digest::digest;
use super::facts::ModelFacts;
use super::quantity::MB;
use remoe_planner::{
    Answer, Baseline, LayerPlan, Options, PlanDraft, PlanError, Problem, Remote, Slo, solve,
};
use remoe_profile::{Prices, PricesBilling, Profile, problem};
use remoe_wire::format_listing;
use remoe_wire::v1::LayerExperts;

pub use wishes::workload;

/// A limit that is meant not to bind, in seconds.
const NO_LIMIT: f64 = 1e6;
/// Characters of a warning.
const MAX_WARNING: usize = 1000;

/// Figures of the hardware, and where they come from.
#[derive(Debug, Clone, PartialEq)]
pub struct KnownProfile {
    /// The figures.
    pub profile: Profile,
    /// Their origin.
    pub source: ProfileSource,
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanningError {
    /// A field of the spec cannot be.
    #[error("spec.{field} {message}")]
    Spec {
        /// The field.
        field: String,
        /// The value, and what to do.
        message: String,
    },
    /// The profile does not belong to the model, or has figures that the planner refuses.
    #[error("{0}")]
    Profile(String),
    /// No plan keeps every limit.
    #[error("{0}")]
    Infeasible(String),
    /// A value cannot be written as JSON.
    #[error("{0}")]
    Json(String),
}

impl From<serde_json::Error> for PlanningError {
    fn from(error: serde_json::Error) -> Self {
        Self::Json(error.to_string())
    }
}

/// A plan that is still to be made: everything that it depends on.
#[derive(Debug, Clone)]
pub struct Planning {
    deployment: String,
    model: PlannedModel,
    device: Device,
    source: ProfileSource,
    mode: RemoteMode,
    moe_layers: Vec<u32>,
    workload: super::api::WorkloadSpec,
    memory: MainMemory,
    problem: Problem,
    /// Hash of all of this. Plans with the same inputs are the same plan.
    pub inputs: String,
}

impl Planning {
    /// Collects what a plan of `deployment` is made from.
    ///
    /// # Errors
    /// A field of the spec that does not fit the model, or a profile that does not.
    pub fn new(
        deployment: &str,
        spec: &MoEDeploymentSpec,
        facts: &ModelFacts,
        known: &KnownProfile,
    ) -> Result<Self, PlanningError> {
        let dtype = compute_dtype(spec, facts);
        let inspection = &facts.inspection;
        known
            .profile
            .check_model(inspection, dtype.name())
            .map_err(|error| PlanningError::Profile(error.to_string()))?;
        let workload = workload(spec, inspection)?;
        let memory = MainMemory::new(inspection, dtype, spec.main.device, &workload);
        let wishes = wishes(spec, request(&workload), pricing(spec)?, &memory);
        let profile = on_device(&known.profile, spec.main.device)?;
        let problem = problem(inspection, &profile, &wishes)
            .map_err(|error| PlanningError::Profile(error.to_string()))?;
        let model = PlannedModel {
            source: spec.model.source.clone(),
            revision: facts.revision.clone().or_else(|| spec.model.revision.clone()),
            endpoint: spec.model.endpoint.clone(),
            credentials_secret_name: spec.model.credentials_secret_name.clone(),
            cache_claim_name: spec.model.cache_claim_name.clone(),
            dtype,
            digest: inspection.fingerprint.clone(),
        };
        let mode = spec.remote_experts.mode;
        let inputs = digest(&(
            &model,
            spec.main.device,
            known.source,
            mode,
            &problem,
            &workload,
            memory.kv_cache_bytes,
        ))?;
        Ok(Self {
            deployment: deployment.to_owned(),
            model,
            device: spec.main.device,
            source: known.source,
            mode,
            // Layer ids of real models fit by far.
            moe_layers: inspection
                .moe_layers
                .iter()
                .map(|&layer| u32::try_from(layer).unwrap_or(u32::MAX))
                .collect(),
            workload,
            memory,
            problem,
            inputs,
        })
    }

    /// Makes the plan; `previous` stays where a new one would save too little.
    ///
    /// Under a prior all experts are local if they fit, and a limit that seems to be missed is a
    /// warning: the prior errs on the slow side, and serving is what brings measurements.
    ///
    /// # Errors
    /// No plan keeps every limit.
    pub fn solve(&self, previous: Option<&MoEPlanSpec>) -> Result<MoEPlanSpec, PlanningError> {
        let previous = previous
            .filter(|plan| plan.model.digest == self.model.digest && plan.model.dtype == self.model.dtype)
            .map(|plan| self.draft(plan))
            .transpose()?;
        let mut refusal = None;
        for attempt in self.attempts() {
            let mut problem = self.problem.clone();
            if attempt.relaxed {
                problem.slo = Slo::new(NO_LIMIT, NO_LIMIT);
            }
            let options = Options { remote: attempt.remote, ..Options::default() };
            match solve(&problem, previous.as_ref(), &options) {
                Ok(answer) => {
                    let warning = attempt.relaxed.then(|| refusal.unwrap_or_default());
                    return self.spec(&answer, warning);
                }
                Err(PlanError::Infeasible(why)) => {
                    refusal = Some(why.to_string());
                }
                Err(error) => return Err(PlanningError::Profile(error.to_string())),
            }
        }
        Err(PlanningError::Infeasible(refusal.unwrap_or_default()))
    }

    fn attempts(&self) -> Vec<Attempt> {
        let wanted = match self.mode {
            RemoteMode::Auto => Remote::Auto,
            RemoteMode::Always => Remote::Always,
            RemoteMode::Never => Remote::Never,
        };
        if self.source != ProfileSource::Prior {
            return vec![Attempt { remote: wanted, relaxed: false }];
        }
        let mut remotes = vec![wanted];
        if wanted == Remote::Auto {
            remotes.insert(0, Remote::Never);
        }
        let both = |remote| [false, true].map(|relaxed| Attempt { remote, relaxed });
        remotes.into_iter().flat_map(both).collect()
    }

    fn spec(&self, answer: &Answer, warning: Option<String>) -> Result<MoEPlanSpec, PlanningError> {
        let remote = self.moe_layers.iter().zip(&answer.plan.layers);
        let remote = remote.filter(|(_, layer)| !layer.remote.is_empty());
        let device_bytes = match self.device {
            Device::Cpu => answer.evaluation.gpu_bytes,
            Device::Cuda => 0.0,
        };
        let main = MainPlan {
            memory_mb: whole_megabytes(answer.plan.main_bytes),
            limit_mb: whole_megabytes(answer.plan.main_bytes + device_bytes),
            kv_cache_bytes: self.memory.kv_cache_bytes,
            fallback_bytes: self.memory.fallback_bytes,
        };
        let numbers = numbers(answer);
        Ok(MoEPlanSpec {
            deployment: self.deployment.clone(),
            inputs: self.inputs.clone(),
            model: self.model.clone(),
            device: self.device,
            profile: self.source,
            workload: self.workload,
            main,
            remote: remote.map(|(layer, part)| remote_plan(*layer, part)).collect(),
            shown: Some(shown(&numbers)),
            numbers,
            warning: warning.map(|text| text.chars().take(MAX_WARNING).collect()),
        })
    }

    /// `plan` in the planner's form.
    fn draft(&self, plan: &MoEPlanSpec) -> Result<PlanDraft, PlanningError> {
        let wrong = |message: String| PlanningError::Profile(format!("the previous plan: {message}"));
        let mut layers = Vec::new();
        for &layer in &self.moe_layers {
            let part = plan.remote.iter().find(|part| part.layer == layer);
            let experts = part.map(|part| part.experts()).transpose().map_err(wrong)?;
            layers.push(serde_json::json!({
                "remote": experts.unwrap_or_default().experts,
                "memory_bytes": part.map_or(0, |part| u64::from(part.memory_mb) * MB),
                "replicas": part.map_or(0, |part| part.replicas),
            }));
        }
        let main_bytes = u64::from(plan.main.memory_mb) * MB;
        let draft = serde_json::json!({ "main_bytes": main_bytes, "layers": layers });
        PlanDraft::from_json(&draft.to_string()).map_err(|error| wrong(error.to_string()))
    }
}

#[derive(Clone, Copy)]
struct Attempt {
    remote: Remote,
    /// Without the promised latencies.
    relaxed: bool,
}

impl RemotePlan {
    /// The remote experts of the layer.
    ///
    /// # Errors
    /// The listing cannot be read.
    pub fn experts(&self) -> Result<LayerExperts, String> {
        let listing = format!("{}:{}", self.layer, self.experts);
        let layers = remoe_wire::parse_listing(&listing).map_err(|error| error.to_string())?;
        layers.into_iter().next().ok_or_else(|| format!("layer {} has no remote experts", self.layer))
    }
}

fn remote_plan(layer: u32, part: &LayerPlan) -> RemotePlan {
    let listing = format_listing(&[LayerExperts { layer, experts: part.remote.clone() }]);
    // Within the layer's entry its id is said once.
    let experts = listing.split_once(':').map_or(String::new(), |(_, experts)| experts.to_owned());
    RemotePlan { layer, experts, memory_mb: whole_megabytes(part.memory_bytes), replicas: part.replicas }
}

/// What is computed in: the spec's wish, else the checkpoint's own.
pub fn compute_dtype(spec: &MoEDeploymentSpec, facts: &ModelFacts) -> ComputeDtype {
    let own = match facts.inspection.dtype.as_str() {
        "bfloat16" => ComputeDtype::Bfloat16,
        _ => ComputeDtype::Float32,
    };
    spec.model.dtype.unwrap_or(own)
}

/// The profile with the figures of `device` only: a plan follows where it has them.
fn on_device(profile: &Profile, device: Device) -> Result<Profile, PlanningError> {
    match (device, profile.device) {
        (Device::Cuda, None) => Err(PlanningError::Profile(
            "the profile was measured without a GPU; make one with remoe profile --device cuda".to_owned(),
        )),
        (Device::Cuda, Some(_)) => Ok(profile.clone()),
        (Device::Cpu, _) => Ok(Profile { device: None, ..profile.clone() }),
    }
}

fn pricing(spec: &MoEDeploymentSpec) -> Result<remoe_planner::Pricing, PlanningError> {
    let wrong =
        |field: &str, message: String| PlanningError::Spec { field: format!("pricing.{field}"), message };
    let number = |field: &str, text: &str| {
        text.parse::<f64>().map_err(|_| wrong(field, format!("is {text:?}, expected a decimal number")))
    };
    let prices = Prices {
        billing: match spec.pricing.billing {
            super::api::Billing::Reserved => PricesBilling::Reserved,
            super::api::Billing::Invocation => PricesBilling::Invocation,
        },
        cpu_core_hour: number("cpuCoreHour", &spec.pricing.cpu_core_hour)?,
        memory_gb_hour: number("memoryGBHour", &spec.pricing.memory_gb_hour)?,
        gpu_hour: spec.pricing.gpu_hour.as_deref().map(|text| number("gpuHour", text)).transpose()?,
        gpu_memory_mb: spec.pricing.gpu_memory_mb.map(f64::from),
        ..Prices::default()
    };
    let pricing = prices.pricing().map_err(|error| wrong(&error.field, error.message))?;
    Ok(remoe_planner::Pricing { main_replicas: spec.replicas, ..pricing })
}

fn numbers(answer: &Answer) -> PlanNumbers {
    let evaluation = &answer.evaluation;
    let cost = |baseline: &Option<Baseline>| baseline.as_ref().map(|baseline| rounded(baseline.total_cost));
    let baselines = &answer.baselines;
    let saving = &answer.explanation.saving;
    PlanNumbers {
        times: PlanTimes {
            ttft_seconds: rounded(evaluation.ttft_seconds),
            tpot_seconds: rounded(evaluation.tpot_seconds),
            prefill_seconds: rounded(evaluation.prefill_seconds),
            decode_seconds: rounded(evaluation.decode_seconds),
        },
        costs: PlanCosts {
            main: rounded(evaluation.main_cost),
            remote: rounded(evaluation.remote_cost),
            total: rounded(evaluation.total_cost),
        },
        baselines: PerBaseline {
            mix: cost(&baselines.mix),
            cpu: cost(&baselines.cpu),
            gpu: cost(&baselines.gpu),
            fetch: cost(&baselines.fetch),
        },
        savings: PerBaseline {
            mix: saving.mix.map(rounded),
            cpu: saving.cpu.map(rounded),
            gpu: saving.gpu.map(rounded),
            fetch: saving.fetch.map(rounded),
        },
    }
}

/// To nine significant digits: more than any figure here is worth, and few enough to be the same number
/// after it was written and read by others.
fn rounded(value: f64) -> f64 {
    format!("{value:.8e}").parse().unwrap_or(value)
}

fn whole_megabytes(bytes: f64) -> u32 {
    // Sizes are checked to be finite and far below what overflows.
    (bytes / MB as f64).ceil() as u32
}
