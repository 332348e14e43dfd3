//! Detection of the LibTorch that the dynamic linker loads for a program.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Environment variable that makes the dynamic linker list the libraries of a program without running it (`ld.so(8)`).
const LIST_VARIABLE: &str = "LD_TRACE_LOADED_OBJECTS";
const CPU_LIBRARY: &str = "libtorch_cpu.so";
const CUDA_LIBRARY: &str = "libtorch_cuda.so";
const CUDA_RUNTIME_PREFIX: &str = "libcudart.so.";

/// LibTorch that a program loads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LibTorch {
    /// Version, such as 2.11.0+cu130, if its files state one.
    pub(crate) version: Option<String>,
    /// Folder of its libraries.
    pub(crate) folder: PathBuf,
    /// The library for CUDA devices is loaded too.
    pub(crate) has_cuda: bool,
    /// Major version of the CUDA runtime, if one is loaded.
    pub(crate) cuda_major: Option<u32>,
}

impl LibTorch {
    /// Finds the LibTorch of `program` without running it.
    ///
    /// # Errors
    /// The program cannot be started, lacks a library, or is not linked with LibTorch.
    pub(crate) fn find(program: &Path) -> Result<Self, String> {
        let listed = Command::new(program).env(LIST_VARIABLE, "1").stdin(Stdio::null()).output();
        let listed = listed.map_err(|error| error.to_string())?;
        Self::from_list(&String::from_utf8_lossy(&listed.stdout))
    }

    /// Parses lines such as `libc10.so => /usr/lib/libc10.so (0x00007f00)`. Lines of libraries with a fixed path lack the name.
    fn from_list(text: &str) -> Result<Self, String> {
        let libraries: Vec<(&str, &str)> = text.lines().map(|line| parse_line(line.trim())).collect();
        let missing: Vec<&str> = libraries
            .iter()
            .filter(|(_, found)| found.starts_with("not found"))
            .map(|(name, _)| *name)
            .collect();
        if !missing.is_empty() {
            return Err(format!("cannot find {}", missing.join(", ")));
        }
        let path_of = |library: &str| {
            let (_, found) = libraries.iter().find(|(name, _)| *name == library)?;
            Some(PathBuf::from(found.rsplit_once(" (").map_or(*found, |(path, _)| path)))
        };
        let library = path_of(CPU_LIBRARY).ok_or("not linked with LibTorch")?;
        // Resolves symbolic links, because the version file is beside the real library.
        let library = library.canonicalize().unwrap_or(library);
        let folder = library.parent().unwrap_or(Path::new("/")).to_owned();
        let runtime =
            libraries.iter().find_map(|(name, _)| name.strip_prefix(CUDA_RUNTIME_PREFIX)?.split('.').next());
        Ok(Self {
            version: version(&folder),
            has_cuda: path_of(CUDA_LIBRARY).is_some(),
            cuda_major: runtime.and_then(|major| major.parse().ok()),
            folder,
        })
    }

    /// Returns the oldest branch of the NVIDIA driver that supports the CUDA runtime
    /// (NVIDIA, CUDA compatibility, minor version compatibility, table 1).
    pub(crate) fn min_driver_branch(&self) -> Option<u32> {
        match self.cuda_major.filter(|_| self.has_cuda)? {
            13 => Some(580),
            12 => Some(525),
            11 => Some(450),
            _ => None,
        }
    }
}

/// Splits a line of the list into a library's name and its path with the load address.
fn parse_line(line: &str) -> (&str, &str) {
    if let Some(pair) = line.split_once(" => ") {
        return pair;
    }
    let path = line.split(" (").next().unwrap_or(line);
    (path.rsplit_once('/').map_or(path, |(_, name)| name), line)
}

/// Reads the version from `build-version` of a LibTorch distribution, or `version.py` of a
/// Python installation.
fn version(folder: &Path) -> Option<String> {
    let parent = folder.parent()?;
    if let Ok(text) = std::fs::read_to_string(parent.join("build-version")) {
        return Some(text.trim().to_owned()).filter(|version| !version.is_empty());
    }
    let text = std::fs::read_to_string(parent.join("version.py")).ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix("__version__ = "))?;
    Some(value.trim().trim_matches(['\'', '"']).to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn libtorch_is_detected_from_library_list() {
        let folder = tempfile::tempdir().unwrap();
        let lib = folder.path().join("torch/lib");
        std::fs::create_dir_all(&lib).unwrap();
        std::fs::write(folder.path().join("torch/version.py"), "a = 1\n__version__ = '2.11.0+cu130'\n")
            .unwrap();
        let cpu = format!("\tlibtorch_cpu.so => {}/libtorch_cpu.so (0x00007f)\n", lib.display());
        let found = LibTorch::from_list(&cpu).unwrap();
        assert_eq!((found.version.as_deref(), found.has_cuda), (Some("2.11.0+cu130"), false));
        assert_eq!((found.folder.as_path(), found.min_driver_branch()), (lib.as_path(), None));
        let cuda = "\tlibtorch_cuda.so => /x/libtorch_cuda.so (0x1)\n\tlibcudart.so.13 => /x/libcudart.so.13 (0x1)\n";
        let found = LibTorch::from_list(&format!("{cpu}{cuda}")).unwrap();
        assert_eq!(
            (found.has_cuda, found.cuda_major, found.min_driver_branch()),
            (true, Some(13), Some(580))
        );
        let refused = LibTorch::from_list(&format!("{cpu}\tlibc10.so => not found\n")).unwrap_err();
        assert_eq!(refused, "cannot find libc10.so");
        assert!(LibTorch::from_list("\tlibc.so.6 => /lib/libc.so.6 (0x1)\n").is_err());
    }
}
