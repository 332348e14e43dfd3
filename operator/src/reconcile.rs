//! One reconcile of a deployment, as a fixed sequence of stages:
//!
//! `read -> resolve -> plan -> scale -> build -> diff -> apply -> status`.
//!
//! Each stage takes the outputs of the stages before it and returns one immutable value. The stages from resolve to
//! diff are pure ([`decide`]). Only [`read`] reads, and only [`apply`](super::apply) writes. Soft state is read as
//! one value and stored as one ([`soft_state`](super::soft_state)). Plans are made outside of reconciles
//! ([`planning_pool`](super::planning_pool)).

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
use super::status::{StatusInputs, status};
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

/// State shared by the reconciles of all deployments.
pub(super) struct Context {
    /// API client.
    pub(super) client: Client,
    /// Settings of the operator.
    pub(super) environment: OperatorEnvironment,
    /// Issuer of certificates.
    pub(super) identities: Arc<Identities>,
    /// Publisher of events.
    pub(super) recorder: Recorder,
    /// Metrics of the operator.
    pub(super) metrics: Metrics,
    /// Pollers of main functions.
    pub(super) main_pollers: MainPollers,
    /// Readiness probes of starting remote functions.
    pub(super) starting: StartProbes,
    /// Soft state of all deployments.
    pub(super) memory: SoftStateStore,
    /// Gateways; absent without gateways.
    pub(super) gateways: Option<Gateways>,
    /// Pool of planning threads.
    pub(super) pool: PlanningPool,
}

/// Failure of a reconcile.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReconcileError {
    /// API call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// Value cannot be serialised as JSON.
    #[error("cannot write JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// Certificates cannot be issued.
    #[error(transparent)]
    Identity(IdentityFailure),
    /// Object changed, or the rollout turn was taken, since it was read.
    #[error("{0} changed since it was read")]
    Stale(String),
    /// Panic, a defect of this program. It concerns this deployment only.
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
    /// Returns whether the namespace is terminating.
    pub(super) fn namespace_is_terminating(&self) -> bool {
        matches!(self, Self::Call(error) if error.namespace_is_terminating())
    }

    /// Returns the failed action, if a user must act and no condition reports it: the operator's role lacks a right,
    /// the API rejects an object, or the operator has a bug.
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

    /// Returns the label of the error metric.
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

/// Reconciles one deployment. Returns the time until the next reconcile.
///
/// # Errors
/// A call failed. Completed writes stand, and the next reconcile continues from there.
pub(super) async fn reconcile(owner: &MoEDeployment, context: &Context) -> Result<Duration, ReconcileError> {
    contained(attempt(owner, context)).await
}

/// Returns the outcome of `run`, with a panic as an error. One task serves all deployments, so a panic about one of
/// them must not stop the others.
async fn contained<T>(run: impl Future<Output = Result<T, ReconcileError>>) -> Result<T, ReconcileError> {
    // Unwind safety: every reconcile starts from the observed state, so nothing half-done is used again.
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
    // Concurrently: a request may wait for this reconcile.
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
    memory.store(owner, decided.soft_state_update(), observed.now)?;
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
    starting.probe_only(owner, decided.diff.starting.clone());
    let refused = applied.refused.into_iter().chain(certification.issues().map(|issue| (None, issue)));
    let status = status(&StatusInputs::collect(inputs, &decided, refused.collect()));
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
