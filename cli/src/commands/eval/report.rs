//! The results of all experiments as one JSON object.

use super::inputs::Inputs;
use remoe_experiments::{
    ClassPlans, ColdStart, Costs, CpuScaling, Decisions, ExperimentError, ExpertTime, INPUT_TOKENS,
    LengthRatio, Machine, Phases, REQUESTS, Routing, Scenario, Sensitivity, Setting, Shape, cold_starts,
    costs, expert_time, phases, ratios,
};
use remoe_planner::{Options, PlanError, preallocate, solve};
use serde::Serialize;
use std::time::Instant;

/// Everything that was found out, and what it rests on.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) assumptions: Assumptions,
    pub(super) scenarios: Vec<ScenarioReport>,
    pub(super) sensitivities: Vec<SensitivityReport>,
}

/// Assumptions of the results.
#[derive(Debug, Serialize)]
pub(super) struct Assumptions {
    /// Where the prices come from.
    pub(super) prices: String,
    pub(super) setting: Setting,
    /// The assumed machine; how far one product spreads differs from scenario to scenario.
    pub(super) machine: Machine,
    pub(super) routing: Routing,
    pub(super) requests: usize,
    /// Prompt tokens of requests without records.
    pub(super) input_tokens: f64,
    /// The profile of the user's model.
    pub(super) profile: Option<String>,
    /// The records of the user's model.
    pub(super) records: Option<String>,
}

/// The figures of one scenario.
#[derive(Debug, Serialize)]
pub(super) struct ScenarioReport {
    pub(super) name: String,
    /// Meaning of the name.
    pub(super) meaning: String,
    pub(super) shape: Shape,
    /// Expert seconds over remote ratio.
    pub(super) figure_4: Vec<ExpertTime>,
    /// Prefill against decode.
    pub(super) figure_5: Vec<Phases>,
    /// Cost of requests.
    pub(super) figure_9: Costs,
    /// Cost over the length of answers.
    pub(super) figure_10: Vec<LengthRatio>,
    /// Cold starts.
    pub(super) figure_11: Vec<ColdStart>,
    /// Measured in this run.
    pub(super) decisions: Decisions,
}

/// Figure 9 under other assumptions.
#[derive(Debug, Serialize)]
pub(super) struct SensitivityReport {
    pub(super) model: String,
    pub(super) rows: Vec<Sensitivity>,
}

impl Assumptions {
    pub(super) fn of(inputs: &Inputs, routing: Routing) -> Self {
        let prices = match &inputs.prices {
            Some((path, prices)) => {
                let stated = [&prices.source, &prices.date].into_iter().flatten().cloned();
                std::iter::once(path.display().to_string()).chain(stated).collect::<Vec<_>>().join(", ")
            }
            None => {
                "AWS Lambda's list price of a GB-second, 3 times that on a GPU (Remoe paper, IV-E)".to_owned()
            }
        };
        let own = inputs.own.as_ref();
        let profile = own.and_then(|own| own.profile.as_ref()).map(|(path, profile)| {
            format!(
                "{} ({}, {}, {})",
                path.display(),
                profile.machine.cpu,
                profile.model.dtype,
                profile.made.date
            )
        });
        let records = own.and_then(|own| own.recorded.as_ref());
        let records = records.map(|one| {
            let paths = one.paths.iter().map(|path| path.display().to_string());
            paths.collect::<Vec<_>>().join(", ")
        });
        Self {
            prices,
            setting: inputs.setting,
            machine: Machine::reference(CpuScaling::Wide),
            routing,
            requests: REQUESTS,
            input_tokens: INPUT_TOKENS,
            profile,
            records,
        }
    }
}

impl ScenarioReport {
    /// Runs all experiments of one scenario.
    pub(super) fn of(scenario: &Scenario, predict_seconds: Option<f64>) -> Result<Self, ExperimentError> {
        let plans = ClassPlans::of(scenario)?;
        let decisions = decisions(scenario, &plans, predict_seconds)?;
        Ok(Self {
            name: scenario.name.clone(),
            meaning: scenario.meaning.clone(),
            shape: scenario.shape.clone(),
            figure_4: expert_time(scenario, &plans)?,
            figure_5: phases(scenario, &plans)?,
            figure_9: costs(scenario, &plans)?,
            figure_10: ratios(scenario)?,
            figure_11: cold_starts(scenario, &plans, decisions),
            decisions,
        })
    }
}

/// How long the decisions of a cold start take here and now.
fn decisions(
    scenario: &Scenario,
    plans: &ClassPlans,
    predict_seconds: Option<f64>,
) -> Result<Decisions, ExperimentError> {
    let failed = |error| ExperimentError::Plan { scenario: scenario.name.clone(), error };
    let started = Instant::now();
    match preallocate(&plans.problem) {
        // That no ratio keeps the limits in the worst case takes the same time to find out.
        Ok(_) | Err(PlanError::Infeasible(_)) => {}
        Err(error) => return Err(failed(error)),
    }
    let preallocate_seconds = started.elapsed().as_secs_f64();
    let started = Instant::now();
    solve(&plans.problem, None, &Options::default()).map_err(failed)?;
    Ok(Decisions { predict_seconds, preallocate_seconds, solve_seconds: started.elapsed().as_secs_f64() })
}
