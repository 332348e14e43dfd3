//! Events of a deployment, for users.

use crate::launcher::Ending;
use std::sync::Arc;

/// An event, for users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RolloutEvent {
    /// A function was started.
    Started {
        /// Place of the function.
        name: String,
    },
    /// A faulty function is being ended.
    Unhealthy {
        /// Place of the function.
        name: String,
        /// Fault that was found.
        fault: String,
    },
    /// A function ended without being asked to.
    Ended {
        /// Place of the function.
        name: String,
        /// Exit of the function.
        ending: Ending,
    },
    /// A function ended as it was asked to.
    Stopped {
        /// Place of the function.
        name: String,
        /// Exit of the function.
        ending: Ending,
    },
    /// A generation is in force.
    Routed {
        /// Number of the generation.
        generation: u64,
        /// Remote functions that the main function could not use, with its reasons.
        problems: Vec<String>,
    },
    /// The main function follows a generation that another process put in force. The deployment's own generation
    /// follows, with a greater number.
    Overruled {
        /// Number of the foreign generation.
        generation: u64,
    },
    /// A generation could not be put in force.
    RoutingFailed {
        /// Cause.
        message: String,
    },
}

/// Receives what happens.
pub type EventSink = Arc<dyn Fn(&RolloutEvent) + Send + Sync>;
