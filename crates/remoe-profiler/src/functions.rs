//! Function processes under measurement: started one at a time, their vCPUs changed while they run.

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

/// A function that does not listen after this long never will.
const START_LIMIT: Duration = Duration::from_secs(600);

/// Starts functions for measurements. Its methods block: call them from a thread of their own.
pub(crate) struct Functions {
    runtime: Handle,
    launcher: ProcessLauncher,
    reporter: Arc<dyn Reporter>,
    /// Quotas limit vCPUs; otherwise only numbers of threads do.
    pub(crate) quotas: bool,
    /// Memory that a function may take: the machine's.
    memory_bytes: u64,
    /// When measurements may run.
    pub(crate) gate: Arc<Gate>,
}

/// A function that listens.
pub(crate) struct ListeningFunction<'f> {
    functions: &'f Functions,
    id: FunctionId,
    pub(crate) grpc: SocketAddr,
    pid: Option<u32>,
    /// From the order to the announcement.
    pub(crate) start: Duration,
}

impl Functions {
    /// With control groups where they are permitted; says so where they are not.
    pub(crate) fn new(
        programs: Programs,
        reporter: &Arc<dyn Reporter>,
        memory_bytes: u64,
        gate: Arc<Gate>,
    ) -> Result<Self, ProfileError> {
        let log = reporter.clone();
        let launcher =
            ProcessLauncher::new(programs, START_LIMIT, Arc::new(move |line: LogLine<'_>| log.log(line)))?;
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

    /// Says `what` to the user who asked for the profile.
    pub(crate) fn tell(&self, what: &str) {
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
        let (started, held_up) = (Instant::now(), self.gate.held_up());
        let found = self.runtime.block_on(async {
            let id = self.launcher.start(&spec).await?;
            let mut known = None;
            loop {
                let list = self.launcher.list().await;
                let Some(observed) = list.into_iter().find(|observed| observed.id == id) else {
                    known.into_iter().for_each(|pid| self.gate.ending(pid));
                    return Err(ProfileError::Gone { name: spec.name });
                };
                if let Some(pid) = observed.pid.filter(|_| known.is_none()) {
                    known = Some(pid);
                    self.gate.started(pid);
                }
                match observed.phase {
                    FunctionPhase::Listening { grpc, .. } => return Ok((id, grpc, observed.pid)),
                    FunctionPhase::Ended(ending) => {
                        known.into_iter().for_each(|pid| self.gate.ending(pid));
                        self.launcher.stop(&id, Duration::ZERO).await;
                        return Err(ProfileError::Ended { name: spec.name, ending });
                    }
                    FunctionPhase::Starting | FunctionPhase::Stopping => self.launcher.changed().await,
                }
            }
        });
        let (id, grpc, pid) = found?;
        let start = started.elapsed().saturating_sub(self.gate.held_up() - held_up);
        Ok(ListeningFunction { functions: self, id, grpc, pid, start })
    }
}

impl ListeningFunction<'_> {
    /// Limits it to `vcpus` from now on; without quotas it keeps what its threads use.
    pub(crate) fn limit(&self, vcpus: f64) -> Result<(), ProfileError> {
        let limited = self.functions.launcher.limit_cpu(&self.id, millis(vcpus));
        limited.map(|_limited| ()).map_err(ProfileError::from)
    }

    /// Asks a remote function to describe itself.
    pub(crate) fn describe_remote(&self) -> Result<FunctionDescription, ProfileError> {
        let described = async {
            let mut client = ExpertFunctionClient::new(control::channel(self.grpc)?);
            let answer = tokio::time::timeout(START_LIMIT, client.describe(DescribeRequest {})).await;
            let late = |_elapsed| ProfileError::Late { function: "remote function", within: START_LIMIT };
            Ok(answer.map_err(late)??.into_inner())
        };
        self.functions.runtime.block_on(described)
    }

    /// Returns the CPU time of its threads so far.
    pub(crate) fn cpu_seconds(&self) -> Option<f64> {
        crate::machine::cpu_seconds(self.pid?)
    }

    /// The most memory that it had resident so far, in bytes.
    pub(crate) fn peak_bytes(&self) -> Option<f64> {
        crate::machine::peak_bytes(self.pid?)
    }
}

impl Drop for ListeningFunction<'_> {
    fn drop(&mut self) {
        self.pid.into_iter().for_each(|pid| self.functions.gate.ending(pid));
        self.functions.runtime.block_on(self.functions.launcher.stop(&self.id, Duration::ZERO));
    }
}

fn millis(vcpus: f64) -> u64 {
    // Small and positive.
    (vcpus * 1000.0).round() as u64
}
