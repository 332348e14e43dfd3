//! Phases of a call.

/// The two halves of a call: everything of the first is done before anything of the second begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallPhase {
    GateUp,
    Down,
}

impl CallPhase {
    pub(crate) const ALL: [Self; 2] = [Self::GateUp, Self::Down];
}
