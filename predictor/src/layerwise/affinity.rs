//! Popularity and inter-layer affinity of experts (DuoServe-MoE, section 4.1).

use crate::error::PredictError;
use crate::fate::top_k;
use crate::record::{ActivationRecord, RecordHeader};

/// Pseudo-counts that shrink a row of affinities towards popularity: a rarely used expert says little about later
/// layers.
const SHRINKAGE: f32 = 10.0;

/// Experts of every token of one record, [layers, tokens, top_k].
#[derive(Debug, Clone, Copy)]
pub struct TokenRoutes<'a> {
    experts: &'a [u16],
    layers: usize,
    top_k: usize,
}

impl<'a> TokenRoutes<'a> {
    /// Returns the routes of a record with per-token experts.
    ///
    /// # Errors
    /// The record has no per-token experts, or they do not match the header.
    pub fn from_record(header: &RecordHeader, record: &'a ActivationRecord) -> Result<Self, PredictError> {
        let (layers, top_k) = (header.layers.len(), header.top_k as usize);
        let experts = record.experts.as_deref().unwrap_or_default();
        let expected = (record.prompt.len() + record.steps as usize) * layers * top_k;
        PredictError::require_size("`experts` of a record", expected, experts.len())?;
        if experts.iter().any(|&expert| u32::from(expert) >= header.experts) {
            let message = format!("expected 0 to {}", header.experts - 1);
            return Err(PredictError::option("experts", "beyond the model", message));
        }
        Ok(Self { experts, layers, top_k })
    }

    /// Returns the experts of the l-th layer, [tokens, `top_k`]. Empty for a layer that does not exist.
    #[must_use]
    pub fn layer(&self, layer: usize) -> &'a [u16] {
        let per_layer = self.experts.len() / self.layers.max(1);
        self.experts.get(layer * per_layer..(layer + 1) * per_layer).unwrap_or_default()
    }

    /// Iterates over the experts of each token in the l-th layer.
    pub fn tokens(&self, layer: usize) -> impl ExactSizeIterator<Item = &'a [u16]> {
        self.layer(layer).chunks_exact(self.top_k)
    }
}

/// Affinity: frequencies with which one expert follows another, `distance` layers later.
#[derive(Debug, Clone)]
pub struct Affinity {
    experts: usize,
    top_k: usize,
    distance: usize,
    /// Share of each expert in its layer's assignments, [layers, experts].
    popularity: Vec<f32>,
    /// Row (l, i): shares of the experts in the assignments of layer l + distance, over tokens that used expert i in
    /// layer l. [layers - distance, experts, experts].
    following: Vec<f32>,
}

impl Affinity {
    /// Counts the routes of all tokens in `records`.
    ///
    /// # Errors
    /// A record has no per-token experts, or `distance` is 0 or not below the number of layers.
    pub fn fit(
        header: &RecordHeader,
        records: &[ActivationRecord],
        distance: usize,
    ) -> Result<Self, PredictError> {
        let (layers, experts) = (header.layers.len(), header.experts as usize);
        if distance == 0 || distance >= layers {
            let message = format!("expected 1 to {}", layers.saturating_sub(1));
            return Err(PredictError::option("distance", distance, message));
        }
        let mut popularity = vec![0.0_f32; layers * experts];
        let mut following = vec![0.0_f32; (layers - distance) * experts * experts];
        for record in records {
            let routes = TokenRoutes::from_record(header, record)?;
            for layer in 0..layers {
                for &expert in routes.layer(layer) {
                    popularity[layer * experts + usize::from(expert)] += 1.0;
                }
            }
            for layer in 0..layers - distance {
                for (now, later) in routes.tokens(layer).zip(routes.tokens(layer + distance)) {
                    for &from in now {
                        let row = (layer * experts + usize::from(from)) * experts;
                        later.iter().for_each(|&to| following[row + usize::from(to)] += 1.0);
                    }
                }
            }
        }
        normalise_rows(&mut popularity, experts);
        for (index, row) in following.chunks_exact_mut(experts).enumerate() {
            let later = (index / experts + distance) * experts;
            for (value, popular) in row.iter_mut().zip(&popularity[later..later + experts]) {
                *value += SHRINKAGE * popular;
            }
        }
        normalise_rows(&mut following, experts);
        Ok(Self { experts, top_k: header.top_k as usize, distance, popularity, following })
    }

    /// Returns the share of each expert in the assignments of the l-th layer.
    #[must_use]
    pub fn popularity(&self, layer: usize) -> &[f32] {
        self.popularity.get(layer * self.experts..(layer + 1) * self.experts).unwrap_or_default()
    }

    /// Returns the shares of layer `layer + distance` among tokens that used `expert` in `layer`.
    #[must_use]
    pub fn following(&self, layer: usize, expert: u16) -> &[f32] {
        let start = (layer * self.experts + usize::from(expert)) * self.experts;
        self.following.get(start..start + self.experts).unwrap_or_default()
    }

    /// Predicts the experts of layer `layer + distance` from those of `layer` ([tokens, `top_k`]): for each token,
    /// the `top_k` with the largest product of affinities, as if its experts were independent.
    #[must_use]
    pub fn predict(&self, layer: usize, routes: &[u16]) -> Vec<u16> {
        let later = self.popularity(layer + self.distance);
        let predicted = routes.chunks_exact(self.top_k).map(|now| {
            let score = |to: usize| {
                let popular = later.get(to).copied().unwrap_or(0.0).max(f32::MIN_POSITIVE).ln();
                let lift = |&from: &u16| {
                    let share = self.following(layer, from).get(to).copied().unwrap_or(0.0);
                    share.max(f32::MIN_POSITIVE).ln() - popular
                };
                popular + now.iter().map(lift).sum::<f32>()
            };
            top_k((0..self.experts).map(score), self.top_k)
        });
        predicted.flatten().collect()
    }
}

fn normalise_rows(values: &mut [f32], experts: usize) {
    for row in values.chunks_exact_mut(experts) {
        let sum: f32 = row.iter().sum();
        if sum > 0.0 {
            row.iter_mut().for_each(|value| *value /= sum);
        }
    }
}
