//! A trained predictor: its parts, its tuning, and its answers.

use crate::error::PredictError;
use crate::error_bars::ErrorBars;
use crate::method::Method;
use crate::mixture::Mixture;
use crate::phase::{ByPhase, Phase};
use crate::predictor::{Popularity, Predictor};
use crate::record::{ActivationRecord, RecordHeader};
use crate::shares::Shares;
use crate::sps::SimilarPrompts;
use crate::tokens::TokenTable;
use crate::tuning::{Prediction, TunedPredictor, Tuning};

#[derive(Debug, Clone)]
pub(crate) struct PredictorParts {
    pub(crate) popularity: Popularity,
    pub(crate) sps: SimilarPrompts,
    pub(crate) tokens: ByPhase<TokenTable>,
}

/// A predictor for one model, fitted to its history.
#[derive(Debug, Clone)]
pub struct Trained {
    pub(crate) header: RecordHeader,
    pub(crate) parts: PredictorParts,
    pub(crate) tuning: ByPhase<Tuning>,
}

impl PredictorParts {
    /// dop, sps and tokens, in the order of the mixture's weights.
    pub(crate) fn all(&self, prompt: &[u32], phase: Phase) -> Result<[Shares; 3], PredictError> {
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
    ) -> Result<Shares, PredictError> {
        match method {
            Method::Dop => self.popularity.predict(prompt, phase),
            Method::Sps => self.sps.predict(prompt, phase),
            Method::Tokens => self.tokens.predict(prompt, phase),
            Method::Blend => mixture.combine(&self.all(prompt, phase)?),
        }
    }
}

impl Trained {
    /// Model and form of the records it was fitted to.
    #[must_use]
    pub fn header(&self) -> &RecordHeader {
        &self.header
    }

    /// Tuning and errors of a phase.
    #[must_use]
    pub fn tuning(&self, phase: Phase) -> &Tuning {
        self.tuning.of(phase)
    }

    /// The part that leans on similar prompts.
    #[must_use]
    pub fn sps(&self) -> &SimilarPrompts {
        &self.parts.sps
    }

    /// The part that goes by token ids, of a phase.
    #[must_use]
    pub fn tokens(&self, phase: Phase) -> &TokenTable {
        self.parts.tokens.of(phase)
    }

    /// The mean of the history.
    #[must_use]
    pub fn popularity(&self) -> &Popularity {
        &self.parts.popularity
    }

    /// Weight of each part in the default method's answers about a phase, averaged over layers.
    #[must_use]
    pub fn part_weights(&self, phase: Phase) -> Vec<(Method, f64)> {
        let Tuning { default, mixture, .. } = self.tuning.of(phase);
        let default = *default;
        if default != Method::Blend {
            return vec![(default, 1.0)];
        }
        let weights = mixture.weights();
        let mean = |part: usize| {
            let of_layers = weights.iter().filter_map(|layer| layer.get(part));
            of_layers.map(|weight| f64::from(*weight)).sum::<f64>() / weights.len().max(1) as f64
        };
        [Method::Dop, Method::Sps, Method::Tokens].into_iter().zip((0..).map(mean)).collect()
    }

    /// The default method's prediction of a phase with its error bar.
    ///
    /// # Errors
    /// The prompt is empty or has a token that the model does not have.
    pub fn predict_with_errors(&self, prompt: &[u32], phase: Phase) -> Result<Prediction<'_>, PredictError> {
        self.tuning.of(phase).prediction(&self.parts.all(prompt, phase)?)
    }

    /// Errors of `method` about a phase of held-out prompts, where the history was long enough.
    #[must_use]
    pub fn errors_of(&self, method: Method, phase: Phase) -> Option<&ErrorBars> {
        self.tuning.of(phase).errors_of(method)
    }

    /// One of its methods as a predictor.
    #[must_use]
    pub fn method(&self, method: Method) -> impl Predictor + '_ {
        OneMethod { trained: self, method }
    }

    /// Takes a new record in without a rebuild, as [`SimilarPrompts::learn`]; the token table and the
    /// weights stay as they are until the next fit.
    ///
    /// # Errors
    /// The record does not belong to this model, or `capacity` is 0.
    pub fn learn(
        &mut self,
        record: &ActivationRecord,
        capacity: usize,
        semantic: f32,
    ) -> Result<(), PredictError> {
        self.parts.sps.learn(record, capacity, semantic)
    }
}

struct OneMethod<'a> {
    trained: &'a Trained,
    method: Method,
}

impl Predictor for OneMethod<'_> {
    fn name(&self) -> &'static str {
        self.method.name()
    }

    fn predict(&self, prompt: &[u32], phase: Phase) -> Result<Shares, PredictError> {
        self.trained.parts.predict(self.method, &self.trained.tuning.of(phase).mixture, prompt, phase)
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

impl TunedPredictor for Trained {
    fn popularity(&self) -> &Popularity {
        &self.parts.popularity
    }

    fn tuning(&self, phase: Phase) -> &Tuning {
        self.tuning.of(phase)
    }

    fn parts(&self, prompt: &[u32], phase: Phase) -> Result<[Shares; 3], PredictError> {
        self.parts.all(prompt, phase)
    }
}
