//! The fixtures of the tests, which seeds are made of.

use std::path::PathBuf;

/// The root of the repository.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// The folders of the fixture checkpoints, sorted.
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

/// A file of a fixture, or nothing.
pub(crate) fn read(path: PathBuf) -> Vec<u8> {
    std::fs::read(path).unwrap_or_default()
}

/// Text that is much longer than an error may be: where it stands in an input that is refused, the
/// error must cut it.
pub(crate) fn long() -> String {
    "long é".repeat(500)
}
