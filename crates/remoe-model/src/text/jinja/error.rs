//! Errors of a rendering.

/// Failure to parse or render a template.
#[derive(Debug)]
pub(in crate::text) struct Error {
    /// Cause of the failure.
    pub(in crate::text) message: String,
    /// Line of the template, if known.
    pub(in crate::text) line: Option<u32>,
    /// Reports if the template called `raise_exception`.
    pub(in crate::text) raised: bool,
}

impl Error {
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), line: None, raised: false }
    }

    pub(super) fn at(message: impl Into<String>, line: u32) -> Self {
        Self { message: message.into(), line: Some(line), raised: false }
    }

    pub(super) fn raised(message: impl Into<String>) -> Self {
        Self { message: message.into(), line: None, raised: true }
    }

    /// Sets the line unless it is already known.
    pub(super) fn in_line(mut self, line: u32) -> Self {
        self.line = self.line.or(Some(line));
        self
    }
}

pub(super) fn fail<T>(message: impl Into<String>) -> Result<T, Error> {
    Err(Error::new(message))
}
