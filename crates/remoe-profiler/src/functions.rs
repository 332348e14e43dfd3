//! Function processes under measurement. Their CPU limits change while they run.

use crate::Reporter;
use crate::error::ProfileError;
use crate::gate::Gate;
use remoe_process::Role;
use remoe_proto::v1::expert_function_client::ExpertFunctionClient;
use remoe_proto::v1::{DescribeRequest, FunctionDescription};
use remoe_rollout::control;
use remoe_rollout::process::Programs;
use remoe_rollout::{
    Cgroups, FunctionId, FunctionPhase, FunctionSpec, Launcher, LogLine, ProcessLauncher, ResourceLimits,
};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// Timeout for a function to listen.
const START_TIMEOUT: Duration = Duration::from_secs(600);

/// Starter of functions for measurements. Its methods block, so they need their own thread.
pub(crate) struct Functions {
    runtime: Handle,
    launcher: ProcessLauncher,
    reporter: Arc<dyn Reporter>,
    /// Set if CPU quotas limit vCPUs; otherwise only numbers of threads do.
    pub(crate) quotas: bool,
    /// Memory limit of a function: the machine's memory.
    memory_bytes: u64,
    /// Gate of the measurements.
    pub(crate) gate: Arc<Gate>,
}

/// Listening function.
pub(crate) struct ListeningFunction<'f> {
    functions: &'f Functions,
    id: FunctionId,
    pub(crate) grpc: SocketAddr,
    pid: Option<u32>,
    /// Time from its start to its announcement.
    pub(crate) start: Duration,
}

impl Functions {
    /// Creates the starter, with control groups if permitted; otherwise reports that they are not.
    pub(crate) fn new(
        programs: Programs,
        reporter: &Arc<dyn Reporter>,
        memory_bytes: u64,
        gate: Arc<Gate>,
    ) -> Result<Self, ProfileError> {
        let log = reporter.clone();
        let launcher =
            ProcessLauncher::new(programs, START_TIMEOUT, Arc::new(move |line: LogLine<'_>| log.log(line)))?;
        let cgroups = Cgroups::find();
        if let Err(error) = &cgroups {
            reporter.line(&format!("cannot set CPU quotas ({error}); using threads as vCPUs"));
        }
        let quotas = cgroups.is_ok();
        let launcher = match cgroups {
            Ok(cgroups) => launcher.with_limits(cgroups),
            Err(_) => launcher,
        };
        Ok(Self {
            runtime: Handle::current(),
            launcher,
            reporter: reporter.clone(),
            quotas,
            memory_bytes,
            gate,
        })
    }

    /// Reports `what` to the user.
    pub(crate) fn report(&self, what: &str) {
        self.reporter.line(what);
    }

    /// Starts a function and waits until it listens.
    pub(crate) fn start(
        &self,
        role: Role,
        arguments: Vec<OsString>,
        vcpus: f64,
    ) -> Result<ListeningFunction<'_>, ProfileError> {
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
        let (started, total_pause) = (Instant::now(), self.gate.total_pause());
        let found = self.runtime.block_on(async {
            let id = self.launcher.start(&spec).await?;
            let mut known = None;
            loop {
                let list = self.launcher.list().await;
                let Some(observed) = list.into_iter().find(|observed| observed.id == id) else {
                    known.into_iter().for_each(|pid| self.gate.unregister(pid));
                    return Err(ProfileError::Gone { name: spec.name });
                };
                if let Some(pid) = observed.pid.filter(|_| known.is_none()) {
                    known = Some(pid);
                    self.gate.register(pid);
                }
                match observed.phase {
                    FunctionPhase::Listening { grpc, .. } => return Ok((id, grpc, observed.pid)),
                    FunctionPhase::Ended(ending) => {
                        known.into_iter().for_each(|pid| self.gate.unregister(pid));
                        self.launcher.stop(&id, Duration::ZERO).await;
                        return Err(ProfileError::Ended { name: spec.name, ending });
                    }
                    FunctionPhase::Starting | FunctionPhase::Stopping => self.launcher.changed().await,
                }
            }
        });
        let (id, grpc, pid) = found?;
        let start = started.elapsed().saturating_sub(self.gate.total_pause() - total_pause);
        Ok(ListeningFunction { functions: self, id, grpc, pid, start })
    }
}

impl ListeningFunction<'_> {
    /// Sets its CPU limit to `vcpus`; without quotas this has no effect.
    pub(crate) fn limit(&self, vcpus: f64) -> Result<(), ProfileError> {
        let limited = self.functions.launcher.limit_cpu(&self.id, millis(vcpus));
        limited.map(|_limited| ()).map_err(ProfileError::from)
    }

    /// Returns the description of a remote function.
    pub(crate) fn describe_remote(&self) -> Result<FunctionDescription, ProfileError> {
        let described = async {
            let mut client = ExpertFunctionClient::new(control::channel(self.grpc)?);
            let answer = tokio::time::timeout(START_TIMEOUT, client.describe(DescribeRequest {})).await;
            let late = |_elapsed| ProfileError::Late { function: "remote function", within: START_TIMEOUT };
            Ok(answer.map_err(late)??.into_inner())
        };
        self.functions.runtime.block_on(described)
    }

    /// Returns the CPU time of its threads so far in seconds.
    pub(crate) fn cpu_seconds(&self) -> Option<f64> {
        crate::machine::cpu_seconds(self.pid?)
    }

    /// Returns its peak resident memory in bytes.
    pub(crate) fn peak_bytes(&self) -> Option<f64> {
        crate::machine::peak_bytes(self.pid?)
    }
}

impl Drop for ListeningFunction<'_> {
    fn drop(&mut self) {
        self.pid.into_iter().for_each(|pid| self.functions.gate.unregister(pid));
        self.functions.runtime.block_on(self.functions.launcher.stop(&self.id, Duration::ZERO));
    }
}

fn millis(vcpus: f64) -> u64 {
    // `vcpus` is small and positive.
    (vcpus * 1000.0).round() as u64
}
