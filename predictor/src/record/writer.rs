//! Appends records.

use crate::record::{ActivationRecord, RecordError, RecordHeader, encode_header, encode_record, scan};
use std::io::{Read, Write};

/// Where to go on writing a file that exists: everything from there on is to be cut off first. 0 where
/// the file is empty or its header was never finished.
///
/// Opening such a file takes four steps: read it with this function, `set_len` to the result, seek to
/// it, and make a [`RecordWriter`].
///
/// # Errors
/// The file is of another model ([`RecordError::OtherModel`]), of another form, or cannot be read.
pub fn resume_position(mut existing: impl Read, header: &RecordHeader) -> Result<u64, RecordError> {
    let encoded = encode_header(header)?;
    let mut begun = Vec::new();
    existing.by_ref().take(encoded.len() as u64).read_to_end(&mut begun)?;
    if begun.len() < encoded.len() && encoded.starts_with(&begun) {
        return Ok(0);
    }
    let scan = scan(begun.chain(existing))?;
    header.require_same(&scan.header)?;
    Ok(scan.valid_bytes)
}

/// Writes records one after another, each in a single `write_all`.
#[derive(Debug)]
pub struct RecordWriter<W> {
    target: W,
    header: RecordHeader,
    bytes: u64,
    max_bytes: u64,
}

impl<W: Write> RecordWriter<W> {
    /// Writes into `target`, which stands at byte `position` of the file: at 0 the header is written
    /// first. The file never grows beyond `max_bytes` ([`crate::record::DEFAULT_FILE_BYTES`]).
    ///
    /// # Errors
    /// The header describes no model, or the write fails.
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

    /// Model and form of the records.
    pub fn header(&self) -> &RecordHeader {
        &self.header
    }

    /// Length of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends one record.
    ///
    /// # Errors
    /// The record does not have the form of the header, it or the file would become too large (nothing
    /// is written then), or the write fails (the file may end with a part of the record; go on only
    /// through [`resume_position`]).
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
