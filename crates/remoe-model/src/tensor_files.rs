//! The tensors of a folder by their names, of a model of any kind: for what makes checkpoints of others.

use crate::error::CheckpointError;
use crate::shards::{Shards, TensorLocation};
use crate::store::Store;
use crate::tensors::TensorRef;

/// The safetensors files of a folder. No config is read, no name expected.
#[derive(Debug)]
pub struct TensorFiles {
    shards: Shards,
}

impl TensorFiles {
    /// Opens the files and reads their headers.
    ///
    /// # Errors
    /// There are none, or a header or the index is wrong.
    pub fn open_in(store: &dyn Store) -> Result<Self, CheckpointError> {
        Ok(Self { shards: Shards::open(store)? })
    }

    /// Names of all tensors, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.shards.names()
    }

    /// A tensor by its name, if it is there and has one of the types that weights have.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<TensorRef> {
        self.shards.tensor(name)
    }

    /// The error that says what is wrong with the tensor `name`, or that it is missing.
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
    /// The file cannot be read or has become shorter, or the tensor is of another folder.
    pub fn read(&self, tensor: &TensorRef) -> Result<Vec<u8>, CheckpointError> {
        let too_large =
            |_| self.wrong(&tensor.name, format!("its {} bytes do not fit into memory", tensor.bytes));
        let mut bytes = vec![0; usize::try_from(tensor.bytes).map_err(too_large)?];
        let place = TensorLocation {
            name: &tensor.name,
            file: tensor.file,
            offset: tensor.offset,
            bytes: tensor.bytes,
        };
        self.shards.read(place, 0..tensor.bytes, &mut bytes)?;
        Ok(bytes)
    }
}
