//! MoEDeployment under test, as its user sees it.

use crate::gateway_access;
use crate::scene::Scene;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams};
use kube::core::ApiResource;
use remoe_proto::identity::Identity;
use remoe_test_support::deadline::{LONG, until};
use remoe_test_support::http;
use serde_json::{Value, json};
use std::net::{IpAddr, SocketAddr};

/// Kinds of objects that a deployment owns.
const OWNED: &str = "pods,services,secrets,networkpolicies,poddisruptionbudgets,endpointslices,moeplans.remoe.dev,moerecords.remoe.dev,moedemands.remoe.dev";

/// MoEDeployment in a scene.
pub struct Deployment {
    /// Name of the object.
    pub name: String,
    /// API of MoEDeployments in the scene's namespace.
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

    /// Returns the MoEDeployment `name`, which the test created otherwise.
    #[must_use]
    pub fn existing(scene: &Scene, name: &str) -> Self {
        let kind = ApiResource::from_gvk_with_plural(
            &GroupVersionKind::gvk("remoe.dev", "v1alpha1", "MoEDeployment"),
            "moedeployments",
        );
        let api = Api::namespaced_with(scene.cluster.client.clone(), &scene.namespace, &kind);
        Self { name: name.to_owned(), api }
    }

    /// Merges `change` into it, as `kubectl patch --type=merge` does.
    ///
    /// # Errors
    /// The API server's message if it rejects the change.
    pub async fn try_patch(&self, change: &Value) -> Result<(), String> {
        let patched = self.api.patch(&self.name, &PatchParams::default(), &Patch::Merge(change)).await;
        patched.map(|_| ()).map_err(|error| error.to_string())
    }

    /// Merges `change` into it.
    pub async fn patch(&self, change: &Value) {
        let patched = self.try_patch(change).await;
        patched.unwrap_or_else(|refusal| panic!("MoEDeployment {}: {change}: {refusal}", self.name));
    }

    /// Waits until it serves the present spec with nothing left to do. Returns the status.
    pub async fn wait_until_settled(&self) -> Value {
        self.wait_for_conditions(&[("Ready", "True"), ("Progressing", "False"), ("Degraded", "False")]).await
    }

    /// Waits until all of these conditions have the expected status for the present generation. Returns the status.
    pub async fn wait_for_conditions(&self, wanted: &[(&str, &str)]) -> Value {
        let what = format!("{wanted:?} of {}", self.name);
        until(LONG, &what, async || {
            let object = self.api.get(&self.name).await.expect("the MoEDeployment can be read");
            let status = object.data["status"].clone();
            let holds = |(kind, value): &(&str, &str)| {
                find(&status, kind).is_some_and(|condition| {
                    condition["status"] == *value
                        && condition["observedGeneration"].as_i64() == object.metadata.generation
                })
            };
            wanted.iter().all(holds).then_some(status)
        })
        .await
    }

    /// Waits until the condition `kind` has the reason `reason`, and returns it.
    pub async fn wait_for_reason(&self, kind: &str, reason: &str) -> Value {
        let what = format!("condition {kind} of {} to be {reason}", self.name);
        until(LONG, &what, async || {
            find(&self.status().await, kind).filter(|condition| condition["reason"] == reason)
        })
        .await
    }

    /// Reads the status, which is null before it is set.
    pub async fn status(&self) -> Value {
        let object = self.api.get(&self.name).await.expect("the MoEDeployment can be read");
        object.data.get("status").cloned().unwrap_or(Value::Null)
    }

    /// Waits until the condition `kind` has `status` for the present generation, and returns it.
    pub async fn wait_for_condition(&self, kind: &str, status: &str) -> Value {
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

    /// Waits until it and all objects of deployments in the scene are gone.
    pub async fn wait_until_gone(&self, scene: &Scene) {
        let owned = format!("remoe.dev/deployment={}", self.name);
        until(LONG, "the end of everything that the deployment owned", async || {
            let left = scene.kubectl(&["get", OWNED, "--output", "name", "--selector", &owned]).await;
            let owner = self.api.get_opt(&self.name).await.expect("MoEDeployments can be read");
            (left.is_empty() && owner.is_none()).then_some(())
        })
        .await;
    }

    /// Returns the HTTP addresses of ready main functions, by the EndpointSlices of their Service.
    pub async fn endpoints(&self, scene: &Scene) -> Vec<SocketAddr> {
        self.ready_main_functions(scene).await.into_iter().map(|(address, _)| address).collect()
    }

    /// Returns HTTP addresses as [`Self::endpoints`] does, for clients without a gateway's identity. If main
    /// functions accept gateways alone, each address is a proxy on this host with that identity.
    pub async fn client_addresses(&self, scene: &Scene) -> Vec<SocketAddr> {
        let deployment = self.api.get(&self.name).await.expect("the MoEDeployment can be read").uid();
        let (namespace, deployment) = (scene.namespace.clone(), deployment.unwrap_or_default());
        let main = Identity::Main { namespace, deployment };
        let mut addresses = Vec::new();
        for (address, pod) in self.ready_main_functions(scene).await {
            let pod = scene.api::<Pod>().get(&pod).await.expect("a pod that is ready can be read");
            let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
            let mut arguments = containers.flat_map(|container| container.args.iter().flatten());
            addresses.push(match arguments.any(|argument| argument == "--gateway-identity") {
                true => {
                    gateway_access::start_proxy(
                        address,
                        gateway_access::gateway_trust(&scene.cluster, main.clone()).await,
                    )
                    .await
                }
                false => address,
            });
        }
        addresses
    }

    /// Returns the addresses of ready main functions with their pod names.
    async fn ready_main_functions(&self, scene: &Scene) -> Vec<(SocketAddr, String)> {
        let of_service =
            ListParams::default().labels(&format!("kubernetes.io/service-name={}-main", self.name));
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
            found.extend(ready.filter_map(|endpoint| {
                let address: IpAddr = endpoint.addresses.first()?.parse().ok()?;
                Some((SocketAddr::new(address, port), endpoint.target_ref?.name?))
            }));
        }
        found
    }
}

/// Returns the condition `kind` of a status.
#[must_use]
pub fn find(status: &Value, kind: &str) -> Option<Value> {
    status["conditions"].as_array()?.iter().find(|condition| condition["type"] == kind).cloned()
}

/// Sends `prompt` to `address` and returns the response with its usage.
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

/// Streamed answer.
pub struct CompletionStream {
    exchange: http::HttpExchange,
    text: String,
}

impl CompletionStream {
    /// Requests a stream of 160 tokens for `prompt` from `address`.
    pub async fn start(address: SocketAddr, model: &str, prompt: &str) -> Self {
        Self::with_tokens(160, address, model, prompt).await
    }

    /// Requests a stream as [`Self::start`] does, with this number of `tokens`.
    pub async fn with_tokens(tokens: u32, address: SocketAddr, model: &str, prompt: &str) -> Self {
        let body = json!({
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "ignore_eos": true,
            "temperature": 0,
            "stream": true,
        });
        let exchange = http::post(address, "/v1/chat/completions", &body).await;
        let exchange = exchange.unwrap_or_else(|error| panic!("chat at {address}: {error}"));
        assert_eq!(exchange.status, 200);
        Self { exchange, text: String::new() }
    }

    /// Waits for the next part. Returns `None` at the end.
    pub async fn next(&mut self) -> Option<()> {
        let part = self.exchange.chunk().await.expect("the stream does not break")?;
        self.text.push_str(&part);
        Some(())
    }

    /// Waits for the end and returns the whole text.
    pub async fn finish(mut self) -> String {
        while self.next().await.is_some() {}
        let events = self.text.lines().filter_map(|line| line.strip_prefix("data: "));
        let (done, events): (Vec<_>, Vec<_>) = events.partition(|event| *event == "[DONE]");
        assert_eq!(done.len(), 1, "{}", self.text);
        let content = |event: &str| {
            let event: Value = serde_json::from_str(event).expect("events are JSON");
            assert!(event["error"].is_null(), "{event}");
            event["choices"][0]["delta"]["content"].as_str().map(str::to_owned)
        };
        events.into_iter().filter_map(content).collect()
    }
}
