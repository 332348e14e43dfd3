//! Cost and times of a request with known routing under a plan.

use crate::error::ExperimentError;
use crate::scenario::{Scenario, SimulatedRequest};
use remoe_planner::Plan;
use serde::Serialize;

/// Cost in dollars and times in seconds of one request.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RequestOutcome {
    /// Dollars.
    pub cost: f64,
    /// Prefill of all layers; no cold start.
    pub ttft_seconds: f64,
    /// One decode step.
    pub tpot_seconds: f64,
}

impl RequestOutcome {
    /// Reports if the times keep the limits of `scenario`.
    #[must_use]
    pub fn is_in_time(&self, scenario: &Scenario) -> bool {
        let slo = scenario.setting.slo;
        self.ttft_seconds <= slo.ttft_seconds && self.tpot_seconds <= slo.tpot_seconds
    }
}

impl Scenario {
    /// Returns the outcome of `plan` for `request` with its true shares: those of its prefill, and those of its decode steps.
    ///
    /// Within a phase the cost model applies: experts of a token are drawn by these shares.
    ///
    /// # Errors
    /// The plan is invalid for this model.
    pub fn outcome(
        &self,
        plan: &Plan,
        request: &SimulatedRequest,
    ) -> Result<RequestOutcome, ExperimentError> {
        let steps = self.setting.decode_steps;
        let evaluate = |shares: &Vec<Vec<f64>>, steps: f64| {
            self.evaluate(&self.problem(request.input_tokens, steps, shares.clone())?, plan)
        };
        // The costs of both phases add up under either kind of billing.
        let prefill = evaluate(&request.prefill, 0.0)?;
        let (with, without) = (evaluate(&request.decode, steps)?, evaluate(&request.decode, 0.0)?);
        Ok(RequestOutcome {
            cost: prefill.total_cost + with.total_cost - without.total_cost,
            ttft_seconds: prefill.ttft_seconds,
            tpot_seconds: with.tpot_seconds,
        })
    }
}
