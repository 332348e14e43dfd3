//! Reports of what runs.

use crate::deployment::DesiredDeployment;
use crate::error::LocalError;
use remoe_rollout::{FunctionState, Status};
use std::collections::BTreeMap;
use std::io;

/// Shows users what becomes of a model.
pub trait Reporter: Send + Sync {
    /// Reports an event of the model that is placed as in `wanted`.
    ///
    /// # Errors
    /// The report cannot be written; the model is not kept any longer.
    fn say(&self, wanted: &DesiredDeployment, event: &str, status: &Status) -> io::Result<()>;

    /// Reports something beside the events.
    fn note(&self, text: &str);

    /// Warns of something that is left as it is.
    fn warn(&self, text: &str);
}

/// Model as it is placed now, with its reporter.
pub struct Report {
    /// The model.
    pub wanted: DesiredDeployment,
    /// Reporter of what becomes of it.
    pub reporter: Box<dyn Reporter>,
}

impl Report {
    /// Reports an event.
    pub(crate) fn say(&self, event: &str, status: &Status) -> Result<(), LocalError> {
        self.reporter.say(&self.wanted, event, status).map_err(LocalError::Report)
    }

    /// Reports something beside the events.
    pub(crate) fn note(&self, text: &str) {
        self.reporter.note(text);
    }

    /// Warns of something that is left as it is.
    pub(crate) fn warn(&self, text: &str) {
        self.reporter.warn(text);
    }
}

/// Returns the processes that the generation in force relies on, with the names of their functions.
pub(crate) fn serving(status: &Status) -> BTreeMap<u32, String> {
    let functions = status.functions.iter();
    let serving = functions.filter(|function| function.state == FunctionState::Serving);
    serving.filter_map(|function| Some((function.pid?, function.name.clone()))).collect()
}
