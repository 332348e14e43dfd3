//! Merge of several record files of one model.

use crate::record::{DamagedRange, RecordError, RecordReader, RecordWriter};
use std::io::{Read, Write};

/// Summary of a merge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergeSummary {
    /// Number of copied records.
    pub records: u64,
    /// Size of the new file, in bytes.
    pub bytes: u64,
    /// Skipped bytes of each source.
    pub damage: Vec<Vec<DamagedRange>>,
}

/// Writes the complete records of `sources`, in order, behind one header into `target`, at most `max_bytes` in all.
///
/// # Errors
/// A source is of another model than the first ([`RecordError::OtherModel`]), there is no source, the file would
/// become too large, or a stream fails.
pub fn merge<R: Read>(
    sources: impl IntoIterator<Item = R>,
    target: impl Write,
    max_bytes: u64,
) -> Result<MergeSummary, RecordError> {
    // All headers are compared before the first byte is written.
    let readers = sources.into_iter().map(RecordReader::new).collect::<Result<Vec<_>, _>>()?;
    let Some(header) = readers.first().map(|reader| reader.header().clone()) else {
        return Err(RecordError::NotRecords("missing input file".to_owned()));
    };
    readers.iter().try_for_each(|reader| header.require_same(reader.header()))?;
    let mut writer = RecordWriter::new(target, header, 0, max_bytes)?;
    let mut merged = MergeSummary { records: 0, bytes: 0, damage: Vec::new() };
    for mut reader in readers {
        for record in reader.by_ref() {
            writer.append(&record?)?;
            merged.records += 1;
        }
        merged.damage.push(reader.damage().to_vec());
    }
    merged.bytes = writer.bytes();
    writer.finish()?;
    Ok(merged)
}
