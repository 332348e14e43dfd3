//! The last event of a stream, held until what it cost is written down and it is stored.

use bytes::{Bytes, BytesMut};

/// Most bytes that are held. A last event that is longer passes by.
const MOST: usize = 16 << 20;

/// Looks for the last event of a stream, which may come in pieces.
pub(crate) struct Ending {
    /// Lines with which it begins.
    marks: &'static [&'static [u8]],
    /// The line that goes on, as long as it may be one of them.
    line: Vec<u8>,
    /// The line cannot be one of them.
    is_other: bool,
    held: BytesMut,
    is_reached: bool,
}

impl Ending {
    /// Looks for an event that begins with one of `marks`.
    pub(crate) fn new(marks: &'static [&'static [u8]]) -> Self {
        Self { marks, line: Vec::new(), is_other: false, held: BytesMut::new(), is_reached: false }
    }

    /// Takes the next bytes and returns those that may leave. Pieces of a mark leave with what comes before it: without
    /// the rest of its event they say nothing.
    pub(crate) fn take(&mut self, data: Bytes) -> Bytes {
        if self.is_reached {
            self.held.extend_from_slice(&data);
            return if self.held.len() > MOST { self.release() } else { Bytes::new() };
        }
        for (at, &byte) in data.iter().enumerate() {
            if !self.is_other {
                self.line.push(byte);
                self.is_other = !self.marks.iter().any(|mark| mark.starts_with(&self.line));
            }
            if byte == b'\n' {
                if !self.is_other && self.marks.contains(&self.line.as_slice()) {
                    self.is_reached = true;
                    // As much of the mark as has not left.
                    let begin = (at + 1).saturating_sub(self.line.len());
                    self.held.extend_from_slice(&data[begin..]);
                    return data.slice(..begin);
                }
                self.line.clear();
                self.is_other = false;
            }
        }
        data
    }

    /// Returns whether anything is held.
    pub(crate) fn is_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// Returns what is held; nothing is from now on but what is longer than may be held.
    pub(crate) fn release(&mut self) -> Bytes {
        self.held.split().freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARKS: &[&[u8]] = &[b"data: [DONE]\n", b"event: end\n"];

    #[test]
    fn last_event_is_held_in_any_pieces() {
        for last in ["data: [DONE]\n\n", "event: end\ndata: {\"a\":1}\n\n"] {
            let before = "event: endless\ndata: {\"text\":\"data: [DONE]\\nevent: end\"}\n\n";
            let text = format!("{before}{last}");
            for size in 1..=text.len() {
                let mut end = Ending::new(MARKS);
                let pieces =
                    text.as_bytes().chunks(size).map(|piece| end.take(Bytes::copy_from_slice(piece)));
                let left: Vec<u8> = pieces.flatten().collect();
                assert!(end.is_held(), "{size}");
                let held = end.release();
                assert_eq!([&left[..], &held[..]].concat(), text.as_bytes(), "{size}");
                // The whole mark at most.
                assert!(left.len() < before.len() + last.find('\n').unwrap_or(0) + 1, "{size}");
                assert!(
                    held.ends_with(last.split_once('\n').map_or("", |(_, rest)| rest).as_bytes()),
                    "{size}"
                );
            }
        }
    }

    #[test]
    fn event_that_is_too_long_passes_by() {
        let mut end = Ending::new(MARKS);
        assert!(end.take(Bytes::from_static(b"event: end\n")).is_empty());
        let long = Bytes::from(vec![b'x'; MOST]);
        assert_eq!(end.take(long).len(), MOST + "event: end\n".len());
        assert!(!end.is_held());
    }
}
