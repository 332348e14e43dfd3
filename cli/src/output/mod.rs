//! Output of commands, and its forms.

pub(crate) mod folders;
pub(crate) mod json;
pub(crate) mod logs;
pub(crate) mod plot;
pub(crate) mod progress;
pub(crate) mod table;
