//! Concurrent requests: their memory, and the useful threads.

use crate::generate;

use generate::small_problem;
use remoe_planner::{
    CpuProfile, Device, MainSize, Options, PAGE_POSITIONS, PlanAccount, PlanDraft, PlanError, Problem,
    Request, evaluate, preallocate, solve, useful_vcpus,
};

fn with_concurrency(problem: &Problem, concurrency: u32) -> Problem {
    Problem { request: Request { concurrency, ..problem.request.clone() }, ..problem.clone() }
}

/// Tokens of a typical request, and of the largest one.
fn tokens(problem: &Problem) -> (f64, f64) {
    let request = &problem.request;
    let input = request.max_input_tokens.unwrap_or(request.input_tokens);
    let output = request.max_output_tokens.unwrap_or(request.output_tokens);
    (request.input_tokens + request.output_tokens, input + output)
}

/// Returns `problem` with the same memory for one request, by an accordingly longer response.
fn one_as_large(problem: &Problem) -> Problem {
    let (typical, largest) = tokens(problem);
    let room = largest.max(f64::from(problem.request.concurrency) * typical);
    let input = problem.request.max_input_tokens.unwrap_or(problem.request.input_tokens);
    let request =
        Request { max_output_tokens: Some(room - input), concurrency: 1, ..problem.request.clone() };
    Problem { request, ..problem.clone() }
}

#[test]
fn memory_covers_largest_request_or_all_typical_ones() {
    let mut larger = 0;
    for seed in 0..200 {
        let problem = small_problem(seed, 2);
        let many = with_concurrency(&problem, 8);
        let same = one_as_large(&many);
        match (solve(&many, None, &Options::default()), solve(&same, None, &Options::default())) {
            (Ok(many_answer), Ok(same_answer)) => {
                assert_eq!(many_answer.plan, same_answer.plan, "seed {seed}");
                assert_eq!(many_answer.evaluation, same_answer.evaluation, "seed {seed}");
                assert_eq!(many_answer.baselines, same_answer.baselines, "seed {seed}");
                let one = evaluate(&problem, &PlanDraft::from(&many_answer.plan), false).unwrap();
                // Times are those of one request; keys and values take device memory.
                assert_eq!(one.ttft_seconds, many_answer.evaluation.ttft_seconds);
                assert_eq!(one.tpot_seconds, many_answer.evaluation.tpot_seconds);
                let cache: f64 = problem.layers.iter().map(|layer| layer.kv_bytes_per_token).sum();
                let (typical, largest) = tokens(&problem);
                let more = ((8.0 * typical).max(largest) - largest) * (cache + problem.token_bytes);
                assert!((many_answer.evaluation.gpu_bytes - one.gpu_bytes - more).abs() < 1.0, "seed {seed}");
                larger += usize::from(more > 0.0);
            }
            (Err(PlanError::Infeasible(_)), Err(PlanError::Infeasible(_))) => {}
            (many, same) => unreachable!("seed {seed}: {many:?} {same:?}"),
        }
        match (preallocate(&many), preallocate(&same)) {
            (Ok(many), Ok(same)) => assert_eq!(many, same),
            (many, same) => assert!(many.is_err() && same.is_err()),
        }
    }
    assert!(larger > 50, "{larger}");
}

#[test]
fn expected_request_cost_keeps_memory_of_plan() {
    let (problem, answer) = (0..)
        .find_map(|seed| {
            let problem = with_concurrency(&small_problem(seed, 2), 8);
            solve(&problem, None, &Options::default()).ok().map(|answer| (problem, answer))
        })
        .unwrap();
    let account = PlanAccount::new(problem.clone(), &PlanDraft::from(&answer.plan)).unwrap();
    let rate = |input: usize, steps: usize| {
        let plan = PlanDraft::from(&answer.plan);
        let mut one = one_as_large(&problem);
        (one.request.input_tokens, one.request.output_tokens) = (input as f64, steps as f64);
        let evaluation = evaluate(&one, &plan, false).unwrap();
        (account.expect(input, steps).cost, evaluation.total_cost)
    };
    for (input, steps) in [(1, 0), (2, 3), (3, 1)] {
        let (expected, evaluated) = rate(input, steps);
        assert!((expected / evaluated - 1.0).abs() < 1e-12, "{expected} {evaluated}");
    }
}

/// A main function on CPUs in which one thread is fastest for one token, and two for several.
fn small_steps() -> Problem {
    let mut problem = small_problem(1, 2);
    problem.device = Device::Cpu;
    let profile = CpuProfile {
        vcpus: vec![0.5, 1.0, 2.0, 4.0],
        tokens: vec![1.0, 16.0],
        seconds: vec![vec![2e-3, 1e-3, 1.1e-3, 1.3e-3], vec![1.6e-2, 8e-3, 4e-3, 6e-3]],
    };
    for layer in &mut problem.layers {
        layer.expert_seconds = profile.clone();
        layer.cpu_nonexpert_seconds = Some(profile.clone());
    }
    problem
}

#[test]
fn threads_are_chosen_for_a_step_of_all_requests() {
    let problem = small_steps();
    let many = with_concurrency(&problem, 16);
    let threads = |problem: &Problem, bytes: f64| MainSize::of(problem, bytes, None).threads;
    assert_eq!([1e8, 1e9, 2e9, 8e9].map(|bytes| threads(&problem, bytes)), [1, 1, 1, 1]);
    assert_eq!([1e8, 1e9, 2e9, 8e9].map(|bytes| threads(&many, bytes)), [1, 1, 2, 2]);
    assert_eq!((useful_vcpus(&many, 64.0), useful_vcpus(&many, 1.9)), (2, 1));
}

#[test]
fn the_cache_has_room_for_the_last_page_of_every_request() {
    let many = with_concurrency(&small_steps(), 8);
    let size = MainSize::of(&many, 2e9, None);
    let (typical, largest) = tokens(&many);
    let per_token: f64 = many.layers.iter().map(|layer| layer.kv_bytes_per_token).sum();
    assert_eq!(size.kv_cache_tokens, largest.max(8.0 * typical));
    assert_eq!(size.concurrency, 8);
    // Eight requests of any lengths that sum up to the tokens fill at most so many whole pages.
    let page = f64::from(PAGE_POSITIONS);
    let most = 8.0 * ((size.kv_cache_tokens / 8.0 - 1.0) / page).ceil() * page;
    assert!(size.kv_cache_bytes / per_token >= most);
    assert!(size.kv_cache_bytes / per_token < size.kv_cache_tokens + 8.0 * page);
    assert!(size.memory_bytes >= 2e9 + size.kv_cache_bytes);
}
