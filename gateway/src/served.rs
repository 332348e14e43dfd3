//! One deployment behind the gateway: it goes where the operator says, and says what there is to do.

use crate::cost_recorder::{CostRecorder, billing};
use crate::demand_writer::{DemandWriter, LastEntry, due, request_load, timeline};
use crate::mains::place;
use crate::probes::Probes;
use crate::usage_learner::{UsageFollower, pause};
use http::HeaderValue;
use remoe_api::{DemandPhase, GroupDemand, MainFunction, MoEDemandSpec, WakeTimeline, tier};
use remoe_gateway_core::{
    ApartGroup, Backend, ColdStart, CostAccounting, Directive, Model, ScalingPhase, WakeMarks,
};
use remoe_proto::identity::Keyring;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

/// After an entry that could not be written.
const AGAIN: Duration = Duration::from_millis(200);

/// A deployment that is served.
pub(crate) struct Served {
    pub(crate) model: Arc<Model>,
    told: watch::Sender<MoEDemandSpec>,
    over: watch::Sender<bool>,
    recorder: CostRecorder,
    tasks: JoinSet<()>,
}

impl Served {
    /// Starts serving `model` as `told` describes it. Records its cost in `cost_accounting`, and its expert usage in
    /// `learner`. `lease` says whether this gateway is counted on, `keyring` has what it shows to main
    /// functions.
    pub(crate) fn new(
        model: Arc<Model>,
        told: MoEDemandSpec,
        cost_accounting: Arc<CostAccounting>,
        (demand_writer, learner): (DemandWriter, Arc<UsageFollower>),
        lease: watch::Receiver<bool>,
        keyring: Option<Arc<Keyring>>,
    ) -> Self {
        model.tell(learner.learner.clone());
        let mut recorder = CostRecorder::new(cost_accounting.clone(), model.name());
        recorder.look(&told.functions);
        let (told, telling) = watch::channel(told);
        let (over, ends) = watch::channel(false);
        let mut tasks = JoinSet::new();
        let clock = model.clone();
        tasks.spawn(async move { clock.keep_time().await });
        tasks.spawn(steer(model.clone(), telling.clone(), lease, keyring));
        tasks.spawn(learner.clone().keep(telling.clone()));
        tasks.spawn(note((model.clone(), learner, cost_accounting), telling, demand_writer, ends));
        Self { model, told, over, recorder, tasks }
    }

    /// Takes note of what the operator tells now.
    pub(crate) fn tell(&mut self, told: MoEDemandSpec) {
        self.recorder.look(&told.functions);
        let length = usize::try_from(told.context_length).unwrap_or(usize::MAX);
        self.model.describe(short_names(self.model.name(), &told), length);
        self.told.send_if_modified(|known| {
            let is_news = *known != told;
            *known = told;
            is_news
        });
    }

    /// Ends the model of a deployment that is gone: waiting requests are refused.
    pub(crate) fn end(mut self) {
        self.tasks.abort_all();
        self.model.end();
        self.recorder.look(&[]);
    }

    /// Takes back what was said about it.
    pub(crate) async fn forget(mut self) {
        self.over.send_replace(true);
        // The others never end.
        while let Some(ended) = self.tasks.join_next().await {
            if ended.is_ok() {
                break;
            }
        }
        self.tasks.abort_all();
    }
}

/// The names besides `NAMESPACE/NAME` that requests may use.
pub(crate) fn short_names(name: &str, told: &MoEDemandSpec) -> Vec<String> {
    let own = name.split_once('/').map_or(name, |(_, own)| own).to_owned();
    let mut names = vec![told.served_name.clone(), own];
    names.dedup();
    names
}

/// Has the model follow what the operator tells and what main functions answer.
async fn steer(
    model: Arc<Model>,
    mut told: watch::Receiver<MoEDemandSpec>,
    mut lease: watch::Receiver<bool>,
    keyring: Option<Arc<Keyring>>,
) {
    let (changes, mut changed) = watch::channel(());
    let mut probes = Probes::new(changes, keyring);
    let mut marks = WakeMarks::default();
    let mut turn = 0;
    loop {
        let now = told.borrow_and_update().clone();
        let is_counted_on = *lease.borrow_and_update();
        probes.keep(&now.mains);
        changed.mark_unchanged();
        mark(&mut marks, &now, &probes);
        let serving = now.mains.iter().filter(|main| probes.answers(&main.uid).serves);
        let backends = serving.filter_map(|main| backend(&now, main)).collect();
        // A gateway that is not counted on must not send requests to functions that may end without asking it.
        let holds = now.sleeps && !is_counted_on;
        let phase = if holds { ScalingPhase::Draining } else { now.phase.into() };
        turn = if holds { turn } else { now.turn };
        model.follow(Directive { phase, turn }, backends, marks);
        // Those of a model of which nothing runs are none.
        let groups = now.groups.iter().filter(|group| group.asleep || !group.experts.is_empty());
        let group = |group: &GroupDemand| ApartGroup {
            name: tier(&group.name),
            experts: group.experts.clone(),
            asleep: group.asleep,
        };
        model.groups_are(groups.map(group).collect(), 0);
        let over = tokio::select! {
            told = told.changed() => told.is_err(),
            held = lease.changed() => held.is_err(),
            answered = changed.changed() => answered.is_err(),
        };
        if over {
            return;
        }
    }
}

/// Notes how far functions have come since they were last asleep.
fn mark(marks: &mut WakeMarks, told: &MoEDemandSpec, probes: &Probes) {
    if told.phase == DemandPhase::Asleep {
        *marks = WakeMarks::default();
        return;
    }
    let now = Instant::now();
    let mut reached = |mark: fn(&mut WakeMarks) -> &mut Option<Instant>, is: bool| {
        if is {
            mark(marks).get_or_insert(now);
        }
    };
    let any =
        |is: fn(crate::probes::Answers) -> bool| told.mains.iter().any(|main| is(probes.answers(&main.uid)));
    reached(|marks| &mut marks.started, !told.mains.is_empty());
    reached(|marks| &mut marks.listening, any(|answers| answers.listens));
    reached(|marks| &mut marks.serving, any(|answers| answers.serves));
}

fn backend(told: &MoEDemandSpec, main: &MainFunction) -> Option<Backend> {
    let mut hasher = DefaultHasher::new();
    (&main.uid, &main.address).hash(&mut hasher);
    let (address, identity) = place(main)?;
    Some(Backend {
        id: hasher.finish(),
        address,
        identity,
        capacity: usize::try_from(main.room).unwrap_or(usize::MAX).max(1),
        authorization: None::<HeaderValue>,
        billing: billing(told, main),
    })
}

/// Says what there is to do when that is due, until it is `over`.
async fn note(
    (model, learner, cost_accounting): (Arc<Model>, Arc<UsageFollower>, Arc<CostAccounting>),
    mut told: watch::Receiver<MoEDemandSpec>,
    mut demand_writer: DemandWriter,
    mut over: watch::Receiver<bool>,
) {
    let (mut loads, mut answered) = (model.loads(), learner.learner.answered_usage());
    // What was said, and when.
    let mut said: Option<(LastEntry, Instant)> = None;
    // The latest wake after which a request was answered, and what is reported of it. It is known before the end of
    // that answer is: the entry that reports the end has it.
    let mut woken: Option<(ColdStart, WakeTimeline)> = None;
    while !*over.borrow_and_update() {
        let now = told.borrow_and_update().clone();
        let load = *loads.borrow_and_update();
        let quiet = model.quiet();
        woken = model.cold_start().map(|cold_start| match woken {
            Some(known) if known.0 == cold_start => known,
            _ => (cold_start, timeline(now.wakes, &cold_start)),
        });
        let before = said.map(|(said, at)| {
            let ago = at.elapsed();
            LastEntry { quiet: said.quiet + ago, ago, ..said }
        });
        let mut wait = due(&now, before, load, quiet);
        // No function sleeps or wakes because of it: it may wait for the pause.
        if let Some(pause) = pause(&now).filter(|_| answered.has_changed().unwrap_or(false)) {
            let rest = before.map_or(Duration::ZERO, |said| pause.saturating_sub(said.ago));
            wait = Some(wait.map_or(rest, |wait| wait.min(rest)));
        }
        if wait == Some(Duration::ZERO) {
            answered.mark_unchanged();
            let mix = learner.mix(now.phase, load.waiting + load.in_flight).await;
            let took = now.follows_load.then(|| request_load(model.occupied()));
            if demand_writer
                .write(
                    load,
                    quiet,
                    cost_accounting.saved(model.name()),
                    (mix, took, woken.map(|(_, wake)| wake)),
                )
                .await
            {
                said = Some((LastEntry { load, quiet, ago: Duration::ZERO }, Instant::now()));
            } else {
                answered.mark_changed();
                sleep(AGAIN).await;
            }
            continue;
        }
        tokio::select! {
            told = told.changed() => if told.is_err() { return },
            load = loads.changed() => if load.is_err() { return },
            // Its other end lives as long as the learner.
            _more = answered.changed(), if pause(&now).is_some() && wait.is_none() => answered.mark_changed(),
            _over = over.changed() => {}
            () = sleep(wait.unwrap_or(Duration::MAX)), if wait.is_some() => {}
        }
    }
    demand_writer.erase().await;
}
