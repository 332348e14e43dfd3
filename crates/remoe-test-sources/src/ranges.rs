//! `Range: bytes=..` of one range.

use std::ops::Range;

/// Part of a file of `size` bytes that a request wants.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    Whole,
    Part(Range<u64>),
    Unsatisfiable,
}

pub(crate) fn wanted(header: Option<&str>, size: u64) -> Wanted {
    let Some(spec) = header.and_then(|header| header.strip_prefix("bytes=")) else {
        return Wanted::Whole;
    };
    let Some((start, last)) = spec.split_once('-') else {
        return Wanted::Whole;
    };
    let (start, last) = (start.parse::<u64>(), last.parse::<u64>());
    match (start, last) {
        (Ok(start), _) if start >= size => Wanted::Unsatisfiable,
        (Ok(start), Ok(last)) if last >= start => Wanted::Part(start..size.min(last + 1)),
        (Ok(start), Err(_)) => Wanted::Part(start..size),
        _ => Wanted::Whole,
    }
}
