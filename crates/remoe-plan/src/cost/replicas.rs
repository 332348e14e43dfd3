//! Functions that hold the same experts of a layer, and share them in the prefill.

use crate::cost::lpt::{Replica, load_bound, longest_first};
use crate::model::Model;

/// Work in the prefill of functions with the same experts of a layer.
pub struct Replicas {
    /// Seconds of each (ZT; Remoe paper, equation 3).
    pub seconds: Vec<f64>,
    /// Seconds of each without transfer and invocation.
    pub computing: Vec<f64>,
    /// Tokens that travel to each.
    pub tokens: Vec<f64>,
    /// Load of each that longest-first assignment balanced.
    pub loads: Vec<f64>,
    /// Seconds of the slowest replica by the bound of LPT.
    pub load_bound: f64,
}

impl Replicas {
    /// Assigns items to replicas, the longest first.
    pub fn new(
        model: &Model<'_>,
        index: usize,
        experts: &[u32],
        vcpus: f64,
        count: u32,
        slowed: f64,
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
        // A replica that does not exist cannot work: the violation of `z` says so.
        let count = count.max(1) as usize;
        let replicas = longest_first(&weights, count);
        let assigned =
            |replica: &Replica, of: &[f64]| replica.items.iter().map(|item| of[*item]).sum::<f64>();
        let rows: Vec<f64> = replicas.iter().map(|replica| assigned(replica, &tokens)).collect();
        let travelling: Vec<f64> = rows.iter().map(|rows| rows.min(model.input)).collect();
        let computing: Vec<f64> =
            replicas.iter().map(|replica| slowed * assigned(replica, &computing)).collect();
        let seconds = computing.iter().zip(&rows).zip(&travelling).map(|((computing, rows), travelling)| {
            let working = computing + rows * model.down + travelling * model.up;
            if *travelling > 0.0 { working + model.invoke } else { 0.0 }
        });
        Self {
            seconds: seconds.collect(),
            loads: replicas.iter().map(|replica| replica.load).collect(),
            load_bound: load_bound(&weights, count),
            computing,
            tokens: travelling,
        }
    }

    /// How many of them have tokens to compute.
    pub fn working(&self) -> usize {
        self.tokens.iter().filter(|tokens| **tokens > 0.0).count()
    }

    /// Seconds of the slowest of them.
    pub fn slowest(&self) -> f64 {
        self.seconds.iter().copied().fold(0.0, f64::max)
    }
}
