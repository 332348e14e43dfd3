//! Portable predictor: a predictor of bounded size over a sketch of the model's embedding, for gateways.
//!
//! The shares of all layers and experts in both phases are coordinates along a few principal directions of the
//! history's usage. Every token of the vocabulary and every past prompt has such coordinates. So no part grows with
//! vocabulary times experts, or with prompts times experts:
//!
//! | part | largest size in bytes |
//! | --- | --- |
//! | coordinates of tokens, in 255ths | [`MAX_TOKEN_BYTES`] |
//! | directions | [`MAX_BASIS_BYTES`] |
//! | past prompts: sketched vectors and coordinates | [`MAX_PAST_BYTES`] |
//! | sketch, computed from the checkpoint on demand | [`MAX_SKETCH_BYTES`] |

mod file;
mod quantised_rows;
mod reduced_parts;

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::phase::{ByPhase, Phase};
use crate::predictor::Popularity;
use crate::record::RecordHeader;
use crate::shares::UsageShares;
use crate::trained::TrainedPredictor;
use crate::tuning::{TunedPredictor, Tuning};
pub use file::PORTABLE_FILE;
pub(crate) use reduced_parts::ReducedParts;

/// Largest saved portable predictor, in bytes.
pub const MAX_PORTABLE_BYTES: usize = 30 << 20;
/// Largest sketch, in bytes.
pub const MAX_SKETCH_BYTES: usize = 32 << 20;
/// Default dimensions of a sketch.
pub const DEFAULT_DIMENSIONS: usize = 64;

/// Largest size of the tokens' coordinates, in bytes.
const MAX_TOKEN_BYTES: usize = 18 << 20;
/// Largest size of the directions, in bytes.
const MAX_BASIS_BYTES: usize = 6 << 20;
/// Largest size of past prompts, in bytes.
const MAX_PAST_BYTES: usize = 5 << 20;
/// Largest number of past prompts: a prediction compares with all.
const MAX_PAST_PROMPTS: usize = 8192;
/// Largest number of directions.
const MAX_DIRECTIONS: usize = 128;
/// Least dimensions of a useful sketch.
const MIN_DIMENSIONS: usize = 16;

/// Returns `wanted` dimensions of a sketch, limited by the largest sketch for this `vocabulary`.
///
/// # Errors
/// The vocabulary is too large for a useful sketch.
pub fn sketch_dimensions(vocabulary: usize, wanted: usize) -> Result<usize, PredictError> {
    let limit = MAX_SKETCH_BYTES / (vocabulary.max(1) * crate::EmbeddingType::F16.bytes());
    match limit {
        limit if limit < MIN_DIMENSIONS => {
            let message = format!("a sketch of {vocabulary} tokens exceeds {MAX_SKETCH_BYTES} bytes");
            Err(PredictError::option("dimensions", wanted, message))
        }
        limit => Ok(wanted.clamp(MIN_DIMENSIONS, limit)),
    }
}

/// Predictor of bounded size over a sketch of the model's embedding.
#[derive(Debug, Clone)]
pub struct PortablePredictor {
    header: RecordHeader,
    parts: ReducedParts,
    tuning: ByPhase<Tuning>,
}

impl PortablePredictor {
    /// Converts `trained`, which was fitted over `embedding`, to `sketch`. Temperatures, weights and errors are
    /// copied from `trained`, whose errors are slightly lower. [`TrainedPredictor::fit_with_portable`] measures the errors of
    /// the portable form.
    ///
    /// # Errors
    /// The sizes of `embedding` or `sketch` do not match the predictor.
    pub fn from_trained(
        trained: &TrainedPredictor,
        embedding: &Embedding,
        sketch: &Embedding,
    ) -> Result<Self, PredictError> {
        Self::with_tuning(trained, embedding, sketch, trained.tuning.clone())
    }

    pub(crate) fn with_tuning(
        trained: &TrainedPredictor,
        embedding: &Embedding,
        sketch: &Embedding,
        tuning: ByPhase<Tuning>,
    ) -> Result<Self, PredictError> {
        let mut parts = ReducedParts::from_parts(&trained.parts, embedding, sketch)?;
        parts.set_temperature(ByPhase {
            prefill: tuning.prefill.temperature,
            decode: tuning.decode.temperature,
        });
        Ok(Self { header: trained.header.clone(), parts, tuning })
    }

    /// Returns the header of the records that it was fitted to.
    #[must_use]
    pub fn header(&self) -> &RecordHeader {
        &self.header
    }

    /// Returns the memory without the sketch, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.bytes()
    }
}

impl TunedPredictor for PortablePredictor {
    fn popularity(&self) -> &Popularity {
        self.parts.popularity()
    }

    fn tuning(&self, phase: Phase) -> &Tuning {
        self.tuning.get(phase)
    }

    fn parts(&self, prompt: &[u32], phase: Phase) -> Result<[UsageShares; 3], PredictError> {
        self.parts.all(prompt, phase)
    }
}
