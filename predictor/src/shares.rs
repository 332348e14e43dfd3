//! How a prompt's work spreads over the experts: the matrix S~ of the Remoe paper.

use crate::error::PredictError;

/// Rows whose sum is no further from 1 are shares already: what rounding leaves.
const SETTLED: f32 = 1e-5;

/// Shares of each expert in the assignments of its layer, [layers, experts]; each row sums to 1.
///
/// The paper's S~ (section IV-B): element (l, k) is the count of expert k of layer l over the sum of
/// the layer's counts.
#[derive(Debug, Clone, PartialEq)]
pub struct Shares {
    experts: usize,
    values: Vec<f32>,
}

impl Shares {
    /// Every expert alike.
    #[must_use]
    pub fn uniform(layers: usize, experts: usize) -> Self {
        Self { experts, values: vec![1.0 / experts as f32; layers * experts] }
    }

    /// From counts [layers, experts], row after row; a layer that counted nothing is uniform.
    ///
    /// # Errors
    /// `counts` holds no whole number of rows.
    pub fn from_counts(experts: usize, counts: &[u32]) -> Result<Self, PredictError> {
        Self::from_weights(experts, counts.iter().map(|&count| count as f32).collect())
    }

    /// From weights that are 0 or more, [layers, experts]: each row is divided by its sum; a row
    /// without a positive, finite sum becomes uniform.
    ///
    /// # Errors
    /// `weights` holds no whole number of rows.
    pub fn from_weights(experts: usize, weights: Vec<f32>) -> Result<Self, PredictError> {
        if experts == 0 || !weights.len().is_multiple_of(experts) {
            let expected = weights.len().next_multiple_of(experts.max(1));
            return Err(PredictError::Size { what: "a matrix of shares", expected, found: weights.len() });
        }
        let mut values = weights;
        for row in values.chunks_exact_mut(experts) {
            row.iter_mut().for_each(|value| *value = value.max(0.0));
            let sum: f32 = row.iter().sum();
            if (sum - 1.0).abs() <= SETTLED {
                // It stays as it is, so that what was saved comes back bit by bit. No share is more than all.
                row.iter_mut().for_each(|value| *value = value.min(1.0));
            } else if sum > 0.0 && sum.is_finite() {
                row.iter_mut().for_each(|value| *value /= sum);
            } else {
                row.fill(1.0 / experts as f32);
            }
        }
        Ok(Self { experts, values })
    }

    /// Interpolates between `self`, at 0, and `other`, at 1: for both phases of a request, by the part of its tokens
    /// that are `other`'s.
    ///
    /// # Errors
    /// They are of different forms.
    pub fn towards(&self, other: &Self, part: f64) -> Result<Self, PredictError> {
        PredictError::require_size("a matrix of shares", self.values.len(), other.values.len())?;
        let pairs = self.values.iter().zip(&other.values);
        let between = |(a, b): (&f32, &f32)| (f64::from(*a) + f64::from(b - a) * part) as f32;
        Self::from_weights(self.experts, pairs.map(between).collect())
    }

    /// Layers with experts.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.values.len() / self.experts
    }

    /// Experts per layer.
    #[must_use]
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// All values, row after row.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The rows in double precision, each with a sum of 1: as planners take them.
    #[must_use]
    pub fn to_rows(&self) -> Vec<Vec<f64>> {
        let row = |row: &[f32]| {
            let sum: f64 = row.iter().map(|share| f64::from(*share)).sum();
            row.iter().map(|share| f64::from(*share) / sum).collect()
        };
        self.rows().map(row).collect()
    }

    /// The rows, one per layer.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.values.chunks_exact(self.experts)
    }
}
