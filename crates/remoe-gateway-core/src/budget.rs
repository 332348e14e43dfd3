//! Daily cost quota: budgets of tenants, and of the requests of models.

use crate::gateway::Gateway;
use crate::model::Model;
use crate::spending::Payer;
use crate::tenant::TenantLimits;
use axum::http::HeaderValue;
use remoe_http::ApiError;
use remoe_proto::{ErrorCode, ServiceError};

/// The share of a budget from which clients are warned.
const WARNS: f64 = 0.8;

/// Lets requests of `tenant` to `model` pass while both have a budget left: the one that exceeds it runs. The larger
/// share that is spent, where clients are to be warned.
///
/// # Errors
/// The day's budget of either is spent.
pub(crate) fn within_budget(
    gateway: &Gateway,
    tenant: Option<&TenantLimits>,
    model: &Model,
) -> Result<Option<HeaderValue>, ApiError> {
    let Some(cost_accounting) = gateway.cost_accounting() else { return Ok(None) };
    let of_tenant = tenant.and_then(|tenant| Some((Payer::Tenant(tenant.name()), tenant.budget()?)));
    let limit = gateway.keys().budget_of(model, &gateway.models(), &gateway.options().short_names);
    let of_model = limit.map(|budget| (Payer::Model(model.name()), budget));
    let mut most: f64 = 0.0;
    for (payer, budget) in of_tenant.into_iter().chain(of_model) {
        let (spent, left) = cost_accounting.spent_today(payer);
        let dollars = |amount: u64| amount as f64 / 1e9;
        if spent >= budget {
            cost_accounting.metrics().refused(payer);
            let amounts = match payer {
                Payer::Tenant(_) => format!(": ${} of ${}", dollars(spent), dollars(budget)),
                // What others have spent is not for everybody to know.
                Payer::Model(_) => String::new(),
            };
            let message = format!("Daily budget of {payer} exhausted{amounts}; resets at 00:00 UTC.");
            let error = ServiceError::new(ErrorCode::ResourceExhausted, message);
            return Err(ApiError::from(error).retry_after(left));
        }
        most = most.max(spent as f64 / budget as f64);
    }
    Ok((most >= WARNS).then(|| HeaderValue::from_str(&format!("{most:.3}")).ok()).flatten())
}
