//! Explanation of a plan: the limit that a cheaper neighbour breaks, the next best plan, and the cost of the paper's form.

use crate::preallocation::WorstCase;
use crate::search::candidate::{CandidateSides, LayerSide};
use crate::search::continuous::{Continuous, continuous};
use crate::search::improve::local_times;
use crate::search::options::{CostTerms, OptionChoice};
use crate::search::selection::{Candidate, Selection};
use crate::search::{COST_TIE, EvaluatedPlan, Search};
use crate::slicing::CandidatePlan;
use remoe_plan::cost::baselines::Baselines;
use remoe_plan::cost::{Evaluation, TPOT_SLACK, TTFT_SLACK};
use remoe_plan::plan::{LayerPlan, Plan, whole_bytes};
use serde::Serialize;

/// Explanation of the choice of a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explanation {
    /// How the number of remote experts per layer was chosen; absent for a previous plan that is kept.
    pub selection: Option<Selection>,
    /// Remote ratio times the experts of the largest layer, or the ratio whose bytes were the budget across layers.
    pub i: Option<usize>,
    /// Share of each baseline's cost that the plan saves.
    pub saving: Saving,
    /// The limit that a cheaper neighbouring plan would break; absent if every neighbour costs more.
    pub binding: Option<Binding>,
    /// The cheapest plan that was found with other remote counts or another main size.
    pub next_best: Option<Alternative>,
    /// Result of the paper's continuous form for the same remote sets and main size.
    pub continuous: Option<Continuous>,
}

/// Shares of the baselines' cost that the plan saves; negative if it costs more.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Saving {
    /// Against all experts in the main function.
    pub mix: Option<f64>,
    /// Against everything on CPUs.
    pub cpu: Option<f64>,
    /// Against everything on the GPU.
    pub gpu: Option<f64>,
    /// Against ideal offloading.
    pub fetch: Option<f64>,
}

/// Binding limit: a cheaper neighbouring plan breaks it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Binding {
    /// Name of the limit, as in [`crate::Violation`].
    pub limit: String,
    /// Value of the plan.
    pub value: f64,
    /// Allowed value.
    pub allowed: f64,
    /// Dollars that the neighbour would save.
    pub would_save: f64,
}

/// A plan that was not chosen.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Alternative {
    /// How its remote counts were chosen.
    pub selection: Selection,
    /// Ratio of remote experts, times the experts of the largest layer.
    pub i: usize,
    /// Memory of the main function in bytes.
    #[serde(serialize_with = "whole_bytes")]
    pub main_bytes: f64,
    /// Replicas in all layers.
    pub replicas: u64,
    /// Cost in dollars.
    pub total_cost: f64,
    /// Share by which its cost is above that of the chosen plan.
    pub above: f64,
}

impl Explanation {
    /// Explains a kept previous plan, with the `best` new one as the alternative.
    pub(crate) fn of_kept(old: &Evaluation, baselines: &Baselines, best: Option<&CandidatePlan>) -> Self {
        Self {
            selection: None,
            i: None,
            saving: saving(old.total_cost, baselines),
            binding: None,
            next_best: best.map(|best| best.alternative(old.total_cost)),
            continuous: None,
        }
    }

    /// Explains a plan with groups, with the best one `per_layer` as the alternative.
    pub(crate) fn of_groups(
        best: &CandidatePlan,
        baselines: &Baselines,
        per_layer: Option<&CandidatePlan>,
    ) -> Self {
        let cost = best.cost();
        Self {
            selection: Some(best.candidate.selection),
            i: Some(best.candidate.i),
            saving: saving(cost, baselines),
            binding: None,
            next_best: per_layer.filter(|other| other.plan != best.plan).map(|other| other.alternative(cost)),
            continuous: None,
        }
    }
}

impl CandidatePlan {
    /// Describes this plan as the alternative to one of `cost`.
    fn alternative(&self, cost: f64) -> Alternative {
        alternative(&self.candidate, &self.plan, &self.evaluation, cost)
    }
}

/// Explains `best`, or the plan of the paper's form if that is cheaper. Returns the explained plan.
pub(crate) fn explain<'m>(
    search: &Search<'m>,
    mut best: EvaluatedPlan,
    candidates: &[Candidate],
    baselines: &Baselines,
) -> (EvaluatedPlan, Explanation) {
    let mut report = None;
    let sides = CandidateSides::new(search.model, search.tables, &best.candidate, search.factors);
    let mut binding = None;
    if let Some(mut sides) = sides {
        let locals = local_times(&sides, best.main);
        if best.plan.replicas() > 0 {
            let (mut form, sizing) = continuous(&mut sides, best.main, &locals);
            let found = sizing
                .and_then(|sizing| search.found(&sides, &best.candidate, best.main, &sizing, f64::INFINITY));
            form.total_cost = found.as_ref().map(|found| found.evaluation.total_cost);
            if let Some(found) = found.filter(|found| found.beats(&best)) {
                best = found;
            }
            form.above = form.total_cost.map(|cost| cost / best.evaluation.total_cost - 1.0);
            report = Some(form);
        }
        binding = Neighbours { search, best: &best, sides: &mut sides }.binding();
    }
    let next_best = next_best(search, &best, candidates);
    let explanation = Explanation {
        selection: Some(best.candidate.selection),
        i: Some(best.candidate.i),
        saving: saving(best.evaluation.total_cost, baselines),
        binding,
        next_best: next_best.map(|found| {
            alternative(&found.candidate, &found.plan, &found.evaluation, best.evaluation.total_cost)
        }),
        continuous: report,
    };
    (best, explanation)
}

fn saving(cost: f64, baselines: &Baselines) -> Saving {
    let against = |baseline: &Option<crate::Baseline>| {
        baseline
            .as_ref()
            .filter(|baseline| baseline.total_cost > 0.0)
            .map(|other| 1.0 - cost / other.total_cost)
    };
    Saving {
        mix: against(&baselines.mix),
        cpu: against(&baselines.cpu),
        gpu: against(&baselines.gpu),
        fetch: against(&baselines.fetch),
    }
}

fn alternative(candidate: &Candidate, plan: &Plan, evaluation: &Evaluation, cost: f64) -> Alternative {
    Alternative {
        selection: candidate.selection,
        i: candidate.i,
        main_bytes: plan.main_bytes,
        replicas: plan.replicas(),
        total_cost: evaluation.total_cost,
        above: evaluation.total_cost / cost - 1.0,
    }
}

/// Returns the cheapest neighbour of the plan.
///
/// Neighbours have another main size, one step more or less of remote experts, or no remote experts.
fn next_best(search: &Search<'_>, best: &EvaluatedPlan, candidates: &[Candidate]) -> Option<EvaluatedPlan> {
    let passes = |candidate: &Candidate| {
        candidate.selection != Selection::AcrossLayers
            || WorstCase::new(search.model, candidate.counts.clone()).passes()
    };
    let distance = |candidate: &Candidate| candidate.i.abs_diff(best.candidate.i);
    let near = |candidate: &&Candidate| {
        candidate.selection == best.candidate.selection && distance(candidate) <= 1 || candidate.i == 0
    };
    let sizes = search.model.main_sizes.len();
    let mut found: Option<EvaluatedPlan> = None;
    // A mixed candidate is not among `candidates`.
    let own = (best.candidate.selection == Selection::Mixed).then_some(&best.candidate);
    let others = candidates.iter().filter(near).filter(|candidate| passes(candidate));
    for candidate in others.chain(own) {
        let Some(mut sides) = CandidateSides::new(search.model, search.tables, candidate, search.factors)
        else {
            continue;
        };
        let own = *candidate == best.candidate;
        let mut mains = vec![best.main.saturating_sub(1), best.main, best.main + 1, sides.first_main];
        mains.sort_unstable();
        mains.dedup();
        mains.retain(|main| (sides.first_main..sizes).contains(main) && !(own && *main == best.main));
        for main in mains {
            let other = search.alternative(&mut sides, candidate, main);
            if let Some(other) = other
                && found.as_ref().is_none_or(|found| other.beats(found))
            {
                found = Some(other);
            }
        }
    }
    found
}

/// Plans that are one step away from `best`.
struct Neighbours<'a, 'm> {
    search: &'a Search<'m>,
    best: &'a EvaluatedPlan,
    sides: &'a mut CandidateSides<'m>,
}

impl Neighbours<'_, '_> {
    /// Returns the broken limit of the neighbour that would save the most.
    fn binding(mut self) -> Option<Binding> {
        let mut found: Option<Binding> = None;
        let mut consider = |binding: Binding| {
            let least = COST_TIE * self.best.evaluation.total_cost;
            if binding.would_save > found.as_ref().map_or(least, |found| found.would_save) {
                found = Some(binding);
            }
        };
        self.smaller_main().into_iter().for_each(&mut consider);
        self.other_options().into_iter().for_each(&mut consider);
        self.smaller_memory().into_iter().for_each(&mut consider);
        found
    }

    /// Returns the limit that a main function one size smaller breaks.
    fn smaller_main(&self) -> Option<Binding> {
        let smaller = self.best.main.checked_sub(1)?;
        let plan = Plan { main_bytes: self.search.model.main_sizes[smaller], ..self.best.plan.clone() };
        let evaluation = self.search.model.evaluate(&plan);
        let violations = (self.search.violations)(&plan, &evaluation);
        let would_save = self.best.evaluation.total_cost - evaluation.total_cost;
        let limit = violations.into_iter().find(|violation| violation.limit != "spec_main")?.limit;
        let (value, allowed) = match limit.as_str() {
            "main" => (self.needed(), self.best.plan.main_bytes),
            _ => self.time(&limit),
        };
        Some(Binding { limit, value, allowed, would_save })
    }

    fn needed(&self) -> f64 {
        self.search.model.main_needed(&self.best.candidate.counts)
    }

    fn time(&self, limit: &str) -> (f64, f64) {
        let (model, evaluation) = (self.search.model, &self.best.evaluation);
        match limit {
            "tpot" => (evaluation.tpot_seconds, model.tpot_limit),
            _ => (evaluation.ttft_seconds, model.ttft_limit),
        }
    }

    /// Returns the latency limits that another size or number of replicas of one layer breaks.
    fn other_options(&mut self) -> Vec<Binding> {
        let main = self.best.main;
        let locals = local_times(self.sides, main);
        let mut own: Vec<Option<CostTerms>> = Vec::new();
        let mut totals = CostTerms::default();
        for (layer, local) in locals.iter().enumerate() {
            let local_terms = self.sides.local_terms(layer, *local);
            let terms = match (&mut self.sides.layers[layer], self.best.choices[layer]) {
                (LayerSide::Remote(options), Some(choice)) => options.terms(choice, *local),
                _ => None,
            };
            totals = totals.plus(&terms.unwrap_or(local_terms));
            own.push(terms);
        }
        let cost = self.sides.cost(main, &totals);
        let (prefill, step) = self.sides.limits();
        let mut found = Vec::new();
        for (layer, local) in locals.iter().enumerate() {
            let (Some(now), Some(choice)) = (own[layer], self.best.choices[layer]) else { continue };
            for neighbour in option_neighbours(choice) {
                let LayerSide::Remote(options) = &mut self.sides.layers[layer] else { continue };
                let Some(terms) = options.terms(neighbour, *local) else { continue };
                let other = totals.minus(&now).plus(&terms);
                let limit = match (
                    other.limit_prefill > prefill + TTFT_SLACK,
                    other.limit_step > step + TPOT_SLACK,
                ) {
                    (true, _) => "ttft",
                    (_, true) => "tpot",
                    _ => continue,
                };
                let (value, allowed) = self.time(limit);
                let would_save = cost - self.sides.cost(main, &other);
                found.push(Binding { limit: limit.to_owned(), value, allowed, would_save });
            }
        }
        found
    }

    /// Returns the memory limits that a smaller size of one layer breaks.
    fn smaller_memory(&self) -> Vec<Binding> {
        let model = self.search.model;
        let mut found = Vec::new();
        for (layer, side) in self.sides.layers.iter().enumerate() {
            let (LayerSide::Remote(options), Some(choice)) = (side, self.best.choices[layer]) else {
                continue;
            };
            let Some(smaller) = choice.memory.checked_sub(1).filter(|smaller| *smaller < options.first)
            else {
                continue;
            };
            let part = &self.best.plan.layers[layer];
            let tight = LayerPlan { memory_bytes: model.remote_sizes[smaller], ..part.clone() };
            let would_save = self.best.evaluation.total_cost
                - model.cost_with_layer(&self.best.plan, &self.best.evaluation, layer, &tight);
            let value = self.best.evaluation.layers[layer].needed_bytes;
            let limit = format!("mem{layer}");
            found.push(Binding { limit, value, allowed: part.memory_bytes, would_save });
        }
        found
    }
}

fn option_neighbours(choice: OptionChoice) -> impl Iterator<Item = OptionChoice> {
    let with_memory = |memory| OptionChoice { memory, ..choice };
    let with_replicas = |replicas| OptionChoice { replicas, ..choice };
    let smaller = choice.memory.checked_sub(1).map(with_memory);
    let fewer = choice.replicas.checked_sub(1).filter(|replicas| *replicas > 0).map(with_replicas);
    [smaller, Some(with_memory(choice.memory + 1)), fewer, Some(choice.raised())].into_iter().flatten()
}
