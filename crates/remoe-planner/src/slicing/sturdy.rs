//! Plans that stand figures that are wrong: the optimum for exact figures lies where a limit binds, and breaks it
//! first (AGH, arXiv 2604.07472, compares exact optima with sturdier plans in this way).

use super::{FEW_EXPERTS, FeasiblePlan, Slicing};
use crate::search::COST_TIE;
use remoe_plan::cost::Evaluation;
use remoe_plan::cost::stress::stressed;
use remoe_plan::model::Model;
use remoe_plan::model::sizing::Sizing;
use remoe_plan::plan::Plan;
use remoe_plan::problem::Problem;
use remoe_plan::problem::wrong::{Truth, WrongFigure};
use serde::Serialize;
use std::collections::BTreeSet;

/// Experts of plans that are compared, at most, and how many plans that are at least and at most.
const MOST_EXPERTS: usize = 60_000;
const COMPARED: (usize, usize) = (48, 4_000);
/// Share by which a plan may cost more than the cheapest one for its neighbours to be tried.
const STONES: f64 = 0.3;
/// How many sizes a main function may be raised at once.
const RAISES: [usize; 4] = [1, 2, 4, 8];

/// Effect of wrong figures on a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sturdiness {
    /// Problems with one figure wrong that the plan was tried on.
    pub tried: usize,
    /// Problems among these in which it breaks a limit.
    pub broken: usize,
    /// The largest share by which it costs more there than planned.
    pub worst_above: f64,
    /// The ones in which the cheapest plan breaks a limit.
    pub broken_of_cheapest: usize,
    /// Share by which the plan costs more than the cheapest one.
    pub above_cheapest: f64,
    /// Every one of those problems.
    pub cases: Vec<WrongCase>,
}

/// One figure that is wrong.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WrongCase {
    /// Which.
    pub figure: WrongFigure,
    /// The limits that the plan breaks then.
    pub broken: Vec<String>,
    /// Limits that the cheapest plan breaks then.
    pub broken_of_cheapest: Vec<String>,
    /// Share by which the plan costs more than planned.
    pub above: f64,
}

/// `problem` with one figure wrong at a time, each in the direction that hurts.
pub(super) fn wrong_problems(problem: &Problem) -> Vec<(WrongFigure, Problem)> {
    let wrong = |figure: WrongFigure| figure.of(problem, Truth::Worse).map(|wrong| (figure, wrong));
    WrongFigure::ALL.into_iter().filter_map(wrong).collect()
}

/// Problems that plans are tried on.
pub(super) struct Trials<'t, 'm> {
    model: &'t Model<'m>,
    wrong: Vec<(WrongFigure, Model<'t>)>,
}

/// A plan on every wrong problem.
#[derive(Clone)]
pub(super) struct TriedPlan {
    evaluations: Vec<Evaluation>,
    /// On how many of them it breaks a limit.
    pub(super) broken: usize,
    /// Cost in dollars at its worst.
    worst: f64,
}

impl<'t, 'm> Trials<'t, 'm> {
    /// `wrong`: those of the problem of `model`.
    pub(super) fn new(model: &'t Model<'m>, wrong: &'t [(WrongFigure, Problem)]) -> Self {
        let wrong = wrong.iter().map(|(figure, wrong)| (*figure, model.beside(wrong))).collect();
        Self { model, wrong }
    }

    /// Returns `None` if the search ends meanwhile.
    pub(super) fn of(&self, plan: &Plan) -> Option<TriedPlan> {
        let factors = self.model.problem.prediction_p95.as_ref();
        let mut evaluations = Vec::with_capacity(self.wrong.len());
        for (figure, wrong) in &self.wrong {
            evaluations.push(match factors.filter(|_| *figure == WrongFigure::Prediction) {
                // How far predictions err is known of the very sets of this plan.
                Some(factors) => stressed(self.model, factors, plan).evaluate(plan),
                None => wrong.evaluate(plan),
            });
            if self.model.ends() {
                return None;
            }
        }
        Some(TriedPlan {
            broken: evaluations.iter().filter(|evaluation| !evaluation.violations.is_empty()).count(),
            worst: evaluations.iter().map(|evaluation| evaluation.total_cost).fold(0.0, f64::max),
            evaluations,
        })
    }
}

/// A plan that may be chosen.
struct OpenPlan {
    planned: FeasiblePlan,
    tried: TriedPlan,
    /// Set if its neighbours are known.
    expanded: bool,
    /// Set if it is too dear to be chosen, and only a step on the way to others; or if it is cheaper than the plan
    /// that was found to be the cheapest, which a search for sturdiness does not replace.
    stone: bool,
}

impl OpenPlan {
    /// Returns `None` if the search ends meanwhile.
    fn new(planned: FeasiblePlan, trials: &Trials<'_, '_>, (cheapest, dearest): (f64, f64)) -> Option<Self> {
        let stone = planned.cost() > dearest || planned.cost() < cheapest * (1.0 - COST_TIE);
        Some(Self { tried: trials.of(&planned.plan)?, planned, expanded: false, stone })
    }

    /// Reports if it breaks limits less often. Of plans that never break any, the cheaper one stands better; of
    /// others that break as many, the one that is cheaper at its worst.
    fn stands_better(&self, other: &Self) -> bool {
        let cheaper = |cost: f64, than: f64| cost < than * (1.0 - COST_TIE);
        match (self.tried.broken, other.tried.broken) {
            (0, 0) => cheaper(self.planned.cost(), other.planned.cost()),
            (own, theirs) if own == theirs => cheaper(self.tried.worst, other.tried.worst),
            (own, theirs) => own < theirs,
        }
    }
}

impl Slicing<'_, '_> {
    /// The plan within `share` of the cost of `best` that breaks limits in the fewest wrong problems; of equal
    /// ones the one that costs least at its worst, or least where it breaks none. Plans are looked for move by move,
    /// from the sturdiest that are known on; `others` are known beside `best`. Where the search ends before `best` is
    /// tried, it is `best`, and how sturdy that is remains unknown.
    pub(crate) fn sturdier(
        &self,
        best: &FeasiblePlan,
        others: &[&FeasiblePlan],
        share: f64,
    ) -> (FeasiblePlan, Option<Sturdiness>) {
        if self.model.ends() {
            return (best.clone(), None);
        }
        let wrong = wrong_problems(self.model.problem);
        let trials = Trials::new(self.model, &wrong);
        let Some(of_cheapest) = trials.of(&best.plan) else { return (best.clone(), None) };
        let costs @ (_, dearest) = (best.cost(), best.cost() * (1.0 + share));
        let farthest = best.cost() * (1.0 + share.max(STONES));
        let few = self.model.experts() <= FEW_EXPERTS;
        let most = (MOST_EXPERTS / self.model.experts().max(1)).clamp(COMPARED.0, COMPARED.1);
        let mut open = Vec::new();
        let mut seen = BTreeSet::new();
        for known in std::iter::once(&best).chain(others).filter(|known| known.cost() <= farthest) {
            if seen.insert(key(&known.plan)) {
                open.extend(OpenPlan::new((*known).clone(), &trials, costs));
            }
        }
        while open.iter().all(|open| open.tried.broken > 0 || open.stone)
            && seen.len() < most
            && !self.model.ends()
        {
            let waiting =
                (0..open.len()).filter(|index| !open[*index].expanded && (few || !open[*index].stone));
            let sturdiest = waiting.reduce(|known, index| {
                let (this, other) = (&open[index], &open[known]);
                let better =
                    !this.stone && other.stone || this.stone == other.stone && this.stands_better(other);
                if better { index } else { known }
            });
            let Some(index) = sturdiest else { break };
            open[index].expanded = true;
            let from = open[index].planned.clone();
            for plan in self.steadier(&from.plan, most) {
                if seen.len() >= most || self.model.ends() {
                    break;
                }
                if !seen.insert(key(&plan)) {
                    continue;
                }
                let planned = self.judged(&from.candidate, plan, None);
                let planned =
                    planned.filter(|planned| planned.cost() <= if few { farthest } else { dearest });
                open.extend(planned.and_then(|planned| OpenPlan::new(planned, &trials, costs)));
            }
        }
        let tried: usize = trials.wrong.iter().map(|(_, wrong)| wrong.work_done()).sum();
        self.model.work.set(self.model.work_done() + tried);
        let may_be = open.into_iter().filter(|open| !open.stone);
        let chosen = may_be.reduce(|known, open| if open.stands_better(&known) { open } else { known });
        let (planned, own) = match chosen {
            Some(OpenPlan { planned, tried, .. }) => (planned, tried),
            None => (best.clone(), of_cheapest.clone()),
        };
        let limits = |evaluation: &Evaluation| {
            evaluation.violations.iter().map(|violation| violation.limit.clone()).collect()
        };
        let pairs = own.evaluations.iter().zip(&of_cheapest.evaluations);
        let cases = pairs.zip(&wrong).map(|((own, cheapest), (figure, _))| WrongCase {
            figure: *figure,
            broken: limits(own),
            broken_of_cheapest: limits(cheapest),
            above: own.total_cost / planned.cost() - 1.0,
        });
        let sturdiness = Sturdiness {
            tried: wrong.len(),
            broken: own.broken,
            worst_above: own.worst / planned.cost() - 1.0,
            broken_of_cheapest: of_cheapest.broken,
            above_cheapest: planned.cost() / best.cost() - 1.0,
            cases: cases.collect(),
        };
        (planned, Some(sturdiness))
    }

    /// Plans a move away from `plan`, those first that help most often: larger functions, then all moves of groups.
    fn steadier(&self, plan: &Plan, most: usize) -> Vec<Plan> {
        let mut plans = self.raised_mains(plan);
        if plan.groups.is_empty() {
            plans.extend(self.layer_moves(plan));
            if plan.replicas() == 0 && self.model.problem.limits.max_groups.is_some() {
                plans.extend(self.neighbours(plan, most));
            }
            return plans;
        }
        let mut raised = plan.clone();
        for index in 0..raised.groups.len() {
            let options = self.model.remote_options(self.needed(plan, &raised.groups[index]));
            let group = &mut raised.groups[index];
            let same = |sizing: &Sizing| sizing.bytes == group.memory_bytes && sizing.stated == group.vcpus;
            let next = options.iter().position(same).and_then(|at| options.get(at + 1));
            if let Some(next) = next {
                (group.memory_bytes, group.vcpus) = (next.bytes, next.stated);
            }
        }
        plans.extend(self.raised_mains(&raised));
        plans.push(raised);
        plans.extend(self.neighbours(plan, most));
        plans
    }

    /// `plan` with other main functions.
    fn raised_mains(&self, plan: &Plan) -> Vec<Plan> {
        let mains = self.model.main_options(self.model.main_needed(&plan.remote_counts()));
        let same = |sizing: &Sizing| sizing.bytes == plan.main_bytes && sizing.stated == plan.main_vcpus;
        let Some(at) = mains.iter().position(same) else { return Vec::new() };
        let below = at.checked_sub(1).into_iter();
        let beside = RAISES.into_iter().map(|by| at + by).chain(below).filter_map(|index| mains.get(index));
        let with = |main: &Sizing| Plan { main_bytes: main.bytes, main_vcpus: main.stated, ..plan.clone() };
        beside.map(with).collect()
    }

    /// `plan`, which has a function per layer, with another size or a function more of one layer, or of all.
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

/// A plan as numbers, to know it again.
fn key(plan: &Plan) -> Vec<u64> {
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
