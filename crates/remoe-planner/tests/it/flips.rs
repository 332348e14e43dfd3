//! Changes that flip a placement comparison: they do, and finding them takes little work.

use crate::generate;

use generate::{
    BEYOND, ExtendedDecisions, MOST_TURN_WORK, Sample, Shape, SplitMix64, beyond, model_problem,
    small_problem,
};
use remoe_planner::{FlipFigure, Options, PlacementComparison, PlanError, PlanningResult, Problem, solve};

const TURNS: Options = Options {
    flips: true,
    robust: false,
    hysteresis: 0.05,
    stands_seconds: 3600.0,
    sturdy: 0.0,
    remote: remoe_planner::Remote::Auto,
};

/// Returns the comparison, also if no plan keeps the limits.
fn verdict(problem: &Problem, options: &Options) -> Option<PlacementComparison> {
    match solve(problem, None, options) {
        Ok(answer) => Some(answer.verdict),
        Err(PlanError::Infeasible(why)) => why.verdict,
        Err(other) => panic!("{other}"),
    }
}

/// Copies `problem` with the input multiplied by `factor`.
fn with(problem: &Problem, cause: FlipFigure, factor: f64) -> Problem {
    let mut problem = problem.clone();
    match cause {
        FlipFigure::ArrivalRate => problem.arrivals.as_mut().unwrap().per_second *= factor,
        FlipFigure::GpuPrice => {
            let pricing = &mut problem.pricing;
            let prices = [&mut pricing.gpu_per_gb_second, &mut pricing.gpu_per_second_each];
            prices.into_iter().flatten().for_each(|price| *price *= factor);
        }
        FlipFigure::ModelSize => {
            for layer in &mut problem.layers {
                layer.expert_bytes *= factor;
                let on_cpus =
                    std::iter::once(&mut layer.expert_seconds).chain(&mut layer.remote_expert_seconds);
                let on_cpus = on_cpus.flat_map(|profile| profile.seconds.iter_mut().flatten());
                let on_gpu = layer.gpu_expert_seconds.iter_mut().flat_map(|profile| &mut profile.seconds);
                on_cpus.chain(on_gpu).for_each(|seconds| *seconds *= factor);
            }
        }
        FlipFigure::Tpot => problem.slo.tpot_seconds *= factor,
    }
    problem
}

/// Small problems of all kinds, with prices at which remote experts are about as likely to pay as not.
fn problems() -> impl Iterator<Item = (u64, Problem)> {
    Sample::new().of(0..48).map(|seed| {
        let random = &mut SplitMix64::new(seed);
        let arrivals = random.one_in(2);
        let per_second = 10f64.powf(random.between(-4.0, 0.0));
        let form = ExtendedDecisions {
            groups: (!random.one_in(4)).then_some(3),
            vcpus: random.one_in(3),
            per_second: arrivals.then_some(per_second),
            idle_seconds: random.one_in(2).then_some(120.0),
        };
        let mut problem = beyond(&small_problem(seed, 1 + seed as usize % 2), form);
        // Without room for all experts in one function they must go somewhere else.
        if random.one_in(2) {
            let sizes = &mut problem.specs.main;
            sizes.max_bytes =
                sizes.min_bytes + (sizes.max_bytes - sizes.min_bytes) * random.between(0.2, 0.8);
        }
        (seed, problem)
    })
}

#[test]
fn a_flip_changes_the_comparison_and_nothing_else() {
    let (mut turned, mut back, mut undecided, mut asked) = (0, 0, 0, 0);
    for (seed, problem) in problems() {
        let Some(said) = verdict(&problem, &TURNS) else { continue };
        let plain = verdict(&problem, &Options { flips: false, ..TURNS }).unwrap();
        assert_eq!((plain.pays, plain.best, &plain.rivals), (said.pays, said.best, &said.rivals), "{seed}");
        assert!(plain.flips.is_empty() && plain.undecided.is_empty());
        undecided += said.undecided.len();
        asked += 1;
        for turn in &said.flips {
            let then = verdict(&with(&problem, turn.cause, turn.factor), &Options::default()).unwrap();
            assert_ne!(then.pays, said.pays, "{seed}: {turn:?}, {}", then.sentence);
            assert_eq!(then.pays, turn.best.has_remote_experts(), "{seed}: {turn:?}");
            assert!(!said.undecided.contains(&turn.cause));
            *(if said.pays { &mut back } else { &mut turned }) += 1;
        }
    }
    // Both directions are seen, and most questions have an answer.
    assert!(turned > 0 && back > 0, "{turned} {back}");
    assert!(undecided < 2 * asked, "{undecided} of {asked}");
}

/// Counts the terms that are summed for the flips of `problem` beyond those for its plan; `None` if it has no plan.
fn work_of_turns(problem: &Problem) -> Option<usize> {
    let work = |options: &Options| Some(solve(problem, None, options).ok()?.search.work);
    Some(work(&TURNS)? - work(&Options { flips: false, ..TURNS })?)
}

fn answer(problem: &Problem) -> PlanningResult {
    solve(problem, None, &TURNS).unwrap()
}

#[test]
fn flips_of_a_model_are_found_with_little_work() {
    for (name, form) in BEYOND {
        for (expert_bytes, slack, gpu_price) in [(1.7e7, 10.0, 3.0), (1.7e7, 0.2, 3.0), (2e5, 0.2, 1e-2)] {
            let shape = Shape { layers: 58, experts: 256, top_k: 8, slack, gpu_price, expert_bytes, seed: 7 };
            let work = work_of_turns(&beyond(&model_problem(shape), form)).unwrap();
            assert!(work <= MOST_TURN_WORK, "{name}, {expert_bytes}, {slack}: {work}");
        }
    }
}

#[test]
fn flips_of_small_problems_are_found_with_little_work() {
    for (seed, problem) in problems() {
        let Some(work) = work_of_turns(&problem) else { continue };
        assert!(work <= MOST_TURN_WORK, "{seed}: {work}");
    }
    // As many groups as layers, few experts, vCPUs and arrivals: many moves.
    for (name, form) in BEYOND {
        let shape = Shape {
            layers: 3,
            experts: 4,
            top_k: 2,
            slack: 0.2,
            gpu_price: 3.0,
            expert_bytes: 1.7e7,
            seed: 7,
        };
        let work = work_of_turns(&beyond(&model_problem(shape), form)).unwrap();
        assert!(work <= MOST_TURN_WORK, "{name}: {work}");
    }
}

#[test]
fn answers_with_flips_are_deterministic() {
    let shape =
        Shape { layers: 6, experts: 16, top_k: 2, slack: 0.2, gpu_price: 3.0, expert_bytes: 1.7e7, seed: 7 };
    let problem = beyond(&model_problem(shape), BEYOND[3].1);
    let first = answer(&problem);
    assert_eq!(first, answer(&problem));
    let plain = solve(&problem, None, &Options { flips: false, ..TURNS }).unwrap();
    assert_eq!((first.plan, first.evaluation), (plain.plan, plain.evaluation));
}

/// If more vCPUs are slower beyond the measured tokens, no size dominates smaller ones; the search must nevertheless not
/// evaluate all pairs of sizes.
#[test]
fn profile_slower_with_more_vcpus_keeps_search_small() {
    let shape =
        Shape { layers: 6, experts: 16, top_k: 4, slack: 10.0, gpu_price: 3.0, expert_bytes: 1e5, seed: 3 };
    let mut problem = model_problem(shape);
    problem.limits.max_groups = Some(16);
    problem.pricing.billing = remoe_planner::Billing::Reserved;
    let work = |problem: &Problem| solve(problem, None, &Options::default()).unwrap().search.work;
    let usual = work(&problem);
    for layer in &mut problem.layers {
        let seconds = &mut layer.expert_seconds.seconds;
        let last = seconds.len() - 1;
        let slowest = seconds[last][0];
        seconds[last].iter_mut().for_each(|own| *own = slowest);
    }
    let slower = work(&problem);
    assert!(slower <= 3 * usual && slower <= 12_000_000, "{slower} beside {usual}");
}
