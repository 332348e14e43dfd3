//! Verdict on remote experts: every way to serve the model beside the others, in one sentence.

mod flip;

use crate::plans::Plans;
use crate::slicing::FeasiblePlan;
use crate::words::{amount, dollars, limit_name};
use remoe_plan::cost::Evaluation;
use remoe_plan::cost::baselines::{Baseline, WithoutRemote};
use remoe_plan::model::Model;
use remoe_plan::problem::Device;
use remoe_plan::way::Way;
use serde::Serialize;

pub(crate) use flip::VerdictFlips;
pub use flip::{FlipFigure, VerdictFlip};

/// The cheapest way to serve, and whether it has remote experts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// Plans with remote experts are the cheapest that keep every limit.
    pub pays: bool,
    /// The answer in plain words.
    pub sentence: String,
    /// The cheapest rival that keeps every limit; absent where none does.
    pub best: Option<Way>,
    /// All rivals.
    pub rivals: Vec<Rival>,
    /// Changes that would turn the verdict, where that was asked.
    pub turns: Vec<VerdictFlip>,
    /// Figures of which that is not known: finding out takes more work than it is worth.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub undecided: Vec<FlipFigure>,
}

/// One way at its cheapest.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Rival {
    /// Which.
    pub name: Way,
    /// Set if it keeps every limit.
    pub feasible: bool,
    /// Dollars in an hour: while requests come as the problem says, else of requests one after another.
    pub dollars_per_hour: Option<f64>,
    /// Dollars of one request.
    pub dollars_per_request: Option<f64>,
    /// Time to first token in seconds.
    pub ttft_seconds: Option<f64>,
    /// Time per output token in seconds.
    pub tpot_seconds: Option<f64>,
    /// Reason that keeps it out, or share by which it is dearer than the best.
    pub why: String,
    /// Set if costs are those of requests that come, not of one after another.
    #[serde(skip)]
    comes: bool,
}

impl Rival {
    /// Returns the price in words: of an hour while requests come as they do, else of a million of them one by one.
    #[must_use]
    pub fn price(&self) -> String {
        match (self.comes, self.dollars_per_hour, self.dollars_per_request) {
            (true, Some(hourly), _) => format!("{} per hour", dollars(hourly)),
            (false, _, Some(each)) => format!("{} per million requests", dollars(each * 1e6)),
            _ => String::new(),
        }
    }
}

/// The rivals of a problem, each at its cheapest.
pub(crate) fn rivals(model: &Model<'_>, without: &WithoutRemote, plans: &Plans<'_>) -> Vec<Rival> {
    let WithoutRemote { baselines, fetch } = without;
    let limits = &model.problem.limits;
    let sliced = match limits.max_groups {
        Some(_) => planned(Way::Sliced, plans.sliced.as_ref(), plans.is_near),
        None => absent(Way::Sliced, "not evaluated: limits.max_groups is not set"),
    };
    let experts = model.local_expert_bytes(&vec![0; model.layers.len()]);
    let most = amount("main", model.problem.specs.main.largest());
    let none_fits = |needed: f64| {
        format!("no main function has {} of memory; the largest has {most}", amount("main", needed))
    };
    let on_main = none_fits(experts + model.main_base());
    let no_gpu = "missing GPU times of experts (gpu_expert_seconds)".to_owned();
    let gpu_times = model.problem.layers.iter().all(|layer| layer.gpu_expert_seconds.is_some());
    let of_gpu = |way, found: Option<&Baseline>, fits: String| {
        baseline(way, found, model, if gpu_times { fits } else { no_gpu.clone() })
    };
    let cpu_times = model.problem.layers.iter().all(|layer| layer.cpu_nonexpert_seconds.is_some());
    let on_cpus = match cpu_times {
        true => none_fits(experts + model.gpu_bytes + model.problem.runtime_bytes),
        false => "missing CPU times of the non-expert part (cpu_nonexpert_seconds)".to_owned(),
    };
    let of_cpus = match model.problem.device {
        Device::Gpu => baseline(Way::Cpu, baselines.cpu.as_ref(), model, on_cpus),
        Device::Cpu => absent(Way::Cpu, &format!("same as {}: no GPU", Way::Mix.name())),
    };
    let moves = match model.problem.swap_seconds.per_token > 0.0 {
        true => on_main.clone(),
        false => "missing bandwidth between host and GPU (swap_seconds.per_token)".to_owned(),
    };
    let mut all = vec![
        sliced,
        planned(Way::Layers, plans.per_layer.as_ref(), plans.is_near),
        baseline(Way::Mix, baselines.mix.as_ref(), model, on_main),
        of_cpus,
        of_gpu(Way::Gpu, baselines.gpu.as_ref(), none_fits(model.main_base())),
        of_gpu(Way::Fetch, fetch.as_ref(), moves),
    ];
    let Some((name, least)) = best(&all) else { return all };
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

/// Costs within this share of each other are equal: sums of the same prices in another order differ by less.
pub(crate) const TIE: f64 = 1e-9;

fn is_tie(cost: f64, least: f64) -> bool {
    cost <= least * (1.0 + TIE)
}

/// Returns the cheapest feasible rival and the dollars of a request there.
///
/// Between equal costs the lower time per output token counts, then the lower time to first token, then the way
/// without remote experts, which is the simpler one.
pub(crate) fn best(rivals: &[Rival]) -> Option<(Way, f64)> {
    let costs = || {
        let feasible = rivals.iter().filter(|rival| rival.feasible);
        feasible.filter_map(|rival| Some((rival, rival.dollars_per_request?)))
    };
    let least = costs().map(|(_, cost)| cost).min_by(f64::total_cmp)?;
    let sooner =
        |a: Option<f64>, b: Option<f64>| a.unwrap_or(f64::INFINITY).total_cmp(&b.unwrap_or(f64::INFINITY));
    let faster = |a: &Rival, b: &Rival| {
        sooner(a.tpot_seconds, b.tpot_seconds).then(sooner(a.ttft_seconds, b.ttft_seconds))
    };
    let ties = costs().filter(|(_, cost)| is_tie(*cost, least));
    let first = ties.min_by(|(a, _), (b, _)| {
        faster(a, b).then(a.name.has_remote_experts().cmp(&b.name.has_remote_experts()))
    });
    first.map(|(rival, cost)| (rival.name, cost))
}

impl Verdict {
    /// `turns`: what turns it, given whether remote experts pay; none where that was not asked.
    pub(crate) fn new(rivals: Vec<Rival>, turns: Option<impl FnOnce(bool) -> VerdictFlips>) -> Self {
        let found = best(&rivals);
        let pays = found.is_some_and(|(way, _)| way.has_remote_experts());
        let asked = turns.is_some();
        let VerdictFlips { found: turns, undecided } =
            turns.map_or_else(VerdictFlips::default, |turns| turns(pays));
        let mut sentence = first_sentence(&rivals, found.map(|(way, _)| way));
        let would: Vec<&str> = turns.iter().map(|turn| turn.words.as_str()).collect();
        if !would.is_empty() {
            sentence = format!("{sentence} This changes with {}.", would.join(", or with "));
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
        Self { pays, sentence, best: found.map(|(way, _)| way), rivals, turns, undecided }
    }
}

fn first_sentence(rivals: &[Rival], best: Option<Way>) -> String {
    // Where requests come as they do, an hour is what is paid for; else requests one after another, of which
    // slower ways answer fewer in an hour.
    let price = |way: Way| {
        let rival = rivals.iter().find(|rival| rival.name == way);
        let rival = rival.filter(|rival| rival.dollars_per_request.is_some());
        rival.map_or_else(String::new, Rival::price)
    };
    let Some(best) = best else {
        return "No placement meets the limits, with or without remote experts.".to_owned();
    };
    let of = |remote: bool| {
        let others: Vec<Rival> =
            rivals.iter().filter(|rival| rival.name.has_remote_experts() == remote).cloned().collect();
        self::best(&others)
    };
    let cost =
        |way: Way| rivals.iter().find(|rival| rival.name == way).and_then(|rival| rival.dollars_per_request);
    match (best.has_remote_experts(), of(!best.has_remote_experts())) {
        (true, Some((other, theirs))) => {
            let saved = 100.0 * (1.0 - cost(best).unwrap_or(theirs) / theirs);
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
        (false, Some((other, theirs))) => {
            let more = 100.0 * (theirs / cost(best).unwrap_or(theirs) - 1.0);
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

fn absent(name: Way, why: &str) -> Rival {
    Rival {
        name,
        feasible: false,
        dollars_per_hour: None,
        dollars_per_request: None,
        ttft_seconds: None,
        tpot_seconds: None,
        why: why.to_owned(),
        comes: false,
    }
}

fn planned(name: Way, found: Option<&FeasiblePlan>, is_near: bool) -> Rival {
    let Some(found) = found.filter(|found| found.plan.replicas() > 0) else {
        let why = if is_near {
            "not searched: plans near the previous one only"
        } else {
            "no such plan meets the limits"
        };
        return absent(name, why);
    };
    let Evaluation { prefill_seconds, decode_seconds, total_cost, life, .. } = &found.evaluation;
    Rival {
        feasible: true,
        dollars_per_hour: Some(life.map_or_else(
            || 3600.0 * total_cost / (prefill_seconds + decode_seconds).max(f64::MIN_POSITIVE),
            |life| life.dollars_per_hour,
        )),
        dollars_per_request: Some(*total_cost),
        comes: life.is_some(),
        ttft_seconds: Some(found.evaluation.ttft_seconds),
        tpot_seconds: Some(found.evaluation.tpot_seconds),
        ..absent(name, "")
    }
}

fn baseline(name: Way, found: Option<&Baseline>, model: &Model<'_>, missing: String) -> Rival {
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
    Rival {
        feasible: found.is_feasible(),
        dollars_per_hour: Some(found.life.map_or_else(
            || 3600.0 * found.total_cost / seconds.max(f64::MIN_POSITIVE),
            |life| life.dollars_per_hour,
        )),
        dollars_per_request: Some(found.total_cost),
        comes: found.life.is_some(),
        ttft_seconds: Some(found.ttft_seconds),
        tpot_seconds: Some(found.tpot_seconds),
        ..absent(name, &broken.collect::<Vec<_>>().join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rival(name: Way, cost: f64, tpot: f64, ttft: f64) -> Rival {
        Rival {
            feasible: true,
            dollars_per_request: Some(cost),
            tpot_seconds: Some(tpot),
            ttft_seconds: Some(ttft),
            ..absent(name, "")
        }
    }

    #[test]
    fn equal_costs_go_to_the_faster_way() {
        let mix = |cost: f64| rival(Way::Mix, cost, 0.137, 2.0);
        let cheapest = |other: Rival, cost: f64| best(&[other, mix(cost)]).map(|(way, _)| way);
        for (other, cost, wins) in [
            // The slower way is listed first and cheaper by less than what sums of prices differ by.
            (rival(Way::Cpu, 1.0, 0.171, 1.0), 1.0 + 1e-12, Way::Mix),
            (rival(Way::Cpu, 1.0, 0.137, 2.5), 1.0, Way::Mix),
            (rival(Way::Cpu, 1.0, 0.137, 1.5), 1.0, Way::Cpu),
            (rival(Way::Sliced, 1.0, 0.137, 2.0), 1.0, Way::Mix),
            (rival(Way::Sliced, 1.0, 0.136, 2.0), 1.0, Way::Sliced),
            (rival(Way::Cpu, 1.0, 0.171, 1.0), 1.0 + 1e-8, Way::Cpu),
        ] {
            assert_eq!(cheapest(other.clone(), cost), Some(wins), "{other:?}");
        }
        let slow = Rival { feasible: false, ..rival(Way::Gpu, 0.5, 0.01, 0.1) };
        assert_eq!(best(&[slow]), None);
    }
}
