//! Plans near the previous one: what a search of milliseconds finds when only shares have changed.
//!
//! The previous arrangement is dealt again by the new shares. A local search over arrangements follows
//! (`slicing/climb.rs`), then groups that end by themselves, then sizes of single functions. Work is counted in terms,
//! so that the plan is the same on every machine; the budget may end the search earlier.

use crate::answer::hysteresis::PreviousPlan;
use crate::plans::{Effort, Inputs, Plans, is_paper_form};
use crate::remote::Remote;
use crate::search::selection::{Candidate, Selection, ratio_candidate};
use crate::slicing::{ArrangementFamily, Climbed, Depth, FeasiblePlan, in_groups};
use remoe_plan::plan::Plan;

/// Terms that a search near the previous plan sums, at most: so many, and so many more for every expert.
const MOST_WORK: (usize, usize) = (200_000, 90);
/// Parts of that work, in percent, up to which arrangements are searched, without and with groups that end by
/// themselves, then such groups, then sizes. The rest is for sturdiness.
const ARRANGED: usize = 70;
const ARRANGED_BESIDE_SLEEP: usize = 35;
const ASLEEP: usize = 70;
const SIZED: usize = 85;
/// Pairs of candidate and main size that are solved for functions of single layers, at most.
const MOST_PAIRS: usize = 24;
/// Rounds over sizes of single functions, and evaluations of each for every function.
const SIZINGS: usize = 3;
const SIZES: usize = 4;
/// Ratios of remote experts that are looked at beside the previous one, as parts of all.
const RATIOS: usize = 16;

impl<'s, 'm: 's> Inputs<'s, 'm> {
    /// The cheapest plans near `kept`, as far as work and budget go.
    pub(crate) fn near(&'s self, kept: &PreviousPlan) -> Plans<'s> {
        let (base, each) = MOST_WORK;
        let work = base + each * self.model.experts();
        let start = self.model.meter.done();
        let until = |percent: usize| self.model.meter.limit_at(start + work / 100 * percent);
        let may_sleep = self.model.problem.remote_idle_seconds.is_some() && self.model.groups_may_sleep();
        until(if may_sleep { ARRANGED_BESIDE_SLEEP } else { ARRANGED });
        let mut plans = Plans::none();
        plans.is_near = true;
        plans.mix = self.mix(&mut plans.counters);
        if self.remote == Remote::Never {
            return plans;
        }
        let previous = in_groups(&kept.plan);
        let dealt = self.dealt_again(&previous);
        let has_groups = self.model.problem.limits.max_groups.is_some();
        if is_paper_form(self.model) && (!has_groups || self.has_rival_layers()) {
            plans.per_layer = self.near_layers(kept);
        } else if !has_groups {
            plans.per_layer = self.climbed(&previous, ArrangementFamily::PerLayer, &mut plans);
        }
        if has_groups {
            let climbed = self.climbed(&previous, ArrangementFamily::Sliced, &mut plans);
            let sliced = better(dealt.clone().filter(|dealt| !is_per_layer(dealt)), climbed);
            until(ASLEEP);
            let paid = |inputs: &Inputs<'_, '_>| {
                inputs.new_slicing().climbed(&previous, ArrangementFamily::Sliced).best
            };
            let sliced = self.with_sleepers(sliced, plans.mix.as_ref(), Effort::Coarse, paid);
            until(SIZED);
            plans.sliced = sliced.map(|sliced| self.sized_on(sliced));
        }
        let layers = dealt.filter(is_per_layer);
        let per_layer = better(plans.per_layer.take(), layers);
        plans.per_layer = per_layer.map(|planned| self.in_layers(&planned).unwrap_or(planned));
        until(100);
        plans
    }

    /// The plan with the experts of `previous` dealt again, where it keeps every limit.
    fn dealt_again(&self, previous: &Plan) -> Option<FeasiblePlan> {
        let slicing = self.new_slicing();
        let plan = slicing.dealt_again(previous).filter(|plan| plan.replicas() > 0)?;
        slicing.judged(&candidate_of(&plan), plan, None)
    }

    fn climbed(
        &self,
        previous: &Plan,
        family: ArrangementFamily,
        plans: &mut Plans<'_>,
    ) -> Option<FeasiblePlan> {
        let mut slicing = self.new_slicing();
        let Climbed { best, bound } = slicing.climbed(previous, family);
        plans.bound = Some(plans.bound.map_or(bound, |known| known.min(bound)));
        plans.counters.add(slicing.counters);
        best
    }

    /// `planned` with other sizes of single functions.
    fn sized_on(&self, planned: FeasiblePlan) -> FeasiblePlan {
        let slicing = self.new_slicing();
        (0..SIZINGS).fold(planned, |planned, _| {
            let mut left = (SIZES * (planned.plan.groups.len() + 1)).min(self.moves());
            slicing.improved(planned, Depth::Single, &mut left)
        })
    }

    /// The cheapest plan with a function per layer of the numbers of remote experts near those of `kept`.
    fn near_layers(&'s self, kept: &PreviousPlan) -> Option<FeasiblePlan> {
        let model = self.model;
        let mut search = self.new_search();
        let counts = kept.plan.remote_counts();
        let known = candidate_of(&kept.plan);
        let main = model.main_sizes.iter().position(|bytes| *bytes == kept.plan.main_bytes);
        let needed = model.main_needed(&counts);
        let fits = |main: &usize| model.main_sizes[*main] >= needed;
        if let Some(main) = main.filter(fits).filter(|_| counts.iter().any(|count| *count > 0)) {
            search.try_one(&known, main);
        }
        search.most_solved = MOST_PAIRS;
        let most = model.most_experts();
        let ratios = (1..=RATIOS).map(|part| (part * most).div_ceil(RATIOS));
        let mut candidates: Vec<Candidate> = vec![known];
        // What follows a plan that runs need not pass the worst case.
        let mixed = |i| Candidate { selection: Selection::Mixed, ..ratio_candidate(model, i) };
        candidates.extend(ratios.map(mixed));
        candidates.retain(|candidate| {
            candidate.counts.iter().any(|count| *count > 0) && self.remote.allows(model, &candidate.counts)
        });
        search.run(candidates);
        search.most_solved = usize::MAX;
        self.mixing().spread(&mut search, true);
        self.mixing().spread(&mut search, false);
        search.best.as_ref().map(FeasiblePlan::from)
    }
}

fn candidate_of(plan: &Plan) -> Candidate {
    let counts = plan.remote_counts();
    Candidate { selection: Selection::Mixed, i: counts.iter().copied().max().unwrap_or(0), counts }
}

/// Returns true if every layer with remote experts has a function of its own.
fn is_per_layer(planned: &FeasiblePlan) -> bool {
    !planned.plan.is_sliced()
}

/// The cheaper one.
fn better(one: Option<FeasiblePlan>, other: Option<FeasiblePlan>) -> Option<FeasiblePlan> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if other.beats(&one) { other } else { one }),
        (one, other) => one.or(other),
    }
}
