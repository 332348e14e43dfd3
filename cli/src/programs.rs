//! Where the function programs are.

use crate::exit::CliError;
use remoe_local::Backend;
use remoe_rollout::process::Programs;
use std::path::{Path, PathBuf};

/// The folder to look in, where it is not that of this program.
const FOLDER_VARIABLE: &str = "REMOE_BIN_DIR";

/// The main function with the native operations, and with LibTorch's.
const NATIVE: &str = "main-model-fn";
const TORCH: &str = "main-model-fn-torch";

/// Device file that the driver of CUDA devices leaves for programs to open.
const CUDA: &str = "/dev/nvidiactl";

/// Finds the function programs beside this one, or in `REMOE_BIN_DIR`: the main function with the operations of
/// `backend`, else with those that `device` needs, or the best device that there is.
pub(crate) fn find(backend: Option<impl Into<Backend>>, device: Option<&str>) -> Result<Programs, CliError> {
    let folder = match std::env::var_os(FOLDER_VARIABLE) {
        Some(folder) => PathBuf::from(folder),
        None => own_folder()?,
    };
    let on_cuda = match device {
        Some(device) => device != "cpu",
        None => Path::new(CUDA).exists() && folder.join(TORCH).is_file(),
    };
    let main = match backend.map(Into::into) {
        Some(Backend::Torch) => TORCH,
        Some(Backend::Native) => NATIVE,
        None if on_cuda => TORCH,
        None => NATIVE,
    };
    Ok(Programs { main: program(&folder, main)?, remote: program(&folder, "remote-expert-fn")? })
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
