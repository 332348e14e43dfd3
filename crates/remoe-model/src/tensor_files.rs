//! Access to tensors by name, for any kind of model. Conversions to Remoe's layout use it.

use crate::error::CheckpointError;
use crate::shards::{Shards, TensorLocation};
use crate::store::Store;
use crate::tensors::TensorRef;

/// The safetensors files of a store. Neither a config nor certain tensors are required.
#[derive(Debug)]
pub struct TensorFiles {
    shards: Shards,
}

impl TensorFiles {
    /// Opens the files and reads their headers.
    ///
    /// # Errors
    /// There are no such files, or a header or the index is invalid.
    pub fn open_in(store: &dyn Store) -> Result<Self, CheckpointError> {
        Ok(Self { shards: Shards::open(store)? })
    }

    /// Returns the names of all tensors, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.shards.names()
    }

    /// Returns a tensor by its name, if it exists and has one of the types of [`crate::StoredDtype`].
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<TensorRef> {
        self.shards.tensor(name)
    }

    /// Returns the error for an invalid or missing tensor `name`.
    #[must_use]
    pub fn wrong(&self, name: &str, message: impl Into<String>) -> CheckpointError {
        match self.shards.tensors.get(name).and_then(|tensor| self.shards.files.get(tensor.file)) {
            Some(shard) => CheckpointError::tensor(&shard.path, name, message.into()),
            None => CheckpointError::MissingTensor {
                path: self.shards.listing.clone(),
                tensor: name.to_owned(),
                message: message.into(),
            },
        }
    }

    /// Reads a whole tensor.
    ///
    /// # Errors
    /// The file cannot be read or was truncated, or the tensor belongs to another folder.
    pub fn read(&self, tensor: &TensorRef) -> Result<Vec<u8>, CheckpointError> {
        let too_large =
            |_| self.wrong(&tensor.name, format!("its {} bytes do not fit into memory", tensor.bytes));
        let mut bytes = vec![0; usize::try_from(tensor.bytes).map_err(too_large)?];
        let location = TensorLocation {
            name: &tensor.name,
            file: tensor.file,
            offset: tensor.offset,
            bytes: tensor.bytes,
        };
        self.shards.read(location, 0..tensor.bytes, &mut bytes)?;
        Ok(bytes)
    }
}
