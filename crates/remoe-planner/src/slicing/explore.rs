//! Branch and bound over the sizes of one arrangement: rectangles of sizes in the order of their lower bounds.

use super::arrangement::GroupArrangement;
use super::arrangement_times::{ArrangementTimes, SizePair};
use super::{CandidatePlan, GroupSearch, LayerExpertTimes, MANY_EXPERTS, SIZE_SAVING, with_sizes};
use crate::search::COST_TIE;
use remoe_plan::model::sizing::Sizing;
use std::collections::BinaryHeap;

impl GroupSearch<'_, '_> {
    /// Returns the cheapest plan of `arrangement` that keeps every limit and costs at most [`Self::cost_limit`] after `work`.
    pub(super) fn explore(
        &mut self,
        arrangement: &GroupArrangement<'_>,
        work: usize,
    ) -> Option<CandidatePlan> {
        let model = self.model;
        let plan = self.plan(arrangement.candidate, arrangement.layout, arrangement.replicas);
        let expert_times = self.expert_times.get_or_init(|| LayerExpertTimes::of_all(model)).as_deref();
        let times = ArrangementTimes::new(model, &self.nonexpert, expert_times, &plan, arrangement.replicas)?;
        let stressed = self.factors.map(|factors| remoe_plan::cost::stress::stressed(model, factors, &plan));
        let stressed = match &stressed {
            Some(stressed) => {
                Some(ArrangementTimes::new(stressed, &self.nonexpert, None, &plan, arrangement.replicas)?)
            }
            None => None,
        };
        let mains = model.useful_main_options(model.main_needed(&arrangement.candidate.counts));
        let remotes = self.remote_options(&plan);
        if mains.is_empty() || remotes.is_empty() {
            return None;
        }
        let sizes =
            SizeOptions { times: &times, stressed: stressed.as_ref(), mains: &mains, remotes: &remotes };
        let whole = Rectangle { main: (0, mains.len() - 1), remote: (0, remotes.len() - 1) };
        let mut best: Option<CandidatePlan> = None;
        let mut open = BinaryHeap::from([OpenRectangle { bound: 0.0, rectangle: whole }]);
        while let Some(OpenRectangle { bound, rectangle }) = open.pop() {
            if bound > self.cost_to_beat(best.as_ref(), work) {
                break;
            }
            let Some(halves) = rectangle.halves() else {
                let plan = with_sizes(&plan, &sizes.pair(rectangle.low()));
                best = self.evaluate_if_better(arrangement.candidate, plan, best.as_ref()).or(best);
                continue;
            };
            for half in halves {
                let bound = self.cost_between(&sizes, half.low(), half.high());
                self.counters.bounds += 1;
                if let Some(bound) = bound.filter(|bound| *bound <= self.cost_to_beat(best.as_ref(), work)) {
                    open.push(OpenRectangle { bound, rectangle: half });
                }
            }
        }
        best
    }

    /// Returns the cost above which no plan of an arrangement is considered.
    ///
    /// It is less than the cost of `best`, the arrangement's best plan so far, and at most [`Self::cost_limit`].
    fn cost_to_beat(&self, best: Option<&CandidatePlan>, work: usize) -> f64 {
        let saving = if self.model.experts() > MANY_EXPERTS { SIZE_SAVING } else { -COST_TIE };
        best.map_or(f64::INFINITY, |best| best.cost() * (1.0 - saving)).min(self.cost_limit(work))
    }

    /// Reports if larger sizes are never slower.
    fn is_isotonic(&self) -> bool {
        let remote = self.model.layers.iter().all(|layer| layer.remote_curve().is_isotonic_beyond());
        self.model.is_isotonic && remote
    }

    /// Returns a lower bound of the cost of any pair of sizes between `low` and `high`.
    ///
    /// Returns `None` if even `high` breaks a latency limit. Sizes are indices into `sizes`.
    fn cost_between(
        &self,
        sizes: &SizeOptions<'_, '_>,
        low: (usize, usize),
        high: (usize, usize),
    ) -> Option<f64> {
        // The times at `high` bound those of smaller sizes only if larger sizes are never slower.
        let lower_bound = low != high && !self.is_isotonic();
        let (fastest, cheapest) = (sizes.pair(high), sizes.pair(low));
        let bill = self.model.quick_bill(&sizes.times.serving_functions(&fastest, &cheapest, lower_bound));
        let stressed = sizes
            .stressed
            .map(|times| self.model.quick_bill(&times.serving_functions(&fastest, &cheapest, lower_bound)));
        let breaks_limit =
            self.breaks_latency_limit(&bill) || stressed.is_some_and(|bill| self.breaks_latency_limit(&bill));
        (!breaks_limit).then_some(bill.total())
    }
}

/// Possible sizes of one arrangement, and its times.
struct SizeOptions<'a, 'm> {
    times: &'a ArrangementTimes<'m>,
    /// Times if the prediction errs as far as plans must tolerate.
    stressed: Option<&'a ArrangementTimes<'m>>,
    mains: &'a [Sizing],
    remotes: &'a [Vec<Sizing>],
}

impl SizeOptions<'_, '_> {
    fn pair(&self, (main, remote): (usize, usize)) -> SizePair<'_> {
        SizePair { main: self.mains[main], remote: &self.remotes[remote] }
    }
}

/// An unexplored rectangle. The one with the lower bound is the greater one, so that a heap returns it first.
struct OpenRectangle {
    bound: f64,
    rectangle: Rectangle,
}

impl Ord for OpenRectangle {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.bound.total_cmp(&self.bound)
    }
}

impl PartialOrd for OpenRectangle {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for OpenRectangle {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for OpenRectangle {}

/// Ranges of main and remote sizes: first and last index, both included.
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

    /// Splits the rectangle in halves along its longer side, the smaller sizes first. `None` for a single pair.
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::generate::{SplitMix64, small_problem};
    use crate::slicing::NonExpertTimes;
    use remoe_plan::plan::{Group, LayerPlan, Plan};

    /// Beyond the measured tokens more vCPUs may be slower: the bound must hold there, too.
    #[test]
    fn rectangle_bound_holds_for_every_pair_of_sizes() {
        let mut slower = 0;
        for seed in 0..60 {
            let random = &mut SplitMix64::new(seed);
            let mut problem = small_problem(seed, 2);
            problem.request.input_tokens = 3000.0;
            problem.limits.payload_bytes = None;
            for layer in &mut problem.layers {
                let profiles = [Some(&mut layer.expert_seconds), layer.cpu_nonexpert_seconds.as_mut()];
                for profile in profiles.into_iter().flatten() {
                    // The step to the last number of tokens is steeper with more vCPUs.
                    let last = profile.seconds.len() - 1;
                    for column in 0..profile.vcpus.len() {
                        profile.seconds[last][column] = profile.seconds[0][0] * random.between(60.0, 61.0);
                    }
                }
            }
            let model = remoe_plan::model::Model::new(&problem);
            slower += usize::from(!model.is_isotonic);
            let half = |parity: u32| Group {
                experts: model
                    .layers
                    .iter()
                    .map(|layer| (0..layer.experts as u32).filter(|id| id % 2 == parity).collect())
                    .collect(),
                memory_bytes: 0.0,
                vcpus: None,
                replicas: 1,
                idle_seconds: None,
            };
            let all = |layer: &remoe_plan::model::LayerModel| LayerPlan {
                remote: (0..layer.experts as u32).collect(),
                ..LayerPlan::default()
            };
            let plan = Plan {
                main_bytes: 0.0,
                main_vcpus: None,
                layers: model.layers.iter().map(all).collect(),
                groups: vec![half(0), half(1)],
            };
            let nonexpert = NonExpertTimes::new(&model);
            let times = ArrangementTimes::new(&model, &nonexpert, None, &plan, 1).unwrap();
            let mains = model.main_options(0.0);
            let remotes: Vec<Vec<Sizing>> =
                model.remote_options(0.0).into_iter().map(|sizing| vec![sizing; 2]).collect();
            let sizes = SizeOptions { times: &times, stressed: None, mains: &mains, remotes: &remotes };
            let cost = |fastest: (usize, usize), cheapest: (usize, usize), lower_bound: bool| {
                let (fastest, cheapest) = (sizes.pair(fastest), sizes.pair(cheapest));
                model.quick_bill(&times.serving_functions(&fastest, &cheapest, lower_bound)).total()
            };
            let high = (mains.len() - 1, remotes.len() - 1);
            let bound = cost(high, (0, 0), true);
            for main in 0..mains.len() {
                for remote in 0..remotes.len() {
                    let exact = cost((main, remote), (main, remote), false);
                    assert!(bound <= exact * (1.0 + 1e-12), "{seed}: {bound} {exact}");
                }
            }
        }
        assert!(slower >= 30, "{slower}");
    }
}
