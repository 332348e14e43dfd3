//! Errors of records and of files of records.

use std::io;

/// Why records cannot be written, read or put together.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The reader or writer failed.
    #[error("activation records: {0}")]
    Io(#[from] io::Error),
    /// The stream does not begin as a record file does.
    #[error(
        "invalid file of activation records: {0}; expected the .npy header array that `remoe record` writes"
    )]
    NotRecords(String),
    /// Written by a newer version.
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
    /// The header describes no model.
    #[error("activation records: header field `{field}`: {message}")]
    Header {
        /// Field of the header.
        field: &'static str,
        /// Problem with its value.
        message: String,
    },
    /// Records of another model, or made in another way.
    #[error(
        "activation records of another model: `{field}` is {found}, expected {expected}; keep one file per model"
    )]
    OtherModel {
        /// Field of the header that differs.
        field: &'static str,
        /// Value that was needed.
        expected: String,
        /// Value of the file.
        found: String,
    },
    /// A record does not have the form that its header promises.
    #[error("activation record: field `{field}` has {found} values, expected {expected}")]
    Shape {
        /// Field of the record.
        field: &'static str,
        /// Values that were needed.
        expected: usize,
        /// Values that are there.
        found: usize,
    },
    /// A record holds a value that cannot be.
    #[error("activation record: field `{field}`: {message}")]
    Value {
        /// Field of the record.
        field: &'static str,
        /// Reason.
        message: String,
    },
    /// A record or file would pass its limit.
    #[error("cannot write {what}: {bytes} bytes, limit {limit}; {remedy}")]
    TooLarge {
        /// `an activation record` or `the record file`.
        what: &'static str,
        /// Bytes that it would take.
        bytes: u64,
        /// Bytes that are allowed.
        limit: u64,
        /// Remedy.
        remedy: &'static str,
    },
}
