//! Tenants that opted out: their requests leave no records, whichever gateway served them.

use crate::tenant::Tenant;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Largest number of tenants. Beyond it, the lowest id is dropped and the tenant's requests are erased again when
/// seen.
const MAX_TENANTS: usize = 4096;

/// Set of opted-out tenants, shared by the predictor and the reader of other gateways' files.
#[derive(Debug, Clone, Default)]
pub(crate) struct OptedOutTenants(Arc<Mutex<BTreeSet<Tenant>>>);

impl OptedOutTenants {
    fn tenants(&self) -> MutexGuard<'_, BTreeSet<Tenant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds `tenant`. Returns false if it was in the set.
    pub(crate) fn insert(&self, tenant: Tenant) -> bool {
        let mut tenants = self.tenants();
        let is_new = tenants.insert(tenant);
        if tenants.len() > MAX_TENANTS {
            tenants.pop_first();
        }
        is_new
    }

    pub(crate) fn remove(&self, tenant: Tenant) {
        self.tenants().remove(&tenant);
    }

    pub(crate) fn contains(&self, tenant: Tenant) -> bool {
        self.tenants().contains(&tenant)
    }

    /// Returns a copy of the set.
    pub(crate) fn all(&self) -> BTreeSet<Tenant> {
        self.tenants().clone()
    }
}
