//! Input and output of the pure step, for processes and pods alike.
//!
//! Facts that only one side has come in as values: the earliest start of a place follows from the restart memory or
//! from the names of pods, the generation that main functions follow from calls or from a durable copy.

use crate::time::Time;
use remoe_process::Role;
use remoe_proto::v1::LayerExperts;
use std::collections::BTreeSet;
use std::time::Duration;

/// Input of a step. `E` is what a generation says of one remote function.
#[derive(Debug, Clone)]
pub struct StepInput<'a, E> {
    /// Desired functions, in their start order.
    pub parts: Vec<ReplicaGroup<'a>>,
    /// Existing functions, oldest first where that is known.
    pub instances: Vec<Instance<'a, E>>,
    /// Routing that main functions of the desired shape were told. Absent if they can be told nothing now.
    pub told: Option<PushedRouting<E>>,
    /// Set if nothing is to run for now and no request is in flight.
    pub asleep: bool,
    /// Differences between processes and pods.
    pub policy: Policy,
    /// Time of the step, since the origin that all times of the scene share.
    pub now: Time,
}

/// Interchangeable functions.
#[derive(Debug, Clone)]
pub struct ReplicaGroup<'a> {
    /// Role of the functions.
    pub role: Role,
    /// Remote experts that each function hosts.
    pub hosted: &'a [LayerExperts],
    /// Places to fill. Empty if the functions rest: their experts are not missed then.
    pub places: Vec<ReplicaSlot>,
    /// Number of functions needed. The places after the first `needed` exist because of load: nothing waits for them.
    pub needed: usize,
    /// Set if a placement that begins waits for the needed functions.
    pub awaited: bool,
    /// Set if the experts are missed once none of these functions is left.
    pub missed: bool,
}

/// Place of one function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaSlot {
    /// Name of the place.
    pub name: String,
    /// Earliest time to fill the place again, after what became of the functions before.
    pub not_before: Time,
}

/// A started function.
#[derive(Debug, Clone)]
pub struct Instance<'a, E> {
    /// Name of the place that it fills.
    pub place: &'a str,
    /// Number of functions that filled the place before it. Absent if that is not known.
    pub incarnation: Option<u32>,
    /// State of the function.
    pub state: InstanceState,
    /// Purpose of the function.
    pub duty: FunctionPurpose<E>,
}

impl<E> Instance<'_, E> {
    /// Reports if it serves, or can.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.state, InstanceState::Sound { ready: true, .. })
    }
}

/// State of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstanceState {
    /// The function stays.
    Sound {
        /// Set if it serves, or can.
        ready: bool,
        /// Set if a cause that a replacement would meet as well keeps it from that.
        hindered: bool,
    },
    /// The function is to be replaced.
    Faulty {
        /// Set if the fault is a conclusion from outside: the function may work all the same.
        presumed: bool,
    },
    /// It was asked to end.
    Leaving,
    /// Nothing of it runs.
    Ended {
        /// Set if it refused to start, and a replacement would refuse as well.
        refused: bool,
    },
}

/// Purpose of a function, and what is known of it for that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FunctionPurpose<E> {
    /// A main function.
    Main {
        /// Set if it is of the desired shape.
        current: bool,
        /// Set if there is a generation that main functions of its shape are to have in force.
        told: bool,
        /// Routing that it has in force.
        follows: FollowedRouting,
    },
    /// A remote function.
    Remote {
        /// The function as a generation names it. Absent if it cannot be reached.
        endpoint: Option<E>,
        /// Set if any generation that main functions were told leads to it.
        routed: bool,
    },
}

/// Routing that a main function acts on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FollowedRouting {
    /// No routing: it calls no remote function.
    Nothing,
    /// The routing that it was told, as far as that matters to remote functions.
    Told,
    /// Another routing, or an unknown one: any remote function may be in use.
    Other,
}

/// Routing that main functions of the desired shape were told.
#[derive(Debug, Clone)]
pub struct PushedRouting<E> {
    /// Endpoints of the generation of the desired placement. Absent if there is no such generation.
    pub endpoints: Option<BTreeSet<E>>,
    /// Set if that generation is right in all else.
    pub stands: bool,
    /// Largest number of any generation so far.
    pub newest: u64,
}

/// Differences between processes and pods, and between deployments of either.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// Start of a replacement relative to the function that is lost.
    pub replacement: Replacement,
    /// Source of health reports.
    pub sight: HealthSource,
    /// Treatment of main functions of another shape.
    pub succession: MainReplacement,
    /// Number of functions presumed lost that may be replaced now.
    pub replacements: usize,
    /// Number of remote functions that may start at the same time.
    pub starts_at_once: usize,
    /// Drain time of an unwanted function. Absent for the grace period that it was made with.
    pub drain: Option<Duration>,
    /// Drain time of a faulty function. Absent for the grace period that it was made with.
    pub faulty_drain: Option<Duration>,
}

/// Start of a replacement relative to the function that is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replacement {
    /// In its place, once nothing of it is left: two may not fit into the memory of one machine.
    InPlace,
    /// Beside it, after a pause: a cluster has room, and a function that only seems lost may serve meanwhile.
    Beside,
}

/// Source of health reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthSource {
    /// Probes of the caller itself: a generation names functions as soon as they are ready.
    Own,
    /// Late reports of others: a faltering function stays named until it is lost. While experts have lost all of their
    /// functions, the generation stays as it is.
    Reported,
}

/// Treatment of main functions of another shape than the desired one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MainReplacement {
    /// They serve until the desired main functions do.
    Surge,
    /// There is no room for both: the desired main functions start when the others have ended.
    Recreate {
        /// Set if nothing else would keep the desired main functions from starting.
        prepared: bool,
    },
}

/// Outcome of a step. Functions are named by their index in the scene.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepOutcome<E> {
    /// Functions that end, in their order.
    pub ends: Vec<(usize, EndAction)>,
    /// Functions to start, in this order.
    pub starts: Vec<Start>,
    /// Generation that main functions are told from now on. Absent if nothing changes.
    pub tell: Option<RoutingPush<E>>,
    /// Set if main functions of the desired shape serve: main functions of other shapes are told nothing any more.
    pub succeeded: bool,
    /// Latest time of the next step, if only time has to pass.
    pub look_again: Option<Time>,
    /// Set if everything is as desired.
    pub settled: bool,
}

/// End of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndAction {
    /// Ask it to end within this time; if absent, within the grace period that it was made with.
    Stop(Option<Duration>),
    /// Acknowledge that it ended.
    Forget,
    /// Acknowledge that it ended; another attempt will not help.
    GiveUp,
}

/// A function to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Start {
    /// Index of its part.
    pub part: usize,
    /// Index of its place in the part.
    pub place: usize,
    /// Index of the faulty function that it replaces, if that is still there.
    pub instead_of: Option<usize>,
}

/// A generation to tell main functions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutingPush<E> {
    /// Number of the generation, larger than any before.
    pub number: u64,
    /// Endpoints that it leads to.
    pub endpoints: BTreeSet<E>,
}
