//! Gate lookahead (`MoEless`): the gate of a later layer, applied to an earlier layer's input.

use crate::error::PredictError;
use crate::fate::GateWeights;
use crate::layerwise::HitRates;
use crate::random::Random;
use crate::vector::{add_scaled, dot};

/// Fraction of the fine-tuning tokens that validate the result: one in this many.
const VALIDATION_FRACTION: usize = 10;

/// Copy of layer l + d's norm and gate, applied to the hidden states that enter layer l.
#[derive(Debug, Clone)]
pub struct GateLookahead {
    weights: GateWeights,
    experts: usize,
    top_k: usize,
    epsilon: f32,
}

/// Options of fine-tuning.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FineTuning {
    /// Mean hit rate from which on fine-tuning is skipped.
    pub threshold: f64,
    /// Passes over the tokens.
    pub epochs: usize,
    /// Initial learning rate, which falls linearly to 0.
    pub rate: f32,
    /// Seed of the order of the tokens.
    pub seed: u64,
}

impl Default for FineTuning {
    fn default() -> Self {
        Self { threshold: 0.9, epochs: 5, rate: 0.01, seed: 0 }
    }
}

impl GateLookahead {
    /// Creates a lookahead from the later layer's weights; `epsilon` is that of its norm.
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

    /// Predicts the experts of each token, [tokens, `top_k`], from hidden states [tokens, hidden].
    ///
    /// # Errors
    /// `states` does not hold complete tokens.
    pub fn predict(&self, states: &[f32]) -> Result<Vec<u16>, PredictError> {
        let whole = states.len().next_multiple_of(self.hidden().max(1));
        PredictError::require_size("a matrix of hidden states", whole, states.len())?;
        let tokens = states.chunks_exact(self.hidden());
        Ok(tokens.flat_map(|state| self.weights.route(state, self.epsilon, self.top_k)).collect())
    }

    /// Measures the accuracy on tokens with known experts.
    ///
    /// # Errors
    /// The numbers of tokens in `states` and `actual` differ.
    pub fn measure(&self, states: &[f32], actual: &[u16]) -> Result<HitRates, PredictError> {
        HitRates::measure(&self.predict(states)?, actual, self.top_k)
    }

    /// Fine-tunes the gate if its accuracy on the given tokens is below the threshold: softmax cross-entropy against
    /// the used experts, by stochastic gradient descent. The last tenth of the tokens validates: the tuned gate is
    /// kept only if it predicts more of their experts. Returns true if the gate changed. The norm is not tuned.
    ///
    /// # Errors
    /// The numbers of tokens in `states` and `actual` differ.
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
        let training = tokens - tokens / VALIDATION_FRACTION;
        let (states, validation_states) = states.split_at(training * hidden);
        let (actual, validation) = actual.split_at(training * self.top_k);
        let mut tuned = self.clone();
        tuned.descend(states, actual, options);
        let is_better = tuned.measure(validation_states, validation)?.mean
            > self.measure(validation_states, validation)?.mean;
        if is_better {
            *self = tuned;
        }
        Ok(is_better)
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

    /// Takes one step for one token, scaled by the squared length of its state, so that `rate` has no unit.
    fn step(&mut self, state: &[f32], used: &[u16], rate: f32) {
        let rows = self.weights.gate.chunks_exact(state.len());
        let logits: Vec<f32> = rows.map(|row| dot(row, state)).collect();
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exponentials: Vec<f32> = logits.iter().map(|logit| (logit - best).exp()).collect();
        let sum: f32 = exponentials.iter().sum();
        let scale = rate * self.experts as f32 / dot(state, state).max(f32::MIN_POSITIVE);
        for ((expert, row), exponential) in
            (0_u16..).zip(self.weights.gate.chunks_exact_mut(state.len())).zip(exponentials)
        {
            let target = if used.contains(&expert) { 1.0 / used.len() as f32 } else { 0.0 };
            add_scaled(row, scale * (target - exponential / sum), state);
        }
    }
}
