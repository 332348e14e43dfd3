//! A later layer's gate, asked early (`MoEless`).

use crate::error::PredictError;
use crate::fate::GateWeights;
use crate::layerwise::HitRates;
use crate::random::Random;
use crate::vector::{add_scaled, dot};

/// One in so many of the tokens given for fine-tuning judges what came of it.
const JUDGES: usize = 10;

/// A copy of layer l + d's norm and gate, applied to the hidden states that enter layer l.
#[derive(Debug, Clone)]
pub struct GateLookahead {
    weights: GateWeights,
    experts: usize,
    top_k: usize,
    epsilon: f32,
}

/// How a copy is fine-tuned.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FineTuning {
    /// A copy whose mean hit rate reaches this stays as it is.
    pub threshold: f64,
    /// Passes over the tokens.
    pub epochs: usize,
    /// Step size, falling linearly to 0.
    pub rate: f32,
    /// Order of the tokens that it learns from.
    pub seed: u64,
}

impl Default for FineTuning {
    fn default() -> Self {
        Self { threshold: 0.9, epochs: 5, rate: 0.01, seed: 0 }
    }
}

impl GateLookahead {
    /// From the later layer's weights; `epsilon` is its norm's.
    ///
    /// # Errors
    /// `hidden` is 0, or a weight does not have the size of `hidden` and `experts`.
    pub fn new(
        weights: GateWeights,
        hidden: usize,
        experts: usize,
        top_k: usize,
        epsilon: f32,
    ) -> Result<Self, PredictError> {
        if hidden == 0 {
            return Err(PredictError::option("hidden", hidden, "expected 1 or more"));
        }
        weights.check(hidden, experts)?;
        Ok(Self { weights, experts, top_k, epsilon })
    }

    fn hidden(&self) -> usize {
        self.weights.norm.len()
    }

    /// The experts of each token, [tokens, `top_k`], for hidden states [tokens, hidden].
    ///
    /// # Errors
    /// `states` holds no whole number of tokens.
    pub fn predict(&self, states: &[f32]) -> Result<Vec<u16>, PredictError> {
        let whole = states.len().next_multiple_of(self.hidden().max(1));
        PredictError::require_size("a matrix of hidden states", whole, states.len())?;
        let tokens = states.chunks_exact(self.hidden());
        Ok(tokens.flat_map(|state| self.weights.route(state, self.epsilon, self.top_k)).collect())
    }

    /// Measures the accuracy on tokens whose experts are known.
    ///
    /// # Errors
    /// `states` and `actual` are not of as many tokens.
    pub fn measure(&self, states: &[f32], actual: &[u16]) -> Result<HitRates, PredictError> {
        HitRates::of(&self.predict(states)?, actual, self.top_k)
    }

    /// Fine-tunes the gate where its accuracy on the given tokens is below the threshold: softmax
    /// cross-entropy against the experts that were used, by stochastic gradient descent. The last tenth of the
    /// tokens only judges: the gate stays as it is unless the tuned one foresees more there. Returns whether
    /// it was changed. The norm stays.
    ///
    /// # Errors
    /// `states` and `actual` are not of as many tokens.
    pub fn fine_tune(
        &mut self,
        states: &[f32],
        actual: &[u16],
        options: FineTuning,
    ) -> Result<bool, PredictError> {
        if self.measure(states, actual)?.mean >= options.threshold {
            return Ok(false);
        }
        let hidden = self.hidden();
        let tokens = states.len() / hidden;
        let taught = tokens - tokens / JUDGES;
        let (states, judging_states) = states.split_at(taught * hidden);
        let (actual, judging) = actual.split_at(taught * self.top_k);
        let mut tuned = self.clone();
        tuned.descend(states, actual, options);
        let better =
            tuned.measure(judging_states, judging)?.mean > self.measure(judging_states, judging)?.mean;
        if better {
            *self = tuned;
        }
        Ok(better)
    }

    fn descend(&mut self, states: &[f32], actual: &[u16], options: FineTuning) {
        let hidden = self.hidden();
        let normed: Vec<f32> = states.chunks_exact(hidden).flat_map(|state| self.normed(state)).collect();
        let tokens = normed.len() / hidden;
        let mut random = Random::new(options.seed);
        let steps = (options.epochs * tokens).max(1) as f32;
        let mut step = 0.0;
        for _ in 0..options.epochs {
            for token in random.sample(tokens, tokens) {
                let token = token as usize;
                let rate = options.rate * (1.0 - step / steps);
                let state = normed.get(token * hidden..(token + 1) * hidden).unwrap_or_default();
                let used = actual.get(token * self.top_k..(token + 1) * self.top_k).unwrap_or_default();
                self.step(state, used, rate);
                step += 1.0;
            }
        }
    }

    fn normed(&self, state: &[f32]) -> Vec<f32> {
        let inverse = 1.0 / (dot(state, state) / state.len() as f32 + self.epsilon).sqrt();
        state.iter().zip(&self.weights.norm).map(|(x, weight)| x * inverse * weight).collect()
    }

    /// One step for one token, scaled by the squared length of its state so that `rate` has no unit.
    fn step(&mut self, state: &[f32], used: &[u16], rate: f32) {
        let rows = self.weights.gate.chunks_exact(state.len());
        let logits: Vec<f32> = rows.map(|row| dot(row, state)).collect();
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let raised: Vec<f32> = logits.iter().map(|logit| (logit - best).exp()).collect();
        let sum: f32 = raised.iter().sum();
        let scale = rate * self.experts as f32 / dot(state, state).max(f32::MIN_POSITIVE);
        for ((expert, row), raised) in
            (0_u16..).zip(self.weights.gate.chunks_exact_mut(state.len())).zip(raised)
        {
            let wanted = if used.contains(&expert) { 1.0 / used.len() as f32 } else { 0.0 };
            add_scaled(row, scale * (wanted - raised / sum), state);
        }
    }
}
