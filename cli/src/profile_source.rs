//! Choice of the hardware profile for a plan: a known one, a new measurement, or assumed figures.

use crate::deployment::DesiredDeployment;
use crate::device::MainDevice;
use crate::exit::CliError;
use crate::flags::{DeploymentArgs, Dtype, default_dtype};
use crate::machine;
use crate::output::progress::{Progress, print_warning};
use crate::planning::PlanningArgs;
use crate::profiling::{self, BelowOne, Gate, OnDevice};
use remoe_hardware::{CpuLimit, Machine, ModelId, Origin, Profile};
use remoe_planner::Problem;
use std::sync::Arc;

/// Source of a profile if none is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MissingProfile {
    /// Measure the machine first.
    Measure,
    /// Assume figures of typical hardware.
    Assume,
}

impl PlanningArgs {
    /// Returns the known profile. If there is none, measures or assumes one.
    pub(crate) async fn resolve_profile(
        &self,
        desired: &DesiredDeployment,
        args: &DeploymentArgs,
        if_missing: MissingProfile,
        progress: &Arc<Progress>,
    ) -> Result<Profile, CliError> {
        let request = profile_request(desired, args, BelowOne { main: true, remote: true });
        let measurement = &request.measurement;
        let id = ModelId::of(&measurement.inspection, &measurement.dtype);
        if let Some(profile) = self.known_profile(&id, &MainDevice::of_deployment(desired))? {
            return Ok(profile);
        }
        if if_missing == MissingProfile::Assume {
            let machine = Machine {
                cpu: machine::cpu(),
                cores: machine::cores(),
                memory_bytes: machine::memory_bytes(),
                device: measurement.device.clone(),
                gpu: measurement.gpu.clone(),
                vcpus_by: CpuLimit::Assumed,
            };
            return Ok(Profile::prior_of_machine(&measurement.inspection, &measurement.dtype, machine));
        }
        progress.line("no profile of this model on this machine; measuring one now (kept for later runs)");
        let profile = profiling::measure(request, Gate::new(true), progress).await?;
        profiling::save(&profile)?;
        profiling::doubts(&profile).iter().for_each(|doubt| print_warning(doubt));
        Ok(profile)
    }
}

/// Builds a request to measure the model of `desired`. `below_one` selects the functions that are also measured with
/// less than one vCPU.
pub(crate) fn profile_request(
    desired: &DesiredDeployment,
    args: &DeploymentArgs,
    below_one: BelowOne,
) -> profiling::ProfileRequest {
    let (inspection, device) = (desired.inspection.clone(), MainDevice::of_deployment(desired));
    let measurement = remoe_profiler::ProfileRequest {
        source: desired.source.clone(),
        dtype: args.dtype.map_or_else(|| default_dtype(&inspection), Dtype::name).to_owned(),
        inspection,
        device: device.name,
        gpu: device.gpu,
        on_device: OnDevice::Measure,
        quick: true,
        address: None,
        below_one,
    };
    profiling::ProfileRequest { measurement, backend: args.backend }
}

/// Warns if plans for `problem` need contention figures that `profile` lacks.
pub(crate) fn warn_missing_contention(profile: &Profile, problem: &Problem, progress: &Progress) {
    let has_groups = problem.limits.max_groups.is_some() && profile.machine.cores > 1;
    if has_groups && profile.origin == Origin::Measured && profile.contention.is_none() {
        progress.line(&format!(
            "the profile of {} lacks contention between concurrent functions, so plans with groups look faster \
             than they are; run `remoe profile`",
            profile.made.date
        ));
    }
}
