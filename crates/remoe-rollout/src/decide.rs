//! Pure step for processes: builds its input and converts its outcome into actions.
//!
//! The caller is the parent of the processes: it notices exits at once, probes health itself, remembers the start of
//! each function, and is the only decision maker.

use crate::action::{Action, Route};
use crate::launcher::{FunctionId, FunctionPhase, FunctionSpec, ObservedFunction};
use crate::memory::RestartMemory;
use crate::step::step;
use crate::step_types::{
    self, EndAction, FollowedRouting, FunctionPurpose, HealthSource, InstanceState, MainReplacement, Policy,
    PushedRouting, Replacement, ReplicaGroup, ReplicaSlot, StepInput,
};
use crate::time::Time;
use remoe_process::Role;
use remoe_proto::v1::LayerExperts;
use std::collections::BTreeSet;
use std::time::Duration;

/// Desired state of a deployment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Desired {
    /// Functions with unique names.
    pub functions: Vec<FunctionSpec>,
    /// Set if the deployment is scaled to zero. The functions keep their slots and start when this is false again.
    /// The caller sets it only while no request is in flight.
    pub asleep: bool,
    /// Slots of remote functions that sleep although the main function runs. Nothing is routed to them, so the main
    /// function loads their experts itself.
    pub resting: BTreeSet<String>,
    /// Set when the placement is known. Before that, functions start, but no generation is pushed.
    pub placed: bool,
    /// Number of the placement. A new placement is put in force when all of its functions are ready; until then the
    /// old one stays.
    pub revision: u32,
    /// Remote experts of each layer, for the routing.
    pub remote: Vec<LayerExperts>,
    /// Account of the plan with its problem, as JSON. Empty if the placement was not planned.
    pub account: String,
    /// Maximum number of remote functions that start at the same time, in the order of `functions`; absent for no
    /// limit. After a sleep, a generation waits for this many; the main function computes the experts of the others
    /// until they are ready.
    pub starts_at_once: Option<usize>,
    /// Drain time of an unwanted function.
    pub drain: Duration,
    /// Timeouts after which a function counts as faulty.
    pub timeouts: RolloutTimeouts,
}

impl Desired {
    /// Returns whether a function must run in this slot now.
    fn wants(&self, slot: &str) -> bool {
        !self.asleep && self.functions.iter().any(|spec| spec.name == slot && !self.rests(spec))
    }

    /// Returns whether the function sleeps while the main function runs. A main function never sleeps alone.
    pub(crate) fn rests(&self, spec: &FunctionSpec) -> bool {
        spec.role == Role::Remote && self.resting.contains(&spec.name)
    }
}

/// Timeouts of a rollout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RolloutTimeouts {
    /// Timeout of probes of a remote function.
    pub remote_silence: Duration,
    /// Timeout of probes of a main function; longer, because ending it costs requests.
    pub main_silence: Duration,
    /// Longest time for which an answering function may be unready, and for which a generation may take to come into
    /// force.
    pub ready: Duration,
}

impl RolloutTimeouts {
    /// Returns the default timeouts, with the given `ready`.
    pub fn with_ready(ready: Duration) -> Self {
        Self { remote_silence: Duration::from_secs(12), main_silence: Duration::from_secs(15), ready }
    }
}

/// State of a function from its launcher and its probes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// State that the launcher reports.
    pub observed: ObservedFunction,
    /// Time of its last answer to a probe, or of the start of listening.
    pub answered: Time,
    /// Time since which it is not ready. Absent if it is ready.
    pub unready_since: Option<Time>,
}

/// Returns the actions to take at `now`, in order.
pub fn decide(desired: &Desired, instances: &[Instance], memory: &RestartMemory, now: Time) -> Vec<Action> {
    let faults: Vec<Option<String>> = instances.iter().map(|it| fault(desired, it, memory, now)).collect();
    let listening = |(instance, fault): &(&Instance, &Option<String>)| {
        let ObservedFunction { name, role, phase, .. } = &instance.observed;
        *role == Role::Main
            && matches!(phase, FunctionPhase::Listening { .. })
            && fault.is_none()
            && desired.wants(name)
    };
    // The main function that receives generations.
    let main = instances.iter().zip(&faults).find(listening).map(|(main, _)| &main.observed.id);
    let in_force = memory.in_force().map(|(_, route)| route).filter(|route| main == Some(&route.main));
    let has_ended = |instance: &Instance, fault: &Option<String>| {
        fault.is_some()
            || matches!(instance.observed.phase, FunctionPhase::Stopping | FunctionPhase::Ended(_))
    };
    let mut first = if memory.settled() { max_concurrent_starts(desired) } else { usize::MAX };
    let groups = desired.functions.iter().map(|spec| {
        // The first generation waits for all functions. The first one after a sleep waits for those that start
        // together with the main function and have not failed.
        let is_first = spec.role == Role::Remote && !desired.rests(spec) && first > 0;
        first -= usize::from(is_first);
        let failed = instances
            .iter()
            .zip(&faults)
            .any(|(it, fault)| it.observed.name == spec.name && has_ended(it, fault));
        let expected_after_sleep = || !memory.settled() || memory.wakes(&spec.name, failed);
        let slot = || ReplicaSlot { name: spec.name.clone(), not_before: memory.not_before(&spec.name) };
        ReplicaGroup {
            role: spec.role,
            hosted: &spec.hosted,
            slots: if desired.rests(spec) { Vec::new() } else { vec![slot()] },
            needed: usize::from(!desired.rests(spec)),
            awaited: in_force.is_some() || (is_first && expected_after_sleep()),
            missed: true,
        }
    });
    let route = |endpoints| {
        let revision = desired.revision;
        main.map(|main| Route { revision, main: main.clone(), endpoints })
    };
    let pushed = main.filter(|_| desired.placed && memory.may_push(now)).map(|_| PushedRouting {
        endpoints: in_force
            .filter(|route| route.revision == desired.revision)
            .map(|route| route.endpoints.clone()),
        is_current: true,
        newest: memory.newest(),
    });
    let is_alive = |main: &FunctionId| {
        let left = instances.iter().filter(|it| !matches!(it.observed.phase, FunctionPhase::Ended(_)));
        left.map(|it| &it.observed.id).any(|id| id == main)
    };
    let outcome = step(&StepInput {
        groups: groups.collect(),
        instances: instances
            .iter()
            .zip(&faults)
            .map(|(it, fault)| to_step_instance(it, fault.is_some(), memory, is_alive))
            .collect(),
        pushed,
        asleep: desired.asleep,
        policy: Policy {
            replacement: Replacement::InPlace,
            health_source: HealthSource::OwnProbes,
            main_replacement: MainReplacement::Surge,
            replacements: usize::MAX,
            starts_at_once: max_concurrent_starts(desired),
            // A sleeping deployment has nothing to drain, and may wake before a drain would end.
            drain: Some(if desired.asleep { Duration::ZERO } else { desired.drain }),
            faulty_drain: Some(Duration::ZERO),
        },
        now,
    });
    let mut ends = outcome.ends;
    if desired.asleep {
        // Main functions end first; otherwise they would report remote functions that end before them.
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
    let start = |start: &step_types::Start| {
        Some(Action::Start { name: desired.functions.get(start.group)?.name.clone() })
    };
    let starts = outcome.starts.iter().filter_map(start);
    let pushed = outcome
        .push
        .and_then(|push| Some(Action::Route { generation: push.number, route: route(push.endpoints)? }));
    ends.chain(starts).chain(pushed).collect()
}

/// Returns the maximum number of remote functions that start at the same time.
fn max_concurrent_starts(desired: &Desired) -> usize {
    desired.starts_at_once.map_or(usize::MAX, |most| most.max(1))
}

/// Converts a function to the input of the step.
fn to_step_instance<'a>(
    instance: &'a Instance,
    is_faulty: bool,
    memory: &RestartMemory,
    is_alive: impl Fn(&FunctionId) -> bool,
) -> step_types::Instance<'a, FunctionId> {
    let ObservedFunction { id, name, role, phase, .. } = &instance.observed;
    let is_listening = matches!(phase, FunctionPhase::Listening { .. });
    let state = match phase {
        // A kill from outside is accidental; an exit by itself would be repeated.
        FunctionPhase::Ended(ending) => InstanceState::Ended {
            refused: (ending.code.is_some() || ending.cause.is_some()) && !memory.settled(),
        },
        FunctionPhase::Stopping => InstanceState::Terminating,
        FunctionPhase::Starting | FunctionPhase::Listening { .. } if is_faulty => {
            InstanceState::Faulty { presumed: false }
        }
        FunctionPhase::Starting | FunctionPhase::Listening { .. } => {
            InstanceState::Healthy { ready: is_listening && instance.unready_since.is_none(), blocked: false }
        }
    };
    let followed = memory.in_force().is_some_and(|(_, route)| route.main == *id);
    let purpose = match role {
        Role::Main => FunctionPurpose::Main {
            current: true,
            pushed: true,
            followed: if followed { FollowedRouting::Pushed } else { FollowedRouting::Nothing },
        },
        Role::Remote => {
            FunctionPurpose::Remote { endpoint: Some(id.clone()), routed: memory.routes_to(id, is_alive) }
        }
    };
    step_types::Instance { slot: name, incarnation: None, state, purpose }
}

/// Returns the fault for which a wanted function must end, if any.
fn fault(desired: &Desired, instance: &Instance, memory: &RestartMemory, now: Time) -> Option<String> {
    let Desired { timeouts, .. } = desired;
    let ObservedFunction { id, name, phase, .. } = &instance.observed;
    let is_listening = matches!(phase, FunctionPhase::Listening { .. });
    // The launcher bounds the time of its start, and the push of a generation has its own deadline.
    if !is_listening || !desired.wants(name) || memory.pushes_to(id) {
        return None;
    }
    let timeout = match instance.observed.role {
        Role::Main => timeouts.main_silence,
        Role::Remote => timeouts.remote_silence,
    };
    let silence = now.saturating_sub(instance.answered);
    if silence > timeout {
        return Some(format!("unresponsive for {:.1} s", silence.as_secs_f64()));
    }
    let unready = now.saturating_sub(instance.unready_since?);
    (unready > timeouts.ready).then(|| format!("not ready for {:.1} s", unready.as_secs_f64()))
}
