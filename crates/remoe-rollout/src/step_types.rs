//! Input and output of the pure step, for processes and pods alike.
//!
//! Facts that only one side has are passed as values. Processes derive the earliest start of a slot from the restart
//! memory, pods from pod names. Processes know the current routing generation from calls, pods from its stored copy.

use crate::time::Time;
use remoe_process::Role;
use remoe_proto::v1::LayerExperts;
use std::collections::BTreeSet;
use std::time::Duration;

/// Input of a step. `E` is the entry of one remote function in a routing generation.
#[derive(Debug, Clone)]
pub struct StepInput<'a, E> {
    /// Desired functions, in their start order.
    pub groups: Vec<ReplicaGroup<'a>>,
    /// Existing functions, oldest first where that is known.
    pub instances: Vec<Instance<'a, E>>,
    /// Routing that was pushed to main functions of the desired specification. Absent if no routing can be pushed
    /// now.
    pub pushed: Option<PushedRouting<E>>,
    /// Set if the deployment is scaled to zero and no request is in flight.
    pub asleep: bool,
    /// Differences between processes and pods.
    pub policy: Policy,
    /// Time of the step, relative to the common origin of all times of the input.
    pub now: Time,
}

/// Group of interchangeable functions.
#[derive(Debug, Clone)]
pub struct ReplicaGroup<'a> {
    /// Role of the functions.
    pub role: Role,
    /// Remote experts that each function hosts.
    pub hosted: &'a [LayerExperts],
    /// Slots of the group. Empty if the group sleeps; then its experts are not missed.
    pub slots: Vec<ReplicaSlot>,
    /// Number of needed functions. Slots after the first `needed` exist because of load; nothing waits for them.
    pub needed: usize,
    /// Set if a new placement waits for the needed functions.
    pub awaited: bool,
    /// Set if routing must keep the group's experts while none of its functions is left.
    pub missed: bool,
}

/// Slot of one function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaSlot {
    /// Name of the slot.
    pub name: String,
    /// Earliest time to fill the slot again, by the back-off.
    pub not_before: Time,
}

/// Started function.
#[derive(Debug, Clone)]
pub struct Instance<'a, E> {
    /// Name of its slot.
    pub slot: &'a str,
    /// Number of earlier functions in this slot. Absent if unknown.
    pub incarnation: Option<u32>,
    /// State of the function.
    pub state: InstanceState,
    /// Purpose of the function.
    pub purpose: FunctionPurpose<E>,
}

impl<E> Instance<'_, E> {
    /// Returns whether it serves or is ready to.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.state, InstanceState::Healthy { ready: true, .. })
    }
}

/// State of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstanceState {
    /// Works, and stays.
    Healthy {
        /// Set if it serves or is ready to.
        ready: bool,
        /// Set if something keeps it from readiness that a replacement would meet as well.
        blocked: bool,
    },
    /// Must be replaced.
    Faulty {
        /// Set if the fault is only presumed from outside: the function may work nevertheless.
        presumed: bool,
    },
    /// Is terminating.
    Terminating,
    /// Has ended.
    Ended {
        /// Set if it refused to start, so that a replacement would refuse as well.
        refused: bool,
    },
}

/// Purpose of a function, with the related state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FunctionPurpose<E> {
    /// A main function.
    Main {
        /// Set if it has the desired specification.
        current: bool,
        /// Set if there is a routing generation for main functions of its specification.
        pushed: bool,
        /// Routing in force.
        followed: FollowedRouting,
    },
    /// A remote function.
    Remote {
        /// Entry of the function in a generation. Absent if it cannot be reached.
        endpoint: Option<E>,
        /// Set if any pushed generation routes to it.
        routed: bool,
    },
}

/// Routing that a main function has in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FollowedRouting {
    /// No routing: it calls no remote function.
    Nothing,
    /// The pushed routing, as far as it matters to remote functions.
    Pushed,
    /// Another routing, or an unknown one: any remote function may be in use.
    Other,
}

/// Routing that was pushed to main functions of the desired specification.
#[derive(Debug, Clone)]
pub struct PushedRouting<E> {
    /// Endpoints of the generation of the desired placement. Absent if there is no such generation.
    pub endpoints: Option<BTreeSet<E>>,
    /// Set if that generation is correct apart from its endpoints.
    pub is_current: bool,
    /// Highest generation number so far.
    pub newest: u64,
}

/// Differences between processes and pods, and between deployments of either.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// Order of a replacement and the lost function.
    pub replacement: Replacement,
    /// Source of health reports.
    pub health_source: HealthSource,
    /// Replacement of main functions of another specification.
    pub main_replacement: MainReplacement,
    /// Number of presumably lost functions that may be replaced now.
    pub replacements: usize,
    /// Maximum number of remote functions that start at the same time.
    pub starts_at_once: usize,
    /// Drain time of an unwanted function. Absent for its own grace period.
    pub drain: Option<Duration>,
    /// Drain time of a faulty function. Absent for its own grace period.
    pub faulty_drain: Option<Duration>,
}

/// Order of a replacement and the lost function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replacement {
    /// The replacement starts after the lost function has ended, since one machine may not have memory for both.
    InPlace,
    /// The replacement starts beside the lost function, after a pause: a cluster has room, and a presumably lost
    /// function may still serve.
    Beside,
}

/// Source of health reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthSource {
    /// Probes of the caller: a generation includes functions as soon as they are ready.
    OwnProbes,
    /// Late reports of others: an unready function stays in the generation until it is lost. While all functions of
    /// some experts are lost, the generation does not change.
    Reported,
}

/// Strategy for replacing main functions of another specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MainReplacement {
    /// The old ones serve until the desired ones do.
    Surge,
    /// There is no room for both: the desired ones start after the old ones have ended.
    Recreate {
        /// Set if nothing else prevents the start of the desired main functions.
        prepared: bool,
    },
}

/// Outcome of a step. Functions are identified by their index in the input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepOutcome<E> {
    /// Functions to end, in this order.
    pub ends: Vec<(usize, EndAction)>,
    /// Functions to start, in this order.
    pub starts: Vec<Start>,
    /// Generation to push to main functions. Absent if routing does not change.
    pub push: Option<RoutingPush<E>>,
    /// Set if main functions of the desired specification serve, so that nothing is pushed to others any more.
    pub succeeded: bool,
    /// Time of the next step, if only time has to pass.
    pub next_step_at: Option<Time>,
    /// Set if everything is as desired.
    pub settled: bool,
}

/// Way to end a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndAction {
    /// Ask it to end within this time; if absent, within its own grace period.
    Stop(Option<Duration>),
    /// Acknowledge that it ended.
    Forget,
    /// Acknowledge that it ended; a retry will not help.
    GiveUp,
}

/// Function to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Start {
    /// Index of its group.
    pub group: usize,
    /// Index of its slot in the group.
    pub slot: usize,
    /// Index of the faulty function that it replaces, if that still exists.
    pub replaces: Option<usize>,
}

/// Routing generation to push to main functions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutingPush<E> {
    /// Number of the generation, higher than any before.
    pub number: u64,
    /// Endpoints of the generation.
    pub endpoints: BTreeSet<E>,
}
