//! The message of one token and one layer, and the checkpoint whose experts answer it.

use crate::checkpoint::ModelShape;
use remoe_proto::v1::Work;

/// Experts of the layer, all of which the token is for: OLMoE's experts per token.
pub(super) const EXPERTS: u32 = 8;

/// The experts as a function is told to host them.
pub(super) const LISTING: &str = "0:0-7";

/// One layer with [`EXPERTS`] experts of OLMoE's hidden size in bfloat16.
pub(super) fn shape(width: usize) -> ModelShape {
    ModelShape {
        experts: EXPERTS as usize,
        top_k: EXPERTS as usize,
        width,
        vocab: 256,
        ..ModelShape::olmoe(1)
    }
}

/// One row for all experts.
pub(super) fn one_token(id: u64, hidden: usize) -> Work {
    // Numbers between -1 and 1, from an exponent of -7 upwards.
    let rows = (0..hidden as u32).flat_map(|i| {
        let bits = i.wrapping_mul(0x9e37_79b9) >> 16;
        ((bits & 0x81ff) as u16 | 0x3c00).to_le_bytes()
    });
    Work {
        id,
        generation: 1,
        layer: 0,
        budget_us: 0,
        rows: rows.collect(),
        counts: vec![EXPERTS],
        experts: (0..EXPERTS).collect(),
        ..Work::default()
    }
}
