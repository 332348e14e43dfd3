//! `traceparent` and `tracestate` of callers, one header per line: `p` or `s`, then the value.

use crate::memory;
use http::{HeaderMap, HeaderValue};
use remoe_otel::{TRACEPARENT, TRACESTATE, forwarded_headers, is_valid};

const BASE: usize = 1 << 16;
/// Each pair of a state is two strings, and a header's value is kept beside them.
const FACTOR: usize = 64;
const MOST_LINES: usize = 100;

pub fn run(data: &[u8]) {
    memory::within(BASE + FACTOR * data.len(), || {
        let mut headers = HeaderMap::new();
        // No server takes many more.
        for line in data.split(|byte| *byte == b'\n').take(MOST_LINES) {
            let Some((name, value)) = line.split_first() else { continue };
            let Ok(value) = HeaderValue::from_bytes(value) else { continue };
            headers.append(if *name == b's' { TRACESTATE } else { TRACEPARENT }, value);
        }
        let said = forwarded_headers(&headers);
        assert_eq!(is_valid(&headers), said.contains_key(TRACEPARENT));
        assert!(said.contains_key(TRACEPARENT) || said.is_empty());
        assert!(said.get_all(TRACEPARENT).iter().all(|parent| parent.len() == 55));
        assert!(said.get_all(TRACESTATE).iter().all(|state| state.len() <= 512));
        assert!(said.keys_len() == said.len(), "each of them once");
        assert_eq!(forwarded_headers(&said), said);
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
