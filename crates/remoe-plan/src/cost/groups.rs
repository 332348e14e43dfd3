//! Times of layers whose remote experts are in groups, which all compute at the same time, and of decode steps of several
//! requests at once.

use crate::cost::LayerEvaluation;
use crate::cost::cpu_quota::CpuSpeed;
use crate::cost::replicas::Replicas;
use crate::cost::sleepers::GroupLife;
use crate::cost::slowest::{Path, PathWork, expected_slowest, slowest_of};
use crate::model::{Model, Seconds, used};
use crate::plan::{Group, Plan, whole_bytes};
use crate::problem::curve::{Column, Curve};
use serde::Serialize;

/// Work of one group of remote functions for a request.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupEvaluation {
    /// Bytes that each of its functions needs.
    #[serde(serialize_with = "whole_bytes")]
    pub needed_bytes: f64,
    /// Share of all assignments that go to it.
    pub share: f64,
    /// Busy seconds of all its functions in the prefill.
    pub prefill_billed: f64,
    /// Busy seconds of its functions in one decode step.
    pub decode_billed: f64,
    /// Dollars per second of all its functions.
    pub rate: f64,
    /// Starts and time alive, if it has an idle window of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub life: Option<GroupLife>,
}

/// Experts of one layer that are computed on one path: by the main function or by one group.
pub struct ExpertPath<'a> {
    experts: &'a [u32],
    curve: &'a Curve,
    column: Column,
    slowdown: f64,
}

impl<'a> ExpertPath<'a> {
    /// Creates the path of `experts` on functions with `vcpus`. Contention lengthens each expert by the factor `slowdown`.
    pub fn new(experts: &'a [u32], curve: &'a Curve, vcpus: f64, slowdown: f64) -> Self {
        Self { experts, curve, column: curve.column(vcpus), slowdown }
    }

    /// Seconds of one expert with `tokens`.
    fn seconds(&self, tokens: f64) -> f64 {
        self.slowdown * self.curve.seconds(tokens, self.column)
    }
}

/// One decode step of a layer's experts.
struct Step {
    /// Expected seconds of the slowest path.
    seconds: f64,
    /// Expected number of groups that are called.
    calls: f64,
}

impl Model<'_> {
    /// Returns the CPU speed of the main function of `plan`.
    pub fn main_cpu_speed(&self, plan: &Plan) -> CpuSpeed {
        self.cpu_speed(plan.main_vcpus.unwrap_or_else(|| self.main_vcpus(plan.main_bytes)))
    }

    /// Returns the CPU speed of each function of `group`.
    pub fn group_cpu_speed(&self, group: &Group) -> CpuSpeed {
        self.cpu_speed(group.vcpus.unwrap_or_else(|| self.remote_vcpus(group.memory_bytes)))
    }

    /// Evaluates `layer` of a plan with groups. The costs in the result are 0.
    pub fn layer_in_groups(&self, layer: usize, plan: &Plan) -> LayerEvaluation {
        let model = &self.layers[layer];
        let vcpus = self.main_cpu_speed(plan).vcpus;
        let slowdown = self.prefill_contention(layer, plan);
        let local = self.local_experts(layer, plan);
        let local_prefill = self.prefill_work(layer, &ExpertPath::new(&local, &model.curve, vcpus, slowdown));
        let replicas: Vec<Replicas> =
            plan.groups.iter().map(|group| self.replicas(layer, group, slowdown)).collect();
        let remote_prefill = replicas.iter().map(Replicas::slowest).fold(0.0, f64::max);
        let shared_prefill = self.shared_core_bound(hosting_groups(layer, plan), || {
            let part = |experts, curve| ExpertPath::new(experts, curve, 1.0, slowdown);
            let parts = plan.groups.iter().map(|group| part(&group.experts[layer], model.remote_curve()));
            let parts = parts.chain([part(&local, &model.curve)]);
            parts.map(|part| self.prefill_work(layer, &part)).sum()
        });
        let step = self.step(layer, 1.0, plan, &local);
        let slowdown = self.step_contention(layer, 1.0, plan);
        let billed: f64 = plan.groups.iter().map(|group| self.group_step(layer, group, slowdown)).sum();
        let called = replicas.iter().filter(|replicas| replicas.slowest() > 0.0).count() as f64;
        let fixed =
            model.fixed(vcpus).plus(Seconds { prefill: called * self.send, step: step.calls * self.send });
        let all = |of: fn(&Replicas) -> &Vec<f64>| replicas.iter().flat_map(of).copied().collect();
        LayerEvaluation {
            prefill: fixed.prefill + local_prefill.max(remote_prefill).max(shared_prefill),
            decode: fixed.step + step.seconds,
            local_prefill,
            remote_prefill,
            replica_seconds: all(|replicas| &replicas.seconds),
            replica_tokens: all(|replicas| &replicas.tokens),
            replica_load: all(|replicas| &replicas.loads),
            load_bound: replicas.iter().map(|replicas| replicas.load_bound).fold(0.0, f64::max),
            remote_decode_billed: billed,
            remote_share: self.share_of(layer, &plan.layers[layer].remote).min(1.0),
            needed_bytes: 0.0,
            main_cost: 0.0,
            remote_cost: 0.0,
        }
    }

    /// Evaluates the group at `index` of `plan`. `evaluated`: the evaluations of all layers.
    pub fn group(&self, index: usize, plan: &Plan, evaluated: &[LayerEvaluation]) -> GroupEvaluation {
        let group = &plan.groups[index];
        let layers = 0..self.layers.len();
        let prefill = |layer: usize| {
            replicas_of_group(index, layer, plan, &evaluated[layer].replica_seconds).iter().sum::<f64>()
        };
        let share = |layer: usize| self.share_of(layer, &group.experts[layer]);
        GroupEvaluation {
            needed_bytes: self.group_needed(&group.experts),
            share: layers.clone().map(share).sum::<f64>() / self.layers.len() as f64,
            prefill_billed: layers.clone().map(prefill).sum(),
            decode_billed: layers
                .map(|layer| self.group_step(layer, group, self.step_contention(layer, 1.0, plan)))
                .sum(),
            rate: self.remote_rate(group.memory_bytes, group.vcpus) * f64::from(group.replicas),
            life: None,
        }
    }

    /// Returns the seconds of one decode step of `rows` requests in all layers of `plan`.
    pub fn batch_step(&self, plan: &Plan, rows: f64) -> f64 {
        (0..self.layers.len()).map(|layer| self.batch_step_of(layer, plan, rows)).sum()
    }

    /// Returns the seconds of one decode step of `rows` requests in `layer`.
    pub fn batch_step_of(&self, layer: usize, plan: &Plan, rows: f64) -> f64 {
        let step = self.step(layer, rows, plan, &self.local_experts(layer, plan));
        let fixed = self.layers[layer].fixed_step(self.main_cpu_speed(plan).vcpus, rows);
        fixed + step.calls * self.send + step.seconds
    }

    fn prefill_tokens(&self, layer: usize, expert: u32) -> f64 {
        self.input * self.layers[layer].per_token() * self.shares[layer][expert as usize]
    }

    /// Returns the ids of the local experts of `layer`, ascending.
    pub fn local_experts(&self, layer: usize, plan: &Plan) -> Vec<u32> {
        let remote = &plan.layers[layer].remote;
        let experts = 0..self.layers[layer].experts as u32;
        experts.filter(|expert| remote.binary_search(expert).is_err()).collect()
    }

    /// Splits the work of `group` in `layer` among its replicas; `slowdown` is the factor of [`ContentionFactors`](super::contention::Slowed).
    pub fn replicas(&self, layer: usize, group: &Group, slowdown: f64) -> Replicas {
        let vcpus = self.group_cpu_speed(group).vcpus;
        Replicas::new(self, layer, &group.experts[layer], vcpus, group.replicas, slowdown)
    }

    /// Returns the busy seconds of `group` in one decode step of one request in `layer`.
    pub fn group_step(&self, layer: usize, group: &Group, slowdown: f64) -> f64 {
        let model = &self.layers[layer];
        let experts = &group.experts[layer];
        let share = self.share_of(layer, experts).min(1.0);
        let part =
            ExpertPath::new(experts, model.remote_curve(), self.group_cpu_speed(group).vcpus, slowdown);
        let one = part.seconds(1.0) + self.down;
        model.per_token() * share * one + model.call_probability(share, 1.0) * self.round_trip()
    }

    /// Evaluates one decode step of `rows` requests in `layer`, without the non-expert part.
    fn step(&self, layer: usize, rows: f64, plan: &Plan, local: &[u32]) -> Step {
        let model = &self.layers[layer];
        let slowdown = self.step_contention(layer, rows, plan);
        let local_path = ExpertPath::new(local, &model.curve, self.main_cpu_speed(plan).vcpus, slowdown);
        // In a plan without groups each layer has at most one remote function.
        let own = &plan.layers[layer];
        let own = (plan.groups.is_empty() && !own.remote.is_empty())
            .then(|| (own.remote.as_slice(), self.remote_vcpus(own.memory_bytes)));
        let of_groups = plan
            .groups
            .iter()
            .map(|group| (group.experts[layer].as_slice(), self.group_cpu_speed(group).vcpus));
        let remote_paths: Vec<ExpertPath<'_>> = of_groups
            .chain(own)
            .filter(|(experts, _)| !experts.is_empty())
            .map(|(experts, vcpus)| ExpertPath::new(experts, model.remote_curve(), vcpus, slowdown))
            .collect();
        let step = match rows > 1.0 {
            true => self.step_of_many(layer, rows, &local_path, &remote_paths),
            false => self.step_of_one(layer, &local_path, &remote_paths),
        };
        let shared = self.shared_core_bound(hosting_groups(layer, plan), || {
            let parts = remote_paths.iter().chain([&local_path]);
            parts
                .map(|part| {
                    self.mean_work(layer, rows, &ExpertPath { column: part.curve.column(1.0), ..*part })
                })
                .sum()
        });
        Step { seconds: step.seconds.max(shared), ..step }
    }

    /// Returns a lower bound of the seconds in which the shared cores of one machine do the work of all functions.
    ///
    /// `core_seconds`: that work on one core. 0 if main function and groups do not share a machine, or without `groups`.
    pub fn shared_core_bound(&self, groups: usize, core_seconds: impl FnOnce() -> f64) -> f64 {
        let cores = self.problem.shared_cores.filter(|_| groups > 0);
        cores.map_or(0.0, |cores| core_seconds() / cores)
    }

    fn step_of_one(
        &self,
        layer: usize,
        local_path: &ExpertPath<'_>,
        remote_paths: &[ExpertPath<'_>],
    ) -> Step {
        let model = &self.layers[layer];
        let path = |part: &ExpertPath<'_>, down: f64, trip: f64| Path {
            share: self.share_of(layer, part.experts),
            seconds: part.seconds(1.0) + down,
            trip,
            count: 1,
        };
        let trip = self.round_trip();
        let mut paths: Vec<Path> = remote_paths.iter().map(|part| path(part, self.down, trip)).collect();
        let calls = paths.iter().map(|path| model.call_probability(path.share, 1.0)).sum();
        let remote: f64 = paths.iter().map(|path| path.share).sum();
        // Shares sum to 1 but for rounding: what is not remote is local.
        paths.push(Path { share: (1.0 - remote).max(0.0), ..path(local_path, 0.0, 0.0) });
        Step { seconds: expected_slowest(model.top_k, &paths), calls }
    }

    /// Evaluates a decode step of several tokens, which share experts: the weights of each used expert are read once.
    ///
    /// The number of used experts varies from step to step, independently on each path.
    fn step_of_many(
        &self,
        layer: usize,
        rows: f64,
        local_path: &ExpertPath<'_>,
        remote_paths: &[ExpertPath<'_>],
    ) -> Step {
        let model = &self.layers[layer];
        let per_token = model.per_token();
        let mut works = vec![self.work(layer, rows, local_path)];
        let mut calls = 0.0;
        for part in remote_paths {
            let share = self.share_of(layer, part.experts).min(1.0);
            let called = model.call_probability(share, rows);
            let travelling = rows * model.call_probability(share, 1.0);
            let mut work = self.work(layer, rows, part);
            work.mean += rows * per_token * share * self.down + travelling * self.up + called * self.invoke;
            works.push(work);
            calls += called;
        }
        Step { seconds: slowest_of(works.into_iter()), calls }
    }

    /// Returns the CPU seconds of the experts of `part` in the prefill.
    pub fn prefill_work(&self, layer: usize, part: &ExpertPath<'_>) -> f64 {
        let tokens = part.experts.iter().map(|expert| self.prefill_tokens(layer, *expert));
        tokens.map(|tokens| part.seconds(tokens)).sum()
    }

    /// Returns the mean CPU seconds of the experts of `part` in a decode step of `rows` requests.
    ///
    /// A single request uses at most top-k experts, even if the shares sum to more.
    pub fn mean_work(&self, layer: usize, rows: f64, part: &ExpertPath<'_>) -> f64 {
        match rows > 1.0 {
            true => self.work(layer, rows, part).mean,
            false => {
                let share = self.share_of(layer, part.experts).min(1.0);
                self.layers[layer].per_token() * share * part.seconds(1.0)
            }
        }
    }

    /// Returns mean and variance of the CPU seconds of the experts of `part` for `rows` tokens.
    fn work(&self, layer: usize, rows: f64, part: &ExpertPath<'_>) -> PathWork {
        let per_token = self.layers[layer].per_token();
        let known = self.used_in(rows).map(|layers| &layers[layer]);
        part.experts.iter().fold(PathWork::default(), |sum, expert| {
            let expert = *expert as usize;
            let (used, tokens) = known
                .map_or_else(|| used(rows, per_token * self.shares[layer][expert]), |known| known[expert]);
            let seconds = part.seconds(tokens);
            PathWork {
                mean: sum.mean + used * seconds,
                variance: sum.variance + used * (1.0 - used) * seconds * seconds,
            }
        })
    }
}

/// Returns the figures of the replicas of the group at `index`, out of the `figures` of all functions of `layer`.
///
/// [`LayerEvaluation`] lists functions group by group.
pub fn replicas_of_group<'f>(index: usize, layer: usize, plan: &Plan, figures: &'f [f64]) -> &'f [f64] {
    let functions = |group: &Group| match group.experts[layer].is_empty() {
        true => 0,
        false => group.replicas.max(1) as usize,
    };
    let before: usize = plan.groups[..index].iter().map(functions).sum();
    &figures[before..before + functions(&plan.groups[index])]
}

/// Counts the groups that host experts of `layer`.
fn hosting_groups(layer: usize, plan: &Plan) -> usize {
    plan.groups.iter().filter(|group| !group.experts[layer].is_empty()).count()
}
