//! Sleep of single remote functions while main functions run, after their experts were unused for the idle window.
//! Pure.
//!
//! Main functions count the usage of experts, and their pollers record when it last grew. The sleep state of each
//! function is stored in the deployment's [`MoEDemand`], so that a new leader continues from it; the idle windows of
//! awake functions start again then. A sleeping function has no replicas: its pods are deleted when no main function
//! routes to them any more, as those of an old plan. Meanwhile main functions load its experts themselves.

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
use remoe_autoscale::scale_to_zero::groups::{GroupObservation, MAX_STRETCH, SleepingGroup};
use remoe_process::format_duration;
use remoe_proto::format_listing;
use remoe_proto::v1::LayerExperts;
use std::sync::Arc;
use std::time::Duration;

/// Maximum bytes of one listing of experts in a [`MoEDemand`].
const MAX_LISTING_BYTES: usize = 65_536;
/// Delay of a reconcile after the end of an idle window, and minimum interval of such reconciles.
const WINDOW_MARGIN: Duration = Duration::from_secs(1);

/// Remote functions that sleep while main functions run.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Groups {
    /// New state of each remote function; empty if none may sleep by itself.
    pub groups: Vec<GroupDemand>,
    /// Remote functions whose usage main functions report, if any.
    pub watched: Option<Arc<WatchedFunctions>>,
    /// State changes, for events after they are written.
    pub changes: Vec<GroupChange>,
    /// Longest time until the next reconcile.
    pub requeue_after: Option<Duration>,
}

/// Sleep or wake of a remote function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupChange {
    /// Name of the function.
    pub function: String,
    /// New state, with its reason.
    pub to: GroupTransition,
    /// Idle window of the function.
    pub idle_window: Duration,
}

/// New state of a remote function, with its reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GroupTransition {
    /// It sleeps: its experts were unused for the idle window.
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
                    format_duration(self.idle_window)
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

/// Decides which remote functions of `target` sleep, by the last use of their experts. `pods` are those of functions.
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
    // Without gateways there is no demand object to store the state in.
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
        let input = GroupInput { observed, demand, pods, window };
        let (group, change) = input.step(function, is_expected(function));
        if group.awake {
            let used = group.asked.map_or(group.since, |asked| asked.max(group.since));
            let window_end =
                (used + group.idle_window(window)).saturating_sub(since_1970(observed.now)) + WINDOW_MARGIN;
            groups.requeue_after =
                Some(groups.requeue_after.map_or(window_end, |stored| stored.min(window_end)));
        } else {
            watched.asleep.insert(function.name.clone());
        }
        let sets = function.hosted.as_ref().map(|hosted| hosted.sets().to_vec()).unwrap_or_default();
        let experts = listing(&sets);
        watched.hosted.insert(function.name.clone(), sets);
        let idle_window = group.idle_window(window);
        groups.changes.extend(change.map(|to| GroupChange {
            function: function.name.clone(),
            to,
            idle_window,
        }));
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

/// Input of the step of one function.
#[derive(Clone, Copy)]
struct GroupInput<'a> {
    observed: &'a Observed,
    demand: &'a MoEDemand,
    pods: &'a [PodView],
    window: Duration,
}

impl GroupInput<'_> {
    /// Returns the next state of `function`. `expected` is set if waiting requests are expected to use it; absent if
    /// that is unknown.
    fn step(self, function: &Function, expected: Option<bool>) -> (SleepingGroup, Option<GroupTransition>) {
        let now = since_1970(self.observed.now);
        let mut stored = self.demand.spec.groups.iter();
        let stored =
            stored.find(|stored| stored.name == function.name && stored.identity == function.identity);
        let phase = self.demand.spec.phase;
        let stored = match (phase, stored) {
            // If the deployment woke now, functions that no request needs would stay asleep.
            (DemandPhase::Asleep, _) => return (SleepingGroup::new(expected.unwrap_or(true), now), None),
            (_, None) => return (SleepingGroup::new(true, now), None),
            (_, Some(stored)) => stored,
        };
        let used = self
            .observed
            .main_observations
            .values()
            .filter_map(|observation| observation.recently_used.get(&function.name))
            .max();
        let since = since_1970(stored.since.0);
        let used = used.map(|used| since_1970(*used)).filter(|used| *used > since);
        let before = SleepingGroup {
            awake: !stored.asleep,
            since,
            asked: used.filter(|_| !stored.asleep),
            stretch: stored.stretch.clamp(1, MAX_STRETCH),
            doubted: stored.doubted,
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
            // A function that is not ready yet cannot be used, so its idle window starts later. A new leader has not
            // observed earlier use.
            let window_start = if ready { since_1970(self.observed.since) } else { now };
            let observation = SleepingGroup { since: since.max(window_start), ..before };
            let next = observation.step(self.window, GroupObservation::default(), now);
            return if next.awake {
                (SleepingGroup { since, ..next }, None)
            } else {
                (next, Some(GroupTransition::Sleeps))
            };
        }
        let observation =
            GroupObservation { asked: used.is_some(), predicted: expected == Some(true), starting: false };
        let next = before.step(self.window, observation, now);
        let turn = if observation.asked { GroupTransition::Asked } else { GroupTransition::Predicted };
        (next, next.awake.then_some(turn))
    }
}

/// Returns the listing of a function's experts for users; empty if it is too long for the object.
fn listing(hosted: &[LayerExperts]) -> String {
    let experts = format_listing(hosted);
    if experts.len() > MAX_LISTING_BYTES { String::new() } else { experts }
}
