//! Plans whose groups end by themselves: what is used all the time stays with the main function, or in groups that
//! stay, and the others are paid for while requests use them.

use crate::plans::{Effort, Inputs};
use crate::slicing::{Depth, FeasiblePlan, in_groups};
use remoe_plan::alive::{Alone, mean_per_second};
use remoe_plan::model::Model;
use remoe_plan::plan::{Group, LayerPlan, Plan};

/// Evaluations of moves from a plan whose groups end by themselves, at most.
const MOST_MOVES: usize = 5_000;
/// Shares of a group's experts that are tried as a group of their own, those that are used least.
const PARTS: [f64; 3] = [0.25, 0.5, 0.75];

impl<'s, 'm: 's> Inputs<'s, 'm> {
    /// `sliced`, the cheapest plan of groups that stay, or a cheaper one in which some end by themselves where the
    /// problem allows that. `mix` is the cheapest plan with nothing remote; `paid` searches at the price of groups
    /// that are paid for a part of the time.
    pub(crate) fn with_sleepers(
        &self,
        sliced: Option<FeasiblePlan>,
        mix: Option<&FeasiblePlan>,
        effort: Effort,
        paid: impl FnOnce(&Inputs<'_, '_>) -> Option<FeasiblePlan>,
    ) -> Option<FeasiblePlan> {
        let allowed = self.model.problem.remote_idle_seconds.filter(|_| self.model.groups_may_sleep());
        let Some(window) = allowed else { return sliced };
        // What is rarely used may leave the main function where all else stays there.
        let mut starts: Vec<FeasiblePlan> = sliced.iter().chain(mix).cloned().collect();
        // Of few experts also where not all of them fit it.
        let slicing = self.new_slicing();
        if let Some(known) = sliced.as_ref().filter(|_| mix.is_none() && slicing.is_small()) {
            let layers = vec![LayerPlan::default(); self.model.layers.len()];
            let home = Plan { layers, groups: Vec::new(), ..known.plan.clone() };
            starts.push(slicing.unjudged(&known.candidate, home));
        }
        if let Some(share) = sliced.as_ref().or(mix).and_then(|known| self.share_alive(known, window)) {
            // What groups cost a second is what differs most: their arrangement is searched at that price.
            let cheap = Model { remote_share: share, ..self.model.beside(self.model.problem) };
            starts.extend(paid(&Inputs { model: &cheap, ..*self }));
            self.model.work.set(self.model.work_done() + cheap.work_done());
        }
        let starts = starts.into_iter().take_while(|_| !self.model.ends());
        let ends = starts.filter_map(|start| self.asleep(&start, window, effort));
        let best = ends.reduce(|best, other| if other.beats(&best) { other } else { best });
        match (sliced, best) {
            (Some(stays), Some(sleeps)) if !sleeps.beats(&stays) => Some(stays),
            (stays, sleeps) => sleeps.or(stays),
        }
    }

    /// The share of the time for which groups are alive that every request uses, at the load of `known`.
    fn share_alive(&self, known: &FeasiblePlan, window: f64) -> Option<f64> {
        let problem = self.model.problem;
        let (arrivals, starts) = (problem.arrivals.as_ref()?, problem.starts?);
        let service_seconds = known.evaluation.life?.service_seconds;
        let all = self.model.local_expert_bytes(&vec![0; self.model.layers.len()]);
        let groups = known.plan.groups.len().max(1) as f64;
        let alone = Alone {
            per_second: mean_per_second(arrivals),
            idle_seconds: window,
            start_seconds: starts.remote.seconds(all / groups),
            service_seconds,
            cold_seconds: service_seconds,
        };
        Some(alone.time().share)
    }

    /// The cheapest of `start` and the plans near it with groups that end by themselves that keeps every limit.
    fn asleep(&self, start: &FeasiblePlan, window: f64, effort: Effort) -> Option<FeasiblePlan> {
        let mut slicing = self.new_slicing();
        slicing.window = Some(window).filter(|_| slicing.is_small());
        let plan = in_groups(&start.plan);
        // Costs of the search that found it may be at another price.
        let candidate = &start.candidate;
        let stays = slicing.judged(candidate, plan.clone(), None);
        let groups: Vec<Group> = plan.groups.iter().map(|group| asleep(group, Some(window))).collect();
        let all = Plan { groups, ..plan.clone() };
        let sleeps = slicing.judged(candidate, all.clone(), None);
        let parted = [
            slicing.parted(candidate, &plan, stays.as_ref(), window),
            // Where groups are, those that are hot may sleep as well.
            sleeps
                .as_ref()
                .filter(|_| all != plan)
                .and_then(|known| slicing.parted(candidate, &all, Some(known), window)),
        ];
        let found = parted.into_iter().chain([sleeps, stays]).flatten();
        // Nothing remote is a way of its own.
        let found: Vec<FeasiblePlan> = found.filter(|found| !found.plan.groups.is_empty()).collect();
        let better = |best: FeasiblePlan, other: FeasiblePlan| if other.beats(&best) { other } else { best };
        // The best start is not always the best end.
        let starts = if slicing.is_small() {
            found.clone()
        } else {
            found.iter().cloned().reduce(better).into_iter().collect()
        };
        let best = found.into_iter().reduce(better);
        let moved = starts.into_iter().filter(|_| effort == Effort::Full).map(|planned| {
            let mut left = self.moves().min(MOST_MOVES);
            slicing.improved(planned, Depth::Pairs, &mut left)
        });
        let moved = moved.reduce(better);
        let mut best = moved.or(best)?;
        loop {
            let cost = best.cost();
            for plan in self.other_sleepers(&best.plan, window) {
                best = slicing.judged(&best.candidate, plan, Some(&best)).unwrap_or(best);
            }
            if best.cost() >= cost || self.model.ends() {
                return Some(best);
            }
        }
    }

    /// `plan` with one group that stays instead of ending, or the other way round; or with the part of a group that is
    /// used least as a group of its own.
    fn other_sleepers(&self, plan: &Plan, window: f64) -> Vec<Plan> {
        let mut plans = Vec::new();
        let most = self.model.problem.limits.max_groups.unwrap_or(0) as usize;
        for index in 0..plan.groups.len() {
            let group = &plan.groups[index];
            let other = asleep(group, if group.idle_seconds.is_some() { None } else { Some(window) });
            let mut flipped = plan.clone();
            flipped.groups[index] = other;
            plans.push(flipped);
            if plan.groups.len() >= most {
                continue;
            }
            for part in PARTS {
                let (mut hot, mut cold) = (group.clone(), asleep(group, Some(window)));
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
                plans.extend(self.new_slicing().sized(split));
            }
        }
        plans
    }
}

fn asleep(group: &Group, idle_seconds: Option<f64>) -> Group {
    Group { idle_seconds, ..group.clone() }
}

fn sorted(experts: &[u32]) -> Vec<u32> {
    let mut experts = experts.to_vec();
    experts.sort_unstable();
    experts
}
