//! Groups that scale to zero while the main function stays alive: their time alive, and the latency of
//! requests that use a group before it is ready.
//!
//! A request uses a group unless none of its tokens chooses any of the group's experts. With r_l the share of layer l's
//! assignments that go to the group, k_l the layer's top-k, and n tokens that choose independently, it uses the group with
//! probability 1 - prod over l of (1 - r_l)^(k_l n). These requests keep the group alive ([`ScalingGroup`]).
//!
//! While a group starts, the main function's local fallback loads and computes its experts. In a prefill it loads every
//! used expert once, in a decode step every expert that the token uses.

use crate::alive::{Alive, ScalingGroup, mean_per_second};
use crate::model::Model;
use crate::plan::{Group, Plan};
use crate::problem::Arrivals;
use serde::Serialize;

/// Share of requests from which groups are assumed to start and stop together.
const NEARLY_ALL: f64 = 0.99;

/// Time alive and cold starts of a group that scales to zero.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct GroupLife {
    /// Share of the requests that use any of its experts.
    pub used_share: f64,
    /// Share of the time in which it is alive, including starts and idle windows.
    pub alive_share: f64,
    /// Cold starts in an hour.
    pub wakes_per_hour: f64,
    /// Seconds of a cold start.
    pub start_seconds: f64,
    /// Share of the requests that use it while it is not ready.
    pub cold_share: f64,
    /// Seconds by which the local fallback lengthens the prefill of such a request.
    pub cold_prefill_seconds: f64,
}

/// Inputs for the time alive of a group that scales to zero.
#[derive(Debug, Clone, PartialEq)]
pub struct SleepingGroup {
    /// Dollars per second of all its functions.
    pub rate: f64,
    idle_seconds: f64,
    /// Share of the requests that use it.
    used_share: f64,
    start_seconds: f64,
    /// Seconds that the local fallback adds to a prefill.
    fallback_prefill: f64,
    /// Seconds that the local fallback adds to a decode step.
    fallback_step: f64,
}

/// Time alive and cost of all groups that scale to zero.
pub struct SleepingGroups {
    /// Time alive of each group.
    pub lives: Vec<GroupLife>,
    /// Dollars per second of all groups, in the mean over all time.
    pub rate: f64,
    /// Share of the requests that use a group which is not ready.
    pub cold_share: f64,
    /// Seconds that the local fallback adds to a prefill while no group is ready.
    pub cold_prefill_seconds: f64,
    /// Seconds that the local fallback adds to a decode step, in the mean over the steps of a cold request.
    pub cold_step_seconds: f64,
}

impl Model<'_> {
    /// Reports if groups may scale to zero.
    ///
    /// If the main function scales to zero, the groups do so together with it. Under invocation billing groups cost
    /// nothing between requests.
    pub fn groups_may_sleep(&self) -> bool {
        let always_there = |arrivals: &Arrivals| arrivals.idle_seconds.is_none();
        self.problem.arrivals.as_ref().is_some_and(always_there)
            && self.is_reserved()
            && self.problem.starts.is_some()
    }

    /// Reports if `group` scales to zero.
    pub fn may_sleep(&self, group: &Group) -> bool {
        group.idle_seconds.is_some() && self.groups_may_sleep()
    }

    /// Returns the inputs of `group` of `plan`, or `None` if it starts and stops with the main function.
    ///
    /// `rate`: dollars per second of all its functions.
    pub fn sleeper(&self, group: &Group, plan: &Plan, rate: f64) -> Option<SleepingGroup> {
        let idle_seconds = group.idle_seconds.filter(|_| self.groups_may_sleep())?;
        let starts = self.problem.starts?;
        let tokens = self.input + self.output;
        let vcpus = self.main_cpu_speed(plan).vcpus;
        let (mut log_unused, mut fallback_prefill, mut fallback_step) = (0.0, 0.0, 0.0);
        for (layer, (model, experts)) in self.layers.iter().zip(&group.experts).enumerate() {
            let share = self.share_of(layer, experts).min(1.0);
            log_unused += model.per_token() * tokens * (-share).ln_1p();
            let column = model.curve.column(vcpus);
            let load = model.expert_bytes / starts.main.load_bytes_per_second;
            for expert in experts {
                let probability = (model.per_token() * self.shares[layer][*expert as usize]).min(1.0);
                let used = 1.0 - (1.0 - probability).powf(self.input);
                fallback_prefill += used * load + model.curve.seconds(self.input * probability, column);
            }
            fallback_step += model.per_token() * share * (load + model.curve.seconds(1.0, column));
        }
        Some(SleepingGroup {
            rate,
            idle_seconds,
            used_share: -log_unused.exp_m1(),
            start_seconds: starts.remote.seconds(self.weight_bytes(&group.experts)),
            fallback_prefill,
            fallback_step,
        })
    }
}

impl SleepingGroups {
    /// Computes the time alive of all groups. `load`: load of the main function. `steps`: decode steps of a request.
    pub fn new(sleepers: &[SleepingGroup], arrivals: &Arrivals, load: &Alive, steps: f64) -> Self {
        let lives: Vec<GroupLife> =
            sleepers.iter().map(|sleeper| sleeper.life(arrivals, load, steps)).collect();
        let rates = lives.iter().zip(sleepers).map(|(life, sleeper)| life.alive_share * sleeper.rate);
        let (together, apart): (Vec<&GroupLife>, Vec<&GroupLife>) =
            lives.iter().partition(|life| life.used_share >= NEARLY_ALL);
        let together = together.iter().map(|life| life.cold_share).fold(0.0, f64::max);
        let warm = apart.iter().map(|life| 1.0 - life.cold_share).product::<f64>() * (1.0 - together);
        Self {
            rate: rates.sum(),
            cold_share: 1.0 - warm,
            cold_prefill_seconds: sleepers.iter().map(|sleeper| sleeper.fallback_prefill).sum(),
            cold_step_seconds: sleepers
                .iter()
                .map(|sleeper| sleeper.fallback_share(load, steps) * sleeper.fallback_step)
                .sum(),
            lives,
        }
    }
}

impl SleepingGroup {
    /// Returns the share of a cold request's decode steps that run before the group is ready. Its prefill started the group.
    fn fallback_share(&self, load: &Alive, steps: f64) -> f64 {
        let step = load.tpot_seconds + self.fallback_step;
        let seconds_left = (self.start_seconds - load.first_token_seconds - self.fallback_prefill).max(0.0);
        if steps > 0.0 && step > 0.0 { (seconds_left / step / steps).min(1.0) } else { 0.0 }
    }

    fn life(&self, arrivals: &Arrivals, load: &Alive, steps: f64) -> GroupLife {
        let per_second = mean_per_second(arrivals);
        // Rate of the bursts in which any request uses the group. Burst sizes are geometric; a record has single requests.
        let size = if arrivals.recorded_seconds.is_some() { 1.0 } else { arrivals.burst.max(1.0) };
        let continues = 1.0 - 1.0 / size;
        let unused = 1.0 - self.used_share;
        let bursts = per_second / size * (1.0 - (1.0 - continues) * unused / (1.0 - continues * unused));
        let fallback_steps = self.fallback_share(load, steps) * steps;
        let alone = ScalingGroup {
            per_second: bursts,
            idle_seconds: self.idle_seconds,
            start_seconds: self.start_seconds,
            service_seconds: load.service_seconds,
            cold_seconds: load.service_seconds + self.fallback_prefill + fallback_steps * self.fallback_step,
        };
        let time = alone.time();
        GroupLife {
            used_share: self.used_share,
            alive_share: time.share,
            wakes_per_hour: time.wakes_per_second * 3600.0,
            start_seconds: self.start_seconds,
            cold_share: self.used_share * time.cold_share,
            cold_prefill_seconds: self.fallback_prefill,
        }
    }
}
