//! Who is who on a cluster: pods that have no right to are not answered, wherever they run and whatever
//! labels they have; certificates come, go with their deployment, and are missed where they may not be made.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret};
use kube::ResourceExt;
use kube::api::DeleteParams;
use remoe_e2e::deployment::{Deployment, chat};
use remoe_e2e::host_operator::image;
use remoe_e2e::scene::Scene;
use remoe_e2e::{claim, figures, pods, release};
use remoe_tests::deadline::{LONG, until};
use serde_json::{Value, json};

/// The folder of the claim with the program that tries.
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

/// A claim `models` in the scene's namespace with the program that tries, and with the demo model.
async fn with_stranger(scene: &Scene) {
    let model = format!("demo={}", remoe_tests::binaries::workspace().join("demo/model").display());
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(env!("CARGO_BIN_EXE_stranger"), folder.path().join("stranger")).unwrap();
    let program = format!("stranger={}", folder.path().display());
    claim::create(scene, "models", &["--put", &model, "--put", &program]).await;
}

/// The address of the first pod that plays `part` in `demo`.
async fn address(scene: &Scene, part: &str) -> String {
    let selector = format!("remoe.dev/deployment=demo,remoe.dev/function,app.kubernetes.io/component={part}");
    let pod = pods::selected(scene, &selector).await.remove(0);
    pod.status.unwrap().pod_ip.unwrap()
}

/// What a pod `name` is answered that tries everything at `demo`, with `labels` and what lies in `secret`.
async fn tries(
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
    let said = pods::finished(scene, name).await;
    let answers: Vec<String> = said.lines().map(str::to_owned).collect();
    assert_eq!(answers.len(), 6, "{said}");
    scene.api::<Pod>().delete(name, &DeleteParams::default()).await.unwrap();
    answers
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_operator_and_the_pods_of_a_deployment_are_answered() {
    Scene::run("only_the_operator_and_the_pods_of_a_deployment_are_answered", async |scene| {
        let cluster = &scene.cluster;
        let mut alone = release::exclusive(cluster, 1).await;
        alone.install(cluster, &["replicas=1"]).await;
        with_stranger(scene).await;
        let demo = Deployment::apply(scene, "demo", &spec("Active")).await;
        // Certificates of a deployment that runs nothing: another one's, for all that functions know.
        let other = Deployment::apply(scene, "other", &spec("Advisory")).await;
        demo.settled().await;
        other.condition("Planned", "True").await;
        let endpoint = demo.endpoints(scene).await[0];
        let answer = chat(endpoint, "demo", "Read Genesis 1:1.").await;
        assert!(answer["usage"]["remoe"]["experts"]["remote"].as_u64() > Some(0), "{answer}");

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
            format!("spiffe://remoe/{}/{uid}/main", scene.namespace),
        ];
        let stolen = json!({
            "app.kubernetes.io/part-of": "remoe", "app.kubernetes.io/component": "main",
            "remoe.dev/deployment": "demo",
        });
        let operators =
            json!({"app.kubernetes.io/part-of": "remoe", "app.kubernetes.io/component": "operator"});
        let beside = Scene { namespace: release::NAMESPACE.to_owned(), ..scene.clone() };
        with_stranger(&beside).await;
        for (scene, name, labels) in [
            (scene, "nobody", &json!({})),
            (scene, "stolen", &stolen),
            (&beside, "beside-the-operator", &operators),
        ] {
            for answer in tries(scene, name, &to, labels, None).await {
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
            for answer in tries(scene, secret, &to, &stolen, Some(secret)).await {
                assert!(answer.ends_with("PermissionDenied"), "{secret}: {answer}");
            }
        }
        // Who is let into the namespace of a deployment with its own Secrets is its main function to others.
        let main = tries(scene, "main", &to, &json!({}), Some("demo-main-identity")).await;
        let answered = main.iter().filter(|answer| answer.ends_with("answered"));
        assert_eq!(answered.collect::<Vec<_>>(), ["Forward: answered", "Describe: answered"]);
        let again = chat(endpoint, "demo", "Read Genesis 1:1.").await;
        assert_eq!(again["choices"], answer["choices"]);

        // What somebody takes away comes again, for the next pod.
        secrets.delete("demo-main-identity", &DeleteParams::default()).await.unwrap();
        demo.patch(&json!({"spec": {"replicas": 2}})).await;
        demo.settled().await;
        demo.delete().await;
        other.delete().await;
        until(LONG, "the end of the certificates", async || {
            secrets.list(&Default::default()).await.unwrap().items.is_empty().then_some(())
        })
        .await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_that_the_chart_does_not_list_is_named() {
    Scene::run("a_namespace_that_the_chart_does_not_list_is_named", async |scene| {
        let cluster = &scene.cluster;
        let mut alone = release::exclusive(cluster, 1).await;
        alone.install(cluster, &["replicas=1", "identity.allNamespaces=false"]).await;
        claim::with_demo_model(scene, "models").await;
        let demo = Deployment::apply(scene, "demo", &spec("Active")).await;
        let degraded = demo.reason("Degraded", "IdentityNotPermitted").await;
        let message = degraded["message"].as_str().unwrap();
        assert!(message.contains("identity.namespaces") && message.contains(&scene.namespace), "{message}");
        let listed = format!("identity.namespaces={{{}}}", scene.namespace);
        alone.install(cluster, &["replicas=1", "identity.allNamespaces=false", &listed]).await;
        demo.settled().await;
    })
    .await;
}
