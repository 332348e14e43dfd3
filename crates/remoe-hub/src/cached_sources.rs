//! List and removal of the sources in the cache.

use crate::cache::SourceFolder;
use crate::error::FetchError;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// File in a source's folder that names the source.
const MARKER_FILE: &str = ".place";
/// Unit of `st_blocks` (`stat(2)`), in bytes.
const BLOCK_BYTES: u64 = 512;

#[derive(Debug, Serialize, Deserialize)]
struct SourceMarker {
    #[serde(rename = "place")]
    location: String,
}

/// Cache folder of one source, with its size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedSource {
    /// Location of the model, as `--model` takes it. `None` for a folder of an earlier version, which has no marker.
    pub location: Option<String>,
    /// Folder in the cache.
    pub folder: PathBuf,
    /// Bytes that its files take on disk.
    pub bytes: u64,
}

impl CachedSource {
    /// Reports if `text` is its location, with or without the commit, or the name of its folder.
    #[must_use]
    pub fn is_named(&self, text: &str) -> bool {
        let location = self.location.as_deref();
        let without_commit =
            location.and_then(|location| location.rsplit_once('@')).map(|(location, _)| location);
        let folder = self.folder.file_name().and_then(|name| name.to_str());
        [location, without_commit, folder].into_iter().flatten().any(|name| name == text)
    }

    /// Removes the folder. Processes that have its files open can still read them.
    ///
    /// # Errors
    /// The cache cannot be written.
    pub fn remove(&self) -> Result<(), FetchError> {
        fs::remove_dir_all(&self.folder).map_err(FetchError::cache(&self.folder))
    }
}

/// Writes the marker that names the source of `folder`, unless there is one.
pub(crate) fn write_marker(folder: &SourceFolder, location: &str) {
    if matches!(folder.read::<SourceMarker>(MARKER_FILE), Ok(None)) {
        // Without a marker, the source is listed by its folder.
        let _unnamed = folder.write(MARKER_FILE, &SourceMarker { location: location.to_owned() });
    }
}

/// Lists the sources in `cache`, sorted by location.
///
/// # Errors
/// The cache cannot be read.
pub fn list_cached_sources(cache: &Path) -> Result<Vec<CachedSource>, FetchError> {
    let entries = match fs::read_dir(cache) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(FetchError::cache(cache))?,
    };
    let mut all = Vec::new();
    for entry in entries {
        let folder = entry.map_err(FetchError::cache(cache))?.path();
        let Some(source) = SourceFolder::existing(&folder) else { continue };
        let location = source.read::<SourceMarker>(MARKER_FILE).ok().flatten().map(|marker| marker.location);
        all.push(CachedSource {
            location,
            bytes: allocated_bytes(&folder).map_err(FetchError::cache(&folder))?,
            folder,
        });
    }
    all.sort_by(|a, b| {
        (a.location.is_none(), &a.location, &a.folder).cmp(&(b.location.is_none(), &b.location, &b.folder))
    });
    Ok(all)
}

/// Returns the bytes that the files of `folder` take on disk. The holes of sparse files do not count.
///
/// # Errors
/// The folder cannot be read.
pub fn allocated_bytes(folder: &Path) -> std::io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        // Another process may have renamed the file meanwhile.
        bytes += entry?.metadata().map_or(0, |metadata| metadata.blocks() * BLOCK_BYTES);
    }
    Ok(bytes)
}
