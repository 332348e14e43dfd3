//! The search over groups: how many experts are remote, over how many groups they are sliced, and how large
//! main function and groups are.
//!
//! All groups of an arrangement have the same vCPUs and nearly the same work, so that an arrangement has
//! two sizes to choose. Arrangements go in the order of what they cost at least; a rectangle of sizes whose
//! bound is too high, or whose quickest corner is too late, is never looked into. Moves of single groups and
//! experts follow (`improve.rs`).

pub(crate) mod deal;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]
mod exhaustive;
mod improve;
mod sturdy;
mod table;
mod terms;

use crate::answer::Remote;
use crate::cost::running::{Bill, Running, Times};
use crate::cost::{Evaluation, Found as Limits, Violation};
use crate::plan::{Group, LayerPlan, Plan};
use crate::problem::ErrorFactor;
use crate::problem::model::{Model, Seconds, Sizing};
use crate::search::selection::Candidate;
use crate::search::tables::LayerTable;
use crate::search::{COST_TIE, Counters};
use deal::{Cut, deal};
use std::cell::OnceCell;
use std::collections::{BTreeSet, BinaryHeap};
pub use sturdy::Sturdiness;
use table::{Pair, Table};
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
/// The same of one that only asks whether something is cheap enough.
const FEW_ARRANGEMENTS: usize = 3;
/// Plans that moves start from, at most.
const MOST_STARTS: usize = 24;
/// Evaluations of moves, at most.
const MOST_EVALUATIONS: usize = 150_000;

/// Which arrangements are searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// A function of its own for every layer.
    PerLayer,
    /// Groups that hold a part of every layer, or of every layer of a block.
    Sliced,
}

/// What follows on the search over arrangements.
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
pub(crate) struct Planned {
    pub(crate) candidate: Candidate,
    pub(crate) plan: Plan,
    pub(crate) evaluation: Evaluation,
}

impl Planned {
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
    /// Whether experts may be remote.
    pub(crate) remote: Remote,
    pub(crate) best: Option<Planned>,
    /// Where nothing keeps the limits: the plans that come closest to it.
    pub(crate) late: Vec<(f64, Planned)>,
    /// What no plan may cost to be worth a look, whatever else is known.
    pub(crate) cutoff: f64,
    /// What is kept of every expert.
    pub(crate) terms: &'s OnceCell<Option<Vec<LayerTerms>>>,
    pub(crate) counters: Counters,
}

/// One arrangement, before anything about it is worked out.
struct Arrangement<'c> {
    candidate: &'c Candidate,
    cut: Cut,
    replicas: u32,
    bound: f64,
}

/// What a candidate takes at least, whatever its arrangement.
struct Least {
    /// Dollars per second of the smallest main function.
    main_rate: f64,
    layers: Vec<LeastOfLayer>,
    /// Nothing is remote.
    is_local: bool,
}

struct LeastOfLayer {
    fixed: Seconds,
    /// Prefill seconds of the local experts, and of the remote ones on one function.
    local: f64,
    away: f64,
    /// Seconds of a token's local experts in a decode step.
    local_step: f64,
    /// Experts of a token that are remote, and the seconds of each.
    away_share: f64,
    away_step: f64,
}

impl Slicing<'_, '_> {
    /// Searches `candidates` in all arrangements of `family`.
    pub(crate) fn run(&mut self, candidates: &[Candidate], family: Family, moves: Moves) {
        let with_moves = moves == Moves::All;
        let mut arrangements: Vec<Arrangement<'_>> = Vec::new();
        for candidate in candidates {
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
            starts.sort_by(|a: &Planned, b| a.cost().total_cmp(&b.cost()));
            let kind =
                |start: &Planned| (start.plan.groups.len(), start.candidate.counts.iter().sum::<usize>());
            let mut seen = BTreeSet::new();
            starts.retain(|start| seen.insert(kind(start)) && seen.len() <= MOST_STARTS);
            // A recorded time is replayed in a tenth of what an expert takes.
            let recorded =
                self.model.problem.arrivals.as_ref().and_then(|arrivals| arrivals.recorded_seconds.as_ref());
            let replayed = recorded.map_or(0, Vec::len) / 10;
            let most = if experts <= FEW_EXPERTS { MOST_EVALUATIONS * experts } else { MOST_WORK };
            let mut left = (most / (experts + replayed).max(1)).min(MOST_EVALUATIONS);
            for start in starts {
                let end = self.improved(start, &mut left);
                if self.best.as_ref().is_none_or(|best| end.beats(best)) {
                    self.best = Some(end);
                }
            }
        }
    }

    /// What moves make of a plan with a function per layer, where groups may be as many and experts are few.
    pub(crate) fn moved_on(&self, planned: &Planned) -> Option<Planned> {
        let layers = &planned.plan.layers;
        let experts = self.model.experts();
        let hosts = layers.iter().filter(|layer| !layer.remote.is_empty()).count();
        let most = self.model.problem.limits.max_groups.unwrap_or(0) as usize;
        if experts > FEW_EXPERTS || hosts > most || !planned.plan.groups.is_empty() {
            return None;
        }
        let own = layers.iter().enumerate().filter(|(_, layer)| !layer.remote.is_empty());
        let groups = own.map(|(index, layer)| Group {
            experts: (0..layers.len())
                .map(|at| if at == index { layer.remote.clone() } else { Vec::new() })
                .collect(),
            memory_bytes: layer.memory_bytes,
            vcpus: None,
            replicas: layer.replicas,
        });
        let plan = Plan {
            layers: layers
                .iter()
                .map(|layer| LayerPlan { remote: layer.remote.clone(), ..LayerPlan::default() })
                .collect(),
            groups: groups.collect(),
            ..planned.plan.clone()
        };
        let start = self.judged(&planned.candidate, plan, None)?;
        Some(self.improved(start, &mut { MOST_EVALUATIONS }))
    }

    /// Remembers the quickest plan of an arrangement that keeps no limit, where so few experts are there that
    /// moves may help.
    fn note_late(&mut self, arrangement: &Arrangement<'_>) {
        let experts = self.model.experts();
        if self.best.is_some() || experts > FEW_EXPERTS {
            return;
        }
        let plan = self.plan(arrangement.candidate, arrangement.cut, arrangement.replicas);
        let mains = self.model.main_options(self.model.main_needed(&arrangement.candidate.counts));
        let remotes = self.remote_options(&plan);
        let (Some(main), Some(remote)) = (mains.last(), remotes.last()) else { return };
        let plan = sized_as(&plan, &Pair { main: *main, remote });
        let planned = self.unjudged(arrangement.candidate, plan);
        self.late.push((self.strain(&planned), planned));
    }

    /// By how much `planned` misses the limit that it misses most; 0 where it keeps all.
    fn strain(&self, planned: &Planned) -> f64 {
        let violations = (self.violations)(&planned.plan, &planned.evaluation);
        violations.iter().map(|violation| violation.value / violation.allowed - 1.0).fold(0.0, f64::max)
    }

    /// Plans that keep the limits, moves away from those that come closest.
    fn repaired(&mut self) -> Vec<Planned> {
        let mut late = std::mem::take(&mut self.late);
        late.sort_by(|a, b| a.0.total_cmp(&b.0));
        late.truncate(MOST_STARTS);
        let mut repaired = Vec::new();
        for (mut strain, mut planned) in late {
            while strain > 0.0 {
                let near = self.neighbours(&planned.plan, MOST_EVALUATIONS).into_iter();
                let near = near.map(|plan| self.unjudged(&planned.candidate, plan));
                let near = near.map(|planned| (self.strain(&planned), planned));
                match near.min_by(|a, b| a.0.total_cmp(&b.0)) {
                    Some((less, better)) if less < strain => (strain, planned) = (less, better),
                    _ => break,
                }
            }
            if strain == 0.0 {
                if self.best.as_ref().is_none_or(|best| planned.beats(best)) {
                    self.best = Some(planned.clone());
                }
                repaired.push(planned);
            }
        }
        repaired
    }

    fn unjudged(&self, candidate: &Candidate, plan: Plan) -> Planned {
        let evaluation = self.model.evaluate(&plan);
        Planned { candidate: candidate.clone(), plan, evaluation }
    }

    /// What a plan must cost at most to be worth a look.
    fn limit(&self, work: usize) -> f64 {
        let gain = PATIENCE.iter().filter(|(after, _)| work >= *after).map(|(_, gain)| *gain).next_back();
        let factor = gain.map_or(1.0 + COST_TIE, |gain| 1.0 - gain);
        self.best.as_ref().map_or(f64::INFINITY, |best| best.cost() * factor).min(self.cutoff)
    }

    fn cuts(&self, family: Family) -> Vec<Cut> {
        let layers = self.model.layers.len();
        let most = self.model.problem.limits.max_groups.unwrap_or(1) as usize;
        let single = Cut { blocks: layers, slices: 1 };
        if family == Family::PerLayer {
            return vec![single];
        }
        let powers = std::iter::successors(Some(1), |blocks| Some(blocks * 2));
        // Functions that are paid for what they work are cheaper the less they hold.
        let whole = powers.take_while(|blocks| *blocks < layers.max(2)).chain((layers > 1).then_some(layers));
        whole.flat_map(|blocks| numbers(most / blocks).map(move |slices| Cut { blocks, slices })).collect()
    }

    /// What every layer of `candidate` takes at least, at the largest sizes.
    fn least(&self, candidate: &Candidate) -> Option<Least> {
        let model = self.model;
        let mains = model.main_options(model.main_needed(&candidate.counts));
        let (main, most) = (mains.first()?, mains.last()?);
        let most_vcpus = model.pace(most.vcpus).vcpus;
        let remote_vcpus =
            model.pace(model.remote_options(0.0).last().map_or(1.0, |sizing| sizing.vcpus)).vcpus;
        let layers = model.layers.iter().zip(self.tables).zip(&candidate.counts);
        let layers = layers.map(|((layer, table), count)| {
            let (curve, remote_curve) = (&layer.curve, layer.remote_curve());
            let (here, there) = (curve.column(most_vcpus), remote_curve.column(remote_vcpus));
            let share = table.share[*count].min(1.0);
            LeastOfLayer {
                fixed: layer.fixed(most_vcpus),
                local: here.of(table.stay(*count)),
                away: there.of(table.away_at(*count)) + table.token_sum[*count] * model.down,
                local_step: layer.per_token() * (1.0 - share) * curve.seconds(1.0, here),
                away_share: layer.per_token() * share,
                away_step: remote_curve.seconds(1.0, there) + model.down,
            }
        });
        model.add_work(model.layers.len());
        Some(Least {
            main_rate: model.gpu_rate + main.rate,
            layers: layers.collect(),
            is_local: candidate.counts.iter().all(|count| *count == 0),
        })
    }

    /// What no plan of the arrangement undercuts: every time at the largest sizes with work that is spread
    /// evenly, every rate at the smallest ones. Infinite where it cannot keep the limits.
    fn bound(&self, candidate: &Candidate, least: &Least, cut: Cut, replicas: u32) -> f64 {
        let model = self.model;
        let mut remote_rate = 0.0;
        if !least.is_local {
            let Some(groups) = self.groups(candidate, cut) else { return f64::INFINITY };
            let Some(rate) = self.least_remote_rate(candidate, groups as f64) else { return f64::INFINITY };
            if model.is_reserved() {
                remote_rate = rate * f64::from(replicas);
            }
        }
        let ways = (cut.slices * replicas as usize) as f64;
        let (mut prefill, mut steps) = (0.0, 0.0);
        for layer in &least.layers {
            let step = layer.local_step.max(layer.away_share / cut.slices as f64 * layer.away_step);
            prefill += layer.fixed.prefill + layer.local.max(layer.away / ways);
            steps += layer.fixed.step + step;
        }
        let batches = model.batches().len();
        // Several of these are one of what else is counted.
        model.add_work((least.layers.len() + batches) / 4 + 1);
        let running = Running {
            times: Times { prefill, steps: vec![steps; batches] },
            main_rate: least.main_rate,
            remote_rate,
            remote_bill: 0.0,
            start_seconds: 0.0,
        };
        let bill = model.quick_bill(&running);
        if self.is_late(&bill) { f64::INFINITY } else { bill.total() }
    }

    /// How many groups have experts; none where another cut makes the same ones.
    fn groups(&self, candidate: &Candidate, cut: Cut) -> Option<usize> {
        let layers = candidate.counts.len();
        let mut of_blocks = vec![0; cut.blocks];
        for (layer, count) in candidate.counts.iter().enumerate() {
            let groups: &mut usize = &mut of_blocks[cut.block(layer, layers)];
            *groups = (*groups).max((*count).min(cut.slices));
        }
        of_blocks.contains(&cut.slices).then(|| of_blocks.iter().sum())
    }

    /// Dollars per second of so many groups for all remote experts, one function each, at least.
    fn least_remote_rate(&self, candidate: &Candidate, groups: f64) -> Option<f64> {
        let model = self.model;
        let bytes = candidate
            .counts
            .iter()
            .zip(&model.layers)
            .map(|(count, layer)| *count as f64 * layer.expert_bytes);
        let bytes = bytes.sum::<f64>() + groups * model.problem.function_bytes;
        let least = *model.remote_options(bytes / groups * (1.0 - 1e-12)).first()?;
        let smallest = model.remote_options(0.0).first().map_or(0.0, |sizing| sizing.rate);
        // Sizes cost in proportion to their bytes, beside the vCPUs.
        let per_byte =
            (model.function_rate(2e9, least.stated) - model.function_rate(1e9, least.stated)) / 1e9;
        let vcpus = model.function_rate(0.0, least.stated);
        Some((groups * smallest).max(bytes * per_byte + groups * vcpus))
    }

    fn is_late(&self, bill: &Bill) -> bool {
        let mut late = Limits::default();
        self.model.late(bill, &mut late);
        !late.names().is_empty()
    }

    fn explore(&mut self, arrangement: &Arrangement<'_>, work: usize) -> Option<Planned> {
        let model = self.model;
        let plan = self.plan(arrangement.candidate, arrangement.cut, arrangement.replicas);
        let terms = self.terms.get_or_init(|| LayerTerms::of_all(model)).as_deref();
        let table = Table::new(model, terms, &plan, arrangement.replicas)?;
        let stressed = self.factors.map(|factors| crate::cost::stress::stressed(model, factors, &plan));
        let stressed = match &stressed {
            Some(stressed) => Some(Table::new(stressed, None, &plan, arrangement.replicas)?),
            None => None,
        };
        let mains = model.main_options(model.main_needed(&arrangement.candidate.counts));
        let remotes = self.remote_options(&plan);
        if mains.is_empty() || remotes.is_empty() {
            return None;
        }
        let sized = Sizes { table: &table, stressed: stressed.as_ref(), mains: &mains, remotes: &remotes };
        let whole = Rectangle { main: (0, mains.len() - 1), remote: (0, remotes.len() - 1) };
        let isotonic = self.is_isotonic();
        let mut best: Option<Planned> = None;
        let mut open = BinaryHeap::from([Open { bound: 0.0, rectangle: whole }]);
        while let Some(Open { bound, rectangle }) = open.pop() {
            if bound > self.worth(best.as_ref(), work) {
                break;
            }
            let Some(halves) = rectangle.halves() else {
                let plan = sized_as(&plan, &sized.pair(rectangle.low()));
                best = self.judged(arrangement.candidate, plan, best.as_ref()).or(best);
                continue;
            };
            for half in halves {
                let single = half.low() == half.high();
                // Only where larger sizes are never slower does a corner speak for the others.
                let bound = match isotonic || single {
                    true => self.cost_between(&sized, half.low(), half.high()),
                    false => Some(bound),
                };
                self.counters.bounds += 1;
                if let Some(bound) = bound.filter(|bound| *bound <= self.worth(best.as_ref(), work)) {
                    open.push(Open { bound, rectangle: half });
                }
            }
        }
        best
    }

    /// What a plan of an arrangement must cost at most: less than the best one of it, and no more than is worth
    /// a look at all.
    fn worth(&self, own: Option<&Planned>, work: usize) -> f64 {
        let experts = self.model.experts();
        let gain = if experts > MANY_EXPERTS { COARSE_GAIN } else { -COST_TIE };
        own.map_or(f64::INFINITY, |own| own.cost() * (1.0 - gain)).min(self.limit(work))
    }

    fn is_isotonic(&self) -> bool {
        let remote = self.model.layers.iter().all(|layer| layer.remote_curve().is_isotonic_beyond());
        self.model.is_isotonic && remote
    }

    /// What any pair of sizes between `low` and `high` costs at least; none where even `high` is too late.
    fn cost_between(&self, sized: &Sizes<'_, '_>, low: (usize, usize), high: (usize, usize)) -> Option<f64> {
        let bill = self.model.quick_bill(&sized.table.running(&sized.pair(high), &sized.pair(low)));
        let stressed = sized
            .stressed
            .map(|table| self.model.quick_bill(&table.running(&sized.pair(high), &sized.pair(low))));
        let late = self.is_late(&bill) || stressed.is_some_and(|bill| self.is_late(&bill));
        (!late).then_some(bill.total())
    }

    /// The plan with its evaluation, where it keeps every limit and beats `other`.
    pub(crate) fn judged(
        &self,
        candidate: &Candidate,
        plan: Plan,
        other: Option<&Planned>,
    ) -> Option<Planned> {
        let planned = self.unjudged(candidate, plan);
        let beats = other.is_none_or(|other| planned.beats(other));
        (beats && (self.violations)(&planned.plan, &planned.evaluation).is_empty()).then_some(planned)
    }

    /// The sets of an arrangement; sizes are still open.
    fn plan(&self, candidate: &Candidate, cut: Cut, replicas: u32) -> Plan {
        let hosted = deal(self.model, self.tables, &candidate.counts, cut);
        let group = |experts| Group { experts, memory_bytes: 0.0, vcpus: None, replicas };
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
            let sizes = model.remote_options(largest).into_iter();
            return sizes.map(|sizing| vec![sizing; needed.len()]).collect();
        }
        let each: Vec<Vec<Sizing>> = needed.iter().map(|needed| model.remote_options(*needed)).collect();
        let count = each.iter().map(Vec::len).min().unwrap_or(0);
        (0..count).map(|index| each.iter().map(|options| options[index]).collect()).collect()
    }

    /// Bytes that a function of `group` needs, also when the prediction errs as far as plans must bear.
    fn needed(&self, plan: &Plan, group: &Group) -> f64 {
        let expected = self.model.group_needed(&group.experts);
        self.factors.map_or(expected, |factors| {
            expected
                .max(crate::cost::stress::stressed(self.model, factors, plan).group_needed(&group.experts))
        })
    }
}

/// `plan` with the sizes of `pair`.
fn sized_as(plan: &Plan, pair: &Pair<'_>) -> Plan {
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

/// Every number up to 16, then a quarter more each, up to `most`.
fn numbers(most: usize) -> impl Iterator<Item = usize> {
    let next = |number: &usize| Some(number + if *number < 16 { 1 } else { number / 4 });
    std::iter::successors(Some(1), next).take_while(move |number| *number <= most)
}

/// The sizes of one arrangement and their times.
struct Sizes<'a, 'm> {
    table: &'a Table<'m>,
    stressed: Option<&'a Table<'m>>,
    mains: &'a [Sizing],
    remotes: &'a [Vec<Sizing>],
}

impl Sizes<'_, '_> {
    fn pair(&self, (main, remote): (usize, usize)) -> Pair<'_> {
        Pair { main: self.mains[main], remote: &self.remotes[remote] }
    }
}

/// A rectangle that is still to be looked into; of two the one with the lower bound is the greater one.
struct Open {
    bound: f64,
    rectangle: Rectangle,
}

impl Ord for Open {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.bound.total_cmp(&self.bound)
    }
}

impl PartialOrd for Open {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Open {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Open {}

/// A range of main and of remote sizes.
#[derive(Debug, Clone, Copy)]
struct Rectangle {
    main: (usize, usize),
    remote: (usize, usize),
}

impl Rectangle {
    fn low(self) -> (usize, usize) {
        (self.main.0, self.remote.0)
    }

    fn high(self) -> (usize, usize) {
        (self.main.1, self.remote.1)
    }

    /// Both halves along the longer side, the smaller sizes first; none of a single pair.
    fn halves(self) -> Option<[Self; 2]> {
        let (mains, remotes) = (self.main.1 - self.main.0, self.remote.1 - self.remote.0);
        let split = |(low, high): (usize, usize)| {
            let middle = usize::midpoint(low, high);
            [(low, middle), (middle + 1, high)]
        };
        if mains == 0 && remotes == 0 {
            return None;
        }
        Some(match mains >= remotes {
            true => split(self.main).map(|main| Self { main, ..self }),
            false => split(self.remote).map(|remote| Self { remote, ..self }),
        })
    }
}
