//! Folder of stored responses: one file each, written atomically.

use super::items::{elements, is_id};
use super::stored::{ResponseLimits, StoredResponse};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// Version of the file format.
const FORMAT_VERSION: u32 = 1;
/// Largest size of a file apart from items and response, in bytes: field names, tenant and id.
const ENVELOPE_BYTES: usize = 4096;
/// Largest number of directory entries that are read.
const MAX_FILES: usize = 1 << 17;

/// Reason why a folder of responses cannot be used.
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

/// Largest number of unreadable files that are reported.
const MAX_UNREAD_MESSAGES: usize = 16;

/// Contents of a folder.
pub(super) struct FolderContents {
    pub(super) found: Vec<(Arc<str>, StoredResponse)>,
    /// Errors of files that could not be read.
    pub(super) unread: Vec<String>,
}

/// Folder with the files of stored responses.
pub(super) struct ResponseFolder {
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

impl ResponseFolder {
    /// Opens the folder at `path`. If it is missing, creates it with access for its owner alone.
    pub(super) fn open(path: &Path) -> Result<Self, ResponseFolderError> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(path).map_err(|error| ResponseFolderError::new(path, "make", &error))?;
        Ok(Self { path: path.to_owned() })
    }

    /// Reads the latest responses, as many as fit `limits`, and removes older ones. Also removes temporary files of
    /// interrupted writes. Other unreadable files stay.
    pub(super) fn read(&self, limits: ResponseLimits) -> Result<FolderContents, ResponseFolderError> {
        let failed = |error: io::Error| ResponseFolderError::new(&self.path, "read", &error);
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(failed)?.take(MAX_FILES) {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.strip_suffix(".tmp").is_some_and(is_id) {
                // If this fails, the next start tries again.
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
        unread.truncate(MAX_UNREAD_MESSAGES);
        Ok(FolderContents { found, unread })
    }

    fn read_one(&self, id: &str, limits: ResponseLimits) -> Result<StoredResponse, ResponseFolderError> {
        let path = self.path_of(id);
        let failed = |cause: &dyn std::fmt::Display| ResponseFolderError::new(&path, "read", cause);
        let max_bytes = limits.bytes.saturating_add(ENVELOPE_BYTES);
        let mut text = String::new();
        let file = File::open(&path).map_err(|error| failed(&error))?;
        file.take(max_bytes as u64 + 1).read_to_string(&mut text).map_err(|error| failed(&error))?;
        if text.len() > max_bytes {
            return Err(failed(&format!("expected at most {max_bytes} bytes")));
        }
        let found: ResponseFile = serde_json::from_str(&text).map_err(|error| failed(&error))?;
        if found.version != FORMAT_VERSION || found.id != id {
            return Err(failed(&format!("expected version {FORMAT_VERSION} of {id}")));
        }
        let items = elements(found.items.get()).ok_or_else(|| failed(&"expected a list of items"))?;
        Ok(StoredResponse {
            tenant: found.tenant.into(),
            at: found.at,
            items: items.into(),
            response: found.response.get().to_owned().into(),
        })
    }

    /// Writes `stored` to its file atomically: to a temporary file, which is then renamed.
    pub(super) fn write(&self, id: &str, stored: &StoredResponse) -> Result<(), ResponseFolderError> {
        let path = self.path_of(id);
        let failed = |cause: &dyn std::fmt::Display| ResponseFolderError::new(&path, "write", cause);
        let items = RawValue::from_string(format!("[{}]", stored.items)).map_err(|error| failed(&error))?;
        let response: &RawValue = serde_json::from_slice(&stored.response).map_err(|error| failed(&error))?;
        let written = ResponseFileRef {
            version: FORMAT_VERSION,
            id,
            tenant: &stored.tenant,
            at: stored.at,
            items: &items,
            response,
        };
        let text = serde_json::to_vec(&written).map_err(|error| failed(&error))?;
        let temporary = self.path.join(format!("{id}.tmp"));
        let write_and_rename = || -> io::Result<()> {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true);
            #[cfg(unix)]
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            let mut file = options.open(&temporary)?;
            file.write_all(&text)?;
            // The modification time orders the responses at the next start, in whatever order the files were written.
            file.set_modified(UNIX_EPOCH + Duration::from_nanos(stored.at))?;
            file.sync_all()?;
            fs::rename(&temporary, &path)
        };
        write_and_rename().map_err(|error| {
            // If this fails, the next start removes the file.
            let _still_there = fs::remove_file(&temporary);
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
