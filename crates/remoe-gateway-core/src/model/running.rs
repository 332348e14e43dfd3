//! What runs for a model, as who keeps its functions says, and what is wanted of them.

use crate::books::Billing;
use crate::connector::uri;
use crate::timeline::WakeMarks;
use axum::http::uri::InvalidUri;
use axum::http::{HeaderValue, Uri};
use remoe_autoscale::scale_to_zero::Phase;
use remoe_proto::identity::Identity;
use serde::Serialize;
use std::net::SocketAddr;
use std::sync::Arc;

/// A remote group that the main function may say nothing of: it sleeps beside it, or is being started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApartGroup {
    /// `group-0`, or `layer-3`.
    pub name: String,
    /// Its experts, as `LAYER:FIRST-LAST,..`.
    pub experts: String,
    /// Whether it sleeps.
    pub asleep: bool,
}

/// Something that answers for a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backend {
    /// Differs from that of every other one there was.
    pub id: u64,
    /// Where it speaks HTTP.
    pub address: SocketAddr,
    /// Who it has to be; nobody in particular, in plaintext, where there is none.
    pub identity: Option<Identity>,
    /// Requests that it has at the same time; further ones wait here, where turns are fair.
    pub room: usize,
    /// What it wants to see as `Authorization`.
    pub authorization: Option<HeaderValue>,
    /// What its functions cost; none where nobody asks.
    pub billing: Option<Arc<Billing>>,
}

impl Backend {
    /// `target` there.
    pub(crate) fn uri(&self, target: &str) -> Result<Uri, InvalidUri> {
        uri(self.address, self.identity.as_ref(), target)
    }
}

/// A function, as people are shown it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FunctionLine {
    /// Its place.
    pub name: String,
    /// What it is doing.
    pub state: &'static str,
    /// Its process, where there is one.
    pub pid: Option<u32>,
}

/// What runs for a model, as its launcher says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Running {
    /// The number of the [`Want`] that this follows.
    pub order: u64,
    /// What takes requests.
    pub backends: Vec<Backend>,
    /// How the latest start went.
    pub wake: WakeMarks,
    /// All functions.
    pub functions: Vec<FunctionLine>,
}

/// What is wanted of a launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// The functions run.
    Awake,
    /// They run, and the launcher says through [`Model::rechecked`] how many requests the engine has.
    Recheck,
    /// Nothing runs.
    Asleep,
}

/// A numbered order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Want {
    /// Grows with every change.
    pub order: u64,
    /// What is wanted.
    pub wanted: Wanted,
}

/// What somebody else decided about a model, for a gateway that keeps no functions itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Directive {
    /// Where the model is to be; it is `Waking` until there is a backend, whatever is said.
    pub phase: Phase,
    /// The number of the decision.
    pub turn: u64,
}

/// What a model has to do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that wait.
    pub waiting: usize,
    /// Requests that functions work on.
    pub in_flight: usize,
    /// The number of the [`Directive`] that all of these came after, or are counted with.
    pub turn: u64,
}

impl Load {
    /// Whether somebody waits or is served.
    pub fn is_busy(self) -> bool {
        self.waiting + self.in_flight > 0
    }
}
