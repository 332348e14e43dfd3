//! From records to a predictor: what is fitted, on which part of the history, and what becomes the default.
//!
//! Four fifths of the history fit the parts, one tenth tunes them (temperature, rounds of the token table,
//! weights of the mixture), one tenth, which nothing has seen, chooses the default and measures its
//! errors. Then all parts are fitted again to the whole history, with what was tuned. Prefill and decode are
//! tuned and measured apart: their work spreads differently.

use crate::divergence;
use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::error_bars::{ErrorBars, ErrorClass, error_classes};
use crate::history::History;
use crate::mixture::Mixture;
use crate::phase::{ByPhase, Phase};
use crate::predictor::{Popularity, Predictor};
use crate::random::Random;
use crate::record::{ActivationRecord, RecordHeader};
use crate::shares::Shares;
use crate::sps::SimilarPrompts;
use crate::tokens::{DEFAULT_ROUNDS, MAX_ROUNDS, TokenFit, TokenTable};
use crate::tree::{Clustering, TreeOptions};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// One prompt in so many tunes, and one in so many checks.
pub(crate) const HELD_OUT: usize = 10;
/// Shorter histories are not divided: a tenth of them says nothing.
const LEAST_DIVIDED: usize = 100;
/// Temperature where nothing could be fitted: similarities of prompts differ by some hundredths.
pub(crate) const DEFAULT_TEMPERATURE: f32 = 0.03;
/// Classes of disagreement that errors of the default method are kept for.
const CLASSES: usize = 3;
/// Rounds without progress after which a fit of token tables is given up.
const PATIENCE: usize = 5;

/// What a fit goes through, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FitStage {
    /// The sums of the four fifths that the parts are fitted to.
    Divided,
    /// Token tables, as many rounds as held-out prompts ask for.
    Tables,
    /// The tree of similar prompts, and temperatures.
    Temperatures,
    /// Weights of the mixture, and errors on prompts that nothing has seen.
    Mixture,
    /// All parts again, from the whole history.
    Whole,
}

impl FitStage {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Divided, Self::Tables, Self::Temperatures, Self::Mixture, Self::Whole];

    /// In words.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Divided => "splitting the training history",
            Self::Tables => "fitting token tables",
            Self::Temperatures => "fitting similar prompts",
            Self::Mixture => "weighing the methods and measuring their errors",
            Self::Whole => "fitting to the whole training history",
        }
    }
}

/// The predictors that a trained one can answer with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// The mean of the history.
    Dop,
    /// Similar past prompts, with the fitted temperature.
    Sps,
    /// The token table.
    Tokens,
    /// The mixture of the three.
    Blend,
}

impl Method {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Dop, Self::Sps, Self::Tokens, Self::Blend];

    /// Its name in tables and files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dop => "dop",
            Self::Sps => "sps",
            Self::Tokens => "tokens",
            Self::Blend => "blend",
        }
    }
}

/// How a predictor is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainingOptions {
    /// Past prompts per prediction.
    pub alpha: usize,
    /// The tree.
    pub tree: TreeOptions,
}

impl Default for TrainingOptions {
    fn default() -> Self {
        Self { alpha: 15, tree: TreeOptions::default() }
    }
}

/// What was tuned for a phase on held-out prompts of the history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tuning {
    /// Temperature of SPS.
    pub temperature: f32,
    /// Rounds of the token table.
    pub rounds: usize,
    /// Weights of dop, sps and tokens in the blend.
    pub mixture: Mixture,
    /// Which method answers.
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

/// The parts that methods are made of.
#[derive(Debug, Clone)]
pub(crate) struct Parts {
    pub(crate) popularity: Popularity,
    pub(crate) sps: SimilarPrompts,
    pub(crate) tokens: ByPhase<TokenTable>,
}

/// A predictor for one model, fitted to its history.
#[derive(Debug, Clone)]
pub struct Trained {
    pub(crate) header: RecordHeader,
    pub(crate) parts: Parts,
    pub(crate) tuning: ByPhase<Tuning>,
}

impl Parts {
    /// SPS and popularity; the token table comes as it has been fitted.
    fn of(
        embedding: &Embedding,
        history: &History,
        options: TrainingOptions,
        temperature: ByPhase<f32>,
        tokens: ByPhase<TokenTable>,
    ) -> Result<Self, PredictError> {
        let popularity = Popularity::of(history)?;
        let (clustering, TrainingOptions { alpha, tree }) = (Clustering::Centred, options);
        let sps = SimilarPrompts::with_tree("sps", embedding.clone(), history, clustering, tree, alpha)?;
        Ok(Self { popularity, sps: sps.tempered("sps", temperature), tokens })
    }

    /// dop, sps and tokens, in the order of the mixture's weights.
    fn all(&self, prompt: &[u32], phase: Phase) -> Result<[Shares; 3], PredictError> {
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

/// One method's prediction from those of all parts.
fn of_parts(method: Method, mixture: &Mixture, parts: &[Shares; 3]) -> Result<Shares, PredictError> {
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

impl Trained {
    /// Fits everything to `records` of the model that `header` names.
    ///
    /// # Errors
    /// There is no record, a record does not belong to the model, or an option cannot be.
    pub fn fit(
        header: RecordHeader,
        records: &[ActivationRecord],
        embedding: &Embedding,
        options: TrainingOptions,
    ) -> Result<Self, PredictError> {
        Self::fit_in_stages(header, records, embedding, options, &mut |_| ())
    }

    /// The same; `begun` is told of each stage as it begins. Short histories go straight to
    /// [`FitStage::Whole`].
    ///
    /// # Errors
    /// As [`Self::fit`].
    pub fn fit_in_stages(
        header: RecordHeader,
        records: &[ActivationRecord],
        embedding: &Embedding,
        options: TrainingOptions,
        begun: &mut dyn FnMut(FitStage),
    ) -> Result<Self, PredictError> {
        options.tree.check(options.alpha)?;
        let (layers, experts) = (header.layers.len(), header.experts as usize);
        let history = |records: &[ActivationRecord]| History::of(embedding, layers, experts, records);
        let tuning = if records.len() < LEAST_DIVIDED {
            ByPhase::both(Tuning::unknown(layers))
        } else {
            let order = Random::new(options.tree.seed).sample(records.len(), records.len());
            let chosen = |range: &[u32]| -> Vec<ActivationRecord> {
                range.iter().filter_map(|&index| records.get(index as usize).cloned()).collect()
            };
            let (check, rest) = order.split_at(records.len() / HELD_OUT);
            let (tune, fit) = rest.split_at(records.len() / HELD_OUT);
            begun(FitStage::Divided);
            let divided = (history(&chosen(fit))?, chosen(tune), chosen(check));
            tune_and_check(embedding, &divided.0, &divided.1, &divided.2, options, begun)?
        };
        begun(FitStage::Whole);
        let history = history(records)?;
        let table = |phase| TokenTable::fit(embedding, &history, phase, tuning.of(phase).rounds);
        let temperature = ByPhase { prefill: tuning.prefill.temperature, decode: tuning.decode.temperature };
        let parts = Parts::of(embedding, &history, options, temperature, ByPhase::try_each(table)?)?;
        Ok(Self { header, parts, tuning })
    }

    /// Model and form of the records it was fitted to.
    #[must_use]
    pub fn header(&self) -> &RecordHeader {
        &self.header
    }

    /// What was tuned and measured for a phase.
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

    /// What each part weighs in the default method's answers about a phase, averaged over layers.
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
        let Tuning { default, mixture, classes, .. } = self.tuning.of(phase);
        let parts = self.parts.all(prompt, phase)?;
        let shares = of_parts(*default, mixture, &parts)?;
        let apart = disagreement(&parts);
        let class = classes.iter().find(|class| apart <= class.disagreement).or(classes.last());
        let errors = class.map(|class| &class.errors).or_else(|| self.errors_of(*default, phase));
        Ok(Prediction { shares, errors, disagreement: apart })
    }

    /// Errors of `method` about a phase of held-out prompts, where the history was long enough.
    #[must_use]
    pub fn errors_of(&self, method: Method, phase: Phase) -> Option<&ErrorBars> {
        self.tuning.of(phase).errors.iter().find(|(known, _)| *known == method).map(|(_, bars)| bars)
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
        let Parts { popularity, sps, tokens } = &self.trained.parts;
        match self.method {
            Method::Dop => popularity.bytes(),
            Method::Sps => sps.bytes(),
            Method::Tokens => tokens.bytes(),
            Method::Blend => popularity.bytes() + sps.bytes() + tokens.bytes(),
        }
    }
}

impl Tuning {
    /// Where the history is too short to tune anything.
    fn unknown(layers: usize) -> Self {
        Self {
            temperature: DEFAULT_TEMPERATURE,
            rounds: DEFAULT_ROUNDS,
            mixture: Mixture::equal(layers, 3),
            default: Method::Sps,
            errors: Vec::new(),
            classes: Vec::new(),
        }
    }
}

/// Records with what was true of a phase; those without any are left out.
fn with_truths<'a>(
    history: &History,
    records: &'a [ActivationRecord],
    phase: Phase,
) -> Result<Vec<(&'a [u32], Shares)>, PredictError> {
    let with_truth = |record: &'a ActivationRecord| {
        let truth = history.shares_of(record, phase);
        truth.map(|truth| Some((&record.prompt[..], truth?))).transpose()
    };
    records.iter().filter_map(with_truth).collect()
}

/// Fits the parts to `history`, tunes them on `tune`, measures them on `check`, each phase by itself.
fn tune_and_check(
    embedding: &Embedding,
    history: &History,
    tune: &[ActivationRecord],
    check: &[ActivationRecord],
    options: TrainingOptions,
    begun: &mut dyn FnMut(FitStage),
) -> Result<ByPhase<Tuning>, PredictError> {
    let held_out = ByPhase::try_each(|phase| with_truths(history, tune, phase))?;
    begun(FitStage::Tables);
    let tables = ByPhase::try_each(|phase| best_table(embedding, history, phase, held_out.of(phase)))?;
    let rounds = ByPhase { prefill: tables.prefill.1, decode: tables.decode.1 };
    let tokens = ByPhase { prefill: tables.prefill.0, decode: tables.decode.0 };
    let mut parts = Parts::of(embedding, history, options, ByPhase::both(DEFAULT_TEMPERATURE), tokens)?;
    begun(FitStage::Temperatures);
    for phase in Phase::ALL {
        parts.sps.fit_temperature(tune, phase)?;
    }
    begun(FitStage::Mixture);
    let mut tuning = ByPhase::try_each(|phase| {
        let cases = held_out.of(phase).par_iter();
        let cases: Vec<_> = cases
            .map(|(prompt, truth)| Ok((parts.all(prompt, phase)?, truth.clone())))
            .collect::<Result<_, PredictError>>()?;
        let mixture = Mixture::fit(history.layers(), &cases);
        let check = with_truths(history, check, phase)?;
        let predicted: Vec<_> = check
            .par_iter()
            .map(|(prompt, _)| parts.all(prompt, phase))
            .collect::<Result<_, PredictError>>()?;
        let truths: Vec<Shares> = check.into_iter().map(|(_, truth)| truth).collect();
        let of_method = |method| {
            predicted.iter().map(|parts| of_parts(method, &mixture, parts)).collect::<Result<Vec<_>, _>>()
        };
        let measured = Method::ALL.map(|method| Ok((method, ErrorBars::of(&of_method(method)?, &truths))));
        let errors = measured.into_iter().collect::<Result<Vec<_>, PredictError>>()?;
        let best = errors.iter().min_by(|a, b| a.1.js_mean.total_cmp(&b.1.js_mean));
        let default = best.map_or(Method::Sps, |(method, _)| *method);
        if truths.is_empty() {
            return Ok(Tuning::unknown(history.layers()));
        }
        let cases = predicted.iter().map(disagreement).zip(of_method(default)?).zip(truths);
        let cases = cases.map(|((apart, prediction), truth)| (apart, prediction, truth)).collect();
        let classes = error_classes(cases, CLASSES);
        let (temperature, rounds) = (*parts.sps.temperature().of(phase), *rounds.of(phase));
        Ok(Tuning { temperature, rounds, mixture, default, errors, classes })
    })?;
    if !history.has_decode() {
        // The prefill's shares stand for the decode steps; how far off they are there is not known.
        tuning.decode = Tuning { errors: Vec::new(), classes: Vec::new(), ..tuning.prefill.clone() };
    }
    Ok(tuning)
}

/// The token table of a phase after the number of rounds that predicts the held-out prompts best, and that
/// number.
fn best_table(
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
