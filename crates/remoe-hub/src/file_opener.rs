//! Opener of a source's files: finds the current version, and compares it with the cached one.

use crate::cache::{CachedFile, ClaimOutcome, OpenLock, SourceFolder};
use crate::client::{RangeResponse, VersionCondition};
use crate::error::FetchError;
use crate::progress::{self, FetchProgress};
use crate::timeouts::{Attempts, FailedAttempt};
use crate::transfer::{POLL_INTERVAL, Transfer};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::time::sleep;

/// Bytes that the first request for a file fetches. They cover small files and most headers.
const FIRST_REQUEST_BYTES: u64 = 64 << 10;

/// Open files of a source, and the means to open further ones.
#[derive(Debug)]
pub(crate) struct FileOpener {
    pub(crate) transfer: Arc<Transfer>,
    pub(crate) folder: SourceFolder,
    /// Open files by name. `None`: the source does not have the file.
    files: Mutex<HashMap<String, Option<Arc<CachedFile>>>>,
    /// Set after the first successful response. From then on, a file that the source refuses is treated as missing.
    has_access: AtomicBool,
}

impl FileOpener {
    /// Creates an opener without open files.
    pub(crate) fn new(transfer: Arc<Transfer>, folder: SourceFolder) -> Self {
        Self { transfer, folder, files: Mutex::default(), has_access: AtomicBool::new(false) }
    }

    /// Locks the open files. Files that the source does not have map to `None`.
    pub(crate) fn files(&self) -> MutexGuard<'_, HashMap<String, Option<Arc<CachedFile>>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens files concurrently.
    pub(crate) async fn open_all(
        self: Arc<Self>,
        names: Vec<String>,
    ) -> Result<Vec<(String, Option<Arc<CachedFile>>)>, FetchError> {
        let tasks: Vec<_> = names
            .into_iter()
            .map(|name| {
                let shared = Arc::clone(&self);
                tokio::spawn(async move { Ok((name.clone(), shared.open(&name).await?)) })
            })
            .collect();
        let mut opened = Vec::new();
        for task in tasks {
            opened.push(task.await.map_err(|error| FetchError::Settings {
                what: "cannot fetch".to_owned(),
                problem: error.to_string(),
            })??);
        }
        Ok(opened)
    }

    /// Opens a file. If its version cannot change, the cached one is enough. Otherwise a request to the source checks
    /// the version, and fetches the first bytes of a new one.
    async fn open(&self, name: &str) -> Result<Option<Arc<CachedFile>>, FetchError> {
        let pinned = self.transfer.client.source.pinned();
        if pinned.is_some_and(|files| !files.contains(name)) {
            return Ok(None);
        }
        // The lock keeps two processes from fetching the first bytes twice.
        let _lock = self.lock_open(name).await?;
        let cached = self.folder.cached_version(name)?;
        if pinned.is_some() && cached.is_some() {
            return Ok(cached);
        }
        let mut attempts = Attempts::new(self.transfer.timeouts, &self.transfer.activity);
        loop {
            match self.request_first_bytes(name, cached.as_ref()).await {
                Ok(file) => return Ok(file),
                Err(failed) => attempts.pause(failed).await?,
            }
        }
    }

    async fn lock_open(&self, name: &str) -> Result<OpenLock, FetchError> {
        let started = Instant::now();
        let limit = self.transfer.timeouts.other_process;
        loop {
            if let Some(lock) = self.folder.try_lock_open(name)? {
                return Ok(lock);
            }
            if started.elapsed() >= limit {
                return Err(FetchError::Stalled {
                    location: self.transfer.client.location(name),
                    cache: self.folder.path().to_owned(),
                    seconds: limit.as_secs(),
                });
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Requests the first bytes of a file, unless it still has the version that is `cached`.
    async fn request_first_bytes(
        &self,
        name: &str,
        cached: Option<&Arc<CachedFile>>,
    ) -> Result<Option<Arc<CachedFile>>, FailedAttempt> {
        let client = &self.transfer.client;
        let condition =
            cached.map_or(VersionCondition::Any, |cached| VersionCondition::Changed(&cached.identity));
        let bytes = match client.get(name, 0..FIRST_REQUEST_BYTES, condition).await? {
            RangeResponse::Bytes(bytes) => bytes,
            RangeResponse::Unchanged => {
                self.has_access.store(true, Ordering::Relaxed);
                return Ok(cached.cloned());
            }
            RangeResponse::Absent(error @ FetchError::Refused { .. }) => {
                if !self.has_access.load(Ordering::Relaxed) {
                    return Err(error.into());
                }
                progress::print_line(&format!("fetch: treated as missing: {error}"));
                return Ok(None);
            }
            RangeResponse::Absent(_) => return Ok(None),
        };
        self.has_access.store(true, Ordering::Relaxed);
        self.transfer.activity.record(0);
        if let Some(cached) = cached.filter(|cached| cached.identity.difference(&bytes.identity).is_none()) {
            return Ok(Some(Arc::clone(cached)));
        }
        let sha256 = match bytes.sha256 {
            None if client.source.states_checksums_on_head() => client.checksum(name).await?,
            stated => stated,
        };
        let file = self.folder.create_version(name, bytes.identity.clone(), sha256)?;
        let range = bytes.range.clone();
        if !range.is_empty()
            && let ClaimOutcome::Claimed(mut claim) = file.claim(range.clone())?
        {
            let mut offset = range.start;
            let progress = FetchProgress::new(String::new(), 0, 0);
            let received =
                self.transfer.receive(*bytes, &mut claim, name, &mut offset, range.end, &progress).await;
            claim.record()?;
            // The remaining bytes are fetched when they are read.
            received.or_else(|failed| if offset > range.start { Ok(()) } else { Err(failed) })?;
        }
        Ok(Some(file))
    }
}
