//! Which bytes of a file are in the cache: records that are only ever appended.
//!
//! A record is written after its bytes. Bytes that only the page cache of the kernel has survive the end
//! of any process, but not the end of the machine: such records carry the identity of the running system
//! and count for as long as it runs. Once the file has been written to the disk, records that always count
//! follow. Records are found by their mark and checksum, so that a torn one costs nothing but itself.

use rangemap::RangeSet;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

const MARK: [u8; 4] = *b"rmj1";
/// Mark, start, end, system and checksum.
const RECORD: usize = 4 + 8 + 8 + 8 + 4;
/// Where the kernel tells the identity of the running system.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// The system of records that always count.
const EVERY_SYSTEM: u64 = 0;

/// The journal of one file.
#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    /// Bytes of it that have been read.
    read: u64,
    system: Option<u64>,
}

/// Kind of change in a journal since it was last read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum JournalChange {
    /// No bytes were taken back.
    More,
    /// All bytes were taken back, because the file's bytes were wrong.
    Dropped,
}

impl Journal {
    /// Opens the journal at `path`, or begins one.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).append(true).create(true).open(path)?;
        Ok(Self { file, read: 0, system: running_system() })
    }

    /// Adds to `complete` what was recorded since the last call.
    pub(super) fn refresh(&mut self, complete: &mut RangeSet<u64>) -> io::Result<JournalChange> {
        let length = self.file.metadata()?.len();
        let news = if length < self.read {
            self.read = 0;
            complete.clear();
            JournalChange::Dropped
        } else {
            JournalChange::More
        };
        let mut bytes = vec![0; usize::try_from(length - self.read).unwrap_or(0)];
        self.file.read_exact_at(&mut bytes, self.read)?;
        let mut at = 0;
        while let Some(record) = bytes.get(at..at + RECORD) {
            match parse(record) {
                Some((range, system)) => {
                    if system == EVERY_SYSTEM || Some(system) == self.system {
                        complete.insert(range);
                    }
                    at += RECORD;
                }
                // Torn: the next one starts somewhere behind.
                None => at += 1,
            }
        }
        self.read += at as u64;
        Ok(news)
    }

    /// Records that the bytes `range` have been written to `data`.
    pub(super) fn append(&mut self, data: &File, range: &Range<u64>) -> io::Result<()> {
        match self.system {
            Some(system) => self.write(range, system),
            // Where systems cannot be told apart only the disk counts.
            None => self.append_synced(data, std::slice::from_ref(range)),
        }
    }

    /// Records that the bytes `ranges` of `data` are on the disk, once they are.
    pub(super) fn append_synced(&mut self, data: &File, ranges: &[Range<u64>]) -> io::Result<()> {
        data.sync_data()?;
        ranges.iter().try_for_each(|range| self.write(range, EVERY_SYSTEM))?;
        self.file.sync_data()
    }

    /// Takes everything back, for all processes.
    pub(super) fn drop_all(&mut self) -> io::Result<()> {
        self.file.set_len(0)
    }

    fn write(&mut self, range: &Range<u64>, system: u64) -> io::Result<()> {
        let mut record = Vec::with_capacity(RECORD);
        record.extend(MARK);
        for number in [range.start, range.end, system] {
            record.extend(number.to_le_bytes());
        }
        record.extend(crc32fast::hash(&record).to_le_bytes());
        // One write: appending is atomic between processes of one machine. Of what two machines write to a
        // shared volume at the same moment one record may be lost, and its bytes are fetched again.
        self.file.write_all(&record)
    }
}

fn parse(record: &[u8]) -> Option<(Range<u64>, u64)> {
    let (body, checksum) = record.split_last_chunk::<4>()?;
    let numbers = body.strip_prefix(&MARK)?;
    if crc32fast::hash(body) != u32::from_le_bytes(*checksum) {
        return None;
    }
    let (words, _) = numbers.as_chunks::<8>();
    let [start, end, system] = words else {
        return None;
    };
    let [start, end, system] = [start, end, system].map(|word| u64::from_le_bytes(*word));
    (start < end).then_some((start..end, system))
}

/// A number for the running system, where the kernel tells it.
fn running_system() -> Option<u64> {
    let text = std::fs::read_to_string(BOOT_ID).ok()?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    u64::from_str_radix(&digits, 16).ok().filter(|system| *system != EVERY_SYSTEM)
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
    fn a_journal_that_was_cut_anywhere_says_what_was_whole() {
        let folder = tempfile::tempdir().unwrap();
        let (path, data) = (folder.path().join("journal"), tempfile::tempfile().unwrap());
        let mut journal = Journal::open(&path).unwrap();
        journal.append(&data, &(0..10)).unwrap();
        journal.append(&data, &(20..30)).unwrap();
        let whole = std::fs::read(&path).unwrap();
        assert_eq!(complete(&path), [0..10, 20..30]);
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            let kept: &[Range<u64>] = if length < RECORD { &[] } else { &[0..10] };
            assert_eq!(complete(&path), kept, "{length} bytes");
            // What is written behind a torn record counts.
            Journal::open(&path).unwrap().append(&data, &(5..15)).unwrap();
            let grown: &[Range<u64>] = if length < RECORD { &[5..15] } else { &[0..15] };
            assert_eq!(complete(&path), grown, "{length} bytes");
        }
    }

    #[test]
    fn what_another_system_has_not_synced_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let (path, data) = (folder.path().join("journal"), tempfile::tempfile().unwrap());
        let mut journal = Journal::open(&path).unwrap();
        journal.system = Some(7);
        journal.append(&data, &(0..10)).unwrap();
        assert_eq!(complete(&path), []);
        journal.append_synced(&data, &[0..5]).unwrap();
        assert_eq!(complete(&path), [0..5]);
    }

    #[test]
    fn what_is_dropped_is_dropped_for_all() {
        let folder = tempfile::tempdir().unwrap();
        let (path, data) = (folder.path().join("journal"), tempfile::tempfile().unwrap());
        let (mut one, mut other) = (Journal::open(&path).unwrap(), Journal::open(&path).unwrap());
        let mut set = RangeSet::new();
        one.append(&data, &(0..10)).unwrap();
        assert_eq!(other.refresh(&mut set).unwrap(), JournalChange::More);
        one.drop_all().unwrap();
        assert_eq!(other.refresh(&mut set).unwrap(), JournalChange::Dropped);
        assert!(set.is_empty());
    }
}
