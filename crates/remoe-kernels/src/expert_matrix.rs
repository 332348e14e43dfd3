//! Names of an expert's weight matrices.

/// Weight matrices of an expert, row-major as in checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExpertMatrix {
    /// Gate projection, `[width, hidden]`. Without a gate it has no rows.
    Gate,
    /// Up projection, `[width, hidden]`.
    Up,
    /// Down projection, `[hidden, width]`.
    Down,
}

impl ExpertMatrix {
    /// All matrices, in the order of the parameters of [`crate::PackedExpert::pack`].
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];
}
