//! `/v1/models`, `/status`, `/health` and `/version`.

use crate::caller::Caller;
use crate::cost_accounting::CostAccounting;
use crate::gateway::Gateway;
use crate::model::{Model, ModelStatus};
use crate::spending::Payer;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::{Extension, Json};
use remoe_autoscale::scale_to_zero::ScalingPhase;
use remoe_billing::LedgerTotals;
use remoe_http::ApiError;
use remoe_proto::{ErrorCode, ServiceError};
use serde::Serialize;
use std::sync::Arc;

#[derive(Serialize)]
pub(crate) struct ModelListing {
    object: &'static str,
    data: Vec<ModelEntry>,
}

#[derive(Serialize)]
pub(crate) struct ModelEntry {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    max_model_len: usize,
    state: ScalingPhase,
}

#[derive(Serialize)]
pub(crate) struct StatusList {
    models: Vec<StatusLine>,
}

#[derive(Serialize)]
struct StatusLine {
    #[serde(flatten)]
    model: ModelStatus,
    /// `None` if no costs are recorded.
    cost: Option<ModelCost>,
}

/// Returns the costs of `model` that `caller` may see; `None` if no costs are recorded.
pub(crate) fn cost(gateway: &Gateway, model: &str, caller: &Caller) -> Option<ModelCost> {
    let cost_accounting = gateway.cost_accounting()?;
    Some(ModelCost::new(cost_accounting, &cost_accounting.totals_since_start(), model, caller))
}

/// Costs of a model in nano-dollars. Only an admin tenant gets the amounts that reveal the usage of other tenants.
#[derive(Serialize)]
pub(crate) struct ModelCost {
    /// Price of the living functions per hour.
    per_hour: u64,
    /// Cost of all functions since the gateway started.
    paid: Option<u64>,
    /// Part of `paid` that answered requests used.
    requests: Option<u64>,
    /// Spending on requests to the model today (UTC).
    today: Option<u64>,
    /// Spending of the caller's tenant today; `None` if the gateway has no keys.
    tenant_today: Option<u64>,
}

impl ModelCost {
    fn new(cost_accounting: &CostAccounting, totals: &LedgerTotals, model: &str, caller: &Caller) -> Self {
        let functions = totals.functions_by_model.get(model).copied().unwrap_or_default();
        let requests = totals.by_model.get(model).map_or(0, |requests| requests.cost);
        let tenant = caller.tenant.as_ref();
        let sees_all = tenant.is_none_or(|tenant| tenant.is_admin());
        let today = |payer| cost_accounting.spent_today(payer).0;
        Self {
            per_hour: functions.per_hour,
            paid: sees_all.then_some(functions.paid),
            requests: sees_all.then_some(requests),
            today: sees_all.then(|| today(Payer::Model(model))),
            tenant_today: tenant.map(|tenant| today(Payer::Tenant(tenant.name()))),
        }
    }
}

#[derive(Serialize)]
pub(crate) struct Health {
    status: &'static str,
}

#[derive(Serialize)]
pub(crate) struct Version {
    version: &'static str,
}

fn describe(gateway: &Gateway, model: &Model) -> ModelEntry {
    ModelEntry {
        id: model.name().to_owned(),
        object: "model",
        created: gateway.started_at,
        owned_by: "remoe",
        max_model_len: model.description().1,
        state: model.phase(),
    }
}

/// Returns the models that the caller may use.
pub(crate) async fn models(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
) -> Json<ModelListing> {
    let usable = gateway.models_of(&caller).into_iter();
    Json(ModelListing { object: "list", data: usable.map(|model| describe(&gateway, &model)).collect() })
}

/// Returns one of these models.
pub(crate) async fn model(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelEntry>, ApiError> {
    // An id that is no UTF-8 matches no model.
    let Path(id) = id.unwrap_or_else(|_| Path(char::REPLACEMENT_CHARACTER.to_string()));
    let model = gateway.model(Some(&id), &caller)?;
    Ok(Json(describe(&gateway, &model)))
}

/// Returns the state and the costs of the models that the caller may use.
pub(crate) async fn status(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
) -> Json<StatusList> {
    let cost_accounting = gateway
        .cost_accounting()
        .map(|cost_accounting| (cost_accounting, cost_accounting.totals_since_start()));
    let line = |model: Arc<Model>| StatusLine {
        cost: cost_accounting
            .as_ref()
            .map(|(cost_accounting, totals)| ModelCost::new(cost_accounting, totals, model.name(), &caller)),
        model: model.status(),
    };
    Json(StatusList { models: gateway.models_of(&caller).into_iter().map(line).collect() })
}

/// Returns 200 if requests are answered, at once or after a cold start. Returns 503 before the first model is ready,
/// and during shutdown.
pub(crate) async fn health(State(gateway): State<Arc<Gateway>>) -> Result<Json<Health>, ApiError> {
    if gateway.is_healthy() {
        return Ok(Json(Health { status: "ok" }));
    }
    let message = "not ready: models are loading, or the server is shutting down; retry later";
    Err(ServiceError::new(ErrorCode::Unavailable, message).into())
}

pub(crate) async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION") })
}
