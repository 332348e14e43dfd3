//! One reconcile of a deployment, as one straight line of stages:
//!
//! `read -> resolve -> plan -> scale -> build -> diff -> apply -> status`.
//!
//! Each stage takes the values before it and returns one value, which nothing changes afterwards. The stages from resolve to
//! diff are pure ([`decide`]). Only [`read`] reads, and only [`apply`](super::apply) writes. Soft state comes in as one value
//! and goes out as one ([`memory`](super::soft_state)). Plans are made beside the line ([`planning_pool`](super::planning_pool)).

use super::api::{CallError, NamespaceApi};
use super::apply::{ApplyError, Writer};
use super::decide::decide;
use super::gateways::Gateways;
use super::identity::{Identities, IdentityFailure};
use super::inputs::Inputs;
use super::main_pollers::MainPollers;
use super::manifests::OperatorEnvironment;
use super::metrics::Metrics;
use super::plan::Pooled;
use super::planning_pool::PlanningPool;
use super::read::{ReadError, Sources, read};
use super::soft_state::{RolloutTurnTaken, SoftStateStore};
use super::start_probes::StartProbes;
use super::status::{Findings, status};
use futures_util::FutureExt;
use jiff::Timestamp;
use kube::runtime::events::Recorder;
use kube::runtime::reflector::ObjectRef;
use kube::{Client, ResourceExt};
use remoe_api::MoEDeployment;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use tokio::join;

/// Everything that reconciles of all deployments share.
pub(super) struct Context {
    /// Client of the API.
    pub(super) client: Client,
    /// Settings of the operator.
    pub(super) environment: OperatorEnvironment,
    /// Certificates.
    pub(super) identities: Arc<Identities>,
    /// Publisher of events.
    pub(super) recorder: Recorder,
    /// Metrics of the operator.
    pub(super) metrics: Metrics,
    /// Conversations with main functions.
    pub(super) main_pollers: MainPollers,
    /// Probes of remote functions that start.
    pub(super) starting: StartProbes,
    /// Soft state.
    pub(super) memory: SoftStateStore,
    /// Gateways, if there are any.
    pub(super) gateways: Option<Gateways>,
    /// Threads that make plans.
    pub(super) pool: PlanningPool,
}

/// Failure of a reconcile.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReconcileError {
    /// A call of the API.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A value that cannot be written as JSON.
    #[error("cannot write JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// Certificates cannot be issued.
    #[error(transparent)]
    Identity(IdentityFailure),
    /// An object or a turn was changed or taken since it was read.
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

impl From<ReadError> for ReconcileError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Call(error) => Self::Call(error),
            ReadError::Json(error) => Self::Json(error),
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

impl From<RolloutTurnTaken> for ReconcileError {
    fn from(_: RolloutTurnTaken) -> Self {
        Self::Stale("the number of rollouts in progress".to_owned())
    }
}

impl ReconcileError {
    /// Reports if the namespace is being deleted.
    pub(super) fn namespace_ends(&self) -> bool {
        matches!(self, Self::Call(error) if error.namespace_ends())
    }

    /// Returns the action that failed, if a user must mend something that no condition names: the operator's role, an
    /// object that the API refuses, or the operator itself.
    pub(super) fn unreported_action(&self) -> Option<String> {
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

/// Reconciles one deployment. Returns when to look again.
///
/// # Errors
/// A call fails. Writes that were made stand, and the next reconcile goes on from there.
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

async fn attempt(stated: &MoEDeployment, context: &Context) -> Result<Duration, ReconcileError> {
    let Context {
        environment, recorder, metrics, main_pollers, starting, memory, identities, gateways, ..
    } = context;
    let owner = &*environment.policy.priced(stated);
    let namespace = owner.namespace().unwrap_or_default();
    let api = NamespaceApi::new(context.client.clone(), &namespace, metrics.writes.clone());
    let soft_state = memory.view(owner, Timestamp::now());
    let sources = Sources { api: &api, gateways: gateways.as_ref(), main_pollers, starting };
    // Beside each other: a request may wait for this reconcile.
    let (observed, certification) =
        join!(read(owner, sources), identities.ensure_all(&api, owner, &environment.policy));
    let observed = observed?;
    let inputs = Inputs {
        owner,
        repriced: owner.spec.pricing != stated.spec.pricing,
        environment,
        observed: &observed,
        soft_state: &soft_state,
        main_certificate_ready: certification.main_certificate_ready(),
    };
    let mut planner = Pooled { pool: &context.pool, key: ObjectRef::from_obj(owner) };
    let decided = decide(inputs, &mut planner)?;
    memory.learn(owner, decided.soft_state_update(), observed.now)?;
    let writer = Writer::new(&api, recorder, owner);
    let mut applied = writer.apply(&decided.diff.writes).await;
    let mut effects = decided.effects(applied.made);
    metrics.count(&effects);
    effects.events.append(&mut applied.events);
    if let Some(error) = applied.failure {
        writer.publish(&effects.events).await;
        return Err(error.into());
    }
    if let Ok(trust) = &certification.trust {
        main_pollers.poll_only(owner, decided.diff.polled_mains.clone(), trust.as_ref());
    }
    starting.keep(owner, decided.diff.starting.clone());
    let refused = applied.refused.into_iter().chain(certification.issues().map(|issue| (None, issue)));
    let status = status(&Findings::of(inputs, &decided, refused.collect()));
    writer.report(&effects.events, &status).await?;
    certification.trust?;
    Ok(decided.diff.requeue_after.min(certification.certificates?.requeue_after))
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
