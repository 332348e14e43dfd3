//! Brings objects to what they are to be. What is already is not written.

use super::api::{MoEDeployment, MoEPlan};
use super::build::{Frame, Revision};
use super::calls::{CallError, Calls, Kind};
use super::drift::covers;
use super::observe::{Observed, is_owned_by};
use super::pods::Trouble;
use super::rollout::{Creation, Deletion};
use futures_util::future::join_all;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt;

/// Plans that are kept: the one that runs, and those that came before.
const KEPT_PLANS: usize = 10;

/// The reason of a trouble with an object that somebody else has under the same name.
pub(super) const NAME_TAKEN: &str = "NameTaken";

/// Writes the objects of one deployment.
pub(super) struct Applier<'a> {
    calls: &'a Calls,
    owner: &'a MoEDeployment,
    uid: String,
}

/// What became of a pod that was to be made.
#[derive(Debug)]
pub(super) enum Made {
    /// It was made.
    Created(String),
    /// The API refused it for a reason that a person must mend.
    Refused(Trouble),
}

impl<'a> Applier<'a> {
    /// Writes objects of `owner` through `calls`.
    pub(super) fn new(calls: &'a Calls, owner: &'a MoEDeployment) -> Self {
        Self { calls, owner, uid: owner.uid().unwrap_or_default() }
    }

    /// Services and network policies.
    ///
    /// # Errors
    /// A call that came to nothing.
    pub(super) async fn frame(&self, frame: &Frame, there: &Observed) -> Result<Vec<Trouble>, CallError> {
        // Without `..`: a new kind of object does not compile until it is written.
        let Frame { services, network_policies } = frame;
        let mut troubles = Vec::new();
        for service in services {
            troubles.extend(self.keep(service, &there.services).await?);
        }
        for policy in network_policies {
            troubles.extend(self.keep(policy, &there.network_policies).await?);
        }
        Ok(troubles)
    }

    /// Disruption budgets; those of functions that need none any more go.
    ///
    /// # Errors
    /// A call that came to nothing.
    pub(super) async fn budgets(
        &self,
        budgets: &[PodDisruptionBudget],
        there: &Observed,
    ) -> Result<Vec<Trouble>, CallError> {
        let mut troubles = Vec::new();
        for budget in budgets {
            troubles.extend(self.keep(budget, &there.budgets).await?);
        }
        for live in there.budgets.iter().filter(|live| is_owned_by(*live, &self.uid)) {
            if budgets.iter().all(|budget| budget.name_any() != live.name_any()) {
                self.remove(live).await?;
            }
        }
        Ok(troubles)
    }

    /// The ConfigMap of the model's facts.
    ///
    /// # Errors
    /// A call that came to nothing.
    pub(super) async fn model(&self, map: &ConfigMap, there: &Observed) -> Result<Vec<Trouble>, CallError> {
        let there: Vec<ConfigMap> = there.model.iter().cloned().collect();
        Ok(self.keep(map, &there).await?.into_iter().collect())
    }

    /// Makes an object what it is to be, unless it is somebody else's.
    async fn keep<K: Kind>(&self, wanted: &K, there: &[K]) -> Result<Option<Trouble>, CallError> {
        let name = wanted.name_any();
        let live = there.iter().find(|live| live.name_any() == name).cloned();
        let live = match live {
            Some(live) => Some(live),
            // It may have lost its labels, or be another's.
            None => self.calls.get::<K>(&name).await?,
        };
        if let Some(live) = &live {
            if !is_owned_by(live, &self.uid) {
                return Ok(Some(name_taken(wanted)));
            }
            if is_as(live, wanted) {
                return Ok(None);
            }
        }
        let applied = match (self.calls.apply(wanted).await, live) {
            // Together with what somebody added it would be no valid object.
            (Err(error), Some(live)) if error.code() == 422 => live,
            (applied, _) => applied?,
        };
        if !is_as(&applied, wanted) {
            // What somebody added to a list, such as a port, stays when ours is applied.
            self.calls.replace(&in_place_of(&applied, wanted)).await?;
        }
        Ok(None)
    }

    async fn remove<K: Kind>(&self, object: &K) -> Result<(), CallError> {
        self.calls.delete::<K>(&object.name_any(), &object.uid().unwrap_or_default(), None).await
    }

    /// A plan, once. Returns the one that is stored, where it is ours.
    ///
    /// # Errors
    /// A call that came to nothing.
    pub(super) async fn plan(&self, plan: &MoEPlan) -> Result<Option<MoEPlan>, CallError> {
        match self.calls.create(plan).await {
            // Named by its content: it is this one.
            Err(error) if error.code() == 409 => self.relabel_plan(plan).await,
            other => other.map(Some),
        }
    }

    /// A profile, unless another deployment was first.
    ///
    /// # Errors
    /// A call that came to nothing.
    pub(super) async fn profile(&self, map: &ConfigMap) -> Result<(), CallError> {
        match self.calls.create(map).await {
            // Measured at the same time, or spoiled: the measurement stands.
            Err(error) if error.code() == 409 => self.calls.apply(map).await.map(|_| ()),
            other => other.map(|_| ()),
        }
    }

    /// Gives a plan that exists the labels back by which it is found.
    async fn relabel_plan(&self, plan: &MoEPlan) -> Result<Option<MoEPlan>, CallError> {
        let live = self.calls.get::<MoEPlan>(&plan.name_any()).await?;
        let Some(live) = live.filter(|live| is_owned_by(live, &self.uid)) else { return Ok(None) };
        // What it says is never changed.
        let labelled = MoEPlan { metadata: plan.metadata.clone(), spec: live.spec.clone() };
        if is_as(&live, &labelled) {
            return Ok(Some(live));
        }
        self.calls.merge(&labelled).await.map(Some)
    }

    /// Deletes the oldest plans but the last ten; `in_use` are kept in any case.
    ///
    /// # Errors
    /// A call that came to nothing.
    pub(super) async fn prune_plans(&self, plans: &[MoEPlan], in_use: &[String]) -> Result<(), CallError> {
        let old = plans.len().saturating_sub(KEPT_PLANS);
        for plan in plans.iter().take(old).filter(|plan| !in_use.contains(&plan.name_any())) {
            self.remove(plan).await?;
        }
        Ok(())
    }

    /// The durable copy of the routing, if it still is what was read: a former leader that writes late
    /// is refused.
    ///
    /// # Errors
    /// A call that came to nothing, and code 409 where it was changed meanwhile.
    pub(super) async fn routing(
        &self,
        map: ConfigMap,
        before: Option<&ConfigMap>,
    ) -> Result<Option<Trouble>, CallError> {
        let found = match before {
            Some(before) => Some(before.clone()),
            // It may have lost its labels, or be another's.
            None => self.calls.get(&map.name_any()).await?,
        };
        let Some(live) = found else {
            self.calls.create(&map).await?;
            return Ok(None);
        };
        if !is_owned_by(&live, &self.uid) {
            return Ok(Some(name_taken(&map)));
        }
        if !is_as(&live, &map) {
            self.calls.replace(&in_place_of(&live, &map)).await?;
        }
        Ok(None)
    }

    /// Makes pods, all at once.
    ///
    /// # Errors
    /// The first call that came to nothing; the others were made all the same.
    pub(super) async fn create(
        &self,
        revision: &Revision,
        creations: &[Creation],
    ) -> Result<Vec<Made>, CallError> {
        let functions: Vec<_> = revision.functions().collect();
        let pods = creations.iter().filter_map(|creation| {
            let function = functions.get(creation.function)?;
            Some(function.pod(self.owner, creation.replica, creation.incarnation))
        });
        let made = join_all(pods.map(|pod| self.pod(pod))).await;
        made.into_iter().collect()
    }

    /// Makes one pod.
    ///
    /// # Errors
    /// A call that came to nothing.
    pub(super) async fn pod(&self, pod: Pod) -> Result<Made, CallError> {
        let name = pod.name_any();
        match self.calls.create(&pod).await {
            Ok(_) => Ok(Made::Created(name)),
            Err(error) if error.code() == 409 => self.taken(&pod, name).await,
            Err(error) if error.namespace_ends() => Err(error),
            Err(error) if matches!(error.code(), 403 | 422) => {
                let message =
                    error.status().map_or_else(|| error.to_string(), |status| status.message.clone());
                let reason = refusal(&message);
                Ok(Made::Refused(Trouble::new(reason, format!("pod {name}: {message}"))))
            }
            Err(error) => Err(error),
        }
    }

    /// A pod of that name exists. Where it is ours, an earlier attempt made it, or it lost its labels.
    async fn taken(&self, wanted: &Pod, name: String) -> Result<Made, CallError> {
        let Some(live) = self.calls.get::<Pod>(&name).await? else { return Ok(Made::Created(name)) };
        if !is_owned_by(&live, &self.uid) {
            return Ok(Made::Refused(name_taken(wanted)));
        }
        self.relabel(&live, wanted).await?;
        Ok(Made::Created(name))
    }

    /// Gives pods back the labels that somebody took or changed.
    ///
    /// # Errors
    /// A call that came to nothing.
    pub(super) async fn relabel(&self, live: &Pod, wanted: &Pod) -> Result<(), CallError> {
        let mut named = Pod { metadata: wanted.metadata.clone(), ..Pod::default() };
        if is_as(live, &named) || live.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        named.metadata.uid.clone_from(&live.metadata.uid);
        self.calls.merge(&named).await.map(|_| ())
    }

    /// Deletes pods.
    ///
    /// # Errors
    /// The first call that came to nothing; the others were made all the same.
    pub(super) async fn delete(&self, deletions: &[Deletion]) -> Result<(), CallError> {
        let deleted =
            deletions.iter().map(|pod| self.calls.delete::<Pod>(&pod.name, &pod.uid, pod.grace_seconds));
        join_all(deleted).await.into_iter().collect()
    }
}

/// What kind of refusal the API server's words are.
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
fn in_place_of<K: Kind>(live: &K, wanted: &K) -> K {
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

fn name_taken<K: Kind>(wanted: &K) -> Trouble {
    let (kind, name) = (K::kind(&()), wanted.name_any());
    Trouble::new(NAME_TAKEN, format!("{kind} {name} belongs to somebody else; rename it, or this deployment"))
}

fn is_as<K: Kind>(live: &K, wanted: &K) -> bool {
    let (live, wanted) = (serde_json::to_value(live), serde_json::to_value(wanted));
    matches!((live, wanted), (Ok(live), Ok(wanted)) if covers(&live, &wanted))
}
