//! Where the function programs are.

use crate::exit::CliError;
use crate::flags::CPU;
use remoe_local::MainBackend;
use remoe_rollout::process::Programs;
use std::path::{Path, PathBuf};

/// The folder to look in, where it is not that of this program.
const FOLDER_VARIABLE: &str = "REMOE_BIN_DIR";

/// The main function with the native operations, and with LibTorch's.
const NATIVE: &str = "main-model-fn";
pub(crate) const TORCH: &str = "main-model-fn-torch";

/// Finds the function programs beside this one, or in `REMOE_BIN_DIR`: the main function with the operations of
/// `backend`, else with those that `device` needs.
pub(crate) fn find(backend: Option<impl Into<MainBackend>>, device: &str) -> Result<Programs, CliError> {
    let folder = folder()?;
    let main = match backend.map(Into::into) {
        Some(MainBackend::Torch) => TORCH,
        Some(MainBackend::Native) => NATIVE,
        None if device == CPU => NATIVE,
        None => TORCH,
    };
    Ok(Programs { main: program(&folder, main)?, remote: program(&folder, "remote-expert-fn")? })
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

fn program(folder: &Path, name: &str) -> Result<PathBuf, CliError> {
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
