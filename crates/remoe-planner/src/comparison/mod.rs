//! Comparison of all strategies to serve a model, each at its cheapest, and whether remote experts pay.

mod flip;

use crate::best_plans::BestPlans;
use crate::slicing::CandidatePlan;
use crate::words::{amount, dollars, limit_name};
use remoe_plan::cost::Evaluation;
use remoe_plan::cost::baselines::{Baseline, WithoutRemote};
use remoe_plan::model::Model;
use remoe_plan::problem::Device;
use remoe_plan::serving_strategy::ServingStrategy;
use serde::Serialize;

pub(crate) use flip::ComparisonFlips;
pub use flip::{ComparisonFlip, FlipFigure};

/// All strategies to serve a model, the cheapest of them, and whether it has remote experts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlacementComparison {
    /// Set if the cheapest strategy that keeps every limit has remote experts.
    pub pays: bool,
    /// Result in plain words.
    pub sentence: String,
    /// The cheapest strategy that keeps every limit; absent if none does.
    pub best: Option<ServingStrategy>,
    /// Evaluations of all strategies.
    pub rivals: Vec<StrategyEvaluation>,
    /// Changes of one figure that would change [`Self::pays`], if [`Options::flips`](crate::Options) asks for them.
    #[serde(rename = "turns")]
    pub flips: Vec<ComparisonFlip>,
    /// Figures for which that is unknown, because the search exceeds its work limit.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub undecided: Vec<FlipFigure>,
}

/// Evaluation of one strategy at its cheapest.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StrategyEvaluation {
    /// Strategy.
    pub name: ServingStrategy,
    /// Set if it keeps every limit.
    pub feasible: bool,
    /// Dollars in an hour: under the arrivals of the problem, or without arrivals, of requests one after another.
    pub dollars_per_hour: Option<f64>,
    /// Dollars of one request.
    pub dollars_per_request: Option<f64>,
    /// Time to first token in seconds.
    pub ttft_seconds: Option<f64>,
    /// Time per output token in seconds.
    pub tpot_seconds: Option<f64>,
    /// Reason that it is not feasible, or by which share it is more expensive than the cheapest.
    pub why: String,
    /// Set if costs are those under the arrivals of the problem.
    #[serde(skip)]
    has_arrivals: bool,
}

impl StrategyEvaluation {
    /// Returns the price in words: of an hour under arrivals, or without them of a million requests one after another.
    #[must_use]
    pub fn price(&self) -> String {
        match (self.has_arrivals, self.dollars_per_hour, self.dollars_per_request) {
            (true, Some(hourly), _) => format!("{} per hour", dollars(hourly)),
            (false, _, Some(each)) => format!("{} per million requests", dollars(each * 1e6)),
            _ => String::new(),
        }
    }
}

/// Evaluates all strategies for a problem, each at its cheapest.
pub(crate) fn evaluate_rivals(
    model: &Model<'_>,
    without_remote: &WithoutRemote,
    plans: &BestPlans<'_>,
) -> Vec<StrategyEvaluation> {
    let WithoutRemote { baselines, fetch } = without_remote;
    let limits = &model.problem.limits;
    let groups = match limits.max_groups {
        Some(_) => planned(ServingStrategy::Sliced, plans.sliced.as_ref(), plans.is_near),
        None => absent(ServingStrategy::Sliced, "not evaluated: limits.max_groups is not set"),
    };
    let experts = model.local_expert_bytes(&vec![0; model.layers.len()]);
    let largest_main = amount("main", model.problem.specs.main.largest());
    let none_fits = |needed: f64| {
        format!("no main function has {} of memory; the largest has {largest_main}", amount("main", needed))
    };
    let on_main = none_fits(experts + model.main_base());
    let no_gpu = "missing GPU times of experts (gpu_expert_seconds)".to_owned();
    let gpu_times = model.problem.layers.iter().all(|layer| layer.gpu_expert_seconds.is_some());
    let gpu_baseline = |strategy, found: Option<&Baseline>, fits: String| {
        baseline(strategy, found, model, if gpu_times { fits } else { no_gpu.clone() })
    };
    let cpu_times = model.problem.layers.iter().all(|layer| layer.cpu_nonexpert_seconds.is_some());
    let on_cpus = match cpu_times {
        true => none_fits(experts + model.gpu_bytes + model.problem.runtime_bytes),
        false => "missing CPU times of the non-expert part (cpu_nonexpert_seconds)".to_owned(),
    };
    let cpu_strategy = match model.problem.device {
        Device::Gpu => baseline(ServingStrategy::Cpu, baselines.cpu.as_ref(), model, on_cpus),
        Device::Cpu => {
            absent(ServingStrategy::Cpu, &format!("same as {}: no GPU", ServingStrategy::Mix.name()))
        }
    };
    let moves = match model.problem.swap_seconds.per_token > 0.0 {
        true => on_main.clone(),
        false => "missing bandwidth between host and GPU (swap_seconds.per_token)".to_owned(),
    };
    let mut all = vec![
        groups,
        planned(ServingStrategy::Layers, plans.per_layer.as_ref(), plans.is_near),
        baseline(ServingStrategy::Mix, baselines.mix.as_ref(), model, on_main),
        cpu_strategy,
        gpu_baseline(ServingStrategy::Gpu, baselines.gpu.as_ref(), none_fits(model.main_base())),
        gpu_baseline(ServingStrategy::Fetch, fetch.as_ref(), moves),
    ];
    let Some((name, least)) = cheapest_strategy(&all) else { return all };
    for rival in &mut all {
        if let Some(cost) = rival.dollars_per_request.filter(|_| rival.feasible) {
            rival.why = match (rival.name == name, is_tie(cost, least)) {
                (true, _) => "cheapest that meets all limits".to_owned(),
                (false, true) => "costs as much as the best, which is at least as fast".to_owned(),
                (false, false) => format!("costs {:.1} % more than the best", 100.0 * (cost / least - 1.0)),
            };
        }
    }
    all
}

/// Relative difference up to which costs are equal: sums of the same prices in another order differ by less.
pub(crate) const TIE: f64 = 1e-9;

fn is_tie(cost: f64, least: f64) -> bool {
    cost <= least * (1.0 + TIE)
}

/// Returns the cheapest feasible strategy and its dollars per request.
///
/// Ties go to the lower time per output token, then to the lower time to first token, then to the strategy without
/// remote experts, which is simpler.
pub(crate) fn cheapest_strategy(rivals: &[StrategyEvaluation]) -> Option<(ServingStrategy, f64)> {
    let costs = || {
        let feasible = rivals.iter().filter(|rival| rival.feasible);
        feasible.filter_map(|rival| Some((rival, rival.dollars_per_request?)))
    };
    let least = costs().map(|(_, cost)| cost).min_by(f64::total_cmp)?;
    let sooner =
        |a: Option<f64>, b: Option<f64>| a.unwrap_or(f64::INFINITY).total_cmp(&b.unwrap_or(f64::INFINITY));
    let faster = |a: &StrategyEvaluation, b: &StrategyEvaluation| {
        sooner(a.tpot_seconds, b.tpot_seconds).then(sooner(a.ttft_seconds, b.ttft_seconds))
    };
    let ties = costs().filter(|(_, cost)| is_tie(*cost, least));
    let first = ties.min_by(|(a, _), (b, _)| {
        faster(a, b).then(a.name.has_remote_experts().cmp(&b.name.has_remote_experts()))
    });
    first.map(|(rival, cost)| (rival.name, cost))
}

impl PlacementComparison {
    /// Compares the evaluated strategies. `find_flips`: finds what would change whether remote experts pay.
    pub(crate) fn new(
        rivals: Vec<StrategyEvaluation>,
        find_flips: Option<impl FnOnce(bool) -> ComparisonFlips>,
    ) -> Self {
        let found = cheapest_strategy(&rivals);
        let pays = found.is_some_and(|(strategy, _)| strategy.has_remote_experts());
        let asked = find_flips.is_some();
        let ComparisonFlips { found: flips, undecided } =
            find_flips.map_or_else(ComparisonFlips::default, |find_flips| find_flips(pays));
        let mut sentence = first_sentence(&rivals, found.map(|(strategy, _)| strategy));
        let changes: Vec<&str> = flips.iter().map(|flip| flip.words.as_str()).collect();
        if !changes.is_empty() {
            sentence = format!("{sentence} This changes with {}.", changes.join(", or with "));
        } else if asked && found.is_some() && undecided.is_empty() {
            sentence.push_str(
                " No tried change of one figure (request rate, TPOT limit, expert size, GPU price), \
                 by up to a factor of 64, changes this.",
            );
        }
        let unknown: Vec<&str> = undecided.iter().map(|cause| cause.name()).collect();
        if !unknown.is_empty() {
            let names = unknown.join(", ");
            sentence =
                format!("{sentence} Unknown for changes of {names}: the search exceeds its work limit.");
        }
        Self { pays, sentence, best: found.map(|(strategy, _)| strategy), rivals, flips, undecided }
    }
}

fn first_sentence(rivals: &[StrategyEvaluation], best: Option<ServingStrategy>) -> String {
    let price = |strategy: ServingStrategy| {
        let rival = rivals.iter().find(|rival| rival.name == strategy);
        let rival = rival.filter(|rival| rival.dollars_per_request.is_some());
        rival.map_or_else(String::new, StrategyEvaluation::price)
    };
    let Some(best) = best else {
        return "No placement meets the limits, with or without remote experts.".to_owned();
    };
    let cheapest_with = |remote: bool| {
        let others: Vec<StrategyEvaluation> =
            rivals.iter().filter(|rival| rival.name.has_remote_experts() == remote).cloned().collect();
        self::cheapest_strategy(&others)
    };
    let cost = |strategy: ServingStrategy| {
        rivals.iter().find(|rival| rival.name == strategy).and_then(|rival| rival.dollars_per_request)
    };
    match (best.has_remote_experts(), cheapest_with(!best.has_remote_experts())) {
        (true, Some((other, other_cost))) => {
            let saved = 100.0 * (1.0 - cost(best).unwrap_or(other_cost) / other_cost);
            format!(
                "Remote experts pay: {} at {}, {saved:.0} % less than {} at {}.",
                best.name(),
                price(best),
                other.name(),
                price(other)
            )
        }
        (true, None) => format!(
            "Remote experts pay: {} at {}; no placement without them meets the limits.",
            best.name(),
            price(best)
        ),
        (false, Some((other, other_cost))) => {
            let more = 100.0 * (other_cost / cost(best).unwrap_or(other_cost) - 1.0);
            format!(
                "Remote experts do not pay: {} at {}; with remote experts {more:.0} % more ({} at {}).",
                best.name(),
                price(best),
                other.name(),
                price(other)
            )
        }
        (false, None) => format!(
            "Remote experts do not pay: {} at {}; no plan with them meets the limits.",
            best.name(),
            price(best)
        ),
    }
}

/// Returns the evaluation of a strategy that is not feasible.
fn absent(name: ServingStrategy, why: &str) -> StrategyEvaluation {
    StrategyEvaluation {
        name,
        feasible: false,
        dollars_per_hour: None,
        dollars_per_request: None,
        ttft_seconds: None,
        tpot_seconds: None,
        why: why.to_owned(),
        has_arrivals: false,
    }
}

/// Returns the evaluation of a strategy with remote experts.
fn planned(name: ServingStrategy, found: Option<&CandidatePlan>, is_near: bool) -> StrategyEvaluation {
    let Some(found) = found.filter(|found| found.plan.replicas() > 0) else {
        let why = if is_near {
            "not searched: plans near the previous one only"
        } else {
            "no such plan meets the limits"
        };
        return absent(name, why);
    };
    let Evaluation { prefill_seconds, decode_seconds, total_cost, life, .. } = &found.evaluation;
    StrategyEvaluation {
        feasible: true,
        dollars_per_hour: Some(life.map_or_else(
            || 3600.0 * total_cost / (prefill_seconds + decode_seconds).max(f64::MIN_POSITIVE),
            |life| life.dollars_per_hour,
        )),
        dollars_per_request: Some(*total_cost),
        has_arrivals: life.is_some(),
        ttft_seconds: Some(found.evaluation.ttft_seconds),
        tpot_seconds: Some(found.evaluation.tpot_seconds),
        ..absent(name, "")
    }
}

/// Returns the evaluation of a baseline. `missing`: reason that `found` is absent.
fn baseline(
    name: ServingStrategy,
    found: Option<&Baseline>,
    model: &Model<'_>,
    missing: String,
) -> StrategyEvaluation {
    let Some(found) = found else { return absent(name, &missing) };
    let seconds = found.prefill_seconds + found.decode_seconds;
    let broken = found.violations.iter().map(|limit| {
        let (value, allowed) = match limit.as_str() {
            "ttft" => (found.ttft_seconds, model.ttft_limit),
            "tpot" => (found.tpot_seconds, model.tpot_limit),
            _ => return format!("{}: limit exceeded", limit_name(limit)),
        };
        format!("{} {}, limit {}", limit_name(limit), amount(limit, value), amount(limit, allowed))
    });
    StrategyEvaluation {
        feasible: found.is_feasible(),
        dollars_per_hour: Some(found.life.map_or_else(
            || 3600.0 * found.total_cost / seconds.max(f64::MIN_POSITIVE),
            |life| life.dollars_per_hour,
        )),
        dollars_per_request: Some(found.total_cost),
        has_arrivals: found.life.is_some(),
        ttft_seconds: Some(found.ttft_seconds),
        tpot_seconds: Some(found.tpot_seconds),
        ..absent(name, &broken.collect::<Vec<_>>().join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluation(name: ServingStrategy, cost: f64, tpot: f64, ttft: f64) -> StrategyEvaluation {
        StrategyEvaluation {
            feasible: true,
            dollars_per_request: Some(cost),
            tpot_seconds: Some(tpot),
            ttft_seconds: Some(ttft),
            ..absent(name, "")
        }
    }

    #[test]
    fn equal_costs_go_to_the_faster_strategy() {
        let mix = |cost: f64| evaluation(ServingStrategy::Mix, cost, 0.137, 2.0);
        let cheapest = |other: StrategyEvaluation, cost: f64| {
            cheapest_strategy(&[other, mix(cost)]).map(|(strategy, _)| strategy)
        };
        for (other, cost, wins) in [
            // The slower strategy comes first, and is cheaper by less than rounding.
            (evaluation(ServingStrategy::Cpu, 1.0, 0.171, 1.0), 1.0 + 1e-12, ServingStrategy::Mix),
            (evaluation(ServingStrategy::Cpu, 1.0, 0.137, 2.5), 1.0, ServingStrategy::Mix),
            (evaluation(ServingStrategy::Cpu, 1.0, 0.137, 1.5), 1.0, ServingStrategy::Cpu),
            (evaluation(ServingStrategy::Sliced, 1.0, 0.137, 2.0), 1.0, ServingStrategy::Mix),
            (evaluation(ServingStrategy::Sliced, 1.0, 0.136, 2.0), 1.0, ServingStrategy::Sliced),
            (evaluation(ServingStrategy::Cpu, 1.0, 0.171, 1.0), 1.0 + 1e-8, ServingStrategy::Cpu),
        ] {
            assert_eq!(cheapest(other.clone(), cost), Some(wins), "{other:?}");
        }
        let slow = StrategyEvaluation { feasible: false, ..evaluation(ServingStrategy::Gpu, 0.5, 0.01, 0.1) };
        assert_eq!(cheapest_strategy(&[slow]), None);
    }
}
