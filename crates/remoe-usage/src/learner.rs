//! Learner of one model's expert usage, from requests as they come, are answered and end.

use crate::joint_usage::JointUsage;
use crate::metrics::ModelPredictionMetrics;
use crate::prediction_service::{LearnedUpdate, PredictionService};
use crate::usage_predictor::{Retention, UsagePredictor};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::sync::watch;

/// Expert usage of recently answered requests.
#[derive(Debug, Clone, PartialEq)]
pub struct AnsweredMix {
    /// Model that the answers were of.
    pub model: String,
    /// Their usage.
    pub mix: JointUsage,
}

/// Learner of one deployment's expert usage. It learns nothing until it is told to [follow](Self::follow) a [`PredictionService`].
#[derive(Debug)]
pub struct UsageLearner {
    watch: RwLock<Option<Arc<PredictionService>>>,
    answered: watch::Sender<Option<AnsweredMix>>,
    metrics: ModelPredictionMetrics,
}

impl Drop for UsageLearner {
    /// The last request to the deployment is over.
    fn drop(&mut self) {
        self.metrics.forget();
    }
}

impl UsageLearner {
    /// Makes a learner that shows what it learns in `metrics`.
    pub fn new(metrics: ModelPredictionMetrics) -> Arc<Self> {
        Arc::new(Self { watch: RwLock::default(), answered: watch::Sender::new(None), metrics })
    }

    /// Returns what a [`PredictionService`] of `model` calls after it learned something: publishes metrics and the usage of answered
    /// requests. Does nothing once the learner is gone.
    pub fn publisher(
        self: &Arc<Self>,
        model: &str,
    ) -> impl FnMut(&UsagePredictor, LearnedUpdate) + Send + 'static {
        let (learner, model) = (Arc::downgrade(self), model.to_owned());
        move |predictor, news| {
            let Some(learner) = learner.upgrade() else { return };
            learner.metrics.show(predictor);
            if news == LearnedUpdate::Answered
                && let Ok(Some(mix)) = predictor.observed().mix()
            {
                learner.answered.send_replace(Some(AnsweredMix { model: model.clone(), mix }));
            }
        }
    }

    /// Learns by `watch` from now on; nothing without one. Usage of answers before is dropped.
    pub fn follow(&self, watch: Option<PredictionService>) {
        *self.watch.write().unwrap_or_else(PoisonError::into_inner) = watch.map(Arc::new);
        self.answered.send_replace(None);
    }

    /// Returns what it learns by.
    pub fn watch(&self) -> Option<Arc<PredictionService>> {
        self.watch.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes the request `id` of `tenant`. False if it is not followed: then nothing else is to be told of it.
    pub fn came(&self, id: u64, tenant: &str, keeps: Retention, body: &[u8]) -> bool {
        self.watch().is_some_and(|watch| watch.came(id, tenant, keeps, body))
    }

    /// Learns from the expert usage that a main function reported of the request `id`.
    pub fn told(&self, id: u64, activations: &str) {
        if let Some(watch) = self.watch() {
            watch.told(id, activations);
        }
    }

    /// Ends the request `id`.
    pub fn left(&self, id: u64) {
        if let Some(watch) = self.watch() {
            watch.left(id);
        }
    }

    /// Watches the expert usage of recently answered requests, now and whenever it changes.
    pub fn answered(&self) -> watch::Receiver<Option<AnsweredMix>> {
        self.answered.subscribe()
    }

    /// Predicts the joint usage of the requests that wait or run; none if that is not known within `most`. Requires a
    /// runtime of tokio, on whose blocking threads it waits.
    pub async fn predicted(&self, most: Duration) -> Option<JointUsage> {
        let watch = self.watch()?;
        tokio::task::spawn_blocking(move || watch.mix(most)).await.ok().flatten()
    }
}
