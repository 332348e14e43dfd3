//! Expected and actual cost of single requests under a running plan.

use crate::cost::Evaluation;
use crate::cost::baseline_prices::BaselinePrices;
use crate::cost::main_size::MainSize;
use crate::error::FieldError;
use crate::model::Model;
use crate::plan::{Plan, PlanDraft, read_file};
use crate::problem::{Billing, Pricing, Problem, Request};
use crate::read::of_any_version;
use serde::{Deserialize, Serialize};
use std::sync::OnceLock;

/// A running plan, with the problem that it was made for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlanAccount {
    problem: Problem,
    plan: Plan,
    #[serde(skip)]
    baseline_prices: OnceLock<BaselinePrices>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AccountFile {
    problem: Problem,
    plan: PlanDraft,
}

/// Error of creating a [`PlanAccount`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AccountError {
    /// A field of the problem has an invalid value.
    #[error("problem: {0}")]
    Problem(FieldError),
    /// The plan does not belong to the problem.
    #[error("plan: {0}")]
    Plan(FieldError),
}

/// Times and cost of a request on warm functions, expected or measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Outcome {
    /// Time to first token, without a cold start.
    #[serde(rename = "ttft_s")]
    pub ttft_seconds: f64,
    /// Time per output token; 0 if only one token is generated.
    #[serde(rename = "tpot_s")]
    pub tpot_seconds: f64,
    /// Dollars.
    pub cost: f64,
}

impl From<&Evaluation> for Outcome {
    fn from(evaluation: &Evaluation) -> Self {
        Self {
            ttft_seconds: evaluation.prefill_seconds,
            tpot_seconds: evaluation.tpot_seconds,
            cost: evaluation.total_cost,
        }
    }
}

/// Expected and measured outcome of a request.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Comparison {
    /// Outcome that the plan expected of a request of this length.
    pub expected: Outcome,
    /// Measured outcome.
    pub measured: Outcome,
}

/// Measurements of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Tokens of the prompt.
    pub input_tokens: usize,
    /// Tokens generated.
    pub output_tokens: usize,
    /// From its arrival to the first token, including the wait.
    pub ttft_seconds: f64,
    /// From the start of its computation to the first token.
    pub prefill_seconds: f64,
    /// From the first token to the last.
    pub decode_seconds: f64,
    /// CPU seconds that all remote functions reported.
    pub remote_seconds: f64,
    /// Calls of remote functions.
    pub remote_calls: u64,
}

impl Measured {
    /// Returns the number of decode steps: the prefill generates the first token.
    fn steps(&self) -> usize {
        self.output_tokens.saturating_sub(1)
    }
}

impl PlanAccount {
    /// Checks that `plan` belongs to `problem`.
    ///
    /// # Errors
    /// A problem without a prediction, or a plan that does not belong to it.
    pub fn new(problem: Problem, plan: &PlanDraft) -> Result<Self, AccountError> {
        let model = Model::with_prediction(&problem).map_err(AccountError::Problem)?;
        let plan = model.plan(plan).map_err(AccountError::Plan)?;
        Ok(Self { problem, plan, baseline_prices: OnceLock::new() })
    }

    /// Reads the serialised form of this or another version: `{"problem": .., "plan": ..}`.
    ///
    /// # Errors
    /// The first field that is missing, of the wrong type or out of range.
    pub fn from_json(text: &str) -> Result<Self, AccountError> {
        let form: AccountFile = of_any_version(text).map_err(AccountError::Problem)?;
        form.problem.check().map_err(AccountError::Problem)?;
        Self::new(form.problem, &form.plan)
    }

    /// Reads a plan file: the output of `remoe plan --json`. Returns `None` if the file does not contain its problem.
    ///
    /// # Errors
    /// The first field that is missing, unknown, stated twice, of the wrong type or out of range.
    pub fn from_plan_file(text: &str) -> Result<Option<Self>, AccountError> {
        let (plan, problem) = read_file::<Problem>(text).map_err(AccountError::Plan)?;
        let Some(problem) = problem else { return Ok(None) };
        problem.check().map_err(AccountError::Problem)?;
        Self::new(problem, &plan).map(Some)
    }

    /// Returns the account of the same plan if all functions run on one machine with `cores`.
    #[must_use]
    pub fn on_one_machine(mut self, cores: u32) -> Self {
        self.problem.shared_cores = Some(f64::from(cores.max(1)));
        self
    }

    /// Returns the main function's size.
    #[must_use]
    pub fn main_size(&self) -> MainSize {
        MainSize::of(&self.problem, self.plan.main_bytes, self.plan.main_vcpus)
    }

    /// Returns the prices that the plan was made for.
    #[must_use]
    pub fn pricing(&self) -> &Pricing {
        &self.problem.pricing
    }

    /// Returns the dollars per second of the main function while it is alive, including GPUs.
    #[must_use]
    pub fn main_per_second(&self) -> f64 {
        Model::new(&self.problem).main_rate(&self.plan)
    }

    /// Returns what a request of `input` tokens with `steps` decode steps would cost under each baseline, in dollars.
    ///
    /// The request runs alone on warm functions. Each baseline has its cheapest size for this problem. The first call
    /// computes the prices.
    pub fn baseline_costs(&self, input: usize, steps: usize) -> impl Iterator<Item = (&'static str, f64)> {
        let prices = self
            .baseline_prices
            .get_or_init(|| BaselinePrices::new(&self.problem, |input| self.single_request(input, 1.0)));
        prices.cost(input, steps)
    }

    /// Returns the problem that the plan was made for.
    #[must_use]
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Returns the plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the expected outcome of the typical request if it runs alone.
    #[must_use]
    pub fn expect_typical(&self) -> Outcome {
        let request = &self.problem.request;
        self.expect(request.input_tokens.round() as usize, request.output_tokens.round() as usize)
    }

    /// Returns the expected outcome of a request of `input` tokens with `steps` decode steps.
    #[must_use]
    pub fn expect(&self, input: usize, steps: usize) -> Outcome {
        Outcome::from(&self.evaluate(input, steps))
    }

    /// Compares the measured outcome of a request with the expected outcome of one of the same length.
    #[must_use]
    pub fn compare(&self, measured: &Measured) -> Comparison {
        let steps = measured.steps();
        let expected = self.evaluate(measured.input_tokens, steps);
        let per_step = if steps > 0 { measured.decode_seconds / steps as f64 } else { 0.0 };
        Comparison {
            expected: Outcome::from(&expected),
            measured: Outcome {
                ttft_seconds: measured.ttft_seconds,
                tpot_seconds: per_step,
                cost: self.bill(measured, &expected),
            },
        }
    }

    /// Returns the dollars of a measured request. `expected`: the evaluation of a request of the same length.
    ///
    /// Main functions are billed for the time of the request, as are remote functions under reserved billing. Under
    /// invocation billing remote functions are billed for their reported seconds and the planned seconds of the calls, at the
    /// planned mean rate of the called functions.
    fn bill(&self, measured: &Measured, expected: &Evaluation) -> f64 {
        let seconds = measured.prefill_seconds + measured.decode_seconds;
        let (planned_seconds, billed_seconds) = if self.problem.pricing.billing == Billing::Reserved {
            (expected.prefill_seconds + expected.decode_seconds, seconds)
        } else {
            let of_prefill = expected.layers.iter().flat_map(|layer| &layer.replica_seconds).sum::<f64>();
            let of_step = expected.layers.iter().map(|layer| layer.remote_decode_billed).sum::<f64>();
            let call_seconds = measured.remote_calls as f64 * self.problem.transport.round_trip();
            (of_prefill + measured.steps() as f64 * of_step, measured.remote_seconds + call_seconds)
        };
        let per_second = |cost: f64, seconds: f64| if seconds > 0.0 { cost / seconds } else { 0.0 };
        let main = per_second(expected.main_cost, expected.prefill_seconds + expected.decode_seconds);
        seconds * main + billed_seconds * per_second(expected.remote_cost, planned_seconds)
    }

    fn evaluate(&self, input: usize, steps: usize) -> Evaluation {
        let request = self.single_request(input.max(1) as f64, steps as f64);
        // Measurements of a request exclude its wait: the expectation is that of a request that runs alone.
        let problem = Problem { request, arrivals: None, ..self.problem.clone() };
        Model { is_rested: true, ..Model::new(&problem) }.evaluate(&self.plan)
    }

    /// Returns a request that runs alone. The memory for tokens, and so its price, stays that of the plan.
    fn single_request(&self, input_tokens: f64, output_tokens: f64) -> Request {
        let planned = &self.problem.request;
        let largest_input = planned.largest_input();
        Request {
            input_tokens,
            output_tokens,
            max_input_tokens: Some(largest_input),
            max_output_tokens: Some(planned.tokens_in_memory() - largest_input),
            concurrency: 1,
        }
    }
}
