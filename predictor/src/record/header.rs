//! Header of a record file, its first array: the model of the records.

use crate::error::quoted;
use crate::record::RecordError;
use serde::{Deserialize, Serialize};

/// Name of the format, the first field of the JSON text.
const FORMAT: &str = "remoe-activations";
/// Format version.
const VERSION: u64 = 1;
/// Largest number of layers, more than any model has.
const MAX_LAYERS: usize = 4096;
/// Largest number of experts per layer, more than any model has, so that ids fit 16 bits.
const MAX_EXPERTS: u32 = 1 << 16;

/// Properties that all records of a file share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordHeader {
    /// Fingerprint of the checkpoint, in hexadecimal.
    pub model: String,
    /// Ids of the layers with routed experts, ascending. Row l of a count array belongs to `layers[l]`.
    pub layers: Vec<u32>,
    /// Routed experts per layer, the columns of a count array.
    pub experts: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Compute dtype of the model: `bfloat16` or `float32`. Near-ties are routed differently in another dtype.
    pub dtype: String,
    /// True if each record has the experts of every token.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tokens: bool,
}

/// JSON text of the header.
#[derive(Serialize, Deserialize)]
struct HeaderText {
    format: String,
    version: u64,
    model: String,
    layers: Vec<u32>,
    experts: u32,
    top_k: u32,
    dtype: String,
    tokens: bool,
}

/// Fields that are checked before the others are parsed.
#[derive(Deserialize)]
struct Preamble {
    format: String,
    version: u64,
}

impl RecordHeader {
    /// Returns the size of a count array: layers x experts.
    #[must_use]
    pub fn cells(&self) -> usize {
        self.layers.len() * self.experts as usize
    }

    /// Checks the ranges of all fields.
    ///
    /// # Errors
    /// [`RecordError::Header`] names the field.
    pub fn check(&self) -> Result<(), RecordError> {
        let invalid = |field, message: String| Err(RecordError::Header { field, message });
        if self.model.is_empty()
            || self.model.len() > 128
            || !self.model.bytes().all(|b| b.is_ascii_hexdigit())
        {
            return invalid("model", "expected a fingerprint of at most 128 hexadecimal digits".to_owned());
        }
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            return invalid(
                "layers",
                format!("names {} layers, expected 1 to {MAX_LAYERS}", self.layers.len()),
            );
        }
        if !self.layers.is_sorted_by(|a, b| a < b) {
            return invalid("layers", "expected ascending ids, each once".to_owned());
        }
        if self.experts == 0 || self.experts > MAX_EXPERTS {
            return invalid("experts", format!("is {}, expected 1 to {MAX_EXPERTS}", self.experts));
        }
        if self.top_k == 0 || self.top_k > self.experts {
            return invalid("top_k", format!("is {}, expected 1 to {} (experts)", self.top_k, self.experts));
        }
        if self.dtype.is_empty() || self.dtype.len() > 32 {
            return invalid("dtype", "expected a dtype such as bfloat16".to_owned());
        }
        Ok(())
    }

    /// Checks that records with the header `found` may be in one file with those of `self`.
    ///
    /// # Errors
    /// [`RecordError::OtherModel`].
    pub fn require_same(&self, found: &Self) -> Result<(), RecordError> {
        let differs = |field, expected: &dyn std::fmt::Debug, found: &dyn std::fmt::Debug| {
            let (expected, found) = (quoted(format!("{expected:?}")), quoted(format!("{found:?}")));
            Err(RecordError::OtherModel { field, expected, found })
        };
        if self.model != found.model {
            return differs("model", &self.model, &found.model);
        }
        if self.layers != found.layers {
            return differs("layers", &self.layers, &found.layers);
        }
        if (self.experts, self.top_k) != (found.experts, found.top_k) {
            let (expected, found) = ((self.experts, self.top_k), (found.experts, found.top_k));
            return differs("(experts, top_k)", &expected, &found);
        }
        if self.dtype != found.dtype {
            return differs("dtype", &self.dtype, &found.dtype);
        }
        if self.tokens != found.tokens {
            return differs("tokens", &self.tokens, &found.tokens);
        }
        Ok(())
    }

    pub(super) fn to_json(&self) -> Result<Vec<u8>, RecordError> {
        self.check()?;
        let text = HeaderText {
            format: FORMAT.to_owned(),
            version: VERSION,
            model: self.model.clone(),
            layers: self.layers.clone(),
            experts: self.experts,
            top_k: self.top_k,
            dtype: self.dtype.clone(),
            tokens: self.tokens,
        };
        serde_json::to_vec(&text).map_err(|error| RecordError::NotRecords(error.to_string()))
    }

    pub(super) fn from_json(bytes: &[u8]) -> Result<Self, RecordError> {
        let unreadable =
            |error: serde_json::Error| RecordError::NotRecords(quoted(format!("invalid header: {error}")));
        let preamble: Preamble = serde_json::from_slice(bytes).map_err(unreadable)?;
        if preamble.format != FORMAT {
            return Err(RecordError::NotRecords(format!(
                "its header is of format `{}`",
                quoted(preamble.format)
            )));
        }
        if preamble.version != VERSION {
            return Err(RecordError::Version { found: preamble.version, supported: VERSION });
        }
        let text: HeaderText = serde_json::from_slice(bytes).map_err(unreadable)?;
        let header = Self {
            model: text.model,
            layers: text.layers,
            experts: text.experts,
            top_k: text.top_k,
            dtype: text.dtype,
            tokens: text.tokens,
        };
        header.check()?;
        Ok(header)
    }
}
