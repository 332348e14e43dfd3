//! Lagrangian dual of the choice of memory and replicas of all layers, for one candidate and one main size.
//!
//! Each layer has one option, and two sums must keep limits. A multiplier for each limit makes the layers independent. The
//! dual function is concave and piecewise linear in each multiplier, so that intersecting two of its lines finds the maximum
//! in a few steps.

use crate::search::candidate::{CandidateSides, LayerSide, Multipliers};
use crate::search::options::{CostTerms, OptionChoice, TermPrices};

/// One option per layer.
#[derive(Debug, Clone)]
pub(crate) struct Sizing {
    /// Choices of the layers; `None` for a layer without remote experts.
    pub(crate) choices: Vec<Option<OptionChoice>>,
    pub(crate) totals: CostTerms,
}

/// A latency limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Limit {
    Prefill,
    Step,
}

/// Point of the dual function: the cheapest sizing at some multipliers.
#[derive(Debug, Clone)]
struct DualPoint {
    sizing: Sizing,
    /// Value of the dual function: priced terms including multipliers, minus the multipliers times the limits.
    value: f64,
}

/// Bound and sizings of one candidate with one main size.
#[derive(Debug)]
pub(crate) struct Dual<'a, 'm> {
    pub(crate) sides: &'a mut CandidateSides<'m>,
    pub(crate) main: usize,
    pub(crate) prices: TermPrices,
    /// Lower bound of the cost of sizings within the limits.
    pub(crate) bound: f64,
    /// Multipliers of that bound.
    pub(crate) multipliers: Multipliers,
    /// The cheapest visited sizing within the limits.
    pub(crate) feasible: Option<Sizing>,
    /// Sizing of the bound, which may break the limits.
    pub(crate) relaxed: Option<Sizing>,
    /// `[layer]`: every option that was the cheapest at some multipliers.
    pub(crate) seen: Vec<Vec<(OptionChoice, CostTerms)>>,
}

/// Maximum number of steps along one multiplier. A piecewise linear function needs far fewer.
const MAX_LINE_STEPS: usize = 40;
/// Searches along alternating multipliers.
const ROUNDS: usize = 6;

impl<'a, 'm> Dual<'a, 'm> {
    /// Solves the dual. Stops early if the bound exceeds `cutoff`.
    ///
    /// `prices`: prices of a linear cost, without multipliers. `hint`: multipliers near which the search begins.
    pub(crate) fn solve(
        sides: &'a mut CandidateSides<'m>,
        main: usize,
        prices: TermPrices,
        hint: Multipliers,
        cutoff: f64,
    ) -> Self {
        let seen = vec![Vec::new(); sides.layers.len()];
        let mut dual = Self {
            seen,
            sides,
            main,
            prices,
            bound: f64::NEG_INFINITY,
            multipliers: Multipliers::default(),
            feasible: None,
            relaxed: None,
        };
        let Some(free) = dual.at(Multipliers::default()) else {
            dual.bound = f64::INFINITY;
            return dual;
        };
        let over = [Limit::Prefill, Limit::Step].map(|limit| dual.excess(limit, &free.sizing) > 0.0);
        if over == [false, false] || dual.bound > cutoff {
            return dual;
        }
        // Starts with a broken limit, and alternates between both.
        let mut limit = if over[0] { Limit::Prefill } else { Limit::Step };
        let mut multipliers = Multipliers::default();
        let mut before = f64::NEG_INFINITY;
        for round in 0..ROUNDS {
            let Some(best) = dual.maximise_along(limit, multipliers, hint, cutoff) else {
                dual.bound = f64::INFINITY;
                return dual;
            };
            multipliers = best;
            let stalled = dual.bound <= before + before.abs() * 1e-12;
            if dual.bound > cutoff || (round > 0 && stalled) {
                break;
            }
            before = dual.bound;
            limit = if limit == Limit::Prefill { Limit::Step } else { Limit::Prefill };
        }
        dual
    }

    /// Returns the seconds by which `sizing` exceeds `limit`.
    fn excess(&self, limit: Limit, sizing: &Sizing) -> f64 {
        let (prefill, step) = self.sides.limits();
        match limit {
            Limit::Prefill => sizing.totals.limit_prefill - prefill,
            Limit::Step => sizing.totals.limit_step - step,
        }
    }

    /// Reports if `totals` keeps both limits.
    pub(crate) fn keeps_limits(&self, totals: &CostTerms) -> bool {
        let (prefill, step) = self.sides.limits();
        totals.limit_prefill <= prefill && totals.limit_step <= step
    }

    /// Returns the cheapest sizing at `multipliers`, or `None` if a layer has no option.
    fn at(&mut self, multipliers: Multipliers) -> Option<DualPoint> {
        let sizing = self.cheapest(self.prices.with(multipliers))?;
        let (prefill, step) = self.sides.limits();
        let mut value = sizing.totals.priced(self.prices.with(multipliers)) - multipliers.prefill * prefill;
        if multipliers.step > 0.0 {
            value -= multipliers.step * step;
        }
        if self.keeps_limits(&sizing.totals) {
            self.offer(&sizing);
        }
        if value > self.bound {
            (self.bound, self.multipliers) = (value, multipliers);
            self.relaxed = Some(sizing.clone());
        }
        Some(DualPoint { sizing, value })
    }

    /// Keeps `sizing`, which must be within the limits, if it is the cheapest so far.
    pub(crate) fn offer(&mut self, sizing: &Sizing) {
        let cost = |sizing: &Sizing| sizing.totals.priced(self.prices);
        if self.feasible.as_ref().is_none_or(|best| cost(sizing) < cost(best)) {
            self.feasible = Some(sizing.clone());
        }
    }

    /// Returns the cheapest option of every layer at `prices`.
    fn cheapest(&mut self, prices: TermPrices) -> Option<Sizing> {
        let count = self.sides.layers.len();
        let mut sizing = Sizing { choices: Vec::with_capacity(count), totals: CostTerms::default() };
        for layer in 0..count {
            let local = self.sides.local(layer, self.main);
            let (choice, terms) = match &mut self.sides.layers[layer] {
                LayerSide::Remote(options) => {
                    let (choice, terms, _) = options.cheapest(prices, local)?;
                    let seen = &mut self.seen[layer];
                    if seen.iter().all(|(known, _)| *known != choice) {
                        seen.push((choice, terms));
                    }
                    (Some(choice), terms)
                }
                LayerSide::Local => (None, self.sides.local_terms(layer, local)),
            };
            sizing.choices.push(choice);
            sizing.totals = sizing.totals.plus(&terms);
        }
        Some(sizing)
    }

    /// Maximises the dual over the multiplier of `limit`; the other multiplier stays that of `from`.
    ///
    /// Starts near `hint`. Returns `None` if no multiplier makes the limit hold.
    fn maximise_along(
        &mut self,
        limit: Limit,
        from: Multipliers,
        hint: Multipliers,
        cutoff: f64,
    ) -> Option<Multipliers> {
        let with = |multiplier: f64| match limit {
            Limit::Prefill => Multipliers { prefill: multiplier, ..from },
            Limit::Step => Multipliers { step: multiplier, ..from },
        };
        let (scale, near) = match limit {
            Limit::Prefill => (self.prices.prefill, hint.prefill),
            Limit::Step => (self.prices.step, hint.step),
        };
        let mut low = (0.0, self.at(with(0.0))?);
        if self.excess(limit, &low.1.sizing) <= 0.0 {
            return Some(with(0.0));
        }
        let (mut multiplier, mut factor) = if near > 0.0 { (near, 1.25) } else { (scale / 8.0, 8.0) };
        let mut high = loop {
            let point = self.at(with(multiplier))?;
            if self.excess(limit, &point.sizing) <= 0.0 {
                break (multiplier, point);
            }
            if self.bound > cutoff {
                return Some(with(multiplier));
            }
            if multiplier > scale * 1e12 {
                return None;
            }
            low = (multiplier, point);
            multiplier *= factor;
            factor *= 2.0;
        };
        if self.bound > cutoff {
            return Some(with(high.0));
        }
        for _ in 0..MAX_LINE_STEPS {
            // Each point defines a line over the multiplier, whose slope is the excess.
            let slopes = (self.excess(limit, &low.1.sizing), self.excess(limit, &high.1.sizing));
            let at_zero = (low.1.value - low.0 * slopes.0, high.1.value - high.0 * slopes.1);
            let crossing = (at_zero.1 - at_zero.0) / (slopes.0 - slopes.1);
            if !(crossing > low.0 && crossing < high.0) {
                break;
            }
            let line = at_zero.0 + crossing * slopes.0;
            let point = self.at(with(crossing))?;
            if self.bound > cutoff || point.value >= line - line.abs() * 1e-13 {
                return Some(with(crossing));
            }
            if self.excess(limit, &point.sizing) <= 0.0 {
                high = (crossing, point);
            } else {
                low = (crossing, point);
            }
        }
        Some(with(if low.1.value > high.1.value { low.0 } else { high.0 }))
    }
}
