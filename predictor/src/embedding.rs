//! Prompts as vectors: one sum of unit token embeddings per prompt.
//!
//! Soft cosine similarity of two prompts (Remoe, equation 11) is, for row-normalised token embeddings
//! E1 and E2, 1'E1 E2'1 / (sqrt(1'E1 E1'1) sqrt(1'E2 E2'1) + sigma). As 1'E1 E2'1 is the dot product of
//! the two row sums, it is the cosine of the summed unit vectors: no token-by-token matrix is made.

use crate::error::PredictError;
use crate::vector;
use bytes::Bytes;
use half::f16;
use rayon::prelude::*;
use std::sync::Arc;

/// The paper's sigma, which keeps the similarity of a zero vector defined (as 0).
pub const SIGMA: f64 = 1e-12;

/// A sum of unit rows this short, per unit of weight, is zero but for rounding.
const CANCELLED: f32 = 1e-6;

/// Element type of an embedding at rest.
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
    /// Bytes of an element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// The numbers in `bytes`, little-endian; a rest that is no whole number is left out.
    #[must_use]
    pub fn floats(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::F32 => bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect(),
            Self::Bf16 => bytes.as_chunks().0.iter().map(|value| widened(*value)).collect(),
            Self::F16 => {
                bytes.as_chunks().0.iter().map(|value| f16::from_le_bytes(*value).to_f32()).collect()
            }
        }
    }
}

impl EmbeddingType {
    /// Rows of `hidden` elements in fewer `dimensions`, as float16: each is scaled to length 1, and each of its
    /// elements is added to one of the dimensions or taken off it (the count sketch of Charikar, Chen and
    /// Farach-Colton, 2002). Cosines of sums of rows stay what they are but for noise of about 1 / sqrt(dimensions).
    /// The result is the same in every process. A row of zeros stays zero, and so does one that is not finite; a rest
    /// that is no whole row is left out.
    #[must_use]
    pub fn sketch(self, hidden: usize, dimensions: usize, rows: &[u8]) -> Vec<u8> {
        let places: Vec<(usize, f32)> = (0..hidden as u64).map(|at| place(at, dimensions.max(1))).collect();
        let (mut sketch, mut bytes) = (vec![0.0_f32; dimensions], Vec::new());
        for row in rows.chunks_exact((hidden * self.bytes()).max(1)) {
            let row = self.floats(row);
            let norm = row.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
            let scale = if norm.is_finite() && norm > 0.0 { (1.0 / norm) as f32 } else { 0.0 };
            sketch.fill(0.0);
            if scale > 0.0 {
                for (value, (place, sign)) in row.iter().zip(&places) {
                    if let Some(sum) = sketch.get_mut(*place) {
                        *sum += sign * scale * value;
                    }
                }
            }
            bytes.extend(sketch.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()));
        }
        bytes
    }
}

/// Where element `at` of a row goes, and with which sign.
fn place(at: u64, dimensions: usize) -> (usize, f32) {
    // SplitMix64's output function.
    let mut mixed = at.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    let sign = if mixed >> 63 == 0 { 1.0 } else { -1.0 };
    ((mixed % dimensions as u64) as usize, sign)
}

/// A bfloat16 as float32. A conversion that also cleans up NaN would not be vectorised.
fn widened(value: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(value)) << 16)
}

/// A model's token embeddings, [vocabulary, hidden], with what a token counts in a prompt's vector.
///
/// The table stays as it is at rest; clones share it.
#[derive(Debug, Clone)]
pub struct Embedding {
    hidden: usize,
    kind: EmbeddingType,
    table: Bytes,
    /// 1 / norm of each row, 0 for a row of zeros.
    inverse_norms: Arc<[f32]>,
    weighting: Option<Weighting>,
}

/// Tokens that count differently.
#[derive(Debug, Clone)]
struct Weighting {
    /// One per token.
    weights: Arc<[f32]>,
    /// Vector that is taken off each unit row before it is weighted, [hidden].
    centre: Arc<[f32]>,
}

impl Embedding {
    /// The table in `bytes`, little-endian, row after row; every token counts alike. A row of zeros
    /// stays zero.
    ///
    /// # Errors
    /// `bytes` is no whole number of rows, or a row holds NaN or infinity.
    pub fn new(hidden: usize, kind: EmbeddingType, bytes: Bytes) -> Result<Self, PredictError> {
        let row = hidden * kind.bytes();
        if row == 0 || bytes.is_empty() || !bytes.len().is_multiple_of(row) {
            let expected = bytes.len().next_multiple_of(row.max(1)).max(row);
            return Err(PredictError::Size { what: "the embedding in bytes", expected, found: bytes.len() });
        }
        let mut embedding =
            Self { hidden, kind, table: bytes, inverse_norms: Arc::default(), weighting: None };
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

    /// As [`Embedding::new`], from float32 values.
    ///
    /// # Errors
    /// As [`Embedding::new`].
    pub fn from_rows(hidden: usize, rows: &[f32]) -> Result<Self, PredictError> {
        Self::new(hidden, EmbeddingType::F32, rows.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    /// This embedding with each token counting by its weight, and the weighted mean unit row taken off,
    /// so that what all prompts have in common does not make them similar.
    ///
    /// # Errors
    /// There is not one weight per token, or one is negative or not finite.
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

    /// Reports if tokens count differently.
    #[must_use]
    pub fn is_weighted(&self) -> bool {
        self.weighting.is_some()
    }

    /// Rows of the table.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.inverse_norms.len()
    }

    /// Elements of a row.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Memory of the table and its scales in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let weighting = self.weighting.as_ref();
        let weighting = weighting.map_or(0, |weighting| weighting.weights.len() + weighting.centre.len());
        (self.table.len() + (self.inverse_norms.len() + weighting) * size_of::<f32>()) as u64
    }

    /// `target += factor * row`, the row as it is at rest.
    pub(crate) fn add_row(&self, id: usize, factor: f32, target: &mut [f32]) {
        let width = self.hidden * self.kind.bytes();
        let row = self.table.get(id * width..(id + 1) * width).unwrap_or_default();
        let pairs = target.iter_mut();
        match self.kind {
            EmbeddingType::F32 => pairs
                .zip(row.as_chunks().0)
                .for_each(|(target, value)| *target += factor * f32::from_le_bytes(*value)),
            EmbeddingType::Bf16 => {
                pairs.zip(row.as_chunks().0).for_each(|(target, value)| *target += factor * widened(*value))
            }
            EmbeddingType::F16 => pairs
                .zip(row.as_chunks().0)
                .for_each(|(target, value)| *target += factor * f16::from_le_bytes(*value).to_f32()),
        }
    }

    /// This embedding in fewer `dimensions`, as [`EmbeddingType::sketch`] makes it; every token counts alike.
    ///
    /// # Errors
    /// `dimensions` is 0.
    pub fn sketched(&self, dimensions: usize) -> Result<Self, PredictError> {
        Self::new(
            dimensions,
            EmbeddingType::F16,
            self.kind.sketch(self.hidden, dimensions, &self.table).into(),
        )
    }

    /// A row scaled to length 1, [hidden]; zeros where the row is zero.
    pub(crate) fn unit_row(&self, id: usize) -> Vec<f32> {
        let mut row = vec![0.0; self.hidden];
        self.add_row(id, self.inverse_norms.get(id).copied().unwrap_or(0.0), &mut row);
        row
    }

    /// Refuses a prompt without tokens, or with one that the model does not have.
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

    /// The mean of a prompt's unit rows, [hidden], whatever tokens weigh.
    pub(crate) fn mean_unit_row(&self, prompt: &[u32]) -> Result<Vec<f32>, PredictError> {
        self.check(prompt)?;
        let mut mean = vec![0.0; self.hidden];
        for id in prompt.iter().map(|&id| id as usize) {
            let inverse = self.inverse_norms.get(id).copied().unwrap_or(0.0);
            self.add_row(id, inverse / prompt.len() as f32, &mut mean);
        }
        Ok(mean)
    }

    /// The vector of a prompt, [hidden]: the sum of its tokens' (weighted) unit rows, scaled to length 1;
    /// zeros where the sum is zero. The dot product of two such vectors is the soft cosine similarity.
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
        // Unit rows that cancel leave rounding errors, which have no direction.
        if vector::dot(&sum, &sum).sqrt() <= CANCELLED * total {
            sum.fill(0.0);
        }
        vector::normalise(&mut sum);
        Ok(sum)
    }
}

/// Soft cosine similarity of two prompts with token embeddings `one` and `two`, as equation 11 of the
/// Remoe paper writes it: token by token, in O(n m hidden). [`Embedding::prompt_vector`] gives the same
/// in O((n + m) hidden); this is the definition that it is tested against.
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
