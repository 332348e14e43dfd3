//! Groups that end by themselves, beside a main function that is always there: how much of the time they are paid for,
//! and what requests meet that come while one is not ready.
//!
//! A request uses a group unless none of its tokens chooses any of the group's experts: with r_l the share of layer l's
//! assignments that go to it, and n tokens, with chance 1 - prod over l of (1 - r_l)^(k n), tokens choosing independently as
//! everywhere in this model. Such requests are what keeps it alive ([`Alone`]). While it starts, the main function's
//! fallback serves its pairs within the memory that it has for that: it loads an expert when it is used, at the main
//! function's measured rate of loading, and computes it. In a prefill every expert is loaded once, in a decode step every
//! one that the token uses.

use crate::alive::{Alive, Alone, mean_per_second};
use crate::model::Model;
use crate::plan::{Group, Plan};
use crate::problem::Arrivals;
use serde::Serialize;

/// Groups that so many requests use start with the same requests and end together.
const NEARLY_ALL: f64 = 0.99;

/// How a group that ends by itself lives.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct GroupLife {
    /// Share of the requests that use any of its experts.
    pub used_share: f64,
    /// Share of the time in which it is alive, starts and idle windows included.
    pub alive_share: f64,
    /// Starts from nothing in an hour.
    pub wakes_per_hour: f64,
    /// Seconds of such a start.
    pub start_seconds: f64,
    /// Share of the requests that use it while it is not ready.
    pub cold_share: f64,
    /// Seconds by which the fallback makes the prefill of such a request longer.
    pub cold_prefill_seconds: f64,
}

/// A group that ends by itself, by what its life follows from.
#[derive(Debug, Clone, PartialEq)]
pub struct Sleeper {
    /// Dollars per second of all its functions.
    pub rate: f64,
    idle_seconds: f64,
    /// Share of the requests that use it.
    used: f64,
    start_seconds: f64,
    /// Seconds that the fallback adds to a prefill, and to a decode step.
    prefill: f64,
    step: f64,
}

/// Lives and cost of the groups that end by themselves.
pub struct Sleeping {
    /// Life of each group.
    pub lives: Vec<GroupLife>,
    /// Dollars per second of all of them, over all time.
    pub rate: f64,
    /// Share of the requests that use one that is not ready.
    pub cold_share: f64,
    /// Seconds by which a prefill is longer while none of them is ready.
    pub cold_prefill_seconds: f64,
    /// Seconds of a decode step, in the mean over the steps of a request.
    pub cold_step_seconds: f64,
}

impl Model<'_> {
    /// Reports if groups may end by themselves here. Where the main function ends too, all of a deployment do together, and
    /// functions that are paid for what they work cost nothing between requests.
    pub fn groups_may_sleep(&self) -> bool {
        let always_there = |arrivals: &Arrivals| arrivals.idle_seconds.is_none();
        self.problem.arrivals.as_ref().is_some_and(always_there)
            && self.is_reserved()
            && self.problem.starts.is_some()
    }

    /// Reports if `group` ends by itself.
    pub fn may_sleep(&self, group: &Group) -> bool {
        group.idle_seconds.is_some() && self.groups_may_sleep()
    }

    /// `group` of `plan` where it ends by itself; none where it lives and dies with the main function.
    pub fn sleeper(&self, group: &Group, plan: &Plan, rate: f64) -> Option<Sleeper> {
        let idle_seconds = group.idle_seconds.filter(|_| self.groups_may_sleep())?;
        let starts = self.problem.starts?;
        let tokens = self.input + self.output;
        let vcpus = self.main_pace(plan).vcpus;
        let (mut unused, mut prefill, mut step) = (0.0, 0.0, 0.0);
        for (layer, (model, experts)) in self.layers.iter().zip(&group.experts).enumerate() {
            let share = self.share_of(layer, experts).min(1.0);
            unused += model.per_token() * tokens * (-share).ln_1p();
            let column = model.curve.column(vcpus);
            let load = model.expert_bytes / starts.main.load_bytes_per_second;
            for expert in experts {
                let chance = (model.per_token() * self.shares[layer][*expert as usize]).min(1.0);
                let used = 1.0 - (1.0 - chance).powf(self.input);
                prefill += used * load + model.curve.seconds(self.input * chance, column);
            }
            step += model.per_token() * share * (load + model.curve.seconds(1.0, column));
        }
        Some(Sleeper {
            rate,
            idle_seconds,
            used: -unused.exp_m1(),
            start_seconds: starts.remote.seconds(self.weight_bytes(&group.experts)),
            prefill,
            step,
        })
    }
}

impl Sleeping {
    /// `steps`: decode steps of a request; `found`: how the main function that they belong to is loaded.
    pub fn new(sleepers: &[Sleeper], arrivals: &Arrivals, found: &Alive, steps: f64) -> Self {
        let lives: Vec<GroupLife> =
            sleepers.iter().map(|sleeper| sleeper.life(arrivals, found, steps)).collect();
        let paid = lives.iter().zip(sleepers).map(|(life, sleeper)| life.alive_share * sleeper.rate);
        let (together, apart): (Vec<&GroupLife>, Vec<&GroupLife>) =
            lives.iter().partition(|life| life.used_share >= NEARLY_ALL);
        let together = together.iter().map(|life| life.cold_share).fold(0.0, f64::max);
        let warm = apart.iter().map(|life| 1.0 - life.cold_share).product::<f64>() * (1.0 - together);
        Self {
            rate: paid.sum(),
            cold_share: 1.0 - warm,
            cold_prefill_seconds: sleepers.iter().map(|sleeper| sleeper.prefill).sum(),
            cold_step_seconds: sleepers
                .iter()
                .map(|sleeper| sleeper.slow_share(found, steps) * sleeper.step)
                .sum(),
            lives,
        }
    }
}

impl Sleeper {
    /// Share of a request's decode steps that pass before the group, which its prefill started, is ready.
    fn slow_share(&self, found: &Alive, steps: f64) -> f64 {
        let step = found.tpot_seconds + self.step;
        let left = (self.start_seconds - found.first_token_seconds - self.prefill).max(0.0);
        if steps > 0.0 && step > 0.0 { (left / step / steps).min(1.0) } else { 0.0 }
    }

    fn life(&self, arrivals: &Arrivals, found: &Alive, steps: f64) -> GroupLife {
        let per_second = mean_per_second(arrivals);
        // Bursts that use it, of geometric sizes; a record counts request by request.
        let size = if arrivals.recorded_seconds.is_some() { 1.0 } else { arrivals.burst.max(1.0) };
        let further = 1.0 - 1.0 / size;
        let spared = 1.0 - self.used;
        let bursts = per_second / size * (1.0 - (1.0 - further) * spared / (1.0 - further * spared));
        let slow = self.slow_share(found, steps) * steps;
        let alone = Alone {
            per_second: bursts,
            idle_seconds: self.idle_seconds,
            start_seconds: self.start_seconds,
            service_seconds: found.service_seconds,
            cold_seconds: found.service_seconds + self.prefill + slow * self.step,
        };
        let time = alone.time();
        GroupLife {
            used_share: self.used,
            alive_share: time.share,
            wakes_per_hour: time.wakes_per_second * 3600.0,
            start_seconds: self.start_seconds,
            cold_share: self.used * time.cold_share,
            cold_prefill_seconds: self.prefill,
        }
    }
}
