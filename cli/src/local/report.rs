//! Reports of what runs.

use crate::deployment::Wanted;
use crate::exit::CliError;
use remoe_rollout::{FunctionState, Status};
use std::collections::BTreeMap;

/// Shows users what becomes of a model.
pub(crate) trait Reporter: Send + Sync {
    /// Reports an event of the model that is placed as in `wanted`.
    fn say(&self, wanted: &Wanted, event: &str, status: &Status) -> Result<(), CliError>;

    /// Reports something beside the events.
    fn note(&self, text: &str);
}

/// Model as it is placed now, with its reporter.
pub(crate) struct Report {
    pub(crate) wanted: Wanted,
    pub(crate) reporter: Box<dyn Reporter>,
}

impl Report {
    /// Reports an event.
    pub(crate) fn say(&self, event: &str, status: &Status) -> Result<(), CliError> {
        self.reporter.say(&self.wanted, event, status)
    }

    /// Reports something beside the events.
    pub(crate) fn note(&self, text: &str) {
        self.reporter.note(text);
    }
}

/// Returns the processes that the generation in force relies on, with the names of their functions.
pub(crate) fn serving(status: &Status) -> BTreeMap<u32, String> {
    let functions = status.functions.iter();
    let serving = functions.filter(|function| function.state == FunctionState::Serving);
    serving.filter_map(|function| Some((function.pid?, function.name.clone()))).collect()
}
