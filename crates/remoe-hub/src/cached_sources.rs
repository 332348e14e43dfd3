//! Sources in the cache, for people: listed, and removed.

use crate::cache::SourceFolder;
use crate::error::FetchError;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Says of which source a folder is.
const PLACE: &str = ".place";
/// Unit of the blocks that a file takes.
const BLOCK: u64 = 512;

#[derive(Debug, Serialize, Deserialize)]
struct SourceMarker {
    place: String,
}

/// The part of the cache that is of one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedSource {
    /// The source, as a model's place is written; none of a folder that an earlier version made.
    pub place: Option<String>,
    /// Folder in the cache.
    pub folder: PathBuf,
    /// Bytes that it takes on disk.
    pub bytes: u64,
}

impl CachedSource {
    /// Tells if `named` is its place, with the commit or without, or the name of its folder.
    #[must_use]
    pub fn is(&self, named: &str) -> bool {
        let place = self.place.as_deref();
        let without_commit = place.and_then(|place| place.rsplit_once('@')).map(|(place, _)| place);
        let folder = self.folder.file_name().and_then(|name| name.to_str());
        [place, without_commit, folder].into_iter().flatten().any(|name| name == named)
    }

    /// Removes it. Processes that have its files open read them to their end.
    ///
    /// # Errors
    /// The cache cannot be written.
    pub fn remove(&self) -> Result<(), FetchError> {
        fs::remove_dir_all(&self.folder).map_err(FetchError::cache(&self.folder))
    }
}

/// Notes that `folder` is of `place`, where nothing says so.
pub(crate) fn note(folder: &SourceFolder, place: &str) {
    if matches!(folder.read::<SourceMarker>(PLACE), Ok(None)) {
        // One that cannot be written is listed by its folder.
        let _unnamed = folder.write(PLACE, &SourceMarker { place: place.to_owned() });
    }
}

/// Lists the parts of `cache`, by place.
///
/// # Errors
/// The cache cannot be read.
pub fn kept(cache: &Path) -> Result<Vec<CachedSource>, FetchError> {
    let entries = match fs::read_dir(cache) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(FetchError::cache(cache))?,
    };
    let mut all = Vec::new();
    for entry in entries {
        let folder = entry.map_err(FetchError::cache(cache))?.path();
        let Some(source) = SourceFolder::existing(&folder) else { continue };
        let place = source.read::<SourceMarker>(PLACE).ok().flatten().map(|known| known.place);
        all.push(CachedSource {
            place,
            bytes: allocated(&folder).map_err(FetchError::cache(&folder))?,
            folder,
        });
    }
    all.sort_by(|a, b| {
        (a.place.is_none(), &a.place, &a.folder).cmp(&(b.place.is_none(), &b.place, &b.folder))
    });
    Ok(all)
}

/// Returns the bytes that the files of `folder` take on disk: sparse ones what was written of them.
///
/// # Errors
/// It cannot be read.
pub fn allocated(folder: &Path) -> std::io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        // One may be renamed meanwhile.
        bytes += entry?.metadata().map_or(0, |metadata| metadata.blocks() * BLOCK);
    }
    Ok(bytes)
}
