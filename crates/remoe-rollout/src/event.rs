//! Events of a deployment, for users.

use crate::launcher::Ending;
use std::sync::Arc;

/// Event of a deployment, for users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RolloutEvent {
    /// A function was started.
    Started {
        /// Slot of the function.
        name: String,
    },
    /// A faulty function is being ended.
    Unhealthy {
        /// Slot of the function.
        name: String,
        /// Fault that was found.
        fault: String,
    },
    /// A function ended unexpectedly.
    Ended {
        /// Slot of the function.
        name: String,
        /// Exit of the function.
        ending: Ending,
    },
    /// A function ended on request.
    Stopped {
        /// Slot of the function.
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
    /// The main function has a generation in force that another process pushed. The deployment's own generation
    /// follows, with a higher number.
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

/// Receiver of events.
pub type EventSink = Arc<dyn Fn(&RolloutEvent) + Send + Sync>;
