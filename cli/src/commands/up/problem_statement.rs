//! Planning problem of a model of `up`, stated at the start and again after a measurement.

use crate::deployment::DesiredDeployment;
use crate::exit::CliError;
use crate::flags::{DeploymentArgs, RemoteArg};
use crate::planning::{PlanningArgs, ProblemInputs};
use crate::profile_source::profile_request;
use crate::profiling::{BelowOne, OnDevice, ProfileRequest};
use remoe_hardware::Profile;
use remoe_planner::{Problem, Slo};
use remoe_predictor::UsageShares;
use std::time::Duration;

/// Flags and past requests that determine a planning problem.
pub(crate) struct ProblemStatement {
    pub(crate) planning: PlanningArgs,
    pub(crate) deployment: DeploymentArgs,
    pub(crate) remote: RemoteArg,
    pub(crate) concurrency: Option<u32>,
    pub(crate) idle: Option<Duration>,
    pub(crate) remote_idle: Option<Duration>,
    /// Expert usage of earlier requests to this service, if any is stored.
    pub(crate) remembered: Option<UsageShares>,
}

impl ProblemStatement {
    /// Returns the problem of serving the model of `wanted` on the machine of `profile`.
    pub(crate) fn problem(&self, profile: &Profile, wanted: &DesiredDeployment) -> Result<Problem, CliError> {
        let inputs = ProblemInputs {
            prompt: None,
            concurrency: self.concurrency,
            idle: self.idle,
            remote_idle: self.remote_idle,
        };
        let problem = self.planning.problem_on(profile, wanted, &self.deployment, inputs)?;
        // Running streams keep this latency while prompts are computed.
        let target_itl_seconds = wanted.options.target_itl.map(|target| target.as_secs_f64());
        let problem = Problem { slo: Slo { target_itl_seconds, ..problem.slo }, ..problem };
        Ok(match &self.remembered {
            // Usage of this service is preferred to a predictor, whose history may come from other requests.
            Some(mean) => Problem { prediction: Some(mean.to_rows()), prediction_p95: None, ..problem },
            None => problem,
        })
    }

    /// Returns the request for the measurement that `problem` needs, while `wanted` serves.
    pub(crate) fn measurement(&self, problem: &Problem, wanted: &DesiredDeployment) -> ProfileRequest {
        let request = profile_request(wanted, &self.deployment, BelowOne::of(problem, self.remote.into()));
        // The serving main function occupies the GPU's memory.
        let measurement =
            remoe_profiler::ProfileRequest { on_device: OnDevice::Assume, ..request.measurement };
        ProfileRequest { measurement, ..request }
    }
}
