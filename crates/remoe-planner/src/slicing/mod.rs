//! Search over groups: how many experts are remote, over how many groups they are sliced, and how large the main
//! function and the groups are.
//!
//! All groups of an arrangement have the same vCPUs and nearly the same work, so that an arrangement has two decision
//! variables: the size of the main function and that of the groups. Branch and bound explores arrangements in the order
//! of their lower bounds. It skips a rectangle of sizes if its bound is too high, or if its fastest corner breaks a
//! latency limit. A local search that moves single groups and experts follows (`improve.rs`).

mod arrangement;
mod arrangement_times;
pub(crate) mod assignment;
mod bulk_moves;
mod cold_groups;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]
mod exhaustive;
mod expert_times;
mod explore;
mod improve;
mod layer_cache;
mod local_search;
mod nonexpert_times;
mod reassign;
mod sensitivity;

use crate::remote::Remote;
use crate::search::selection::Candidate;
use crate::search::tables::LayerTable;
use crate::search::{COST_TIE, Counters};
use arrangement::GroupArrangement;
use arrangement_times::SizePair;
use assignment::{GroupLayout, assign_to_groups};
pub(crate) use expert_times::LayerExpertTimes;
pub(crate) use improve::MoveDepth;
pub(crate) use local_search::LocalSearchResult;
pub(crate) use nonexpert_times::NonExpertTimes;
use remoe_plan::cost::running::Bill;
use remoe_plan::cost::{Evaluation, LimitViolations, Violation};
use remoe_plan::model::Model;
use remoe_plan::model::sizing::Sizing;
use remoe_plan::plan::{Group, LayerPlan, Plan};
use remoe_plan::problem::ErrorFactor;
pub use sensitivity::{MisestimatedCase, SensitivityAnalysis};
use std::cell::OnceCell;
use std::collections::BTreeSet;

/// Pairs of work and share: after this work, an arrangement is explored only if its bound is at most the best cost times
/// (1 - share).
///
/// Work is counted in experts of explored arrangements. A negative share explores arrangements that cost more than the best
/// plan, since moves may improve them. A share of 1 ends the search.
const REQUIRED_SAVING: [(usize, f64); 5] =
    [(0, -0.3), (5_000, 1e-4), (300_000, 1e-3), (600_000, 5e-3), (1_200_000, 1.0)];
/// Maximum replicas of a group in arrangements. Moves may add more.
const MAX_ARRANGEMENT_REPLICAS: u32 = 4;

/// Maximum work of moves, in evaluated experts.
const MAX_MOVE_WORK: usize = 300_000;
/// Largest number of experts, over all layers, for which every expert may be moved and infeasible plans are repaired.
const FEW_EXPERTS: usize = 32;
/// Number of experts, over all layers, above which sizes must save [`SIZE_SAVING`] to be tried.
const MANY_EXPERTS: usize = 500;
/// Share of the best cost that sizes must save above [`MANY_EXPERTS`].
const SIZE_SAVING: f64 = 1e-3;
/// Arrangements that [`SlicingEffort::Coarse`] explores.
const COARSE_ARRANGEMENTS: usize = 8;
/// Arrangements that [`SlicingEffort::Probe`] explores.
const PROBE_ARRANGEMENTS: usize = 3;
/// Maximum number of plans that moves start from.
const MAX_STARTS: usize = 24;
/// Maximum number of plans that moves start from with up to [`FEW_EXPERTS`] experts.
const MAX_STARTS_WITH_FEW_EXPERTS: usize = 100;
/// Maximum number of evaluations of moves.
const MAX_EVALUATIONS: usize = 150_000;

/// Family of arrangements that a search covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ArrangementFamily {
    /// One remote function for each layer.
    PerLayer,
    /// Groups that each host a slice of every layer, or of every layer of a block.
    Sliced,
}

/// Effort of a search over groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlicingEffort {
    /// All promising arrangements, then moves from the best of them.
    Full,
    /// The most promising arrangements, without moves.
    Coarse,
    /// Very few arrangements, without moves: is there a plan that is cheap enough?
    Probe,
}

impl SlicingEffort {
    /// Returns the maximum number of arrangements that are explored.
    fn max_arrangements(self) -> usize {
        match self {
            Self::Full => usize::MAX,
            Self::Coarse => COARSE_ARRANGEMENTS,
            Self::Probe => PROBE_ARRANGEMENTS,
        }
    }
}

/// A plan of a candidate, with its evaluation.
#[derive(Debug, Clone)]
pub(crate) struct CandidatePlan {
    pub(crate) candidate: Candidate,
    pub(crate) plan: Plan,
    pub(crate) evaluation: Evaluation,
}

impl CandidatePlan {
    pub(crate) fn cost(&self) -> f64 {
        self.evaluation.total_cost
    }

    /// Reports if this plan is cheaper than `other`, or as cheap with fewer functions, then with less memory.
    pub(crate) fn beats(&self, other: &Self) -> bool {
        let (own, others) = (self.cost(), other.cost());
        if (own - others).abs() > COST_TIE * others.abs() {
            return own < others;
        }
        let rank = |planned: &Self| (planned.plan.replicas(), planned.plan.bytes());
        rank(self) < rank(other)
    }
}

/// Search over groups: its inputs, and the best plan so far.
pub(crate) struct GroupSearch<'s, 'm> {
    pub(crate) model: &'s Model<'m>,
    pub(crate) tables: &'s [LayerTable],
    /// Prediction errors that plans must tolerate, for each layer; absent unless plans must be robust.
    pub(crate) factors: Option<&'s [ErrorFactor]>,
    /// Returns the limits that a plan breaks, given its evaluation.
    pub(crate) violations: &'s dyn Fn(&Plan, &Evaluation) -> Vec<Violation>,
    /// Policy on remote experts.
    pub(crate) remote: Remote,
    /// Idle window that moves may give to groups, in seconds; absent if groups must not scale to zero.
    pub(crate) idle_window: Option<f64>,
    pub(crate) best: Option<CandidatePlan>,
    /// Plans that break limits, with their excess ([`Self::limit_excess`]): starts for repairs if no plan is feasible.
    pub(crate) infeasible: Vec<(f64, CandidatePlan)>,
    /// Cost above which no plan is considered, in dollars.
    pub(crate) cutoff: f64,
    /// Times of the non-expert part, which are the same for every arrangement.
    pub(crate) nonexpert: NonExpertTimes,
    /// Times of every expert, once they are computed; `None` inside if they are too many to keep.
    pub(crate) expert_times: &'s OnceCell<Option<Vec<LayerExpertTimes>>>,
    pub(crate) counters: Counters,
}

impl GroupSearch<'_, '_> {
    /// Searches arrangements of `family` for `candidates`, as far as `effort` and the cost limit allow, and sets [`Self::best`].
    pub(crate) fn run(&mut self, candidates: &[Candidate], family: ArrangementFamily, effort: SlicingEffort) {
        let with_moves = effort == SlicingEffort::Full;
        let mut arrangements: Vec<GroupArrangement<'_>> = Vec::new();
        for candidate in candidates {
            if self.model.ends() {
                return;
            }
            self.counters.candidates += 1;
            let is_local = candidate.counts.iter().all(|count| *count == 0);
            let layouts =
                if is_local { vec![GroupLayout { blocks: 1, slices: 1 }] } else { self.layouts(family) };
            let max_replicas = if is_local {
                1
            } else {
                self.model.problem.limits.max_replicas.min(MAX_ARRANGEMENT_REPLICAS)
            };
            let layer_bounds = self.lower_bounds(candidate);
            for layout in layouts {
                for replicas in 1..=max_replicas {
                    let bound = layer_bounds
                        .as_ref()
                        .map_or(f64::INFINITY, |bounds| self.bound(candidate, bounds, layout, replicas));
                    self.counters.bounds += 1;
                    arrangements.push(GroupArrangement { candidate, layout, replicas, bound });
                }
            }
        }
        // An infinite bound means that some limit must break. Such arrangements are explored only for small models that have
        // no others, since moves may repair them.
        let experts = self.model.experts();
        let keep_infeasible = experts <= FEW_EXPERTS
            && arrangements.iter().all(|arrangement| arrangement.bound == f64::INFINITY);
        arrangements.retain(|arrangement| keep_infeasible || arrangement.bound < f64::INFINITY);
        self.counters.pairs += arrangements.len();
        arrangements.sort_by(|a, b| a.bound.total_cmp(&b.bound));
        let mut starts = Vec::new();
        for (explored, arrangement) in arrangements.iter().enumerate() {
            let work = explored * experts;
            if arrangement.bound > self.cost_limit(work) || explored >= effort.max_arrangements() {
                break;
            }
            self.counters.solved += 1;
            let Some(found) = self.explore(arrangement, work) else {
                self.remember_infeasible(arrangement);
                continue;
            };
            if self.best.as_ref().is_none_or(|best| found.beats(best)) {
                self.best = Some(found.clone());
            }
            starts.push(found);
        }
        if with_moves && starts.is_empty() {
            starts.extend(self.repair_infeasible());
        }
        if with_moves {
            // The best start is not always the best end.
            starts.sort_by(|a: &CandidatePlan, b| a.cost().total_cmp(&b.cost()));
            let is_small = self.is_small();
            // Starts with the same groups and remote counts lead to the same plans.
            let shape = |start: &CandidatePlan| {
                let counts = &start.candidate.counts;
                let counts = if is_small { counts.clone() } else { vec![counts.iter().sum::<usize>()] };
                (start.plan.groups.len(), counts)
            };
            let max_starts = if is_small { MAX_STARTS_WITH_FEW_EXPERTS } else { MAX_STARTS };
            let mut seen = BTreeSet::new();
            starts.retain(|start| seen.insert(shape(start)) && seen.len() <= max_starts);
            // Replaying ten recorded arrivals takes as long as evaluating one expert.
            let recorded =
                self.model.problem.arrivals.as_ref().and_then(|arrivals| arrivals.recorded_seconds.as_ref());
            let replayed = recorded.map_or(0, Vec::len) / 10;
            let max_work = max_evaluations(experts) * experts;
            let mut left = (max_work / (experts + replayed).max(1)).min(MAX_EVALUATIONS);
            if is_small {
                // With few experts single moves are cheap. Pairs of moves start from their results.
                let mut ends: Vec<CandidatePlan> = Vec::new();
                let mut left_for_single_moves = MAX_EVALUATIONS / 2;
                for start in starts {
                    let end = self.improved(start, MoveDepth::Single, &mut left_for_single_moves);
                    if ends.iter().all(|known| known.plan != end.plan) {
                        ends.push(end);
                    }
                }
                ends.sort_by(|a, b| a.cost().total_cmp(&b.cost()));
                starts = ends;
            }
            for start in starts {
                let end = self.improved(start, MoveDepth::Pairs, &mut left);
                if self.best.as_ref().is_none_or(|best| end.beats(best)) {
                    self.best = Some(end);
                }
            }
        }
    }

    /// Converts a plan with a function for each layer to groups and improves it by moves.
    ///
    /// Returns `None` if there may not be as many groups, or if no converted plan keeps the limits.
    pub(crate) fn improved_per_layer(&self, planned: &CandidatePlan) -> Option<CandidatePlan> {
        let layers = &planned.plan.layers;
        let experts = self.model.experts();
        let functions = layers.iter().filter(|layer| !layer.remote.is_empty()).count();
        let max_groups = self.model.problem.limits.max_groups.unwrap_or(0) as usize;
        let is_local = functions == 0;
        if functions > max_groups || !planned.plan.groups.is_empty() || experts > FEW_EXPERTS && is_local {
            return None;
        }
        let plan = in_groups(&planned.plan);
        let start = self.evaluate_if_better(&planned.candidate, plan, None)?;
        // An all-local plan gets few moves: plans that differ more are found from arrangements.
        let mut left = if is_local { MAX_EVALUATIONS / 20 } else { max_evaluations(experts) };
        Some(self.improved(start, MoveDepth::Pairs, &mut left))
    }

    /// Remembers the fastest plan of an arrangement that has no feasible plan, if experts are few enough for a repair.
    fn remember_infeasible(&mut self, arrangement: &GroupArrangement<'_>) {
        let experts = self.model.experts();
        if self.best.is_some() || experts > FEW_EXPERTS {
            return;
        }
        let plan = self.plan(arrangement.candidate, arrangement.layout, arrangement.replicas);
        let mains = self.model.useful_main_options(self.model.main_needed(&arrangement.candidate.counts));
        let remotes = self.remote_options(&plan);
        let (Some(main), Some(remote)) = (mains.last(), remotes.last()) else { return };
        let plan = with_sizes(&plan, &SizePair { main: *main, remote });
        let planned = self.evaluated(arrangement.candidate, plan);
        self.infeasible.push((self.limit_excess(&planned), planned));
    }

    /// Returns by which share `planned` exceeds its most exceeded limit; 0 if it keeps all limits.
    fn limit_excess(&self, planned: &CandidatePlan) -> f64 {
        let violations = (self.violations)(&planned.plan, &planned.evaluation);
        violations.iter().map(|violation| violation.value / violation.allowed - 1.0).fold(0.0, f64::max)
    }

    /// Repairs the remembered infeasible plans by moves, those with the least excess first.
    fn repair_infeasible(&mut self) -> Vec<CandidatePlan> {
        let mut starts = std::mem::take(&mut self.infeasible);
        starts.sort_by(|a, b| a.0.total_cmp(&b.0));
        starts.truncate(MAX_STARTS);
        let mut repaired = Vec::new();
        for (mut excess, mut planned) in starts {
            while excess > 0.0 && !self.model.ends() {
                let neighbours = self.neighbours(&planned.plan, MAX_EVALUATIONS).into_iter();
                let evaluated = neighbours.map(|plan| self.evaluated(&planned.candidate, plan));
                let with_excess = evaluated.map(|neighbour| (self.limit_excess(&neighbour), neighbour));
                match with_excess.min_by(|a, b| a.0.total_cmp(&b.0)) {
                    Some((less, better)) if less < excess => (excess, planned) = (less, better),
                    _ => break,
                }
            }
            if excess == 0.0 && !self.model.ends() {
                self.model.meter.found_plan();
                if self.best.as_ref().is_none_or(|best| planned.beats(best)) {
                    self.best = Some(planned.clone());
                }
                repaired.push(planned);
            }
        }
        repaired
    }

    /// Evaluates `plan`, whether or not it keeps the limits.
    pub(crate) fn evaluated(&self, candidate: &Candidate, plan: Plan) -> CandidatePlan {
        let evaluation = self.model.evaluate(&plan);
        CandidatePlan { candidate: candidate.clone(), plan, evaluation }
    }

    /// Returns the cost in dollars above which no plan is considered after `work` explored experts.
    fn cost_limit(&self, work: usize) -> f64 {
        let saving =
            REQUIRED_SAVING.iter().filter(|(after, _)| work >= *after).map(|(_, saving)| *saving).next_back();
        let factor = saving.map_or(1.0 + COST_TIE, |saving| 1.0 - saving);
        if self.model.ends() {
            return f64::NEG_INFINITY;
        }
        self.best.as_ref().map_or(f64::INFINITY, |best| best.cost() * factor).min(self.cutoff)
    }

    fn breaks_latency_limit(&self, bill: &Bill) -> bool {
        let mut broken = LimitViolations::default();
        self.model.check_latency(bill, &mut broken);
        !broken.names().is_empty()
    }

    /// Evaluates `plan`, and returns it if it keeps every limit and beats `other`.
    pub(crate) fn evaluate_if_better(
        &self,
        candidate: &Candidate,
        plan: Plan,
        other: Option<&CandidatePlan>,
    ) -> Option<CandidatePlan> {
        let may_beat = |cost: f64| other.is_none_or(|other| cost <= other.cost() * (1.0 + 2.0 * COST_TIE));
        let evaluation = self.model.evaluate_if(&plan, may_beat)?;
        let planned = CandidatePlan { candidate: candidate.clone(), plan, evaluation };
        let beats = other.is_none_or(|other| planned.beats(other));
        let keeps = beats && (self.violations)(&planned.plan, &planned.evaluation).is_empty();
        // If the search ended meanwhile, latencies of the plan may not have been simulated.
        let is_complete = keeps && !self.model.ends();
        is_complete.then(|| {
            self.model.meter.found_plan();
            planned
        })
    }

    /// Returns the plan of an arrangement, with sizes of 0 in place of those that are not chosen yet.
    fn plan(&self, candidate: &Candidate, layout: GroupLayout, replicas: u32) -> Plan {
        let hosted = assign_to_groups(self.model, self.tables, &candidate.counts, layout);
        let group = |experts| Group { experts, memory_bytes: 0.0, vcpus: None, replicas, idle_seconds: None };
        let remote = |(table, count): (&LayerTable, &usize)| LayerPlan {
            remote: table.remote_set(*count),
            ..LayerPlan::default()
        };
        Plan {
            main_bytes: 0.0,
            main_vcpus: None,
            layers: self.tables.iter().zip(&candidate.counts).map(remote).collect(),
            groups: hosted.into_iter().map(group).collect(),
        }
    }

    /// Returns the possible sizes of all groups of `plan`, the cheapest first. All groups of one entry have the same vCPUs.
    fn remote_options(&self, plan: &Plan) -> Vec<Vec<Sizing>> {
        let model = self.model;
        if plan.groups.is_empty() {
            return vec![Vec::new()];
        }
        let needed: Vec<f64> = plan.groups.iter().map(|group| self.needed_bytes(plan, group)).collect();
        if model.problem.specs.remote_vcpus.is_none() {
            let largest = needed.iter().copied().fold(0.0, f64::max);
            let sizes = model.useful_remote_options(largest).into_iter();
            return sizes.map(|sizing| vec![sizing; needed.len()]).collect();
        }
        let each: Vec<Vec<Sizing>> =
            needed.iter().map(|needed| model.useful_remote_options(*needed)).collect();
        let count = each.iter().map(Vec::len).min().unwrap_or(0);
        (0..count).map(|index| each.iter().map(|options| options[index]).collect()).collect()
    }

    /// Returns the bytes that a function of `group` needs, also if the prediction errs by [`Self::factors`].
    fn needed_bytes(&self, plan: &Plan, group: &Group) -> f64 {
        let expected = self.model.group_needed(&group.experts);
        self.factors.map_or(expected, |factors| {
            expected.max(
                remoe_plan::cost::stress::stressed(self.model, factors, plan).group_needed(&group.experts),
            )
        })
    }
}

/// Returns the maximum number of evaluations of moves for a model with `experts` over all layers.
pub(crate) fn max_evaluations(experts: usize) -> usize {
    if experts <= FEW_EXPERTS { MAX_EVALUATIONS } else { MAX_MOVE_WORK / experts }
}

/// Converts `plan` to groups: the function of each layer, if any, becomes a group.
pub(crate) fn in_groups(plan: &Plan) -> Plan {
    if !plan.groups.is_empty() {
        return plan.clone();
    }
    let layers = &plan.layers;
    let with_remote = layers.iter().enumerate().filter(|(_, layer)| !layer.remote.is_empty());
    let groups = with_remote.map(|(index, layer)| Group {
        experts: (0..layers.len())
            .map(|at| if at == index { layer.remote.clone() } else { Vec::new() })
            .collect(),
        memory_bytes: layer.memory_bytes,
        vcpus: None,
        replicas: layer.replicas,
        idle_seconds: None,
    });
    let of_groups = |layer: &LayerPlan| LayerPlan { remote: layer.remote.clone(), ..LayerPlan::default() };
    Plan { layers: layers.iter().map(of_groups).collect(), groups: groups.collect(), ..plan.clone() }
}

/// Returns `plan` with the sizes of `pair`.
fn with_sizes(plan: &Plan, pair: &SizePair<'_>) -> Plan {
    let groups = plan.groups.iter().zip(pair.remote).map(|(group, sizing)| Group {
        memory_bytes: sizing.bytes,
        vcpus: sizing.stated,
        ..group.clone()
    });
    Plan {
        main_bytes: pair.main.bytes,
        main_vcpus: pair.main.stated,
        layers: plan.layers.clone(),
        groups: groups.collect(),
    }
}
