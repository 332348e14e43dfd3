//! Paths of the programs of functions.

use crate::exit::CliError;
use crate::flags::CPU;
use remoe_local::MainBackend;
use remoe_rollout::process::Programs;
use std::path::{Path, PathBuf};

/// Environment variable with the folder of the programs. By default, it is the folder of this program.
const FOLDER_VARIABLE: &str = "REMOE_BIN_DIR";

/// Main function with the native backend.
const NATIVE: &str = "main-model-fn";
/// Main function with the LibTorch backend.
pub(crate) const TORCH: &str = "main-model-fn-torch";

/// Finds the programs of functions. Without a `backend`, selects the main function for `device`.
pub(crate) fn find(backend: Option<impl Into<MainBackend>>, device: &str) -> Result<Programs, CliError> {
    let folder = folder()?;
    let main = match backend.map(Into::into) {
        Some(MainBackend::Torch) => TORCH,
        Some(MainBackend::Native) => NATIVE,
        None if device == CPU => NATIVE,
        None => TORCH,
    };
    Ok(Programs {
        main: require_program(&folder, main)?,
        remote: require_program(&folder, "remote-expert-fn")?,
    })
}

/// Returns the folder of the function programs.
pub(crate) fn folder() -> Result<PathBuf, CliError> {
    std::env::var_os(FOLDER_VARIABLE).map_or_else(own_folder, |folder| Ok(PathBuf::from(folder)))
}

fn own_folder() -> Result<PathBuf, CliError> {
    let own = std::env::current_exe()
        .map_err(|error| CliError::runtime(format!("cannot find the folder of this program: {error}")))?;
    Ok(own.parent().unwrap_or(Path::new("/")).to_owned())
}

fn require_program(folder: &Path, name: &str) -> Result<PathBuf, CliError> {
    let path = folder.join(name);
    if path.is_file() {
        return Ok(path);
    }
    Err(CliError {
        path: Some(path),
        ..CliError::runtime(format!(
            "cannot find {name} in {}: in a checkout run `make build`, else install it there \
             (docs/guides/install.md), or set {FOLDER_VARIABLE} to its folder",
            folder.display()
        ))
    })
}
