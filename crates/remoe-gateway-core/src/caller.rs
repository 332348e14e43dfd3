//! Caller of a request: the tenant of its key, or its address if the gateway has no keys.

use crate::tenant::TenantLimits;
use std::sync::Arc;

/// Caller of a request.
#[derive(Clone)]
pub(crate) struct Caller {
    /// Tenant of the key; `None` if the gateway has no keys.
    pub(crate) tenant: Option<Arc<TenantLimits>>,
    /// Name by which the fair queue distinguishes clients.
    pub(crate) client: Arc<str>,
}

impl Caller {
    /// Returns a caller that may see everything.
    pub(crate) fn unrestricted() -> Self {
        Self { tenant: None, client: "".into() }
    }

    /// Returns the name of the tenant; empty if the gateway has no keys.
    pub(crate) fn tenant_name(&self) -> &str {
        self.tenant.as_ref().map_or("", |tenant| tenant.name())
    }
}
