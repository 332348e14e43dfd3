//! Files that flags name, and errors about them.

use crate::exit::CliError;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Longest file in bytes. A problem of a thousand layers of 512 experts is a tenth of it.
const FILE_LIMIT: u64 = 256 << 20;

/// Reads the text of a file that `flag` names.
pub(crate) fn read(flag: &str, path: &Path) -> Result<String, CliError> {
    let wrong = |message: String| CliError {
        path: Some(path.to_owned()),
        ..CliError::arguments(flag, format!("cannot read {}: {message}", path.display()))
    };
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(FILE_LIMIT + 1).read_to_string(&mut text))
        .map_err(|error| wrong(error.to_string()))?;
    if text.len() as u64 > FILE_LIMIT {
        return Err(wrong(format!("expected at most {FILE_LIMIT} bytes")));
    }
    Ok(text)
}

/// Returns `error` about the file at `path`, which `flag` names.
pub(crate) fn in_file(flag: &str, path: &Path, error: &dyn std::fmt::Display) -> CliError {
    CliError {
        path: Some(path.to_owned()),
        ..CliError::arguments(flag, format!("{}: {error}", path.display()))
    }
}
