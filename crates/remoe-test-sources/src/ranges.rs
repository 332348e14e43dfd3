//! `Range: bytes=..` of one range.

use std::ops::Range;

/// Part of a file of `size` bytes that a request wants.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RequestedRange {
    Whole,
    Part(Range<u64>),
    Unsatisfiable,
}

pub(crate) fn wanted(header: Option<&str>, size: u64) -> RequestedRange {
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
