//! Sensitivity of figure 9 to its assumptions.

use crate::costs::{ClassPlans, StrategyCost};
use crate::error::ExperimentError;
use crate::machine::{CpuScaling, Machine};
use crate::routing::Routing;
use crate::scenario::{Scenario, Setting};
use crate::shape::Shape;
use remoe_planner::Slo;
use serde::Serialize;

/// The class's expected costs under one change of the assumptions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sensitivity {
    /// Description of the changed assumption.
    pub change: String,
    /// Scaling of an expert over vCPUs.
    pub scaling: CpuScaling,
    /// Expected dollars of a request under each feasible strategy of the paper; empty if no plan keeps the limits.
    pub costs: Vec<StrategyCost>,
}

/// Computes the costs with the stated assumptions, then with one of them changed at a time.
///
/// # Errors
/// The scenario is invalid.
pub fn sensitivity(
    shape: &Shape,
    setting: Setting,
    routing: Routing,
    input_tokens: f64,
) -> Result<Vec<Sensitivity>, ExperimentError> {
    let mut rows = Vec::new();
    for scaling in CpuScaling::ALL {
        let machine = Machine::reference(scaling);
        let mut changes = vec![("as stated".to_owned(), machine, setting, routing)];
        for skew in [0.0, 1.4] {
            changes.push((format!("skew {skew}"), machine, setting, Routing { skew, ..routing }));
        }
        for milliseconds in [0.1, 5.0] {
            let invoke_seconds = milliseconds / 1e3;
            let changed = Machine { invoke_seconds, ..machine };
            changes.push((format!("{milliseconds} ms per invocation"), changed, setting, routing));
        }
        for times in [3.0, 10.0] {
            let mut changed = machine;
            changed.gpu.layer_seconds *= times;
            changed.gpu.expert_seconds *= times;
            changes.push((format!("GPU operators launch {times} times as long"), changed, setting, routing));
        }
        for ratio in [1.0, 10.0] {
            let mut pricing = setting.pricing;
            pricing.gpu_per_gb_second = Some(ratio * pricing.cpu_per_gb_second);
            pricing.gpu_bytes_each = None;
            pricing.gpu_per_second_each = None;
            let changed = Setting { pricing, ..setting };
            changes.push((format!("GPU memory {ratio} times the CPU's price"), machine, changed, routing));
        }
        let slo = Slo { tpot_seconds: 0.2, ..setting.slo };
        changes.push(("at most 200 ms per token".to_owned(), machine, Setting { slo, ..setting }, routing));
        for (change, machine, setting, routing) in changes {
            let requests = routing.requests(shape, 1, input_tokens);
            let scenario = Scenario::assumed(shape.clone(), &machine, setting, requests);
            let costs = match ClassPlans::of(&scenario) {
                Ok(plans) => plans.of_the_paper(),
                Err(ExperimentError::Plan { .. }) => Vec::new(),
                Err(other) => return Err(other),
            };
            rows.push(Sensitivity { change, scaling, costs });
        }
    }
    Ok(rows)
}
