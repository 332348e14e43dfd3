//! Plans near the previous one: what a search of milliseconds finds when only shares have changed.
//!
//! The previous arrangement is dealt again by the new shares. Beside it stand the arrangements with a few more or fewer
//! remote experts and groups, and a plan with nothing remote.

use crate::answer::hysteresis::Kept;
use crate::answer::plans::{Effort, Inputs, Plans};
use crate::search::selection::{Candidate, Selection};
use crate::slicing::{Family, Planned, in_groups};

/// Terms that a search near the previous plan sums, at most.
const MOST_WORK: usize = 1_000_000;

impl<'s, 'm: 's> Inputs<'s, 'm> {
    /// The cheapest plans near `kept`, as far as the budget goes.
    pub(crate) fn near(&'s self, kept: &Kept) -> Plans<'s> {
        self.model.meter.limit_to(MOST_WORK);
        let mut plans = Plans::none();
        plans.is_near = true;
        plans.mix = self.mix(&mut plans.counters);
        let counts = kept.plan.remote_counts();
        let i = counts.iter().copied().max().unwrap_or(0);
        let candidate = Candidate { selection: Selection::Mixed, i, counts };
        let slicing = self.new_slicing();
        let dealt = slicing
            .dealt_again(&in_groups(&kept.plan))
            .and_then(|plan| slicing.judged(&candidate, plan, None));
        let family =
            if self.model.problem.limits.max_groups.is_some() { Family::Sliced } else { Family::PerLayer };
        let arranged = self.arranged(family, Effort::Coarse, &mut plans.counters);
        let all = [dealt, arranged].into_iter().flatten();
        let best: Option<Planned> = all.reduce(|best, other| if other.beats(&best) { other } else { best });
        match family {
            Family::Sliced => plans.sliced = best,
            Family::PerLayer => plans.per_layer = best.map(|best| self.in_layers(&best).unwrap_or(best)),
        }
        plans
    }
}
