//! Paths of the programs under test.

use std::path::{Path, PathBuf};

/// Returns the root of the repository.
#[must_use]
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the crate lies in the workspace")
}

/// Returns the folder of the programs: `REMOE_BIN_DIR`, or `target/release` of the workspace.
#[must_use]
pub fn folder() -> PathBuf {
    std::env::var_os("REMOE_BIN_DIR")
        .map_or_else(|| workspace().join("target/release"), |folder| workspace().join(PathBuf::from(folder)))
}

/// Returns the path of the program `name`.
#[must_use]
pub fn program(name: &str) -> PathBuf {
    let path = folder().join(name);
    assert!(path.is_file(), "{} does not exist: run `make build`", path.display());
    path
}
