//! Token tables: what each token of a prompt adds to its shares, whatever stands around it.
//!
//! A prompt's shares are modelled as the mean over its tokens of a row of [layers x experts] per token
//! id. Averages over the prompts in which a token occurs would smear the tokens into each other, so the
//! rows are fitted together, by ridge regression on the counts of whole prompts; no per-token record is
//! needed. A second part, linear in the token's unit embedding, is fitted with them, so that a row
//! shrinks towards what similar tokens do, and only then towards popularity. A token that was never
//! seen has that part alone.

mod features;
mod fit;

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::history::History;
use crate::phase::{ByPhase, Phase};
use crate::predictor::{Popularity, Predictor};
use crate::rows::Rows;
use crate::shares::Shares;
use crate::vector::{add_scaled, dot};
use features::Features;
pub use fit::TokenFit;
use rayon::prelude::*;

/// Weight of the penalty on the squared rows; prompts have shares near 1/16 and the same weight each.
/// Halving or doubling it changes little, as the number of rounds is chosen on held-out prompts.
const RIDGE: f64 = 0.02;
/// Rounds when there is nothing to choose them on.
pub const DEFAULT_ROUNDS: usize = 16;
/// Rounds, at most.
pub const MAX_ROUNDS: usize = 40;

/// The fitted table.
#[derive(Debug, Clone)]
pub struct TokenTable {
    embedding: Embedding,
    features: Features,
    experts: usize,
    /// The prediction for a prompt of nothing known, [layers x experts].
    base: Vec<f32>,
    /// One row per feature, [features, layers x experts].
    rows: Rows,
}

impl TokenTable {
    /// Fits a table to a phase of `history` in `rounds` of conjugate gradients; fewer rounds shrink more.
    ///
    /// # Errors
    /// The history is empty or of another model than `embedding`.
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

    /// Ids of the tokens with a row, ascending; their rows come first.
    pub(crate) fn tokens(&self) -> &[u32] {
        self.features.tokens()
    }

    pub(crate) fn base(&self) -> &[f32] {
        &self.base
    }

    pub(crate) fn rows(&self) -> &Rows {
        &self.rows
    }

    /// The shares of a request with this prompt in the table's phase.
    ///
    /// # Errors
    /// As [`Predictor::predict`].
    pub fn predict(&self, prompt: &[u32]) -> Result<Shares, PredictError> {
        let mut sum = self.base.clone();
        for (feature, value) in self.features.of(&self.embedding, prompt)? {
            add_scaled(&mut sum, value, self.rows.row(feature as usize));
        }
        Shares::from_weights(self.experts, sum)
    }

    /// Adds, for every token of the vocabulary, the coordinates in `basis` [coordinates, layers x experts] of what it adds
    /// to a prompt of which it is all, to `sums` [vocabulary, coordinates]. A prompt's coordinates are the mean of its
    /// tokens'.
    pub(crate) fn add_coordinates(&self, basis: &[&[f32]], sums: &mut [f32]) {
        let width = basis.len().max(1);
        let rows = (0..self.rows.len()).into_par_iter();
        let rows: Vec<Vec<f32>> = rows
            .map(|row| basis.iter().map(|direction| dot(direction, self.rows.row(row))).collect())
            .collect();
        let (of_tokens, of_directions) = rows.split_at(self.features.tokens().len().min(rows.len()));
        let maps: Vec<Vec<f32>> = (0..basis.len())
            .map(|at| {
                let values: Vec<f32> = of_directions.iter().map(|row| row[at]).collect();
                self.features.through_directions(self.embedding.hidden(), &values)
            })
            .collect();
        sums.par_chunks_exact_mut(width).enumerate().for_each(|(token, sums)| {
            let unit = self.embedding.unit_row(token);
            sums.iter_mut().zip(&maps).for_each(|(sum, map)| *sum += dot(map, &unit));
            if let Some(row) = self.features.column(token as u32).and_then(|column| of_tokens.get(column)) {
                add_scaled(sums, 1.0, row);
            }
        });
    }

    /// How much each token of the vocabulary tells about a prefill's routing: half the L1 distance, averaged over
    /// layers, of the shares of a prompt of this token alone from popularity; 0 to 1.
    ///
    /// # Errors
    /// Never for a table that was fitted.
    pub fn information(&self, popularity: &Popularity) -> Result<Vec<f32>, PredictError> {
        let popular = popularity.shares(Phase::Prefill);
        let layers = popular.layers() as f32;
        let of = |id: u32| {
            let shares = self.predict(&[id])?;
            let pairs = shares.values().iter().zip(popular.values());
            Ok(pairs.map(|(a, b)| (a - b).abs()).sum::<f32>() / (2.0 * layers))
        };
        (0..self.embedding.vocabulary() as u32).map(of).collect()
    }
}

impl Predictor for ByPhase<TokenTable> {
    fn name(&self) -> &'static str {
        "tokens"
    }

    fn predict(&self, prompt: &[u32], phase: Phase) -> Result<Shares, PredictError> {
        self.of(phase).predict(prompt)
    }

    fn bytes(&self) -> u64 {
        let of = |table: &TokenTable| {
            table.rows.bytes() + table.features.bytes() + size_of_val(&table.base[..]) as u64
        };
        of(&self.prefill) + of(&self.decode)
    }
}
