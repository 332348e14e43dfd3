//! Client of the Kubernetes API; every call has a deadline.

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

/// Deadline of one call.
const CALL_DEADLINE: Duration = Duration::from_secs(10);
/// Maximum lines and bytes of a log that are read. An inspector prints its facts among its log lines.
const MAX_LOG_LINES: i64 = 200;
const MAX_LOG_BYTES: i64 = 1 << 20;

/// Failure of a call.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    /// The API refused the call or could not be reached.
    #[error("cannot {call}: {source}")]
    Api {
        /// Description of the call.
        call: String,
        /// Error of the client.
        source: Box<kube::Error>,
    },
    /// The deadline passed.
    #[error("cannot {call}: no answer within {} s", CALL_DEADLINE.as_secs())]
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

    /// Returns the API's error status, if it gave one.
    pub(super) fn status(&self) -> Option<&kube::core::Status> {
        match self {
            Self::Api { source, .. } => match source.as_ref() {
                kube::Error::Api(status) => Some(status),
                _ => None,
            },
            Self::Timeout { .. } => None,
        }
    }

    /// Returns whether the namespace is terminating and accepts no new objects.
    pub(super) fn namespace_is_terminating(&self) -> bool {
        let details = self.status().and_then(|status| status.details.as_ref());
        details
            .is_some_and(|details| details.causes.iter().any(|cause| cause.reason == "NamespaceTerminating"))
    }

    /// Returns the HTTP status code of the API's answer; 0 if there was none.
    pub(super) fn code(&self) -> u16 {
        self.status().map_or(0, |status| status.code)
    }
}

/// Client for the objects of one namespace.
#[derive(Clone)]
pub(super) struct NamespaceApi {
    client: Client,
    namespace: String,
    writes: IntCounterVec,
}

/// Kind of a namespaced object.
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
    /// Creates a client for `namespace`. Writes are counted in `writes` by verb and kind.
    pub(super) fn new(client: Client, namespace: &str, writes: IntCounterVec) -> Self {
        Self { client, namespace: namespace.to_owned(), writes }
    }

    fn api<K: ApiObject>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn count<K: ApiObject>(&self, verb: &str) {
        self.writes.with_label_values(&[verb, &K::kind(&())]).inc();
    }

    async fn with_deadline<T>(
        &self,
        call: impl Fn() -> String,
        future: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, CallError> {
        match timeout(CALL_DEADLINE, future).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(source)) => Err(CallError::Api { call: call(), source: Box::new(source) }),
            Err(_elapsed) => Err(CallError::Timeout { call: call() }),
        }
    }

    /// Lists the objects that match the label `selector`.
    ///
    /// # Errors
    /// See [`CallError`].
    pub(super) async fn list<K: ApiObject>(&self, selector: &str) -> Result<Vec<K>, CallError> {
        let call = || format!("list {} with {selector}", K::plural(&()));
        let params = ListParams::default().labels(selector);
        let list = self.with_deadline(call, self.api::<K>().list(&params)).await?;
        Ok(list.items)
    }

    /// Reads the object `name`; absent if it does not exist.
    ///
    /// # Errors
    /// See [`CallError`].
    pub(super) async fn get<K: ApiObject>(&self, name: &str) -> Result<Option<K>, CallError> {
        let call = || format!("get {} {name}", K::kind(&()));
        self.with_deadline(call, self.api::<K>().get_opt(name)).await
    }

    /// Creates an object.
    ///
    /// # Errors
    /// See [`CallError`]; code 409 if the name is taken.
    pub(super) async fn create<K: ApiObject>(&self, object: &K) -> Result<K, CallError> {
        self.count::<K>("create");
        let name = object.meta().name.clone().unwrap_or_default();
        let call = || format!("create {} {name}", K::kind(&()));
        let params = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
        self.with_deadline(call, self.api().create(&params, object)).await
    }

    /// Replaces an object, if its resource version is unchanged.
    ///
    /// # Errors
    /// See [`CallError`]; code 409 if it changed meanwhile.
    pub(super) async fn replace<K: ApiObject>(&self, object: &K) -> Result<K, CallError> {
        self.count::<K>("update");
        let name = object.meta().name.clone().unwrap_or_default();
        let call = || format!("replace {} {name}", K::kind(&()));
        let params = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
        self.with_deadline(call, self.api().replace(&name, &params, object)).await
    }

    /// Replaces the status of an object, if its resource version is unchanged.
    ///
    /// # Errors
    /// See [`CallError`]; code 409 if it changed meanwhile.
    pub(super) async fn replace_status<K: ApiObject>(&self, object: &K) -> Result<K, CallError> {
        self.count::<K>("update");
        let name = object.meta().name.clone().unwrap_or_default();
        let call = || format!("replace the status of {} {name}", K::kind(&()));
        let params = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
        self.with_deadline(call, self.api().replace_status(&name, &params, object)).await
    }

    /// Applies an object's desired state by a forced server-side apply.
    ///
    /// # Errors
    /// See [`CallError`].
    pub(super) async fn apply<K: ApiObject>(&self, object: &K) -> Result<K, CallError> {
        self.count::<K>("patch");
        let name = object.meta().name.clone().unwrap_or_default();
        let call = || format!("apply {} {name}", K::kind(&()));
        let params = PatchParams::apply(MANAGER).force();
        self.with_deadline(call, self.api().patch(&name, &params, &Patch::Apply(object))).await
    }

    /// Merges `object` into the live object of the same name, if its UID matches.
    ///
    /// # Errors
    /// See [`CallError`].
    pub(super) async fn merge<K: ApiObject>(&self, object: &K) -> Result<K, CallError> {
        self.count::<K>("patch");
        let name = object.meta().name.clone().unwrap_or_default();
        let call = || format!("patch {} {name}", K::kind(&()));
        let params = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        self.with_deadline(call, self.api().patch(&name, &params, &Patch::Merge(object))).await
    }

    /// Deletes the object `name` if its UID is still `uid`. `grace_seconds` overrides a pod's grace period. A missing
    /// object is no error.
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
        match self.with_deadline(call, self.api::<K>().delete(name, &params)).await {
            // It is gone, or replaced by another object.
            Err(error) if matches!(error.code(), 404 | 409) => Ok(()),
            other => other.map(|_| ()),
        }
    }

    /// Reads the log of a completed pod.
    ///
    /// # Errors
    /// See [`CallError`].
    pub(super) async fn log(&self, pod: &str) -> Result<String, CallError> {
        let call = || format!("read the log of pod {pod}");
        let params = LogParams {
            tail_lines: Some(MAX_LOG_LINES),
            limit_bytes: Some(MAX_LOG_BYTES),
            ..LogParams::default()
        };
        self.with_deadline(call, self.api::<Pod>().logs(pod, &params)).await
    }

    /// Applies the status of a deployment.
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
        self.with_deadline(call, api.patch_status(name, &params, &patch)).await.map(|_| ())
    }

    /// Lists the plans of a deployment, newest last.
    ///
    /// # Errors
    /// See [`CallError`].
    pub(super) async fn plans(&self, selector: &str) -> Result<Vec<MoEPlan>, CallError> {
        let mut plans = self.list::<MoEPlan>(selector).await?;
        plans.sort_by_key(|plan| (plan.metadata.creation_timestamp.clone(), plan.metadata.name.clone()));
        Ok(plans)
    }
}
