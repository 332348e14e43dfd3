//! Scratch folder for code that reads files only. It is usually on a memory file system.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Folder with the files of the current input.
pub(crate) struct ScratchFolder {
    folder: PathBuf,
    present: RefCell<BTreeSet<String>>,
}

impl ScratchFolder {
    /// Creates the folder in `FUZZ_SCRATCH`, by default in the system's folder of temporary files.
    pub(crate) fn new() -> Self {
        let parent = std::env::var_os("FUZZ_SCRATCH").map_or_else(std::env::temp_dir, PathBuf::from);
        let folder = parent.join(format!("remoe-fuzz-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("the scratch folder can be made");
        Self { folder, present: RefCell::default() }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Replaces the files of the folder. Each file has a name, its first bytes, and its length in bytes.
    pub(crate) fn fill(&self, files: &[(&str, &[u8], u64)]) {
        let mut present = self.present.borrow_mut();
        present.retain(|name| {
            let is_kept = files.iter().any(|(wanted, ..)| wanted == name);
            if !is_kept {
                fs::remove_file(self.folder.join(name)).expect("a scratch file can be removed");
            }
            is_kept
        });
        for &(name, first_bytes, length) in files {
            let mut file = File::create(self.folder.join(name)).expect("a scratch file can be made");
            file.write_all(first_bytes).expect("a scratch file can be written");
            if length != first_bytes.len() as u64 {
                file.set_len(length).expect("a scratch file can be made longer");
            }
            present.insert(name.to_owned());
        }
    }
}
