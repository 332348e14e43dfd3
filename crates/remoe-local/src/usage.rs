//! Learns the expert usage of a model from its requests.

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

/// Timeout for predictions of waiting requests during a wake. A prediction takes less than a millisecond.
const PREDICTION_TIMEOUT: Duration = Duration::from_millis(250);
/// Minimum number of requests before a placement follows their usage.
const MIN_REQUESTS: f64 = 4.0;

/// Learned expert usage of one model.
pub struct ModelUsage {
    learner: Arc<UsageLearner>,
    answered: watch::Receiver<Option<AnsweredUsage>>,
    /// Mean usage in the training history at the start, if it has enough requests.
    pub remembered: Option<UsageShares>,
}

/// Training history of a model's requests.
#[derive(Debug, Clone, Copy)]
pub struct UsageHistory<'a> {
    /// Folder that stores it across restarts.
    pub folder: Option<&'a Path>,
    /// Maximum bytes of the folder.
    pub folder_bytes: u64,
    /// Set if predictions do not use it.
    pub forgets: bool,
}

/// Files of a model that predictions need.
pub struct ModelFiles {
    /// Fingerprint of the checkpoint.
    pub fingerprint: String,
    /// Embedding of the checkpoint.
    pub embedding: Embedding,
    /// Trained predictor of the model, if there is one.
    pub trained: Option<TrainedPredictor>,
}

impl ModelUsage {
    /// Starts to learn from the requests of `wanted`'s model with these `files`. `tokens` are those of a typical
    /// request.
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
        // Several models share one folder.
        let folder = history.folder.map(|folder| folder.join(&files.fingerprint));
        let options = PredictorOptions {
            store: folder.map(|folder| (folder, history.folder_bytes)),
            is_history_disabled: history.forgets,
            output_tokens: tokens.decode,
        };
        let prompts = PromptReader::open(&wanted.checkpoint)?;
        let trained = files.trained.map(|trained| Box::new(trained) as Box<dyn TunedPredictor>);
        let predictor = UsagePredictor::new(header, files.embedding, prompts, trained, options)?;
        let is_enough = predictor.history_size().requests as f64 >= MIN_REQUESTS;
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

    /// Returns a handle to the active requests.
    pub(crate) fn present(&self) -> ActiveRequests {
        ActiveRequests(self.learner.clone())
    }

    /// Returns the recent expert usage, if there were enough requests.
    pub(crate) fn recent(&self) -> Option<UsageShares> {
        shares_if_enough(self.answered.borrow().as_ref())
    }

    /// Returns the recent expert usage, if it changed since the last call and there were enough requests.
    pub(crate) fn recent_if_changed(&mut self) -> Option<UsageShares> {
        if !self.answered.has_changed().unwrap_or(false) {
            return None;
        }
        shares_if_enough(self.answered.borrow_and_update().as_ref())
    }
}

fn shares_if_enough(answered: Option<&AnsweredUsage>) -> Option<UsageShares> {
    answered
        .map(|answered| &answered.usage)
        .filter(|mix| mix.requests >= MIN_REQUESTS)
        .map(|mix| mix.shares.clone())
}

/// Waiting and running requests.
pub(crate) struct ActiveRequests(Arc<UsageLearner>);

impl ActiveRequests {
    /// Predicts the expert usage of the active requests; `None` if it is unknown.
    pub(crate) async fn mix(self) -> Option<JointUsage> {
        self.0.predict_joint_usage(PREDICTION_TIMEOUT).await
    }
}
