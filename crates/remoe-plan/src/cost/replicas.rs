//! Prefill work of replicas: functions that host the same experts of a layer and divide them among themselves.

use crate::cost::lpt::{Replica, load_bound, longest_first};
use crate::model::Model;

/// Prefill work of the replicas that host the same experts of a layer.
pub struct Replicas {
    /// Seconds of each replica (ZT; Remoe paper, equation 3).
    pub seconds: Vec<f64>,
    /// CPU seconds of each replica: without transfer and invocation.
    pub computing: Vec<f64>,
    /// Tokens that are sent to each replica.
    pub tokens: Vec<f64>,
    /// Load of each replica, as balanced by longest-first assignment.
    pub loads: Vec<f64>,
    /// Seconds of the slowest replica by the bound of LPT.
    pub load_bound: f64,
}

impl Replicas {
    /// Assigns `experts` of the layer at `index` to `count` replicas, the longest first. Contention lengthens each expert by `slowdown`.
    pub fn new(
        model: &Model<'_>,
        index: usize,
        experts: &[u32],
        vcpus: f64,
        count: u32,
        slowdown: f64,
    ) -> Self {
        let layer = &model.layers[index];
        let shares = &model.shares[index];
        if experts.is_empty() {
            return Self {
                seconds: vec![],
                computing: vec![],
                tokens: vec![],
                loads: vec![],
                load_bound: 0.0,
            };
        }
        let curve = layer.remote_curve();
        let column = curve.column(vcpus);
        let tokens: Vec<f64> =
            experts.iter().map(|expert| model.input * layer.per_token() * shares[*expert as usize]).collect();
        let computing: Vec<f64> = tokens.iter().map(|tokens| curve.seconds(*tokens, column)).collect();
        let both_ways = model.up + model.down;
        let weights: Vec<f64> =
            tokens.iter().zip(&computing).map(|(tokens, seconds)| seconds + tokens * both_ways).collect();
        // A count of 0 is reported as a violation of the limit `z`.
        let count = count.max(1) as usize;
        let replicas = longest_first(&weights, count);
        let assigned =
            |replica: &Replica, of: &[f64]| replica.items.iter().map(|item| of[*item]).sum::<f64>();
        let rows: Vec<f64> = replicas.iter().map(|replica| assigned(replica, &tokens)).collect();
        let sent_tokens: Vec<f64> = rows.iter().map(|rows| rows.min(model.input)).collect();
        let computing: Vec<f64> =
            replicas.iter().map(|replica| slowdown * assigned(replica, &computing)).collect();
        let seconds =
            computing.iter().zip(&rows).zip(&sent_tokens).map(|((computing, rows), sent_tokens)| {
                let working = computing + rows * model.down + sent_tokens * model.up;
                if *sent_tokens > 0.0 { working + model.invoke } else { 0.0 }
            });
        Self {
            seconds: seconds.collect(),
            loads: replicas.iter().map(|replica| replica.load).collect(),
            load_bound: load_bound(&weights, count),
            computing,
            tokens: sent_tokens,
        }
    }

    /// Counts the replicas that receive tokens.
    pub fn working(&self) -> usize {
        self.tokens.iter().filter(|tokens| **tokens > 0.0).count()
    }

    /// Returns the seconds of the slowest replica.
    pub fn slowest(&self) -> f64 {
        self.seconds.iter().copied().fold(0.0, f64::max)
    }
}
