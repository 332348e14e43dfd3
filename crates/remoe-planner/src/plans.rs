//! The cheapest plan of every form that a problem asks for.

use crate::preallocation::WalkStep;
use crate::remote::Remote;
use crate::search::candidate::{CandidateSides, Multipliers};
use crate::search::mixed::Mixed;
use crate::search::selection::{Candidate, Selection, across_layers, by_ratio, others, whole_layers};
use crate::search::tables::LayerTable;
use crate::search::{COST_TIE, Counters, EvaluatedPlan, Search};
use crate::slicing::{
    ArrangementFamily, FeasiblePlan, LayerTerms, Moves, RestOfLayers, Slicing, Sturdiness, most_moves,
};
use remoe_plan::cost::stress::all_violations;
use remoe_plan::cost::{Evaluation, Violation};
use remoe_plan::model::Model;
use remoe_plan::plan::{LayerPlan, Plan};
use remoe_plan::problem::ErrorFactor;
use std::cell::OnceCell;

/// How much is searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Everything.
    Full,
    /// A tenth of the ratios: for the question who is cheapest, asked of many problems.
    Coarse,
}

/// Beyond so many experts in all, arrangements of groups that end by themselves are searched coarsely.
const MANY_EXPERTS: usize = 1000;
/// Ratios that a coarse search tries, at most.
const COARSE_RATIOS: usize = 9;

/// Pairs of candidate and main size that are solved to know what a way costs that is not chosen.
const PAIRS_OF_A_RIVAL: usize = 12;
/// Up to this many choices of how many experts of each layer are remote are all tried.
const FEW_CHOICES: usize = 512;

/// Inputs of a search.
pub(crate) struct Inputs<'s, 'm> {
    pub(crate) model: &'s Model<'m>,
    pub(crate) tables: &'s [LayerTable],
    /// Terms of every expert, once they are worked out.
    pub(crate) terms: &'s OnceCell<Option<Vec<LayerTerms>>>,
    /// Layers by sets of their own, once a plan has such sets.
    pub(crate) own_sets: &'s OnceCell<Vec<LayerTable>>,
    pub(crate) factors: Option<&'s [ErrorFactor]>,
    pub(crate) violations: &'s dyn Fn(&Plan, &Evaluation) -> Vec<Violation>,
    pub(crate) remote: Remote,
    /// Candidates whose worst case passes, for functions of single layers.
    pub(crate) candidates: &'s [Candidate],
}

/// The cheapest plans that keep every limit.
pub(crate) struct Plans<'s> {
    /// Best of the search over single layers, with or without remote experts: its neighbours are known.
    pub(crate) found: Option<EvaluatedPlan>,
    pub(crate) search: Option<Search<'s>>,
    /// With a function per layer.
    pub(crate) per_layer: Option<FeasiblePlan>,
    /// With groups; none where the problem does not allow them.
    pub(crate) sliced: Option<FeasiblePlan>,
    /// With nothing remote.
    pub(crate) mix: Option<FeasiblePlan>,
    pub(crate) counters: Counters,
    /// Only plans near the previous one were looked at.
    pub(crate) is_near: bool,
    /// No plan of the arrangements that were looked at costs less, in dollars.
    pub(crate) bound: Option<f64>,
}

impl Plans<'_> {
    /// Nothing with remote experts.
    pub(crate) fn none() -> Self {
        Self {
            found: None,
            search: None,
            per_layer: None,
            sliced: None,
            mix: None,
            counters: Counters::default(),
            is_near: false,
            bound: None,
        }
    }

    /// The cheapest of them; of equal ones the one with fewer functions, then with less memory.
    pub(crate) fn best(&self) -> Option<&FeasiblePlan> {
        let all = [&self.per_layer, &self.sliced, &self.mix].into_iter().flatten();
        all.reduce(|best, other| if other.beats(best) { other } else { best })
    }
}

/// Reports if a function per layer is searched in the paper's form, where sizes are memory and cost is that of
/// one request.
pub(super) fn is_paper_form(model: &Model<'_>) -> bool {
    let specs = &model.problem.specs;
    specs.main_vcpus.is_none() && specs.remote_vcpus.is_none() && model.problem.arrivals.is_none()
}

impl<'s, 'm: 's> Inputs<'s, 'm> {
    pub(crate) fn plans(&'s self, effort: Effort) -> Plans<'s> {
        let mut plans = Plans::none();
        if is_paper_form(self.model) {
            let mut search = self.new_search();
            let (local, remote): (Vec<Candidate>, Vec<Candidate>) =
                self.candidates.iter().cloned().partition(is_local);
            // Under reserved billing slices are cheaper than functions of which one works at a time; how
            // much dearer those are need not be known to the last ratio.
            if !self.has_rival_layers() || effort == Effort::Coarse {
                search.most_solved = PAIRS_OF_A_RIVAL;
            }
            search.run(thinned(remote, effort));
            search.most_solved = usize::MAX;
            if effort == Effort::Full && self.remote != Remote::Never && self.has_rival_layers() {
                self.mixing().spread(&mut search, false);
                search.close();
            }
            let away = search.best.take();
            search.run(local);
            let mix = search.best.take();
            let mixed = (effort == Effort::Full).then(|| self.mixed(away.as_ref())).flatten();
            let (away, of_away) = match mixed {
                Some((found, of_mixed)) => (Some(found), Some(of_mixed)),
                None => (away, None),
            };
            plans.per_layer = away.as_ref().map(FeasiblePlan::from);
            plans.mix = mix.as_ref().map(FeasiblePlan::from);
            plans.counters = search.counters;
            plans.search = Some(search);
            plans.found = match (mix, away) {
                (Some(mix), Some(away)) if !away.beats(&mix) => Some(mix),
                (mix, None) => mix,
                (_, away) => {
                    plans.search = of_away.or(plans.search);
                    away
                }
            };
        } else {
            plans.per_layer = self.sliced(ArrangementFamily::PerLayer, effort, &mut plans.counters);
            plans.mix = self.mix(&mut plans.counters);
        }
        if self.model.problem.limits.max_groups.is_some() {
            plans.sliced = self.sliced(ArrangementFamily::Sliced, effort, &mut plans.counters);
            // A function per layer is a start as good as any.
            let start = plans.per_layer.as_ref().filter(|_| effort == Effort::Full);
            let moved = start.and_then(|planned| self.new_slicing().moved_on(planned));
            // So is one expert away from nothing remote, which no arrangement of slices is.
            let start = plans.mix.as_ref().filter(|_| effort == Effort::Full && self.remote != Remote::Never);
            let single = start.and_then(|planned| self.new_slicing().moved_on(planned));
            let single = single.filter(|planned| planned.plan.replicas() > 0);
            let all = [plans.sliced.take(), moved, single].into_iter().flatten();
            plans.sliced = all.reduce(|best, other| if other.beats(&best) { other } else { best });
            let sliced = plans.sliced.take();
            let mut counters = Counters::default();
            let coarse = self.model.experts() > MANY_EXPERTS;
            let paid_effort = if coarse { Effort::Coarse } else { effort };
            let paid = |inputs: &Inputs<'_, '_>| {
                inputs.arranged(ArrangementFamily::Sliced, paid_effort, &mut counters)
            };
            plans.sliced = self.with_sleepers(sliced, plans.mix.as_ref(), effort, paid);
            plans.counters.add(counters);
        }
        plans
    }

    pub(super) fn mixing(&'s self) -> Mixed<'s, 's> {
        let Self { model, tables, remote, factors, .. } = *self;
        Mixed { model, tables, remote, factors }
    }

    /// The cheapest plan with a function per layer whose layers differ freely, if it is cheaper than `known`, and what
    /// knows its neighbours.
    fn mixed(&'s self, known: Option<&EvaluatedPlan>) -> Option<(EvaluatedPlan, Search<'s>)> {
        if self.remote == Remote::Never {
            return None;
        }
        let Self { model, tables, factors, .. } = *self;
        let cutoff = known.map_or(f64::INFINITY, |known| known.evaluation.total_cost * (1.0 - COST_TIE));
        let picked = self.mixing().cheapest(cutoff)?;
        let counts: Vec<usize> = picked.sets.iter().map(Vec::len).collect();
        let led = |(layer, set): (usize, &Vec<u32>)| tables[layer].led_by(model, layer, set);
        self.own_sets.set(picked.sets.iter().enumerate().map(led).collect()).ok()?;
        let search = Search { tables: self.own_sets.get()?, ..self.new_search() };
        let i = counts.iter().copied().max().unwrap_or(0);
        let candidate = Candidate { selection: Selection::Mixed, i, counts };
        let sides = CandidateSides::new(model, search.tables, &candidate, factors)?;
        let found = search.found(&sides, &candidate, picked.main, &picked.sizing, f64::INFINITY)?;
        known.is_none_or(|known| found.beats(known)).then_some((found, search))
    }

    /// The cheapest plan of `family` as far as `effort` finds it, in groups.
    pub(super) fn arranged(
        &self,
        family: ArrangementFamily,
        effort: Effort,
        counters: &mut Counters,
    ) -> Option<FeasiblePlan> {
        let mut choices = self.choices();
        if effort == Effort::Full && self.remote == Remote::Auto {
            let known: std::collections::BTreeSet<Vec<usize>> =
                choices.iter().map(|choice| choice.counts.clone()).collect();
            let whole = whole_layers(self.model).into_iter();
            choices.extend(whole.filter(|whole| !known.contains(&whole.counts)));
        }
        self.slicing(choices, family, effort, counters)
    }

    fn sliced(
        &self,
        family: ArrangementFamily,
        effort: Effort,
        counters: &mut Counters,
    ) -> Option<FeasiblePlan> {
        let best = self.arranged(family, effort, counters)?;
        Some(self.in_layers(&best).unwrap_or(best))
    }

    /// Every choice of remote experts for plans in groups.
    fn choices(&self) -> Vec<Candidate> {
        let mut all = by_ratio(self.model);
        if self.remote != Remote::Never {
            let across = across_layers(self.model, &all);
            all.extend(across);
            let rest = others(self.model, &all, FEW_CHOICES);
            all.extend(rest);
        }
        all.retain(|candidate| self.remote.allows(self.model, &candidate.counts) && !is_local(candidate));
        all
    }

    /// Candidates that a coarse search takes.
    pub(crate) fn coarse_choices(&self) -> Vec<Candidate> {
        thinned(self.choices(), Effort::Coarse)
    }

    /// Reports if plans with a function per layer may be cheaper than those with groups. Under reserved billing they
    /// are not: of functions that are paid for, one works at a time.
    pub(crate) fn has_rival_layers(&self) -> bool {
        !(self.model.is_reserved() && self.model.problem.limits.max_groups.is_some())
    }

    /// A plan with remote experts that costs less than `cutoff`, as far as `choices` and the most promising
    /// arrangements have one: the cheapest of those that were looked into.
    pub(crate) fn below(
        &self,
        cutoff: f64,
        choices: &[Candidate],
    ) -> Option<(ArrangementFamily, FeasiblePlan)> {
        let mut best: Option<(ArrangementFamily, FeasiblePlan)> = None;
        let mut take = |family: ArrangementFamily, found: Option<FeasiblePlan>| {
            let Some(found) = found.filter(|found| found.cost() < cutoff && found.plan.replicas() > 0) else {
                return;
            };
            if best.as_ref().is_none_or(|(_, known)| found.beats(known)) {
                best = Some((family, found));
            }
        };
        let sliced = |family: ArrangementFamily| {
            let mut slicing = self.new_slicing();
            slicing.cutoff = cutoff;
            slicing.run(choices, family, Moves::Few);
            slicing.best
        };
        if self.model.problem.limits.max_groups.is_some() {
            take(ArrangementFamily::Sliced, sliced(ArrangementFamily::Sliced));
        }
        if self.has_rival_layers() && is_paper_form(self.model) {
            let mut search = self.new_search();
            search.most_solved = PAIRS_OF_A_RIVAL;
            search.cutoff = cutoff;
            let remote = self.candidates.iter().filter(|candidate| !is_local(candidate));
            search.run(thinned(remote.cloned().collect(), Effort::Coarse));
            take(ArrangementFamily::PerLayer, search.best.as_ref().map(FeasiblePlan::from));
        } else if self.has_rival_layers() {
            take(ArrangementFamily::PerLayer, sliced(ArrangementFamily::PerLayer));
        }
        best
    }

    /// `planned` on this model: in groups with sizes that hold what is there. None where it does not keep every limit.
    pub(crate) fn carried(&self, planned: &FeasiblePlan) -> Option<FeasiblePlan> {
        let slicing = self.new_slicing();
        let plan = match planned.plan.groups.is_empty() {
            true => planned.plan.clone(),
            false => slicing.sized(planned.plan.clone())?,
        };
        slicing.judged(&planned.candidate, plan, None)
    }

    pub(super) fn new_search(&self) -> Search<'_> {
        Search {
            model: self.model,
            tables: self.tables,
            factors: self.factors,
            violations: self.violations,
            best: None,
            multipliers: Multipliers::default(),
            open: Vec::new(),
            most_solved: usize::MAX,
            cutoff: f64::INFINITY,
            counters: Counters::default(),
        }
    }

    /// Nothing remote, where that is allowed.
    pub(super) fn mix(&self, counters: &mut Counters) -> Option<FeasiblePlan> {
        let mut all = by_ratio(self.model);
        all.retain(|candidate| self.remote.allows(self.model, &candidate.counts) && is_local(candidate));
        let best = self.slicing(all, ArrangementFamily::PerLayer, Effort::Coarse, counters)?;
        Some(self.in_layers(&best).unwrap_or(best))
    }

    /// The plan near `best` that stands wrong figures best, within `share` of its cost.
    pub(crate) fn sturdier(
        &self,
        best: &FeasiblePlan,
        plans: &Plans<'_>,
        share: f64,
    ) -> (FeasiblePlan, Option<Sturdiness>) {
        let others: Vec<&FeasiblePlan> =
            [&plans.per_layer, &plans.sliced, &plans.mix].into_iter().flatten().collect();
        self.new_slicing().sturdier(best, &others, share)
    }

    pub(super) fn new_slicing(&self) -> Slicing<'_, 'm> {
        Slicing {
            model: self.model,
            tables: self.tables,
            factors: self.factors,
            violations: self.violations,
            remote: self.remote,
            window: None,
            best: None,
            late: Vec::new(),
            cutoff: f64::INFINITY,
            rest: RestOfLayers::new(self.model),
            terms: self.terms,
            counters: Counters::default(),
        }
    }

    /// Evaluations of moves from a plan that is known already, at most.
    pub(super) fn moves(&self) -> usize {
        most_moves(self.model.experts())
    }

    fn slicing(
        &self,
        candidates: Vec<Candidate>,
        family: ArrangementFamily,
        effort: Effort,
        counters: &mut Counters,
    ) -> Option<FeasiblePlan> {
        let mut slicing = self.new_slicing();
        let moves = if effort == Effort::Full { Moves::All } else { Moves::None };
        slicing.run(&thinned(candidates, effort), family, moves);
        counters.add(slicing.counters);
        slicing.best
    }

    /// Rewrites the plan as a function per layer, where its groups are that.
    pub(super) fn in_layers(&self, planned: &FeasiblePlan) -> Option<FeasiblePlan> {
        let mut layers = vec![LayerPlan::default(); self.model.layers.len()];
        if planned.plan.main_vcpus.is_some() {
            return None;
        }
        for group in &planned.plan.groups {
            let mut own = (0..layers.len()).filter(|layer| !group.experts[*layer].is_empty());
            let (Some(layer), None) = (own.next(), own.next()) else { return None };
            if group.vcpus.is_some() || group.idle_seconds.is_some() || layers[layer].replicas > 0 {
                return None;
            }
            layers[layer] = LayerPlan {
                remote: group.experts[layer].clone(),
                memory_bytes: group.memory_bytes,
                replicas: group.replicas,
            };
        }
        let plan = Plan::of_layers(planned.plan.main_bytes, layers);
        let evaluation = self.model.evaluate(&plan);
        let (cost, known) = (evaluation.total_cost, planned.cost());
        // Functions per layer are taken to have the machine for themselves, groups are not: the same plan looks
        // cheaper.
        let shared = self.model.problem.shared_cores.is_some();
        let same = cost <= known * (1.0 + COST_TIE) && !(shared && cost < known * (1.0 - COST_TIE));
        let stands = same && (self.violations)(&plan, &evaluation).is_empty();
        stands.then(|| FeasiblePlan { candidate: planned.candidate.clone(), plan, evaluation })
    }
}

/// Reports if nothing is remote.
fn is_local(candidate: &Candidate) -> bool {
    candidate.counts.iter().all(|count| *count == 0)
}

impl From<&EvaluatedPlan> for FeasiblePlan {
    fn from(found: &EvaluatedPlan) -> Self {
        Self {
            candidate: found.candidate.clone(),
            plan: found.plan.clone(),
            evaluation: found.evaluation.clone(),
        }
    }
}

/// As many of `candidates` as `effort` allows, evenly; nothing remote is always among them where it was.
fn thinned(candidates: Vec<Candidate>, effort: Effort) -> Vec<Candidate> {
    if effort == Effort::Full || candidates.len() <= COARSE_RATIOS {
        return candidates;
    }
    let most = candidates.iter().map(|candidate| candidate.i).max().unwrap_or(0).max(1);
    let step = most.div_ceil(COARSE_RATIOS - 1).max(1);
    candidates.into_iter().filter(|candidate| candidate.i % step == 0 || candidate.i == most).collect()
}

/// The limits that a plan does not keep; with `factors` also when the prediction errs by them.
pub(crate) fn violations_of(
    model: &Model<'_>,
    factors: Option<&[ErrorFactor]>,
    plan: &Plan,
    evaluation: &Evaluation,
) -> Vec<Violation> {
    match factors {
        Some(factors) => all_violations(model, factors, plan, evaluation),
        None => evaluation.violations.clone(),
    }
}

/// Every choice of remote counts that the search may take: ratios that pass the worst case, nothing
/// remote, and the choices across layers, whose worst case is only checked where they are good.
pub(crate) fn candidates(model: &Model<'_>, remote: Remote, walk: &[WalkStep]) -> Vec<Candidate> {
    let mut all = by_ratio(model);
    let across = if remote == Remote::Never { Vec::new() } else { across_layers(model, &all) };
    let passes = |i: usize| i == 0 || walk.iter().any(|step| step.i == i && step.passes());
    all.retain(|candidate| passes(candidate.i));
    all.extend(across);
    all.retain(|candidate| remote.allows(model, &candidate.counts));
    all
}
