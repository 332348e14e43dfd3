//! Cache folder of fetched files, shared by processes.
//!
//! `<cache>/<digest of the source's address and commit>/` holds for each file:
//!
//! - `NAME.json`: its version,
//! - `NAME.VERSION`: a sparse file as long as the original,
//! - `NAME.VERSION.journal`: the byte ranges that have been fetched,
//! - `NAME.VERSION.verified`, once the complete file has the SHA-256 that the source states.

mod file;
mod journal;
mod lock;

pub(crate) use file::{CachedFile, ClaimOutcome, RangeClaim};

use crate::checksum::Sha256Sum;
use crate::error::FetchError;
use crate::identity::Identity;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Size limit of a metadata file, in bytes.
const METADATA_BYTES_LIMIT: u64 = 16 << 20;
/// Hexadecimal digits of a digest in a file name.
const DIGEST_DIGITS: usize = 24;

/// Cache folder of one source.
#[derive(Debug)]
pub(crate) struct SourceFolder {
    path: PathBuf,
}

/// Content of `NAME.json`: the cached version of a file.
#[derive(Debug, Serialize, Deserialize)]
struct CachedVersion {
    #[serde(flatten)]
    identity: Identity,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sha256: Option<String>,
}

/// Lock between processes that open a file for the first time. Dropping it releases the lock.
#[derive(Debug)]
pub(crate) struct OpenLock {
    _locked: File,
}

impl SourceFolder {
    /// Opens or creates the folder of the source with this address in `cache`.
    ///
    /// # Errors
    /// The folder cannot be created.
    pub(crate) fn open(cache: &Path, address: &str) -> Result<Self, FetchError> {
        let digest: String = Sha256Sum::of(address).to_string().chars().take(DIGEST_DIGITS).collect();
        let path = cache.join(digest);
        fs::create_dir_all(&path).map_err(FetchError::cache(&path))?;
        Ok(Self { path })
    }

    /// Returns the folder at `path`, if its name is that of a source's folder.
    pub(crate) fn existing(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?;
        let is_source = name.len() == DIGEST_DIGITS && is_digest(name) && path.is_dir();
        is_source.then(|| Self { path: path.to_owned() })
    }

    /// Returns the path of the folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the JSON value in the file `name`. A missing or damaged file gives `None`.
    pub(crate) fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, FetchError> {
        let path = self.path.join(name);
        let bytes = match fs::metadata(&path) {
            Ok(metadata) if metadata.len() <= METADATA_BYTES_LIMIT => fs::read(&path),
            Ok(_) => return Ok(None),
            Err(error) => Err(error),
        };
        match bytes {
            // A damaged file is written again by the caller.
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(FetchError::cache(&path)(error)),
        }
    }

    /// Writes `value` as JSON to the file `name`, atomically.
    pub(crate) fn write<T: Serialize>(&self, name: &str, value: &T) -> Result<(), FetchError> {
        let path = self.path.join(name);
        // A random number, because processes in containers have equal ids.
        let temporary = self.path.join(format!("{name}.{:016x}.new", fastrand::u64(..)));
        let write = || {
            let mut file = File::create(&temporary)?;
            file.write_all(&serde_json::to_vec(value)?)?;
            file.sync_data()?;
            fs::rename(&temporary, &path)
        };
        write().map_err(FetchError::cache(&path))
    }

    /// Takes the lock for opening the file `name`, unless another process holds it.
    ///
    /// # Errors
    /// The folder cannot be written, or its file system lacks locks.
    pub(crate) fn try_lock_open(&self, name: &str) -> Result<Option<OpenLock>, FetchError> {
        let path = self.path.join(format!("{}.lock", flat_name(name)));
        let file = File::options().write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(FetchError::cache(&path))?;
        let locked = lock::try_lock(&file, &(0..1)).map_err(FetchError::cache(&path))?;
        Ok(locked.then_some(OpenLock { _locked: file }))
    }

    /// Opens the cached version of the file `name`, if any.
    ///
    /// # Errors
    /// The cache cannot be read.
    pub(crate) fn cached_version(&self, name: &str) -> Result<Option<Arc<CachedFile>>, FetchError> {
        let Some(cached) = self.read::<CachedVersion>(&metadata_name(name))? else {
            return Ok(None);
        };
        let sha256 = cached.sha256.as_deref().and_then(Sha256Sum::from_hex);
        self.open_version(name, cached.identity, sha256).map(Some)
    }

    /// Creates a new version of the file `name`, and removes the previous one. A reader of the removed version keeps it
    /// open until it ends.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub(crate) fn create_version(
        &self,
        name: &str,
        identity: Identity,
        sha256: Option<Sha256Sum>,
    ) -> Result<Arc<CachedFile>, FetchError> {
        self.remove_versions(name).map_err(FetchError::cache(&self.path))?;
        let file = self.open_version(name, identity.clone(), sha256)?;
        let cached = CachedVersion { identity, sha256: sha256.map(|sum| sum.to_string()) };
        self.write(&metadata_name(name), &cached)?;
        Ok(file)
    }

    fn open_version(
        &self,
        name: &str,
        identity: Identity,
        sha256: Option<Sha256Sum>,
    ) -> Result<Arc<CachedFile>, FetchError> {
        CachedFile::open(self.path.join(version_name(name, &identity)), name, identity, sha256)
    }

    fn remove_versions(&self, name: &str) -> std::io::Result<()> {
        let prefix = format!("{}.", flat_name(name));
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let other = entry.file_name();
            let version = other.to_str().and_then(|other| other.strip_prefix(&prefix));
            // `model.safetensors.index.json` is not a version of `model.safetensors`.
            if version.is_some_and(|version| version.get(..DIGEST_DIGITS).is_some_and(is_digest)) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

/// Returns a file's name in the cache folder, which has no subfolders.
fn flat_name(name: &str) -> String {
    name.replace('/', "%2F")
}

fn metadata_name(name: &str) -> String {
    format!("{}.json", flat_name(name))
}

fn version_name(name: &str, identity: &Identity) -> String {
    // As `Identity::difference` compares versions: an ETag takes precedence over a date.
    let version = identity.etag.as_ref().or(identity.last_modified.as_ref());
    let text = format!("{}\n{version:?}", identity.size);
    let digest: String = Sha256Sum::of(text).to_string().chars().take(DIGEST_DIGITS).collect();
    format!("{}.{digest}", flat_name(name))
}

fn is_digest(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
