//! Moves of single groups, sizes and experts on the exact cost.

use super::known::KnownLayers;
use super::{FEW_EXPERTS, FeasiblePlan, Slicing};
use remoe_plan::model::sizing::Sizing;
use remoe_plan::plan::{Group, Plan};

/// Sizes of all functions together that are all tried for another deal, at most.
const MOST_SIZES: usize = 512;

/// How many moves are made at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Depth {
    /// One.
    Single,
    /// One, and where none saves anything a pair.
    Pairs,
}

impl Slicing<'_, '_> {
    /// `best` after every move that saves something: another size of the main function or of one group, a
    /// function more or less of one group, one expert to another group, home or away; and after pairs of
    /// them as far as `left` evaluations go.
    pub(crate) fn improved(&self, mut best: FeasiblePlan, depth: Depth, left: &mut usize) -> FeasiblePlan {
        let mut known = KnownLayers::default();
        while *left > 0 && !self.model.ends() {
            // Of many experts few moves are made: most of them in the small.
            let most = if self.is_small() { *left } else { *left / 4 };
            let blocks = self.block_moves(&best.plan, most);
            let near = self.neighbours(&best.plan, *left);
            let single = self.cheapest(blocks.iter().chain(&near), &best, left, &mut known);
            let found = match depth {
                Depth::Single => single,
                Depth::Pairs => {
                    single.or_else(|| self.cheapest_pair(&best, &blocks, &near, left, &mut known))
                }
            };
            match found {
                Some(found) if found.cost() < best.cost() * (1.0 - 1e-9) => best = found,
                _ => return best,
            }
        }
        best
    }

    /// The cheapest plan two moves away from `best`, whose neighbours are `near` and, with many experts moved at once,
    /// `blocks`.
    fn cheapest_pair(
        &self,
        best: &FeasiblePlan,
        blocks: &[Plan],
        near: &[Plan],
        left: &mut usize,
        known: &mut KnownLayers,
    ) -> Option<FeasiblePlan> {
        let pairs =
            near.iter().take_while(|_| !self.model.ends()).flat_map(|plan| self.neighbours(plan, usize::MAX));
        let affordable = near.len() * near.len() <= *left;
        let pairs: Vec<Plan> = if affordable { pairs.collect() } else { Vec::new() };
        let snug: Vec<Plan> =
            pairs.iter().filter(|_| self.is_small()).filter_map(|plan| self.snug(plan)).collect();
        let found = self.cheapest(pairs.iter().chain(&snug), best, left, known);
        let found = found.or_else(|| {
            // Another deal may want other sizes of all functions at once.
            let others = blocks.iter().chain(near);
            let others = others
                .filter(|plan| self.is_small() && !self.model.ends() && !is_dealt_alike(plan, &best.plan));
            let sized: Vec<Plan> = others.flat_map(|plan| self.every_size(plan)).take(*left).collect();
            self.cheapest(sized.iter(), best, left, known)
        });
        found.or_else(|| {
            // Many experts that move at once may want single ones elsewhere.
            let affordable = self.is_small() && blocks.len() * near.len() <= *left;
            let from = blocks.iter().filter(|_| affordable && !self.model.ends());
            let pairs: Vec<Plan> = from.flat_map(|plan| self.neighbours(plan, usize::MAX)).collect();
            self.cheapest(pairs.iter(), best, left, known)
        })
    }

    /// Reports if experts are few: then moves may be tried that would be too many with more experts.
    pub(crate) fn is_small(&self) -> bool {
        self.model.experts() <= FEW_EXPERTS
    }

    fn cheapest<'p>(
        &self,
        plans: impl Iterator<Item = &'p Plan>,
        best: &FeasiblePlan,
        left: &mut usize,
        known: &mut KnownLayers,
    ) -> Option<FeasiblePlan> {
        let mut better: Option<FeasiblePlan> = None;
        for plan in plans {
            *left = left.saturating_sub(1);
            if self.model.ends() {
                break;
            }
            let beaten = better.as_ref().unwrap_or(best);
            if self.may_beat(plan, beaten, known) {
                better = self.judged(&best.candidate, plan.clone(), Some(beaten)).or(better);
            }
        }
        better
    }

    /// Returns true if `plans` are at least `most`, or the search ends.
    pub(super) fn has_enough(&self, plans: &[Plan], most: usize) -> bool {
        if plans.len() >= most || self.model.ends() {
            return true;
        }
        // A plan is written expert by expert, list by list.
        let lists = plans.last().map_or(1, |plan| plan.groups.len()) * self.model.layers.len();
        self.model.meter.count(1 + self.model.experts() / 8 + lists);
        false
    }

    /// At most `most` plans one move away.
    pub(super) fn neighbours(&self, plan: &Plan, most: usize) -> Vec<Plan> {
        let mut plans = Vec::new();
        let counts = plan.remote_counts();
        let mains = self.model.main_options(self.model.main_needed(&counts));
        let now = |sizing: &Sizing| sizing.bytes == plan.main_bytes && sizing.stated == plan.main_vcpus;
        for main in beside(&mains, now) {
            plans.push(Plan { main_bytes: main.bytes, main_vcpus: main.stated, ..plan.clone() });
        }
        for index in 0..plan.groups.len() {
            if self.has_enough(&plans, most) {
                break;
            }
            plans.extend(self.group_moves(plan, index));
        }
        let most_groups = self.model.problem.limits.max_groups.unwrap_or(1) as usize;
        let few = self.is_small();
        let groups = || (0..plan.groups.len()).map(Some);
        // One group more, where there may be.
        let with_new = || (0..(plan.groups.len() + 1).min(most_groups.max(plan.groups.len()))).map(Some);
        for (layer, table) in self.tables.iter().enumerate() {
            // The local expert that is used least may go; of few experts any, or one in the place of another.
            let remote = &plan.layers[layer].remote;
            let mut local = table.order.iter().filter(|expert| remote.binary_search(expert).is_err());
            let going: Vec<u32> = match few {
                true => local.copied().collect(),
                false => local.next().copied().into_iter().collect(),
            };
            for group in 0..if few { plan.groups.len() } else { 0 } {
                for back in &plan.groups[group].experts[layer] {
                    let home = moved(plan.clone(), layer, *back, Some(group), None);
                    let swapped =
                        going.iter().map(|expert| moved(home.clone(), layer, *expert, None, Some(group)));
                    plans.extend(swapped.filter_map(|plan| self.sized(plan)));
                }
            }
            let away = going.iter().flat_map(|expert| with_new().map(move |to| (*expert, None, to)));
            let of_groups = plan.groups.iter().enumerate().flat_map(|(from, group)| {
                let to = groups().chain([None]).filter(move |to| *to != Some(from));
                let experts = group.experts[layer].iter();
                experts.flat_map(move |expert| to.clone().map(move |to| (*expert, Some(from), to)))
            });
            for (expert, from, to) in away.chain(of_groups) {
                if self.has_enough(&plans, most) {
                    break;
                }
                let moved = self.sized(moved(plan.clone(), layer, expert, from, to));
                plans.extend(moved);
            }
        }
        for (one, other) in pairs(plan.groups.len()) {
            for layer in 0..plan.layers.len() {
                for expert in &plan.groups[one].experts[layer] {
                    for back in &plan.groups[other].experts[layer] {
                        if self.has_enough(&plans, most) {
                            break;
                        }
                        let there = moved(plan.clone(), layer, *expert, Some(one), Some(other));
                        plans.extend(self.sized(moved(there, layer, *back, Some(other), Some(one))));
                    }
                }
            }
        }
        plans.retain(|plan| {
            let counts = plan.remote_counts();
            // What has nothing remote is a way of its own.
            plan.replicas() > 0 && self.remote.allows(self.model, &counts)
        });
        plans.truncate(most);
        plans
    }

    /// Other sizes and numbers of functions of one group, and whether it ends by itself.
    fn group_moves(&self, plan: &Plan, index: usize) -> Vec<Plan> {
        let group = &plan.groups[index];
        let options = self.model.remote_options(self.needed(plan, group));
        let now = |sizing: &Sizing| sizing.bytes == group.memory_bytes && sizing.stated == group.vcpus;
        let with = |changed: Group| {
            let mut plan = plan.clone();
            plan.groups[index] = changed;
            plan
        };
        let sizes = beside(&options, now).map(|sizing| Group {
            memory_bytes: sizing.bytes,
            vcpus: sizing.stated,
            ..group.clone()
        });
        let fewer = (group.replicas > 1).then(|| Group { replicas: group.replicas - 1, ..group.clone() });
        let more = (group.replicas < self.model.problem.limits.max_replicas)
            .then(|| Group { replicas: group.replicas + 1, ..group.clone() });
        let other = self.window.map(|window| match group.idle_seconds {
            Some(_) => Group { idle_seconds: None, ..group.clone() },
            None => Group { idle_seconds: Some(window), ..group.clone() },
        });
        sizes.chain(fewer).chain(more).chain(other).map(with).collect()
    }

    /// `plan` with every function of the least size that holds what is there, at the same vCPUs: what fewer experts
    /// need was sized for more.
    fn snug(&self, plan: &Plan) -> Option<Plan> {
        let mut least = Plan { main_bytes: 0.0, ..plan.clone() };
        least.groups.iter_mut().for_each(|group| group.memory_bytes = 0.0);
        self.sized(least).filter(|snug| snug != plan)
    }

    /// `plan` with every size and number of all its functions, and every choice of groups that end by themselves; none
    /// where they are many.
    pub(super) fn every_size(&self, plan: &Plan) -> Vec<Plan> {
        let mains = self.model.main_options(self.model.main_needed(&plan.remote_counts()));
        let replicas = self.model.problem.limits.max_replicas;
        let options = plan.groups.iter().map(|group| self.model.remote_options(self.needed(plan, group)));
        let options: Vec<Vec<Sizing>> = options.collect();
        let of_groups = options.iter().map(|options| options.len().saturating_mul(replicas as usize));
        if of_groups.fold(mains.len(), usize::saturating_mul) > MOST_SIZES {
            return Vec::new();
        }
        let with_main =
            |main: &Sizing| Plan { main_bytes: main.bytes, main_vcpus: main.stated, ..plan.clone() };
        let mut plans: Vec<Plan> = mains.iter().map(with_main).collect();
        for (index, options) in options.iter().enumerate() {
            let ends = match self.window {
                Some(window) => vec![None, Some(window)],
                None => vec![plan.groups[index].idle_seconds],
            };
            let each = |plan: &Plan| {
                let sizes =
                    options.iter().flat_map(|sizing| (1..=replicas).map(move |replicas| (*sizing, replicas)));
                let sizes = sizes
                    .flat_map(|(sizing, replicas)| ends.iter().map(move |idle| (sizing, replicas, *idle)));
                let with = |(sizing, replicas, idle_seconds): (Sizing, u32, Option<f64>)| {
                    let mut plan = plan.clone();
                    let group = &mut plan.groups[index];
                    (group.memory_bytes, group.vcpus) = (sizing.bytes, sizing.stated);
                    (group.replicas, group.idle_seconds) = (replicas, idle_seconds);
                    plan
                };
                sizes.map(with).collect::<Vec<_>>()
            };
            plans = plans.iter().flat_map(each).collect();
        }
        plans
    }

    /// `plan` with every size raised or lowered to the least that holds what is there, at the same vCPUs;
    /// none where nothing holds it.
    pub(crate) fn sized(&self, mut plan: Plan) -> Option<Plan> {
        let counts = plan.remote_counts();
        let mains = self.model.main_sizings(self.model.main_needed(&counts));
        let main = fitting(mains, plan.main_bytes, plan.main_vcpus)?;
        (plan.main_bytes, plan.main_vcpus) = (main.bytes, main.stated);
        plan.groups.retain(|group| group.experts.iter().any(|experts| !experts.is_empty()));
        for index in 0..plan.groups.len() {
            let options = self.model.remote_sizings(self.needed(&plan, &plan.groups[index]));
            let group = &mut plan.groups[index];
            let sizing = fitting(options, group.memory_bytes, group.vcpus)?;
            (group.memory_bytes, group.vcpus) = (sizing.bytes, sizing.stated);
        }
        Some(plan)
    }
}

/// Reports if the same groups have the same experts.
fn is_dealt_alike(one: &Plan, other: &Plan) -> bool {
    one.groups.iter().map(|group| &group.experts).eq(other.groups.iter().map(|group| &group.experts))
}

/// All pairs of so many groups.
fn pairs(groups: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..groups).flat_map(move |one| (one + 1..groups).map(move |other| (one, other)))
}

/// The options right below and above the present one.
fn beside(options: &[Sizing], now: impl Fn(&Sizing) -> bool) -> impl Iterator<Item = Sizing> {
    let at = options.iter().position(now);
    let pair = at.map(|at| [at.checked_sub(1), Some(at + 1)]).into_iter().flatten().flatten();
    pair.filter_map(|index| options.get(index).copied()).collect::<Vec<_>>().into_iter()
}

/// The option with these vCPUs, or where memory brings them the least one with as much memory, or the largest;
/// of a new function the least one.
fn fitting(options: impl Iterator<Item = Sizing>, bytes: f64, vcpus: Option<f64>) -> Option<Sizing> {
    let fits = |sizing: &Sizing| match vcpus {
        Some(_) => sizing.stated == vcpus,
        None => sizing.bytes >= bytes,
    };
    let mut last = None;
    for sizing in options {
        last = Some(sizing);
        if fits(&sizing) {
            break;
        }
    }
    last
}

/// `plan` with `expert` of `layer` moved from one group to another; none stands for home, the number behind
/// the last group for a new one.
fn moved(mut plan: Plan, layer: usize, expert: u32, from: Option<usize>, to: Option<usize>) -> Plan {
    let insert = |set: &mut Vec<u32>| set.insert(set.partition_point(|id| *id < expert), expert);
    match from {
        Some(from) => plan.groups[from].experts[layer].retain(|id| *id != expert),
        None => insert(&mut plan.layers[layer].remote),
    }
    if to == Some(plan.groups.len()) {
        let like = plan.groups.first();
        plan.groups.push(Group {
            experts: vec![Vec::new(); plan.layers.len()],
            memory_bytes: 0.0,
            vcpus: like.and_then(|group| group.vcpus),
            replicas: 1,
            idle_seconds: like.and_then(|group| group.idle_seconds),
        });
    }
    match to {
        Some(to) => insert(&mut plan.groups[to].experts[layer]),
        None => plan.layers[layer].remote.retain(|id| *id != expert),
    }
    plan
}
