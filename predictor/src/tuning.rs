//! Parameters and errors from prompts of the history that nothing was fitted to, and predictions with them.

use crate::divergence;
use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::error_bars::{ErrorBars, ErrorClass, error_classes};
use crate::history::History;
use crate::method::Method;
use crate::mixture::Mixture;
use crate::phase::{ByPhase, Phase};
use crate::predictor::Popularity;
use crate::record::ActivationRecord;
use crate::shares::Shares;
use crate::tokens::{DEFAULT_ROUNDS, MAX_ROUNDS, TokenFit, TokenTable};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::fmt::Debug;

/// Temperature where nothing could be fitted: similarities of prompts differ by some hundredths.
pub(crate) const DEFAULT_TEMPERATURE: f32 = 0.03;
/// Classes of disagreement that errors of the default method are kept for.
const CLASSES: usize = 3;
/// Rounds without progress after which a fit of token tables is given up.
const PATIENCE: usize = 5;

/// Parameters of a phase that were tuned on held-out prompts of the history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tuning {
    /// Temperature of SPS.
    pub temperature: f32,
    /// Rounds of the token table.
    pub rounds: usize,
    /// Weights of dop, sps and tokens in the blend.
    pub mixture: Mixture,
    /// Method that answers.
    pub default: Method,
    /// Errors of each method on prompts that nothing was tuned on; empty for a history that is too short.
    pub errors: Vec<(Method, ErrorBars)>,
    /// Errors of the default method by how far `sps` and `tokens` are apart; empty where prompts are too few.
    pub classes: Vec<ErrorClass>,
}

/// A prediction with what is known about its error.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction<'a> {
    /// The predicted shares.
    pub shares: Shares,
    /// Errors of this method on held-out prompts, where the history was long enough; on those about which its parts
    /// were as much at odds as about this one, where there were many.
    pub errors: Option<&'a ErrorBars>,
    /// How far the parts that look at the prompt are apart: Jensen-Shannon divergence in nats, mean over layers.
    pub disagreement: f64,
}

/// A predictor of three parts (dop, sps and tokens) that was tuned and measured on held-out prompts.
pub trait TunedPredictor: Debug + Send {
    /// The mean of the history.
    fn popularity(&self) -> &Popularity;

    /// Parameters and errors of a phase.
    fn tuning(&self, phase: Phase) -> &Tuning;

    /// Predictions of dop, sps and tokens, in this order.
    ///
    /// # Errors
    /// The prompt is empty or has a token that the model does not have.
    fn parts(&self, prompt: &[u32], phase: Phase) -> Result<[Shares; 3], PredictError>;

    /// The default method's prediction of a phase with its error bar.
    ///
    /// # Errors
    /// As [`Self::parts`].
    fn predict_with_errors(&self, prompt: &[u32], phase: Phase) -> Result<Prediction<'_>, PredictError> {
        self.tuning(phase).prediction(&self.parts(prompt, phase)?)
    }

    /// Errors of `method` about a phase of held-out prompts, where the history was long enough.
    fn errors_of(&self, method: Method, phase: Phase) -> Option<&ErrorBars> {
        self.tuning(phase).errors_of(method)
    }
}

/// One method's prediction from those of all parts.
pub(crate) fn of_parts(
    method: Method,
    mixture: &Mixture,
    parts: &[Shares; 3],
) -> Result<Shares, PredictError> {
    let [dop, sps, tokens] = parts;
    match method {
        Method::Dop => Ok(dop.clone()),
        Method::Sps => Ok(sps.clone()),
        Method::Tokens => Ok(tokens.clone()),
        Method::Blend => mixture.combine(parts),
    }
}

/// How far the two parts that look at the prompt are apart.
fn disagreement([_, sps, tokens]: &[Shares; 3]) -> f64 {
    divergence::mean(sps, tokens)
}

impl Tuning {
    /// Where the history is too short to tune anything.
    pub(crate) fn unknown(layers: usize) -> Self {
        Self {
            temperature: DEFAULT_TEMPERATURE,
            rounds: DEFAULT_ROUNDS,
            mixture: Mixture::equal(layers, 3),
            default: Method::Sps,
            errors: Vec::new(),
            classes: Vec::new(),
        }
    }

    /// The default method's prediction from those of its parts.
    pub(crate) fn prediction(&self, parts: &[Shares; 3]) -> Result<Prediction<'_>, PredictError> {
        let shares = of_parts(self.default, &self.mixture, parts)?;
        let apart = disagreement(parts);
        let class = self.classes.iter().find(|class| apart <= class.disagreement).or(self.classes.last());
        let errors = class.map(|class| &class.errors).or_else(|| self.errors_of(self.default));
        Ok(Prediction { shares, errors, disagreement: apart })
    }

    pub(crate) fn errors_of(&self, method: Method) -> Option<&ErrorBars> {
        self.errors.iter().find(|(known, _)| *known == method).map(|(_, bars)| bars)
    }

    /// Refuses values that no fit gives.
    pub(crate) fn check(&self, layers: usize) -> Result<(), PredictError> {
        if !(self.temperature > 0.0 && self.temperature.is_finite()) {
            return Err(PredictError::Saved(format!("invalid temperature {}", self.temperature)));
        }
        PredictError::require_size("the mixture", layers, self.mixture.weights().len())
    }
}

/// Prompts that nothing is fitted to, each with its true shares of a phase.
pub(crate) type Cases<'a> = Vec<(&'a [u32], Shares)>;

/// Held-out prompts of a history.
pub(crate) struct HeldOut<'a> {
    /// Prompts that choose temperatures, rounds and weights.
    pub(crate) tune: ByPhase<Cases<'a>>,
    /// Prompts that measure errors, and nothing else sees.
    check: ByPhase<Cases<'a>>,
    layers: usize,
    has_decode: bool,
}

impl<'a> HeldOut<'a> {
    /// `tune` and `check` are no part of `history`.
    pub(crate) fn of(
        history: &History,
        tune: &'a [ActivationRecord],
        check: &'a [ActivationRecord],
    ) -> Result<Self, PredictError> {
        Ok(Self {
            tune: ByPhase::try_each(|phase| with_truths(history, tune, phase))?,
            check: ByPhase::try_each(|phase| with_truths(history, check, phase))?,
            layers: history.layers(),
            has_decode: history.has_decode(),
        })
    }

    /// Fits the weights of `parts` and measures their errors, each phase by itself.
    pub(crate) fn tuned(
        &self,
        parts: impl Fn(&[u32], Phase) -> Result<[Shares; 3], PredictError> + Sync,
        temperature: ByPhase<f32>,
        rounds: ByPhase<usize>,
    ) -> Result<ByPhase<Tuning>, PredictError> {
        let mut tuning = ByPhase::try_each(|phase| {
            let cases = self.tune.of(phase).par_iter();
            let cases: Vec<_> = cases
                .map(|(prompt, truth)| Ok((parts(prompt, phase)?, truth.clone())))
                .collect::<Result<_, PredictError>>()?;
            let mixture = Mixture::fit(self.layers, &cases);
            let check = self.check.of(phase);
            let predicted: Vec<_> = check
                .par_iter()
                .map(|(prompt, _)| parts(prompt, phase))
                .collect::<Result<_, PredictError>>()?;
            let truths: Vec<Shares> = check.iter().map(|(_, truth)| truth.clone()).collect();
            let of_method = |method| {
                predicted.iter().map(|parts| of_parts(method, &mixture, parts)).collect::<Result<Vec<_>, _>>()
            };
            let measured =
                Method::ALL.map(|method| Ok((method, ErrorBars::of(&of_method(method)?, &truths))));
            let errors = measured.into_iter().collect::<Result<Vec<_>, PredictError>>()?;
            let best = errors.iter().min_by(|a, b| a.1.js_mean.total_cmp(&b.1.js_mean));
            let default = best.map_or(Method::Sps, |(method, _)| *method);
            if truths.is_empty() {
                return Ok(Tuning::unknown(self.layers));
            }
            let cases = predicted.iter().map(disagreement).zip(of_method(default)?).zip(truths);
            let cases = cases.map(|((apart, prediction), truth)| (apart, prediction, truth)).collect();
            let classes = error_classes(cases, CLASSES);
            let (temperature, rounds) = (*temperature.of(phase), *rounds.of(phase));
            Ok::<_, PredictError>(Tuning { temperature, rounds, mixture, default, errors, classes })
        })?;
        if !self.has_decode {
            // The prefill's shares stand for the decode steps; how far off they are there is not known.
            tuning.decode = Tuning { errors: Vec::new(), classes: Vec::new(), ..tuning.prefill.clone() };
        }
        Ok(tuning)
    }
}

/// Records with what was true of a phase; those without any are left out.
fn with_truths<'a>(
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

/// The token table of a phase after the number of rounds that predicts the held-out prompts best, and that
/// number.
pub(crate) fn best_table(
    embedding: &Embedding,
    history: &History,
    phase: Phase,
    held_out: &[(&[u32], Shares)],
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
        let error = |(prompt, truth): &(&[u32], Shares)| {
            Ok::<_, PredictError>(divergence::mean(&table.predict(prompt)?, truth))
        };
        let errors = held_out.par_iter().map(error).collect::<Result<Vec<_>, _>>()?;
        let sum: f64 = errors.iter().sum();
        if sum < best.0 {
            best = (sum, table, round);
        } else if round - best.2 >= PATIENCE {
            break;
        }
    }
    Ok((best.1, best.2))
}
