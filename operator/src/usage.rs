//! Expert usage of requests, as gateways report it, and whether another plan is due for it: for requests that wait, when
//! functions wake, and for answered ones, while functions serve. Pure.

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
use remoe_predictor::Shares;
use remoe_rollout::need::ExpectedPairs;
use std::time::Duration;

/// Answered requests to go by before a plan is made for them, older ones counting for less than one.
const ENOUGH: u32 = 4;
/// A wake that takes longer by a plan that followed requests goes on by the plan before, where pods find no place or fail.
const PATIENCE: Duration = Duration::from_secs(300);
/// By how much the API server's clock may be behind.
const CLOCKS: SignedDuration = SignedDuration::from_secs(60);
/// Intervals without another plan after one that could not start.
const GIVEN_UP_INTERVALS: u32 = 10;

/// Returns the facts that gateways are to find out about requests; absent if plans do not follow.
pub(crate) fn order(
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

/// Returns the kind of requests, if any, that a search for another plan is due for now: requests other than those that
/// `plan`, which is to run, was made for. `running` is the name of the plan that main functions were last told of.
pub(crate) fn due(inputs: Inputs<'_>, plan: &MoEPlan, hash: &str, running: Option<&str>) -> Option<MixOf> {
    let Inputs { owner, observed, soft_state, .. } = inputs;
    if owner.spec.prediction.replan == Replan::Never {
        return None;
    }
    let demand = observed.demand.as_ref()?;
    let waits = || observed.gateways_alive().any(|entry| entry.waiting > 0);
    match demand.spec.phase {
        // A plan that is only proposed serves no waiting request.
        DemandPhase::Asleep if owner.spec.mode == Mode::Active && waits() => {
            (observed.now >= soft_state.cooldown.wake).then_some(MixOf::Waiting)
        }
        // A prior, which is not measured, is no reason to move experts.
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

/// Sums up what live gateways report of requests to `model`: of waiting ones, if `of` asks for them and anything is
/// known of them, else of answered ones. Absent if too little is known.
pub(crate) fn heard(
    owner: &MoEDeployment,
    observed: &Observed,
    model: &Inspection,
    of: MixOf,
    revision: u32,
) -> Option<PlannedPrediction> {
    let said = |of| merged(owner, observed, model, of).map(|(shares, requests)| (of, shares, requests));
    let waiting = if of == MixOf::Waiting { said(MixOf::Waiting) } else { None };
    let (of, shares, requests) =
        waiting.or_else(|| said(MixOf::Answered).filter(|(_, _, requests)| *requests >= ENOUGH))?;
    Some(PlannedPrediction { revision, of, requests, shares: shares.to_text(MOST_SHARES)? })
}

/// Returns the expert usage that functions start for: that of waiting requests, as far as anything is known of them,
/// else the one that `plan`, by which they start, was made for. Absent if neither is known.
pub(crate) fn expected(
    owner: &MoEDeployment,
    observed: &Observed,
    model: &Inspection,
    plan: &MoEPlanSpec,
) -> Option<Shares> {
    if owner.spec.prediction.replan == Replan::Never {
        return None;
    }
    let waiting = merged(owner, observed, model, MixOf::Waiting).map(|(shares, _)| shares);
    let planned = || {
        let shares = &plan.prediction.as_ref()?.shares;
        Shares::from_text(shares, model.moe_layers.len(), model.experts).ok()
    };
    waiting.or_else(planned)
}

/// The (token, expert) pairs that those who wait are expected to have; none where nothing is known of them.
pub(crate) fn pairs_of_waiting(
    owner: &MoEDeployment,
    observed: &Observed,
    model: &Inspection,
) -> Option<ExpectedPairs> {
    let (shares, _) = merged(owner, observed, model, MixOf::Waiting)?;
    let said = observed.gateways_alive().filter_map(|entry| read(entry, model, MixOf::Waiting));
    let tokens: f64 = said.map(|(_, mix)| mix.tokens.max(1) as f64).sum();
    let layers = model.moe_layers.iter().map(|layer| u32::try_from(*layer).unwrap_or(u32::MAX));
    Some(ExpectedPairs::new(layers.collect(), shares.to_rows(), tokens * model.top_k as f64))
}

/// Shares by tokens, and requests. What was answered by a gateway that has had no request since counts for half as much after
/// every interval.
fn merged(
    owner: &MoEDeployment,
    observed: &Observed,
    model: &Inspection,
    of: MixOf,
) -> Option<(Shares, u32)> {
    let (mut sum, mut requests) = (vec![0.0_f64; model.moe_layers.len() * model.experts], 0.0);
    let mut is_said = false;
    for entry in observed.gateways_alive() {
        let Some((shares, mix)) = read(entry, model, of) else { continue };
        let intervals =
            elapsed(observed, entry.last_active.0).as_secs_f64() / interval(owner).as_secs_f64().max(1.0);
        let kept = if of == MixOf::Waiting { 1.0 } else { 0.5_f64.powf(intervals.floor()) };
        let tokens = kept * mix.tokens.max(1) as f64;
        let pairs = sum.iter_mut().zip(shares.values());
        pairs.for_each(|(sum, share)| *sum += tokens * f64::from(*share));
        requests += kept * f64::from(mix.requests);
        is_said = true;
    }
    let weights = sum.into_iter().map(|value| value as f32).collect();
    let shares = is_said.then(|| Shares::from_weights(model.experts, weights))?.ok()?;
    Some((shares, requests.round().min(f64::from(u32::MAX)) as u32))
}

/// Reads the report of `entry` about requests `of` this kind, if it is about this very model.
fn read<'a>(entry: &'a GatewayDemand, model: &Inspection, of: MixOf) -> Option<(Shares, &'a RequestMix)> {
    let mix = entry.mix.as_ref().filter(|mix| mix.of == of && mix.model == model.fingerprint)?;
    // Only gateways write there; values that they cannot have meant are left out.
    Shares::from_text(&mix.shares, model.moe_layers.len(), model.experts).ok().map(|shares| (shares, mix))
}

/// The plans among `plans` for the spec that `planning` is of, whatever requests were expected to use, the newest first.
pub(crate) fn of_spec<'a>(plans: impl Iterator<Item = &'a MoEPlan>, planning: &Planning) -> Vec<&'a MoEPlan> {
    let mut plans: Vec<&MoEPlan> = plans.filter(|plan| is_of_spec(&plan.spec, planning)).collect();
    // Of equal ones the last.
    plans.reverse();
    plans.sort_by_key(|plan| std::cmp::Reverse(revision_of(&plan.spec)));
    plans
}

/// Returns whether `plan` is for the spec that `planning` is of.
pub(crate) fn is_of_spec(plan: &MoEPlanSpec, planning: &Planning) -> bool {
    match &plan.prediction {
        None => plan.inputs == planning.inputs,
        Some(prediction) => planning.inputs_expecting(prediction).is_ok_and(|inputs| inputs == plan.inputs),
    }
}

/// Reports if `plan` followed requests and functions cannot start by it. Waiting requests have no other plan to be
/// served by meanwhile: functions that wake are given less time than those that replace others. Weights that take long
/// to load are waited for.
pub(crate) fn is_given_up(owner: &MoEDeployment, observed: &Observed, plan: &MoEPlan) -> bool {
    // What a person accepted is his to take back.
    if plan.spec.prediction.is_none() || owner.spec.mode != Mode::Active {
        return false;
    }
    if failed_plan(owner).is_some_and(|hash| plan_name(&owner.name_any(), hash) == plan.name_any()) {
        return true;
    }
    // One that was made for this wake: others have served.
    let made = plan.metadata.creation_timestamp.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0);
    let wakes_long = observed.demand.as_ref().is_some_and(|demand| {
        let (since, is_wake) = (demand.spec.since.0, demand.spec.phase == DemandPhase::Waking);
        is_wake
            && demand.spec.wakes > 0
            && made >= earlier(since, CLOCKS)
            && elapsed(observed, since) >= PATIENCE
    });
    let uid = owner.uid().unwrap_or_default();
    let mut pods = observed.pods.iter().filter_map(|pod| PodView::of(pod, &uid, observed.now));
    // Its pods have stood for as long without a place, or end as often as they start.
    wakes_long
        && pods.any(|pod| {
            let stands_long = elapsed(observed, pod.created) >= PATIENCE / 2;
            pod.owned && pod.ends_by.is_none() && stands_long && (pod.ip.is_none() || pod.fault.is_some())
        })
}

/// The plan that did not become ready in time under the present spec.
pub(crate) fn failed_plan(owner: &MoEDeployment) -> Option<&str> {
    let status = owner.status.as_ref()?;
    let is_same_spec = status.observed_generation == owner.metadata.generation;
    status.failed_plan.as_deref().filter(|_| is_same_spec)
}

/// The number of a plan; 0 of one that followed nothing.
pub(crate) fn revision_of(plan: &MoEPlanSpec) -> u32 {
    plan.prediction.as_ref().map_or(0, |prediction| prediction.revision)
}

/// The number of the next plan.
pub(crate) fn next_revision(plans: &[MoEPlan]) -> u32 {
    plans.iter().map(|plan| revision_of(&plan.spec)).max().unwrap_or(0).saturating_add(1)
}
