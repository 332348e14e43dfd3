//! Prompt vectors: the normalised sum of the unit embeddings of a prompt's tokens.
//!
//! The soft cosine similarity of two prompts (equation 11 of the Remoe paper) is, for row-normalised token embeddings
//! E1 and E2, 1'E1 E2'1 / (sqrt(1'E1 E1'1) sqrt(1'E2 E2'1) + sigma). 1'E1 E2'1 is the dot product of the two row
//! sums. So the similarity is the cosine of the summed unit vectors, and no token-by-token matrix is needed.

use crate::error::PredictError;
use crate::vector;
use bytes::Bytes;
use half::f16;
use rayon::prelude::*;
use std::sync::Arc;

/// Sigma of the paper, which makes the similarity of a zero vector 0.
pub const SIGMA: f64 = 1e-12;

/// Length per unit of weight below which a sum of unit rows counts as zero.
const ZERO_LENGTH: f32 = 1e-6;

/// Element type of a stored embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmbeddingType {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl EmbeddingType {
    /// Returns the size of an element, in bytes.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Decodes little-endian `bytes`. Ignores an incomplete last element.
    #[must_use]
    pub fn floats(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::F32 => bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect(),
            Self::Bf16 => bytes.as_chunks().0.iter().map(|value| bfloat16_to_f32(*value)).collect(),
            Self::F16 => {
                bytes.as_chunks().0.iter().map(|value| f16::from_le_bytes(*value).to_f32()).collect()
            }
        }
    }
}

impl EmbeddingType {
    /// Projects rows of `hidden` elements to fewer `dimensions`, as float16, by count sketch (Charikar, Chen and
    /// Farach-Colton, 2002): each row is scaled to length 1, then each element is added to or subtracted from one
    /// dimension. Cosines of sums of rows keep their value but for noise of about 1 / sqrt(dimensions). The result is
    /// the same in every process.
    ///
    /// A row of zeros or with a non-finite element becomes zero. An incomplete last row is ignored.
    #[must_use]
    pub fn sketch(self, hidden: usize, dimensions: usize, rows: &[u8]) -> Vec<u8> {
        let positions: Vec<(usize, f32)> =
            (0..hidden as u64).map(|index| sketch_position(index, dimensions.max(1))).collect();
        let (mut sketch, mut bytes) = (vec![0.0_f32; dimensions], Vec::new());
        for row in rows.chunks_exact((hidden * self.bytes()).max(1)) {
            let row = self.floats(row);
            let norm = row.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
            let scale = if norm.is_finite() && norm > 0.0 { (1.0 / norm) as f32 } else { 0.0 };
            sketch.fill(0.0);
            if scale > 0.0 {
                for (value, (dimension, sign)) in row.iter().zip(&positions) {
                    if let Some(sum) = sketch.get_mut(*dimension) {
                        *sum += sign * scale * value;
                    }
                }
            }
            bytes.extend(sketch.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()));
        }
        bytes
    }
}

/// Returns the dimension and the sign of element `index` in the count sketch.
fn sketch_position(index: u64, dimensions: usize) -> (usize, f32) {
    // SplitMix64's output function.
    let mut mixed = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    let sign = if mixed >> 63 == 0 { 1.0 } else { -1.0 };
    ((mixed % dimensions as u64) as usize, sign)
}

/// Converts bfloat16 to float32. A conversion that also quiets NaN would not be vectorised.
fn bfloat16_to_f32(value: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(value)) << 16)
}

/// Token embeddings of a model, [vocabulary, hidden], with optional token weights.
///
/// The table keeps its stored element type. Clones share it.
#[derive(Debug, Clone)]
pub struct Embedding {
    hidden: usize,
    element_type: EmbeddingType,
    table: Bytes,
    /// 1 / norm of each row; 0 for a row of zeros.
    inverse_norms: Arc<[f32]>,
    weighting: Option<Weighting>,
}

/// Weights of tokens in prompt vectors.
#[derive(Debug, Clone)]
struct Weighting {
    /// Weight of each token, [vocabulary].
    weights: Arc<[f32]>,
    /// Vector that is subtracted from each unit row before weighting, [hidden].
    centre: Arc<[f32]>,
}

impl Embedding {
    /// Creates an embedding from little-endian rows in `bytes`. Every token has the same weight.
    ///
    /// # Errors
    /// `bytes` does not hold complete rows, or a row has NaN or infinity.
    pub fn new(hidden: usize, element_type: EmbeddingType, bytes: Bytes) -> Result<Self, PredictError> {
        let row = hidden * element_type.bytes();
        if row == 0 || bytes.is_empty() || !bytes.len().is_multiple_of(row) {
            let expected = bytes.len().next_multiple_of(row.max(1)).max(row);
            return Err(PredictError::Size { what: "the embedding in bytes", expected, found: bytes.len() });
        }
        let mut embedding =
            Self { hidden, element_type, table: bytes, inverse_norms: Arc::default(), weighting: None };
        let norm = |id| {
            let mut values = vec![0.0; hidden];
            embedding.add_row(id, 1.0, &mut values);
            let squares: f64 = values.iter().map(|&value| f64::from(value).powi(2)).sum();
            squares.sqrt()
        };
        let norms: Vec<f64> = (0..embedding.table.len() / row).into_par_iter().map(norm).collect();
        if let Some(row) = norms.iter().position(|norm| !norm.is_finite()) {
            return Err(PredictError::NotFinite { what: "the embedding", row });
        }
        let inverse = |norm: &f64| if *norm > 0.0 { (1.0 / norm) as f32 } else { 0.0 };
        embedding.inverse_norms = norms.iter().map(inverse).collect();
        Ok(embedding)
    }

    /// Creates an embedding from float32 rows, as [`Embedding::new`] does.
    ///
    /// # Errors
    /// As [`Embedding::new`].
    pub fn from_rows(hidden: usize, rows: &[f32]) -> Result<Self, PredictError> {
        Self::new(hidden, EmbeddingType::F32, rows.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    /// Returns this embedding with a weight for each token. Subtracts the weighted mean unit row, so that prompts are
    /// not similar by what all prompts share.
    ///
    /// # Errors
    /// The number of weights is not the vocabulary, or a weight is negative or not finite.
    pub fn weighted(&self, weights: &[f32]) -> Result<Self, PredictError> {
        PredictError::require_size("the list of token weights", self.vocabulary(), weights.len())?;
        if let Some(row) = weights.iter().position(|weight| !weight.is_finite() || *weight < 0.0) {
            return Err(PredictError::NotFinite { what: "the list of token weights", row });
        }
        let total: f32 = weights.iter().sum::<f32>().max(f32::MIN_POSITIVE);
        let mut centre = vec![0.0; self.hidden];
        for (id, (weight, inverse)) in weights.iter().zip(&*self.inverse_norms).enumerate() {
            if *weight > 0.0 {
                self.add_row(id, weight * inverse / total, &mut centre);
            }
        }
        let weighting = Weighting { weights: weights.into(), centre: centre.into() };
        Ok(Self { weighting: Some(weighting), ..self.clone() })
    }

    /// Returns true if tokens have weights.
    #[must_use]
    pub fn is_weighted(&self) -> bool {
        self.weighting.is_some()
    }

    /// Returns the number of tokens.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.inverse_norms.len()
    }

    /// Returns the number of elements per row.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Returns the memory of the table and its norms, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let weighting = self.weighting.as_ref();
        let weighting = weighting.map_or(0, |weighting| weighting.weights.len() + weighting.centre.len());
        (self.table.len() + (self.inverse_norms.len() + weighting) * size_of::<f32>()) as u64
    }

    /// Adds `factor` times the stored row to `target`.
    pub(crate) fn add_row(&self, id: usize, factor: f32, target: &mut [f32]) {
        let width = self.hidden * self.element_type.bytes();
        let row = self.table.get(id * width..(id + 1) * width).unwrap_or_default();
        let pairs = target.iter_mut();
        match self.element_type {
            EmbeddingType::F32 => pairs
                .zip(row.as_chunks().0)
                .for_each(|(target, value)| *target += factor * f32::from_le_bytes(*value)),
            EmbeddingType::Bf16 => pairs
                .zip(row.as_chunks().0)
                .for_each(|(target, value)| *target += factor * bfloat16_to_f32(*value)),
            EmbeddingType::F16 => pairs
                .zip(row.as_chunks().0)
                .for_each(|(target, value)| *target += factor * f16::from_le_bytes(*value).to_f32()),
        }
    }

    /// Returns the sketch of this embedding in fewer `dimensions`, by [`EmbeddingType::sketch`], without token
    /// weights.
    ///
    /// # Errors
    /// `dimensions` is 0.
    pub fn sketched(&self, dimensions: usize) -> Result<Self, PredictError> {
        Self::new(
            dimensions,
            EmbeddingType::F16,
            self.element_type.sketch(self.hidden, dimensions, &self.table).into(),
        )
    }

    /// Returns a row scaled to length 1, [hidden]; zeros if the row is zero.
    pub(crate) fn unit_row(&self, id: usize) -> Vec<f32> {
        let mut row = vec![0.0; self.hidden];
        self.add_row(id, self.inverse_norms.get(id).copied().unwrap_or(0.0), &mut row);
        row
    }

    /// Checks that the prompt has tokens and that all are in the vocabulary.
    ///
    /// # Errors
    /// [`PredictError::EmptyPrompt`], [`PredictError::Token`].
    pub fn check(&self, prompt: &[u32]) -> Result<(), PredictError> {
        if prompt.is_empty() {
            return Err(PredictError::EmptyPrompt);
        }
        let vocabulary = self.vocabulary();
        match prompt.iter().find(|&&id| id as usize >= vocabulary) {
            Some(&id) => Err(PredictError::Token { id, vocabulary }),
            None => Ok(()),
        }
    }

    /// Returns the unweighted mean of a prompt's unit rows, [hidden].
    pub(crate) fn mean_unit_row(&self, prompt: &[u32]) -> Result<Vec<f32>, PredictError> {
        self.check(prompt)?;
        let mut mean = vec![0.0; self.hidden];
        for id in prompt.iter().map(|&id| id as usize) {
            let inverse = self.inverse_norms.get(id).copied().unwrap_or(0.0);
            self.add_row(id, inverse / prompt.len() as f32, &mut mean);
        }
        Ok(mean)
    }

    /// Returns the vector of a prompt, [hidden]: the sum of the weighted unit rows of its tokens, scaled to length 1,
    /// or zeros if the sum is zero. The dot product of two such vectors is the soft cosine similarity.
    ///
    /// # Errors
    /// As [`Embedding::check`].
    pub fn prompt_vector(&self, prompt: &[u32]) -> Result<Vec<f32>, PredictError> {
        self.check(prompt)?;
        let mut sum = vec![0.0; self.hidden];
        let mut total = 0.0;
        for id in prompt.iter().map(|&id| id as usize) {
            let inverse = self.inverse_norms.get(id).copied().unwrap_or(0.0);
            let weights = self.weighting.as_ref().map(|weighting| &weighting.weights);
            let weight = weights.map_or(1.0, |weights| weights.get(id).copied().unwrap_or(0.0));
            self.add_row(id, weight * inverse, &mut sum);
            total += weight;
        }
        if let Some(weighting) = &self.weighting {
            vector::add_scaled(&mut sum, -total, &weighting.centre);
        }
        // If unit rows cancel, the rest is rounding error without a direction.
        if vector::dot(&sum, &sum).sqrt() <= ZERO_LENGTH * total {
            sum.fill(0.0);
        }
        vector::normalise(&mut sum);
        Ok(sum)
    }
}

/// Computes the soft cosine similarity of two prompts with token embeddings `one` and `two` by the definition in
/// equation 11 of the Remoe paper, token by token, in O(n m hidden). It is the reference for tests of
/// [`Embedding::prompt_vector`], which takes O((n + m) hidden).
#[must_use]
pub fn soft_cosine(one: &[&[f32]], two: &[&[f32]]) -> f64 {
    let cosine = |a: &[f32], b: &[f32]| {
        let product = |a: &[f32], b: &[f32]| -> f64 {
            a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
        };
        let norms = (product(a, a) * product(b, b)).sqrt();
        if norms > 0.0 { product(a, b) / norms } else { 0.0 }
    };
    let sum = |one: &[&[f32]], two: &[&[f32]]| -> f64 {
        one.iter().flat_map(|a| two.iter().map(move |b| cosine(a, b))).sum()
    };
    // A Gram matrix is positive semi-definite; rounding may still leave a tiny negative sum.
    let (own, other) = (sum(one, one).max(0.0), sum(two, two).max(0.0));
    sum(one, two) / (own.sqrt() * other.sqrt() + SIGMA)
}
