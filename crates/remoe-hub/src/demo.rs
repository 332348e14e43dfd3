//! Resolution of the location `demo` to the demo model in Remoe's packages.

use crate::location::ModelLocation;
use std::path::Path;

/// Location of the demo model on command lines.
const DEMO_NAME: &str = "demo";

/// Folder of the demo model, relative to the installation prefix: `/usr/share/remoe/demo` for `/usr/bin/remoe`.
const INSTALLED_FOLDER: &str = "share/remoe/demo";

/// Returns the folder of the installed demo model for the location `demo`. Returns other locations unchanged, and
/// also `demo` if a folder of that name holds a checkpoint.
pub(crate) fn resolve(location: ModelLocation, program: Option<&Path>) -> ModelLocation {
    let is_demo = matches!(&location, ModelLocation::Folder(path) if path.as_os_str() == DEMO_NAME);
    if !is_demo || is_checkpoint(Path::new(DEMO_NAME)) {
        return location;
    }
    let prefix = program.and_then(Path::parent).and_then(Path::parent);
    match prefix.map(|prefix| prefix.join(INSTALLED_FOLDER)).filter(|folder| is_checkpoint(folder)) {
        Some(folder) => ModelLocation::Folder(folder),
        None => location,
    }
}

fn is_checkpoint(folder: &Path) -> bool {
    folder.join("config.json").is_file()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn folder(path: impl Into<PathBuf>) -> ModelLocation {
        ModelLocation::Folder(path.into())
    }

    #[test]
    fn demo_installed_beside_programs_is_found() {
        let prefix = tempfile::tempdir().unwrap();
        let program = prefix.path().join("bin/remoe");
        let installed = prefix.path().join(INSTALLED_FOLDER);
        std::fs::create_dir_all(&installed).unwrap();
        assert_eq!(resolve(folder("demo"), Some(&program)), folder("demo"));
        std::fs::write(installed.join("config.json"), "{}").unwrap();
        assert_eq!(resolve(folder("demo"), Some(&program)), folder(&installed));
        assert_eq!(resolve(folder("demo"), None), folder("demo"));
        for path in ["./demo", "demo/", "demo/model", "other"] {
            assert_eq!(resolve(folder(path), Some(&program)), folder(path));
        }
    }
}
