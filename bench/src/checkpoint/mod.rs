//! Seeded checkpoints of any shape: a valid `config.json` and safetensors, no tokenizer.
//!
//! The weights are random, with the spread that keeps hidden states of ordinary size and lets every
//! token choose its own experts, so that speed is that of a trained model of the shape.

mod config;
mod shape;
mod shards;
mod tensors;
mod weights;

pub(crate) use shape::ModelShape;

use crate::error::{ErrorContext, Result};
use std::path::Path;

/// Writes the checkpoint into the folder `out`, which is made; returns the bytes of its weights.
///
/// # Errors
/// The shape contradicts itself, or the folder cannot be written.
pub(crate) fn write(shape: &ModelShape, seed: u64, shard_bytes: u64, out: &Path) -> Result<u64> {
    shape.check()?;
    let writing = || format!("writing a checkpoint to {}", out.display());
    std::fs::create_dir_all(out).doing(writing)?;
    let config = out.join(CONFIG);
    if config.exists() {
        std::fs::remove_file(&config).doing(writing)?;
    }
    let bytes = shards::write(&tensors::of(shape), shape.dtype, seed, shard_bytes, out)?;
    // Last: a folder with a config is complete.
    std::fs::write(config, config_text(shape)).doing(writing)?;
    Ok(bytes)
}

const CONFIG: &str = "config.json";

/// Reports if `folder` holds a complete checkpoint of `shape`.
pub(crate) fn is_of(shape: &ModelShape, folder: &Path) -> bool {
    std::fs::read_to_string(folder.join(CONFIG)).is_ok_and(|text| text == config_text(shape))
}

fn config_text(shape: &ModelShape) -> String {
    format!("{:#}\n", config::of(shape))
}
