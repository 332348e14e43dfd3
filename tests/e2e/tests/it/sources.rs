//! Models from a hub and from S3: fetched bytes, and reports of failures.

use remoe_e2e::deployment::{Deployment, chat};
use remoe_e2e::scene::Scene;
use remoe_e2e::{claim, release};
use remoe_test_sources::{Content, Hub, HubOptions, S3, S3Options};
use remoe_test_support::binaries::workspace;
use remoe_test_support::up::Up;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;

const PROMPT: &str = "Read Genesis 1:1.";
const WEIGHTS: &str = "model.safetensors";
const TOKEN: &str = "hf_of_the_test";

#[tokio::test(flavor = "multi_thread")]
async fn hub_serves_only_hosted_experts() {
    Scene::run("hub_serves_only_hosted_experts", async |scene| {
        let content = Content::new(workspace().join("demo/model"));
        let options = HubOptions { token: Some(TOKEN.to_owned()), ..HubOptions::default() };
        let commit = options.commit.clone();
        let hub = Hub::start(any_port(scene), content.clone(), options).await.unwrap();
        let model = json!({"source": hub.model(), "endpoint": hub.endpoint()});
        let demo = serve(scene, &content, model, [("HF_TOKEN", "hf_wrong")], [("HF_TOKEN", TOKEN)]).await;
        assert_eq!(demo.status().await["model"]["revision"], commit.as_str());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bucket_serves_only_hosted_experts() {
    Scene::run("bucket_serves_only_hosted_experts", async |scene| {
        let content = Content::new(workspace().join("demo/model"));
        let s3 = S3::start(
            any_port(scene),
            content.clone(),
            S3Options { prefix: "some/model".to_owned(), ..S3Options::default() },
        )
        .await
        .unwrap();
        let right = s3.environment();
        let value = |name: &str| right.iter().find(|(known, _)| *known == name).unwrap().1.as_str();
        let model = json!({"source": s3.model(), "endpoint": value("AWS_ENDPOINT_URL")});
        let of = |secret| {
            [
                ("AWS_ACCESS_KEY_ID", value("AWS_ACCESS_KEY_ID")),
                ("AWS_SECRET_ACCESS_KEY", secret),
                ("AWS_REGION", value("AWS_REGION")),
            ]
        };
        serve(scene, &content, model, of("wrong"), of(value("AWS_SECRET_ACCESS_KEY"))).await;
    })
    .await;
}

/// A deployment of `model` meets in turn a missing Secret, wrong credentials, a missing file and broken connections,
/// and finally serves.
async fn serve<const N: usize>(
    scene: &Scene,
    content: &Arc<Content>,
    mut model: Value,
    wrong: [(&str, &str); N],
    right: [(&str, &str); N],
) -> Deployment {
    let _operator = release::shared(&scene.cluster).await;
    claim::create(scene, "weights", &[]).await;
    model["credentialsSecretName"] = json!("source");
    model["cacheClaimName"] = json!("weights");
    let spec = json!({
        "model": model,
        "servedName": "model",
        "main": {"memoryMB": {"min": 200, "max": 2000, "step": 100}},
        "remoteExperts": {"mode": "Always", "maxReplicas": 1, "memoryMB": {"min": 100, "max": 1000}},
    });
    let demo = Deployment::apply(scene, "demo", &spec).await;
    demo.wait_for_reason("Planned", "CredentialsMissing").await;

    secret(scene, &wrong).await;
    let refused = demo.wait_for_reason("Planned", "CredentialsRefused").await;
    let message = refused["message"].as_str().unwrap();
    let source = model["source"].as_str().unwrap();
    assert!(message.contains(source), "{message}");
    assert!(wrong.iter().all(|(_, value)| value.len() < 8 || !message.contains(value)), "{message}");

    content.change(|faults| _ = faults.absent.insert(WEIGHTS.to_owned()));
    secret(scene, &right).await;
    let missing = demo.wait_for_reason("Planned", "ModelUnreadable").await;
    assert!(missing["message"].as_str().unwrap().contains(WEIGHTS), "{missing}");

    content.take_counted();
    content.change(|faults| {
        faults.absent.clear();
        (faults.cut_after, faults.cuts) = (Some(100_000), 12);
    });
    demo.wait_for_condition("Ready", "True").await;
    let left = content.faults().cuts;
    assert_eq!(left, 0, "connections were cut");

    let fetched = content.counted()[WEIGHTS].bytes;
    let size = std::fs::metadata(workspace().join("demo/model").join(WEIGHTS)).unwrap().len();
    // Bytes from before an interruption, or from another pod, are not fetched again.
    assert!(fetched <= size + (1 << 20), "{fetched} of {size} bytes were sent");
    let answer = chat(demo.client_addresses(scene).await[0], "model", PROMPT).await;
    let local = Up::start(&workspace().join("demo/model"), 1).await;
    let local = chat(local.ready.http(), "model", PROMPT).await;
    assert_eq!(answer["choices"], local["choices"]);
    assert!(answer["usage"]["remoe"]["experts"]["remote"].as_u64() > Some(0), "{answer}");
    demo
}

async fn secret(scene: &Scene, keys: &[(&str, &str)]) {
    let data: serde_json::Map<String, Value> =
        keys.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
    let secret =
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "source"}, "stringData": data});
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), secret.to_string()).unwrap();
    scene.kubectl(&["apply", "--filename", file.path().to_str().unwrap()]).await;
}

/// Returns a free port on this host's address for pods.
fn any_port(scene: &Scene) -> SocketAddr {
    SocketAddr::new(scene.cluster.host, 0)
}
