//! Functions that run for a model, as their launcher reports them, and the state that the gateway wants of them.

use crate::connector::function_uri;
use crate::cost_accounting::Billing;
use crate::timeline::WakeMarks;
use axum::http::uri::InvalidUri;
use axum::http::{HeaderValue, Uri};
use remoe_autoscale::scale_to_zero::ScalingPhase;
use remoe_proto::identity::Identity;
use serde::Serialize;
use std::net::SocketAddr;
use std::sync::Arc;

/// Remote group that sleeps or is being started while the main function runs. The main function's own placement may
/// not list it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InactiveGroup {
    /// Name such as `group-0` or `layer-3`.
    pub name: String,
    /// Experts of the group, as `LAYER:FIRST-LAST,..`.
    pub experts: String,
    /// Set if the group sleeps.
    pub asleep: bool,
}

/// Main function that answers requests for a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backend {
    /// Id, never used again for another backend.
    pub id: u64,
    /// Address of its HTTP server.
    pub address: SocketAddr,
    /// Identity that the server must prove; `None`: any process may answer, in plaintext.
    pub identity: Option<Identity>,
    /// Request slots. Further requests wait in the gateway's fair queue.
    pub capacity: usize,
    /// Value of the `Authorization` header that the server expects.
    pub authorization: Option<HeaderValue>,
    /// Prices of the main function and its remote functions; `None` if costs are not recorded.
    pub billing: Option<Arc<Billing>>,
}

impl Backend {
    /// Returns the URI of `target` at this backend.
    pub(crate) fn uri(&self, target: &str) -> Result<Uri, InvalidUri> {
        function_uri(self.address, self.identity.as_ref(), target)
    }
}

/// Function as `/status` lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FunctionLine {
    /// Name of the function in its deployment.
    pub name: String,
    /// Name of its state.
    pub state: &'static str,
    /// Process id, if it is a process.
    pub pid: Option<u32>,
}

/// Functions that run for a model, as its launcher reports them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunningFunctions {
    /// Number of the latest [`LauncherOrder`] that the launcher had received.
    pub order: u64,
    /// Main functions that take requests.
    pub backends: Vec<Backend>,
    /// Times of the latest start.
    pub wake: WakeMarks,
    /// All functions.
    pub functions: Vec<FunctionLine>,
}

/// State that the gateway wants of a model's functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DesiredState {
    /// All functions run.
    Awake,
    /// All functions run, and the launcher reports through [`Model::rechecked`] how many requests the engines have.
    Recheck,
    /// No function runs.
    Asleep,
}

/// Numbered order to a launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LauncherOrder {
    /// Grows with every change.
    pub order: u64,
    /// State to reach.
    pub wanted: DesiredState,
}

/// Operator's decision about a model, for a gateway that launches no functions itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Directive {
    /// Phase of the model. `Active` takes effect once there is a backend; until then the model is `Waking`.
    pub phase: ScalingPhase,
    /// Number of the decision: `turn` of the `MoEDemand`.
    pub turn: u64,
}

/// Load of a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ModelLoad {
    /// Requests that wait.
    pub waiting: usize,
    /// Requests that functions work on.
    pub in_flight: usize,
    /// Number of the latest [`Directive`] that the model had when these requests were counted.
    pub turn: u64,
}

impl ModelLoad {
    /// Reports if any request waits or is served.
    pub fn is_busy(self) -> bool {
        self.waiting + self.in_flight > 0
    }
}
