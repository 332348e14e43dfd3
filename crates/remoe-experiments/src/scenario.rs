//! Scenario of an experiment: a model on a machine with requests, and its planning problems.

use crate::error::ExperimentError;
use crate::machine::Machine;
use crate::shape::Shape;
use remoe_hardware::{DeploymentRequirements, DeviceTimes, Profile, problem};
use remoe_planner::{
    Billing, Evaluation, GpuProfile, LayerPlan, Limits, Options, Plan, PlanDraft, PlanError, PlanningResult,
    Pricing, Problem, Remote, Slo, evaluate, solve,
};
use serde::Serialize;

/// Shares of assignments, per MoE layer and expert; each row sums to 1.
pub type ExpertShares = Vec<Vec<f64>>;

/// Parameters of all requests.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Setting {
    /// Prices of memory.
    pub pricing: Pricing,
    /// Latency limits, without cold starts.
    pub slo: Slo,
    /// Limits of the platform.
    pub limits: Limits,
    /// Decode steps of a request: generated tokens minus 1.
    pub decode_steps: f64,
}

/// Returns the prices of the paper: per GB-second, GPU memory at 3 times the price of CPU memory (section IV-E), and
/// invocation billing.
///
/// The paper states no absolute price. 1 GB-second costs the list price of AWS Lambda on x86 (0.0000166667 dollars).
#[must_use]
pub fn paper_pricing() -> Pricing {
    const GB_SECOND: f64 = 0.000_016_666_7;
    Pricing {
        cpu_per_gb_second: GB_SECOND,
        memory_per_gb_second: None,
        cpu_per_core_second: None,
        memory_per_vcpu_bytes: None,
        gpu_per_gb_second: Some(3.0 * GB_SECOND),
        gpu_bytes_each: None,
        gpu_per_second_each: None,
        billing: Billing::Invocation,
        main_replicas: 1,
    }
}

/// Tokens of a prompt of 500 characters (Remoe paper, section V-C), at 4 characters per token.
pub const INPUT_TOKENS: f64 = 125.0;

/// Requests of figure 9 (Remoe paper, section V-C).
pub const REQUESTS: usize = 50;

impl Setting {
    /// Returns the parameters of the paper: 200 generated tokens (section V-C) and a payload of 6 MB (section II).
    ///
    /// The paper leaves open: up to 4 replicas, a TTFT limit of 30 s and a TPOT limit of 2 s, which exclude no strategy.
    #[must_use]
    pub fn of_the_paper(pricing: Pricing) -> Self {
        Self {
            pricing,
            slo: Slo::new(30.0, 2.0),
            limits: Limits { payload_bytes: Some(6e6), max_replicas: 4, max_groups: None, gpu_bytes: None },
            decode_steps: 199.0,
        }
    }
}

/// A request with its predicted and its true routing.
#[derive(Debug, Clone, PartialEq)]
pub struct SimulatedRequest {
    /// Tokens of the prompt.
    pub input_tokens: f64,
    /// Predicted shares.
    pub predicted: ExpertShares,
    /// True shares of the prefill.
    pub prefill: ExpertShares,
    /// True shares of the decode steps.
    pub decode: ExpertShares,
}

/// A model on a machine with requests of one class.
#[derive(Debug, Clone, PartialEq)]
pub struct Scenario {
    /// Name in tables and file names.
    pub name: String,
    /// Description.
    pub meaning: String,
    /// The model.
    pub shape: Shape,
    /// Profile of the model on the machine.
    pub profile: Profile,
    /// Seconds of one expert on the machine's GPU.
    pub gpu_expert_seconds: GpuProfile,
    /// Bytes per second from host memory to the machine's GPU.
    pub host_bytes_per_second: f64,
    /// Parameters of all requests.
    pub setting: Setting,
    /// The requests.
    pub requests: Vec<SimulatedRequest>,
}

impl Scenario {
    /// Creates the scenario of `shape` on an assumed machine.
    #[must_use]
    pub fn assumed(
        shape: Shape,
        machine: &Machine,
        setting: Setting,
        requests: Vec<SimulatedRequest>,
    ) -> Self {
        let scaling = machine.cpu.scaling;
        let profile = machine.profile(&shape);
        Self::with_profile(scaling.name(), scaling.meaning(), shape, profile, machine, setting, requests)
    }

    /// Creates the scenario of `shape` on the machine of `profile`.
    ///
    /// The GPU of `machine` is used if the profile has none, and always for experts, which profiles do not measure there.
    #[must_use]
    pub fn measured(
        shape: Shape,
        profile: Profile,
        machine: &Machine,
        setting: Setting,
        requests: Vec<SimulatedRequest>,
    ) -> Self {
        // Times on CPUs include the measured time of the context: the assumed GPU must, too.
        let read = shape.facts.kv_bytes_per_token as f64 / machine.gpu.bytes_per_second;
        let assumed = || DeviceTimes { context_seconds_per_token: read, ..machine.device(&shape) };
        let device = profile.device.or_else(|| Some(assumed()));
        let profile = Profile { device, ..profile };
        Self::with_profile(
            "measured",
            "times as measured, an assumed GPU",
            shape,
            profile,
            machine,
            setting,
            requests,
        )
    }

    fn with_profile(
        times: &str,
        meaning: &str,
        shape: Shape,
        profile: Profile,
        machine: &Machine,
        setting: Setting,
        requests: Vec<SimulatedRequest>,
    ) -> Self {
        let gpu_expert_seconds = machine.gpu_expert_seconds(&shape);
        let host_bytes_per_second = machine.gpu.host_bytes_per_second;
        Self {
            name: format!("{}-{times}", shape.name),
            meaning: format!("{}; {meaning}", shape.source),
            shape,
            profile,
            gpu_expert_seconds,
            host_bytes_per_second,
            setting,
            requests,
        }
    }

    /// Checks that there are requests, with shares for every layer and expert.
    ///
    /// # Errors
    /// No requests, or shares of another shape.
    pub fn check(&self) -> Result<(), ExperimentError> {
        let (layers, experts) = (self.shape.moe_layers(), self.shape.facts.experts);
        for (index, request) in self.requests.iter().enumerate() {
            for rows in [&request.predicted, &request.prefill, &request.decode] {
                if rows.len() != layers || rows.iter().any(|row| row.len() != experts) {
                    let width = rows.first().map_or(0, Vec::len);
                    return Err(ExperimentError::Shares {
                        scenario: self.name.clone(),
                        request: index,
                        found: format!("{} x {width}", rows.len()),
                        expected: format!("{layers} x {experts}"),
                    });
                }
            }
        }
        if self.requests.is_empty() {
            return Err(ExperimentError::NoRequests { scenario: self.name.clone() });
        }
        Ok(())
    }

    /// Returns the mean and the largest number of tokens of a prompt.
    fn input_tokens(&self) -> (f64, f64) {
        let tokens = self.requests.iter().map(|request| request.input_tokens);
        let most = tokens.clone().fold(0.0, f64::max);
        (tokens.sum::<f64>() / self.requests.len().max(1) as f64, most)
    }

    /// Returns the mean of all predictions, which the class is planned with.
    #[must_use]
    pub fn class_prediction(&self) -> ExpertShares {
        let count = self.requests.len().max(1) as f64;
        let mut mean = vec![vec![0.0; self.shape.facts.experts]; self.shape.moe_layers()];
        for request in &self.requests {
            for (sums, row) in mean.iter_mut().zip(&request.predicted) {
                sums.iter_mut().zip(row).for_each(|(sum, share)| *sum += share / count);
            }
        }
        mean
    }

    /// Returns the problem of the class, with its mean prediction and mean length.
    ///
    /// # Errors
    /// An invalid scenario.
    pub fn class_problem(&self) -> Result<Problem, ExperimentError> {
        self.check()?;
        self.problem(self.input_tokens().0, self.setting.decode_steps, self.class_prediction())
    }

    /// Returns the problem of one request with `shares`.
    ///
    /// Memory is that for the longest request of the class, so that all requests are billed for the same functions.
    pub(crate) fn problem(
        &self,
        input_tokens: f64,
        output_tokens: f64,
        shares: ExpertShares,
    ) -> Result<Problem, ExperimentError> {
        let (_, most) = self.input_tokens();
        let wishes = DeploymentRequirements {
            request: remoe_planner::Request {
                input_tokens,
                output_tokens,
                max_input_tokens: Some(most.max(input_tokens)),
                max_output_tokens: Some(self.setting.decode_steps.max(output_tokens)),
                concurrency: 1,
            },
            slo: self.setting.slo,
            pricing: self.setting.pricing,
            specs: self.shape.specs,
            limits: self.setting.limits,
            prediction: Some(shares),
            arrivals: None,
            remote_idle_seconds: None,
            prediction_p95: None,
            fallback_bytes: 0.0,
            cold_start_seconds: 0.0,
        };
        let mut problem = problem(&self.shape.facts, &self.profile, &wishes)
            .map_err(|error| ExperimentError::Problem { scenario: self.name.clone(), error })?;
        for layer in &mut problem.layers {
            layer.gpu_expert_seconds = Some(self.gpu_expert_seconds.clone());
        }
        Ok(problem)
    }

    /// Searches the cheapest plan for `problem`.
    pub(crate) fn solve(&self, problem: &Problem, remote: Remote) -> Result<PlanningResult, ExperimentError> {
        solve(problem, None, &Options { remote, ..Options::default() })
            .map_err(|error| self.plan_error(error))
    }

    /// Evaluates `plan`, also if it breaks limits.
    pub(crate) fn evaluate(&self, problem: &Problem, plan: &Plan) -> Result<Evaluation, ExperimentError> {
        evaluate(problem, &PlanDraft::from(plan), false).map_err(|error| self.plan_error(error))
    }

    pub(crate) fn plan_error(&self, error: PlanError) -> ExperimentError {
        ExperimentError::Plan { scenario: self.name.clone(), error }
    }

    /// Returns the plan with all experts local.
    pub(crate) fn all_local(&self, main_bytes: f64) -> Plan {
        Plan::of_layers(main_bytes, vec![LayerPlan::default(); self.shape.moe_layers()])
    }
}
