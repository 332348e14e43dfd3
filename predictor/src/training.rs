//! From records to a predictor: what is fitted, on which part of the history, and what becomes the default.
//!
//! Four fifths of the history fit the parts, one tenth tunes them (temperature, rounds of the token table,
//! weights of the mixture), one tenth, which nothing has seen, chooses the default and measures its
//! errors. Then all parts are fitted again to the whole history, with what was tuned. Prefill and decode are
//! tuned and measured apart: their work spreads differently.

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::history::History;
use crate::phase::{ByPhase, Phase};
use crate::portable::{Portable, Reduced};
use crate::predictor::Popularity;
use crate::random::Random;
use crate::record::{ActivationRecord, RecordHeader};
use crate::sps::SimilarPrompts;
use crate::tokens::TokenTable;
use crate::trained::{PredictorParts, Trained};
use crate::tree::{Clustering, TreeOptions};
use crate::tuning::{DEFAULT_TEMPERATURE, HeldOut, Tuning, best_table};

/// One prompt in so many tunes, and one in so many checks.
pub(crate) const HELD_OUT: usize = 10;
/// Shorter histories are not divided: a tenth of them says nothing.
const LEAST_DIVIDED: usize = 100;

/// Stages of a fit, in this order.
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

    /// As [`Self::fit`]; `begun` is called with each stage as it begins. Short histories go straight to
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

    /// As [`Self::fit_in_stages`], with the predictor that gateways get beside it: the same parts over `sketch`, a
    /// sketch of `embedding`, tuned and measured on the same held-out prompts.
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
    let parts = parts(embedding, &history, options, temperature, ByPhase::try_each(table)?)?;
    Ok((Trained { header, parts, tuning }, portable))
}

/// Fits popularity and SPS to `history`; `tokens` are fitted already.
fn parts(
    embedding: &Embedding,
    history: &History,
    options: TrainingOptions,
    temperature: ByPhase<f32>,
    tokens: ByPhase<TokenTable>,
) -> Result<PredictorParts, PredictError> {
    let popularity = Popularity::of(history)?;
    let (clustering, TrainingOptions { alpha, tree }) = (Clustering::Centred, options);
    let sps = SimilarPrompts::with_tree("sps", embedding.clone(), history, clustering, tree, alpha)?;
    Ok(PredictorParts { popularity, sps: sps.tempered("sps", temperature), tokens })
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
    let mut parts = parts(embedding, history, options, ByPhase::both(DEFAULT_TEMPERATURE), tokens)?;
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
