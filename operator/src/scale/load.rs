//! Replicas by load, as gateways and main functions report it. Pure.

use crate::epoch::since_1970;
use crate::events::ClusterEvent;
use crate::inputs::Inputs;
use crate::manifests::{Count, Function, TargetPlan, room};
use crate::names::{Component, tier};
use crate::observed::Observed;
use crate::pods::PodView;
use crate::quantity::MB;
use remoe_autoscale::replicas::{GatewayReport, History, Mains, Policy, Remote, Worked, mains, remote};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A function of which there are to be more or fewer from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReplicaChange {
    /// Kind of the function.
    pub component: Component,
    /// Name of the function.
    pub function: String,
    /// Replicas until now.
    pub from: u32,
    /// Replicas from now on.
    pub to: u32,
}

impl ReplicaChange {
    /// Returns the event of the change.
    pub(crate) fn event(&self) -> ClusterEvent {
        let Self { from, to, .. } = self;
        let function = match self.component {
            Component::Main => "the main function".to_owned(),
            _ => tier(&self.function),
        };
        let note = format!("Scaled {function} from {from} to {to} replicas because of load.");
        ClusterEvent::normal("Scaled", note)
    }
}

/// Replicas that follow from the load.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct LoadScale {
    /// Load in the scaling window, with what was reported since.
    pub(super) history: History,
    /// Replicas beyond those of the plan, by function.
    pub(super) extra: BTreeMap<String, u32>,
    /// Functions whose replicas change.
    pub(super) changes: Vec<ReplicaChange>,
}

/// Returns how many functions the load asks for, whose functions by the plan are `target` and whose pods are `pods`.
pub(super) fn by_load(inputs: Inputs<'_>, pods: &[PodView], target: Option<&TargetPlan>) -> LoadScale {
    let Inputs { owner, observed, soft_state, .. } = inputs;
    let spec = &owner.spec;
    // Without gateways no load is reported.
    if !spec.follows_load() || observed.demand.is_none() {
        return LoadScale::default();
    }
    let window = spec.scaling.window.into();
    let now = since_1970(observed.now);
    let pods: Vec<&PodView> = pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none()).collect();
    let mut history = soft_state.load.clone();
    listen(observed, &mut history, &pods, window, now);
    let Some(target) = target else { return LoadScale { history, ..LoadScale::default() } };
    let policy = Policy { target: f64::from(spec.scaling.target_percent) / 100.0, window };
    let room = u32::try_from(room(&target.plan)).unwrap_or(u32::MAX);
    let main = &target.revision.main;
    let there = present(main, &pods);
    let bounds = Mains {
        name: &main.name,
        present: there.max(main.replicas),
        least: main.replicas,
        most: spec.scaling.most(),
        room,
        serves: pods.iter().any(|pod| pod.is_main && pod.ready),
    };
    let mut wanted = vec![(main, there, mains(&policy, &history, bounds, now))];
    if let Some(limits) = &spec.scaling.remote {
        let functions = &target.revision.remote;
        let there: Vec<(u32, Vec<String>)> =
            functions.iter().map(|function| (present(function, &pods), addresses(function, &pods))).collect();
        let seen: Vec<Remote<'_>> = functions
            .iter()
            .zip(&there)
            .map(|(function, (present, addresses))| Remote {
                name: &function.name,
                addresses,
                present: *present,
                least: function.replicas,
                most: limits.max.max(function.replicas),
                bytes: function.bytes,
            })
            .collect();
        let memory = limits.memory_mb.map_or(u64::MAX, |memory| u64::from(memory) * MB);
        let counts = remote(&policy, &history, &seen, memory, now);
        let present = there.iter().map(|(present, _)| *present);
        wanted
            .extend(functions.iter().zip(present).zip(counts).map(|((of, there), count)| (of, there, count)));
    }
    let changes: Vec<ReplicaChange> = wanted
        .iter()
        .filter_map(|(function, present, count)| change(&mut history, function, *present, *count))
        .collect();
    for change in changes.iter().filter(|change| change.to > change.from) {
        history.raised(&change.function, now);
    }
    let extra = |(function, _, count): &(&Function, u32, u32)| {
        (function.name.clone(), count.saturating_sub(function.replicas))
    };
    LoadScale { history, extra: wanted.iter().map(extra).collect(), changes }
}

/// Returns the change of `function`, of which `present` replicas are there, to `wanted` replicas, or to those of its plan if
/// these are more.
fn change(history: &mut History, function: &Function, present: u32, wanted: u32) -> Option<ReplicaChange> {
    let extra = wanted.saturating_sub(function.replicas);
    let to = Count { replicas: function.replicas, extra }.most();
    // A count that was decided before and is not reached yet is no change, whatever delays it.
    let from = history.want(&function.name, to).unwrap_or(present.max(function.replicas));
    (from != to).then(|| ReplicaChange {
        component: function.component,
        function: function.name.clone(),
        from,
        to,
    })
}

/// Returns when to look again at the latest, as functions may be too many by then without a report; `is_more` says that
/// replicas run because of load.
pub(super) fn requeue_after(inputs: Inputs<'_>, is_more: bool) -> Option<Duration> {
    let scaling = &inputs.owner.spec;
    let window: Duration = scaling.scaling.window.into();
    (scaling.follows_load() && (is_more || is_busy(inputs.observed))).then(|| window / 4)
}

fn is_busy(observed: &Observed) -> bool {
    observed.gateways_alive().any(|entry| entry.waiting > 0 || entry.in_flight > 0)
}

/// Adds what gateways and main functions report to `history`.
fn listen(observed: &Observed, history: &mut History, pods: &[&PodView], window: Duration, now: Duration) {
    history.look(now);
    for entry in observed.gateways_alive() {
        let Some(load) = &entry.load else { continue };
        let said = GatewayReport {
            at: since_1970(load.at.0),
            occupied: Duration::from_millis(load.occupied_ms),
            requests: entry.waiting.saturating_add(entry.in_flight),
            waiting: entry.waiting,
            sequence: entry.sequence,
        };
        history.note(&entry.uid, said, window, now);
    }
    // Of others main functions may say what they want.
    let remote: BTreeSet<String> =
        pods.iter().filter(|pod| !pod.is_main).filter_map(|pod| pod.expert_address()).collect();
    for (main, observation) in &observed.main_observations {
        let Some(Worked { age, computed }) = &observation.worked else { continue };
        let ours = computed.iter().filter(|(address, _)| remote.contains(*address));
        let computed = ours.map(|(address, time)| (address.clone(), *time)).collect();
        history.note_work(main, Worked { age: *age, computed }, window, now);
    }
    history.keep(
        |gateway| observed.gateways.contains(gateway),
        |main| pods.iter().any(|pod| pod.is_main && pod.uid == main),
    );
}

/// Replicas of `function` that were started and are not asked to end, those of a revision before among them: whatever
/// follows it has the same load.
fn present(function: &Function, pods: &[&PodView]) -> u32 {
    let of = pods.iter().filter(|pod| pod.function == function.name);
    of.map(|pod| pod.replica.saturating_add(1)).max().unwrap_or(0)
}

/// Where main functions reach `function`.
fn addresses(function: &Function, pods: &[&PodView]) -> Vec<String> {
    pods.iter().filter(|pod| pod.function == function.name).filter_map(|pod| pod.expert_address()).collect()
}
