//! Store of a source's files, which reads through the cache.

use crate::access::Access;
use crate::cache::{CachedFile, SourceFolder};
use crate::cached_sources;
use crate::client::SourceClient;
use crate::description::fetch_description;
use crate::egress_client::CheckedClient;
use crate::error::FetchError;
use crate::file_opener::FileOpener;
use crate::location::ModelLocation;
use crate::progress::{self, FetchProgress};
use crate::runtime::FetchRuntime;
use crate::source::{Hub, HubServer, S3, Source, Web, is_commit};
use crate::timeouts::{FetchTimeouts, SourceActivity};
use crate::transfer::{MissingRanges, Transfer, total_bytes};
use rangemap::RangeSet;
use remoe_model::{FileRange, Store, StoredFile};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Alignment of fetched ranges in bytes.
const ALIGNMENT_BYTES: u64 = 4 << 10;
/// Largest gap between two ranges that are fetched as one, in bytes. A request costs more than fetching the gap.
const GAP_BYTES: u64 = 32 << 10;
/// Name of the cached file list of a hub commit.
const FILE_LIST: &str = ".contents";

/// Store of a hub commit, an S3 prefix or a web server's folder.
///
/// It fetches on threads of its own. Its methods block, and may be called from any thread.
pub struct FetchedStore {
    opening: Arc<FileOpener>,
    runtime: Arc<FetchRuntime>,
    revision: Option<String>,
    /// Set after the message that everything is in the cache.
    reported_cached: AtomicBool,
}

/// Cached file list of a hub commit.
#[derive(Debug, Serialize, Deserialize)]
struct FileList {
    files: BTreeSet<String>,
}

impl FetchedStore {
    /// Opens the remote `location`, with its folder in `cache`. Resolves a branch or tag of the hub to its commit. For
    /// a commit whose file list is cached, makes no request.
    ///
    /// # Errors
    /// The source is a folder, does not exist, is not allowed, denies access or does not respond, or the cache folder
    /// cannot be used.
    pub fn connect(location: &ModelLocation, cache: &Path, access: &Access) -> Result<Self, FetchError> {
        let timeouts = access.timeouts;
        let runtime = Arc::new(FetchRuntime::start()?);
        let http = CheckedClient::new(access.egress.clone(), &timeouts)?;
        let mut revision = None;
        let mut pinned = location.clone();
        let (source, folder) = match location {
            ModelLocation::Folder(path) => {
                let problem = "expected a remote source, got a folder".to_owned();
                return Err(FetchError::Settings { what: path.display().to_string(), problem });
            }
            ModelLocation::Web { url } => {
                (Source::Web(Web::new(url.clone())), SourceFolder::open(cache, url.as_str())?)
            }
            ModelLocation::S3 { bucket, prefix } => {
                let s3 = S3::from_environment(bucket, prefix, access)?;
                let folder = SourceFolder::open(cache, &format!("s3 {} {prefix}", s3.base()))?;
                (Source::S3(s3), folder)
            }
            ModelLocation::Hub { repository, revision: wanted } => {
                let wanted = wanted.as_deref().unwrap_or("main");
                let (hub, folder) =
                    open_hub(&runtime, &http, cache, repository, wanted, location.to_string(), timeouts)?;
                revision = Some(hub.commit.clone());
                pinned = ModelLocation::Hub { repository: repository.clone(), revision: revision.clone() };
                (Source::Hub(hub), folder)
            }
        };
        cached_sources::write_marker(&folder, &pinned.to_string());
        let client = SourceClient::new(http, source, PathBuf::from(pinned.to_string()));
        let opening =
            FileOpener::new(Arc::new(Transfer { client, timeouts, activity: SourceActivity::new() }), folder);
        Ok(Self { opening: Arc::new(opening), runtime, revision, reported_cached: AtomicBool::new(false) })
    }

    /// Returns the commit of a hub repository.
    #[must_use]
    pub fn revision(&self) -> Option<&str> {
        self.revision.as_deref()
    }

    /// Returns the source's folder in the cache.
    #[must_use]
    pub fn cache(&self) -> &Path {
        self.opening.folder.path()
    }

    fn open_files(&self, names: &[&str]) -> Result<Vec<Option<Arc<CachedFile>>>, FetchError> {
        let unknown: Vec<String> = {
            let files = self.opening.files();
            names.iter().filter(|name| !files.contains_key(**name)).map(|name| (*name).to_owned()).collect()
        };
        if !unknown.is_empty() {
            let opening = Arc::clone(&self.opening);
            let opened = self.runtime.run(opening.open_all(unknown))?;
            self.opening.files().extend(opened);
        }
        let files = self.opening.files();
        Ok(names.iter().map(|name| files.get(*name).cloned().flatten()).collect())
    }

    fn handle(&self, file: Arc<CachedFile>) -> Arc<dyn StoredFile> {
        let transfer = Arc::clone(&self.opening.transfer);
        Arc::new(FetchedFile { file, transfer, runtime: Arc::clone(&self.runtime) })
    }
}

/// Resolves the revision `wanted` of a hub repository, from the cache or by a request to the hub.
fn open_hub(
    runtime: &FetchRuntime,
    http: &CheckedClient,
    cache: &Path,
    repository: &str,
    wanted: &str,
    location: String,
    timeouts: FetchTimeouts,
) -> Result<(Hub, SourceFolder), FetchError> {
    let server = HubServer::from_environment()?;
    let folder =
        |commit: &str| SourceFolder::open(cache, &format!("hf {} {repository} {commit}", server.endpoint()));
    if is_commit(wanted) {
        let folder = folder(wanted)?;
        if let Some(FileList { files }) = folder.read(FILE_LIST)? {
            let hub = Hub::at_commit(server, repository.to_owned(), wanted.to_owned(), files);
            return Ok((hub, folder));
        }
    }
    let description = {
        let (http, server) = (http.clone(), server.clone());
        let (repository, wanted, location) = (repository.to_owned(), wanted.to_owned(), location.clone());
        runtime.run(async move {
            fetch_description(&http, &server, &repository, &wanted, &location, timeouts).await
        })?
    };
    let hub = Hub::new(server.clone(), repository.to_owned(), description)
        .map_err(|problem| FetchError::InvalidResponse { location, problem: problem.to_owned() })?;
    let folder = folder(&hub.commit)?;
    folder.write(FILE_LIST, &FileList { files: hub.files.clone() })?;
    Ok((hub, folder))
}

impl Store for FetchedStore {
    fn root(&self) -> &Path {
        self.opening.transfer.client.root()
    }

    fn open(&self, name: &str) -> io::Result<Option<Arc<dyn StoredFile>>> {
        Ok(self.open_files(&[name])?.pop().flatten().map(|file| self.handle(file)))
    }

    fn open_all(&self, names: &[&str]) -> io::Result<Vec<Option<Arc<dyn StoredFile>>>> {
        let opened = self.open_files(names)?;
        Ok(opened.into_iter().map(|file| file.map(|file| self.handle(file))).collect())
    }

    fn prefetch(&self, ranges: &[FileRange<'_>]) -> io::Result<()> {
        let mut by_file: BTreeMap<&str, Vec<Range<u64>>> = BTreeMap::new();
        for FileRange { file, bytes } in ranges {
            by_file.entry(file).or_default().push(bytes.clone());
        }
        let names: Vec<&str> = by_file.keys().copied().collect();
        let mut wanted = Vec::new();
        for (file, (name, ranges)) in self.open_files(&names)?.into_iter().zip(by_file) {
            let location = || self.opening.transfer.client.location(name);
            let file = file.ok_or_else(|| FetchError::Missing {
                location: location(),
                answer: "when it was opened".to_owned(),
            })?;
            let coalesced = coalesce(&ranges, file.identity.size);
            wanted.push((file, coalesced));
        }
        let bytes: u64 = wanted.iter().map(|(_, ranges)| total_bytes(ranges)).sum();
        let missing = MissingRanges::find(wanted)?;
        let location = self.root().display().to_string();
        if missing.bytes() == 0 {
            if bytes > 0 && !self.reported_cached.swap(true, Ordering::Relaxed) {
                progress::print_cached(&location, bytes);
            }
            return Ok(());
        }
        self.reported_cached.store(true, Ordering::Relaxed);
        let progress = Arc::new(FetchProgress::new(location, bytes, bytes - missing.bytes()));
        let transfer = Arc::clone(&self.opening.transfer);
        Ok(self.runtime.run(transfer.fetch_missing(missing, progress, true))?)
    }
}

/// Aligns `ranges` to [`ALIGNMENT_BYTES`], and merges those with a gap of at most [`GAP_BYTES`].
fn coalesce(ranges: &[Range<u64>], size: u64) -> Vec<Range<u64>> {
    let mut set = RangeSet::new();
    for range in ranges.iter().filter(|range| !range.is_empty()) {
        let start = range.start / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
        let end = range.end.next_multiple_of(ALIGNMENT_BYTES);
        set.insert(start..end + GAP_BYTES);
    }
    set.into_iter().map(|range| range.start..(range.end - GAP_BYTES).min(size)).collect()
}

impl fmt::Debug for FetchedStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("FetchedStore").field(&self.root()).finish()
    }
}

/// Open file of a source.
struct FetchedFile {
    file: Arc<CachedFile>,
    transfer: Arc<Transfer>,
    runtime: Arc<FetchRuntime>,
}

impl StoredFile for FetchedFile {
    fn size(&self) -> u64 {
        self.file.identity.size
    }

    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        let size = self.size();
        let bytes = offset.min(size)..size.min(offset.saturating_add(target.len() as u64));
        if bytes.is_empty() {
            return Ok(0);
        }
        if !self.file.missing(&bytes)?.is_empty() {
            let wanted = coalesce(std::slice::from_ref(&bytes), size);
            let missing = MissingRanges::find([(Arc::clone(&self.file), wanted)])?;
            let progress = Arc::new(FetchProgress::new(String::new(), 0, 0));
            self.runtime.run(Arc::clone(&self.transfer).fetch_missing(missing, progress, false))?;
        }
        let length = usize::try_from(bytes.end - bytes.start).unwrap_or(target.len());
        self.file.read_at(target.get_mut(..length).unwrap_or_default(), offset)
    }
}

impl fmt::Debug for FetchedFile {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("FetchedFile").field(&self.file.path()).finish()
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]
mod tests {
    use super::*;

    #[test]
    fn near_ranges_are_merged() {
        assert_eq!(coalesce(&[10..20, 5000..5001], 100_000), [0..8192]);
        assert_eq!(coalesce(&[10..20, 4096 + GAP_BYTES..4097 + GAP_BYTES], 100_000), [0..8192 + GAP_BYTES]);
        assert_eq!(
            coalesce(&[10..20, 8192 + GAP_BYTES..8193 + GAP_BYTES], 100_000),
            [0..4096, 8192 + GAP_BYTES..12288 + GAP_BYTES]
        );
        assert_eq!(coalesce(&[99_999..100_000, 7..7], 100_000), [98_304..100_000]);
    }
}
