//! Identities on a cluster: unauthorised pods get no answer on any node and with any labels. Certificates are created
//! and deleted with their deployment, and a condition reports missing rights to create them.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret};
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use remoe_e2e::deployment::{CompletionStream, Deployment, chat};
use remoe_e2e::host_operator::image;
use remoe_e2e::scene::Scene;
use remoe_e2e::{claim, figures, gateways, pods, release};
use remoe_test_support::deadline::{LONG, until};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Number of clients that stream during a rotation.
const CLIENTS: usize = 100;
const PROMPT: &str = "Read Genesis 1:1.";
/// Secrets of the deployment `demo`.
const SECRETS: [&str; 2] = ["demo-main-identity", "demo-remote-expert-identity"];

/// Folder of the claim with the test client.
const STRANGER: &str = "/models/stranger/stranger";

fn spec(mode: &str) -> Value {
    json!({
        "model": {"source": "pvc://models/demo"},
        "profile": figures::reference(),
        "mode": mode,
        "main": {"memoryMB": {"min": 200, "max": 4000}},
        "remoteExperts": {"mode": "Always", "memoryMB": {"min": 100, "max": 1000}, "maxReplicas": 1},
    })
}

/// Creates a claim `models` in the scene's namespace with the test client and the demo model.
async fn create_stranger_volume(scene: &Scene) {
    let model = format!("demo={}", remoe_test_support::binaries::workspace().join("demo/model").display());
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(env!("CARGO_BIN_EXE_stranger"), folder.path().join("stranger")).unwrap();
    let program = format!("stranger={}", folder.path().display());
    claim::create(scene, "models", &["--put", &model, "--put", &program]).await;
}

/// Returns the address of the first pod with the role `part` in `demo`.
async fn address(scene: &Scene, part: &str) -> String {
    let selector = format!("remoe.dev/deployment=demo,remoe.dev/function,app.kubernetes.io/component={part}");
    let pod = pods::list(scene, &selector).await.remove(0);
    pod.status.unwrap().pod_ip.unwrap()
}

/// Runs a pod `name` that tries all calls at `demo`, with `labels` and the contents of `secret`, and returns the
/// outcomes.
async fn run_stranger(
    scene: &Scene,
    name: &str,
    arguments: &[String],
    labels: &Value,
    secret: Option<&str>,
) -> Vec<String> {
    let mut arguments = arguments.to_vec();
    arguments.extend(secret.map(|_| "/identity".to_owned()));
    let container = json!({"image": image("main"), "command": [STRANGER], "args": arguments});
    let mut pod = serde_json::to_value(pods::restricted(name, &container)).unwrap();
    pod["metadata"]["labels"] = labels.clone();
    if let Some(secret) = secret {
        let volume = json!({"name": "identity", "secret": {"secretName": secret}});
        pod["spec"]["volumes"].as_array_mut().unwrap().push(volume);
        let mount = json!({"name": "identity", "mountPath": "/identity"});
        pod["spec"]["containers"][0]["volumeMounts"].as_array_mut().unwrap().push(mount);
    }
    pods::create(scene, &serde_json::from_value(pod).unwrap()).await;
    let log = pods::wait_until_completed(scene, name).await;
    let answers: Vec<String> = log.lines().map(str::to_owned).collect();
    assert_eq!(answers.len(), 7, "{log}");
    scene.api::<Pod>().delete(name, &DeleteParams::default()).await.unwrap();
    answers
}

#[tokio::test(flavor = "multi_thread")]
async fn functions_answer_operator_gateways_and_own_deployment_only() {
    Scene::run("functions_answer_operator_gateways_and_own_deployment_only", async |scene| {
        let cluster = &scene.cluster;
        let mut alone = release::exclusive(cluster, 1).await;
        alone.install(cluster, &["replicas=1"]).await;
        create_stranger_volume(scene).await;
        let demo = Deployment::apply(scene, "demo", &spec("Active")).await;
        // Certificates of another deployment, which runs no functions.
        let other = Deployment::apply(scene, "other", &spec("Advisory")).await;
        demo.wait_until_settled().await;
        other.wait_for_condition("Planned", "True").await;
        // A client with the certificate of the gateways is answered.
        let endpoint = demo.client_addresses(scene).await[0];
        assert!(!demo.endpoints(scene).await.contains(&endpoint), "main functions know gateways");
        let answer = chat(endpoint, "demo", "Read Genesis 1:1.").await;
        assert!(answer["usage"]["remoe"]["experts"]["remote"].as_u64() > Some(0), "{answer}");
        let gateway = gateways::address(&gateways::pods(cluster, 1).await[0]);
        let by_gateway = chat(gateway, &format!("{}/demo", scene.namespace), "Read Genesis 1:1.").await;
        assert_eq!(by_gateway["choices"], answer["choices"]);

        let uid = demo.api.get("demo").await.unwrap().metadata.uid.unwrap();
        let secrets = scene.api::<Secret>();
        for part in ["main", "remote-expert"] {
            let secret = secrets.get(&format!("demo-{part}-identity")).await.unwrap();
            assert_eq!(secret.type_.as_deref(), Some("kubernetes.io/tls"));
            assert_eq!(secret.owner_references()[0].uid, uid);
        }
        let to = [
            format!("{}:9000", address(scene, "main").await),
            format!("{}:9001", address(scene, "remote-expert").await),
            format!("{}:8000", address(scene, "main").await),
            format!("spiffe://remoe/{}/{uid}/main", scene.namespace),
        ];
        let stolen = json!({
            "app.kubernetes.io/part-of": "remoe", "app.kubernetes.io/component": "main",
            "remoe.dev/deployment": "demo",
        });
        let operators =
            json!({"app.kubernetes.io/part-of": "remoe", "app.kubernetes.io/component": "operator"});
        let beside = Scene { namespace: release::NAMESPACE.to_owned(), ..scene.clone() };
        create_stranger_volume(&beside).await;
        for (scene, name, labels) in [
            (scene, "anonymous", &json!({})),
            (scene, "stolen", &stolen),
            (&beside, "beside-the-operator", &operators),
        ] {
            for answer in run_stranger(scene, name, &to, labels, None).await {
                assert!(
                    !answer.ends_with("answered") && !answer.ends_with("PermissionDenied"),
                    "{name}: {answer}"
                );
            }
        }
        let claims = beside.api::<PersistentVolumeClaim>();
        claims.delete("models", &DeleteParams::default()).await.unwrap();
        claim::remove_volumes(&beside).await;
        for secret in ["other-main-identity", "other-remote-expert-identity", "demo-remote-expert-identity"] {
            for answer in run_stranger(scene, secret, &to, &stolen, Some(secret)).await {
                assert!(answer.ends_with("PermissionDenied"), "{secret}: {answer}");
            }
        }
        // A pod that mounts the deployment's Secrets in its namespace has its main function's identity.
        let main = run_stranger(scene, "main", &to, &json!({}), Some("demo-main-identity")).await;
        let answered = main.iter().filter(|answer| answer.ends_with("answered"));
        assert_eq!(answered.collect::<Vec<_>>(), ["Forward: answered", "Describe: answered"]);
        let again = chat(endpoint, "demo", "Read Genesis 1:1.").await;
        assert_eq!(again["choices"], answer["choices"]);

        // A deleted Secret is created again, for the next pod.
        secrets.delete("demo-main-identity", &DeleteParams::default()).await.unwrap();
        demo.patch(&json!({"spec": {"replicas": 2}})).await;
        demo.wait_until_settled().await;
        demo.delete().await;
        other.delete().await;
        until(LONG, "the end of the certificates", async || {
            secrets.list(&Default::default()).await.unwrap().items.is_empty().then_some(())
        })
        .await;
    })
    .await;
}

/// Clients that stream one answer after another until stopped.
struct Clients {
    /// Number of clients within an answer.
    running: Arc<AtomicUsize>,
    end: watch::Sender<bool>,
    tasks: JoinSet<usize>,
}

impl Clients {
    /// Starts all clients of `endpoint`, which must give each of them `answer`.
    fn start(endpoint: SocketAddr, answer: &str) -> Self {
        let (end, ended) = watch::channel(false);
        let (running, mut tasks) = (Arc::new(AtomicUsize::new(0)), JoinSet::new());
        for _client in 0..CLIENTS {
            let (running, ended, answer) = (running.clone(), ended.clone(), answer.to_owned());
            tasks.spawn(async move {
                let mut answers = 0;
                while !*ended.borrow() {
                    let mut stream = CompletionStream::start(endpoint, "demo", PROMPT).await;
                    stream.next().await.expect("a first token");
                    running.fetch_add(1, Ordering::SeqCst);
                    assert_eq!(stream.finish().await, answer);
                    running.fetch_sub(1, Ordering::SeqCst);
                    answers += 1;
                }
                answers
            });
        }
        Self { running, end, tasks }
    }

    /// Waits until all clients are within an answer at the same time.
    async fn wait_until_all_run(&mut self) {
        until(LONG, "all streams to run", async || {
            if let Some(ended) = self.tasks.try_join_next() {
                panic!("a stream broke: {:?}", ended.err());
            }
            (self.running.load(Ordering::SeqCst) == CLIENTS).then_some(())
        })
        .await;
    }

    /// Returns the number of complete answers of all clients.
    async fn end(self) -> usize {
        self.end.send_replace(true);
        self.tasks.join_all().await.into_iter().sum()
    }
}

/// Returns the certificate in the folder of each function's pod, and the pod's restarts.
async fn certificates(scene: &Scene) -> BTreeMap<String, (Vec<u8>, i32)> {
    let all = pods::list(scene, pods::FUNCTIONS).await;
    let of = |pod: &Pod| {
        let process = pods::process_id(pod).expect("the pod runs");
        let certificate = std::fs::read(format!("/proc/{process}/root/identity/tls.crt"));
        let certificate = certificate.unwrap_or_else(|error| panic!("{}: {error}", pod.name_any()));
        (pod.uid().expect("a pod has a uid"), (certificate, pods::restart_count(pod)))
    };
    all.iter().map(of).collect()
}

/// Certificates are rotated while a hundred clients stream. All answers complete, no container restarts, and new
/// connections use the new certificates.
#[tokio::test(flavor = "multi_thread")]
async fn certificates_change_under_a_hundred_streams() {
    Scene::run("certificates_change_under_a_hundred_streams", async |scene| {
        let cluster = &scene.cluster;
        let _operator = release::shared(cluster).await;
        claim::with_demo_model(scene, "models").await;
        let mut spec = spec("Active");
        spec["workload"] = json!({
            "maxInputTokens": 100, "maxOutputTokens": 200, "typicalInputTokens": 50, "typicalOutputTokens": 160,
            "concurrency": CLIENTS,
        });
        let demo = Deployment::apply(scene, "demo", &spec).await;
        demo.wait_until_settled().await;
        let endpoint = demo.client_addresses(scene).await[0];
        let answer = CompletionStream::start(endpoint, "demo", PROMPT).await.finish().await;
        let before = certificates(scene).await;
        let mut clients = Clients::start(endpoint, &answer);
        clients.wait_until_all_run().await;

        let secrets = scene.api::<Secret>();
        for secret in SECRETS {
            secrets.delete(secret, &DeleteParams::default()).await.unwrap();
        }
        demo.patch(&json!({"metadata": {"annotations": {"test/look": "1"}}})).await;
        let after = until(LONG, "another certificate in every pod", async || {
            let now = certificates(scene).await;
            let is_another = |(uid, (certificate, _)): (&String, &(Vec<u8>, i32))| {
                before.get(uid).is_some_and(|(known, _)| known != certificate)
            };
            now.iter().all(is_another).then_some(now)
        })
        .await;
        clients.wait_until_all_run().await;
        // A new pod presents the new certificates and accepts them.
        demo.patch(&json!({"spec": {"replicas": 2}})).await;
        demo.wait_until_settled().await;
        for endpoint in demo.client_addresses(scene).await {
            let answer = chat(endpoint, "demo", PROMPT).await;
            let experts = &answer["usage"]["remoe"]["experts"];
            assert!(experts["remote"].as_u64() > Some(0), "{answer}");
            assert_eq!(experts["retries"].as_u64(), Some(0), "{answer}");
        }
        clients.wait_until_all_run().await;
        let answers = clients.end().await;
        println!("{answers} answers of {CLIENTS} clients, none broken");
        let now = certificates(scene).await;
        let lives = |all: &BTreeMap<String, (Vec<u8>, i32)>, uid: &String| all.get(uid).map(|(_, lives)| *lives);
        assert!(after.keys().all(|uid| lives(&now, uid) == lives(&before, uid)), "something was started again");

        // An immutable Secret is reported and created again once it is deleted.
        let spoiled = json!({"immutable": true, "data": {"tls.crt": "eA=="}});
        secrets.patch(SECRETS[0], &PatchParams::default(), &Patch::Merge(&spoiled)).await.unwrap();
        let degraded = demo.wait_for_reason("Degraded", "IdentityNotWritten").await;
        let message = degraded["message"].as_str().unwrap();
        assert!(message.contains(SECRETS[0]), "{message}");
        secrets.delete(SECRETS[0], &DeleteParams::default()).await.unwrap();
        until(LONG, "another certificate", async || {
            let secret = secrets.get_opt(SECRETS[0]).await.unwrap()?;
            (secret.immutable != Some(true)).then_some(())
        })
        .await;
        demo.delete().await;
        until(LONG, "the end of the certificates", async || {
            let listed = secrets.list(&ListParams::default()).await.unwrap();
            listed.items.is_empty().then_some(())
        })
        .await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn namespace_outside_the_chart_is_reported() {
    Scene::run("namespace_outside_the_chart_is_reported", async |scene| {
        let cluster = &scene.cluster;
        let mut alone = release::exclusive(cluster, 1).await;
        alone.install(cluster, &["replicas=1", "identity.allNamespaces=false"]).await;
        claim::with_demo_model(scene, "models").await;
        let demo = Deployment::apply(scene, "demo", &spec("Active")).await;
        let degraded = demo.wait_for_reason("Degraded", "IdentityNotPermitted").await;
        let message = degraded["message"].as_str().unwrap();
        assert!(message.contains("identity.namespaces") && message.contains(&scene.namespace), "{message}");
        let listed = format!("identity.namespaces={{{}}}", scene.namespace);
        alone.install(cluster, &["replicas=1", "identity.allNamespaces=false", &listed]).await;
        demo.wait_until_settled().await;
    })
    .await;
}
