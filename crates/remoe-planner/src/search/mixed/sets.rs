//! The sets of experts that a layer may have remote, with every size and number of functions of each.

use crate::remote::Remote;
use crate::search::options::{LayerOptions, Local, OptionChoice, Terms};
use crate::search::tables::LayerTable;
use remoe_plan::model::Model;
use remoe_plan::problem::ErrorFactor;
use std::borrow::Cow;

/// Options of all sets together, at most: sets times sizes times numbers of functions.
const MOST_CELLS: usize = 200_000;
/// Options times main sizes, at most.
const MOST_TERMS: usize = 3_000_000;
/// Experts of all layers together up to which all of that is spent.
const FEW_EXPERTS: usize = 12;

/// The order of experts whose first ones are a set, and how many those are.
pub(super) struct ExpertPrefix<'t> {
    pub(super) table: Cow<'t, LayerTable>,
    pub(super) count: usize,
}

/// One set of a layer's experts.
pub(super) struct CandidateSet<'m> {
    pub(super) table: &'m LayerTable,
    pub(super) count: usize,
    /// Bytes of the experts that stay with the main function.
    pub(super) local_bytes: f64,
    /// Sizes and numbers of functions; absent where nothing is remote.
    pub(super) options: Option<Box<LayerOptions<'m>>>,
}

impl<'m> CandidateSet<'m> {
    /// Returns none if no remote size holds it.
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

    /// Figures of the layer with this set at the main size at `main`.
    pub(super) fn local(&self, main: usize) -> Local {
        self.options.as_ref().map_or_else(|| self.table.all_local(main), |options| options.local(main))
    }

    /// Every option of it at one main size that no other one beats in every term.
    pub(super) fn at(
        &mut self,
        model: &Model<'_>,
        layer: usize,
        main: usize,
    ) -> Vec<(Option<OptionChoice>, Terms)> {
        let local = self.local(main);
        match &mut self.options {
            None => vec![(None, Terms::all_local(&model.layers[layer], local))],
            Some(options) => {
                let mut kept: Vec<(Option<OptionChoice>, Terms)> = Vec::new();
                let mut all = options.up_to(|_| 0.0, local, 0.0);
                // Stable: of equal ones the one with less memory and fewer functions comes first.
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

/// Sets that are tried of every layer, from all subsets to the least used experts alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Width {
    Subsets,
    /// The least used experts, with one of them exchanged for another one.
    Exchanged,
    LeastUsed,
}

/// The sets to try of every layer: as many as their work allows; none where even the fewest are too many.
pub(super) fn leads<'t>(
    model: &Model<'_>,
    tables: &'t [LayerTable],
    remote: Remote,
) -> Option<Vec<Vec<ExpertPrefix<'t>>>> {
    let sizes = model.remote_sizes.len();
    // Every subset of so few experts is worth the work; of more, most plans are found in a tenth of it.
    let experts: usize = model.layers.iter().map(|layer| layer.experts).sum();
    let part = if experts <= FEW_EXPERTS { 1 } else { 10 };
    let most = model.problem.limits.max_replicas as usize;
    let fits = |width: &Width| {
        let sets = model
            .layers
            .iter()
            .map(|layer| width.sets(layer.experts).saturating_mul(most.min(layer.experts)));
        let cells = sets.fold(0_usize, usize::saturating_add).saturating_mul(sizes);
        cells <= MOST_CELLS / part && cells.saturating_mul(model.main_sizes.len()) <= MOST_TERMS / part
    };
    let width = [Width::Subsets, Width::Exchanged, Width::LeastUsed].into_iter().find(fits)?;
    let of_layer = |(layer, table): (usize, &'t LayerTable)| {
        let may_stay = remote.allows_in(&model.layers[layer], 0);
        let prefixes = (usize::from(!may_stay)..=table.order.len())
            .map(|count| ExpertPrefix { table: Cow::Borrowed(table), count });
        let mut leads: Vec<ExpertPrefix<'t>> = prefixes.collect();
        for set in width.others(&table.order) {
            model.add_work(table.order.len());
            let table = Cow::Owned(table.led_by(model, layer, &set));
            leads.push(ExpertPrefix { table, count: set.len() });
        }
        leads
    };
    Some(tables.iter().enumerate().map(of_layer).collect())
}

impl Width {
    /// How many sets a layer with so many experts has.
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
    fn others(self, order: &[u32]) -> Vec<Vec<u32>> {
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
