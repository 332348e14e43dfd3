//! What quotas of CPU time and shared cores add to the times of functions that each compute by themselves.
//!
//! A quota below one vCPU is one of time, not of speed: a function computes on a whole core until its part of a
//! period is used up, and rests until the next one begins. One that rests anyway, because it waits for others, is as
//! quick as with a whole core; one that always computes is slowed down to its share. What it computes are experts,
//! the rest of the model in the main function, and calls: each is sent, received, answered and taken back.

use crate::cost::groups::Part;
use crate::cost::running::Times;
use crate::plan::{Group, Plan};
use crate::problem::contention::Slowed;
use crate::problem::curve::Curve;
use crate::problem::model::Model;

/// Seconds after which a function has its part again: the usual period of control groups.
const PERIOD_SECONDS: f64 = 0.1;

/// How a function computes with its vCPUs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pace {
    /// The vCPUs whose speed it has while it computes.
    pub(crate) vcpus: f64,
    /// Seconds that pass per second of computing, where it computes all the time.
    pub(crate) stretch: f64,
}

impl Model<'_> {
    /// How a function with `vcpus` computes.
    pub(crate) fn pace(&self, vcpus: f64) -> Pace {
        match self.problem.cpu_quotas && vcpus < 1.0 {
            true => Pace { vcpus: 1.0, stretch: 1.0 / vcpus },
            false => Pace { vcpus, stretch: 1.0 },
        }
    }

    /// `times` of `plan`, no shorter than what the quota of any function allows.
    pub(crate) fn within_quotas(&self, plan: &Plan, times: &mut Times) {
        if !self.problem.cpu_quotas {
            return;
        }
        let slowed: Vec<Slowed> = (0..self.layers.len()).map(|layer| self.slowed(layer, plan)).collect();
        let groups = plan.groups.iter().map(|group| (self.group_pace(group), Some(group)));
        let throttled = std::iter::once((self.main_pace(plan), None)).chain(groups);
        let works: Vec<(Times, f64)> = throttled
            .filter(|(pace, _)| pace.stretch > 1.0)
            .map(|(pace, group)| match group {
                None => (self.work_of_main(plan, pace, &slowed), pace.stretch),
                Some(group) => (self.work_of(group, pace, &slowed), pace.stretch),
            })
            .collect();
        match self.is_rested {
            true => self.after_rest(times, &works),
            false => works.iter().for_each(|(work, stretch)| times.at_least(work, *stretch)),
        }
    }

    /// `times` of one request on functions that have rested: each has its part of a period at hand and is slowed
    /// down only when that is used up. With a quota q of periods of P seconds, W seconds of computing that begin
    /// anywhere in a period take W / q - (1 - q) P in the mean, and never less than W.
    fn after_rest(&self, times: &mut Times, works: &[(Times, f64)]) {
        let until = |work: fn(&Times, f64) -> f64| {
            let each = works.iter().map(|(all, stretch)| {
                stretch * work(all, self.output) - (1.0 - 1.0 / stretch) * PERIOD_SECONDS
            });
            each.fold(0.0, f64::max)
        };
        times.prefill = times.prefill.max(until(|work, _| work.prefill));
        let all = until(|work, steps| work.prefill + steps * work.steps[0]);
        if self.output > 0.0 {
            times.steps[0] = times.steps[0].max((all - times.prefill) / self.output);
        }
    }

    /// What the main function computes.
    fn work_of_main(&self, plan: &Plan, pace: Pace, slowed: &[Slowed]) -> Times {
        let batches = self.batches();
        let mut work = Times::none(batches.len());
        for (layer, model) in self.layers.iter().enumerate() {
            let local = self.local_experts(layer, plan);
            let experts = self.work_of_experts(layer, &local, &model.curve, pace, &slowed[layer]);
            let calls = |rows: f64| {
                let called = plan.groups.iter().map(|group| self.share_of(layer, &group.experts[layer]));
                called.map(|share| model.called(share, rows)).sum::<f64>() * self.main_cpu
            };
            let working: usize =
                plan.groups.iter().map(|group| self.replicas(layer, group, 1.0).working()).sum();
            let steps = batches.iter().zip(&experts.steps);
            work.add(
                model.computing(pace.vcpus, self.input) + experts.prefill + working as f64 * self.main_cpu,
                steps.map(|(rows, experts)| model.step_computing(pace.vcpus, *rows) + experts + calls(*rows)),
            );
        }
        work
    }

    /// What one of the functions of `group` computes.
    fn work_of(&self, group: &Group, pace: Pace, slowed: &[Slowed]) -> Times {
        let mut work = Times::none(self.batches().len());
        let functions = f64::from(group.replicas.max(1));
        for (layer, model) in self.layers.iter().enumerate() {
            let hosted = &group.experts[layer];
            let all = self.work_of_experts(layer, hosted, model.remote_curve(), pace, &slowed[layer]);
            let share = self.share_of(layer, hosted);
            let calls = self.batches().into_iter().map(|rows| model.called(share, rows) * self.function_cpu);
            let working = self.replicas(layer, group, 1.0).working();
            let prefill = all.prefill + working as f64 * self.function_cpu;
            work.add(
                prefill / functions,
                all.steps.iter().zip(calls).map(|(step, calls)| (step + calls) / functions),
            );
        }
        work
    }

    /// Seconds of computing `experts` of `layer`.
    fn work_of_experts(
        &self,
        layer: usize,
        experts: &[u32],
        curve: &Curve,
        pace: Pace,
        slowed: &Slowed,
    ) -> Times {
        let part = |slowed: f64| Part::new(experts, curve, pace.vcpus, slowed);
        let steps = self.batches().into_iter().zip(&slowed.steps);
        Times {
            prefill: self.prefill_work(layer, &part(slowed.prefill)),
            steps: steps.map(|(rows, slowed)| self.mean_work(layer, rows, &part(*slowed))).collect(),
        }
    }
}
