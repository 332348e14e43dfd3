//! The hub, S3 and web servers: what they give, and what they refuse.

use crate::support::{ANY, WEIGHTS, connect, files, model, start_copy, total, web};
use remoe_test_sources::{Hub, HubOptions, S3, S3Options};

fn hub_environment(hub: &Hub, token: &str) -> Vec<(&'static str, String)> {
    vec![("HF_ENDPOINT", hub.endpoint()), ("HF_TOKEN", token.to_owned())]
}

async fn hub(
    folder: &std::path::Path,
    options: HubOptions,
) -> (Hub, std::sync::Arc<remoe_test_sources::Content>) {
    let content = remoe_test_sources::Content::new(folder);
    (Hub::start(ANY, content.clone(), options).await.unwrap(), content)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_web_server_gives_the_folders_bytes_once() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let (web, content) = web(model.path()).await;
    let cache = work.path().join("cache");
    for round in 0..2 {
        let copy = start_copy(&web.model(), &cache, &work.path().join("copy"), &[]).done().await;
        assert_eq!(copy, files(model.path()));
        assert_eq!(content.bytes(), total(model.path()), "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s3_gives_the_folders_bytes_once_to_who_signs() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let content = remoe_test_sources::Content::new(model.path());
    // The key may not list the bucket, as is usual: what is absent looks refused.
    let options = S3Options { no_listing: true, ..S3Options::default() };
    let s3 = S3::start(ANY, content.clone(), options).await.unwrap();
    let cache = work.path().join("cache");
    for round in 0..2 {
        let copying = start_copy(&s3.model(), &cache, &work.path().join("copy"), &s3.environment());
        assert_eq!(copying.done().await, files(model.path()));
        assert_eq!(content.bytes(), total(model.path()), "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_hub_gives_the_folders_bytes_once() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let options = HubOptions { token: Some("t0ken".to_owned()), ..HubOptions::default() };
    let (hub, content) = hub(model.path(), options.clone()).await;
    // Signed URLs expire while there is work left.
    content.change(|faults| faults.uses_of_signed_urls = 2);
    let environment = hub_environment(&hub, "t0ken");
    let cache = work.path().join("cache");
    let copying = start_copy(&hub.model(), &cache, &work.path().join("copy"), &environment);
    assert_eq!(copying.done().await, files(model.path()));
    assert_eq!(content.bytes(), total(model.path()));
    assert_eq!(hub.leaked(), 0, "the storage is another server");
    // At a commit nothing can have changed, and no source needs to be asked.
    let described = hub.described();
    drop(hub);
    let pinned = format!("hf://{}@{}", options.repository, options.commit);
    let copying = start_copy(&pinned, &cache, &work.path().join("again"), &environment);
    assert_eq!(copying.done().await, files(model.path()));
    assert_eq!(described, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_hubs_checksums_are_compared() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let cache = work.path().join("cache");
    let to = work.path().join("copy");
    let wrong = HubOptions { wrong_checksums: true, ..HubOptions::default() };
    let (liar, _) = hub(model.path(), wrong).await;
    let said = start_copy(&liar.model(), &cache, &to, &hub_environment(&liar, "")).refusal().await;
    assert!(said.contains("SHA-256") && said.contains(WEIGHTS), "{said}");
    // Nothing of it is kept: the next one begins again, and is told the same.
    let before = files_of(&cache).await;
    let said = start_copy(&liar.model(), &cache, &to, &hub_environment(&liar, "")).refusal().await;
    assert!(said.contains("SHA-256"), "{said}");
    assert_eq!(before, files_of(&cache).await);
}

/// The lengths of the journals in a cache.
async fn files_of(cache: &std::path::Path) -> Vec<(String, usize)> {
    let source = std::fs::read_dir(cache).unwrap().next().unwrap().unwrap();
    let journals = files(&source.path()).into_iter().filter(|(name, _)| name.ends_with("journal"));
    journals.filter(|(name, _)| name.starts_with(WEIGHTS)).map(|(name, bytes)| (name, bytes.len())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_say_what_to_do_and_no_secret() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let options = HubOptions { token: Some("t0ken".to_owned()), ..HubOptions::default() };
    let (hub, _) = hub(model.path(), options).await;
    let content = remoe_test_sources::Content::new(model.path());
    let s3 = S3::start(ANY, content, S3Options::default()).await.unwrap();
    let cache = work.path().join("cache");
    let to = work.path().join("copy");
    let refusal = async |model: &str, environment: &[(&str, String)]| {
        start_copy(model, &cache, &to, environment).refusal().await
    };
    let said = refusal(&hub.model(), &hub_environment(&hub, "wr0ng")).await;
    assert!(said.contains("access denied") && said.contains("HF_TOKEN"), "{said}");
    assert!(!said.contains("wr0ng"), "{said}");
    let said = refusal(&format!("{}@dev", hub.model()), &hub_environment(&hub, "t0ken")).await;
    assert!(said.contains("org/model@dev does not exist"), "{said}");
    let said = refusal("hf://org/other", &hub_environment(&hub, "t0ken")).await;
    assert!(said.contains("hf://org/other does not exist"), "{said}");
    let mut environment = s3.environment();
    environment.retain(|(name, _)| *name != "AWS_SECRET_ACCESS_KEY");
    environment.push(("AWS_SECRET_ACCESS_KEY", "wr0ng".to_owned()));
    let said = refusal(&s3.model(), &environment).await;
    assert!(said.contains("SignatureDoesNotMatch") && said.contains("AWS_SECRET_ACCESS_KEY"), "{said}");
    assert!(!said.contains("wr0ng"), "{said}");
    let said = refusal("s3://models/nowhere", &s3.environment()).await;
    assert!(said.contains("missing s3://models/nowhere/config.json"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_is_named() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let (web, content) = web(model.path()).await;
    content.change(|faults| faults.absent.extend([WEIGHTS.to_owned()]));
    let said = start_copy(&web.model(), &work.path().join("cache"), work.path(), &[]).refusal().await;
    assert!(said.contains("missing ") && said.contains("/models/model.safetensors: "), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_there_is_named() {
    let work = tempfile::tempdir().unwrap();
    // No server listens there once the socket is gone.
    let address = std::net::TcpListener::bind(ANY).unwrap().local_addr().unwrap();
    let store = connect(&format!("http://{address}/models"), work.path()).await.unwrap();
    let said = crate::support::read(&store, "config.json").await.unwrap_err();
    assert!(said.contains(&address.to_string()) && said.contains("cannot reach"), "{said}");
}
