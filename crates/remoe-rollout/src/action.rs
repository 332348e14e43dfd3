//! Actions of the supervisor on functions.

use crate::launcher::{Ending, FunctionId};
use std::collections::BTreeSet;
use std::time::Duration;

/// Route: a main function, and the remote functions that it calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Number of the placement.
    pub revision: u32,
    /// Main function.
    pub main: FunctionId,
    /// Remote functions.
    pub endpoints: BTreeSet<FunctionId>,
}

/// Action towards the desired state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Start the function of a slot.
    Start {
        /// Name of the slot.
        name: String,
    },
    /// Stop a function.
    Stop {
        /// Function.
        id: FunctionId,
        /// Name of its slot.
        name: String,
        /// Drain time; zero to end it at once.
        grace: Duration,
        /// Fault for which it ends; `None` if it is merely unwanted.
        fault: Option<String>,
    },
    /// Acknowledge the end of a function.
    Forget {
        /// Function.
        id: FunctionId,
        /// Name of its slot.
        name: String,
        /// Exit of the function.
        ending: Ending,
    },
    /// Push a generation to the route's main function.
    Route {
        /// Number of the generation, higher than any before.
        generation: u64,
        /// Main function and its remote functions.
        route: Route,
    },
    /// Give up: the function refused to start, and a retry will not help.
    GiveUp {
        /// Function, whose end this acknowledges.
        id: FunctionId,
        /// Name of its slot.
        name: String,
        /// Exit of the process, with its last log lines.
        ending: Ending,
    },
}
