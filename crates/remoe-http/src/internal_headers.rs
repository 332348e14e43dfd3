//! Headers between a gateway and the main functions behind it. What a client sends under these names is dropped.

use axum::http::HeaderName;

/// On whose behalf a main function works.
pub const TENANT: HeaderName = HeaderName::from_static("x-remoe-tenant");
/// Which parts of a request's time are over, as `Server-Timing` would have them.
pub const TIMING: HeaderName = HeaderName::from_static("x-remoe-timing");
/// Rates of the functions of a deployment.
pub const RATES: HeaderName = HeaderName::from_static("x-remoe-rates");
/// Cost of a request in JSON, as main functions report it at the end.
pub const TOLD: HeaderName = HeaderName::from_static("x-remoe-told");
/// Text that a main function writes as `usage.remoe.cost`. The gateway puts the cost there that it has booked.
pub const COST_PLACEHOLDER: HeaderName = HeaderName::from_static("x-remoe-cost-placeholder");
/// Asks how a request's tokens spread over the experts, and says it at the end: counts in base64, none of its text.
pub const ACTIVATIONS: HeaderName = HeaderName::from_static("x-remoe-activations");
/// Tokens of the prompt and of the answer, as main functions tell at the end: `12, 34`.
pub const TOKENS: HeaderName = HeaderName::from_static("x-remoe-tokens");
/// Says that the items of `previous_response_id` stand before the input already.
pub const RESOLVED: HeaderName = HeaderName::from_static("x-remoe-resolved");
