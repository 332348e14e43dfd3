//! Folders that results go to. None is made unasked: a typing error would be one, too.

use crate::exit::CliError;
use rustix::fs::{Access, access};
use std::io;
use std::path::Path;

/// Refuses a file whose folder is not there.
pub(crate) fn require_parent(flag: &str, file: &Path) -> Result<(), CliError> {
    match file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        Some(folder) if !folder.is_dir() => Err(missing(flag, folder)),
        _ => Ok(()),
    }
}

/// Refuses a file that this user cannot write: better said before work than after.
pub(crate) fn require_writable(flag: &str, file: &Path) -> Result<(), CliError> {
    require_parent(flag, file)?;
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let checked = if file.exists() { file } else { folder };
    access(checked, Access::WRITE_OK).map_err(|error| CliError {
        path: Some(file.to_owned()),
        ..CliError::arguments(flag, format!("cannot write {}: {error}", file.display()))
    })
}

/// Makes `folder`, but not the folders above it.
pub(crate) fn make(flag: &str, folder: &Path) -> Result<(), CliError> {
    require_parent(flag, folder)?;
    match std::fs::create_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists || !folder.is_dir() => Err(CliError {
            path: Some(folder.to_owned()),
            ..CliError::arguments(flag, format!("cannot create {}: {error}", folder.display()))
        }),
        _ => Ok(()),
    }
}

fn missing(flag: &str, folder: &Path) -> CliError {
    CliError {
        path: Some(folder.to_owned()),
        ..CliError::arguments(flag, format!("missing folder {}; create it first", folder.display()))
    }
}
