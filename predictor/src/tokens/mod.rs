//! Token tables: the contribution of each token of a prompt to its shares, independent of context.
//!
//! The shares of a prompt are modelled as the mean over its tokens of a row [layers x experts] per token id. Averages
//! over the prompts with a token would mix the tokens, so the rows are fitted together by ridge regression on the
//! counts of whole prompts. Records per token are not needed.
//!
//! A second part, linear in the token's unit embedding, is fitted along with them. So a row shrinks towards the rows
//! of similar tokens, and only then towards popularity. An unseen token has this part alone.

mod features;
mod fit;

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::history::History;
use crate::phase::{ByPhase, Phase};
use crate::predictor::{Popularity, Predictor};
use crate::rows::Rows;
use crate::shares::UsageShares;
use crate::vector::{add_scaled, dot};
use features::Features;
pub use fit::TokenFit;
use rayon::prelude::*;

/// Ridge penalty on the squared rows, for prompts of equal weight with shares near 1/16. Halving or doubling it
/// changes little, because the number of rounds is chosen on held-out prompts.
const RIDGE: f64 = 0.02;
/// Default number of rounds, without held-out prompts.
pub const DEFAULT_ROUNDS: usize = 16;
/// Largest number of rounds.
pub const MAX_ROUNDS: usize = 40;

/// Fitted token table of one phase.
#[derive(Debug, Clone)]
pub struct TokenTable {
    embedding: Embedding,
    features: Features,
    experts: usize,
    /// Prediction for a prompt without features, [layers x experts].
    base: Vec<f32>,
    /// Row of each feature, [features, layers x experts].
    rows: Rows,
}

impl TokenTable {
    /// Fits a table to a phase of `history` in `rounds` rounds of conjugate gradients. Fewer rounds shrink more.
    ///
    /// # Errors
    /// The history is empty, or has a token beyond the vocabulary of `embedding`.
    pub fn fit(
        embedding: &Embedding,
        history: &History,
        phase: Phase,
        rounds: usize,
    ) -> Result<Self, PredictError> {
        let mut fit = TokenFit::new(embedding, history, phase)?;
        (0..rounds).for_each(|_| fit.advance());
        Ok(fit.table())
    }

    pub(crate) fn from_parts(
        embedding: Embedding,
        tokens: Vec<u32>,
        experts: usize,
        base: Vec<f32>,
        rows: Rows,
    ) -> Result<Self, PredictError> {
        let features = Features::new(&embedding, tokens);
        PredictError::require_size("`tokens.rows`", features.len(), rows.len())?;
        PredictError::require_size("a row of `tokens.rows`", base.len(), rows.width())?;
        Ok(Self { embedding, features, experts, base, rows })
    }

    /// Returns the ids of the tokens with their own row, ascending. These rows come first.
    pub(crate) fn tokens(&self) -> &[u32] {
        self.features.tokens()
    }

    pub(crate) fn base(&self) -> &[f32] {
        &self.base
    }

    pub(crate) fn rows(&self) -> &Rows {
        &self.rows
    }

    /// Predicts the shares of a request with this prompt in the table's phase.
    ///
    /// # Errors
    /// As [`Predictor::predict`].
    pub fn predict(&self, prompt: &[u32]) -> Result<UsageShares, PredictError> {
        let mut sum = self.base.clone();
        for (feature, value) in self.features.of_prompt(&self.embedding, prompt)? {
            add_scaled(&mut sum, value, self.rows.row(feature as usize));
        }
        UsageShares::from_weights(self.experts, sum)
    }

    /// Adds the coordinates of every token's contribution to `sums` [vocabulary, coordinates]. `basis` is
    /// [coordinates, layers x experts]. The coordinates of a prompt are the mean of those of its tokens.
    pub(crate) fn add_coordinates(&self, basis: &[&[f32]], sums: &mut [f32]) {
        let width = basis.len().max(1);
        let rows = (0..self.rows.len()).into_par_iter();
        let rows: Vec<Vec<f32>> = rows
            .map(|row| basis.iter().map(|direction| dot(direction, self.rows.row(row))).collect())
            .collect();
        let (token_rows, direction_rows) = rows.split_at(self.features.tokens().len().min(rows.len()));
        let maps: Vec<Vec<f32>> = (0..basis.len())
            .map(|coordinate| {
                let values: Vec<f32> = direction_rows.iter().map(|row| row[coordinate]).collect();
                self.features.direction_map(self.embedding.hidden(), &values)
            })
            .collect();
        sums.par_chunks_exact_mut(width).enumerate().for_each(|(token, sums)| {
            let unit = self.embedding.unit_row(token);
            sums.iter_mut().zip(&maps).for_each(|(sum, map)| *sum += dot(map, &unit));
            if let Some(row) = self.features.column(token as u32).and_then(|column| token_rows.get(column)) {
                add_scaled(sums, 1.0, row);
            }
        });
    }

    /// Returns how much each token of the vocabulary tells about the routing of a prefill: half the L1 distance,
    /// averaged over layers, between popularity and the shares of a prompt of this token alone; 0 to 1.
    ///
    /// # Errors
    /// Never fails for a fitted table.
    pub fn information(&self, popularity: &Popularity) -> Result<Vec<f32>, PredictError> {
        let popular = popularity.shares(Phase::Prefill);
        let layers = popular.layers() as f32;
        let information_of = |id: u32| {
            let shares = self.predict(&[id])?;
            let pairs = shares.values().iter().zip(popular.values());
            Ok(pairs.map(|(a, b)| (a - b).abs()).sum::<f32>() / (2.0 * layers))
        };
        (0..self.embedding.vocabulary() as u32).map(information_of).collect()
    }
}

impl Predictor for ByPhase<TokenTable> {
    fn name(&self) -> &'static str {
        "tokens"
    }

    fn predict(&self, prompt: &[u32], phase: Phase) -> Result<UsageShares, PredictError> {
        self.get(phase).predict(prompt)
    }

    fn bytes(&self) -> u64 {
        let table_bytes = |table: &TokenTable| {
            table.rows.bytes() + table.features.bytes() + size_of_val(&table.base[..]) as u64
        };
        table_bytes(&self.prefill) + table_bytes(&self.decode)
    }
}
