//! Health, metrics and version.

use super::state::HttpState;
use axum::Json;
use axum::extract::State;
use axum::response::Response;
use remoe_http::ApiError;
use serde::Serialize;
use std::sync::Arc;

#[derive(Serialize)]
pub(super) struct Health {
    status: &'static str,
}

#[derive(Serialize)]
pub(super) struct Version {
    version: &'static str,
}

/// Returns 200 while requests are accepted, otherwise 503.
pub(super) async fn health(State(state): State<Arc<HttpState>>) -> Result<Json<Health>, ApiError> {
    state.check_ready()?;
    Ok(Json(Health { status: "ok" }))
}

/// Returns all metrics of the process in Prometheus' text format.
pub(super) async fn metrics(State(state): State<Arc<HttpState>>) -> Response {
    remoe_process::render_metrics(&state.registry)
}

pub(super) async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION") })
}
