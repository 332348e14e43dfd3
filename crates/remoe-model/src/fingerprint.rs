//! Identity of a checkpoint's weights, computed without reading all of them.

use std::fmt;
use std::ops::Range;

use sha2::{Digest, Sha256};

use crate::config::ModelConfig;
use crate::error::CheckpointError;
use crate::quantised_form::QuantisedForm;
use crate::shards::{Shard, Shards};
use crate::store::{FileRange, Store};

/// Pages that are sampled of each file, evenly spaced, including the first and the last.
const PAGES: u64 = 64;
/// Bytes of a page.
const PAGE_BYTES: u64 = 4096;
/// Bytes that are sampled at the start of a tensor.
const TENSOR_SAMPLE_BYTES: u64 = 64;
/// Upper bound of the sampled tensors of a file, which are evenly spaced.
const TENSORS: usize = 512;

/// SHA-256 over the parsed config and over samples of each safetensors file, in the order of file names.
///
/// The samples of a file are its length, its header, 64 evenly spaced pages of 4 KiB, and the first 64 bytes of its
/// tensors (of about 512 of them, if there are more). Names of folders and files are not included.
///
/// The fingerprint guards against mixing checkpoints, not against attackers: an edit of a few bytes in the middle of a
/// large tensor may not change it.
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

/// Reads the samples of all files and hashes them.
pub(crate) fn compute(
    config: &ModelConfig,
    quantised_form: Option<QuantisedForm>,
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
    // The parsed config, not the file, so that another version of transformers may write the same model differently.
    let config_text = config_text(config);
    hash.update((config_text.len() as u64).to_le_bytes());
    hash.update(&config_text);
    if let Some(form) = quantised_form {
        hash.update(format!("{form:?}\n"));
    }
    let mut page = [0; PAGE_BYTES as usize];
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

/// Returns the `Debug` output of the config, in which fields that were added later are omitted if they have the value
/// that was implied before. So a checkpoint keeps its fingerprint, and data stored under it stay usable.
fn config_text(config: &ModelConfig) -> String {
    let text = format!("{config:?}").replace("gated: true, ", "").replace("output_bias: false, ", "");
    let text = text.replace("biases: None, ", "biases: false, ").replace("biases: All, ", "biases: true, ");
    // The context length is the one that the config states, without rope scaling, unless a user has set another one.
    let (context, stated) = (config.context_length, config.stated_positions);
    let scaled = config.rope.as_ref().map_or(stated as f64, |rope| rope.scaled_context(stated).floor());
    let hashed = if context as f64 == scaled { stated } else { context };
    let both = format!("context_length: {context}, stated_positions: {stated}, ");
    let text = text.replace(&both, &format!("context_length: {hashed}, "));
    match (text.split_once("rope: Some("), config.rope.is_some()) {
        (Some((before, after)), true) => {
            format!("{before}rope: {}", after.replacen("), bos_id: ", ", bos_id: ", 1))
        }
        _ => text,
    }
}

/// Returns the byte ranges that are sampled of a file, each a page at most.
fn samples(shard: &Shard) -> Vec<Range<u64>> {
    let size = shard.file.size();
    let sample = |start: u64, length: u64| start..size.min(start + length);
    if size <= PAGES * PAGE_BYTES {
        // A small file is read completely.
        return (0..size).step_by(PAGE_BYTES as usize).map(|start| sample(start, PAGE_BYTES)).collect();
    }
    let last = size - PAGE_BYTES;
    // The product can exceed 64 bits.
    let page = |number: u64| u128::from(last) * u128::from(number) / u128::from(PAGES - 1);
    let pages = (0..PAGES).map(|number| sample(page(number) as u64, PAGE_BYTES));
    let step = shard.starts.len().div_ceil(TENSORS).max(1);
    let tensors = shard.starts.iter().step_by(step);
    // An empty tensor may start at the end of the file.
    pages.chain(tensors.map(|start| sample(*start, TENSOR_SAMPLE_BYTES))).collect()
}
