//! From records to a predictor: what is fitted, on which part of the history, and what becomes the default.
//!
//! Four fifths of the history fit the parts, one tenth tunes them (temperature, rounds of the token table,
//! weights of the mixture), one tenth, which nothing has seen, chooses the default and measures its
//! errors. Then all parts are fitted again to the whole history, with what was tuned.

use crate::divergence;
use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::error_bars::ErrorBars;
use crate::history::History;
use crate::mixture::Mixture;
use crate::predictor::{Popularity, Predictor};
use crate::random::Random;
use crate::record::{ActivationRecord, RecordHeader};
use crate::shares::Shares;
use crate::similar::SimilarPrompts;
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
/// Rounds without progress after which a fit of token tables is given up.
const PATIENCE: usize = 5;

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

/// What was tuned on held-out prompts of the history.
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
}

/// A prediction with what is known about its error.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction<'a> {
    /// The predicted shares.
    pub shares: Shares,
    /// Errors of this method on held-out prompts, where the history was long enough.
    pub errors: Option<&'a ErrorBars>,
}

/// The parts that methods are made of.
#[derive(Debug, Clone)]
pub(crate) struct Parts {
    pub(crate) popularity: Popularity,
    pub(crate) sps: SimilarPrompts,
    pub(crate) tokens: TokenTable,
}

/// A predictor for one model, fitted to its history.
#[derive(Debug, Clone)]
pub struct Trained {
    pub(crate) header: RecordHeader,
    pub(crate) parts: Parts,
    pub(crate) tuning: Tuning,
}

impl Parts {
    /// SPS and popularity; the token table comes as it has been fitted.
    fn of(
        embedding: &Embedding,
        history: &History,
        options: TrainingOptions,
        temperature: f32,
        tokens: TokenTable,
    ) -> Result<Self, PredictError> {
        let popularity = Popularity::of(history)?;
        let (clustering, TrainingOptions { alpha, tree }) = (Clustering::Centred, options);
        let sps = SimilarPrompts::with_tree("sps", embedding.clone(), history, clustering, tree, alpha)?;
        Ok(Self { popularity, sps: sps.tempered("sps", temperature), tokens })
    }

    /// dop, sps and tokens, in the order of the mixture's weights.
    fn all(&self, prompt: &[u32]) -> Result<Vec<Shares>, PredictError> {
        Ok(vec![self.popularity.predict(prompt)?, self.sps.predict(prompt)?, self.tokens.predict(prompt)?])
    }

    fn predict(&self, method: Method, mixture: &Mixture, prompt: &[u32]) -> Result<Shares, PredictError> {
        match method {
            Method::Dop => self.popularity.predict(prompt),
            Method::Sps => self.sps.predict(prompt),
            Method::Tokens => self.tokens.predict(prompt),
            Method::Blend => mixture.combine(&self.all(prompt)?),
        }
    }
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
        options.tree.check(options.alpha)?;
        let (layers, experts) = (header.layers.len(), header.experts as usize);
        let history = |records: &[ActivationRecord]| History::of(embedding, layers, experts, records);
        let tuning = if records.len() < LEAST_DIVIDED {
            Tuning {
                temperature: DEFAULT_TEMPERATURE,
                rounds: DEFAULT_ROUNDS,
                mixture: Mixture::equal(layers, 3),
                default: Method::Sps,
                errors: Vec::new(),
            }
        } else {
            let order = Random::new(options.tree.seed).sample(records.len(), records.len());
            let chosen = |range: &[u32]| -> Vec<ActivationRecord> {
                range.iter().filter_map(|&index| records.get(index as usize).cloned()).collect()
            };
            let (check, rest) = order.split_at(records.len() / HELD_OUT);
            let (tune, fit) = rest.split_at(records.len() / HELD_OUT);
            tune_and_check(embedding, &history(&chosen(fit))?, &chosen(tune), &chosen(check), options)?
        };
        let history = history(records)?;
        let tokens = TokenTable::fit(embedding, &history, tuning.rounds)?;
        let parts = Parts::of(embedding, &history, options, tuning.temperature, tokens)?;
        Ok(Self { header, parts, tuning })
    }

    /// Model and form of the records it was fitted to.
    #[must_use]
    pub fn header(&self) -> &RecordHeader {
        &self.header
    }

    /// What was tuned and measured.
    #[must_use]
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// The part that leans on similar prompts.
    #[must_use]
    pub fn sps(&self) -> &SimilarPrompts {
        &self.parts.sps
    }

    /// The part that goes by token ids.
    #[must_use]
    pub fn tokens(&self) -> &TokenTable {
        &self.parts.tokens
    }

    /// The mean of the history.
    #[must_use]
    pub fn popularity(&self) -> &Popularity {
        &self.parts.popularity
    }

    /// What each part weighs in the default method's answers, averaged over layers.
    #[must_use]
    pub fn part_weights(&self) -> Vec<(Method, f64)> {
        let default = self.tuning.default;
        if default != Method::Blend {
            return vec![(default, 1.0)];
        }
        let weights = self.tuning.mixture.weights();
        let mean = |part: usize| {
            let of_layers = weights.iter().filter_map(|layer| layer.get(part));
            of_layers.map(|weight| f64::from(*weight)).sum::<f64>() / weights.len().max(1) as f64
        };
        [Method::Dop, Method::Sps, Method::Tokens].into_iter().zip((0..).map(mean)).collect()
    }

    /// The default method's prediction with its error bar.
    ///
    /// # Errors
    /// The prompt is empty or has a token that the model does not have.
    pub fn predict_with_errors(&self, prompt: &[u32]) -> Result<Prediction<'_>, PredictError> {
        let shares = self.method(self.tuning.default).predict(prompt)?;
        Ok(Prediction { shares, errors: self.errors_of(self.tuning.default) })
    }

    /// Errors of `method` on held-out prompts, where the history was long enough.
    #[must_use]
    pub fn errors_of(&self, method: Method) -> Option<&ErrorBars> {
        self.tuning.errors.iter().find(|(known, _)| *known == method).map(|(_, bars)| bars)
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

    fn predict(&self, prompt: &[u32]) -> Result<Shares, PredictError> {
        self.trained.parts.predict(self.method, &self.trained.tuning.mixture, prompt)
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

/// Fits the parts to `history`, tunes them on `tune`, measures them on `check`.
fn tune_and_check(
    embedding: &Embedding,
    history: &History,
    tune: &[ActivationRecord],
    check: &[ActivationRecord],
    options: TrainingOptions,
) -> Result<Tuning, PredictError> {
    let truths_of = |records: &[ActivationRecord]| {
        records.iter().map(|record| history.shares_of(record)).collect::<Result<Vec<_>, _>>()
    };
    let (tune_truths, check_truths) = (truths_of(tune)?, truths_of(check)?);
    let (tokens, rounds) = best_table(embedding, history, tune, &tune_truths)?;
    let mut parts = Parts::of(embedding, history, options, DEFAULT_TEMPERATURE, tokens)?;
    parts.sps.fit_temperature(tune)?;
    let predictions: Vec<Vec<Shares>> =
        tune.par_iter().map(|record| parts.all(&record.prompt)).collect::<Result<_, _>>()?;
    let cases: Vec<(Vec<Shares>, Shares)> = predictions.into_iter().zip(tune_truths).collect();
    let mixture = Mixture::fit(history.layers(), 3, &cases);
    let measure = |method| {
        let predict = |record: &ActivationRecord| parts.predict(method, &mixture, &record.prompt);
        let predictions = check.par_iter().map(predict).collect::<Result<Vec<_>, _>>()?;
        Ok((method, ErrorBars::of(&predictions, &check_truths)))
    };
    let errors = Method::ALL.map(measure).into_iter().collect::<Result<Vec<_>, PredictError>>()?;
    let best = errors.iter().min_by(|a, b| a.1.js_mean.total_cmp(&b.1.js_mean));
    let default = best.map_or(Method::Sps, |(method, _)| *method);
    Ok(Tuning { temperature: parts.sps.temperature(), rounds, mixture, default, errors })
}

/// The token table after the number of rounds that predicts `tune` best, and that number.
fn best_table(
    embedding: &Embedding,
    history: &History,
    tune: &[ActivationRecord],
    truths: &[Shares],
) -> Result<(TokenTable, usize), PredictError> {
    let mut fit = TokenFit::new(embedding, history)?;
    let mut best = (f64::INFINITY, fit.table(), 0);
    for round in 1..=MAX_ROUNDS {
        fit.advance();
        let table = fit.table();
        let error = |(record, truth): (&ActivationRecord, &Shares)| {
            Ok::<_, PredictError>(divergence::mean(&table.predict(&record.prompt)?, truth))
        };
        let errors = tune.par_iter().zip(truths).map(error).collect::<Result<Vec<_>, _>>()?;
        let sum: f64 = errors.iter().sum();
        if sum < best.0 {
            best = (sum, table, round);
        } else if round - best.2 >= PATIENCE {
            break;
        }
    }
    Ok((best.1, best.2))
}
