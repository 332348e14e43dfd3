//! Expert usage of a model, learned from its requests.

use crate::deployment::DesiredDeployment;
use crate::error::LocalError;
use remoe_gateway_core::UsageObserver;
use remoe_predictor::record::RecordHeader;
use remoe_predictor::{ByPhase, Embedding, TrainedPredictor, TunedPredictor, UsageShares};
use remoe_usage::{
    AnsweredUsage, JointUsage, PredictionMetrics, PredictionService, PredictorOptions, PromptReader,
    UsageLearner, UsagePredictor,
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
pub struct ModelUsage {
    learner: Arc<UsageLearner>,
    answered: watch::Receiver<Option<AnsweredUsage>>,
    /// Mean usage of the requests that were remembered at the start, if they are enough to go by.
    pub remembered: Option<UsageShares>,
}

/// Training history of a model's requests.
#[derive(Debug, Clone, Copy)]
pub struct UsageHistory<'a> {
    /// Folder that keeps it over restarts.
    pub folder: Option<&'a Path>,
    /// Limit of its size.
    pub folder_bytes: u64,
    /// Requests are predicted without it.
    pub forgets: bool,
}

/// Parts of a model by which its requests are predicted.
pub struct ModelFiles {
    /// Fingerprint of the checkpoint.
    pub fingerprint: String,
    /// Embedding of the checkpoint.
    pub embedding: Embedding,
    /// A predictor that was built for it.
    pub trained: Option<TrainedPredictor>,
}

impl ModelUsage {
    /// Begins to follow the requests of `wanted`'s model, which has these `files`; a typical one has so many `tokens`.
    ///
    /// # Errors
    /// The history cannot be used, the tokenizer cannot be read, or the system refuses a thread.
    pub fn open(
        wanted: &DesiredDeployment,
        history: UsageHistory<'_>,
        files: ModelFiles,
        tokens: ByPhase<f64>,
        metrics: &PredictionMetrics,
    ) -> Result<Self, LocalError> {
        let facts = &wanted.inspection;
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let header = RecordHeader {
            model: files.fingerprint.clone(),
            layers: facts.moe_layers.iter().map(|layer| number(*layer)).collect(),
            experts: number(facts.experts),
            top_k: number(facts.top_k),
            dtype: wanted.dtype().to_owned(),
            tokens: false,
        };
        // One folder serves for several models.
        let folder = history.folder.map(|folder| folder.join(&files.fingerprint));
        let options = PredictorOptions {
            store: folder.map(|folder| (folder, history.folder_bytes)),
            is_history_disabled: history.forgets,
            output_tokens: tokens.decode,
        };
        let prompts = PromptReader::open(&wanted.checkpoint)?;
        let trained = files.trained.map(|trained| Box::new(trained) as Box<dyn TunedPredictor>);
        let predictor = UsagePredictor::new(header, files.embedding, prompts, trained, options)?;
        let is_enough = predictor.history_size().requests as f64 >= ENOUGH;
        let remembered = if is_enough { predictor.mean_usage(tokens)? } else { None };
        let learner = UsageLearner::new(metrics.of_model(&wanted.name()));
        let watch = PredictionService::start(predictor, None, learner.publisher(&files.fingerprint));
        let watch = watch.map_err(LocalError::Thread)?;
        learner.set_service(Some(watch));
        Ok(Self { answered: learner.answered_usage(), learner, remembered })
    }

    /// Returns the observer that learns expert usage from the model's requests.
    pub fn observer(&self) -> Arc<dyn UsageObserver> {
        self.learner.clone()
    }

    /// Returns the present requests.
    pub(crate) fn present(&self) -> ActiveRequests {
        ActiveRequests(self.learner.clone())
    }

    /// Returns the recent expert usage, if that is enough to go by.
    pub(crate) fn of_late(&self) -> Option<UsageShares> {
        enough(self.answered.borrow().as_ref())
    }

    /// Returns the recent expert usage if it changed since this was last called, and is enough to go by.
    pub(crate) fn news(&mut self) -> Option<UsageShares> {
        if !self.answered.has_changed().unwrap_or(false) {
            return None;
        }
        enough(self.answered.borrow_and_update().as_ref())
    }
}

fn enough(answered: Option<&AnsweredUsage>) -> Option<UsageShares> {
    answered
        .map(|answered| &answered.usage)
        .filter(|mix| mix.requests >= ENOUGH)
        .map(|mix| mix.shares.clone())
}

/// Requests that wait or are worked on.
pub(crate) struct ActiveRequests(Arc<UsageLearner>);

impl ActiveRequests {
    /// Predicts which experts they will use; `None` if that is not known.
    pub(crate) async fn mix(self) -> Option<JointUsage> {
        self.0.predict_joint_usage(PREDICTIONS).await
    }
}
