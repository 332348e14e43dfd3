//! What a tenant may spend on a day.

use crate::gateway::Gateway;
use crate::keys::Tenant;
use axum::http::HeaderValue;
use remoe_http::ApiError;
use remoe_wire::{ErrorCode, ServiceError};

/// The share of a budget from which clients are warned.
const WARNS: f64 = 0.8;

/// Lets requests of `tenant` pass while its budget lasts: the one that exceeds it runs. The share that is spent, where
/// clients are to be warned.
///
/// # Errors
/// The day's budget is spent.
pub(crate) fn within_budget(
    gateway: &Gateway,
    tenant: Option<&Tenant>,
) -> Result<Option<HeaderValue>, ApiError> {
    let Some((tenant, books)) = tenant.zip(gateway.books()) else { return Ok(None) };
    let Some(budget) = tenant.budget() else { return Ok(None) };
    let (spent, left) = books.spent_today(tenant.name());
    let dollars = |amount: u64| amount as f64 / 1e9;
    if spent >= budget {
        books.metrics().refused(tenant.name());
        let message = format!(
            "the budget of the tenant {} is spent: ${} of ${} a day; it begins anew at 00:00 UTC",
            tenant.name(),
            dollars(spent),
            dollars(budget),
        );
        let error = ServiceError::new(ErrorCode::ResourceExhausted, message);
        return Err(ApiError::from(error).retry_after(left));
    }
    let share = spent as f64 / budget as f64;
    Ok((share >= WARNS).then(|| HeaderValue::from_str(&format!("{share:.3}")).ok()).flatten())
}
