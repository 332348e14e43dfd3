//! Replicas by load, as reported by gateways and main functions. Pure.

use crate::epoch::since_1970;
use crate::events::ClusterEvent;
use crate::inputs::Inputs;
use crate::manifests::{Count, Function, TargetPlan, max_batch};
use crate::names::{Component, tier};
use crate::observed::Observed;
use crate::pods::PodView;
use crate::quantity::MB;
use remoe_autoscale::replicas::{
    GatewayReport, LoadHistory, MainReplicas, RemoteReplicas, RemoteWorkReport, ScalingPolicy, main_replicas,
    remote_replicas,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Change of the number of replicas of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReplicaChange {
    /// Component of the function.
    pub component: Component,
    /// Name of the function.
    pub function: String,
    /// Old number of replicas.
    pub from: u32,
    /// New number of replicas.
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

/// Numbers of replicas for the load.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct LoadScale {
    /// Load in the scaling window, including new reports.
    pub(super) history: LoadHistory,
    /// Replicas beyond those of the plan, by function.
    pub(super) extra: BTreeMap<String, u32>,
    /// Functions whose replicas change.
    pub(super) changes: Vec<ReplicaChange>,
}

/// Decides the number of replicas for the load. `target` is the desired plan; `pods` are those of functions.
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
    record_reports(observed, &mut history, &pods, window, now);
    let Some(target) = target else { return LoadScale { history, ..LoadScale::default() } };
    let policy = ScalingPolicy { target: f64::from(spec.scaling.target_percent) / 100.0, window };
    let room = u32::try_from(max_batch(&target.plan)).unwrap_or(u32::MAX);
    let main = &target.revision.main;
    let current = current_replicas(main, &pods);
    let bounds = MainReplicas {
        name: &main.name,
        present: current.max(main.replicas),
        least: main.replicas,
        most: spec.scaling.most(),
        room,
        serves: pods.iter().any(|pod| pod.is_main && pod.ready),
    };
    let mut wanted = vec![(main, current, main_replicas(&policy, &history, bounds, now))];
    if let Some(limits) = &spec.scaling.remote {
        let functions = &target.revision.remote;
        let current: Vec<(u32, Vec<String>)> = functions
            .iter()
            .map(|function| (current_replicas(function, &pods), addresses(function, &pods)))
            .collect();
        let remotes: Vec<RemoteReplicas<'_>> = functions
            .iter()
            .zip(&current)
            .map(|(function, (present, addresses))| RemoteReplicas {
                name: &function.name,
                addresses,
                present: *present,
                least: function.replicas,
                most: limits.max.max(function.replicas),
                bytes: function.bytes,
            })
            .collect();
        let memory = limits.memory_mb.map_or(u64::MAX, |memory| u64::from(memory) * MB);
        let counts = remote_replicas(&policy, &history, &remotes, memory, now);
        let present = current.iter().map(|(present, _)| *present);
        wanted.extend(
            functions
                .iter()
                .zip(present)
                .zip(counts)
                .map(|((function, current), count)| (function, current, count)),
        );
    }
    let changes: Vec<ReplicaChange> = wanted
        .iter()
        .filter_map(|(function, present, count)| change(&mut history, function, *present, *count))
        .collect();
    for change in changes.iter().filter(|change| change.to > change.from) {
        history.record_raise(&change.function, now);
    }
    let extra = |(function, _, count): &(&Function, u32, u32)| {
        (function.name.clone(), count.saturating_sub(function.replicas))
    };
    LoadScale { history, extra: wanted.iter().map(extra).collect(), changes }
}

/// Returns the change of `function` from `current` replicas to `wanted`, or to those of its plan if these are more.
fn change(
    history: &mut LoadHistory,
    function: &Function,
    current: u32,
    wanted: u32,
) -> Option<ReplicaChange> {
    let extra = wanted.saturating_sub(function.replicas);
    let to = Count { replicas: function.replicas, extra }.total_replicas();
    // A count that was decided earlier and not reached yet is no change.
    let from = history.set_wanted(&function.name, to).unwrap_or(current.max(function.replicas));
    (from != to).then(|| ReplicaChange {
        component: function.component,
        function: function.name.clone(),
        from,
        to,
    })
}

/// Returns the time until replicas may have to be removed without a new report. `is_scaled_up` is set if replicas run
/// because of load.
pub(super) fn requeue_after(inputs: Inputs<'_>, is_scaled_up: bool) -> Option<Duration> {
    let scaling = &inputs.owner.spec;
    let window: Duration = scaling.scaling.window.into();
    (scaling.follows_load() && (is_scaled_up || is_busy(inputs.observed))).then(|| window / 4)
}

fn is_busy(observed: &Observed) -> bool {
    observed.gateways_alive().any(|entry| entry.waiting > 0 || entry.in_flight > 0)
}

/// Adds the reports of gateways and main functions to `history`.
fn record_reports(
    observed: &Observed,
    history: &mut LoadHistory,
    pods: &[&PodView],
    window: Duration,
    now: Duration,
) {
    history.start_at(now);
    for entry in observed.gateways_alive() {
        let Some(load) = &entry.load else { continue };
        let report = GatewayReport {
            at: since_1970(load.at.0),
            occupied: Duration::from_millis(load.occupied_ms),
            requests: entry.waiting.saturating_add(entry.in_flight),
            waiting: entry.waiting,
            sequence: entry.sequence,
        };
        history.add_gateway_report(&entry.uid, report, window, now);
    }
    // Reports about other addresses are ignored.
    let remote: BTreeSet<String> =
        pods.iter().filter(|pod| !pod.is_main).filter_map(|pod| pod.expert_address()).collect();
    for (main, observation) in &observed.main_observations {
        let Some(RemoteWorkReport { age, computed }) = &observation.worked else { continue };
        let ours = computed.iter().filter(|(address, _)| remote.contains(*address));
        let computed = ours.map(|(address, time)| (address.clone(), *time)).collect();
        history.add_work_report(main, RemoteWorkReport { age: *age, computed }, window, now);
    }
    history.retain(
        |gateway| observed.gateways.contains(gateway),
        |main| pods.iter().any(|pod| pod.is_main && pod.uid == main),
    );
}

/// Returns the number of started replicas of `function` that are not terminating, including those of the revision
/// before: their successors get the same load.
fn current_replicas(function: &Function, pods: &[&PodView]) -> u32 {
    let pods_of_function = pods.iter().filter(|pod| pod.function == function.name);
    pods_of_function.map(|pod| pod.replica.saturating_add(1)).max().unwrap_or(0)
}

/// Returns the addresses at which main functions reach `function`.
fn addresses(function: &Function, pods: &[&PodView]) -> Vec<String> {
    pods.iter().filter(|pod| pod.function == function.name).filter_map(|pod| pod.expert_address()).collect()
}
