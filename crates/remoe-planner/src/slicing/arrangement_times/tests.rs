//! Times of arrangements, compared with evaluations of the same plans.

use super::*;
use crate::generate::{SplitMix64, small_problem};
use remoe_plan::plan::{Group, LayerPlan};
use remoe_plan::problem::{Arrivals, Contention, VcpuRange};

/// Returns a plan whose first `local` experts are local; the others go to the groups in turns.
fn plan(model: &Model<'_>, groups: u32, local: u32, replicas: u32) -> Plan {
    let group = |index: u32| Group {
        experts: model
            .layers
            .iter()
            .map(|layer| (local..layer.experts as u32).filter(|id| id % groups == index).collect())
            .collect(),
        memory_bytes: model.remote_sizes[0],
        vcpus: Some(1.0),
        replicas,
        idle_seconds: None,
    };
    let remote = |layer: &LayerModel| (local..layer.experts as u32).collect();
    let groups = (0..groups).map(group);
    Plan {
        main_bytes: model.main_sizes[0],
        main_vcpus: Some(1.0),
        layers: model
            .layers
            .iter()
            .map(|layer| LayerPlan { remote: remote(layer), ..LayerPlan::default() })
            .collect(),
        groups: groups.filter(|group| group.experts.iter().any(|experts| !experts.is_empty())).collect(),
    }
}

#[test]
fn arrangement_times_equal_evaluated_times() {
    let random = &mut SplitMix64::new(3);
    let mut compared = 0;
    for seed in 0..300 {
        let mut problem = small_problem(seed, 1 + seed as usize % 3);
        let range = Some(VcpuRange { min: 0.5, max: 4.0, step: 0.5 });
        (problem.specs.main_vcpus, problem.specs.remote_vcpus) = (range, range);
        problem.pricing.cpu_per_core_second = Some(0.5);
        problem.pricing.memory_per_gb_second = Some(0.3);
        problem.limits.payload_bytes = None;
        problem.request.concurrency = 4;
        problem.arrivals = Some(Arrivals {
            per_second: 1e-3,
            burst: 1.0,
            recorded_seconds: None,
            idle_seconds: None,
            input_variation: 0.0,
            output_variation: 0.0,
        });
        problem.cpu_quotas = seed.is_multiple_of(2);
        problem.shared_cores = Some(3.0);
        problem.contention = Some(Contention { functions: 5, step: 1.9, prefill: 1.4 });
        let model = Model::new(&problem);
        let replicas = random.whole(1, 3) as u32;
        let mut plan = plan(&model, random.whole(1, 3) as u32, random.whole(0, 2) as u32, replicas);
        if plan.groups.is_empty() {
            continue;
        }
        // At most one vCPU each: experts are assigned to replicas by their times on one vCPU.
        let vcpus = if problem.cpu_quotas { [0.5, 1.0][random.whole(0, 1) as usize] } else { 1.0 };
        plan.main_vcpus = Some(vcpus);
        plan.groups.iter_mut().for_each(|group| group.vcpus = Some(vcpus));
        let nonexpert = NonExpertTimes::new(&model);
        let arrangement = ArrangementTimes::new(&model, &nonexpert, None, &plan, replicas).unwrap();
        let sizing = Sizing { bytes: 0.0, stated: Some(vcpus), vcpus, rate: 1.0 };
        let remote = vec![sizing; plan.groups.len()];
        let pair = SizePair { main: sizing, remote: &remote };
        let times = arrangement.serving_functions(&pair, &pair, false).times;
        let evaluation = model.evaluate(&plan);
        let steps = evaluation.steps.iter().map(|step| step.seconds);
        let all = std::iter::once(evaluation.prefill_seconds).chain(steps);
        for (found, expected) in std::iter::once(times.prefill).chain(times.steps).zip(all) {
            assert!((found - expected).abs() <= 1e-9 * expected, "{seed}: {found} {expected} {plan:?}");
        }
        assert_eq!(evaluation.steps.len(), 3);
        compared += 1;
    }
    assert!(compared >= 200, "{compared}");
}
