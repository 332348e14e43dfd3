//! A record as a line of text: eight hexadecimal digits of the CRC-32 of what follows, a space, JSON.

use crate::record::Record;
use std::io::Write;

/// Longest line that is read, in bytes: a record is much shorter.
pub(crate) const LONGEST: usize = 1 << 20;
/// Hexadecimal digits of a checksum.
const DIGITS: usize = 8;

/// Appends the line of `record`, with its end, to `lines`.
pub(crate) fn write(record: &Record, lines: &mut Vec<u8>) -> Result<(), serde_json::Error> {
    let start = lines.len();
    lines.extend([b' '; DIGITS + 1]);
    serde_json::to_writer(&mut *lines, record)?;
    let sum = crc32fast::hash(&lines[start + DIGITS + 1..]);
    // The digits have room in so many bytes.
    let _fits = write!(&mut lines[start..start + DIGITS], "{sum:08x}");
    lines.push(b'\n');
    Ok(())
}

/// The record of `line`, without its end; none where it is damaged.
pub(crate) fn read(line: &[u8]) -> Option<Record> {
    let (sum, rest) = line.split_at_checked(DIGITS)?;
    let sum = u32::from_str_radix(std::str::from_utf8(sum).ok()?, 16).ok()?;
    let json = rest.strip_prefix(b" ")?;
    (crc32fast::hash(json) == sum).then(|| serde_json::from_slice(json).ok()).flatten()
}
