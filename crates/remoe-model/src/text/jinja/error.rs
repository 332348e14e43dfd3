//! Errors of a rendering.

/// A failure of a template.
#[derive(Debug)]
pub(in crate::text) struct Error {
    /// The cause.
    pub(in crate::text) message: String,
    /// The line of the template, where it is known.
    pub(in crate::text) line: Option<u32>,
    /// The template called `raise_exception`.
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

    /// Adds a line unless there is one.
    pub(super) fn in_line(mut self, line: u32) -> Self {
        self.line = self.line.or(Some(line));
        self
    }
}

pub(super) fn fail<T>(message: impl Into<String>) -> Result<T, Error> {
    Err(Error::new(message))
}
