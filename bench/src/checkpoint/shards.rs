//! Tensors into safetensors files: the header's length, the header as JSON, the data, which some
//! threads make and write in parts of bounded size.

use super::shape::Dtype;
use super::tensors::TensorSpec;
use super::weights;
use crate::error::{BenchError, ErrorContext, Result};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Elements that a thread makes at a time.
const PART: usize = 1 << 20;

const _: () = assert!(PART.is_multiple_of(weights::LANES));

/// Writes `tensors` into as few files as have at most `shard_bytes` of weights each; returns the bytes
/// of all weights.
pub(super) fn write(
    tensors: &[TensorSpec],
    dtype: Dtype,
    seed: u64,
    shard_bytes: u64,
    folder: &Path,
) -> Result<u64> {
    let shards = divide(tensors, dtype, shard_bytes);
    let names: Vec<String> = match shards.len() {
        1 => vec!["model.safetensors".to_owned()],
        count => (1..=count).map(|shard| format!("model-{shard:05}-of-{count:05}.safetensors")).collect(),
    };
    let mut total = 0;
    let mut map = Map::new();
    for (name, shard) in names.iter().zip(&shards) {
        let path = folder.join(name);
        total += write_shard(&path, shard, dtype, seed)?;
        map.extend(shard.iter().map(|tensor| (tensor.name.clone(), json!(name))));
    }
    if shards.len() > 1 {
        let path = folder.join("model.safetensors.index.json");
        let index = json!({"metadata": {"total_size": total}, "weight_map": map});
        std::fs::write(&path, index.to_string()).doing(|| format!("writing {}", path.display()))?;
    }
    Ok(total)
}

fn divide(tensors: &[TensorSpec], dtype: Dtype, shard_bytes: u64) -> Vec<&[TensorSpec]> {
    let mut shards = Vec::new();
    let (mut first, mut bytes) = (0, 0);
    for (index, tensor) in tensors.iter().enumerate() {
        let size = (tensor.elements() * dtype.bytes()) as u64;
        if index > first && bytes + size > shard_bytes {
            shards.push(&tensors[first..index]);
            (first, bytes) = (index, 0);
        }
        bytes += size;
    }
    shards.push(&tensors[first..]);
    shards
}

fn write_shard(path: &Path, tensors: &[TensorSpec], dtype: Dtype, seed: u64) -> Result<u64> {
    let mut header = Map::from_iter([("__metadata__".to_owned(), json!({"format": "pt"}))]);
    let mut starts = Vec::with_capacity(tensors.len());
    let mut bytes = 0;
    for tensor in tensors {
        let end = bytes + (tensor.elements() * dtype.bytes()) as u64;
        let entry = json!({"dtype": dtype.tag(), "shape": tensor.shape, "data_offsets": [bytes, end]});
        header.insert(tensor.name.clone(), entry);
        starts.push(bytes);
        bytes = end;
    }
    let mut header = Value::Object(header).to_string();
    // The data begins at a multiple of eight.
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let data = 8 + header.len() as u64;
    let writing = || format!("writing {}", path.display());
    let file = File::create(path).doing(writing)?;
    file.set_len(data + bytes).doing(writing)?;
    file.write_all_at(&(header.len() as u64).to_le_bytes(), 0).doing(writing)?;
    file.write_all_at(header.as_bytes(), 8).doing(writing)?;

    let parts: Vec<(usize, usize)> = tensors
        .iter()
        .enumerate()
        .flat_map(|(tensor, facts)| (0..facts.elements()).step_by(PART).map(move |first| (tensor, first)))
        .collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut buffer = Vec::new();
        while let Some(&(index, first)) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
            let tensor = &tensors[index];
            buffer.resize((tensor.elements() - first).min(PART) * dtype.bytes(), 0);
            weights::fill(tensor, seed, dtype, first, &mut buffer);
            file.write_all_at(&buffer, data + starts[index] + (first * dtype.bytes()) as u64)?;
        }
        Ok::<_, std::io::Error>(())
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            let written = thread.join().map_err(|_| BenchError::new(writing(), "a thread panicked"))?;
            written.doing(writing)?;
        }
        Ok(bytes)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::tensors::Fill;

    #[test]
    fn shards_hold_what_fits() {
        let tensor =
            |elements| TensorSpec { name: String::new(), shape: vec![elements], fill: Fill::Random(1.0) };
        let tensors = [tensor(10), tensor(10), tensor(30), tensor(5), tensor(5)];
        let counts = |bytes| -> Vec<usize> {
            divide(&tensors, Dtype::Bfloat16, bytes).iter().map(|shard| shard.len()).collect()
        };
        assert_eq!(counts(40), [2, 1, 2], "a tensor that is too large has a file of its own");
        assert_eq!(counts(1000), [5]);
    }
}
