//! Header of the tests' model.

use remoe_predictor::record::RecordHeader;

/// Returns the header of a model with `layers` layers of `experts` experts, of which a token uses two.
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
