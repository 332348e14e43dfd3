//! A prompt as sparse numbers: shares of its tokens, then its mean unit embedding.

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::random::Random;
use std::collections::HashMap;

/// Numbers that the mean embedding is given, at most; wider embeddings are projected onto as many random
/// directions.
const MAX_DIRECTIONS: usize = 256;
/// Seed of those directions; part of the form of a saved table.
const DIRECTIONS_SEED: u64 = 0x7265_6d6f_6500;

/// The features of one model's prompts.
#[derive(Debug, Clone)]
pub(super) struct Features {
    tokens: Vec<u32>,
    column_of: HashMap<u32, u32>,
    directions: usize,
    /// [directions, hidden], where the embedding is wider than that.
    projection: Option<Vec<f32>>,
}

impl Features {
    /// `tokens` get a feature each, in their order.
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

    /// Column of a token; none where it has no feature of its own.
    pub(super) fn column(&self, token: u32) -> Option<usize> {
        self.column_of.get(&token).map(|&column| column as usize)
    }

    /// The linear map from a unit row of the embedding, [`hidden` elements], through the directions to sums of their
    /// `values`, which has one number per direction.
    pub(super) fn through_directions(&self, hidden: usize, values: &[f32]) -> Vec<f32> {
        let Some(projection) = &self.projection else { return values.to_vec() };
        let mut map = vec![0.0; hidden];
        for (row, value) in projection.chunks_exact(hidden.max(1)).zip(values) {
            crate::vector::add_scaled(&mut map, *value, row);
        }
        map
    }

    /// Number of features.
    pub(super) fn len(&self) -> usize {
        self.tokens.len() + self.directions
    }

    pub(super) fn bytes(&self) -> u64 {
        let projection = self.projection.as_ref().map_or(0, |projection| size_of_val(projection.as_slice()));
        // A hash table holds its entries at a load of at most 7/8.
        (self.tokens.len() * (size_of::<u32>() + 10) + projection) as u64
    }

    /// (feature, value) of a prompt, each feature at most once.
    pub(super) fn of(&self, embedding: &Embedding, prompt: &[u32]) -> Result<Vec<(u32, f32)>, PredictError> {
        let mean = embedding.mean_unit_row(prompt)?;
        let mut ids = prompt.to_vec();
        ids.sort_unstable();
        let share = 1.0 / prompt.len() as f32;
        let mut found = Vec::with_capacity(ids.len() + self.directions);
        for run in ids.chunk_by(|a, b| a == b) {
            if let Some(&column) = self.column_of.get(&run[0]) {
                found.push((column, run.len() as f32 * share));
            }
        }
        let first = self.tokens.len() as u32;
        match &self.projection {
            None => found.extend((first..).zip(mean)),
            Some(projection) => {
                let rows = projection.chunks_exact(mean.len());
                found.extend((first..).zip(rows.map(|row| crate::vector::dot(row, &mean))));
            }
        }
        Ok(found)
    }
}
