//! One served deployment: follows the operator's `MoEDemand`, and reports the load in its status.

use crate::cost_recorder::{CostRecorder, billing};
use crate::demand_writer::{DemandWriter, LastEntry, due, request_load, timeline};
use crate::main_functions::address_and_identity;
use crate::probes::MainProbes;
use crate::usage_learner::{UsageFollower, report_interval};
use http::HeaderValue;
use remoe_api::{DemandPhase, GroupDemand, MainFunction, MoEDemandSpec, WakeTimeline, tier};
use remoe_gateway_core::{
    Backend, ColdStart, CostAccounting, Directive, InactiveGroup, Model, ScalingPhase, WakeMarks,
};
use remoe_proto::identity::Keyring;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

/// Time after an entry that could not be written.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Served deployment.
pub(crate) struct ServedDeployment {
    pub(crate) model: Arc<Model>,
    demand: watch::Sender<MoEDemandSpec>,
    shutdown: watch::Sender<bool>,
    recorder: CostRecorder,
    tasks: JoinSet<()>,
}

impl ServedDeployment {
    /// Starts serving `model` by `demand`. Records costs in `cost_accounting` and expert usage in `learner`. `lease`
    /// is true while this gateway holds its Lease. `keyring` has the credentials for main functions.
    pub(crate) fn new(
        model: Arc<Model>,
        demand: MoEDemandSpec,
        cost_accounting: Arc<CostAccounting>,
        (demand_writer, learner): (DemandWriter, Arc<UsageFollower>),
        lease: watch::Receiver<bool>,
        keyring: Option<Arc<Keyring>>,
    ) -> Self {
        model.set_usage_observer(learner.learner.clone());
        let mut recorder = CostRecorder::new(cost_accounting.clone(), model.name());
        recorder.observe_pods(&demand.functions);
        let (demand, demands) = watch::channel(demand);
        let (shutdown, shutdown_receiver) = watch::channel(false);
        let mut tasks = JoinSet::new();
        let deadlines = model.clone();
        tasks.spawn(async move { deadlines.run_deadlines().await });
        tasks.spawn(follow_demand(model.clone(), demands.clone(), lease, keyring));
        tasks.spawn(learner.clone().follow_orders(demands.clone()));
        tasks.spawn(report_load(
            (model.clone(), learner, cost_accounting),
            demands,
            demand_writer,
            shutdown_receiver,
        ));
        Self { model, demand, shutdown, recorder, tasks }
    }

    /// Applies an update of the `MoEDemand`.
    pub(crate) fn update(&mut self, demand: MoEDemandSpec) {
        self.recorder.observe_pods(&demand.functions);
        let length = usize::try_from(demand.context_length).unwrap_or(usize::MAX);
        self.model.describe(short_names(self.model.name(), &demand), length);
        self.demand.send_if_modified(|known| {
            let is_changed = *known != demand;
            *known = demand;
            is_changed
        });
    }

    /// Ends the model of a removed deployment. Waiting requests are refused.
    pub(crate) fn end(mut self) {
        self.tasks.abort_all();
        self.model.end();
        self.recorder.observe_pods(&[]);
    }

    /// Removes this gateway's entry from the `MoEDemand`'s status.
    pub(crate) async fn withdraw(mut self) {
        self.shutdown.send_replace(true);
        // Only the reporting task ends by itself; aborted ones return an error.
        while let Some(ended) = self.tasks.join_next().await {
            if ended.is_ok() {
                break;
            }
        }
        self.tasks.abort_all();
    }
}

/// Returns the short names of the model: its served name, and its name without the namespace.
pub(crate) fn short_names(name: &str, demand: &MoEDemandSpec) -> Vec<String> {
    let own_name = name.split_once('/').map_or(name, |(_, own_name)| own_name).to_owned();
    let mut names = vec![demand.served_name.clone(), own_name];
    names.dedup();
    names
}

/// Applies the operator's demand and the probe results of main functions to the model, whenever one of them changes.
async fn follow_demand(
    model: Arc<Model>,
    mut demand: watch::Receiver<MoEDemandSpec>,
    mut lease: watch::Receiver<bool>,
    keyring: Option<Arc<Keyring>>,
) {
    let (changes, mut changed) = watch::channel(());
    let mut probes = MainProbes::new(changes, keyring);
    let mut marks = WakeMarks::default();
    let mut turn = 0;
    loop {
        let current = demand.borrow_and_update().clone();
        let holds_lease = *lease.borrow_and_update();
        probes.set_targets(&current.mains);
        changed.mark_unchanged();
        record_marks(&mut marks, &current, &probes);
        let serving = current.mains.iter().filter(|main| probes.result(&main.uid).serves);
        let backends = serving.filter_map(|main| backend(&current, main)).collect();
        // Without its Lease the gateway must queue requests: the operator may end functions without asking it.
        let must_queue = current.sleeps && !holds_lease;
        let phase = if must_queue { ScalingPhase::Draining } else { current.phase.into() };
        turn = if must_queue { turn } else { current.turn };
        model.follow_directive(Directive { phase, turn }, backends, marks);
        // Groups without experts belong to a model that is asleep.
        let groups = current.groups.iter().filter(|group| group.asleep || !group.experts.is_empty());
        let group = |group: &GroupDemand| InactiveGroup {
            name: tier(&group.name),
            experts: group.experts.clone(),
            asleep: group.asleep,
        };
        model.set_inactive_groups(groups.map(group).collect(), 0);
        let is_closed = tokio::select! {
            demand = demand.changed() => demand.is_err(),
            held = lease.changed() => held.is_err(),
            answered = changed.changed() => answered.is_err(),
        };
        if is_closed {
            return;
        }
    }
}

/// Records the times at which functions started, listened and served since the last sleep.
fn record_marks(marks: &mut WakeMarks, demand: &MoEDemandSpec, probes: &MainProbes) {
    if demand.phase == DemandPhase::Asleep {
        *marks = WakeMarks::default();
        return;
    }
    let now = Instant::now();
    let mut set_once = |mark: fn(&mut WakeMarks) -> &mut Option<Instant>, is_reached: bool| {
        if is_reached {
            mark(marks).get_or_insert(now);
        }
    };
    let any_main = |predicate: fn(crate::probes::ProbeResult) -> bool| {
        demand.mains.iter().any(|main| predicate(probes.result(&main.uid)))
    };
    set_once(|marks| &mut marks.started, !demand.mains.is_empty());
    set_once(|marks| &mut marks.listening, any_main(|result| result.listens));
    set_once(|marks| &mut marks.serving, any_main(|result| result.serves));
}

/// Makes the backend of `main`. Returns `None` if its address or identity is invalid.
fn backend(demand: &MoEDemandSpec, main: &MainFunction) -> Option<Backend> {
    let mut hasher = DefaultHasher::new();
    (&main.uid, &main.address).hash(&mut hasher);
    let (address, identity) = address_and_identity(main)?;
    Some(Backend {
        id: hasher.finish(),
        address,
        identity,
        capacity: usize::try_from(main.room).unwrap_or(usize::MAX).max(1),
        authorization: None::<HeaderValue>,
        billing: billing(demand, main),
    })
}

/// Writes an entry with the load whenever one is due, until `shutdown` is set. Then removes the entry.
async fn report_load(
    (model, learner, cost_accounting): (Arc<Model>, Arc<UsageFollower>, Arc<CostAccounting>),
    mut demand: watch::Receiver<MoEDemandSpec>,
    mut demand_writer: DemandWriter,
    mut shutdown: watch::Receiver<bool>,
) {
    let (mut loads, mut answered) = (model.watch_load(), learner.learner.answered_usage());
    // Last written entry, and the time of writing.
    let mut last_entry: Option<(LastEntry, Instant)> = None;
    // Latest cold start and its timeline. It is known before the answer ends, so the entry that reports the end
    // contains it.
    let mut last_wake: Option<(ColdStart, WakeTimeline)> = None;
    while !*shutdown.borrow_and_update() {
        let current = demand.borrow_and_update().clone();
        let load = *loads.borrow_and_update();
        let quiet = model.idle_time();
        last_wake = model.cold_start().map(|cold_start| match last_wake {
            Some(known) if known.0 == cold_start => known,
            _ => (cold_start, timeline(current.wakes, &cold_start)),
        });
        let before = last_entry.map(|(entry, written_at)| {
            let ago = written_at.elapsed();
            LastEntry { quiet: entry.quiet + ago, ago, ..entry }
        });
        let mut wait = due(&current, before, load, quiet);
        // Expert usage is not urgent, because no function sleeps or wakes by it: it waits for the pause.
        if let Some(pause) = report_interval(&current).filter(|_| answered.has_changed().unwrap_or(false)) {
            let remaining = before.map_or(Duration::ZERO, |entry| pause.saturating_sub(entry.ago));
            wait = Some(wait.map_or(remaining, |wait| wait.min(remaining)));
        }
        if wait == Some(Duration::ZERO) {
            answered.mark_unchanged();
            let mix = learner.mix(current.phase, load.waiting + load.in_flight).await;
            let request_time = current.follows_load.then(|| request_load(model.total_request_time()));
            if demand_writer
                .write(
                    load,
                    quiet,
                    cost_accounting.savings(model.name()),
                    (mix, request_time, last_wake.map(|(_, wake)| wake)),
                )
                .await
            {
                last_entry = Some((LastEntry { load, quiet, ago: Duration::ZERO }, Instant::now()));
            } else {
                answered.mark_changed();
                sleep(RETRY_INTERVAL).await;
            }
            continue;
        }
        tokio::select! {
            demand = demand.changed() => if demand.is_err() { return },
            load = loads.changed() => if load.is_err() { return },
            // The sender lives as long as the learner, so no error is expected.
            _more = answered.changed(), if report_interval(&current).is_some() && wait.is_none() => answered.mark_changed(),
            _over = shutdown.changed() => {}
            () = sleep(wait.unwrap_or(Duration::MAX)), if wait.is_some() => {}
        }
    }
    demand_writer.erase().await;
}
