//! Which remote groups of a model run while its main function does: asks that what they are used for, and has the pure
//! step decide.

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

/// Longest time in which the main function answers which experts were used.
const ASK: Duration = Duration::from_secs(1);
/// Between two looks, at least and at most ..
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// .. and while a group sleeps: who asks for it is served by the main function alone until it is there.
const WHILE_ASLEEP: Duration = Duration::from_millis(100);

/// The remote groups of one model.
pub(crate) struct Tiers {
    /// Without use for so long a group sleeps.
    window: Duration,
    began: Instant,
    groups: Vec<Tier>,
    told: ReportedUsage,
    looking: Option<JoinHandle<UsageObservation>>,
    next: Instant,
}

/// A remote group, and whether it is awake.
struct Tier {
    /// `group-0`, or `layer-3`: the function of its first place.
    name: String,
    group: groups::SleepGroup,
    state: SleepingGroup,
}

/// Result of a look.
pub(crate) struct UsageObservation {
    main: u32,
    /// Absent if the main function did not answer.
    pairs: Option<Vec<LayerPairs>>,
    /// Experts that present requests will use, where that is known.
    expected: Option<JointUsage>,
}

/// Changes after a look.
#[derive(Debug, Default)]
pub(crate) struct GroupUpdate {
    /// Why each group wakes that does.
    pub(crate) wakes: Vec<WakeCause>,
    /// Some group falls asleep.
    pub(crate) sleeps: bool,
    /// Pairs that asked for groups that slept.
    pub(crate) pairs: u64,
}

impl Tiers {
    /// Groups of no model yet.
    pub(crate) fn new(window: Duration) -> Self {
        let now = Instant::now();
        let (groups, told) = (Vec::new(), ReportedUsage::default());
        Self { window, began: now, groups, told, looking: None, next: now }
    }

    /// The functions of `wanted` start: all of them, but groups that requests are known not to need which use experts by
    /// `expected`.
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
                Tier { name, group, state: SleepingGroup::new(needed, now) }
            })
            .collect();
        self.looking = None;
        self.next = Instant::now() + self.pause();
    }

    /// Places that nothing is to fill now.
    pub(crate) fn resting(&self) -> BTreeSet<String> {
        let asleep = self.groups.iter().filter(|tier| !tier.state.awake);
        asleep.flat_map(|tier| tier.group.places.iter().cloned()).collect()
    }

    /// The experts of each group, and whether it sleeps.
    pub(crate) fn groups(&self) -> Vec<InactiveGroup> {
        let group = |tier: &Tier| InactiveGroup {
            name: tier.name.clone(),
            experts: format_listing(&tier.group.hosted),
            asleep: !tier.state.awake,
        };
        self.groups.iter().map(group).collect()
    }

    fn any_sleeps(&self) -> bool {
        self.groups.iter().any(|tier| !tier.state.awake)
    }

    fn pause(&self) -> Duration {
        let pause = (self.window / 4).clamp(PAUSES.0, PAUSES.1);
        if self.any_sleeps() { pause.min(WHILE_ASLEEP) } else { pause }
    }

    /// Waits until it is time to look, and looks while `main` is given: the process and address of the main function. Nothing
    /// is lost where this is dropped.
    pub(crate) async fn look(
        &mut self,
        main: Option<(u32, SocketAddr)>,
        present: Option<ActiveRequests>,
    ) -> Option<UsageObservation> {
        if self.groups.is_empty() {
            return std::future::pending().await;
        }
        tokio::time::sleep_until(self.next.into()).await;
        if self.looking.is_none() {
            let Some((main, address)) = main else { return std::future::pending().await };
            // Only what sleeps is woken for predictions.
            let present = present.filter(|_| self.any_sleeps());
            self.looking = Some(tokio::spawn(async move {
                let answer = control::describe_uses(address, ASK).await;
                let expected = match present {
                    Some(present) => present.mix().await,
                    None => None,
                };
                UsageObservation { main, pairs: answer.ok().map(|description| description.pairs), expected }
            }));
        }
        let looked = match &mut self.looking {
            Some(looking) => looking.await.ok(),
            None => None,
        };
        self.looking = None;
        self.next = Instant::now() + self.pause();
        looked
    }

    /// Returns the changes after a look, where functions are as `status` says.
    pub(crate) fn note(
        &mut self,
        looked: &UsageObservation,
        wanted: &DesiredDeployment,
        status: &Status,
    ) -> GroupUpdate {
        let mut change = GroupUpdate::default();
        // Who says nothing has not been used any less for that.
        let Some(pairs) = &looked.pairs else { return change };
        let main = looked.main.to_string();
        let uses = self.told.note(&main, pairs, true);
        self.told.keep(|known| known == main);
        let now = self.began.elapsed();
        let serves = |place: &String| {
            let functions = &status.functions;
            functions.iter().any(|it| it.name == *place && it.state == FunctionState::Serving)
        };
        let expected = looked.expected.as_ref().map(|mix| pairs_of(mix, wanted));
        for Tier { group, state, .. } in &mut self.groups {
            let pairs = uses.of(&group.hosted);
            let is_expected = || expected.as_ref().is_some_and(|expected| expected.is_on(&group.hosted));
            let seen = GroupObservation {
                asked: pairs > 0,
                predicted: !state.awake && is_expected(),
                starting: !group.places.iter().any(serves),
            };
            let next = state.step(self.window, seen, now);
            if !state.awake {
                change.pairs += pairs;
            }
            match (state.awake, next.awake) {
                (false, true) if seen.asked => change.wakes.push(WakeCause::Asked),
                (false, true) => change.wakes.push(WakeCause::Predicted),
                (true, false) => change.sleeps = true,
                (true, true) | (false, false) => {}
            }
            *state = next;
        }
        self.next = Instant::now() + self.pause();
        change
    }
}

impl Drop for Tiers {
    fn drop(&mut self) {
        if let Some(looking) = &self.looking {
            looking.abort();
        }
    }
}

/// The pairs of requests that use experts by `mix`.
fn pairs_of(mix: &JointUsage, wanted: &DesiredDeployment) -> ExpectedPairs {
    let layers = wanted.moe_layers.iter().map(|moe| moe.layer).collect();
    ExpectedPairs::new(layers, mix.shares.to_rows(), mix.tokens * wanted.inspection.top_k as f64)
}
