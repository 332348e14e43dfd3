//! From records to a predictor: what is fitted, on which part of the history, and what becomes the default.
//!
//! Four fifths of the history fit the parts, one tenth tunes them (temperature, rounds of the token table,
//! weights of the mixture), one tenth, which nothing has seen, chooses the default and measures its
//! errors. Then all parts are fitted again to the whole history, with what was tuned. Prefill and decode are
//! tuned and measured apart: their work spreads differently.

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::error_bars::ErrorBars;
use crate::history::History;
use crate::mixture::Mixture;
use crate::phase::{ByPhase, Phase};
use crate::portable::{Portable, Reduced};
use crate::predictor::{Popularity, Predictor};
use crate::random::Random;
use crate::record::{ActivationRecord, RecordHeader};
use crate::shares::Shares;
use crate::sps::SimilarPrompts;
use crate::tokens::TokenTable;
use crate::tree::{Clustering, TreeOptions};
use crate::tuning::{DEFAULT_TEMPERATURE, HeldOut, Prediction, TunedPredictor, Tuning, best_table};
use serde::{Deserialize, Serialize};

/// One prompt in so many tunes, and one in so many checks.
pub(crate) const HELD_OUT: usize = 10;
/// Shorter histories are not divided: a tenth of them says nothing.
const LEAST_DIVIDED: usize = 100;

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
        let (trained, _) = fit(header, records, embedding, None, options, begun)?;
        Ok(trained)
    }

    /// As [`Self::fit_in_stages`], with the predictor that gateways get beside it: the same parts over `sketch`, a sketch
    /// of `embedding`, tuned and measured on the same held-out prompts.
    ///
    /// # Errors
    /// As [`Self::fit`]; or `sketch` has another vocabulary.
    pub fn fit_with_portable(
        header: RecordHeader,
        records: &[ActivationRecord],
        (embedding, sketch): (&Embedding, &Embedding),
        options: TrainingOptions,
        begun: &mut dyn FnMut(FitStage),
    ) -> Result<(Self, Portable), PredictError> {
        let (trained, tuning) = fit(header, records, embedding, Some(sketch), options, begun)?;
        let portable = Portable::with_tuning(&trained, embedding, sketch, tuning)?;
        Ok((trained, portable))
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
        let Parts { popularity, sps, tokens } = &self.trained.parts;
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

/// Fits and tunes everything; the second tuning is that of the parts over `sketch`, where there is one.
fn fit(
    header: RecordHeader,
    records: &[ActivationRecord],
    embedding: &Embedding,
    sketch: Option<&Embedding>,
    options: TrainingOptions,
    begun: &mut dyn FnMut(FitStage),
) -> Result<(Trained, ByPhase<Tuning>), PredictError> {
    options.tree.check(options.alpha)?;
    let (layers, experts) = (header.layers.len(), header.experts as usize);
    let history = |records: &[ActivationRecord]| History::of(embedding, layers, experts, records);
    let (tuning, portable) = if records.len() < LEAST_DIVIDED {
        let unknown = ByPhase::both(Tuning::unknown(layers));
        (unknown.clone(), unknown)
    } else {
        let order = Random::new(options.tree.seed).sample(records.len(), records.len());
        let chosen = |range: &[u32]| -> Vec<ActivationRecord> {
            range.iter().filter_map(|&index| records.get(index as usize).cloned()).collect()
        };
        let (check, rest) = order.split_at(records.len() / HELD_OUT);
        let (tune, fit) = rest.split_at(records.len() / HELD_OUT);
        begun(FitStage::Divided);
        let (tune, check) = (chosen(tune), chosen(check));
        let history = history(&chosen(fit))?;
        let held_out = HeldOut::of(&history, &tune, &check)?;
        tune_and_check((embedding, sketch), &history, &tune, &held_out, options, begun)?
    };
    begun(FitStage::Whole);
    let history = history(records)?;
    let table = |phase| TokenTable::fit(embedding, &history, phase, tuning.of(phase).rounds);
    let temperature = ByPhase { prefill: tuning.prefill.temperature, decode: tuning.decode.temperature };
    let parts = Parts::of(embedding, &history, options, temperature, ByPhase::try_each(table)?)?;
    Ok((Trained { header, parts, tuning }, portable))
}

/// Fits the parts to `history`, and tunes and measures them on what is held out, each phase by itself.
fn tune_and_check(
    (embedding, sketch): (&Embedding, Option<&Embedding>),
    history: &History,
    tune: &[ActivationRecord],
    held_out: &HeldOut<'_>,
    options: TrainingOptions,
    begun: &mut dyn FnMut(FitStage),
) -> Result<(ByPhase<Tuning>, ByPhase<Tuning>), PredictError> {
    begun(FitStage::Tables);
    let tables = ByPhase::try_each(|phase| best_table(embedding, history, phase, held_out.tune.of(phase)))?;
    let rounds = ByPhase { prefill: tables.prefill.1, decode: tables.decode.1 };
    let tokens = ByPhase { prefill: tables.prefill.0, decode: tables.decode.0 };
    let mut parts = Parts::of(embedding, history, options, ByPhase::both(DEFAULT_TEMPERATURE), tokens)?;
    begun(FitStage::Temperatures);
    for phase in Phase::ALL {
        parts.sps.fit_temperature(tune, phase)?;
    }
    begun(FitStage::Mixture);
    let whole = held_out.tuned(|prompt, phase| parts.all(prompt, phase), parts.sps.temperature(), rounds)?;
    let Some(sketch) = sketch else { return Ok((whole.clone(), whole)) };
    let mut reduced = Reduced::of(&parts, embedding, sketch)?;
    reduced.fit_temperatures(&held_out.tune)?;
    let portable =
        held_out.tuned(|prompt, phase| reduced.all(prompt, phase), reduced.temperature(), rounds)?;
    Ok((whole, portable))
}
