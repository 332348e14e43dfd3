//! Time of decode steps by the context that they attend to.

use crate::generate;

use generate::{BEYOND, beyond, small_problem};
use remoe_planner::{CpuProfile, Device, Evaluation, Options, PlanDraft, Problem, Remote, evaluate, solve};
use serde_json::json;

/// vCPUs between which a token of context takes from 200 down to 10 microseconds in each layer.
const VCPUS: [f64; 2] = [0.3, 3.0];
const PER_TOKEN: [f64; 2] = [2e-4, 1e-5];
const MEASURED: f64 = 100.0;

fn per_token(vcpus: f64) -> f64 {
    let place = ((vcpus - VCPUS[0]) / (VCPUS[1] - VCPUS[0])).clamp(0.0, 1.0);
    PER_TOKEN[0] + (PER_TOKEN[1] - PER_TOKEN[0]) * place
}

fn mean_context(problem: &Problem) -> f64 {
    problem.request.input_tokens + (problem.request.output_tokens + 1.0) / 2.0
}

fn with_context(problem: &Problem) -> Problem {
    let mut problem = problem.clone();
    for layer in &mut problem.layers {
        layer.cpu_context_seconds = Some(CpuProfile {
            vcpus: VCPUS.to_vec(),
            tokens: vec![MEASURED],
            seconds: vec![PER_TOKEN.iter().map(|seconds| seconds * MEASURED).collect()],
        });
        layer.context_seconds_per_token = 3e-6;
    }
    problem
}

/// A plan with every other expert of each layer in one group, and the largest functions.
fn evaluated(problem: &Problem) -> Evaluation {
    let away = |experts: u32| (0..experts).filter(|expert| expert % 2 == 1).collect::<Vec<u32>>();
    let layers: Vec<_> = problem
        .layers
        .iter()
        .map(|layer| json!({"remote": away(layer.experts), "memory_bytes": 0, "replicas": 0}))
        .collect();
    let hosted: Vec<String> = problem
        .layers
        .iter()
        .enumerate()
        .map(|(index, layer)| {
            let ids: Vec<String> = away(layer.experts).iter().map(u32::to_string).collect();
            format!("{index}:{}", ids.join(","))
        })
        .collect();
    let specs = &problem.specs;
    let plan = json!({
        "main_bytes": specs.main.largest(), "main_vcpus": specs.main_vcpus.map(|range| range.largest()),
        "layers": layers,
        "groups": [{
            "experts": hosted.join(","), "replicas": 1, "memory_bytes": specs.remote.largest(),
            "vcpus": specs.remote_vcpus.map(|range| range.largest()),
        }],
    });
    evaluate(problem, &PlanDraft::from_json(&plan.to_string()).unwrap(), false).unwrap()
}

#[test]
fn every_request_of_a_step_attends_to_its_own_context() {
    let mut compared = [0, 0];
    for seed in 0..120 {
        let (_, form) = BEYOND[seed as usize % BEYOND.len()];
        let mut problem = beyond(&small_problem(seed, 2), form);
        problem.pricing.memory_per_gb_second.get_or_insert(0.1);
        if problem.request.output_tokens == 0.0 {
            continue;
        }
        let on_cpu = problem.device == Device::Cpu;
        compared[usize::from(on_cpu)] += 1;
        let (without, with) = (evaluated(&problem), evaluated(&with_context(&problem)));
        let specs = &problem.specs;
        let vcpus = specs.main_vcpus.map_or(specs.main.largest() / 1e9, |range| range.largest());
        let each = if on_cpu { per_token(vcpus) } else { 3e-6 };
        let one = problem.layers.len() as f64 * each * mean_context(&problem);
        let near = |value: f64, expected: f64| (value - expected).abs() <= 1e-9 * expected.abs().max(1e-6);
        assert_eq!(with.prefill_seconds, without.prefill_seconds, "{seed}");
        assert!(
            near(with.decode_seconds - without.decode_seconds, problem.request.output_tokens * one),
            "{seed}: {} {} {one}",
            with.decode_seconds,
            without.decode_seconds
        );
        for (with, without) in with.steps.iter().zip(&without.steps) {
            assert!(
                near(with.seconds - without.seconds, with.requests * one),
                "{seed}: {with:?} {without:?}"
            );
        }
        // Functions that are always there cost the same however long requests take.
        let is_there = problem.arrivals.as_ref().is_some_and(|arrivals| arrivals.idle_seconds.is_none());
        let (cost, than) = (with.total_cost, without.total_cost);
        assert!(if is_there { near(cost, than) } else { cost > than }, "{seed}: {cost} {than}");
    }
    assert!(compared.iter().all(|count| *count >= 25), "{compared:?}");
}

/// The plan without remote experts has the cheapest main function that keeps the limits with context.
#[test]
fn plans_count_the_context() {
    let mut other = 0;
    for seed in (1..240).step_by(3) {
        let plain = small_problem(seed, 2);
        let mut problem = with_context(&plain);
        assert_eq!(problem.device, Device::Cpu);
        // Long answers.
        problem.request.output_tokens = 2000.0;
        problem.slo = remoe_planner::Slo::new(1e6, 1e6);
        let options = Options { remote: Remote::Never, ..Options::default() };
        let Ok(answer) = solve(&problem, None, &options) else { continue };
        let sizes = (0..64)
            .map(|step| problem.specs.main.min_bytes + f64::from(step) * problem.specs.main.step_bytes);
        let costs = sizes.take_while(|bytes| *bytes <= problem.specs.main.max_bytes).filter_map(|bytes| {
            let plan = json!({"main_bytes": bytes, "layers": [{}, {}]}).to_string();
            let evaluation = evaluate(&problem, &PlanDraft::from_json(&plan).ok()?, false).ok()?;
            evaluation.violations.is_empty().then_some((evaluation.total_cost, bytes))
        });
        let (cost, _) = costs.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
        assert!(
            (answer.evaluation.total_cost / cost - 1.0).abs() < 1e-9,
            "{seed}: {} {cost}",
            answer.evaluation.total_cost
        );
        let blind = Problem { request: problem.request.clone(), slo: problem.slo, ..plain };
        let blind = solve(&blind, None, &options).unwrap();
        other += usize::from(blind.plan.main_bytes != answer.plan.main_bytes);
    }
    assert!(other >= 5, "{other}");
}
