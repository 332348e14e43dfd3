//! Figure 4 of the Remoe paper: time of experts over the ratio of remote experts, at two core counts.

use crate::costs::ClassPlans;
use crate::error::ExperimentError;
use crate::scenario::Scenario;
use remoe_planner::{Layer, LayerPlan, Plan};
use serde::Serialize;

/// vCPUs of the main function and of every remote function (caption of figure 4), with 1 GB each.
pub const CORES: [u32; 2] = [5, 10];

const GB: f64 = 1e9;

/// Seconds of experts at one ratio: computation, and calls of remote functions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ExpertTime {
    /// vCPUs of every function.
    pub cores: u32,
    /// Share of each layer's experts that are remote: the least used ones.
    pub ratio: f64,
    /// All layers of a prefill.
    pub prefill_seconds: f64,
    /// All layers of one decode step.
    pub decode_seconds: f64,
}

/// Computes the times at ratios in steps of an eighth, or of one expert if there are fewer. Memory limits are ignored.
///
/// # Errors
/// The scenario is invalid.
pub fn expert_time(scenario: &Scenario, plans: &ClassPlans) -> Result<Vec<ExpertTime>, ExperimentError> {
    let problem = &plans.problem;
    let prediction = scenario.class_prediction();
    let experts = scenario.shape.facts.experts;
    let steps = experts.min(8);
    let mut times = Vec::new();
    for cores in CORES {
        for step in 0..=steps {
            let count = experts * step / steps;
            let layers = prediction.iter().map(|shares| remote(shares, count, f64::from(cores) * GB));
            let plan = Plan::of_layers(f64::from(cores) * GB, layers.collect());
            let evaluation = scenario.evaluate(problem, &plan)?;
            let fixed = |tokens: f64| 2.0 * problem.swap_seconds.at(tokens);
            let layers = || problem.layers.iter().zip(&evaluation.layers);
            let prefill = layers().map(|(_, layer)| layer.local_prefill.max(layer.remote_prefill));
            let nonexpert = |layer: &Layer| {
                let context = layer.context_seconds_per_token * problem.request.mean_context();
                layer.nonexpert_decode_seconds + context + fixed(1.0)
            };
            let decode = layers().map(|(layer, evaluated)| evaluated.decode - nonexpert(layer));
            times.push(ExpertTime {
                cores,
                ratio: count as f64 / experts as f64,
                prefill_seconds: prefill.sum(),
                decode_seconds: decode.sum(),
            });
        }
    }
    Ok(times)
}

/// Returns the plan of a layer whose `count` least used experts are remote.
fn remote(shares: &[f64], count: usize, memory_bytes: f64) -> LayerPlan {
    let mut by_use: Vec<u32> = (0..shares.len() as u32).collect();
    by_use.sort_by(|a, b| shares[*a as usize].total_cmp(&shares[*b as usize]));
    by_use.truncate(count);
    by_use.sort_unstable();
    match count {
        0 => LayerPlan::default(),
        _ => LayerPlan { remote: by_use, memory_bytes, replicas: 1 },
    }
}
