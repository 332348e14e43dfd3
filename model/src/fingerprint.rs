//! Identity of the weights without reading them all.

use std::fmt;
use std::os::unix::fs::FileExt;

use sha2::{Digest, Sha256};

use crate::config::ModelConfig;
use crate::error::CheckpointError;
use crate::shards::{Shard, Shards};

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

pub(crate) fn of(config: &ModelConfig, shards: &Shards) -> Result<Fingerprint, CheckpointError> {
    let mut hash = Sha256::new();
    hash.update(b"remoe checkpoint 1\n");
    // The facts, not the file: the same model written by another version of transformers is the same.
    let facts = format!("{config:?}");
    hash.update((facts.len() as u64).to_le_bytes());
    hash.update(&facts);
    for shard in &shards.files {
        hash.update(shard.bytes.to_le_bytes());
        hash.update((shard.header.len() as u64).to_le_bytes());
        hash.update(&shard.header);
        sample(shard, &mut hash)?;
    }
    Ok(Fingerprint(hash.finalize().into()))
}

fn sample(shard: &Shard, hash: &mut Sha256) -> Result<(), CheckpointError> {
    let mut page = [0; PAGE as usize];
    let mut read = |start: u64, length: u64| {
        let length = length.min(shard.bytes.saturating_sub(start));
        let target = page.get_mut(..length as usize).unwrap_or_default();
        shard.file.read_exact_at(target, start).map_err(|error| CheckpointError::io(&shard.path, error))?;
        hash.update(&*target);
        Ok::<_, CheckpointError>(())
    };
    let last = shard.bytes.saturating_sub(PAGE);
    if shard.bytes <= PAGES * PAGE {
        for start in (0..shard.bytes).step_by(PAGE as usize) {
            read(start, PAGE)?;
        }
        // Every byte has been read.
        return Ok(());
    }
    for number in 0..PAGES {
        // 128 bits: the product can exceed 64.
        let start = u128::from(last) * u128::from(number) / u128::from(PAGES - 1);
        read(start as u64, PAGE)?;
    }
    let step = shard.starts.len().div_ceil(TENSORS).max(1);
    for start in shard.starts.iter().step_by(step) {
        read(*start, TENSOR_SAMPLE)?;
    }
    Ok(())
}
