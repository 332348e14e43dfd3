//! Test fixtures, from which seeds are made.

use std::path::PathBuf;

/// Returns the root of the repository.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Returns the folders of the fixture checkpoints, sorted.
pub(crate) fn checkpoints() -> Vec<PathBuf> {
    let fixtures = root().join("tests/fixtures");
    let mut folders: Vec<PathBuf> = std::fs::read_dir(fixtures)
        .expect("tests/fixtures is there")
        .map(|entry| entry.expect("it can be listed").path())
        .filter(|path| path.join("config.json").exists())
        .collect();
    folders.sort();
    folders
}

/// Reads a file of a fixture. A missing file is empty.
pub(crate) fn read(path: PathBuf) -> Vec<u8> {
    std::fs::read(path).unwrap_or_default()
}

/// Returns a text that is longer than an error message may be. Errors that repeat it must truncate it.
pub(crate) fn long_text() -> String {
    "long é".repeat(500)
}
