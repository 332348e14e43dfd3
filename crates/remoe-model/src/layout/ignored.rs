//! Tensors that the model does not need. A few kinds are ignored, all others are refused.

use std::collections::BTreeSet;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::TensorFinder;
use crate::error::CheckpointError;
use crate::shards::{RawTensor, Shards};

/// Contents of a checkpoint that are ignored.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ignored {
    /// Ids of the multi-token prediction (MTP) layers, which follow the model's layers.
    pub prediction_layers: Vec<usize>,
    /// Bytes of these layers and of buffers.
    pub bytes: u64,
}

/// Suffixes of buffers that older versions of transformers wrote: frequencies, angles and masks. They follow from the
/// config.
const BUFFERS: [&str; 5] = [
    ".rotary_emb.inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
    ".attn.bias",
    ".attn.masked_bias",
];

/// Tensors that only a multi-token prediction layer has (DeepSeek-V3, arXiv 2412.19437, section 2.2).
const PREDICTION_TENSORS: [&str; 3] = ["eh_proj.weight", "enorm.weight", "hnorm.weight"];

/// Returns the id of the layer that a tensor belongs to.
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

/// Refuses tensors of layers beyond the config's layers and `extra_layers` multi-token prediction layers. Config or
/// weights then belong to another model, and ignoring layers would silently give wrong results.
pub(super) fn check_layer_count(
    layers: usize,
    extra_layers: usize,
    shards: &Shards,
) -> Result<(), CheckpointError> {
    let known = layers.saturating_add(extra_layers);
    let extra_layer = |tensor: &&RawTensor| layer_of(&tensor.name).filter(|id| *id >= layers);
    let invalid = |tensor: &RawTensor, message: String| {
        let path = shards.files.get(tensor.file).map_or(&*shards.listing, |shard| &shard.path);
        CheckpointError::tensor(path, &tensor.name, message)
    };
    let unknown = shards.tensors.values().filter(|tensor| extra_layer(tensor).is_some_and(|id| id >= known));
    if let Some(tensor) = unknown.min_by_key(|tensor| &tensor.name) {
        let message = format!(
            "belongs to a layer that config.json lacks: num_hidden_layers is {layers}; check that both files belong to \
             one model"
        );
        return Err(invalid(tensor, message));
    }
    // A layer of the model that is mistaken for a prediction layer would be silently ignored as well.
    let incomplete = shards.tensors.values().filter_map(|tensor| {
        let id = extra_layer(&tensor)?;
        let lacks = |part: &&&str| !shards.tensors.contains_key(&*format!("model.layers.{id}.{part}"));
        Some((tensor, id, *PREDICTION_TENSORS.iter().find(lacks)?))
    });
    match incomplete.min_by_key(|(tensor, ..)| &tensor.name) {
        None => Ok(()),
        Some((tensor, id, part)) => {
            let message = format!(
                "invalid layer {id}: expected a next-token prediction layer (num_nextn_predict_layers) with `{part}`"
            );
            Err(invalid(tensor, message))
        }
    }
}

impl TensorFinder<'_> {
    /// Returns the tensors that were not found as tensors of the model: multi-token prediction layers and buffers. To be
    /// called after all tensors of the model have been found.
    ///
    /// # Errors
    /// There are other unused tensors.
    pub(super) fn ignored(&self, layers: usize) -> Result<Ignored, CheckpointError> {
        let used = self.used.borrow();
        let mut prediction_layers = BTreeSet::new();
        let (mut bytes, mut others) = (0, Vec::new());
        for tensor in self.shards.tensors.values().filter(|tensor| !used.contains(&*tensor.name)) {
            match layer_of(&tensor.name).filter(|id| *id >= layers) {
                Some(id) => drop(prediction_layers.insert(id)),
                None if BUFFERS.iter().any(|suffix| tensor.name.ends_with(suffix)) => {}
                None => {
                    others.push(tensor);
                    continue;
                }
            }
            bytes += tensor.bytes;
        }
        let Some(first) = others.iter().min_by_key(|tensor| &tensor.name) else {
            return Ok(Ignored { prediction_layers: prediction_layers.into_iter().collect(), bytes });
        };
        let count = match others.len() - 1 {
            0 => String::new(),
            1 => " (and 1 other)".to_owned(),
            more => format!(" (and {more} others)"),
        };
        let path = self.shards.files.get(first.file).map_or(Path::new("?"), |shard| &shard.path);
        Err(CheckpointError::tensor(
            path,
            &first.name,
            format!(
                "unexpected{count}: config.json describes a model without it; check the fields of config.json, and \
                 that both files belong to one model"
            ),
        ))
    }
}
