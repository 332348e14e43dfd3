//! Local search by moves of single groups, sizes and experts, on the exact cost.

use super::layer_cache::LayerTimesCache;
use super::{CandidatePlan, FEW_EXPERTS, GroupSearch};
use remoe_plan::model::sizing::Sizing;
use remoe_plan::plan::{Group, Plan};

/// Maximum number of combinations of sizes of all functions that [`GroupSearch::all_sizings`] tries.
const MAX_SIZINGS: usize = 512;

/// Number of moves that are made at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MoveDepth {
    /// Single moves.
    Single,
    /// Single moves, and pairs of moves if no single move saves anything.
    Pairs,
}

impl GroupSearch<'_, '_> {
    /// Improves `best` by moves until none saves anything, or until `left` evaluations are used up.
    ///
    /// A move changes the size of the main function or of one group, the replicas of one group, or the place of one
    /// expert: in another group or in the main function.
    pub(crate) fn improved(
        &self,
        mut best: CandidatePlan,
        depth: MoveDepth,
        left: &mut usize,
    ) -> CandidatePlan {
        let mut cache = LayerTimesCache::default();
        while *left > 0 && !self.model.ends() {
            // With many experts few moves are affordable: most of them are single moves.
            let most = if self.is_small() { *left } else { *left / 4 };
            let bulk = self.bulk_moves(&best.plan, most);
            let near = self.neighbours(&best.plan, *left);
            let single = self.cheapest(bulk.iter().chain(&near), &best, left, &mut cache);
            let found = match depth {
                MoveDepth::Single => single,
                MoveDepth::Pairs => {
                    single.or_else(|| self.cheapest_pair(&best, &bulk, &near, left, &mut cache))
                }
            };
            match found {
                Some(found) if found.cost() < best.cost() * (1.0 - 1e-9) => best = found,
                _ => return best,
            }
        }
        best
    }

    /// Returns the cheapest plan that is two moves away from `best`, if it beats `best`.
    ///
    /// `near`: plans one single move away. `bulk`: plans one bulk move away.
    fn cheapest_pair(
        &self,
        best: &CandidatePlan,
        bulk: &[Plan],
        near: &[Plan],
        left: &mut usize,
        cache: &mut LayerTimesCache,
    ) -> Option<CandidatePlan> {
        let pairs =
            near.iter().take_while(|_| !self.model.ends()).flat_map(|plan| self.neighbours(plan, usize::MAX));
        let affordable = near.len() * near.len() <= *left;
        let pairs: Vec<Plan> = if affordable { pairs.collect() } else { Vec::new() };
        let tight: Vec<Plan> =
            pairs.iter().filter(|_| self.is_small()).filter_map(|plan| self.with_least_sizes(plan)).collect();
        let found = self.cheapest(pairs.iter().chain(&tight), best, left, cache);
        let found = found.or_else(|| {
            // Another assignment of experts may need other sizes of all functions at once.
            let others = bulk.iter().chain(near);
            let others = others.filter(|plan| {
                self.is_small() && !self.model.ends() && !has_same_assignment(plan, &best.plan)
            });
            let sized: Vec<Plan> = others.flat_map(|plan| self.all_sizings(plan)).take(*left).collect();
            self.cheapest(sized.iter(), best, left, cache)
        });
        found.or_else(|| {
            // After a bulk move single experts may belong elsewhere.
            let affordable = self.is_small() && bulk.len() * near.len() <= *left;
            let from = bulk.iter().filter(|_| affordable && !self.model.ends());
            let pairs: Vec<Plan> = from.flat_map(|plan| self.neighbours(plan, usize::MAX)).collect();
            self.cheapest(pairs.iter(), best, left, cache)
        })
    }

    /// Reports if experts are so few that costly moves may be tried.
    pub(crate) fn is_small(&self) -> bool {
        self.model.experts() <= FEW_EXPERTS
    }

    /// Returns the cheapest of `plans` that beats `best`. Every plan uses up one of `left` evaluations.
    fn cheapest<'p>(
        &self,
        plans: impl Iterator<Item = &'p Plan>,
        best: &CandidatePlan,
        left: &mut usize,
        cache: &mut LayerTimesCache,
    ) -> Option<CandidatePlan> {
        let mut better: Option<CandidatePlan> = None;
        for plan in plans {
            *left = left.saturating_sub(1);
            if self.model.ends() {
                break;
            }
            let beaten = better.as_ref().unwrap_or(best);
            if self.may_beat(plan, beaten, cache) {
                better = self.evaluate_if_better(&best.candidate, plan.clone(), Some(beaten)).or(better);
            }
        }
        better
    }

    /// Returns true if there are `most` plans or more, or if the search ends.
    pub(super) fn has_enough(&self, plans: &[Plan], most: usize) -> bool {
        if plans.len() >= most || self.model.ends() {
            return true;
        }
        // Work of writing a plan: its experts and its lists.
        let lists = plans.last().map_or(1, |plan| plan.groups.len()) * self.model.layers.len();
        self.model.meter.count(1 + self.model.experts() / 8 + lists);
        false
    }

    /// Returns up to `most` plans that are one move away from `plan`.
    pub(super) fn neighbours(&self, plan: &Plan, most: usize) -> Vec<Plan> {
        let mut plans = Vec::new();
        let counts = plan.remote_counts();
        let mains = self.model.main_options(self.model.main_needed(&counts));
        let is_current =
            |sizing: &Sizing| sizing.bytes == plan.main_bytes && sizing.stated == plan.main_vcpus;
        for main in adjacent_sizes(&mains, is_current) {
            plans.push(Plan { main_bytes: main.bytes, main_vcpus: main.stated, ..plan.clone() });
        }
        for index in 0..plan.groups.len() {
            if self.has_enough(&plans, most) {
                break;
            }
            plans.extend(self.group_moves(plan, index));
        }
        let most_groups = self.model.problem.limits.max_groups.unwrap_or(1) as usize;
        let is_small = self.is_small();
        let groups = || (0..plan.groups.len()).map(Some);
        // Including a new group, if the limit allows one.
        let with_new = || (0..(plan.groups.len() + 1).min(most_groups.max(plan.groups.len()))).map(Some);
        for (layer, table) in self.tables.iter().enumerate() {
            // The least used local expert may become remote. With few experts, each may, also in exchange for another.
            let remote = &plan.layers[layer].remote;
            let mut local = table.order.iter().filter(|expert| remote.binary_search(expert).is_err());
            let to_remote: Vec<u32> = match is_small {
                true => local.copied().collect(),
                false => local.next().copied().into_iter().collect(),
            };
            for group in 0..if is_small { plan.groups.len() } else { 0 } {
                for to_local in &plan.groups[group].experts[layer] {
                    let with_local = move_expert(plan.clone(), layer, *to_local, Some(group), None);
                    let swapped = to_remote
                        .iter()
                        .map(|expert| move_expert(with_local.clone(), layer, *expert, None, Some(group)));
                    plans.extend(swapped.filter_map(|plan| self.with_fitting_sizes(plan)));
                }
            }
            let from_local =
                to_remote.iter().flat_map(|expert| with_new().map(move |to| (*expert, None, to)));
            let from_groups = plan.groups.iter().enumerate().flat_map(|(from, group)| {
                let to = groups().chain([None]).filter(move |to| *to != Some(from));
                let experts = group.experts[layer].iter();
                experts.flat_map(move |expert| to.clone().map(move |to| (*expert, Some(from), to)))
            });
            for (expert, from, to) in from_local.chain(from_groups) {
                if self.has_enough(&plans, most) {
                    break;
                }
                let moved = self.with_fitting_sizes(move_expert(plan.clone(), layer, expert, from, to));
                plans.extend(moved);
            }
        }
        // Exchanges of two experts of different groups.
        for (one, other) in pairs(plan.groups.len()) {
            for layer in 0..plan.layers.len() {
                for expert in &plan.groups[one].experts[layer] {
                    for exchanged in &plan.groups[other].experts[layer] {
                        if self.has_enough(&plans, most) {
                            break;
                        }
                        let first = move_expert(plan.clone(), layer, *expert, Some(one), Some(other));
                        let both = move_expert(first, layer, *exchanged, Some(other), Some(one));
                        plans.extend(self.with_fitting_sizes(both));
                    }
                }
            }
        }
        plans.retain(|plan| {
            let counts = plan.remote_counts();
            // Plans without remote experts are searched as a strategy of their own.
            plan.replicas() > 0 && self.remote.allows(self.model, &counts)
        });
        plans.truncate(most);
        plans
    }

    /// Returns plans with another size, number of replicas or idle window of the group at `index`.
    fn group_moves(&self, plan: &Plan, index: usize) -> Vec<Plan> {
        let group = &plan.groups[index];
        let options = self.model.remote_options(self.needed_bytes(plan, group));
        let is_current = |sizing: &Sizing| sizing.bytes == group.memory_bytes && sizing.stated == group.vcpus;
        let with = |changed: Group| {
            let mut plan = plan.clone();
            plan.groups[index] = changed;
            plan
        };
        let sizes = adjacent_sizes(&options, is_current).map(|sizing| Group {
            memory_bytes: sizing.bytes,
            vcpus: sizing.stated,
            ..group.clone()
        });
        let fewer = (group.replicas > 1).then(|| Group { replicas: group.replicas - 1, ..group.clone() });
        let more = (group.replicas < self.model.problem.limits.max_replicas)
            .then(|| Group { replicas: group.replicas + 1, ..group.clone() });
        let toggled = self.idle_window.map(|window| match group.idle_seconds {
            Some(_) => Group { idle_seconds: None, ..group.clone() },
            None => Group { idle_seconds: Some(window), ..group.clone() },
        });
        sizes.chain(fewer).chain(more).chain(toggled).map(with).collect()
    }

    /// Returns `plan` with the least sizes that hold its experts, at the same vCPUs, if that differs from `plan`.
    fn with_least_sizes(&self, plan: &Plan) -> Option<Plan> {
        let mut least = Plan { main_bytes: 0.0, ..plan.clone() };
        least.groups.iter_mut().for_each(|group| group.memory_bytes = 0.0);
        self.with_fitting_sizes(least).filter(|tight| tight != plan)
    }

    /// Returns `plan` with every combination of sizes, replicas and idle windows of all its functions.
    ///
    /// Returns no plans if there are more than [`MAX_SIZINGS`].
    pub(super) fn all_sizings(&self, plan: &Plan) -> Vec<Plan> {
        let mains = self.model.main_options(self.model.main_needed(&plan.remote_counts()));
        let replicas = self.model.problem.limits.max_replicas;
        let options =
            plan.groups.iter().map(|group| self.model.remote_options(self.needed_bytes(plan, group)));
        let options: Vec<Vec<Sizing>> = options.collect();
        let of_groups = options.iter().map(|options| options.len().saturating_mul(replicas as usize));
        if of_groups.fold(mains.len(), usize::saturating_mul) > MAX_SIZINGS {
            return Vec::new();
        }
        let with_main =
            |main: &Sizing| Plan { main_bytes: main.bytes, main_vcpus: main.stated, ..plan.clone() };
        let mut plans: Vec<Plan> = mains.iter().map(with_main).collect();
        for (index, options) in options.iter().enumerate() {
            let idle_windows = match self.idle_window {
                Some(window) => vec![None, Some(window)],
                None => vec![plan.groups[index].idle_seconds],
            };
            let each = |plan: &Plan| {
                let sizes =
                    options.iter().flat_map(|sizing| (1..=replicas).map(move |replicas| (*sizing, replicas)));
                let sizes = sizes.flat_map(|(sizing, replicas)| {
                    idle_windows.iter().map(move |idle| (sizing, replicas, *idle))
                });
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

    /// Returns `plan` with sizes that hold its experts, at the same vCPUs where these are stated.
    ///
    /// Returns `None` if no size holds the experts of a function.
    pub(crate) fn with_fitting_sizes(&self, mut plan: Plan) -> Option<Plan> {
        let counts = plan.remote_counts();
        let mains = self.model.main_sizings(self.model.main_needed(&counts));
        let main = fitting(mains, plan.main_bytes, plan.main_vcpus)?;
        (plan.main_bytes, plan.main_vcpus) = (main.bytes, main.stated);
        plan.groups.retain(|group| group.experts.iter().any(|experts| !experts.is_empty()));
        for index in 0..plan.groups.len() {
            let options = self.model.remote_sizings(self.needed_bytes(&plan, &plan.groups[index]));
            let group = &mut plan.groups[index];
            let sizing = fitting(options, group.memory_bytes, group.vcpus)?;
            (group.memory_bytes, group.vcpus) = (sizing.bytes, sizing.stated);
        }
        Some(plan)
    }
}

/// Reports if both plans assign the same experts to each group.
fn has_same_assignment(one: &Plan, other: &Plan) -> bool {
    one.groups.iter().map(|group| &group.experts).eq(other.groups.iter().map(|group| &group.experts))
}

/// Returns all pairs of different indices below `groups`.
fn pairs(groups: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..groups).flat_map(move |one| (one + 1..groups).map(move |other| (one, other)))
}

/// Returns the options next to the current one: the smaller and the larger.
fn adjacent_sizes(options: &[Sizing], is_current: impl Fn(&Sizing) -> bool) -> impl Iterator<Item = Sizing> {
    let current = options.iter().position(is_current);
    let pair = current.map(|index| [index.checked_sub(1), Some(index + 1)]).into_iter().flatten().flatten();
    pair.filter_map(|index| options.get(index).copied()).collect::<Vec<_>>().into_iter()
}

/// Returns the first option with `vcpus`, or if vCPUs come with memory, the first with at least `bytes`.
///
/// If there is none, returns the last option.
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

/// Returns `plan` with `expert` of `layer` moved from one group to another.
///
/// `None` stands for the main function, the number of groups for a new group.
fn move_expert(mut plan: Plan, layer: usize, expert: u32, from: Option<usize>, to: Option<usize>) -> Plan {
    let insert = |set: &mut Vec<u32>| set.insert(set.partition_point(|id| *id < expert), expert);
    match from {
        Some(from) => plan.groups[from].experts[layer].retain(|id| *id != expert),
        None => insert(&mut plan.layers[layer].remote),
    }
    if to == Some(plan.groups.len()) {
        let first = plan.groups.first();
        plan.groups.push(Group {
            experts: vec![Vec::new(); plan.layers.len()],
            memory_bytes: 0.0,
            vcpus: first.and_then(|group| group.vcpus),
            replicas: 1,
            idle_seconds: first.and_then(|group| group.idle_seconds),
        });
    }
    match to {
        Some(to) => insert(&mut plan.groups[to].experts[layer]),
        None => plan.layers[layer].remote.retain(|id| *id != expert),
    }
    plan
}
