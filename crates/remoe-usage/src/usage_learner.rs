//! Learner of one deployment's expert usage, from its requests.

use crate::joint_usage::JointUsage;
use crate::metrics::ModelPredictionMetrics;
use crate::prediction_service::{HistoryUpdate, PredictionService};
use crate::usage_predictor::{Retention, UsagePredictor};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::sync::watch;

/// Expert usage of recently answered requests.
#[derive(Debug, Clone, PartialEq)]
pub struct AnsweredUsage {
    /// Fingerprint of the model.
    pub model: String,
    /// Joint usage of the requests.
    pub usage: JointUsage,
}

/// Learner of one deployment's expert usage. It does nothing until [`Self::set_service`] sets a [`PredictionService`].
#[derive(Debug)]
pub struct UsageLearner {
    service: RwLock<Option<Arc<PredictionService>>>,
    answered: watch::Sender<Option<AnsweredUsage>>,
    metrics: ModelPredictionMetrics,
}

impl Drop for UsageLearner {
    /// Removes the metrics of the deployment.
    fn drop(&mut self) {
        self.metrics.remove();
    }
}

impl UsageLearner {
    /// Creates a learner that reports to `metrics`.
    pub fn new(metrics: ModelPredictionMetrics) -> Arc<Self> {
        Arc::new(Self { service: RwLock::default(), answered: watch::Sender::new(None), metrics })
    }

    /// Returns the callback of a [`PredictionService`] for `model`, which publishes metrics and the usage of answered
    /// requests. The callback does nothing once the learner is dropped.
    pub fn publisher(
        self: &Arc<Self>,
        model: &str,
    ) -> impl FnMut(&UsagePredictor, HistoryUpdate) + Send + 'static {
        let (learner, model) = (Arc::downgrade(self), model.to_owned());
        move |predictor, update| {
            let Some(learner) = learner.upgrade() else { return };
            learner.metrics.update(predictor);
            if update == HistoryUpdate::Answered
                && let Ok(Some(usage)) = predictor.observed().joint_usage()
            {
                learner.answered.send_replace(Some(AnsweredUsage { model: model.clone(), usage }));
            }
        }
    }

    /// Replaces the prediction service and clears the usage of earlier answers. Without a service, the learner does
    /// nothing.
    pub fn set_service(&self, service: Option<PredictionService>) {
        *self.service.write().unwrap_or_else(PoisonError::into_inner) = service.map(Arc::new);
        self.answered.send_replace(None);
    }

    /// Returns the present prediction service.
    pub fn service(&self) -> Option<Arc<PredictionService>> {
        self.service.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Begins to track request `id` of `tenant`. Returns false if the request is not tracked; the caller then reports
    /// nothing else about it.
    pub fn begin_request(&self, id: u64, tenant: &str, retention: Retention, body: &[u8]) -> bool {
        self.service().is_some_and(|service| service.begin_request(id, tenant, retention, body))
    }

    /// Learns from the activations that a main function reported for request `id`.
    pub fn record_usage(&self, id: u64, activations: &str) {
        if let Some(service) = self.service() {
            service.record_usage(id, activations);
        }
    }

    /// Ends the tracking of request `id`.
    pub fn end_request(&self, id: u64) {
        if let Some(service) = self.service() {
            service.end_request(id);
        }
    }

    /// Subscribes to the expert usage of recently answered requests.
    pub fn answered_usage(&self) -> watch::Receiver<Option<AnsweredUsage>> {
        self.answered.subscribe()
    }

    /// Predicts the joint usage of the active requests. Returns `None` if it is unknown or not ready within
    /// `timeout`. Requires a Tokio runtime, on whose blocking threads it waits.
    pub async fn predict_joint_usage(&self, timeout: Duration) -> Option<JointUsage> {
        let service = self.service()?;
        tokio::task::spawn_blocking(move || service.predict_joint_usage(timeout)).await.ok().flatten()
    }
}
