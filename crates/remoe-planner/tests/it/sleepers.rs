//! Groups that scale to zero independently of an always running main function.

use crate::generate;

use generate::{ExtendedDecisions, Sample, Shape, SplitMix64, beyond, model_problem, small_problem};
use remoe_planner::{
    Options, PlanDraft, PlanError, PlanningResult, Problem, Remote, ScalingGroup, ServingStrategy, Start,
    Starts, evaluate, solve,
};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A problem with groups and rare requests.
fn problem(seed: u64, per_second: f64) -> Problem {
    let form =
        ExtendedDecisions { groups: Some(3), vcpus: true, per_second: Some(per_second), idle_seconds: None };
    let mut problem = beyond(&small_problem(seed, 2), form);
    problem.limits.payload_bytes = None;
    (problem.slo.ttft_seconds, problem.slo.tpot_seconds) = (1e3, 1e2);
    problem
}

fn solved(problem: &Problem) -> Option<PlanningResult> {
    match solve(problem, None, &Options::default()) {
        Ok(answer) => Some(answer),
        Err(PlanError::Infeasible(_)) => None,
        Err(error) => panic!("{error}"),
    }
}

/// Plans the problem of each seed. Returns the number of plans, and of those with sleeping groups.
fn compared(seeds: impl Iterator<Item = u64>) -> (usize, usize) {
    let (mut compared, mut asleep) = (0, 0);
    for seed in seeds {
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
        let rival = after.verdict.rivals.iter().find(|rival| rival.name == ServingStrategy::Sliced).unwrap();
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
    (compared, asleep)
}

#[test]
fn sleeping_groups_are_chosen_only_if_cheaper() {
    // Some problems take many times as long as others: a thread that is done takes the next.
    let sample = Sample::new();
    let seeds: Vec<u64> = sample.of(0..40).collect();
    let next = AtomicUsize::new(0);
    let take = || {
        std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed)).map_while(|at| seeds.get(at).copied())
    };
    let halves = std::thread::scope(|scope| {
        let halves = [scope.spawn(|| compared(take())), scope.spawn(|| compared(take()))];
        halves.map(|half| half.join().unwrap())
    });
    let (compared, asleep) = (halves[0].0 + halves[1].0, halves[0].1 + halves[1].1);
    assert!(sample.is_enough(compared, 20) && sample.is_enough(asleep, 5), "{compared} {asleep}");
}

#[test]
fn group_is_alive_while_requests_use_it() {
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
    let alone = ScalingGroup {
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
    // A missing window is asked for.
    problem.remote_idle_seconds = None;
    let Err(PlanError::Plan(error)) = evaluate(&problem, &plan(sleeps), false) else { panic!() };
    assert!(error.to_string().contains("groups[0].idle_seconds"), "{error}");
    let always = Options { remote: Remote::Always, ..Options::default() };
    if let Ok(answer) = solve(&problem, None, &always) {
        assert!(!serde_json::to_string(&answer).unwrap().contains("sleep"));
    }
}

/// Simulated alive times of groups, for requests whose tokens choose experts individually.
struct ObservedGroups {
    used: f64,
    alive: f64,
    wakes_per_hour: f64,
    cold: f64,
}

/// Simulates `groups`, each with the experts of each layer, the seconds of a start, and the additional seconds of requests
/// during a start.
fn simulate_groups(
    problem: &Problem,
    groups: &[(Vec<Vec<u32>>, f64, f64)],
    service_seconds: f64,
    requests: usize,
) -> Vec<ObservedGroups> {
    let random = &mut SplitMix64::new(3);
    let (arrivals, request) = (problem.arrivals.as_ref().unwrap(), &problem.request);
    let window = problem.remote_idle_seconds.unwrap();
    let tokens = (request.input_tokens + request.output_tokens) as usize;
    let shares = problem.prediction.as_ref().unwrap();
    // Since when it is alive, when it is ready, and when it ends.
    let mut times = vec![(0.0, 0.0, 0.0); groups.len()];
    let mut seen: Vec<ObservedGroups> = groups
        .iter()
        .map(|_| ObservedGroups { used: 0.0, alive: 0.0, wakes_per_hour: 0.0, cold: 0.0 })
        .collect();
    let (mut now, mut came) = (0.0, 0);
    while came < requests {
        now -= (1.0 - random.unit()).ln() * arrivals.burst / arrivals.per_second;
        loop {
            came += 1;
            let mut uses = vec![false; groups.len()];
            for (layer, (shares, parts)) in shares.iter().zip(&problem.layers).enumerate() {
                for _ in 0..tokens * parts.top_k as usize {
                    let mut left = random.unit();
                    let expert = shares
                        .iter()
                        .take_while(|share| {
                            left -= **share;
                            left > 0.0
                        })
                        .count() as u32;
                    let hosts = groups.iter().position(|(experts, ..)| experts[layer].contains(&expert));
                    if let Some(group) = hosts {
                        uses[group] = true
                    }
                }
            }
            for (index, _) in uses.iter().enumerate().filter(|(_, uses)| **uses) {
                let ((began, ready, ends), seen) = (&mut times[index], &mut seen[index]);
                let (_, start, longer) = &groups[index];
                seen.used += 1.0;
                if now >= *ends {
                    seen.alive += *ends - *began;
                    seen.wakes_per_hour += 1.0;
                    (*began, *ready) = (now, now + start);
                    *ends = *ready + window;
                }
                let is_cold = now < *ready;
                seen.cold += f64::from(u8::from(is_cold));
                let takes = service_seconds + if is_cold { *longer } else { 0.0 };
                *ends = f64::max(*ends, now + takes + window);
            }
            if random.unit() < 1.0 / arrivals.burst {
                break;
            }
        }
    }
    for (seen, (began, ..)) in seen.iter_mut().zip(times) {
        // Up to the last wake.
        seen.alive /= began;
        seen.wakes_per_hour *= 3600.0 / began;
        seen.used /= came as f64;
        seen.cold /= came as f64;
    }
    seen
}

/// The alive time of a group follows from the probability that a request uses any of its experts.
#[test]
fn alive_time_of_groups_follows_the_requests_that_use_them() {
    let (mut worst, mut sum, mut compared) = (0.0_f64, 0.0, 0);
    for seed in 0..24 {
        let random = &mut SplitMix64::new(seed);
        let mut problem =
            Problem { remote_idle_seconds: Some(random.between(5.0, 100.0)), ..problem(seed, 1.0) };
        (problem.request.input_tokens, problem.request.output_tokens) = (12.0, 8.0);
        (problem.request.max_input_tokens, problem.request.max_output_tokens) = (None, None);
        let arrivals = problem.arrivals.as_mut().unwrap();
        arrivals.per_second = 10f64.powf(random.between(-3.0, -1.0));
        arrivals.burst = if seed % 3 == 0 { 3.0 } else { 1.0 };
        // The fallback loads so slowly that groups are ready before a prefill that waits for it is over.
        let mut start =
            |rate| Start { process_seconds: random.between(0.5, 2.0), load_bytes_per_second: rate };
        problem.starts =
            Some(Starts { main: start(2e7), remote: Start { load_bytes_per_second: 1e9, ..start(1.0) } });
        // From the rarest experts to those of every request: two groups that end by themselves and one that stays.
        let mut sets = vec![vec![Vec::new(); problem.layers.len()]; 3];
        for (layer, shares) in problem.prediction.as_mut().unwrap().iter_mut().enumerate() {
            for (expert, share) in shares.iter_mut().enumerate() {
                let rarity = expert % 3;
                *share *= [0.003, 0.03, 1.0][rarity];
                sets[rarity][layer].push(expert as u32);
            }
            let sum: f64 = shares.iter().sum();
            shares.iter_mut().for_each(|share| *share /= sum);
        }
        let named = |experts: &[Vec<u32>]| {
            let each = experts
                .iter()
                .enumerate()
                .flat_map(|(layer, ids)| ids.iter().map(move |id| format!("{layer}:{id}")));
            each.collect::<Vec<String>>().join(",")
        };
        let draft = format!(
            r#"{{"groups": [{{"experts": "{}", "sleeps": true}}, {{"experts": "{}", "sleeps": true}}, {{"experts": "{}"}}]}}"#,
            named(&sets[0]),
            named(&sets[1]),
            named(&sets[2]),
        );
        let evaluation = evaluate(&problem, &PlanDraft::from_json(&draft).unwrap(), false).unwrap();
        assert_eq!(evaluation.groups[2].life, None);
        let lives: Vec<_> = evaluation.groups[..2].iter().map(|group| group.life.unwrap()).collect();
        let groups: Vec<_> = sets
            .iter()
            .zip(&lives)
            .map(|(experts, life)| (experts.clone(), life.start_seconds, life.cold_prefill_seconds))
            .collect();
        let seen = simulate_groups(&problem, &groups, evaluation.life.unwrap().service_seconds, 40_000);
        for (life, seen) in lives.iter().zip(&seen) {
            let pairs = [
                (life.used_share, seen.used),
                (life.alive_share, seen.alive),
                (life.wakes_per_hour, seen.wakes_per_hour),
                (life.cold_share, seen.cold),
            ];
            for (stated, seen) in pairs {
                let error = (stated / seen - 1.0).abs();
                (worst, sum, compared) = (worst.max(error), sum + error, compared + 1);
                assert!(error <= 0.08, "{seed}: {pairs:?}");
            }
        }
    }
    println!("{} in the mean, {worst} at most", sum / f64::from(compared));
    assert!(sum / f64::from(compared) <= 0.01, "{sum} of {compared}");
}

/// Most terms that may be summed for a plan of 58 x 256 experts whose groups may scale to zero.
const MOST_WORK: usize = 25_000_000;

#[test]
fn planning_with_sleeping_groups_takes_little_work() {
    for (vcpus, expert_bytes, slack) in
        [(true, 1.7e7, 10.0), (true, 2e5, 0.2), (false, 1.7e7, 1e-3), (false, 2e5, 0.2)]
    {
        let shape =
            Shape { layers: 58, experts: 256, top_k: 8, slack, gpu_price: 3.0, expert_bytes, seed: 7 };
        let form = ExtendedDecisions { groups: Some(16), vcpus, per_second: Some(1e-3), idle_seconds: None };
        let stays = beyond(&model_problem(shape), form);
        let may = Problem { remote_idle_seconds: Some(60.0), ..stays.clone() };
        let [stays, may] = [stays, may].map(|problem| solved(&problem).unwrap());
        let work = may.search.work;
        assert!(may.evaluation.total_cost <= stays.evaluation.total_cost * (1.0 + 1e-9), "{expert_bytes}");
        assert!(work <= MOST_WORK, "{vcpus} {expert_bytes} {slack}: {work}");
    }
}
