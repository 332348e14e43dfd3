//! How the command ends.

use crate::remedies::{by_flag, infeasible};
use remoe_local::LocalError;
use remoe_model::CheckpointError;
use remoe_planner::PlanError;
use remoe_proto::{ErrorCode, ServiceError};
use remoe_rollout::{NotReady, PlacementError, StartFailure};
use serde::Serialize;
use std::borrow::Cow;
use std::path::PathBuf;

/// Exit codes, and the `code` of an error object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub(crate) enum Code {
    /// It failed while it ran.
    Runtime = 1,
    /// The arguments are invalid.
    Arguments = 2,
    /// The wanted deployment does not fit.
    Infeasible = 3,
    /// The checkpoint cannot be used.
    Checkpoint = 4,
    /// The user ended it.
    Interrupted = 130,
    /// The reader of the output is gone, as behind `| head`: there is nothing left to be done.
    ClosedOutput = 0,
}

/// Why the command failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct CliError {
    pub(crate) code: Code,
    pub(crate) message: String,
    /// The file that was wrong.
    pub(crate) path: Option<PathBuf>,
    /// The flag, or the field of the file, that was wrong.
    pub(crate) field: Option<String>,
}

impl CliError {
    fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), path: None, field: None }
    }

    pub(crate) fn runtime(message: impl Into<String>) -> Self {
        Self::new(Code::Runtime, message)
    }

    pub(crate) fn arguments(field: &str, message: impl Into<String>) -> Self {
        Self { field: Some(field.to_owned()), ..Self::new(Code::Arguments, message) }
    }

    /// Returns the message, preceded by the flag unless the message names it. Messages of libraries rarely do.
    pub(crate) fn text(&self) -> Cow<'_, str> {
        match self.field.as_deref().filter(|field| field.starts_with("--")) {
            Some(flag) if !names(&self.message, flag) => Cow::Owned(format!("{flag}: {}", self.message)),
            _ => Cow::Borrowed(&self.message),
        }
    }

    pub(crate) fn interrupted() -> Self {
        Self::new(Code::Interrupted, "interrupted")
    }

    /// A placement that cannot be, from the flags or from the plan at `path`.
    pub(crate) fn placement(error: PlacementError, path: Option<PathBuf>) -> Self {
        let field = match (&path, error.field.as_str()) {
            (_, "") => None,
            (Some(_), field) => Some(field.to_owned()),
            (None, flag) => Some(format!("--{}", flag.replace('_', "-"))),
        };
        let of_file = path.as_ref().map(|path| format!("{}: ", path.display()));
        let of_field = field.as_ref().map(|field| format!("{field}: "));
        let message = [of_file, of_field].into_iter().flatten().collect::<String>();
        Self { path, field, ..Self::new(Code::Arguments, message + &error.message) }
    }
}

impl From<PlanError> for CliError {
    fn from(error: PlanError) -> Self {
        match error {
            PlanError::Infeasible(why) => Self::new(Code::Infeasible, infeasible(&why, false)),
            PlanError::Problem(error) | PlanError::Plan(error) => {
                let error = by_flag(error);
                Self { field: Some(error.field.clone()), ..Self::new(Code::Arguments, error.to_string()) }
            }
            PlanError::Cancelled => Self::new(Code::Runtime, error.to_string()),
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
        // The first paragraph says what is wrong, the others how to get help.
        let message = text.split("\n\n").next().unwrap_or(&text);
        let message = message.strip_prefix("error: ").unwrap_or(message);
        let field = error.get(clap::error::ContextKind::InvalidArg).and_then(|value| match value {
            clap::error::ContextValue::String(name) => Some(name.clone()),
            clap::error::ContextValue::Strings(names) => names.first().cloned(),
            _ => None,
        });
        Self {
            field: field.as_deref().and_then(flag).map(str::to_owned),
            ..Self::new(Code::Arguments, message.trim())
        }
    }
}

/// Reports if `text` contains `flag`, and not only a longer flag that begins with it.
fn names(text: &str, flag: &str) -> bool {
    let is_longer = |rest: &str| rest.starts_with(|next: char| next.is_ascii_alphanumeric() || next == '-');
    text.match_indices(flag).any(|(at, found)| !text.get(at + found.len()..).is_some_and(is_longer))
}

/// The flag in clap's name of an argument, which may be `--flag <VALUE>` or `<VALUE|--flag <VALUE>>`.
fn flag(name: &str) -> Option<&str> {
    let mut words =
        name.split(|c: char| c.is_whitespace() || "<>|".contains(c)).filter(|word| !word.is_empty());
    let first = words.clone().next();
    words.find(|word| word.starts_with("--")).or(first)
}

impl From<CheckpointError> for CliError {
    fn from(error: CheckpointError) -> Self {
        let code = if error.is_transient() { Code::Runtime } else { Code::Checkpoint };
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
            Some(2) => Code::Arguments,
            Some(3) => Code::Infeasible,
            Some(4) => Code::Checkpoint,
            _ => Code::Runtime,
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
            ErrorCode::InvalidArgument | ErrorCode::ContextLengthExceeded => Code::Arguments,
            _ => Code::Runtime,
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
            return Self::new(Code::ClosedOutput, "the output is closed");
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
