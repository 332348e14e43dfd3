//! Parses `config.json`: a family's fields, fields that are unsupported in every family, and the quantisation.

use std::path::Path;

use serde_json::{Map, Value};

use crate::config::{ModelConfig, declared_dtype};
use crate::error::CheckpointError;
use crate::facts::StoredDtype;
use crate::family::Family;
use crate::fields::Fields;
use crate::foreign_fields;
use crate::json;
use crate::quantised_form::Quantisation;

impl ModelConfig {
    /// Parses the text of a `config.json`. `path` only appears in messages.
    ///
    /// # Errors
    /// Names a field with an invalid or unsupported value.
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
        let family = Family::from_fields(&fields)?;
        refuse_unsupported(&fields)?;
        foreign_fields::refuse(fields, family)?;
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

/// Returns the number of multi-token prediction (MTP) layers, which follow the model's layers in a checkpoint. They are
/// not served.
pub(crate) fn prediction_layers(path: &Path, object: &Map<String, Value>) -> Result<usize, CheckpointError> {
    let fields = Fields::new(path, object);
    // In families other than DeepSeek-V3 these fields are refused elsewhere.
    Ok(fields.optional_count(fields.either("num_nextn_predict_layers", "num_mtp_layers")?)?.unwrap_or(0))
}

/// Reads how weights are quantised in the checkpoint, if they are.
pub(crate) fn quantisation(
    path: &Path,
    object: &Map<String, Value>,
) -> Result<Option<Quantisation>, CheckpointError> {
    Quantisation::read(Fields::new(path, object))
}

/// Refuses fields that would change the results of any family and are not supported in any.
fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), CheckpointError> {
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
