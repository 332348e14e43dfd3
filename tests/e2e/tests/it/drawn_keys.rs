//! Release with default values: gateways require keys, which the chart generates once. With a certificate they serve
//! TLS.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::Api;
use remoe_e2e::cluster::Cluster;
use remoe_e2e::scene::Scene;
use remoe_e2e::{demo, gateways, release, tool};
use serde_json::{Value, json};
use std::path::Path;

/// Secret with the certificate of the gateways.
const TLS: &str = "gateway-tls";

/// Returns the key `name` that the chart generated.
async fn drawn(cluster: &Cluster, name: &str) -> String {
    let secrets = Api::<Secret>::namespaced(cluster.client.clone(), release::NAMESPACE);
    let secret = secrets.get("remoe-gateway-keys").await.expect("the chart drew keys");
    let ByteString(key) = &secret.data.expect("the Secret has keys")[name];
    String::from_utf8(key.clone()).expect("a key is text")
}

/// Creates a certificate for `host` in `folder`, and its Secret.
async fn certificate(cluster: &Cluster, folder: &Path, host: &str) -> String {
    let (certificate, key) = (folder.join("tls.crt"), folder.join("tls.key"));
    let path = |path: &Path| path.to_str().expect("the path is text").to_owned();
    let (subject, names) = (format!("/CN={host}"), format!("subjectAltName=DNS:{host}"));
    let (certificate, key) = (path(&certificate), path(&key));
    let arguments = [
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
        "-subj",
        &subject,
        "-addext",
        &names,
        "-keyout",
        &key,
        "-out",
        &certificate,
    ];
    tool::run(Path::new("openssl"), &cluster.kubeconfig, &arguments).await;
    let place = ["--namespace", release::NAMESPACE];
    let files = [format!("--cert={certificate}"), format!("--key={key}")];
    let create = ["create", "secret", "tls", TLS, &files[0], &files[1]];
    cluster.kubectl(&[&create[..], &place].concat()).await;
    certificate
}

#[tokio::test(flavor = "multi_thread")]
async fn default_release_requires_drawn_keys_and_serves_tls() {
    Scene::run("default_release_requires_drawn_keys_and_serves_tls", async |scene| {
        let cluster = &scene.cluster;
        let mut alone = release::exclusive(cluster, 1).await;
        let forget = ["delete", "secret", TLS, "--ignore-not-found", "--namespace", release::NAMESPACE];
        cluster.kubectl(&forget).await;
        let demo = demo::deploy(scene, &json!({})).await;
        let exposed = demo.wait_for_condition("Exposed", "True").await;
        assert_eq!(exposed["reason"], "GatewayOpen", "{exposed}");
        assert!(demo.status().await["url"].as_str().unwrap().starts_with("http://"));

        let folder = tempfile::tempdir().unwrap();
        let host = format!("demo.{}.svc", scene.namespace);
        let authority = certificate(cluster, folder.path(), &host).await;
        // With an empty value, an upgrade of a release without keys would stay without keys.
        let tls = format!("gateway.tls.secretName={TLS}");
        alone.install(cluster, &["replicas=1", "gateway.open=false", &tls]).await;
        demo.wait_for_reason("Exposed", "KeysRequired").await;
        let url = demo.status().await["url"].as_str().unwrap().to_owned();
        assert_eq!(url, format!("https://{host}:8000"));

        let gateway = gateways::address(&gateways::pods(cluster, 1).await[0]);
        let resolve = format!("{host}:8000:{}", gateway.ip());
        let get = async |key: &str| -> (String, Value) {
            let (path, header) = (format!("{url}/v1/models"), format!("Authorization: Bearer {key}"));
            let mut arguments =
                vec!["--silent", "--show-error", "--cacert", &authority, "--resolve", &resolve];
            if !key.is_empty() {
                arguments.extend(["--header", &header]);
            }
            arguments.extend(["--write-out", "\n%{http_code}", &path]);
            let said = tool::run(Path::new("curl"), &cluster.kubeconfig, &arguments).await;
            let (body, status) = said.rsplit_once('\n').unwrap();
            (status.to_owned(), serde_json::from_str(body).unwrap_or(Value::Null))
        };
        let (admin, metrics) = (drawn(cluster, "admin").await, drawn(cluster, "metrics").await);
        assert_ne!(admin, metrics);
        for key in ["", "sk-guessed"] {
            assert_eq!(get(key).await.0, "401", "key {key:?}");
        }
        let models = |body: &Value| body["data"].as_array().map_or(0, Vec::len);
        let (status, body) = get(&admin).await;
        assert_eq!((status.as_str(), models(&body)), ("200", 1), "{body}");
        let (status, body) = get(&metrics).await;
        assert_eq!((status.as_str(), models(&body)), ("200", 0), "{body}");

        // An upgrade keeps them.
        alone.install(cluster, &["replicas=1", "gateway.open=false", "gateway.maxRequests=1000"]).await;
        assert_eq!(drawn(cluster, "admin").await, admin);
        demo.delete().await;
        demo.wait_until_gone(scene).await;
        cluster.kubectl(&forget).await;
    })
    .await;
}
