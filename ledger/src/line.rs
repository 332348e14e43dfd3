//! A record as a line of text: eight hexadecimal digits of the CRC-32 of what follows, a space, JSON.

use crate::record::Record;
use std::io::Write;

/// Longest line that is read, in bytes: a record is much shorter.
pub(crate) const LONGEST: usize = 1 << 20;

/// The line of `record`, with its end.
pub(crate) fn write(record: &Record) -> Result<Vec<u8>, serde_json::Error> {
    let mut line = vec![b' '; 9];
    serde_json::to_writer(&mut line, record)?;
    let sum = crc32fast::hash(&line[9..]);
    // Eight digits have room in eight bytes.
    let _fits = write!(&mut line[..8], "{sum:08x}");
    line.push(b'\n');
    Ok(line)
}

/// The record of `line`, without its end; none where it is damaged.
pub(crate) fn read(line: &[u8]) -> Option<Record> {
    let (sum, rest) = line.split_at_checked(8)?;
    let sum = u32::from_str_radix(std::str::from_utf8(sum).ok()?, 16).ok()?;
    let json = rest.strip_prefix(b" ")?;
    (crc32fast::hash(json) == sum).then(|| serde_json::from_slice(json).ok()).flatten()
}
