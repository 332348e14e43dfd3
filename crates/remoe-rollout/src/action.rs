//! Actions: what supervision does to functions.

use crate::launcher::{Ending, FunctionId};
use std::collections::BTreeSet;
use std::time::Duration;

/// A main function and the remote functions that it serves through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The number of the placement.
    pub revision: u32,
    /// The main function.
    pub main: FunctionId,
    /// The remote functions.
    pub endpoints: BTreeSet<FunctionId>,
}

/// A step towards what is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Start the function that fills the place.
    Start {
        /// The place.
        name: String,
    },
    /// Stop a function.
    Stop {
        /// The function.
        id: FunctionId,
        /// The place that it fills.
        name: String,
        /// How long it may drain; zero: end it.
        grace: Duration,
        /// Reason of its removal; `None`: it works and is no longer wanted.
        fault: Option<String>,
    },
    /// Acknowledge the end of a function.
    Forget {
        /// The function.
        id: FunctionId,
        /// The place that it filled.
        name: String,
        /// How it ended.
        ending: Ending,
    },
    /// Have the route's main function put a generation in force.
    Route {
        /// The number of the generation, larger than any before.
        generation: u64,
        /// The main function and its remote functions.
        route: Route,
    },
    /// Nothing works and trying again will not help: the function refused to start.
    GiveUp {
        /// The function; its end is acknowledged with this.
        id: FunctionId,
        /// The place that it was to fill.
        name: String,
        /// Exit and last words of the process.
        ending: Ending,
    },
}
