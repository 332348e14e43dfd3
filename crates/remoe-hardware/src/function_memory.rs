//! Memory that a remote-expert function needs besides its experts.

use crate::Profile;
use remoe_model::Inspection;

const MIB: f64 = 1_048_576.0;
/// Bytes of code, runtime and connection buffers (16 MiB), partly received messages (16 MiB), and one request with its
/// response (8 MiB).
const FIXED_BYTES: f64 = 40.0 * MIB;
/// Largest payload of one message in bytes.
const PAYLOAD_BYTES: f64 = 3.5 * MIB;
/// Upper bound of the bytes that kernels add to each row: padding to whole panels of 64 elements, and row indices.
const PADDING_BYTES: f64 = 512.0;

/// Returns the bytes that a remote function of `model` in `dtype` needs besides its experts. It is the upper bound that
/// `remote-expert-fn` itself computes and below which it refuses to start. Kernels hold the inner activations and a copy
/// of the rows of the largest request.
pub(crate) fn required_bytes(model: &Inspection, dtype: &str) -> f64 {
    let row = model.resident_bytes(model.token_bytes, dtype) as f64;
    // An expert without a gate has two matrices.
    let inner =
        model.resident_bytes(model.decoded().expert_bytes, dtype) as f64 / (2.0 * model.hidden_size as f64);
    FIXED_BYTES + PAYLOAD_BYTES * (2.0 + (inner + PADDING_BYTES) / row)
}

impl Profile {
    /// Returns the bytes of a remote function of `model` besides its experts: the measured ones, and at least those that it
    /// needs to start.
    #[must_use]
    pub fn function_bytes(&self, model: &Inspection) -> f64 {
        self.memory.function_bytes.max(required_bytes(model, &self.model.dtype))
    }
}
