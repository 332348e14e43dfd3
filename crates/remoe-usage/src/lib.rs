//! Prediction of the experts that requests will use, while they wait and run.
//!
//! ```text
//! a request comes ──▶ tokens ──▶ prediction ─▶ Mix: who is here, and what that takes ──▶ a wake's plan
//!
//! an answer ends ──▶ activations ──▶ Observed: what was used of late ──▶ a revision of what runs
//!                          └───────▶ memory, by tenant ──▶ Store: one file
//!                                       ▲
//!            files of other gateways ───┘ Exchange
//! ```
//!
//! [`UsagePredictor`] joins them. It takes values and returns values; only [`Store`] and [`Exchange`] touch the disk. A
//! [`PredictionService`] gives it a thread, so that no request waits for it. A [`UsageLearner`] is what a gateway tells of requests. Nothing of a prompt's text is kept: a request is
//! remembered by the vector of its prompt and by how its tokens spread over the experts.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod body;
mod calibration;
mod exchange;
mod frame;
mod growth;
mod joint_usage;
mod learner;
mod memory;
mod metrics;
mod model_summary;
mod numbers;
mod observed;
mod opted_out;
mod prediction_service;
mod prior;
mod quality;
mod steps;
mod store;
mod tenant;
mod usage_predictor;

pub use body::Prompts;
pub use calibration::{Calibration, ExpertSetShare, LAYER_GROUPS, PARTS};
pub use exchange::Exchange;
pub use joint_usage::JointUsage;
pub use learner::{AnsweredMix, UsageLearner};
pub use metrics::{ModelPredictionMetrics, PredictionMetrics};
pub use model_summary::{MAX_MODEL_SUMMARY, ModelSummary, ModelSummaryError, write_model_summary};
pub use observed::ObservedUsage;
pub use prediction_service::{Ended, LearnedUpdate, Opened, Peers, PredictionService, PredictorOpener};
pub use quality::{PhaseQuality, Quality, Third};
pub use store::{Store, StoreError, StoredRequest};
pub use tenant::Tenant;
pub use usage_predictor::{Arrival, MEMORY, PredictorOptions, Retention, UsagePredictor};
