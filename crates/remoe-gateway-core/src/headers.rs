//! Headers between clients, the gateway and main functions: their names, and which are forwarded.

use crate::caller::Caller;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header, response};
use remoe_http::internal_headers::{ACTIVATIONS, COST_PLACEHOLDER, RATES, RESOLVED, TENANT, TIMING};
use remoe_otel::{TRACEPARENT, TRACESTATE, is_valid};

/// Response header of a request that waited for a cold start.
pub(crate) const COLD_START: HeaderName = HeaderName::from_static("x-remoe-cold-start");
/// Request header that asks for the cost, and response header or trailer that states it in nano-dollars.
pub(crate) const COST: HeaderName = HeaderName::from_static("x-remoe-cost");
/// Response header with the spent share of the daily budget, once that is large.
pub(crate) const BUDGET: HeaderName = HeaderName::from_static("x-remoe-budget");
/// Trailers of a stream.
pub(crate) const TRAILERS: &str = "server-timing, x-remoe-cost";

/// Headers that are not forwarded: hop-by-hop headers, and keys of this gateway.
const NOT_FORWARDED: [&str; 13] = [
    "authorization",
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-api-key",
];

/// Returns the headers that a main function gets with a request of `caller`.
pub(crate) fn forwarded(headers: &HeaderMap, caller: &Caller) -> HeaderMap {
    let hop_by_hop = connection_headers(headers);
    let pairs = headers.iter().filter(|(name, _)| !is_removed(name, &hop_by_hop));
    let mut headers: HeaderMap = pairs.map(|(name, value)| (name.clone(), value.clone())).collect();
    headers.insert(header::TE, HeaderValue::from_static("trailers"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("te"));
    let tenant = caller.tenant.as_ref().and_then(|tenant| HeaderValue::from_str(tenant.name()).ok());
    if let Some(tenant) = tenant {
        headers.insert(TENANT, tenant);
    }
    // Drops invalid traceparent headers.
    if !is_valid(&headers) {
        headers.remove(TRACEPARENT);
        headers.remove(TRACESTATE);
    }
    headers
}

/// Returns the names of headers that `Connection` declares hop-by-hop.
fn connection_headers(headers: &HeaderMap) -> Vec<String> {
    let values = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(|name| name.trim().to_ascii_lowercase()).collect()
}

/// Reports if a client's header `name` is not forwarded. `hop_by_hop` are the names that `Connection` declares.
fn is_removed(name: &HeaderName, hop_by_hop: &[String]) -> bool {
    // Only the gateway may write the internal headers.
    [TENANT, TIMING, RATES, COST_PLACEHOLDER, ACTIVATIONS, RESOLVED].contains(name)
        || NOT_FORWARDED.contains(&name.as_str())
        || hop_by_hop.iter().any(|other| other == name.as_str())
}

/// Reports if a client with these headers accepts trailers.
pub(crate) fn takes_trailers(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::TE).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|value| value.trim().eq_ignore_ascii_case("trailers"))
}

/// Removes headers of a main function's answer that are meant for the gateway or for its own connection.
pub(crate) fn strip_internal(head: &mut response::Parts) {
    let hop_by_hop = connection_headers(&head.headers);
    for name in NOT_FORWARDED.iter().copied().filter(|name| !matches!(*name, "content-length" | "trailer")) {
        head.headers.remove(name);
    }
    for name in hop_by_hop {
        head.headers.remove(name);
    }
    for name in [TENANT, TIMING, RATES] {
        head.headers.remove(name);
    }
    // The version of the connection to the client is used instead.
    head.version = axum::http::Version::HTTP_11;
    head.extensions.clear();
}
