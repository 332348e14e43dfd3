//! The name `demo` for the demo model that comes with packages of Remoe.

use crate::location::ModelLocation;
use std::path::Path;

/// How arguments name the model.
const NAME: &str = "demo";

/// Folder of the model, seen from the parent of the folder of the programs: `/usr/bin` and `/usr/share/remoe/demo`.
const INSTALLED: &str = "share/remoe/demo";

/// Returns the installed demo model for the name `demo`; every other location, and a checkpoint in a folder `demo`,
/// stay as they are.
pub(crate) fn resolve(location: ModelLocation, program: Option<&Path>) -> ModelLocation {
    let is_named = matches!(&location, ModelLocation::Folder(path) if path.as_os_str() == NAME);
    if !is_named || is_checkpoint(Path::new(NAME)) {
        return location;
    }
    let prefix = program.and_then(Path::parent).and_then(Path::parent);
    match prefix.map(|prefix| prefix.join(INSTALLED)).filter(|folder| is_checkpoint(folder)) {
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
        let installed = prefix.path().join(INSTALLED);
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
