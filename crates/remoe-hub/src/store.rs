//! The files of a source, read through the cache.

use crate::access::Access;
use crate::background::Background;
use crate::cache::{CachedFile, SourceFolder};
use crate::cached_sources;
use crate::checked_client::CheckedClient;
use crate::client::SourceClient;
use crate::describe::describe;
use crate::error::FetchError;
use crate::location::ModelLocation;
use crate::opening::Opening;
use crate::progress::{self, FetchProgress};
use crate::source::{Hub, HubServer, S3, Source, Web, is_commit};
use crate::timeouts::{FetchTimeouts, SourceActivity};
use crate::transfer::{Missing, Transfer, total};
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

/// Alignment of fetched ranges in bytes: they begin and end at pages.
const PAGE: u64 = 4 << 10;
/// Largest gap in bytes between ranges that are fetched as one: a request costs more than the gap.
const GAP: u64 = 32 << 10;
/// Name under which the file list of a hub repository's commit is kept beside its files.
const CONTENTS: &str = ".contents";

/// The files of a hub commit, an S3 prefix or a web server's folder.
///
/// It has threads of its own and may be used from any thread, also from those of an async runtime, which
/// it blocks.
pub struct FetchedStore {
    opening: Arc<Opening>,
    runtime: Arc<Background>,
    revision: Option<String>,
    /// The user has been told that nothing needs to be fetched.
    said_cached: AtomicBool,
}

/// A hub commit as the cache keeps it.
#[derive(Debug, Serialize, Deserialize)]
struct Contents {
    files: BTreeSet<String>,
}

impl FetchedStore {
    /// Connects with `location`, which is no folder, and opens its part of the cache folder `cache`. For a
    /// branch or tag of the hub this asks which commit it is; a commit of which everything is in the cache
    /// is read without a connection.
    ///
    /// # Errors
    /// There is no such source, it is not an allowed one, its credentials are refused, it does not answer, or
    /// the cache folder cannot be used.
    pub fn connect(location: &ModelLocation, cache: &Path, access: &Access) -> Result<Self, FetchError> {
        let patience = access.patience;
        let runtime = Arc::new(Background::start()?);
        let http = CheckedClient::new(access.egress.clone(), &patience)?;
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
                    open_hub(&runtime, &http, cache, repository, wanted, location.to_string(), patience)?;
                revision = Some(hub.commit.clone());
                pinned = ModelLocation::Hub { repository: repository.clone(), revision: revision.clone() };
                (Source::Hub(hub), folder)
            }
        };
        cached_sources::note(&folder, &pinned.to_string());
        let client = SourceClient::new(http, source, PathBuf::from(pinned.to_string()));
        let opening =
            Opening::new(Arc::new(Transfer { client, patience, heard: SourceActivity::new() }), folder);
        Ok(Self { opening: Arc::new(opening), runtime, revision, said_cached: AtomicBool::new(false) })
    }

    /// The commit, for a repository of the hub.
    #[must_use]
    pub fn revision(&self) -> Option<&str> {
        self.revision.as_deref()
    }

    /// The part of the cache that keeps what is fetched.
    #[must_use]
    pub fn cache(&self) -> &Path {
        self.opening.folder.path()
    }

    fn opened(&self, names: &[&str]) -> Result<Vec<Option<Arc<CachedFile>>>, FetchError> {
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

/// The commit that is `wanted`, with what the cache or the hub knows of it.
fn open_hub(
    runtime: &Background,
    http: &CheckedClient,
    cache: &Path,
    repository: &str,
    wanted: &str,
    place: String,
    patience: FetchTimeouts,
) -> Result<(Hub, SourceFolder), FetchError> {
    let server = HubServer::from_environment()?;
    let folder =
        |commit: &str| SourceFolder::open(cache, &format!("hf {} {repository} {commit}", server.endpoint()));
    if is_commit(wanted) {
        let folder = folder(wanted)?;
        if let Some(Contents { files }) = folder.read(CONTENTS)? {
            let hub = Hub::at_commit(server, repository.to_owned(), wanted.to_owned(), files);
            return Ok((hub, folder));
        }
    }
    let description = {
        let (http, server) = (http.clone(), server.clone());
        let (repository, wanted, place) = (repository.to_owned(), wanted.to_owned(), place.clone());
        runtime.run(async move { describe(&http, &server, &repository, &wanted, &place, patience).await })?
    };
    let hub = Hub::new(server.clone(), repository.to_owned(), description)
        .map_err(|problem| FetchError::Answer { place, problem: problem.to_owned() })?;
    let folder = folder(&hub.commit)?;
    folder.write(CONTENTS, &Contents { files: hub.files.clone() })?;
    Ok((hub, folder))
}

impl Store for FetchedStore {
    fn root(&self) -> &Path {
        self.opening.transfer.client.root()
    }

    fn open(&self, name: &str) -> io::Result<Option<Arc<dyn StoredFile>>> {
        Ok(self.opened(&[name])?.pop().flatten().map(|file| self.handle(file)))
    }

    fn open_all(&self, names: &[&str]) -> io::Result<Vec<Option<Arc<dyn StoredFile>>>> {
        let opened = self.opened(names)?;
        Ok(opened.into_iter().map(|file| file.map(|file| self.handle(file))).collect())
    }

    fn prefetch(&self, ranges: &[FileRange<'_>]) -> io::Result<()> {
        let mut by_file: BTreeMap<&str, Vec<Range<u64>>> = BTreeMap::new();
        for FileRange { file, bytes } in ranges {
            by_file.entry(file).or_default().push(bytes.clone());
        }
        let names: Vec<&str> = by_file.keys().copied().collect();
        let mut wanted = Vec::new();
        for (file, (name, ranges)) in self.opened(&names)?.into_iter().zip(by_file) {
            let place = || self.opening.transfer.client.place(name);
            let file = file.ok_or_else(|| FetchError::Missing {
                place: place(),
                answer: "when it was opened".to_owned(),
            })?;
            let whole = coalesced(&ranges, file.identity.size);
            wanted.push((file, whole));
        }
        let bytes: u64 = wanted.iter().map(|(_, ranges)| total(ranges)).sum();
        let missing = Missing::of(wanted)?;
        let place = self.root().display().to_string();
        if missing.bytes() == 0 {
            if bytes > 0 && !self.said_cached.swap(true, Ordering::Relaxed) {
                progress::print_cached(&place, bytes);
            }
            return Ok(());
        }
        self.said_cached.store(true, Ordering::Relaxed);
        let progress = Arc::new(FetchProgress::new(place, bytes, bytes - missing.bytes()));
        let transfer = Arc::clone(&self.opening.transfer);
        Ok(self.runtime.run(transfer.bring(missing, progress, true))?)
    }
}

/// `ranges` in whole pages, as one where the gap between them is small.
fn coalesced(ranges: &[Range<u64>], size: u64) -> Vec<Range<u64>> {
    let mut set = RangeSet::new();
    for range in ranges.iter().filter(|range| !range.is_empty()) {
        let start = range.start / PAGE * PAGE;
        let end = range.end.next_multiple_of(PAGE);
        set.insert(start..end + GAP);
    }
    set.into_iter().map(|range| range.start..(range.end - GAP).min(size)).collect()
}

impl fmt::Debug for FetchedStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("FetchedStore").field(&self.root()).finish()
    }
}

/// An open file of a source.
struct FetchedFile {
    file: Arc<CachedFile>,
    transfer: Arc<Transfer>,
    runtime: Arc<Background>,
}

impl StoredFile for FetchedFile {
    fn size(&self) -> u64 {
        self.file.identity.size
    }

    fn read_at(&self, target: &mut [u8], at: u64) -> io::Result<usize> {
        let size = self.size();
        let bytes = at.min(size)..size.min(at.saturating_add(target.len() as u64));
        if bytes.is_empty() {
            return Ok(0);
        }
        if !self.file.missing(&bytes)?.is_empty() {
            let wanted = coalesced(std::slice::from_ref(&bytes), size);
            let missing = Missing::of([(Arc::clone(&self.file), wanted)])?;
            let progress = Arc::new(FetchProgress::new(String::new(), 0, 0));
            self.runtime.run(Arc::clone(&self.transfer).bring(missing, progress, false))?;
        }
        let length = usize::try_from(bytes.end - bytes.start).unwrap_or(target.len());
        self.file.read_at(target.get_mut(..length).unwrap_or_default(), at)
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
    fn near_ranges_become_one() {
        assert_eq!(coalesced(&[10..20, 5000..5001], 100_000), [0..8192]);
        assert_eq!(coalesced(&[10..20, 4096 + GAP..4097 + GAP], 100_000), [0..8192 + GAP]);
        assert_eq!(coalesced(&[10..20, 8192 + GAP..8193 + GAP], 100_000), [0..4096, 8192 + GAP..12288 + GAP]);
        assert_eq!(coalesced(&[99_999..100_000, 7..7], 100_000), [98_304..100_000]);
    }
}
