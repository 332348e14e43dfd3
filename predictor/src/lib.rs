//! Which experts a prompt will use.
//!
//! [`record`] is the file format of what models did. [`Trained`] is what a command or a planner wants: it
//! fits all parts to a history, chooses the one that predicts held-out prompts best, says how far off it
//! was, and can be saved. [`Portable`] is the same in bounded size, for gateways, which have a sketch of the
//! model's embedding. The parts stand for themselves, too: [`SimilarPrompts`] over a [`Tree`] (SPS),
//! [`TokenTable`], and the baselines [`Popularity`], [`Uniform`] and [`Fate`], all [`Predictor`]s.
//! [`Activations`] is how a main function tells a gateway what a request used; what is learned from it is an
//! [`Experience`], which holds no token.
//! [`layerwise`] predicts layer by layer and token by token, for functions that must know while a request
//! runs.
//!
//! Everything here takes values, byte slices and readers and returns values; files are opened by the
//! caller. The same input and seed give the same output, on any number of threads.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

#[cfg(not(target_endian = "little"))]
compile_error!("saved predictors and embeddings are little-endian and used in place");

mod activations;
mod compact;
mod contest;
pub mod correlation;
pub mod divergence;
mod embedding;
mod error;
mod error_bars;
mod expectation;
mod fate;
mod history;
mod informed;
pub mod layerwise;
mod method;
mod mixture;
mod packed;
mod phase;
mod portable;
mod predictor;
pub mod prompts;
mod random;
pub mod record;
mod regrowth;
mod rows;
mod saved;
mod shares;
mod sps;
mod subspace;
mod tokens;
mod trained;
mod training;
mod tree;
mod tuning;
mod vector;

pub use activations::{Activations, MAX_ACTIVATIONS_BYTES};
pub use contest::{Contest, Contestant, Field};
pub use embedding::{Embedding, EmbeddingType, SIGMA, soft_cosine};
pub use error::PredictError;
pub use error_bars::{ErrorBars, ErrorClass, LEAST_IN_CLASS, QUANTILES, error_classes, quantile};
pub use expectation::Expectation;
pub use fate::{Fate, GateWeights};
pub use history::{Experience, History};
pub use informed::informed_sps;
pub use method::Method;
pub use mixture::Mixture;
pub use phase::{ByPhase, Phase};
pub use portable::{
    DEFAULT_DIMENSIONS, MAX_PORTABLE_BYTES, MAX_SKETCH_BYTES, PORTABLE_FILE, Portable, sketch_dimensions,
};
pub use predictor::{Popularity, Predictor, Uniform};
pub use regrowth::Regrowth;
pub use saved::PREDICTOR_FILE;
pub use shares::Shares;
pub use sps::{Index, Learned, SimilarPrompts, UNTEMPERED};
pub use tokens::{DEFAULT_ROUNDS, MAX_ROUNDS, TokenFit, TokenTable};
pub use trained::Trained;
pub use training::{FitStage, TrainingOptions};
pub use tree::{Clustering, Effort, Neighbour, Tree, TreeOptions, exhaustive};
pub use tuning::{Prediction, TunedPredictor, Tuning};
