//! Memory sizes and replicas by the paper's continuous form (Remoe paper, sections IV-E and IV-F), as a start and for
//! comparison with the exact form.
//!
//! Decode seconds over memory are fitted by theta1 exp(-theta2 y) + theta3. Sizes are relaxed to real numbers, found with
//! one multiplier, and rounded up. Then replicas are raised.

use crate::search::candidate::{CandidateSides, LayerSide};
use crate::search::dual::Sizing;
use crate::search::options::{CostTerms, LayerOptions, LocalTimes, OptionChoice};
use argmin::core::{CostFunction, Error, Executor, State};
use argmin::solver::brent::{BrentOpt, BrentRoot};
use ndarray::{Array1, ArrayView1};
use remoe_plan::model::Model;
use remoe_plan::problem::sizes::{GB, first_at_least};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Least R^2 of a fit that is used.
const LEAST_R2: f64 = 0.95;
/// Number of grid points for theta2, over six decades.
const DECAY_POINTS: i32 = 24;
/// Maximum number of points of a fit.
const MAX_FIT_POINTS: usize = 64;

/// The fitted curve of one layer: seconds of one expert for one token over memory in GB.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Fit {
    /// Seconds that memory can save.
    pub theta1: f64,
    /// Decay of these seconds per GB.
    pub theta2: f64,
    /// Seconds that remain.
    pub theta3: f64,
    /// Share of the variance that the fit explains.
    pub r2: f64,
}

impl Fit {
    /// The least-squares fit of `seconds` over `memory` in GB, ascending; none where nothing decays.
    #[must_use]
    pub fn of(memory: &[f64], seconds: &[f64]) -> Option<Self> {
        (memory.len() == seconds.len()).then(|| fit(memory.into(), seconds.into()))?
    }

    /// Seconds with `memory` GB.
    #[must_use]
    pub fn seconds(&self, memory: f64) -> f64 {
        self.theta1 * (-self.theta2 * memory).exp() + self.theta3
    }
}

/// Result of the paper's form for the remote sets and the main size of the answer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Continuous {
    /// One fit per layer with remote experts; absent where no decay fits.
    pub fits: Vec<Option<Fit>>,
    /// Why only the exact form was used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<Refusal>,
    /// Dollars of the plan that it leads to, within the limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_cost: Option<f64>,
    /// By which share that is above the answer's cost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub above: Option<f64>,
}

/// Why the paper's form cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// Some fit explains too little: R^2 below 0.95.
    PoorFit,
    /// theta2 < 2 c^c / H^w in some layer: not convex (Remoe paper, Theorem 2).
    NotConvex,
    /// Reserved billing is no sum over layers.
    ReservedBilling,
    /// No memory keeps the time per output token.
    TooSlow,
}

/// A function of one variable, for argmin.
struct LineObjective<F>(F);

impl<F: Fn(f64) -> f64> CostFunction for LineObjective<F> {
    type Param = f64;
    type Output = f64;

    fn cost(&self, at: &f64) -> Result<f64, Error> {
        Ok((self.0)(*at))
    }
}

/// Returns the argument between `low` and `high` at which `function` is least.
fn minimum(function: impl Fn(f64) -> f64, low: f64, high: f64) -> f64 {
    let run = Executor::new(LineObjective(function), BrentOpt::new(low, high))
        .configure(|state| state.max_iters(60))
        .timer(false)
        .run();
    run.ok().and_then(|run| run.state.get_best_param().copied()).unwrap_or(low)
}

/// Returns the argument between `low` and `high` at which `function` changes its sign, if it does.
fn root(function: impl Fn(f64) -> f64, low: f64, high: f64) -> Option<f64> {
    let run = Executor::new(LineObjective(function), BrentRoot::new(low, high, 1e-9 * (high - low)))
        .configure(|state| state.max_iters(100))
        .timer(false)
        .run();
    run.ok().and_then(|run| run.state.get_best_param().copied())
}

/// Fits `seconds` over `memory` in GB by non-linear least squares.
///
/// For a given theta2 the other two parameters are linear, so the search has one dimension.
fn fit(memory: ArrayView1<'_, f64>, seconds: ArrayView1<'_, f64>) -> Option<Fit> {
    let mean = seconds.mean()?;
    let variance = seconds.mapv(|value| (value - mean).powi(2)).sum();
    let span = memory.last()? - memory.first()?;
    if !(span > 0.0 && variance > 0.0) {
        return None;
    }
    let misfit = |power: f64| linear_part(memory, seconds, power.exp() / span).1;
    // Powers of e from 10^-3 to 10^3.
    let step = 6.0 * std::f64::consts::LN_10 / f64::from(DECAY_POINTS);
    let power = |index: i32| f64::from(index - DECAY_POINTS / 2) * step;
    let nearest =
        (0..=DECAY_POINTS).min_by(|a, b| misfit(power(*a)).total_cmp(&misfit(power(*b)))).unwrap_or_default();
    let theta2 = minimum(misfit, power(nearest - 1), power(nearest + 1)).exp() / span;
    let ((theta1, theta3), left) = linear_part(memory, seconds, theta2);
    (theta1 > 0.0 && theta3 > 0.0).then_some(Fit { theta1, theta2, theta3, r2: 1.0 - left / variance })
}

/// Returns the best non-negative theta1 and theta3 for a given theta2, and the sum of squared residuals.
fn linear_part(memory: ArrayView1<'_, f64>, seconds: ArrayView1<'_, f64>, theta2: f64) -> ((f64, f64), f64) {
    let decay: Array1<f64> = memory.mapv(|memory| (-theta2 * memory).exp());
    let count = decay.len() as f64;
    let (sum, squares) = (decay.sum(), decay.dot(&decay));
    let (sum_seconds, product) = (seconds.sum(), decay.dot(&seconds));
    let determinant = count * squares - sum * sum;
    let free = (
        (count * product - sum * sum_seconds) / determinant,
        (squares * sum_seconds - sum * product) / determinant,
    );
    let (theta1, theta3) = match free {
        (theta1, theta3) if theta1 > 0.0 && theta3 > 0.0 => (theta1, theta3),
        // A parameter is negative: fits the other one alone.
        (theta1, _) if theta1 <= 0.0 => (0.0, sum_seconds / count),
        (_, theta3) if theta3 <= 0.0 && squares > 0.0 => (product / squares, f64::MIN_POSITIVE),
        _ => (0.0, sum_seconds / count),
    };
    let left = (&seconds - &(&decay * theta1 + theta3)).mapv(|value| value * value).sum();
    ((theta1, theta3), left)
}

/// One layer of the relaxed problem.
struct RelaxedLayer {
    layer: usize,
    fit: Fit,
    /// Expected remote experts per token.
    experts: f64,
    /// Expected seconds per token that do not depend on the size: transfer and invocation.
    fixed: f64,
    /// Least and largest memory in GB.
    range: (f64, f64),
}

impl RelaxedLayer {
    fn decode(&self, memory: f64) -> f64 {
        self.experts * self.fit.seconds(memory) + self.fixed
    }

    /// Returns the best memory if a second of decode costs `rate + multiplier` besides the memory's own price.
    ///
    /// It is the root of the derivative of a convex function.
    fn best(&self, rate: f64, price: f64, multiplier: f64) -> f64 {
        let slope = |memory: f64| {
            let falling =
                self.experts * self.fit.theta1 * self.fit.theta2 * (-self.fit.theta2 * memory).exp();
            price * self.decode(memory) - (rate + price * memory + multiplier) * falling
        };
        let (low, high) = self.range;
        if slope(low) >= 0.0 {
            low
        } else if slope(high) <= 0.0 {
            high
        } else {
            root(slope, low, high).unwrap_or(high)
        }
    }
}

/// Solves the paper's form for the remote sets and main size of `sides`. Also returns its sizing, if that keeps the limits.
pub(crate) fn continuous(
    sides: &mut CandidateSides<'_>,
    main: usize,
    locals: &[LocalTimes],
) -> (Continuous, Option<Sizing>) {
    let model = sides.model;
    let mut report = Continuous { fits: Vec::new(), refused: None, total_cost: None, above: None };
    let rate = model.coupled_main_rate(model.main_sizes[main]);
    let stride = model.remote_sizes.len().div_ceil(MAX_FIT_POINTS);
    let mut relaxed = Vec::new();
    // Decode seconds of the non-expert part and of layers without remote experts.
    let mut other_seconds = 0.0;
    for (layer, side) in sides.layers.iter().enumerate() {
        other_seconds += locals[layer].fixed.step;
        let LayerSide::Remote(options) = side else {
            other_seconds += model.layers[layer].per_token() * locals[layer].step;
            continue;
        };
        let memory: Array1<f64> = model.remote_sizes.iter().step_by(stride).map(|bytes| bytes / GB).collect();
        let seconds: Array1<f64> = options.steps().step_by(stride).map(|step| step - model.down).collect();
        let fitted = fit(memory.view(), seconds.view());
        report.fits.push(fitted);
        relaxed.extend(fitted.map(|fit| relax(model, layer, options, fit)));
    }
    report.refused = refusal(model, &report.fits, rate);
    if report.refused.is_some() || relaxed.is_empty() {
        return (report, None);
    }
    let limit = if model.output > 0.0 { model.tpot_limit - other_seconds } else { f64::INFINITY };
    let Some(memory) = sizes(&relaxed, rate, model.cpu_price, limit) else {
        report.refused = Some(Refusal::TooSlow);
        return (report, None);
    };
    let mut choices: Vec<Option<OptionChoice>> = vec![None; locals.len()];
    for (relaxed, memory) in relaxed.iter().zip(memory) {
        let rounded = first_at_least(&model.remote_sizes, memory * GB).min(model.remote_sizes.len() - 1);
        choices[relaxed.layer] = Some(OptionChoice { memory: rounded, replicas: 1 });
    }
    let sizing = raise_replicas(sides, main, locals, choices);
    (report, sizing)
}

fn relax(model: &Model<'_>, layer: usize, options: &LayerOptions<'_>, fit: Fit) -> RelaxedLayer {
    let per_token = model.layers[layer].per_token();
    let share = options.share();
    let called = 1.0 - (1.0 - share).powi(per_token as i32);
    RelaxedLayer {
        layer,
        fit,
        experts: per_token * share,
        fixed: per_token * share * model.down + called * model.round_trip(),
        range: (
            model.remote_sizes[options.first] / GB,
            model.remote_sizes[model.remote_sizes.len() - 1] / GB,
        ),
    }
}

fn refusal(model: &Model<'_>, fits: &[Option<Fit>], rate: f64) -> Option<Refusal> {
    if model.is_reserved() {
        return Some(Refusal::ReservedBilling);
    }
    if fits.iter().any(|fit| fit.is_none_or(|fit| fit.r2 < LEAST_R2)) {
        return Some(Refusal::PoorFit);
    }
    let convex = |fit: &Fit| fit.theta2 >= 2.0 * model.cpu_price / rate;
    (!fits.iter().flatten().all(convex)).then_some(Refusal::NotConvex)
}

/// Returns the memory of each layer in GB such that all layers together take at most `limit` decode seconds.
fn sizes(layers: &[RelaxedLayer], rate: f64, price: f64, limit: f64) -> Option<Vec<f64>> {
    let at = |multiplier: f64| layers.iter().map(move |layer| (layer, layer.best(rate, price, multiplier)));
    let over =
        |multiplier: f64| at(multiplier).map(|(layer, memory)| layer.decode(memory)).sum::<f64>() - limit;
    let mut multiplier = 0.0;
    if over(0.0) > 0.0 {
        let mut most = rate;
        while over(most) > 0.0 {
            most *= 16.0;
            if most > rate * 1e12 {
                return None;
            }
        }
        multiplier = root(over, 0.0, most)?;
    }
    Some(at(multiplier).map(|(_, memory)| memory).collect())
}

/// Raises replicas as the paper does: first for the payload limit, then in the layer of the greatest potential.
///
/// Continues until the TTFT limit holds and no potential is positive. If the limit does not hold and no potential is
/// positive, raises the layer whose prefill falls the most.
fn raise_replicas(
    sides: &mut CandidateSides<'_>,
    main: usize,
    locals: &[LocalTimes],
    mut choices: Vec<Option<OptionChoice>>,
) -> Option<Sizing> {
    let prices = sides.invocation_prices(main);
    let (prefill_limit, step_limit) = sides.limits();
    let mut totals = CostTerms::default();
    // Per layer: its terms, and those with one replica more.
    let mut steps: Vec<(CostTerms, Option<CostTerms>)> = Vec::new();
    for (layer, local) in locals.iter().enumerate() {
        let local_terms = sides.local_terms(layer, *local);
        let terms = match (&mut sides.layers[layer], &mut choices[layer]) {
            (LayerSide::Remote(options), Some(choice)) => {
                while options.terms(*choice, *local).is_none() {
                    choice.replicas += 1;
                    if choice.replicas > options.replicas {
                        return None;
                    }
                }
                (options.terms(*choice, *local)?, options.terms(choice.raised(), *local))
            }
            _ => (local_terms, None),
        };
        totals = totals.plus(&terms.0);
        steps.push(terms);
    }
    loop {
        let late = totals.limit_prefill > prefill_limit;
        let best_by = |gain: &dyn Fn(&CostTerms, &CostTerms) -> f64| {
            let mut best = (0.0, None);
            for (layer, (now, next)) in steps.iter().enumerate() {
                let gain = next.as_ref().map_or(0.0, |next| gain(now, next));
                if gain > best.0 {
                    best = (gain, Some(layer));
                }
            }
            best.1
        };
        let potential = |now: &CostTerms, next: &CostTerms| now.priced(prices) - next.priced(prices);
        let mut layer = best_by(&potential);
        if late && layer.is_none() {
            layer = best_by(&|now: &CostTerms, next: &CostTerms| now.limit_prefill - next.limit_prefill);
        }
        let Some(layer) = layer else { break };
        let (LayerSide::Remote(options), Some(choice)) = (&mut sides.layers[layer], &mut choices[layer])
        else {
            break;
        };
        *choice = choice.raised();
        let (now, next) = steps[layer];
        let next = next?;
        totals = totals.minus(&now).plus(&next);
        steps[layer] = (next, options.terms(choice.raised(), locals[layer]));
    }
    let within = totals.limit_prefill <= prefill_limit && totals.limit_step <= step_limit;
    within.then_some(Sizing { choices, totals })
}
