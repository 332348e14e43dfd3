//! Tests of expert usage prediction, in one test program.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod bounded;
mod history_store;
mod model;
mod model_summary;
mod peer_history;
mod prediction_service;
mod shared_prior;
mod usage_predictor;
