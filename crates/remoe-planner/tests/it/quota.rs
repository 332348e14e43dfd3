//! Comparison of expected decode steps with a simulation of functions that exhaust their CPU quota and wait for the next
//! period.

use crate::generate;

use generate::SplitMix64;
use remoe_planner::{Evaluation, PlanAccount, PlanDraft, Problem, evaluate};
use serde_json::{Value, json};

const PERIOD_NANOS: u64 = 100_000_000;

/// A simulated function under a CPU quota, with the rest of its current period.
struct QuotaFunction {
    vcpus: f64,
    phase: u64,
    period: u64,
    left: u64,
}

impl QuotaFunction {
    fn new(vcpus: f64, random: &mut SplitMix64) -> Self {
        Self { vcpus, phase: random.whole(0, PERIOD_NANOS), period: u64::MAX, left: 0 }
    }

    /// When it has computed for `seconds`, from `now` on.
    fn compute(&mut self, mut now: u64, seconds: f64) -> u64 {
        let mut needed = (seconds * 1e9) as u64;
        loop {
            let period = (now + self.phase) / PERIOD_NANOS;
            if period != self.period {
                self.period = period;
                self.left = (self.vcpus.min(1.0) * PERIOD_NANOS as f64) as u64;
            }
            let end = (period + 1) * PERIOD_NANOS - self.phase;
            let ran = needed.min(self.left).min(end - now);
            (needed, self.left) = (needed - ran, self.left - ran);
            if needed == 0 {
                return now + ran;
            }
            now = end;
        }
    }
}

/// A request each of whose steps calls one function after the other.
struct QuotaCase {
    main_vcpus: f64,
    group_vcpus: f64,
    /// Seconds of the main function in every layer.
    main_seconds: f64,
    /// The layer's expert: its group, its seconds.
    layers: Vec<(usize, f64)>,
    groups: usize,
    trip_seconds: f64,
    /// Computing of the main function per call, and of the called one beside the expert.
    call_seconds: (f64, f64),
}

impl QuotaCase {
    fn random(random: &mut SplitMix64) -> Self {
        let groups = random.whole(1, 4) as usize;
        let seconds = |random: &mut SplitMix64| 10f64.powf(random.between(-4.0, -2.0));
        let (main, expert) = (seconds(random), seconds(random));
        // How much of that calls take.
        let calls = (random.between(0.0, 0.9), random.between(0.0, 0.9));
        let own = expert * (1.0 - calls.1);
        Self {
            main_vcpus: [0.25, 0.4, 0.7, 1.0][random.whole(0, 3) as usize],
            group_vcpus: [0.1, 0.2, 0.4, 0.7][random.whole(0, 3) as usize],
            main_seconds: main * (1.0 - calls.0),
            layers: (0..4).map(|layer| (layer % groups, own * random.between(0.8, 1.2))).collect(),
            groups,
            trip_seconds: 10f64.powf(random.between(-5.0, -3.5)),
            call_seconds: (main * calls.0, expert * calls.1),
        }
    }

    fn simulated(&self, random: &mut SplitMix64) -> f64 {
        const STEPS: u32 = 1000;
        let mut main = QuotaFunction::new(self.main_vcpus, random);
        let mut groups: Vec<QuotaFunction> =
            (0..self.groups).map(|_| QuotaFunction::new(self.group_vcpus, random)).collect();
        let mut now = PERIOD_NANOS;
        for _ in 0..STEPS {
            now = self.step(now, &mut main, &mut groups);
        }
        (now - PERIOD_NANOS) as f64 / 1e9 / f64::from(STEPS)
    }

    fn problem(&self, cpu_quotas: bool) -> Value {
        let profile = |seconds: f64| json!({"vcpus": [0.1, 1.0], "tokens": [1.0], "seconds": [[10.0 * seconds, seconds]]});
        let layer = |(_, seconds): &(usize, f64)| {
            json!({
                "experts": 2, "top_k": 1, "expert_bytes": 1e8, "nonexpert_bytes": 1e8, "kv_bytes_per_token": 0.0,
                "nonexpert_prefill_seconds": {"base": 0.0, "per_token": 0.0}, "nonexpert_decode_seconds": 0.0,
                "expert_seconds": profile(*seconds), "cpu_nonexpert_seconds": profile(self.main_seconds),
            })
        };
        let sizes = json!({"min_bytes": 1e8, "max_bytes": 1e10, "step_bytes": 1e8});
        let vcpus = |vcpus: f64| json!({"min": vcpus, "max": vcpus, "step": 1.0});
        json!({
            "device": "cpu",
            "request": {"input_tokens": 1.0, "output_tokens": 100.0},
            "prediction": self.layers.iter().map(|_| [1.0, 0.0]).collect::<Vec<_>>(),
            "layers": self.layers.iter().map(layer).collect::<Vec<_>>(),
            "token_bytes": 1.0, "head_bytes": 0.0, "runtime_bytes": 0.0, "function_bytes": 0.0,
            "transport": {
                "token_bytes_up": 1.0, "token_bytes_down": 1.0, "bytes_per_second": 1e12,
                "invoke_seconds": self.trip_seconds + self.call_seconds.1, "send_seconds": self.call_seconds.0,
                "main_cpu_seconds": self.call_seconds.0, "function_cpu_seconds": self.call_seconds.1,
            },
            "swap_seconds": {"base": 0.0, "per_token": 0.0},
            "cold_start_seconds": 0.0,
            "pricing": {"cpu_per_core_second": 1.0, "memory_per_gb_second": 0.1, "billing": "reserved"},
            "specs": {
                "main": sizes, "remote": sizes,
                "main_vcpus": vcpus(self.main_vcpus), "remote_vcpus": vcpus(self.group_vcpus),
            },
            "cpu_quotas": cpu_quotas,
            "slo": {"ttft_seconds": 1e3, "tpot_seconds": 1e3},
            "limits": {"max_replicas": 1, "max_groups": 4},
        })
    }

    /// Seconds of a step of an answer with so many of them, in the mean over requests that find functions rested.
    fn simulated_alone(&self, steps: u32, random: &mut SplitMix64) -> f64 {
        const REQUESTS: u32 = 200;
        let answer = |random: &mut SplitMix64| {
            let mut main = QuotaFunction::new(self.main_vcpus, random);
            let mut groups: Vec<QuotaFunction> =
                (0..self.groups).map(|_| QuotaFunction::new(self.group_vcpus, random)).collect();
            let first = self.step(PERIOD_NANOS, &mut main, &mut groups);
            let last = (0..steps).fold(first, |now, _| self.step(now, &mut main, &mut groups));
            (last - first) as f64 / 1e9 / f64::from(steps)
        };
        (0..REQUESTS).map(|_| answer(random)).sum::<f64>() / f64::from(REQUESTS)
    }

    /// When a step is done that begins `now`.
    fn step(&self, mut now: u64, main: &mut QuotaFunction, groups: &mut [QuotaFunction]) -> u64 {
        for (group, seconds) in &self.layers {
            now = main.compute(now, self.main_seconds + self.call_seconds.0);
            now = groups[*group].compute(now, *seconds + self.call_seconds.1);
            now += (self.trip_seconds * 1e9) as u64;
        }
        now
    }

    fn plan(&self) -> Value {
        let hosted = |group: usize| {
            let own = self.layers.iter().enumerate().filter(|(_, (host, _))| *host == group);
            own.map(|(layer, _)| format!("{layer}:0")).collect::<Vec<_>>().join(",")
        };
        let groups: Vec<_> = (0..self.groups)
            .map(|group| json!({"experts": hosted(group), "memory_bytes": 1e9, "vcpus": self.group_vcpus}))
            .collect();
        json!({"main_bytes": 1e9, "main_vcpus": self.main_vcpus, "groups": groups})
    }

    fn expected(&self, cpu_quotas: bool) -> f64 {
        evaluated(&self.problem(cpu_quotas), &self.plan()).tpot_seconds
    }

    fn expected_alone(&self, steps: u32) -> f64 {
        let form = json!({"problem": self.problem(true), "plan": self.plan()});
        PlanAccount::from_json(&form.to_string()).unwrap().expect(1, steps as usize).tpot_seconds
    }
}

fn evaluated(problem: &Value, plan: &Value) -> Evaluation {
    let problem = Problem::from_json(&problem.to_string()).unwrap();
    evaluate(&problem, &PlanDraft::from_json(&plan.to_string()).unwrap(), false).unwrap()
}

#[test]
fn step_time_matches_functions_that_exhaust_cpu_quota() {
    let random = &mut SplitMix64::new(11);
    let scenes: Vec<QuotaCase> = (0..300).map(|_| QuotaCase::random(random)).collect();
    let ratios = scenes.iter().map(|scene| scene.simulated(random) / scene.expected(true));
    let mut ratios: Vec<f64> = ratios.collect();
    ratios.sort_by(f64::total_cmp);
    // Functions whose periods meet badly take longer; a last period may be begun and not paid for.
    assert!(
        ratios[0] > 0.95 && ratios[ratios.len() - 1] < 1.15,
        "{} to {}",
        ratios[0],
        ratios[ratios.len() - 1]
    );
    assert!((ratios[ratios.len() / 2] - 1.0).abs() < 0.005, "median {}", ratios[ratios.len() / 2]);
    // Speeds instead of quotas would be wrong: most of these functions rest most of the time.
    let slow = scenes.iter().filter(|scene| scene.expected(false) > 1.2 * scene.expected(true)).count();
    assert!(slow > 100, "{slow}");
}

/// Single requests find functions idle, with the whole quota of a period available.
#[test]
fn a_short_response_ends_before_quotas_slow_it_down() {
    let random = &mut SplitMix64::new(12);
    let mut ratios: Vec<f64> = Vec::new();
    let mut quicker = 0;
    for _ in 0..300 {
        let scene = QuotaCase::random(random);
        let steps = random.whole(4, 64) as u32;
        let expected = scene.expected_alone(steps);
        ratios.push(scene.simulated_alone(steps, random) / expected);
        quicker += usize::from(expected < 0.7 * scene.expected(true));
    }
    ratios.sort_by(f64::total_cmp);
    assert!((ratios[ratios.len() / 2] - 1.0).abs() < 0.05, "median {}", ratios[ratios.len() / 2]);
    let (least, most) = (ratios[ratios.len() / 20], ratios[ratios.len() - ratios.len() / 20]);
    assert!(least > 0.8 && most < 1.25, "nine of ten between {least} and {most}");
    assert!(quicker > 10, "{quicker} of 300 are much quicker than what lasts");
}

/// The prefill waits for the quota of the main function, which calls each function of a group that has tokens.
#[test]
fn a_prefill_calls_every_function_of_a_group() {
    const CALL: f64 = 0.01;
    let scene = |main_call| QuotaCase {
        main_vcpus: 0.25,
        group_vcpus: 1.0,
        main_seconds: 1.0,
        layers: vec![(0, 1e-4)],
        groups: 1,
        trip_seconds: 1e-4,
        call_seconds: (main_call, 0.0),
    };
    let first_token = |main_call, replicas: u32| {
        let mut problem = scene(main_call).problem(true);
        problem["prediction"] = json!([[0.5, 0.5]]);
        problem["request"]["input_tokens"] = json!(10.0);
        problem["transport"]["send_seconds"] = json!(0.0);
        problem["limits"]["max_replicas"] = json!(2);
        let group = json!({"experts": "0:0-1", "memory_bytes": 1e9, "vcpus": 1.0, "replicas": replicas});
        let plan = json!({"main_bytes": 1e9, "main_vcpus": 0.25, "groups": [group]});
        evaluated(&problem, &plan).ttft_seconds
    };
    for replicas in [1, 2] {
        let more = first_token(CALL, replicas) - first_token(0.0, replicas);
        assert!((more - f64::from(replicas) * CALL / 0.25).abs() < 1e-9, "{more} s for {replicas}");
    }
}

/// Replicas of a group compute different experts of a prefill, each with its own quota.
#[test]
fn a_prefill_waits_for_the_busiest_replica() {
    const TOKENS: f64 = 100.0;
    const EXPERT: f64 = 1e-3;
    let scene = QuotaCase {
        main_vcpus: 1.0,
        group_vcpus: 0.5,
        main_seconds: 1e-6,
        layers: vec![(0, EXPERT)],
        groups: 1,
        trip_seconds: 1e-4,
        call_seconds: (0.0, 0.0),
    };
    let first_token = |shares: [f64; 2]| {
        let mut problem = scene.problem(true);
        problem["prediction"] = json!([shares]);
        problem["request"]["input_tokens"] = json!(TOKENS);
        problem["limits"]["max_replicas"] = json!(2);
        let group = json!({"experts": "0:0-1", "memory_bytes": 1e9, "vcpus": 0.5, "replicas": 2});
        let plan = json!({"main_bytes": 1e9, "main_vcpus": 1.0, "groups": [group]});
        evaluated(&problem, &plan).ttft_seconds
    };
    for busiest in [0.5, 0.7, 0.95] {
        let (found, expected) = (first_token([busiest, 1.0 - busiest]), busiest * TOKENS * EXPERT / 0.5);
        assert!((found / expected - 1.0).abs() < 1e-6, "{busiest}: {found} {expected}");
    }
}
