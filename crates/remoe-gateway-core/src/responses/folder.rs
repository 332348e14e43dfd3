//! The files of stored responses: one each, written whole or not at all.

use super::items::{elements, is_id};
use super::stored::{ResponseLimits, StoredResponse};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// Version of the files.
const VERSION: u32 = 1;
/// Bytes of a file beside items and response: names, the tenant and the id.
const ENVELOPE: usize = 4096;
/// Most files that are looked at.
const FILES: usize = 1 << 17;

/// Why a folder of responses cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {cause}", path.display())]
pub struct ResponseFolderError {
    path: PathBuf,
    action: &'static str,
    cause: String,
}

impl ResponseFolderError {
    pub(super) fn new(path: &Path, action: &'static str, cause: &dyn std::fmt::Display) -> Self {
        Self { path: path.to_owned(), action, cause: cause.to_string() }
    }
}

/// Files that cannot be read, most that are told of.
const UNREAD: usize = 16;

/// Contents of a folder.
pub(super) struct Read {
    pub(super) found: Vec<(Arc<str>, StoredResponse)>,
    /// Why files were left out.
    pub(super) unread: Vec<String>,
}

/// A folder of responses.
pub(super) struct Folder {
    path: PathBuf,
}

#[derive(Serialize)]
struct ResponseFileRef<'a> {
    version: u32,
    id: &'a str,
    tenant: &'a str,
    at: u64,
    items: &'a RawValue,
    response: &'a RawValue,
}

#[derive(Deserialize)]
struct ResponseFile {
    version: u32,
    id: String,
    tenant: String,
    at: u64,
    items: Box<RawValue>,
    response: Box<RawValue>,
}

impl Folder {
    /// Opens the folder at `path`, which is made if it is not there: for its owner alone.
    pub(super) fn open(path: &Path) -> Result<Self, ResponseFolderError> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(path).map_err(|error| ResponseFolderError::new(path, "make", &error))?;
        Ok(Self { path: path.to_owned() })
    }

    /// Reads the latest responses, as many as fit `limits`, and removes older ones. What is left of a write that was cut
    /// off is removed; other files that cannot be read stay.
    pub(super) fn read(&self, limits: ResponseLimits) -> Result<Read, ResponseFolderError> {
        let failed = |error: io::Error| ResponseFolderError::new(&self.path, "read", &error);
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(failed)?.take(FILES) {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.strip_suffix(".tmp").is_some_and(is_id) {
                // It is found again at the next start.
                let _still_there = fs::remove_file(entry.path());
            } else if let Some(id) = name.strip_suffix(".json").filter(|id| is_id(id)) {
                let modified = entry.metadata().and_then(|metadata| metadata.modified()).map_err(failed)?;
                files.push((modified, Arc::<str>::from(id)));
            }
        }
        files.sort_unstable_by(|one, other| other.cmp(one));
        let (mut found, mut unread, mut bytes) = (Vec::new(), Vec::new(), 0);
        for (_, id) in files {
            if found.len() >= limits.responses || bytes > limits.bytes {
                self.remove(&id)?;
                continue;
            }
            match self.read_one(&id, limits) {
                Ok(stored) => {
                    bytes += stored.bytes();
                    found.push((id, stored));
                }
                Err(error) => {
                    tracing::warn!(%error, "stored response ignored");
                    unread.push(error.to_string());
                }
            }
        }
        unread.truncate(UNREAD);
        Ok(Read { found, unread })
    }

    fn read_one(&self, id: &str, limits: ResponseLimits) -> Result<StoredResponse, ResponseFolderError> {
        let path = self.path_of(id);
        let failed = |cause: &dyn std::fmt::Display| ResponseFolderError::new(&path, "read", cause);
        let most = limits.bytes.saturating_add(ENVELOPE);
        let mut text = String::new();
        let file = File::open(&path).map_err(|error| failed(&error))?;
        file.take(most as u64 + 1).read_to_string(&mut text).map_err(|error| failed(&error))?;
        if text.len() > most {
            return Err(failed(&format!("expected at most {most} bytes")));
        }
        let found: ResponseFile = serde_json::from_str(&text).map_err(|error| failed(&error))?;
        if found.version != VERSION || found.id != id {
            return Err(failed(&format!("expected version {VERSION} of {id}")));
        }
        let items = elements(found.items.get()).ok_or_else(|| failed(&"expected a list of items"))?;
        Ok(StoredResponse {
            tenant: found.tenant.into(),
            at: found.at,
            items: items.into(),
            response: found.response.get().to_owned().into(),
        })
    }

    /// Writes `stored` to a file of its own, which is there whole or not at all.
    pub(super) fn write(&self, id: &str, stored: &StoredResponse) -> Result<(), ResponseFolderError> {
        let path = self.path_of(id);
        let failed = |cause: &dyn std::fmt::Display| ResponseFolderError::new(&path, "write", cause);
        let items = RawValue::from_string(format!("[{}]", stored.items)).map_err(|error| failed(&error))?;
        let response: &RawValue = serde_json::from_slice(&stored.response).map_err(|error| failed(&error))?;
        let written = ResponseFileRef {
            version: VERSION,
            id,
            tenant: &stored.tenant,
            at: stored.at,
            items: &items,
            response,
        };
        let text = serde_json::to_vec(&written).map_err(|error| failed(&error))?;
        let next = self.path.join(format!("{id}.tmp"));
        let all = || -> io::Result<()> {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true);
            #[cfg(unix)]
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            let mut file = options.open(&next)?;
            file.write_all(&text)?;
            // Files are read in the order of their responses, whenever they were written.
            file.set_modified(UNIX_EPOCH + Duration::from_nanos(stored.at))?;
            file.sync_all()?;
            fs::rename(&next, &path)
        };
        all().map_err(|error| {
            // What cannot be removed either is removed at the next start.
            let _still_there = fs::remove_file(&next);
            failed(&error)
        })
    }

    /// Removes the file of `id`, if there is one.
    pub(super) fn remove(&self, id: &str) -> Result<(), ResponseFolderError> {
        let path = self.path_of(id);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(ResponseFolderError::new(&path, "remove", &error))
            }
            _ => Ok(()),
        }
    }

    fn path_of(&self, id: &str) -> PathBuf {
        self.path.join(format!("{id}.json"))
    }
}
