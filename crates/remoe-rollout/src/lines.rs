//! Reads lines of a child's output with bounded memory, even if the child writes endlessly or without line breaks.

use std::collections::VecDeque;
use tokio::io::{AsyncRead, AsyncReadExt};

/// Maximum bytes of a line; longer lines are split.
const MAX_LINE_BYTES: usize = 16 << 10;

/// Calls `each` for every line of `reader` until it ends or fails.
pub(crate) async fn each_line(mut reader: impl AsyncRead + Unpin, mut each: impl FnMut(&str)) {
    let mut chunk = vec![0; 8 << 10];
    let mut line = Vec::new();
    // A failed pipe is treated like a closed one.
    while let Ok(count @ 1..) = reader.read(&mut chunk).await {
        for piece in chunk[..count].split_inclusive(|&byte| byte == b'\n') {
            for slice in piece.chunks(MAX_LINE_BYTES) {
                if line.len() + slice.len() > MAX_LINE_BYTES {
                    flush(&mut line, &mut each);
                }
                line.extend_from_slice(slice);
            }
            if piece.ends_with(b"\n") {
                flush(&mut line, &mut each);
            }
        }
    }
    if !line.is_empty() {
        flush(&mut line, &mut each);
    }
}

fn flush(line: &mut Vec<u8>, each: &mut impl FnMut(&str)) {
    let text = String::from_utf8_lossy(line);
    each(text.trim_end_matches(['\n', '\r']));
    line.clear();
}

/// Last lines of a log, bounded in lines and bytes.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    lines: VecDeque<String>,
    bytes: usize,
}

impl Tail {
    const MAX_LINES: usize = 20;
    const MAX_BYTES: usize = 32 << 10;

    pub(crate) fn push(&mut self, line: &str) {
        if line.is_empty() {
            return;
        }
        self.bytes += line.len();
        self.lines.push_back(line.to_owned());
        while self.lines.len() > Self::MAX_LINES || self.bytes > Self::MAX_BYTES {
            let Some(oldest) = self.lines.pop_front() else { break };
            self.bytes -= oldest.len();
        }
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.iter().cloned().collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn lines_of(bytes: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(each_line(bytes, |line| lines.push(line.to_owned())));
        lines
    }

    #[test]
    fn splits_at_line_breaks_and_keeps_the_rest() {
        assert_eq!(lines_of(b"one\r\ntwo\n\nthree"), ["one", "two", "", "three"]);
    }

    #[test]
    fn a_line_without_end_comes_in_bounded_pieces() {
        let lines = lines_of(&vec![b'x'; 100_000]);
        assert!(lines.iter().all(|line| line.len() <= MAX_LINE_BYTES));
        assert_eq!(lines.iter().map(String::len).sum::<usize>(), 100_000);
    }

    #[test]
    fn the_tail_is_bounded_in_lines_and_bytes() {
        let mut tail = Tail::default();
        for number in 0..1000 {
            tail.push(&number.to_string());
        }
        assert_eq!(tail.lines().len(), Tail::MAX_LINES);
        assert_eq!(tail.lines().last().unwrap(), "999");
        for _ in 0..Tail::MAX_LINES {
            tail.push(&"y".repeat(MAX_LINE_BYTES));
        }
        assert!(tail.lines().iter().map(String::len).sum::<usize>() <= Tail::MAX_BYTES);
    }
}
