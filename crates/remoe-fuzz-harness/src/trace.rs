//! Target: `traceparent` and `tracestate` headers of clients.
//!
//! Input: one header per line. A line is `p` or `s`, then the value.

use crate::memory;
use http::{HeaderMap, HeaderValue};
use remoe_otel::{TRACEPARENT, TRACESTATE, forwarded_headers, is_valid};

const BASE_BYTES: usize = 1 << 16;
/// Memory limit per byte: each pair of a `tracestate` becomes two strings, and the header's value is kept too.
const BYTES_PER_INPUT_BYTE: usize = 64;
const LINE_LIMIT: usize = 100;

pub fn run(data: &[u8]) {
    memory::with_limit(BASE_BYTES + BYTES_PER_INPUT_BYTE * data.len(), || {
        let mut headers = HeaderMap::new();
        // Servers limit the number of headers to about this many.
        for line in data.split(|byte| *byte == b'\n').take(LINE_LIMIT) {
            let Some((name, value)) = line.split_first() else { continue };
            let Ok(value) = HeaderValue::from_bytes(value) else { continue };
            headers.append(if *name == b's' { TRACESTATE } else { TRACEPARENT }, value);
        }
        let forwarded = forwarded_headers(&headers);
        assert_eq!(is_valid(&headers), forwarded.contains_key(TRACEPARENT));
        assert!(forwarded.contains_key(TRACEPARENT) || forwarded.is_empty());
        assert!(forwarded.get_all(TRACEPARENT).iter().all(|parent| parent.len() == 55));
        assert!(forwarded.get_all(TRACESTATE).iter().all(|state| state.len() <= 512));
        assert!(forwarded.keys_len() == forwarded.len(), "each of them once");
        assert_eq!(forwarded_headers(&forwarded), forwarded);
    });
}

pub fn seeds() -> Vec<Vec<u8>> {
    let parent = "p00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    [
        parent.to_owned(),
        format!("{parent}\nsrojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
        format!("{parent}\nsa@b=1, c*/_-d = \nse=f=g"),
        format!("{parent}\n{parent}"),
        "pcc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-ff-more".to_owned(),
        format!("p00-{}-{}-00", "0".repeat(32), "1".repeat(16)),
    ]
    .map(String::into_bytes)
    .into()
}
