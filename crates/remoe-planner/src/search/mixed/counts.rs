//! Promising remote counts of every layer, if experts are too many to try their sets.
//!
//! With a Lagrangian multiplier on the bytes of local experts every layer chooses its count independently. Exchanges in
//! single layers and in pairs of layers use the memory that the multiplier leaves free. The search over sizes ([`Search`])
//! then solves the most promising choices.

use super::MixedSearch;
use super::sets::{CandidateSet, ExpertPrefix};
use crate::search::options::{CostTerms, TermPrices};
use crate::search::selection::{Candidate, Selection};
use crate::search::{EvaluatedPlan, Search};
use std::borrow::Cow;

/// Maximum number of compared remote counts, over all layers.
const MAX_COUNTS: usize = 1_500;
/// Main sizes of the first round, over the whole range.
const MAIN_SIZES_PER_ROUND: usize = 16;
/// Main sizes of later rounds, as offsets from the best one.
const MAIN_SIZE_OFFSETS: [isize; 9] = [0, -1, 1, -2, 2, -4, 4, -8, 8];
/// Number of rounds. Each searches nearer to the best plan of the last one.
const ROUNDS: usize = 4;
/// Number of choices whose sizes are solved in a round.
const MAX_TRIED: usize = 3;
/// Bisection steps of the search for a multiplier.
const STEPS: usize = 24;
/// Maximum number of exchanges of pairs of layers.
const MAX_PAIRS: usize = 12;

/// Costs of remote counts at one main size.
struct PricedCounts {
    /// `[layer][index]`: priced terms of a count.
    values: Vec<Vec<f64>>,
    /// `[layer][index]`: bytes of local experts with a count.
    bytes: Vec<Vec<f64>>,
    /// Bytes for the local experts of all layers.
    allowed: f64,
}

/// Linear approximation of the cost: prices of terms, and a constant.
#[derive(Clone, Copy)]
struct LinearPricing {
    prices: TermPrices,
    constant: f64,
}

impl<'m> MixedSearch<'m, 'm> {
    /// Lets `search` solve the most promising remote counts, starting from its best plan.
    ///
    /// If `near`, skips the first round over the whole range, so that the search stays near that plan.
    pub(crate) fn search_counts(&self, search: &mut Search<'m>, near: bool) {
        for round in (usize::from(near)..ROUNDS).take_while(|_| !self.model.ends()) {
            let before = search.best.as_ref().map(|best| best.evaluation.total_cost);
            let expert_prefixes = self.grid(search.best.as_ref(), round);
            let mut sets: Vec<Vec<CandidateSet<'_>>> = Vec::with_capacity(expert_prefixes.len());
            for (layer, expert_prefixes) in expert_prefixes.iter().enumerate() {
                let set = |lead| CandidateSet::new(self.model, lead, layer, self.factors);
                sets.push(expert_prefixes.iter().filter_map(set).collect());
            }
            let mut promising: Vec<(f64, usize, Candidate)> = Vec::new();
            for main in self.mains(&sets, search.best.as_ref(), round) {
                if self.model.ends() {
                    return;
                }
                let pricing = self.pricing(search, main);
                let priced = self.priced(&mut sets, main, pricing.prices);
                let Some((value, chosen)) = priced.and_then(|priced| priced.cheapest()) else { continue };
                let counts: Vec<usize> = chosen.iter().zip(&sets).map(|(at, sets)| sets[*at].count).collect();
                let i = counts.iter().copied().max().unwrap_or(0);
                let candidate = Candidate { selection: Selection::Mixed, i, counts };
                promising.push((value + pricing.constant, main, candidate));
            }
            promising.retain(|(.., candidate)| candidate.i > 0);
            promising.sort_by(|a, b| a.0.total_cmp(&b.0));
            promising.truncate(MAX_TRIED);
            for (_, main, candidate) in promising {
                search.solve_pair(&candidate, main);
            }
            let after = search.best.as_ref().map(|best| best.evaluation.total_cost);
            if round > usize::from(near) && before == after {
                return;
            }
        }
    }

    /// Returns the remote counts of every layer that are compared: none, all, and some between them.
    ///
    /// In later rounds these are nearer to the counts of `best`.
    fn grid(&self, best: Option<&EvaluatedPlan>, round: usize) -> Vec<Vec<ExpertPrefix<'m>>> {
        let each = (MAX_COUNTS / self.tables.len().max(1)).max(3);
        let of_layer = |(layer, table): (usize, &'m crate::search::tables::LayerTable)| {
            let experts = table.order.len();
            let own = best.map(|best| best.candidate.counts[layer]);
            let mut counts: Vec<usize> = vec![0, experts];
            counts.extend(own);
            let left = each.saturating_sub(counts.len());
            match own.filter(|_| round > 0 && experts > each) {
                None => counts.extend((0..left).map(|step| (step + 1) * experts / (left + 1))),
                Some(own) => {
                    let near = (0..left / 2).flat_map(|power| {
                        let by = 1_usize << power.min(32);
                        [own.checked_sub(by), Some(own + by)]
                    });
                    counts.extend(near.flatten().filter(|count| *count <= experts));
                }
            }
            counts.sort_unstable();
            counts.dedup();
            counts.retain(|count| self.remote.allows_in(&self.model.layers[layer], *count));
            counts.into_iter().map(|count| ExpertPrefix { table: Cow::Borrowed(table), count }).collect()
        };
        self.tables.iter().enumerate().map(of_layer).collect()
    }

    /// Returns the indices of the main sizes that are tried.
    fn mains(
        &self,
        sets: &[Vec<CandidateSet<'_>>],
        best: Option<&EvaluatedPlan>,
        round: usize,
    ) -> Vec<usize> {
        let sizes = self.model.main_sizes.len();
        let fewest = |sets: &Vec<CandidateSet<'_>>| {
            sets.iter().map(|set| set.local_bytes).fold(f64::INFINITY, f64::min)
        };
        let needed = self.model.main_base() + sets.iter().map(fewest).sum::<f64>();
        let first = self.model.main_sizes.partition_point(|size| *size < needed);
        let all: f64 = self.model.layers.iter().map(|layer| layer.experts as f64 * layer.expert_bytes).sum();
        // A size that holds all experts leaves nothing to choose.
        let most = self.model.main_base() + all;
        let last = self.model.main_sizes.partition_point(|size| *size < most).min(sizes);
        let mut mains: Vec<usize> = match best.filter(|_| round > 0) {
            Some(best) => {
                let beside = MAIN_SIZE_OFFSETS.iter().map(|by| best.main.checked_add_signed(*by));
                beside.flatten().collect()
            }
            None => {
                let steps = MAIN_SIZES_PER_ROUND.min(last.saturating_sub(first)).max(1);
                let even = (0..steps).map(|step| first + step * last.saturating_sub(first) / steps);
                even.chain(best.map(|best| best.main)).collect()
            }
        };
        mains.retain(|main| (first..sizes).contains(main));
        mains.sort_unstable();
        mains.dedup();
        mains
    }

    /// Returns the linear cost with the main size at `main`, with the multipliers of the latest solved pair.
    ///
    /// Under reserved billing the cost is linearised at the best plan.
    fn pricing(&self, search: &Search<'_>, main: usize) -> LinearPricing {
        let model = self.model;
        let rate = model.coupled_main_rate(model.main_sizes[main]);
        if !model.is_reserved() {
            let prices = TermPrices {
                prefill: rate,
                step: rate * model.output,
                bill: 1.0,
                limit_prefill: 0.0,
                limit_step: 0.0,
            };
            return LinearPricing { prices: prices.with(search.multipliers), constant: 0.0 };
        }
        let (dollars, seconds) = match &search.best {
            Some(best) => {
                let seconds = best.evaluation.prefill_seconds + best.evaluation.decode_seconds;
                (best.evaluation.total_cost / seconds.max(f64::MIN_POSITIVE), seconds)
            }
            None => {
                let local = self.tables.iter().zip(&model.layers).map(|(table, layer)| {
                    let terms = CostTerms::all_local(layer, table.all_local(main));
                    terms.prefill + model.output * terms.step
                });
                (rate, local.sum())
            }
        };
        let prices = TermPrices {
            prefill: dollars,
            step: dollars * model.output,
            bill: seconds,
            limit_prefill: 0.0,
            limit_step: 0.0,
        };
        LinearPricing { prices, constant: seconds * (rate - dollars) }
    }

    /// Returns the least cost of every remote count, or `None` if a layer has no count that fits.
    fn priced(
        &self,
        sets: &mut [Vec<CandidateSet<'_>>],
        main: usize,
        prices: TermPrices,
    ) -> Option<PricedCounts> {
        let allowed = self.model.main_sizes[main] - self.model.main_base();
        let mut priced = PricedCounts { values: Vec::new(), bytes: Vec::new(), allowed };
        for (layer, sets) in sets.iter_mut().enumerate() {
            if sets.is_empty() {
                return None;
            }
            self.model.add_work(sets.len() * self.model.remote_sizes.len() / 8 + 1);
            // Work of filling the options.
            self.model.meter.count(sets.len() * self.model.remote_sizes.len() / 8);
            let value = |set: &mut CandidateSet<'_>| {
                let local = set.local(main);
                match &mut set.options {
                    None => CostTerms::all_local(&self.model.layers[layer], local).priced(prices),
                    Some(options) => options.lower_bound(prices, local),
                }
            };
            priced.values.push(sets.iter_mut().map(value).collect());
            priced.bytes.push(sets.iter().map(|set| set.local_bytes).collect());
        }
        Some(priced)
    }
}

impl PricedCounts {
    /// Searches the cheapest choice within the bytes by a multiplier and exchanges. `None` if no choice is within them.
    fn cheapest(&self) -> Option<(f64, Vec<usize>)> {
        let chosen = self.at_multiplier()?;
        let mut state = CountExchanges::new(self, chosen);
        for _ in 0..MAX_PAIRS {
            while state.best_single() {}
            if !state.pair() {
                break;
            }
        }
        state.value.is_finite().then_some((state.value, state.chosen))
    }

    /// Returns the choice of every layer at the least multiplier whose bytes are within the allowed ones.
    fn at_multiplier(&self) -> Option<Vec<usize>> {
        let at = |multiplier: f64| {
            let layers = self.values.iter().zip(&self.bytes);
            let chosen: Vec<usize> = layers
                .map(|(values, bytes)| {
                    let value = |at: &usize| values[*at] + multiplier * bytes[*at];
                    (0..values.len()).min_by(|a, b| value(a).total_cmp(&value(b))).unwrap_or(0)
                })
                .collect();
            let bytes: f64 = chosen.iter().zip(&self.bytes).map(|(at, bytes)| bytes[*at]).sum();
            (bytes <= self.allowed, chosen)
        };
        if let (true, chosen) = at(0.0) {
            return Some(chosen);
        }
        let finite = self.values.iter().flatten().filter(|value| value.is_finite());
        let largest = self.bytes.iter().flatten().copied().fold(1.0, f64::max);
        let mut high = finite.copied().fold(f64::MIN_POSITIVE, f64::max) / largest;
        let mut low = 0.0;
        let mut within = None;
        for _ in 0..2 * STEPS {
            if let (true, chosen) = at(high) {
                within = Some(chosen);
                break;
            }
            low = high;
            high *= 8.0;
        }
        let mut within = within?;
        for _ in 0..STEPS {
            let middle = f64::midpoint(low, high);
            match at(middle) {
                (true, chosen) => (high, within) = (middle, chosen),
                (false, _) => low = middle,
            }
        }
        Some(within)
    }
}

/// State of a local search by exchanges of counts.
struct CountExchanges<'p> {
    priced: &'p PricedCounts,
    chosen: Vec<usize>,
    value: f64,
    bytes: f64,
}

/// Exchange of the count of one layer: saved dollars and added bytes.
#[derive(Clone, Copy)]
struct CountSwap {
    layer: usize,
    to: usize,
    saves: f64,
    adds: f64,
}

impl<'p> CountExchanges<'p> {
    fn new(priced: &'p PricedCounts, chosen: Vec<usize>) -> Self {
        let sum = |of: &[Vec<f64>]| of.iter().zip(&chosen).map(|(row, at)| row[*at]).sum();
        Self { value: sum(&priced.values), bytes: sum(&priced.bytes), priced, chosen }
    }

    fn all(&self) -> impl Iterator<Item = CountSwap> {
        let PricedCounts { values, bytes, .. } = self.priced;
        self.chosen.iter().enumerate().flat_map(move |(layer, at)| {
            (0..values[layer].len()).filter(move |to| to != at).map(move |to| CountSwap {
                layer,
                to,
                saves: values[layer][*at] - values[layer][to],
                adds: bytes[layer][to] - bytes[layer][*at],
            })
        })
    }

    fn make(&mut self, exchange: CountSwap) {
        self.chosen[exchange.layer] = exchange.to;
        self.value -= exchange.saves;
        self.bytes += exchange.adds;
    }

    /// Makes the exchange that saves the most per byte, of those that fit in memory.
    fn best_single(&mut self) -> bool {
        let least = self.value.abs() * 1e-9;
        let left = self.priced.allowed - self.bytes;
        let per_byte = |exchange: &CountSwap| exchange.saves / exchange.adds.max(1.0);
        let fits = self.all().filter(|exchange| exchange.saves > least && exchange.adds <= left);
        let best = fits.max_by(|a, b| per_byte(a).total_cmp(&per_byte(b)));
        best.inspect(|exchange| self.make(*exchange)).is_some()
    }

    /// Makes the pair of exchanges that saves the most: one frees memory, the other uses it.
    fn pair(&mut self) -> bool {
        let least = self.value.abs() * 1e-9;
        let left = self.priced.allowed - self.bytes;
        let (mut frees, mut uses): (Vec<CountSwap>, Vec<CountSwap>) =
            self.all().filter(|exchange| exchange.saves.is_finite()).partition(|one| one.adds < 0.0);
        uses.retain(|exchange| exchange.saves > least);
        // Sorted by added bytes, so that the best of those that fit is known by prefix.
        uses.sort_by(|a, b| a.adds.total_cmp(&b.adds));
        frees.sort_by(|a, b| b.saves.total_cmp(&a.saves));
        let mut best: Option<(f64, CountSwap, CountSwap)> = None;
        let most = uses.iter().map(|exchange| exchange.saves).fold(0.0, f64::max);
        for free in frees {
            let worth = best.as_ref().map_or(least, |(saves, ..)| *saves);
            if free.saves + most <= worth {
                break;
            }
            let fitting = uses.partition_point(|exchange| exchange.adds + free.adds <= left);
            let others = uses[..fitting].iter().filter(|exchange| exchange.layer != free.layer);
            let with = others.max_by(|a, b| a.saves.total_cmp(&b.saves));
            if let Some(with) = with.filter(|with| free.saves + with.saves > worth) {
                best = Some((free.saves + with.saves, free, *with));
            }
        }
        let Some((_, free, with)) = best else { return false };
        self.make(free);
        self.make(with);
        true
    }
}
