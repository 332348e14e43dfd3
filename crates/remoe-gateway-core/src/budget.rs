//! Daily cost quota: budgets of tenants, and of the requests of models.

use crate::gateway::Gateway;
use crate::model::Model;
use crate::spending::Payer;
use crate::tenant::TenantLimits;
use axum::http::HeaderValue;
use remoe_http::ApiError;
use remoe_proto::{ErrorCode, ServiceError};

/// Spent share of a daily budget from which answers state it in a header.
const WARNING_SHARE: f64 = 0.8;

/// Checks the daily budgets of `tenant` and `model` before a request runs. A request that exceeds what is left still
/// runs; later ones are refused. Returns the larger spent share as a header value if clients are to be warned.
///
/// # Errors
/// The daily budget of the tenant or the model is exhausted.
pub(crate) fn check_budgets(
    gateway: &Gateway,
    tenant: Option<&TenantLimits>,
    model: &Model,
) -> Result<Option<HeaderValue>, ApiError> {
    let Some(cost_accounting) = gateway.cost_accounting() else { return Ok(None) };
    let tenant_budget =
        tenant.and_then(|tenant| Some((Payer::Tenant(tenant.name()), tenant.daily_budget()?)));
    let limit = gateway.keys().budget_of(model, &gateway.models(), &gateway.options().short_names);
    let model_budget = limit.map(|budget| (Payer::Model(model.name()), budget));
    let mut largest_share: f64 = 0.0;
    for (payer, budget) in tenant_budget.into_iter().chain(model_budget) {
        let (spent, time_until_reset) = cost_accounting.spent_today(payer);
        let dollars = |amount: u64| amount as f64 / 1e9;
        if spent >= budget {
            cost_accounting.metrics().count_refusal(payer);
            let amounts = match payer {
                Payer::Tenant(_) => format!(": ${} of ${}", dollars(spent), dollars(budget)),
                // The spending of other tenants is not disclosed.
                Payer::Model(_) => String::new(),
            };
            let message = format!("Daily budget of {payer} exhausted{amounts}; resets at 00:00 UTC.");
            let error = ServiceError::new(ErrorCode::ResourceExhausted, message);
            return Err(ApiError::from(error).retry_after(time_until_reset));
        }
        largest_share = largest_share.max(spent as f64 / budget as f64);
    }
    Ok((largest_share >= WARNING_SHARE)
        .then(|| HeaderValue::from_str(&format!("{largest_share:.3}")).ok())
        .flatten())
}
