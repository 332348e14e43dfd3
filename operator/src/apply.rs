//! The apply stage: the only writer of a reconcile, of objects, events and status. It decides nothing.
//!
//! Certificates are the exception: [`identity`](super::identity) writes them beside the read stage.

use super::api::{ApiObject, CallError, NamespaceApi};
use super::drift::is_as;
use super::events::{ClusterEvent, shortened, transitions};
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

/// Limit of one event; later it is not published.
const DEADLINE: Duration = Duration::from_secs(5);
/// Bytes of a note; the API takes 1024.
const MAX_NOTE: usize = 1000;
/// Bytes of an action; the API takes 128.
const MAX_ACTION: usize = 128;

/// Outcome of the writes.
#[derive(Debug, Default)]
pub(super) struct Applied {
    /// Refusals of the API that a user must mend, with the component of a refused pod.
    pub(super) refused: Vec<(Option<Component>, StatusIssue)>,
    /// Events of the writes.
    pub(super) events: Vec<ClusterEvent>,
    /// Number of writes that were made, counted from the first.
    pub(super) made: usize,
    /// Failure of the first write that was not made; those after it are left for the next reconcile.
    pub(super) failure: Option<ApplyError>,
}

/// Failure of a write.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApplyError {
    /// A call of the API.
    #[error(transparent)]
    Call(#[from] CallError),
    /// An object exists that was not read: a decision without it may be wrong.
    #[error("{0} changed since it was read")]
    Stale(String),
}

/// Writes for one deployment: its objects, its events and its status.
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

    /// Makes `writes` in their order, up to the first that fails. Pods are made and deleted beside each other: one that fails
    /// keeps no other back.
    pub(super) async fn apply(&self, writes: &[Write]) -> Applied {
        let mut applied = Applied::default();
        for together in writes.chunk_by(are_beside_each_other) {
            let written = join_all(together.iter().map(|write| self.write(write))).await;
            for written in written {
                match written {
                    Ok(written) => applied.note(written),
                    Err(error) => applied.failure = applied.failure.take().or(Some(error)),
                }
            }
            if applied.failure.is_some() {
                break;
            }
            applied.made += together.len();
        }
        applied
    }

    /// Publishes `events`.
    pub(super) async fn publish(&self, events: &[ClusterEvent]) {
        publish(self.recorder, self.owner, events).await;
    }

    /// Publishes `events`, states `status` where it is not stated yet, and publishes the changes of its conditions.
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

fn are_beside_each_other(one: &Write, other: &Write) -> bool {
    matches!((one, other), (Write::Create(_), Write::Create(_)) | (Write::Delete(_), Write::Delete(_)))
}

/// Outcome of one step.
enum WriteOutcome {
    Done,
    Made(ClusterEvent),
    Refused(Option<Component>, StatusIssue),
}

impl Applied {
    fn note(&mut self, written: WriteOutcome) {
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
            Write::Service(keep) => self.keep(keep).await,
            Write::Policy(keep) => self.keep(keep).await,
            Write::Budget(keep) => self.keep(keep).await,
            Write::Facts(keep) => self.keep(keep).await,
            Write::Routing(keep) => self.routing(keep).await,
            Write::Demand(keep) => self.demand(keep).await,
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
    async fn keep<K: ApiObject>(&self, keep: &DesiredObject<K>) -> Result<WriteOutcome, ApplyError> {
        let wanted = keep.wanted.as_ref();
        let live = match &keep.live {
            Some(live) => Some(live.as_ref().clone()),
            // It may have lost its labels, or be another's.
            None => self.api.get::<K>(&wanted.name_any()).await?,
        };
        if live.as_ref().is_some_and(|live| !is_owned_by(live, &self.uid)) {
            return Ok(WriteOutcome::Refused(None, name_taken(wanted)));
        }
        let applied = match (self.api.apply(wanted).await, live) {
            // Together with the fields that another writer added, the object would be invalid.
            (Err(error), Some(live)) if error.code() == 422 => live,
            (applied, _) => applied?,
        };
        if !is_as(&applied, wanted) {
            // An entry that another writer added to a list, such as a port, survives a server-side apply.
            self.api.replace(&in_place_of(&applied, wanted)).await?;
        }
        Ok(WriteOutcome::Done)
    }

    /// The durable copy of the routing, if it still is what was read: a former leader that writes late is
    /// refused, and so is what was decided without having read what is there.
    async fn routing(&self, keep: &DesiredObject<MoERecord>) -> Result<WriteOutcome, ApplyError> {
        let wanted = keep.wanted.as_ref();
        if let Some(live) = &keep.live {
            self.api.replace(&in_place_of(live.as_ref(), wanted)).await?;
            return Ok(WriteOutcome::Done);
        }
        let Err(error) = self.api.create(wanted).await else { return Ok(WriteOutcome::Done) };
        let found =
            if error.code() == 409 { self.api.get::<MoERecord>(&wanted.name_any()).await? } else { None };
        let Some(found) = found else { return Err(error.into()) };
        if !is_owned_by(&found, &self.uid) {
            return Ok(WriteOutcome::Refused(None, name_taken(wanted)));
        }
        // It lost the labels by which it is found. What it says is read with them again.
        self.api.merge(&MoERecord { metadata: wanted.metadata.clone(), spec: found.spec }).await?;
        Err(ApplyError::Stale(wanted.name_any()))
    }

    /// Writes the operator's part of the demand object, if the gateways' part is unchanged since it was read.
    async fn demand(&self, keep: &DesiredObject<MoEDemand>) -> Result<WriteOutcome, ApplyError> {
        let written = match &keep.live {
            Some(live) => self.api.replace(&in_place_of(live.as_ref(), keep.wanted.as_ref())).await,
            None => self.api.create(keep.wanted.as_ref()).await,
        };
        Ok(written.map(|_| WriteOutcome::Done)?)
    }

    /// A plan, once.
    async fn plan(&self, plan: &MoEPlan) -> Result<WriteOutcome, ApplyError> {
        match self.api.create(plan).await {
            // Named by its content: it is this one.
            Err(error) if error.code() == 409 => self.relabel_plan(plan).await?,
            other => other.map(|_| ())?,
        }
        Ok(WriteOutcome::Done)
    }

    /// Gives a plan that exists the labels back by which it is found.
    async fn relabel_plan(&self, plan: &MoEPlan) -> Result<(), CallError> {
        let live = self.api.get::<MoEPlan>(&plan.name_any()).await?;
        let Some(live) = live.filter(|live| is_owned_by(live, &self.uid)) else { return Ok(()) };
        // What it says is never changed.
        let labelled = MoEPlan { metadata: plan.metadata.clone(), spec: live.spec.clone() };
        if is_as(&live, &labelled) {
            return Ok(());
        }
        self.api.merge(&labelled).await.map(|_| ())
    }

    /// A profile, unless another deployment was first.
    async fn profile(&self, record: &MoERecord) -> Result<WriteOutcome, ApplyError> {
        match self.api.create(record).await {
            // Measured at the same time, or spoiled: the measurement stands.
            Err(error) if error.code() == 409 => self.api.apply(record).await.map(|_| ())?,
            other => other.map(|_| ())?,
        }
        Ok(WriteOutcome::Done)
    }

    /// Makes one pod.
    async fn create(
        &self,
        Creation { pod, component, event }: &Creation,
    ) -> Result<WriteOutcome, ApplyError> {
        let refused = |issue| Ok(WriteOutcome::Refused(Some(*component), issue));
        match self.api.create(pod.as_ref()).await {
            Ok(_) => Ok(WriteOutcome::Made(event.clone())),
            Err(error) if error.code() == 409 => {
                // Where it is ours, an earlier attempt made it, or it lost its labels.
                let name = pod.name_any();
                let Some(live) = self.api.get::<Pod>(&name).await? else { return Ok(WriteOutcome::Done) };
                if !is_owned_by(&live, &self.uid) {
                    return refused(name_taken(pod.as_ref()));
                }
                self.relabel(&live, pod).await
            }
            Err(error) if error.namespace_ends() => Err(error.into()),
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
        if !is_as(live, &named) && live.metadata.deletion_timestamp.is_none() {
            named.metadata.uid.clone_from(&live.metadata.uid);
            self.api.merge(&named).await?;
        }
        Ok(WriteOutcome::Done)
    }
}

/// Publishes `events` about `owner`. A failure is logged: no reconcile fails for an event.
pub(super) async fn publish(recorder: &Recorder, owner: &MoEDeployment, events: &[ClusterEvent]) {
    let reference = owner.object_ref(&());
    for event in events {
        let event = Event {
            type_: if event.warning { EventType::Warning } else { EventType::Normal },
            reason: event.reason.clone(),
            note: Some(shortened(&event.note, MAX_NOTE)),
            action: shortened(&event.action, MAX_ACTION),
            secondary: None,
        };
        match timeout(DEADLINE, recorder.publish(&event, &reference)).await {
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

/// `wanted` in place of `live`, if that is still what was read. What others have said about the object
/// in its metadata stays.
fn in_place_of<K: ApiObject>(live: &K, wanted: &K) -> K {
    let mut object = wanted.clone();
    let mut metadata = live.meta().clone();
    let said = object.meta();
    metadata.labels.get_or_insert_default().extend(said.labels.clone().into_iter().flatten());
    metadata.annotations.get_or_insert_default().extend(said.annotations.clone().into_iter().flatten());
    metadata.owner_references.clone_from(&said.owner_references);
    // The API server keeps these itself.
    metadata.managed_fields = None;
    *object.meta_mut() = metadata;
    object
}
