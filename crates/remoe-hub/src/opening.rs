//! Opening files of a source: which version there is, and whether the cache has it.

use crate::cache::{CachedFile, ClaimOutcome, OpenLock, SourceFolder};
use crate::client::{Condition, Reply};
use crate::error::FetchError;
use crate::progress::{self, FetchProgress};
use crate::timeouts::{Attempts, Failed};
use crate::transfer::{POLL, Transfer};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::time::sleep;

/// Bytes of a file that are fetched to learn what it is: small files and most headers as a whole.
const FIRST: u64 = 64 << 10;

/// The files of a source that are open, and what opens further ones.
#[derive(Debug)]
pub(crate) struct Opening {
    pub(crate) transfer: Arc<Transfer>,
    pub(crate) folder: SourceFolder,
    files: Mutex<HashMap<String, Option<Arc<CachedFile>>>>,
    /// Set once the source has given a file: from then on, a file that it refuses is treated as missing.
    granted: AtomicBool,
}

impl Opening {
    /// Creates an opening without open files.
    pub(crate) fn new(transfer: Arc<Transfer>, folder: SourceFolder) -> Self {
        Self { transfer, folder, files: Mutex::default(), granted: AtomicBool::new(false) }
    }

    /// Returns the open files, and the names of files that do not exist.
    pub(crate) fn files(&self) -> MutexGuard<'_, HashMap<String, Option<Arc<CachedFile>>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens files at the same time.
    pub(crate) async fn open_all(
        self: Arc<Self>,
        names: Vec<String>,
    ) -> Result<Vec<(String, Option<Arc<CachedFile>>)>, FetchError> {
        let opening: Vec<_> = names
            .into_iter()
            .map(|name| {
                let shared = Arc::clone(&self);
                tokio::spawn(async move { Ok((name.clone(), shared.open(&name).await?)) })
            })
            .collect();
        let mut opened = Vec::new();
        for file in opening {
            opened.push(file.await.map_err(|error| FetchError::Settings {
                what: "cannot fetch".to_owned(),
                problem: error.to_string(),
            })??);
        }
        Ok(opened)
    }

    /// Opens a file: from the cache where its version is known not to change, else with a question to the
    /// source, which brings the first bytes where they are missing.
    async fn open(&self, name: &str) -> Result<Option<Arc<CachedFile>>, FetchError> {
        let pinned = self.transfer.client.source.pinned();
        if pinned.is_some_and(|files| !files.contains(name)) {
            return Ok(None);
        }
        // Two processes that begin at the same moment do not fetch the first bytes twice.
        let _turn = self.turn(name).await?;
        let known = self.folder.known(name)?;
        if pinned.is_some() && known.is_some() {
            return Ok(known);
        }
        let mut attempts = Attempts::new(self.transfer.patience, &self.transfer.heard);
        loop {
            match self.ask(name, known.as_ref()).await {
                Ok(file) => return Ok(file),
                Err(failed) => attempts.pause(failed).await?,
            }
        }
    }

    async fn turn(&self, name: &str) -> Result<OpenLock, FetchError> {
        let begun = Instant::now();
        let patience = self.transfer.patience.others;
        loop {
            if let Some(turn) = self.folder.turn(name)? {
                return Ok(turn);
            }
            if begun.elapsed() >= patience {
                return Err(FetchError::Stalled {
                    place: self.transfer.client.place(name),
                    cache: self.folder.path().to_owned(),
                    seconds: patience.as_secs(),
                });
            }
            sleep(POLL).await;
        }
    }

    /// Asks the source for the first bytes of a file, unless they are of the version that is `known`.
    async fn ask(
        &self,
        name: &str,
        known: Option<&Arc<CachedFile>>,
    ) -> Result<Option<Arc<CachedFile>>, Failed> {
        let client = &self.transfer.client;
        let condition = known.map_or(Condition::Any, |known| Condition::Other(&known.identity));
        let bytes = match client.get(name, 0..FIRST, condition).await? {
            Reply::Bytes(bytes) => bytes,
            Reply::Unchanged => {
                self.granted.store(true, Ordering::Relaxed);
                return Ok(known.cloned());
            }
            Reply::Absent(error @ FetchError::Refused { .. }) => {
                if !self.granted.load(Ordering::Relaxed) {
                    return Err(error.into());
                }
                progress::print_line(&format!("fetch: treated as missing: {error}"));
                return Ok(None);
            }
            Reply::Absent(_) => return Ok(None),
        };
        self.granted.store(true, Ordering::Relaxed);
        self.transfer.heard.note(0);
        if let Some(known) = known.filter(|known| known.identity.difference(&bytes.identity).is_none()) {
            return Ok(Some(Arc::clone(known)));
        }
        let sha256 = match bytes.sha256 {
            None if client.source.states_checksums_on_head() => client.checksum(name).await?,
            stated => stated,
        };
        let file = self.folder.begin(name, bytes.identity.clone(), sha256)?;
        let range = bytes.range.clone();
        if !range.is_empty()
            && let ClaimOutcome::Claimed(mut claim) = file.claim(range.clone())?
        {
            let mut at = range.start;
            let progress = FetchProgress::new(String::new(), 0, 0);
            let received =
                self.transfer.receive(*bytes, &mut claim, name, &mut at, range.end, &progress).await;
            claim.record()?;
            // What has not come is fetched when it is needed.
            received.or_else(|failed| if at > range.start { Ok(()) } else { Err(failed) })?;
        }
        Ok(Some(file))
    }
}
