//! Distribution of a prompt's work over the experts: the matrix S~ of the Remoe paper.

use crate::error::PredictError;

/// Tolerance of a row's sum around 1 for rounding, within which the row is kept unchanged.
const SUM_TOLERANCE: f32 = 1e-5;

/// Share of each expert in the assignments of its layer, [layers, experts]. Each row sums to 1.
///
/// S~ of the paper (section IV-B): element (l, k) is the count of expert k in layer l over the sum of the layer's
/// counts.
#[derive(Debug, Clone, PartialEq)]
pub struct UsageShares {
    experts: usize,
    values: Vec<f32>,
}

impl UsageShares {
    /// Returns equal shares for all experts.
    #[must_use]
    pub fn uniform(layers: usize, experts: usize) -> Self {
        Self { experts, values: vec![1.0 / experts as f32; layers * experts] }
    }

    /// Computes shares from counts [layers, experts]. A layer without counts becomes uniform.
    ///
    /// # Errors
    /// `counts` does not hold complete rows.
    pub fn from_counts(experts: usize, counts: &[u32]) -> Result<Self, PredictError> {
        Self::from_weights(experts, counts.iter().map(|&count| count as f32).collect())
    }

    /// Normalises non-negative weights [layers, experts]: divides each row by its sum. A row without a positive,
    /// finite sum becomes uniform.
    ///
    /// # Errors
    /// `weights` does not hold complete rows.
    pub fn from_weights(experts: usize, weights: Vec<f32>) -> Result<Self, PredictError> {
        if experts == 0 || !weights.len().is_multiple_of(experts) {
            let expected = weights.len().next_multiple_of(experts.max(1));
            return Err(PredictError::Size { what: "a matrix of shares", expected, found: weights.len() });
        }
        let mut values = weights;
        for row in values.chunks_exact_mut(experts) {
            row.iter_mut().for_each(|value| *value = value.max(0.0));
            let sum: f32 = row.iter().sum();
            if (sum - 1.0).abs() <= SUM_TOLERANCE {
                // Keeps saved shares bit for bit. No share exceeds 1.
                row.iter_mut().for_each(|value| *value = value.min(1.0));
            } else if sum > 0.0 && sum.is_finite() {
                row.iter_mut().for_each(|value| *value /= sum);
            } else {
                row.fill(1.0 / experts as f32);
            }
        }
        Ok(Self { experts, values })
    }

    /// Interpolates linearly from `self`, at weight 0, to `other`, at weight 1.
    ///
    /// # Errors
    /// The shapes differ.
    pub fn towards(&self, other: &Self, weight: f64) -> Result<Self, PredictError> {
        PredictError::require_size("a matrix of shares", self.values.len(), other.values.len())?;
        let pairs = self.values.iter().zip(&other.values);
        let between = |(a, b): (&f32, &f32)| (f64::from(*a) + f64::from(b - a) * weight) as f32;
        Self::from_weights(self.experts, pairs.map(between).collect())
    }

    /// Returns the number of layers with experts.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.values.len() / self.experts
    }

    /// Returns the number of experts per layer.
    #[must_use]
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Returns all values, row by row.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Returns the rows in double precision, each with a sum of 1, as the planner takes them.
    #[must_use]
    pub fn to_rows(&self) -> Vec<Vec<f64>> {
        let row = |row: &[f32]| {
            let sum: f64 = row.iter().map(|share| f64::from(*share)).sum();
            row.iter().map(|share| f64::from(*share) / sum).collect()
        };
        self.rows().map(row).collect()
    }

    /// Iterates over the rows, one per layer.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.values.chunks_exact(self.experts)
    }
}
