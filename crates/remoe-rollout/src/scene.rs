//! What the pure step sees, of processes and of pods alike, and what it decides.
//!
//! What only one side knows comes in as a value: when a place may be filled again follows from a memory of restarts or from
//! the names of pods, what main functions follow from calls or from a durable copy.

use crate::time::Time;
use remoe_process::Role;
use remoe_proto::v1::LayerExperts;
use std::collections::BTreeSet;
use std::time::Duration;

/// What a step sees. `E` is what a generation says of one remote function.
#[derive(Debug, Clone)]
pub struct Scene<'a, E> {
    /// What is to run, in the order in which it starts.
    pub parts: Vec<Part<'a>>,
    /// Every function that is there, oldest first where that is known.
    pub instances: Vec<Instance<'a, E>>,
    /// What main functions of what is to run were told; none: nothing can be told now.
    pub told: Option<Told<E>>,
    /// Nothing is to run for now, and no request is under way.
    pub asleep: bool,
    /// What is different for processes and pods.
    pub policy: Policy,
    /// When, since an origin that all times here have.
    pub now: Time,
}

/// Functions that are alike: one does for another.
#[derive(Debug, Clone)]
pub struct Part<'a> {
    /// The part that they play.
    pub role: Role,
    /// The remote experts that each hosts.
    pub hosted: &'a [LayerExperts],
    /// Where they are to be. None where they rest: nobody misses what they host.
    pub places: Vec<Place>,
    /// How many are needed. Places beyond the first ones of so many are there because of load: nothing waits for them.
    pub needed: usize,
    /// Whether a placement that begins waits for those that are needed.
    pub awaited: bool,
    /// Whether its experts are missed where none of it is left.
    pub missed: bool,
}

/// Where one function is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its name.
    pub name: String,
    /// When it may be filled again, after what became of those before.
    pub not_before: Time,
}

/// One function that was started.
#[derive(Debug, Clone)]
pub struct Instance<'a, E> {
    /// The place that it fills.
    pub place: &'a str,
    /// How many came before it there; none: nobody can tell.
    pub incarnation: Option<u32>,
    /// How it is.
    pub state: State,
    /// What it is for.
    pub duty: Duty<E>,
}

impl<E> Instance<'_, E> {
    /// Whether it serves, or can.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.state, State::Sound { ready: true, .. })
    }
}

/// How a function is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// There to stay.
    Sound {
        /// Whether it serves, or can.
        ready: bool,
        /// Whether something keeps it from that which another one in its place would meet as well.
        hindered: bool,
    },
    /// There has to be another one in its place.
    Faulty {
        /// It may be at work all the same: that is a conclusion from outside.
        presumed: bool,
    },
    /// Asked to end.
    Leaving,
    /// Nothing of it runs.
    Ended {
        /// It refused to start, and another one would.
        refused: bool,
    },
}

/// What a function is for, and what is known of it for that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Duty<E> {
    /// It is a main function.
    Main {
        /// Whether it is of the shape that is to run.
        current: bool,
        /// Whether there is something that those of its shape are to have in force.
        told: bool,
        /// What it has in force.
        follows: Follows,
    },
    /// It is a remote function.
    Remote {
        /// What a generation says of it; none: it cannot be reached.
        endpoint: Option<E>,
        /// Whether anything that main functions were told leads to it.
        routed: bool,
    },
}

/// What a main function acts on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follows {
    /// On nothing: it calls nobody.
    Nothing,
    /// On what it was told, as far as that matters to remote functions.
    Told,
    /// On something else, or nobody knows: any remote function may be in use.
    Other,
}

/// What main functions were told, of the shape that is to run.
#[derive(Debug, Clone)]
pub struct Told<E> {
    /// Where the generation leads that is of the placement which is to run; none: none is.
    pub endpoints: Option<BTreeSet<E>>,
    /// Whether that generation is right in all else.
    pub stands: bool,
    /// The largest number that any generation had.
    pub newest: u64,
}

/// What is different for processes and pods, and for deployments of either.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// Where another one starts in place of one that is lost.
    pub replacement: Replacement,
    /// Who watches health.
    pub sight: Sight,
    /// What becomes of main functions of another shape.
    pub succession: Succession,
    /// How many functions that are presumed lost may be replaced now.
    pub replacements: usize,
    /// How many remote functions may start at the same time.
    pub starts_at_once: usize,
    /// How long a function may drain that is not wanted; none: as long as it was made for.
    pub drain: Option<Duration>,
    /// The same for one with which something is wrong.
    pub faulty_drain: Option<Duration>,
}

/// Where another function starts in place of one that is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replacement {
    /// In its place, once nothing of it is left: two may not fit into the memory of one machine.
    InPlace,
    /// Beside it, after a pause: a cluster has room, and whoever only seems to be lost may serve meanwhile.
    Beside,
}

/// Who watches health.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sight {
    /// Whoever decides asks functions itself: a generation names those that are ready, as soon as they are.
    Own,
    /// Others, who tell of it late: what falters stays named until it is lost, and while experts have lost all of their
    /// functions the generation stays as it is.
    Reported,
}

/// What becomes of main functions of another shape than the one that is to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Succession {
    /// They serve until those that are to run do.
    Surge,
    /// There is no room for both: those that are to run start when the others have ended.
    Recreate {
        /// Whether nothing else would keep those that are to run from starting.
        prepared: bool,
    },
}

/// What is to be done. Functions go by their index in the scene.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome<E> {
    /// Functions that are over, in their order.
    pub ends: Vec<(usize, End)>,
    /// Functions that are to be started, in this order.
    pub starts: Vec<Start>,
    /// What main functions are to be told from now on; none: no change.
    pub tell: Option<Tell<E>>,
    /// Main functions of the shape that is to run serve: nothing is told any more to those of others.
    pub succeeded: bool,
    /// When to look again at the latest, where only time has to pass.
    pub look_again: Option<Time>,
    /// Whether everything is as it is to be.
    pub settled: bool,
}

/// What becomes of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It is asked to end within this time; none: the one that it was made for.
    Stop(Option<Duration>),
    /// Its end is acknowledged.
    Forget,
    /// The same, and trying again will not help.
    GiveUp,
}

/// A function that is to be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Start {
    /// The index of its part.
    pub part: usize,
    /// The index of its place in that.
    pub place: usize,
    /// The function in whose place it starts, where that is there and faulty.
    pub instead_of: Option<usize>,
}

/// A generation that main functions are to be told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tell<E> {
    /// Its number, larger than any before.
    pub number: u64,
    /// Where it leads.
    pub endpoints: BTreeSet<E>,
}
