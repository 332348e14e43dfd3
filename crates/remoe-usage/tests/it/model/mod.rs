//! The model that the requests of these tests are to.

use remoe_predictor::record::RecordHeader;

/// One with so many layers, all of them with so many experts, of which a token uses two.
pub(crate) fn header(layers: usize, experts: usize) -> RecordHeader {
    RecordHeader {
        model: "ab".repeat(32),
        layers: (0..layers as u32).collect(),
        experts: experts as u32,
        top_k: 2,
        dtype: "float32".to_owned(),
        tokens: false,
    }
}
