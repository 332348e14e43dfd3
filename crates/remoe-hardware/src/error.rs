//! Errors of profiles, prices and what is made of them.

use remoe_planner::FieldError;

/// A profile that cannot be read or believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("profile: {}", at(field, message))]
pub struct ProfileError {
    /// The field that is wrong, as `expert_seconds.seconds[1][0]`; empty: the file as a whole.
    pub field: String,
    /// The value, what was expected and what to do.
    pub message: String,
}

/// Prices that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("prices: {}", at(field, message))]
pub struct PricesError {
    /// The field that is wrong; empty: the file as a whole.
    pub field: String,
    /// The value, what was expected and what to do.
    pub message: String,
}

/// A list of nodes that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("nodes: {}", at(field, message))]
pub struct NodesError {
    /// The field that is wrong, as `nodes[2].perHour`; empty: the file as a whole.
    pub field: String,
    /// The value, what was expected and what to do.
    pub message: String,
}

/// Why no problem can be made of a profile and a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProblemError {
    /// The profile was made of other weights.
    #[error("profile of another checkpoint: expected {model}, got {profile}; run `remoe profile`")]
    ForeignModel {
        /// Fingerprint in the profile.
        profile: String,
        /// Fingerprint of the checkpoint.
        model: String,
    },
    /// The profile was made in another dtype.
    #[error(
        "profile of another dtype: expected {wanted}, got {profile}; run `remoe profile` with --dtype and \
         --experts-dtype"
    )]
    ForeignDtype {
        /// The profile's.
        profile: String,
        /// The one to plan for.
        wanted: String,
    },
    /// The profile is of main functions on another device.
    #[error(
        "profile of another device: expected {wanted}, got {profile}; make one with `remoe profile --device {wanted}`, \
         or choose device {profile}"
    )]
    ForeignDevice {
        /// The profile's.
        profile: String,
        /// The one to plan for.
        wanted: String,
    },
    /// GPU memory would be paid for as main memory.
    #[error("missing GPU price: set gpuHour and gpuMemoryMB, or plan for the CPU")]
    NoGpuPrice,
    /// There is nothing to place.
    #[error("cannot plan for family {family}: no routed experts")]
    NoExperts {
        /// The model's family.
        family: String,
    },
    /// Figures that the planner refuses.
    #[error("problem: {0}")]
    Field(#[from] FieldError),
}

/// Returns the field and the message of a value that cannot be read.
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

fn at(field: &str, message: &str) -> String {
    if field.is_empty() { message.to_owned() } else { format!("{field} {message}") }
}
