//! Records of rows on their way through the model.

/// Level of what an inspection records beside logits; each level holds what those before it do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum InspectLevel {
    /// Selected experts and their weights.
    Routing,
    /// Routing and the hidden states of every position before the final norm.
    Hidden,
}

/// The routing of one MoE layer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LayerRouting {
    /// The model's layer id.
    pub layer: usize,
    /// Per token: (expert, weight), experts ascending.
    pub tokens: Vec<Vec<(u32, f32)>>,
}

/// Records of an iteration's rows for an inspection.
#[derive(Default)]
pub(crate) struct Trace {
    pub(crate) routing: Vec<LayerRouting>,
    /// rows x hidden, before the final norm, compute dtype, little endian; empty unless asked for.
    pub(crate) hidden: Vec<u8>,
}
