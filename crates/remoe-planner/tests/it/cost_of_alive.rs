//! Comparison of each part of a plan's cost with the alive seconds of simulated engines times the price of the functions.

// Only how long functions are alive is read here.
#[allow(dead_code)]
use crate::engine;
use crate::generate;

use engine::{Lengths, Setting, observe};
use generate::{ExtendedDecisions, SplitMix64, beyond, small_problem};
use remoe_planner::{Device, Options, Problem, Remote, solve};

/// A problem with groups, vCPUs, and requests so rare that functions end between them.
fn problem(seed: u64) -> Problem {
    let random = &mut SplitMix64::new(seed);
    let idle_seconds = random.between(1.0, 100.0);
    // From a request in three windows to three in one.
    let per_second = 3f64.powf(random.between(-1.0, 1.0)) / idle_seconds;
    let form = ExtendedDecisions {
        groups: Some(3),
        vcpus: true,
        per_second: Some(per_second),
        idle_seconds: Some(idle_seconds),
    };
    let mut problem = beyond(&small_problem(seed, 2), form);
    problem.request.output_tokens = problem.request.output_tokens.min(20.0);
    problem.limits.payload_bytes = None;
    (problem.slo.ttft_seconds, problem.slo.tpot_seconds) = (1e3, 1e2);
    (problem.slo.cold_ttft_seconds, problem.slo.cold_share) = (None, None);
    problem
}

/// Dollars per second of the non-expert part.
fn device_rate(problem: &Problem, bytes: f64) -> f64 {
    let pricing = &problem.pricing;
    match (problem.device, pricing.gpu_bytes_each, pricing.gpu_per_second_each) {
        (Device::Cpu, ..) => pricing.memory_per_gb_second.unwrap() * bytes / 1e9,
        (Device::Gpu, Some(each), Some(price)) => (bytes / each).ceil() * price,
        (Device::Gpu, ..) => pricing
            .gpu_per_gb_second
            .map_or_else(|| pricing.function_rate(bytes, None), |price| price * bytes / 1e9),
    }
}

#[test]
fn cost_with_arrivals_is_alive_seconds_times_rates() {
    let (mut compared, mut with_groups, mut worst) = (0, 0, 0.0_f64);
    for seed in 0..60 {
        let problem = problem(seed);
        let remote = if seed % 3 == 0 { Remote::Auto } else { Remote::Always };
        let Ok(answer) = solve(&problem, None, &Options { remote, ..Options::default() }) else { continue };
        let (plan, evaluation) = (&answer.plan, &answer.evaluation);
        let life = evaluation.life.unwrap();
        if life.utilisation > 0.3 || !plan.layers.iter().all(|layer| layer.replicas == 0) {
            continue;
        }
        let arrivals = problem.arrivals.as_ref().unwrap();
        // The slowest function starts as long as its weights load.
        let starts = problem.starts.unwrap();
        let weights = |experts: &[usize]| -> f64 {
            let layers = problem.layers.iter().zip(experts);
            layers.map(|(layer, count)| *count as f64 * layer.expert_bytes).sum()
        };
        let local: Vec<usize> = problem
            .layers
            .iter()
            .zip(&plan.layers)
            .map(|(layer, part)| layer.experts as usize - part.remote.len())
            .collect();
        let rest: f64 =
            problem.layers.iter().map(|layer| layer.nonexpert_bytes).sum::<f64>() + problem.head_bytes;
        let loading = |start: remoe_planner::Start, bytes: f64| {
            start.process_seconds + bytes / start.load_bytes_per_second
        };
        let of_groups = plan.groups.iter().map(|group| {
            let counts: Vec<usize> = group.experts.iter().map(Vec::len).collect();
            loading(starts.remote, weights(&counts))
        });
        let start_seconds = of_groups.fold(loading(starts.main, rest + weights(&local)), f64::max);
        // Between the batches that an evaluation has, steps are linear.
        let slots = problem.request.concurrency as usize;
        let step = |rows: usize| {
            let rows = rows as f64;
            let above = evaluation.steps.iter().position(|step| step.requests >= rows).unwrap();
            let (to, from) = (&evaluation.steps[above], &evaluation.steps[above.saturating_sub(1)]);
            let part = if above == 0 { 0.0 } else { (rows - from.requests) / (to.requests - from.requests) };
            from.seconds + (to.seconds - from.seconds) * part
        };
        let setting = Setting {
            per_second: arrivals.per_second,
            burst: 1.0,
            idle_seconds: arrivals.idle_seconds,
            start_seconds,
            prefill_seconds: evaluation.prefill_seconds,
            step_seconds: (1..=slots).map(step).collect(),
            steps: problem.request.output_tokens,
            lengths: Lengths::Fixed,
            prefill_variation: 0.0,
            target_itl: None,
            slots,
            mains: problem.pricing.main_replicas as usize,
        };
        if setting.steps < 1.0 {
            continue;
        }
        let seen = observe(&setting, 20_000, seed);
        let seconds_per_request = seen.share / arrivals.per_second;
        let main = problem.pricing.function_rate(plan.main_bytes, plan.main_vcpus)
            + device_rate(&problem, evaluation.gpu_bytes);
        let groups: f64 = plan
            .groups
            .iter()
            .map(|group| {
                f64::from(group.replicas) * problem.pricing.function_rate(group.memory_bytes, group.vcpus)
            })
            .sum();
        let parts = [
            (evaluation.main_cost, seconds_per_request * main * setting.mains as f64),
            (evaluation.remote_cost, seconds_per_request * groups),
        ];
        for (stated, simulated) in parts.into_iter().filter(|(stated, _)| *stated > 0.0) {
            let error = (stated / simulated - 1.0).abs();
            worst = worst.max(error);
            assert!(error <= 0.02, "{seed}: {stated} {simulated} {life:?}");
        }
        let sum = evaluation.main_cost + evaluation.remote_cost;
        assert!((evaluation.total_cost / sum - 1.0).abs() < 1e-12, "{seed}");
        compared += 1;
        with_groups += usize::from(!plan.groups.is_empty());
    }
    println!("{compared} plans, {with_groups} with groups, {worst} at most");
    assert!(compared >= 30 && with_groups >= 20, "{compared} {with_groups}");
}
