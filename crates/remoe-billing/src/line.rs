//! A record as a line of text: eight hexadecimal digits of the CRC-32 of what follows, a space, JSON.

use crate::record::Record;

/// Longest line that is read, in bytes: a record is much shorter.
pub(crate) const LONGEST: usize = 1 << 20;
/// Hexadecimal digits of a checksum.
const DIGITS: usize = 8;

/// Appends the line of `record`, with its end, to `lines`.
pub(crate) fn write(record: &Record, lines: &mut Vec<u8>) -> Result<(), serde_json::Error> {
    let start = lines.len();
    lines.extend([b' '; DIGITS + 1]);
    serde_json::to_writer(&mut *lines, record)?;
    let digits = checksum(&lines[start + DIGITS + 1..]);
    lines[start..start + DIGITS].copy_from_slice(digits.as_bytes());
    lines.push(b'\n');
    Ok(())
}

/// The record of `line`, without its end; none where it is damaged.
pub(crate) fn read(line: &[u8]) -> Option<Record> {
    let (sum, rest) = line.split_at_checked(DIGITS)?;
    let json = rest.strip_prefix(b" ")?;
    // As text: other digits of the same number, upper-case ones, are damage as well.
    (checksum(json).as_bytes() == sum).then(|| serde_json::from_slice(json).ok()).flatten()
}

/// The [`DIGITS`] of the checksum of `json`.
fn checksum(json: &[u8]) -> String {
    format!("{:0DIGITS$x}", crc32fast::hash(json))
}
