//! Tests of foresight, in one program.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod bounded;
mod exchange;
mod model;
mod model_summary;
mod prediction_service;
mod prior;
mod store;
mod usage_predictor;
