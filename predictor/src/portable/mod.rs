//! A predictor of bounded size that needs no more than a sketch of the model's embedding: what gateways get.
//!
//! Shares of all layers and experts in both phases are written as coordinates in a few principal directions of what the
//! history used. A token has coordinates, whether the history had it or not, and so has a past prompt. So nothing
//! grows with vocabulary times experts, or with prompts times experts:
//!
//! | part | bytes, at most |
//! | --- | --- |
//! | coordinates of tokens, in 255ths | [`MAX_TOKEN_BYTES`] |
//! | directions | [`MAX_BASIS_BYTES`] |
//! | past prompts: vectors in the sketch, and coordinates | [`MAX_PAST_BYTES`] |
//! | the sketch, made of the checkpoint where it is needed | [`MAX_SKETCH_BYTES`] |

mod codes;
mod file;
mod reduced;

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::phase::{ByPhase, Phase};
use crate::predictor::Popularity;
use crate::record::RecordHeader;
use crate::shares::Shares;
use crate::trained::Trained;
use crate::tuning::{TunedPredictor, Tuning};
pub use file::PORTABLE_FILE;
pub(crate) use reduced::Reduced;

/// Bytes of a saved portable predictor, at most.
pub const MAX_PORTABLE_BYTES: usize = 30 << 20;
/// Bytes of a sketch, at most.
pub const MAX_SKETCH_BYTES: usize = 32 << 20;
/// Dimensions of the sketch where nothing else is asked for.
pub const DEFAULT_DIMENSIONS: usize = 64;

/// Bytes of the coordinates of tokens, at most.
const MAX_TOKEN_BYTES: usize = 18 << 20;
/// Bytes of the directions, at most.
const MAX_BASIS_BYTES: usize = 6 << 20;
/// Bytes of past prompts, at most.
const MAX_PAST_BYTES: usize = 5 << 20;
/// Past prompts, at most: a prediction compares with all of them.
const MAX_PAST: usize = 8192;
/// Directions, at most.
const MAX_DIRECTIONS: usize = 128;
/// Dimensions of a sketch, at least: fewer say nothing.
const LEAST_DIMENSIONS: usize = 16;

/// Returns `wanted` dimensions of a sketch, or as many as the largest sketch of such a `vocabulary` has.
///
/// # Errors
/// The vocabulary is too large for any.
pub fn sketch_dimensions(vocabulary: usize, wanted: usize) -> Result<usize, PredictError> {
    let most = MAX_SKETCH_BYTES / (vocabulary.max(1) * crate::EmbeddingType::F16.bytes());
    match most {
        most if most < LEAST_DIMENSIONS => {
            let message = format!("a sketch of {vocabulary} tokens exceeds {MAX_SKETCH_BYTES} bytes");
            Err(PredictError::option("dimensions", wanted, message))
        }
        most => Ok(wanted.clamp(LEAST_DIMENSIONS, most)),
    }
}

/// A predictor of bounded size over a sketch of the model's embedding.
#[derive(Debug, Clone)]
pub struct Portable {
    header: RecordHeader,
    parts: Reduced,
    tuning: ByPhase<Tuning>,
}

impl Portable {
    /// Expresses `trained`, which was fitted over `embedding`, over `sketch`. Temperatures, weights and errors stay those
    /// of `trained`, which are a little better: [`Trained::fit_with_portable`] measures them.
    ///
    /// # Errors
    /// `embedding` or `sketch` is of another model.
    pub fn of(trained: &Trained, embedding: &Embedding, sketch: &Embedding) -> Result<Self, PredictError> {
        Self::with_tuning(trained, embedding, sketch, trained.tuning.clone())
    }

    pub(crate) fn with_tuning(
        trained: &Trained,
        embedding: &Embedding,
        sketch: &Embedding,
        tuning: ByPhase<Tuning>,
    ) -> Result<Self, PredictError> {
        let mut parts = Reduced::of(&trained.parts, embedding, sketch)?;
        parts.set_temperature(ByPhase {
            prefill: tuning.prefill.temperature,
            decode: tuning.decode.temperature,
        });
        Ok(Self { header: trained.header.clone(), parts, tuning })
    }

    /// Model and form of the records it was fitted to.
    #[must_use]
    pub fn header(&self) -> &RecordHeader {
        &self.header
    }

    /// Memory in bytes, the sketch not counted.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.bytes()
    }
}

impl TunedPredictor for Portable {
    fn popularity(&self) -> &Popularity {
        self.parts.popularity()
    }

    fn tuning(&self, phase: Phase) -> &Tuning {
        self.tuning.of(phase)
    }

    fn parts(&self, prompt: &[u32], phase: Phase) -> Result<[Shares; 3], PredictError> {
        self.parts.all(prompt, phase)
    }
}
