//! A folder in memory for what can only be read from files.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Files of one input; the next one replaces them.
pub(crate) struct Scratch {
    folder: PathBuf,
    present: RefCell<BTreeSet<String>>,
}

impl Scratch {
    /// A folder under `FUZZ_SCRATCH`, or where temporary files go.
    pub(crate) fn new() -> Self {
        let parent = std::env::var_os("FUZZ_SCRATCH").map_or_else(std::env::temp_dir, PathBuf::from);
        let folder = parent.join(format!("remoe-fuzz-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("the scratch folder can be made");
        Self { folder, present: RefCell::default() }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Makes these the only files: name, how they begin, and how long they are.
    pub(crate) fn fill(&self, files: &[(&str, &[u8], u64)]) {
        let mut present = self.present.borrow_mut();
        present.retain(|name| {
            let stays = files.iter().any(|(wanted, ..)| wanted == name);
            if !stays {
                fs::remove_file(self.folder.join(name)).expect("a scratch file can be removed");
            }
            stays
        });
        for &(name, begin, length) in files {
            let mut file = File::create(self.folder.join(name)).expect("a scratch file can be made");
            file.write_all(begin).expect("a scratch file can be written");
            if length != begin.len() as u64 {
                file.set_len(length).expect("a scratch file can be made longer");
            }
            present.insert(name.to_owned());
        }
    }
}
