//! Figures 5 and 10 of the Remoe paper: time and cost over the lengths of prompt and output.

use crate::costs::{ClassPlans, Strategy, StrategyCost};
use crate::error::ExperimentError;
use crate::scenario::Scenario;
use serde::Serialize;

/// Token counts of figure 5.
const TOKENS: [f64; 6] = [32.0, 64.0, 128.0, 256.0, 512.0, 1024.0];
/// Decode steps per token of the prompt in figure 10.
const STEPS_PER_TOKEN: [f64; 7] = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0];

/// Seconds of a prefill and of as many decode steps, under MIX.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Phases {
    /// Tokens of the prompt, and decode steps.
    pub tokens: f64,
    /// The prefill.
    pub prefill_seconds: f64,
    /// The decode steps.
    pub decode_seconds: f64,
}

/// Expected cost of a request at one ratio of output length to prompt length.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LengthRatio {
    /// Tokens of the prompt.
    pub input_tokens: f64,
    /// Decode steps.
    pub decode_steps: f64,
    /// Expected dollars under each feasible strategy of the paper.
    pub costs: Vec<StrategyCost>,
}

/// Computes figure 5: seconds of prefill and decode over the number of tokens, with MIX's main function for the class.
///
/// # Errors
/// The scenario is invalid, or no size holds all experts.
pub fn phases(scenario: &Scenario, plans: &ClassPlans) -> Result<Vec<Phases>, ExperimentError> {
    let Some(mix) = plans.baseline(Strategy::Mix) else { return Ok(Vec::new()) };
    let plan = scenario.all_local(mix.main_bytes);
    let at = |tokens: f64| {
        let problem = scenario.problem(tokens, tokens, scenario.class_prediction())?;
        let evaluation = scenario.evaluate(&problem, &plan)?;
        Ok(Phases {
            tokens,
            prefill_seconds: evaluation.prefill_seconds,
            decode_seconds: evaluation.decode_seconds,
        })
    };
    TOKENS.into_iter().map(at).collect()
}

/// Computes figure 10: the class's expected cost over the length of outputs, with a plan for each length.
///
/// # Errors
/// The scenario is invalid, or no plan keeps its limits.
pub fn ratios(scenario: &Scenario) -> Result<Vec<LengthRatio>, ExperimentError> {
    let at = |per_token: f64| {
        let mut of_length = scenario.clone();
        let input_tokens = scenario.class_problem()?.request.input_tokens;
        of_length.setting.decode_steps = (input_tokens * per_token).round();
        let plans = ClassPlans::of(&of_length)?;
        let decode_steps = of_length.setting.decode_steps;
        Ok(LengthRatio { input_tokens, decode_steps, costs: plans.of_the_paper() })
    };
    STEPS_PER_TOKEN.into_iter().map(at).collect()
}
