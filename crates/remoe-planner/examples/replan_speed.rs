//! Measures the time of replanning for new shares on one thread, and its saving relative to a full search:
//!
//! `cargo run --profile ci -p remoe-planner --example replan_speed [VECTORS [LAYERS [CASE [SEED]]]]`
//!
//! Each vector of shares evolves from the previous one: drawn independently (Dirichlet, alpha from 0.1 to 10),
//! permuted, or slightly changed. The saving is the cost of the last plan under the new shares minus that of the new
//! plan. Seconds are CPU time. The last columns count plans that break a limit, and plans that cost more than the last
//! one although that keeps the limits.

#![allow(clippy::unwrap_used)]

#[path = "../tests/it/generate/mod.rs"]
mod generate;

use generate::{ExtendedDecisions, Shape, SplitMix64, beyond, model_problem, next_shares};
use remoe_planner::{Billing, Budget, Device, Options, PlanDraft, Problem, evaluate, replan, solve_within};

/// Layers, experts, top-k, bytes of an expert, and the time limit of a plan in milliseconds.
const MODELS: [(usize, u32, u32, f64, f64); 3] =
    [(16, 64, 8, 1.26e7, 50.0), (27, 64, 6, 1.73e7, 50.0), (58, 256, 8, 4.4e7, 150.0)];

const GROUPS: ExtendedDecisions =
    ExtendedDecisions { groups: Some(16), vcpus: true, per_second: Some(1e-2), idle_seconds: None };

/// Name, slack of the limits, and enabled features.
type SpeedCase = (&'static str, f64, fn(&Problem) -> Problem);

const CASES: [SpeedCase; 7] = [
    ("reserved, groups sleep", 1.0, |problem| Problem {
        remote_idle_seconds: Some(60.0),
        ..beyond(problem, ExtendedDecisions { per_second: Some(2e-3), ..GROUPS })
    }),
    ("reserved, operator", 1.0, |problem| {
        let mut problem = beyond(problem, GROUPS);
        problem.device = Device::Cpu;
        problem.cpu_quotas = true;
        problem.remote_idle_seconds = Some(60.0);
        problem
    }),
    ("reserved, all sleep", 0.2, |problem| {
        beyond(problem, ExtendedDecisions { per_second: Some(1e-3), idle_seconds: Some(300.0), ..GROUPS })
    }),
    ("reserved, busy", 0.2, |problem| beyond(problem, GROUPS)),
    ("reserved, memory", 0.2, |problem| {
        beyond(problem, ExtendedDecisions { vcpus: false, per_second: None, ..GROUPS })
    }),
    ("invocation, layers", 0.2, Problem::clone),
    ("invocation, groups", 0.2, |problem| {
        let mut problem = beyond(problem, ExtendedDecisions { vcpus: true, per_second: None, ..GROUPS });
        problem.pricing.billing = Billing::Invocation;
        problem
    }),
];

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<usize>().unwrap());
    let vectors = arguments.next().unwrap_or(200);
    let (only_layers, only_case) = (arguments.next(), arguments.next());
    let seed = arguments.next().unwrap_or(7) as u64;
    println!(
        "{:<9} {:<23} {:>7} {:>7} {:>7} {:>7} {:>9} {:>9} {:>9} {:>7} {:>6} {:>6}",
        "model",
        "case",
        "p50 ms",
        "p95 ms",
        "max ms",
        "allowed",
        "solve ms",
        "saving %",
        "full %",
        "share %",
        "broken",
        "worse"
    );
    for (layers, experts, top_k, expert_bytes, allowed) in MODELS {
        if only_layers.is_some_and(|only| only > 0 && only != layers) {
            continue;
        }
        for (index, (name, slack, case)) in CASES.into_iter().enumerate() {
            if only_case.is_some_and(|only| only != index) {
                continue;
            }
            let shape = Shape { layers, experts, top_k, slack, gpu_price: 3.0, expert_bytes, seed };
            let figures = followed(case(&model_problem(shape)), vectors);
            let millis = sorted(figures.iter().map(|figure| figure.replan * 1e3).collect());
            let full_millis = sorted(figures.iter().map(|figure| figure.solve * 1e3).collect());
            let saved = |of: fn(&Figure) -> f64| {
                at(
                    &sorted(
                        figures
                            .iter()
                            .map(|figure| 100.0 * (figure.last - of(figure)) / figure.last)
                            .collect(),
                    ),
                    0.5,
                )
            };
            let (new, full) = (saved(|figure| figure.new), saved(|figure| figure.full));
            println!(
                "{:<9} {name:<23} {:>7.1} {:>7.1} {:>7.1} {allowed:>7} {:>9.0} {new:>9.3} {full:>9.3} {:>7.1} {:>6} {:>6}",
                format!("{layers}x{experts}"),
                at(&millis, 0.5),
                at(&millis, 0.95),
                at(&millis, 1.0),
                at(&full_millis, 0.5),
                100.0 * new / full,
                figures.iter().filter(|figure| figure.broken).count(),
                figures.iter().filter(|figure| figure.worse).count(),
            );
        }
    }
}

/// One vector of shares.
struct Figure {
    /// Seconds.
    replan: f64,
    solve: f64,
    /// Dollars of the last plan, the new one and that of a full search.
    last: f64,
    new: f64,
    full: f64,
    broken: bool,
    worse: bool,
}

fn followed(mut problem: Problem, vectors: usize) -> Vec<Figure> {
    let random = &mut SplitMix64::new(11);
    let options = Options { sturdy: 0.0, hysteresis: 0.0, stands_seconds: 1e12, ..Options::default() };
    let solved = |problem: &Problem, previous: Option<&PlanDraft>| {
        solve_within(problem, previous, &options, Budget::UNLIMITED).ok()
    };
    let mut previous = PlanDraft::from(&solved(&problem, None).unwrap().plan);
    let mut figures = Vec::new();
    for index in 0..vectors {
        let shares = problem.prediction.clone().unwrap();
        problem.prediction = Some(next_shares(random, &shares, index));
        let last = evaluate(&problem, &previous, false).unwrap();
        let start = processor_seconds();
        let new = replan(&problem, &previous, &options, Budget::UNLIMITED);
        let middle = processor_seconds();
        let full = solved(&problem, None);
        let end = processor_seconds();
        let Some(full) = full else { continue };
        let (cost, broken) = match &new {
            Ok(new) => (new.evaluation.total_cost, !new.evaluation.violations.is_empty()),
            Err(_) => (last.total_cost, true),
        };
        figures.push(Figure {
            replan: middle - start,
            solve: end - middle,
            last: last.total_cost,
            new: cost,
            full: full.evaluation.total_cost,
            broken,
            worse: last.violations.is_empty() && cost > last.total_cost * (1.0 + 1e-9),
        });
        if std::env::var_os("REPLAN_VERBOSE").is_some() {
            let figure = &figures[figures.len() - 1];
            println!(
                "  {index} last {:.6} ({}) new {:.6} full {:.6} ms {:.1}",
                figure.last,
                last.violations.len(),
                figure.new / figure.last,
                figure.full / figure.last,
                figure.replan * 1e3
            );
            if let Ok(new) = &new {
                println!("    new  {}", described(&new.plan));
            }
            println!("    full {}", described(&full.plan));
        }
        previous = PlanDraft::from(&full.plan);
    }
    figures
}

fn described(plan: &remoe_planner::Plan) -> String {
    let counts: Vec<usize> = plan.layers.iter().map(|layer| layer.remote.len()).collect();
    let groups: Vec<String> = plan
        .groups
        .iter()
        .map(|group| {
            let experts: usize = group.experts.iter().map(Vec::len).sum();
            format!(
                "{experts}:{:?}x{}{}",
                group.vcpus.unwrap_or(group.memory_bytes / 1e9),
                group.replicas,
                if group.idle_seconds.is_some() { "z" } else { "" }
            )
        })
        .collect();
    let own: Vec<String> = plan
        .layers
        .iter()
        .filter(|layer| layer.replicas > 0)
        .map(|layer| format!("{:.1}x{}", layer.memory_bytes / 1e9, layer.replicas))
        .collect();
    format!(
        "main {:.2} {:?} counts {counts:?} groups {groups:?} {own:?}",
        plan.main_bytes / 1e9,
        plan.main_vcpus
    )
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

fn at(sorted: &[f64], share: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((share * last as f64).round() as usize).copied().unwrap_or(f64::NAN)
}

/// Returns the CPU seconds of this thread.
fn processor_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
}
