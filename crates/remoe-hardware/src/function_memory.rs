//! Memory that a remote function asks for beside its experts.

use crate::Profile;
use remoe_model::Inspection;

const MIB: f64 = 1_048_576.0;
/// Code, runtime and buffers of connections (16 MiB), messages that are not complete (16 MiB), and one request with its
/// answer (8 MiB).
const FIXED_BYTES: f64 = 40.0 * MIB;
/// Largest payload of rows in one message.
const PAYLOAD_BYTES: f64 = 3.5 * MIB;
/// Bytes that kernels add to each row at most: its padding to whole panels of 64 elements, and its places.
const PADDING_BYTES: f64 = 512.0;

/// Bytes of memory that a remote function of `model` in `dtype` asks for beside its experts, as `remote-expert-fn` counts
/// them (an upper bound): it starts with no less. Kernels keep inner activations and a copy of the rows of the largest
/// request.
pub(crate) fn least_bytes(model: &Inspection, dtype: &str) -> f64 {
    let row = model.resident_bytes(model.token_bytes, dtype) as f64;
    // An expert without a gate has two matrices.
    let inner =
        model.resident_bytes(model.decoded().expert_bytes, dtype) as f64 / (2.0 * model.hidden_size as f64);
    FIXED_BYTES + PAYLOAD_BYTES * (2.0 + (inner + PADDING_BYTES) / row)
}

impl Profile {
    /// Bytes of a remote function of `model` besides its experts: what was measured, but no less than it starts with.
    #[must_use]
    pub fn function_bytes(&self, model: &Inspection) -> f64 {
        self.memory.function_bytes.max(least_bytes(model, &self.model.dtype))
    }
}
