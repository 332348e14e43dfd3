//! Training of a predictor: fits, tunes and measures all methods on a training history.
//!
//! Four fifths of the history fit the parts. One tenth tunes the temperature, the rounds of the token table and the
//! weights of the mixture. The last tenth, unseen until then, chooses the default method and measures its errors.
//! Then all parts are fitted again to the whole history with the tuned parameters. Prefill and decode are tuned and
//! measured separately: their work spreads differently over the experts.

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::history::History;
use crate::phase::{ByPhase, Phase};
use crate::portable::{PortablePredictor, ReducedParts};
use crate::predictor::Popularity;
use crate::random::Random;
use crate::record::{ActivationRecord, RecordHeader};
use crate::sps::SimilarPrompts;
use crate::tokens::TokenTable;
use crate::trained::{PredictorParts, TrainedPredictor};
use crate::tree::{Clustering, TreeOptions};
use crate::tuning::{DEFAULT_TEMPERATURE, HeldOut, Tuning, best_table};

/// Fraction of the prompts that tune, and that measure: one in this many each.
pub(crate) const HELD_OUT: usize = 10;
/// Shortest history that is split: a tenth of a shorter one says too little.
const MIN_SPLIT_RECORDS: usize = 100;

/// Stages of training, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FitStage {
    /// Splits the history and computes the shares of the fitting part.
    Divided,
    /// Fits token tables, with the number of rounds by held-out prompts.
    Tables,
    /// Builds the tree of similar prompts and fits temperatures.
    Temperatures,
    /// Fits the weights of the mixture and measures errors on unseen prompts.
    Mixture,
    /// Fits all parts again to the whole history.
    Whole,
}

impl FitStage {
    /// All stages, in order.
    pub const ALL: [Self; 5] = [Self::Divided, Self::Tables, Self::Temperatures, Self::Mixture, Self::Whole];

    /// Returns a description for progress messages.
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

/// Options of training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainingOptions {
    /// Number of similar prompts per prediction.
    pub alpha: usize,
    /// Options of the search tree.
    pub tree: TreeOptions,
}

impl Default for TrainingOptions {
    fn default() -> Self {
        Self { alpha: 15, tree: TreeOptions::default() }
    }
}

impl TrainedPredictor {
    /// Trains a predictor on `records` of the model of `header`.
    ///
    /// # Errors
    /// There is no record, a record has another shape than the model, or an option is invalid.
    pub fn fit(
        header: RecordHeader,
        records: &[ActivationRecord],
        embedding: &Embedding,
        options: TrainingOptions,
    ) -> Result<Self, PredictError> {
        Self::fit_in_stages(header, records, embedding, options, &mut |_| ())
    }

    /// Trains a predictor as [`Self::fit`] does and calls `on_stage` at the start of each stage. Short histories go
    /// straight to [`FitStage::Whole`].
    ///
    /// # Errors
    /// As [`Self::fit`].
    pub fn fit_in_stages(
        header: RecordHeader,
        records: &[ActivationRecord],
        embedding: &Embedding,
        options: TrainingOptions,
        on_stage: &mut dyn FnMut(FitStage),
    ) -> Result<Self, PredictError> {
        let (trained, _) = fit(header, records, embedding, None, options, on_stage)?;
        Ok(trained)
    }

    /// Trains a predictor and its portable form: the same parts over `sketch`, a sketch of `embedding`, tuned and
    /// measured on the same held-out prompts.
    ///
    /// # Errors
    /// As [`Self::fit`], or `sketch` has another vocabulary.
    pub fn fit_with_portable(
        header: RecordHeader,
        records: &[ActivationRecord],
        (embedding, sketch): (&Embedding, &Embedding),
        options: TrainingOptions,
        on_stage: &mut dyn FnMut(FitStage),
    ) -> Result<(Self, PortablePredictor), PredictError> {
        let (trained, tuning) = fit(header, records, embedding, Some(sketch), options, on_stage)?;
        let portable = PortablePredictor::with_tuning(&trained, embedding, sketch, tuning)?;
        Ok((trained, portable))
    }
}

/// Fits and tunes all parts. The second tuning is that of the parts over `sketch`; without a sketch it equals the
/// first.
fn fit(
    header: RecordHeader,
    records: &[ActivationRecord],
    embedding: &Embedding,
    sketch: Option<&Embedding>,
    options: TrainingOptions,
    on_stage: &mut dyn FnMut(FitStage),
) -> Result<(TrainedPredictor, ByPhase<Tuning>), PredictError> {
    options.tree.check(options.alpha)?;
    let (layers, experts) = (header.layers.len(), header.experts as usize);
    let history = |records: &[ActivationRecord]| History::from_records(embedding, layers, experts, records);
    let (tuning, portable) = if records.len() < MIN_SPLIT_RECORDS {
        let unknown = ByPhase::both(Tuning::untuned(layers));
        (unknown.clone(), unknown)
    } else {
        let order = Random::new(options.tree.seed).sample(records.len(), records.len());
        let records_at = |range: &[u32]| -> Vec<ActivationRecord> {
            range.iter().filter_map(|&index| records.get(index as usize).cloned()).collect()
        };
        let (check, rest) = order.split_at(records.len() / HELD_OUT);
        let (tune, fit) = rest.split_at(records.len() / HELD_OUT);
        on_stage(FitStage::Divided);
        let (tune, check) = (records_at(tune), records_at(check));
        let history = history(&records_at(fit))?;
        let held_out = HeldOut::new(&history, &tune, &check)?;
        tune_and_check((embedding, sketch), &history, &tune, &held_out, options, on_stage)?
    };
    on_stage(FitStage::Whole);
    let history = history(records)?;
    let table = |phase| TokenTable::fit(embedding, &history, phase, tuning.get(phase).rounds);
    let temperature = ByPhase { prefill: tuning.prefill.temperature, decode: tuning.decode.temperature };
    let parts = fit_parts(embedding, &history, options, temperature, ByPhase::try_each(table)?)?;
    Ok((TrainedPredictor { header, parts, tuning }, portable))
}

/// Fits popularity and SPS to `history` and joins them with the fitted `tokens`.
fn fit_parts(
    embedding: &Embedding,
    history: &History,
    options: TrainingOptions,
    temperature: ByPhase<f32>,
    tokens: ByPhase<TokenTable>,
) -> Result<PredictorParts, PredictError> {
    let popularity = Popularity::from_history(history)?;
    let (clustering, TrainingOptions { alpha, tree }) = (Clustering::Centred, options);
    let sps = SimilarPrompts::with_tree("sps", embedding.clone(), history, clustering, tree, alpha)?;
    Ok(PredictorParts { popularity, sps: sps.with_temperature("sps", temperature), tokens })
}

/// Fits the parts to `history`, then tunes and measures them on held-out prompts, each phase separately.
fn tune_and_check(
    (embedding, sketch): (&Embedding, Option<&Embedding>),
    history: &History,
    tune: &[ActivationRecord],
    held_out: &HeldOut<'_>,
    options: TrainingOptions,
    on_stage: &mut dyn FnMut(FitStage),
) -> Result<(ByPhase<Tuning>, ByPhase<Tuning>), PredictError> {
    on_stage(FitStage::Tables);
    let tables =
        ByPhase::try_each(|phase| best_table(embedding, history, phase, held_out.tuning_cases.get(phase)))?;
    let rounds = ByPhase { prefill: tables.prefill.1, decode: tables.decode.1 };
    let tokens = ByPhase { prefill: tables.prefill.0, decode: tables.decode.0 };
    let mut parts = fit_parts(embedding, history, options, ByPhase::both(DEFAULT_TEMPERATURE), tokens)?;
    on_stage(FitStage::Temperatures);
    for phase in Phase::ALL {
        parts.sps.fit_temperature(tune, phase)?;
    }
    on_stage(FitStage::Mixture);
    let full = held_out.tune(|prompt, phase| parts.all(prompt, phase), parts.sps.temperature(), rounds)?;
    let Some(sketch) = sketch else { return Ok((full.clone(), full)) };
    let mut reduced = ReducedParts::from_parts(&parts, embedding, sketch)?;
    reduced.fit_temperatures(&held_out.tuning_cases)?;
    let portable =
        held_out.tune(|prompt, phase| reduced.all(prompt, phase), reduced.temperature(), rounds)?;
    Ok((full, portable))
}
