//! Trained predictor: its parts and its tuning.

use crate::error::PredictError;
use crate::error_bars::ErrorBars;
use crate::method::Method;
use crate::mixture::Mixture;
use crate::phase::{ByPhase, Phase};
use crate::predictor::{Popularity, Predictor};
use crate::record::{ActivationRecord, RecordHeader};
use crate::shares::UsageShares;
use crate::sps::SimilarPrompts;
use crate::tokens::TokenTable;
use crate::tuning::{Prediction, TunedPredictor, Tuning};

/// Fitted parts of a predictor.
#[derive(Debug, Clone)]
pub(crate) struct PredictorParts {
    pub(crate) popularity: Popularity,
    pub(crate) sps: SimilarPrompts,
    pub(crate) tokens: ByPhase<TokenTable>,
}

/// Predictor of one model, fitted to its training history.
#[derive(Debug, Clone)]
pub struct TrainedPredictor {
    pub(crate) header: RecordHeader,
    pub(crate) parts: PredictorParts,
    pub(crate) tuning: ByPhase<Tuning>,
}

impl PredictorParts {
    /// Returns the predictions of dop, sps and tokens, in the order of the mixture's weights.
    pub(crate) fn all(&self, prompt: &[u32], phase: Phase) -> Result<[UsageShares; 3], PredictError> {
        Ok([
            self.popularity.predict(prompt, phase)?,
            self.sps.predict(prompt, phase)?,
            self.tokens.predict(prompt, phase)?,
        ])
    }

    fn predict(
        &self,
        method: Method,
        mixture: &Mixture,
        prompt: &[u32],
        phase: Phase,
    ) -> Result<UsageShares, PredictError> {
        match method {
            Method::Dop => self.popularity.predict(prompt, phase),
            Method::Sps => self.sps.predict(prompt, phase),
            Method::Tokens => self.tokens.predict(prompt, phase),
            Method::Blend => mixture.combine(&self.all(prompt, phase)?),
        }
    }
}

impl TrainedPredictor {
    /// Returns the header of the records that it was fitted to.
    #[must_use]
    pub fn header(&self) -> &RecordHeader {
        &self.header
    }

    /// Returns the tuning and the errors of a phase.
    #[must_use]
    pub fn tuning(&self, phase: Phase) -> &Tuning {
        self.tuning.get(phase)
    }

    /// Returns the similar-prompt search.
    #[must_use]
    pub fn sps(&self) -> &SimilarPrompts {
        &self.parts.sps
    }

    /// Returns the token table of a phase.
    #[must_use]
    pub fn tokens(&self, phase: Phase) -> &TokenTable {
        self.parts.tokens.get(phase)
    }

    /// Returns the mean of the history.
    #[must_use]
    pub fn popularity(&self) -> &Popularity {
        &self.parts.popularity
    }

    /// Returns the weight of each part in the default method's predictions of a phase, averaged over layers.
    #[must_use]
    pub fn part_weights(&self, phase: Phase) -> Vec<(Method, f64)> {
        let Tuning { default, mixture, .. } = self.tuning.get(phase);
        let default = *default;
        if default != Method::Blend {
            return vec![(default, 1.0)];
        }
        let weights = mixture.weights();
        let mean = |part: usize| {
            let layer_weights = weights.iter().filter_map(|layer| layer.get(part));
            layer_weights.map(|weight| f64::from(*weight)).sum::<f64>() / weights.len().max(1) as f64
        };
        [Method::Dop, Method::Sps, Method::Tokens].into_iter().zip((0..).map(mean)).collect()
    }

    /// Predicts a phase with the default method, with error bars.
    ///
    /// # Errors
    /// The prompt is empty or has a token that the model does not have.
    pub fn predict_with_errors(&self, prompt: &[u32], phase: Phase) -> Result<Prediction<'_>, PredictError> {
        self.tuning.get(phase).prediction(&self.parts.all(prompt, phase)?)
    }

    /// Returns the errors of `method` in a phase, if the history was long enough.
    #[must_use]
    pub fn errors_of(&self, method: Method, phase: Phase) -> Option<&ErrorBars> {
        self.tuning.get(phase).errors_of(method)
    }

    /// Returns one of its methods as a predictor.
    #[must_use]
    pub fn method(&self, method: Method) -> impl Predictor + '_ {
        MethodPredictor { trained: self, method }
    }

    /// Adds a record without a rebuild, as [`SimilarPrompts::learn`] does. The token table and the weights are
    /// unchanged until the next fit.
    ///
    /// # Errors
    /// The record has another shape than the model, or `capacity` is 0.
    pub fn learn(
        &mut self,
        record: &ActivationRecord,
        capacity: usize,
        semantic: f32,
    ) -> Result<(), PredictError> {
        self.parts.sps.learn(record, capacity, semantic)
    }
}

/// Predictor that uses one method of a trained predictor.
struct MethodPredictor<'a> {
    trained: &'a TrainedPredictor,
    method: Method,
}

impl Predictor for MethodPredictor<'_> {
    fn name(&self) -> &'static str {
        self.method.name()
    }

    fn predict(&self, prompt: &[u32], phase: Phase) -> Result<UsageShares, PredictError> {
        self.trained.parts.predict(self.method, &self.trained.tuning.get(phase).mixture, prompt, phase)
    }

    fn bytes(&self) -> u64 {
        let PredictorParts { popularity, sps, tokens } = &self.trained.parts;
        match self.method {
            Method::Dop => popularity.bytes(),
            Method::Sps => sps.bytes(),
            Method::Tokens => tokens.bytes(),
            Method::Blend => popularity.bytes() + sps.bytes() + tokens.bytes(),
        }
    }
}

impl TunedPredictor for TrainedPredictor {
    fn popularity(&self) -> &Popularity {
        &self.parts.popularity
    }

    fn tuning(&self, phase: Phase) -> &Tuning {
        self.tuning.get(phase)
    }

    fn parts(&self, prompt: &[u32], phase: Phase) -> Result<[UsageShares; 3], PredictError> {
        self.parts.all(prompt, phase)
    }
}
