//! Builds the planning problem from the spec, the model's facts and the hardware profile, and solves it. Pure.

mod basis;
mod hosted;
mod memory;
mod numbers;
mod requirements;
mod verdict;

use self::basis::PlanInputs;
use self::hosted::{draft, group_plans, layer_plans};
use self::memory::MainMemory;
use self::numbers::{numbers, shown};
use self::requirements::requirements;
use super::digest::digest;
use super::facts::ModelFacts;
use super::quantity::MB;
use remoe_api::{
    ComputeDtype, DenseDtype, Device, KvCacheDtype, MainPlan, MixOf, MoEDeploymentSpec, MoEPlanSpec,
    PlanVerdict, PlannedModel, PlannedPrediction, ProfileSource, RemoteMode,
};
use remoe_hardware::{Origin, Profile, search_by_origin};
use remoe_model::{Inspection, ONE_GPU};
#[cfg(test)]
use remoe_planner::PlanChange;
use remoe_planner::{
    Budget, Options, PlanAccount, PlanDraft, PlanError, PlanningResult, Pricing, Problem, Remote,
    compare_within, preallocate_for, replan, solve_within,
};
use remoe_predictor::UsageShares;

pub(crate) use basis::account;
pub(crate) use hosted::check_hosted;
pub(crate) use numbers::{counted, three_digits};
pub(crate) use requirements::workload;

/// Maximum additional cost, as a share, of a plan of groups that keeps the limits even if figures are wrong.
const MAX_STURDY_COST: f64 = 0.02;
/// Message of an aborted search.
const CANCELLED_MESSAGE: &str = "no plan within the time limit; narrow memoryMB, cpu or maxGroups";
/// Maximum characters of a warning.
const MAX_WARNING_CHARS: usize = 1000;

/// Hardware profile and its source.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct KnownProfile {
    /// Hardware profile.
    pub profile: Profile,
    /// Source of the profile.
    pub source: ProfileSource,
}

/// Failure to make a plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum PlanningError {
    /// A field of the spec is invalid.
    #[error("spec.{field} {message}")]
    Spec {
        /// Path of the field.
        field: String,
        /// Value and remedy.
        message: String,
    },
    /// The profile belongs to another model, or has invalid figures.
    #[error("{0}")]
    Profile(String),
    /// No plan keeps every limit.
    #[error("{0}")]
    Infeasible(String),
    /// A value cannot be written as JSON.
    #[error("cannot write JSON: {0}")]
    Json(String),
    /// The search exceeded its time limit or panicked.
    #[error("planning aborted: {0}")]
    Aborted(String),
}

impl From<serde_json::Error> for PlanningError {
    fn from(error: serde_json::Error) -> Self {
        Self::Json(error.to_string())
    }
}

impl From<PlanError> for PlanningError {
    fn from(error: PlanError) -> Self {
        match error {
            PlanError::Infeasible(why) => Self::Infeasible(why.to_string()),
            PlanError::Cancelled => Self::Aborted(CANCELLED_MESSAGE.to_owned()),
            error => Self::Profile(error.to_string()),
        }
    }
}

/// Planning problem of a deployment: everything that its plan depends on.
#[derive(Debug, Clone)]
pub(crate) struct Planning {
    deployment: String,
    model: PlannedModel,
    device: Device,
    source: ProfileSource,
    /// Set if all figures are measured.
    is_sure: bool,
    mode: RemoteMode,
    moe_layers: Vec<u32>,
    workload: remoe_api::WorkloadSpec,
    memory: MainMemory,
    problem: Problem,
    basis: PlanInputs,
    prediction: Option<PlannedPrediction>,
    /// Hash of the inputs without the prediction.
    spec_inputs: String,
    /// Hash of all inputs except the number of main functions. Plans with the same inputs are equal.
    pub inputs: String,
}

impl Planning {
    /// Collects the inputs of a plan for `deployment`.
    ///
    /// # Errors
    /// A field of the spec or the profile does not fit the model.
    pub(crate) fn new(
        deployment: &str,
        spec: &MoEDeploymentSpec,
        facts: &ModelFacts,
        known: &KnownProfile,
    ) -> Result<Self, PlanningError> {
        let dtype = compute_dtype(spec, facts);
        check_gpus(spec)?;
        check_positions(spec, facts)?;
        check_dense_dtype(spec, dtype)?;
        check_kv_cache_dtype(spec)?;
        let inspection = &served(spec, facts);
        known
            .profile
            .check_model(inspection, dtype.name())
            .map_err(|error| PlanningError::Profile(error.to_string()))?;
        let workload = workload(spec, inspection)?;
        let memory = MainMemory::new(inspection, dtype, spec.main.device, &workload);
        let basis = PlanInputs {
            model: ModelFacts { inspection: inspection.clone(), revision: facts.revision.clone() },
            profile: on_device(&known.profile, spec.main.device)?,
            requirements: requirements(spec, &workload, &memory)?,
            expected: None,
        };
        let problem = basis.problem()?;
        let model = PlannedModel {
            source: spec.model.source.clone(),
            revision: facts.revision.clone().or_else(|| spec.model.revision.clone()),
            endpoint: spec.model.endpoint.clone(),
            credentials_secret_name: spec.model.credentials_secret_name.clone(),
            ambient_credentials: spec.model.ambient_credentials,
            cache_claim_name: spec.model.cache_claim_name.clone(),
            dtype,
            experts_dtype: spec.model.experts_dtype,
            dense_dtype: spec.model.dense_dtype,
            kv_cache_dtype: spec.model.kv_cache_dtype,
            max_model_len: spec.model.max_model_len,
            digest: inspection.fingerprint.clone(),
        };
        let mode = spec.remote_experts.mode;
        let inputs = digest(&(
            &model,
            spec.main.device,
            known.source,
            mode,
            // The number of main functions does not change the plan.
            &Problem { pricing: Pricing { main_replicas: 1, ..problem.pricing }, ..problem.clone() },
            &workload,
            memory.kv_cache_bytes,
        ))?;
        Ok(Self {
            deployment: deployment.to_owned(),
            model,
            device: spec.main.device,
            source: known.source,
            is_sure: known.source != ProfileSource::Prior && !has_assumed_device(&basis.profile),
            mode,
            moe_layers: basis.moe_layers(),
            workload,
            memory,
            problem,
            basis,
            prediction: None,
            spec_inputs: inputs.clone(),
            inputs,
        })
    }

    /// Returns the same problem for requests with the expert usage `prediction`.
    ///
    /// # Errors
    /// The prediction is for a model with other layers or experts.
    pub(crate) fn expecting(self, prediction: PlannedPrediction) -> Result<Self, PlanningError> {
        let basis = PlanInputs { expected: Some(prediction.shares.clone()), ..self.basis };
        Ok(Self {
            problem: basis.problem()?,
            inputs: expecting(&self.spec_inputs, &prediction)?,
            prediction: Some(prediction),
            basis,
            ..self
        })
    }

    /// Returns the hash of the inputs with `prediction`.
    ///
    /// # Errors
    /// A value cannot be written as JSON.
    pub(crate) fn inputs_expecting(&self, prediction: &PlannedPrediction) -> Result<String, PlanningError> {
        Ok(expecting(&self.spec_inputs, prediction)?)
    }

    /// Returns the same problem with a plan revision higher by `by`.
    ///
    /// # Errors
    /// A value cannot be written as JSON.
    pub(crate) fn revised(mut self, by: u32) -> Result<Self, serde_json::Error> {
        if let Some(prediction) = &mut self.prediction {
            prediction.revision = prediction.revision.saturating_add(by);
            self.inputs = expecting(&self.spec_inputs, prediction)?;
        }
        Ok(self)
    }

    /// Returns the id of a request for a plan. It excludes the prediction, so that new usage reports do not restart
    /// the search.
    ///
    /// # Errors
    /// A value cannot be written as JSON.
    pub(crate) fn request_id(&self, previous: Option<&MoEPlanSpec>) -> Result<String, serde_json::Error> {
        digest(&(&self.spec_inputs, previous))
    }

    /// Returns the number of requests whose usage is predicted, and if they wait or were answered.
    pub(crate) fn predicted(&self) -> Option<(u32, MixOf)> {
        self.prediction.as_ref().map(|prediction| (prediction.requests, prediction.of))
    }

    /// Returns the indices of the MoE layers, and the usage shares of their experts that `plan` expects
    /// ([layers][experts]).
    pub(crate) fn expected_usage(&self, plan: &MoEPlanSpec) -> Option<(Vec<u32>, Vec<Vec<f64>>)> {
        let model = &self.basis.model.inspection;
        let shares = &plan.prediction.as_ref()?.shares;
        let shares = UsageShares::from_text(shares, model.moe_layers.len(), model.experts).ok()?;
        Some((self.moe_layers.clone(), shares.to_rows()))
    }

    /// Returns the problem that the plan solves.
    #[cfg(test)]
    pub(crate) fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Searches a plan; `previous` stays if a new one would save too little.
    ///
    /// Under a prior, all experts are local if they fit, and a missed limit is only a warning: the prior errs on the
    /// slow side, and only serving leads to measurements.
    ///
    /// # Errors
    /// No plan keeps every limit.
    pub(crate) fn solve(
        &self,
        previous: Option<&MoEPlanSpec>,
        budget: Budget<'_>,
    ) -> Result<MoEPlanSpec, PlanningError> {
        let previous = previous.and_then(|plan| self.draft(plan));
        let (result, warning) = self.search_with_origin(&self.problem, |problem, options| {
            solve_within(problem, previous.as_ref(), options, budget)
        })?;
        let verdict = self.verdict_of(&result, budget);
        Ok(self.plan(&result, warning, verdict))
    }

    /// Searches a plan to replace `current` while main functions serve; `None` if `current` is good enough. The size
    /// of main functions stays, so that they only need a new placement.
    ///
    /// # Errors
    /// No plan keeps every limit.
    pub(crate) fn improve(
        &self,
        current: &MoEPlanSpec,
        budget: Budget<'_>,
    ) -> Result<Option<MoEPlanSpec>, PlanningError> {
        let search = |problem: &Problem, draft: &PlanDraft, options: &Options| {
            solve_within(problem, Some(draft), options, budget)
        };
        // The verdict considers all sizes of the main function.
        self.search_with_same_main(current, search, || self.verdict(budget))
    }

    /// Searches the plan for waiting requests, whose main functions start by `current`. Improves its remote functions
    /// while the budget lasts. `None` if `current` is good enough.
    ///
    /// # Errors
    /// No plan keeps every limit.
    pub(crate) fn replan(
        &self,
        current: &MoEPlanSpec,
        budget: Budget<'_>,
    ) -> Result<Option<MoEPlanSpec>, PlanningError> {
        let search =
            |problem: &Problem, draft: &PlanDraft, options: &Options| replan(problem, draft, options, budget);
        // A verdict takes too long during a wake.
        self.search_with_same_main(current, search, || current.verdict.clone())
    }

    /// Returns the plan by which main functions start before the plan for the predicted requests is known: `current`
    /// with the memory that MMP gives main functions (Remoe paper, Algorithm 2), for as many remote experts as in
    /// `current`. `None` if that changes nothing.
    ///
    /// # Errors
    /// No size of the main function keeps the limits.
    pub(crate) fn preallocated(&self, current: &MoEPlanSpec) -> Result<Option<MoEPlanSpec>, PlanningError> {
        // Bounds from a prior are meaningless, since it errs on the slow side.
        if !self.is_sure() {
            return Ok(None);
        }
        let Some(draft) = self.draft(current) else { return Ok(None) };
        let result = preallocate_for(&self.problem, &draft)?;
        let plan = self.plan(&result, None, current.verdict.clone());
        Ok((plan.main != current.main).then_some(plan))
    }

    /// Returns the plan that `search` finds for main functions of the same size as in `current`, with its `verdict`;
    /// `None` if `current` is good enough.
    fn search_with_same_main(
        &self,
        current: &MoEPlanSpec,
        search: impl Fn(&Problem, &PlanDraft, &Options) -> Result<PlanningResult, PlanError>,
        verdict: impl FnOnce() -> Option<PlanVerdict>,
    ) -> Result<Option<MoEPlanSpec>, PlanningError> {
        let Some((result, warning)) = self.search_better(current, search)? else { return Ok(None) };
        let plan = self.plan(&result, warning, None);
        let is_same =
            (&plan.main, &plan.remote, &plan.groups) == (&current.main, &current.remote, &current.groups);
        Ok((!is_same).then(|| MoEPlanSpec { verdict: verdict(), ..plan }))
    }

    /// Returns the result of `search` for main functions of the same size as in `current`, with a warning if it may
    /// miss limits; `None` if `current` is good enough.
    fn search_better(
        &self,
        current: &MoEPlanSpec,
        search: impl Fn(&Problem, &PlanDraft, &Options) -> Result<PlanningResult, PlanError>,
    ) -> Result<Option<(PlanningResult, Option<String>)>, PlanningError> {
        let Some(draft) = self.draft(current) else { return Ok(None) };
        let vcpus = current.main.cpu_millicores.map(|millicores| f64::from(millicores) / 1000.0);
        let problem = self.problem.with_main(f64::from(current.main.memory_mb) * MB as f64, vcpus);
        let found = self.search_with_origin(&problem, |problem, options| search(problem, &draft, options))?;
        let keeps_current = found.0.change.as_ref().is_some_and(|change| change.kept);
        Ok((!keeps_current).then_some(found))
    }

    /// Returns the change from `current` to the better plan; `None` if `current` is good enough.
    #[cfg(test)]
    pub(crate) fn change(&self, current: &MoEPlanSpec) -> Option<PlanChange> {
        let search = |problem: &Problem, draft: &PlanDraft, options: &Options| {
            solve_within(problem, Some(draft), options, Budget::UNLIMITED)
        };
        self.search_better(current, search).ok()??.0.change
    }

    /// Returns whether figures are precise enough to compare ways to serve; a prior errs on the slow side.
    fn is_sure(&self) -> bool {
        self.is_sure
    }

    /// Compares all ways to serve, whatever the spec allows.
    fn verdict(&self, budget: Budget<'_>) -> Option<PlanVerdict> {
        if !self.is_sure() {
            return None;
        }
        // A plan exists, so the comparison succeeds unless it is cancelled.
        compare_within(&self.problem, budget).ok().map(|found| verdict::to_plan_verdict(&found))
    }

    fn verdict_of(&self, result: &PlanningResult, budget: Budget<'_>) -> Option<PlanVerdict> {
        match self.mode {
            // The search did not consider the ways that the mode excludes.
            RemoteMode::Never => self.verdict(budget),
            RemoteMode::Auto | RemoteMode::Always => {
                self.is_sure().then(|| verdict::to_plan_verdict(&result.verdict))
            }
        }
    }

    /// Returns the best plan for `problem` that `search` finds, with a warning if it may miss limits.
    fn search_with_origin(
        &self,
        problem: &Problem,
        search: impl Fn(&Problem, &Options) -> Result<PlanningResult, PlanError>,
    ) -> Result<(PlanningResult, Option<String>), PlanningError> {
        let wanted = match self.mode {
            RemoteMode::Auto => Remote::Auto,
            RemoteMode::Always => Remote::Always,
            RemoteMode::Never => Remote::Never,
        };
        let (result, missed) = search_by_origin(problem, self.origin(), wanted, |problem, remote| {
            search(problem, &Options { remote, sturdy: MAX_STURDY_COST, ..Options::default() })
        })?;
        Ok((result, missed.map(|why| why.to_string())))
    }

    fn origin(&self) -> Origin {
        if self.is_sure() { Origin::Measured } else { Origin::Prior }
    }

    /// Returns the plan to publish for `result`, with a `warning` and the `verdict` on remote experts.
    pub(crate) fn plan(
        &self,
        result: &PlanningResult,
        warning: Option<String>,
        verdict: Option<PlanVerdict>,
    ) -> MoEPlanSpec {
        let device_bytes = match self.device {
            Device::Cpu => result.evaluation.gpu_bytes,
            Device::Cuda => 0.0,
        };
        let main = MainPlan {
            memory_mb: whole_megabytes(result.plan.main_bytes),
            cpu_millicores: result.plan.main_vcpus.map(whole_millicores),
            limit_mb: whole_megabytes(result.plan.main_bytes + device_bytes),
            kv_cache_bytes: self.memory.kv_cache_bytes,
            fallback_bytes: self.memory.fallback_bytes,
        };
        let groups = group_plans(&self.moe_layers, &result.plan.groups);
        // Groups host all remote experts.
        let remote = match groups.is_empty() {
            true => layer_plans(&self.moe_layers, &result.plan.layers),
            false => Vec::new(),
        };
        let numbers = numbers(result);
        MoEPlanSpec {
            deployment: self.deployment.clone(),
            inputs: self.inputs.clone(),
            model: self.model.clone(),
            device: self.device,
            profile: self.source,
            workload: self.workload.clone(),
            main,
            shown: Some(shown(&numbers, remote.len(), groups.len())),
            remote,
            groups,
            numbers,
            verdict,
            warning: warning.map(|text| text.chars().take(MAX_WARNING_CHARS).collect()),
            prediction: self.prediction.clone(),
            basis: self.basis.text(),
        }
    }

    /// Converts `plan` to the planner's form; absent if it does not fit this problem.
    fn draft(&self, plan: &MoEPlanSpec) -> Option<PlanDraft> {
        let weights = |model: &PlannedModel| {
            (model.digest.clone(), model.dtype, model.experts_dtype, model.dense_dtype)
        };
        let same = weights(&plan.model) == weights(&self.model);
        let draft = draft(plan, &self.moe_layers, &self.problem).ok().filter(|_| same)?;
        // A corrupted plan, or one of another version, must not block a better one.
        PlanAccount::new(self.problem.clone(), &draft).is_ok().then_some(draft)
    }
}

/// Returns the hash of `inputs` with `prediction`.
fn expecting(inputs: &str, prediction: &PlannedPrediction) -> Result<String, serde_json::Error> {
    digest(&(inputs, prediction.revision, &prediction.shares))
}

/// Returns the compute dtype: the spec's, else the checkpoint's own.
pub(crate) fn compute_dtype(spec: &MoEDeploymentSpec, facts: &ModelFacts) -> ComputeDtype {
    let own = match facts.inspection.dtype.as_str() {
        "bfloat16" => ComputeDtype::Bfloat16,
        _ => ComputeDtype::Float32,
    };
    spec.model.dtype.unwrap_or(own)
}

/// Returns the model as the spec has it served.
pub(crate) fn served(spec: &MoEDeploymentSpec, facts: &ModelFacts) -> Inspection {
    let model = &spec.model;
    let (experts, dense) = (model.experts_dtype.map(Into::into), model.dense_dtype.map(Into::into));
    let inspection = facts.inspection.clone().kept_as(experts, dense, spec.main.device.name());
    let inspection = Inspection { kv_cache_dtype: model.kv_cache_dtype.map(Into::into), ..inspection };
    match spec.model.max_model_len {
        Some(positions) => Inspection {
            context_length: inspection.context_length.min(positions as usize),
            served_context: None,
            ..inspection
        },
        None => inspection,
    }
}

/// Refuses more GPUs than a main function uses. Objects stored by older versions may have any number.
fn check_gpus(spec: &MoEDeploymentSpec) -> Result<(), PlanningError> {
    let Some(gpu) = spec.main.gpu.as_ref().filter(|gpu| gpu.count != 1) else { return Ok(()) };
    let message = format!("is {}, {ONE_GPU}", gpu.count);
    Err(PlanningError::Spec { field: "main.gpu.count".to_owned(), message })
}

/// Refuses more positions than the model supports, as main functions do.
fn check_positions(spec: &MoEDeploymentSpec, facts: &ModelFacts) -> Result<(), PlanningError> {
    let most = facts.inspection.context_length;
    let Some(positions) = spec.model.max_model_len.filter(|positions| *positions as usize > most) else {
        return Ok(());
    };
    let message = format!("is {positions}, expected at most {most}, the context length of the model");
    Err(PlanningError::Spec { field: "model.maxModelLen".to_owned(), message })
}

/// Refuses dtypes of dense weights that main functions do not support.
fn check_dense_dtype(spec: &MoEDeploymentSpec, computed_in: ComputeDtype) -> Result<(), PlanningError> {
    let message = match (spec.model.dense_dtype, computed_in) {
        (Some(asked @ (DenseDtype::Int8 | DenseDtype::Int4)), _) if spec.main.device == Device::Cuda => {
            let asked = remoe_model::DenseDtype::from(asked).name();
            format!("is {asked}, which is not supported on GPUs; omit it, or use device cpu")
        }
        (Some(asked @ DenseDtype::Bfloat16), ComputeDtype::Float32)
        | (Some(asked @ DenseDtype::Float32), ComputeDtype::Bfloat16) => {
            let asked = remoe_model::DenseDtype::from(asked).name();
            format!("is {asked}, expected the compute dtype {}, or omit it", computed_in.name())
        }
        _ => return Ok(()),
    };
    Err(PlanningError::Spec { field: "model.denseDtype".to_owned(), message })
}

/// Refuses KV-cache dtypes that main functions do not support on the device.
fn check_kv_cache_dtype(spec: &MoEDeploymentSpec) -> Result<(), PlanningError> {
    match spec.model.kv_cache_dtype {
        Some(KvCacheDtype::Int8) if spec.main.device == Device::Cuda => Err(PlanningError::Spec {
            field: "model.kvCacheDtype".to_owned(),
            message: "is int8, which is not supported on GPUs; omit it, or use device cpu".to_owned(),
        }),
        Some(KvCacheDtype::Int8) | None => Ok(()),
    }
}

/// Returns whether the times of the device are assumed.
fn has_assumed_device(profile: &Profile) -> bool {
    profile.device.is_some_and(|times| times.assumed)
}

/// Returns the profile with the figures of `device` only.
fn on_device(profile: &Profile, device: Device) -> Result<Profile, PlanningError> {
    match (device, profile.device) {
        (Device::Cuda, None) => Err(PlanningError::Profile(
            "invalid profile: measured without a GPU; make one on such a node with remoe-agent profile --device \
             cuda (image remoe-main-cuda)"
                .to_owned(),
        )),
        (Device::Cuda, Some(_)) => Ok(profile.clone()),
        // Such a profile was measured with LibTorch, whose times on CPUs differ.
        (Device::Cpu, Some(_)) if profile.origin == Origin::Measured => {
            let refused = profile.check_device(device.name());
            refused.map(|()| profile.clone()).map_err(|error| PlanningError::Profile(error.to_string()))
        }
        (Device::Cpu, _) => Ok(Profile { device: None, ..profile.clone() }),
    }
}

fn whole_megabytes(bytes: f64) -> u32 {
    // Sizes are checked to be finite and far below overflow.
    (bytes / MB as f64).ceil() as u32
}

fn whole_millicores(vcpus: f64) -> u32 {
    // Ranges are whole millicores; other values are rounded, to at least one.
    ((vcpus * 1000.0).round() as u32).max(1)
}
