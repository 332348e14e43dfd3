//! Names of routes for metrics. Their number is bounded, whatever paths clients send.

/// Routes of all HTTP servers that have no parameters.
const FIXED_ROUTES: [&str; 16] = [
    "/",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/models",
    "/v1/placement",
    "/tokenize",
    "/detokenize",
    "/status",
    "/health",
    "/metrics",
    "/version",
    "/page",
];

/// Returns the name of the route of `path`.
#[must_use]
pub fn route_name(path: &str) -> &'static str {
    match FIXED_ROUTES.into_iter().find(|route| *route == path) {
        Some(route) => route,
        None if path.starts_with("/v1/models/") => "/v1/models/{id}",
        None if path.starts_with("/v1/responses/") => "/v1/responses/{id}",
        None if path.starts_with("/page/") => "/page",
        None => "other",
    }
}
