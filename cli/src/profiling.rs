//! Measurement of a hardware profile by a command, with progress on its terminal.

mod profile_files;

pub(crate) use profile_files::{default_path, save, save_if_newer, save_to, write_atomically};
pub(crate) use remoe_profiler::{BelowOne, Gate, MeasurementCounts, OnDevice, doubts, memory_needed};

use crate::exit::CliError;
use crate::flags::Backend;
use crate::output::progress::Progress;
use crate::programs;
use remoe_hardware::Profile;
use remoe_profiler::{ProfileError, Reporter};
use remoe_rollout::LogLine;
use std::sync::Arc;

/// Request to measure a profile, with the backend of the main function.
pub(crate) struct ProfileRequest {
    pub(crate) measurement: remoe_profiler::ProfileRequest,
    pub(crate) backend: Option<Backend>,
}

/// Measures a profile on this machine while `gate` is open.
pub(crate) async fn measure(
    request: ProfileRequest,
    gate: Arc<Gate>,
    progress: &Arc<Progress>,
) -> Result<Profile, CliError> {
    let ProfileRequest { measurement, backend } = request;
    let programs = programs::find(backend, &measurement.device)?;
    Ok(remoe_profiler::measure(measurement, programs, gate, progress.clone()).await?)
}

impl Reporter for Progress {
    fn expect(&self, steps: usize) {
        self.expect(steps);
    }

    fn doing(&self, what: String) {
        self.doing(what);
    }

    fn clear(&self) {
        self.clear();
    }

    fn line(&self, text: &str) {
        self.line(text);
    }

    fn log(&self, line: LogLine<'_>) {
        self.log(line);
    }
}

impl From<ProfileError> for CliError {
    fn from(error: ProfileError) -> Self {
        match error {
            ProfileError::NoExperts { .. } => Self::arguments("--model", error.to_string()),
            ProfileError::Interrupted => Self::interrupted(),
            ProfileError::Service(error) => error.into(),
            error => Self::runtime(error.to_string()),
        }
    }
}
