//! One look at a deployment, as one straight line:
//!
//! `Observed -> Known -> Planned (with its Revision) -> Steps (with what is Demanded) -> Applied -> Status`.
//!
//! The stages decide; this module hands on from one to the next. Plans are made beside it ([`planner`](super::planner)).

use super::api::MoEDeployment;
use super::applied::{ApplyError, apply};
use super::build::Surroundings;
use super::calls::{CallError, Calls};
use super::conversations::Conversations;
use super::events::{publish, transitions};
use super::fleet::{Others, Silence};
use super::following::{rest_after_giving_up, rest_after_nothing};
use super::gateways::Gateways;
use super::identity::{Certified, Identities, IdentityFailure};
use super::known::know;
use super::load;
use super::metrics::Metrics;
use super::observed::{ObserveError, observe};
use super::per_deployment::PerDeployment;
use super::planned::{Planned, task};
use super::planner::{Planner, Pooled, plan};
use super::planning_pool::PlanningPool;
use super::rest::Rest;
use super::resting;
use super::starting::Starting;
use super::status::{Findings, status};
use super::steps::{Write, steps};
use super::turn::{self, Turns};
use futures_util::FutureExt;
use kube::runtime::events::Recorder;
use kube::runtime::reflector::ObjectRef;
use kube::{Client, ResourceExt};
use remoe_scaling::History;
use remoe_sleep::Phase;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use tokio::join;

/// What every run works with.
pub(super) struct Context {
    /// The API.
    pub(super) client: Client,
    /// What the operator was told.
    pub(super) around: Surroundings,
    /// Who is who.
    pub(super) identities: Arc<Identities>,
    /// Where events are published.
    pub(super) recorder: Recorder,
    /// What is counted.
    pub(super) metrics: Metrics,
    /// What is said to main functions, and what they say.
    pub(super) conversations: Conversations,
    /// Remote functions that start.
    pub(super) starting: Starting,
    /// What looks at all deployments saw.
    pub(super) fleet: PerDeployment<Silence>,
    /// Who is made anew although nobody asked.
    pub(super) turns: Turns,
    /// Who holds requests; none: nobody does.
    pub(super) gateways: Option<Gateways>,
    /// Until when plans that follow requests are not looked for.
    pub(super) rests: PerDeployment<Rest>,
    /// What was said of load of late.
    pub(super) loads: PerDeployment<History>,
    /// Threads that make plans.
    pub(super) pool: PlanningPool,
}

/// Why a run came to nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReconcileError {
    /// A call of the API.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A value that cannot be written as JSON.
    #[error("cannot write JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// Nobody can be told who is who.
    #[error(transparent)]
    Identity(IdentityFailure),
    /// Something is there that was not read.
    #[error("{0} changed since it was read")]
    Stale(String),
    /// A defect of this program: what belongs to this deployment led it where it should not go.
    #[error("operator bug: reconcile panicked: {0}; please report it")]
    Panicked(String),
}

impl From<IdentityFailure> for ReconcileError {
    fn from(failure: IdentityFailure) -> Self {
        match failure {
            IdentityFailure::Call(error) => Self::Call(error),
            failure => Self::Identity(failure),
        }
    }
}

impl From<ObserveError> for ReconcileError {
    fn from(error: ObserveError) -> Self {
        match error {
            ObserveError::Call(error) => Self::Call(error),
            ObserveError::Json(error) => Self::Json(error),
        }
    }
}

impl From<ApplyError> for ReconcileError {
    fn from(error: ApplyError) -> Self {
        match error {
            ApplyError::Call(error) => Self::Call(error),
            ApplyError::Stale(name) => Self::Stale(name),
        }
    }
}

impl ReconcileError {
    /// Whether the namespace is being deleted.
    pub(super) fn namespace_ends(&self) -> bool {
        matches!(self, Self::Call(error) if error.namespace_ends())
    }

    /// What was tried, where a person must mend something that no condition names: the operator's role, an
    /// object that the API refuses, or the operator itself.
    pub(super) fn untold(&self) -> Option<String> {
        match self {
            Self::Call(error) if matches!(error.code(), 400 | 401 | 403 | 422) => {
                Some(error.call().to_owned())
            }
            Self::Identity(_) => Some("distribute certificates".to_owned()),
            Self::Panicked(_) => Some("reconcile".to_owned()),
            _ => None,
        }
    }

    /// For metrics.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Call(CallError::Timeout { .. }) => "timeout",
            Self::Call(error) if error.code() == 409 => "conflict",
            Self::Call(_) => "api",
            Self::Json(_) => "json",
            Self::Identity(_) => "identity",
            Self::Stale(_) => "conflict",
            Self::Panicked(_) => "panic",
        }
    }
}

/// Looks at one deployment and does what is to be done. Returns when to look again.
///
/// # Errors
/// A call came to nothing. What was done stands, and the next run goes on from there.
pub(super) async fn reconcile(owner: &MoEDeployment, context: &Context) -> Result<Duration, ReconcileError> {
    contained(attempt(owner, context)).await
}

/// The outcome of `run`; a panic in it is one of its failures. All deployments are served by one task: what
/// one of them consists of is no reason to leave the others alone.
async fn contained<T>(run: impl Future<Output = Result<T, ReconcileError>>) -> Result<T, ReconcileError> {
    // Nothing that it leaves half-done is looked at again: every run begins with what is there.
    AssertUnwindSafe(run).catch_unwind().await.unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<&str>().map(|words| (*words).to_owned());
        let words = words.or_else(|| panic.downcast_ref::<String>().cloned());
        Err(ReconcileError::Panicked(words.unwrap_or_else(|| "panic without a message".to_owned())))
    })
}

async fn attempt(owner: &MoEDeployment, context: &Context) -> Result<Duration, ReconcileError> {
    let stated = owner;
    let owner = &*context.around.allowed.priced(stated);
    let Context {
        around, recorder, conversations, starting, fleet, turns, identities, gateways, rests, ..
    } = context;
    let namespace = owner.namespace().unwrap_or_default();
    let calls = Calls::new(context.client.clone(), &namespace, context.metrics.writes.clone());

    let said = (conversations.heard(owner), starting.serving(owner));
    let others = fleet.but(owner);
    let deployments = others.len() + 1;
    let others = others.iter().map(|(namespace, silence)| (namespace.as_str(), *silence));
    let others = Others::of(&namespace, others);
    // Certificates before any pod is made, which waits for its own, and before one that serves ends for it. What fails there
    // keeps nothing from healing: most pods have theirs. Beside what is read: somebody may wait for this look.
    let never_ran = owner.status.as_ref().is_none_or(|status| status.plan.is_none());
    let certificates = async {
        if never_ran && around.allowed.refusal(owner).is_some() {
            return Ok(Certified::none());
        }
        identities.keep(&calls, owner).await
    };
    let (observed, certified) = join!(observe(&calls, owner, said, others, gateways.as_ref()), certificates);
    let mut observed = observed?;
    observed.uncertified = !certified.as_ref().is_ok_and(|certified| certified.mains);
    observed.rest = rests.of(owner);
    let known = know(owner, &observed)?;
    let mut planner = Pooled { pool: &context.pool, key: ObjectRef::from_obj(owner) };
    observed.wake_plan = planner.wake();
    let task = task(owner, &observed, &known, around);
    let decision = plan(owner, &observed, around, task, &mut planner)?;
    if decision.rests {
        rests.note(owner, rest_after_nothing(owner, &observed));
    }
    let follows = decision.cause;
    // The question for the plan may be as new as this reconcile.
    let wake_plan = planner.wake();
    let mut planned = Planned::new(owner, &observed, &known, decision, around);
    planned.repriced = owner.spec.pricing != stated.spec.pricing;
    planned.remote_waits = wake_plan.and_then(|plan| plan.holds_remote(observed.demand.as_ref()));
    let mut history = context.loads.take(owner);
    let pods = observed.functions(owner);
    let scaled = load::follow(owner, (&observed, &pods), &mut history, planned.target.as_mut());
    context.loads.note(owner, history);
    planned.resting = resting::follow(owner, (&observed, &pods), &known, planned.target.as_mut());
    if !planned.given_up.is_empty() {
        rests.note(owner, rest_after_giving_up(owner, &observed));
    }
    let target = planned.target.as_ref().map(|target| &target.revision);
    let is_new = target.is_some_and(|target| turn::is_needed(owner, &pods, &observed.table(owner), target));
    observed.waits = is_new && !turns.take(owner, deployments, observed.now);
    let steps = steps(owner, (&observed, pods), &known, &planned, around)?;
    if steps.settled {
        turns.end(&ObjectRef::from_obj(owner));
    }
    fleet.note(owner, Silence::among(&steps.pods));
    let trust = identities.trust(owner).await;
    let (applied, outcome) = apply(&calls, owner, &steps.writes).await;
    // Whatever became of the rest: the next look finds what is written, and says nothing of it.
    let made = &steps.writes[..applied.made];
    if let Some(cause) = follows.filter(|_| made.iter().any(|write| matches!(write, Write::Plan(_)))) {
        context.metrics.replanned(cause);
    }
    let is_told = made.iter().any(|write| matches!(write, Write::Demand(_)));
    if let Some(change) = steps.demanded.change.filter(|_| is_told) {
        context.metrics.changed(change);
    }
    let mut happenings = steps.said(applied.made);
    if steps.demanded.phase != Phase::Asleep {
        scaled.iter().for_each(|change| context.metrics.scaled(change));
        happenings.extend(scaled.iter().map(load::Change::happening));
    }
    if is_told {
        let changes = &planned.resting.changes;
        changes.iter().for_each(|change| context.metrics.group_turned(change.to));
        happenings.extend(changes.iter().map(resting::Change::happening));
    }
    happenings.extend(applied.happenings);
    if let Err(error) = outcome {
        publish(recorder, owner, &happenings).await;
        return Err(error.into());
    }
    if let Ok(trust) = &trust {
        conversations.keep(owner, steps.partners.clone(), trust.as_ref());
    }
    starting.keep(owner, steps.starting());
    publish(recorder, owner, &happenings).await;
    let mut refused = applied.refused;
    let troubles = certified.iter().flat_map(|certified| certified.troubles.clone());
    refused.extend(troubles.map(|trouble| (None, trouble)));
    let status = status(&Findings::of(owner, &observed, &known, &planned, &steps, refused, around));
    if owner.status.as_ref() != Some(&status) {
        calls.apply_status(&owner.name_any(), &status).await?;
    }
    publish(recorder, owner, &transitions(owner.status.as_ref(), &status)).await;
    trust?;
    let look_again = steps.look_again.min(certified?.look_again);
    Ok(load::look_again(owner, &observed, planned.target.as_ref())
        .map_or(look_again, |at| look_again.min(at)))
}

#[cfg(test)]
mod tests {
    use super::{ReconcileError, contained};

    #[tokio::test]
    #[allow(clippy::panic)]
    async fn a_panic_is_a_failure_of_the_run_that_met_it() {
        let panics = async { panic!("number {}", 7) };
        let outcome: Result<(), _> = contained(panics).await;
        assert!(matches!(outcome, Err(ReconcileError::Panicked(words)) if words == "number 7"));
        assert!(matches!(contained(async { Ok(1) }).await, Ok(1)));
    }
}
