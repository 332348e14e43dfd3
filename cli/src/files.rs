//! Reading of files that flags name, and errors about them.

use crate::exit::CliError;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Size limit of a file in bytes. A problem with 1000 layers of 512 experts has a tenth of it.
const FILE_BYTES_LIMIT: u64 = 256 << 20;

/// Reads the text of a file that `flag` names.
pub(crate) fn read(flag: &str, path: &Path) -> Result<String, CliError> {
    let invalid = |message: String| CliError {
        path: Some(path.to_owned()),
        ..CliError::arguments(flag, format!("cannot read {}: {message}", path.display()))
    };
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(FILE_BYTES_LIMIT + 1).read_to_string(&mut text))
        .map_err(|error| invalid(error.to_string()))?;
    if text.len() as u64 > FILE_BYTES_LIMIT {
        return Err(invalid(format!("expected at most {FILE_BYTES_LIMIT} bytes")));
    }
    Ok(text)
}

/// Adds the path of the file, which `flag` names, to an error about it.
pub(crate) fn file_error(flag: &str, path: &Path, error: &dyn std::fmt::Display) -> CliError {
    CliError {
        path: Some(path.to_owned()),
        ..CliError::arguments(flag, format!("{}: {error}", path.display()))
    }
}
