//! Remote sets of a layer that are tried, with all sizes and numbers of replicas of each.

use crate::remote::Remote;
use crate::search::options::{CostTerms, LayerOptions, LocalTimes, OptionChoice};
use crate::search::tables::LayerTable;
use remoe_plan::model::Model;
use remoe_plan::problem::ErrorFactor;
use std::borrow::Cow;

/// Maximum number of options of all sets: sets times sizes times numbers of replicas.
const MAX_OPTIONS: usize = 200_000;
/// Maximum number of options times main sizes.
const MAX_TERMS: usize = 3_000_000;
/// Largest number of experts, over all layers, for which the full maxima apply; beyond it a tenth of them.
const FEW_EXPERTS: usize = 12;

/// A set of experts, as a prefix of an order of experts.
pub(super) struct ExpertPrefix<'t> {
    pub(super) table: Cow<'t, LayerTable>,
    pub(super) count: usize,
}

/// One set of a layer's experts.
pub(super) struct CandidateSet<'m> {
    pub(super) table: &'m LayerTable,
    pub(super) count: usize,
    /// Bytes of the local experts.
    pub(super) local_bytes: f64,
    /// Sizes and numbers of replicas; absent for the empty set.
    pub(super) options: Option<Box<LayerOptions<'m>>>,
}

impl<'m> CandidateSet<'m> {
    /// Returns `None` if no remote size holds the set.
    pub(super) fn new(
        model: &'m Model<'m>,
        lead: &'m ExpertPrefix<'m>,
        layer: usize,
        factors: Option<&[ErrorFactor]>,
    ) -> Option<Self> {
        let (table, count) = (&*lead.table, lead.count);
        let parts = &model.layers[layer];
        let local_bytes = (parts.experts - count) as f64 * parts.expert_bytes;
        let options = match count {
            0 => None,
            count => {
                let factor = factors.map(|factors| factors[layer].of(count));
                Some(Box::new(LayerOptions::new(model, table, layer, count, factor)?))
            }
        };
        Some(Self { table, count, local_bytes, options })
    }

    /// Returns the times of the layer in the main function with this set and the main size at `main`.
    pub(super) fn local(&self, main: usize) -> LocalTimes {
        self.options.as_ref().map_or_else(|| self.table.all_local(main), |options| options.local(main))
    }

    /// Returns the undominated options of the set at one main size.
    pub(super) fn undominated_options(
        &mut self,
        model: &Model<'_>,
        layer: usize,
        main: usize,
    ) -> Vec<(Option<OptionChoice>, CostTerms)> {
        let local = self.local(main);
        match &mut self.options {
            None => vec![(None, CostTerms::all_local(&model.layers[layer], local))],
            Some(options) => {
                let mut kept: Vec<(Option<OptionChoice>, CostTerms)> = Vec::new();
                let mut all = options.up_to(|_| 0.0, local, 0.0);
                // The sort is stable: of equal options the one with less memory and fewer replicas comes first.
                all.sort_by(|a, b| a.1.bill.total_cmp(&b.1.bill));
                for (choice, terms) in all {
                    let beaten = kept.iter().any(|(_, other)| {
                        other.prefill <= terms.prefill
                            && other.step <= terms.step
                            && other.limit_prefill <= terms.limit_prefill
                            && other.limit_step <= terms.limit_step
                    });
                    if !beaten {
                        kept.push((Some(choice), terms));
                    }
                }
                kept
            }
        }
    }
}

/// Family of sets that are tried for every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SetFamily {
    /// All subsets.
    Subsets,
    /// The least used experts, with one of them exchanged for another expert.
    Exchanged,
    /// The least used experts only.
    LeastUsed,
}

/// Returns the sets of every layer that are tried, or `None` if even the smallest family is too much work.
pub(super) fn expert_prefixes<'t>(
    model: &Model<'_>,
    tables: &'t [LayerTable],
    remote: Remote,
) -> Option<Vec<Vec<ExpertPrefix<'t>>>> {
    let sizes = model.remote_sizes.len();
    // With more experts a tenth of the work finds most of the best plans.
    let experts: usize = model.layers.iter().map(|layer| layer.experts).sum();
    let part = if experts <= FEW_EXPERTS { 1 } else { 10 };
    let most = model.problem.limits.max_replicas as usize;
    let fits = |width: &SetFamily| {
        let sets = model
            .layers
            .iter()
            .map(|layer| width.sets(layer.experts).saturating_mul(most.min(layer.experts)));
        let cells = sets.fold(0_usize, usize::saturating_add).saturating_mul(sizes);
        cells <= MAX_OPTIONS / part && cells.saturating_mul(model.main_sizes.len()) <= MAX_TERMS / part
    };
    let width = [SetFamily::Subsets, SetFamily::Exchanged, SetFamily::LeastUsed].into_iter().find(fits)?;
    let of_layer = |(layer, table): (usize, &'t LayerTable)| {
        let may_stay = remote.allows_in(&model.layers[layer], 0);
        let prefixes = (usize::from(!may_stay)..=table.order.len())
            .map(|count| ExpertPrefix { table: Cow::Borrowed(table), count });
        let mut expert_prefixes: Vec<ExpertPrefix<'t>> = prefixes.collect();
        for set in width.sets_beyond_prefixes(&table.order) {
            model.add_work(table.order.len());
            let table = Cow::Owned(table.with_first(model, layer, &set));
            expert_prefixes.push(ExpertPrefix { table, count: set.len() });
        }
        expert_prefixes
    };
    Some(tables.iter().enumerate().map(of_layer).collect())
}

impl SetFamily {
    /// Returns the number of sets of a layer with `experts`.
    fn sets(self, experts: usize) -> usize {
        match self {
            Self::Subsets => {
                1_usize.checked_shl(experts as u32).filter(|_| experts < 20).unwrap_or(usize::MAX)
            }
            Self::Exchanged => {
                experts + 1 + (1..experts).map(|count| count * (experts - count)).sum::<usize>()
            }
            Self::LeastUsed => experts + 1,
        }
    }

    /// Returns the sets that are not the first experts of `order`.
    fn sets_beyond_prefixes(self, order: &[u32]) -> Vec<Vec<u32>> {
        let is_prefix = |set: &[u32]| order.starts_with(set);
        let sets: Vec<Vec<u32>> = match self {
            Self::LeastUsed => Vec::new(),
            Self::Subsets => {
                let of = |mask: usize| (0..order.len()).filter(move |at| mask >> at & 1 == 1);
                (1..1_usize << order.len()).map(|mask| of(mask).map(|at| order[at]).collect()).collect()
            }
            Self::Exchanged => {
                let exchanged = |count: usize| {
                    let pairs = (0..count).flat_map(move |out| (count..order.len()).map(move |to| (out, to)));
                    pairs.map(move |(out, to)| {
                        let mut set = order[..count].to_vec();
                        set.remove(out);
                        set.push(order[to]);
                        set
                    })
                };
                (1..order.len()).flat_map(exchanged).collect()
            }
        };
        sets.into_iter().filter(|set| !is_prefix(set)).collect()
    }
}
