//! Sparse features of a prompt: the shares of its tokens, then its mean unit embedding.

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::random::Random;
use std::collections::HashMap;

/// Largest number of features for the mean embedding. Wider embeddings are projected onto this many random
/// directions.
const MAX_DIRECTIONS: usize = 256;
/// Seed of those directions, which is part of the format of a saved table.
const DIRECTIONS_SEED: u64 = 0x7265_6d6f_6500;

/// Feature map of one model's prompts.
#[derive(Debug, Clone)]
pub(super) struct Features {
    tokens: Vec<u32>,
    column_of: HashMap<u32, u32>,
    directions: usize,
    /// Projection, [directions, hidden], if the embedding is wider.
    projection: Option<Vec<f32>>,
}

impl Features {
    /// Creates a map with one feature for each of `tokens`, in order.
    pub(super) fn new(embedding: &Embedding, tokens: Vec<u32>) -> Self {
        let hidden = embedding.hidden();
        let directions = hidden.min(MAX_DIRECTIONS);
        let projection = (hidden > directions).then(|| {
            let mut random = Random::new(DIRECTIONS_SEED);
            let length = 1.0 / (directions as f32).sqrt();
            let sign = |_| if random.next() & 1 == 0 { length } else { -length };
            (0..directions * hidden).map(sign).collect()
        });
        let column_of = tokens.iter().copied().zip(0..).collect();
        Self { tokens, column_of, directions, projection }
    }

    pub(super) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the feature of a token, if it has its own.
    pub(super) fn column(&self, token: u32) -> Option<usize> {
        self.column_of.get(&token).map(|&column| column as usize)
    }

    /// Returns the linear map, [hidden], from a unit row of the embedding to the sum of its direction features
    /// weighted by `values`.
    pub(super) fn direction_map(&self, hidden: usize, values: &[f32]) -> Vec<f32> {
        let Some(projection) = &self.projection else { return values.to_vec() };
        let mut map = vec![0.0; hidden];
        for (row, value) in projection.chunks_exact(hidden.max(1)).zip(values) {
            crate::vector::add_scaled(&mut map, *value, row);
        }
        map
    }

    /// Returns the number of features.
    pub(super) fn len(&self) -> usize {
        self.tokens.len() + self.directions
    }

    pub(super) fn bytes(&self) -> u64 {
        let projection = self.projection.as_ref().map_or(0, |projection| size_of_val(projection.as_slice()));
        // The load of a hash table is at most 7/8.
        (self.tokens.len() * (size_of::<u32>() + 10) + projection) as u64
    }

    /// Returns the (feature, value) pairs of a prompt, each feature at most once.
    pub(super) fn of_prompt(
        &self,
        embedding: &Embedding,
        prompt: &[u32],
    ) -> Result<Vec<(u32, f32)>, PredictError> {
        let mean = embedding.mean_unit_row(prompt)?;
        let mut ids = prompt.to_vec();
        ids.sort_unstable();
        let share = 1.0 / prompt.len() as f32;
        let mut features = Vec::with_capacity(ids.len() + self.directions);
        for run in ids.chunk_by(|a, b| a == b) {
            if let Some(&column) = self.column_of.get(&run[0]) {
                features.push((column, run.len() as f32 * share));
            }
        }
        let first_direction = self.tokens.len() as u32;
        match &self.projection {
            None => features.extend((first_direction..).zip(mean)),
            Some(projection) => {
                let rows = projection.chunks_exact(mean.len());
                features.extend((first_direction..).zip(rows.map(|row| crate::vector::dot(row, &mean))));
            }
        }
        Ok(features)
    }
}
