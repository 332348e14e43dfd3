//! Reader of a ledger, which may be written to at the same time.

use crate::line;
use crate::record::Record;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Reason why a ledger cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// Another process writes the ledger.
    #[error("cannot open the ledger in {}: another process writes it; use a separate folder", path.display())]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// A file operation failed.
    #[error("cannot use the ledger in {}: {error}", path.display())]
    Io {
        /// The folder.
        path: PathBuf,
        /// Error of the system.
        error: io::Error,
    },
}

/// Iterator over the records of a ledger, oldest first.
#[derive(Debug)]
pub struct LedgerRecords {
    folder: PathBuf,
    files: std::vec::IntoIter<(u64, PathBuf)>,
    current: Option<BufReader<File>>,
    damaged: u64,
}

/// Returns the records of the ledger in `folder`, oldest first.
///
/// # Errors
/// The folder cannot be read.
pub fn records(folder: &Path) -> Result<LedgerRecords, LedgerError> {
    Ok(LedgerRecords::from_files(folder, numbered_files(folder)?))
}

/// Returns [`records`] without files that end before `time`, in nanoseconds since 1970. Some older records may come
/// first.
///
/// # Errors
/// The folder cannot be read.
pub fn records_since(folder: &Path, time: u64) -> Result<LedgerRecords, LedgerError> {
    let mut entries = records(folder)?;
    let mut files: Vec<_> = entries.files.by_ref().collect();
    let begins_earlier = |path: &Path| {
        let file = File::open(path).ok()?;
        let mut first = Vec::new();
        BufReader::new(file.take(line::MAX_LINE_BYTES as u64)).read_until(b'\n', &mut first).ok()?;
        Some(line::read(first.strip_suffix(b"\n")?)?.at() < time)
    };
    let last_before = files.iter().rposition(|(_, path)| begins_earlier(path) == Some(true));
    entries.files = files.split_off(last_before.unwrap_or(0)).into_iter();
    Ok(entries)
}

impl LedgerRecords {
    /// Returns the records of `files`, which are numbered files of the ledger in `folder`.
    pub(crate) fn from_files(folder: &Path, files: Vec<(u64, PathBuf)>) -> Self {
        Self { folder: folder.to_owned(), files: files.into_iter(), current: None, damaged: 0 }
    }

    /// Returns the number of damaged lines that were skipped so far.
    #[must_use]
    pub fn damaged(&self) -> u64 {
        self.damaged
    }

    /// Reads the next line of the present file, without its line break.
    fn read_line(&mut self) -> io::Result<Option<Vec<u8>>> {
        let Some(reader) = &mut self.current else { return Ok(None) };
        let mut line = Vec::new();
        let read = reader.by_ref().take(line::MAX_LINE_BYTES as u64).read_until(b'\n', &mut line)?;
        if line.pop_if(|last| *last == b'\n').is_none() {
            // An incomplete line: its writer was killed, or is still writing it.
            self.damaged += u64::from(read > 0);
            return Ok(None);
        }
        Ok(Some(line))
    }
}

impl Iterator for LedgerRecords {
    type Item = Result<Record, LedgerError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.read_line() {
                Err(error) => {
                    self.current = None;
                    return Some(Err(LedgerError::Io { path: self.folder.clone(), error }));
                }
                // After a failed write the writer begins with a line break, which may leave an empty line.
                Ok(Some(line)) if line.is_empty() => {}
                Ok(Some(line)) => match line::read(&line) {
                    Some(record) => return Some(Ok(record)),
                    None => self.damaged += 1,
                },
                Ok(None) => {
                    let (_, path) = self.files.next()?;
                    match File::open(path) {
                        Ok(file) => self.current = Some(BufReader::new(file)),
                        // The writer has removed this oldest file meanwhile.
                        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                        Err(error) => {
                            return Some(Err(LedgerError::Io { path: self.folder.clone(), error }));
                        }
                    }
                }
            }
        }
    }
}

/// Returns the files of the ledger in `folder`, sorted by their numbers.
pub(crate) fn numbered_files(folder: &Path) -> Result<Vec<(u64, PathBuf)>, LedgerError> {
    let failed = |error: io::Error| LedgerError::Io { path: folder.to_owned(), error };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("ledger-")?.strip_suffix(".log"));
        if let Some(number) = number.and_then(|digits| digits.parse().ok()) {
            files.push((number, entry.path()));
        }
    }
    files.sort_unstable();
    Ok(files)
}
