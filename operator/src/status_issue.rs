//! Faults that conditions and events report.

/// Reason of a pod that is not ready without a known cause.
pub(crate) const NOT_READY: &str = "NotReady";
/// Reason of a main function whose routing generation was not sent by this operator.
pub(crate) const FOREIGN_ROUTING: &str = "ForeignRouting";

/// Fault for conditions and events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StatusIssue {
    /// Reason, one word in UpperCamelCase.
    pub reason: &'static str,
    /// Message for users.
    pub message: String,
}

impl StatusIssue {
    /// Creates an issue with this `reason`.
    pub(crate) fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }

    /// Returns whether the fault is only presumed from outside: the function may work nevertheless.
    pub(crate) fn is_presumed(&self) -> bool {
        matches!(self.reason, NOT_READY | FOREIGN_ROUTING)
    }
}
