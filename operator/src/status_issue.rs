//! Reasons and messages of conditions and warnings.

/// Reason of a function that is not ready and says nothing more.
pub(crate) const NOT_READY: &str = "NotReady";
/// Reason of a main function with a routing generation that this operator never told it.
pub(crate) const FOREIGN_ROUTING: &str = "ForeignRouting";

/// A fault, for conditions and events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StatusIssue {
    /// Reason, as one word in UpperCamelCase.
    pub reason: &'static str,
    /// Message for users.
    pub message: String,
}

impl StatusIssue {
    /// Creates a trouble with this `reason`.
    pub(crate) fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }

    /// Returns whether it is a conclusion from outside: the function may work all the same.
    pub(crate) fn is_presumed(&self) -> bool {
        matches!(self.reason, NOT_READY | FOREIGN_ROUTING)
    }
}
