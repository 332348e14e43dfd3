//! From a dual solution to the best sizing within the limits: repair, single and pair moves, and an
//! exact search among what the bound leaves.

use crate::search::candidate::{CandidateSides, LayerSide};
use crate::search::dual::{Dual, Sizing};
use crate::search::options::{Local, OptionChoice, Terms};
use remoe_plan::budget::Meter;

/// Up to this many layers the best sizing is found, beyond them one within [`GAP`] of the bound will do.
const FEW_LAYERS: usize = 4;
const GAP: f64 = 1e-6;
/// Options that pair moves are tried over, at most.
const PAIR_OPTIONS: usize = 600;
/// Passes over all pairs, at most; two or three are the rule.
const PASSES: usize = 20;
/// Nodes of the exact search.
const NODES: usize = 20_000;

/// An option of a layer, with what it costs more than the layer's cheapest at the multipliers.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    layer: usize,
    choice: OptionChoice,
    terms: Terms,
    extra: f64,
}

/// How much work a sizing is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Moves among the options that the dual has met.
    Quick,
    /// Then among all that the bound leaves, and an exact search.
    Full,
}

/// A sizing within the limits, and whether there is a cheaper one to look for.
pub(crate) struct Improved {
    pub(crate) sizing: Sizing,
    pub(crate) open: bool,
}

/// The cheapest sizing that is found within the limits, given the solved dual of a linear cost.
pub(crate) fn improve(mut dual: Dual<'_, '_>, effort: Effort) -> Option<Improved> {
    let locals = locals(dual.sides, dual.main);
    if dual.feasible.is_none() {
        let start = dual.relaxed.clone()?;
        let repaired = repair(&mut dual, &locals, start).or_else(|| fastest(&mut dual, &locals))?;
        dual.offer(&repaired);
    }
    let mut best = dual.feasible.clone()?;
    let prices = dual.prices;
    let cost = |totals: &Terms| totals.priced(prices);
    let enough = dual.bound.abs() * if locals.len() <= FEW_LAYERS { 1e-13 } else { GAP };
    let gap = |best: &Sizing, dual: &Dual<'_, '_>| cost(&best.totals) - dual.bound;
    if gap(&best, &dual) > enough {
        // What was cheapest at some multipliers comes first: it closes most of the gap, and a small
        // gap leaves few options to look at.
        let seen = seen(&dual);
        moves(dual.sides, &locals, &seen, &mut best, cost);
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

/// The options that the dual has met.
fn seen(dual: &Dual<'_, '_>) -> Vec<Candidate> {
    let prices = dual.prices.with(dual.multipliers);
    let layers = dual.seen.iter().enumerate().flat_map(|(layer, options)| {
        let extra = move |terms: &Terms| terms.priced(prices);
        let least = options.iter().map(|(_, terms)| extra(terms)).fold(f64::INFINITY, f64::min);
        options.iter().map(move |(choice, terms)| Candidate {
            layer,
            choice: *choice,
            terms: *terms,
            extra: extra(terms) - least,
        })
    });
    layers.collect()
}

pub(crate) fn locals(sides: &CandidateSides<'_>, main: usize) -> Vec<Local> {
    (0..sides.layers.len()).map(|layer| sides.local(layer, main)).collect()
}

/// Terms of the layer's option in `sizing`.
fn terms_in(sides: &mut CandidateSides<'_>, locals: &[Local], sizing: &Sizing, layer: usize) -> Terms {
    let local = locals[layer];
    let local_terms = sides.local_terms(layer, local);
    match (&mut sides.layers[layer], sizing.choices[layer]) {
        (LayerSide::Remote(options), Some(choice)) => options.terms(choice, local).unwrap_or(local_terms),
        _ => local_terms,
    }
}

/// Every option of every layer that a sizing cheaper than the best one may have: what it costs more
/// than the layer's cheapest, at the multipliers, is at most the gap between bound and best. Without
/// those that another one beats in every term.
fn core(dual: &mut Dual<'_, '_>, locals: &[Local], gap: f64) -> Vec<Candidate> {
    let prices = dual.prices.with(dual.multipliers);
    let linear = dual.prices;
    let mut core = Vec::new();
    for (layer, local) in locals.iter().enumerate() {
        let LayerSide::Remote(options) = &mut dual.sides.layers[layer] else { continue };
        let Some((_, _, least)) = options.cheapest(prices, *local) else { continue };
        let found = options.up_to(|terms| terms.priced(prices), *local, least + gap + least.abs() * 1e-12);
        let mut kept: Vec<Candidate> = Vec::new();
        let mut sorted: Vec<Candidate> = found
            .into_iter()
            .map(|(choice, terms)| Candidate { layer, choice, terms, extra: terms.priced(prices) - least })
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

/// Exchanges single options for those that reduce the missed limits the most per dollar, until both
/// limits hold.
fn repair(dual: &mut Dual<'_, '_>, locals: &[Local], mut sizing: Sizing) -> Option<Sizing> {
    let (prefill, step) = dual.sides.limits();
    let prices = dual.prices;
    let missed = |totals: &Terms| {
        let prefill_missed = (totals.limit_prefill - prefill).max(0.0) / prefill.abs().max(1e-9);
        let step_missed = if step.is_finite() { (totals.limit_step - step).max(0.0) / step } else { 0.0 };
        prefill_missed + step_missed
    };
    while !dual.keeps_limits(&sizing.totals) {
        let now = missed(&sizing.totals);
        let mut best: Option<(f64, usize, OptionChoice, Terms)> = None;
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

/// The largest memory everywhere, with the replicas that are quickest there, if that is within the
/// limits.
fn fastest(dual: &mut Dual<'_, '_>, locals: &[Local]) -> Option<Sizing> {
    let memory = dual.sides.model.remote_sizes.len() - 1;
    let mut sizing = Sizing { choices: vec![None; locals.len()], totals: Terms::default() };
    for (layer, local) in locals.iter().enumerate() {
        let mut terms = dual.sides.local_terms(layer, *local);
        if let LayerSide::Remote(options) = &mut dual.sides.layers[layer] {
            let choices = (1..=options.replicas).map(|replicas| OptionChoice { memory, replicas });
            let choices: Vec<(OptionChoice, Terms)> = choices
                .filter_map(|choice| options.terms(choice, *local).map(|terms| (choice, terms)))
                .collect();
            let quickest = choices.iter().min_by(|a, b| a.1.limit_prefill.total_cmp(&b.1.limit_prefill))?;
            sizing.choices[layer] = Some(quickest.0);
            terms = quickest.1;
        }
        sizing.totals = sizing.totals.plus(&terms);
    }
    dual.keeps_limits(&sizing.totals).then_some(sizing)
}

/// Exchanges one option, then two, for as long as the cost falls within the limits.
fn moves(
    sides: &mut CandidateSides<'_>,
    locals: &[Local],
    core: &[Candidate],
    best: &mut Sizing,
    cost: impl Fn(&Terms) -> f64,
) {
    let (prefill, step) = sides.limits();
    let current = (0..locals.len()).map(|layer| terms_in(sides, locals, best, layer)).collect();
    let meter = &sides.model.meter;
    let mut state = Moves { best, current, cost, prefill, step, meter };
    let mut for_pairs: Vec<Candidate> = core.to_vec();
    for_pairs.sort_by(|a, b| a.extra.total_cmp(&b.extra));
    for_pairs.truncate(PAIR_OPTIONS);
    for _ in 0..PASSES {
        while !meter.ends() && state.best_single(core) {}
        if !state.pairs(&for_pairs) {
            return;
        }
    }
}

struct Moves<'a, F> {
    best: &'a mut Sizing,
    /// Terms of the layers in `best`.
    current: Vec<Terms>,
    cost: F,
    prefill: f64,
    step: f64,
    meter: &'a Meter<'a>,
}

impl<F: Fn(&Terms) -> f64> Moves<'_, F> {
    /// The cost below which a move is worth making.
    fn worth(&self) -> f64 {
        let now = (self.cost)(&self.best.totals);
        now - now.abs() * 1e-13
    }

    fn with(&self, totals: &Terms, candidate: &Candidate) -> Terms {
        totals.minus(&self.current[candidate.layer]).plus(&candidate.terms)
    }

    fn allows(&self, totals: &Terms) -> bool {
        totals.limit_prefill <= self.prefill && totals.limit_step <= self.step
    }

    fn make(&mut self, candidate: &Candidate) {
        self.best.totals = self.with(&self.best.totals, candidate);
        self.best.choices[candidate.layer] = Some(candidate.choice);
        self.current[candidate.layer] = candidate.terms;
    }

    /// Makes the single exchange that saves the most.
    fn best_single(&mut self, options: &[Candidate]) -> bool {
        let mut found = (self.worth(), None);
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

    /// Goes over all pairs once and makes every exchange that saves anything.
    fn pairs(&mut self, options: &[Candidate]) -> bool {
        let mut any = false;
        for (index, first) in options.iter().enumerate() {
            self.meter.count(index);
            if self.meter.ends() {
                return false;
            }
            let mut worth = self.worth();
            let mut with_first = self.with(&self.best.totals, first);
            for second in options[..index].iter().filter(|second| second.layer != first.layer) {
                let totals = self.with(&with_first, second);
                if (self.cost)(&totals) < worth && self.allows(&totals) {
                    self.make(first);
                    self.make(second);
                    any = true;
                    worth = self.worth();
                    with_first = self.best.totals;
                }
            }
        }
        any
    }
}

/// Single and pair moves over all options for a cost that need not be linear.
pub(crate) fn improve_any(
    sides: &mut CandidateSides<'_>,
    locals: &[Local],
    best: &mut Sizing,
    cost: impl Fn(&Terms) -> f64,
) {
    let mut all = Vec::new();
    for (layer, local) in locals.iter().enumerate() {
        let LayerSide::Remote(options) = &mut sides.layers[layer] else { continue };
        for (choice, terms) in options.up_to(|_| 0.0, *local, 0.0) {
            let totals = best.totals.plus(&terms);
            all.push(Candidate { layer, choice, terms, extra: cost(&totals) });
        }
    }
    moves(sides, locals, &all, best, cost);
}

/// Depth-first search over the core, within a number of nodes: what costs more than the gap at the
/// multipliers cannot be better, nor can what leaves the limits out of reach.
fn exhaust(dual: &Dual<'_, '_>, core: &[Candidate], locals: &[Local], best: &mut Sizing, gap: f64) {
    let mut layers: Vec<Vec<Candidate>> =
        core.chunk_by(|a, b| a.layer == b.layer).map(<[_]>::to_vec).collect();
    for options in &mut layers {
        options.sort_by(|a, b| a.extra.total_cmp(&b.extra));
    }
    let mut fixed = Terms::default();
    for (layer, local) in locals.iter().enumerate() {
        if matches!(dual.sides.layers[layer], LayerSide::Local) {
            fixed = fixed.plus(&dual.sides.local_terms(layer, *local));
        }
    }
    let remote = dual.sides.layers.iter().filter(|side| matches!(side, LayerSide::Remote(_))).count();
    if layers.len() != remote {
        return;
    }
    // What the layers from each depth on need at least.
    let mut rest = vec![(0.0, 0.0)];
    for options in layers.iter().rev() {
        let least =
            |of: fn(&Terms) -> f64| options.iter().map(|o| of(&o.terms)).fold(f64::INFINITY, f64::min);
        let (prefill, step) = rest[rest.len() - 1];
        rest.push((prefill + least(|terms| terms.limit_prefill), step + least(|terms| terms.limit_step)));
    }
    rest.reverse();
    let limits = dual.sides.limits();
    let mut search =
        Search { layers: &layers, rest: &rest, limits, gap, nodes: NODES, chosen: Vec::new(), found: None };
    search.descend(fixed, 0.0, |totals| totals.priced(dual.prices) - dual.bound);
    if let Some((chosen, totals)) = search.found {
        for candidate in chosen {
            best.choices[candidate.layer] = Some(candidate.choice);
        }
        best.totals = totals;
    }
}

struct Search<'a> {
    layers: &'a [Vec<Candidate>],
    rest: &'a [(f64, f64)],
    limits: (f64, f64),
    /// How much the best sizing costs more than the bound.
    gap: f64,
    nodes: usize,
    chosen: Vec<Candidate>,
    found: Option<(Vec<Candidate>, Terms)>,
}

impl Search<'_> {
    fn descend(&mut self, totals: Terms, extra: f64, over_bound: impl Fn(&Terms) -> f64 + Copy) {
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
