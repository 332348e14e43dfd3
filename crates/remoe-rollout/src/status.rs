//! Status of a deployment.

use crate::action::Route;
use crate::decide::Instance;
use crate::launcher::{Ending, FunctionPhase, FunctionSpec};
use remoe_process::Role;
use remoe_proto::v1::LayerExperts;
use serde::Serialize;
use std::net::SocketAddr;

/// A deployment as it is now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// The number of the latest change of what is wanted that this follows.
    pub change: u64,
    /// The generation that the present main function has in force: the deployment answers.
    pub generation: Option<u64>,
    /// One entry per place, the main function first; at the end places that are no longer wanted and whose functions
    /// are still there.
    pub functions: Vec<FunctionStatus>,
    /// Set when the deployment was given up.
    pub failure: Option<StartFailure>,
    /// Why the last routing was not put in force, where it was not.
    pub routing_problem: Option<String>,
}

/// One place of a deployment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionStatus {
    /// The place.
    pub name: String,
    /// The part that is played there.
    pub role: Role,
    /// State of the function.
    pub state: FunctionState,
    /// Process id, if there is a process.
    pub pid: Option<u32>,
    /// Where it speaks gRPC, once it listens.
    pub grpc: Option<SocketAddr>,
    /// Where it speaks HTTP to users.
    pub http: Option<SocketAddr>,
    /// Where it serves `/metrics`.
    pub metrics: Option<SocketAddr>,
    /// The remote experts that it hosts.
    pub hosted: Vec<LayerExperts>,
}

/// State of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FunctionState {
    /// There is none; it will be started after a pause.
    Waiting,
    /// There is none, and none is needed: it will be started when its experts are asked for.
    Asleep,
    /// It has been started and does not listen yet.
    Starting,
    /// It listens and is not ready.
    Loading,
    /// It is ready and not in the generation in force yet.
    Ready,
    /// It is in the generation in force.
    Serving,
    /// It has been asked to stop.
    Stopping,
}

impl FunctionState {
    /// The state in a word.
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

/// A function that refused to start, and with it the deployment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} {ending}")]
pub struct StartFailure {
    /// The place that it was to fill.
    pub name: String,
    /// Exit of the function, with its last log lines.
    pub ending: Ending,
}

impl FunctionStatus {
    /// Returns the status of the place of `spec`, filled by `instance`, under the route in force; `rests`: nothing is
    /// to fill it now.
    pub(crate) fn of(
        spec: &FunctionSpec,
        instance: Option<&Instance>,
        in_force: Option<&Route>,
        rests: bool,
    ) -> Self {
        let nothing = if rests { FunctionState::Asleep } else { FunctionState::Waiting };
        let mut status = Self {
            name: spec.name.clone(),
            role: spec.role,
            state: nothing,
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
                nothing
            }
        };
        status
    }
}
