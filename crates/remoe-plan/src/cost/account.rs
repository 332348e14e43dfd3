//! Expectation and bill of single requests under a plan that runs.

use crate::cost::Evaluation;
use crate::cost::main_size::MainSize;
use crate::cost::rivals::Rivals;
use crate::error::FieldError;
use crate::model::Model;
use crate::plan::{Plan, PlanDraft, read_file};
use crate::problem::{Billing, Pricing, Problem, Request};
use crate::read::of_any_version;
use serde::{Deserialize, Serialize};
use std::sync::OnceLock;

/// A plan that runs, with the problem that it was made for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlanAccount {
    problem: Problem,
    plan: Plan,
    #[serde(skip)]
    rivals: OnceLock<Rivals>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AccountFile {
    problem: Problem,
    plan: PlanDraft,
}

/// Reason that a problem and a plan make no account.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AccountError {
    /// The problem has a field with an impossible value.
    #[error("problem: {0}")]
    Problem(FieldError),
    /// The plan does not belong to the problem.
    #[error("plan: {0}")]
    Plan(FieldError),
}

/// Times and cost of a request: as expected from warm functions, or as measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Outcome {
    /// Time to first token, without a cold start.
    #[serde(rename = "ttft_s")]
    pub ttft_seconds: f64,
    /// Time per output token; 0 where only one is generated.
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
    /// From its arrival to the first token, waiting included.
    pub ttft_seconds: f64,
    /// From the start of its computation to the first token.
    pub prefill_seconds: f64,
    /// From the first token to the last.
    pub decode_seconds: f64,
    /// Computation that remote functions reported, all together.
    pub remote_seconds: f64,
    /// Calls of remote functions.
    pub remote_calls: u64,
}

impl Measured {
    /// Decode steps: the first token comes out of the prefill.
    fn steps(&self) -> usize {
        self.output_tokens.saturating_sub(1)
    }
}

impl PlanAccount {
    /// # Errors
    /// Problem and plan do not belong together.
    pub fn new(problem: Problem, plan: &PlanDraft) -> Result<Self, AccountError> {
        let model = Model::with_prediction(&problem).map_err(AccountError::Problem)?;
        let plan = model.plan(plan).map_err(AccountError::Plan)?;
        Ok(Self { problem, plan, rivals: OnceLock::new() })
    }

    /// Reads what [`Self`] serialises to, in this or another version: `{"problem": .., "plan": ..}`.
    ///
    /// # Errors
    /// The first field that is missing, of the wrong type or out of range.
    pub fn from_json(text: &str) -> Result<Self, AccountError> {
        let form: AccountFile = of_any_version(text).map_err(AccountError::Problem)?;
        form.problem.check().map_err(AccountError::Problem)?;
        Self::new(form.problem, &form.plan)
    }

    /// Reads a plan file: the output of `remoe plan --json`. None where the file does not state its problem.
    ///
    /// # Errors
    /// The first field that is missing, unknown, stated twice, of the wrong type or out of range.
    pub fn from_plan_file(text: &str) -> Result<Option<Self>, AccountError> {
        let (plan, problem) = read_file::<Problem>(text).map_err(AccountError::Plan)?;
        let Some(problem) = problem else { return Ok(None) };
        problem.check().map_err(AccountError::Problem)?;
        Self::new(problem, &plan).map(Some)
    }

    /// As above where all functions run on one machine with so many cores.
    #[must_use]
    pub fn on_one_machine(mut self, cores: u32) -> Self {
        self.problem.shared_cores = Some(f64::from(cores.max(1)));
        self
    }

    /// The main function's size.
    #[must_use]
    pub fn main_size(&self) -> MainSize {
        MainSize::of(&self.problem, self.plan.main_bytes, self.plan.main_vcpus)
    }

    /// The prices that the plan was made for.
    #[must_use]
    pub fn pricing(&self) -> &Pricing {
        &self.problem.pricing
    }

    /// Dollars per second of the main function while it is alive, GPUs included.
    #[must_use]
    pub fn main_per_second(&self) -> f64 {
        Model::new(&self.problem).main_rate(&self.plan)
    }

    /// Dollars that a request of `input` tokens with `steps` decode steps would cost as the baselines serve it, alone
    /// and warm, each at the size that it would have for this problem. What they cost is worked out at the first
    /// call.
    pub fn rivals(&self, input: usize, steps: usize) -> impl Iterator<Item = (&'static str, f64)> {
        let rivals = self.rivals.get_or_init(|| Rivals::of(&self.problem, |input| self.request(input, 1.0)));
        rivals.cost(input, steps)
    }

    /// Problem that it was planned for.
    #[must_use]
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Expected outcome of the typical request when it runs alone.
    #[must_use]
    pub fn expect_typical(&self) -> Outcome {
        let request = &self.problem.request;
        self.expect(request.input_tokens.round() as usize, request.output_tokens.round() as usize)
    }

    /// Expected outcome of a request of `input` tokens with `steps` decode steps.
    #[must_use]
    pub fn expect(&self, input: usize, steps: usize) -> Outcome {
        Outcome::from(&self.evaluate(input, steps))
    }

    /// Outcome that the plan expected of a request of this length, beside the measured one.
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

    /// Cost of a request of which `expected` was expected. Main functions are paid for the time that it
    /// took; remote ones too under reserved billing, else for what they reported with the planned time of
    /// the ways, at the planned mean rate of the functions that worked.
    fn bill(&self, measured: &Measured, expected: &Evaluation) -> f64 {
        let seconds = measured.prefill_seconds + measured.decode_seconds;
        let (planned, worked) = if self.problem.pricing.billing == Billing::Reserved {
            (expected.prefill_seconds + expected.decode_seconds, seconds)
        } else {
            let of_prefill = expected.layers.iter().flat_map(|layer| &layer.replica_seconds).sum::<f64>();
            let of_step = expected.layers.iter().map(|layer| layer.remote_decode_billed).sum::<f64>();
            let ways = measured.remote_calls as f64 * self.problem.transport.round_trip();
            (of_prefill + measured.steps() as f64 * of_step, measured.remote_seconds + ways)
        };
        let per_second = |cost: f64, seconds: f64| if seconds > 0.0 { cost / seconds } else { 0.0 };
        let main = per_second(expected.main_cost, expected.prefill_seconds + expected.decode_seconds);
        seconds * main + worked * per_second(expected.remote_cost, planned)
    }

    fn evaluate(&self, input: usize, steps: usize) -> Evaluation {
        let request = self.request(input.max(1) as f64, steps as f64);
        // What one request takes when it runs alone is what can be measured of it.
        let problem = Problem { request, arrivals: None, ..self.problem.clone() };
        Model { is_rested: true, ..Model::new(&problem) }.evaluate(&self.plan)
    }

    /// One request that runs alone. Memory and what it costs stay those of the plan.
    fn request(&self, input_tokens: f64, output_tokens: f64) -> Request {
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
