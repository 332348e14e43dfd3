//! Search for the cheapest plan of every form: with a function for each layer, with groups, and all-local.

use crate::preallocation::WalkStep;
use crate::remote::Remote;
use crate::search::candidate::{CandidateSides, Multipliers};
use crate::search::mixed::MixedSearch;
use crate::search::selection::{
    Candidate, Selection, across_layers, by_ratio, other_combinations, whole_layers,
};
use crate::search::tables::LayerTable;
use crate::search::{COST_TIE, Counters, EvaluatedPlan, Search};
use crate::slicing::{
    ArrangementFamily, CandidatePlan, GroupSearch, LayerExpertTimes, NonExpertTimes, SensitivityAnalysis,
    SlicingEffort, max_evaluations,
};
use remoe_plan::cost::stress::all_violations;
use remoe_plan::cost::{Evaluation, Violation};
use remoe_plan::model::Model;
use remoe_plan::plan::{LayerPlan, Plan};
use remoe_plan::problem::ErrorFactor;
use std::cell::OnceCell;

/// Effort of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Everything.
    Full,
    /// A tenth of the ratios: for comparisons of many problems.
    Coarse,
}

/// Number of experts, over all layers, above which arrangements of groups that scale to zero are searched coarsely.
const MANY_EXPERTS: usize = 1000;
/// Maximum number of ratios that a coarse search tries.
const COARSE_RATIOS: usize = 9;

/// Solved pairs of candidate and main size for a strategy that is only evaluated for comparison.
const COMPARISON_PAIRS: usize = 12;
/// Largest number of combinations of remote counts that are all tried.
const MAX_ENUMERATED_COUNTS: usize = 512;

/// Inputs of a search.
pub(crate) struct SearchInputs<'s, 'm> {
    pub(crate) model: &'s Model<'m>,
    pub(crate) tables: &'s [LayerTable],
    /// Times of every expert, once they are computed.
    pub(crate) expert_times: &'s OnceCell<Option<Vec<LayerExpertTimes>>>,
    /// Tables of a plan whose layers have other expert sets than the least used ones, once there is such a plan.
    pub(crate) own_sets: &'s OnceCell<Vec<LayerTable>>,
    /// Prediction errors that plans must tolerate; absent unless plans must be robust.
    pub(crate) factors: Option<&'s [ErrorFactor]>,
    /// Returns the limits that a plan breaks.
    pub(crate) violations: &'s dyn Fn(&Plan, &Evaluation) -> Vec<Violation>,
    pub(crate) remote: Remote,
    /// Candidates whose worst case passes, for plans with a function for each layer.
    pub(crate) candidates: &'s [Candidate],
}

/// The cheapest feasible plan of every form.
pub(crate) struct BestPlans<'s> {
    /// Best plan of the search over single layers. It can be explained, since `search` knows its neighbours.
    pub(crate) found: Option<EvaluatedPlan>,
    pub(crate) search: Option<Search<'s>>,
    /// With a function for each layer.
    pub(crate) per_layer: Option<CandidatePlan>,
    /// With groups, if the problem allows them.
    pub(crate) sliced: Option<CandidatePlan>,
    /// With all experts local.
    pub(crate) mix: Option<CandidatePlan>,
    pub(crate) counters: Counters,
    /// Set if only plans near the previous one were searched.
    pub(crate) is_near: bool,
    /// Lower bound in dollars of the cost of every plan of the considered arrangements.
    pub(crate) bound: Option<f64>,
}

impl BestPlans<'_> {
    /// Returns no plans.
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

    /// Returns the cheapest plan; see [`CandidatePlan::beats`] for ties.
    pub(crate) fn best(&self) -> Option<&CandidatePlan> {
        let all = [&self.per_layer, &self.sliced, &self.mix].into_iter().flatten();
        all.reduce(|best, other| if other.beats(best) { other } else { best })
    }
}

/// Reports if plans with a function for each layer are searched in the paper's form.
///
/// Then vCPUs come with memory, and the cost is that of one request.
pub(super) fn is_paper_form(model: &Model<'_>) -> bool {
    let specs = &model.problem.specs;
    specs.main_vcpus.is_none() && specs.remote_vcpus.is_none() && model.problem.arrivals.is_none()
}

impl<'s, 'm: 's> SearchInputs<'s, 'm> {
    /// Searches the cheapest plan of every form.
    pub(crate) fn plans(&'s self, effort: Effort) -> BestPlans<'s> {
        let mut plans = BestPlans::none();
        if is_paper_form(self.model) {
            let mut search = self.new_search();
            let (local, remote): (Vec<Candidate>, Vec<Candidate>) =
                self.candidates.iter().cloned().partition(is_local);
            // Under reserved billing slices are cheaper than functions for single layers, of which one computes at a time.
            // Then a rough cost of the latter is enough.
            if !self.may_prefer_per_layer() || effort == Effort::Coarse {
                search.max_solved = COMPARISON_PAIRS;
            }
            search.run(thin_out(remote, effort));
            search.max_solved = usize::MAX;
            if effort == Effort::Full && self.remote != Remote::Never && self.may_prefer_per_layer() {
                self.mixed_search().search_counts(&mut search, false);
                search.solve_open_pairs();
            }
            let remote_best = search.best.take();
            search.run(local);
            let mix = search.best.take();
            let mixed = (effort == Effort::Full).then(|| self.mixed(remote_best.as_ref())).flatten();
            let (remote_best, mixed_search) = match mixed {
                Some((found, search)) => (Some(found), Some(search)),
                None => (remote_best, None),
            };
            plans.per_layer = remote_best.as_ref().map(CandidatePlan::from);
            plans.mix = mix.as_ref().map(CandidatePlan::from);
            plans.counters = search.counters;
            plans.search = Some(search);
            plans.found = match (mix, remote_best) {
                (Some(mix), Some(remote)) if !remote.beats(&mix) => Some(mix),
                (mix, None) => mix,
                (_, remote) => {
                    plans.search = mixed_search.or(plans.search);
                    remote
                }
            };
        } else {
            plans.per_layer = self.sliced(ArrangementFamily::PerLayer, effort, &mut plans.counters);
            plans.mix = self.mix(&mut plans.counters);
        }
        if self.model.problem.limits.max_groups.is_some() {
            plans.sliced = self.sliced(ArrangementFamily::Sliced, effort, &mut plans.counters);
            // Moves also start from the plan with a function for each layer.
            let start = plans.per_layer.as_ref().filter(|_| effort == Effort::Full);
            let moved = start.and_then(|planned| self.new_group_search().improved_per_layer(planned));
            // And from the all-local plan: no arrangement has a single remote expert.
            let start = plans.mix.as_ref().filter(|_| effort == Effort::Full && self.remote != Remote::Never);
            let single = start.and_then(|planned| self.new_group_search().improved_per_layer(planned));
            let single = single.filter(|planned| planned.plan.replicas() > 0);
            let all = [plans.sliced.take(), moved, single].into_iter().flatten();
            plans.sliced = all.reduce(|best, other| if other.beats(&best) { other } else { best });
            let sliced = plans.sliced.take();
            let mut counters = Counters::default();
            let coarse = self.model.experts() > MANY_EXPERTS;
            let groups_effort = if coarse { Effort::Coarse } else { effort };
            let search_at_price = |inputs: &SearchInputs<'_, '_>| {
                inputs.arranged(ArrangementFamily::Sliced, groups_effort, &mut counters)
            };
            plans.sliced = self.with_sleeping_groups(sliced, plans.mix.as_ref(), effort, search_at_price);
            plans.counters.add(counters);
        }
        plans
    }

    pub(super) fn mixed_search(&'s self) -> MixedSearch<'s, 's> {
        let Self { model, tables, remote, factors, .. } = *self;
        MixedSearch { model, tables, remote, factors }
    }

    /// Searches the cheapest plan with a function for each layer and any expert sets, if it beats `known`.
    ///
    /// Returns it with the search that knows its neighbours.
    fn mixed(&'s self, known: Option<&EvaluatedPlan>) -> Option<(EvaluatedPlan, Search<'s>)> {
        if self.remote == Remote::Never {
            return None;
        }
        let Self { model, tables, factors, .. } = *self;
        let cutoff = known.map_or(f64::INFINITY, |known| known.evaluation.total_cost * (1.0 - COST_TIE));
        let picked = self.mixed_search().cheapest(cutoff)?;
        let counts: Vec<usize> = picked.sets.iter().map(Vec::len).collect();
        let table = |(layer, set): (usize, &Vec<u32>)| tables[layer].with_first(model, layer, set);
        self.own_sets.set(picked.sets.iter().enumerate().map(table).collect()).ok()?;
        let search = Search { tables: self.own_sets.get()?, ..self.new_search() };
        let i = counts.iter().copied().max().unwrap_or(0);
        let candidate = Candidate { selection: Selection::Mixed, i, counts };
        let sides = CandidateSides::new(model, search.tables, &candidate, factors)?;
        let found =
            search.found(&sides, &candidate, picked.main_size_index, &picked.sizing, f64::INFINITY)?;
        known.is_none_or(|known| found.beats(known)).then_some((found, search))
    }

    /// Searches the cheapest plan of `family`, in the form of groups.
    pub(super) fn arranged(
        &self,
        family: ArrangementFamily,
        effort: Effort,
        counters: &mut Counters,
    ) -> Option<CandidatePlan> {
        let mut choices = self.remote_counts();
        if effort == Effort::Full && self.remote == Remote::Auto {
            let known: std::collections::BTreeSet<Vec<usize>> =
                choices.iter().map(|choice| choice.counts.clone()).collect();
            let whole = whole_layers(self.model).into_iter();
            choices.extend(whole.filter(|whole| !known.contains(&whole.counts)));
        }
        self.group_search(choices, family, effort, counters)
    }

    /// Searches the cheapest plan of `family`, in the form of layers if possible.
    fn sliced(
        &self,
        family: ArrangementFamily,
        effort: Effort,
        counters: &mut Counters,
    ) -> Option<CandidatePlan> {
        let best = self.arranged(family, effort, counters)?;
        Some(self.in_layers(&best).unwrap_or(best))
    }

    /// Returns all candidates of remote counts for plans with groups.
    fn remote_counts(&self) -> Vec<Candidate> {
        let mut all = by_ratio(self.model);
        if self.remote != Remote::Never {
            let across = across_layers(self.model, &all);
            all.extend(across);
            let rest = other_combinations(self.model, &all, MAX_ENUMERATED_COUNTS);
            all.extend(rest);
        }
        all.retain(|candidate| self.remote.allows(self.model, &candidate.counts) && !is_local(candidate));
        all
    }

    /// Returns the candidates of remote counts for a coarse search.
    pub(crate) fn coarse_choices(&self) -> Vec<Candidate> {
        thin_out(self.remote_counts(), Effort::Coarse)
    }

    /// Reports if plans with a function for each layer may be cheaper than plans with groups.
    ///
    /// Under reserved billing they are not: all functions are billed, but one computes at a time.
    pub(crate) fn may_prefer_per_layer(&self) -> bool {
        !(self.model.is_reserved() && self.model.problem.limits.max_groups.is_some())
    }

    /// Searches a plan with remote experts that costs less than `cutoff` among `choices` and the most promising arrangements.
    ///
    /// Returns the cheapest plan of the explored ones.
    pub(crate) fn search_below(
        &self,
        cutoff: f64,
        choices: &[Candidate],
    ) -> Option<(ArrangementFamily, CandidatePlan)> {
        let mut best: Option<(ArrangementFamily, CandidatePlan)> = None;
        let mut take = |family: ArrangementFamily, found: Option<CandidatePlan>| {
            let Some(found) = found.filter(|found| found.cost() < cutoff && found.plan.replicas() > 0) else {
                return;
            };
            if best.as_ref().is_none_or(|(_, known)| found.beats(known)) {
                best = Some((family, found));
            }
        };
        let sliced = |family: ArrangementFamily| {
            let mut group_search = self.new_group_search();
            group_search.cutoff = cutoff;
            group_search.run(choices, family, SlicingEffort::Probe);
            group_search.best
        };
        if self.model.problem.limits.max_groups.is_some() {
            take(ArrangementFamily::Sliced, sliced(ArrangementFamily::Sliced));
        }
        if self.may_prefer_per_layer() && is_paper_form(self.model) {
            let mut search = self.new_search();
            search.max_solved = COMPARISON_PAIRS;
            search.cutoff = cutoff;
            let remote = self.candidates.iter().filter(|candidate| !is_local(candidate));
            search.run(thin_out(remote.cloned().collect(), Effort::Coarse));
            take(ArrangementFamily::PerLayer, search.best.as_ref().map(CandidatePlan::from));
        } else if self.may_prefer_per_layer() {
            take(ArrangementFamily::PerLayer, sliced(ArrangementFamily::PerLayer));
        }
        best
    }

    /// Evaluates `planned` on this model, with sizes that hold its experts. Returns `None` if it breaks a limit.
    pub(crate) fn carry_over(&self, planned: &CandidatePlan) -> Option<CandidatePlan> {
        let group_search = self.new_group_search();
        let plan = match planned.plan.groups.is_empty() {
            true => planned.plan.clone(),
            false => group_search.with_fitting_sizes(planned.plan.clone())?,
        };
        group_search.evaluate_if_better(&planned.candidate, plan, None)
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
            max_solved: usize::MAX,
            cutoff: f64::INFINITY,
            counters: Counters::default(),
        }
    }

    /// Searches the cheapest all-local plan, if it is allowed.
    pub(super) fn mix(&self, counters: &mut Counters) -> Option<CandidatePlan> {
        let mut all = by_ratio(self.model);
        all.retain(|candidate| self.remote.allows(self.model, &candidate.counts) && is_local(candidate));
        let best = self.group_search(all, ArrangementFamily::PerLayer, Effort::Coarse, counters)?;
        Some(self.in_layers(&best).unwrap_or(best))
    }

    /// Searches the plan near `best` that is least sensitive to misestimated inputs, within the share `premium` of its cost.
    pub(crate) fn least_sensitive(
        &self,
        best: &CandidatePlan,
        plans: &BestPlans<'_>,
        premium: f64,
    ) -> (CandidatePlan, Option<SensitivityAnalysis>) {
        let others: Vec<&CandidatePlan> =
            [&plans.per_layer, &plans.sliced, &plans.mix].into_iter().flatten().collect();
        self.new_group_search().least_sensitive(best, &others, premium)
    }

    pub(super) fn new_group_search(&self) -> GroupSearch<'_, 'm> {
        GroupSearch {
            model: self.model,
            tables: self.tables,
            factors: self.factors,
            violations: self.violations,
            remote: self.remote,
            idle_window: None,
            best: None,
            infeasible: Vec::new(),
            cutoff: f64::INFINITY,
            nonexpert: NonExpertTimes::new(self.model),
            expert_times: self.expert_times,
            counters: Counters::default(),
        }
    }

    /// Returns the maximum number of evaluations of moves from a known plan.
    pub(super) fn max_evaluations(&self) -> usize {
        max_evaluations(self.model.experts())
    }

    fn group_search(
        &self,
        candidates: Vec<Candidate>,
        family: ArrangementFamily,
        effort: Effort,
        counters: &mut Counters,
    ) -> Option<CandidatePlan> {
        let mut group_search = self.new_group_search();
        let slicing_effort = if effort == Effort::Full { SlicingEffort::Full } else { SlicingEffort::Coarse };
        group_search.run(&thin_out(candidates, effort), family, slicing_effort);
        counters.add(group_search.counters);
        group_search.best
    }

    /// Rewrites a plan whose groups each host a single layer in the form of layers. Returns `None` for other plans.
    pub(super) fn in_layers(&self, planned: &CandidatePlan) -> Option<CandidatePlan> {
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
        // The cost model shares the machine's cores among groups, but not among functions of layers: the same plan looks
        // cheaper in the form of layers.
        let shared = self.model.problem.shared_cores.is_some();
        let is_same_cost = cost <= known * (1.0 + COST_TIE) && !(shared && cost < known * (1.0 - COST_TIE));
        let is_feasible = is_same_cost && (self.violations)(&plan, &evaluation).is_empty();
        is_feasible.then(|| CandidatePlan { candidate: planned.candidate.clone(), plan, evaluation })
    }
}

/// Reports if all experts are local.
fn is_local(candidate: &Candidate) -> bool {
    candidate.counts.iter().all(|count| *count == 0)
}

impl From<&EvaluatedPlan> for CandidatePlan {
    fn from(found: &EvaluatedPlan) -> Self {
        Self {
            candidate: found.candidate.clone(),
            plan: found.plan.clone(),
            evaluation: found.evaluation.clone(),
        }
    }
}

/// Returns as many of `candidates` as `effort` allows, evenly spread. The all-local one stays.
fn thin_out(candidates: Vec<Candidate>, effort: Effort) -> Vec<Candidate> {
    if effort == Effort::Full || candidates.len() <= COARSE_RATIOS {
        return candidates;
    }
    let most = candidates.iter().map(|candidate| candidate.i).max().unwrap_or(0).max(1);
    let step = most.div_ceil(COARSE_RATIOS - 1).max(1);
    candidates.into_iter().filter(|candidate| candidate.i % step == 0 || candidate.i == most).collect()
}

/// Returns the limits that a plan breaks; with `factors` also if the prediction errs by these factors.
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

/// Returns all candidates of remote counts for plans with a function for each layer.
///
/// These are the ratios that pass the worst case, the all-local candidate, and the candidates across layers. The worst
/// case of the latter is checked later, and only for good ones.
pub(crate) fn candidates(model: &Model<'_>, remote: Remote, walk: &[WalkStep]) -> Vec<Candidate> {
    let mut all = by_ratio(model);
    let across = if remote == Remote::Never { Vec::new() } else { across_layers(model, &all) };
    let passes = |i: usize| i == 0 || walk.iter().any(|step| step.i == i && step.passes());
    all.retain(|candidate| passes(candidate.i));
    all.extend(across);
    all.retain(|candidate| remote.allows(model, &candidate.counts));
    all
}
