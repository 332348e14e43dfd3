//! Tensors of a checkpoint that its model does not need: few are ignored, the others are refused.

use std::collections::BTreeSet;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Finder;
use crate::error::CheckpointError;
use crate::shards::{RawTensor, Shards};

/// Parts of a checkpoint besides the model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ignored {
    /// Ids of the layers behind the others that predict further tokens.
    pub prediction_layers: Vec<usize>,
    /// Bytes of those layers and of buffers that are computed again.
    pub bytes: u64,
}

/// Ends of the names of buffers that older versions of transformers wrote: frequencies, angles and masks,
/// which follow from the config.
const BUFFERS: [&str; 5] = [
    ".rotary_emb.inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
    ".attn.bias",
    ".attn.masked_bias",
];

/// Tensors that only a layer for next-token prediction has (DeepSeek-V3, arXiv 2412.19437, section 2.2).
const OF_PREDICTION: [&str; 3] = ["eh_proj.weight", "enorm.weight", "hnorm.weight"];

/// The layer that a tensor is of.
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

/// Refuses tensors of layers that the config does not have, `further` ones that predict further tokens counted
/// in: one of the two is of another model, and to leave layers out would give another answer without a word.
pub(super) fn no_more_layers(layers: usize, further: usize, shards: &Shards) -> Result<(), CheckpointError> {
    let known = layers.saturating_add(further);
    let behind = |tensor: &&RawTensor| layer_of(&tensor.name).filter(|id| *id >= layers);
    let wrong = |tensor: &RawTensor, message: String| {
        let path = shards.files.get(tensor.file).map_or(&*shards.listing, |shard| &shard.path);
        CheckpointError::tensor(path, &tensor.name, message)
    };
    let more = shards.tensors.values().filter(|tensor| behind(tensor).is_some_and(|id| id >= known));
    if let Some(tensor) = more.min_by_key(|tensor| &tensor.name) {
        let message = format!(
            "belongs to a layer that config.json lacks: num_hidden_layers is {layers}; check that both files belong to \
             one model"
        );
        return Err(wrong(tensor, message));
    }
    // A layer of the model that is taken for one of prediction would be lost without a word as well.
    let incomplete = shards.tensors.values().filter_map(|tensor| {
        let id = behind(&tensor)?;
        let lacks = |part: &&&str| !shards.tensors.contains_key(&*format!("model.layers.{id}.{part}"));
        Some((tensor, id, *OF_PREDICTION.iter().find(lacks)?))
    });
    match incomplete.min_by_key(|(tensor, ..)| &tensor.name) {
        None => Ok(()),
        Some((tensor, id, part)) => {
            let message = format!(
                "invalid layer {id}: expected a next-token prediction layer (num_nextn_predict_layers) with `{part}`"
            );
            Err(wrong(tensor, message))
        }
    }
}

impl Finder<'_> {
    /// Returns the tensors that the model did not ask for, once it has asked for all of its own: layers that predict
    /// further tokens and buffers.
    pub(super) fn ignored(&self, layers: usize) -> Result<Ignored, CheckpointError> {
        let used = self.used.borrow();
        let mut prediction_layers = BTreeSet::new();
        let (mut bytes, mut others) = (0, Vec::new());
        for tensor in self.shards.tensors.values().filter(|tensor| !used.contains(&*tensor.name)) {
            match layer_of(&tensor.name).filter(|id| *id >= layers) {
                Some(id) => drop(prediction_layers.insert(id)),
                None if BUFFERS.iter().any(|end| tensor.name.ends_with(end)) => {}
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
