//! Measures the time of planning on one thread, by the size of the model:
//!
//! `cargo run --release -p remoe-planner --example solve_speed [LAYERS]`
//!
//! Seconds are CPU time, so that other load on the machine does not count. `walk` is pre-allocation, `tables` the time of
//! planning without remote experts beyond it, and `search` the rest. `sliced` has up to 16 groups, `sturdy` also chooses
//! the most robust plan within 2 % of the cost, and `asleep` has groups that may scale to zero.

#![allow(clippy::unwrap_used)]

#[path = "../tests/it/generate/mod.rs"]
mod generate;

use generate::{Shape, model_problem};
use remoe_planner::{
    Arrivals, Billing, Options, PlanDraft, Problem, Remote, Start, Starts, evaluate, preallocate, solve,
};

/// Layers, experts, top-k, and the time limit of a plan in seconds.
const MODELS: [(usize, u32, u32, f64); 3] = [(27, 64, 6, 0.1), (58, 256, 8, 1.0), (1000, 512, 8, 30.0)];

/// Name, bytes of an expert, slack of the limits, price of the device.
const CASES: [(&str, f64, f64, f64); 4] = [
    ("memory decides, loose limits", 1.7e7, 10.0, 3.0),
    ("memory decides, tight limits", 1.7e7, 1e-3, 3.0),
    ("vCPUs decide, tight limits", 2e5, 1e-3, 1e-2),
    ("vCPUs decide, limits bind", 2e5, 0.2, 1e-2),
];

fn main() {
    let only: Option<usize> = std::env::args().nth(1).and_then(|layers| layers.parse().ok());
    println!(
        "{:<13} {:<29} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} | {:>6} {:>7} {:>7} {:>7} {:>7}",
        "model",
        "case",
        "read",
        "walk",
        "tables",
        "search",
        "plan",
        "allowed",
        "evaluate",
        "sliced",
        "groups",
        "sturdy",
        "asleep",
        "cands",
        "pairs",
        "bounds",
        "solved",
        "peak MB"
    );
    for (layers, experts, top_k, allowed) in MODELS {
        if only.is_some_and(|only| only != layers) {
            continue;
        }
        for (name, expert_bytes, slack, gpu_price) in CASES {
            let shape = Shape { layers, experts, top_k, slack, gpu_price, expert_bytes, seed: 7 };
            let text = serde_json::to_string(&model_problem(shape)).unwrap();
            let (read, problem) = timed(|| Problem::from_json(&text).unwrap());
            let (walk, _) = timed(|| preallocate(&problem));
            let never = Options { remote: Remote::Never, ..Options::default() };
            let (without, _) = timed(|| solve(&problem, None, &never).map(|answer| answer.plan));
            let (plan, answer) = timed(|| solve(&problem, None, &Options::default()).unwrap());
            let (groups, sliced) =
                timed(|| solve(&with_groups(&problem), None, &Options::default()).unwrap());
            let sturdily = Options { sturdy: 0.02, ..Options::default() };
            let (sturdy, _) = timed(|| solve(&with_groups(&problem), None, &sturdily).unwrap());
            let seldom = with_sleep(&problem);
            let (asleep, _) = timed(|| solve(&seldom, None, &Options::default()).map(|answer| answer.plan));
            let draft = PlanDraft::from(&answer.plan);
            let (evaluating, _) = timed(|| evaluate(&problem, &draft, false).unwrap());
            let work = answer.search;
            println!(
                "{:<13} {name:<29} {read:>8.4} {walk:>8.4} {:>8.4} {:>8.4} {plan:>8.4} {allowed:>8} {evaluating:>8.4} {groups:>8.4} {:>8} {sturdy:>8.4} {asleep:>8.4} | {:>6} {:>7} {:>7} {:>7} {:>7.0}",
                format!("{layers} x {experts}"),
                without - walk,
                plan - without,
                sliced.plan.groups.len(),
                work.candidates,
                work.pairs,
                work.bounds,
                work.solved,
                peak_megabytes(),
            );
        }
    }
}

/// Returns `problem` with up to 16 groups, under reserved billing.
fn with_groups(problem: &Problem) -> Problem {
    let mut problem = problem.clone();
    problem.limits.max_groups = Some(16);
    problem.pricing.billing = Billing::Reserved;
    problem
}

/// Returns `problem` with rare requests, and with groups that may scale to zero.
fn with_sleep(problem: &Problem) -> Problem {
    let arrivals = Arrivals {
        per_second: 1e-3,
        burst: 1.0,
        recorded_seconds: None,
        idle_seconds: None,
        input_variation: 0.0,
        output_variation: 0.0,
    };
    let start = Start { process_seconds: 2.0, load_bytes_per_second: 1e9 };
    Problem {
        arrivals: Some(arrivals),
        starts: Some(Starts { main: start, remote: start }),
        remote_idle_seconds: Some(60.0),
        ..with_groups(problem)
    }
}

/// Returns the mean seconds of `work`, repeated until the measurement is long enough.
fn timed<T>(mut work: impl FnMut() -> T) -> (f64, T) {
    let start = processor_seconds();
    let mut value = work();
    let mut runs = 1.0;
    while processor_seconds() - start < 0.2 {
        value = std::hint::black_box(work());
        runs += 1.0;
    }
    ((processor_seconds() - start) / runs, value)
}

/// Returns the CPU seconds of this thread.
fn processor_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
}

/// Returns the peak memory of this process.
fn peak_megabytes() -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1e3
}
