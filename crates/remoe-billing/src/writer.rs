//! The ledger's folder: numbered files to whose last one lines are appended. Each begins with what the files before it
//! have said of functions that are alive, so that it adds up without them.

use crate::account::LedgerTotals;
use crate::line;
use crate::read::{Entries, LedgerError, segments};
use crate::record::Record;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The file in a ledger's folder that its writer holds.
pub const LOCK: &str = "lock";

/// How much a ledger keeps.
#[derive(Debug, Clone, Copy)]
pub struct LedgerLimits {
    /// A file of so many bytes is followed by another.
    pub file_bytes: u64,
    /// Files that are kept; beyond, the oldest is removed.
    pub files: usize,
}

impl Default for LedgerLimits {
    /// 256 files of 16 MiB: some ten million requests.
    fn default() -> Self {
        Self { file_bytes: 16 << 20, files: 256 }
    }
}

/// A ledger that is open for writing, by one process at a time.
///
/// A record is handed to the system in one write before [`Self::append`] returns: it survives the end of this
/// process, however that comes, but not a loss of power.
#[derive(Debug)]
pub struct Ledger {
    folder: PathBuf,
    limits: LedgerLimits,
    tail: Mutex<Tail>,
    /// Held until the ledger is closed.
    lock: File,
    dropped: u64,
}

#[derive(Debug)]
struct Tail {
    file: File,
    number: u64,
    bytes: u64,
    /// Set if the last write may have left half a line.
    torn: bool,
    /// Set if the file does not begin yet with the state after the files before it.
    headless: bool,
    /// State of the functions that are alive, after all records so far.
    past: LedgerTotals,
}

impl Ledger {
    /// Opens the ledger in `folder`, which is made where there is none. Half a line at its end, of a writer that was
    /// killed or out of space, is dropped: [`Self::dropped_bytes`].
    ///
    /// # Errors
    /// Another process has it open, or the folder cannot be read and written.
    pub fn open(folder: &Path, limits: LedgerLimits) -> Result<Self, LedgerError> {
        let failed = |error: io::Error| LedgerError::Io { path: folder.to_owned(), error };
        std::fs::create_dir_all(folder).map_err(failed)?;
        let lock = File::create(folder.join(LOCK)).map_err(failed)?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => LedgerError::InUse { path: folder.to_owned() },
            TryLockError::Error(error) => failed(error),
        })?;
        let mut files = segments(folder)?;
        let (number, path) = files.last().cloned().unwrap_or_else(|| (1, file_of(folder, 1)));
        let mut file = append_to(&path).map_err(failed)?;
        let (bytes, dropped) = cut_torn_end(&mut file).map_err(failed)?;
        if dropped > 0 {
            tracing::warn!(path = %path.display(), dropped, "truncated ledger line dropped");
        }
        let (past, headless) = past(folder, &mut files)?;
        let tail = Mutex::new(Tail { file, number, bytes, torn: false, headless, past });
        Ok(Self { folder: folder.to_owned(), limits, tail, lock, dropped })
    }

    /// Where it is.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Bytes of half a line that was found at the end.
    #[must_use]
    pub fn dropped_bytes(&self) -> u64 {
        self.dropped
    }

    /// Appends `record`, before it what a file that begins with it needs of those before.
    ///
    /// # Errors
    /// The system did not take it: there is no space, or no folder any more. What is appended later is not harmed.
    pub fn append(&self, record: &Record) -> io::Result<()> {
        // What a panic leaves is a file position, which the system keeps, and sums that are right after every step.
        let mut tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        let written = self.write(&mut tail, record);
        // The next file says what this one could not take.
        if let Err(error) = tail.past.add(record) {
            tracing::error!(%error, "ledger record not carried over to the next file");
        }
        written
    }

    fn write(&self, tail: &mut Tail, record: &Record) -> io::Result<()> {
        let mut lines = Vec::new();
        if tail.bytes >= self.limits.file_bytes {
            self.next_file(tail)?;
        }
        if tail.torn {
            lines.push(b'\n');
        }
        if tail.headless {
            tail.past.carried(record.at()).try_for_each(|carried| line::write(&carried, &mut lines))?;
        }
        line::write(record, &mut lines)?;
        tail.torn = true;
        tail.file.write_all(&lines)?;
        (tail.torn, tail.headless) = (false, false);
        tail.bytes += lines.len() as u64;
        Ok(())
    }

    fn next_file(&self, tail: &mut Tail) -> io::Result<()> {
        let number = tail.number + 1;
        let file = append_to(&file_of(&self.folder, number))?;
        let past = std::mem::take(&mut tail.past);
        *tail = Tail { file, number, bytes: 0, torn: false, headless: true, past };
        // That the ledger keeps too much is no reason to lose a record.
        if let Err(error) = self.remove_oldest() {
            tracing::error!(%error, "cannot remove the oldest ledger files");
        }
        Ok(())
    }

    fn remove_oldest(&self) -> Result<(), LedgerError> {
        let files = segments(&self.folder)?;
        for (_, path) in files.iter().take(files.len().saturating_sub(self.limits.files.max(1))) {
            tracing::warn!(path = %path.display(), "ledger size limit reached: removing the oldest file");
            match std::fs::remove_file(path) {
                // Another process has removed it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => removed.map_err(|error| LedgerError::Io { path: path.clone(), error })?,
            }
        }
        Ok(())
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        // A child that this process has just forked holds the lock as well, until it becomes another program.
        let _ = self.lock.unlock();
    }
}

/// Returns the state of the functions that are alive after `files`, oldest first, and whether the last file does not
/// begin with that state yet.
fn past(folder: &Path, files: &mut Vec<(u64, PathBuf)>) -> Result<(LedgerTotals, bool), LedgerError> {
    let mut needed = Vec::new();
    let mut headless = false;
    while let Some(file) = files.pop() {
        let (is_first, is_last) = (files.is_empty(), needed.is_empty());
        needed.insert(0, file.clone());
        if is_first || stands_alone(folder, file)? {
            break;
        }
        headless |= is_last;
    }
    let mut past = LedgerTotals::default();
    for record in Entries::of(folder, needed) {
        if let Err(error) = past.add(&record?) {
            tracing::error!(%error, "ledger record not carried over to the next file");
        }
    }
    Ok((past, headless))
}

/// Reports if a file begins with the state after all files before it: its head was written together with the record
/// that follows it, so that it is whole if there is another one.
fn stands_alone(folder: &Path, file: (u64, PathBuf)) -> Result<bool, LedgerError> {
    let mut records = Entries::of(folder, vec![file]);
    let Some(Record::Continued { .. }) = records.next().transpose()? else { return Ok(false) };
    for record in records {
        if !matches!(record?, Record::Continued { .. } | Record::Carried { .. }) {
            return Ok(true);
        }
    }
    Ok(false)
}

pub(crate) fn file_of(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("ledger-{number:06}.log"))
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).read(true).append(true).open(path)
}

/// Cuts what follows the last whole line; how long the file is then, and how much that was.
fn cut_torn_end(file: &mut File) -> io::Result<(u64, u64)> {
    let length = file.seek(SeekFrom::End(0))?;
    let start = length.saturating_sub(line::LONGEST as u64);
    file.seek(SeekFrom::Start(start))?;
    let mut end = Vec::new();
    file.read_to_end(&mut end)?;
    let whole = end.iter().rposition(|byte| *byte == b'\n').map_or(start, |at| start + at as u64 + 1);
    file.set_len(whole)?;
    Ok((whole, length - whole))
}
