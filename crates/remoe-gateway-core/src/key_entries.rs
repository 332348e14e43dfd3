//! Schema of a keys file: tenants with keys and limits, and daily budgets of models.

use crate::privacy::Privacy;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::num::{NonZeroU32, NonZeroU64};

/// Contents of a keys file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct KeysFile {
    pub(crate) tenants: Vec<TenantEntry>,
    #[serde(default)]
    pub(crate) models: Vec<ModelEntry>,
}

/// Daily budget of a model.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct ModelEntry {
    pub(crate) name: String,
    pub(crate) dollars_per_day: f64,
}

/// Tenant with its keys, permissions and limits.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct TenantEntry {
    pub(crate) name: String,
    /// Keys, or digests of keys as `sha256:HEX`.
    pub(crate) keys: Vec<String>,
    pub(crate) models: Option<BTreeSet<String>>,
    pub(crate) namespaces: Option<BTreeSet<String>>,
    #[serde(default)]
    pub(crate) admin: bool,
    pub(crate) requests_per_minute: Option<NonZeroU64>,
    pub(crate) tokens_per_minute: Option<NonZeroU64>,
    pub(crate) concurrent: Option<NonZeroU32>,
    pub(crate) dollars_per_day: Option<f64>,
    #[serde(default)]
    pub(crate) privacy: Privacy,
}
