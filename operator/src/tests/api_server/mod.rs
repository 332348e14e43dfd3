//! Tests on a real API server, if `REMOE_E2E_KUBECONFIG` names one. Each test has its own namespace, which is deleted
//! afterwards.

mod crash;
mod deletion;
mod extreme_numbers;
mod faults;
mod hostile;
mod neighbours;
mod proxy;
pub mod routing_push;
mod stage;
mod verbs;

use futures_util::{StreamExt, stream};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, Resource};
use remoe_api::crds;
use serde_json::json;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Timeout of every wait.
const PATIENCE: Duration = Duration::from_secs(60);

/// API server with the custom resources, and a namespace of the test.
#[derive(Clone)]
pub struct Server {
    pub client: Client,
    pub namespace: String,
}

impl Server {
    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }
}

/// Concurrent cases: an operator waits most of the time.
const SIDE_BY_SIDE: usize = 6;

/// Runs `test` against the server; prints a note if there is none.
pub fn with_server(test: impl AsyncFnOnce(Server)) {
    with_cluster(async |client| {
        let server = Server::new(client).await;
        test(server.clone()).await;
        server.delete().await;
    });
}

/// Runs `test` for every case, each in its own namespace.
pub fn with_servers<T>(cases: impl IntoIterator<Item = T>, test: impl AsyncFn(Server, T)) {
    with_cluster(async |client| {
        let each = async |case| {
            let server = Server::new(client.clone()).await;
            test(server.clone(), case).await;
            server.delete().await;
        };
        stream::iter(cases).for_each_concurrent(SIDE_BY_SIDE, each).await;
    });
}

fn with_cluster(test: impl AsyncFnOnce(Client)) {
    if std::env::var("REMOE_E2E_KUBECONFIG").is_err() {
        println!("skipped: REMOE_E2E_KUBECONFIG names no cluster (tests/cluster/cluster.py up --fast)");
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = Client::try_from(config().await).unwrap();
        install(&client).await;
        test(client).await;
    });
}

/// Administrator's client.
pub async fn config() -> Config {
    let path = std::env::var("REMOE_E2E_KUBECONFIG").unwrap();
    let options = KubeConfigOptions::default();
    Config::from_custom_kubeconfig(Kubeconfig::read_from(path).unwrap(), &options).await.unwrap()
}

impl Server {
    async fn new(client: Client) -> Self {
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let object = json!({"metadata": {"generateName": "operator-test-"}});
        let object = serde_json::from_value(object).unwrap();
        let namespace = namespaces.create(&PostParams::default(), &object).await.unwrap();
        let server = Self { client, namespace: namespace.metadata.name.unwrap() };
        let accounts = server.api::<ServiceAccount>();
        eventually("the default service account", async || {
            accounts.get_opt("default").await.unwrap().is_some()
        })
        .await;
        server
    }

    pub fn namespaces(&self) -> Api<Namespace> {
        Api::all(self.client.clone())
    }

    /// Deletes the namespace, unless the test did. The namespace of a failed test stays for inspection.
    async fn delete(&self) {
        let deleted = self.namespaces().delete(&self.namespace, &DeleteParams::default()).await;
        if let Err(error) = deleted {
            assert!(error.to_string().contains("not found"), "{error}");
        }
    }
}

/// Applies the custom resource definitions of this build.
async fn install(client: &Client) {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    for (name, yaml) in crds().unwrap() {
        let name = name.trim_end_matches(".yaml");
        let crd: CustomResourceDefinition = serde_yaml::from_str(&yaml).unwrap();
        api.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(&crd)).await.unwrap();
        eventually("the custom resource", async || {
            let crd = api.get(name).await.unwrap();
            let conditions = crd.status.and_then(|status| status.conditions).unwrap_or_default();
            conditions.iter().any(|condition| condition.type_ == "Established" && condition.status == "True")
        })
        .await;
    }
}

/// Waits until `condition` holds.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !condition().await {
            sleep(Duration::from_millis(50)).await;
        }
    };
    if timeout(PATIENCE, waiting).await.is_err() {
        panic!("{what} did not come about within {PATIENCE:?}");
    }
}
