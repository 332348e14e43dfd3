//! Apply stage: writes objects, events and status. It is the only writer of a reconcile, and decides nothing.
//!
//! Certificates are the exception: [`identity`](super::identity) writes them during the read stage.

use super::api::{ApiObject, CallError, NamespaceApi};
use super::drift::is_up_to_date;
use super::events::{ClusterEvent, transitions, truncated};
use super::names::Component;
use super::ownership::{is_owned_by, name_taken};
use super::status_issue::StatusIssue;
use super::write::{Creation, Deletion, DesiredObject, STARTED, Write};
use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::runtime::events::{Event, EventType, Recorder};
use kube::{Resource, ResourceExt};
use remoe_api::{MoEDemand, MoEDeployment, MoEDeploymentStatus, MoEPlan, MoERecord};
use std::time::Duration;
use tokio::time::timeout;

/// Timeout for publishing one event.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum bytes of a note; the API's limit is 1024.
const MAX_NOTE_BYTES: usize = 1000;
/// Maximum bytes of an action; the API's limit is 128.
const MAX_ACTION_BYTES: usize = 128;

/// Outcome of the writes.
#[derive(Debug, Default)]
pub(super) struct Applied {
    /// Refused writes that a user must fix, with the component if a pod was refused.
    pub(super) refused: Vec<(Option<Component>, StatusIssue)>,
    /// Events of the writes.
    pub(super) events: Vec<ClusterEvent>,
    /// Number of completed writes, from the first.
    pub(super) made: usize,
    /// First failure; the next reconcile repeats the remaining writes.
    pub(super) failure: Option<ApplyError>,
}

/// Failure of a write.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApplyError {
    /// API call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// An object exists that was not read, so the decision may be wrong.
    #[error("{0} changed since it was read")]
    Stale(String),
}

/// Writer of one deployment's objects, events and status.
pub(super) struct Writer<'a> {
    api: &'a NamespaceApi,
    recorder: &'a Recorder,
    owner: &'a MoEDeployment,
    uid: String,
}

impl<'a> Writer<'a> {
    /// Creates the writer for `owner`.
    pub(super) fn new(api: &'a NamespaceApi, recorder: &'a Recorder, owner: &'a MoEDeployment) -> Self {
        Self { api, recorder, owner, uid: owner.uid().unwrap_or_default() }
    }

    /// Executes `writes` in order until the first failure. Consecutive creations or deletions of pods run
    /// concurrently; a failed one does not stop the others of its batch.
    pub(super) async fn apply(&self, writes: &[Write]) -> Applied {
        let mut applied = Applied::default();
        for batch in writes.chunk_by(run_concurrently) {
            let written = join_all(batch.iter().map(|write| self.write(write))).await;
            for written in written {
                match written {
                    Ok(written) => applied.record(written),
                    Err(error) => applied.failure = applied.failure.take().or(Some(error)),
                }
            }
            if applied.failure.is_some() {
                break;
            }
            applied.made += batch.len();
        }
        applied
    }

    /// Publishes `events`.
    pub(super) async fn publish(&self, events: &[ClusterEvent]) {
        publish(self.recorder, self.owner, events).await;
    }

    /// Publishes `events`, writes `status` if it changed, and publishes the events of its transitions.
    ///
    /// # Errors
    /// The status cannot be written.
    pub(super) async fn report(
        &self,
        events: &[ClusterEvent],
        status: &MoEDeploymentStatus,
    ) -> Result<(), CallError> {
        self.publish(events).await;
        let before = self.owner.status.as_ref();
        if before != Some(status) {
            self.api.apply_status(&self.owner.name_any(), status).await?;
        }
        self.publish(&transitions(before, status)).await;
        Ok(())
    }
}

fn run_concurrently(one: &Write, other: &Write) -> bool {
    matches!((one, other), (Write::Create(_), Write::Create(_)) | (Write::Delete(_), Write::Delete(_)))
}

/// Outcome of one write.
enum WriteOutcome {
    Done,
    Made(ClusterEvent),
    Refused(Option<Component>, StatusIssue),
}

impl Applied {
    fn record(&mut self, written: WriteOutcome) {
        match written {
            WriteOutcome::Done => {}
            WriteOutcome::Refused(component, issue) => self.refused.push((component, issue)),
            WriteOutcome::Made(event) => match self.events.last_mut() {
                Some(last) if last.reason == event.reason => {
                    let name = event.note.strip_prefix(STARTED).unwrap_or(&event.note);
                    last.note = format!("{}, {name}", last.note);
                }
                _ => self.events.push(event),
            },
        }
    }
}

impl Writer<'_> {
    async fn write(&self, write: &Write) -> Result<WriteOutcome, ApplyError> {
        match write {
            Write::Service(desired) => self.apply_desired(desired).await,
            Write::Policy(desired) => self.apply_desired(desired).await,
            Write::Budget(desired) => self.apply_desired(desired).await,
            Write::Facts(desired) => self.apply_desired(desired).await,
            Write::Routing(desired) => self.routing(desired).await,
            Write::Demand(desired) => self.demand(desired).await,
            Write::ForgetGateways(left) => {
                Ok(self.api.replace_status(left.as_ref()).await.map(|_| WriteOutcome::Done)?)
            }
            Write::Plan(plan) => self.plan(plan).await,
            Write::Profile(record) => self.profile(record).await,
            Write::Share(record) => {
                Ok(self.api.replace(record.as_ref()).await.map(|_| WriteOutcome::Done)?)
            }
            Write::Create(creation) => self.create(creation).await,
            Write::Relabel { live, wanted } => self.relabel(live, wanted).await,
            Write::Delete(Deletion { name, uid, grace_seconds }) => {
                Ok(self.api.delete::<Pod>(name, uid, *grace_seconds).await.map(|()| WriteOutcome::Done)?)
            }
            Write::DeleteBudget(name, uid) => {
                let deleted = self.api.delete::<PodDisruptionBudget>(name, uid, None).await;
                Ok(deleted.map(|()| WriteOutcome::Done)?)
            }
            Write::DeletePlan(name, uid) => {
                Ok(self.api.delete::<MoEPlan>(name, uid, None).await.map(|()| WriteOutcome::Done)?)
            }
        }
    }

    /// Applies an object's desired state, unless the object belongs to another owner.
    async fn apply_desired<K: ApiObject>(
        &self,
        desired: &DesiredObject<K>,
    ) -> Result<WriteOutcome, ApplyError> {
        let wanted = desired.wanted.as_ref();
        let live = match &desired.live {
            Some(live) => Some(live.as_ref().clone()),
            // It may have lost its labels, or belong to another owner.
            None => self.api.get::<K>(&wanted.name_any()).await?,
        };
        if live.as_ref().is_some_and(|live| !is_owned_by(live, &self.uid)) {
            return Ok(WriteOutcome::Refused(None, name_taken(wanted)));
        }
        let applied = match (self.api.apply(wanted).await, live) {
            // The fields that another writer added make the result invalid: replace the object instead.
            (Err(error), Some(live)) if error.code() == 422 => live,
            (applied, _) => applied?,
        };
        if !is_up_to_date(&applied, wanted) {
            // An entry that another writer added to a list, such as a port, survives a server-side apply.
            self.api.replace(&with_version_of(&applied, wanted)).await?;
        }
        Ok(WriteOutcome::Done)
    }

    /// Writes the stored routing table if it is unchanged since it was read. This fences off a former leader that
    /// writes late, and decisions made without the current table.
    async fn routing(&self, desired: &DesiredObject<MoERecord>) -> Result<WriteOutcome, ApplyError> {
        let wanted = desired.wanted.as_ref();
        if let Some(live) = &desired.live {
            self.api.replace(&with_version_of(live.as_ref(), wanted)).await?;
            return Ok(WriteOutcome::Done);
        }
        let Err(error) = self.api.create(wanted).await else { return Ok(WriteOutcome::Done) };
        let found =
            if error.code() == 409 { self.api.get::<MoERecord>(&wanted.name_any()).await? } else { None };
        let Some(found) = found else { return Err(error.into()) };
        if !is_owned_by(&found, &self.uid) {
            return Ok(WriteOutcome::Refused(None, name_taken(wanted)));
        }
        // It lost the labels by which it is listed. They are restored, and the next reconcile reads it.
        self.api.merge(&MoERecord { metadata: wanted.metadata.clone(), spec: found.spec }).await?;
        Err(ApplyError::Stale(wanted.name_any()))
    }

    /// Writes the operator's part of the demand object, if the gateways' part is unchanged since it was read.
    async fn demand(&self, desired: &DesiredObject<MoEDemand>) -> Result<WriteOutcome, ApplyError> {
        let written = match &desired.live {
            Some(live) => self.api.replace(&with_version_of(live.as_ref(), desired.wanted.as_ref())).await,
            None => self.api.create(desired.wanted.as_ref()).await,
        };
        Ok(written.map(|_| WriteOutcome::Done)?)
    }

    /// Creates a plan, unless it exists.
    async fn plan(&self, plan: &MoEPlan) -> Result<WriteOutcome, ApplyError> {
        match self.api.create(plan).await {
            // Plans are named by their content, so the existing one is equal.
            Err(error) if error.code() == 409 => self.relabel_plan(plan).await?,
            other => other.map(|_| ())?,
        }
        Ok(WriteOutcome::Done)
    }

    /// Restores the labels of an existing plan.
    async fn relabel_plan(&self, plan: &MoEPlan) -> Result<(), CallError> {
        let live = self.api.get::<MoEPlan>(&plan.name_any()).await?;
        let Some(live) = live.filter(|live| is_owned_by(live, &self.uid)) else { return Ok(()) };
        // Its content is never changed.
        let labelled = MoEPlan { metadata: plan.metadata.clone(), spec: live.spec.clone() };
        if is_up_to_date(&live, &labelled) {
            return Ok(());
        }
        self.api.merge(&labelled).await.map(|_| ())
    }

    /// Writes a profile; an existing one is overwritten.
    async fn profile(&self, record: &MoERecord) -> Result<WriteOutcome, ApplyError> {
        match self.api.create(record).await {
            // Another deployment measured it at the same time, or the record is corrupted: the new measurement wins.
            Err(error) if error.code() == 409 => self.api.apply(record).await.map(|_| ())?,
            other => other.map(|_| ())?,
        }
        Ok(WriteOutcome::Done)
    }

    /// Creates one pod.
    async fn create(
        &self,
        Creation { pod, component, event }: &Creation,
    ) -> Result<WriteOutcome, ApplyError> {
        let refused = |issue| Ok(WriteOutcome::Refused(Some(*component), issue));
        match self.api.create(pod.as_ref()).await {
            Ok(_) => Ok(WriteOutcome::Made(event.clone())),
            Err(error) if error.code() == 409 => {
                // If this deployment owns it, an earlier attempt created it, or it lost its labels.
                let name = pod.name_any();
                let Some(live) = self.api.get::<Pod>(&name).await? else { return Ok(WriteOutcome::Done) };
                if !is_owned_by(&live, &self.uid) {
                    return refused(name_taken(pod.as_ref()));
                }
                self.relabel(&live, pod).await
            }
            Err(error) if error.namespace_is_terminating() => Err(error.into()),
            Err(error) if matches!(error.code(), 403 | 422) => {
                let message =
                    error.status().map_or_else(|| error.to_string(), |status| status.message.clone());
                refused(StatusIssue::new(refusal(&message), format!("pod {}: {message}", pod.name_any())))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Restores the labels of a pod that another writer removed or changed.
    async fn relabel(&self, live: &Pod, wanted: &Pod) -> Result<WriteOutcome, ApplyError> {
        let mut named = Pod { metadata: wanted.metadata.clone(), ..Pod::default() };
        if !is_up_to_date(live, &named) && live.metadata.deletion_timestamp.is_none() {
            named.metadata.uid.clone_from(&live.metadata.uid);
            self.api.merge(&named).await?;
        }
        Ok(WriteOutcome::Done)
    }
}

/// Publishes `events` about `owner`. Failures are only logged: no reconcile fails because of an event.
pub(super) async fn publish(recorder: &Recorder, owner: &MoEDeployment, events: &[ClusterEvent]) {
    let reference = owner.object_ref(&());
    for event in events {
        let event = Event {
            type_: if event.warning { EventType::Warning } else { EventType::Normal },
            reason: event.reason.clone(),
            note: Some(truncated(&event.note, MAX_NOTE_BYTES)),
            action: truncated(&event.action, MAX_ACTION_BYTES),
            secondary: None,
        };
        match timeout(PUBLISH_TIMEOUT, recorder.publish(&event, &reference)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, reason = event.reason, "event not published"),
            Err(_elapsed) => tracing::warn!(reason = event.reason, "event not published: timeout"),
        }
    }
}

/// Classifies the API server's message about a refusal.
fn refusal(message: &str) -> &'static str {
    if message.contains("exceeded quota") {
        "QuotaExceeded"
    } else if message.contains("cannot create resource") {
        "NotPermitted"
    } else {
        "PodRefused"
    }
}

/// Returns `wanted` with the resource version of `live`, so that the write fails if the object changed. Labels and
/// annotations of other writers stay.
fn with_version_of<K: ApiObject>(live: &K, wanted: &K) -> K {
    let mut object = wanted.clone();
    let mut metadata = live.meta().clone();
    let ours = object.meta();
    metadata.labels.get_or_insert_default().extend(ours.labels.clone().into_iter().flatten());
    metadata.annotations.get_or_insert_default().extend(ours.annotations.clone().into_iter().flatten());
    metadata.owner_references.clone_from(&ours.owner_references);
    // The API server keeps these itself.
    metadata.managed_fields = None;
    *object.meta_mut() = metadata;
    object
}
