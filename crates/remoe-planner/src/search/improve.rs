//! Best sizing within the limits, from a dual solution: repair, single and pair moves, and an exact search among the options
//! that the bound does not exclude.

use crate::search::candidate::{CandidateSides, LayerSide};
use crate::search::dual::{Dual, Sizing};
use crate::search::options::{CostTerms, LocalTimes, OptionChoice};
use remoe_plan::budget::Meter;

/// Largest number of layers for which the optimal sizing is searched. Beyond it, one within [`GAP`] is enough.
const FEW_LAYERS: usize = 4;
/// Relative optimality gap.
const GAP: f64 = 1e-6;
/// Maximum number of options for pair moves.
const MAX_PAIR_OPTIONS: usize = 600;
/// Maximum number of passes over all pairs. Two or three are usual.
const MAX_PASSES: usize = 20;
/// Maximum number of nodes of the exact search.
const MAX_NODES: usize = 20_000;

/// An option of a layer.
#[derive(Debug, Clone, Copy)]
struct LayerCandidate {
    layer: usize,
    choice: OptionChoice,
    terms: CostTerms,
    /// Priced terms at the multipliers, above those of the layer's cheapest option.
    extra: f64,
}

/// Effort of a sizing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Moves among the options that the dual visited.
    Quick,
    /// Also moves among all options that the bound does not exclude, and an exact search.
    Full,
}

/// A sizing within the limits.
pub(crate) struct Improved {
    pub(crate) sizing: Sizing,
    /// Set if there may be a cheaper sizing.
    pub(crate) open: bool,
}

/// Searches the cheapest sizing within the limits, given the solved dual of a linear cost.
pub(crate) fn improve(mut dual: Dual<'_, '_>, effort: Effort) -> Option<Improved> {
    let locals = local_times(dual.sides, dual.main);
    if dual.feasible.is_none() {
        let start = dual.relaxed.clone()?;
        let repaired = repair(&mut dual, &locals, start).or_else(|| fastest(&mut dual, &locals))?;
        dual.offer(&repaired);
    }
    let mut best = dual.feasible.clone()?;
    let prices = dual.prices;
    let cost = |totals: &CostTerms| totals.priced(prices);
    let enough = dual.bound.abs() * if locals.len() <= FEW_LAYERS { 1e-13 } else { GAP };
    let gap = |best: &Sizing, dual: &Dual<'_, '_>| cost(&best.totals) - dual.bound;
    if gap(&best, &dual) > enough {
        // Moves among the visited options close most of the gap. A small gap excludes most other options.
        let visited = visited_candidates(&dual);
        moves(dual.sides, &locals, &visited, &mut best, cost);
    }
    if gap(&best, &dual) <= enough {
        return Some(Improved { sizing: best, open: false });
    }
    if effort == Effort::Quick {
        return Some(Improved { sizing: best, open: true });
    }
    let left = gap(&best, &dual);
    let core = core(&mut dual, &locals, left);
    moves(dual.sides, &locals, &core, &mut best, cost);
    let left = gap(&best, &dual);
    exhaust(&dual, &core, &locals, &mut best, left);
    Some(Improved { sizing: best, open: false })
}

/// Returns the options that the dual visited.
fn visited_candidates(dual: &Dual<'_, '_>) -> Vec<LayerCandidate> {
    let prices = dual.prices.with(dual.multipliers);
    let layers = dual.seen.iter().enumerate().flat_map(|(layer, options)| {
        let extra = move |terms: &CostTerms| terms.priced(prices);
        let least = options.iter().map(|(_, terms)| extra(terms)).fold(f64::INFINITY, f64::min);
        options.iter().map(move |(choice, terms)| LayerCandidate {
            layer,
            choice: *choice,
            terms: *terms,
            extra: extra(terms) - least,
        })
    });
    layers.collect()
}

/// Returns the times of every layer in the main function with the main size at `main`.
pub(crate) fn local_times(sides: &CandidateSides<'_>, main: usize) -> Vec<LocalTimes> {
    (0..sides.layers.len()).map(|layer| sides.local(layer, main)).collect()
}

/// Returns the terms of the layer's option in `sizing`.
fn terms_in(
    sides: &mut CandidateSides<'_>,
    locals: &[LocalTimes],
    sizing: &Sizing,
    layer: usize,
) -> CostTerms {
    let local = locals[layer];
    let local_terms = sides.local_terms(layer, local);
    match (&mut sides.layers[layer], sizing.choices[layer]) {
        (LayerSide::Remote(options), Some(choice)) => options.terms(choice, local).unwrap_or(local_terms),
        _ => local_terms,
    }
}

/// Returns every undominated option that a sizing cheaper than the best one may have.
///
/// At the multipliers it costs at most `gap` more than the layer's cheapest option. `gap`: best cost minus lower bound.
fn core(dual: &mut Dual<'_, '_>, locals: &[LocalTimes], gap: f64) -> Vec<LayerCandidate> {
    let prices = dual.prices.with(dual.multipliers);
    let linear = dual.prices;
    let mut core = Vec::new();
    for (layer, local) in locals.iter().enumerate() {
        let LayerSide::Remote(options) = &mut dual.sides.layers[layer] else { continue };
        let Some((_, _, least)) = options.cheapest(prices, *local) else { continue };
        let found = options.up_to(|terms| terms.priced(prices), *local, least + gap + least.abs() * 1e-12);
        let mut kept: Vec<LayerCandidate> = Vec::new();
        let mut sorted: Vec<LayerCandidate> = found
            .into_iter()
            .map(|(choice, terms)| LayerCandidate {
                layer,
                choice,
                terms,
                extra: terms.priced(prices) - least,
            })
            .collect();
        sorted.sort_by(|a, b| a.terms.priced(linear).total_cmp(&b.terms.priced(linear)));
        for candidate in sorted {
            let beaten = kept.iter().any(|kept| {
                kept.terms.limit_prefill <= candidate.terms.limit_prefill
                    && kept.terms.limit_step <= candidate.terms.limit_step
            });
            if !beaten {
                kept.push(candidate);
            }
        }
        core.extend(kept);
    }
    core
}

/// Exchanges single options for those that reduce the excess over the limits the most per dollar, until both hold.
fn repair(dual: &mut Dual<'_, '_>, locals: &[LocalTimes], mut sizing: Sizing) -> Option<Sizing> {
    let (prefill, step) = dual.sides.limits();
    let prices = dual.prices;
    let missed = |totals: &CostTerms| {
        let prefill_missed = (totals.limit_prefill - prefill).max(0.0) / prefill.abs().max(1e-9);
        let step_missed = if step.is_finite() { (totals.limit_step - step).max(0.0) / step } else { 0.0 };
        prefill_missed + step_missed
    };
    while !dual.keeps_limits(&sizing.totals) {
        let now = missed(&sizing.totals);
        let mut best: Option<(f64, usize, OptionChoice, CostTerms)> = None;
        for (layer, local) in locals.iter().enumerate() {
            let current = terms_in(dual.sides, locals, &sizing, layer);
            let LayerSide::Remote(options) = &mut dual.sides.layers[layer] else { continue };
            for (choice, terms) in options.up_to(|_| 0.0, *local, 0.0) {
                let totals = sizing.totals.minus(&current).plus(&terms);
                let gain = now - missed(&totals);
                if gain <= now * 1e-9 {
                    continue;
                }
                let price = (terms.priced(prices) - current.priced(prices)).max(0.0);
                let score = gain / (price + 1e-12 * dual.bound.abs());
                if best.as_ref().is_none_or(|(best, ..)| score > *best) {
                    best = Some((score, layer, choice, totals));
                }
            }
        }
        let (_, layer, choice, totals) = best?;
        sizing.choices[layer] = Some(choice);
        sizing.totals = totals;
    }
    Some(sizing)
}

/// Returns the sizing with the largest memory and the fastest number of replicas in every layer, if it keeps the limits.
fn fastest(dual: &mut Dual<'_, '_>, locals: &[LocalTimes]) -> Option<Sizing> {
    let memory = dual.sides.model.remote_sizes.len() - 1;
    let mut sizing = Sizing { choices: vec![None; locals.len()], totals: CostTerms::default() };
    for (layer, local) in locals.iter().enumerate() {
        let mut terms = dual.sides.local_terms(layer, *local);
        if let LayerSide::Remote(options) = &mut dual.sides.layers[layer] {
            let choices = (1..=options.replicas).map(|replicas| OptionChoice { memory, replicas });
            let choices: Vec<(OptionChoice, CostTerms)> = choices
                .filter_map(|choice| options.terms(choice, *local).map(|terms| (choice, terms)))
                .collect();
            let fastest = choices.iter().min_by(|a, b| a.1.limit_prefill.total_cmp(&b.1.limit_prefill))?;
            sizing.choices[layer] = Some(fastest.0);
            terms = fastest.1;
        }
        sizing.totals = sizing.totals.plus(&terms);
    }
    dual.keeps_limits(&sizing.totals).then_some(sizing)
}

/// Exchanges one option, then two, as long as the cost falls within the limits.
fn moves(
    sides: &mut CandidateSides<'_>,
    locals: &[LocalTimes],
    core: &[LayerCandidate],
    best: &mut Sizing,
    cost: impl Fn(&CostTerms) -> f64,
) {
    let (prefill, step) = sides.limits();
    let current = (0..locals.len()).map(|layer| terms_in(sides, locals, best, layer)).collect();
    let meter = &sides.model.meter;
    let mut state = Moves { best, current, cost, prefill, step, meter };
    let mut for_pairs: Vec<LayerCandidate> = core.to_vec();
    for_pairs.sort_by(|a, b| a.extra.total_cmp(&b.extra));
    for_pairs.truncate(MAX_PAIR_OPTIONS);
    for _ in 0..MAX_PASSES {
        while !meter.ends() && state.best_single(core) {}
        if !state.pairs(&for_pairs) {
            return;
        }
    }
}

/// State of a local search by exchanges of options.
struct Moves<'a, F> {
    best: &'a mut Sizing,
    /// Terms of the layers in `best`.
    current: Vec<CostTerms>,
    cost: F,
    prefill: f64,
    step: f64,
    meter: &'a Meter<'a>,
}

impl<F: Fn(&CostTerms) -> f64> Moves<'_, F> {
    /// Returns the cost that a move must undercut.
    fn cost_to_beat(&self) -> f64 {
        let now = (self.cost)(&self.best.totals);
        now - now.abs() * 1e-13
    }

    fn with(&self, totals: &CostTerms, candidate: &LayerCandidate) -> CostTerms {
        totals.minus(&self.current[candidate.layer]).plus(&candidate.terms)
    }

    fn allows(&self, totals: &CostTerms) -> bool {
        totals.limit_prefill <= self.prefill && totals.limit_step <= self.step
    }

    fn make(&mut self, candidate: &LayerCandidate) {
        self.best.totals = self.with(&self.best.totals, candidate);
        self.best.choices[candidate.layer] = Some(candidate.choice);
        self.current[candidate.layer] = candidate.terms;
    }

    /// Makes the single exchange that saves the most. Returns false if none saves anything.
    fn best_single(&mut self, options: &[LayerCandidate]) -> bool {
        let mut found = (self.cost_to_beat(), None);
        self.meter.count(options.len());
        for candidate in options {
            let totals = self.with(&self.best.totals, candidate);
            let value = (self.cost)(&totals);
            if value < found.0 && self.allows(&totals) {
                found = (value, Some(*candidate));
            }
        }
        found.1.inspect(|candidate| self.make(candidate)).is_some()
    }

    /// Makes every pair of exchanges that saves anything, in one pass. Returns false if none does.
    fn pairs(&mut self, options: &[LayerCandidate]) -> bool {
        let mut any = false;
        for (index, first) in options.iter().enumerate() {
            self.meter.count(index);
            if self.meter.ends() {
                return false;
            }
            let mut cost_to_beat = self.cost_to_beat();
            let mut with_first = self.with(&self.best.totals, first);
            for second in options[..index].iter().filter(|second| second.layer != first.layer) {
                let totals = self.with(&with_first, second);
                if (self.cost)(&totals) < cost_to_beat && self.allows(&totals) {
                    self.make(first);
                    self.make(second);
                    any = true;
                    cost_to_beat = self.cost_to_beat();
                    with_first = self.best.totals;
                }
            }
        }
        any
    }
}

/// Improves `best` by single and pair moves over all options, for a cost that need not be linear.
pub(crate) fn improve_any(
    sides: &mut CandidateSides<'_>,
    locals: &[LocalTimes],
    best: &mut Sizing,
    cost: impl Fn(&CostTerms) -> f64,
) {
    let mut all = Vec::new();
    for (layer, local) in locals.iter().enumerate() {
        let LayerSide::Remote(options) = &mut sides.layers[layer] else { continue };
        for (choice, terms) in options.up_to(|_| 0.0, *local, 0.0) {
            let totals = best.totals.plus(&terms);
            all.push(LayerCandidate { layer, choice, terms, extra: cost(&totals) });
        }
    }
    moves(sides, locals, &all, best, cost);
}

/// Improves `best` by a depth-first search over the core with up to [`MAX_NODES`] nodes.
///
/// Skips partial sizings whose extra cost exceeds the gap, or that cannot keep the limits.
fn exhaust(dual: &Dual<'_, '_>, core: &[LayerCandidate], locals: &[LocalTimes], best: &mut Sizing, gap: f64) {
    let mut layers: Vec<Vec<LayerCandidate>> =
        core.chunk_by(|a, b| a.layer == b.layer).map(<[_]>::to_vec).collect();
    for options in &mut layers {
        options.sort_by(|a, b| a.extra.total_cmp(&b.extra));
    }
    let mut fixed = CostTerms::default();
    for (layer, local) in locals.iter().enumerate() {
        if matches!(dual.sides.layers[layer], LayerSide::Local) {
            fixed = fixed.plus(&dual.sides.local_terms(layer, *local));
        }
    }
    let remote = dual.sides.layers.iter().filter(|side| matches!(side, LayerSide::Remote(_))).count();
    if layers.len() != remote {
        return;
    }
    // Least seconds of the layers from each depth on.
    let mut rest = vec![(0.0, 0.0)];
    for options in layers.iter().rev() {
        let least =
            |of: fn(&CostTerms) -> f64| options.iter().map(|o| of(&o.terms)).fold(f64::INFINITY, f64::min);
        let (prefill, step) = rest[rest.len() - 1];
        rest.push((prefill + least(|terms| terms.limit_prefill), step + least(|terms| terms.limit_step)));
    }
    rest.reverse();
    let limits = dual.sides.limits();
    let mut search = ExactSearch {
        layers: &layers,
        rest: &rest,
        limits,
        gap,
        nodes: MAX_NODES,
        chosen: Vec::new(),
        found: None,
    };
    search.descend(fixed, 0.0, |totals| totals.priced(dual.prices) - dual.bound);
    if let Some((chosen, totals)) = search.found {
        for candidate in chosen {
            best.choices[candidate.layer] = Some(candidate.choice);
        }
        best.totals = totals;
    }
}

/// State of the depth-first search.
struct ExactSearch<'a> {
    layers: &'a [Vec<LayerCandidate>],
    rest: &'a [(f64, f64)],
    limits: (f64, f64),
    /// Cost of the best sizing minus the lower bound.
    gap: f64,
    nodes: usize,
    chosen: Vec<LayerCandidate>,
    found: Option<(Vec<LayerCandidate>, CostTerms)>,
}

impl ExactSearch<'_> {
    fn descend(&mut self, totals: CostTerms, extra: f64, over_bound: impl Fn(&CostTerms) -> f64 + Copy) {
        let depth = self.chosen.len();
        let (prefill, step) = self.rest[depth];
        if totals.limit_prefill + prefill > self.limits.0 || totals.limit_step + step > self.limits.1 {
            return;
        }
        let Some(options) = self.layers.get(depth) else {
            let over = over_bound(&totals);
            if over < self.gap * (1.0 - 1e-9) {
                self.gap = over;
                self.found = Some((self.chosen.clone(), totals));
            }
            return;
        };
        for candidate in options {
            if self.nodes == 0 || extra + candidate.extra >= self.gap {
                return;
            }
            self.nodes -= 1;
            self.chosen.push(*candidate);
            self.descend(totals.plus(&candidate.terms), extra + candidate.extra, over_bound);
            self.chosen.pop();
        }
    }
}
