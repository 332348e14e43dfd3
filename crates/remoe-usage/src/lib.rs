//! Expert usage prediction for requests that wait or run.
//!
//! ```text
//! request arrives ──▶ tokens ──▶ prediction ──▶ JointUsage of active requests ──▶ plan for the wake
//!
//! answer ends ──▶ activations ──▶ ObservedUsage of recent requests ──▶ revision of the placement
//!                       └───────▶ TenantHistories ──▶ HistoryStore: one file
//!                                      ▲
//!           files of other gateways ───┘ PeerHistoryReader
//! ```
//!
//! [`UsagePredictor`] joins these parts. Only [`HistoryStore`] and [`PeerHistoryReader`] touch the disk. A [`PredictionService`] runs
//! the predictor on its own thread, so that no request waits for a prediction. A gateway reports its requests to a
//! [`UsageLearner`].
//!
//! The text of a prompt is never kept. A stored request consists of its prompt's vector and the shares of its tokens
//! per expert.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod answer_lengths;
mod calibration;
mod frame;
mod history_store;
mod joint_usage;
mod metrics;
mod model_summary;
mod observed_usage;
mod opted_out;
mod peer_history;
mod prediction_service;
mod prompt_reader;
mod quality;
mod record_numbers;
mod shared_prior;
mod tenant;
mod tenant_histories;
mod tree_build;
mod usage_learner;
mod usage_predictor;

pub use calibration::{EXPERT_SETS, ExpertSetShare, LAYER_GROUPS, UsageCalibration};
pub use history_store::{HistoryStore, HistoryStoreError, StoredRequest};
pub use joint_usage::JointUsage;
pub use metrics::{ModelPredictionMetrics, PredictionMetrics};
pub use model_summary::{MAX_MODEL_SUMMARY, ModelSummary, ModelSummaryError, write_model_summary};
pub use observed_usage::ObservedUsage;
pub use peer_history::PeerHistoryReader;
pub use prediction_service::{
    ForEachEnded, HistoryUpdate, LoadedPredictor, PeerGateways, PredictionService, PredictorLoader,
};
pub use prompt_reader::PromptReader;
pub use quality::{LayerThirdQuality, PhaseQuality, PredictionQuality};
pub use tenant::Tenant;
pub use usage_learner::{AnsweredUsage, UsageLearner};
pub use usage_predictor::{
    HistorySize, IN_MEMORY_HISTORY_BYTES, PredictorOptions, RequestArrival, Retention, UsagePredictor,
};
