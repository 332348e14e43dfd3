//! `config.json` read into facts: the family's own fields, those that no family may have, and the stored form.

use std::path::Path;

use serde_json::{Map, Value};

use crate::config::{ModelConfig, declared_dtype};
use crate::error::CheckpointError;
use crate::facts::StoredDtype;
use crate::family::Family;
use crate::fields::Fields;
use crate::foreign;
use crate::json;
use crate::stored_form::Quantisation;

impl ModelConfig {
    /// Parses the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// A field that is wrong or asks for something unsupported, by name.
    pub fn from_json(path: &Path, text: &[u8]) -> Result<Self, CheckpointError> {
        let object = json::parse_object(path, text)?;
        Self::from_object(path, &object, None)
    }

    pub(crate) fn from_object(
        path: &Path,
        object: &Map<String, Value>,
        stored: Option<StoredDtype>,
    ) -> Result<Self, CheckpointError> {
        let fields = Fields::new(path, object);
        let family = Family::of(&fields)?;
        refuse_everywhere(&fields)?;
        foreign::refuse(fields, family)?;
        let mut config = family.parse(fields)?;
        if let (None, Some(stored)) = (declared_dtype(&fields)?, stored) {
            config.dtype = stored;
        }
        if let Some(quantisation) = Quantisation::read(fields)? {
            quantisation.check(fields, family, config.dtype)?;
        }
        if config.moe_layers().is_empty() {
            return Err(fields.unsupported(
                "num_hidden_layers",
                "no layer has routed experts; serve dense models with another engine",
            ));
        }
        Ok(config)
    }
}

/// Further layers of a checkpoint, behind the others, that predict tokens beyond the next one. They are no
/// part of the model that is served.
pub(crate) fn prediction_layers(path: &Path, object: &Map<String, Value>) -> Result<usize, CheckpointError> {
    let fields = Fields::new(path, object);
    // Of other families than DeepSeek-V3 the fields are refused.
    Ok(fields.optional_count(fields.either("num_nextn_predict_layers", "num_mtp_layers")?)?.unwrap_or(0))
}

/// How weights are stored that are not in the dtype.
pub(crate) fn quantisation(
    path: &Path,
    object: &Map<String, Value>,
) -> Result<Option<Quantisation>, CheckpointError> {
    Quantisation::read(Fields::new(path, object))
}

/// Fields that change the answer of any family and that no family here has.
fn refuse_everywhere(fields: &Fields<'_>) -> Result<(), CheckpointError> {
    fields.refuse("per_layer_config", "layers that differ by override are not supported")?;
    fields.refuse("attention_chunk_size", "chunked attention is not supported")?;
    for flag in ["is_encoder_decoder", "add_cross_attention"] {
        if fields.flag(flag, false)? {
            return Err(fields.unsupported(flag, "only decoder models are supported"));
        }
    }
    if !fields.flag("is_causal", true)? {
        return Err(fields.unsupported("is_causal", "only causal models are supported"));
    }
    if fields.optional_count("num_kv_shared_layers")?.unwrap_or(0) != 0 {
        return Err(
            fields.unsupported("num_kv_shared_layers", "layers that share a KV cache are not supported")
        );
    }
    if fields.optional_count("chunk_size_feed_forward")?.unwrap_or(0) != 0 {
        return Err(fields.unsupported("chunk_size_feed_forward", "chunking is not supported, set it to 0"));
    }
    Ok(())
}
