//! Parser of `Range` headers with one range.

use std::ops::Range;

/// Part of a file that a request asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RequestedRange {
    Whole,
    Part(Range<u64>),
    Unsatisfiable,
}

/// Parses the `Range` header of a request for a file of `size` bytes. An invalid header requests the whole file.
pub(crate) fn requested_range(header: Option<&str>, size: u64) -> RequestedRange {
    let Some(spec) = header.and_then(|header| header.strip_prefix("bytes=")) else {
        return RequestedRange::Whole;
    };
    let Some((start, last)) = spec.split_once('-') else {
        return RequestedRange::Whole;
    };
    let (start, last) = (start.parse::<u64>(), last.parse::<u64>());
    match (start, last) {
        (Ok(start), _) if start >= size => RequestedRange::Unsatisfiable,
        (Ok(start), Ok(last)) if last >= start => RequestedRange::Part(start..size.min(last + 1)),
        (Ok(start), Err(_)) => RequestedRange::Part(start..size),
        _ => RequestedRange::Whole,
    }
}
