//! What happens in a deployment, as it is told to people.

use crate::launcher::Ending;
use std::sync::Arc;

/// Something that happened, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A function was started.
    Started {
        /// Its place.
        name: String,
    },
    /// A function is being ended because something is wrong with it.
    Unhealthy {
        /// Its place.
        name: String,
        /// What is wrong.
        fault: String,
    },
    /// A function ended without being asked to.
    Ended {
        /// Its place.
        name: String,
        /// How it ended.
        ending: Ending,
    },
    /// A function ended as it was asked to.
    Stopped {
        /// Its place.
        name: String,
        /// How it ended.
        ending: Ending,
    },
    /// A generation is in force.
    Routed {
        /// Its number.
        generation: u64,
        /// Remote functions that the main function could not use, with its reasons.
        problems: Vec<String>,
    },
    /// The main function follows a generation that somebody else put in force. The deployment's own
    /// follows, with a greater number.
    Overruled {
        /// The other one's number.
        generation: u64,
    },
    /// A generation could not be put in force.
    RoutingFailed {
        /// Why.
        message: String,
    },
}

/// Receives what happens.
pub type EventSink = Arc<dyn Fn(&Event) + Send + Sync>;
