//! Writer of record files.

use crate::record::{ActivationRecord, RecordError, RecordHeader, encode_header, encode_record, scan};
use std::io::{Read, Write};

/// Returns the position at which to continue an existing file: everything from there on must be truncated first.
/// Returns 0 if the file is empty or its header is incomplete.
///
/// Steps to continue a file: read it with this function, `set_len` to the result, seek to it, and create a
/// [`RecordWriter`].
///
/// # Errors
/// The file is of another model ([`RecordError::OtherModel`]), is not a record file, or cannot be read.
pub fn resume_position(mut existing: impl Read, header: &RecordHeader) -> Result<u64, RecordError> {
    let encoded = encode_header(header)?;
    let mut start = Vec::new();
    existing.by_ref().take(encoded.len() as u64).read_to_end(&mut start)?;
    if start.len() < encoded.len() && encoded.starts_with(&start) {
        return Ok(0);
    }
    let scan = scan(start.chain(existing))?;
    header.require_same(&scan.header)?;
    Ok(scan.valid_bytes)
}

/// Writer of records, each in a single `write_all`.
#[derive(Debug)]
pub struct RecordWriter<W> {
    target: W,
    header: RecordHeader,
    bytes: u64,
    max_bytes: u64,
}

impl<W: Write> RecordWriter<W> {
    /// Creates a writer into `target`, which is at byte `position` of the file. At position 0, it writes the header.
    /// The file never exceeds `max_bytes` (default [`crate::record::DEFAULT_FILE_BYTES`]).
    ///
    /// # Errors
    /// The header is invalid, or the write fails.
    pub fn new(
        mut target: W,
        header: RecordHeader,
        position: u64,
        max_bytes: u64,
    ) -> Result<Self, RecordError> {
        let encoded = encode_header(&header)?;
        let mut bytes = position;
        if position == 0 {
            target.write_all(&encoded)?;
            bytes = encoded.len() as u64;
        }
        Ok(Self { target, header, bytes, max_bytes })
    }

    /// Returns the header.
    pub fn header(&self) -> &RecordHeader {
        &self.header
    }

    /// Returns the size of the file, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends one record.
    ///
    /// # Errors
    /// The record does not match the header, or the record or the file would become too large; then nothing is
    /// written. Or the write fails; then the file may end with an incomplete record: continue only through
    /// [`resume_position`].
    pub fn append(&mut self, record: &ActivationRecord) -> Result<(), RecordError> {
        let encoded = encode_record(&self.header, record)?;
        let bytes = self.bytes.saturating_add(encoded.len() as u64);
        if bytes > self.max_bytes {
            return Err(RecordError::TooLarge {
                what: "the record file",
                bytes,
                limit: self.max_bytes,
                remedy: "continue in another file; files of one model can be merged",
            });
        }
        self.target.write_all(&encoded)?;
        self.bytes = bytes;
        Ok(())
    }

    /// Flushes and returns the target.
    ///
    /// # Errors
    /// The flush fails.
    pub fn finish(mut self) -> Result<W, RecordError> {
        self.target.flush()?;
        Ok(self.target)
    }
}
