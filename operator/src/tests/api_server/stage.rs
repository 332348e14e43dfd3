//! Operator in this process whose writes can be held back, on a cluster without nodes.

use crate::facts::{ModelFacts, subject};
use crate::names::{COMPONENT, Component, PodName};
use crate::testing::example::{deployment, facts};
use crate::tests::api_server::proxy::Proxy;
use crate::tests::api_server::{Server, config, eventually};
use crate::{RunSettings, Settings, run};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Pod, Secret, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::client::ClientBuilder;
use kube::{Api, Client, Config, Resource, ResourceExt};
use remoe_api::{MoEDeployment, MoEPlan, MoERecord};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tower::{Layer, Service as TowerService};

/// Interval of polling.
pub const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Gate that lets a number of writes through and holds back the others.
#[derive(Clone)]
pub struct Budget {
    left: Arc<Semaphore>,
    /// Writes that were let through.
    made: Arc<AtomicU64>,
    /// The API server's answers to them.
    answers: Arc<Mutex<Vec<WriteRecord>>>,
}

/// Write and the API server's answer.
#[derive(Clone, Debug)]
pub struct WriteRecord {
    pub method: http::Method,
    pub path: String,
    pub code: http::StatusCode,
}

impl Budget {
    pub fn of(writes: usize) -> Self {
        Self { left: Arc::new(Semaphore::new(writes)), made: Arc::default(), answers: Arc::default() }
    }

    pub fn unlimited() -> Self {
        Self::of(Semaphore::MAX_PERMITS / 2)
    }

    /// Returns whether the next write is held back.
    pub fn is_spent(&self) -> bool {
        self.left.available_permits() == 0
    }

    /// Lets all further writes through.
    pub fn open(&self) {
        self.left.add_permits(Semaphore::MAX_PERMITS / 2);
    }

    pub fn made(&self) -> u64 {
        self.made.load(Ordering::SeqCst)
    }

    pub fn answers(&self) -> Vec<WriteRecord> {
        self.answers.lock().unwrap().clone()
    }
}

#[derive(Clone)]
pub struct Budgeted<S> {
    inner: S,
    budget: Budget,
}

impl<S> Layer<S> for Budget {
    type Service = Budgeted<S>;

    fn layer(&self, inner: S) -> Budgeted<S> {
        Budgeted { inner, budget: self.clone() }
    }
}

impl<S, B, R> TowerService<http::Request<B>> for Budgeted<S>
where
    S: TowerService<http::Request<B>, Response = http::Response<R>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    R: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        // Nothing is sent before this future is polled.
        let sending = self.inner.call(request);
        if method == http::Method::GET {
            return Box::pin(sending);
        }
        let budget = self.budget.clone();
        Box::pin(async move {
            budget.left.acquire().await.unwrap().forget();
            budget.made.fetch_add(1, Ordering::SeqCst);
            let answer = sending.await?;
            let code = answer.status();
            budget.answers.lock().unwrap().push(WriteRecord { method, path, code });
            Ok(answer)
        })
    }
}

/// Operator in this process, for the namespace of a test.
pub struct Operator {
    task: JoinHandle<()>,
    pub budget: Budget,
    /// Address of its metrics.
    metrics: SocketAddr,
}

impl Operator {
    /// Starts an operator, with no other in the cluster.
    pub async fn start(server: &Server, budget: Budget) -> Self {
        Self::start_with(server, budget, &[]).await
    }

    /// Starts an operator with additional arguments; see [`Self::start`].
    pub async fn start_with(server: &Server, budget: Budget, further: &[&str]) -> Self {
        Self::start_by(server, config().await, budget, further).await
    }

    /// Starts an operator that uses this proxy.
    pub async fn start_behind(server: &Server, proxy: &Proxy, budget: Budget, further: &[&str]) -> Self {
        Self::start_by(server, proxy.config(), budget, further).await
    }

    async fn start_by(server: &Server, config: Config, budget: Budget, further: &[&str]) -> Self {
        retire_release(server).await;
        let client: Client = ClientBuilder::try_from(config).unwrap().with_layer(&budget).build();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let metrics = listener.local_addr().unwrap();
        let settings = settings(&server.namespace, further);
        let task = tokio::spawn(async move {
            run(client, settings, listener, CancellationToken::new()).await.unwrap();
        });
        Self { task, budget, metrics }
    }

    /// Reads the operator's metrics.
    pub async fn counts(&self) -> String {
        let mut stream = TcpStream::connect(self.metrics).await.unwrap();
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).await.unwrap();
        said
    }

    /// Stops it like `kill -9`.
    pub async fn kill(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }
}

/// Removes the operator and gateways of an installed chart, which would interfere.
async fn retire_release(server: &Server) {
    let installed: Api<Deployment> = Api::namespaced(server.client.clone(), "remoe-system");
    let none = Patch::Merge(json!({"spec": {"replicas": 0}}));
    let mut found = false;
    for name in ["remoe", "remoe-gateway"] {
        found |= installed.patch_scale(name, &PatchParams::default(), &none).await.is_ok();
    }
    if found {
        let pods: Api<Pod> = Api::namespaced(server.client.clone(), "remoe-system");
        eventually("the end of the chart's operator and gateways", async || {
            pods.list(&ListParams::default()).await.unwrap().items.is_empty()
        })
        .await;
    }
}

fn settings(namespace: &str, further: &[&str]) -> RunSettings {
    use clap::Parser;
    // Its own namespace is the test's namespace too.
    let own = ["remoe-operator", "--watch-namespace", namespace, "--namespace", namespace];
    let arguments = own.iter().chain(&["--image-pull-policy", "Never"]).chain(further);
    Settings::parse_from(arguments).run
}

/// Creates a deployment with its inspected facts, since inspection needs a node.
pub async fn deploy(server: &Server) -> MoEDeployment {
    deploy_as(server, "demo").await
}

/// Creates a deployment of another name; see [`deploy`].
pub async fn deploy_as(server: &Server, name: &str) -> MoEDeployment {
    deploy_model(server, name, &facts()).await
}

/// Creates a deployment of this model, with its inspected facts.
pub async fn deploy_model(server: &Server, name: &str, facts: &ModelFacts) -> MoEDeployment {
    let mut owner = deployment(json!({"scaling": {"min": 2}}));
    owner.metadata = kube::api::ObjectMeta { name: Some(name.to_owned()), ..Default::default() };
    let owner = server.api::<MoEDeployment>().create(&PostParams::default(), &owner).await.unwrap();
    let record = facts.record(&owner, &subject(&owner.spec.model, None).unwrap()).unwrap();
    server.api::<MoERecord>().create(&PostParams::default(), &record).await.unwrap();
    owner
}

/// Marks every pod as running and remote functions as ready. Main functions do not answer: the tests only check the
/// pushed generations.
pub async fn run_pods(server: &Server) {
    run_pods_at(server, |index| format!("127.0.0.{}", index + 1)).await;
}

/// Marks pods as running at addresses that the test chooses by the number of the pod; see [`run_pods`].
pub async fn run_pods_at(server: &Server, address: impl Fn(usize) -> String) {
    let pods = server.api::<Pod>();
    let list = pods.list(&ListParams::default()).await.unwrap();
    for (index, pod) in list.items.iter().enumerate() {
        let running = pod.status.as_ref().is_some_and(|status| status.pod_ip.is_some());
        if running || pod.metadata.deletion_timestamp.is_some() {
            continue;
        }
        let now = jiff::Timestamp::now().to_string();
        let ip = address(index);
        let is_remote =
            pod.labels().get(COMPONENT).is_some_and(|part| part == Component::RemoteExpert.name());
        let ready = if is_remote { "True" } else { "False" };
        let ready = json!({"type": "Ready", "status": ready, "lastTransitionTime": now});
        let status = json!({"status": {
            "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "startTime": now, "conditions": [ready],
        }});
        // It may be deleted by now.
        let _gone = pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(&status)).await;
    }
}

/// Returns the names of all objects of the deployment, without incarnations.
pub async fn world(server: &Server) -> Vec<String> {
    let mut names = Vec::new();
    let pods = server.api::<Pod>().list(&ListParams::default()).await.unwrap();
    for pod in pods.items.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()) {
        names.push(format!("pod {}", PodName::parse(&pod.name_any()).unwrap().place));
    }
    names.extend(listed::<Service>(server).await);
    names.extend(listed::<NetworkPolicy>(server).await);
    names.extend(listed::<PodDisruptionBudget>(server).await);
    names.extend(listed::<MoEPlan>(server).await);
    // The authority is the operator's.
    let secrets = listed::<Secret>(server).await;
    names.extend(secrets.into_iter().filter(|name| !name.ends_with("remoe-authority")));
    names.extend(listed::<MoERecord>(server).await);
    names.sort();
    names
}

async fn listed<K>(server: &Server) -> Vec<String>
where
    K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned,
{
    let list = server.api::<K>().list(&ListParams::default()).await.unwrap();
    list.items.iter().map(|object| format!("{} {}", K::kind(&()), object.name_any())).collect()
}

/// Returns all objects of the deployment, without values that differ between lifetimes: identities, times, addresses,
/// incarnations and growing numbers.
pub async fn objects(server: &Server) -> BTreeMap<String, Value> {
    let mut all = Vec::new();
    all.extend(contents::<Service>(server).await);
    all.extend(contents::<NetworkPolicy>(server).await);
    all.extend(contents::<PodDisruptionBudget>(server).await);
    all.extend(contents::<MoEPlan>(server).await);
    all.extend(contents::<MoERecord>(server).await);
    let mut lives = vec![(server.namespace.clone(), "NAMESPACE".to_owned())];
    let owner = server.api::<MoEDeployment>().get_opt("demo").await.unwrap();
    lives.extend(owner.and_then(|owner| owner.uid()).map(|uid| (uid, "UID".to_owned())));
    for pod in contents::<Pod>(server).await {
        let name = pod["metadata"]["name"].as_str().unwrap();
        let place = PodName::parse(name).unwrap().place;
        if let Some(ip) = pod["status"]["podIP"].as_str() {
            lives.push((format!("\"{ip}:"), format!("\"{place}:")));
        }
        lives.push((format!("\"{name}\""), format!("\"{place}\"")));
        all.push(pod);
    }
    let mut named = BTreeMap::new();
    for mut object in all {
        for field in ["uid", "resourceVersion", "creationTimestamp", "generation", "managedFields"] {
            object["metadata"].as_object_mut().unwrap().remove(field);
        }
        let content = object.as_object_mut().unwrap();
        content.remove("status");
        if let Some(spec) = content.get_mut("spec").and_then(Value::as_object_mut) {
            spec.retain(|field, _| field != "clusterIP" && field != "clusterIPs");
            if let Some(generations) = spec.get_mut("generations").and_then(Value::as_object_mut) {
                generations.values_mut().for_each(|generation| generation["number"] = json!(0));
                spec.insert("about".to_owned(), json!(""));
            }
        }
        let mut text = object.to_string();
        for (life, common) in &lives {
            text = text.replace(life, common);
        }
        let object: Value = serde_json::from_str(&text).unwrap();
        let name = format!("{} {}", object["kind"], object["metadata"]["name"]);
        // Two pods at one place at the same time are a fault.
        let found = if named.contains_key(&name) { format!("{name}, once more") } else { name };
        named.insert(found, object);
    }
    named
}

/// Returns all objects of a kind that are not terminating.
async fn contents<K>(server: &Server) -> Vec<Value>
where
    K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + serde::Serialize,
{
    let list = server.api::<K>().list(&ListParams::default()).await.unwrap();
    let stay = list.items.iter().filter(|object| object.meta().deletion_timestamp.is_none());
    let value = |object: &K| {
        let mut value = serde_json::to_value(object).unwrap();
        value["kind"] = json!(K::kind(&()));
        value
    };
    stay.map(value).collect()
}

/// Returns whether the next step is to push to main functions: everything else is done by then.
pub async fn is_routed(server: &Server) -> bool {
    let record = server.api::<MoERecord>().get_opt("demo-routing").await.unwrap();
    record.is_some_and(|record| !record.spec.generations.is_empty())
}

pub async fn status_of(server: &Server) -> serde_json::Value {
    let owner = server.api::<MoEDeployment>().get("demo").await.unwrap();
    let mut status = serde_json::to_value(owner.status).unwrap();
    for condition in status["conditions"].as_array_mut().into_iter().flatten() {
        condition["lastTransitionTime"] = json!(null);
    }
    status
}

/// Runs until no more writes come. Returns their number.
pub async fn quiet(server: &Server, operator: &Operator) -> u64 {
    let written = || operator.budget.made();
    let mut seen = (written(), 0);
    eventually("quiet", async || {
        run_pods(server).await;
        sleep(POLL_INTERVAL).await;
        seen = if written() == seen.0 { (seen.0, seen.1 + 1) } else { (written(), 0) };
        seen.1 >= 8 && is_routed(server).await
    })
    .await;
    written()
}
