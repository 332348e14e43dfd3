//! What would have to be different for the verdict to turn, found by solving the problem that is different.

use super::{Way, best};
use crate::answer::plans::Effort;
use crate::answer::words::{rounded_up, seconds};
use crate::answer::{Options, ways};
use crate::problem::{CpuProfile, Device, Problem};
use serde::Serialize;

/// No figure is changed by more than this power of 2.
const DOUBLINGS: u32 = 6;
/// Halvings of the factor's logarithm: to 2 %.
const HALVINGS: usize = 5;
/// Problems with so many experts in all are solved in full each time.
const FEW_EXPERTS: usize = 64;
/// Problems with more experts in all are not solved over and over.
const MOST_EXPERTS: usize = 100_000;

/// What is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// How many requests come.
    ArrivalRate,
    /// What the GPU costs.
    GpuPrice,
    /// Bytes of the experts, and the time that they take.
    ModelSize,
    /// The limit of the time per output token.
    Tpot,
}

/// A change that turns the verdict.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Turn {
    /// What is changed.
    pub cause: Cause,
    /// By which factor: the nearest that was found to turn it.
    pub factor: f64,
    /// Its value there: requests per hour, seconds; the factor itself for prices and sizes.
    pub at: f64,
    /// The cheapest way then.
    pub best: Way,
    /// In words, as the end of a sentence.
    pub words: String,
}

/// The nearest change of each figure by itself that turns the verdict `pays` of `problem`.
///
/// None where the problem is too large to be solved over and over.
pub(crate) fn turns(problem: &Problem, options: &Options, pays: bool) -> Option<Vec<Turn>> {
    let experts: usize = problem.layers.iter().map(|layer| layer.experts as usize).sum();
    if experts > MOST_EXPERTS {
        return None;
    }
    let all = [Cause::ArrivalRate, Cause::Tpot, Cause::ModelSize, Cause::GpuPrice];
    // What a coarse search takes for the answer as things are says nothing of how they might be.
    let effort = if experts <= FEW_EXPERTS { Effort::Full } else { Effort::Coarse };
    if cheapest(problem, options, effort)?.has_remote_experts() != pays {
        return None;
    }
    Some(all.into_iter().filter_map(|cause| turn(problem, options, pays, cause, effort)).collect())
}

fn turn(problem: &Problem, options: &Options, pays: bool, cause: Cause, effort: Effort) -> Option<Turn> {
    let turned = |factor: f64| {
        let way = cheapest(&cause.changed(problem, factor)?, options, effort)?;
        (way.has_remote_experts() != pays).then_some(way)
    };
    // The answer may turn and turn back: doublings first, then between the last that stays and the first
    // that turns.
    let nearest = |up: bool| {
        let factor = |logarithm: f64| if up { logarithm.exp2() } else { (-logarithm).exp2() };
        let (first, mut best) =
            (1..=DOUBLINGS).find_map(|power| Some((power, turned(factor(f64::from(power)))?)))?;
        let (mut here, mut there) = (f64::from(first) - 1.0, f64::from(first));
        for _ in 0..HALVINGS {
            let middle = f64::midpoint(here, there);
            match turned(factor(middle)) {
                Some(way) => (best, there) = (way, middle),
                None => here = middle,
            }
        }
        Some((factor(there), best))
    };
    let found = [nearest(true), nearest(false)].into_iter().flatten();
    let (factor, best) = found.min_by(|a, b| a.0.ln().abs().total_cmp(&b.0.ln().abs()))?;
    // The last word is that of the search which the answer came from.
    let sure = effort == Effort::Full
        || cheapest(&cause.changed(problem, factor)?, options, Effort::Full)?.has_remote_experts() != pays;
    if !sure {
        return None;
    }
    let (at, words) = cause.words(problem, factor);
    Some(Turn { cause, factor, at, best, words })
}

/// The cheapest way to serve `problem`.
fn cheapest(problem: &Problem, options: &Options, effort: Effort) -> Option<Way> {
    best(&ways(problem, options.remote, effort).ok()?).map(|(way, _)| way)
}

impl Cause {
    /// `problem` with the figure `factor` times as large; none where it has no such figure.
    fn changed(self, problem: &Problem, factor: f64) -> Option<Problem> {
        let mut changed = problem.clone();
        match self {
            Self::ArrivalRate => {
                let arrivals = changed.arrivals.as_mut()?;
                arrivals.per_second *= factor;
                if let Some(times) = &mut arrivals.recorded_seconds {
                    times.iter_mut().for_each(|time| *time /= factor);
                }
            }
            Self::GpuPrice if problem.device == Device::Cpu && !problem.pricing.has_gpu() => return None,
            Self::GpuPrice => {
                let pricing = &mut changed.pricing;
                let prices = [&mut pricing.gpu_per_gb_second, &mut pricing.gpu_per_second_each];
                prices.into_iter().flatten().for_each(|price| *price *= factor);
                if !problem.pricing.has_gpu() {
                    return None;
                }
            }
            Self::ModelSize => {
                for layer in &mut changed.layers {
                    layer.expert_bytes *= factor;
                    scale(&mut layer.expert_seconds, factor);
                    layer.remote_expert_seconds.iter_mut().for_each(|profile| scale(profile, factor));
                    let on_gpu = layer.gpu_expert_seconds.iter_mut();
                    on_gpu.flat_map(|profile| &mut profile.seconds).for_each(|seconds| *seconds *= factor);
                }
            }
            Self::Tpot if problem.request.output_tokens == 0.0 => return None,
            Self::Tpot => changed.slo.tpot_seconds *= factor,
        }
        Some(changed)
    }

    fn words(self, problem: &Problem, factor: f64) -> (f64, String) {
        match self {
            Self::ArrivalRate => {
                let rate = problem.arrivals.as_ref().map_or(0.0, crate::alive::mean_per_second) * factor;
                let hourly = rounded_up(rate * 3600.0);
                (rate * 3600.0, format!("{hourly} requests an hour"))
            }
            Self::GpuPrice => (factor, format!("a GPU that costs {factor:.2} times as much")),
            Self::ModelSize => (factor, format!("experts that are {factor:.2} times as large")),
            Self::Tpot => {
                let at = problem.slo.tpot_seconds * factor;
                (at, format!("a limit of {} per output token", seconds(at)))
            }
        }
    }
}

fn scale(profile: &mut CpuProfile, factor: f64) {
    profile.seconds.iter_mut().flatten().for_each(|seconds| *seconds *= factor);
}
