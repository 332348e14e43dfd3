//! Errors of profiles, price lists, node lists and planning problems.

use remoe_planner::FieldError;

/// Error of a profile: it is unreadable or has an invalid field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("profile: {}", format_field(field, message))]
pub struct ProfileError {
    /// Path of the invalid field, such as `expert_seconds.seconds[1][0]`; empty if the error is in the file as a whole.
    pub field: String,
    /// The value, the expected values and the remedy.
    pub message: String,
}

/// Error of a price list: it is unreadable or has an invalid field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("prices: {}", format_field(field, message))]
pub struct PricesError {
    /// Path of the invalid field; empty if the error is in the file as a whole.
    pub field: String,
    /// The value, the expected values and the remedy.
    pub message: String,
}

/// Error of a node list: it is unreadable or has an invalid field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("nodes: {}", format_field(field, message))]
pub struct NodesError {
    /// Path of the invalid field, such as `nodes[2].perHour`; empty if the error is in the file as a whole.
    pub field: String,
    /// The value, the expected values and the remedy.
    pub message: String,
}

/// Error of building a planning problem from a profile and a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProblemError {
    /// The profile is of another checkpoint.
    #[error("profile of another checkpoint: expected {model}, got {profile}; run `remoe profile`")]
    ForeignModel {
        /// Fingerprint in the profile.
        profile: String,
        /// Fingerprint of the checkpoint.
        model: String,
    },
    /// The profile is of another dtype.
    #[error(
        "profile of another dtype: expected {wanted}, got {profile}; run `remoe profile` with --dtype and \
         --experts-dtype"
    )]
    ForeignDtype {
        /// Value in the profile.
        profile: String,
        /// Value to plan for.
        wanted: String,
    },
    /// The profile is of main functions on another device.
    #[error(
        "profile of another device: expected {wanted}, got {profile}; make one with `remoe profile --device {wanted}`, \
         or choose device {profile}"
    )]
    ForeignDevice {
        /// Value in the profile.
        profile: String,
        /// Value to plan for.
        wanted: String,
    },
    /// The profile has a GPU, and the prices have none.
    #[error("missing GPU price: set gpuHour and gpuMemoryMB, or plan for the CPU")]
    NoGpuPrice,
    /// The model has no routed experts.
    #[error("cannot plan for family {family}: no routed experts")]
    NoExperts {
        /// The model's family.
        family: String,
    },
    /// The planner rejects a field of the problem.
    #[error("problem: {0}")]
    Field(#[from] FieldError),
}

/// Converts a deserialization error to the path and the message of the field that caused it.
pub(crate) fn unreadable<E: std::fmt::Display>(error: serde_path_to_error::Error<E>) -> FieldError {
    let path = error.path().to_string();
    FieldError::unreadable(&path, &error.into_inner().to_string())
}

impl From<FieldError> for ProfileError {
    fn from(FieldError { field, message }: FieldError) -> Self {
        Self { field, message }
    }
}

impl From<FieldError> for PricesError {
    fn from(FieldError { field, message }: FieldError) -> Self {
        Self { field, message }
    }
}

impl From<FieldError> for NodesError {
    fn from(FieldError { field, message }: FieldError) -> Self {
        Self { field, message }
    }
}

/// Formats `message` after the path of its field, if it has one.
fn format_field(field: &str, message: &str) -> String {
    if field.is_empty() { message.to_owned() } else { format!("{field} {message}") }
}
