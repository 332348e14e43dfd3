//! Upper bound of decoding: every byte that a step needs, read once at the machine's bandwidth.

use crate::context::BenchContext;
use crate::error::{ErrorContext, Result};
use crate::machine::{cores, is_intel};
use crate::parts::kernels::{Throughput, start_ours};
use crate::process::ChildProcess;
use crate::report::Bar;
use remoe_model::{Checkpoint, Sizes};
use std::path::Path;

/// The machine's memory, and what a step of decoding needs of it, with all weights as they are stored.
#[derive(Debug)]
pub(super) struct Bound {
    instrument: ChildProcess,
    sizes: Sizes,
    /// Rows of the embedding that a step does not read: all but one for each token.
    embedding_bytes: u64,
}

impl Bound {
    pub(super) fn of(context: &BenchContext, model: &Path) -> Result<Self> {
        let reading = || format!("reading {}", model.display());
        let checkpoint = Checkpoint::open(model).doing(reading)?;
        let sizes = checkpoint.sizes();
        let embedding_bytes = checkpoint.config().vocab_size as u64 * sizes.token_bytes;
        let (instrument, _) = start_ours(context, "bf16", cores())?;
        Ok(Self { instrument, sizes, embedding_bytes })
    }

    /// Bytes per second that all threads together read.
    pub(super) fn bandwidth(&mut self) -> Result<f64> {
        let answer = self.instrument.ask("read")?;
        let answer: Throughput =
            serde_json::from_str(&answer).doing(|| format!("reading the answer {answer:?}"))?;
        Ok(answer.rate * 1e9)
    }

    /// Bytes of a step of `batch` streams that reads `experts` experts, with `positions` tokens before each of
    /// its own: weights, keys and values.
    pub(super) fn step_bytes(&self, batch: usize, experts: f64, positions: f64) -> f64 {
        let dense = self.sizes.outside_bytes - self.embedding_bytes
            + self.sizes.non_expert_layer_bytes.iter().sum::<u64>();
        let cache = batch as f64 * positions * self.sizes.kv_bytes_per_token as f64;
        dense as f64 + experts * self.sizes.expert_bytes as f64 + cache
    }
}

/// Decoding as a share of it. On Intel's processors a core reaches less of the memory's bandwidth once it also computes.
pub(super) fn bar() -> Bar {
    Bar::AtLeast(if is_intel() { 0.75 } else { 0.85 })
}
