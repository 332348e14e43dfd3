//! Errors of a measurement.

use remoe_proto::ServiceError;
use remoe_rollout::{CgroupError, Ending, LaunchError};
use std::time::Duration;

/// Failure of a measurement.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The model has no routed experts.
    #[error("cannot profile family {family}: no routed experts")]
    NoExperts {
        /// Family of the model.
        family: String,
    },
    /// The gate was shut, or the measurement was cancelled.
    #[error("interrupted")]
    Interrupted,
    /// A function cannot be started.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The CPU limit of a function cannot be changed.
    #[error(transparent)]
    Limit(#[from] CgroupError),
    /// A function ended while it started.
    #[error("{name}: {ending}")]
    Ended {
        /// Name of the function.
        name: String,
        /// Exit of its process.
        ending: Ending,
    },
    /// A function ended and its exit is unknown.
    #[error("cannot reach {name}: it ended")]
    Gone {
        /// Name of the function.
        name: String,
    },
    /// A call failed.
    #[error("{}", .0.message)]
    Service(ServiceError),
    /// A call took too long.
    #[error("cannot measure the {function}: no answer within {within:?}")]
    Late {
        /// Kind of the function.
        function: &'static str,
        /// Timeout of the call.
        within: Duration,
    },
    /// The grid has no vCPUs for a function.
    #[error("cannot measure the {function}: no vCPUs to measure with")]
    NoVcpus {
        /// Kind of the function.
        function: &'static str,
    },
    /// The network to a remote function was not measured.
    #[error("cannot measure the network to a remote function")]
    NoTransport,
    /// Concurrent calls failed.
    #[error("cannot call concurrent remote functions: {why}")]
    Concurrent {
        /// Cause.
        why: String,
    },
    /// A stream of tokens ended early.
    #[error("cannot read the answer: the stream ended early")]
    Cut,
    /// Part of a prompt came from the prefix cache.
    #[error(
        "prefix cache hit: only {computed} of {tokens} tokens were computed, so the prefill time is invalid"
    )]
    Cached {
        /// Computed positions.
        computed: u64,
        /// Positions of the prompt.
        tokens: u64,
    },
    /// The measuring thread panicked or was cancelled.
    #[error("cannot measure: {0}")]
    Thread(#[from] tokio::task::JoinError),
}

impl From<ServiceError> for ProfileError {
    fn from(error: ServiceError) -> Self {
        Self::Service(error)
    }
}

impl From<tonic::Status> for ProfileError {
    fn from(status: tonic::Status) -> Self {
        Self::Service(status.into())
    }
}
