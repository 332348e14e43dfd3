//! Search near the previous plan, for changed shares: it takes milliseconds.
//!
//! First the experts are reassigned by the new shares. A local search over arrangements follows
//! (`slicing/local_search.rs`), then groups that scale to zero, then sizes of single functions. Work is counted in terms,
//! so that the plan is the same on every machine. The budget may end the search earlier.

use crate::answer::hysteresis::PreviousPlan;
use crate::best_plans::{BestPlans, Effort, SearchInputs, is_paper_form};
use crate::remote::Remote;
use crate::search::selection::{Candidate, Selection, ratio_candidate};
use crate::slicing::{ArrangementFamily, CandidatePlan, LocalSearchResult, MoveDepth, in_groups};
use remoe_plan::plan::Plan;

/// Maximum work of a search near the previous plan, in summed terms: a constant part, and a part for each expert.
const MAX_WORK: usize = 200_000;
const MAX_WORK_PER_EXPERT: usize = 90;
/// Percentage of that work after which the search over arrangements ends, if no groups may scale to zero.
const ARRANGEMENTS_END: usize = 70;
/// Percentage after which it ends if groups may scale to zero.
const ARRANGEMENTS_END_WITH_SLEEPING: usize = 35;
/// Percentage after which the search for groups that scale to zero ends.
const SLEEPING_END: usize = 70;
/// Percentage after which the search over sizes ends. The rest is for the sensitivity analysis.
const SIZES_END: usize = 85;
/// Maximum number of solved pairs of candidate and main size, for plans with a function for each layer.
const MAX_PAIRS: usize = 24;
/// Rounds of the search over sizes of single functions.
const SIZE_ROUNDS: usize = 3;
/// Evaluations in a round for each function.
const EVALUATIONS_PER_FUNCTION: usize = 4;
/// Number of remote ratios that are tried besides the previous one.
const RATIOS: usize = 16;

impl<'s, 'm: 's> SearchInputs<'s, 'm> {
    /// Searches the cheapest plans near `kept`, within the work limit and the budget.
    pub(crate) fn best_near(&'s self, kept: &PreviousPlan) -> BestPlans<'s> {
        let work = MAX_WORK + MAX_WORK_PER_EXPERT * self.model.experts();
        let start = self.model.meter.done();
        let until = |percent: usize| self.model.meter.limit_at(start + work / 100 * percent);
        let may_sleep = self.model.problem.remote_idle_seconds.is_some() && self.model.groups_may_sleep();
        until(if may_sleep { ARRANGEMENTS_END_WITH_SLEEPING } else { ARRANGEMENTS_END });
        let mut plans = BestPlans::none();
        plans.is_near = true;
        plans.mix = self.mix(&mut plans.counters);
        if self.remote == Remote::Never {
            return plans;
        }
        let previous = in_groups(&kept.plan);
        let reassigned = self.reassigned(&previous);
        let has_groups = self.model.problem.limits.max_groups.is_some();
        if is_paper_form(self.model) && (!has_groups || self.may_prefer_per_layer()) {
            plans.per_layer = self.near_layers(kept);
        } else if !has_groups {
            plans.per_layer = self.search_near(&previous, ArrangementFamily::PerLayer, &mut plans);
        }
        if has_groups {
            let found = self.search_near(&previous, ArrangementFamily::Sliced, &mut plans);
            let sliced = cheaper(reassigned.clone().filter(|plan| !is_per_layer(plan)), found);
            until(SLEEPING_END);
            let search_at_price = |inputs: &SearchInputs<'_, '_>| {
                inputs.new_group_search().search_near(&previous, ArrangementFamily::Sliced).best
            };
            let sliced =
                self.with_sleeping_groups(sliced, plans.mix.as_ref(), Effort::Coarse, search_at_price);
            until(SIZES_END);
            plans.sliced = sliced.map(|sliced| self.with_improved_sizes(sliced));
        }
        let layers = reassigned.filter(is_per_layer);
        let per_layer = cheaper(plans.per_layer.take(), layers);
        plans.per_layer = per_layer.map(|planned| self.in_layers(&planned).unwrap_or(planned));
        until(100);
        plans
    }

    /// Returns the plan with the experts of `previous` reassigned, if it keeps every limit.
    fn reassigned(&self, previous: &Plan) -> Option<CandidatePlan> {
        let group_search = self.new_group_search();
        let plan = group_search.reassigned(previous).filter(|plan| plan.replicas() > 0)?;
        group_search.evaluate_if_better(&candidate_of(&plan), plan, None)
    }

    fn search_near(
        &self,
        previous: &Plan,
        family: ArrangementFamily,
        plans: &mut BestPlans<'_>,
    ) -> Option<CandidatePlan> {
        let mut group_search = self.new_group_search();
        let LocalSearchResult { best, bound } = group_search.search_near(previous, family);
        plans.bound = Some(plans.bound.map_or(bound, |known| known.min(bound)));
        plans.counters.add(group_search.counters);
        best
    }

    /// Improves the sizes of single functions of `planned`.
    fn with_improved_sizes(&self, planned: CandidatePlan) -> CandidatePlan {
        let group_search = self.new_group_search();
        (0..SIZE_ROUNDS).fold(planned, |planned, _| {
            let mut left =
                (EVALUATIONS_PER_FUNCTION * (planned.plan.groups.len() + 1)).min(self.max_evaluations());
            group_search.improved(planned, MoveDepth::Single, &mut left)
        })
    }

    /// Searches the cheapest plan with a function for each layer whose remote counts are near those of `kept`.
    fn near_layers(&'s self, kept: &PreviousPlan) -> Option<CandidatePlan> {
        let model = self.model;
        let mut search = self.new_search();
        let counts = kept.plan.remote_counts();
        let known = candidate_of(&kept.plan);
        let main = model.main_sizes.iter().position(|bytes| *bytes == kept.plan.main_bytes);
        let needed = model.main_needed(&counts);
        let fits = |main: &usize| model.main_sizes[*main] >= needed;
        if let Some(main) = main.filter(fits).filter(|_| counts.iter().any(|count| *count > 0)) {
            search.solve_pair(&known, main);
        }
        search.max_solved = MAX_PAIRS;
        let most = model.most_experts();
        let ratios = (1..=RATIOS).map(|part| (part * most).div_ceil(RATIOS));
        let mut candidates: Vec<Candidate> = vec![known];
        // Candidates need not pass the worst case, since a running plan proves the prediction.
        let mixed = |i| Candidate { selection: Selection::Mixed, ..ratio_candidate(model, i) };
        candidates.extend(ratios.map(mixed));
        candidates.retain(|candidate| {
            candidate.counts.iter().any(|count| *count > 0) && self.remote.allows(model, &candidate.counts)
        });
        search.run(candidates);
        search.max_solved = usize::MAX;
        self.mixed_search().search_counts(&mut search, true);
        self.mixed_search().search_counts(&mut search, false);
        search.best.as_ref().map(CandidatePlan::from)
    }
}

fn candidate_of(plan: &Plan) -> Candidate {
    let counts = plan.remote_counts();
    Candidate { selection: Selection::Mixed, i: counts.iter().copied().max().unwrap_or(0), counts }
}

/// Returns true if every layer with remote experts has a function of its own.
fn is_per_layer(planned: &CandidatePlan) -> bool {
    !planned.plan.is_sliced()
}

/// Returns the cheaper plan.
fn cheaper(one: Option<CandidatePlan>, other: Option<CandidatePlan>) -> Option<CandidatePlan> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if other.beats(&one) { other } else { one }),
        (one, other) => one.or(other),
    }
}
