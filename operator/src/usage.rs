//! Expert usage of requests as gateways report it, and when it requires a new plan: when functions wake, for the
//! waiting requests; while functions serve, for the answered ones. Pure.

use super::cooldown::Cooldown;
use super::inputs::Inputs;
use super::manifests::plan_name;
use super::observed::Observed;
use super::planning::Planning;
use super::pods::PodView;
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use remoe_api::MOST_SHARES;
use remoe_api::{
    DemandPhase, GatewayDemand, MixOf, MoEDeployment, MoEPlan, MoEPlanSpec, Mode, PlannedPrediction,
    PredictionOrder, Privacy, ProfileSource, Replan, RequestMix,
};
use remoe_model::Inspection;
use remoe_predictor::UsageShares;
use remoe_rollout::need::ExpectedPairs;
use std::time::Duration;

/// Answered requests required for a plan; older ones have less weight.
const MIN_ANSWERED_REQUESTS: u32 = 4;
/// Longest wake with a plan that followed requests. After that, if its pods are unschedulable or fail, the wake
/// continues with the plan before.
const MAX_WAKE_TIME: Duration = Duration::from_secs(300);
/// Tolerated lag of the API server's clock.
const CLOCK_SKEW: SignedDuration = SignedDuration::from_secs(60);
/// Replanning intervals without a new plan after one whose functions could not start.
const GIVEN_UP_INTERVALS: u32 = 10;

/// Returns what gateways must report about requests; absent if plans do not follow usage.
pub(crate) fn prediction_order(
    owner: &MoEDeployment,
    model: Option<&Inspection>,
    output_tokens: u32,
) -> Option<PredictionOrder> {
    let spec = &owner.spec.prediction;
    let model = model.filter(|model| spec.replan == Replan::Auto && !model.moe_layers.is_empty())?;
    Some(PredictionOrder {
        model: model.fingerprint.clone(),
        every_seconds: u32::try_from(interval(owner).as_secs()).unwrap_or(u32::MAX),
        counts_only: spec.privacy == Privacy::CountsOnly,
        output_tokens,
    })
}

fn interval(owner: &MoEDeployment) -> Duration {
    owner.spec.prediction.interval.into()
}

/// Returns the requests, if any, whose usage requires a search for a new plan now. `plan` is the desired plan with
/// its `hash`; `running` is the plan of the latest routing generation.
pub(crate) fn due_replan(
    inputs: Inputs<'_>,
    plan: &MoEPlan,
    hash: &str,
    running: Option<&str>,
) -> Option<MixOf> {
    let Inputs { owner, observed, soft_state, .. } = inputs;
    if owner.spec.prediction.replan == Replan::Never {
        return None;
    }
    let demand = observed.demand.as_ref()?;
    let waits = || observed.gateways_alive().any(|entry| entry.waiting > 0);
    match demand.spec.phase {
        // In mode Advisory a new plan would only be proposed and serve no waiting request.
        DemandPhase::Asleep if owner.spec.mode == Mode::Active && waits() => {
            (observed.now >= soft_state.cooldown.wake).then_some(MixOf::Waiting)
        }
        // Figures of a prior do not justify moving experts.
        DemandPhase::Active if running == Some(hash) && plan.spec.profile != ProfileSource::Prior => {
            let made = plan.metadata.creation_timestamp.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0);
            let is_old = elapsed(observed, made) >= interval(owner);
            (is_old && observed.now >= soft_state.cooldown.drift).then_some(MixOf::Answered)
        }
        _ => None,
    }
}

/// Returns the cooldown after a search that found no better plan.
pub(crate) fn cooldown_without_better_plan(
    owner: &MoEDeployment,
    observed: &Observed,
    before: Cooldown,
) -> Cooldown {
    Cooldown { drift: later(observed.now, interval(owner)), ..before }
}

/// Returns the cooldown after a plan that could not start.
pub(crate) fn cooldown_after_giving_up(owner: &MoEDeployment, observed: &Observed) -> Cooldown {
    let until = later(observed.now, interval(owner).saturating_mul(GIVEN_UP_INTERVALS));
    Cooldown { drift: until, wake: until }
}

fn earlier(time: Timestamp, by: SignedDuration) -> Timestamp {
    time.checked_sub(by).unwrap_or(Timestamp::MIN)
}

fn later(now: Timestamp, by: Duration) -> Timestamp {
    SignedDuration::try_from(by).ok().and_then(|by| now.checked_add(by).ok()).unwrap_or(Timestamp::MAX)
}

fn elapsed(observed: &Observed, since: Timestamp) -> Duration {
    Duration::try_from(observed.now.duration_since(since)).unwrap_or_default()
}

/// Sums up the usage that live gateways report for `model`: of waiting requests if `source` asks for them and some
/// are known, else of answered ones. Absent if too little is known.
pub(crate) fn observed_usage(
    owner: &MoEDeployment,
    observed: &Observed,
    model: &Inspection,
    source: MixOf,
    revision: u32,
) -> Option<PlannedPrediction> {
    let reported =
        |source| merged(owner, observed, model, source).map(|(shares, requests)| (source, shares, requests));
    let waiting = if source == MixOf::Waiting { reported(MixOf::Waiting) } else { None };
    let (source, shares, requests) = waiting.or_else(|| {
        reported(MixOf::Answered).filter(|(_, _, requests)| *requests >= MIN_ANSWERED_REQUESTS)
    })?;
    Some(PlannedPrediction { revision, of: source, requests, shares: shares.to_text(MOST_SHARES)? })
}

/// Returns the expert usage that functions start for: that of waiting requests if known, else the one that `plan` was
/// made for. Absent if neither is known.
pub(crate) fn expected(
    owner: &MoEDeployment,
    observed: &Observed,
    model: &Inspection,
    plan: &MoEPlanSpec,
) -> Option<UsageShares> {
    if owner.spec.prediction.replan == Replan::Never {
        return None;
    }
    let waiting = merged(owner, observed, model, MixOf::Waiting).map(|(shares, _)| shares);
    let planned = || {
        let shares = &plan.prediction.as_ref()?.shares;
        UsageShares::from_text(shares, model.moe_layers.len(), model.experts).ok()
    };
    waiting.or_else(planned)
}

/// Returns the (token, expert) pairs that waiting requests are expected to have; absent if nothing is known of them.
pub(crate) fn pairs_of_waiting(
    owner: &MoEDeployment,
    observed: &Observed,
    model: &Inspection,
) -> Option<ExpectedPairs> {
    let (shares, _) = merged(owner, observed, model, MixOf::Waiting)?;
    let reported = observed.gateways_alive().filter_map(|entry| read(entry, model, MixOf::Waiting));
    let tokens: f64 = reported.map(|(_, mix)| mix.tokens.max(1) as f64).sum();
    let layers = model.moe_layers.iter().map(|layer| u32::try_from(*layer).unwrap_or(u32::MAX));
    Some(ExpectedPairs::new(layers.collect(), shares.to_rows(), tokens * model.top_k as f64))
}

/// Returns the usage shares, weighted by tokens, and the number of requests. The weight of a gateway without new
/// requests halves with every interval.
fn merged(
    owner: &MoEDeployment,
    observed: &Observed,
    model: &Inspection,
    source: MixOf,
) -> Option<(UsageShares, u32)> {
    let (mut sum, mut requests) = (vec![0.0_f64; model.moe_layers.len() * model.experts], 0.0);
    let mut any_reported = false;
    for entry in observed.gateways_alive() {
        let Some((shares, mix)) = read(entry, model, source) else { continue };
        let intervals =
            elapsed(observed, entry.last_active.0).as_secs_f64() / interval(owner).as_secs_f64().max(1.0);
        let weight = if source == MixOf::Waiting { 1.0 } else { 0.5_f64.powf(intervals.floor()) };
        let tokens = weight * mix.tokens.max(1) as f64;
        let pairs = sum.iter_mut().zip(shares.values());
        pairs.for_each(|(sum, share)| *sum += tokens * f64::from(*share));
        requests += weight * f64::from(mix.requests);
        any_reported = true;
    }
    let weights = sum.into_iter().map(|value| value as f32).collect();
    let shares = any_reported.then(|| UsageShares::from_weights(model.experts, weights))?.ok()?;
    Some((shares, requests.round().min(f64::from(u32::MAX)) as u32))
}

/// Reads the report of `entry` about requests of this `source`, if it is about this very model.
fn read<'a>(
    entry: &'a GatewayDemand,
    model: &Inspection,
    source: MixOf,
) -> Option<(UsageShares, &'a RequestMix)> {
    let mix = entry.mix.as_ref().filter(|mix| mix.of == source && mix.model == model.fingerprint)?;
    // Invalid values of a faulty gateway are ignored.
    UsageShares::from_text(&mix.shares, model.moe_layers.len(), model.experts)
        .ok()
        .map(|shares| (shares, mix))
}

/// Returns those of `plans` that are for the spec of `planning`, whatever usage they were made for, newest first.
pub(crate) fn plans_of_spec<'a>(
    plans: impl Iterator<Item = &'a MoEPlan>,
    planning: &Planning,
) -> Vec<&'a MoEPlan> {
    let mut plans: Vec<&MoEPlan> = plans.filter(|plan| is_of_spec(&plan.spec, planning)).collect();
    // Of equal revisions the last.
    plans.reverse();
    plans.sort_by_key(|plan| std::cmp::Reverse(revision_of(&plan.spec)));
    plans
}

/// Returns whether `plan` is for the spec of `planning`.
pub(crate) fn is_of_spec(plan: &MoEPlanSpec, planning: &Planning) -> bool {
    match &plan.prediction {
        None => plan.inputs == planning.inputs,
        Some(prediction) => planning.inputs_expecting(prediction).is_ok_and(|inputs| inputs == plan.inputs),
    }
}

/// Returns whether `plan` followed requests and its functions cannot start. No other plan serves waiting requests
/// meanwhile, so a wake is given up sooner than a rollout. Slow loading of weights alone is not a reason.
pub(crate) fn is_given_up(owner: &MoEDeployment, observed: &Observed, plan: &MoEPlan) -> bool {
    // A plan that a user accepted is never given up.
    if plan.spec.prediction.is_none() || owner.spec.mode != Mode::Active {
        return false;
    }
    if failed_plan(owner).is_some_and(|hash| plan_name(&owner.name_any(), hash) == plan.name_any()) {
        return true;
    }
    // Only a plan made for this wake: older ones have served before.
    let made = plan.metadata.creation_timestamp.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0);
    let wake_takes_long = observed.demand.as_ref().is_some_and(|demand| {
        let (since, is_wake) = (demand.spec.since.0, demand.spec.phase == DemandPhase::Waking);
        is_wake
            && demand.spec.wakes > 0
            && made >= earlier(since, CLOCK_SKEW)
            && elapsed(observed, since) >= MAX_WAKE_TIME
    });
    let uid = owner.uid().unwrap_or_default();
    let mut pods = observed.pods.iter().filter_map(|pod| PodView::from_pod(pod, &uid, observed.now));
    // Its pods have been unschedulable for long, or keep failing.
    wake_takes_long
        && pods.any(|pod| {
            let is_old_pod = elapsed(observed, pod.created) >= MAX_WAKE_TIME / 2;
            pod.owned && pod.ends_by.is_none() && is_old_pod && (pod.ip.is_none() || pod.fault.is_some())
        })
}

/// Returns the plan that missed the progress deadline under the current spec.
pub(crate) fn failed_plan(owner: &MoEDeployment) -> Option<&str> {
    let status = owner.status.as_ref()?;
    let is_same_spec = status.observed_generation == owner.metadata.generation;
    status.failed_plan.as_deref().filter(|_| is_same_spec)
}

/// Returns the revision of a plan; 0 if it followed no usage.
pub(crate) fn revision_of(plan: &MoEPlanSpec) -> u32 {
    plan.prediction.as_ref().map_or(0, |prediction| prediction.revision)
}

/// Returns the revision of the next plan.
pub(crate) fn next_revision(plans: &[MoEPlan]) -> u32 {
    plans.iter().map(|plan| revision_of(&plan.spec)).max().unwrap_or(0).saturating_add(1)
}
