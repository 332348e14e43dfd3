//! Search for mixed plans: each layer chooses by itself which of its experts are remote (none, some or all), and has a
//! function of its own for them.
//!
//! Layers depend on each other only through the main function's memory and the latency limits. So a plan is one option for
//! each layer (a set of experts, a size, a number of replicas), and three sums over the layers are limited: prefill time,
//! step time and local bytes. With few experts all sets are searched
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
/// Sums of this search that take as long as one summed term of an evaluation.
const SUMS_PER_WORK: usize = 8;

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
    /// Index in `Model::main_sizes`.
    pub(crate) main_size_index: usize,
    /// `[layer]`: ids of the remote experts.
    pub(crate) sets: Vec<Vec<u32>>,
    pub(crate) sizing: Sizing,
}

impl MixedSearch<'_, '_> {
    /// Returns the cheapest plan that has remote experts and costs less than `cutoff` dollars. Also returns `None` if there
    /// are too many experts to try all sets.
    pub(crate) fn cheapest(&self, cutoff: f64) -> Option<MixedPlan> {
        let model = self.model;
        let prefixes_by_layer = expert_prefixes(model, self.tables, self.remote)?;
        let mut sets_by_layer: Vec<Vec<CandidateSet<'_>>> = Vec::with_capacity(prefixes_by_layer.len());
        for (layer, prefixes) in prefixes_by_layer.iter().enumerate() {
            let set = |prefix| CandidateSet::new(model, prefix, layer, self.factors);
            sets_by_layer.push(prefixes.iter().filter_map(set).collect());
        }
        // Tries main sizes in the order of their lower bounds.
        let mut main_sizes = Vec::new();
        for index in (0..model.main_sizes.len()).take_while(|_| !model.ends()) {
            let bound = self.options_at(&mut sets_by_layer, index, cutoff).map(|options| options.bound);
            main_sizes.extend(bound.filter(|bound| *bound < cutoff).map(|bound| (bound, index)));
        }
        main_sizes.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut work_left = MAX_WORK;
        let mut best: Option<(f64, MixedPlan)> = None;
        for (bound, main_size_index) in main_sizes {
            let cutoff = best.as_ref().map_or(cutoff, |(cost, _)| *cost);
            if bound >= cutoff || work_left == 0 || model.ends() {
                break;
            }
            let Some(options) = self.options_at(&mut sets_by_layer, main_size_index, cutoff) else {
                continue;
            };
            let merge = OptionMerge {
                cost: options.cost,
                limits: options.limits,
                bounds: &options.bounds,
                left: &mut work_left,
                meter: &model.meter,
            };
            let Some(merged) = merge.cheapest(&options.layers, cutoff) else { continue };
            let remote_sets = merged.items.iter().zip(&sets_by_layer).map(|(item, sets)| {
                let set = &sets[item.set];
                set.table.remote_set(set.count)
            });
            let sizing = Sizing {
                choices: merged.items.iter().map(|item| item.choice).collect(),
                totals: merged.sum.terms,
            };
            best = Some((merged.cost, MixedPlan { main_size_index, sets: remote_sets.collect(), sizing }));
        }
        model.add_work((MAX_WORK - work_left) / SUMS_PER_WORK);
        best.map(|(_, picked)| picked)
    }

    /// Returns the options of every layer at one main size, or `None` if the experts that must be local do not fit.
    fn options_at(
        &self,
        sets_by_layer: &mut [Vec<CandidateSet<'_>>],
        main_size_index: usize,
        cutoff: f64,
    ) -> Option<SizeOptions> {
        let model = self.model;
        let size = model.main_sizes[main_size_index];
        let cost = MainSizeCost {
            rate: model.coupled_main_rate(size),
            output: model.output,
            is_reserved: model.is_reserved(),
        };
        let (prefill, step) = limits(model);
        let allowed_bytes = size - model.main_base() + BYTE_SLACK / 2.0;
        let fewest = sets_by_layer
            .iter()
            .map(|sets| sets.iter().map(|set| set.local_bytes).fold(f64::INFINITY, f64::min));
        if fewest.sum::<f64>() > allowed_bytes {
            return None;
        }
        let mut layers = Vec::with_capacity(sets_by_layer.len());
        for (layer, sets) in sets_by_layer.iter_mut().enumerate() {
            let mut items = Vec::new();
            for (index, set) in sets.iter_mut().enumerate() {
                let bytes = set.local_bytes;
                let options = set.undominated_options(model, layer, main_size_index).into_iter();
                items.extend(options.map(|(choice, terms)| LayerOption {
                    set: index,
                    choice,
                    sum: OptionSum { terms, bytes },
                }));
            }
            layers.push(items);
        }
        model.add_work(layers.iter().map(Vec::len).sum::<usize>() / SUMS_PER_WORK);
        let bounds = Bounds::new(cost, allowed_bytes, &layers, cutoff)?;
        let bound = bounds.of_all(&layers);
        Some(SizeOptions {
            cost,
            limits: Limits { prefill, step, bytes: allowed_bytes },
            layers,
            bounds,
            bound,
        })
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
