//! One version of one file in the cache: a sparse file, and which of its bytes are there.

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

/// A part of a claim is recorded when it has this many bytes, or is this old: what a process that is
/// killed loses, and how soon others see that something arrives.
const RECORD_BYTES: u64 = 1 << 20;
const RECORD_AFTER: Duration = Duration::from_secs(1);

/// A file of which some bytes are in the cache.
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
    complete: RangeSet<u64>,
    /// Bytes that some part of this process is fetching. Locks are between processes only.
    claimed: RangeSet<u64>,
    /// Bytes that this process has written and not yet recorded as being on the disk.
    unsynced: RangeSet<u64>,
    /// The SHA-256 of the whole has been compared.
    verified: bool,
}

/// Outcome of an attempt to claim bytes.
#[derive(Debug)]
pub(crate) enum ClaimOutcome {
    /// The bytes are in the cache.
    Complete,
    /// Another task or process fetches some of them.
    Busy,
    /// The caller is to fetch them.
    Claimed(RangeClaim),
}

/// Exclusive right to fetch some bytes; ends when it is dropped.
#[derive(Debug)]
pub(crate) struct RangeClaim {
    file: Arc<CachedFile>,
    bytes: Range<u64>,
    /// Written and not yet recorded.
    unrecorded: Range<u64>,
    recorded: Instant,
}

impl CachedFile {
    /// Opens the file at `path`, or begins it.
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

    /// The file in the cache.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The parts of `bytes` that are not in the cache.
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

    /// Bytes of the file that are in the cache.
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
        let claim = RangeClaim { file: Arc::clone(self), bytes, unrecorded, recorded: Instant::now() };
        // Another process that held the lock may have completed them.
        if self.missing(&claim.bytes)?.is_empty() {
            return Ok(ClaimOutcome::Complete);
        }
        Ok(ClaimOutcome::Claimed(claim))
    }

    /// Reads bytes that are in the cache.
    pub(crate) fn read_at(&self, target: &mut [u8], at: u64) -> io::Result<usize> {
        self.data.read_at(target, at)
    }

    /// Reports if every byte is there and has not been compared with the source's SHA-256.
    pub(crate) fn is_unverified(&self) -> bool {
        let state = self.state();
        !state.verified && gaps(&state.complete, &(0..self.identity.size)).is_empty()
    }

    /// Compares the whole with the source's SHA-256, unless another process has done so or is at it.
    /// Returns whether it is known to be right. It takes as long as reading the file.
    ///
    /// # Errors
    /// It is wrong: everything was dropped then. Or the cache cannot be read.
    pub(crate) fn verify(&self, place: &str) -> Result<bool, FetchError> {
        let Some(expected) = self.sha256 else {
            return Ok(true);
        };
        let marker = sibling(&self.path, "verified");
        if marker.exists() {
            self.state().verified = true;
            return Ok(true);
        }
        let size = self.identity.size;
        let turn = File::options().write(true).create(true).truncate(false).open(sibling(&self.path, "lock"));
        let turn = turn.map_err(FetchError::cache(&self.path))?;
        if !lock::try_lock(&turn, &(0..1)).map_err(FetchError::cache(&self.path))? {
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
        state.journal.drop_all().map_err(FetchError::cache(&self.path))?;
        self.refresh(&mut state)?;
        Err(FetchError::Checksum {
            place: place.to_owned(),
            expected: expected.to_string(),
            found: found.to_string(),
        })
    }

    /// Brings to the disk what this process has written, and records it for whatever system comes next.
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
            // Not under the lock of the state: it takes long.
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
    /// The parts of the claim that are to be fetched, in order.
    ///
    /// # Errors
    /// The cache cannot be read.
    pub(crate) fn missing(&self) -> Result<Vec<Range<u64>>, FetchError> {
        self.file.missing(&self.bytes)
    }

    /// Keeps `bytes`, which belong at position `at` of the claim.
    ///
    /// # Errors
    /// The cache cannot be written.
    pub(crate) fn write(&mut self, bytes: &[u8], at: u64) -> Result<(), FetchError> {
        self.file.data.write_all_at(bytes, at).map_err(FetchError::cache(&self.file.path))?;
        if at != self.unrecorded.end {
            self.record()?;
            self.unrecorded = at..at;
        }
        self.unrecorded.end = at + bytes.len() as u64;
        let long = self.unrecorded.end - self.unrecorded.start >= RECORD_BYTES;
        if long || self.recorded.elapsed() >= RECORD_AFTER { self.record() } else { Ok(()) }
    }

    /// Records what has been written.
    ///
    /// # Errors
    /// The cache cannot be written.
    pub(crate) fn record(&mut self) -> Result<(), FetchError> {
        let written = self.unrecorded.clone();
        self.unrecorded.start = written.end;
        self.recorded = Instant::now();
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
        // What cannot be recorded will be fetched again.
        let _unrecorded = self.record();
        let mut state = self.file.state();
        state.claimed.remove(self.bytes.clone());
        // A lock that cannot be freed ends with the process.
        let _kept = lock::unlock(&self.file.data, &self.bytes);
    }
}

/// The parts of `bytes` that are not in `set`.
fn gaps(set: &RangeSet<u64>, bytes: &Range<u64>) -> Vec<Range<u64>> {
    if bytes.is_empty() {
        return Vec::new();
    }
    set.gaps(bytes).collect()
}

/// The file beside `path` whose name ends in `.kind`.
fn sibling(path: &Path, kind: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(kind);
    PathBuf::from(name)
}
