//! W3C trace context: parses and checks headers, and writes them. Pure.

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};

/// Header with the trace id and the span id of the caller.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Header with data that tracing systems add.
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Size of the compact form of a sampled span's context: trace id and span id.
pub const CONTEXT_BYTES: usize = 24;
/// Length of a `traceparent` of version 0: `00-<32 parse_hex>-<16 parse_hex>-<2 parse_hex>`.
const TRACEPARENT_BYTES: usize = 55;
/// Longest `tracestate` that is forwarded, in bytes. A longer one is dropped; the `traceparent` stays.
const MAX_STATE_BYTES: usize = 512;

/// Returns the compact form of a context.
pub(crate) fn pack(trace: TraceId, span: SpanId) -> [u8; CONTEXT_BYTES] {
    let mut bytes = [0; CONTEXT_BYTES];
    bytes[..16].copy_from_slice(&trace.to_bytes());
    bytes[16..].copy_from_slice(&span.to_bytes());
    bytes
}

/// Parses the compact form of a sampled context. The context is invalid if an id is zero.
pub(crate) fn unpack(bytes: &[u8; CONTEXT_BYTES]) -> SpanContext {
    let (mut trace, mut span) = ([0; 16], [0; 8]);
    trace.copy_from_slice(&bytes[..16]);
    span.copy_from_slice(&bytes[16..]);
    let (trace, span) = (TraceId::from_bytes(trace), SpanId::from_bytes(span));
    SpanContext::new(trace, span, TraceFlags::SAMPLED, true, TraceState::default())
}

/// Reports if `headers` have a valid `traceparent`.
#[must_use]
pub fn is_valid(headers: &HeaderMap) -> bool {
    parse_traceparent(headers).is_some()
}

/// Returns the headers that are forwarded for the context in `headers`. For tests that nothing else is.
#[must_use]
pub fn forwarded_headers(headers: &HeaderMap) -> HeaderMap {
    let mut written = HeaderMap::new();
    if let Some(context) = read(headers) {
        write(&context, &mut written);
    }
    written
}

/// Parses the context in `headers`. Returns `None` if it is missing or invalid.
pub(crate) fn read(headers: &HeaderMap) -> Option<SpanContext> {
    let (trace, span, flags) = parse_traceparent(headers)?;
    Some(SpanContext::new(trace, span, flags, true, trace_state(headers)))
}

/// Writes `context` to `headers`, in place of any other.
pub(crate) fn write(context: &SpanContext, headers: &mut HeaderMap) {
    headers.remove(TRACEPARENT);
    headers.remove(TRACESTATE);
    if !context.is_valid() {
        return;
    }
    let flags = u8::from(context.is_sampled());
    let parent = format!("00-{:032x}-{:016x}-{flags:02x}", context.trace_id(), context.span_id());
    if let Ok(parent) = HeaderValue::from_str(&parent) {
        headers.insert(TRACEPARENT, parent);
    }
    let state = context.trace_state().header();
    if let Some(state) = HeaderValue::from_str(&state).ok().filter(|state| !state.is_empty()) {
        headers.insert(TRACESTATE, state);
    }
}

/// Parses `traceparent`. Returns `None` if it is missing, repeated or invalid.
fn parse_traceparent(headers: &HeaderMap) -> Option<(TraceId, SpanId, TraceFlags)> {
    let mut values = headers.get_all(TRACEPARENT).iter();
    let (value, None) = (values.next()?.as_bytes(), values.next()) else { return None };
    let (version, rest) = (parse_hex(value.get(..2)?)?, value.get(TRACEPARENT_BYTES..)?);
    // Later versions may append fields after a dash. Version 255 is invalid.
    let is_valid_length = match version {
        0 => rest.is_empty(),
        1..=254 => rest.is_empty() || rest.starts_with(b"-"),
        _ => false,
    };
    if !is_valid_length || [2, 35, 52].iter().any(|&index| value.get(index) != Some(&b'-')) {
        return None;
    }
    let (trace, span) = (parse_hex(value.get(3..35)?)?, parse_hex(value.get(36..52)?)?);
    let flags = parse_hex(value.get(53..TRACEPARENT_BYTES)?)? as u8;
    (trace != 0 && span != 0).then(|| {
        // Version 0 defines only this flag.
        let flags = TraceFlags::new(flags & TraceFlags::SAMPLED.to_u8());
        (TraceId::from(trace), SpanId::from(span as u64), flags)
    })
}

/// Parses at most 32 lower-case hexadecimal digits.
fn parse_hex(text: &[u8]) -> Option<u128> {
    text.iter().try_fold(0, |number, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u128::from(digit))
    })
}

/// Returns the `tracestate`; empty if it is too long or invalid.
fn trace_state(headers: &HeaderMap) -> TraceState {
    let mut text = String::new();
    for value in headers.get_all(TRACESTATE) {
        let Ok(value) = value.to_str() else { return TraceState::default() };
        if text.len() + value.len() >= MAX_STATE_BYTES {
            return TraceState::default();
        }
        if !text.is_empty() {
            text.push(',');
        }
        text.push_str(value);
    }
    text.parse().unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const SPAN: &str = "00f067aa0ba902b7";

    fn headers(pairs: &[(HeaderName, &[u8])]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name, HeaderValue::from_bytes(value).unwrap());
        }
        headers
    }

    fn parent(value: &str) -> Option<SpanContext> {
        read(&headers(&[(TRACEPARENT, value.as_bytes())]))
    }

    #[test]
    fn context_is_written_as_it_was_read() {
        for flags in ["00", "01"] {
            let written = headers(&[
                (TRACEPARENT, format!("00-{TRACE}-{SPAN}-{flags}").as_bytes()),
                (TRACESTATE, b"rojo=1, congo=t61rcWkgMzE"),
                (TRACESTATE, b"third@vendor=x"),
            ]);
            let context = read(&written).unwrap();
            assert_eq!(context.trace_id().to_string(), TRACE);
            assert_eq!(context.span_id().to_string(), SPAN);
            assert_eq!(context.is_sampled(), flags == "01");
            assert!(context.is_remote() && is_valid(&written));
            let mut written = headers(&[(TRACEPARENT, b"of another"), (TRACESTATE, b"of=another")]);
            write(&context, &mut written);
            assert_eq!(written[TRACEPARENT], format!("00-{TRACE}-{SPAN}-{flags}"));
            assert_eq!(written[TRACESTATE], "rojo=1,congo=t61rcWkgMzE,third@vendor=x");
            assert_eq!(written.len(), 2);
        }
        let mut written = headers(&[(TRACEPARENT, b"of another")]);
        write(&SpanContext::empty_context(), &mut written);
        assert!(written.is_empty());
    }

    #[test]
    fn compact_context_is_read_as_written() {
        let context = parent(&format!("00-{TRACE}-{SPAN}-01")).unwrap();
        let packed = pack(context.trace_id(), context.span_id());
        assert_eq!(unpack(&packed), context);
        assert!(!unpack(&[0; CONTEXT_BYTES]).is_valid());
    }

    #[test]
    fn later_versions_are_read_as_version_zero() {
        assert!(parent(&format!("01-{TRACE}-{SPAN}-01")).is_some());
        let context = parent(&format!("fe-{TRACE}-{SPAN}-ff-what-comes")).unwrap();
        assert_eq!(context.trace_flags(), TraceFlags::SAMPLED);
        assert!(parent(&format!("01-{TRACE}-{SPAN}-01what")).is_none());
    }

    #[test]
    fn invalid_traceparent_is_ignored() {
        let upper = TRACE.to_uppercase();
        let zero = "0".repeat(32);
        let long = "a".repeat(100_000);
        for wrong in [
            "",
            "00",
            "-",
            "----",
            &format!("00-{TRACE}-{SPAN}"),
            &format!("00-{TRACE}-{SPAN}-1"),
            &format!("00-{TRACE}-{SPAN}-01-"),
            &format!("00-{TRACE}-{SPAN}-01-more"),
            &format!("00-{TRACE}-{SPAN}-0x"),
            &format!("00-{TRACE}-{SPAN}-+1"),
            &format!("00-{upper}-{SPAN}-01"),
            &format!("00-{zero}-{SPAN}-01"),
            &format!("00-{TRACE}-0000000000000000-01"),
            &format!("00-{TRACE}_{SPAN}-01"),
            &format!("00 {TRACE} {SPAN} 01"),
            &format!("ff-{TRACE}-{SPAN}-01"),
            &format!("0-{TRACE}-{SPAN}-001"),
            &format!(" 00-{TRACE}-{SPAN}-01"),
            &format!("00-{TRACE}-{SPAN}-01 "),
            &format!("00-{SPAN}-{TRACE}-01"),
            &format!("00-+{}-{SPAN}-01", &TRACE[1..]),
            &long,
            "00-'; drop table traces; --aaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        ] {
            assert!(parent(wrong).is_none(), "{wrong:.80}");
        }
        assert!(read(&headers(&[(TRACEPARENT, &[0xff; TRACEPARENT_BYTES])])).is_none());
        let good = format!("00-{TRACE}-{SPAN}-01");
        let twice = headers(&[(TRACEPARENT, good.as_bytes()), (TRACEPARENT, good.as_bytes())]);
        assert!(read(&twice).is_none(), "ambiguous");
        assert!(read(&HeaderMap::new()).is_none());
    }

    #[test]
    fn invalid_tracestate_is_dropped_alone() {
        let good = format!("00-{TRACE}-{SPAN}-01");
        for wrong in [&b"no pair"[..], b"UPPER=1", &[0xff], "k=".repeat(400).as_bytes(), &[b'a'; 600]] {
            let written = headers(&[(TRACEPARENT, good.as_bytes()), (TRACESTATE, wrong)]);
            let context = read(&written).unwrap();
            assert_eq!(context.trace_state(), &TraceState::default(), "{wrong:?}");
        }
    }
}
