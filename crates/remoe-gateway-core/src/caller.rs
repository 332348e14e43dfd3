//! Caller of a request: the tenant of its key, or its address where there are no keys.

use crate::tenant::TenantLimits;
use std::sync::Arc;

/// Caller of a request.
#[derive(Clone)]
pub(crate) struct Caller {
    /// Tenant of its key; `None` where there are no keys.
    pub(crate) tenant: Option<Arc<TenantLimits>>,
    /// Name by which waiting requests take turns.
    pub(crate) client: Arc<str>,
}

impl Caller {
    /// Returns a caller that may know everything.
    pub(crate) fn anybody() -> Self {
        Self { tenant: None, client: "".into() }
    }

    /// Returns the name of the tenant; empty where there are no keys.
    pub(crate) fn tenant_name(&self) -> &str {
        self.tenant.as_ref().map_or("", |tenant| tenant.name())
    }
}
