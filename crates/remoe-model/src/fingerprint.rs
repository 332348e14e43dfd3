//! Identity of the weights without reading them all.

use std::fmt;
use std::ops::Range;

use sha2::{Digest, Sha256};

use crate::config::ModelConfig;
use crate::error::CheckpointError;
use crate::shards::{Shard, Shards};
use crate::store::{FileRange, Store};
use crate::stored_form::ShortForm;

/// Pages that are read of each file, spread evenly, the first and the last among them.
const PAGES: u64 = 64;
/// Bytes of a page.
const PAGE: u64 = 4096;
/// Bytes that are read at the start of each tensor.
const TENSOR_SAMPLE: u64 = 64;
/// Tensors of a file whose start is read, spread evenly where there are more.
const TENSORS: usize = 512;

/// SHA-256 over what the config says about the model, and for each safetensors file, in the order of
/// their names: its length, its header, 64 pages of 4 KiB spread evenly over it, and the first 64
/// bytes of its tensors (of about 512 of them where there are more).
///
/// Two checkpoints of one fingerprint are the same for all practical purposes; an edit of a few bytes
/// in the middle of a large tensor can go unseen. It guards against mixing checkpoints, not against
/// an attacker. Names of folders and files do not enter it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Fingerprint({self})")
    }
}

pub(crate) fn of(
    config: &ModelConfig,
    short_form: Option<ShortForm>,
    store: &dyn Store,
    shards: &Shards,
) -> Result<Fingerprint, CheckpointError> {
    let samples: Vec<Vec<Range<u64>>> = shards.files.iter().map(samples).collect();
    let ranges: Vec<_> = shards
        .files
        .iter()
        .zip(&samples)
        .flat_map(|(shard, samples)| {
            samples.iter().map(|bytes| FileRange { file: &shard.name, bytes: bytes.clone() })
        })
        .collect();
    store.prefetch(&ranges).map_err(|error| CheckpointError::io(store.root(), error))?;
    let mut hash = Sha256::new();
    hash.update(b"remoe checkpoint 1\n");
    // The facts, not the file: the same model written by another version of transformers is the same.
    let facts = facts_text(config);
    hash.update((facts.len() as u64).to_le_bytes());
    hash.update(&facts);
    if let Some(form) = short_form {
        hash.update(format!("{form:?}\n"));
    }
    let mut page = [0; PAGE as usize];
    for (shard, samples) in shards.files.iter().zip(samples) {
        hash.update(shard.file.size().to_le_bytes());
        hash.update((shard.header.len() as u64).to_le_bytes());
        hash.update(&shard.header);
        for sample in samples {
            let target = page.get_mut(..(sample.end - sample.start) as usize).unwrap_or_default();
            shard
                .file
                .read_exact_at(target, sample.start)
                .map_err(|error| CheckpointError::io(&shard.path, error))?;
            hash.update(&*target);
        }
    }
    Ok(Fingerprint(hash.finalize().into()))
}

/// Returns the config as text. Facts that were added later are left out where they have the value that was implied
/// before: a checkpoint keeps its fingerprint, and data that were stored under it stay usable.
fn facts_text(config: &ModelConfig) -> String {
    let text = format!("{config:?}").replace("gated: true, ", "").replace("output_bias: false, ", "");
    let text = text.replace("biases: None, ", "biases: false, ").replace("biases: All, ", "biases: true, ");
    // Positions as the config states them, though its rope may reach others, unless a user has chosen how many are
    // served.
    let (context, stated) = (config.context_length, config.stated_positions);
    let reached = config.rope.as_ref().map_or(stated as f64, |rope| rope.reach(stated).floor());
    let said = if context as f64 == reached { stated } else { context };
    let both = format!("context_length: {context}, stated_positions: {stated}, ");
    let text = text.replace(&both, &format!("context_length: {said}, "));
    match (text.split_once("rope: Some("), config.rope.is_some()) {
        (Some((before, after)), true) => {
            format!("{before}rope: {}", after.replacen("), bos_id: ", ", bos_id: ", 1))
        }
        _ => text,
    }
}

/// Returns the ranges that are read of a file, each a page at most.
fn samples(shard: &Shard) -> Vec<Range<u64>> {
    let size = shard.file.size();
    let sample = |start: u64, length: u64| start..size.min(start + length);
    if size <= PAGES * PAGE {
        // Every byte.
        return (0..size).step_by(PAGE as usize).map(|start| sample(start, PAGE)).collect();
    }
    let last = size - PAGE;
    // 128 bits: the product can exceed 64.
    let page = |number: u64| u128::from(last) * u128::from(number) / u128::from(PAGES - 1);
    let pages = (0..PAGES).map(|number| sample(page(number) as u64, PAGE));
    let step = shard.starts.len().div_ceil(TENSORS).max(1);
    let tensors = shard.starts.iter().step_by(step);
    // A tensor of no bytes starts where the file ends.
    pages.chain(tensors.map(|start| sample(*start, TENSOR_SAMPLE))).collect()
}
