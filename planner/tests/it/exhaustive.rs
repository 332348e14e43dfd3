//! Plans against the exhaustive optimum: every ratio that passes the worst case, every main size,
//! every remote size and every number of replicas.

use crate::generate;

use generate::small_problem;
use remoe_planner::{Billing, Evaluation, Options, Plan, PlanDraft, PlanError, Problem, evaluate, solve};
use serde_json::json;

/// What one option of a layer contributes at one main size.
#[derive(Clone, Copy, Debug)]
struct Terms {
    prefill: f64,
    step: f64,
    bill: f64,
}

/// The remote set, with the same size and replicas in every layer that has one.
fn evaluated(problem: &Problem, sets: &[Vec<u32>], main: f64, memory: f64, replicas: u32) -> Evaluation {
    let layers: Vec<_> =
        sets.iter().map(|set| json!({"remote": set, "memory_bytes": memory, "replicas": replicas})).collect();
    let plan = json!({"main_bytes": main, "layers": layers}).to_string();
    evaluate(problem, &PlanDraft::from_json(&plan).unwrap(), false).unwrap()
}

/// The `counts` least used experts of each layer, ascending.
fn least_used(problem: &Problem, counts: &[usize]) -> Vec<Vec<u32>> {
    let rows = problem.prediction.as_ref().unwrap().iter().zip(counts);
    let sets = rows.map(|(shares, count)| {
        let mut order: Vec<u32> = (0..shares.len() as u32).collect();
        order.sort_by(|a, b| shares[*a as usize].total_cmp(&shares[*b as usize]).then(a.cmp(b)));
        order.truncate(*count);
        order.sort_unstable();
        order
    });
    sets.collect()
}

/// Without what another option beats in every term.
fn undominated(mut options: Vec<Terms>) -> Vec<Terms> {
    options.sort_by(|a, b| a.bill.total_cmp(&b.bill).then(a.prefill.total_cmp(&b.prefill)));
    let mut kept: Vec<Terms> = Vec::new();
    for option in options {
        if !kept.iter().any(|other| other.prefill <= option.prefill && other.step <= option.step) {
            kept.push(option);
        }
    }
    kept
}

/// The least cost of one choice of remote sets, over all main sizes and options.
fn cheapest(problem: &Problem, counts: &[usize]) -> Option<f64> {
    let sets = least_used(problem, counts);
    let remote = problem.specs.remote.sizes();
    let reserved = problem.pricing.billing == Billing::Reserved;
    let output = problem.request.output_tokens;
    let gb = 1e-9 * problem.pricing.cpu_per_gb_second;
    let most = problem.limits.max_replicas;
    // Replicas work as long whatever the main size is, so that one size tells their times.
    let sizes = problem.specs.main.sizes();
    let replicated: Vec<(f64, u32, Evaluation)> = remote
        .iter()
        .flat_map(|memory| (1..=most).map(move |replicas| (*memory, replicas)))
        .map(|(memory, replicas)| (memory, replicas, evaluated(problem, &sets, sizes[0], memory, replicas)))
        .collect();
    let mut best: Option<f64> = None;
    for main in sizes {
        let single: Vec<Evaluation> =
            remote.iter().map(|memory| evaluated(problem, &sets, main, *memory, 1)).collect();
        let bare = &single[0];
        if bare.violations.iter().any(|violation| violation.limit == "main") {
            continue;
        }
        let rate = bare.main_cost / (bare.prefill_seconds + bare.decode_seconds);
        let mut layers: Vec<Vec<Terms>> = vec![Vec::new(); sets.len()];
        for (option, (memory, replicas, evaluation)) in replicated.iter().enumerate() {
            let alone = &single[option / most as usize];
            for (index, layer) in evaluation.layers.iter().enumerate() {
                let broken = |name: &str| {
                    let limit = format!("{name}{index}");
                    evaluation.violations.iter().any(|violation| violation.limit == limit)
                };
                if broken("mem") || broken("payload") {
                    continue;
                }
                let bill = if reserved && !sets[index].is_empty() {
                    gb * memory * f64::from(*replicas) / f64::from(problem.pricing.main_replicas)
                } else if reserved {
                    0.0
                } else {
                    layer.remote_cost
                };
                let here = &alone.layers[index];
                let fixed = here.prefill - here.local_prefill.max(here.remote_prefill);
                let prefill = fixed + here.local_prefill.max(layer.remote_prefill);
                layers[index].push(Terms { prefill, step: here.decode, bill });
            }
        }
        let layers: Vec<Vec<Terms>> = layers.into_iter().map(undominated).collect();
        let prefill = problem.slo.ttft_seconds - problem.cold_start_seconds + 1e-9;
        let step = if output > 0.0 { problem.slo.tpot_seconds + 1e-12 } else { f64::INFINITY };
        let cost = |terms: &Terms| {
            let seconds = terms.prefill + output * terms.step;
            if reserved { (rate + terms.bill) * seconds } else { rate * seconds + terms.bill }
        };
        let mut partial = vec![Terms { prefill: 0.0, step: 0.0, bill: 0.0 }];
        for options in layers {
            let sums = partial.iter().flat_map(|sum| {
                options.iter().map(|option| Terms {
                    prefill: sum.prefill + option.prefill,
                    step: sum.step + option.step,
                    bill: sum.bill + option.bill,
                })
            });
            partial = sums.filter(|sum| sum.prefill <= prefill && sum.step <= step).collect();
        }
        let least = partial.iter().map(cost).fold(f64::INFINITY, f64::min);
        if least < best.unwrap_or(f64::INFINITY) {
            best = Some(least);
        }
    }
    best
}

fn optimum(problem: &Problem, answer: Option<&remoe_planner::Answer>) -> Option<f64> {
    let walk = match answer {
        Some(answer) => answer.walk.clone(),
        None => remoe_planner::preallocate(problem).map(|answer| answer.walk).unwrap_or_default(),
    };
    let none = vec![0; problem.layers.len()];
    let passing = walk.iter().filter(|step| step.passes()).map(|step| step.remote_experts.clone());
    let mut all: Vec<Vec<usize>> = passing.collect();
    if !all.contains(&none) {
        all.push(none);
    }
    all.iter().filter_map(|counts| cheapest(problem, counts)).min_by(f64::total_cmp)
}

#[derive(Default)]
struct Gaps {
    solved: usize,
    infeasible: usize,
    above: Vec<f64>,
    across: usize,
    /// Plans that a time limit holds.
    bound: usize,
    paper: Vec<f64>,
    refused: usize,
}

impl Gaps {
    fn take(&mut self, seed: u64, problem: &Problem) {
        let answer = solve(problem, None, &Options::default());
        let answer = match answer {
            Ok(answer) => answer,
            Err(PlanError::Infeasible(why)) => {
                self.infeasible += 1;
                assert_eq!(optimum(problem, None), None, "seed {seed}: {why}");
                return;
            }
            Err(error) => panic!("seed {seed}: {error}"),
        };
        self.solved += 1;
        assert!(passes_its_own_evaluation(problem, &answer.plan), "seed {seed}");
        let cost = answer.evaluation.total_cost;
        if let Some(mix) = answer.baselines.mix.as_ref().filter(|mix| mix.is_feasible()) {
            assert!(
                cost <= mix.total_cost * (1.0 + 1e-12),
                "seed {seed}: {cost} above MIX {}",
                mix.total_cost
            );
        }
        self.across +=
            usize::from(answer.explanation.selection == Some(remoe_planner::Selection::AcrossLayers));
        let binding = answer.explanation.binding.as_ref();
        self.bound += usize::from(binding.is_some_and(|binding| ["ttft", "tpot"].contains(&&*binding.limit)));
        if let Some(form) = &answer.explanation.continuous {
            self.refused += usize::from(form.refused.is_some());
            self.paper.extend(form.above);
        }
        // Without an optimum, the plan across layers is the only one.
        if let Some(optimum) = optimum(problem, Some(&answer)) {
            let above = cost / optimum - 1.0;
            assert!(above <= 0.01, "seed {seed}: {cost} is {above} above {optimum}");
            self.above.push(above.max(0.0));
        }
    }

    fn report(&mut self, name: &str) {
        let quantiles = |values: &mut Vec<f64>| {
            values.sort_by(f64::total_cmp);
            let at = |share: f64| values.get((share * (values.len() as f64 - 1.0)) as usize).copied();
            (values.len(), at(0.5), at(0.95), at(1.0))
        };
        let (above, paper) = (quantiles(&mut self.above), quantiles(&mut self.paper));
        eprintln!(
            "{name}: {} solved ({} across layers, {} held by a time limit), {} infeasible; above the optimum (n, median, 95 %, most) {above:?}; \
             the paper's form {paper:?}, refused {}",
            self.solved, self.across, self.bound, self.infeasible, self.refused
        );
    }
}

fn passes_its_own_evaluation(problem: &Problem, plan: &Plan) -> bool {
    evaluate(problem, &PlanDraft::from(plan), false).unwrap().violations.is_empty()
}

#[test]
fn invocation_billing_is_optimal() {
    let mut gaps = Gaps::default();
    for seed in 0..1600 {
        gaps.take(seed, &small_problem(seed, 1 + seed as usize % 3));
    }
    gaps.report("invocation");
    assert!(gaps.above.len() > 1000);
    assert!(gaps.above.iter().all(|above| *above <= 1e-9), "{:?}", gaps.above.last());
}

#[test]
fn reserved_billing_is_close() {
    let mut gaps = Gaps::default();
    for seed in 0..300 {
        let mut problem = small_problem(seed, 1 + seed as usize % 3);
        problem.pricing.billing = Billing::Reserved;
        gaps.take(seed, &problem);
    }
    gaps.report("reserved");
}
