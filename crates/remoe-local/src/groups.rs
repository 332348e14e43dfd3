//! Sleep of remote groups while the main function runs: polls their usage, and applies the pure step.

use crate::deployment::DesiredDeployment;
use crate::usage::ActiveRequests;
use remoe_autoscale::scale_to_zero::groups::{GroupObservation, SleepingGroup};
use remoe_gateway_core::{InactiveGroup, WakeCause};
use remoe_proto::format_listing;
use remoe_proto::v1::LayerPairs;
use remoe_rollout::groups::{self, ReportedUsage};
use remoe_rollout::need::ExpectedPairs;
use remoe_rollout::{FunctionState, Status, control};
use remoe_usage::JointUsage;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Timeout of polling the main function for expert usage.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(1);
/// Minimum and maximum interval of polls.
const POLL_INTERVALS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// Maximum interval while a group sleeps: the main function alone serves its requests until it is awake.
const MAX_INTERVAL_WHILE_ASLEEP: Duration = Duration::from_millis(100);

/// Remote groups of one model.
pub(crate) struct SleepGroups {
    /// Idle window of a group.
    window: Duration,
    began: Instant,
    groups: Vec<SleepGroupState>,
    reported: ReportedUsage,
    pending_poll: Option<JoinHandle<UsageObservation>>,
    next: Instant,
}

/// Remote group and its sleep state.
struct SleepGroupState {
    /// Name of its function: `group-0` or `layer-3`.
    name: String,
    group: groups::SleepGroup,
    state: SleepingGroup,
}

/// Result of a poll.
pub(crate) struct UsageObservation {
    main: u32,
    /// Absent if the main function did not answer.
    pairs: Option<Vec<LayerPairs>>,
    /// Predicted usage of active requests, if known.
    expected: Option<JointUsage>,
}

/// Changes after a poll.
#[derive(Debug, Default)]
pub(crate) struct GroupUpdate {
    /// Causes of the groups that wake.
    pub(crate) wakes: Vec<WakeCause>,
    /// Set if a group falls asleep.
    pub(crate) sleeps: bool,
    /// (token, expert) pairs of sleeping groups.
    pub(crate) pairs: u64,
}

impl SleepGroups {
    /// Creates an empty set of groups.
    pub(crate) fn new(window: Duration) -> Self {
        let now = Instant::now();
        let (groups, reported) = (Vec::new(), ReportedUsage::default());
        Self { window, began: now, groups, reported, pending_poll: None, next: now }
    }

    /// Sets the groups for the start of `wanted`. All are awake, except those that requests with expert usage
    /// `expected` do not need.
    pub(crate) fn begin(&mut self, wanted: &DesiredDeployment, expected: Option<&JointUsage>) {
        let now = self.began.elapsed();
        let groups = groups::groups(&wanted.desired().functions).into_iter();
        let processes = wanted.placement.processes();
        let expected = expected.map(|mix| pairs_of(mix, wanted));
        self.groups = groups
            .map(|group| {
                let needed = expected.as_ref().is_none_or(|expected| expected.is_on(&group.hosted));
                let process = processes.iter().find(|process| group.places.contains(&process.name));
                let name = process.map_or_else(String::new, |process| process.function.clone());
                SleepGroupState { name, group, state: SleepingGroup::new(needed, now) }
            })
            .collect();
        self.pending_poll = None;
        self.next = Instant::now() + self.poll_interval();
    }

    /// Returns the slots of sleeping groups.
    pub(crate) fn resting(&self) -> BTreeSet<String> {
        let asleep = self.groups.iter().filter(|group_state| !group_state.state.awake);
        asleep.flat_map(|group_state| group_state.group.places.iter().cloned()).collect()
    }

    /// Returns the experts of each group, and whether it sleeps.
    pub(crate) fn groups(&self) -> Vec<InactiveGroup> {
        let group = |group_state: &SleepGroupState| InactiveGroup {
            name: group_state.name.clone(),
            experts: format_listing(&group_state.group.hosted),
            asleep: !group_state.state.awake,
        };
        self.groups.iter().map(group).collect()
    }

    fn any_asleep(&self) -> bool {
        self.groups.iter().any(|group_state| !group_state.state.awake)
    }

    fn poll_interval(&self) -> Duration {
        let poll_interval = (self.window / 4).clamp(POLL_INTERVALS.0, POLL_INTERVALS.1);
        if self.any_asleep() { poll_interval.min(MAX_INTERVAL_WHILE_ASLEEP) } else { poll_interval }
    }

    /// Waits for the next poll and polls `main`, the process and address of the main function. This is cancel-safe.
    pub(crate) async fn poll(
        &mut self,
        main: Option<(u32, SocketAddr)>,
        active_requests: Option<ActiveRequests>,
    ) -> Option<UsageObservation> {
        if self.groups.is_empty() {
            return std::future::pending().await;
        }
        tokio::time::sleep_until(self.next.into()).await;
        if self.pending_poll.is_none() {
            let Some((main, address)) = main else { return std::future::pending().await };
            // Predictions matter only for sleeping groups.
            let active_requests = active_requests.filter(|_| self.any_asleep());
            self.pending_poll = Some(tokio::spawn(async move {
                let answer = control::describe_uses(address, DESCRIBE_TIMEOUT).await;
                let expected = match active_requests {
                    Some(active_requests) => active_requests.mix().await,
                    None => None,
                };
                UsageObservation { main, pairs: answer.ok().map(|description| description.pairs), expected }
            }));
        }
        let polled = match &mut self.pending_poll {
            Some(pending_poll) => pending_poll.await.ok(),
            None => None,
        };
        self.pending_poll = None;
        self.next = Instant::now() + self.poll_interval();
        polled
    }

    /// Returns the changes after a poll, given the current `status` of functions.
    pub(crate) fn apply_poll(
        &mut self,
        polled: &UsageObservation,
        wanted: &DesiredDeployment,
        status: &Status,
    ) -> GroupUpdate {
        let mut change = GroupUpdate::default();
        // Without an answer, usage is unknown.
        let Some(pairs) = &polled.pairs else { return change };
        let main = polled.main.to_string();
        let uses = self.reported.note(&main, pairs, true);
        self.reported.keep(|known| known == main);
        let now = self.began.elapsed();
        let serves = |place: &String| {
            let functions = &status.functions;
            functions.iter().any(|it| it.name == *place && it.state == FunctionState::Serving)
        };
        let expected = polled.expected.as_ref().map(|mix| pairs_of(mix, wanted));
        for SleepGroupState { group, state, .. } in &mut self.groups {
            let pairs = uses.of(&group.hosted);
            let is_expected = || expected.as_ref().is_some_and(|expected| expected.is_on(&group.hosted));
            let observation = GroupObservation {
                asked: pairs > 0,
                predicted: !state.awake && is_expected(),
                starting: !group.places.iter().any(serves),
            };
            let next = state.step(self.window, observation, now);
            if !state.awake {
                change.pairs += pairs;
            }
            match (state.awake, next.awake) {
                (false, true) if observation.asked => change.wakes.push(WakeCause::Asked),
                (false, true) => change.wakes.push(WakeCause::Predicted),
                (true, false) => change.sleeps = true,
                (true, true) | (false, false) => {}
            }
            *state = next;
        }
        self.next = Instant::now() + self.poll_interval();
        change
    }
}

impl Drop for SleepGroups {
    fn drop(&mut self) {
        if let Some(pending_poll) = &self.pending_poll {
            pending_poll.abort();
        }
    }
}

/// Returns the expected pairs of requests with expert usage `mix`.
fn pairs_of(mix: &JointUsage, wanted: &DesiredDeployment) -> ExpectedPairs {
    let layers = wanted.moe_layers.iter().map(|moe| moe.layer).collect();
    ExpectedPairs::new(layers, mix.shares.to_rows(), mix.tokens * wanted.inspection.top_k as f64)
}
