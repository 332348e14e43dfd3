//! Headers between a gateway and its main functions. The gateway removes them from requests of clients.

use axum::http::HeaderName;

/// Name of the request's tenant.
pub const TENANT: HeaderName = HeaderName::from_static("x-remoe-tenant");
/// Parts of the request's time so far, in the format of `Server-Timing`.
pub const TIMING: HeaderName = HeaderName::from_static("x-remoe-timing");
/// Prices of the deployment's functions.
pub const RATES: HeaderName = HeaderName::from_static("x-remoe-rates");
/// Cost of a request in JSON, which the main function reports at the end.
pub const REPORTED_COST: HeaderName = HeaderName::from_static("x-remoe-told");
/// Text that the main function writes as `usage.remoe.cost`. The gateway replaces it by the recorded cost.
pub const COST_PLACEHOLDER: HeaderName = HeaderName::from_static("x-remoe-cost-placeholder");
/// In a request: asks for its expert usage. At the end of the answer: the expert usage as counts in base64, without
/// any text.
pub const ACTIVATIONS: HeaderName = HeaderName::from_static("x-remoe-activations");
/// Prompt tokens and completion tokens, which the main function reports at the end: `12, 34`.
pub const TOKENS: HeaderName = HeaderName::from_static("x-remoe-tokens");
/// Marks a request whose input has the items of `previous_response_id` already.
pub const RESOLVED: HeaderName = HeaderName::from_static("x-remoe-resolved");
