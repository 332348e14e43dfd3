//! All files of a model, for programs that copy or convert it.

use remoe_model::{Checkpoint, FileRange, StoredFile};
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

/// Files of a model beside its weights.
const OTHER_FILES: [&str; 11] = [
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "additional_chat_templates/rag.jinja",
];

/// The files of a model.
#[derive(Debug)]
pub struct WholeModel {
    checkpoint: Checkpoint,
    files: Vec<(String, Arc<dyn StoredFile>)>,
}

impl WholeModel {
    /// Opens the weights of `checkpoint`, and the other files that exist.
    ///
    /// # Errors
    /// A file cannot be opened.
    pub fn open(checkpoint: Checkpoint) -> io::Result<Self> {
        let weights: BTreeSet<String> = checkpoint
            .files()
            .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
            .collect();
        let mut files = Vec::new();
        for name in weights.into_iter().chain(OTHER_FILES.map(str::to_owned)) {
            if let Some(file) = checkpoint.store().open(&name)? {
                files.push((name, file));
            }
        }
        Ok(Self { checkpoint, files })
    }

    /// Returns the files with their names.
    #[must_use]
    pub fn files(&self) -> &[(String, Arc<dyn StoredFile>)] {
        &self.files
    }

    /// Returns the total size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, file)| file.size()).sum()
    }

    /// Fetches the missing bytes, and verifies the checksums that the source states.
    ///
    /// # Errors
    /// The source fails, or a checksum differs.
    pub fn fetch(&self) -> io::Result<()> {
        let files = self.files.iter();
        let ranges: Vec<_> =
            files.map(|(name, file)| FileRange { file: name, bytes: 0..file.size() }).collect();
        self.checkpoint.store().prefetch(&ranges)
    }
}
