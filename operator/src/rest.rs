//! Until when plans that follow requests are not looked for: the same question is not asked at every look, and what could
//! not start is not tried again at once.

use jiff::Timestamp;

/// Until when nothing is looked for. Whoever begins anew looks once more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Rest {
    /// For requests as they are.
    pub drift: Timestamp,
    /// For those who wake functions.
    pub wake: Timestamp,
}
