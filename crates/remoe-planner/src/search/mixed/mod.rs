//! Search for plans with a function for each layer and independent remote sets: layers may be local, remote or split.
//!
//! Layers depend on each other only through the main function's memory and the latency limits. So a plan is one option for
//! each layer (a set of experts, a size, a number of replicas) within three sums. With few experts all sets are searched
//! (`sets.rs`, `bound.rs`, `merge.rs`). With many, Lagrangian multipliers select the remote counts that are searched
//! (`counts.rs`).

mod bound;
mod counts;
mod merge;
mod sets;

use crate::remote::Remote;
use crate::search::candidate::limits;
use crate::search::dual::Sizing;
use crate::search::tables::LayerTable;
use bound::{Bounds, LayerOption, MainSizeCost, OptionSum};
use merge::{Limits, OptionMerge};
use remoe_plan::model::Model;
use remoe_plan::problem::ErrorFactor;
use remoe_plan::problem::sizes::BYTE_SLACK;
use sets::{CandidateSet, expert_prefixes};

/// Maximum number of sums and comparisons of one search.
const MAX_WORK: usize = 20_000_000;

/// Inputs of the search.
#[derive(Clone, Copy)]
pub(crate) struct MixedSearch<'s, 'm> {
    pub(crate) model: &'s Model<'m>,
    pub(crate) tables: &'s [LayerTable],
    pub(crate) remote: Remote,
    /// Prediction errors that plans must tolerate; absent unless plans must be robust.
    pub(crate) factors: Option<&'s [ErrorFactor]>,
}

/// A plan: remote sets and sizing of all layers.
pub(crate) struct MixedPlan {
    /// Index of the main size.
    pub(crate) main: usize,
    /// `[layer]`: ids of the remote experts.
    pub(crate) sets: Vec<Vec<u32>>,
    pub(crate) sizing: Sizing,
}

impl MixedSearch<'_, '_> {
    /// Searches the cheapest plan with remote experts below `cutoff`, if experts are few enough to try their sets.
    pub(crate) fn cheapest(&self, cutoff: f64) -> Option<MixedPlan> {
        let model = self.model;
        let expert_prefixes = expert_prefixes(model, self.tables, self.remote)?;
        let mut sets: Vec<Vec<CandidateSet<'_>>> = Vec::with_capacity(expert_prefixes.len());
        for (layer, expert_prefixes) in expert_prefixes.iter().enumerate() {
            let set = |lead| CandidateSet::new(model, lead, layer, self.factors);
            sets.push(expert_prefixes.iter().filter_map(set).collect());
        }
        // Tries main sizes in the order of their lower bounds.
        let mut mains = Vec::new();
        for main in (0..model.main_sizes.len()).take_while(|_| !model.ends()) {
            let bound = self.options_at(&mut sets, main, cutoff).map(|at| at.bound);
            mains.extend(bound.filter(|bound| *bound < cutoff).map(|bound| (bound, main)));
        }
        mains.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut left = MAX_WORK;
        let mut best: Option<(f64, MixedPlan)> = None;
        for (bound, main) in mains {
            let cutoff = best.as_ref().map_or(cutoff, |(cost, _)| *cost);
            if bound >= cutoff || left == 0 || model.ends() {
                break;
            }
            let Some(at) = self.options_at(&mut sets, main, cutoff) else { continue };
            let merge = OptionMerge {
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
        model.add_work((MAX_WORK - left) / 8);
        best.map(|(_, picked)| picked)
    }

    /// Returns the options of every layer at one main size, or `None` if the size holds too few experts.
    fn options_at(
        &self,
        sets: &mut [Vec<CandidateSet<'_>>],
        main: usize,
        cutoff: f64,
    ) -> Option<SizeOptions> {
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
                let all = set.undominated_options(model, layer, main).into_iter();
                items.extend(all.map(|(choice, terms)| LayerOption {
                    set: index,
                    choice,
                    sum: OptionSum { terms, bytes },
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

/// Options of all layers at one main size.
struct SizeOptions {
    cost: MainSizeCost,
    limits: Limits,
    layers: Vec<Vec<LayerOption>>,
    bounds: Bounds,
    bound: f64,
}
