//! Remote functions that sleep while main functions run: their experts were not used for a window. Pure.
//!
//! Main functions count how often the experts of each remote function are used, and the conversations with them remember
//! when that last grew. Whether a function sleeps stands in the [`MoEDemand`] of its deployment, so that
//! a new leader goes on from there; it opens the windows of those that are awake again. A function that sleeps has no
//! replicas: its pods go when no main function calls them any more, as those of a plan before do, and main functions load its
//! experts meanwhile.

use crate::epoch::{since_1970, timestamp};
use crate::events::ClusterEvent;
use crate::inputs::Inputs;
use crate::main_client::WatchedFunctions;
use crate::manifests::{Function, TargetPlan};
use crate::names::tier;
use crate::observed::Observed;
use crate::ownership::is_owned_by;
use crate::pods::PodView;
use crate::resolve::Resolved;
use crate::usage;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use remoe_api::{DemandPhase, GroupDemand, MoEDemand};
use remoe_autoscale::scale_to_zero::groups::{GroupObservation, MOST_STRETCH, SleepingGroup};
use remoe_process::format_duration;
use remoe_proto::format_listing;
use remoe_proto::v1::LayerExperts;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a listing of experts that a [`MoEDemand`] may have.
const MOST_LISTED: usize = 65_536;
/// A window that ends is looked at so long after, and no two looks for windows follow each other faster.
const AFTER: Duration = Duration::from_secs(1);

/// Remote functions that sleep while main functions run.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Groups {
    /// State of each remote function from now on; empty if none may sleep by itself.
    pub groups: Vec<GroupDemand>,
    /// Use of remote functions that main functions are asked for, if any.
    pub watched: Option<Arc<WatchedFunctions>>,
    /// Changes, for events once they are written.
    pub changes: Vec<GroupChange>,
    /// When to look again at the latest.
    pub requeue_after: Option<Duration>,
}

/// A remote function that falls asleep or wakes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupChange {
    /// Name of the function.
    pub function: String,
    /// Reason and direction.
    pub to: GroupTransition,
    /// Time without use of its experts before it sleeps.
    pub patience: Duration,
}

/// Direction of a change, with its reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GroupTransition {
    /// It falls asleep: its experts were not used for its window.
    Sleeps,
    /// It wakes: its experts were used.
    Asked,
    /// It wakes: waiting requests are predicted to use its experts.
    Predicted,
}

impl Groups {
    /// Returns whether the remote function of this name sleeps.
    pub(super) fn is_asleep(&self, function: &str) -> bool {
        self.watched.as_ref().is_some_and(|watched| watched.asleep.contains(function))
    }
}

impl GroupChange {
    /// Returns the event of the change.
    pub(crate) fn event(&self) -> ClusterEvent {
        let function = tier(&self.function);
        match self.to {
            GroupTransition::Sleeps => ClusterEvent::normal(
                "GroupAsleep",
                format!(
                    "Scaled {function} to zero: its experts were not used for {}.",
                    format_duration(self.patience)
                ),
            ),
            GroupTransition::Asked => ClusterEvent::normal(
                "GroupWaking",
                format!(
                    "Waking {function}: its experts were requested; main functions compute them until it is \
                     ready."
                ),
            ),
            GroupTransition::Predicted => ClusterEvent::normal(
                "GroupWaking",
                format!("Waking {function}: waiting requests are predicted to use its experts."),
            ),
        }
    }
}

/// Returns which remote functions of `target` sleep, by when the experts of each were last used; `pods` are those of
/// functions.
pub(super) fn by_use(
    inputs: Inputs<'_>,
    pods: &[PodView],
    resolved: &Resolved,
    target: Option<&TargetPlan>,
) -> Groups {
    let Inputs { owner, observed, .. } = inputs;
    let uid = owner.uid().unwrap_or_default();
    let demand = observed.demand.as_ref().filter(|demand| is_owned_by(*demand, &uid));
    let window = owner.spec.scaling.remote_idle_window.map(Duration::from);
    // Without gateways there is nothing that remembers.
    let (Some(window), Some(demand), Some(target)) = (window, demand, target) else {
        return Groups::default();
    };
    let facts = resolved.model.facts();
    let expected = facts.and_then(|facts| usage::pairs_of_waiting(owner, observed, &facts.inspection));
    let is_expected = |function: &Function| {
        let hosted = function.hosted.as_ref()?.sets();
        Some(expected.as_ref()?.is_on(hosted))
    };
    let mut groups = Groups::default();
    let mut watched = WatchedFunctions::default();
    for function in &target.revision.remote {
        let scene = GroupInput { observed, demand, pods, window };
        let (group, change) = scene.step(function, is_expected(function));
        if group.awake {
            let used = group.asked.map_or(group.since, |asked| asked.max(group.since));
            let ends = (used + group.patience(window)).saturating_sub(since_1970(observed.now)) + AFTER;
            groups.requeue_after = Some(groups.requeue_after.map_or(ends, |known| known.min(ends)));
        } else {
            watched.asleep.insert(function.name.clone());
        }
        let sets = function.hosted.as_ref().map(|hosted| hosted.sets().to_vec()).unwrap_or_default();
        let experts = listing(&sets);
        watched.hosted.insert(function.name.clone(), sets);
        let patience = group.patience(window);
        groups.changes.extend(change.map(|to| GroupChange { function: function.name.clone(), to, patience }));
        groups.groups.push(GroupDemand {
            name: function.name.clone(),
            identity: function.identity.clone(),
            asleep: !group.awake,
            experts,
            since: MicroTime(timestamp(group.since)),
            stretch: group.stretch,
            doubted: group.doubted,
        });
    }
    groups.watched = Some(Arc::new(watched));
    groups
}

/// Inputs of the step of one function.
#[derive(Clone, Copy)]
struct GroupInput<'a> {
    observed: &'a Observed,
    demand: &'a MoEDemand,
    pods: &'a [PodView],
    window: Duration,
}

impl GroupInput<'_> {
    /// Returns the next state of `function`. `expected` says if waiting requests are expected to use it; absent if that
    /// is not known.
    fn step(self, function: &Function, expected: Option<bool>) -> (SleepingGroup, Option<GroupTransition>) {
        let now = since_1970(self.observed.now);
        let mut known = self.demand.spec.groups.iter();
        let known = known.find(|known| known.name == function.name && known.identity == function.identity);
        let phase = self.demand.spec.phase;
        let known = match (phase, known) {
            // If the deployment woke now, the functions that no request needs would stay asleep.
            (DemandPhase::Asleep, _) => return (SleepingGroup::new(expected.unwrap_or(true), now), None),
            (_, None) => return (SleepingGroup::new(true, now), None),
            (_, Some(known)) => known,
        };
        let used = self
            .observed
            .main_observations
            .values()
            .filter_map(|observation| observation.recently_used.get(&function.name))
            .max();
        let since = since_1970(known.since.0);
        let used = used.map(|used| since_1970(*used)).filter(|used| *used > since);
        let before = SleepingGroup {
            awake: !known.asleep,
            since,
            asked: used.filter(|_| !known.asleep),
            stretch: known.stretch.clamp(1, MOST_STRETCH),
            doubted: known.doubted,
        };
        if phase != DemandPhase::Active {
            return (before, None);
        }
        if before.awake {
            let ready = self.pods.iter().any(|pod| {
                pod.function == function.name
                    && pod.identity == function.identity
                    && pod.is_sound()
                    && pod.ready
            });
            // It is not there yet: its window is not over before anybody could use it. And a new leader has not seen who did.
            let opened = if ready { since_1970(self.observed.since) } else { now };
            let seen = SleepingGroup { since: since.max(opened), ..before };
            let next = seen.step(self.window, GroupObservation::default(), now);
            return if next.awake {
                (SleepingGroup { since, ..next }, None)
            } else {
                (next, Some(GroupTransition::Sleeps))
            };
        }
        let seen =
            GroupObservation { asked: used.is_some(), predicted: expected == Some(true), starting: false };
        let next = before.step(self.window, seen, now);
        let turn = if seen.asked { GroupTransition::Asked } else { GroupTransition::Predicted };
        (next, next.awake.then_some(turn))
    }
}

/// Returns the experts of a function that no main function speaks of, as users are shown them; empty if that would be
/// too much for the object.
fn listing(hosted: &[LayerExperts]) -> String {
    let experts = format_listing(hosted);
    if experts.len() > MOST_LISTED { String::new() } else { experts }
}
