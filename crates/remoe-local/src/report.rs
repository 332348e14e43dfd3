//! Reports to users.

use crate::deployment::DesiredDeployment;
use crate::error::LocalError;
use remoe_rollout::{FunctionState, Status};
use std::collections::BTreeMap;
use std::io;

/// Reporter of a model's events to users.
pub trait Reporter: Send + Sync {
    /// Reports an event of the deployment `wanted`.
    ///
    /// # Errors
    /// The report cannot be written; supervision ends.
    fn say(&self, wanted: &DesiredDeployment, event: &str, status: &Status) -> io::Result<()>;

    /// Reports a note.
    fn note(&self, text: &str);

    /// Reports a warning.
    fn warn(&self, text: &str);
}

/// Current deployment of a model, with its reporter.
pub struct Report {
    /// Current deployment.
    pub wanted: DesiredDeployment,
    /// Reporter of its events.
    pub reporter: Box<dyn Reporter>,
}

impl Report {
    /// Reports an event.
    pub(crate) fn say(&self, event: &str, status: &Status) -> Result<(), LocalError> {
        self.reporter.say(&self.wanted, event, status).map_err(LocalError::Report)
    }

    /// Reports a note.
    pub(crate) fn note(&self, text: &str) {
        self.reporter.note(text);
    }

    /// Reports a warning.
    pub(crate) fn warn(&self, text: &str) {
        self.reporter.warn(text);
    }
}

/// Returns the serving processes, with the names of their functions.
pub(crate) fn serving(status: &Status) -> BTreeMap<u32, String> {
    let functions = status.functions.iter();
    let serving = functions.filter(|function| function.state == FunctionState::Serving);
    serving.filter_map(|function| Some((function.pid?, function.name.clone()))).collect()
}
