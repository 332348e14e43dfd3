//! The pure step for processes: builds their scene and translates its outcome into actions.
//!
//! The caller is the parent of the processes: it sees an end at once, asks for health itself, remembers when it last
//! started which function, and is the only one that decides.

use crate::action::{Action, Route};
use crate::launcher::{FunctionId, FunctionPhase, FunctionSpec, ObservedFunction};
use crate::memory::RestartMemory;
use crate::scene::{
    self, EndAction, FollowedRouting, FunctionPurpose, HealthSource, InstanceState, MainReplacement, Policy,
    PushedRouting, Replacement, ReplicaGroup, ReplicaSlot, StepInput,
};
use crate::step::step;
use crate::time::Time;
use remoe_process::Role;
use remoe_proto::v1::LayerExperts;
use std::collections::BTreeSet;
use std::time::Duration;

/// Desired state of a deployment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Desired {
    /// Functions, each with a name of its own.
    pub functions: Vec<FunctionSpec>,
    /// Set if nothing is to run for now: the functions keep their places and start when this is false again. The caller
    /// sets it only while no request is in flight.
    pub asleep: bool,
    /// Places of remote functions that are not to run for now although the main function does. No route leads to them,
    /// so the main function loads their experts itself.
    pub resting: BTreeSet<String>,
    /// Set once it is decided which experts are remote. Before that, functions start, and no generation is put in
    /// force.
    pub placed: bool,
    /// Number of the placement. A placement that replaces another is put in force when all of its functions are ready;
    /// until then the other one stays.
    pub revision: u32,
    /// Remote experts of each layer, as the main function is told.
    pub remote: Vec<LayerExperts>,
    /// The plan behind `remote` with its problem, as JSON. Empty if the placement was not planned.
    pub account: String,
    /// Largest number of remote functions that start at the same time, in their order among `functions`. Absent for all
    /// of them. After a sleep, a generation waits for the first ones, as many as this; the main function stands in for
    /// the experts of the others until they are there.
    pub starts_at_once: Option<usize>,
    /// Drain time of a function that is no longer wanted.
    pub drain: Duration,
    /// Bounds on waiting before a fault is assumed.
    pub patience: RolloutTimeouts,
}

impl Desired {
    /// Reports if a function is to run at the place now.
    fn wants(&self, place: &str) -> bool {
        !self.asleep && self.functions.iter().any(|spec| spec.name == place && !self.rests(spec))
    }

    /// Reports if the function is to sleep beside a main function that runs. A main function never rests alone.
    pub(crate) fn rests(&self, spec: &FunctionSpec) -> bool {
        spec.role == Role::Remote && self.resting.contains(&spec.name)
    }
}

/// Bounds on waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RolloutTimeouts {
    /// Longest time without an answer to a probe before a remote function is ended.
    pub remote_silence: Duration,
    /// Longest time without an answer before a main function is ended; longer, because ending it costs requests.
    pub main_silence: Duration,
    /// Longest time for a function that answers to be unready before it is ended, and for a generation to come into
    /// force before it counts as failed.
    pub ready: Duration,
}

impl RolloutTimeouts {
    /// The usual bounds, with `ready` as given.
    pub fn with_ready(ready: Duration) -> Self {
        Self { remote_silence: Duration::from_secs(12), main_silence: Duration::from_secs(15), ready }
    }
}

/// A function as its launcher and its probes see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// State that the launcher reports.
    pub observed: ObservedFunction,
    /// Time of its last answer to a probe, or of the start of listening.
    pub answered: Time,
    /// Time since when it has not been ready. Absent if it is ready.
    pub unready_since: Option<Time>,
}

/// Returns the actions to take at `now`, in this order.
pub fn decide(desired: &Desired, instances: &[Instance], memory: &RestartMemory, now: Time) -> Vec<Action> {
    let faults: Vec<Option<String>> = instances.iter().map(|it| fault(desired, it, memory, now)).collect();
    let listening = |(instance, fault): &(&Instance, &Option<String>)| {
        let ObservedFunction { name, role, phase, .. } = &instance.observed;
        *role == Role::Main
            && matches!(phase, FunctionPhase::Listening { .. })
            && fault.is_none()
            && desired.wants(name)
    };
    // The main function that puts generations in force.
    let main = instances.iter().zip(&faults).find(listening).map(|(main, _)| &main.observed.id);
    let in_force = memory.in_force().map(|(_, route)| route).filter(|route| main == Some(&route.main));
    let is_out = |instance: &Instance, fault: &Option<String>| {
        fault.is_some()
            || matches!(instance.observed.phase, FunctionPhase::Stopping | FunctionPhase::Ended(_))
    };
    let mut first = if memory.settled() { at_once(desired) } else { usize::MAX };
    let parts = desired.functions.iter().map(|spec| {
        // The first generation waits for everything, the first after a sleep for all that start at the same time as the
        // main function and have not failed.
        let is_first = spec.role == Role::Remote && !desired.rests(spec) && first > 0;
        first -= usize::from(is_first);
        let failed = instances
            .iter()
            .zip(&faults)
            .any(|(it, fault)| it.observed.name == spec.name && is_out(it, fault));
        let may_come = || !memory.settled() || memory.wakes(&spec.name, failed);
        let place = || ReplicaSlot { name: spec.name.clone(), not_before: memory.not_before(&spec.name) };
        ReplicaGroup {
            role: spec.role,
            hosted: &spec.hosted,
            places: if desired.rests(spec) { Vec::new() } else { vec![place()] },
            needed: usize::from(!desired.rests(spec)),
            awaited: in_force.is_some() || (is_first && may_come()),
            missed: true,
        }
    });
    let route = |endpoints| {
        let revision = desired.revision;
        main.map(|main| Route { revision, main: main.clone(), endpoints })
    };
    let told = main.filter(|_| desired.placed && memory.may_push(now)).map(|_| PushedRouting {
        endpoints: in_force
            .filter(|route| route.revision == desired.revision)
            .map(|route| route.endpoints.clone()),
        stands: true,
        newest: memory.newest(),
    });
    let is_left = |main: &FunctionId| {
        let left = instances.iter().filter(|it| !matches!(it.observed.phase, FunctionPhase::Ended(_)));
        left.map(|it| &it.observed.id).any(|id| id == main)
    };
    let outcome = step(&StepInput {
        parts: parts.collect(),
        instances: instances
            .iter()
            .zip(&faults)
            .map(|(it, fault)| seen(it, fault.is_some(), memory, is_left))
            .collect(),
        told,
        asleep: desired.asleep,
        policy: Policy {
            replacement: Replacement::InPlace,
            sight: HealthSource::Own,
            succession: MainReplacement::Surge,
            replacements: usize::MAX,
            starts_at_once: at_once(desired),
            // Who sleeps has nothing to drain, and may be woken before a drain would end.
            drain: Some(if desired.asleep { Duration::ZERO } else { desired.drain }),
            faulty_drain: Some(Duration::ZERO),
        },
        now,
    });
    let mut ends = outcome.ends;
    if desired.asleep {
        // Main functions first: one that runs on would report remote functions that end before it.
        let is_main =
            |at: usize| instances.get(at).is_some_and(|instance| instance.observed.role == Role::Main);
        ends.sort_by_key(|(at, _)| !is_main(*at));
    }
    let ends = ends.into_iter().filter_map(|(at, end)| {
        let ObservedFunction { id, name, phase, .. } = instances.get(at)?.observed.clone();
        Some(match (end, phase) {
            (EndAction::GiveUp, FunctionPhase::Ended(ending)) => Action::GiveUp { id, name, ending },
            (_, FunctionPhase::Ended(ending)) => Action::Forget { id, name, ending },
            (EndAction::Stop(grace), _) => Action::Stop {
                id,
                name,
                grace: grace.unwrap_or(desired.drain),
                fault: faults.get(at)?.clone(),
            },
            _ => return None,
        })
    });
    let start =
        |start: &scene::Start| Some(Action::Start { name: desired.functions.get(start.part)?.name.clone() });
    let starts = outcome.starts.iter().filter_map(start);
    let told = outcome
        .tell
        .and_then(|tell| Some(Action::Route { generation: tell.number, route: route(tell.endpoints)? }));
    ends.chain(starts).chain(told).collect()
}

/// Remote functions that may start at the same time.
fn at_once(desired: &Desired) -> usize {
    desired.starts_at_once.map_or(usize::MAX, |most| most.max(1))
}

/// A function as the step sees it.
fn seen<'a>(
    instance: &'a Instance,
    is_faulty: bool,
    memory: &RestartMemory,
    is_left: impl Fn(&FunctionId) -> bool,
) -> scene::Instance<'a, FunctionId> {
    let ObservedFunction { id, name, role, phase, .. } = &instance.observed;
    let listens = matches!(phase, FunctionPhase::Listening { .. });
    let state = match phase {
        // Killed from outside is chance; an exit of its own would be repeated.
        FunctionPhase::Ended(ending) => InstanceState::Ended {
            refused: (ending.code.is_some() || ending.cause.is_some()) && !memory.settled(),
        },
        FunctionPhase::Stopping => InstanceState::Leaving,
        FunctionPhase::Starting | FunctionPhase::Listening { .. } if is_faulty => {
            InstanceState::Faulty { presumed: false }
        }
        FunctionPhase::Starting | FunctionPhase::Listening { .. } => {
            InstanceState::Sound { ready: listens && instance.unready_since.is_none(), hindered: false }
        }
    };
    let follows = memory.in_force().is_some_and(|(_, route)| route.main == *id);
    let duty = match role {
        Role::Main => FunctionPurpose::Main {
            current: true,
            told: true,
            follows: if follows { FollowedRouting::Told } else { FollowedRouting::Nothing },
        },
        Role::Remote => {
            FunctionPurpose::Remote { endpoint: Some(id.clone()), routed: memory.routes_to(id, is_left) }
        }
    };
    scene::Instance { place: name, incarnation: None, state, duty }
}

/// Why a function that is wanted is to be ended, where it is.
fn fault(desired: &Desired, instance: &Instance, memory: &RestartMemory, now: Time) -> Option<String> {
    let Desired { patience, .. } = desired;
    let ObservedFunction { id, name, phase, .. } = &instance.observed;
    let listens = matches!(phase, FunctionPhase::Listening { .. });
    // Its launcher bounds how long it may start, and the push of a generation has its own deadline.
    if !listens || !desired.wants(name) || memory.pushes_to(id) {
        return None;
    }
    let allowed = match instance.observed.role {
        Role::Main => patience.main_silence,
        Role::Remote => patience.remote_silence,
    };
    let silent = now.saturating_sub(instance.answered);
    if silent > allowed {
        return Some(format!("unresponsive for {:.1} s", silent.as_secs_f64()));
    }
    let unready = now.saturating_sub(instance.unready_since?);
    (unready > patience.ready).then(|| format!("not ready for {:.1} s", unready.as_secs_f64()))
}
