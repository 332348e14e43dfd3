//! Time that quotas of CPU time and shared cores add to functions that each compute by themselves.
//!
//! A quota below one vCPU is one of time, not of speed: a function computes on a whole core until its part of a
//! period is used up, and rests until the next one begins. One that rests anyway, because it waits for others, is as
//! quick as with a whole core; one that always computes is slowed down to its share. What it computes are experts,
//! the rest of the model in the main function, and calls: each is sent, received, answered and taken back.

use crate::cost::contention::Slowed;
use crate::cost::groups::ExpertPath;
use crate::cost::running::Times;
use crate::model::Model;
use crate::plan::{Group, Plan};
use crate::problem::contention::Contention;
use crate::problem::curve::Curve;

/// Seconds after which a function has its part again: the usual period of control groups.
const PERIOD_SECONDS: f64 = 0.1;

/// How a function computes with its vCPUs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// The vCPUs whose speed it has while it computes.
    pub vcpus: f64,
    /// Seconds that pass per second of computing, where it computes all the time.
    pub stretch: f64,
}

/// Computation of the main function, or of all functions of a group together.
///
/// In a prefill each replica has experts of its own. Decode steps go to replicas in turns.
#[derive(Debug, Clone, PartialEq)]
pub struct Computed {
    /// Experts.
    pub experts: Times,
    /// Everything else.
    pub rest: Times,
    /// Seconds of experts and of everything else in a prefill, of each replica.
    prefill: Vec<(f64, f64)>,
    functions: f64,
    stretch: f64,
}

impl Computed {
    /// Nothing yet, by so many `functions` at `pace`.
    pub fn none(batches: usize, pace: Pace, functions: u32) -> Self {
        let (experts, rest) = (Times::none(batches), Times::none(batches));
        let prefill = vec![(0.0, 0.0); functions.max(1) as usize];
        Self { experts, rest, prefill, functions: f64::from(functions), stretch: pace.stretch }
    }

    /// Adds what each replica computes of a layer's prefill: experts, and everything else.
    pub fn add_prefill(&mut self, replicas: impl Iterator<Item = (f64, f64)>) {
        for (sum, (experts, rest)) in self.prefill.iter_mut().zip(replicas) {
            *sum = (sum.0 + experts, sum.1 + rest);
            self.experts.prefill += experts;
            self.rest.prefill += rest;
        }
    }

    /// Experts and everything else that the busiest replica computes in a prefill.
    fn busiest(&self) -> (f64, f64) {
        let all = |(experts, rest): &(f64, f64)| experts + rest;
        self.prefill.iter().copied().max_by(|a, b| all(a).total_cmp(&all(b))).unwrap_or_default()
    }

    /// As above for one function in the decode step at `index`.
    fn step(&self, index: usize) -> (f64, f64) {
        (self.experts.steps[index] / self.functions, self.rest.steps[index] / self.functions)
    }
}

impl Model<'_> {
    /// How a function with `vcpus` computes.
    pub fn pace(&self, vcpus: f64) -> Pace {
        match self.problem.cpu_quotas && vcpus < 1.0 {
            true => Pace { vcpus: 1.0, stretch: 1.0 / vcpus },
            false => Pace { vcpus, stretch: 1.0 },
        }
    }

    /// `times` of `plan`, no shorter than what the quota of any function allows.
    pub fn within_quotas(&self, plan: &Plan, times: &mut Times) {
        if !self.problem.cpu_quotas {
            return;
        }
        let main = self.main_pace(plan);
        let groups = || plan.groups.iter().map(|group| (group, self.group_pace(group)));
        if main.stretch.max(groups().map(|(_, pace)| pace.stretch).fold(1.0, f64::max)) <= 1.0 {
            return;
        }
        let slowed = (0..self.layers.len()).map(|layer| match self.is_rested {
            // Who has rested computes when it is asked, and all who are asked do so at the same time.
            true => self.slowed(layer, plan),
            false => Slowed::not(self.batches().len()),
        });
        let slowed: Vec<Slowed> = slowed.collect();
        let mut all = vec![self.computed_by_main(plan, main, &slowed)];
        all.extend(groups().map(|(group, pace)| self.computed_by(group, pace, &slowed)));
        match self.is_rested {
            true => self.after_rest(times, &all),
            false => self.throttled(&all, true, times),
        }
    }

    /// `times`, no shorter than what functions of which `all` is computed take where they always compute. One whose
    /// quota is used up computes for its share of the time, so that others' experts are in its way for as much of that as they take
    /// meanwhile: `contended`, unless the least is asked for that sizes can lead to. While the main function computes
    /// anything else, no other function has anything to do.
    pub fn throttled(&self, all: &[Computed], contended: bool, times: &mut Times) {
        let contention = self.contention().filter(|_| contended);
        type TimeFn<'p> = &'p dyn Fn(&Computed) -> (f64, f64);
        type All<'p> = &'p dyn Fn(&Times) -> f64;
        let lengthen = |time: &mut f64, part: TimeFn<'_>, pick: All<'_>, measured: fn(Contention) -> f64| {
            let all_experts: f64 = all.iter().map(|one| pick(&one.experts)).sum();
            for own in all.iter().filter(|own| own.stretch > 1.0) {
                let (experts, rest) = part(own);
                if experts + rest <= 0.0 {
                    continue;
                }
                let others = (all_experts - experts).max(0.0);
                let slowed = contention.map_or(1.0, |contention| {
                    let along = 1.0 + others / (own.stretch * (experts + rest));
                    contention.among(along, measured(contention))
                });
                *time = time.max(own.stretch * (slowed * experts + rest));
            }
        };
        lengthen(&mut times.prefill, &Computed::busiest, &|times| times.prefill, |contention| {
            contention.prefill
        });
        for (index, step) in times.steps.iter_mut().enumerate() {
            lengthen(step, &|own| own.step(index), &|times| times.steps[index], |contention| contention.step);
        }
    }

    /// `times` of one request on functions that have rested: each has its part of a period at hand and is slowed
    /// down only when that is used up. With a quota q of periods of P seconds, W seconds of computing that begin
    /// anywhere in a period take W / q - (1 - q) P in the mean, and never less than W.
    fn after_rest(&self, times: &mut Times, all: &[Computed]) {
        let until = |steps: f64| {
            let each = all.iter().filter(|one| one.stretch > 1.0).map(|one| {
                let ((experts, rest), step) = (one.busiest(), one.step(0));
                let work = experts + rest + steps * (step.0 + step.1);
                one.stretch * work - (1.0 - 1.0 / one.stretch) * PERIOD_SECONDS
            });
            each.fold(0.0, f64::max)
        };
        times.prefill = times.prefill.max(until(0.0));
        if self.output > 0.0 {
            times.steps[0] = times.steps[0].max((until(self.output) - times.prefill) / self.output);
        }
    }

    /// Computation of the main function.
    fn computed_by_main(&self, plan: &Plan, pace: Pace, slowed: &[Slowed]) -> Computed {
        let batches = self.batches();
        let mut computed = Computed::none(batches.len(), pace, 1);
        for (layer, model) in self.layers.iter().enumerate() {
            let local = self.local_experts(layer, plan);
            let experts = self.work_of_experts(layer, &local, &model.curve, pace, &slowed[layer]);
            computed.experts.add(0.0, experts.steps.into_iter());
            let calls = |rows: f64| {
                let called = plan.groups.iter().map(|group| self.share_of(layer, &group.experts[layer]));
                called.map(|share| model.called(share, rows)).sum::<f64>() * self.main_cpu
            };
            let working: usize =
                plan.groups.iter().map(|group| self.replicas(layer, group, 1.0).working()).sum();
            let rest = model.computing(pace.vcpus, self.input) + working as f64 * self.main_cpu;
            computed.add_prefill(std::iter::once((experts.prefill, rest)));
            let steps = batches.iter().map(|rows| model.step_computing(pace.vcpus, *rows) + calls(*rows));
            computed.rest.add(0.0, steps);
        }
        computed
    }

    /// Computation of the functions of `group`.
    fn computed_by(&self, group: &Group, pace: Pace, slowed: &[Slowed]) -> Computed {
        let batches = self.batches();
        let mut computed = Computed::none(batches.len(), pace, group.replicas.max(1));
        for (layer, model) in self.layers.iter().enumerate() {
            let hosted = &group.experts[layer];
            let experts = self.work_of_experts(layer, hosted, model.remote_curve(), pace, &slowed[layer]);
            computed.experts.add(0.0, experts.steps.into_iter());
            let share = self.share_of(layer, hosted);
            let calls = batches.iter().map(|rows| model.called(share, *rows) * self.function_cpu);
            computed.rest.add(0.0, calls);
            let replicas = self.replicas(layer, group, slowed[layer].prefill);
            let work = replicas.computing.iter().zip(&replicas.tokens);
            computed.add_prefill(
                work.map(|(experts, tokens)| (*experts, if *tokens > 0.0 { self.function_cpu } else { 0.0 })),
            );
        }
        computed
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
        let part = |slowed: f64| ExpertPath::new(experts, curve, pace.vcpus, slowed);
        let steps = self.batches().into_iter().zip(&slowed.steps);
        Times {
            prefill: self.prefill_work(layer, &part(slowed.prefill)),
            steps: steps.map(|(rows, slowed)| self.mean_work(layer, rows, &part(*slowed))).collect(),
        }
    }
}
