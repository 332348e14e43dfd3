//! Records of rows on their way through the layers, for inspection.

/// Level of an inspection's records; each level includes the levels before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum InspectLevel {
    /// Selected experts and their weights, per layer and position.
    Routing,
    /// Routing, and hidden states of every position before the final norm.
    Hidden,
}

/// The routing of one MoE layer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LayerRouting {
    /// The layer's index in the model.
    pub layer: usize,
    /// Per token: (expert, weight), experts ascending.
    pub tokens: Vec<Vec<(u32, f32)>>,
}

/// Records of an iteration's rows.
#[derive(Default)]
pub(crate) struct Trace {
    pub(crate) routing: Vec<LayerRouting>,
    /// rows x hidden before the final norm, compute dtype, little endian; empty below [`InspectLevel::Hidden`].
    pub(crate) hidden: Vec<u8>,
}
