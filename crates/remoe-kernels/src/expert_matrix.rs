//! Weight matrices of an expert.

/// One of the weight matrices, row-major as checkpoints store them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Matrix {
    /// `[width, hidden]`; no rows where the expert has no gate.
    Gate,
    /// `[width, hidden]`.
    Up,
    /// `[hidden, width]`.
    Down,
}

impl Matrix {
    /// All three, in the order in which [`crate::PackedExpert::pack`] takes them.
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];
}
