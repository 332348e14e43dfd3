//! Calls of the Kubernetes API, each with a deadline.

use super::names::MANAGER;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams, LogParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Client, Resource};
use prometheus::IntCounterVec;
use remoe_api::{MoEDeployment, MoEPlan};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::time::Duration;
use tokio::time::timeout;

/// No call takes longer.
const DEADLINE: Duration = Duration::from_secs(10);
/// Lines of an inspector's log that are read, and their bytes: facts and what is logged beside them.
const LOG_LINES: i64 = 200;
const LOG_BYTES: i64 = 1 << 20;

/// Why a call came to nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    /// The API refused or could not be reached.
    #[error("cannot {call}: {source}")]
    Api {
        /// Description of the call.
        call: String,
        /// Error of the client.
        source: Box<kube::Error>,
    },
    /// No answer in time.
    #[error("cannot {call}: no answer within {} s", DEADLINE.as_secs())]
    Timeout {
        /// Description of the call.
        call: String,
    },
}

impl CallError {
    /// Returns the description of the call.
    pub(super) fn call(&self) -> &str {
        match self {
            Self::Api { call, .. } | Self::Timeout { call } => call,
        }
    }

    /// The API's answer, where it gave one.
    pub(super) fn status(&self) -> Option<&kube::core::Status> {
        match self {
            Self::Api { source, .. } => match source.as_ref() {
                kube::Error::Api(status) => Some(status),
                _ => None,
            },
            Self::Timeout { .. } => None,
        }
    }

    /// Reports if the namespace is being deleted: it takes no new objects.
    pub(super) fn namespace_ends(&self) -> bool {
        let details = self.status().and_then(|status| status.details.as_ref());
        details
            .is_some_and(|details| details.causes.iter().any(|cause| cause.reason == "NamespaceTerminating"))
    }

    /// The code of the API's answer; 0 without one.
    pub(super) fn code(&self) -> u16 {
        self.status().map_or(0, |status| status.code)
    }
}

/// The API's objects of one namespace.
#[derive(Clone)]
pub(super) struct NamespaceApi {
    client: Client,
    namespace: String,
    writes: IntCounterVec,
}

/// A kind of object that calls are made about.
pub(super) trait ApiObject:
    Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize
{
}

impl<K> ApiObject for K where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + DeserializeOwned
        + Serialize
{
}

impl NamespaceApi {
    /// Calls about `namespace`; those that change objects are counted in `writes` by verb and kind.
    pub(super) fn new(client: Client, namespace: &str, writes: IntCounterVec) -> Self {
        Self { client, namespace: namespace.to_owned(), writes }
    }

    fn api<K: ApiObject>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn count<K: ApiObject>(&self, verb: &str) {
        self.writes.with_label_values(&[verb, &K::kind(&())]).inc();
    }

    async fn within<T>(
        &self,
        call: impl Fn() -> String,
        future: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, CallError> {
        match timeout(DEADLINE, future).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(source)) => Err(CallError::Api { call: call(), source: Box::new(source) }),
            Err(_elapsed) => Err(CallError::Timeout { call: call() }),
        }
    }

    /// All objects that `selector` selects.
    ///
    /// # Errors
    /// See [`CallError`].
    pub(super) async fn list<K: ApiObject>(&self, selector: &str) -> Result<Vec<K>, CallError> {
        let call = || format!("list {} with {selector}", K::plural(&()));
        let params = ListParams::default().labels(selector);
        let list = self.within(call, self.api::<K>().list(&params)).await?;
        Ok(list.items)
    }

    /// The object called `name`, where there is one.
    ///
    /// # Errors
    /// See [`CallError`].
    pub(super) async fn get<K: ApiObject>(&self, name: &str) -> Result<Option<K>, CallError> {
        let call = || format!("get {} {name}", K::kind(&()));
        self.within(call, self.api::<K>().get_opt(name)).await
    }

    /// Makes an object.
    ///
    /// # Errors
    /// See [`CallError`]; code 409 where the name is taken.
    pub(super) async fn create<K: ApiObject>(&self, object: &K) -> Result<K, CallError> {
        self.count::<K>("create");
        let name = object.meta().name.clone().unwrap_or_default();
        let call = || format!("create {} {name}", K::kind(&()));
        let params = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
        self.within(call, self.api().create(&params, object)).await
    }

    /// Replaces an object, whose resource version says what was read.
    ///
    /// # Errors
    /// See [`CallError`]; code 409 where it was changed meanwhile.
    pub(super) async fn replace<K: ApiObject>(&self, object: &K) -> Result<K, CallError> {
        self.count::<K>("update");
        let name = object.meta().name.clone().unwrap_or_default();
        let call = || format!("replace {} {name}", K::kind(&()));
        let params = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
        self.within(call, self.api().replace(&name, &params, object)).await
    }

    /// Replaces the status of an object, whose resource version says what was read.
    ///
    /// # Errors
    /// See [`CallError`]; code 409 where it was changed meanwhile.
    pub(super) async fn replace_status<K: ApiObject>(&self, object: &K) -> Result<K, CallError> {
        self.count::<K>("update");
        let name = object.meta().name.clone().unwrap_or_default();
        let call = || format!("replace the status of {} {name}", K::kind(&()));
        let params = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
        self.within(call, self.api().replace_status(&name, &params, object)).await
    }

    /// Makes an object what it is to be (server-side apply), whatever it was.
    ///
    /// # Errors
    /// See [`CallError`].
    pub(super) async fn apply<K: ApiObject>(&self, object: &K) -> Result<K, CallError> {
        self.count::<K>("patch");
        let name = object.meta().name.clone().unwrap_or_default();
        let call = || format!("apply {} {name}", K::kind(&()));
        let params = PatchParams::apply(MANAGER).force();
        self.within(call, self.api().patch(&name, &params, &Patch::Apply(object))).await
    }

    /// Merges what `object` says into the one of its name, if that still has its uid.
    ///
    /// # Errors
    /// See [`CallError`].
    pub(super) async fn merge<K: ApiObject>(&self, object: &K) -> Result<K, CallError> {
        self.count::<K>("patch");
        let name = object.meta().name.clone().unwrap_or_default();
        let call = || format!("patch {} {name}", K::kind(&()));
        let params = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        self.within(call, self.api().patch(&name, &params, &Patch::Merge(object))).await
    }

    /// Deletes the object called `name`, if it still is the one with `uid`; a pod may have other
    /// `grace_seconds` to end than it was made with. One that is gone is no error.
    ///
    /// # Errors
    /// See [`CallError`].
    pub(super) async fn delete<K: ApiObject>(
        &self,
        name: &str,
        uid: &str,
        grace_seconds: Option<u32>,
    ) -> Result<(), CallError> {
        self.count::<K>("delete");
        let call = || format!("delete {} {name}", K::kind(&()));
        let params = DeleteParams {
            grace_period_seconds: grace_seconds,
            preconditions: Some(Preconditions { uid: Some(uid.to_owned()), resource_version: None }),
            ..DeleteParams::background()
        };
        match self.within(call, self.api::<K>().delete(name, &params)).await {
            // Gone, or another one by now.
            Err(error) if matches!(error.code(), 404 | 409) => Ok(()),
            other => other.map(|_| ()),
        }
    }

    /// Returns the log of a pod that ended.
    ///
    /// # Errors
    /// See [`CallError`].
    pub(super) async fn log(&self, pod: &str) -> Result<String, CallError> {
        let call = || format!("read the log of pod {pod}");
        let params =
            LogParams { tail_lines: Some(LOG_LINES), limit_bytes: Some(LOG_BYTES), ..LogParams::default() };
        self.within(call, self.api::<Pod>().logs(pod, &params)).await
    }

    /// States the status of a deployment.
    ///
    /// # Errors
    /// See [`CallError`].
    pub(super) async fn apply_status(
        &self,
        name: &str,
        status: &remoe_api::MoEDeploymentStatus,
    ) -> Result<(), CallError> {
        self.count::<MoEDeployment>("patch");
        let call = || format!("apply the status of MoEDeployment {name}");
        let object = serde_json::json!({
            "apiVersion": MoEDeployment::api_version(&()),
            "kind": MoEDeployment::kind(&()),
            "metadata": { "name": name },
            "status": status,
        });
        let params = PatchParams::apply(MANAGER).force();
        let api = self.api::<MoEDeployment>();
        let patch = Patch::Apply(&object);
        self.within(call, api.patch_status(name, &params, &patch)).await.map(|_| ())
    }

    /// All plans of a deployment, the newest last.
    ///
    /// # Errors
    /// See [`CallError`].
    pub(super) async fn plans(&self, selector: &str) -> Result<Vec<MoEPlan>, CallError> {
        let mut plans = self.list::<MoEPlan>(selector).await?;
        plans.sort_by_key(|plan| (plan.metadata.creation_timestamp.clone(), plan.metadata.name.clone()));
        Ok(plans)
    }
}
