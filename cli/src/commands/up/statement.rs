//! How the problem of a plan is stated, for figures that are known at the start or measured later.

use crate::deployment::DesiredDeployment;
use crate::exit::CliError;
use crate::figures::measurement;
use crate::flags::{DeploymentArgs, RemoteArg};
use crate::planning::{PlanningArgs, ProblemInputs};
use crate::profiling::{BelowOne, OnDevice, ProfileRequest};
use remoe_hardware::Profile;
use remoe_planner::{Problem, Slo};
use remoe_predictor::UsageShares;
use std::time::Duration;

/// Flags and past requests that state a problem.
pub(crate) struct ProblemStatement {
    pub(crate) planning: PlanningArgs,
    pub(crate) deployment: DeploymentArgs,
    pub(crate) remote: RemoteArg,
    pub(crate) concurrency: Option<u32>,
    pub(crate) idle: Option<Duration>,
    pub(crate) remote_idle: Option<Duration>,
    /// Expert usage of requests to this service, where it remembers any.
    pub(crate) remembered: Option<UsageShares>,
}

impl ProblemStatement {
    /// States the problem of serving `wanted`'s model on the machine of `profile`.
    pub(crate) fn problem(&self, profile: &Profile, wanted: &DesiredDeployment) -> Result<Problem, CliError> {
        let asked = ProblemInputs {
            prompt: None,
            concurrency: self.concurrency,
            idle: self.idle,
            remote_idle: self.remote_idle,
        };
        let problem = self.planning.problem_on(profile, wanted, &self.deployment, asked)?;
        // Running streams keep this latency beside prompts.
        let target_itl_seconds = wanted.options.target_itl.map(|target| target.as_secs_f64());
        let problem = Problem { slo: Slo { target_itl_seconds, ..problem.slo }, ..problem };
        Ok(match &self.remembered {
            // They were requests to this very service; a predictor's history may be anybody's.
            Some(mean) => Problem { prediction: Some(mean.to_rows()), prediction_p95: None, ..problem },
            None => problem,
        })
    }

    /// Requests the measurement for plans as `problem`, beside `wanted` while it serves.
    pub(crate) fn measurement(&self, problem: &Problem, wanted: &DesiredDeployment) -> ProfileRequest {
        let request = measurement(wanted, &self.deployment, BelowOne::of(problem, self.remote.into()));
        // A GPU has no room beside the main function that serves.
        let subject = remoe_profiler::ProfileRequest { on_device: OnDevice::Assume, ..request.subject };
        ProfileRequest { subject, ..request }
    }
}
