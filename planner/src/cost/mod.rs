//! What a plan costs and how fast it is, term by term (README, "The cost model").

pub(crate) mod account;
pub(crate) mod baselines;
pub(crate) mod decode;
pub(crate) mod lpt;
pub(crate) mod main_size;
pub(crate) mod stress;

use crate::cost::decode::{expected_slower_path, remote_count_probabilities};
use crate::cost::lpt::{Replica, load_bound, longest_first};
use crate::plan::{LayerPlan, Plan, whole_bytes};
use crate::problem::curve::Column;
use crate::problem::model::{Model, Seconds};
use crate::problem::sizes::{BYTE_SLACK, GB};
use serde::Serialize;

/// Slack of the time to first token, in seconds.
pub(crate) const TTFT_SLACK: f64 = 1e-9;
/// Slack of the time per output token, in seconds.
pub(crate) const TPOT_SLACK: f64 = 1e-12;

/// Times in seconds and cost in dollars of one request under a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Evaluation {
    /// Prefill of all layers (PT; Remoe paper, equation 1).
    pub prefill_seconds: f64,
    /// All decode steps (GT; Remoe paper, equation 4).
    pub decode_seconds: f64,
    /// Prefill and cold start.
    pub ttft_seconds: f64,
    /// One decode step; 0 where there is none.
    pub tpot_seconds: f64,
    /// The main function (Remoe paper, equation 6).
    pub main_cost: f64,
    /// The remote functions (Remoe paper, equations 8 and 9).
    pub remote_cost: f64,
    /// Both.
    pub total_cost: f64,
    /// Memory of the device (Remoe paper, equation 7).
    #[serde(serialize_with = "whole_bytes")]
    pub gpu_bytes: f64,
    /// The terms of each layer.
    pub layers: Vec<LayerEvaluation>,
    /// Limits that the plan does not keep.
    pub violations: Vec<Violation>,
}

/// The terms of one layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerEvaluation {
    /// Prefill seconds: fixed part and the slower of both paths.
    pub prefill: f64,
    /// Seconds of one decode step.
    pub decode: f64,
    /// Prefill seconds of the local experts.
    pub local_prefill: f64,
    /// Prefill seconds of the slowest replica.
    pub remote_prefill: f64,
    /// Prefill seconds of each replica (ZT; Remoe paper, equation 3).
    pub replica_seconds: Vec<f64>,
    /// Tokens that travel to each replica.
    pub replica_tokens: Vec<f64>,
    /// What longest-first assignment balanced: seconds without invocation and without the cap on
    /// tokens.
    pub replica_load: Vec<f64>,
    /// The largest load that can be (Remoe paper, Theorem 4).
    pub load_bound: f64,
    /// Remote seconds that are billed per decode step.
    pub remote_decode_billed: f64,
    /// Share of the layer's assignments that go to remote experts.
    pub remote_share: f64,
    /// Bytes that a replica needs.
    #[serde(serialize_with = "whole_bytes")]
    pub needed_bytes: f64,
    /// Dollars of the main function while it works on this layer.
    pub main_cost: f64,
    /// Dollars of this layer's remote functions.
    pub remote_cost: f64,
}

/// A limit that is not kept.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Violation {
    /// Its name: `ttft`, `tpot`, `gpu`, `main`, `mem<l>`, `payload<l>`, `z<l>`, `spec_main`, `spec<l>`.
    pub limit: String,
    /// What the plan has.
    pub value: f64,
    /// What is allowed: the most, or for a size the nearest of its list.
    pub allowed: f64,
}

impl Model<'_> {
    /// The evaluation of `plan`, which must have been made for this problem.
    pub(crate) fn evaluate(&self, plan: &Plan) -> Evaluation {
        let layers = plan.layers.iter().enumerate();
        let mut layers: Vec<LayerEvaluation> =
            layers.map(|(layer, part)| self.layer(layer, part, plan.main_bytes)).collect();
        let prefill_seconds: f64 = layers.iter().map(|layer| layer.prefill).sum();
        let step: f64 = layers.iter().map(|layer| layer.decode).sum();
        let decode_seconds = self.output * step;
        let seconds = prefill_seconds + decode_seconds;
        let main_rate = self.main_rate(plan.main_bytes);
        for (layer, part) in layers.iter_mut().zip(&plan.layers) {
            layer.main_cost = main_rate * (layer.prefill + self.output * layer.decode);
            layer.remote_cost = self.remote_cost(layer, part, seconds);
        }
        let main_cost = seconds * main_rate;
        let remote_cost: f64 = layers.iter().map(|layer| layer.remote_cost).sum();
        let mut evaluation = Evaluation {
            prefill_seconds,
            decode_seconds,
            ttft_seconds: prefill_seconds + self.problem.cold_start_seconds,
            tpot_seconds: if self.output > 0.0 { step } else { 0.0 },
            main_cost,
            remote_cost,
            total_cost: main_cost + remote_cost,
            gpu_bytes: self.gpu_bytes,
            layers,
            violations: Vec::new(),
        };
        evaluation.violations = self.violations(plan, &evaluation);
        evaluation
    }

    /// Dollars of one layer's remote functions, when the whole request takes `seconds`.
    fn remote_cost(&self, layer: &LayerEvaluation, part: &LayerPlan, seconds: f64) -> f64 {
        let billed = if self.is_reserved() {
            seconds * f64::from(part.replicas) / f64::from(self.problem.pricing.main_replicas)
        } else {
            layer.replica_seconds.iter().sum::<f64>() + self.output * layer.remote_decode_billed
        };
        self.cpu_price * part.memory_bytes / GB * billed
    }

    /// The total cost of `plan`, whose evaluation is known, with another `part` for one layer.
    pub(crate) fn cost_with_layer(
        &self,
        plan: &Plan,
        evaluation: &Evaluation,
        layer: usize,
        part: &LayerPlan,
    ) -> f64 {
        let (old, new) = (&evaluation.layers[layer], self.layer(layer, part, plan.main_bytes));
        let before = evaluation.prefill_seconds + evaluation.decode_seconds;
        let after = before + new.prefill - old.prefill + self.output * (new.decode - old.decode);
        let others = evaluation.remote_cost - old.remote_cost;
        // Reserved functions are paid for as long as the request takes.
        let others = if self.is_reserved() { others / before * after } else { others };
        after * self.main_rate(plan.main_bytes) + others + self.remote_cost(&new, part, after)
    }

    fn layer(&self, layer: usize, part: &LayerPlan, main_bytes: f64) -> LayerEvaluation {
        let model = &self.layers[layer];
        let shares = &self.shares[layer];
        let tokens = |expert: usize| self.input * model.per_token() * shares[expert];
        let main = model.curve.column(main_bytes / GB);
        let fixed = model.fixed(main_bytes);
        let is_local = |expert: &usize| part.remote.binary_search(&(*expert as u32)).is_err();
        let local_prefill: f64 =
            (0..model.experts).filter(is_local).map(|expert| model.curve.seconds(tokens(expert), main)).sum();
        let remote = Remote::new(self, layer, part);
        let remote_prefill = remote.seconds.iter().copied().fold(0.0, f64::max);
        let share = self.share_of(layer, &part.remote).min(1.0);
        let local_step = model.curve.seconds(1.0, main);
        let remote_step = model.remote_curve().seconds(1.0, remote.column) + self.down;
        let probabilities = remote_count_probabilities(model.top_k, share);
        let slower = expected_slower_path(&probabilities, local_step, remote_step, self.round_trip());
        let called = 1.0 - probabilities[0];
        let prefill_calls = if remote.tokens.iter().any(|tokens| *tokens > 0.0) { 1.0 } else { 0.0 };
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

    fn violations(&self, plan: &Plan, evaluation: &Evaluation) -> Vec<Violation> {
        let mut found = Found::default();
        found.unless_at_most("ttft", evaluation.ttft_seconds, self.ttft_limit, TTFT_SLACK);
        found.unless_at_most("tpot", evaluation.tpot_seconds, self.tpot_limit, TPOT_SLACK);
        if let Some(allowed) = self.problem.limits.gpu_bytes {
            found.unless_at_most("gpu", self.gpu_bytes, allowed, BYTE_SLACK);
        }
        let remote: Vec<usize> = plan.layers.iter().map(|layer| layer.remote.len()).collect();
        found.unless_at_most("main", self.main_needed(&remote), plan.main_bytes, BYTE_SLACK);
        let specs = &self.problem.specs;
        let layers = plan.layers.iter().zip(&evaluation.layers).enumerate();
        for (index, (part, layer)) in layers.filter(|(_, (part, _))| !part.remote.is_empty()) {
            found.unless_at_most(&format!("mem{index}"), layer.needed_bytes, part.memory_bytes, BYTE_SLACK);
            if let Some(allowed) = self.problem.limits.payload_bytes {
                let tokens = layer.replica_tokens.iter().copied().fold(0.0, f64::max);
                let value = tokens * self.problem.transport.token_bytes_up;
                found.unless_at_most(&format!("payload{index}"), value, allowed, BYTE_SLACK);
            }
            let most = self.problem.limits.max_replicas;
            if !(1..=most).contains(&part.replicas) {
                found.add(&format!("z{index}"), f64::from(part.replicas), f64::from(most));
            }
            found.unless_equal(
                &format!("spec{index}"),
                part.memory_bytes,
                specs.remote.nearest(part.memory_bytes),
            );
        }
        found.unless_equal("spec_main", plan.main_bytes, specs.main.nearest(plan.main_bytes));
        found.0
    }
}

/// The violations found so far.
#[derive(Default)]
struct Found(Vec<Violation>);

impl Found {
    fn add(&mut self, limit: &str, value: f64, allowed: f64) {
        self.0.push(Violation { limit: limit.to_owned(), value, allowed });
    }

    fn unless_at_most(&mut self, limit: &str, value: f64, allowed: f64, slack: f64) {
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

/// What the replicas of one layer do in the prefill.
struct Remote {
    column: Column,
    seconds: Vec<f64>,
    tokens: Vec<f64>,
    loads: Vec<f64>,
    load_bound: f64,
}

impl Remote {
    fn new(model: &Model<'_>, index: usize, part: &LayerPlan) -> Self {
        let layer = &model.layers[index];
        let shares = &model.shares[index];
        let curve = layer.remote_curve();
        let column = curve.column(part.memory_bytes / GB);
        if part.remote.is_empty() {
            return Self { column, seconds: vec![], tokens: vec![], loads: vec![], load_bound: 0.0 };
        }
        let tokens: Vec<f64> = part
            .remote
            .iter()
            .map(|expert| model.input * layer.per_token() * shares[*expert as usize])
            .collect();
        let computing: Vec<f64> = tokens.iter().map(|tokens| curve.seconds(*tokens, column)).collect();
        let both_ways = model.up + model.down;
        let weights: Vec<f64> =
            tokens.iter().zip(&computing).map(|(tokens, seconds)| seconds + tokens * both_ways).collect();
        // A replica that does not exist cannot work: the violation of `z` says so.
        let count = part.replicas.max(1) as usize;
        let replicas = longest_first(&weights, count);
        let assigned =
            |replica: &Replica, of: &[f64]| replica.items.iter().map(|item| of[*item]).sum::<f64>();
        let rows: Vec<f64> = replicas.iter().map(|replica| assigned(replica, &tokens)).collect();
        let travelling: Vec<f64> = rows.iter().map(|rows| rows.min(model.input)).collect();
        let seconds = replicas.iter().zip(&rows).zip(&travelling).map(|((replica, rows), travelling)| {
            let working = assigned(replica, &computing) + rows * model.down + travelling * model.up;
            if *travelling > 0.0 { working + model.invoke } else { 0.0 }
        });
        Self {
            column,
            seconds: seconds.collect(),
            loads: replicas.iter().map(|replica| replica.load).collect(),
            load_bound: load_bound(&weights, count),
            tokens: travelling,
        }
    }
}
