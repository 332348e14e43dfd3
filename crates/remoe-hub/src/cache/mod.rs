//! The folder that keeps what was fetched, for every process that shares it.
//!
//! `<cache>/<digest of the source>/` holds for each file `NAME.json`, which says what version the cache is
//! of, `NAME.VERSION`, a sparse file as long as the original, and `NAME.VERSION.journal`, which says which
//! of its bytes are there. `NAME.VERSION.verified` says that the whole has the SHA-256 that the source
//! states. The digest is of the source's address, with the commit where it has one.

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

/// Longest description that is read.
const DESCRIPTION_BYTES: u64 = 16 << 20;
/// Characters of digests in names.
const DIGITS: usize = 24;

/// The folder of one source.
#[derive(Debug)]
pub(crate) struct SourceFolder {
    path: PathBuf,
}

/// A version of a file, as `NAME.json` keeps it.
#[derive(Debug, Serialize, Deserialize)]
struct CachedVersion {
    #[serde(flatten)]
    identity: Identity,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sha256: Option<String>,
}

/// The right to open a file for the first time; ends when it is dropped.
#[derive(Debug)]
pub(crate) struct OpenLock {
    _locked: File,
}

impl SourceFolder {
    /// The folder of the source with this address in `cache`.
    ///
    /// # Errors
    /// It cannot be made.
    pub(crate) fn open(cache: &Path, address: &str) -> Result<Self, FetchError> {
        let digest: String = Sha256Sum::of(address).to_string().chars().take(DIGITS).collect();
        let path = cache.join(digest);
        fs::create_dir_all(&path).map_err(FetchError::cache(&path))?;
        Ok(Self { path })
    }

    /// The folder at `path`, if it can be that of a source.
    pub(crate) fn existing(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?;
        let is_source = name.len() == DIGITS && is_digest(name) && path.is_dir();
        is_source.then(|| Self { path: path.to_owned() })
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the value kept under `name`, if it is there and readable.
    pub(crate) fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, FetchError> {
        let path = self.path.join(name);
        let bytes = match fs::metadata(&path) {
            Ok(metadata) if metadata.len() <= DESCRIPTION_BYTES => fs::read(&path),
            Ok(_) => return Ok(None),
            Err(error) => Err(error),
        };
        match bytes {
            // One that was spoiled is made again.
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(FetchError::cache(&path)(error)),
        }
    }

    /// Keeps `value` under `name`, as a whole or not at all.
    pub(crate) fn write<T: Serialize>(&self, name: &str, value: &T) -> Result<(), FetchError> {
        let path = self.path.join(name);
        // Not the process id: those of containers are all alike.
        let temporary = self.path.join(format!("{name}.{:016x}.new", fastrand::u64(..)));
        let write = || {
            let mut file = File::create(&temporary)?;
            file.write_all(&serde_json::to_vec(value)?)?;
            file.sync_data()?;
            fs::rename(&temporary, &path)
        };
        write().map_err(FetchError::cache(&path))
    }

    /// Takes the turn to open the file `name`, unless another process has it.
    ///
    /// # Errors
    /// The folder cannot be written, or has no locks.
    pub(crate) fn turn(&self, name: &str) -> Result<Option<OpenLock>, FetchError> {
        let path = self.path.join(format!("{}.lock", flat(name)));
        let file = File::options().write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(FetchError::cache(&path))?;
        let locked = lock::try_lock(&file, &(0..1)).map_err(FetchError::cache(&path))?;
        Ok(locked.then_some(OpenLock { _locked: file }))
    }

    /// The version of the file `name` that is in the cache.
    ///
    /// # Errors
    /// The cache cannot be read.
    pub(crate) fn known(&self, name: &str) -> Result<Option<Arc<CachedFile>>, FetchError> {
        let Some(known) = self.read::<CachedVersion>(&description(name))? else {
            return Ok(None);
        };
        let sha256 = known.sha256.as_deref().and_then(Sha256Sum::from_hex);
        self.file(name, known.identity, sha256).map(Some)
    }

    /// Begins another version of the file `name`, and removes the one before. A reader of the removed version keeps it
    /// until it ends.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub(crate) fn begin(
        &self,
        name: &str,
        identity: Identity,
        sha256: Option<Sha256Sum>,
    ) -> Result<Arc<CachedFile>, FetchError> {
        self.remove_versions(name).map_err(FetchError::cache(&self.path))?;
        let file = self.file(name, identity.clone(), sha256)?;
        let known = CachedVersion { identity, sha256: sha256.map(|sum| sum.to_string()) };
        self.write(&description(name), &known)?;
        Ok(file)
    }

    fn file(
        &self,
        name: &str,
        identity: Identity,
        sha256: Option<Sha256Sum>,
    ) -> Result<Arc<CachedFile>, FetchError> {
        CachedFile::open(self.path.join(version_name(name, &identity)), name, identity, sha256)
    }

    fn remove_versions(&self, name: &str) -> std::io::Result<()> {
        let prefix = format!("{}.", flat(name));
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let other = entry.file_name();
            let version = other.to_str().and_then(|other| other.strip_prefix(&prefix));
            // `model.safetensors.index.json` is no version of `model.safetensors`.
            if version.is_some_and(|version| version.get(..DIGITS).is_some_and(is_digest)) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

/// The name of a file of the model in the cache's folder, which has no folders of its own.
fn flat(name: &str) -> String {
    name.replace('/', "%2F")
}

fn description(name: &str) -> String {
    format!("{}.json", flat(name))
}

fn version_name(name: &str, identity: &Identity) -> String {
    // As versions are compared: a date says nothing beside an ETag.
    let version = identity.etag.as_ref().or(identity.last_modified.as_ref());
    let text = format!("{}\n{version:?}", identity.size);
    let digest: String = Sha256Sum::of(text).to_string().chars().take(DIGITS).collect();
    format!("{}.{digest}", flat(name))
}

fn is_digest(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
