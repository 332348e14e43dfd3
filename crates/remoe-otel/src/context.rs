//! W3C trace context: what headers say, checked before anything of it is believed, and how it is written. Pure.

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};

/// Names the span that a request is part of.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Data that tracing systems add to that.
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Bytes that name a sampled span where headers would be too long: the number of its trace and its own.
pub const CONTEXT_BYTES: usize = 24;
/// Bytes of a `traceparent` of version 0: `00-<32 digits>-<16 digits>-<2 digits>`.
const LENGTH: usize = 55;
/// Bytes of `tracestate` that are taken over; a client that sends more loses all of it, not its place in the trace.
const LONGEST_STATE: usize = 512;

/// The span of `trace` with the number `span` in as few bytes as there are.
pub(crate) fn pack(trace: TraceId, span: SpanId) -> [u8; CONTEXT_BYTES] {
    let mut bytes = [0; CONTEXT_BYTES];
    bytes[..16].copy_from_slice(&trace.to_bytes());
    bytes[16..].copy_from_slice(&span.to_bytes());
    bytes
}

/// The sampled span that `bytes` name, which is none where a number is zero.
pub(crate) fn unpack(bytes: &[u8; CONTEXT_BYTES]) -> SpanContext {
    let (mut trace, mut span) = ([0; 16], [0; 8]);
    trace.copy_from_slice(&bytes[..16]);
    span.copy_from_slice(&bytes[16..]);
    let (trace, span) = (TraceId::from_bytes(trace), SpanId::from_bytes(span));
    SpanContext::new(trace, span, TraceFlags::SAMPLED, true, TraceState::default())
}

/// Reports if `headers` name a span by the rules of the W3C.
#[must_use]
pub fn is_valid(headers: &HeaderMap) -> bool {
    named(headers).is_some()
}

/// Returns the headers that are passed on for the span that `headers` name: for checks that nothing else is.
#[must_use]
pub fn said_again(headers: &HeaderMap) -> HeaderMap {
    let mut said = HeaderMap::new();
    if let Some(context) = read(headers) {
        write(&context, &mut said);
    }
    said
}

/// The span that `headers` name; none where they name none, or not by the rules of the W3C.
pub(crate) fn read(headers: &HeaderMap) -> Option<SpanContext> {
    let (trace, span, flags) = named(headers)?;
    Some(SpanContext::new(trace, span, flags, true, state(headers)))
}

/// Has `headers` name the span of `context`, and no other.
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

fn named(headers: &HeaderMap) -> Option<(TraceId, SpanId, TraceFlags)> {
    let mut values = headers.get_all(TRACEPARENT).iter();
    let (value, None) = (values.next()?.as_bytes(), values.next()) else { return None };
    let (version, rest) = (digits(value.get(..2)?)?, value.get(LENGTH..)?);
    // Versions to come may say more, after another dash; 255 is none.
    let fits = match version {
        0 => rest.is_empty(),
        1..=254 => rest.is_empty() || rest.starts_with(b"-"),
        _ => false,
    };
    if !fits || [2, 35, 52].iter().any(|&at| value.get(at) != Some(&b'-')) {
        return None;
    }
    let (trace, span) = (digits(value.get(3..35)?)?, digits(value.get(36..52)?)?);
    let flags = digits(value.get(53..LENGTH)?)? as u8;
    (trace != 0 && span != 0).then(|| {
        // Of the flags this version knows one.
        let flags = TraceFlags::new(flags & TraceFlags::SAMPLED.to_u8());
        (TraceId::from(trace), SpanId::from(span as u64), flags)
    })
}

/// Lower-case hexadecimal digits, at most 32.
fn digits(text: &[u8]) -> Option<u128> {
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
fn state(headers: &HeaderMap) -> TraceState {
    let mut text = String::new();
    for value in headers.get_all(TRACESTATE) {
        let Ok(value) = value.to_str() else { return TraceState::default() };
        if text.len() + value.len() >= LONGEST_STATE {
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
    fn what_is_read_is_written() {
        for flags in ["00", "01"] {
            let said = headers(&[
                (TRACEPARENT, format!("00-{TRACE}-{SPAN}-{flags}").as_bytes()),
                (TRACESTATE, b"rojo=1, congo=t61rcWkgMzE"),
                (TRACESTATE, b"third@vendor=x"),
            ]);
            let context = read(&said).unwrap();
            assert_eq!(context.trace_id().to_string(), TRACE);
            assert_eq!(context.span_id().to_string(), SPAN);
            assert_eq!(context.is_sampled(), flags == "01");
            assert!(context.is_remote() && is_valid(&said));
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
    fn few_bytes_name_a_span_as_well() {
        let context = parent(&format!("00-{TRACE}-{SPAN}-01")).unwrap();
        let packed = pack(context.trace_id(), context.span_id());
        assert_eq!(unpack(&packed), context);
        assert!(!unpack(&[0; CONTEXT_BYTES]).is_valid());
    }

    #[test]
    fn later_versions_are_read_as_far_as_they_are_known() {
        assert!(parent(&format!("01-{TRACE}-{SPAN}-01")).is_some());
        let context = parent(&format!("fe-{TRACE}-{SPAN}-ff-what-comes")).unwrap();
        assert_eq!(context.trace_flags(), TraceFlags::SAMPLED);
        assert!(parent(&format!("01-{TRACE}-{SPAN}-01what")).is_none());
    }

    #[test]
    fn what_breaks_the_rules_is_ignored() {
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
        assert!(read(&headers(&[(TRACEPARENT, &[0xff; LENGTH])])).is_none());
        let good = format!("00-{TRACE}-{SPAN}-01");
        let twice = headers(&[(TRACEPARENT, good.as_bytes()), (TRACEPARENT, good.as_bytes())]);
        assert!(read(&twice).is_none(), "whose is it?");
        assert!(read(&HeaderMap::new()).is_none());
    }

    #[test]
    fn a_state_that_breaks_the_rules_is_lost_and_nothing_else() {
        let good = format!("00-{TRACE}-{SPAN}-01");
        for wrong in [&b"no pair"[..], b"UPPER=1", &[0xff], "k=".repeat(400).as_bytes(), &[b'a'; 600]] {
            let said = headers(&[(TRACEPARENT, good.as_bytes()), (TRACESTATE, wrong)]);
            let context = read(&said).unwrap();
            assert_eq!(context.trace_state(), &TraceState::default(), "{wrong:?}");
        }
    }
}
