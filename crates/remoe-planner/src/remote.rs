//! Policy on remote experts.

use remoe_plan::model::{LayerModel, Model};
use serde::Serialize;

/// Policy on remote experts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Remote {
    /// Remote experts where that is cheaper.
    #[default]
    Auto,
    /// Remote experts in every layer with more experts than a token uses.
    Always,
    /// No remote experts.
    Never,
}

impl Remote {
    /// Reports if plans may have `counts` remote experts in their layers.
    pub(crate) fn allows(self, model: &Model<'_>, counts: &[usize]) -> bool {
        model.layers.iter().zip(counts).all(|(layer, count)| self.allows_in(layer, *count))
    }

    /// Reports if plans may have `count` remote experts in `layer`.
    pub(crate) fn allows_in(self, layer: &LayerModel, count: usize) -> bool {
        match self {
            Self::Auto => true,
            Self::Always => count > 0 || layer.experts <= layer.top_k,
            Self::Never => count == 0,
        }
    }
}
