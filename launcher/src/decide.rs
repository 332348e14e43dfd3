//! The pure step: from what is wanted, what is there and what is remembered to what is to be done.

use crate::launcher::{Ending, FunctionId, FunctionSpec, Observed, Phase};
use crate::memory::{RestartMemory, Route, Time};
use remoe_function::Role;
use remoe_wire::v1::LayerExperts;
use std::collections::BTreeSet;
use std::time::Duration;

/// What is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Desired {
    /// The functions, each with a name of its own.
    pub functions: Vec<FunctionSpec>,
    /// Nothing is to run for now: the functions keep their places and are started when this is false
    /// again. Whoever says so knows that no request is under way.
    pub asleep: bool,
    /// Places of remote functions that are not to run for now although the main function does. No route leads to them, so
    /// that it loads their experts itself.
    pub resting: BTreeSet<String>,
    /// Whether it is decided what is remote. Before that functions start, and no generation is put in
    /// force.
    pub placed: bool,
    /// The number of the placement. One that replaces another is put in force when all of its functions are ready, and
    /// until then the other stays.
    pub revision: u32,
    /// The remote experts of each layer, as the main function is told.
    pub remote: Vec<LayerExperts>,
    /// The plan behind that with its problem, as JSON; empty where nobody planned it.
    pub account: String,
    /// Remote functions that start at the same time, at most, in their order among `functions`; none: all of them. After a
    /// sleep a generation waits for as many, the first ones: for experts of others the main function stands in until they are there.
    pub starts_at_once: Option<usize>,
    /// How long a function that is no longer wanted may drain.
    pub drain: Duration,
    /// How long things may take before something is done about them.
    pub patience: Patience,
}

impl Desired {
    /// Whether the function is to run now. A main function never rests alone.
    pub(crate) fn runs(&self, spec: &FunctionSpec) -> bool {
        !self.asleep && !self.rests(spec)
    }

    /// Whether the function is to sleep beside a main function that runs.
    pub(crate) fn rests(&self, spec: &FunctionSpec) -> bool {
        spec.role == Role::Remote && self.resting.contains(&spec.name)
    }
}

/// Bounds on waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// A remote function that answers no probe for this long is ended.
    pub remote_silence: Duration,
    /// The same for a main function. Ending it costs requests, so it is given longer.
    pub main_silence: Duration,
    /// A function that answers, but is not ready for this long, is ended. A generation that is not
    /// in force after this long counts as failed.
    pub ready: Duration,
}

impl Patience {
    /// The usual bounds, with `ready` as given.
    pub fn with_ready(ready: Duration) -> Self {
        Self { remote_silence: Duration::from_secs(12), main_silence: Duration::from_secs(15), ready }
    }
}

/// A function as its launcher and its probes see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// What the launcher says.
    pub observed: Observed,
    /// When it last answered a probe, or began to listen.
    pub answered: Time,
    /// Since when it has not been ready; `None`: it is.
    pub unready_since: Option<Time>,
}

/// Something to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Start the function that fills the place.
    Start {
        /// The place.
        name: String,
    },
    /// Stop a function.
    Stop {
        /// Which.
        id: FunctionId,
        /// The place that it fills.
        name: String,
        /// How long it may drain; zero: end it.
        grace: Duration,
        /// What is wrong with it; `None`: nothing, it is no longer wanted.
        fault: Option<String>,
    },
    /// Acknowledge the end of a function.
    Forget {
        /// Which.
        id: FunctionId,
        /// The place that it filled.
        name: String,
        /// How it ended.
        ending: Ending,
    },
    /// Have the route's main function put a generation in force.
    Route {
        /// The number of the generation, larger than any before.
        generation: u64,
        /// What it says.
        route: Route,
    },
    /// Nothing works and trying again will not help: the function refused to start.
    GiveUp {
        /// Which; its end is acknowledged with this.
        id: FunctionId,
        /// The place that it was to fill.
        name: String,
        /// What it said.
        ending: Ending,
    },
}

/// What is to be done at `now`, in this order.
pub fn decide(desired: &Desired, instances: &[Instance], memory: &RestartMemory, now: Time) -> Vec<Action> {
    let mut actions = Vec::new();
    let mut in_service: Vec<&Instance> = Vec::new();
    for instance in instances {
        let Observed { id, name, phase, .. } = &instance.observed;
        let wanted = desired.functions.iter().any(|spec| spec.name == *name && desired.runs(spec))
            && in_service.iter().all(|other| other.observed.name != *name);
        match phase {
            Phase::Ended(ending) => {
                let (id, name, ending) = (id.clone(), name.clone(), ending.clone());
                // Killed from outside is chance; an exit of its own would be repeated.
                let refused = ending.code.is_some() || ending.cause.is_some();
                actions.push(if wanted && refused && !memory.settled() {
                    Action::GiveUp { id, name, ending }
                } else {
                    Action::Forget { id, name, ending }
                });
            }
            Phase::Stopping => {}
            Phase::Starting | Phase::Listening { .. } if wanted => {
                match unhealthy(&desired.patience, instance, memory, now) {
                    fault @ Some(_) => actions.push(Action::Stop {
                        id: id.clone(),
                        name: name.clone(),
                        grace: Duration::ZERO,
                        fault,
                    }),
                    None => in_service.push(instance),
                }
            }
            Phase::Starting | Phase::Listening { .. } => {
                if desired.asleep || may_leave(instance, instances, memory) {
                    // Who sleeps has nothing to drain, and may be woken before a drain would end.
                    let grace = if desired.asleep { Duration::ZERO } else { desired.drain };
                    actions.push(Action::Stop { id: id.clone(), name: name.clone(), grace, fault: None });
                }
            }
        }
    }
    if desired.asleep {
        return actions;
    }
    // A place is free when nothing of that name is left, not even on its way out: two of them may
    // not fit into memory.
    let starting = in_service.iter().filter(|instance| {
        let is_ready =
            matches!(instance.observed.phase, Phase::Listening { .. }) && instance.unready_since.is_none();
        instance.observed.role == Role::Remote && !is_ready
    });
    let mut room = at_once(desired).saturating_sub(starting.count());
    for spec in &desired.functions {
        let occupied = instances.iter().any(|instance| instance.observed.name == spec.name);
        if occupied || desired.rests(spec) || now < memory.not_before(&spec.name) {
            continue;
        }
        if spec.role == Role::Remote {
            let Some(left) = room.checked_sub(1) else { continue };
            room = left;
        }
        actions.push(Action::Start { name: spec.name.clone() });
    }
    actions.extend(route(desired, instances, &in_service, memory, now));
    actions
}

/// Remote functions that may start at the same time.
fn at_once(desired: &Desired) -> usize {
    desired.starts_at_once.map_or(usize::MAX, |most| most.max(1))
}

/// Why the function is to be ended, where it is.
fn unhealthy(patience: &Patience, instance: &Instance, memory: &RestartMemory, now: Time) -> Option<String> {
    let listens = matches!(instance.observed.phase, Phase::Listening { .. });
    // Its launcher bounds how long it may start, and the push of a generation has its own deadline.
    if !listens || memory.pushes_to(&instance.observed.id) {
        return None;
    }
    let allowed = match instance.observed.role {
        Role::Main => patience.main_silence,
        Role::Remote => patience.remote_silence,
    };
    let silent = now.saturating_sub(instance.answered);
    if silent > allowed {
        return Some(format!("has not answered for {:.1} s", silent.as_secs_f64()));
    }
    let unready = now.saturating_sub(instance.unready_since?);
    (unready > patience.ready).then(|| format!("has not been ready for {:.1} s", unready.as_secs_f64()))
}

/// A function that is not wanted leaves when no request can be sent to it any more: main functions
/// at once, remote ones when no route leads there or no main function is left.
fn may_leave(instance: &Instance, instances: &[Instance], memory: &RestartMemory) -> bool {
    let main_is_left = || {
        instances.iter().any(|other| {
            other.observed.role == Role::Main && !matches!(other.observed.phase, Phase::Ended(_))
        })
    };
    instance.observed.role == Role::Main || !memory.routes_to(&instance.observed.id) || !main_is_left()
}

/// The generation to be put in force, where the one in force is not what it should be.
fn route(
    desired: &Desired,
    instances: &[Instance],
    in_service: &[&Instance],
    memory: &RestartMemory,
    now: Time,
) -> Option<Action> {
    if !desired.placed {
        return None;
    }
    let listening = |role| {
        in_service.iter().filter(move |instance| {
            instance.observed.role == role && matches!(instance.observed.phase, Phase::Listening { .. })
        })
    };
    let main = listening(Role::Main).next()?;
    let ready: Vec<_> = listening(Role::Remote).filter(|instance| instance.unready_since.is_none()).collect();
    let remote_places =
        || desired.functions.iter().filter(|spec| spec.role == Role::Remote && !desired.rests(spec));
    // The first generation waits for everything, the first after a sleep for all that start at the same time as the
    // main function and have not failed. Later ones take what there is.
    let starts = memory.in_force().is_none_or(|(_, route)| route.main != main.observed.id);
    let is_ready = |spec: &&FunctionSpec| ready.iter().any(|it| it.observed.name == spec.name);
    let may_come = |spec: &FunctionSpec| {
        let is_out = |one: &&Instance| in_service.iter().all(|other| other.observed.id != one.observed.id);
        let failed = instances.iter().filter(is_out).any(|one| one.observed.name == spec.name);
        !memory.settled() || memory.wakes(&spec.name, failed)
    };
    let replaces = !starts && memory.in_force().is_some_and(|(_, route)| route.revision != desired.revision);
    let first = if memory.settled() { at_once(desired) } else { usize::MAX };
    let mut awaited = remote_places()
        .enumerate()
        .filter(|(at, spec)| replaces || (starts && *at < first && may_come(spec)));
    if awaited.any(|(_, spec)| !is_ready(&spec)) {
        return None;
    }
    let route = Route {
        revision: desired.revision,
        main: main.observed.id.clone(),
        endpoints: ready.iter().map(|instance| instance.observed.id.clone()).collect(),
    };
    let generation = memory.next_generation(&route, now)?;
    // Where experts have lost all of their remote functions and nothing else has changed, the generation in
    // force stays: under it the main function serves them by itself until one of them is back.
    if starts || replaces || !ready.iter().all(|instance| memory.routes_to(&instance.observed.id)) {
        return Some(Action::Route { generation, route });
    }
    // What rests is missed by nobody.
    let resting = desired.functions.iter().filter(|spec| desired.rests(spec));
    let there: Vec<&LayerExperts> =
        remote_places().filter(is_ready).chain(resting).flat_map(|spec| &spec.hosted).collect();
    let is_served = |set: &LayerExperts| {
        let hosted = there.iter().filter(|hosted| hosted.layer == set.layer);
        let hosted: BTreeSet<u32> = hosted.flat_map(|hosted| hosted.experts.iter().copied()).collect();
        set.experts.iter().all(|expert| hosted.contains(expert))
    };
    desired.remote.iter().all(is_served).then_some(Action::Route { generation, route })
}
