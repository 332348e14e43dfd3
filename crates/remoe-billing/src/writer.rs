//! Writer of a ledger: a folder of numbered files, to the last of which lines are appended. Each file begins with the
//! state of the living functions, so that it can be added up without the files before it.

use crate::account::LedgerTotals;
use crate::line;
use crate::read::{LedgerError, LedgerRecords, numbered_files};
use crate::record::Record;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Name of the file in a ledger's folder that its writer locks.
pub const LOCK_FILE: &str = "lock";

/// Limits of a ledger's size.
#[derive(Debug, Clone, Copy)]
pub struct LedgerLimits {
    /// Size in bytes from which a new file is begun.
    pub file_bytes: u64,
    /// Largest number of files. If there are more, the oldest is removed.
    pub files: usize,
}

impl Default for LedgerLimits {
    /// Returns 256 files of 16 MiB, enough for about ten million requests.
    fn default() -> Self {
        Self { file_bytes: 16 << 20, files: 256 }
    }
}

/// Ledger that is open for writing, by one process at a time.
///
/// [`Self::append`] passes a record to the system in one write before it returns. The record survives a crash of this
/// process, but not a loss of power.
#[derive(Debug)]
pub struct Ledger {
    folder: PathBuf,
    limits: LedgerLimits,
    current: Mutex<CurrentFile>,
    /// Locked until the ledger is closed.
    lock: File,
    dropped: u64,
}

#[derive(Debug)]
struct CurrentFile {
    file: File,
    number: u64,
    bytes: u64,
    /// Set if the last write failed and may have left an incomplete line.
    has_torn_line: bool,
    /// Set if the state after earlier files must still be written to this file.
    lacks_state: bool,
    /// State of the functions that are alive, after all records so far.
    state: LedgerTotals,
}

impl Ledger {
    /// Opens the ledger in `folder`, which is created if it is missing. Cuts off an incomplete last line, which a
    /// killed writer or a full disk left: see [`Self::dropped_bytes`].
    ///
    /// # Errors
    /// Another process has it open, or the folder cannot be read and written.
    pub fn open(folder: &Path, limits: LedgerLimits) -> Result<Self, LedgerError> {
        let failed = |error: io::Error| LedgerError::Io { path: folder.to_owned(), error };
        std::fs::create_dir_all(folder).map_err(failed)?;
        let lock = File::create(folder.join(LOCK_FILE)).map_err(failed)?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => LedgerError::InUse { path: folder.to_owned() },
            TryLockError::Error(error) => failed(error),
        })?;
        let mut files = numbered_files(folder)?;
        let (number, path) = files.last().cloned().unwrap_or_else(|| (1, file_of(folder, 1)));
        let mut file = append_to(&path).map_err(failed)?;
        let (bytes, dropped) = cut_torn_end(&mut file).map_err(failed)?;
        if dropped > 0 {
            tracing::warn!(path = %path.display(), dropped, "truncated ledger line dropped");
        }
        let (state, lacks_state) = state_after(folder, &mut files)?;
        let current =
            Mutex::new(CurrentFile { file, number, bytes, has_torn_line: false, lacks_state, state });
        Ok(Self { folder: folder.to_owned(), limits, current, lock, dropped })
    }

    /// Returns the folder of the ledger.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the size of the incomplete line that was cut off when the ledger was opened, in bytes.
    #[must_use]
    pub fn dropped_bytes(&self) -> u64 {
        self.dropped
    }

    /// Appends `record`. If it is the first of a file, appends the state after earlier files before it.
    ///
    /// # Errors
    /// The write failed, for example because the disk is full. Later records are not affected.
    pub fn append(&self, record: &Record) -> io::Result<()> {
        // A panic cannot leave file position and sums inconsistent, so a poisoned lock is used as it is.
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let written = self.write(&mut current, record);
        // The next file begins with this state, even if this record was not written.
        if let Err(error) = current.state.add(record) {
            tracing::error!(%error, "ledger record not carried over to the next file");
        }
        written
    }

    fn write(&self, current: &mut CurrentFile, record: &Record) -> io::Result<()> {
        let mut lines = Vec::new();
        if current.bytes >= self.limits.file_bytes {
            self.next_file(current)?;
        }
        if current.has_torn_line {
            lines.push(b'\n');
        }
        if current.lacks_state {
            current
                .state
                .carried_records(record.at())
                .try_for_each(|carried| line::write(&carried, &mut lines))?;
        }
        line::write(record, &mut lines)?;
        current.has_torn_line = true;
        current.file.write_all(&lines)?;
        (current.has_torn_line, current.lacks_state) = (false, false);
        current.bytes += lines.len() as u64;
        Ok(())
    }

    fn next_file(&self, current: &mut CurrentFile) -> io::Result<()> {
        let number = current.number + 1;
        let file = append_to(&file_of(&self.folder, number))?;
        let state = std::mem::take(&mut current.state);
        *current = CurrentFile { file, number, bytes: 0, has_torn_line: false, lacks_state: true, state };
        // The record is written even if the oldest file cannot be removed.
        if let Err(error) = self.remove_oldest() {
            tracing::error!(%error, "cannot remove the oldest ledger files");
        }
        Ok(())
    }

    fn remove_oldest(&self) -> Result<(), LedgerError> {
        let files = numbered_files(&self.folder)?;
        for (_, path) in files.iter().take(files.len().saturating_sub(self.limits.files.max(1))) {
            tracing::warn!(path = %path.display(), "ledger size limit reached: removing the oldest file");
            match std::fs::remove_file(path) {
                // Another process has removed the file.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => removed.map_err(|error| LedgerError::Io { path: path.clone(), error })?,
            }
        }
        Ok(())
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        // A child process inherits the lock between fork and exec, so it is released explicitly.
        let _ = self.lock.unlock();
    }
}

/// Returns the state after `files`, oldest first, and whether that state must still be written to the last file.
fn state_after(folder: &Path, files: &mut Vec<(u64, PathBuf)>) -> Result<(LedgerTotals, bool), LedgerError> {
    let mut needed = Vec::new();
    let mut lacks_state = false;
    while let Some(file) = files.pop() {
        let (is_first, is_last) = (files.is_empty(), needed.is_empty());
        needed.insert(0, file.clone());
        if is_first || begins_with_state(folder, file)? {
            break;
        }
        lacks_state |= is_last;
    }
    let mut state = LedgerTotals::default();
    for record in LedgerRecords::from_files(folder, needed) {
        if let Err(error) = state.add(&record?) {
            tracing::error!(%error, "ledger record not carried over to the next file");
        }
    }
    Ok((state, lacks_state))
}

/// Reports if a file begins with the complete state after all earlier files. The state is written together with the
/// first record, so it is complete if another record follows.
fn begins_with_state(folder: &Path, file: (u64, PathBuf)) -> Result<bool, LedgerError> {
    let mut records = LedgerRecords::from_files(folder, vec![file]);
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

/// Cuts off what follows the last complete line. Returns the new length of the file and the number of bytes cut off.
fn cut_torn_end(file: &mut File) -> io::Result<(u64, u64)> {
    let length = file.seek(SeekFrom::End(0))?;
    let start = length.saturating_sub(line::MAX_LINE_BYTES as u64);
    file.seek(SeekFrom::Start(start))?;
    let mut end = Vec::new();
    file.read_to_end(&mut end)?;
    let complete_length =
        end.iter().rposition(|byte| *byte == b'\n').map_or(start, |index| start + index as u64 + 1);
    file.set_len(complete_length)?;
    Ok((complete_length, length - complete_length))
}
