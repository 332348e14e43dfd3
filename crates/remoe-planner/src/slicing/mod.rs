//! The search over groups: how many experts are remote, over how many groups they are sliced, and how large
//! main function and groups are.
//!
//! All groups of an arrangement have the same vCPUs and nearly the same work, so that an arrangement has
//! two sizes to choose. Arrangements go in the order of what they cost at least; a rectangle of sizes whose
//! bound is too high, or whose quickest corner is too late, is never looked into. Moves of single groups and
//! experts follow (`improve.rs`).

mod again;
mod arrangement;
mod blocks;
mod climb;
mod cold;
pub(crate) mod deal;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]
mod exhaustive;
mod explore;
mod improve;
mod known;
mod rest;
mod sturdy;
mod table;
mod terms;

use crate::remote::Remote;
use crate::search::selection::Candidate;
use crate::search::tables::LayerTable;
use crate::search::{COST_TIE, Counters};
use arrangement::Arrangement;
pub(crate) use climb::Climbed;
use deal::{Cut, deal};
pub(crate) use improve::Depth;
use remoe_plan::cost::running::Bill;
use remoe_plan::cost::{Evaluation, LimitViolations as Limits, Violation};
use remoe_plan::model::Model;
use remoe_plan::model::sizing::Sizing;
use remoe_plan::plan::{Group, LayerPlan, Plan};
use remoe_plan::problem::ErrorFactor;
pub(crate) use rest::RestOfLayers;
use std::cell::OnceCell;
use std::collections::BTreeSet;
pub use sturdy::{Sturdiness, WrongCase};
use table::SizePair;
pub(crate) use terms::LayerTerms;

/// After how much work, in experts of arrangements, only savings above this share are pursued; at first also
/// what costs more by so much, since moves may make more of it.
const PATIENCE: [(usize, f64); 5] =
    [(0, -0.3), (5_000, 1e-4), (300_000, 1e-3), (600_000, 5e-3), (1_200_000, 1.0)];
/// Functions of a group that arrangements are tried with, at most; moves may add more.
const MOST_REPLICAS: u32 = 4;

/// Work that moves may be, in experts evaluated.
const MOST_WORK: usize = 300_000;
/// Up to so many experts in all, any expert may be moved, and plans that are late are repaired.
const FEW_EXPERTS: usize = 32;
/// Beyond so many experts in all, sizes of an arrangement must save this share to be tried.
const MANY_EXPERTS: usize = 500;
const COARSE_GAIN: f64 = 1e-3;
/// Arrangements that a search without moves looks into, the most promising first.
const COARSE_ARRANGEMENTS: usize = 8;
/// Arrangements that are searched if the only question is whether something is cheap enough.
const FEW_ARRANGEMENTS: usize = 3;
/// Plans that moves start from, at most.
const MOST_STARTS: usize = 24;
/// Plans that moves start from with few experts, at most.
const MOST_STARTS_OF_FEW: usize = 100;
/// Evaluations of moves, at most.
const MOST_EVALUATIONS: usize = 150_000;

/// Which arrangements are searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ArrangementFamily {
    /// A function of its own for every layer.
    PerLayer,
    /// Groups that hold a part of every layer, or of every layer of a block.
    Sliced,
}

/// Moves that follow the search over arrangements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moves {
    /// Moves from the best of many arrangements.
    All,
    /// Nothing, and few arrangements are looked into.
    None,
    /// Nothing, and very few are.
    Few,
}

impl Moves {
    /// Arrangements that are looked into, at most.
    fn arrangements(self) -> usize {
        match self {
            Self::All => usize::MAX,
            Self::None => COARSE_ARRANGEMENTS,
            Self::Few => FEW_ARRANGEMENTS,
        }
    }
}

/// A plan that keeps every limit.
#[derive(Debug, Clone)]
pub(crate) struct FeasiblePlan {
    pub(crate) candidate: Candidate,
    pub(crate) plan: Plan,
    pub(crate) evaluation: Evaluation,
}

impl FeasiblePlan {
    pub(crate) fn cost(&self) -> f64 {
        self.evaluation.total_cost
    }

    /// Cheaper; of equal ones fewer functions, then less memory.
    pub(crate) fn beats(&self, other: &Self) -> bool {
        let (cost, than) = (self.cost(), other.cost());
        if (cost - than).abs() > COST_TIE * than.abs() {
            return cost < than;
        }
        let rank = |planned: &Self| (planned.plan.replicas(), planned.plan.bytes());
        rank(self) < rank(other)
    }
}

/// Everything that the search reads.
pub(crate) struct Slicing<'s, 'm> {
    pub(crate) model: &'s Model<'m>,
    pub(crate) tables: &'s [LayerTable],
    /// How far remote shares may exceed their prediction, where plans must bear it.
    pub(crate) factors: Option<&'s [ErrorFactor]>,
    /// The limits that a plan does not keep, given its evaluation.
    pub(crate) violations: &'s dyn Fn(&Plan, &Evaluation) -> Vec<Violation>,
    /// Policy on remote experts.
    pub(crate) remote: Remote,
    /// Seconds after which groups end by themselves, where moves may have them do so.
    pub(crate) window: Option<f64>,
    pub(crate) best: Option<FeasiblePlan>,
    /// Where nothing keeps the limits: the plans that come closest to it.
    pub(crate) late: Vec<(f64, FeasiblePlan)>,
    /// Cost above which no plan is considered, whatever else is known.
    pub(crate) cutoff: f64,
    /// Figures that are the same for every arrangement: of layers, and of every expert.
    pub(crate) rest: RestOfLayers,
    pub(crate) terms: &'s OnceCell<Option<Vec<LayerTerms>>>,
    pub(crate) counters: Counters,
}

impl Slicing<'_, '_> {
    /// Searches `candidates` in all arrangements of `family`.
    pub(crate) fn run(&mut self, candidates: &[Candidate], family: ArrangementFamily, moves: Moves) {
        let with_moves = moves == Moves::All;
        let mut arrangements: Vec<Arrangement<'_>> = Vec::new();
        for candidate in candidates {
            if self.model.ends() {
                return;
            }
            self.counters.candidates += 1;
            let nothing = candidate.counts.iter().all(|count| *count == 0);
            let cuts = if nothing { vec![Cut { blocks: 1, slices: 1 }] } else { self.cuts(family) };
            let most = if nothing { 1 } else { self.model.problem.limits.max_replicas.min(MOST_REPLICAS) };
            let least = self.least(candidate);
            for cut in cuts {
                for replicas in 1..=most {
                    let least = least.as_ref();
                    let bound =
                        least.map_or(f64::INFINITY, |least| self.bound(candidate, least, cut, replicas));
                    self.counters.bounds += 1;
                    arrangements.push(Arrangement { candidate, cut, replicas, bound });
                }
            }
        }
        // What is too late by its bound is only looked at where nothing else is there.
        let experts = self.model.experts();
        let hopeless = experts <= FEW_EXPERTS
            && arrangements.iter().all(|arrangement| arrangement.bound == f64::INFINITY);
        arrangements.retain(|arrangement| hopeless || arrangement.bound < f64::INFINITY);
        self.counters.pairs += arrangements.len();
        arrangements.sort_by(|a, b| a.bound.total_cmp(&b.bound));
        let mut starts = Vec::new();
        for (built, arrangement) in arrangements.iter().enumerate() {
            let work = built * experts;
            if arrangement.bound > self.limit(work) || built >= moves.arrangements() {
                break;
            }
            self.counters.solved += 1;
            let Some(found) = self.explore(arrangement, work) else {
                self.note_late(arrangement);
                continue;
            };
            if self.best.as_ref().is_none_or(|best| found.beats(best)) {
                self.best = Some(found.clone());
            }
            starts.push(found);
        }
        if with_moves && starts.is_empty() {
            starts.extend(self.repaired());
        }
        if with_moves {
            // The best start is not always the best end.
            starts.sort_by(|a: &FeasiblePlan, b| a.cost().total_cmp(&b.cost()));
            let is_small = self.is_small();
            let kind = |start: &FeasiblePlan| {
                let counts = &start.candidate.counts;
                let counts = if is_small { counts.clone() } else { vec![counts.iter().sum::<usize>()] };
                (start.plan.groups.len(), counts)
            };
            let most_starts = if is_small { MOST_STARTS_OF_FEW } else { MOST_STARTS };
            let mut seen = BTreeSet::new();
            starts.retain(|start| seen.insert(kind(start)) && seen.len() <= most_starts);
            // A recorded time is replayed in a tenth of what an expert takes.
            let recorded =
                self.model.problem.arrivals.as_ref().and_then(|arrivals| arrivals.recorded_seconds.as_ref());
            let replayed = recorded.map_or(0, Vec::len) / 10;
            let most = most_moves(experts) * experts;
            let mut left = (most / (experts + replayed).max(1)).min(MOST_EVALUATIONS);
            if is_small {
                // Of few experts single moves are cheap: pairs follow from where those end.
                let mut ends: Vec<FeasiblePlan> = Vec::new();
                let mut left = MOST_EVALUATIONS / 2;
                for start in starts {
                    let end = self.improved(start, Depth::Single, &mut left);
                    if ends.iter().all(|known| known.plan != end.plan) {
                        ends.push(end);
                    }
                }
                ends.sort_by(|a, b| a.cost().total_cmp(&b.cost()));
                starts = ends;
            }
            for start in starts {
                let end = self.improved(start, Depth::Pairs, &mut left);
                if self.best.as_ref().is_none_or(|best| end.beats(best)) {
                    self.best = Some(end);
                }
            }
        }
    }

    /// The plan that moves make of one with a function per layer, where groups may be as many.
    pub(crate) fn moved_on(&self, planned: &FeasiblePlan) -> Option<FeasiblePlan> {
        let layers = &planned.plan.layers;
        let experts = self.model.experts();
        let hosts = layers.iter().filter(|layer| !layer.remote.is_empty()).count();
        let most = self.model.problem.limits.max_groups.unwrap_or(0) as usize;
        if hosts > most || !planned.plan.groups.is_empty() || experts > FEW_EXPERTS && hosts == 0 {
            return None;
        }
        let plan = in_groups(&planned.plan);
        let start = self.judged(&planned.candidate, plan, None)?;
        // Nothing remote is a start for few moves: what lies farther is found from arrangements.
        let mut left = if hosts == 0 { MOST_EVALUATIONS / 20 } else { most_moves(experts) };
        Some(self.improved(start, Depth::Pairs, &mut left))
    }

    /// Remembers the quickest plan of an arrangement that keeps no limit, where so few experts are there that
    /// moves may help.
    fn note_late(&mut self, arrangement: &Arrangement<'_>) {
        let experts = self.model.experts();
        if self.best.is_some() || experts > FEW_EXPERTS {
            return;
        }
        let plan = self.plan(arrangement.candidate, arrangement.cut, arrangement.replicas);
        let mains = self.model.useful_main_options(self.model.main_needed(&arrangement.candidate.counts));
        let remotes = self.remote_options(&plan);
        let (Some(main), Some(remote)) = (mains.last(), remotes.last()) else { return };
        let plan = sized_as(&plan, &SizePair { main: *main, remote });
        let planned = self.unjudged(arrangement.candidate, plan);
        self.late.push((self.strain(&planned), planned));
    }

    /// By how much `planned` misses the limit that it misses most; 0 where it keeps all.
    fn strain(&self, planned: &FeasiblePlan) -> f64 {
        let violations = (self.violations)(&planned.plan, &planned.evaluation);
        violations.iter().map(|violation| violation.value / violation.allowed - 1.0).fold(0.0, f64::max)
    }

    /// Plans that keep the limits, moves away from those that come closest.
    fn repaired(&mut self) -> Vec<FeasiblePlan> {
        let mut late = std::mem::take(&mut self.late);
        late.sort_by(|a, b| a.0.total_cmp(&b.0));
        late.truncate(MOST_STARTS);
        let mut repaired = Vec::new();
        for (mut strain, mut planned) in late {
            while strain > 0.0 && !self.model.ends() {
                let near = self.neighbours(&planned.plan, MOST_EVALUATIONS).into_iter();
                let near = near.map(|plan| self.unjudged(&planned.candidate, plan));
                let near = near.map(|planned| (self.strain(&planned), planned));
                match near.min_by(|a, b| a.0.total_cmp(&b.0)) {
                    Some((less, better)) if less < strain => (strain, planned) = (less, better),
                    _ => break,
                }
            }
            if strain == 0.0 && !self.model.ends() {
                self.model.meter.found_plan();
                if self.best.as_ref().is_none_or(|best| planned.beats(best)) {
                    self.best = Some(planned.clone());
                }
                repaired.push(planned);
            }
        }
        repaired
    }

    pub(crate) fn unjudged(&self, candidate: &Candidate, plan: Plan) -> FeasiblePlan {
        let evaluation = self.model.evaluate(&plan);
        FeasiblePlan { candidate: candidate.clone(), plan, evaluation }
    }

    /// Returns the cost above which no plan is considered.
    fn limit(&self, work: usize) -> f64 {
        let gain = PATIENCE.iter().filter(|(after, _)| work >= *after).map(|(_, gain)| *gain).next_back();
        let factor = gain.map_or(1.0 + COST_TIE, |gain| 1.0 - gain);
        if self.model.ends() {
            return f64::NEG_INFINITY;
        }
        self.best.as_ref().map_or(f64::INFINITY, |best| best.cost() * factor).min(self.cutoff)
    }

    fn is_late(&self, bill: &Bill) -> bool {
        let mut late = Limits::default();
        self.model.late(bill, &mut late);
        !late.names().is_empty()
    }

    /// The plan with its evaluation, where it keeps every limit and beats `other`.
    pub(crate) fn judged(
        &self,
        candidate: &Candidate,
        plan: Plan,
        other: Option<&FeasiblePlan>,
    ) -> Option<FeasiblePlan> {
        let may_beat = |cost: f64| other.is_none_or(|other| cost <= other.cost() * (1.0 + 2.0 * COST_TIE));
        let evaluation = self.model.evaluate_if(&plan, may_beat)?;
        let planned = FeasiblePlan { candidate: candidate.clone(), plan, evaluation };
        let beats = other.is_none_or(|other| planned.beats(other));
        let keeps = beats && (self.violations)(&planned.plan, &planned.evaluation).is_empty();
        // Where the search ends meanwhile, latencies of the plan may be unknown.
        let stands = keeps && !self.model.ends();
        stands.then(|| {
            self.model.meter.found_plan();
            planned
        })
    }

    /// The sets of an arrangement; sizes are still open.
    fn plan(&self, candidate: &Candidate, cut: Cut, replicas: u32) -> Plan {
        let hosted = deal(self.model, self.tables, &candidate.counts, cut);
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

    /// Sizes of all groups of `plan`, the cheapest first; the vCPUs of one entry are the same.
    fn remote_options(&self, plan: &Plan) -> Vec<Vec<Sizing>> {
        let model = self.model;
        if plan.groups.is_empty() {
            return vec![Vec::new()];
        }
        let needed: Vec<f64> = plan.groups.iter().map(|group| self.needed(plan, group)).collect();
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

    /// Bytes that a function of `group` needs, also when the prediction errs as far as plans must bear.
    fn needed(&self, plan: &Plan, group: &Group) -> f64 {
        let expected = self.model.group_needed(&group.experts);
        self.factors.map_or(expected, |factors| {
            expected.max(
                remoe_plan::cost::stress::stressed(self.model, factors, plan).group_needed(&group.experts),
            )
        })
    }
}

/// Evaluations that moves may be, of so many experts.
pub(crate) fn most_moves(experts: usize) -> usize {
    if experts <= FEW_EXPERTS { MOST_EVALUATIONS } else { MOST_WORK / experts }
}

/// `plan`, whose layers may have functions of their own, with these as groups.
pub(crate) fn in_groups(plan: &Plan) -> Plan {
    if !plan.groups.is_empty() {
        return plan.clone();
    }
    let layers = &plan.layers;
    let own = layers.iter().enumerate().filter(|(_, layer)| !layer.remote.is_empty());
    let groups = own.map(|(index, layer)| Group {
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

/// `plan` with the sizes of `pair`.
fn sized_as(plan: &Plan, pair: &SizePair<'_>) -> Plan {
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
