//! Costs of single requests as the baselines would have served them.

use crate::cost::baselines::{Baseline, Baselines};
use crate::model::Model;
use crate::problem::{Problem, Request, SizeRange, VcpuRange};

/// Prompts for which a prefill is worked out: powers of 2 of tokens, what is between them by interpolation.
const LONGEST: u32 = 17;

/// The baselines of a problem at the sizes that they would have there, as prices of single requests.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rivals(Vec<Rival>);

#[derive(Debug, Clone, PartialEq)]
struct Rival {
    name: &'static str,
    /// Dollars of the prefill of 1, 2, 4, .. tokens.
    prefill: Vec<f64>,
    /// Dollars of a decode step with so much context.
    step: Vec<f64>,
}

impl Rivals {
    /// `alone` is a request of so many tokens and one decode step.
    pub fn of(problem: &Problem, alone: impl Fn(f64) -> Request) -> Self {
        let planned = Baselines::of(&Model::new(problem));
        let rival = |name, found: Option<Baseline>, of: fn(Baselines) -> Option<Baseline>| {
            // What it would be stays the same, however long single requests are.
            let mut fixed = Problem { arrivals: None, ..problem.clone() };
            let Baseline { main_bytes, main_vcpus, .. } = found?;
            fixed.specs.main = SizeRange { min_bytes: main_bytes, max_bytes: main_bytes, ..fixed.specs.main };
            if let (Some(vcpus), Some(range)) = (main_vcpus, fixed.specs.main_vcpus) {
                fixed.specs.main_vcpus = Some(VcpuRange { min: vcpus, max: vcpus, ..range });
            }
            let mut prices = (0..LONGEST).map(|power| {
                let request = alone(f64::from(1_u32 << power));
                let one = of(Baselines::of(&Model::new(&Problem { request, ..fixed.clone() })))?;
                let seconds = one.prefill_seconds + one.decode_seconds;
                let rate = if seconds > 0.0 { one.total_cost / seconds } else { 0.0 };
                Some((rate * one.prefill_seconds, rate * one.decode_seconds))
            });
            let (prefill, step): (Vec<f64>, Vec<f64>) = prices.by_ref().collect::<Option<_>>()?;
            Some(Rival { name, prefill, step })
        };
        let all = [
            rival("mix", planned.mix, |of| of.mix),
            rival("cpu", planned.cpu, |of| of.cpu),
            rival("gpu", planned.gpu, |of| of.gpu),
            rival("fetch", planned.fetch, |of| of.fetch),
        ];
        Self(all.into_iter().flatten().collect())
    }

    /// Dollars of a request of `input` tokens with `steps` decode steps, by the baselines' names.
    pub fn cost(&self, input: usize, steps: usize) -> impl Iterator<Item = (&'static str, f64)> {
        let tokens = (input.max(1)) as f64;
        // The prompt and half of what is generated, in the mean.
        let context = tokens + steps as f64 / 2.0;
        self.0.iter().map(move |rival| {
            let (prefill, step) = (between(&rival.prefill, tokens), between(&rival.step, context));
            (rival.name, prefill + step * steps as f64)
        })
    }
}

/// The value for `tokens` of prices for 1, 2, 4, .. tokens; beyond the most of them it rises as between the last two.
fn between(prices: &[f64], tokens: f64) -> f64 {
    let at = |power: usize| prices.get(power).or(prices.last()).copied().unwrap_or(0.0);
    let low = tokens.log2().clamp(0.0, f64::from(LONGEST - 2)).floor() as usize;
    let from = (1_u64 << low) as f64;
    at(low) + (at(low + 1) - at(low)) * ((tokens - from) / from).max(0.0)
}
