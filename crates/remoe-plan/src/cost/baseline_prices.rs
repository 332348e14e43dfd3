//! Costs of single requests under each baseline.

use crate::cost::baselines::{Baseline, Baselines};
use crate::model::Model;
use crate::problem::{Problem, Request, SizeRange, VcpuRange};

/// Number of prompt lengths for which prices are computed: 1, 2, 4, .. tokens. Others are interpolated.
const PROMPT_LENGTHS: u32 = 17;

/// Prices of single requests under the baselines of a problem, each at its cheapest size for that problem.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct BaselinePrices(Vec<BaselinePrice>);

#[derive(Debug, Clone, PartialEq)]
struct BaselinePrice {
    name: &'static str,
    /// Dollars of the prefill of 1, 2, 4, .. tokens.
    prefill: Vec<f64>,
    /// Dollars of a decode step with a context of 1, 2, 4, .. tokens.
    step: Vec<f64>,
}

impl BaselinePrices {
    /// Computes the prices. `single_request`: returns a request with a given number of prompt tokens and one decode step.
    pub fn new(problem: &Problem, single_request: impl Fn(f64) -> Request) -> Self {
        let planned = Baselines::of(&Model::new(problem));
        let price = |name, planned: Option<Baseline>, pick: fn(Baselines) -> Option<Baseline>| {
            // The size of a baseline does not depend on the lengths of single requests.
            let mut fixed = Problem { arrivals: None, ..problem.clone() };
            let Baseline { main_bytes, main_vcpus, .. } = planned?;
            fixed.specs.main = SizeRange { min_bytes: main_bytes, max_bytes: main_bytes, ..fixed.specs.main };
            if let (Some(vcpus), Some(range)) = (main_vcpus, fixed.specs.main_vcpus) {
                fixed.specs.main_vcpus = Some(VcpuRange { min: vcpus, max: vcpus, ..range });
            }
            let mut prices = (0..PROMPT_LENGTHS).map(|power| {
                let request = single_request(f64::from(1_u32 << power));
                let baseline = pick(Baselines::of(&Model::new(&Problem { request, ..fixed.clone() })))?;
                let seconds = baseline.prefill_seconds + baseline.decode_seconds;
                let rate = if seconds > 0.0 { baseline.total_cost / seconds } else { 0.0 };
                Some((rate * baseline.prefill_seconds, rate * baseline.decode_seconds))
            });
            let (prefill, step): (Vec<f64>, Vec<f64>) = prices.by_ref().collect::<Option<_>>()?;
            Some(BaselinePrice { name, prefill, step })
        };
        let all = [
            price("mix", planned.mix, |all| all.mix),
            price("cpu", planned.cpu, |all| all.cpu),
            price("gpu", planned.gpu, |all| all.gpu),
            price("fetch", planned.fetch, |all| all.fetch),
        ];
        Self(all.into_iter().flatten().collect())
    }

    /// Returns the dollars of a request of `input` tokens with `steps` decode steps, by the names of the baselines.
    pub fn cost(&self, input: usize, steps: usize) -> impl Iterator<Item = (&'static str, f64)> {
        let tokens = (input.max(1)) as f64;
        // Mean context of the decode steps: the prompt and half of the generated tokens.
        let context = tokens + steps as f64 / 2.0;
        self.0.iter().map(move |price| {
            let (prefill, step) = (interpolate(&price.prefill, tokens), interpolate(&price.step, context));
            (price.name, prefill + step * steps as f64)
        })
    }
}

/// Interpolates `prices` for 1, 2, 4, .. tokens. Beyond the last of them, prices rise as between the last two.
fn interpolate(prices: &[f64], tokens: f64) -> f64 {
    let at = |power: usize| prices.get(power).or(prices.last()).copied().unwrap_or(0.0);
    let low = tokens.log2().clamp(0.0, f64::from(PROMPT_LENGTHS - 2)).floor() as usize;
    let from = (1_u64 << low) as f64;
    at(low) + (at(low + 1) - at(low)) * ((tokens - from) / from).max(0.0)
}
