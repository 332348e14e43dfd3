//! Tuning on held-out prompts: parameters and errors of each method, and predictions with them.

use crate::divergence;
use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::error_bars::{ErrorBars, ErrorCase, ErrorClass, error_classes};
use crate::history::History;
use crate::method::Method;
use crate::mixture::Mixture;
use crate::phase::{ByPhase, Phase};
use crate::predictor::Popularity;
use crate::record::ActivationRecord;
use crate::shares::UsageShares;
use crate::tokens::{DEFAULT_ROUNDS, MAX_ROUNDS, TokenFit, TokenTable};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::fmt::Debug;

/// Temperature without enough data to fit one: similarities differ by some hundredths.
pub(crate) const DEFAULT_TEMPERATURE: f32 = 0.03;
/// Number of disagreement classes with separate errors of the default method.
const DISAGREEMENT_CLASSES: usize = 3;
/// Rounds without progress after which the fit of a token table stops.
const MAX_STALLED_ROUNDS: usize = 5;

/// Tuned parameters and measured errors of one phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tuning {
    /// Softmax temperature of SPS.
    pub temperature: f32,
    /// Conjugate-gradient rounds of the token table.
    pub rounds: usize,
    /// Weights of dop, sps and tokens in the blend.
    pub mixture: Mixture,
    /// Method that predictions use.
    pub default: Method,
    /// Errors of each method on prompts not used for tuning. Empty if the history is too short.
    pub errors: Vec<(Method, ErrorBars)>,
    /// Errors of the default method by the disagreement of `sps` and `tokens`. Empty if there are too few prompts.
    pub classes: Vec<ErrorClass>,
}

/// Prediction with its expected error.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction<'a> {
    /// Predicted shares.
    pub shares: UsageShares,
    /// Errors of this method on held-out prompts with similar disagreement, or on all held-out prompts if there are
    /// too few. Absent if the history is too short.
    pub errors: Option<&'a ErrorBars>,
    /// Disagreement of `sps` and `tokens`: mean Jensen-Shannon divergence over layers, in nats.
    pub disagreement: f64,
}

/// Predictor of three parts (dop, sps and tokens) with tuned parameters and measured errors.
pub trait TunedPredictor: Debug + Send {
    /// Returns the mean of the history.
    fn popularity(&self) -> &Popularity;

    /// Returns the tuning of a phase.
    fn tuning(&self, phase: Phase) -> &Tuning;

    /// Returns the predictions of dop, sps and tokens, in this order.
    ///
    /// # Errors
    /// The prompt is empty or has a token that the model does not have.
    fn parts(&self, prompt: &[u32], phase: Phase) -> Result<[UsageShares; 3], PredictError>;

    /// Predicts a phase with the default method, with error bars.
    ///
    /// # Errors
    /// As [`Self::parts`].
    fn predict_with_errors(&self, prompt: &[u32], phase: Phase) -> Result<Prediction<'_>, PredictError> {
        self.tuning(phase).prediction(&self.parts(prompt, phase)?)
    }

    /// Returns the errors of `method` in a phase, if the history was long enough.
    fn errors_of(&self, method: Method, phase: Phase) -> Option<&ErrorBars> {
        self.tuning(phase).errors_of(method)
    }
}

/// Combines the predictions of all parts into that of `method`.
pub(crate) fn combine_parts(
    method: Method,
    mixture: &Mixture,
    parts: &[UsageShares; 3],
) -> Result<UsageShares, PredictError> {
    let [dop, sps, tokens] = parts;
    match method {
        Method::Dop => Ok(dop.clone()),
        Method::Sps => Ok(sps.clone()),
        Method::Tokens => Ok(tokens.clone()),
        Method::Blend => mixture.combine(parts),
    }
}

/// Returns the mean divergence of `sps` and `tokens`, the parts that use the prompt.
fn disagreement([_, sps, tokens]: &[UsageShares; 3]) -> f64 {
    divergence::mean(sps, tokens)
}

impl Tuning {
    /// Returns the defaults for a history that is too short to tune on.
    pub(crate) fn untuned(layers: usize) -> Self {
        Self {
            temperature: DEFAULT_TEMPERATURE,
            rounds: DEFAULT_ROUNDS,
            mixture: Mixture::equal(layers, 3),
            default: Method::Sps,
            errors: Vec::new(),
            classes: Vec::new(),
        }
    }

    /// Combines the predictions of the parts into that of the default method, with error bars.
    pub(crate) fn prediction(&self, parts: &[UsageShares; 3]) -> Result<Prediction<'_>, PredictError> {
        let shares = combine_parts(self.default, &self.mixture, parts)?;
        let disagreement = disagreement(parts);
        let class =
            self.classes.iter().find(|class| disagreement <= class.disagreement).or(self.classes.last());
        let errors = class.map(|class| &class.errors).or_else(|| self.errors_of(self.default));
        Ok(Prediction { shares, errors, disagreement })
    }

    pub(crate) fn errors_of(&self, method: Method) -> Option<&ErrorBars> {
        self.errors.iter().find(|(known, _)| *known == method).map(|(_, bars)| bars)
    }

    /// Checks values from a file.
    pub(crate) fn check(&self, layers: usize) -> Result<(), PredictError> {
        if !(self.temperature > 0.0 && self.temperature.is_finite()) {
            return Err(PredictError::Saved(format!("invalid temperature {}", self.temperature)));
        }
        PredictError::require_size("the mixture", layers, self.mixture.weights().len())
    }
}

/// Held-out prompts with their true shares of a phase.
pub(crate) type Cases<'a> = Vec<(&'a [u32], UsageShares)>;

/// Held-out prompts of a training history.
pub(crate) struct HeldOut<'a> {
    /// Prompts that tune temperatures, rounds and weights.
    pub(crate) tuning_cases: ByPhase<Cases<'a>>,
    /// Prompts that only measure errors.
    error_cases: ByPhase<Cases<'a>>,
    layers: usize,
    has_decode: bool,
}

impl<'a> HeldOut<'a> {
    /// Creates the held-out cases; `history` must not contain `tune` or `check`.
    pub(crate) fn new(
        history: &History,
        tune: &'a [ActivationRecord],
        check: &'a [ActivationRecord],
    ) -> Result<Self, PredictError> {
        Ok(Self {
            tuning_cases: ByPhase::try_each(|phase| cases_of(history, tune, phase))?,
            error_cases: ByPhase::try_each(|phase| cases_of(history, check, phase))?,
            layers: history.layers(),
            has_decode: history.has_decode(),
        })
    }

    /// Fits the weights of `parts` and measures their errors, each phase separately.
    pub(crate) fn tune(
        &self,
        parts: impl Fn(&[u32], Phase) -> Result<[UsageShares; 3], PredictError> + Sync,
        temperature: ByPhase<f32>,
        rounds: ByPhase<usize>,
    ) -> Result<ByPhase<Tuning>, PredictError> {
        let mut tuning = ByPhase::try_each(|phase| {
            let cases = self.tuning_cases.get(phase).par_iter();
            let cases: Vec<_> = cases
                .map(|(prompt, truth)| Ok((parts(prompt, phase)?, truth.clone())))
                .collect::<Result<_, PredictError>>()?;
            let mixture = Mixture::fit(self.layers, &cases);
            let error_cases = self.error_cases.get(phase);
            let predicted: Vec<_> = error_cases
                .par_iter()
                .map(|(prompt, _)| parts(prompt, phase))
                .collect::<Result<_, PredictError>>()?;
            let truths: Vec<UsageShares> = error_cases.iter().map(|(_, truth)| truth.clone()).collect();
            let predictions_of = |method| {
                predicted
                    .iter()
                    .map(|parts| combine_parts(method, &mixture, parts))
                    .collect::<Result<Vec<_>, _>>()
            };
            let measured =
                Method::ALL.map(|method| Ok((method, ErrorBars::measure(&predictions_of(method)?, &truths))));
            let errors = measured.into_iter().collect::<Result<Vec<_>, PredictError>>()?;
            let best = errors.iter().min_by(|a, b| a.1.js_mean.total_cmp(&b.1.js_mean));
            let default = best.map_or(Method::Sps, |(method, _)| *method);
            if truths.is_empty() {
                return Ok(Tuning::untuned(self.layers));
            }
            let cases = predicted.iter().map(disagreement).zip(predictions_of(default)?).zip(truths);
            let cases = cases
                .map(|((disagreement, prediction), truth)| ErrorCase { disagreement, prediction, truth })
                .collect();
            let classes = error_classes(cases, DISAGREEMENT_CLASSES);
            let (temperature, rounds) = (*temperature.get(phase), *rounds.get(phase));
            Ok::<_, PredictError>(Tuning { temperature, rounds, mixture, default, errors, classes })
        })?;
        if !self.has_decode {
            // The prefill's shares stand for the decode steps; their error there is unknown.
            tuning.decode = Tuning { errors: Vec::new(), classes: Vec::new(), ..tuning.prefill.clone() };
        }
        Ok(tuning)
    }
}

/// Pairs the prompt of each record with its true shares in a phase. Skips records without any.
fn cases_of<'a>(
    history: &History,
    records: &'a [ActivationRecord],
    phase: Phase,
) -> Result<Cases<'a>, PredictError> {
    let with_truth = |record: &'a ActivationRecord| {
        let truth = history.shares_of(record, phase);
        truth.map(|truth| Some((&record.prompt[..], truth?))).transpose()
    };
    records.iter().filter_map(with_truth).collect()
}

/// Fits the token table of a phase with the number of rounds that predicts the held-out prompts best. Returns the
/// table and that number.
pub(crate) fn best_table(
    embedding: &Embedding,
    history: &History,
    phase: Phase,
    held_out: &[(&[u32], UsageShares)],
) -> Result<(TokenTable, usize), PredictError> {
    let mut fit = TokenFit::new(embedding, history, phase)?;
    if held_out.is_empty() {
        (0..DEFAULT_ROUNDS).for_each(|_| fit.advance());
        return Ok((fit.table(), DEFAULT_ROUNDS));
    }
    let mut best = (f64::INFINITY, fit.table(), 0);
    for round in 1..=MAX_ROUNDS {
        fit.advance();
        let table = fit.table();
        let error = |(prompt, truth): &(&[u32], UsageShares)| {
            Ok::<_, PredictError>(divergence::mean(&table.predict(prompt)?, truth))
        };
        let errors = held_out.par_iter().map(error).collect::<Result<Vec<_>, _>>()?;
        let sum: f64 = errors.iter().sum();
        if sum < best.0 {
            best = (sum, table, round);
        } else if round - best.2 >= MAX_STALLED_ROUNDS {
            break;
        }
    }
    Ok((best.1, best.2))
}
