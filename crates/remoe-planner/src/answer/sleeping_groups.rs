//! Search for plans with groups that scale to zero.
//!
//! Often used experts stay in the main function or in groups that are always alive. Groups of the others are billed only
//! while requests use them.

use crate::best_plans::{Effort, SearchInputs};
use crate::slicing::{CandidatePlan, MoveDepth, in_groups};
use remoe_plan::alive::{ScalingGroup, mean_per_second};
use remoe_plan::model::Model;
use remoe_plan::plan::{Group, LayerPlan, Plan};

/// Maximum number of evaluations of moves from a plan with groups that scale to zero.
const MAX_MOVES: usize = 5_000;
/// Shares of a group's experts, the least used ones, that are tried as a separate group.
const SPLIT_SHARES: [f64; 3] = [0.25, 0.5, 0.75];

impl<'s, 'm: 's> SearchInputs<'s, 'm> {
    /// Returns the cheaper of `sliced` and of the best plan with groups that scale to zero, if the problem allows these.
    ///
    /// `sliced`: the cheapest plan with groups that are always alive. `mix`: the cheapest all-local plan.
    /// `search_at_price`: searches arrangements with groups that are billed for a part of the time.
    pub(crate) fn with_sleeping_groups(
        &self,
        sliced: Option<CandidatePlan>,
        mix: Option<&CandidatePlan>,
        effort: Effort,
        search_at_price: impl FnOnce(&SearchInputs<'_, '_>) -> Option<CandidatePlan>,
    ) -> Option<CandidatePlan> {
        let allowed = self.model.problem.remote_idle_seconds.filter(|_| self.model.groups_may_sleep());
        let Some(window) = allowed else { return sliced };
        // Rarely used experts may also leave an all-local plan.
        let mut starts: Vec<CandidatePlan> = sliced.iter().chain(mix).cloned().collect();
        // With few experts also if the main function cannot hold them all.
        let group_search = self.new_group_search();
        if let Some(known) = sliced.as_ref().filter(|_| mix.is_none() && group_search.is_small()) {
            let layers = vec![LayerPlan::default(); self.model.layers.len()];
            let all_local = Plan { layers, groups: Vec::new(), ..known.plan.clone() };
            starts.push(group_search.evaluated(&known.candidate, all_local));
        }
        if let Some(share) = sliced.as_ref().or(mix).and_then(|known| self.alive_share(known, window)) {
            // Groups that scale to zero are cheaper: arrangements are searched at that price.
            let cheap = Model { remote_share: share, ..self.model.beside(self.model.problem) };
            starts.extend(search_at_price(&SearchInputs { model: &cheap, ..*self }));
            self.model.work.set(self.model.work_done() + cheap.work_done());
        }
        let starts = starts.into_iter().take_while(|_| !self.model.ends());
        let ends = starts.filter_map(|start| self.improved_with_sleeping(&start, window, effort));
        let best = ends.reduce(|best, other| if other.beats(&best) { other } else { best });
        match (sliced, best) {
            (Some(alive), Some(sleeping)) if !sleeping.beats(&alive) => Some(alive),
            (alive, sleeping) => sleeping.or(alive),
        }
    }

    /// Returns the share of the time in which a group that every request uses is alive, at the load of `known`.
    fn alive_share(&self, known: &CandidatePlan, window: f64) -> Option<f64> {
        let problem = self.model.problem;
        let (arrivals, starts) = (problem.arrivals.as_ref()?, problem.starts?);
        let service_seconds = known.evaluation.life?.service_seconds;
        let all = self.model.local_expert_bytes(&vec![0; self.model.layers.len()]);
        let groups = known.plan.groups.len().max(1) as f64;
        let alone = ScalingGroup {
            per_second: mean_per_second(arrivals),
            idle_seconds: window,
            start_seconds: starts.remote.seconds(all / groups),
            service_seconds,
            cold_seconds: service_seconds,
        };
        Some(alone.time().share)
    }

    /// Searches the cheapest feasible plan of `start` and the plans near it with groups that scale to zero.
    fn improved_with_sleeping(
        &self,
        start: &CandidatePlan,
        window: f64,
        effort: Effort,
    ) -> Option<CandidatePlan> {
        let mut group_search = self.new_group_search();
        group_search.idle_window = Some(window).filter(|_| group_search.is_small());
        let plan = in_groups(&start.plan);
        // The search that found `start` may have used another price.
        let candidate = &start.candidate;
        let alive = group_search.evaluate_if_better(candidate, plan.clone(), None);
        let groups: Vec<Group> =
            plan.groups.iter().map(|group| with_idle_window(group, Some(window))).collect();
        let all = Plan { groups, ..plan.clone() };
        let sleeping = group_search.evaluate_if_better(candidate, all.clone(), None);
        let with_best_cold_groups = [
            group_search.with_best_cold_groups(candidate, &plan, alive.as_ref(), window),
            // All groups may scale to zero, not only the cold ones.
            sleeping
                .as_ref()
                .filter(|_| all != plan)
                .and_then(|known| group_search.with_best_cold_groups(candidate, &all, Some(known), window)),
        ];
        let found = with_best_cold_groups.into_iter().chain([sleeping, alive]).flatten();
        // All-local plans are a strategy of their own.
        let found: Vec<CandidatePlan> = found.filter(|found| !found.plan.groups.is_empty()).collect();
        let better =
            |best: CandidatePlan, other: CandidatePlan| if other.beats(&best) { other } else { best };
        // The best start is not always the best end.
        let starts = if group_search.is_small() {
            found.clone()
        } else {
            found.iter().cloned().reduce(better).into_iter().collect()
        };
        let best = found.into_iter().reduce(better);
        let moved = starts.into_iter().filter(|_| effort == Effort::Full).map(|planned| {
            let mut left = self.max_evaluations().min(MAX_MOVES);
            group_search.improved(planned, MoveDepth::Pairs, &mut left)
        });
        let moved = moved.reduce(better);
        let mut best = moved.or(best)?;
        loop {
            let cost = best.cost();
            for plan in self.idle_window_moves(&best.plan, window) {
                best = group_search.evaluate_if_better(&best.candidate, plan, Some(&best)).unwrap_or(best);
            }
            if best.cost() >= cost || self.model.ends() {
                return Some(best);
            }
        }
    }

    /// Returns `plan` with the idle window of one group added or removed, and with the least used experts of one group as a
    /// separate group.
    fn idle_window_moves(&self, plan: &Plan, window: f64) -> Vec<Plan> {
        let mut plans = Vec::new();
        let most = self.model.problem.limits.max_groups.unwrap_or(0) as usize;
        for index in 0..plan.groups.len() {
            let group = &plan.groups[index];
            let other =
                with_idle_window(group, if group.idle_seconds.is_some() { None } else { Some(window) });
            let mut flipped = plan.clone();
            flipped.groups[index] = other;
            plans.push(flipped);
            if plan.groups.len() >= most {
                continue;
            }
            for part in SPLIT_SHARES {
                let (mut hot, mut cold) = (group.clone(), with_idle_window(group, Some(window)));
                for (layer, experts) in group.experts.iter().enumerate() {
                    let shares = &self.model.shares[layer];
                    let mut by_use = experts.clone();
                    by_use.sort_by(|a, b| shares[*a as usize].total_cmp(&shares[*b as usize]).then(a.cmp(b)));
                    let (rare, often) = by_use.split_at((experts.len() as f64 * part).round() as usize);
                    (cold.experts[layer], hot.experts[layer]) = (sorted(rare), sorted(often));
                }
                let mut split = plan.clone();
                split.groups[index] = hot;
                split.groups.push(cold);
                plans.extend(self.new_group_search().with_fitting_sizes(split));
            }
        }
        plans
    }
}

fn with_idle_window(group: &Group, idle_seconds: Option<f64>) -> Group {
    Group { idle_seconds, ..group.clone() }
}

fn sorted(experts: &[u32]) -> Vec<u32> {
    let mut experts = experts.to_vec();
    experts.sort_unstable();
    experts
}
