//! Function processes under measurement: started one at a time, their vCPUs changed while they run.

use super::gate::Gate;
use crate::exit::CliError;
use crate::flags::Backend;
use crate::output::progress::Progress;
use crate::programs;
use remoe_process::Role;
use remoe_proto::v1::expert_function_client::ExpertFunctionClient;
use remoe_proto::v1::{DescribeRequest, FunctionDescription};
use remoe_rollout::control;
use remoe_rollout::{
    Cgroups, FunctionId, FunctionSpec, Launcher, LogLine, Phase, ProcessLauncher, ResourceLimits,
};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// A function that does not listen after this long never will.
const START_LIMIT: Duration = Duration::from_secs(600);

/// Starts functions for measurements. Its methods block: call them from a thread of their own.
pub(super) struct Functions {
    runtime: Handle,
    launcher: ProcessLauncher,
    progress: Arc<Progress>,
    /// Quotas limit vCPUs; otherwise only numbers of threads do.
    pub(super) quotas: bool,
    /// Memory that a function may take: the machine's.
    memory_bytes: u64,
    /// When measurements may run.
    pub(super) gate: Arc<Gate>,
}

/// A function that listens.
pub(super) struct Running<'f> {
    functions: &'f Functions,
    id: FunctionId,
    pub(super) grpc: SocketAddr,
    pid: Option<u32>,
    /// From the order to the announcement.
    pub(super) start: Duration,
}

impl Functions {
    /// With control groups where they are permitted; says so where they are not.
    pub(super) fn new(
        progress: &Arc<Progress>,
        memory_bytes: u64,
        backend: Option<Backend>,
        device: &str,
        gate: Arc<Gate>,
    ) -> Result<Self, CliError> {
        let log = progress.clone();
        let launcher = ProcessLauncher::new(
            programs::find(backend, device)?,
            START_LIMIT,
            Arc::new(move |line: LogLine<'_>| log.log(line)),
        )
        .map_err(|error| CliError::runtime(error.to_string()))?;
        let cgroups = Cgroups::find();
        if let Err(error) = &cgroups {
            progress.line(&format!("cannot set CPU quotas ({error}); using threads as vCPUs"));
        }
        let quotas = cgroups.is_ok();
        let launcher = match cgroups {
            Ok(cgroups) => launcher.with_limits(cgroups),
            Err(_) => launcher,
        };
        Ok(Self {
            runtime: Handle::current(),
            launcher,
            progress: progress.clone(),
            quotas,
            memory_bytes,
            gate,
        })
    }

    /// Says `what` to the user who asked for the profile.
    pub(super) fn tell(&self, what: &str) {
        self.progress.line(what);
    }

    /// Starts a function and waits until it listens.
    pub(super) fn start(
        &self,
        role: Role,
        arguments: Vec<OsString>,
        vcpus: f64,
    ) -> Result<Running<'_>, CliError> {
        let spec = FunctionSpec {
            name: format!("profiled-{}", if role == Role::Main { "main" } else { "remote" }),
            role,
            arguments,
            environment: Vec::new(),
            http: None,
            hosted: Vec::new(),
            limits: self
                .quotas
                .then(|| ResourceLimits { cpu_millis: millis(vcpus), memory_bytes: self.memory_bytes }),
        };
        let (started, held_up) = (Instant::now(), self.gate.held_up());
        let found = self.runtime.block_on(async {
            let id =
                self.launcher.start(&spec).await.map_err(|error| CliError::runtime(error.to_string()))?;
            let mut known = None;
            loop {
                let list = self.launcher.list().await;
                let Some(observed) = list.into_iter().find(|observed| observed.id == id) else {
                    known.into_iter().for_each(|pid| self.gate.ending(pid));
                    return Err(CliError::runtime(format!("cannot reach {}: it ended", spec.name)));
                };
                if let Some(pid) = observed.pid.filter(|_| known.is_none()) {
                    known = Some(pid);
                    self.gate.started(pid);
                }
                match observed.phase {
                    Phase::Listening { grpc, .. } => return Ok((id, grpc, observed.pid)),
                    Phase::Ended(ending) => {
                        known.into_iter().for_each(|pid| self.gate.ending(pid));
                        self.launcher.stop(&id, Duration::ZERO).await;
                        return Err(CliError::runtime(format!("{}: {ending}", spec.name)));
                    }
                    Phase::Starting | Phase::Stopping => self.launcher.changed().await,
                }
            }
        });
        let (id, grpc, pid) = found?;
        let start = started.elapsed().saturating_sub(self.gate.held_up() - held_up);
        Ok(Running { functions: self, id, grpc, pid, start })
    }
}

impl Running<'_> {
    /// Limits it to `vcpus` from now on; without quotas it keeps what its threads use.
    pub(super) fn limit(&self, vcpus: f64) -> Result<(), CliError> {
        let limited = self.functions.launcher.limit_cpu(&self.id, millis(vcpus));
        limited.map(|_limited| ()).map_err(|error| CliError::runtime(error.to_string()))
    }

    /// Asks a remote function to describe itself.
    pub(super) fn describe_remote(&self) -> Result<FunctionDescription, CliError> {
        let described = async {
            let mut client = ExpertFunctionClient::new(control::channel(self.grpc)?);
            let answer = tokio::time::timeout(START_LIMIT, client.describe(DescribeRequest {})).await;
            let late = |_elapsed| CliError::runtime("cannot describe the remote function: no answer in time");
            Ok(answer.map_err(late)??.into_inner())
        };
        self.functions.runtime.block_on(described)
    }

    /// Returns the CPU time of its threads so far.
    pub(super) fn cpu_seconds(&self) -> Option<f64> {
        crate::machine::cpu_seconds(self.pid?)
    }

    /// The most memory that it had resident so far, in bytes.
    pub(super) fn peak_bytes(&self) -> Option<f64> {
        crate::machine::peak_bytes(self.pid?)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.pid.into_iter().for_each(|pid| self.functions.gate.ending(pid));
        self.functions.runtime.block_on(self.functions.launcher.stop(&self.id, Duration::ZERO));
    }
}

fn millis(vcpus: f64) -> u64 {
    // Small and positive.
    (vcpus * 1000.0).round() as u64
}
