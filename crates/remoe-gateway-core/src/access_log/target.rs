//! Values of `--access-log`.

use super::line::AccessLogFormat;
use super::writer::AccessLog;
use std::io::{self, Write};
use std::path::PathBuf;
use std::str::FromStr;

/// Format and destination of the access log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AccessLogTarget {
    /// No access log.
    Off,
    /// Lines on standard error.
    StandardError(AccessLogFormat),
    /// Lines of JSON at the end of a file.
    File(PathBuf),
}

/// Error of a value of `--access-log` that is neither a format nor a path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected off, text, json, or the path of a file with a / or a dot in it, such as ./{0}")]
pub struct AccessLogTargetError(String);

impl FromStr for AccessLogTarget {
    type Err = AccessLogTargetError;

    /// Parses `off`, `text`, `json`, `-` (JSON on standard error), or a path. Other words without a slash or dot are
    /// refused, because they are probably misspelt formats.
    fn from_str(text: &str) -> Result<Self, AccessLogTargetError> {
        match text {
            "off" => Ok(Self::Off),
            "text" => Ok(Self::StandardError(AccessLogFormat::Text)),
            "json" | "-" => Ok(Self::StandardError(AccessLogFormat::Json)),
            path if path.contains(['/', '.']) => Ok(Self::File(path.into())),
            other => Err(AccessLogTargetError(other.to_owned())),
        }
    }
}

impl AccessLogTarget {
    /// Opens the access log. Lines for standard error are passed to `write`, on a separate thread.
    ///
    /// # Errors
    /// The file cannot be opened, or the writer's thread cannot be started.
    pub fn open(
        &self,
        write: impl FnMut(&str) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Option<AccessLog>> {
        match self {
            Self::Off => Ok(None),
            Self::StandardError(format) => AccessLog::with_writer(*format, write).map(Some),
            Self::File(path) => AccessLog::open(path).map(Some),
        }
    }

    /// Opens the access log. Lines for standard error are written there directly.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_to_stderr(&self) -> io::Result<Option<AccessLog>> {
        self.open(|line| io::stderr().write_all(format!("{line}\n").as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_log_word_that_is_no_format_is_refused() {
        use AccessLogFormat::{Json, Text};
        for (text, target) in [
            ("off", AccessLogTarget::Off),
            ("text", AccessLogTarget::StandardError(Text)),
            ("json", AccessLogTarget::StandardError(Json)),
            ("-", AccessLogTarget::StandardError(Json)),
            ("./text", AccessLogTarget::File("./text".into())),
            ("access.jsonl", AccessLogTarget::File("access.jsonl".into())),
        ] {
            assert_eq!(text.parse(), Ok(target), "{text}");
        }
        for text in ["", "txt", "JSON"] {
            assert_eq!(text.parse::<AccessLogTarget>(), Err(AccessLogTargetError(text.to_owned())));
        }
    }
}
