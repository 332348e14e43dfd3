//! A safetensors file that is written tensor by tensor: none but the one at hand is in memory.

use crate::error::ConvertError;
use remoe_model::StoredDtype;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

/// A tensor that will be written.
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

/// The file, and what is still to come.
pub(crate) struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
    dtype: StoredDtype,
    planned: std::vec::IntoIter<PlannedTensor>,
}

impl Writer {
    /// Makes the file and writes its header: all tensors, of one type, in the order in which they will come.
    pub(crate) fn create(
        path: PathBuf,
        dtype: StoredDtype,
        planned: Vec<PlannedTensor>,
    ) -> Result<Self, ConvertError> {
        let mut header = Map::new();
        header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
        let mut at = 0;
        for tensor in &planned {
            let end = at + tensor.bytes(dtype);
            let described = json!({"dtype": name(dtype), "shape": tensor.shape, "data_offsets": [at, end]});
            header.insert(tensor.name.clone(), described);
            at = end;
        }
        let mut header = Value::Object(header).to_string();
        // Elements begin at a multiple of 8.
        header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
        let file = File::create_new(&path).map_err(ConvertError::write(&path))?;
        let mut file = BufWriter::new(file);
        let length = (header.len() as u64).to_le_bytes();
        file.write_all(&length)
            .and_then(|()| file.write_all(header.as_bytes()))
            .map_err(ConvertError::write(&path))?;
        Ok(Self { path, file, dtype, planned: planned.into_iter() })
    }

    /// Writes the next tensor, which is the one that was planned.
    pub(crate) fn tensor(&mut self, name: &str, bytes: &[u8]) -> Result<(), ConvertError> {
        let planned = self.planned.next();
        let fits =
            |tensor: &PlannedTensor| tensor.name == name && tensor.bytes(self.dtype) == bytes.len() as u64;
        if !planned.as_ref().is_some_and(fits) {
            let message = format!("expected {planned:?}, got `{name}` of {} bytes", bytes.len());
            return Err(ConvertError::write(&self.path)(std::io::Error::other(message)));
        }
        self.file.write_all(bytes).map_err(ConvertError::write(&self.path))
    }

    /// Brings everything to the file.
    pub(crate) fn finish(mut self) -> Result<(), ConvertError> {
        if let Some(missing) = self.planned.next() {
            let message = format!("missing tensor `{}`", missing.name);
            return Err(ConvertError::write(&self.path)(std::io::Error::other(message)));
        }
        self.file.flush().map_err(ConvertError::write(&self.path))
    }
}

/// The type's name in a header.
fn name(dtype: StoredDtype) -> &'static str {
    match dtype {
        StoredDtype::F32 => "F32",
        StoredDtype::Bf16 => "BF16",
        StoredDtype::F16 => "F16",
    }
}
