//! Cheapest choice of one option for each layer at one main size, by dynamic programming over the layers.
//!
//! Partial plans are dropped if another one dominates them, or if their lower bound exceeds the best cost.

use super::bound::{Bounds, LayerOption, MainSizeCost, OptionSum};
use remoe_plan::budget::Meter;

/// Maximum number of partial plans that are kept after each layer: the most promising ones.
const MAX_SUMS: usize = 1_500;
/// Maximum number of partial plans that are compared with each other.
const MAX_COMPARED_SUMS: usize = 6_000;

/// Limits of plans at one main size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) prefill: f64,
    pub(super) step: f64,
    pub(super) bytes: f64,
}

impl Limits {
    fn allow(&self, sum: &OptionSum) -> bool {
        sum.terms.limit_prefill <= self.prefill
            && sum.terms.limit_step <= self.step
            && sum.bytes <= self.bytes
    }
}

/// A plan: one option for every layer.
#[derive(Debug, Clone)]
pub(super) struct MergedPlan {
    pub(super) cost: f64,
    pub(super) items: Vec<LayerOption>,
    pub(super) sum: OptionSum,
}

/// A partial plan: options of the first layers.
#[derive(Debug, Clone, Copy)]
struct PartialPlan {
    sum: OptionSum,
    /// Set if any expert is remote.
    has_remote: bool,
    /// Back pointer: index of the partial plan of one layer less, and of the added option.
    from: (usize, usize),
    bound: f64,
}

/// Dominance of partial plans: the figures that are compared.
#[derive(Clone, Copy)]
struct DominanceCheck<'a> {
    meter: &'a Meter<'a>,
    cost: MainSizeCost,
    /// Set if some plan may break the prefill limit.
    prefill: bool,
    /// Set if some plan may break the limit of decode steps.
    step: bool,
}

impl DominanceCheck<'_> {
    fn figures(&self, sum: &OptionSum) -> [f64; 5] {
        let (seconds, bill) = (self.cost.seconds(&sum.terms), sum.terms.bill);
        let (first, second) = match self.cost.is_reserved {
            true => (bill, seconds),
            false => (self.cost.rate * seconds + bill, 0.0),
        };
        let counts = |counts: bool, figure: f64| if counts { figure } else { 0.0 };
        let prefill = counts(self.prefill, sum.terms.limit_prefill);
        [first, second, prefill, counts(self.step, sum.terms.limit_step), sum.bytes]
    }

    /// Returns the undominated ones of `all`, and the number of comparisons.
    ///
    /// `of`: returns the sum, and whether any expert is remote. All-local sums do not dominate sums with remote experts.
    fn undominated<T: Copy>(&self, all: Vec<T>, of: impl Fn(&T) -> (OptionSum, bool)) -> (Vec<T>, usize) {
        let mut sorted: Vec<([f64; 5], bool, T)> = all
            .into_iter()
            .map(|one| {
                let (sum, has_remote) = of(&one);
                (self.figures(&sum), has_remote, one)
            })
            .collect();
        sorted.sort_by(|a, b| {
            let figures = a.0.iter().zip(&b.0).map(|(a, b)| a.total_cmp(b));
            figures.fold(std::cmp::Ordering::Equal, std::cmp::Ordering::then).then(b.1.cmp(&a.1))
        });
        let mut kept: Vec<([f64; 5], bool, T)> = Vec::new();
        let mut compared = 0;
        for one in sorted {
            let beats = |other: &([f64; 5], bool, T)| {
                (other.1 || !one.1) && other.0.iter().zip(&one.0).all(|(other, own)| other <= own)
            };
            compared += kept.len();
            self.meter.count(kept.len() / 8);
            if self.meter.ends() {
                break;
            }
            if !kept.iter().any(beats) {
                kept.push(one);
            }
        }
        (kept.into_iter().map(|(_, _, one)| one).collect(), compared)
    }
}

/// Dynamic program over the layers at one main size.
pub(super) struct OptionMerge<'a> {
    pub(super) cost: MainSizeCost,
    pub(super) limits: Limits,
    pub(super) bounds: &'a Bounds,
    /// Remaining number of sums and comparisons.
    pub(super) left: &'a mut usize,
    pub(super) meter: &'a Meter<'a>,
}

impl<'a> OptionMerge<'a> {
    /// Returns the cheapest plan within the limits that has remote experts and costs less than `cutoff`.
    pub(super) fn cheapest(mut self, layers: &[Vec<LayerOption>], mut cutoff: f64) -> Option<MergedPlan> {
        let compared = self.compared(layers);
        let mut order: Vec<usize> = (0..layers.len()).collect();
        let mut reduced: Vec<Vec<LayerOption>> = self.promising_options(layers, cutoff)?;
        for items in &mut reduced {
            let (kept, work) =
                compared.undominated(std::mem::take(items), |item| (item.sum, item.choice.is_some()));
            *items = kept;
            self.spend(work);
        }
        order.sort_by_key(|layer| reduced[*layer].len());
        let rest = self.rest(&reduced, &order);
        let nothing = PartialPlan {
            sum: OptionSum::default(),
            has_remote: false,
            from: (0, 0),
            bound: f64::NEG_INFINITY,
        };
        let mut steps: Vec<Vec<PartialPlan>> = vec![vec![nothing]];
        let mut best: Option<(PartialPlan, f64)> = None;
        for (depth, layer) in order.iter().enumerate() {
            let is_last = depth + 1 == order.len();
            let before = steps.last()?;
            let mut longer = Vec::new();
            self.spend(before.len() * reduced[*layer].len());
            for (index, partial) in before.iter().enumerate() {
                self.meter.count(reduced[*layer].len());
                if self.meter.ends() {
                    return None;
                }
                for (at, item) in reduced[*layer].iter().enumerate() {
                    let sum = partial.sum.plus(&item.sum);
                    let has_remote = partial.has_remote || item.choice.is_some();
                    if !self.limits.allow(&sum.plus(&rest[depth + 1].least)) {
                        continue;
                    }
                    if is_last {
                        let cost = self.cost.of(&sum.terms);
                        if cost < cutoff && has_remote {
                            cutoff = cost;
                            best =
                                Some((PartialPlan { sum, has_remote, from: (index, at), bound: cost }, cost));
                        }
                        continue;
                    }
                    let values = rest[depth + 1].values.iter().enumerate();
                    let values: Vec<f64> =
                        values.map(|(bound, rest)| self.bounds.of(bound, &sum) + rest).collect();
                    let bound = self.bounds.cost(&values);
                    if bound < cutoff {
                        longer.push(PartialPlan { sum, has_remote, from: (index, at), bound });
                    }
                }
            }
            if is_last {
                break;
            }
            keep_most_promising(&mut longer, MAX_COMPARED_SUMS);
            let (mut kept, work) = compared.undominated(longer, |partial| (partial.sum, partial.has_remote));
            self.spend(work);
            keep_most_promising(&mut kept, MAX_SUMS);
            steps.push(kept);
        }
        let (last, cost) = best?;
        let mut chosen: Vec<(usize, LayerOption)> = Vec::new();
        let mut from = last.from;
        for (depth, layer) in order.iter().enumerate().rev() {
            chosen.push((*layer, reduced[*layer][from.1]));
            from = steps[depth][from.0].from;
        }
        chosen.sort_by_key(|(layer, _)| *layer);
        Some(MergedPlan { cost, items: chosen.into_iter().map(|(_, item)| item).collect(), sum: last.sum })
    }

    fn spend(&mut self, work: usize) {
        *self.left = self.left.saturating_sub(work);
    }

    /// Returns the options that may be part of a plan below `cutoff`, or `None` if a layer has no such option.
    fn promising_options(&self, layers: &[Vec<LayerOption>], cutoff: f64) -> Option<Vec<Vec<LayerOption>>> {
        let of_layers: Vec<LayerBounds> = layers.iter().map(|items| self.least_of(items)).collect();
        let all = of_layers.iter().fold(LayerBounds::none(self.bounds.count()), |sum, one| sum.plus(one));
        let mut promising = Vec::with_capacity(layers.len());
        for (items, own) in layers.iter().zip(&of_layers) {
            let others = all.minus(own);
            let may_pay = |item: &&LayerOption| {
                let values = others.values.iter().enumerate();
                let values: Vec<f64> =
                    values.map(|(bound, rest)| self.bounds.of(bound, &item.sum) + rest).collect();
                // Sums in another order may differ in their last bits.
                let slack = |figure: f64| figure - figure.abs() * 1e-12;
                let sum = item.sum.plus(&others.least);
                slack(self.bounds.cost(&values)) < cutoff
                    && slack(sum.terms.limit_prefill) <= self.limits.prefill
                    && slack(sum.terms.limit_step) <= self.limits.step
                    && slack(sum.bytes) <= self.limits.bytes
            };
            let kept: Vec<LayerOption> = items.iter().filter(may_pay).copied().collect();
            if kept.is_empty() {
                return None;
            }
            promising.push(kept);
        }
        Some(promising)
    }

    fn compared(&self, layers: &[Vec<LayerOption>]) -> DominanceCheck<'a> {
        let most = |of: fn(&LayerOption) -> f64| -> f64 {
            layers.iter().map(|items| items.iter().map(of).fold(0.0, f64::max)).sum()
        };
        DominanceCheck {
            meter: self.meter,
            cost: self.cost,
            prefill: most(|item| item.sum.terms.limit_prefill) > self.limits.prefill,
            step: most(|item| item.sum.terms.limit_step) > self.limits.step,
        }
    }

    /// Returns for every depth the sum of least figures of the remaining layers, each figure independently.
    fn rest(&self, layers: &[Vec<LayerOption>], order: &[usize]) -> Vec<LayerBounds> {
        let mut rest = vec![LayerBounds::none(self.bounds.count())];
        for layer in order.iter().rev() {
            let longer = self.least_of(&layers[*layer]).plus(&rest[rest.len() - 1]);
            rest.push(longer);
        }
        rest.reverse();
        rest
    }

    fn least_of(&self, items: &[LayerOption]) -> LayerBounds {
        let least = |of: fn(&LayerOption) -> f64| items.iter().map(of).fold(f64::INFINITY, f64::min);
        let mut sum = OptionSum { bytes: least(|item| item.sum.bytes), ..OptionSum::default() };
        sum.terms.limit_prefill = least(|item| item.sum.terms.limit_prefill);
        sum.terms.limit_step = least(|item| item.sum.terms.limit_step);
        let values = (0..self.bounds.count()).map(|bound| self.bounds.least(bound, items));
        LayerBounds { least: sum, values: values.collect() }
    }
}

/// Least figures of one or more layers.
struct LayerBounds {
    /// Least limited seconds and bytes.
    least: OptionSum,
    /// Least value in every bound.
    values: Vec<f64>,
}

impl LayerBounds {
    fn none(bounds: usize) -> Self {
        Self { least: OptionSum::default(), values: vec![0.0; bounds] }
    }

    fn plus(&self, other: &Self) -> Self {
        let values = self.values.iter().zip(&other.values).map(|(own, other)| own + other);
        Self { least: self.least.plus(&other.least), values: values.collect() }
    }

    fn minus(&self, other: &Self) -> Self {
        let values = self.values.iter().zip(&other.values).map(|(own, other)| own - other);
        let least = OptionSum {
            terms: self.least.terms.minus(&other.least.terms),
            bytes: self.least.bytes - other.least.bytes,
        };
        Self { least, values: values.collect() }
    }
}

/// Keeps the `most` partial plans with the lowest bounds.
fn keep_most_promising(sums: &mut Vec<PartialPlan>, most: usize) {
    if sums.len() > most {
        sums.sort_by(|a, b| a.bound.total_cmp(&b.bound));
        sums.truncate(most);
    }
}
