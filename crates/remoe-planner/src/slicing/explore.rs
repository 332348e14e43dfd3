//! The sizes of one arrangement: rectangles of them by what they cost at least.

use super::arrangement::Arrangement;
use super::table::{SizePair, Table};
use super::{COARSE_GAIN, FeasiblePlan, LayerTerms, MANY_EXPERTS, Slicing, sized_as};
use crate::search::COST_TIE;
use remoe_plan::model::sizing::Sizing;
use std::collections::BinaryHeap;

impl Slicing<'_, '_> {
    /// The cheapest plan of `arrangement` that keeps every limit and is worth a search after so much `work`.
    pub(super) fn explore(&mut self, arrangement: &Arrangement<'_>, work: usize) -> Option<FeasiblePlan> {
        let model = self.model;
        let plan = self.plan(arrangement.candidate, arrangement.cut, arrangement.replicas);
        let terms = self.terms.get_or_init(|| LayerTerms::of_all(model)).as_deref();
        let table = Table::new(model, &self.rest, terms, &plan, arrangement.replicas)?;
        let stressed = self.factors.map(|factors| remoe_plan::cost::stress::stressed(model, factors, &plan));
        let stressed = match &stressed {
            Some(stressed) => Some(Table::new(stressed, &self.rest, None, &plan, arrangement.replicas)?),
            None => None,
        };
        let mains = model.useful_main_options(model.main_needed(&arrangement.candidate.counts));
        let remotes = self.remote_options(&plan);
        if mains.is_empty() || remotes.is_empty() {
            return None;
        }
        let sized = Sizes { table: &table, stressed: stressed.as_ref(), mains: &mains, remotes: &remotes };
        let whole = Rectangle { main: (0, mains.len() - 1), remote: (0, remotes.len() - 1) };
        let mut best: Option<FeasiblePlan> = None;
        let mut open = BinaryHeap::from([OpenRectangle { bound: 0.0, rectangle: whole }]);
        while let Some(OpenRectangle { bound, rectangle }) = open.pop() {
            if bound > self.worth(best.as_ref(), work) {
                break;
            }
            let Some(halves) = rectangle.halves() else {
                let plan = sized_as(&plan, &sized.pair(rectangle.low()));
                best = self.judged(arrangement.candidate, plan, best.as_ref()).or(best);
                continue;
            };
            for half in halves {
                let bound = self.cost_between(&sized, half.low(), half.high());
                self.counters.bounds += 1;
                if let Some(bound) = bound.filter(|bound| *bound <= self.worth(best.as_ref(), work)) {
                    open.push(OpenRectangle { bound, rectangle: half });
                }
            }
        }
        best
    }

    /// Returns the cost above which no plan of an arrangement is considered: less than the best one of it, and no
    /// more than [`Self::limit`].
    fn worth(&self, own: Option<&FeasiblePlan>, work: usize) -> f64 {
        let experts = self.model.experts();
        let gain = if experts > MANY_EXPERTS { COARSE_GAIN } else { -COST_TIE };
        own.map_or(f64::INFINITY, |own| own.cost() * (1.0 - gain)).min(self.limit(work))
    }

    fn is_isotonic(&self) -> bool {
        let remote = self.model.layers.iter().all(|layer| layer.remote_curve().is_isotonic_beyond());
        self.model.is_isotonic && remote
    }

    /// Returns a lower bound of the cost of any pair of sizes between `low` and `high`; none where even `high` is too
    /// late.
    fn cost_between(&self, sized: &Sizes<'_, '_>, low: (usize, usize), high: (usize, usize)) -> Option<f64> {
        // A corner speaks for smaller sizes only where it is never slower than they are.
        let least = low != high && !self.is_isotonic();
        let (quick, cheap) = (sized.pair(high), sized.pair(low));
        let bill = self.model.quick_bill(&sized.table.running(&quick, &cheap, least));
        let stressed =
            sized.stressed.map(|table| self.model.quick_bill(&table.running(&quick, &cheap, least)));
        let late = self.is_late(&bill) || stressed.is_some_and(|bill| self.is_late(&bill));
        (!late).then_some(bill.total())
    }
}

/// The sizes of one arrangement and their times.
struct Sizes<'a, 'm> {
    table: &'a Table<'m>,
    stressed: Option<&'a Table<'m>>,
    mains: &'a [Sizing],
    remotes: &'a [Vec<Sizing>],
}

impl Sizes<'_, '_> {
    fn pair(&self, (main, remote): (usize, usize)) -> SizePair<'_> {
        SizePair { main: self.mains[main], remote: &self.remotes[remote] }
    }
}

/// A rectangle that is still to be looked into; of two the one with the lower bound is the greater one.
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::generate::{SplitMix64, small_problem};
    use crate::slicing::RestOfLayers;
    use remoe_plan::plan::{Group, LayerPlan, Plan};

    /// No pair of sizes costs less than the rectangle around it, also where more vCPUs are slower for more tokens
    /// than were measured.
    #[test]
    fn a_rectangle_costs_no_more_than_any_pair_in_it() {
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
            let rest = RestOfLayers::new(&model);
            let table = Table::new(&model, &rest, None, &plan, 1).unwrap();
            let mains = model.main_options(0.0);
            let remotes: Vec<Vec<Sizing>> =
                model.remote_options(0.0).into_iter().map(|sizing| vec![sizing; 2]).collect();
            let sized = Sizes { table: &table, stressed: None, mains: &mains, remotes: &remotes };
            let cost = |quick: (usize, usize), cheap: (usize, usize), least: bool| {
                let running = table.running(&sized.pair(quick), &sized.pair(cheap), least);
                model.quick_bill(&running).total()
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
