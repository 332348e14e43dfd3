//! Plans within a search budget, and plans near a previous plan.

use crate::generate::{
    BEYOND, ExtendedDecisions, Sample, Shape, SplitMix64, beyond, model_problem, next_shares, small_problem,
};
use remoe_planner::{
    Arrivals, Billing, Budget, Options, PlanDraft, PlanError, PlanningResult, Problem, Proceed,
    ReplacementReason, compare, compare_within, evaluate, replan, solve, solve_within,
};
use std::cell::Cell;

/// Hysteresis under which any saving replaces the previous plan.
const EAGER: Options = Options {
    remote: remoe_planner::Remote::Auto,
    robust: false,
    hysteresis: 0.0,
    stands_seconds: 1e12,
    sturdy: 0.0,
    flips: false,
};

/// Copies `problem` with shares that evolved from its own.
fn drifted(problem: &Problem, random: &mut SplitMix64, index: usize) -> Problem {
    let shares = problem.prediction.as_ref().unwrap();
    Problem { prediction: Some(next_shares(random, shares, index)), ..problem.clone() }
}

/// Small problems of all kinds, with a plan for each.
fn small_problems(seeds: impl Iterator<Item = u64>) -> impl Iterator<Item = (u64, Problem, PlanningResult)> {
    seeds.filter_map(|seed| {
        let small = small_problem(seed, 1 + seed as usize % 3);
        let mut problem = match seed as usize % 6 {
            form @ 0..4 => beyond(&small, BEYOND[form].1),
            4 => Problem { remote_idle_seconds: Some(30.0), ..beyond(&small, BEYOND[2].1) },
            _ => small,
        };
        if seed % 7 == 0 {
            problem.pricing.billing = Billing::Invocation;
        }
        let answer = solve(&problem, None, &EAGER).ok()?;
        Some((seed, problem, answer))
    })
}

/// A problem in the shape of a model, with groups that may scale to zero.
fn operator_problem(layers: usize, experts: u32) -> Problem {
    let shape = Shape { layers, experts, top_k: 8, slack: 0.5, gpu_price: 3.0, expert_bytes: 1.2e7, seed: 3 };
    let form =
        ExtendedDecisions { groups: Some(16), vcpus: true, per_second: Some(2e-3), idle_seconds: None };
    Problem { remote_idle_seconds: Some(60.0), ..beyond(&model_problem(shape), form) }
}

/// Asserts that the answer keeps the limits, and costs no more than the previous plan if that keeps them.
fn check(problem: &Problem, previous: &PlanDraft, answer: &PlanningResult, name: &str) {
    let own = evaluate(problem, &PlanDraft::from(&answer.plan), false).unwrap();
    assert!(own.violations.is_empty(), "{name}: {:?}", own.violations);
    let apart = (own.total_cost - answer.evaluation.total_cost).abs();
    assert!(apart <= 1e-9 * own.total_cost, "{name}: {} {}", own.total_cost, answer.evaluation.total_cost);
    let before = evaluate(problem, previous, false).unwrap();
    if before.violations.is_empty() {
        assert!(own.total_cost <= before.total_cost * (1.0 + 1e-9), "{name}: dearer than the previous plan");
    }
    if let Some(bound) = answer.cost_bound {
        assert!(bound <= own.total_cost * (1.0 + 1e-9), "{name}: {bound} {}", own.total_cost);
    }
}

#[test]
fn replan_on_small_problems_keeps_limits_and_never_costs_more() {
    let random = &mut SplitMix64::new(2);
    let sample = Sample::new();
    let (mut planned, mut saved) = (0, 0);
    for (seed, problem, answer) in small_problems(sample.of(0..250)) {
        let previous = PlanDraft::from(&answer.plan);
        let problem = drifted(&problem, random, seed as usize);
        let new = match replan(&problem, &previous, &EAGER, Budget::UNLIMITED) {
            Ok(new) => new,
            Err(PlanError::Infeasible(_)) => {
                assert!(solve(&problem, None, &EAGER).is_err(), "{seed}: a plan was not found");
                continue;
            }
            Err(error) => panic!("{seed}: {error}"),
        };
        check(&problem, &previous, &new, &format!("seed {seed}"));
        assert_eq!(new, replan(&problem, &previous, &EAGER, Budget::UNLIMITED).unwrap(), "{seed}: differs");
        planned += 1;
        let before = evaluate(&problem, &previous, false).unwrap();
        saved += usize::from(new.evaluation.total_cost < before.total_cost * (1.0 - 1e-6));
    }
    assert!(sample.is_enough(planned, 150) && sample.is_enough(saved, 60), "{planned} {saved}");
}

#[test]
fn replan_of_16_x_64_keeps_limits_and_most_of_the_saving() {
    let random = &mut SplitMix64::new(4);
    for (name, problem) in [
        ("sleep", operator_problem(16, 64)),
        ("memory", {
            let shape = Shape {
                layers: 16,
                experts: 64,
                top_k: 8,
                slack: 0.2,
                gpu_price: 3.0,
                expert_bytes: 1.2e7,
                seed: 3,
            };
            let form =
                ExtendedDecisions { groups: Some(16), vcpus: false, per_second: None, idle_seconds: None };
            beyond(&model_problem(shape), form)
        }),
    ] {
        let mut problem = problem;
        let mut previous = PlanDraft::from(&solve(&problem, None, &EAGER).unwrap().plan);
        let mut costs = Vec::new();
        for index in 0..6 {
            problem = drifted(&problem, random, index);
            let new = replan(&problem, &previous, &EAGER, Budget::UNLIMITED).unwrap();
            assert!(new.incremental && new.complete, "{name} {index}");
            check(&problem, &previous, &new, &format!("{name} {index}"));
            let before = evaluate(&problem, &previous, false).unwrap().total_cost;
            let full = solve(&problem, None, &EAGER).unwrap().evaluation.total_cost;
            costs.push((new.evaluation.total_cost / before, full / before));
            previous = PlanDraft::from(&new.plan);
        }
        let saved: f64 = costs.iter().map(|(new, _)| 1.0 - new).sum();
        let full_saved: f64 = costs.iter().map(|(_, full)| 1.0 - full).sum();
        // Each vector follows the plan of the last one, so that shortfalls add up.
        assert!(saved >= 0.85 * full_saved, "{name}: {saved} of {full_saved}: {costs:?}");
    }
}

#[test]
fn replan_keeps_the_previous_plan_within_hysteresis() {
    let random = &mut SplitMix64::new(6);
    let sample = Sample::new();
    let (mut kept, mut replaced) = (0, 0);
    for (seed, problem, answer) in small_problems(sample.of(0..200)) {
        let previous = PlanDraft::from(&answer.plan);
        let problem = drifted(&problem, random, seed as usize);
        let options = Options { hysteresis: 0.1, stands_seconds: 3600.0, ..EAGER };
        let Ok(new) = replan(&problem, &previous, &options, Budget::UNLIMITED) else { continue };
        let change = new.change.as_ref().unwrap();
        match change.kept {
            true => {
                kept += 1;
                assert_eq!(new.plan, answer.plan, "{seed}");
            }
            false if change.reason == ReplacementReason::Cheaper => {
                replaced += 1;
                assert!(new.evaluation.total_cost < change.previous_cost * 0.9, "{seed}");
                assert!(change.change_cost.is_none_or(|toll| toll.saves > toll.dollars), "{seed}");
            }
            false => assert_eq!(change.reason, ReplacementReason::PreviousFails, "{seed}"),
        }
    }
    assert!(sample.is_enough(kept, 80) && sample.is_enough(replaced, 5), "{kept} {replaced}");
}

/// Runs with a budget that answers with `then` from query `at` on. Returns the number of queries.
fn count_queries(at: usize, then: Proceed, mut run: impl FnMut(Budget<'_>)) -> usize {
    let queries = Cell::new(0);
    let proceed = || {
        queries.set(queries.get() + 1);
        if queries.get() > at { then } else { Proceed::Continue }
    };
    run(Budget::new(&proceed));
    queries.get()
}

/// Budget queries after cancellation within which a search must end, 1,000 terms each.
const QUERIES_AFTER_CANCEL: usize = 60;

/// Cancels a search at points spread over its whole run.
fn cancel_everywhere(name: &str, run: &dyn Fn(Budget<'_>) -> Result<(), PlanError>) {
    let all = count_queries(usize::MAX, Proceed::Continue, |budget| run(budget).unwrap());
    for point in 0..12 {
        let at = all * point / 12;
        let queries = count_queries(at, Proceed::Cancel, |budget| {
            assert_eq!(run(budget), Err(PlanError::Cancelled), "{name}: {at} of {all}");
        });
        let after = queries - at;
        assert!(after <= QUERIES_AFTER_CANCEL, "{name}: {after} after {at} of {all}");
    }
}

#[test]
fn cancelled_search_ends_within_few_terms() {
    let problem = operator_problem(16, 64);
    let options = Options { sturdy: 0.02, flips: true, ..EAGER };
    let previous = PlanDraft::from(&solve(&problem, None, &EAGER).unwrap().plan);
    cancel_everywhere("solve", &|budget| solve_within(&problem, None, &options, budget).map(|_| ()));
    cancel_everywhere("replan", &|budget| replan(&problem, &previous, &options, budget).map(|_| ()));
    cancel_everywhere("compare", &|budget| compare_within(&problem, budget).map(|_| ()));
    let mut recorded = problem.clone();
    let times = (0..3_000).map(|index| f64::from(index) * 400.0 + f64::from(index % 7)).collect();
    recorded.arrivals =
        recorded.arrivals.map(|arrivals| Arrivals { recorded_seconds: Some(times), ..arrivals });
    cancel_everywhere("recorded", &|budget| solve_within(&recorded, None, &EAGER, budget).map(|_| ()));
    let layers = small_problem(6, 2);
    cancel_everywhere("small", &|budget| solve_within(&layers, None, &options, budget).map(|_| ()));
}

#[test]
fn cancelled_search_for_remedies_ends_within_few_terms() {
    let mut problem = small_problem(6, 3);
    problem.slo.tpot_seconds = 1e-9;
    let all = count_queries(usize::MAX, Proceed::Continue, |budget| {
        let answer = solve_within(&problem, None, &EAGER, budget);
        assert!(matches!(answer, Err(PlanError::Infeasible(_))), "{answer:?}");
    });
    for at in [0, all / 4, all / 2, all * 3 / 4] {
        let queries = count_queries(at, Proceed::Cancel, |budget| {
            assert_eq!(solve_within(&problem, None, &EAGER, budget), Err(PlanError::Cancelled));
        });
        assert!(queries - at <= QUERIES_AFTER_CANCEL, "{} after {at} of {all}", queries - at);
    }
}

#[test]
fn finished_search_returns_a_plan_that_keeps_limits() {
    let random = &mut SplitMix64::new(9);
    let first = operator_problem(16, 64);
    let previous = PlanDraft::from(&solve(&first, None, &EAGER).unwrap().plan);
    let problem = drifted(&first, random, 2);
    let options = Options { sturdy: 0.02, flips: true, ..EAGER };
    let unlimited = solve(&problem, Some(&previous), &options).unwrap();
    assert!(unlimited.complete && !unlimited.incremental);
    let all = count_queries(usize::MAX, Proceed::Continue, |budget| {
        assert_eq!(solve_within(&problem, Some(&previous), &options, budget).unwrap(), unlimited);
    });
    for previous in [None, Some(&previous)] {
        for at in [0, 10, all / 8, all / 2, all * 7 / 8] {
            count_queries(at, Proceed::Finish, |budget| {
                let answer = solve_within(&problem, previous, &options, budget).unwrap();
                assert!(answer.evaluation.violations.is_empty() && !answer.complete, "{at} of {all}");
                assert!(!answer.verdict.rivals.is_empty() && answer.baselines.mix.is_some());
                match previous {
                    Some(previous) => check(&problem, previous, &answer, &format!("{at} of {all}")),
                    None => {
                        let own = evaluate(&problem, &PlanDraft::from(&answer.plan), false).unwrap();
                        assert!(own.violations.is_empty(), "{at} of {all}: {:?}", own.violations);
                    }
                }
            });
        }
    }
    count_queries(5, Proceed::Finish, |budget| {
        let answer = replan(&problem, &previous, &options, budget).unwrap();
        check(&problem, &previous, &answer, "replan");
        assert!(answer.incremental && !answer.complete);
    });
}

#[test]
fn finished_search_that_has_no_plan_goes_on_to_the_first_one() {
    let sample = Sample::new();
    let mut found = 0;
    for (seed, problem, _) in small_problems(sample.of(0..200)) {
        count_queries(0, Proceed::Finish, |budget| {
            let answer = solve_within(&problem, None, &EAGER, budget).unwrap();
            assert!(answer.evaluation.violations.is_empty(), "{seed}");
            found += 1;
        });
    }
    assert!(sample.is_enough(found, 50), "{found}");
}

#[test]
fn comparison_within_no_limit_is_the_comparison() {
    let problem = operator_problem(4, 16);
    assert_eq!(compare_within(&problem, Budget::UNLIMITED).unwrap(), compare(&problem).unwrap());
}
