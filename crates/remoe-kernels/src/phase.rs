//! Phases of a call to the pool.

/// The two phases of a call: all units of the first are done before any unit of the second begins. Products and tasks only have the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallPhase {
    GateUp,
    Down,
}

impl CallPhase {
    pub(crate) const ALL: [Self; 2] = [Self::GateUp, Self::Down];
}
