//! Records as lines of text: eight hexadecimal digits of the CRC-32 of the JSON, a space, the JSON.

use crate::record::Record;

/// Longest line that is read, in bytes. Records are much shorter.
pub(crate) const MAX_LINE_BYTES: usize = 1 << 20;
/// Hexadecimal digits of a checksum.
const CHECKSUM_DIGITS: usize = 8;

/// Appends the line of `record`, with its line break, to `lines`.
pub(crate) fn write(record: &Record, lines: &mut Vec<u8>) -> Result<(), serde_json::Error> {
    let start = lines.len();
    lines.extend([b' '; CHECKSUM_DIGITS + 1]);
    serde_json::to_writer(&mut *lines, record)?;
    let digits = checksum(&lines[start + CHECKSUM_DIGITS + 1..]);
    lines[start..start + CHECKSUM_DIGITS].copy_from_slice(digits.as_bytes());
    lines.push(b'\n');
    Ok(())
}

/// Parses `line`, without its line break. Returns `None` if it is damaged.
pub(crate) fn read(line: &[u8]) -> Option<Record> {
    let (sum, rest) = line.split_at_checked(CHECKSUM_DIGITS)?;
    let json = rest.strip_prefix(b" ")?;
    // Compared as text, so that upper-case digits count as damage, too.
    (checksum(json).as_bytes() == sum).then(|| serde_json::from_slice(json).ok()).flatten()
}

/// Returns the checksum of `json` as [`CHECKSUM_DIGITS`] hexadecimal digits.
fn checksum(json: &[u8]) -> String {
    format!("{:0CHECKSUM_DIGITS$x}", crc32fast::hash(json))
}
