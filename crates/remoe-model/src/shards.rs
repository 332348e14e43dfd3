//! The safetensors files of a checkpoint. They are opened once, and their headers are checked against each other.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use crate::error::CheckpointError;
use crate::facts::StoredDtype;
use crate::fields::Fields;
use crate::header::{self, TENSOR_LIMIT};
use crate::json::{self, JSON_LIMIT};
use crate::store::{Store, StoredFile, read_fully_at};
use crate::tensors::{StoredAs, TensorRef};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// An open safetensors file.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) name: String,
    /// Path of the file in messages.
    pub(crate) path: PathBuf,
    pub(crate) file: Arc<dyn StoredFile>,
    /// JSON of the header, for the fingerprint.
    pub(crate) header: Vec<u8>,
    /// Start positions of all tensors, ascending.
    pub(crate) starts: Vec<u64>,
}

/// A tensor of any type, as the header describes it.
#[derive(Debug)]
pub(crate) struct RawTensor {
    pub(crate) name: Arc<str>,
    pub(crate) file: usize,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<u64>,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// Location of a tensor, or of its scales.
pub(crate) struct TensorLocation<'a> {
    pub(crate) name: &'a str,
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// All files and tensors of a checkpoint.
#[derive(Debug)]
pub(crate) struct Shards {
    /// The file that lists the tensors: the only one, or the index.
    pub(crate) listing: PathBuf,
    pub(crate) files: Vec<Shard>,
    pub(crate) tensors: HashMap<Arc<str>, RawTensor>,
    /// Bytes of all headers, which stay in memory.
    header_bytes: u64,
}

impl Shards {
    /// Returns the names of all tensors, sorted.
    pub(crate) fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.tensors.keys().map(|name| &**name).collect();
        names.sort_unstable();
        names
    }

    /// Returns a tensor by its name, if it exists and has one of the types of [`StoredDtype`].
    pub(crate) fn tensor(&self, name: &str) -> Option<TensorRef> {
        let raw = self.tensors.get(name)?;
        Some(TensorRef {
            file: raw.file,
            name: raw.name.clone(),
            offset: raw.offset,
            bytes: raw.bytes,
            dtype: StoredDtype::from_header(raw.dtype)?,
            shape: raw.shape.iter().map(|size| usize::try_from(*size).ok()).collect::<Option<_>>()?,
            strides: None,
            stored: StoredAs::Plain,
        })
    }

    /// Reads the bytes `range` of a tensor into `target`, which has the length of the range.
    pub(crate) fn read(
        &self,
        location: TensorLocation<'_>,
        range: Range<u64>,
        target: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let TensorLocation { name, file, offset, bytes } = location;
        let request = |message| CheckpointError::Request { path: self.listing.clone(), message };
        if range.start > range.end || range.end > bytes || range.end - range.start != target.len() as u64 {
            return Err(request(format!(
                "bytes {range:?} of `{name}` ({bytes} bytes) were asked for into a buffer of {}",
                target.len()
            )));
        }
        let shard = self.files.get(file);
        let shard = shard.ok_or_else(|| request(format!("`{name}` belongs to another checkpoint")))?;
        let start = offset + range.start;
        let read = read_fully_at(&*shard.file, target, start)
            .map_err(|error| CheckpointError::io(&shard.path, error))?;
        if read < target.len() {
            return Err(CheckpointError::ShortRead {
                path: shard.path.clone(),
                tensor: name.to_owned(),
                at: start + read as u64,
                missing: (target.len() - read) as u64,
            });
        }
        Ok(())
    }

    /// Opens all files, and reads their headers.
    pub(crate) fn open(store: &dyn Store) -> Result<Self, CheckpointError> {
        let single = store.root().join(SINGLE);
        // A single file takes precedence over an index, as in transformers.
        if let Some(file) = store.open(SINGLE).map_err(|error| CheckpointError::io(&single, error))? {
            let mut shards = Self::empty(single.clone());
            shards.add(SINGLE, single, file)?;
            return Ok(shards);
        }
        let Some(bytes) = json::read_optional(store, INDEX)? else {
            return Err(CheckpointError::MissingFile {
                path: single,
                message: format!(
                    "the folder has neither {SINGLE} nor {INDEX}; convert other weight formats with save_pretrained"
                ),
            });
        };
        Self::open_index(store, &bytes)
    }

    fn empty(listing: PathBuf) -> Self {
        Self { listing, files: Vec::new(), tensors: HashMap::new(), header_bytes: 0 }
    }

    /// Opens the files that the index lists.
    fn open_index(store: &dyn Store, bytes: &[u8]) -> Result<Self, CheckpointError> {
        let index = &store.root().join(INDEX);
        let object = json::parse_object(index, bytes)?;
        let fields = Fields::new(index, &object);
        let Some(Value::Object(map)) = fields.get("weight_map") else {
            return Err(fields.error("weight_map", "is missing or not an object"));
        };
        let mut names: Vec<&str> = Vec::new();
        for (tensor, file) in map {
            let Some(name) = file.as_str().filter(|name| is_file_name(name)) else {
                return Err(CheckpointError::tensor(
                    index,
                    tensor,
                    format!("weight_map says {file}, expected the name of a file in the folder"),
                ));
            };
            names.push(name);
        }
        names.sort_unstable();
        names.dedup();
        let mut shards = Self::empty(index.to_owned());
        let files = store.open_all(&names).map_err(|error| CheckpointError::io(index, error))?;
        for (name, file) in names.into_iter().zip(files) {
            let path = store.root().join(name);
            let Some(file) = file else {
                let message = format!("{INDEX} names it; the checkpoint is incomplete, download it again");
                return Err(CheckpointError::MissingFile { path, message });
            };
            shards.add(name, path, file)?;
        }
        shards.check_index(map)?;
        Ok(shards)
    }

    /// Adds a file and its tensors.
    fn add(&mut self, name: &str, path: PathBuf, file: Arc<dyn StoredFile>) -> Result<(), CheckpointError> {
        let header = header::read(&path, &*file)?;
        self.header_bytes += header.bytes.len() as u64;
        let count = self.tensors.len() + header.entries.len();
        if count > TENSOR_LIMIT || self.header_bytes > JSON_LIMIT {
            return Err(CheckpointError::header(
                &path,
                format!(
                    "{count} tensors and {} bytes of headers up to this file, expected at most {TENSOR_LIMIT} and \
                     {JSON_LIMIT}",
                    self.header_bytes
                ),
            ));
        }
        let number = self.files.len();
        let mut starts = Vec::with_capacity(header.entries.len());
        for entry in header.entries {
            starts.push(entry.start);
            let name: Arc<str> = entry.name.into();
            let tensor = RawTensor {
                name: Arc::clone(&name),
                file: number,
                dtype: entry.dtype,
                shape: entry.shape,
                offset: entry.start,
                bytes: entry.end - entry.start,
            };
            if let Some(other) = self.tensors.insert(Arc::clone(&name), tensor) {
                let first = self.files.get(other.file).map_or(Path::new("?"), |shard| &shard.path);
                return Err(CheckpointError::tensor(&path, &name, format!("is also in {}", first.display())));
            }
        }
        self.files.push(Shard { name: name.to_owned(), path, file, header: header.bytes, starts });
        Ok(())
    }

    /// Checks that every tensor is in the file that the index states, and that the index lists every tensor.
    fn check_index(&self, map: &serde_json::Map<String, Value>) -> Result<(), CheckpointError> {
        for (tensor, file) in map {
            let file = file.as_str().unwrap_or_default();
            let found = self.tensors.get(tensor.as_str());
            let shard = found.and_then(|tensor| self.files.get(tensor.file));
            match shard {
                Some(shard) if shard.path.ends_with(file) => {}
                Some(shard) => {
                    return Err(CheckpointError::tensor(
                        &self.listing,
                        tensor,
                        format!("weight_map says {file}, but it is in {}", shard.path.display()),
                    ));
                }
                None => {
                    return Err(CheckpointError::tensor(
                        &self.listing,
                        tensor,
                        format!("weight_map says {file}, but that file lacks it"),
                    ));
                }
            }
        }
        if self.tensors.len() != map.len()
            && let Some(tensor) = self.tensors.values().find(|t| !map.contains_key(&*t.name))
        {
            let path = self.files.get(tensor.file).map_or(&*self.listing, |shard| &shard.path);
            return Err(CheckpointError::tensor(
                path,
                &tensor.name,
                format!("is not in {}", self.listing.display()),
            ));
        }
        Ok(())
    }
}

/// Reports if a name is that of a file in the folder itself, not a path.
fn is_file_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}
