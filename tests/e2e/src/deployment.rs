//! A MoEDeployment as its user sees it.

use crate::scene::Scene;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{Api, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams};
use kube::core::ApiResource;
use remoe_tests::deadline::{LONG, until};
use remoe_tests::http;
use serde_json::{Value, json};
use std::net::{IpAddr, SocketAddr};

/// A MoEDeployment.
pub struct Deployment {
    /// Its name.
    pub name: String,
    /// Objects of its kind in the scene's namespace.
    pub api: Api<DynamicObject>,
}

impl Deployment {
    /// Applies a MoEDeployment `name` with this `spec`.
    pub async fn apply(scene: &Scene, name: &str, spec: &Value) -> Self {
        let deployment = Self::existing(scene, name);
        let object = json!({
            "apiVersion": "remoe.dev/v1alpha1",
            "kind": "MoEDeployment",
            "metadata": {"name": name},
            "spec": spec,
        });
        let params = PatchParams::apply("remoe-e2e").force();
        let applied = deployment.api.patch(name, &params, &Patch::Apply(&object)).await;
        applied.unwrap_or_else(|error| panic!("MoEDeployment {name}: {error}"));
        deployment
    }

    /// A MoEDeployment `name` that the test has made in another way.
    #[must_use]
    pub fn existing(scene: &Scene, name: &str) -> Self {
        let kind = ApiResource::from_gvk_with_plural(
            &GroupVersionKind::gvk("remoe.dev", "v1alpha1", "MoEDeployment"),
            "moedeployments",
        );
        let api = Api::namespaced_with(scene.cluster.client.clone(), &scene.namespace, &kind);
        Self { name: name.to_owned(), api }
    }

    /// Its status; null before it has one.
    pub async fn status(&self) -> Value {
        let object = self.api.get(&self.name).await.expect("the MoEDeployment can be read");
        object.data.get("status").cloned().unwrap_or(Value::Null)
    }

    /// Waits until the condition `kind` is `status`, of the present generation, and returns it.
    pub async fn condition(&self, kind: &str, status: &str) -> Value {
        let what = format!("condition {kind}={status} of {}", self.name);
        until(LONG, &what, async || {
            let object = self.api.get(&self.name).await.expect("the MoEDeployment can be read");
            let conditions = object.data["status"]["conditions"].as_array()?.clone();
            conditions.into_iter().find(|condition| {
                condition["type"] == kind
                    && condition["status"] == status
                    && condition["observedGeneration"].as_i64() == object.metadata.generation
            })
        })
        .await
    }

    /// Deletes it and waits until it is gone.
    pub async fn delete(&self) {
        let deleted = self.api.delete(&self.name, &DeleteParams::default()).await;
        deleted.unwrap_or_else(|error| panic!("MoEDeployment {}: {error}", self.name));
        let what = format!("the end of {}", self.name);
        until(LONG, &what, async || matches!(self.api.get_opt(&self.name).await, Ok(None)).then_some(()))
            .await;
    }

    /// Where the HTTP interface answers, by the EndpointSlices of its Service: ready main functions.
    pub async fn endpoints(&self, scene: &Scene) -> Vec<SocketAddr> {
        let of_service = ListParams::default().labels(&format!("kubernetes.io/service-name={}", self.name));
        let slices =
            scene.api::<EndpointSlice>().list(&of_service).await.expect("EndpointSlices can be listed");
        let mut found = Vec::new();
        for slice in slices {
            let ports = slice.ports.unwrap_or_default();
            let http = ports.iter().find(|port| port.name.as_deref() == Some("http"));
            let Some(port) = http.and_then(|port| port.port).and_then(|port| u16::try_from(port).ok()) else {
                continue;
            };
            let ready = slice.endpoints.into_iter();
            let ready = ready
                .filter(|endpoint| endpoint.conditions.as_ref().and_then(|each| each.ready) == Some(true));
            let addresses = ready.flat_map(|endpoint| endpoint.addresses);
            found.extend(
                addresses.filter_map(|address| Some(SocketAddr::new(address.parse::<IpAddr>().ok()?, port))),
            );
        }
        found
    }
}

/// Asks `address` for an answer to `prompt` and returns it, usage and all.
pub async fn chat(address: SocketAddr, model: &str, prompt: &str) -> Value {
    let body = json!({
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 24,
        "temperature": 0,
        "include_figures": true,
    });
    let exchange = http::post(address, "/v1/chat/completions", &body).await;
    let exchange = exchange.unwrap_or_else(|error| panic!("chat at {address}: {error}"));
    let answer = exchange.finish().await.unwrap_or_else(|error| panic!("chat at {address}: {error}"));
    assert_eq!(answer.status, 200, "{}", answer.body);
    serde_json::from_str(&answer.body).expect("the answer is JSON")
}
