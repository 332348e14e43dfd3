//! How many functions run, as load goes: what gateways and main functions said of it, and what follows for the revision that
//! is to run. Pure.

use super::api::MoEDeployment;
use super::epoch::since_1970;
use super::events::Happening;
use super::manifests::{Function, Target, room};
use super::names::{Component, tier};
use super::observed::Observed;
use super::pods::PodView;
use super::quantity::MB;
use remoe_autoscale::replicas::{History, Mains, Policy, Remote, Said, Worked, mains, remote};
use std::collections::BTreeSet;
use std::time::Duration;

/// A function of which there are to be more or fewer from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Change {
    /// What kind of function.
    pub component: Component,
    /// Its name.
    pub function: String,
    /// Replicas until now.
    pub from: u32,
    /// Replicas from now on.
    pub to: u32,
}

impl Change {
    /// What is worth saying of it.
    pub(crate) fn happening(&self) -> Happening {
        let Self { from, to, .. } = self;
        let function = match self.component {
            Component::Main => "the main function".to_owned(),
            _ => tier(&self.function),
        };
        let note = format!("Scaled {function} from {from} to {to} replicas because of load.");
        Happening::normal("Scaled", note)
    }
}

/// Has `target` run as many functions as the load asks for that `observed`, whose functions are `pods`, and `history`, which
/// is brought up to date, tell of. What changes by that.
pub(crate) fn follow(
    owner: &MoEDeployment,
    (observed, pods): (&Observed, &[PodView]),
    history: &mut History,
    target: Option<&mut Target>,
) -> Vec<Change> {
    let spec = &owner.spec;
    // Without gateways nobody knows the load.
    if !spec.follows_load() || observed.demand.is_none() {
        *history = History::default();
        return Vec::new();
    }
    let window = spec.scaling.window.into();
    let now = since_1970(observed.now);
    let pods: Vec<&PodView> = pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none()).collect();
    listen(observed, history, &pods, window, now);
    let Some(target) = target else { return Vec::new() };
    let policy = Policy { target: f64::from(spec.scaling.target_percent) / 100.0, window };
    let room = u32::try_from(room(&target.plan)).unwrap_or(u32::MAX);
    let mut changes = Vec::new();
    let main = &mut target.revision.main;
    let there = present(main, &pods);
    let bounds = Mains {
        name: &main.name,
        present: there.max(main.replicas),
        least: main.replicas,
        most: spec.scaling.most(),
        room,
        serves: pods.iter().any(|pod| pod.is_main && pod.ready),
    };
    let wanted = mains(&policy, history, bounds, now);
    changes.extend(scale(history, main, there, wanted));
    if let Some(limits) = &spec.scaling.remote {
        let functions = &mut target.revision.remote;
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
        let wanted = remote(&policy, history, &seen, memory, now);
        for ((function, (present, _)), wanted) in functions.iter_mut().zip(&there).zip(wanted) {
            changes.extend(scale(history, function, *present, wanted));
        }
    }
    for change in changes.iter().filter(|change| change.to > change.from) {
        history.raised(&change.function, now);
    }
    changes
}

/// Has `function`, of which `present` are there, run as many as `wanted`, or as its plan says where these are more. What
/// changes by that.
fn scale(history: &mut History, function: &mut Function, present: u32, wanted: u32) -> Option<Change> {
    function.extra = wanted.saturating_sub(function.replicas);
    let to = function.most();
    // What was decided before and is not there yet is no change, whatever keeps it.
    let from = history.want(&function.name, to).unwrap_or(present.max(function.replicas));
    (from != to).then(|| Change { component: function.component, function: function.name.clone(), from, to })
}

/// When to look again at the latest, where nobody says anything and functions may be too many by then.
pub(crate) fn look_again(
    owner: &MoEDeployment,
    observed: &Observed,
    target: Option<&Target>,
) -> Option<Duration> {
    let is_more = target.is_some_and(|target| target.revision.functions().any(|function| function.extra > 0));
    let window: Duration = owner.spec.scaling.window.into();
    (owner.spec.follows_load() && (is_more || is_busy(observed))).then(|| window / 4)
}

fn is_busy(observed: &Observed) -> bool {
    observed.gateways_alive().any(|entry| entry.waiting > 0 || entry.in_flight > 0)
}

/// Takes note of what gateways and main functions said.
fn listen(observed: &Observed, history: &mut History, pods: &[&PodView], window: Duration, now: Duration) {
    history.look(now);
    for entry in observed.gateways_alive() {
        let Some(load) = &entry.load else { continue };
        let said = Said {
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
    for (main, heard) in &observed.heard {
        let Some(Worked { age, computed }) = &heard.worked else { continue };
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
