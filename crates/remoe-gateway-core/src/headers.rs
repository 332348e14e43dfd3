//! Headers between clients, the gateway and main functions: names, and which of them are handed on.

use crate::caller::Caller;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header, response};
use remoe_http::internal_headers::{ACTIVATIONS, COST_PLACEHOLDER, RATES, RESOLVED, TENANT, TIMING};
use remoe_otel::{TRACEPARENT, TRACESTATE, is_valid};

/// Response header of a request that waited for a cold start.
pub(crate) const COLD_START: HeaderName = HeaderName::from_static("x-remoe-cold-start");
/// Request header that asks for the cost, and response header or trailer that states it in nano-dollars.
pub(crate) const COST: HeaderName = HeaderName::from_static("x-remoe-cost");
/// Response header with the spent share of the day's budget, once that is large.
pub(crate) const BUDGET: HeaderName = HeaderName::from_static("x-remoe-budget");
/// Trailers of a stream.
pub(crate) const TRAILERS: &str = "server-timing, x-remoe-cost";

/// Hop-by-hop headers, and keys of this gateway.
const OWN: [&str; 13] = [
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

/// Returns the headers of a request that a main function gets.
pub(crate) fn forwarded(headers: &HeaderMap, caller: &Caller) -> HeaderMap {
    let named = connection_headers(headers);
    let pairs = headers.iter().filter(|(name, _)| !is_own(name, &named));
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

/// Returns the names that `Connection` declares to be hop-by-hop.
fn connection_headers(headers: &HeaderMap) -> Vec<String> {
    let values = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(|name| name.trim().to_ascii_lowercase()).collect()
}

fn is_own(name: &HeaderName, connection: &[String]) -> bool {
    // The gateway writes these itself.
    [TENANT, TIMING, RATES, COST_PLACEHOLDER, ACTIVATIONS, RESOLVED].contains(name)
        || OWN.contains(&name.as_str())
        || connection.iter().any(|own| own == name.as_str())
}

/// Returns whether a client with these headers takes trailers.
pub(crate) fn takes_trailers(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::TE).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|value| value.trim().eq_ignore_ascii_case("trailers"))
}

/// Removes the headers of a main function's answer that are meant for the gateway or its connection.
pub(crate) fn strip(head: &mut response::Parts) {
    let named = connection_headers(&head.headers);
    for name in OWN.iter().copied().filter(|name| !matches!(*name, "content-length" | "trailer")) {
        head.headers.remove(name);
    }
    for name in named {
        head.headers.remove(name);
    }
    for name in [TENANT, TIMING, RATES] {
        head.headers.remove(name);
    }
    // It is the connection to the client that decides.
    head.version = axum::http::Version::HTTP_11;
    head.extensions.clear();
}
