//! Writer of a safetensors file, tensor by tensor. Only the current tensor is in memory.

use crate::error::ConvertError;
use remoe_model::StoredDtype;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

/// Tensor that will be written.
#[derive(Debug, Clone)]
pub(crate) struct PlannedTensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
}

impl PlannedTensor {
    fn bytes(&self, dtype: StoredDtype) -> u64 {
        self.shape.iter().map(|&size| size as u64).product::<u64>() * dtype.bytes()
    }
}

/// Writer of a safetensors file, with the tensors that are still to be written.
pub(crate) struct SafetensorsWriter {
    path: PathBuf,
    file: BufWriter<File>,
    dtype: StoredDtype,
    planned: std::vec::IntoIter<PlannedTensor>,
}

impl SafetensorsWriter {
    /// Creates the file, and writes its header. All tensors have one dtype and are in the planned order.
    pub(crate) fn create(
        path: PathBuf,
        dtype: StoredDtype,
        planned: Vec<PlannedTensor>,
    ) -> Result<Self, ConvertError> {
        let mut header = Map::new();
        header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
        let mut offset = 0;
        for tensor in &planned {
            let end = offset + tensor.bytes(dtype);
            let described =
                json!({"dtype": dtype_name(dtype), "shape": tensor.shape, "data_offsets": [offset, end]});
            header.insert(tensor.name.clone(), described);
            offset = end;
        }
        let mut header = Value::Object(header).to_string();
        // Pads the header, so that the data starts at a multiple of 8.
        header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
        let file = File::create_new(&path).map_err(ConvertError::write(&path))?;
        let mut file = BufWriter::new(file);
        let length = (header.len() as u64).to_le_bytes();
        file.write_all(&length)
            .and_then(|()| file.write_all(header.as_bytes()))
            .map_err(ConvertError::write(&path))?;
        Ok(Self { path, file, dtype, planned: planned.into_iter() })
    }

    /// Writes the next tensor, which must be the next planned one.
    pub(crate) fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), ConvertError> {
        let planned = self.planned.next();
        let fits =
            |tensor: &PlannedTensor| tensor.name == name && tensor.bytes(self.dtype) == bytes.len() as u64;
        if !planned.as_ref().is_some_and(fits) {
            let message = format!("expected {planned:?}, got `{name}` of {} bytes", bytes.len());
            return Err(ConvertError::write(&self.path)(std::io::Error::other(message)));
        }
        self.file.write_all(bytes).map_err(ConvertError::write(&self.path))
    }

    /// Checks that all tensors were written, and flushes the file.
    pub(crate) fn finish(mut self) -> Result<(), ConvertError> {
        if let Some(missing) = self.planned.next() {
            let message = format!("missing tensor `{}`", missing.name);
            return Err(ConvertError::write(&self.path)(std::io::Error::other(message)));
        }
        self.file.flush().map_err(ConvertError::write(&self.path))
    }
}

/// Returns the dtype's name in safetensors headers.
fn dtype_name(dtype: StoredDtype) -> &'static str {
    match dtype {
        StoredDtype::F32 => "F32",
        StoredDtype::Bf16 => "BF16",
        StoredDtype::F16 => "F16",
    }
}
