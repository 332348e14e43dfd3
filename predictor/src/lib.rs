//! Prediction of the experts that a prompt will use.
//!
//! [`record`] is the file format of activation records. [`TrainedPredictor`] fits all methods to a training history, chooses
//! the one with the least error on held-out prompts, measures that error, and can be saved. [`PortablePredictor`] is the same
//! in bounded size for gateways, which have only a sketch of the model's embedding.
//!
//! Each method can be used alone as a [`Predictor`]: [`SimilarPrompts`] over a [`Tree`] (SPS), [`TokenTable`], and
//! the baselines [`Popularity`], [`Uniform`] and [`Fate`]. A main function reports the expert usage of a request to a
//! gateway as [`Activations`]. A gateway keeps it as an [`UsageSample`], without tokens. [`layerwise`] predicts layer
//! by layer and token by token while a request runs.
//!
//! All functions take values, byte slices and readers and return values; the caller opens files. The same input and
//! seed give the same output, on any number of threads.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

#[cfg(not(target_endian = "little"))]
compile_error!("saved predictors and embeddings are little-endian and used in place");

mod activations;
mod comparison;
pub mod correlation;
pub mod divergence;
mod embedding;
mod error;
mod error_bars;
mod expectation;
mod fate;
mod history;
mod informed_sps;
pub mod layerwise;
mod method;
mod mixture;
mod packed_text;
mod phase;
mod portable;
mod predictor;
mod predictor_file;
pub mod prompts;
mod random;
pub mod record;
mod rows;
mod shares;
mod shares_text;
mod sps;
mod subspace;
mod tokens;
mod trained;
mod training;
mod tree;
mod tree_rebuild;
mod tuning;
mod vector;

pub use activations::{Activations, MAX_ACTIVATIONS_BYTES};
pub use comparison::{ComparedMethod, ComparedMethods, MethodComparison};
pub use embedding::{Embedding, EmbeddingType, SIGMA, soft_cosine};
pub use error::PredictError;
pub use error_bars::{
    ErrorBars, ErrorCase, ErrorClass, MIN_CLASS_PROMPTS, QUANTILES, error_classes, quantile,
};
pub use expectation::Expectation;
pub use fate::{Fate, GateWeights};
pub use history::{History, UsageSample};
pub use informed_sps::informed_sps;
pub use method::Method;
pub use mixture::Mixture;
pub use phase::{ByPhase, Phase};
pub use portable::{
    DEFAULT_DIMENSIONS, MAX_PORTABLE_BYTES, MAX_SKETCH_BYTES, PORTABLE_FILE, PortablePredictor,
    sketch_dimensions,
};
pub use predictor::{Popularity, Predictor, Uniform};
pub use predictor_file::PREDICTOR_FILE;
pub use shares::UsageShares;
pub use sps::{PromptIndex, SimilarPrompts, SlotUpdate, UNTEMPERED};
pub use tokens::{DEFAULT_ROUNDS, MAX_ROUNDS, TokenFit, TokenTable};
pub use trained::TrainedPredictor;
pub use training::{FitStage, TrainingOptions};
pub use tree::{Clustering, Neighbour, SearchEffort, Tree, TreeOptions, exhaustive_search};
pub use tree_rebuild::TreeRebuild;
pub use tuning::{Prediction, TunedPredictor, Tuning};
