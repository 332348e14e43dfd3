//! Errors of commands, with their exit codes.

use crate::remedies::{infeasible, with_flag};
use remoe_local::LocalError;
use remoe_model::CheckpointError;
use remoe_planner::PlanError;
use remoe_proto::{ErrorCode, ServiceError};
use remoe_rollout::{NotReady, PlacementError, StartFailure};
use serde::Serialize;
use std::borrow::Cow;
use std::path::PathBuf;

/// Exit codes of the command. JSON errors contain their names as `code`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub(crate) enum CliExitCode {
    /// A failure while the command ran.
    Runtime = 1,
    /// Invalid arguments.
    Arguments = 2,
    /// No plan or deployment meets the limits.
    Infeasible = 3,
    /// An invalid or unsupported checkpoint.
    Checkpoint = 4,
    /// An interrupt by the user.
    Interrupted = 130,
    /// A closed output, as with `| head`. It does not count as a failure.
    ClosedOutput = 0,
}

/// Error of a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct CliError {
    pub(crate) code: CliExitCode,
    pub(crate) message: String,
    /// File that the error is about.
    pub(crate) path: Option<PathBuf>,
    /// Flag, or field of the file, that the error is about.
    pub(crate) field: Option<String>,
}

impl CliError {
    fn new(code: CliExitCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), path: None, field: None }
    }

    pub(crate) fn runtime(message: impl Into<String>) -> Self {
        Self::new(CliExitCode::Runtime, message)
    }

    pub(crate) fn arguments(field: &str, message: impl Into<String>) -> Self {
        Self { field: Some(field.to_owned()), ..Self::new(CliExitCode::Arguments, message) }
    }

    /// Returns the message. Prepends the flag if the message does not name it, which messages of libraries rarely do.
    pub(crate) fn text(&self) -> Cow<'_, str> {
        match self.field.as_deref().filter(|field| field.starts_with("--")) {
            Some(flag) if !contains_flag(&self.message, flag) => {
                Cow::Owned(format!("{flag}: {}", self.message))
            }
            _ => Cow::Borrowed(&self.message),
        }
    }

    pub(crate) fn interrupted() -> Self {
        Self::new(CliExitCode::Interrupted, "interrupted")
    }

    /// Converts an error about a placement from flags, or from the plan file at `path`.
    pub(crate) fn placement(error: PlacementError, path: Option<PathBuf>) -> Self {
        let field = match (&path, error.field.as_str()) {
            (_, "") => None,
            (Some(_), field) => Some(field.to_owned()),
            (None, flag) => Some(format!("--{}", flag.replace('_', "-"))),
        };
        let file_prefix = path.as_ref().map(|path| format!("{}: ", path.display()));
        let field_prefix = field.as_ref().map(|field| format!("{field}: "));
        let message = [file_prefix, field_prefix].into_iter().flatten().collect::<String>();
        Self { path, field, ..Self::new(CliExitCode::Arguments, message + &error.message) }
    }
}

impl From<PlanError> for CliError {
    fn from(error: PlanError) -> Self {
        match error {
            PlanError::Infeasible(reason) => Self::new(CliExitCode::Infeasible, infeasible(&reason, false)),
            PlanError::Problem(error) | PlanError::Plan(error) => {
                let error = with_flag(error);
                Self {
                    field: Some(error.field.clone()),
                    ..Self::new(CliExitCode::Arguments, error.to_string())
                }
            }
            PlanError::Cancelled => Self::new(CliExitCode::Runtime, error.to_string()),
        }
    }
}

impl From<LocalError> for CliError {
    fn from(error: LocalError) -> Self {
        match error {
            LocalError::Plan(error) => error.into(),
            LocalError::Placement(error) => Self::placement(error, None),
            LocalError::Checkpoint(error) => error.into(),
            LocalError::Text(error) => error.into(),
            LocalError::Predict(error) => error.into(),
            LocalError::History(error) => Self::arguments("--experience", error.to_string()),
            LocalError::Report(error) => error.into(),
            error => Self::runtime(error.to_string()),
        }
    }
}

impl From<clap::Error> for CliError {
    fn from(error: clap::Error) -> Self {
        let text = error.render().to_string();
        // The first paragraph is the error, the others explain how to get help.
        let message = text.split("\n\n").next().unwrap_or(&text);
        let message = message.strip_prefix("error: ").unwrap_or(message);
        let field = error.get(clap::error::ContextKind::InvalidArg).and_then(|value| match value {
            clap::error::ContextValue::String(name) => Some(name.clone()),
            clap::error::ContextValue::Strings(names) => names.first().cloned(),
            _ => None,
        });
        Self {
            field: field.as_deref().and_then(flag_in_argument_name).map(str::to_owned),
            ..Self::new(CliExitCode::Arguments, message.trim())
        }
    }
}

/// Reports if `text` contains `flag` as a whole word.
fn contains_flag(text: &str, flag: &str) -> bool {
    let is_longer = |rest: &str| rest.starts_with(|next: char| next.is_ascii_alphanumeric() || next == '-');
    text.match_indices(flag).any(|(start, found)| !text.get(start + found.len()..).is_some_and(is_longer))
}

/// Extracts the flag from clap's name of an argument, such as `--flag <VALUE>` or `<VALUE|--flag <VALUE>>`.
fn flag_in_argument_name(name: &str) -> Option<&str> {
    let mut words =
        name.split(|c: char| c.is_whitespace() || "<>|".contains(c)).filter(|word| !word.is_empty());
    let first = words.clone().next();
    words.find(|word| word.starts_with("--")).or(first)
}

impl From<CheckpointError> for CliError {
    fn from(error: CheckpointError) -> Self {
        let code = if error.is_transient() { CliExitCode::Runtime } else { CliExitCode::Checkpoint };
        Self {
            path: Some(error.path().to_owned()),
            field: error.field().map(str::to_owned),
            ..Self::new(code, error.to_string())
        }
    }
}

impl From<StartFailure> for CliError {
    fn from(failure: StartFailure) -> Self {
        let code = match failure.ending.code {
            Some(2) => CliExitCode::Arguments,
            Some(3) => CliExitCode::Infeasible,
            Some(4) => CliExitCode::Checkpoint,
            _ => CliExitCode::Runtime,
        };
        let record = failure.ending.last_record().unwrap_or_default();
        let text = |key| record.get(key).and_then(|value| value.as_str()).map(str::to_owned);
        Self {
            path: text("path").map(PathBuf::from),
            field: text("field"),
            ..Self::new(code, failure.to_string())
        }
    }
}

impl From<NotReady> for CliError {
    fn from(error: NotReady) -> Self {
        match error {
            NotReady::Failed(failure) => failure.into(),
            other => Self::runtime(other.to_string()),
        }
    }
}

impl From<ServiceError> for CliError {
    fn from(error: ServiceError) -> Self {
        let code = match error.code {
            ErrorCode::InvalidArgument | ErrorCode::ContextLengthExceeded => CliExitCode::Arguments,
            _ => CliExitCode::Runtime,
        };
        Self { field: error.field, ..Self::new(code, error.message) }
    }
}

impl From<tonic::Status> for CliError {
    fn from(status: tonic::Status) -> Self {
        ServiceError::from(status).into()
    }
}

impl From<std::io::Error> for CliError {
    fn from(error: std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Self::new(CliExitCode::ClosedOutput, "the output is closed");
        }
        Self::runtime(format!("cannot write the output: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_text_names_the_flag_once() {
        for (flag, message, text) in [
            ("--pricing", "prices.yaml: missing field", "--pricing: prices.yaml: missing field"),
            ("--pricing", "invalid --pricing: 0", "invalid --pricing: 0"),
            ("--model", "see --model-cache", "--model: see --model-cache"),
            ("gate", "main exited with code 4", "main exited with code 4"),
        ] {
            assert_eq!(CliError::arguments(flag, message).text(), text);
        }
        assert_eq!(CliError::runtime("cannot start").text(), "cannot start");
    }
}
