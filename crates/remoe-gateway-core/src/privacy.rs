//! Privacy of tenants' requests.

use serde::Deserialize;

/// Privacy of a tenant's requests: what predictions of expert usage may remember of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub enum Privacy {
    /// Each request is remembered without its text. The mean of their expert usage predicts that of tenants without
    /// records.
    Shared,
    /// Each request is remembered without its text, for predictions of this tenant alone.
    #[default]
    None,
    /// Their expert usage is added to that of all tenants. No single request is remembered.
    CountsOnly,
    /// Nothing is remembered: main functions are not asked for their expert usage.
    LeftOut,
}
