//! Status of a deployment.

use crate::action::Route;
use crate::decide::Instance;
use crate::launcher::{Ending, FunctionPhase, FunctionSpec};
use remoe_process::Role;
use remoe_proto::v1::LayerExperts;
use serde::Serialize;
use std::net::SocketAddr;

/// Current status of a deployment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// Number of the latest change of the desired state that is included.
    pub change: u64,
    /// Generation that the main function has in force; then the deployment serves.
    pub generation: Option<u64>,
    /// One entry per slot, the main function first; then unwanted slots whose functions still exist.
    pub functions: Vec<FunctionStatus>,
    /// Set when the deployment was given up.
    pub failure: Option<StartFailure>,
    /// Reason why the last push of routing failed, if it did.
    pub routing_problem: Option<String>,
}

/// Status of one slot of a deployment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionStatus {
    /// Name of the slot.
    pub name: String,
    /// Role of the function.
    pub role: Role,
    /// State of the function.
    pub state: FunctionState,
    /// Process id, if there is a process.
    pub pid: Option<u32>,
    /// gRPC address, once it listens.
    pub grpc: Option<SocketAddr>,
    /// HTTP address for clients.
    pub http: Option<SocketAddr>,
    /// Address of `/metrics`.
    pub metrics: Option<SocketAddr>,
    /// Hosted remote experts.
    pub hosted: Vec<LayerExperts>,
}

/// State of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FunctionState {
    /// There is no function; it starts after a pause.
    Waiting,
    /// There is no function, and none is needed until its experts are used.
    Asleep,
    /// It was started and does not listen yet.
    Starting,
    /// It listens and is not ready yet.
    Loading,
    /// It is ready and not in the generation in force yet.
    Ready,
    /// It is in the generation in force.
    Serving,
    /// It is terminating.
    Stopping,
}

impl FunctionState {
    /// Returns the name of the state.
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Asleep => "asleep",
            Self::Starting => "starting",
            Self::Loading => "loading",
            Self::Ready => "ready",
            Self::Serving => "serving",
            Self::Stopping => "stopping",
        }
    }
}

/// Failure of a deployment because a function refused to start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} {ending}")]
pub struct StartFailure {
    /// Name of its slot.
    pub name: String,
    /// Exit of the function, with its last log lines.
    pub ending: Ending,
}

impl FunctionStatus {
    /// Returns the status of the slot of `spec`, filled by `instance`, under the route in force. `rests` is set if
    /// the slot stays empty for now.
    pub(crate) fn of(
        spec: &FunctionSpec,
        instance: Option<&Instance>,
        in_force: Option<&Route>,
        rests: bool,
    ) -> Self {
        let empty_state = if rests { FunctionState::Asleep } else { FunctionState::Waiting };
        let mut status = Self {
            name: spec.name.clone(),
            role: spec.role,
            state: empty_state,
            pid: instance.and_then(|instance| instance.observed.pid),
            grpc: None,
            http: None,
            metrics: None,
            hosted: spec.hosted.clone(),
        };
        let Some(instance) = instance else { return status };
        status.state = match &instance.observed.phase {
            FunctionPhase::Starting => FunctionState::Starting,
            FunctionPhase::Listening { grpc, http, metrics } => {
                (status.grpc, status.http, status.metrics) = (Some(*grpc), *http, *metrics);
                let id = &instance.observed.id;
                let routed = in_force.is_some_and(|route| route.main == *id || route.endpoints.contains(id));
                match (routed, spec.role, instance.unready_since) {
                    (true, Role::Main, _) | (true, Role::Remote, None) => FunctionState::Serving,
                    (false, Role::Remote, None) => FunctionState::Ready,
                    (_, _, _) => FunctionState::Loading,
                }
            }
            FunctionPhase::Stopping => FunctionState::Stopping,
            FunctionPhase::Ended(_) => {
                status.pid = None;
                empty_state
            }
        };
        status
    }
}
