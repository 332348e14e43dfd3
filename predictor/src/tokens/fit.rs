//! Ridge regression of shares on features, by conjugate gradients.
//!
//! Minimises |Y - X B|^2 + ridge |B|^2 over B, [features, cells], with X and Y centred, for each of the cells =
//! layers x experts separately. X stays sparse: its centring is applied, not stored. Early stopping shrinks much as a
//! larger ridge does, so that one fit yields a whole regularisation path.

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::history::History;
use crate::phase::Phase;
use crate::rows::Rows;
use crate::tokens::features::Features;
use crate::tokens::{RIDGE, TokenTable};
use crate::vector::add_scaled;
use rayon::prelude::*;

/// Sparse rows of (index, value).
type SparseRows = Vec<Vec<(u32, f32)>>;

/// Fit of a token table, with access to the table after each round.
#[derive(Debug)]
pub struct TokenFit {
    embedding: Embedding,
    features: Features,
    experts: usize,
    cells: usize,
    /// Features of each prompt.
    by_prompt: SparseRows,
    /// Prompts of each feature.
    by_feature: SparseRows,
    /// Mean of each feature.
    feature_mean: Vec<f32>,
    /// Mean of each cell.
    cell_mean: Vec<f32>,
    /// B, [features, cells].
    solution: Vec<f32>,
    /// Residual of the normal equations, [features, cells].
    residual: Vec<f32>,
    /// Search direction, [features, cells].
    direction: Vec<f32>,
    /// Squared norm of the residual of each cell.
    residual_squares: Vec<f64>,
}

impl TokenFit {
    /// Starts a fit. The table predicts popularity until the first round.
    ///
    /// # Errors
    /// The history is empty, or has a token beyond the vocabulary of `embedding`.
    pub fn new(embedding: &Embedding, history: &History, phase: Phase) -> Result<Self, PredictError> {
        let slots: Vec<u32> = history.slots().collect();
        if slots.is_empty() {
            return Err(PredictError::History { records: 0, needed: 1 });
        }
        let mut tokens: Vec<u32> = slots.iter().flat_map(|&slot| history.prompt(slot)).copied().collect();
        tokens.sort_unstable();
        tokens.dedup();
        let features = Features::new(embedding, tokens);
        let rows = slots.par_iter().map(|&slot| features.of_prompt(embedding, history.prompt(slot)));
        let by_prompt = rows.collect::<Result<SparseRows, _>>()?;
        let mut by_feature: SparseRows = vec![Vec::new(); features.len()];
        for (prompt, row) in (0..).zip(&by_prompt) {
            for &(feature, value) in row {
                by_feature[feature as usize].push((prompt, value));
            }
        }
        let count = slots.len() as f32;
        let feature_mean = by_feature
            .iter()
            .map(|column| column.iter().map(|(_, value)| value).sum::<f32>() / count)
            .collect();
        let cells = history.layers() * history.experts();
        let mut cell_mean = vec![0.0; cells];
        slots
            .iter()
            .for_each(|&slot| add_scaled(&mut cell_mean, 1.0 / count, history.share_row(slot, phase)));
        let mut fit = Self {
            embedding: embedding.clone(),
            experts: history.experts(),
            cells,
            by_prompt,
            by_feature,
            feature_mean,
            cell_mean,
            solution: vec![0.0; features.len() * cells],
            residual: Vec::new(),
            direction: Vec::new(),
            residual_squares: Vec::new(),
            features,
        };
        let mut targets = Vec::with_capacity(slots.len() * cells);
        for &slot in &slots {
            targets.extend(
                history.share_row(slot, phase).iter().zip(&fit.cell_mean).map(|(share, mean)| share - mean),
            );
        }
        fit.residual = fit.adjoint(&targets);
        fit.direction = fit.residual.clone();
        fit.residual_squares = column_products(&fit.residual, &fit.residual, cells);
        Ok(fit)
    }

    /// Computes X B for the centred X: [prompts, cells].
    fn forward(&self, matrix: &[f32]) -> Vec<f32> {
        let mut shift = vec![0.0; self.cells];
        for (row, &mean) in matrix.chunks_exact(self.cells).zip(&self.feature_mean) {
            add_scaled(&mut shift, -mean, row);
        }
        let mut product = vec![0.0; self.by_prompt.len() * self.cells];
        product.par_chunks_mut(self.cells).zip(&self.by_prompt).for_each(|(target, row)| {
            target.copy_from_slice(&shift);
            accumulate(target, row, matrix);
        });
        product
    }

    /// Computes X' R for the centred X: [features, cells].
    fn adjoint(&self, matrix: &[f32]) -> Vec<f32> {
        let mut sum = vec![0.0; self.cells];
        matrix.chunks_exact(self.cells).for_each(|row| add_scaled(&mut sum, 1.0, row));
        let mut product = vec![0.0; self.by_feature.len() * self.cells];
        let targets = product.par_chunks_mut(self.cells).zip(&self.by_feature).zip(&self.feature_mean);
        targets.for_each(|((target, column), &mean)| {
            add_scaled(target, -mean, &sum);
            accumulate(target, column, matrix);
        });
        product
    }

    /// Runs one round of conjugate gradients for every cell.
    pub fn advance(&mut self) {
        let mut image = self.adjoint(&self.forward(&self.direction));
        add_scaled(&mut image, RIDGE as f32, &self.direction);
        let curvature = column_products(&self.direction, &image, self.cells);
        let steps: Vec<f32> = self
            .residual_squares
            .iter()
            .zip(curvature)
            .map(|(square, curvature)| ratio(*square, curvature))
            .collect();
        let cells = self.cells;
        let add = |target: &mut [f32], factors: &[f32], sign: f32, rows: &[f32]| {
            target.par_chunks_mut(cells).zip(rows.par_chunks(cells)).for_each(|(target, row)| {
                for ((target, factor), value) in target.iter_mut().zip(factors).zip(row) {
                    *target += sign * factor * value;
                }
            });
        };
        add(&mut self.solution, &steps, 1.0, &self.direction);
        add(&mut self.residual, &steps, -1.0, &image);
        let residual_squares = column_products(&self.residual, &self.residual, cells);
        let direction_factors: Vec<f32> =
            residual_squares.iter().zip(&self.residual_squares).map(|(new, old)| ratio(*new, *old)).collect();
        self.residual_squares = residual_squares;
        let residual = &self.residual;
        self.direction.par_chunks_mut(cells).zip(residual.par_chunks(cells)).for_each(
            |(direction, residual)| {
                for ((direction, factor), residual) in
                    direction.iter_mut().zip(&direction_factors).zip(residual)
                {
                    *direction = residual + factor * *direction;
                }
            },
        );
    }

    /// Returns the table after the rounds so far.
    #[must_use]
    pub fn table(&self) -> TokenTable {
        let mut base = self.cell_mean.clone();
        for (row, &mean) in self.solution.chunks_exact(self.cells).zip(&self.feature_mean) {
            add_scaled(&mut base, -mean, row);
        }
        TokenTable {
            embedding: self.embedding.clone(),
            features: self.features.clone(),
            experts: self.experts,
            base,
            rows: Rows::from_values(self.cells, self.solution.clone()),
        }
    }
}

/// Returns the quotient, or 0 once a cell has converged.
fn ratio(numerator: f64, denominator: f64) -> f32 {
    if numerator > 1e-20 && denominator > 0.0 { (numerator / denominator) as f32 } else { 0.0 }
}

/// Adds the sum of value * row over the sparse `row` to `target`.
fn accumulate(target: &mut [f32], row: &[(u32, f32)], matrix: &[f32]) {
    let cells = target.len();
    for &(index, value) in row {
        let start = index as usize * cells;
        add_scaled(target, value, matrix.get(start..start + cells).unwrap_or_default());
    }
}

/// Returns the dot products of corresponding columns of two matrices with `cells` columns.
fn column_products(a: &[f32], b: &[f32], cells: usize) -> Vec<f64> {
    let mut products = vec![0.0; cells];
    for (a, b) in a.chunks_exact(cells).zip(b.chunks_exact(cells)) {
        for ((product, a), b) in products.iter_mut().zip(a).zip(b) {
            *product += f64::from(*a) * f64::from(*b);
        }
    }
    products
}
