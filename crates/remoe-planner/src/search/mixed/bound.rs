//! Lower bounds of the cost of one option for each layer at one main size.
//!
//! A multiplier on the bytes of local experts makes layers independent. Under invocation billing the cost is linear, so that
//! one such bound is enough. Under reserved billing it is seconds times rate: the least seconds, the least rate and the
//! least weighted sum of both bound a region whose cheapest points are two of its corners.

use crate::search::options::{CostTerms, OptionChoice};

/// One option of a layer at one main size.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerOption {
    /// Index of the set among the layer's sets.
    pub(super) set: usize,
    pub(super) choice: Option<OptionChoice>,
    pub(super) sum: OptionSum,
}

/// Sum of options of several layers.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct OptionSum {
    pub(super) terms: CostTerms,
    /// Bytes of local experts.
    pub(super) bytes: f64,
}

impl OptionSum {
    pub(super) fn plus(&self, other: &Self) -> Self {
        Self { terms: self.terms.plus(&other.terms), bytes: self.bytes + other.bytes }
    }
}

/// Cost of a plan as a function of the sum of its layers, at one main size.
#[derive(Debug, Clone, Copy)]
pub(super) struct MainSizeCost {
    /// Dollars per second of the main function.
    pub(super) rate: f64,
    /// Decode steps.
    pub(super) output: f64,
    pub(super) is_reserved: bool,
}

impl MainSizeCost {
    pub(super) fn seconds(&self, terms: &CostTerms) -> f64 {
        terms.prefill + self.output * terms.step
    }

    pub(super) fn of(&self, terms: &CostTerms) -> f64 {
        let seconds = self.seconds(terms);
        if self.is_reserved { (self.rate + terms.bill) * seconds } else { self.rate * seconds + terms.bill }
    }
}

/// Weighted sum of seconds, bills and local bytes. The weight of bytes is the Lagrangian multiplier.
#[derive(Debug, Clone, Copy)]
struct LinearBound {
    seconds: f64,
    bill: f64,
    bytes: f64,
}

impl LinearBound {
    fn of(&self, cost: &MainSizeCost, sum: &OptionSum) -> f64 {
        self.seconds * cost.seconds(&sum.terms) + self.bill * sum.terms.bill + self.bytes * sum.bytes
    }

    /// Returns the option of a layer with the least value. Ties go to fewer local bytes.
    fn least<'i>(&self, cost: &MainSizeCost, items: &'i [LayerOption]) -> Option<(f64, &'i LayerOption)> {
        let all = items.iter().map(|item| (self.of(cost, &item.sum), item));
        all.reduce(|best, other| {
            let fewer = other.0 == best.0 && other.1.sum.bytes < best.1.sum.bytes;
            if other.0 < best.0 || fewer { other } else { best }
        })
    }
}

/// Bisection steps of the search for a multiplier.
const STEPS: usize = 24;

/// Lower bounds at one main size with `bytes` for local experts.
#[derive(Debug, Clone)]
pub(super) struct Bounds {
    cost: MainSizeCost,
    bytes: f64,
    linears: Vec<LinearBound>,
}

impl Bounds {
    /// `aim`: expected cost of plans. Returns `None` if the experts that must be local need more than `bytes`.
    pub(super) fn new(cost: MainSizeCost, bytes: f64, layers: &[Vec<LayerOption>], aim: f64) -> Option<Self> {
        let mut bounds = Self { cost, bytes, linears: Vec::new() };
        if !cost.is_reserved {
            bounds.add(layers, cost.rate, 1.0)?;
            return Some(bounds);
        }
        bounds.add(layers, 1.0, 0.0)?;
        bounds.add(layers, 0.0, 1.0)?;
        let least = |index: usize| bounds.value(index, bounds.sum_of(layers, index));
        let (seconds, bill) = (least(0).max(f64::MIN_POSITIVE), least(1));
        // Slope of the curve seconds times rate = aim at the least seconds.
        let rate = if aim.is_finite() { aim / seconds } else { cost.rate + bill };
        bounds.add(layers, rate / seconds, 1.0)?;
        Some(bounds)
    }

    /// Adds the linear bound with these weights at its best multiplier.
    fn add(&mut self, layers: &[Vec<LayerOption>], seconds: f64, bill: f64) -> Option<()> {
        let at = |multiplier: f64| {
            let linear = LinearBound { seconds, bill, bytes: multiplier };
            let mut bytes = 0.0;
            for items in layers {
                bytes += linear.least(&self.cost, items)?.1.sum.bytes;
            }
            Some(bytes - self.bytes)
        };
        let (mut low, mut high) = (0.0, 0.0);
        if at(0.0)? > 0.0 {
            let largest = layers.iter().flatten().map(|item| item.sum.bytes).fold(1.0, f64::max);
            let scale = |item: &LayerOption| {
                seconds * self.cost.seconds(&item.sum.terms) + bill * item.sum.terms.bill
            };
            high = layers.iter().flatten().map(scale).fold(0.0, f64::max).max(f64::MIN_POSITIVE) / largest;
            while at(high)? > 0.0 {
                low = high;
                high *= 4.0;
                if high > f64::MAX / 1e30 {
                    return None;
                }
            }
            for _ in 0..STEPS {
                let middle = f64::midpoint(low, high);
                if at(middle)? > 0.0 { low = middle } else { high = middle }
            }
        }
        self.linears.push(LinearBound { seconds, bill, bytes: high });
        Some(())
    }

    pub(super) fn count(&self) -> usize {
        self.linears.len()
    }

    /// Returns the value of a sum in the bound at `index`.
    pub(super) fn of(&self, index: usize, sum: &OptionSum) -> f64 {
        self.linears[index].of(&self.cost, sum)
    }

    /// Returns the least value of a layer in the bound at `index`.
    pub(super) fn least(&self, index: usize, items: &[LayerOption]) -> f64 {
        self.linears[index].least(&self.cost, items).map_or(f64::INFINITY, |(least, _)| least)
    }

    fn sum_of(&self, layers: &[Vec<LayerOption>], index: usize) -> f64 {
        layers.iter().map(|items| self.least(index, items)).sum()
    }

    /// Returns the lower bound of plans within the bytes, given the sum of least values in the bound at `index`.
    fn value(&self, index: usize, sum: f64) -> f64 {
        let multiplier = self.linears[index].bytes;
        if multiplier > 0.0 { sum - multiplier * self.bytes } else { sum }
    }

    /// Returns a lower bound of the cost of plans whose value in each bound is at least that of `values`.
    pub(super) fn cost(&self, values: &[f64]) -> f64 {
        let value = |index: usize| self.value(index, values[index]);
        if !self.cost.is_reserved {
            return value(0);
        }
        let (seconds, rate, both) = (value(0), self.cost.rate + value(1), self.cost.rate + value(2));
        let price = self.linears[2].seconds;
        let at_least_seconds = seconds * rate.max(both - price * seconds);
        let at_least_rate = ((both - rate) / price).max(seconds) * rate;
        at_least_seconds.min(at_least_rate)
    }

    /// Returns a lower bound of the cost of all plans of one option for each layer.
    pub(super) fn of_all(&self, layers: &[Vec<LayerOption>]) -> f64 {
        let sums: Vec<f64> = (0..self.count()).map(|index| self.sum_of(layers, index)).collect();
        self.cost(&sums)
    }
}
