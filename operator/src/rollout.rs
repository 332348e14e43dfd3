//! Rollout of a revision on Kubernetes: converts pods and routing into the input of the pure step of
//! [`remoe_rollout`], and its output into actions on pods.
//!
//! The operator may be restarted or lose its leadership between any two writes. It learns of health from nodes, and
//! cannot distinguish a deleted pod from an unreachable one. So no state is kept between two steps: back-off is
//! counted in pod names, generation numbers are stored before they are sent, and an interrupted step is repeated from
//! the observed state.

use super::backoff::REPLACEMENT_BACKOFF;
use super::digest::digest;
use super::epoch::{since_1970, timestamp};
use super::fleet::OtherDeployments;
use super::manifests::{Function, Hosted, Revision};
use super::names::{PodName, next_incarnation};
use super::pods::PodView;
use super::replacement::Replacements;
use super::routing::{Generation, RoutedPod, RoutingTable};
use super::status_issue::StatusIssue;
use super::write::Deletion;
use jiff::Timestamp;
use remoe_api::RolloutStrategy;
use remoe_process::Role;
use remoe_proto::format_listing;
use remoe_rollout::step as pure;
use remoe_rollout::step_types::{
    self, EndAction, FollowedRouting, FunctionPurpose, HealthSource, Instance, InstanceState,
    MainReplacement, Policy, PushedRouting, Replacement, ReplicaGroup, ReplicaSlot, Start,
};
use std::time::Duration;

/// Grace period of a faulty pod: its longest requests are not awaited.
const FAULTY_GRACE: Duration = Duration::from_secs(45);

/// Input of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RolloutInput<'a> {
    /// Name of the deployment.
    pub deployment: &'a str,
    /// Desired revision.
    pub target: &'a Revision,
    /// Strategy for replacing main functions that serve.
    pub strategy: RolloutStrategy,
    /// Set if a main function that starts now finds its certificate.
    pub main_certificate_ready: bool,
    /// Stored routing table.
    pub table: &'a RoutingTable,
    /// All pods of functions, including those of deleted deployments of the same name.
    pub pods: &'a [PodView],
    /// Function counts of all other deployments.
    pub others: OtherDeployments,
    /// Current time.
    pub now: Timestamp,
}

/// Outcome of a step.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Rollout {
    /// Pods to create.
    pub create: Vec<Creation>,
    /// Pods to delete.
    pub delete: Vec<Deletion>,
    /// New routing table; absent if it does not change.
    pub table: Option<RoutingTable>,
    /// Reason why replacement of presumably lost functions is paused.
    pub paused: Option<StatusIssue>,
    /// Time of the next step, if only time has to pass.
    pub requeue_after: Option<Timestamp>,
    /// Set if everything is in the desired state.
    pub settled: bool,
}

/// Index of the main functions among the functions of a revision.
pub(crate) const MAIN_FUNCTION: usize = 0;

/// Pod to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Creation {
    /// Index into the functions of the target.
    pub function: usize,
    /// Index of the replica.
    pub replica: u32,
    /// Number of earlier pods of this replica.
    pub incarnation: u32,
    /// Fault of the pod that it replaces.
    pub replaces: Option<StatusIssue>,
}

/// Returns the hash of a revision: its plan and the specifications of its functions.
pub(crate) fn revision_hash(revision: &Revision) -> Result<String, serde_json::Error> {
    let identities: Vec<&str> = revision.functions().map(|function| function.identity.as_str()).collect();
    digest(&(&revision.plan, identities))
}

/// Computes the next actions.
///
/// # Errors
/// A value cannot be written as JSON.
pub(crate) fn step(input: RolloutInput<'_>) -> Result<Rollout, serde_json::Error> {
    let Replacements { allowed, paused } = Replacements::compute(input.target, input.pods, input.others);
    let functions: Vec<&Function> = input.target.functions().collect();
    let next = NextGeneration::compute(input)?;
    let numbers_are_known = numbers_are_known(input);
    // On a lost node, a pod stays listed forever: pods past their termination deadline are ignored.
    let existing = input.pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none_or(|end| input.now < end));
    let existing: Vec<&PodView> = existing.collect();
    let outcome = pure::step(&step_types::StepInput {
        groups: functions.iter().map(|function| replica_group(input, function, &next)).collect(),
        instances: existing.iter().map(|pod| instance(input, &next, pod)).collect(),
        pushed: numbers_are_known.then(|| next.pushed_routing(input)),
        asleep: false,
        policy: Policy {
            replacement: Replacement::Beside,
            health_source: HealthSource::Reported,
            main_replacement: match input.strategy {
                RolloutStrategy::Surge => MainReplacement::Surge,
                RolloutStrategy::Recreate => {
                    MainReplacement::Recreate { prepared: input.main_certificate_ready }
                }
            },
            replacements: allowed,
            starts_at_once: usize::MAX,
            drain: None,
            faulty_drain: Some(FAULTY_GRACE),
        },
        now: since_1970(input.now),
    });
    let identity = &input.target.main.identity;
    let mut table = input.table.clone();
    if numbers_are_known {
        table.corrupted = false;
        if let Some(step_types::RoutingPush { number, endpoints }) = outcome.push {
            let NextGeneration { revision, remote, groups, .. } = next;
            let (plan, endpoints) = (input.target.plan.clone(), endpoints.into_iter().collect());
            let generation = Generation { number, plan, revision, remote, endpoints, groups };
            table.entries.insert(identity.clone(), generation);
        }
        // Drops generations without a main function.
        let has_main =
            |known: &String| input.pods.iter().any(|pod| pod.is_main && pod.owned && pod.identity == *known);
        table.entries.retain(|known, _| known == identity || (!outcome.succeeded && has_main(known)));
    }
    let faulty_at = input.pods.iter().filter_map(|pod| pod.faulty_at);
    let requeue_after = outcome.next_step_at.map(timestamp).into_iter().chain(faulty_at).min();
    let table = (table != *input.table).then_some(table);
    let only_target = input.table.entries.keys().all(|known| known == identity);
    let create = |start: &Start| Some(creation(input, *functions.get(start.group)?, start, &existing));
    let delete = |(at, end): &(usize, EndAction)| {
        let (pod, EndAction::Stop(grace)) = (existing.get(*at)?, end) else { return None };
        // Pods without a fault keep their normal grace period.
        let grace = grace.filter(|_| pod.fault.is_some());
        let grace_seconds = grace.map(|grace| u32::try_from(grace.as_secs()).unwrap_or(u32::MAX));
        Some(Deletion { name: pod.name.to_string(), uid: pod.uid.clone(), grace_seconds })
    };
    Ok(Rollout {
        create: outcome.starts.iter().filter_map(create).collect(),
        delete: outcome.ends.iter().filter_map(delete).collect(),
        settled: outcome.settled && requeue_after.is_none() && table.is_none() && only_target,
        table,
        paused,
        requeue_after,
    })
}

/// Next routing generation of the target, and the current one of the same revision.
struct NextGeneration<'a> {
    revision: String,
    remote: String,
    groups: Vec<String>,
    current: Option<&'a Generation>,
}

impl<'a> NextGeneration<'a> {
    fn compute(input: RolloutInput<'a>) -> Result<Self, serde_json::Error> {
        let revision = revision_hash(input.target)?;
        let current = input.table.entries.get(&input.target.main.identity);
        let groups = input.target.remote.iter().filter_map(|function| match &function.hosted {
            Some(Hosted::Group(sets)) => Some(format_listing(sets)),
            Some(Hosted::Layer(_)) | None => None,
        });
        Ok(Self {
            remote: format_listing(&input.target.remote_sets()),
            groups: groups.collect(),
            current: current.filter(|current| current.revision == revision),
            revision,
        })
    }

    fn pushed_routing(&self, input: RolloutInput<'_>) -> PushedRouting<RoutedPod> {
        // If a main function has a newer generation than was sent, or the same number with other content, another
        // writer interfered.
        let is_overwritten = |current: &Generation| {
            let mut mains = input.pods.iter().filter(|pod| pod.owned && pod.is_main);
            mains.any(|pod| {
                pod.identity == input.target.main.identity
                    && pod.in_force >= Some(current.number)
                    && !pod.acts_on(current)
            })
        };
        let in_force = input.pods.iter().filter(|pod| pod.owned).filter_map(|pod| pod.in_force).max();
        PushedRouting {
            endpoints: self.current.map(|current| current.endpoints.iter().cloned().collect()),
            is_current: self.current.is_some_and(|current| {
                current.remote == self.remote
                    && current.groups == self.groups
                    && current.endpoints.is_sorted_by(|one, other| one < other)
                    && !is_overwritten(current)
            }),
            newest: input.table.newest().max(in_force.unwrap_or(0)),
        }
    }
}

/// Converts a function of the target.
fn replica_group<'a>(
    input: RolloutInput<'_>,
    function: &'a Function,
    next: &NextGeneration<'_>,
) -> ReplicaGroup<'a> {
    let place = |replica| {
        let name = function.place(input.deployment, replica);
        // A terminating pod is replaced at once.
        let newest = newest(input, &name).filter(|pod| pod.ends_by.is_none());
        let not_before = newest.map(|pod| {
            since_1970(pod.created).saturating_add(REPLACEMENT_BACKOFF.after(pod.name.incarnation))
        });
        ReplicaSlot { name, not_before: not_before.unwrap_or_default() }
    };
    // Main functions serve the experts of sleeping functions locally until those are ready.
    let was_routed =
        |current: &Generation| current.endpoints.iter().any(|it| was_replica_of(input, function, it));
    ReplicaGroup {
        role: if function.hosted.is_none() { Role::Main } else { Role::Remote },
        hosted: function.hosted.as_ref().map_or(&[], Hosted::sets),
        slots: (0..function.total_replicas()).map(place).collect(),
        needed: function.replicas as usize,
        awaited: true,
        missed: function.replicas > 0 && next.current.is_some_and(was_routed),
    }
}

/// Converts a pod.
fn instance<'a>(
    input: RolloutInput<'_>,
    next: &NextGeneration<'_>,
    pod: &'a PodView,
) -> Instance<'a, RoutedPod> {
    // Remote functions are ready only if they belong to the target. A pod that lost its labels belongs to none until
    // they are restored.
    let function = input.target.functions().find(|function| {
        function.name == pod.function
            && function.identity == pod.identity
            && pod.replica < function.total_replicas()
            && function.place(input.deployment, pod.replica) == pod.name.place
    });
    let state = if pod.ends_by.is_some() {
        InstanceState::Terminating
    } else if pod.is_sound() {
        let ready = pod.ready && (pod.is_main || function.is_some());
        InstanceState::Healthy { ready, blocked: pod.issue.is_some() }
    } else {
        InstanceState::Faulty { presumed: pod.fault.as_ref().is_some_and(StatusIssue::is_presumed) }
    };
    // An unready function keeps its routed address, whatever its current one is.
    let name = pod.name.to_string();
    let known =
        || next.current.and_then(|current| current.endpoints.iter().find(|it| it.pod == name).cloned());
    let endpoint = function.and_then(|function| {
        let now = routed_pod(function, &next.groups, pod);
        if pod.ready { now } else { known().or(now) }
    });
    let purpose = match pod.is_main {
        true => FunctionPurpose::Main {
            current: pod.identity == input.target.main.identity,
            pushed: input.table.entries.contains_key(&pod.identity),
            followed: follows(input.table, pod),
        },
        false => FunctionPurpose::Remote { endpoint, routed: input.table.routes_to(&name) },
    };
    // Names chosen by other writers do not count incarnations.
    let incarnation = pod.name.is_counted().then_some(pod.name.incarnation);
    Instance { slot: &pod.name.place, incarnation, state, purpose }
}

/// Compares the generation that a main function has in force with the one that was sent.
fn follows(table: &RoutingTable, pod: &PodView) -> FollowedRouting {
    // A terminating main function finishes its requests.
    let generation = table.entries.get(&pod.identity).filter(|_| pod.ends_by.is_none());
    match (generation, pod.in_force) {
        (_, Some(0)) if pod.ends_by.is_none() => FollowedRouting::Nothing,
        (Some(generation), Some(_)) if pod.acts_on(generation) => FollowedRouting::Pushed,
        // It has not been ready to receive a generation.
        (Some(_), None) if !pod.ready => FollowedRouting::Nothing,
        _ => FollowedRouting::Other,
    }
}

/// Returns the newest owned pod of a replica.
fn newest<'a>(input: RolloutInput<'a>, place: &str) -> Option<&'a PodView> {
    let ours = input.pods.iter().filter(|pod| pod.name.place == place && pod.owned && pod.name.is_counted());
    ours.max_by_key(|pod| pod.name.incarnation)
}

/// Returns the pod to create for `start`. Indices of replaced pods refer to `existing`.
fn creation(input: RolloutInput<'_>, function: &Function, start: &Start, existing: &[&PodView]) -> Creation {
    let replica = u32::try_from(start.slot).unwrap_or(u32::MAX);
    let place = function.place(input.deployment, replica);
    let newest = newest(input, &place).map(|pod| pod.name.incarnation);
    // Names of terminating pods, and of pods of other owners, are still taken.
    let taken = input.pods.iter().filter(|pod| pod.name.place == place);
    let taken = taken.map(|pod| pod.name.incarnation).collect();
    Creation {
        function: start.group,
        replica,
        incarnation: next_incarnation(newest, &taken),
        replaces: start.replaces.and_then(|at| existing.get(at)?.fault.clone()),
    }
}

/// Returns whether an unused generation number is known. If the stored table was lost or corrupted, only the main
/// functions know which numbers were used.
fn numbers_are_known(input: RolloutInput<'_>) -> bool {
    let table_is_valid = !input.table.entries.is_empty() && !input.table.corrupted;
    let mut mains = input.pods.iter().filter(|pod| pod.owned && pod.is_main && pod.fault.is_none());
    table_is_valid || mains.all(|pod| !pod.ready || pod.in_force.is_some())
}

/// Returns whether the pod of the `routed` entry is or was a replica of `function`.
fn was_replica_of(input: RolloutInput<'_>, function: &Function, routed: &RoutedPod) -> bool {
    let places = |place: &str| place.rsplit_once('-').map(|(places, _replica)| places.to_owned());
    let pod_places = PodName::parse(&routed.pod).and_then(|name| places(&name.place));
    pod_places.is_some() && pod_places == places(&function.place(input.deployment, 0))
}

fn routed_pod(function: &Function, groups: &[String], pod: &PodView) -> Option<RoutedPod> {
    let (layers, group) = match function.hosted.as_ref()? {
        Hosted::Layer(set) => (vec![set.layer], None),
        Hosted::Group(sets) => {
            let listing = format_listing(sets);
            (Vec::new(), Some(groups.iter().position(|group| *group == listing)?))
        }
    };
    Some(RoutedPod { pod: pod.name.to_string(), address: pod.expert_address()?, layers, group })
}

/// Returns the main functions to poll, each with the generation that it must have in force.
pub(crate) fn desired_generations<'a>(
    table: &'a RoutingTable,
    pods: &'a [PodView],
) -> impl Iterator<Item = (&'a PodView, Option<&'a Generation>)> {
    let mains = pods.iter().filter(|pod| pod.is_main && pod.is_sound() && pod.ip.is_some());
    mains.map(|pod| (pod, table.entries.get(&pod.identity)))
}
