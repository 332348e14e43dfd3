//! One version of one file in the cache: a sparse file, and the set of its cached bytes.

use super::journal::Journal;
use super::lock;
use crate::checksum::Sha256Sum;
use crate::error::FetchError;
use crate::identity::Identity;
use rangemap::RangeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Received bytes after which a claim writes a journal record. A killed process loses at most this much.
const RECORD_BYTES: u64 = 1 << 20;
/// Time after which a claim writes a journal record, so that other processes see progress.
const RECORD_AFTER: Duration = Duration::from_secs(1);

/// A partly or completely cached file.
#[derive(Debug)]
pub(crate) struct CachedFile {
    pub(crate) name: String,
    pub(crate) identity: Identity,
    pub(crate) sha256: Option<Sha256Sum>,
    path: PathBuf,
    data: File,
    state: Mutex<FileState>,
}

#[derive(Debug)]
struct FileState {
    journal: Journal,
    /// Bytes that are in the cache.
    complete: RangeSet<u64>,
    /// Bytes that tasks of this process are fetching. The file locks exclude other processes only.
    claimed: RangeSet<u64>,
    /// Bytes that this process has written, but not yet recorded as synced to disk.
    unsynced: RangeSet<u64>,
    /// The complete file has the source's SHA-256, or the source states none.
    verified: bool,
}

/// Outcome of an attempt to claim bytes.
#[derive(Debug)]
pub(crate) enum ClaimOutcome {
    /// The bytes are in the cache.
    Complete,
    /// Another task or process is fetching some of the bytes.
    Busy,
    /// The caller must fetch the missing bytes.
    Claimed(RangeClaim),
}

/// Exclusive right to fetch a range of bytes. Dropping it releases the range.
#[derive(Debug)]
pub(crate) struct RangeClaim {
    file: Arc<CachedFile>,
    bytes: Range<u64>,
    /// Bytes that have been written, but not yet recorded in the journal.
    unrecorded: Range<u64>,
    recorded_at: Instant,
}

impl CachedFile {
    /// Opens the file at `path`, or creates it.
    pub(super) fn open(
        path: PathBuf,
        name: &str,
        identity: Identity,
        sha256: Option<Sha256Sum>,
    ) -> Result<Arc<Self>, FetchError> {
        let failed = FetchError::cache(&path);
        let opened = || {
            let data = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
            if data.metadata()?.len() != identity.size {
                data.set_len(identity.size)?;
            }
            let mut journal = Journal::open(&sibling(&path, "journal"))?;
            let mut complete = RangeSet::new();
            journal.refresh(&mut complete)?;
            Ok((data, journal, complete))
        };
        let (data, journal, complete) = opened().map_err(failed)?;
        let verified = sha256.is_none() || sibling(&path, "verified").exists();
        let state =
            FileState { journal, complete, claimed: RangeSet::new(), unsynced: RangeSet::new(), verified };
        Ok(Arc::new(Self { name: name.to_owned(), identity, sha256, path, data, state: Mutex::new(state) }))
    }

    /// Returns the path of the file in the cache.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the parts of `bytes` that are not in the cache.
    ///
    /// # Errors
    /// The cache cannot be read.
    pub(crate) fn missing(&self, bytes: &Range<u64>) -> Result<Vec<Range<u64>>, FetchError> {
        let mut state = self.state();
        let missing = gaps(&state.complete, bytes);
        if missing.is_empty() {
            return Ok(missing);
        }
        // Another process may have fetched them since.
        self.refresh(&mut state)?;
        Ok(gaps(&state.complete, bytes))
    }

    /// Counts the bytes that are in the cache.
    pub(crate) fn complete(&self) -> u64 {
        self.state().complete.iter().map(|range| range.end - range.start).sum()
    }

    /// Tries to claim `bytes`.
    ///
    /// # Errors
    /// The cache cannot be read or locked.
    pub(crate) fn claim(self: &Arc<Self>, bytes: Range<u64>) -> Result<ClaimOutcome, FetchError> {
        let mut state = self.state();
        self.refresh(&mut state)?;
        if gaps(&state.complete, &bytes).is_empty() {
            return Ok(ClaimOutcome::Complete);
        }
        if state.claimed.overlaps(&bytes)
            || !lock::try_lock(&self.data, &bytes).map_err(FetchError::cache(&self.path))?
        {
            return Ok(ClaimOutcome::Busy);
        }
        state.claimed.insert(bytes.clone());
        drop(state);
        let unrecorded = bytes.start..bytes.start;
        let claim = RangeClaim { file: Arc::clone(self), bytes, unrecorded, recorded_at: Instant::now() };
        // Before it released the lock, another process may have fetched them.
        if self.missing(&claim.bytes)?.is_empty() {
            return Ok(ClaimOutcome::Complete);
        }
        Ok(ClaimOutcome::Claimed(claim))
    }

    /// Reads bytes that are in the cache.
    pub(crate) fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        self.data.read_at(target, offset)
    }

    /// Reports if the file is complete, but not yet compared with the source's SHA-256.
    pub(crate) fn is_unverified(&self) -> bool {
        let state = self.state();
        !state.verified && gaps(&state.complete, &(0..self.identity.size)).is_empty()
    }

    /// Compares the complete file with the source's SHA-256, and returns `true` once it is verified.
    /// Returns `false` while another process verifies it. Reads the whole file.
    ///
    /// # Errors
    /// The checksum differs: all cached bytes are discarded. Or the cache cannot be read.
    pub(crate) fn verify(&self, location: &str) -> Result<bool, FetchError> {
        let Some(expected) = self.sha256 else {
            return Ok(true);
        };
        let marker = sibling(&self.path, "verified");
        if marker.exists() {
            self.state().verified = true;
            return Ok(true);
        }
        let size = self.identity.size;
        let lock_file =
            File::options().write(true).create(true).truncate(false).open(sibling(&self.path, "lock"));
        let lock_file = lock_file.map_err(FetchError::cache(&self.path))?;
        if !lock::try_lock(&lock_file, &(0..1)).map_err(FetchError::cache(&self.path))? {
            return Ok(false);
        }
        let found = Sha256Sum::of_file(&self.data, size).map_err(FetchError::cache(&self.path))?;
        let mut state = self.state();
        if found == expected {
            let synced = self.data.sync_data().and_then(|()| File::create(&marker));
            synced.map_err(FetchError::cache(&marker))?;
            state.verified = true;
            return Ok(true);
        }
        state.journal.discard_all().map_err(FetchError::cache(&self.path))?;
        self.refresh(&mut state)?;
        Err(FetchError::Checksum {
            location: location.to_owned(),
            expected: expected.to_string(),
            found: found.to_string(),
        })
    }

    /// Syncs the bytes that this process has written to disk, and records that they survive a reboot.
    ///
    /// # Errors
    /// The cache cannot be written.
    pub(crate) fn sync(&self) -> Result<(), FetchError> {
        let written = std::mem::take(&mut self.state().unsynced);
        let written: Vec<_> = written.into_iter().collect();
        if written.is_empty() {
            return Ok(());
        }
        let synced = || {
            // Without holding the lock of the state, because syncing takes long.
            self.data.sync_data()?;
            self.state().journal.append_synced(&self.data, &written)
        };
        synced().map_err(FetchError::cache(&self.path))
    }

    fn refresh(&self, state: &mut FileState) -> Result<(), FetchError> {
        state.journal.refresh(&mut state.complete).map_err(FetchError::cache(&self.path))?;
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, FileState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RangeClaim {
    /// Returns the parts of the claim that must be fetched, in ascending order.
    ///
    /// # Errors
    /// The cache cannot be read.
    pub(crate) fn missing(&self) -> Result<Vec<Range<u64>>, FetchError> {
        self.file.missing(&self.bytes)
    }

    /// Writes `bytes` at `offset` of the file, which must lie in the claim.
    ///
    /// # Errors
    /// The cache cannot be written.
    pub(crate) fn write(&mut self, bytes: &[u8], offset: u64) -> Result<(), FetchError> {
        self.file.data.write_all_at(bytes, offset).map_err(FetchError::cache(&self.file.path))?;
        if offset != self.unrecorded.end {
            self.record()?;
            self.unrecorded = offset..offset;
        }
        self.unrecorded.end = offset + bytes.len() as u64;
        let is_long = self.unrecorded.end - self.unrecorded.start >= RECORD_BYTES;
        if is_long || self.recorded_at.elapsed() >= RECORD_AFTER { self.record() } else { Ok(()) }
    }

    /// Records the written bytes in the journal.
    ///
    /// # Errors
    /// The cache cannot be written.
    pub(crate) fn record(&mut self) -> Result<(), FetchError> {
        let written = self.unrecorded.clone();
        self.unrecorded.start = written.end;
        self.recorded_at = Instant::now();
        if written.is_empty() {
            return Ok(());
        }
        let mut state = self.file.state();
        state.journal.append(&self.file.data, &written).map_err(FetchError::cache(&self.file.path))?;
        state.complete.insert(written.clone());
        state.unsynced.insert(written);
        Ok(())
    }
}

impl Drop for RangeClaim {
    fn drop(&mut self) {
        // Bytes without a record are fetched again.
        let _unrecorded = self.record();
        let mut state = self.file.state();
        state.claimed.remove(self.bytes.clone());
        // The kernel releases the lock at the latest when the process ends.
        let _kept = lock::unlock(&self.file.data, &self.bytes);
    }
}

/// Returns the parts of `bytes` that are not in `set`.
fn gaps(set: &RangeSet<u64>, bytes: &Range<u64>) -> Vec<Range<u64>> {
    if bytes.is_empty() {
        return Vec::new();
    }
    set.gaps(bytes).collect()
}

/// Returns `path` with `.kind` appended.
fn sibling(path: &Path, kind: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(kind);
    PathBuf::from(name)
}
