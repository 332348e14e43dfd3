//! Rollout of a revision on Kubernetes: input of the pure step from pods and routing, and its outcome for them.
//!
//! The process that decides may be restarted or deposed between any two writes, is told of health by nodes, and cannot
//! tell a pod that is gone from one that it cannot see. So nothing is remembered between two steps: back-off is counted
//! in names of pods, numbers are written before they are told, and a step that was interrupted anywhere is made again
//! from what is there.

use super::backoff::PAUSES;
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
use remoe_rollout::scene::{
    self, EndAction, FollowedRouting, FunctionPurpose, HealthSource, Instance, InstanceState,
    MainReplacement, Policy, PushedRouting, Replacement, ReplicaGroup, ReplicaSlot, Start,
};
use remoe_rollout::step as pure;
use std::time::Duration;

/// A pod with which something is wrong is not waited for until the longest answer is finished.
const FAULTY_GRACE: Duration = Duration::from_secs(45);

/// Inputs of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RolloutInput<'a> {
    /// The name of the deployment.
    pub deployment: &'a str,
    /// Revision that is to run.
    pub target: &'a Revision,
    /// Strategy for main functions that serve when others are to follow them.
    pub strategy: RolloutStrategy,
    /// Main functions that start now find their certificates.
    pub main_certificate_ready: bool,
    /// Generations that main functions were told.
    pub table: &'a RoutingTable,
    /// Every pod of a function, those of earlier deployments of the same name included.
    pub pods: &'a [PodView],
    /// Functions of all other deployments.
    pub others: OtherDeployments,
    /// When.
    pub now: Timestamp,
}

/// Outcome of a step.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Rollout {
    /// Pods to be made.
    pub create: Vec<Creation>,
    /// Pods to be deleted.
    pub delete: Vec<Deletion>,
    /// Generations that main functions are to be told from now on; absent if they do not change.
    pub table: Option<RoutingTable>,
    /// Why functions that seem to be lost are left alone.
    pub held: Option<StatusIssue>,
    /// When to look again at the latest, where only time has to pass.
    pub requeue_after: Option<Timestamp>,
    /// Set if everything is in the desired state.
    pub settled: bool,
}

/// Index of the main functions among the functions of a revision.
pub(crate) const MAIN_FUNCTION: usize = 0;

/// A pod to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Creation {
    /// Index into the functions of the target.
    pub function: usize,
    /// Which replica.
    pub replica: u32,
    /// How many filled the place before.
    pub incarnation: u32,
    /// Fault of the pod before it.
    pub replaces: Option<StatusIssue>,
}

/// Identity of a revision: its plan in one shape.
pub(crate) fn revision_hash(revision: &Revision) -> Result<String, serde_json::Error> {
    let identities: Vec<&str> = revision.functions().map(|function| function.identity.as_str()).collect();
    digest(&(&revision.plan, identities))
}

/// Returns the next actions.
///
/// # Errors
/// A value cannot be written as JSON.
pub(crate) fn step(scene: RolloutInput<'_>) -> Result<Rollout, serde_json::Error> {
    let Replacements { left, held } = Replacements::of(scene.target, scene.pods, scene.others);
    let functions: Vec<&Function> = scene.target.functions().collect();
    let next = NextGeneration::of(scene)?;
    let numbers_are_known = numbers_are_known(scene);
    // On a node that is lost, a pod is listed for ever: what is past its end holds nothing up.
    let there = scene.pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none_or(|end| scene.now < end));
    let there: Vec<&PodView> = there.collect();
    let outcome = pure::step(&scene::StepInput {
        parts: functions.iter().map(|function| part(scene, function, &next)).collect(),
        instances: there.iter().map(|pod| seen(scene, &next, pod)).collect(),
        told: numbers_are_known.then(|| next.told(scene)),
        asleep: false,
        policy: Policy {
            replacement: Replacement::Beside,
            sight: HealthSource::Reported,
            succession: match scene.strategy {
                RolloutStrategy::Surge => MainReplacement::Surge,
                RolloutStrategy::Recreate => {
                    MainReplacement::Recreate { prepared: scene.main_certificate_ready }
                }
            },
            replacements: left,
            starts_at_once: usize::MAX,
            drain: None,
            faulty_drain: Some(FAULTY_GRACE),
        },
        now: since_1970(scene.now),
    });
    let identity = &scene.target.main.identity;
    let mut table = scene.table.clone();
    if numbers_are_known {
        table.corrupted = false;
        if let Some(scene::RoutingPush { number, endpoints }) = outcome.tell {
            let NextGeneration { revision, remote, groups, .. } = next;
            let (plan, endpoints) = (scene.target.plan.clone(), endpoints.into_iter().collect());
            let generation = Generation { number, plan, revision, remote, endpoints, groups };
            table.entries.insert(identity.clone(), generation);
        }
        // No main function is left to be told.
        let exists =
            |known: &String| scene.pods.iter().any(|pod| pod.is_main && pod.owned && pod.identity == *known);
        table.entries.retain(|known, _| known == identity || (!outcome.succeeded && exists(known)));
    }
    let faulty_at = scene.pods.iter().filter_map(|pod| pod.faulty_at);
    let requeue_after = outcome.look_again.map(timestamp).into_iter().chain(faulty_at).min();
    let table = (table != *scene.table).then_some(table);
    let only_target = scene.table.entries.keys().all(|known| known == identity);
    let create = |start: &Start| Some(creation(scene, *functions.get(start.part)?, start, &there));
    let delete = |(at, end): &(usize, EndAction)| {
        let (pod, EndAction::Stop(grace)) = (there.get(*at)?, end) else { return None };
        // A pod that nothing is wrong with but its name ends like any other.
        let grace = grace.filter(|_| pod.fault.is_some());
        let grace_seconds = grace.map(|grace| u32::try_from(grace.as_secs()).unwrap_or(u32::MAX));
        Some(Deletion { name: pod.name.to_string(), uid: pod.uid.clone(), grace_seconds })
    };
    Ok(Rollout {
        create: outcome.starts.iter().filter_map(create).collect(),
        delete: outcome.ends.iter().filter_map(delete).collect(),
        settled: outcome.settled && requeue_after.is_none() && table.is_none() && only_target,
        table,
        held,
        requeue_after,
    })
}

/// Generation that main functions of the target are to be told, and the one that they were told of the same revision.
struct NextGeneration<'a> {
    revision: String,
    remote: String,
    groups: Vec<String>,
    present: Option<&'a Generation>,
}

impl<'a> NextGeneration<'a> {
    fn of(scene: RolloutInput<'a>) -> Result<Self, serde_json::Error> {
        let revision = revision_hash(scene.target)?;
        let present = scene.table.entries.get(&scene.target.main.identity);
        let groups = scene.target.remote.iter().filter_map(|function| match &function.hosted {
            Some(Hosted::Group(sets)) => Some(format_listing(sets)),
            Some(Hosted::Layer(_)) | None => None,
        });
        Ok(Self {
            remote: format_listing(&scene.target.remote_sets()),
            groups: groups.collect(),
            present: present.filter(|present| present.revision == revision),
            revision,
        })
    }

    fn told(&self, scene: RolloutInput<'_>) -> PushedRouting<RoutedPod> {
        // If a main function is further than it was told, or as far with other content, it follows another writer.
        let overruled = |present: &Generation| {
            let mut mains = scene.pods.iter().filter(|pod| pod.owned && pod.is_main);
            mains.any(|pod| {
                pod.identity == scene.target.main.identity
                    && pod.in_force >= Some(present.number)
                    && !pod.acts_on(present)
            })
        };
        let in_force = scene.pods.iter().filter(|pod| pod.owned).filter_map(|pod| pod.in_force).max();
        PushedRouting {
            endpoints: self.present.map(|present| present.endpoints.iter().cloned().collect()),
            stands: self.present.is_some_and(|present| {
                present.remote == self.remote
                    && present.groups == self.groups
                    && present.endpoints.is_sorted_by(|one, other| one < other)
                    && !overruled(present)
            }),
            newest: scene.table.newest().max(in_force.unwrap_or(0)),
        }
    }
}

/// A function of the target as the step sees it.
fn part<'a>(scene: RolloutInput<'_>, function: &'a Function, next: &NextGeneration<'_>) -> ReplicaGroup<'a> {
    let place = |replica| {
        let name = function.place(scene.deployment, replica);
        // One that was asked to end is replaced at once.
        let newest = newest(scene, &name).filter(|pod| pod.ends_by.is_none());
        let not_before =
            newest.map(|pod| since_1970(pod.created).saturating_add(PAUSES.after(pod.name.incarnation)));
        ReplicaSlot { name, not_before: not_before.unwrap_or_default() }
    };
    // Main functions serve the experts of what was asleep until it is there.
    let was_routed = |present: &Generation| present.endpoints.iter().any(|it| is_of(scene, function, it));
    ReplicaGroup {
        role: if function.hosted.is_none() { Role::Main } else { Role::Remote },
        hosted: function.hosted.as_ref().map_or(&[], Hosted::sets),
        places: (0..function.most()).map(place).collect(),
        needed: function.replicas as usize,
        awaited: true,
        missed: function.replicas > 0 && next.present.is_some_and(was_routed),
    }
}

/// A pod as the step sees it.
fn seen<'a>(scene: RolloutInput<'_>, next: &NextGeneration<'_>, pod: &'a PodView) -> Instance<'a, RoutedPod> {
    // Of remote functions only those of the target count as ready; what has lost its labels is none before it has them again.
    let function = scene.target.functions().find(|function| {
        function.name == pod.function
            && function.identity == pod.identity
            && pod.replica < function.most()
            && function.place(scene.deployment, pod.replica) == pod.name.place
    });
    let state = if pod.ends_by.is_some() {
        InstanceState::Leaving
    } else if pod.is_sound() {
        let ready = pod.ready && (pod.is_main || function.is_some());
        InstanceState::Sound { ready, hindered: pod.issue.is_some() }
    } else {
        InstanceState::Faulty { presumed: pod.fault.as_ref().is_some_and(StatusIssue::is_presumed) }
    };
    // One that falters stays as main functions were told of it, whatever its address is by now.
    let name = pod.name.to_string();
    let known =
        || next.present.and_then(|present| present.endpoints.iter().find(|it| it.pod == name).cloned());
    let endpoint = function.and_then(|function| {
        let now = routed_pod(function, &next.groups, pod);
        if pod.ready { now } else { known().or(now) }
    });
    let duty = match pod.is_main {
        true => FunctionPurpose::Main {
            current: pod.identity == scene.target.main.identity,
            told: scene.table.entries.contains_key(&pod.identity),
            follows: follows(scene.table, pod),
        },
        false => FunctionPurpose::Remote { endpoint, routed: scene.table.leads_to(&name) },
    };
    // What others have named says nothing about how many there were.
    let incarnation = pod.name.is_counted().then_some(pod.name.incarnation);
    Instance { place: &pod.name.place, incarnation, state, duty }
}

/// Compares the generation that a main function has in force with the one that it was told.
fn follows(table: &RoutingTable, pod: &PodView) -> FollowedRouting {
    // On its way out it finishes its requests.
    let generation = table.entries.get(&pod.identity).filter(|_| pod.ends_by.is_none());
    match (generation, pod.in_force) {
        (_, Some(0)) if pod.ends_by.is_none() => FollowedRouting::Nothing,
        (Some(generation), Some(_)) if pod.acts_on(generation) => FollowedRouting::Told,
        // It has not been up to be told anything.
        (Some(_), None) if !pod.ready => FollowedRouting::Nothing,
        _ => FollowedRouting::Other,
    }
}

/// The latest of ours at a place.
fn newest<'a>(scene: RolloutInput<'a>, place: &str) -> Option<&'a PodView> {
    let ours = scene.pods.iter().filter(|pod| pod.name.place == place && pod.owned && pod.name.is_counted());
    ours.max_by_key(|pod| pod.name.incarnation)
}

/// The pod that is to be made for `start`; those that are there go by their index in `there`.
fn creation(scene: RolloutInput<'_>, function: &Function, start: &Start, there: &[&PodView]) -> Creation {
    let replica = u32::try_from(start.place).unwrap_or(u32::MAX);
    let place = function.place(scene.deployment, replica);
    let newest = newest(scene, &place).map(|pod| pod.name.incarnation);
    // Names of pods that are on their way out are still taken, and so are those of others.
    let taken = scene.pods.iter().filter(|pod| pod.name.place == place);
    let taken = taken.map(|pod| pod.name.incarnation).collect();
    Creation {
        function: start.part,
        replica,
        incarnation: next_incarnation(newest, &taken),
        replaces: start.instead_of.and_then(|at| there.get(at)?.fault.clone()),
    }
}

/// Reports if a number that was never used can be told: where the durable copy was lost or spoiled, only main functions
/// know which ones were.
fn numbers_are_known(scene: RolloutInput<'_>) -> bool {
    let is_whole = !scene.table.entries.is_empty() && !scene.table.corrupted;
    let mut mains = scene.pods.iter().filter(|pod| pod.owned && pod.is_main && pod.fault.is_none());
    is_whole || mains.all(|pod| !pod.ready || pod.in_force.is_some())
}

/// Reports if the pod that main functions were told of fills, or filled, a place of `function`.
fn is_of(scene: RolloutInput<'_>, function: &Function, routed: &RoutedPod) -> bool {
    let places = |place: &str| place.rsplit_once('-').map(|(places, _replica)| places.to_owned());
    let filled = PodName::parse(&routed.pod).and_then(|name| places(&name.place));
    filled.is_some() && filled == places(&function.place(scene.deployment, 0))
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

/// The main functions that are spoken with, each with the generation that it is to have in force.
pub(crate) fn desired_generations<'a>(
    table: &'a RoutingTable,
    pods: &'a [PodView],
) -> impl Iterator<Item = (&'a PodView, Option<&'a Generation>)> {
    let mains = pods.iter().filter(|pod| pod.is_main && pod.is_sound() && pod.ip.is_some());
    mains.map(|pod| (pod, table.entries.get(&pod.identity)))
}
