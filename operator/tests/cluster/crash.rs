//! The operator is killed after every write that it makes, and another one goes on.

use crate::api::{Server, eventually, with_server};
use crate::example::{deployment, facts};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, Resource, ResourceExt};
use remoe_operator::cluster::api::{MoEDeployment, MoEPlan};
use remoe_operator::cluster::facts::subject;
use remoe_operator::cluster::names::{COMPONENT, Component, PodName};
use remoe_operator::cluster::{RunSettings, Settings, run};
use serde_json::json;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tower::{Layer, Service as TowerService};

/// Lets a number of writes through; every later request never ends.
#[derive(Clone)]
struct Budget {
    left: Arc<AtomicU64>,
    /// Writes that went through.
    made: Arc<AtomicU64>,
}

impl Budget {
    fn of(writes: u64) -> Self {
        Self { left: Arc::new(writes.into()), made: Arc::default() }
    }

    fn is_spent(&self) -> bool {
        self.left.load(Ordering::SeqCst) == 0
    }
}

#[derive(Clone)]
struct Budgeted<S> {
    inner: S,
    budget: Budget,
}

impl<S> Layer<S> for Budget {
    type Service = Budgeted<S>;

    fn layer(&self, inner: S) -> Budgeted<S> {
        Budgeted { inner, budget: self.clone() }
    }
}

impl<S, B> TowerService<http::Request<B>> for Budgeted<S>
where
    S: TowerService<http::Request<B>>,
    S::Future: Send + 'static,
    S::Response: 'static,
    S::Error: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let is_write = request.method() != http::Method::GET;
        let allowed = !is_write
            || self
                .budget
                .left
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1))
                .is_ok();
        if self.budget.is_spent() && !allowed {
            return Box::pin(std::future::pending());
        }
        if is_write {
            self.budget.made.fetch_add(1, Ordering::SeqCst);
        }
        Box::pin(self.inner.call(request))
    }
}

/// An operator in this process, for the namespace of a test.
struct Operator {
    task: JoinHandle<()>,
    budget: Budget,
}

impl Operator {
    async fn start(server: &Server, budget: Budget) -> Self {
        let path = std::env::var("REMOE_E2E_KUBECONFIG").unwrap();
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(Kubeconfig::read_from(path).unwrap(), &options);
        let client: Client =
            ClientBuilder::try_from(config.await.unwrap()).unwrap().with_layer(&budget).build();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let settings = settings(&server.namespace);
        let task = tokio::spawn(async move {
            run(client, settings, listener, CancellationToken::new()).await.unwrap();
        });
        Self { task, budget }
    }

    /// As `kill -9` would: nothing more is done.
    async fn kill(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }
}

fn settings(namespace: &str) -> RunSettings {
    use clap::Parser;
    let arguments = ["remoe-operator", "--watch-namespace", namespace, "--image-pull-policy", "Never"];
    Settings::parse_from(arguments).run
}

/// A deployment with what its inspector found out, which needs a node.
async fn deploy(server: &Server) -> MoEDeployment {
    let mut owner = deployment(json!({"replicas": 2}));
    owner.metadata = kube::api::ObjectMeta { name: Some("demo".to_owned()), ..Default::default() };
    let owner = server.api::<MoEDeployment>().create(&PostParams::default(), &owner).await.unwrap();
    let map = facts().config_map(&owner, &subject(&owner.spec.model, None).unwrap()).unwrap();
    server.api::<ConfigMap>().create(&PostParams::default(), &map).await.unwrap();
    owner
}

/// Has every pod run, as nodes would, and remote functions be ready. Main functions do not answer: they are
/// told of nothing, and what is to be told is what counts here.
async fn run_pods(server: &Server) {
    let pods = server.api::<Pod>();
    let list = pods.list(&ListParams::default()).await.unwrap();
    for (index, pod) in list.items.iter().enumerate() {
        let running = pod.status.as_ref().is_some_and(|status| status.pod_ip.is_some());
        if running || pod.metadata.deletion_timestamp.is_some() {
            continue;
        }
        let now = jiff::Timestamp::now().to_string();
        let ip = format!("127.0.0.{}", index + 1);
        let is_remote =
            pod.labels().get(COMPONENT).is_some_and(|part| part == Component::RemoteExpert.name());
        let ready = if is_remote { "True" } else { "False" };
        let ready = json!({"type": "Ready", "status": ready, "lastTransitionTime": now});
        let status = json!({"status": {
            "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "startTime": now, "conditions": [ready],
        }});
        // It may be gone by now.
        let _gone = pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(&status)).await;
    }
}

/// Names of everything that belongs to the deployment, without incarnations.
async fn world(server: &Server) -> Vec<String> {
    let mut names = Vec::new();
    let pods = server.api::<Pod>().list(&ListParams::default()).await.unwrap();
    for pod in pods.items.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()) {
        names.push(format!("pod {}", PodName::parse(&pod.name_any()).unwrap().place));
    }
    names.extend(listed::<Service>(server).await);
    names.extend(listed::<NetworkPolicy>(server).await);
    names.extend(listed::<PodDisruptionBudget>(server).await);
    names.extend(listed::<MoEPlan>(server).await);
    names.extend(
        listed::<ConfigMap>(server).await.into_iter().filter(|name| !name.ends_with("kube-root-ca.crt")),
    );
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

/// Whether main functions would be told: everything else is done by then.
async fn is_routed(server: &Server) -> bool {
    let map = server.api::<ConfigMap>().get_opt("demo-routing").await.unwrap();
    map.is_some_and(|map| map.data.is_some())
}

async fn status_of(server: &Server) -> serde_json::Value {
    let owner = server.api::<MoEDeployment>().get("demo").await.unwrap();
    let mut status = serde_json::to_value(owner.status).unwrap();
    for condition in status["conditions"].as_array_mut().into_iter().flatten() {
        condition["lastTransitionTime"] = json!(null);
    }
    status
}

/// Runs until nothing is written any more. Returns the number of writes.
async fn quiet(server: &Server, operator: &Operator) -> u64 {
    let written = || operator.budget.made.load(Ordering::SeqCst);
    let mut seen = (written(), 0);
    eventually("quiet", async || {
        run_pods(server).await;
        sleep(Duration::from_millis(250)).await;
        seen = if written() == seen.0 { (seen.0, seen.1 + 1) } else { (written(), 0) };
        seen.1 >= 8 && is_routed(server).await
    })
    .await;
    written()
}

#[test]
fn killed_after_any_write_the_operator_ends_at_the_same_state() {
    let mut reference = None;
    with_server(async |server| {
        deploy(&server).await;
        let operator = Operator::start(&server, Budget::of(u64::MAX)).await;
        let writes = quiet(&server, &operator).await;
        reference = Some((world(&server).await, status_of(&server).await, writes));
        operator.kill().await;
    });
    let Some((objects, status, writes)) = reference else { return };
    assert!(objects.len() > 10, "{objects:?}");
    // Every write but those of events, which tell of what is there.
    for crash in 1..writes {
        with_server(async |server| {
            deploy(&server).await;
            let operator = Operator::start(&server, Budget::of(crash)).await;
            eventually("the crash", async || {
                run_pods(&server).await;
                sleep(Duration::from_millis(20)).await;
                operator.budget.is_spent()
            })
            .await;
            operator.kill().await;
            let operator = Operator::start(&server, Budget::of(u64::MAX)).await;
            quiet(&server, &operator).await;
            assert_eq!(world(&server).await, objects, "after {crash} writes");
            assert_eq!(status_of(&server).await["plan"], status["plan"], "after {crash} writes");
            operator.kill().await;
            check_deletion(&server).await;
        });
    }
}

/// The cluster collects what belonged to a deployment that is gone.
async fn check_deletion(server: &Server) {
    let owners = server.api::<MoEDeployment>();
    owners.delete("demo", &DeleteParams::background()).await.unwrap();
    eventually("nothing is left", async || world(server).await.is_empty()).await;
}

#[test]
fn a_settled_deployment_is_not_written() {
    with_server(async |server| {
        deploy(&server).await;
        let operator = Operator::start(&server, Budget::of(u64::MAX)).await;
        let before = quiet(&server, &operator).await;
        // Something that is not ours makes it look again.
        let owners = server.api::<MoEDeployment>();
        for look in 0..3 {
            let note = json!({"metadata": {"annotations": {"test/look": look.to_string()}}});
            owners.patch("demo", &PatchParams::default(), &Patch::Merge(&note)).await.unwrap();
            sleep(Duration::from_millis(500)).await;
        }
        assert_eq!(operator.budget.made.load(Ordering::SeqCst), before);
        operator.kill().await;
    });
}
