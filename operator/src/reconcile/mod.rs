//! The pipeline: observe, find out about the model, plan, build, apply, tell main functions, state the
//! status. Everything that is decided is decided by pure modules; this one joins them.

mod hardware;
mod model;
mod planned;
mod roll;

use super::api::{MoEDeployment, MoEPlan, ModelStatus};
use super::apply::Applier;
use super::build::{Surroundings, budgets, frame, plan_name, revision};
use super::calls::{CallError, Calls};
use super::events::{Happening, publish, transitions};
use super::mains;
use super::metrics::Metrics;
use super::observe::{Observed, observe};
use super::pods::{PodView, Trouble};
use super::routing::RoutingTable;
use super::status::{Findings, status};
use futures_util::FutureExt;
use jiff::Timestamp;
use kube::runtime::events::Recorder;
use kube::{Client, ResourceExt};
use std::panic::AssertUnwindSafe;
use std::time::Duration;

/// When to look again at something that is on its way, whatever events say.
const SOON: Duration = Duration::from_secs(1);
/// When to look again at something that others must move on.
const LATER: Duration = Duration::from_secs(15);
/// When to look again at what is as it should be: watches can miss something.
const SETTLED: Duration = Duration::from_secs(300);

/// What every run works with.
pub(super) struct Context {
    /// The API.
    pub(super) client: Client,
    /// What the operator was told.
    pub(super) around: Surroundings,
    /// Where events are published.
    pub(super) recorder: Recorder,
    /// What is counted.
    pub(super) metrics: Metrics,
}

/// Why a run came to nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReconcileError {
    /// A call of the API.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A value that cannot be written as JSON.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// The task that plans ended abnormally, or took too long.
    #[error("planning: {0}")]
    Planning(String),
    /// A defect of this program: what belongs to this deployment led it where it should not go.
    #[error("the operator has a defect that this deployment meets: {0}")]
    Panicked(String),
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
            Self::Planning(_) => "planning",
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
        Err(ReconcileError::Panicked(words.unwrap_or_else(|| "a panic without words".to_owned())))
    })
}

async fn attempt(owner: &MoEDeployment, context: &Context) -> Result<Duration, ReconcileError> {
    let calls = Calls::new(
        context.client.clone(),
        &owner.namespace().unwrap_or_default(),
        context.metrics.writes.clone(),
    );
    let there = observe(&calls, owner).await?;
    let mut run = Run {
        owner,
        context,
        applier: Applier::new(&calls, owner),
        calls: &calls,
        there,
        troubles: Vec::new(),
        happenings: Vec::new(),
        look_again: SETTLED,
        now: Timestamp::now(),
    };
    run.pipeline().await?;
    Ok(run.look_again)
}

/// One run.
struct Run<'a> {
    owner: &'a MoEDeployment,
    context: &'a Context,
    calls: &'a Calls,
    applier: Applier<'a>,
    there: Observed,
    troubles: Vec<Trouble>,
    happenings: Vec<Happening>,
    look_again: Duration,
    now: Timestamp,
}

impl Run<'_> {
    async fn pipeline(&mut self) -> Result<(), ReconcileError> {
        let table = self.there.routing.as_ref().map(RoutingTable::from_config_map).unwrap_or_default();
        let running = self.running(&table);
        // Before any pod is made: a pod without its policy would be open to all.
        let frame = frame(self.owner, &self.context.around);
        self.troubles.extend(self.applier.frame(&frame, &self.there).await?);
        let model = self.model().await?;
        let planning = match &model {
            Ok(facts) => self.plan(facts, running.as_deref()).await?,
            Err(state) => state.clone(),
        };
        let target = self.target(&planning, running.as_deref(), model.as_ref().ok());
        let built =
            target.and_then(|(hash, plan)| match revision(self.owner, &hash, &plan, &self.context.around) {
                Ok(revision) => Some((revision, plan)),
                Err(error) => {
                    self.troubles.push(Trouble::new("InvalidSpec", error.to_string()));
                    None
                }
            });
        let mut pods = self.views();
        mains::describe(&mut pods).await;
        let mut settled = false;
        if let Some((revision, _)) = &built {
            let budgets = budgets(self.owner, revision);
            self.troubles.extend(self.applier.budgets(&budgets, &self.there).await?);
            settled = self.roll(revision, &table, &pods).await?;
        }
        let profiling = self.profiling(model.as_ref().ok(), &planning, settled || built.is_none()).await?;
        self.prune(&planning, built.as_ref().map(|(revision, _)| revision.plan.as_str()), running.as_deref())
            .await?;
        let facts = model.ok();
        let findings = Findings {
            deployment: self.owner,
            model: facts.map(|facts| ModelStatus {
                source: self.owner.spec.model.source.clone(),
                revision: facts.revision,
                digest: facts.inspection.fingerprint,
            }),
            planning: &planning,
            profiling,
            target: built.as_ref().map(|(revision, plan)| (revision, plan)),
            running: running.as_deref(),
            pods: &pods,
            troubles: std::mem::take(&mut self.troubles),
            settled,
            now: self.now,
        };
        let status = status(&findings);
        if self.owner.status.as_ref() != Some(&status) {
            self.calls.apply_status(&self.owner.name_any(), &status).await?;
        }
        self.happenings.extend(transitions(self.owner.status.as_ref(), &status));
        publish(&self.context.recorder, self.owner, &self.happenings).await;
        Ok(())
    }

    /// The plan that main functions were last told of.
    fn running(&self, table: &RoutingTable) -> Option<String> {
        let newest = table.entries.values().max_by_key(|generation| generation.number);
        let told = newest.map(|generation| generation.plan.clone());
        told.or_else(|| self.owner.status.as_ref()?.plan.clone())
    }

    fn find(&self, hash: &str) -> Option<&MoEPlan> {
        let name = plan_name(&self.owner.name_any(), hash);
        self.there.plans.iter().find(|plan| plan.name_any() == name)
    }

    /// The hash in a plan's name.
    fn hash(&self, plan: &MoEPlan) -> Option<String> {
        let name = plan.name_any();
        let hash = name.strip_prefix(&self.owner.name_any())?.strip_prefix('-')?;
        Some(hash.to_owned())
    }

    fn views(&self) -> Vec<PodView> {
        let uid = self.owner.uid().unwrap_or_default();
        self.there.pods.iter().filter_map(|pod| PodView::of(pod, &uid, self.now)).collect()
    }

    fn look_soon(&mut self, after: Duration) {
        self.look_again = self.look_again.min(after);
    }

    fn look_at(&mut self, at: Timestamp) {
        // A little later, so that the time has come.
        let after = Duration::try_from(at.duration_since(self.now)).unwrap_or_default();
        self.look_soon(after + Duration::from_millis(100));
    }
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
