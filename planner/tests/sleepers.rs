//! Groups that end by themselves beside a main function that is always there.
#![allow(clippy::unwrap_used, clippy::panic)]

mod generate;

use generate::{Beyond, beyond, small_problem};
use remoe_planner::{
    Alone, Answer, Options, PlanDraft, PlanError, Problem, Remote, Start, Starts, Way, evaluate, solve,
};

/// A problem with groups whose requests come seldom.
fn problem(seed: u64, per_second: f64) -> Problem {
    let form = Beyond { groups: Some(3), vcpus: true, per_second: Some(per_second), idle_seconds: None };
    let mut problem = beyond(&small_problem(seed, 2), form);
    problem.limits.payload_bytes = None;
    (problem.slo.ttft_seconds, problem.slo.tpot_seconds) = (1e3, 1e2);
    problem
}

fn solved(problem: &Problem) -> Option<Answer> {
    match solve(problem, None, &Options::default()) {
        Ok(answer) => Some(answer),
        Err(PlanError::Infeasible(_)) => None,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn they_are_taken_where_they_are_cheaper_and_nowhere_else() {
    let (mut compared, mut asleep) = (0, 0);
    for seed in 0..40 {
        let stays = problem(seed, 10f64.powf(-1.0 - (seed % 4) as f64));
        let may = Problem { remote_idle_seconds: Some(60.0), ..stays.clone() };
        let (Some(before), Some(after)) = (solved(&stays), solved(&may)) else { continue };
        compared += 1;
        let (cost, than) = (after.evaluation.total_cost, before.evaluation.total_cost);
        assert!(cost <= than * (1.0 + 1e-9), "{seed}: {cost} {than}");
        assert!(before.plan.groups.iter().all(|group| group.idle_seconds.is_none()), "{seed}");
        // What is said of a plan is what it is found to be when it is read again.
        let json = serde_json::to_string(&after).unwrap();
        let again = evaluate(&may, &PlanDraft::from_json(&json).unwrap(), false).unwrap();
        assert_eq!(again, after.evaluation, "{seed}");
        assert!(after.evaluation.violations.is_empty(), "{seed}");
        let sleeping = after.plan.groups.iter().filter(|group| group.idle_seconds.is_some()).count();
        if sleeping == 0 {
            continue;
        }
        asleep += 1;
        assert!(cost < than && json.contains(r#""sleeps":true,"idle_seconds":60"#), "{seed}: {json}");
        let life = after.evaluation.life.unwrap();
        assert_eq!((life.sleeping_groups, life.alive_share), (sleeping, 1.0), "{seed}");
        // The verdict names the cheaper way.
        let rival = after.verdict.rivals.iter().find(|rival| rival.name == Way::Sliced).unwrap();
        assert!((rival.dollars_per_request.unwrap() / cost - 1.0).abs() < 1e-9, "{seed}");
        // Groups are paid for while they are alive, all else always.
        let per_second = may.arrivals.as_ref().unwrap().per_second;
        let groups = after.plan.groups.iter().zip(&after.evaluation.groups);
        let paid: f64 = groups
            .map(|(group, terms)| {
                assert_eq!(group.idle_seconds.is_some(), terms.life.is_some());
                terms.rate * terms.life.map_or(1.0, |life| life.alive_share)
            })
            .sum();
        assert!((after.evaluation.remote_cost * per_second / paid - 1.0).abs() < 1e-9, "{seed}");
        for life in after.evaluation.groups.iter().filter_map(|terms| terms.life) {
            assert!(life.alive_share < 1.0 && life.used_share <= 1.0 && life.cold_share > 0.0, "{life:?}");
        }
        // Who allows no cold request gets no group that sleeps.
        let mut strict = may.clone();
        strict.slo.cold_share = Some(0.0);
        let strict = solved(&strict).unwrap();
        assert!(strict.plan.groups.iter().all(|group| group.idle_seconds.is_none()), "{seed}");
        assert!((strict.evaluation.total_cost / than - 1.0).abs() < 1e-9, "{seed}");
    }
    assert!(compared >= 20 && asleep >= 5, "{compared} {asleep}");
}

#[test]
fn a_group_is_alive_as_long_as_requests_that_use_it_keep_it() {
    let mut problem = Problem { remote_idle_seconds: Some(30.0), ..problem(7, 1e-3) };
    let start = Start { process_seconds: 2.0, load_bytes_per_second: 1e8 };
    problem.starts = Some(Starts { main: start, remote: start });
    let plan = |draft: &str| PlanDraft::from_json(draft).unwrap();
    let life =
        |problem: &Problem, draft: &str| evaluate(problem, &plan(draft), false).unwrap().groups[0].life;
    let sleeps = r#"{"groups": [{"experts": "0:0", "sleeps": true}]}"#;
    let found = life(&problem, sleeps).unwrap();
    // None of n tokens' k choices is the expert.
    let (request, share) = (&problem.request, problem.prediction.as_ref().unwrap()[0][0]);
    let choices = f64::from(problem.layers[0].top_k) * (request.input_tokens + request.output_tokens);
    assert!((found.used_share - (1.0 - (1.0 - share).powf(choices))).abs() < 1e-9);
    assert_eq!(found.start_seconds, 2.0 + problem.layers[0].expert_bytes / 1e8);
    // Where requests are short beside windows, their length hardly counts.
    let alone = Alone {
        per_second: 1e-3 * found.used_share,
        idle_seconds: 30.0,
        start_seconds: found.start_seconds,
        service_seconds: 0.0,
        cold_seconds: 0.0,
    };
    assert!(found.alive_share >= alone.time().share);
    // Longer windows, and windows of its own.
    let own = r#"{"groups": [{"experts": "0:0", "sleeps": true, "idle_seconds": 600}]}"#;
    assert!(life(&problem, own).unwrap().alive_share > found.alive_share);
    // Asked not to, with a main function that ends too, and paid for work, it lives with the main function.
    assert_eq!(life(&problem, r#"{"groups": [{"experts": "0:0", "sleeps": false}]}"#), None);
    let mut ends = problem.clone();
    ends.arrivals.as_mut().unwrap().idle_seconds = Some(300.0);
    assert_eq!(life(&ends, sleeps), None);
    // A window that nobody states is asked for.
    problem.remote_idle_seconds = None;
    let Err(PlanError::Plan(error)) = evaluate(&problem, &plan(sleeps), false) else { panic!() };
    assert!(error.to_string().contains("groups[0].idle_seconds"), "{error}");
    let always = Options { remote: Remote::Always, ..Options::default() };
    if let Ok(answer) = solve(&problem, None, &always) {
        assert!(!serde_json::to_string(&answer).unwrap().contains("sleep"));
    }
}
