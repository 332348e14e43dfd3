//! Several files of one model become one.

use crate::record::{Damage, Reader, RecordError, RecordWriter};
use std::io::{Read, Write};

/// Summary of a merge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merged {
    /// Whole records that were copied.
    pub records: u64,
    /// Length of the new file.
    pub bytes: u64,
    /// Bytes that were skipped in each source.
    pub damage: Vec<Vec<Damage>>,
}

/// Writes the whole records of `sources`, in order, behind one header into `target`, at most
/// `max_bytes` in all.
///
/// # Errors
/// A source is of another model than the first ([`RecordError::OtherModel`]), there is no source, the
/// file would become too large, or a stream fails.
pub fn merge<R: Read>(
    sources: impl IntoIterator<Item = R>,
    target: impl Write,
    max_bytes: u64,
) -> Result<Merged, RecordError> {
    // All headers are compared before the first byte is written.
    let readers = sources.into_iter().map(Reader::new).collect::<Result<Vec<_>, _>>()?;
    let Some(header) = readers.first().map(|reader| reader.header().clone()) else {
        return Err(RecordError::NotRecords("missing input file".to_owned()));
    };
    readers.iter().try_for_each(|reader| header.require_same(reader.header()))?;
    let mut writer = RecordWriter::new(target, header, 0, max_bytes)?;
    let mut merged = Merged { records: 0, bytes: 0, damage: Vec::new() };
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
