//! Functions that run for a model, as reported by what keeps them, and the state that is wanted of them.

use crate::connector::uri;
use crate::cost_accounting::Billing;
use crate::timeline::WakeMarks;
use axum::http::uri::InvalidUri;
use axum::http::{HeaderValue, Uri};
use remoe_autoscale::scale_to_zero::ScalingPhase;
use remoe_proto::identity::Identity;
use serde::Serialize;
use std::net::SocketAddr;
use std::sync::Arc;

/// A remote group that the main function may say nothing of: it sleeps beside it, or is being started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApartGroup {
    /// `group-0`, or `layer-3`.
    pub name: String,
    /// Experts of the group, as `LAYER:FIRST-LAST,..`.
    pub experts: String,
    /// Set if the group sleeps.
    pub asleep: bool,
}

/// Main function that answers requests for a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backend {
    /// Unique among all backends that there ever were.
    pub id: u64,
    /// Address of its HTTP server.
    pub address: SocketAddr,
    /// Identity that it must prove; absent: any process in plaintext.
    pub identity: Option<Identity>,
    /// Requests that it has at the same time; further ones wait here, where turns are fair.
    pub capacity: usize,
    /// Value of the `Authorization` header that it expects.
    pub authorization: Option<HeaderValue>,
    /// Rates of its functions; absent if costs are not recorded.
    pub billing: Option<Arc<Billing>>,
}

impl Backend {
    /// Returns the URI of `target` at this backend.
    pub(crate) fn uri(&self, target: &str) -> Result<Uri, InvalidUri> {
        uri(self.address, self.identity.as_ref(), target)
    }
}

/// Function, as listed for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FunctionLine {
    /// Place of the function.
    pub name: String,
    /// State of the function.
    pub state: &'static str,
    /// Process id, if it is a process.
    pub pid: Option<u32>,
}

/// Functions that run for a model, as its launcher reports them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunningFunctions {
    /// The number of the [`LauncherOrder`] that this follows.
    pub order: u64,
    /// Main functions that take requests.
    pub backends: Vec<Backend>,
    /// How the latest start went.
    pub wake: WakeMarks,
    /// All functions.
    pub functions: Vec<FunctionLine>,
}

/// State that is wanted of a launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DesiredState {
    /// The functions run.
    Awake,
    /// They run, and the launcher says through [`Model::rechecked`] how many requests the engine has.
    Recheck,
    /// Nothing runs.
    Asleep,
}

/// A numbered order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LauncherOrder {
    /// Grows with every change.
    pub order: u64,
    /// State to reach.
    pub wanted: DesiredState,
}

/// Decision about a model that was made elsewhere, for a gateway that keeps no functions itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Directive {
    /// Phase of the model; whatever is said, it is `Waking` until there is a backend.
    pub phase: ScalingPhase,
    /// The number of the decision.
    pub turn: u64,
}

/// Load of a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ModelLoad {
    /// Requests that wait.
    pub waiting: usize,
    /// Requests that functions work on.
    pub in_flight: usize,
    /// The number of the [`Directive`] that all of these came after, or are counted with.
    pub turn: u64,
}

impl ModelLoad {
    /// Reports if any request waits or is served.
    pub fn is_busy(self) -> bool {
        self.waiting + self.in_flight > 0
    }
}
