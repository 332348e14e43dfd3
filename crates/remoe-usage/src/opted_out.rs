//! Tenants whose requests are not remembered, whichever gateway served them.

use crate::tenant::Tenant;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Tenants that are known, at most. Of further ones the file is looked through again.
const MOST: usize = 4096;

/// Shared by the predictor and the reader of other gateways' files.
#[derive(Debug, Clone, Default)]
pub(crate) struct OptedOutTenants(Arc<Mutex<BTreeSet<Tenant>>>);

impl OptedOutTenants {
    fn tenants(&self) -> MutexGuard<'_, BTreeSet<Tenant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note of `tenant`. False where that was known.
    pub(crate) fn insert(&self, tenant: Tenant) -> bool {
        let mut tenants = self.tenants();
        let is_new = tenants.insert(tenant);
        if tenants.len() > MOST {
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

    /// All of them, as they are now.
    pub(crate) fn all(&self) -> BTreeSet<Tenant> {
        self.tenants().clone()
    }
}
