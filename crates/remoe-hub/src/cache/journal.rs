//! Append-only journal of the bytes of a file that are in the cache.
//!
//! A record is written after its bytes. Bytes in the kernel's page cache survive the end of a process, but not a
//! crash of the machine: a record without a sync carries the boot id and is valid until the next boot. After the
//! file is synced to disk, records that are always valid follow. A reader finds records by their magic number and
//! checksum, so that a torn record loses only itself.

use rangemap::RangeSet;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

const MAGIC: [u8; 4] = *b"rmj1";
/// Bytes of a record: magic number, start, end, boot id and CRC-32.
const RECORD_BYTES: usize = 4 + 8 + 8 + 8 + 4;
/// File of the kernel with a random id of the current boot.
const BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";
/// Boot id of records of synced bytes, which are valid after any boot.
const ANY_BOOT: u64 = 0;

/// The journal of one file.
#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    /// Length of the part that has been read, in bytes.
    read_bytes: u64,
    /// Id of the current boot. `None` if the kernel does not provide one.
    boot_id: Option<u64>,
}

/// Kind of change in a journal since it was last read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum JournalChange {
    /// Records were appended, or nothing changed.
    Appended,
    /// All records were discarded, because the file's checksum was wrong.
    Discarded,
}

impl Journal {
    /// Opens the journal at `path`, or creates it.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).append(true).create(true).open(path)?;
        Ok(Self { file, read_bytes: 0, boot_id: current_boot_id() })
    }

    /// Adds the ranges of records that were appended since the last call to `complete`.
    pub(super) fn refresh(&mut self, complete: &mut RangeSet<u64>) -> io::Result<JournalChange> {
        let length = self.file.metadata()?.len();
        let change = if length < self.read_bytes {
            self.read_bytes = 0;
            complete.clear();
            JournalChange::Discarded
        } else {
            JournalChange::Appended
        };
        let mut bytes = vec![0; usize::try_from(length - self.read_bytes).unwrap_or(0)];
        self.file.read_exact_at(&mut bytes, self.read_bytes)?;
        let mut offset = 0;
        while let Some(record) = bytes.get(offset..offset + RECORD_BYTES) {
            match parse(record) {
                Some(Record { range, boot_id }) => {
                    if boot_id == ANY_BOOT || Some(boot_id) == self.boot_id {
                        complete.insert(range);
                    }
                    offset += RECORD_BYTES;
                }
                // Torn: searches for the start of the next record.
                None => offset += 1,
            }
        }
        self.read_bytes += offset as u64;
        Ok(change)
    }

    /// Records that the bytes `range` have been written to `data`, but not synced.
    pub(super) fn append(&mut self, data: &File, range: &Range<u64>) -> io::Result<()> {
        match self.boot_id {
            Some(boot_id) => self.write(range, boot_id),
            // Without a boot id, only synced bytes can be recorded.
            None => self.append_synced(data, std::slice::from_ref(range)),
        }
    }

    /// Syncs `data` to disk, then records that the bytes `ranges` are there.
    pub(super) fn append_synced(&mut self, data: &File, ranges: &[Range<u64>]) -> io::Result<()> {
        data.sync_data()?;
        ranges.iter().try_for_each(|range| self.write(range, ANY_BOOT))?;
        self.file.sync_data()
    }

    /// Discards all records, for all processes.
    pub(super) fn discard_all(&mut self) -> io::Result<()> {
        self.file.set_len(0)
    }

    fn write(&mut self, range: &Range<u64>, boot_id: u64) -> io::Result<()> {
        let mut record = Vec::with_capacity(RECORD_BYTES);
        record.extend(MAGIC);
        for number in [range.start, range.end, boot_id] {
            record.extend(number.to_le_bytes());
        }
        record.extend(crc32fast::hash(&record).to_le_bytes());
        // One write call, because appending is atomic between processes of one machine. If two machines append to
        // a shared volume at once, a record may be lost, and its bytes are fetched again.
        self.file.write_all(&record)
    }
}

/// A parsed record of the journal.
struct Record {
    range: Range<u64>,
    boot_id: u64,
}

fn parse(record: &[u8]) -> Option<Record> {
    let (body, checksum) = record.split_last_chunk::<4>()?;
    let numbers = body.strip_prefix(&MAGIC)?;
    if crc32fast::hash(body) != u32::from_le_bytes(*checksum) {
        return None;
    }
    let (words, _) = numbers.as_chunks::<8>();
    let [start, end, boot_id] = words else {
        return None;
    };
    let [start, end, boot_id] = [start, end, boot_id].map(|word| u64::from_le_bytes(*word));
    (start < end).then_some(Record { range: start..end, boot_id })
}

/// Returns the first 64 bits of the kernel's boot id.
fn current_boot_id() -> Option<u64> {
    let text = std::fs::read_to_string(BOOT_ID_FILE).ok()?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    u64::from_str_radix(&digits, 16).ok().filter(|boot_id| *boot_id != ANY_BOOT)
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn complete(path: &Path) -> Vec<Range<u64>> {
        let mut set = RangeSet::new();
        Journal::open(path).unwrap().refresh(&mut set).unwrap();
        set.iter().cloned().collect()
    }

    #[test]
    fn truncated_journal_keeps_its_whole_records() {
        let folder = tempfile::tempdir().unwrap();
        let (path, data) = (folder.path().join("journal"), tempfile::tempfile().unwrap());
        let mut journal = Journal::open(&path).unwrap();
        journal.append(&data, &(0..10)).unwrap();
        journal.append(&data, &(20..30)).unwrap();
        let whole = std::fs::read(&path).unwrap();
        assert_eq!(complete(&path), [0..10, 20..30]);
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            let kept: &[Range<u64>] = if length < RECORD_BYTES { &[] } else { &[0..10] };
            assert_eq!(complete(&path), kept, "{length} bytes");
            // A record behind a torn one is read.
            Journal::open(&path).unwrap().append(&data, &(5..15)).unwrap();
            let grown: &[Range<u64>] = if length < RECORD_BYTES { &[5..15] } else { &[0..15] };
            assert_eq!(complete(&path), grown, "{length} bytes");
        }
    }

    #[test]
    fn unsynced_record_of_another_boot_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let (path, data) = (folder.path().join("journal"), tempfile::tempfile().unwrap());
        let mut journal = Journal::open(&path).unwrap();
        journal.boot_id = Some(7);
        journal.append(&data, &(0..10)).unwrap();
        assert_eq!(complete(&path), []);
        journal.append_synced(&data, &[0..5]).unwrap();
        assert_eq!(complete(&path), [0..5]);
    }

    #[test]
    fn discarded_records_disappear_for_all_processes() {
        let folder = tempfile::tempdir().unwrap();
        let (path, data) = (folder.path().join("journal"), tempfile::tempfile().unwrap());
        let (mut one, mut other) = (Journal::open(&path).unwrap(), Journal::open(&path).unwrap());
        let mut set = RangeSet::new();
        one.append(&data, &(0..10)).unwrap();
        assert_eq!(other.refresh(&mut set).unwrap(), JournalChange::Appended);
        one.discard_all().unwrap();
        assert_eq!(other.refresh(&mut set).unwrap(), JournalChange::Discarded);
        assert!(set.is_empty());
    }
}
