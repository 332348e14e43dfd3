//! Figures that plans stand on: of the profile that is known, measured now, or assumed.

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

/// Figures to plan with where nothing was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unmeasured {
    /// Figures that are measured first.
    Measure,
    /// Assumed ones.
    Assume,
}

impl PlanningArgs {
    /// The known profile; where there is none, the figures that `unmeasured` says.
    pub(crate) async fn profile_of(
        &self,
        wanted: &DesiredDeployment,
        args: &DeploymentArgs,
        unmeasured: Unmeasured,
        progress: &Arc<Progress>,
    ) -> Result<Profile, CliError> {
        let request = measurement(wanted, args, BelowOne { main: true, remote: true });
        let subject = &request.subject;
        let id = ModelId::of(&subject.inspection, &subject.dtype);
        if let Some(profile) = self.known_profile(&id, &MainDevice::of_main(wanted))? {
            return Ok(profile);
        }
        if unmeasured == Unmeasured::Assume {
            let machine = Machine {
                cpu: machine::cpu(),
                cores: machine::cores(),
                memory_bytes: machine::memory_bytes(),
                device: subject.device.clone(),
                gpu: subject.gpu.clone(),
                vcpus_by: CpuLimit::Assumed,
            };
            return Ok(Profile::prior_of_machine(&subject.inspection, &subject.dtype, machine));
        }
        progress.line("no profile of this model on this machine; measuring one now (kept for later runs)");
        let profile = profiling::measure(request, Gate::new(true), progress).await?;
        profiling::keep(&profile)?;
        profiling::doubts(&profile).iter().for_each(|doubt| print_warning(doubt));
        Ok(profile)
    }
}

/// Requests the measurement of `wanted`'s model, for plans that give functions less than one vCPU as `below_one` says.
pub(crate) fn measurement(
    wanted: &DesiredDeployment,
    args: &DeploymentArgs,
    below_one: BelowOne,
) -> profiling::ProfileRequest {
    let (inspection, device) = (wanted.inspection.clone(), MainDevice::of_main(wanted));
    let subject = remoe_profiler::ProfileRequest {
        source: wanted.source.clone(),
        dtype: args.dtype.map_or_else(|| default_dtype(&inspection), Dtype::name).to_owned(),
        inspection,
        device: device.name,
        gpu: device.gpu,
        on_device: OnDevice::Measure,
        quick: true,
        address: None,
        below_one,
    };
    profiling::ProfileRequest { subject, backend: args.backend }
}

/// Warns of figures of `profile` that plans as `problem` lack.
pub(crate) fn check_contention(profile: &Profile, problem: &Problem, progress: &Progress) {
    let several = problem.limits.max_groups.is_some() && profile.machine.cores > 1;
    if several && profile.origin == Origin::Measured && profile.contention.is_none() {
        progress.line(&format!(
            "the profile of {} lacks contention between concurrent functions, so plans with groups look faster \
             than they are; run `remoe profile`",
            profile.made.date
        ));
    }
}
