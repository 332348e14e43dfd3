//! Listings: models, their state, the gateway's own health.

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
    /// `None` where no money is accounted for.
    cost: Option<ModelCost>,
}

/// Returns what `model` costs, for `caller`; `None` where no money is accounted for.
pub(crate) fn cost(gateway: &Gateway, model: &str, caller: &Caller) -> Option<ModelCost> {
    let cost_accounting = gateway.cost_accounting()?;
    Some(ModelCost::of(cost_accounting, &cost_accounting.so_far(), model, caller))
}

/// Costs of a model, in nano-dollars. A tenant that does not see all is not told costs that reveal use by other
/// tenants.
#[derive(Serialize)]
pub(crate) struct ModelCost {
    /// The functions that are alive, in an hour.
    per_hour: u64,
    /// All functions since the gateway started, or since they did.
    paid: Option<u64>,
    /// Part of `paid` that was reported with answered requests.
    requests: Option<u64>,
    /// Requests to the model today, in UTC.
    today: Option<u64>,
    /// All requests of the caller's tenant today; `None` where there are no keys.
    tenant_today: Option<u64>,
}

impl ModelCost {
    fn of(cost_accounting: &CostAccounting, account: &LedgerTotals, model: &str, caller: &Caller) -> Self {
        let functions = account.functions_by_model.get(model).copied().unwrap_or_default();
        let requests = account.by_model.get(model).map_or(0, |requests| requests.cost);
        let tenant = caller.tenant.as_ref();
        let sees_all = tenant.is_none_or(|tenant| tenant.sees_all());
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
        created: gateway.created,
        owned_by: "remoe",
        max_model_len: model.described().1,
        state: model.phase(),
    }
}

/// The models that the caller may use.
pub(crate) async fn models(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
) -> Json<ModelListing> {
    let seen = gateway.models_of(&caller).into_iter();
    Json(ModelListing { object: "list", data: seen.map(|model| describe(&gateway, &model)).collect() })
}

/// One of them.
pub(crate) async fn model(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelEntry>, ApiError> {
    // What is no text names no model.
    let Path(id) = id.unwrap_or_else(|_| Path(char::REPLACEMENT_CHARACTER.to_string()));
    let model = gateway.model(Some(&id), &caller)?;
    Ok(Json(describe(&gateway, &model)))
}

/// Returns what runs, waits and sleeps, and what it costs.
pub(crate) async fn status(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
) -> Json<StatusList> {
    let cost_accounting =
        gateway.cost_accounting().map(|cost_accounting| (cost_accounting, cost_accounting.so_far()));
    let line = |model: Arc<Model>| StatusLine {
        cost: cost_accounting
            .as_ref()
            .map(|(cost_accounting, account)| ModelCost::of(cost_accounting, account, model.name(), &caller)),
        model: model.status(),
    };
    Json(StatusList { models: gateway.models_of(&caller).into_iter().map(line).collect() })
}

/// 200 where requests are answered, be it after a wake; 503 before the first model takes any, and at the end.
pub(crate) async fn health(State(gateway): State<Arc<Gateway>>) -> Result<Json<Health>, ApiError> {
    if gateway.is_well() {
        return Ok(Json(Health { status: "ok" }));
    }
    let message = "not ready: models are loading, or the server is shutting down; retry later";
    Err(ServiceError::new(ErrorCode::Unavailable, message).into())
}

pub(crate) async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION") })
}
