//! Expert usage of a model, learned from its requests.

use crate::deployment::Wanted;
use crate::exit::CliError;
use crate::flags::default_dtype;
use crate::predictors::Model;
use remoe_gateway_core::Witness;
use remoe_predictor::record::RecordHeader;
use remoe_predictor::{ByPhase, Shares, TunedPredictor};
use remoe_usage::{
    AnsweredMix, Foresight, ForesightMetrics, ForesightOptions, Mix, Prompts, UsageLearner, Watch,
};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Longest time that a wake waits for the predictions of waiting requests. They take less than a millisecond each.
const PREDICTIONS: Duration = Duration::from_millis(250);
/// Requests to go by before a placement follows what is used.
const ENOUGH: f64 = 4.0;

/// Learned usage of one model.
pub(crate) struct ModelUsage {
    learner: Arc<UsageLearner>,
    answered: watch::Receiver<Option<AnsweredMix>>,
    /// Mean usage of the requests that were remembered at the start, if they are enough to go by.
    pub(crate) remembered: Option<Shares>,
}

/// Memory of a model's requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory<'a> {
    /// Folder that keeps it over restarts.
    pub(crate) folder: Option<&'a Path>,
    /// Limit of its size.
    pub(crate) folder_bytes: u64,
    /// Requests are predicted without it.
    pub(crate) forgets: bool,
}

impl ModelUsage {
    /// Begins to follow the requests of `wanted`'s model, whose predictor is in the folder `predictor` or its own; a
    /// typical one has so many `tokens`.
    pub(crate) fn open(
        wanted: &Wanted,
        memory: Memory<'_>,
        predictor: Option<&Path>,
        tokens: ByPhase<f64>,
        metrics: &ForesightMetrics,
    ) -> Result<Self, CliError> {
        let model = Model::of(wanted.checkpoint.clone())?;
        let facts = &wanted.inspection;
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let header = RecordHeader {
            model: model.fingerprint.clone(),
            layers: facts.moe_layers.iter().map(|layer| number(*layer)).collect(),
            experts: number(facts.experts),
            top_k: number(facts.top_k),
            dtype: wanted.options.dtype.clone().unwrap_or_else(|| default_dtype(facts).to_owned()),
            tokens: false,
        };
        let trained = model.predictor(predictor)?;
        // One folder serves for several models.
        let folder = memory.folder.map(|folder| folder.join(&model.fingerprint));
        let options = ForesightOptions {
            store: folder.map(|folder| (folder, memory.folder_bytes)),
            forgets: memory.forgets,
            output_tokens: tokens.decode,
        };
        let prompts = Prompts::open(&wanted.checkpoint)?;
        let trained = trained.map(|trained| Box::new(trained) as Box<dyn TunedPredictor>);
        let foresight = Foresight::new(header, model.embedding, prompts, trained, options)
            .map_err(|error| CliError::arguments("--experience", error.to_string()))?;
        let is_enough = foresight.remembered().0 as f64 >= ENOUGH;
        let remembered = if is_enough { foresight.mean(tokens)? } else { None };
        let learner = UsageLearner::new(metrics.of_model(&wanted.name()));
        let watch = Watch::start(foresight, None, learner.publisher(&model.fingerprint));
        let watch = watch.map_err(|error| CliError::runtime(format!("cannot start a thread: {error}")))?;
        learner.follow(Some(watch));
        Ok(Self { answered: learner.answered(), learner, remembered })
    }

    /// Returns the witness of the model's requests.
    pub(crate) fn witness(&self) -> Arc<dyn Witness> {
        self.learner.clone()
    }

    /// Returns the present requests.
    pub(crate) fn present(&self) -> Present {
        Present(self.learner.clone())
    }

    /// Returns the recent expert usage, if that is enough to go by.
    pub(crate) fn of_late(&self) -> Option<Shares> {
        enough(self.answered.borrow().as_ref())
    }

    /// Returns the recent expert usage if it changed since this was last called, and is enough to go by.
    pub(crate) fn news(&mut self) -> Option<Shares> {
        if !self.answered.has_changed().unwrap_or(false) {
            return None;
        }
        enough(self.answered.borrow_and_update().as_ref())
    }
}

fn enough(answered: Option<&AnsweredMix>) -> Option<Shares> {
    answered.map(|answered| &answered.mix).filter(|mix| mix.requests >= ENOUGH).map(|mix| mix.shares.clone())
}

/// Requests that wait or are worked on.
pub(crate) struct Present(Arc<UsageLearner>);

impl Present {
    /// Predicts which experts they will use; `None` if that is not known.
    pub(crate) async fn mix(self) -> Option<Mix> {
        self.0.predicted(PREDICTIONS).await
    }
}
