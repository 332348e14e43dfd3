//! Sensitivity analysis: plans that keep their limits even if one input was misestimated.
//!
//! The optimum for exact inputs lies where a limit binds, and is the first to break it. A slightly more expensive plan may keep
//! its limits (AGH, arXiv 2604.07472, compares exact optima with less sensitive plans in this way).

use super::{CandidatePlan, FEW_EXPERTS, GroupSearch};
use crate::search::COST_TIE;
use remoe_plan::cost::Evaluation;
use remoe_plan::cost::stress::stressed;
use remoe_plan::model::Model;
use remoe_plan::model::sizing::Sizing;
use remoe_plan::plan::Plan;
use remoe_plan::problem::Problem;
use remoe_plan::problem::misestimated::{ErrorDirection, MisestimatedInput};
use serde::Serialize;
use std::collections::BTreeSet;

/// Maximum sum of the experts of all compared plans.
const MAX_COMPARED_EXPERTS: usize = 60_000;
/// Least and largest number of compared plans, whatever their experts.
const MIN_COMPARED_PLANS: usize = 48;
const MAX_COMPARED_PLANS: usize = 4_000;
/// Share by which a plan may cost more than the cheapest one and still be a stepping stone to others.
const MAX_STEPPING_STONE_PREMIUM: f64 = 0.3;
/// Numbers of sizes by which the main function is raised at once.
const MAIN_SIZE_STEPS: [usize; 4] = [1, 2, 4, 8];

/// Effect of misestimated inputs on a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SensitivityAnalysis {
    /// Number of problems with one misestimated input that the plan was evaluated on.
    pub tried: usize,
    /// Number of these problems in which the plan breaks a limit.
    pub broken: usize,
    /// Largest share by which the plan costs more than planned in any of these problems.
    pub worst_above: f64,
    /// Number of these problems in which the cheapest plan breaks a limit.
    pub broken_of_cheapest: usize,
    /// Share by which the plan costs more than the cheapest one.
    pub above_cheapest: f64,
    /// Effect of each misestimated input.
    pub cases: Vec<MisestimatedCase>,
}

/// Effect of one misestimated input.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MisestimatedCase {
    /// Misestimated input.
    pub figure: MisestimatedInput,
    /// Names of the limits that the plan breaks.
    pub broken: Vec<String>,
    /// Names of the limits that the cheapest plan breaks.
    pub broken_of_cheapest: Vec<String>,
    /// Share by which the plan costs more than planned.
    pub above: f64,
}

/// Returns the problems in which one input of `problem` is misestimated in the direction [`ErrorDirection::Worse`].
pub(super) fn misestimated_problems(problem: &Problem) -> Vec<(MisestimatedInput, Problem)> {
    let actual = |input: MisestimatedInput| Some((input, input.apply(problem, ErrorDirection::Worse)?));
    MisestimatedInput::ALL.into_iter().filter_map(actual).collect()
}

/// Problems with one misestimated input each, on which plans are evaluated.
pub(super) struct StressTests<'t, 'm> {
    model: &'t Model<'m>,
    misestimated: Vec<(MisestimatedInput, Model<'t>)>,
}

/// Evaluations of one plan on every problem with a misestimated input.
#[derive(Clone)]
pub(super) struct StressResult {
    evaluations: Vec<Evaluation>,
    /// Number of problems in which the plan breaks a limit.
    pub(super) broken: usize,
    /// Highest cost in dollars.
    worst_cost: f64,
}

impl<'t, 'm> StressTests<'t, 'm> {
    /// `misestimated`: the [`misestimated_problems`] of the problem of `model`.
    pub(super) fn new(model: &'t Model<'m>, misestimated: &'t [(MisestimatedInput, Problem)]) -> Self {
        let misestimated =
            misestimated.iter().map(|(input, problem)| (*input, model.beside(problem))).collect();
        Self { model, misestimated }
    }

    /// Evaluates `plan` on every problem. Returns `None` if the search ends meanwhile.
    pub(super) fn run(&self, plan: &Plan) -> Option<StressResult> {
        let factors = self.model.problem.prediction_p95.as_ref();
        let mut evaluations = Vec::with_capacity(self.misestimated.len());
        for (input, actual) in &self.misestimated {
            evaluations.push(match factors.filter(|_| *input == MisestimatedInput::Prediction) {
                // The error factors apply to the remote sets of this plan.
                Some(factors) => stressed(self.model, factors, plan).evaluate(plan),
                None => actual.evaluate(plan),
            });
            if self.model.ends() {
                return None;
            }
        }
        Some(StressResult {
            broken: evaluations.iter().filter(|evaluation| !evaluation.violations.is_empty()).count(),
            worst_cost: evaluations.iter().map(|evaluation| evaluation.total_cost).fold(0.0, f64::max),
            evaluations,
        })
    }
}

/// Costs in dollars between which a plan may be chosen.
#[derive(Clone, Copy)]
struct CostRange {
    cheapest: f64,
    dearest: f64,
}

/// A plan in the search for the least sensitive one.
struct SearchedPlan {
    planned: CandidatePlan,
    stress: StressResult,
    /// Set if its neighbours were searched.
    expanded: bool,
    /// Set if it cannot be chosen, and only leads to other plans: it is too dear, or cheaper than the cheapest plan of
    /// the search before, which is not replaced here.
    is_stepping_stone: bool,
}

impl SearchedPlan {
    /// Returns `None` if the search ends meanwhile.
    fn new(planned: CandidatePlan, tests: &StressTests<'_, '_>, costs: CostRange) -> Option<Self> {
        let is_stepping_stone =
            planned.cost() > costs.dearest || planned.cost() < costs.cheapest * (1.0 - COST_TIE);
        Some(Self { stress: tests.run(&planned.plan)?, planned, expanded: false, is_stepping_stone })
    }

    /// Reports if this plan breaks limits in fewer problems than `other`.
    ///
    /// Ties go to the lower cost if no limit is broken, else to the lower worst cost.
    fn is_less_sensitive(&self, other: &Self) -> bool {
        let is_cheaper = |own: f64, others: f64| own < others * (1.0 - COST_TIE);
        match (self.stress.broken, other.stress.broken) {
            (0, 0) => is_cheaper(self.planned.cost(), other.planned.cost()),
            (own, others) if own == others => is_cheaper(self.stress.worst_cost, other.stress.worst_cost),
            (own, others) => own < others,
        }
    }
}

impl GroupSearch<'_, '_> {
    /// Searches the least sensitive plan that costs at most the share `premium` more than `best`.
    ///
    /// It breaks limits in the fewest problems with a misestimated input; see [`SearchedPlan::is_less_sensitive`] for ties.
    /// The search moves away from the least sensitive known plans: `best` and `others`. If the search ends before `best` is
    /// evaluated, returns `best` without an analysis.
    pub(crate) fn least_sensitive(
        &self,
        best: &CandidatePlan,
        others: &[&CandidatePlan],
        premium: f64,
    ) -> (CandidatePlan, Option<SensitivityAnalysis>) {
        if self.model.ends() {
            return (best.clone(), None);
        }
        let misestimated = misestimated_problems(self.model.problem);
        let tests = StressTests::new(self.model, &misestimated);
        let Some(cheapest_result) = tests.run(&best.plan) else { return (best.clone(), None) };
        let costs = CostRange { cheapest: best.cost(), dearest: best.cost() * (1.0 + premium) };
        let max_cost = best.cost() * (1.0 + premium.max(MAX_STEPPING_STONE_PREMIUM));
        let few = self.model.experts() <= FEW_EXPERTS;
        let most = (MAX_COMPARED_EXPERTS / self.model.experts().max(1))
            .clamp(MIN_COMPARED_PLANS, MAX_COMPARED_PLANS);
        let mut open = Vec::new();
        let mut seen = BTreeSet::new();
        for known in std::iter::once(&best).chain(others).filter(|known| known.cost() <= max_cost) {
            if seen.insert(plan_key(&known.plan)) {
                open.extend(SearchedPlan::new((*known).clone(), &tests, costs));
            }
        }
        while open.iter().all(|open| open.stress.broken > 0 || open.is_stepping_stone)
            && seen.len() < most
            && !self.model.ends()
        {
            let unexpanded = (0..open.len())
                .filter(|index| !open[*index].expanded && (few || !open[*index].is_stepping_stone));
            let least_sensitive = unexpanded.reduce(|best, index| {
                let (this, other) = (&open[index], &open[best]);
                let is_better = match (this.is_stepping_stone, other.is_stepping_stone) {
                    (true, false) => false,
                    (false, true) => true,
                    _ => this.is_less_sensitive(other),
                };
                if is_better { index } else { best }
            });
            let Some(index) = least_sensitive else { break };
            open[index].expanded = true;
            let from = open[index].planned.clone();
            for plan in self.sensitivity_moves(&from.plan, most) {
                if seen.len() >= most || self.model.ends() {
                    break;
                }
                if !seen.insert(plan_key(&plan)) {
                    continue;
                }
                let planned = self.evaluate_if_better(&from.candidate, plan, None);
                let planned =
                    planned.filter(|planned| planned.cost() <= if few { max_cost } else { costs.dearest });
                open.extend(planned.and_then(|planned| SearchedPlan::new(planned, &tests, costs)));
            }
        }
        let work: usize = tests.misestimated.iter().map(|(_, actual)| actual.work_done()).sum();
        self.model.work.set(self.model.work_done() + work);
        let eligible = open.into_iter().filter(|open| !open.is_stepping_stone);
        let chosen = eligible.reduce(|best, open| if open.is_less_sensitive(&best) { open } else { best });
        let (planned, own) = match chosen {
            Some(SearchedPlan { planned, stress, .. }) => (planned, stress),
            None => (best.clone(), cheapest_result.clone()),
        };
        let limits = |evaluation: &Evaluation| {
            evaluation.violations.iter().map(|violation| violation.limit.clone()).collect()
        };
        let pairs = own.evaluations.iter().zip(&cheapest_result.evaluations);
        let cases = pairs.zip(&misestimated).map(|((own, cheapest), (input, _))| MisestimatedCase {
            figure: *input,
            broken: limits(own),
            broken_of_cheapest: limits(cheapest),
            above: own.total_cost / planned.cost() - 1.0,
        });
        let sturdiness = SensitivityAnalysis {
            tried: misestimated.len(),
            broken: own.broken,
            worst_above: own.worst_cost / planned.cost() - 1.0,
            broken_of_cheapest: cheapest_result.broken,
            above_cheapest: planned.cost() / best.cost() - 1.0,
            cases: cases.collect(),
        };
        (planned, Some(sturdiness))
    }

    /// Returns plans one move away from `plan`, the most promising first: larger functions, then all moves of groups.
    fn sensitivity_moves(&self, plan: &Plan, most: usize) -> Vec<Plan> {
        let mut plans = self.with_other_mains(plan);
        if plan.groups.is_empty() {
            plans.extend(self.layer_moves(plan));
            if plan.replicas() == 0 && self.model.problem.limits.max_groups.is_some() {
                plans.extend(self.neighbours(plan, most));
            }
            return plans;
        }
        let mut raised = plan.clone();
        for index in 0..raised.groups.len() {
            let options = self.model.remote_options(self.needed_bytes(plan, &raised.groups[index]));
            let group = &mut raised.groups[index];
            let same = |sizing: &Sizing| sizing.bytes == group.memory_bytes && sizing.stated == group.vcpus;
            let next = options.iter().position(same).and_then(|at| options.get(at + 1));
            if let Some(next) = next {
                (group.memory_bytes, group.vcpus) = (next.bytes, next.stated);
            }
        }
        plans.extend(self.with_other_mains(&raised));
        plans.push(raised);
        plans.extend(self.neighbours(plan, most));
        plans
    }

    /// Returns `plan` with larger main functions, and with the next smaller one.
    fn with_other_mains(&self, plan: &Plan) -> Vec<Plan> {
        let mains = self.model.main_options(self.model.main_needed(&plan.remote_counts()));
        let same = |sizing: &Sizing| sizing.bytes == plan.main_bytes && sizing.stated == plan.main_vcpus;
        let Some(at) = mains.iter().position(same) else { return Vec::new() };
        let below = at.checked_sub(1).into_iter();
        let beside = MAIN_SIZE_STEPS
            .into_iter()
            .map(|step| at + step)
            .chain(below)
            .filter_map(|index| mains.get(index));
        let with = |main: &Sizing| Plan { main_bytes: main.bytes, main_vcpus: main.stated, ..plan.clone() };
        beside.map(with).collect()
    }

    /// Returns `plan`, which has a function for each layer, with another size or one more replica of one layer, or of all.
    fn layer_moves(&self, plan: &Plan) -> Vec<Plan> {
        let mut plans = Vec::new();
        let mut all = [plan.clone(), plan.clone()];
        let most = self.model.problem.limits.max_replicas;
        for (layer, part) in plan.layers.iter().enumerate().filter(|(_, part)| part.replicas > 0) {
            let sizes = &self.model.remote_sizes;
            let at = sizes.iter().position(|bytes| *bytes == part.memory_bytes);
            let beside = at.into_iter().flat_map(|at| [Some(at + 1), at.checked_sub(1)]).flatten();
            for bytes in beside.filter_map(|index| sizes.get(index)) {
                let mut moved = plan.clone();
                moved.layers[layer].memory_bytes = *bytes;
                plans.push(moved);
            }
            if let Some(bytes) = at.and_then(|at| sizes.get(at + 1)) {
                all[0].layers[layer].memory_bytes = *bytes;
            }
            if part.replicas < most {
                let mut moved = plan.clone();
                moved.layers[layer].replicas += 1;
                plans.push(moved);
                all[1].layers[layer].replicas += 1;
            }
        }
        plans.extend(all);
        plans
    }
}

/// Encodes `plan` as numbers, to recognise equal plans.
fn plan_key(plan: &Plan) -> Vec<u64> {
    let stated = |vcpus: Option<f64>| vcpus.map_or(u64::MAX, f64::to_bits);
    let set = |experts: &Vec<u32>| {
        let ids = experts.iter().map(|expert| u64::from(*expert));
        ids.chain([u64::MAX]).collect::<Vec<u64>>()
    };
    let mut key = vec![plan.main_bytes.to_bits(), stated(plan.main_vcpus)];
    for layer in &plan.layers {
        key.extend([layer.memory_bytes.to_bits(), u64::from(layer.replicas)]);
        key.extend(set(&layer.remote));
    }
    for group in &plan.groups {
        key.extend([group.memory_bytes.to_bits(), stated(group.vcpus), u64::from(group.replicas)]);
        key.push(stated(group.idle_seconds));
        key.extend(group.experts.iter().flat_map(set));
    }
    key
}
