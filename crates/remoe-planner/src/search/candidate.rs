//! The layers of one candidate with all their options, and lower bounds of its cost.

use crate::search::options::{CostTerms, LayerOptions, LocalTimes, OptionChoice, TermPrices};
use crate::search::selection::Candidate;
use crate::search::tables::LayerTable;
use remoe_plan::cost::{TPOT_SLACK, TTFT_SLACK};
use remoe_plan::model::Model;
use remoe_plan::plan::{LayerPlan, Plan};
use remoe_plan::problem::ErrorFactor;
use remoe_plan::problem::sizes::first_at_least;

/// Lagrangian multipliers of the latency limits: dollars that a limit longer by one second saves.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Multipliers {
    pub(crate) prefill: f64,
    pub(crate) step: f64,
}

/// Remote sets of a candidate, with their options.
#[derive(Debug)]
pub(crate) struct CandidateSides<'m> {
    pub(crate) model: &'m Model<'m>,
    tables: &'m [LayerTable],
    counts: Vec<usize>,
    pub(crate) layers: Vec<LayerSide<'m>>,
    /// Index of the smallest main size that holds the local experts.
    pub(crate) first_main: usize,
}

/// Place of the experts of one layer.
#[derive(Debug)]
pub(crate) enum LayerSide<'m> {
    /// All in the main function.
    Local,
    /// Some in a remote function.
    Remote(Box<LayerOptions<'m>>),
}

impl<'m> CandidateSides<'m> {
    /// Returns `None` if a remote set fits no size. `factors`: see [`LayerOptions::new`].
    pub(crate) fn new(
        model: &'m Model<'m>,
        tables: &'m [LayerTable],
        candidate: &Candidate,
        factors: Option<&[ErrorFactor]>,
    ) -> Option<Self> {
        let mut layers = Vec::with_capacity(tables.len());
        for (layer, (table, count)) in tables.iter().zip(&candidate.counts).enumerate() {
            layers.push(if *count == 0 {
                LayerSide::Local
            } else {
                let factor = factors.map(|factors| factors[layer].of(*count));
                LayerSide::Remote(Box::new(LayerOptions::new(model, table, layer, *count, factor)?))
            });
        }
        let first_main = first_at_least(&model.main_sizes, model.main_needed(&candidate.counts));
        Some(Self { model, tables, counts: candidate.counts.clone(), layers, first_main })
    }

    /// Returns the local times of `layer` with the main size at `main`.
    pub(crate) fn local(&self, layer: usize, main: usize) -> LocalTimes {
        match &self.layers[layer] {
            LayerSide::Remote(options) => options.local(main),
            LayerSide::Local => self.tables[layer].all_local(main),
        }
    }

    /// Returns the terms of a layer without remote experts.
    pub(crate) fn local_terms(&self, layer: usize, local: LocalTimes) -> CostTerms {
        CostTerms::all_local(&self.model.layers[layer], local)
    }

    /// Returns the limits of prefill and decode step in seconds.
    ///
    /// They include half of the slack. The other half is for the last bits in which sums differ from an evaluation.
    pub(crate) fn limits(&self) -> (f64, f64) {
        limits(self.model)
    }

    /// Returns the cost in dollars, given `terms` summed over all layers.
    pub(crate) fn cost(&self, main: usize, terms: &CostTerms) -> f64 {
        let seconds = terms.prefill + self.model.output * terms.step;
        let rate = self.model.coupled_main_rate(self.model.main_sizes[main]);
        if self.model.is_reserved() { (rate + terms.bill) * seconds } else { rate * seconds + terms.bill }
    }

    /// Returns the prices of terms under invocation billing with the main size at `main`: there the cost is linear.
    pub(crate) fn invocation_prices(&self, main: usize) -> TermPrices {
        let rate = self.model.coupled_main_rate(self.model.main_sizes[main]);
        TermPrices {
            prefill: rate,
            step: rate * self.model.output,
            bill: 1.0,
            limit_prefill: 0.0,
            limit_step: 0.0,
        }
    }

    /// Returns the sum of the least value of each term over the options of every layer, with the main size at `high`.
    fn least_terms(&self, high: usize) -> CostTerms {
        let mut least = CostTerms::default();
        for layer in 0..self.layers.len() {
            let local = self.local(layer, high);
            match &self.layers[layer] {
                LayerSide::Local => least = least.plus(&self.local_terms(layer, local)),
                LayerSide::Remote(options) => {
                    let (prefill, step) = options.fastest(local);
                    least.prefill += prefill;
                    least.step += step;
                    least.bill += options.least_bill();
                }
            }
        }
        least
    }

    /// Returns a lower bound of the cost with a main size from `low` to `high`; infinite if no plan keeps the limits.
    ///
    /// Uses the least value of each term independently.
    pub(crate) fn quick_bound(&self, low: usize, high: usize) -> f64 {
        let least = self.least_terms(high);
        let (prefill, step) = self.limits();
        // The slack keeps rounding from excluding a plan.
        if least.prefill > prefill * (1.0 + 1e-12) || least.step > step * (1.0 + 1e-12) {
            return f64::INFINITY;
        }
        self.cost(low, &least)
    }

    /// Returns the Lagrangian lower bound at `multipliers`, with a main size from `low` to `high`. Every layer has one option.
    pub(crate) fn bound(&mut self, low: usize, high: usize, multipliers: Multipliers) -> f64 {
        if self.model.is_reserved() {
            return self.reserved_bound(low, high);
        }
        let (prefill, step) = self.limits();
        let prices = self.invocation_prices(low).with(multipliers);
        let mut bound = -multipliers.prefill * prefill;
        if multipliers.step > 0.0 {
            bound -= multipliers.step * step;
        }
        bound + self.priced_bound(high, prices)
    }

    fn priced_bound(&mut self, high: usize, prices: TermPrices) -> f64 {
        let mut sum = 0.0;
        for layer in 0..self.layers.len() {
            let local = self.local(layer, high);
            sum += match &mut self.layers[layer] {
                LayerSide::Remote(options) => options.lower_bound(prices, local),
                LayerSide::Local => self.local_terms(layer, local).priced(prices),
            };
        }
        sum
    }

    /// Returns the lower bound under reserved billing, where the cost is the product of seconds T and rate A.
    ///
    /// The least T, the least A and the least p T + A for one p bound a region whose smallest product is at one of two
    /// corners.
    fn reserved_bound(&mut self, low: usize, high: usize) -> f64 {
        let output = self.model.output;
        let main_rate = self.model.coupled_main_rate(self.model.main_sizes[low]);
        let least = self.least_terms(high);
        let (seconds, rate) = (least.prefill + output * least.step, main_rate + least.bill);
        let price = rate / seconds.max(f64::MIN_POSITIVE);
        let prices = TermPrices {
            prefill: price,
            step: price * output,
            bill: 1.0,
            limit_prefill: 0.0,
            limit_step: 0.0,
        };
        let both = main_rate + self.priced_bound(high, prices);
        let at_least_seconds = seconds * rate.max(both - price * seconds);
        let at_least_rate = ((both - rate) / price).max(seconds) * rate;
        at_least_seconds.min(at_least_rate)
    }

    /// Returns the plan of `choices`, one for each layer, with the main size at `main`.
    pub(crate) fn plan(&self, main: usize, choices: &[Option<OptionChoice>]) -> Plan {
        let layers = choices.iter().zip(self.tables).zip(&self.counts).map(|((choice, table), count)| {
            choice.map_or_else(LayerPlan::default, |choice| LayerPlan {
                remote: table.remote_set(*count),
                memory_bytes: self.model.remote_sizes[choice.memory],
                // Checked problems allow at most 1024.
                replicas: choice.replicas as u32,
            })
        });
        Plan::of_layers(self.model.main_sizes[main], layers.collect())
    }
}

/// Returns [`CandidateSides::limits`].
pub(crate) fn limits(model: &Model<'_>) -> (f64, f64) {
    let prefill = model.ttft_limit - model.problem.cold_start_seconds + TTFT_SLACK / 2.0;
    let step = if model.output > 0.0 { model.tpot_limit + TPOT_SLACK / 2.0 } else { f64::INFINITY };
    (prefill, step)
}

impl TermPrices {
    pub(crate) fn with(self, multipliers: Multipliers) -> Self {
        Self { limit_prefill: multipliers.prefill, limit_step: multipliers.step, ..self }
    }
}
