//! Time that CPU quotas of control groups add to the phases of a request.
//!
//! A quota below one vCPU limits time, not speed: a function computes on a whole core until its quota of the period is
//! used up, then it is throttled until the next period begins. A function that waits for others most of the time is as
//! fast as one with a whole core. A function that computes all the time is slowed down to its quota.
//!
//! CPU work is of three kinds: experts, the non-expert part in the main function, and the sending, receiving and
//! answering of calls.

use crate::cost::contention::ContentionFactors;
use crate::cost::groups::ExpertPath;
use crate::cost::running::PhaseTimes;
use crate::model::Model;
use crate::plan::{Group, Plan};
use crate::problem::contention::Contention;
use crate::problem::curve::Curve;

/// Seconds after which a quota is refilled: the default period of control groups.
const PERIOD_SECONDS: f64 = 0.1;

/// Speed of a function under its CPU quota.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CpuSpeed {
    /// vCPUs that it uses while it is not throttled: at least 1 where a quota applies.
    pub vcpus: f64,
    /// Seconds that pass per second of computing if it computes all the time: 1 / quota, or 1 without a quota.
    pub throttle_factor: f64,
}

/// CPU seconds of the main function, or of all replicas of a group together, in each phase of a request.
///
/// In a prefill each replica computes its own experts. Decode steps go to the replicas in turns.
#[derive(Debug, Clone, PartialEq)]
pub struct CpuWork {
    /// Experts.
    pub experts: PhaseTimes,
    /// Everything but experts.
    pub non_expert: PhaseTimes,
    /// Prefill work of each replica.
    prefill: Vec<CpuSeconds>,
    functions: f64,
    throttle_factor: f64,
}

/// CPU seconds of one function in one phase.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CpuSeconds {
    /// Seconds of experts.
    pub experts: f64,
    /// Seconds of everything else.
    pub non_expert: f64,
}

impl CpuSeconds {
    fn total(self) -> f64 {
        self.experts + self.non_expert
    }
}

impl CpuWork {
    /// Returns zero work for `functions` replicas at `speed`. `batches`: number of [`Model::batches`].
    pub fn none(batches: usize, speed: CpuSpeed, functions: u32) -> Self {
        let (experts, non_expert) = (PhaseTimes::none(batches), PhaseTimes::none(batches));
        let prefill = vec![CpuSeconds::default(); functions.max(1) as usize];
        let throttle_factor = speed.throttle_factor;
        Self { experts, non_expert, prefill, functions: f64::from(functions), throttle_factor }
    }

    /// Adds the work of each replica in a layer's prefill.
    pub fn add_prefill(&mut self, replicas: impl Iterator<Item = CpuSeconds>) {
        for (sum, work) in self.prefill.iter_mut().zip(replicas) {
            sum.experts += work.experts;
            sum.non_expert += work.non_expert;
            self.experts.prefill += work.experts;
            self.non_expert.prefill += work.non_expert;
        }
    }

    /// Returns the prefill work of the busiest replica.
    fn busiest_prefill(&self) -> CpuSeconds {
        let busiest = self.prefill.iter().copied().max_by(|a, b| a.total().total_cmp(&b.total()));
        busiest.unwrap_or_default()
    }

    /// Returns the work of one replica in a decode step. `batch`: index into [`Model::batches`].
    fn step(&self, batch: usize) -> CpuSeconds {
        CpuSeconds {
            experts: self.experts.steps[batch] / self.functions,
            non_expert: self.non_expert.steps[batch] / self.functions,
        }
    }
}

impl Model<'_> {
    /// Returns the speed of a function with `vcpus`.
    pub fn cpu_speed(&self, vcpus: f64) -> CpuSpeed {
        match self.problem.cpu_quotas && vcpus < 1.0 {
            true => CpuSpeed { vcpus: 1.0, throttle_factor: 1.0 / vcpus },
            false => CpuSpeed { vcpus, throttle_factor: 1.0 },
        }
    }

    /// Lengthens `times` of `plan` to what the CPU quota of the slowest function allows.
    pub fn within_quotas(&self, plan: &Plan, times: &mut PhaseTimes) {
        if !self.problem.cpu_quotas {
            return;
        }
        let main = self.main_cpu_speed(plan);
        let groups = || plan.groups.iter().map(|group| (group, self.group_cpu_speed(group)));
        if main.throttle_factor.max(groups().map(|(_, speed)| speed.throttle_factor).fold(1.0, f64::max))
            <= 1.0
        {
            return;
        }
        let contention = (0..self.layers.len()).map(|layer| match self.is_rested {
            // Functions with unused quota compute as soon as they are called, all at the same time.
            true => self.contention_factors(layer, plan),
            false => ContentionFactors::none(self.batches().len()),
        });
        let contention: Vec<ContentionFactors> = contention.collect();
        let mut work = vec![self.main_cpu_work(plan, main, &contention)];
        work.extend(groups().map(|(group, speed)| self.group_cpu_work(group, speed, &contention)));
        match self.is_rested {
            true => self.throttle_rested(times, &work),
            false => self.throttle(&work, true, times),
        }
    }

    /// Lengthens `times` to what functions under lasting load take within their CPU quotas.
    ///
    /// `work`: work of the main function and of every group. If `with_contention`, experts are slowed down by the experts
    /// that other functions compute meanwhile; without it, `times` are a lower bound over all sizes. A throttled function
    /// spreads its work over a longer time, so that it overlaps with others for a smaller part. While the main function
    /// computes the non-expert part, no other function computes.
    pub fn throttle(&self, work: &[CpuWork], with_contention: bool, times: &mut PhaseTimes) {
        let contention = self.contention().filter(|_| with_contention);
        type WorkOfOne<'p> = &'p dyn Fn(&CpuWork) -> CpuSeconds;
        type PhaseSeconds<'p> = &'p dyn Fn(&PhaseTimes) -> f64;
        let lengthen = |time: &mut f64,
                        work_of_one: WorkOfOne<'_>,
                        phase_seconds: PhaseSeconds<'_>,
                        measured: fn(Contention) -> f64| {
            let all_experts: f64 = work.iter().map(|function| phase_seconds(&function.experts)).sum();
            for function in work.iter().filter(|function| function.throttle_factor > 1.0) {
                let own = work_of_one(function);
                if own.total() <= 0.0 {
                    continue;
                }
                let others = (all_experts - own.experts).max(0.0);
                let slowdown = contention.map_or(1.0, |contention| {
                    let concurrent = 1.0 + others / (function.throttle_factor * own.total());
                    contention.factor_among(concurrent, measured(contention))
                });
                *time = time.max(function.throttle_factor * (slowdown * own.experts + own.non_expert));
            }
        };
        lengthen(&mut times.prefill, &CpuWork::busiest_prefill, &|times| times.prefill, |contention| {
            contention.prefill
        });
        for (batch, step) in times.steps.iter_mut().enumerate() {
            lengthen(step, &|work| work.step(batch), &|times| times.steps[batch], |contention| {
                contention.step
            });
        }
    }

    /// Lengthens `times` of one request on functions that were idle before it, whose quota of the period is unused.
    ///
    /// With a quota q of periods of P seconds, W seconds of computing that begin anywhere in a period take
    /// W / q - (1 - q) P in the mean, and never less than W.
    fn throttle_rested(&self, times: &mut PhaseTimes, work: &[CpuWork]) {
        let seconds_until_step = |steps: f64| {
            let each = work.iter().filter(|function| function.throttle_factor > 1.0).map(|function| {
                let seconds = function.busiest_prefill().total() + steps * function.step(0).total();
                let quota = 1.0 / function.throttle_factor;
                function.throttle_factor * seconds - (1.0 - quota) * PERIOD_SECONDS
            });
            each.fold(0.0, f64::max)
        };
        times.prefill = times.prefill.max(seconds_until_step(0.0));
        if self.output > 0.0 {
            let decode = seconds_until_step(self.output) - times.prefill;
            times.steps[0] = times.steps[0].max(decode / self.output);
        }
    }

    /// Returns the CPU work of the main function of `plan`.
    fn main_cpu_work(&self, plan: &Plan, speed: CpuSpeed, contention: &[ContentionFactors]) -> CpuWork {
        let batches = self.batches();
        let mut work = CpuWork::none(batches.len(), speed, 1);
        for (layer, model) in self.layers.iter().enumerate() {
            let local = self.local_experts(layer, plan);
            let experts = self.expert_cpu_seconds(layer, &local, &model.curve, speed, &contention[layer]);
            work.experts.add(0.0, experts.steps.into_iter());
            let calls = |rows: f64| {
                let called = plan.groups.iter().map(|group| self.share_of(layer, &group.experts[layer]));
                called.map(|share| model.call_probability(share, rows)).sum::<f64>() * self.main_cpu
            };
            let working: usize =
                plan.groups.iter().map(|group| self.replicas(layer, group, 1.0).working()).sum();
            let non_expert = model.nonexpert_cpu(speed.vcpus, self.input) + working as f64 * self.main_cpu;
            work.add_prefill(std::iter::once(CpuSeconds { experts: experts.prefill, non_expert }));
            let steps =
                batches.iter().map(|rows| model.nonexpert_step_cpu(speed.vcpus, *rows) + calls(*rows));
            work.non_expert.add(0.0, steps);
        }
        work
    }

    /// Returns the CPU work of all replicas of `group`.
    fn group_cpu_work(&self, group: &Group, speed: CpuSpeed, contention: &[ContentionFactors]) -> CpuWork {
        let batches = self.batches();
        let mut work = CpuWork::none(batches.len(), speed, group.replicas.max(1));
        for (layer, model) in self.layers.iter().enumerate() {
            let hosted = &group.experts[layer];
            let experts =
                self.expert_cpu_seconds(layer, hosted, model.remote_curve(), speed, &contention[layer]);
            work.experts.add(0.0, experts.steps.into_iter());
            let share = self.share_of(layer, hosted);
            let calls = batches.iter().map(|rows| model.call_probability(share, *rows) * self.function_cpu);
            work.non_expert.add(0.0, calls);
            let replicas = self.replicas(layer, group, contention[layer].prefill);
            let replicas = replicas.computing.iter().zip(&replicas.tokens);
            work.add_prefill(replicas.map(|(experts, tokens)| CpuSeconds {
                experts: *experts,
                non_expert: if *tokens > 0.0 { self.function_cpu } else { 0.0 },
            }));
        }
        work
    }

    /// Returns the CPU seconds of `experts` of `layer`.
    fn expert_cpu_seconds(
        &self,
        layer: usize,
        experts: &[u32],
        curve: &Curve,
        speed: CpuSpeed,
        contention: &ContentionFactors,
    ) -> PhaseTimes {
        let path = |slowdown: f64| ExpertPath::new(experts, curve, speed.vcpus, slowdown);
        let steps = self.batches().into_iter().zip(&contention.steps);
        PhaseTimes {
            prefill: self.prefill_work(layer, &path(contention.prefill)),
            steps: steps.map(|(rows, slowdown)| self.mean_work(layer, rows, &path(*slowdown))).collect(),
        }
    }
}
