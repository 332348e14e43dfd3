//! Scale to zero and wake: decides from the requests that gateways hold, and from the running functions, whether
//! functions run. Pure.
//!
//! The decision is level-based: it follows from the current state. Before functions stop, gateways are told to hold
//! new requests (`Draining`), and all live gateways must acknowledge without a request at hand. Both directions use
//! one object, [`MoEDemand`], with optimistic concurrency: a write fails if the object changed since it was read, so
//! no request is missed.

use super::groups::Groups;
use crate::billed_pods::billed_pods;
use crate::conditions::sentence;
use crate::events::ClusterEvent;
use crate::identity::identity_of;
use crate::inputs::Inputs;
use crate::manifests::{max_batch, served_name};
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

/// Minimum duration of a wake whose requests are gone, so that the next client need not wait for another wake.
const MIN_WAKE_DURATION: Duration = Duration::from_secs(600);
/// Interval of reconciles while gateways acknowledge; it also detects dead ones.
const DRAINING_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of reconciles that check if gateways with requests are still alive.
const LIVENESS_INTERVAL: Duration = Duration::from_secs(15);

/// Decision whether functions run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DemandDecision {
    /// New phase of the deployment.
    pub phase: ScalingPhase,
    /// Start of the phase; absent if the deployment cannot be scaled to zero.
    pub since: Option<Timestamp>,
    /// Number of wakes so far.
    pub wakes: u64,
    /// Desired demand object; absent without gateways.
    pub object: Option<MoEDemand>,
    /// Demand object without the entries of dead gateways; absent if all are alive.
    pub without_dead: Option<MoEDemand>,
    /// Issue that prevents scale to zero.
    pub issue: Option<StatusIssue>,
    /// Events that are published once the object is written.
    pub events: Vec<ClusterEvent>,
    /// Timeline of the latest wake, if a gateway reported it.
    pub timeline: Option<WakeTimeline>,
    /// Times of planning for the latest wake, if it was planned.
    pub planning: Option<WakePlanning>,
    /// Phase change to count in the metrics. The first start is not counted, since no request caused it.
    pub change: Option<PhaseChange>,
    /// Longest time until the next reconcile.
    pub requeue_after: Option<Duration>,
}

/// Change of the phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PhaseChange {
    /// Old phase.
    pub from: ScalingPhase,
    /// New phase.
    pub to: ScalingPhase,
    /// Duration of the old phase.
    pub lasted: Duration,
}

impl DemandDecision {
    /// Returns the decision for a deployment that never scales to zero.
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

    /// Returns whether functions are starting because of a request.
    pub(crate) fn is_wake(&self) -> bool {
        self.phase == ScalingPhase::Waking && self.wakes > 0
    }
}

/// Decides whether functions run, and builds the demand object for gateways. `pods` are those of functions, and
/// `groups` the state of remote functions.
pub(super) fn demanded(
    inputs: Inputs<'_>,
    resolved: &Resolved,
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
    // Clocks differ: times in the future are clamped.
    let times = alive.iter().map(|entry| entry.last_active.0.min(now));
    // The idle window starts when functions woke, and again with a new leader, which has not observed earlier
    // requests.
    let window_start = matches!(phase, ScalingPhase::Active | ScalingPhase::Waking).then_some(since);
    let active = times.chain(window_start).chain([observed.since]).max().unwrap_or(now);
    // Only waiting requests wake functions, not past ones, nor a new leader.
    let quiet = if phase == ScalingPhase::Asleep { Duration::MAX } else { elapsed(active, now) };
    let turn = before.map_or(0, |before| before.turn);
    let has_acknowledged =
        |gateway: &String| alive.iter().any(|entry| entry.uid == *gateway && entry.acknowledged == turn);
    let serving = pods.iter().any(|pod| pod.is_main && pod.is_sound() && pod.ready);
    let next = step(
        phase,
        &StepInputs {
            waiting,
            in_flight,
            quiet,
            // The first start is never abandoned, although no request has come yet.
            idle: window.filter(|_| phase != ScalingPhase::Waking || wakes > 0),
            wake_limit: MIN_WAKE_DURATION,
            serving,
            engine: observed
                .gateways
                .iter()
                .all(has_acknowledged)
                .then(|| u32::try_from(in_flight).unwrap_or(u32::MAX)),
        },
    );
    let changes = next != phase || before.is_none();
    // Several gateways may have held requests: the slowest one determines the duration of the wake.
    let timelines =
        alive.iter().filter_map(|entry| entry.wake).filter(|wake| wake.wake == wakes && wakes > 0);
    let timeline = timelines.max_by_key(WakeTimeline::total_us);
    let planning = planned.wake_times.or_else(|| before?.planning).filter(|planning| planning.wake == wakes);
    // Published with the write that records it, so that it is published once even if the leader changes.
    let unreported_action = timeline.filter(|wake| before.is_some_and(|before| before.wake_told < wake.wake));
    let spec = MoEDemandSpec {
        served_name: served_name(owner),
        context_length: resolved.model.facts().map_or(0, |facts| {
            u32::try_from(served(&owner.spec, facts).served_context()).unwrap_or(u32::MAX)
        }),
        phase: next.into(),
        turn: turn.saturating_add(u64::from(changes)),
        since: MicroTime(if changes { now } else { since }),
        wakes: wakes.saturating_add(u64::from(phase == ScalingPhase::Asleep && next == ScalingPhase::Waking)),
        wake_told: unreported_action.map_or(before.map_or(0, |before| before.wake_told), |wake| wake.wake),
        planning: planned.wake_times.or_else(|| before?.planning),
        sleeps: window.is_some(),
        follows_load: owner.spec.follows_load(),
        mains: if next == ScalingPhase::Asleep { Vec::new() } else { routable_mains(owner, planned, pods) },
        groups: if next == ScalingPhase::Asleep { Vec::new() } else { groups.groups.clone() },
        functions: billed_pods(
            owner,
            &observed.pods,
            matches!(next, ScalingPhase::Active | ScalingPhase::Waking),
        ),
        prediction: prediction_order(owner, resolved, planned),
    };
    let requeue_after = match next {
        ScalingPhase::Draining => Some(DRAINING_INTERVAL),
        ScalingPhase::Active | ScalingPhase::Waking if waiting + in_flight > 0 => Some(LIVENESS_INTERVAL),
        ScalingPhase::Active => {
            window.map(|window| window.saturating_sub(elapsed(active, now)) + Duration::from_millis(100))
        }
        ScalingPhase::Waking => Some(LIVENESS_INTERVAL),
        ScalingPhase::Asleep => None,
    };
    DemandDecision {
        phase: next,
        since: Some(spec.since.0),
        wakes: spec.wakes,
        events: phase_event((phase, next), elapsed(since, now), (waiting, window), wakes)
            .into_iter()
            .chain(unreported_action.map(|wake| timeline_event(&wake, planning.as_ref(), now)))
            .collect(),
        timeline,
        planning,
        change: (next != phase && (phase != ScalingPhase::Waking || wakes > 0)).then(|| PhaseChange {
            from: phase,
            to: next,
            lasted: elapsed(since, now),
        }),
        object: Some(object(owner, spec)),
        without_dead: live.filter(|_| !dead.is_empty()).map(|live| without_gateways(live, &dead)),
        issue: None,
        requeue_after: requeue_after.filter(|_| window.is_some()),
    }
}

/// Returns what gateways must report about requests.
fn prediction_order(
    owner: &MoEDeployment,
    resolved: &Resolved,
    planned: &PlanStage,
) -> Option<PredictionOrder> {
    let tokens = planned.target.as_ref().map_or(0, |target| target.plan.workload.typical_output_tokens);
    usage::prediction_order(owner, resolved.model.facts().map(|facts| &facts.inspection), tokens)
}

fn elapsed(from: Timestamp, to: Timestamp) -> Duration {
    Duration::try_from(to.duration_since(from).max(SignedDuration::ZERO)).unwrap_or_default()
}

/// Returns the main functions that gateways may send requests to.
fn routable_mains(owner: &MoEDeployment, planned: &PlanStage, pods: &[PodView]) -> Vec<MainFunction> {
    let room = planned.target.as_ref().map_or(DEFAULT_MAX_BATCH, |target| max_batch(&target.plan));
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

fn without_gateways(live: &MoEDemand, dead: &[&GatewayDemand]) -> MoEDemand {
    let mut demand = live.clone();
    demand.metadata.managed_fields = None;
    if let Some(status) = &mut demand.status {
        status.gateways.retain(|entry| dead.iter().all(|dead| dead.uid != entry.uid));
    }
    demand
}

/// Returns the event of a phase change, if it has one.
fn phase_event(
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

/// Returns the event about the timeline of a wake.
fn timeline_event(wake: &WakeTimeline, planning: Option<&WakePlanning>, now: Timestamp) -> ClusterEvent {
    ClusterEvent::normal("FirstToken", sentence(&timeline(wake, planning))).of_wake(now)
}

/// Describes the time to first token of a wake and its parts.
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

/// Describes why no function runs; `window` is the idle window.
pub(crate) fn scaled_to_zero(window: Option<Duration>) -> String {
    let why = window.map(|window| format!(": no requests for {}", format_duration(window)));
    format!("Scaled to zero{}.", why.unwrap_or_default())
}
