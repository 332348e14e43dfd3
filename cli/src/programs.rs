//! Where the function programs are.

use crate::exit::CliError;
use remoe_launcher::process::Programs;
use std::path::{Path, PathBuf};

/// The folder to look in, where it is not that of this program.
const FOLDER_VARIABLE: &str = "REMOE_BIN_DIR";

/// Finds the function programs beside this one, or in `REMOE_BIN_DIR`.
pub(crate) fn find() -> Result<Programs, CliError> {
    let folder = match std::env::var_os(FOLDER_VARIABLE) {
        Some(folder) => PathBuf::from(folder),
        None => own_folder()?,
    };
    Ok(Programs { main: program(&folder, "main-model-fn")?, remote: program(&folder, "remote-expert-fn")? })
}

fn own_folder() -> Result<PathBuf, CliError> {
    let own = std::env::current_exe()
        .map_err(|error| CliError::runtime(format!("cannot find this program's own folder: {error}")))?;
    Ok(own.parent().unwrap_or(Path::new("/")).to_owned())
}

fn program(folder: &Path, name: &str) -> Result<PathBuf, CliError> {
    let path = folder.join(name);
    if path.is_file() {
        return Ok(path);
    }
    Err(CliError {
        path: Some(path),
        ..CliError::runtime(format!(
            "{name} is not in {}: build it with `make build`, or name its folder in {FOLDER_VARIABLE}",
            folder.display()
        ))
    })
}
