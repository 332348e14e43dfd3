//! Measures the hardware profile of this machine for a model.

mod error;
mod functions;
mod gate;
mod grid;
mod line_fit;
pub mod machine;
mod main_function;
mod measured_main;
mod remote;

pub use error::ProfileError;
pub use gate::{Gate, MeasurementCounts};

use functions::Functions;
use grid::Grid;
use machine::CpuTimes;
use main_function::MainSetup;
use remoe_hardware::{CpuLimit, Kernels, Machine, Made, Memory, ModelId, Origin, Profile, Starts};
use remoe_hub::ModelArgs;
use remoe_model::Inspection;
use remoe_planner::{Fit, Problem, Remote, SizeRange, Specs, VcpuRange};
use remoe_process::Role;
use remoe_rollout::LogLine;
use remoe_rollout::process::Programs;
use remote::RemoteSetup;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

/// Minimum warm-up of a function: first uses touch cold memory, and instruction paths are tried in turn.
const MIN_WARM_UP: Duration = Duration::from_millis(300);
/// Share of CPU time used by other programs above which figures are not trusted.
const MAX_DISTURBANCE: f64 = 0.1;
/// Bytes of a measured main function in addition to its weights, with remote experts beside it.
const ADDITIONAL_BYTES: u64 = 500 << 20;

/// Device name of the CPUs.
const CPU_DEVICE: &str = "cpu";

/// Request for a measurement.
pub struct ProfileRequest {
    /// Model arguments of every function.
    pub source: ModelArgs,
    /// Facts of the model, with the in-memory dtypes of experts and dense weights.
    pub inspection: Inspection,
    /// Compute dtype.
    pub dtype: String,
    /// Device of the main function: `cpu`, `cuda` or `cuda:INDEX`.
    pub device: String,
    /// Model name of its GPU, if known.
    pub gpu: Option<String>,
    /// Origin of the times on the device, if it is not the CPUs.
    pub on_device: OnDevice,
    /// Set to measure fewer points, in a third of the time.
    pub quick: bool,
    /// Address of a remote function on another machine for measuring the network; absent for loopback.
    pub address: Option<String>,
    /// Roles to measure with less than one vCPU.
    pub below_one: BelowOne,
}

/// Times of everything but routed experts on a device other than the CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnDevice {
    /// Measured: the device has memory for one more main function.
    Measure,
    /// Assumed: a serving main function occupies the device, or there is none.
    Assume,
}

/// Roles that plans may give less than one vCPU.
#[derive(Debug, Clone, Copy)]
pub struct BelowOne {
    /// Main functions.
    pub main: bool,
    /// Remote functions.
    pub remote: bool,
}

impl BelowOne {
    /// Returns the roles that plans for `problem` with this mode of remote experts may give less than one vCPU.
    pub fn of(problem: &Problem, remote: Remote) -> Self {
        let Specs { main, remote: remote_sizes, main_vcpus, remote_vcpus } = problem.specs;
        let below = |bytes: SizeRange, vcpus: Option<VcpuRange>| {
            vcpus.map_or(bytes.min_bytes / problem.pricing.vcpu_bytes(), |vcpus| vcpus.min) < 1.0
        };
        Self {
            main: below(main, main_vcpus),
            remote: remote != Remote::Never && below(remote_sizes, remote_vcpus),
        }
    }
}

/// Receiver of a measurement's progress.
pub trait Reporter: Send + Sync {
    /// Announces the number of steps.
    fn expect(&self, steps: usize);

    /// Reports the begin of the next step.
    fn doing(&self, what: String);

    /// Reports the end of the last step.
    fn clear(&self);

    /// Reports a note.
    fn line(&self, text: &str);

    /// Receives a log line of a function.
    fn log(&self, line: LogLine<'_>);
}

/// Measures a profile on this machine with these `programs`, while `gate` is open.
///
/// # Errors
/// A function cannot be started or measured, or the gate was ended.
pub async fn measure(
    request: ProfileRequest,
    programs: Programs,
    gate: Arc<Gate>,
    reporter: Arc<dyn Reporter>,
) -> Result<Profile, ProfileError> {
    tokio::task::spawn_blocking(move || measure_blocking(&request, programs, gate, &reporter)).await?
}

/// Returns reasons to measure again, for users; none if the profile looks valid.
pub fn doubts(profile: &Profile) -> Vec<String> {
    let busy = profile.disturbed.map(|share| {
        format!(
            "other programs used {:.0} % of the CPUs during the measurements; measure again on an idle machine",
            100.0 * share
        )
    });
    let slower = profile.slower_with_more_vcpus().map(|slower| format!("unexpected measurement: {slower}"));
    busy.into_iter().chain(slower).collect()
}

/// Returns the additional bytes of memory that a measurement needs: a whole model, or copies of some of its experts.
pub fn memory_needed(inspection: &Inspection, dtype: &str) -> u64 {
    inspection
        .resident_total_bytes(dtype)
        .saturating_add(remote::COPIES_BYTES as u64)
        .saturating_add(ADDITIONAL_BYTES)
}

fn measure_blocking(
    request: &ProfileRequest,
    programs: Programs,
    gate: Arc<Gate>,
    reporter: &Arc<dyn Reporter>,
) -> Result<Profile, ProfileError> {
    let ProfileRequest { source, inspection, dtype, device, gpu, on_device, quick, address, below_one } =
        request;
    if inspection.moe_layers.is_empty() {
        return Err(ProfileError::NoExperts { family: inspection.family.clone() });
    }
    let functions = Functions::new(programs, reporter, machine::memory_bytes().max(1 << 30), gate)?;
    let grid = Grid::new(machine::cores(), *quick, inspection.served_context());
    let step = |what: String| reporter.doing(what);
    let subject = ProfiledModel {
        functions: &functions,
        source,
        inspection,
        dtype,
        grid: &grid,
        below_one: *below_one,
    };
    let measured_device = if *on_device == OnDevice::Measure { device.as_str() } else { CPU_DEVICE };
    reporter.expect(steps(&subject, measured_device, address.is_some()));
    let before = CpuTimes::now();
    let remote = RemoteSetup { subject: &subject, address: address.as_deref() }.measure(&step)?;
    let last = remote.expert_seconds.vcpus.len() - 1;
    let alone = remote.expert_seconds.seconds.iter().map(|row| row[last]).collect();
    let main = MainSetup { subject: &subject, device: measured_device, alone }.measure(&step)?;
    let assumed = || Profile::prior_on_gpu(inspection, dtype).device;
    let device_times = main.device.or_else(|| if device == CPU_DEVICE { None } else { assumed() });
    let others = before.zip(CpuTimes::now()).map(|(before, after)| after.others_since(&before));
    reporter.clear();
    let mut transport = remote.transport;
    // The CPU time of a call is measured separately and bounds the time of sending; a difference of decode steps has
    // all their noise.
    let computed = Some(transport.main_cpu_seconds).filter(|seconds| *seconds > 0.0);
    transport.send_seconds = computed.map_or(main.call.send, |most| main.call.send.min(most));
    if address.is_none() {
        // The main function's view of a call includes its wake-up and driving its connections.
        let per_expert = remote.expert_seconds.seconds.first().map_or(0.0, |row| row[0]);
        let rows = (1 + inspection.top_k) as f64 * subject.resident_bytes(inspection.token_bytes);
        let known = inspection.top_k as f64 * per_expert + rows / transport.bytes_per_second;
        transport.invoke_seconds = (main.call.wait - known).max(0.0);
    }
    let one_token: Vec<f64> = remote.expert_seconds.seconds.first().cloned().unwrap_or_default();
    Ok(Profile {
        version: 1,
        origin: Origin::Measured,
        made: Made { date: machine::now(), version: env!("CARGO_PKG_VERSION").to_owned() },
        machine: Machine {
            cpu: machine::cpu(),
            cores: grid.cores,
            memory_bytes: machine::memory_bytes(),
            device: device.clone(),
            gpu: gpu.clone(),
            vcpus_by: if functions.quotas { CpuLimit::Quota } else { CpuLimit::Threads },
        },
        model: ModelId::of(inspection, dtype),
        kernels: Kernels { numerics_class: remote.numerics_class, instruction_path: remote.instruction_path },
        // One vCPU per 1 GB.
        fit: Fit::of(&remote.expert_seconds.vcpus, &one_token),
        expert_seconds: main.expert_seconds,
        remote_expert_seconds: Some(remote.expert_seconds),
        gpu_expert_seconds: None,
        nonexpert_seconds: main.nonexpert_seconds,
        context_seconds: Some(main.context_seconds),
        device: device_times,
        transport,
        contention: remote.contention,
        starts: Starts { main: main.start, remote: remote.start },
        memory: Memory { main_bytes: main.main_bytes, function_bytes: remote.function_bytes.max(0.0) },
        disturbed: others.filter(|share| *share > MAX_DISTURBANCE),
    })
}

/// Returns the number of steps that [`RemoteSetup::measure`] and [`MainSetup::measure`] report together.
fn steps(subject: &ProfiledModel<'_>, device: &str, elsewhere: bool) -> usize {
    // Each function starts and is then measured at every size.
    let of_role = |role: Role| {
        let groups = subject.grid.by_threads(subject.below_one(role));
        groups.len() + groups.iter().map(|(_, vcpus)| vcpus.len()).sum::<usize>()
    };
    let own_device = if device == CPU_DEVICE { 0 } else { 2 };
    // Overhead of a call, network (and a second one if an address is given), concurrent functions, start times, and
    // remote calls of the main function.
    of_role(Role::Remote) + of_role(Role::Main) + 2 + usize::from(elsewhere) + 2 + 1 + own_device
}

/// Model under measurement, with the functions that run it.
struct ProfiledModel<'a> {
    functions: &'a Functions,
    source: &'a ModelArgs,
    inspection: &'a Inspection,
    dtype: &'a str,
    grid: &'a Grid,
    below_one: BelowOne,
}

impl ProfiledModel<'_> {
    /// Returns whether functions of this role are measured with less than one vCPU.
    fn below_one(&self, role: Role) -> bool {
        self.functions.quotas
            && match role {
                Role::Main => self.below_one.main,
                Role::Remote => self.below_one.remote,
            }
    }

    /// Returns the gate of the measurements.
    fn gate(&self) -> &Gate {
        &self.functions.gate
    }

    /// Returns the resident bytes of all weights.
    fn weight_bytes(&self) -> f64 {
        self.inspection.resident_total_bytes(self.dtype) as f64
    }

    /// Converts stored `bytes` to resident bytes in the compute dtype.
    fn resident_bytes(&self, bytes: u64) -> f64 {
        self.inspection.resident_bytes(bytes, self.dtype) as f64
    }

    /// Returns the resident bytes of `count` experts.
    fn resident_experts(&self, count: usize) -> f64 {
        count as f64 * self.inspection.resident_expert_bytes(self.dtype) as f64
    }

    /// Returns the dtype arguments of all functions. The main function also needs [`Self::dense_precision`].
    fn precision(&self) -> Vec<OsString> {
        let mut arguments = vec!["--dtype".into(), self.dtype.into()];
        if let Some(experts) = self.inspection.experts_dtype {
            arguments.extend(["--experts-dtype".into(), experts.name().into()]);
        }
        arguments
    }

    /// Returns the additional dtype arguments of a main function.
    fn dense_precision(&self) -> [OsString; 2] {
        let dense_dtype = self.inspection.dense_dtype.map_or(self.dtype, |quantised| quantised.name());
        ["--dense-dtype".into(), dense_dtype.into()]
    }
}
