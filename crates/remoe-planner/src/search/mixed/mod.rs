//! Plans with a function per layer whose layers differ freely: some wholly local, some wholly remote, some split.
//!
//! The local experts of all layers share the main function's memory, which is all that ties layers together beside
//! the limits of times. So a plan is one option per layer (a set of experts, a size, a number of functions) within
//! three sums. Few experts are searched to the end here (`sets.rs`, `bound.rs`, `merge.rs`); of many, multipliers
//! say which numbers of remote experts are worth a search (`counts.rs`).

mod bound;
mod counts;
mod merge;
mod sets;

use crate::remote::Remote;
use crate::search::candidate::limits;
use crate::search::dual::Sizing;
use crate::search::tables::LayerTable;
use bound::{Bounds, LayerOption, MainSizeCost, Sum};
use merge::{Limits, Merge};
use remoe_plan::model::Model;
use remoe_plan::problem::ErrorFactor;
use remoe_plan::problem::sizes::BYTE_SLACK;
use sets::{CandidateSet, leads};

/// Sums and comparisons of one search, at most.
const MOST_MERGED: usize = 20_000_000;

/// Everything that the search reads.
#[derive(Clone, Copy)]
pub(crate) struct Mixed<'s, 'm> {
    pub(crate) model: &'s Model<'m>,
    pub(crate) tables: &'s [LayerTable],
    pub(crate) remote: Remote,
    /// How far remote shares may exceed their prediction, where plans must bear it.
    pub(crate) factors: Option<&'s [ErrorFactor]>,
}

/// A plan as the sets of its layers and their sizes.
pub(crate) struct MixedPlan {
    pub(crate) main: usize,
    /// Remote experts of every layer.
    pub(crate) sets: Vec<Vec<u32>>,
    pub(crate) sizing: Sizing,
}

impl Mixed<'_, '_> {
    /// The cheapest plan below `cutoff` that has something remote, where experts are few enough to try their sets.
    pub(crate) fn cheapest(&self, cutoff: f64) -> Option<MixedPlan> {
        let model = self.model;
        let leads = leads(model, self.tables, self.remote)?;
        let mut sets: Vec<Vec<CandidateSet<'_>>> = Vec::with_capacity(leads.len());
        for (layer, leads) in leads.iter().enumerate() {
            let set = |lead| CandidateSet::new(model, lead, layer, self.factors);
            sets.push(leads.iter().filter_map(set).collect());
        }
        // The main sizes, the one with the lowest bound first.
        let mut mains = Vec::new();
        for main in (0..model.main_sizes.len()).take_while(|_| !model.ends()) {
            let bound = self.at(&mut sets, main, cutoff).map(|at| at.bound);
            mains.extend(bound.filter(|bound| *bound < cutoff).map(|bound| (bound, main)));
        }
        mains.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut left = MOST_MERGED;
        let mut best: Option<(f64, MixedPlan)> = None;
        for (bound, main) in mains {
            let cutoff = best.as_ref().map_or(cutoff, |(cost, _)| *cost);
            if bound >= cutoff || left == 0 || model.ends() {
                break;
            }
            let Some(at) = self.at(&mut sets, main, cutoff) else { continue };
            let merge = Merge {
                cost: at.cost,
                limits: at.limits,
                bounds: &at.bounds,
                left: &mut left,
                meter: &model.meter,
            };
            let Some(merged) = merge.cheapest(&at.layers, cutoff) else { continue };
            let remote = merged.items.iter().zip(&sets).map(|(item, sets)| {
                let set = &sets[item.set];
                set.table.remote_set(set.count)
            });
            let sizing = Sizing {
                choices: merged.items.iter().map(|item| item.choice).collect(),
                totals: merged.sum.terms,
            };
            best = Some((merged.cost, MixedPlan { main, sets: remote.collect(), sizing }));
        }
        model.add_work((MOST_MERGED - left) / 8);
        best.map(|(_, picked)| picked)
    }

    /// Every option of every layer at one main size; none where it holds too little.
    fn at(&self, sets: &mut [Vec<CandidateSet<'_>>], main: usize, cutoff: f64) -> Option<SizeOptions> {
        let model = self.model;
        let size = model.main_sizes[main];
        let cost = MainSizeCost {
            rate: model.coupled_main_rate(size),
            output: model.output,
            is_reserved: model.is_reserved(),
        };
        let (prefill, step) = limits(model);
        let bytes = size - model.main_base() + BYTE_SLACK / 2.0;
        let fewest =
            sets.iter().map(|sets| sets.iter().map(|set| set.local_bytes).fold(f64::INFINITY, f64::min));
        if fewest.sum::<f64>() > bytes {
            return None;
        }
        let mut layers = Vec::with_capacity(sets.len());
        for (layer, sets) in sets.iter_mut().enumerate() {
            let mut items = Vec::new();
            for (index, set) in sets.iter_mut().enumerate() {
                let bytes = set.local_bytes;
                let all = set.at(model, layer, main).into_iter();
                items.extend(all.map(|(choice, terms)| LayerOption {
                    set: index,
                    choice,
                    sum: Sum { terms, bytes },
                }));
            }
            layers.push(items);
        }
        model.add_work(layers.iter().map(Vec::len).sum::<usize>() / 8);
        let bounds = Bounds::new(cost, bytes, &layers, cutoff)?;
        let bound = bounds.of_all(&layers);
        Some(SizeOptions { cost, limits: Limits { prefill, step, bytes }, layers, bounds, bound })
    }
}

/// The options of all layers at one main size.
struct SizeOptions {
    cost: MainSizeCost,
    limits: Limits,
    layers: Vec<Vec<LayerOption>>,
    bounds: Bounds,
    bound: f64,
}
