//! Decision on scale to zero and on the cold start from there: whether functions are to run, from the requests that gateways hold and the functions that
//! run. Pure.
//!
//! Level-based: it follows from what is there now. Before functions end, gateways are told to hold newcomers
//! (`Draining`) and all that live have to acknowledge it with nothing at hand. What they are told and what they say is
//! one object, [`MoEDemand`], which is written as it was read or not at all: a request that comes meanwhile is seen.

use super::groups::Groups;
use crate::billed_pods::billed_pods;
use crate::conditions::sentence;
use crate::events::ClusterEvent;
use crate::identity::identity_of;
use crate::inputs::Inputs;
use crate::manifests::{room, served_name};
use crate::names::Component;
use crate::ownership::{is_owned_by, owned_meta};
use crate::plan::PlanStage;
use crate::planning::served;
use crate::pods::PodView;
use crate::ports::HTTP_PORT;
use crate::resolve::Resolved;
use crate::status_issue::StatusIssue;
use crate::usage;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use remoe_api::{
    GatewayDemand, MainFunction, MoEDemand, MoEDemandSpec, MoEDeployment, PredictionOrder, WakePlanning,
    WakeTimeline,
};
use remoe_autoscale::scale_to_zero::{ScalingPhase, StepInputs, step};
use remoe_process::format_duration;
use remoe_rollout::functions::DEFAULT_MAX_BATCH;
use std::net::SocketAddr;
use std::time::Duration;

/// Shortest duration of a wake whose requests have gone: the next client need not wait for another wake.
const WAKE: Duration = Duration::from_secs(600);
/// Gateways acknowledge within a moment; one that died is noticed by looking.
const SOON: Duration = Duration::from_secs(1);
/// Interval of checks that gateways with requests still live.
const LATER: Duration = Duration::from_secs(15);

/// Decision on whether functions are to run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DemandDecision {
    /// Where the deployment is from now on.
    pub phase: ScalingPhase,
    /// Start of the phase; absent if the deployment cannot be scaled to zero.
    pub since: Option<Timestamp>,
    /// How often it was woken.
    pub wakes: u64,
    /// Demand object as gateways are to find it; absent without gateways.
    pub object: Option<MoEDemand>,
    /// Demand object without the entries of dead gateways; absent if all live.
    pub without_dead: Option<MoEDemand>,
    /// Trouble that keeps the deployment from scaling to zero.
    pub issue: Option<StatusIssue>,
    /// Events that are published once the object is written.
    pub events: Vec<ClusterEvent>,
    /// How the latest wake went, where a gateway says so.
    pub timeline: Option<WakeTimeline>,
    /// How it was planned, where it was.
    pub planning: Option<WakePlanning>,
    /// Change of the phase that is counted then: not the first start, which no request caused.
    pub change: Option<PhaseChange>,
    /// When to look again at the latest.
    pub requeue_after: Option<Duration>,
}

/// From one phase to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PhaseChange {
    /// Where the deployment was.
    pub from: ScalingPhase,
    /// Where it is from now on.
    pub to: ScalingPhase,
    /// How long it had been where it was.
    pub lasted: Duration,
}

impl DemandDecision {
    /// Returns the decision for a deployment whose functions run as long as it exists.
    pub(crate) fn always() -> Self {
        Self {
            phase: ScalingPhase::Active,
            since: None,
            wakes: 0,
            object: None,
            without_dead: None,
            issue: None,
            events: Vec::new(),
            timeline: None,
            planning: None,
            change: None,
            requeue_after: None,
        }
    }

    /// Reports if functions start because of a request.
    pub(crate) fn is_wake(&self) -> bool {
        self.phase == ScalingPhase::Waking && self.wakes > 0
    }
}

/// Returns whether functions are to run, and what gateways are told of it; `pods` are those of functions, and `groups` the
/// remote ones that sleep.
pub(super) fn demanded(
    inputs: Inputs<'_>,
    known: &Resolved,
    planned: &PlanStage,
    groups: &Groups,
    pods: &[PodView],
) -> DemandDecision {
    let Inputs { owner, observed, environment, .. } = inputs;
    let window = owner.spec.idle_window();
    if environment.gateway.is_none() {
        let message = "cannot scale to zero (spec.scaling.min is 0): the operator runs without gateways, which \
                       wake functions; set gateway.enabled in its chart, or spec.scaling.min to 1; until then \
                       functions keep running";
        return DemandDecision {
            issue: window.map(|_| StatusIssue::new("NoGateway", message)),
            ..DemandDecision::always()
        };
    }
    let uid = owner.metadata.uid.clone().unwrap_or_default();
    let live = observed.demand.as_ref().filter(|live| is_owned_by(*live, &uid));
    let before = live.map(|live| &live.spec);
    let now = observed.now;
    let phase = before.map_or(ScalingPhase::Waking, |before| before.phase.into());
    let since = before.map_or(now, |before| before.since.0);
    let wakes = before.map_or(0, |before| before.wakes);
    let all: &[GatewayDemand] = live.map_or(&[], MoEDemand::gateways);
    let (alive, dead): (Vec<_>, Vec<_>) =
        all.iter().partition(|entry| observed.gateways.contains(&entry.uid));
    let sum = |of: fn(&GatewayDemand) -> u32| alive.iter().map(|entry| of(entry) as usize).sum::<usize>();
    let (waiting, in_flight) = (sum(|entry| entry.waiting), sum(|entry| entry.in_flight));
    // A time to come is none: clocks differ.
    let times = alive.iter().map(|entry| entry.last_active.0.min(now));
    // The window is open from when functions woke up, not from when it was found closed; a new leader opens it again.
    let opened = matches!(phase, ScalingPhase::Active | ScalingPhase::Waking).then_some(since);
    let active = times.chain(opened).chain([observed.since]).max().unwrap_or(now);
    // Only who waits wakes functions: not who came and went, and no new leader.
    let quiet = if phase == ScalingPhase::Asleep { Duration::MAX } else { elapsed(active, now) };
    let turn = before.map_or(0, |before| before.turn);
    let acknowledges =
        |gateway: &String| alive.iter().any(|entry| entry.uid == *gateway && entry.acknowledged == turn);
    let serving = pods.iter().any(|pod| pod.is_main && pod.is_sound() && pod.ready);
    let next = step(
        phase,
        &StepInputs {
            waiting,
            in_flight,
            quiet,
            // The first start is not given up: there has been no request yet.
            idle: window.filter(|_| phase != ScalingPhase::Waking || wakes > 0),
            wake_limit: WAKE,
            serving,
            engine: observed
                .gateways
                .iter()
                .all(acknowledges)
                .then(|| u32::try_from(in_flight).unwrap_or(u32::MAX)),
        },
    );
    let changes = next != phase || before.is_none();
    // Several gateways may have held requests: what took longest is what a wake takes.
    let timelines =
        alive.iter().filter_map(|entry| entry.wake).filter(|wake| wake.wake == wakes && wakes > 0);
    let timeline = timelines.max_by_key(WakeTimeline::total_us);
    let planning = planned.chain.or_else(|| before?.planning).filter(|planning| planning.wake == wakes);
    // Published with the write that says so: once, also if the leader changes.
    let unreported_action = timeline.filter(|wake| before.is_some_and(|before| before.wake_told < wake.wake));
    let spec = MoEDemandSpec {
        served_name: served_name(owner),
        context_length: known.model.facts().map_or(0, |facts| {
            u32::try_from(served(&owner.spec, facts).served_context()).unwrap_or(u32::MAX)
        }),
        phase: next.into(),
        turn: turn.saturating_add(u64::from(changes)),
        since: MicroTime(if changes { now } else { since }),
        wakes: wakes.saturating_add(u64::from(phase == ScalingPhase::Asleep && next == ScalingPhase::Waking)),
        wake_told: unreported_action.map_or(before.map_or(0, |before| before.wake_told), |wake| wake.wake),
        planning: planned.chain.or_else(|| before?.planning),
        sleeps: window.is_some(),
        follows_load: owner.spec.follows_load(),
        mains: if next == ScalingPhase::Asleep { Vec::new() } else { mains(owner, planned, pods) },
        groups: if next == ScalingPhase::Asleep { Vec::new() } else { groups.groups.clone() },
        functions: billed_pods(
            owner,
            &observed.pods,
            matches!(next, ScalingPhase::Active | ScalingPhase::Waking),
        ),
        prediction: order(owner, known, planned),
    };
    let requeue_after = match next {
        ScalingPhase::Draining => Some(SOON),
        ScalingPhase::Active | ScalingPhase::Waking if waiting + in_flight > 0 => Some(LATER),
        ScalingPhase::Active => {
            window.map(|window| window.saturating_sub(elapsed(active, now)) + Duration::from_millis(100))
        }
        ScalingPhase::Waking => Some(LATER),
        ScalingPhase::Asleep => None,
    };
    DemandDecision {
        phase: next,
        since: Some(spec.since.0),
        wakes: spec.wakes,
        events: event((phase, next), elapsed(since, now), (waiting, window), wakes)
            .into_iter()
            .chain(unreported_action.map(|wake| told(&wake, planning.as_ref(), now)))
            .collect(),
        timeline,
        planning,
        change: (next != phase && (phase != ScalingPhase::Waking || wakes > 0)).then(|| PhaseChange {
            from: phase,
            to: next,
            lasted: elapsed(since, now),
        }),
        object: Some(object(owner, spec)),
        without_dead: live.filter(|_| !dead.is_empty()).map(|live| without(live, &dead)),
        issue: None,
        requeue_after: requeue_after.filter(|_| window.is_some()),
    }
}

/// Returns the facts that gateways are to find out about requests.
fn order(owner: &MoEDeployment, known: &Resolved, planned: &PlanStage) -> Option<PredictionOrder> {
    let tokens = planned.target.as_ref().map_or(0, |target| target.plan.workload.typical_output_tokens);
    usage::prediction_order(owner, known.model.facts().map(|facts| &facts.inspection), tokens)
}

fn elapsed(from: Timestamp, to: Timestamp) -> Duration {
    Duration::try_from(to.duration_since(from).max(SignedDuration::ZERO)).unwrap_or_default()
}

/// The main functions that requests may be sent to.
fn mains(owner: &MoEDeployment, planned: &PlanStage, pods: &[PodView]) -> Vec<MainFunction> {
    let room = planned.target.as_ref().map_or(DEFAULT_MAX_BATCH, |target| room(&target.plan));
    let mains = pods.iter().filter(|pod| pod.is_main && pod.is_sound());
    let mut mains: Vec<MainFunction> = mains
        .filter_map(|pod| {
            Some(MainFunction {
                uid: pod.uid.clone(),
                pod: pod.name.to_string(),
                address: SocketAddr::new(pod.ip?, HTTP_PORT).to_string(),
                identity: pod.knows_gateways.then(|| identity_of(owner, Component::Main).to_string()),
                room: u32::try_from(room).unwrap_or(u32::MAX),
            })
        })
        .collect();
    mains.sort_by(|one, other| one.pod.cmp(&other.pod));
    mains
}

fn object(owner: &MoEDeployment, spec: MoEDemandSpec) -> MoEDemand {
    MoEDemand { metadata: owned_meta(owner, str::to_owned), spec, status: None }
}

fn without(live: &MoEDemand, dead: &[&GatewayDemand]) -> MoEDemand {
    let mut left = live.clone();
    left.metadata.managed_fields = None;
    if let Some(status) = &mut left.status {
        status.gateways.retain(|entry| dead.iter().all(|dead| dead.uid != entry.uid));
    }
    left
}

/// Returns the event of a change of the phase, if it has one.
fn event(
    (from, to): (ScalingPhase, ScalingPhase),
    lasted: Duration,
    (waiting, window): (usize, Option<Duration>),
    wakes: u64,
) -> Option<ClusterEvent> {
    match (from, to) {
        (ScalingPhase::Draining | ScalingPhase::Waking, ScalingPhase::Asleep) => {
            Some(ClusterEvent::normal("Asleep", scaled_to_zero(window)))
        }
        (ScalingPhase::Asleep, ScalingPhase::Waking) => {
            let queued = match waiting {
                1 => "1 request is queued".to_owned(),
                waiting => format!("{waiting} requests are queued"),
            };
            Some(ClusterEvent::normal("Waking", format!("Waking: {queued}.")))
        }
        (ScalingPhase::Waking, ScalingPhase::Active) if wakes > 0 => {
            Some(ClusterEvent::normal("Awake", format!("Awake after {:.1} s.", lasted.as_secs_f64())))
        }
        _ => None,
    }
}

/// How a wake went.
fn told(wake: &WakeTimeline, planning: Option<&WakePlanning>, now: Timestamp) -> ClusterEvent {
    ClusterEvent::normal("FirstToken", sentence(&timeline(wake, planning))).of_wake(now)
}

/// Returns the time to the first token of a wake and its parts, for people.
pub(crate) fn timeline(wake: &WakeTimeline, planning: Option<&WakePlanning>) -> String {
    let seconds = |microseconds: u64| format!("{:.3} s", microseconds as f64 / 1e6);
    let parts = wake.parts().map(|(name, part)| format!("{name} {}", seconds(part)));
    let total = seconds(wake.total_us());
    let planned = planning.filter(|planning| planning.plan_us > 0).map_or_else(String::new, |planning| {
        let steps = planning.steps().map(|(name, step)| format!("{name} {}", seconds(step)));
        format!("; planned meanwhile: {}", steps.join(", "))
    });
    format!("wake {}: time to first token {total} ({}){planned}", wake.wake, parts.join(", "))
}

/// Returns why no function runs, for people; `window` is the idle window.
pub(crate) fn scaled_to_zero(window: Option<Duration>) -> String {
    let why = window.map(|window| format!(": no requests for {}", format_duration(window)));
    format!("Scaled to zero{}.", why.unwrap_or_default())
}
