//! Comparison of plans with one function per layer with the exhaustive optimum over all subsets of each layer's experts,
//! main sizes, remote sizes and replicas.

use crate::generate;

use generate::{Sample, Shape, SplitMix64, model_problem, small_problem, tighten};
use remoe_planner::{
    Billing, Evaluation, Options, Plan, PlanDraft, PlanError, PlanningResult, Problem, Selection, SizeRange,
    evaluate, solve,
};
use serde_json::json;

/// Most experts of a problem in total.
const MAX_EXPERTS: u32 = 12;

/// Cost and latency terms of one option of a layer at one main size.
#[derive(Clone, Debug)]
struct Terms {
    prefill: f64,
    step: f64,
    bill: f64,
    /// Bytes of the experts that stay with the main function.
    local_bytes: f64,
    /// Subset, memory and replicas of every layer so far.
    parts: Vec<(usize, f64, u32)>,
}

impl Terms {
    fn beats(&self, other: &Self) -> bool {
        self.prefill <= other.prefill
            && self.step <= other.step
            && self.bill <= other.bill
            && self.local_bytes <= other.local_bytes
    }

    fn plus(&self, other: &Self) -> Self {
        Self {
            prefill: self.prefill + other.prefill,
            step: self.step + other.step,
            bill: self.bill + other.bill,
            local_bytes: self.local_bytes + other.local_bytes,
            parts: self.parts.iter().chain(&other.parts).copied().collect(),
        }
    }
}

/// A problem of at most [`MAX_EXPERTS`] experts in one to four layers, all of whose plans can be tried.
fn problem(seed: u64) -> Problem {
    let random = &mut SplitMix64::new(seed ^ 0xa11);
    let layers = 1 + seed as usize % 4;
    let mut problem = small_problem(seed, layers);
    let mut left = MAX_EXPERTS;
    for (index, layer) in problem.layers.iter_mut().enumerate() {
        let others = (layers - index - 1) as u32;
        let most = if layers == 1 { left } else { (left - 2 * others).min(7) };
        layer.experts = random.whole(2, u64::from(most)) as u32;
        left -= layer.experts;
        layer.top_k = random.whole(1, u64::from(layer.experts.min(8))) as u32;
    }
    let shares = problem.layers.iter().map(|layer| random.shares(layer.experts as usize)).collect();
    problem.prediction = Some(shares);
    let all: f64 = problem.layers.iter().map(|layer| f64::from(layer.experts) * layer.expert_bytes).sum();
    let range = |least: f64, most: f64, sizes: f64| SizeRange {
        min_bytes: least,
        max_bytes: most,
        step_bytes: ((most - least) / sizes).ceil(),
    };
    problem.specs.main = range(2e8, 3e8 + 1.2 * all, random.whole(4, 8) as f64);
    problem.specs.remote = range(1e8, 2e8 + random.between(0.3, 1.1) * all, random.whole(2, 5) as f64);
    problem.limits.max_replicas = random.whole(1, 3) as u32;
    if random.one_in(2) {
        problem.pricing.billing = Billing::Reserved;
    }
    tighten(&mut problem, [1e3, 10.0, 1.0, 0.3, 0.1, -0.1][random.whole(0, 5) as usize]);
    problem
}

/// Lists all subsets of a number of experts, ascending.
fn subsets(experts: u32) -> Vec<Vec<u32>> {
    (0..1_u32 << experts)
        .map(|mask| (0..experts).filter(|expert| mask >> expert & 1 == 1).collect())
        .collect()
}

fn plan_of(main: f64, parts: impl Iterator<Item = (Vec<u32>, f64, u32)>) -> PlanDraft {
    let layers: Vec<_> = parts
        .map(|(set, memory, replicas)| json!({"remote": set, "memory_bytes": memory, "replicas": replicas}))
        .collect();
    PlanDraft::from_json(&json!({"main_bytes": main, "layers": layers}).to_string()).unwrap()
}

/// Builds a plan with one set per layer, and the same size and replicas in each layer with remote experts.
fn evaluated(problem: &Problem, sets: &[Vec<u32>], main: f64, memory: f64, replicas: u32) -> Evaluation {
    let parts = sets.iter().map(|set| match set.is_empty() {
        true => (Vec::new(), 0.0, 0),
        false => (set.clone(), memory, replicas),
    });
    evaluate(problem, &plan_of(main, parts), false).unwrap()
}

/// Removes options that another one dominates in all terms.
fn undominated(mut options: Vec<Terms>) -> Vec<Terms> {
    options.sort_by(|a, b| a.bill.total_cmp(&b.bill).then(a.prefill.total_cmp(&b.prefill)));
    let mut kept: Vec<Terms> = Vec::new();
    for option in options {
        if !kept.iter().any(|other| other.beats(&option)) {
            kept.push(option);
        }
    }
    kept
}

/// Returns the smallest cost of all plans with one function per layer.
fn optimum(problem: &Problem) -> Option<f64> {
    let (mains, remotes) = (problem.specs.main.sizes(), problem.specs.remote.sizes());
    let reserved = problem.pricing.billing == Billing::Reserved;
    let output = problem.request.output_tokens;
    let most = problem.limits.max_replicas;
    let of_layers: Vec<Vec<Vec<u32>>> = problem.layers.iter().map(|layer| subsets(layer.experts)).collect();
    let rounds = of_layers.iter().map(Vec::len).max().unwrap_or(0);
    // Layers do not depend on each other, so that one plan shows a set of each of them.
    let sets = |round: usize| -> Vec<Vec<u32>> {
        of_layers.iter().map(|sets| sets.get(round).cloned().unwrap_or_default()).collect()
    };
    // Replicas work as long whatever the main size is, so that one size tells their times.
    let mut replicated = Vec::new();
    for round in 0..rounds {
        for memory in &remotes {
            for replicas in 1..=most {
                let evaluation = evaluated(problem, &sets(round), mains[0], *memory, replicas);
                replicated.push((round, *memory, replicas, evaluation));
            }
        }
    }
    let request = &problem.request;
    let tokens = request.max_input_tokens.unwrap_or(request.input_tokens)
        + request.max_output_tokens.unwrap_or(request.output_tokens);
    let base = tokens * problem.token_bytes + problem.runtime_bytes;
    let mut best: Option<(f64, f64, Terms)> = None;
    for main in mains {
        let mut layers: Vec<Vec<Terms>> = vec![Vec::new(); of_layers.len()];
        let mut rate = 0.0;
        for at_size in replicated.chunks(most as usize) {
            let (round, memory, ..) = at_size[0];
            let here = evaluated(problem, &sets(round), main, memory, 1);
            rate = here.main_cost / (here.prefill_seconds + here.decode_seconds);
            for (_, _, replicas, evaluation) in at_size {
                for (index, layer) in evaluation.layers.iter().enumerate() {
                    let broken = |name: &str| {
                        let limit = format!("{name}{index}");
                        evaluation.violations.iter().any(|violation| violation.limit == limit)
                    };
                    let Some(set) = of_layers[index].get(round) else { continue };
                    if broken("mem") || broken("payload") {
                        continue;
                    }
                    let gb_second = 1e-9 * problem.pricing.cpu_per_gb_second * memory;
                    let mains = f64::from(problem.pricing.main_replicas);
                    let bill = match (set.is_empty(), reserved) {
                        (true, _) => 0.0,
                        (_, true) => gb_second * f64::from(*replicas) / mains,
                        _ => layer.remote_cost,
                    };
                    let alone = &here.layers[index];
                    let fixed = alone.prefill - alone.local_prefill.max(alone.remote_prefill);
                    let stays = problem.layers[index].experts as usize - set.len();
                    layers[index].push(Terms {
                        prefill: fixed + alone.local_prefill.max(layer.remote_prefill),
                        step: alone.decode,
                        bill,
                        local_bytes: stays as f64 * problem.layers[index].expert_bytes,
                        parts: vec![(round, memory, *replicas)],
                    });
                }
            }
        }
        let layers: Vec<Vec<Terms>> = layers.into_iter().map(undominated).collect();
        let prefill = problem.slo.ttft_seconds - problem.cold_start_seconds + 1e-9;
        let step = if output > 0.0 { problem.slo.tpot_seconds + 1e-12 } else { f64::INFINITY };
        let cost = |terms: &Terms| {
            let seconds = terms.prefill + output * terms.step;
            if reserved { (rate + terms.bill) * seconds } else { rate * seconds + terms.bill }
        };
        let nothing = Terms { prefill: 0.0, step: 0.0, bill: 0.0, local_bytes: base, parts: Vec::new() };
        let mut partial = vec![nothing];
        for options in layers {
            let sums = partial.iter().flat_map(|sum| options.iter().map(|option| sum.plus(option)));
            let keeps =
                |sum: &Terms| sum.prefill <= prefill && sum.step <= step && sum.local_bytes <= main + 1e-6;
            partial = undominated(sums.filter(keeps).collect());
        }
        for terms in partial {
            let cost = cost(&terms);
            if best.as_ref().is_none_or(|(least, ..)| cost < *least) {
                best = Some((cost, main, terms));
            }
        }
    }
    let (cost, main, terms) = best?;
    // The sum of parts is a plan, and its evaluation says the same.
    let parts = terms.parts.iter().zip(&of_layers).map(|((round, memory, replicas), sets)| {
        match sets[*round].clone() {
            set if set.is_empty() => (set, 0.0, 0),
            set => (set, *memory, *replicas),
        }
    });
    let evaluation = evaluate(problem, &plan_of(main, parts), false).unwrap();
    assert_eq!(evaluation.violations, []);
    assert!((evaluation.total_cost - cost).abs() <= 1e-9 * cost, "{evaluation:?}");
    Some(cost)
}

#[derive(Default)]
struct Gaps {
    solved: usize,
    infeasible: usize,
    missed: Vec<u64>,
    above: Vec<(f64, u64)>,
    mixed: usize,
    /// Plans that a time limit holds.
    bound: usize,
    paper: Vec<f64>,
    refused: usize,
}

impl Gaps {
    fn take(&mut self, seed: u64, problem: &Problem) {
        let optimum = optimum(problem);
        let answer = match solve(problem, None, &Options::default()) {
            Ok(answer) => answer,
            Err(PlanError::Infeasible(_)) => {
                self.infeasible += 1;
                self.missed.extend(optimum.map(|_| seed));
                return;
            }
            Err(error) => panic!("seed {seed}: {error}"),
        };
        self.solved += 1;
        assert!(passes_its_own_evaluation(problem, &answer.plan), "seed {seed}");
        self.note(&answer);
        let cost = answer.evaluation.total_cost;
        let above = cost / optimum.unwrap() - 1.0;
        assert!(above > -1e-9, "seed {seed}: {cost} is below the optimum by {above}");
        self.above.push((above, seed));
    }

    fn note(&mut self, answer: &PlanningResult) {
        self.mixed += usize::from(answer.explanation.selection == Some(Selection::Mixed));
        let binding = answer.explanation.binding.as_ref();
        self.bound += usize::from(binding.is_some_and(|binding| ["ttft", "tpot"].contains(&&*binding.limit)));
        if let Some(form) = &answer.explanation.continuous {
            self.refused += usize::from(form.refused.is_some());
            self.paper.extend(form.above);
        }
    }

    fn report(&mut self, name: &str) {
        self.above.sort_by(|a, b| a.0.total_cmp(&b.0));
        self.paper.sort_by(f64::total_cmp);
        let at = |values: Vec<f64>, share: f64| {
            values.get((share * (values.len() as f64 - 1.0)) as usize).copied()
        };
        let costs: Vec<f64> = self.above.iter().map(|(above, _)| *above).collect();
        let of = |values: &Vec<f64>| [0.5, 0.95, 1.0].map(|share| at(values.clone(), share));
        let dear = self.above.iter().filter(|(above, _)| *above > 1e-3);
        eprintln!(
            "{name}: {} solved ({} mixed, {} held by a time limit), {} infeasible, missed {:?}; above the optimum (median, 95 %, most) {:?}, \
             more than 0.1 %: {:?}; the paper's form {} {:?}, refused {}",
            self.solved,
            self.mixed,
            self.bound,
            self.infeasible,
            self.missed,
            of(&costs),
            dear.collect::<Vec<_>>(),
            self.paper.len(),
            of(&self.paper),
            self.refused
        );
    }
}

fn passes_its_own_evaluation(problem: &Problem, plan: &Plan) -> bool {
    evaluate(problem, &PlanDraft::from(plan), false).unwrap().violations.is_empty()
}

#[test]
fn plans_per_layer_are_optimal_over_all_subsets() {
    let mut gaps = Gaps::default();
    let sample = Sample::new();
    for seed in sample.of(0..800) {
        gaps.take(seed, &problem(seed));
    }
    gaps.report("per layer");
    assert!(sample.is_enough(gaps.solved, 500), "{}", gaps.solved);
    assert!(gaps.missed.is_empty(), "{:?}", gaps.missed);
    assert!(gaps.above.iter().all(|(above, _)| *above <= 1e-9), "{:?}", gaps.above.last());
}

/// Compares the plans of larger problems with those whose first layers are entirely remote and others entirely local.
#[test]
fn plans_with_whole_layers_cost_no_less_than_the_answer() {
    let (mut compared, mut mixed) = (0, 0);
    for seed in 0..4 {
        let shape = Shape {
            layers: 10,
            experts: 32,
            top_k: 4,
            slack: 10.0,
            gpu_price: 0.1,
            expert_bytes: 6.4e7,
            seed,
        };
        let mut problem = model_problem(shape);
        // The main function holds half of the experts.
        let range = &mut problem.specs.main;
        range.max_bytes =
            range.min_bytes + range.step_bytes * (0.6 * 10.0 * 32.0 * 6.4e7 / range.step_bytes).ceil();
        if seed % 2 == 1 {
            problem.pricing.billing = Billing::Reserved;
        }
        let answer = solve(&problem, None, &Options::default()).unwrap();
        mixed += usize::from(answer.explanation.selection == Some(Selection::Mixed));
        for remote_layers in 1..=10 {
            let local_bytes = (10 - remote_layers) as f64 * 32.0 * 6.4e7;
            let needed = local_bytes + problem.runtime_bytes + 328.0 * problem.token_bytes;
            let Some(main) = problem.specs.main.sizes().into_iter().find(|size| *size >= needed) else {
                continue;
            };
            for memory in problem.specs.remote.sizes() {
                let parts = (0..10).map(|layer| match layer < remote_layers {
                    true => ((0..32).collect(), memory, 1),
                    false => (Vec::new(), 0.0, 0),
                });
                let known = evaluate(&problem, &plan_of(main, parts), false).unwrap();
                if known.violations.is_empty() {
                    compared += 1;
                    let cost = answer.evaluation.total_cost;
                    assert!(
                        cost <= known.total_cost * (1.0 + 1e-9),
                        "{seed} {remote_layers} {memory}: {cost}"
                    );
                }
            }
        }
    }
    assert!(compared > 100 && mixed > 0, "{compared} {mixed}");
}
