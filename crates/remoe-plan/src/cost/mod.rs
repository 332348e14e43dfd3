//! Cost model: times and cost of a request under a plan, term by term (README of `remoe-planner`, "The cost model").

pub mod account;
pub mod baseline_prices;
pub mod baselines;
pub mod contention;
pub mod cpu_quota;
pub mod decode;
pub mod groups;
pub mod lpt;
pub mod main_size;
pub mod replicas;
pub mod running;
pub mod sleepers;
pub mod slowest;
pub mod stress;

use crate::cost::decode::{expected_slower_path, remote_count_probabilities};
use crate::cost::groups::{GroupEvaluation, replicas_of_group};
use crate::cost::replicas::Replicas;
use crate::cost::running::{Bill, Detail, Life, PhaseTimes, ServingFunctions};
use crate::model::{Model, Seconds};
use crate::plan::{Group, LayerPlan, Plan, whole_bytes};
use crate::problem::sizes::{BYTE_SLACK, GB};
use serde::Serialize;

/// Slack of the time to first token, in seconds.
pub const TTFT_SLACK: f64 = 1e-9;
/// Slack of the time per output token, in seconds.
pub const TPOT_SLACK: f64 = 1e-12;

/// Times in seconds and cost in dollars of one request under a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Evaluation {
    /// Prefill of all layers (PT; Remoe paper, equation 1).
    pub prefill_seconds: f64,
    /// All decode steps (GT; Remoe paper, equation 4).
    pub decode_seconds: f64,
    /// Time to first token: prefill and cold start. With arrivals, the mean over requests.
    pub ttft_seconds: f64,
    /// Time per output token: one decode step, or 0 without one. With arrivals, the mean over requests.
    pub tpot_seconds: f64,
    /// With arrivals, decode steps of several requests, up to the concurrency.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<BatchStep>,
    /// Dollars of the main function (Remoe paper, equation 6).
    pub main_cost: f64,
    /// Dollars of the remote functions (Remoe paper, equations 8 and 9).
    pub remote_cost: f64,
    /// Dollars of all functions.
    pub total_cost: f64,
    /// Memory of the device (Remoe paper, equation 7).
    #[serde(serialize_with = "whole_bytes")]
    pub gpu_bytes: f64,
    /// The terms of each layer.
    pub layers: Vec<LayerEvaluation>,
    /// The terms of each group.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupEvaluation>,
    /// With arrivals, time alive and load of the functions. Costs and times are those at that load.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub life: Option<Life>,
    /// Limits that the plan breaks.
    pub violations: Vec<Violation>,
}

/// One decode step of several requests.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct BatchStep {
    /// Number of requests with a token in the step.
    pub requests: f64,
    /// Seconds of the step.
    pub seconds: f64,
}

/// The terms of one layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerEvaluation {
    /// Prefill seconds: the non-expert part and the slower of both paths.
    pub prefill: f64,
    /// Seconds of one decode step.
    pub decode: f64,
    /// Prefill seconds of the local experts.
    pub local_prefill: f64,
    /// Prefill seconds of the slowest replica.
    pub remote_prefill: f64,
    /// Prefill seconds of each replica (ZT; Remoe paper, equation 3).
    pub replica_seconds: Vec<f64>,
    /// Tokens that are sent to each replica.
    pub replica_tokens: Vec<f64>,
    /// Load of each replica, as balanced by longest-first assignment: seconds without invocation and without the cap on sent
    /// tokens.
    pub replica_load: Vec<f64>,
    /// Upper bound of the largest load (Remoe paper, Theorem 4).
    pub load_bound: f64,
    /// Billed seconds of remote functions in a decode step.
    pub remote_decode_billed: f64,
    /// Share of the layer's assignments that go to remote experts.
    pub remote_share: f64,
    /// Bytes that a replica needs.
    #[serde(serialize_with = "whole_bytes")]
    pub needed_bytes: f64,
    /// Dollars of the main function for this layer.
    pub main_cost: f64,
    /// Dollars of this layer's remote functions.
    pub remote_cost: f64,
}

/// A broken limit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Violation {
    /// Name: `ttft`, `tpot`, `gpu`, `main`, `mem<l>`, `payload<l>`, `z<l>`, `spec_main`, `spec<l>`.
    pub limit: String,
    /// Value of the plan.
    pub value: f64,
    /// Allowed value: the largest one, or for a size the nearest allowed size.
    pub allowed: f64,
}

impl Model<'_> {
    /// Evaluates `plan`, which must belong to this problem. Latencies are simulated only if limits depend on it.
    pub fn evaluate(&self, plan: &Plan) -> Evaluation {
        self.evaluate_in(plan, Detail::Search)
    }

    /// Evaluates `plan` with simulated latencies. It breaks the same limits as [`Self::evaluate`] finds.
    pub fn evaluate_fully(&self, plan: &Plan) -> Evaluation {
        self.evaluate_in(plan, Detail::Full)
    }

    /// Evaluates `plan` if `accepts_cost` accepts its cost in dollars. Otherwise, or if the search ends, returns `None`.
    ///
    /// Rejected plans take no simulation.
    pub fn evaluate_if(&self, plan: &Plan, accepts_cost: impl Fn(f64) -> bool) -> Option<Evaluation> {
        if self.ends() {
            return None;
        }
        let (mut evaluation, running) = self.evaluate_times(plan);
        // Costs do not depend on simulations.
        let cost = self.bill(&running, Detail::Cost).total();
        accepts_cost(cost).then(|| {
            self.complete(plan, &mut evaluation, &running, Detail::Search);
            evaluation
        })
    }

    fn evaluate_in(&self, plan: &Plan, detail: Detail) -> Evaluation {
        let (mut evaluation, running) = self.evaluate_times(plan);
        self.complete(plan, &mut evaluation, &running, detail);
        evaluation
    }

    /// Evaluates the times of `plan`. Cost and latency follow in [`Self::complete`].
    fn evaluate_times(&self, plan: &Plan) -> (Evaluation, ServingFunctions) {
        // Terms of the prefill and of each batch, and the fixed work of each layer.
        self.add_work(self.experts() * (2 + self.batches().len() / 2) + 40 * self.layers.len());
        let mut layers: Vec<LayerEvaluation> = match plan.groups.is_empty() {
            true => {
                plan.layers.iter().enumerate().map(|(layer, part)| self.layer(layer, part, plan)).collect()
            }
            false => (0..plan.layers.len()).map(|layer| self.layer_in_groups(layer, plan)).collect(),
        };
        let groups: Vec<GroupEvaluation> =
            (0..plan.groups.len()).map(|index| self.group(index, plan, &layers)).collect();
        let times = self.times(plan, &mut layers);
        let prefill_seconds = times.prefill;
        let step = times.steps[0];
        let decode_seconds = self.output * step;
        let seconds = prefill_seconds + decode_seconds;
        let main_rate = self.main_rate(plan);
        for (layer, part) in layers.iter_mut().zip(&plan.layers) {
            layer.main_cost = main_rate * (layer.prefill + self.output * layer.decode);
            layer.remote_cost = self.remote_cost(layer, part, seconds);
        }
        let batches = self.batches().into_iter().zip(&times.steps);
        let steps = match self.problem.arrivals {
            Some(_) => batches.map(|(requests, seconds)| BatchStep { requests, seconds: *seconds }).collect(),
            None => Vec::new(),
        };
        let running = self.running(plan, times, &layers, &groups);
        let evaluation = Evaluation {
            prefill_seconds,
            decode_seconds,
            ttft_seconds: 0.0,
            tpot_seconds: 0.0,
            steps,
            main_cost: 0.0,
            remote_cost: 0.0,
            total_cost: 0.0,
            gpu_bytes: self.gpu_bytes,
            layers,
            groups,
            life: None,
            violations: Vec::new(),
        };
        (evaluation, running)
    }

    /// Adds cost, latency and broken limits to an evaluation of times.
    fn complete(&self, plan: &Plan, evaluation: &mut Evaluation, running: &ServingFunctions, detail: Detail) {
        let bill = self.bill(running, detail);
        let sleeping =
            plan.groups.iter().zip(&mut evaluation.groups).filter(|(group, _)| self.may_sleep(group));
        sleeping.zip(&bill.sleepers).for_each(|((_, group), life)| group.life = Some(*life));
        (evaluation.ttft_seconds, evaluation.tpot_seconds) = (bill.ttft_seconds, bill.tpot_seconds);
        (evaluation.main_cost, evaluation.remote_cost) = (bill.main_cost, bill.remote_cost);
        evaluation.total_cost = bill.total();
        evaluation.life = bill.life;
        self.divide_cost_among_layers(evaluation);
        evaluation.violations = self.violations(plan, evaluation, &bill);
    }

    /// Sums the times of `layers`. The time that CPU quotas add is spread over `layers`.
    fn times(&self, plan: &Plan, layers: &mut [LayerEvaluation]) -> PhaseTimes {
        let mut steps = vec![layers.iter().map(|layer| layer.decode).sum()];
        steps.extend(self.batches()[1..].iter().map(|rows| self.batch_step(plan, *rows)));
        let unthrottled = PhaseTimes { prefill: layers.iter().map(|layer| layer.prefill).sum(), steps };
        let mut times = unthrottled.clone();
        self.within_quotas(plan, &mut times);
        for layer in layers.iter_mut().filter(|_| times != unthrottled) {
            layer.prefill *= ratio(times.prefill, unthrottled.prefill);
            layer.decode *= ratio(times.steps[0], unthrottled.steps[0]);
        }
        times
    }

    /// Collects the times and rates that the cost of `plan` follows from.
    fn running(
        &self,
        plan: &Plan,
        times: PhaseTimes,
        layers: &[LayerEvaluation],
        groups: &[GroupEvaluation],
    ) -> ServingFunctions {
        let of_layers = || plan.layers.iter().zip(layers);
        let rate = |part: &LayerPlan| self.cpu_price * part.memory_bytes / GB;
        let billed = |prefill: f64, step: f64| prefill + self.output * step;
        let (mut remote_rate, mut remote_bill) = (0.0, 0.0);
        if self.is_reserved() {
            let always_alive = plan.groups.iter().zip(groups).filter(|(part, _)| !self.may_sleep(part));
            remote_rate = of_layers().map(|(part, _)| rate(part) * f64::from(part.replicas)).sum::<f64>()
                + always_alive.map(|(_, group)| group.rate).sum::<f64>();
        } else {
            let of_layer = |(part, layer): (&LayerPlan, &LayerEvaluation)| {
                rate(part) * billed(layer.replica_seconds.iter().sum(), layer.remote_decode_billed)
            };
            // Each replica is billed for its own busy time.
            let replicas_of_group = |(part, group): (&Group, &GroupEvaluation)| {
                group.rate / f64::from(part.replicas) * billed(group.prefill_billed, group.decode_billed)
            };
            remote_bill = of_layers().map(of_layer).sum::<f64>()
                + plan.groups.iter().zip(groups).map(replicas_of_group).sum::<f64>();
        }
        let remote = plan.remote_counts();
        let largest = match plan.groups.is_empty() {
            true => remote
                .iter()
                .zip(&self.layers)
                .map(|(set, layer)| *set as f64 * layer.expert_bytes)
                .fold(0.0, f64::max),
            false => plan.groups.iter().map(|group| self.weight_bytes(&group.experts)).fold(0.0, f64::max),
        };
        ServingFunctions {
            times,
            main_rate: self.main_rate(plan),
            remote_rate,
            remote_bill,
            start_seconds: self
                .start_seconds(self.nonexpert_bytes + self.local_expert_bytes(&remote), largest),
            sleepers: plan
                .groups
                .iter()
                .zip(groups)
                .filter_map(|(part, group)| self.sleeper(part, plan, group.rate))
                .collect(),
        }
    }

    /// Returns the dollars per second of the main function of `plan` (H^w).
    pub fn main_rate(&self, plan: &Plan) -> f64 {
        self.gpu_rate + self.function_rate(plan.main_bytes, plan.main_vcpus)
    }

    /// Divides the costs of groups and of time alive among the layers.
    fn divide_cost_among_layers(&self, evaluation: &mut Evaluation) {
        let seconds = evaluation.prefill_seconds + evaluation.decode_seconds;
        if evaluation.groups.is_empty() && evaluation.life.is_none() || seconds == 0.0 {
            return;
        }
        for layer in &mut evaluation.layers {
            let part = (layer.prefill + self.output * layer.decode) / seconds;
            layer.main_cost = evaluation.main_cost * part;
            layer.remote_cost = evaluation.remote_cost * part;
        }
    }

    /// Returns the dollars of one layer's remote functions if the whole request takes `seconds`.
    fn remote_cost(&self, layer: &LayerEvaluation, part: &LayerPlan, seconds: f64) -> f64 {
        let billed = if self.is_reserved() {
            seconds * f64::from(part.replicas) / f64::from(self.problem.pricing.main_replicas)
        } else {
            layer.replica_seconds.iter().sum::<f64>() + self.output * layer.remote_decode_billed
        };
        self.cpu_price * part.memory_bytes / GB * billed
    }

    /// Returns the total cost of `plan` with `part` in place of the plan of `layer`. `evaluation`: that of `plan`.
    pub fn cost_with_layer(
        &self,
        plan: &Plan,
        evaluation: &Evaluation,
        layer: usize,
        part: &LayerPlan,
    ) -> f64 {
        let (old, new) = (&evaluation.layers[layer], self.layer(layer, part, plan));
        let before = evaluation.prefill_seconds + evaluation.decode_seconds;
        let after = before + new.prefill - old.prefill + self.output * (new.decode - old.decode);
        let others = evaluation.remote_cost - old.remote_cost;
        // Under reserved billing functions are billed for the time of the request.
        let others = if self.is_reserved() { others / before * after } else { others };
        after * self.main_rate(plan) + others + self.remote_cost(&new, part, after)
    }

    fn layer(&self, layer: usize, part: &LayerPlan, plan: &Plan) -> LayerEvaluation {
        let model = &self.layers[layer];
        let shares = &self.shares[layer];
        let tokens = |expert: usize| self.input * model.per_token() * shares[expert];
        let vcpus = self.main_cpu_speed(plan).vcpus;
        let main = model.curve.column(vcpus);
        let fixed = model.fixed(vcpus);
        let is_local = |expert: &usize| part.remote.binary_search(&(*expert as u32)).is_err();
        let local_prefill: f64 =
            (0..model.experts).filter(is_local).map(|expert| model.curve.seconds(tokens(expert), main)).sum();
        let remote_vcpus = self.remote_vcpus(part.memory_bytes);
        let remote = Replicas::new(self, layer, &part.remote, remote_vcpus, part.replicas, 1.0);
        let remote_prefill = remote.slowest();
        let share = self.share_of(layer, &part.remote).min(1.0);
        let local_step = model.curve.seconds(1.0, main);
        let curve = model.remote_curve();
        let remote_step = curve.seconds(1.0, curve.column(remote_vcpus)) + self.down;
        let probabilities = remote_count_probabilities(model.top_k, share);
        let slower = expected_slower_path(&probabilities, local_step, remote_step, self.round_trip());
        let called = 1.0 - probabilities[0];
        let prefill_calls = if remote.working() > 0 { 1.0 } else { 0.0 };
        let fixed = fixed.plus(Seconds { prefill: prefill_calls * self.send, step: called * self.send });
        LayerEvaluation {
            prefill: fixed.prefill + local_prefill.max(remote_prefill),
            decode: fixed.step + slower,
            local_prefill,
            remote_prefill,
            replica_seconds: remote.seconds,
            replica_tokens: remote.tokens,
            replica_load: remote.loads,
            load_bound: remote.load_bound,
            remote_decode_billed: model.per_token() * share * remote_step + called * self.round_trip(),
            remote_share: share,
            needed_bytes: match part.remote.len() {
                0 => 0.0,
                set => self.remote_needed(layer, set, share),
            },
            main_cost: 0.0,
            remote_cost: 0.0,
        }
    }

    fn violations(&self, plan: &Plan, evaluation: &Evaluation, bill: &Bill) -> Vec<Violation> {
        let mut found = LimitViolations::default();
        self.check_latency(bill, &mut found);
        if let Some(allowed) = self.problem.limits.gpu_bytes {
            found.unless_at_most("gpu", self.gpu_bytes, allowed, BYTE_SLACK);
        }
        let remote = plan.remote_counts();
        found.unless_at_most("main", self.main_needed(&remote), plan.main_bytes, BYTE_SLACK);
        let specs = &self.problem.specs;
        let own = if plan.groups.is_empty() { &plan.layers[..] } else { &[] };
        let layers = own.iter().zip(&evaluation.layers).enumerate();
        for (index, (part, layer)) in layers.filter(|(_, (part, _))| !part.remote.is_empty()) {
            found.unless_at_most(&format!("mem{index}"), layer.needed_bytes, part.memory_bytes, BYTE_SLACK);
            if let Some(allowed) = self.problem.limits.payload_bytes {
                let tokens = layer.replica_tokens.iter().copied().fold(0.0, f64::max);
                let value = tokens * self.problem.transport.token_bytes_up;
                found.unless_at_most(&format!("payload{index}"), value, allowed, BYTE_SLACK);
            }
            let max_replicas = self.problem.limits.max_replicas;
            if !(1..=max_replicas).contains(&part.replicas) {
                found.add(&format!("z{index}"), f64::from(part.replicas), f64::from(max_replicas));
            }
            found.unless_equal(
                &format!("spec{index}"),
                part.memory_bytes,
                specs.remote.nearest(part.memory_bytes),
            );
        }
        for (index, group) in plan.groups.iter().enumerate() {
            self.group_violations((index, group), plan, evaluation, &mut found);
        }
        let allowed = self.problem.limits.max_groups.unwrap_or(0);
        if plan.is_sliced() && plan.groups.len() > allowed as usize {
            found.add("groups", plan.groups.len() as f64, f64::from(allowed));
        }
        if let (Some(vcpus), Some(range)) = (plan.main_vcpus, specs.main_vcpus) {
            found.unless_equal("vcpus_main", vcpus, range.nearest(vcpus));
        }
        found.unless_equal("spec_main", plan.main_bytes, specs.main.nearest(plan.main_bytes));
        found.0
    }

    fn group_violations(
        &self,
        (index, group): (usize, &Group),
        plan: &Plan,
        evaluation: &Evaluation,
        found: &mut LimitViolations,
    ) {
        let (specs, limits) = (&self.problem.specs, &self.problem.limits);
        let name = |limit: &str| format!("{limit}_group{index}");
        let needed = evaluation.groups[index].needed_bytes;
        found.unless_at_most(&name("mem"), needed, group.memory_bytes, BYTE_SLACK);
        if let Some(allowed) = limits.payload_bytes {
            let layers = evaluation.layers.iter().enumerate();
            let tokens = layers
                .flat_map(|(layer, terms)| replicas_of_group(index, layer, plan, &terms.replica_tokens))
                .copied();
            let value = tokens.fold(0.0, f64::max) * self.problem.transport.token_bytes_up;
            found.unless_at_most(&name("payload"), value, allowed, BYTE_SLACK);
        }
        if !(1..=limits.max_replicas).contains(&group.replicas) {
            found.add(&name("z"), f64::from(group.replicas), f64::from(limits.max_replicas));
        }
        found.unless_equal(&name("spec"), group.memory_bytes, specs.remote.nearest(group.memory_bytes));
        if let (Some(vcpus), Some(range)) = (group.vcpus, specs.remote_vcpus) {
            found.unless_equal(&name("vcpus"), vcpus, range.nearest(vcpus));
        }
    }
}

/// Returns `seconds / base`, or 1 if `base` is 0.
fn ratio(seconds: f64, base: f64) -> f64 {
    if base > 0.0 { seconds / base } else { 1.0 }
}

/// Collected violations.
#[derive(Default)]
pub struct LimitViolations(Vec<Violation>);

impl LimitViolations {
    /// Returns the names of the broken limits.
    pub fn names(self) -> Vec<String> {
        self.0.into_iter().map(|violation| violation.limit).collect()
    }

    fn add(&mut self, limit: &str, value: f64, allowed: f64) {
        self.0.push(Violation { limit: limit.to_owned(), value, allowed });
    }

    /// Adds a violation of `limit` unless `value` is at most `allowed + slack`.
    pub fn unless_at_most(&mut self, limit: &str, value: f64, allowed: f64, slack: f64) {
        if value > allowed + slack {
            self.add(limit, value, allowed);
        }
    }

    fn unless_equal(&mut self, limit: &str, value: f64, allowed: f64) {
        if (value - allowed).abs() > BYTE_SLACK {
            self.add(limit, value, allowed);
        }
    }
}
