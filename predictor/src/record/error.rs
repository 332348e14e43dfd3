//! Errors of activation records and their files.

use std::io;

/// Reason that records cannot be written, read or merged.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The reader or writer failed.
    #[error("activation records: {0}")]
    Io(#[from] io::Error),
    /// The stream is not a record file.
    #[error(
        "invalid file of activation records: {0}; expected the .npy header array that `remoe record` writes"
    )]
    NotRecords(String),
    /// The file has another format version.
    #[error(
        "cannot read activation records: format version {found}, expected {supported}; update this program, or record \
         again"
    )]
    Version {
        /// Version of the file.
        found: u64,
        /// Version of this program.
        supported: u64,
    },
    /// A field of the header is invalid.
    #[error("activation records: header field `{field}`: {message}")]
    Header {
        /// Field of the header.
        field: &'static str,
        /// Problem with its value.
        message: String,
    },
    /// The records are of another model or were recorded with other settings.
    #[error(
        "activation records of another model: `{field}` is {found}, expected {expected}; keep one file per model"
    )]
    OtherModel {
        /// Field of the header that differs.
        field: &'static str,
        /// Expected value.
        expected: String,
        /// Value of the file.
        found: String,
    },
    /// A field of a record has another size than the header requires.
    #[error("activation record: field `{field}` has {found} values, expected {expected}")]
    Shape {
        /// Field of the record.
        field: &'static str,
        /// Expected number of values.
        expected: usize,
        /// Actual number of values.
        found: usize,
    },
    /// A field of a record has an invalid value.
    #[error("activation record: field `{field}`: {message}")]
    Value {
        /// Field of the record.
        field: &'static str,
        /// Problem with the value.
        message: String,
    },
    /// A record or file would exceed its limit.
    #[error("cannot write {what}: {bytes} bytes, limit {limit}; {remedy}")]
    TooLarge {
        /// `an activation record` or `the record file`.
        what: &'static str,
        /// Required size, in bytes.
        bytes: u64,
        /// Limit, in bytes.
        limit: u64,
        /// Suggested remedy.
        remedy: &'static str,
    },
}
