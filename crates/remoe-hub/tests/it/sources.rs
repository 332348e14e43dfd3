//! Tests of the hub, S3 and web servers: complete copies, checksums, and refused requests.

use crate::support::{ANY_PORT, WEIGHTS, connect, files, model, start_copy, total_bytes, web};
use remoe_test_sources::{Hub, HubOptions, S3, S3Options};

fn hub_environment(hub: &Hub, token: &str) -> Vec<(&'static str, String)> {
    vec![("HF_ENDPOINT", hub.endpoint()), ("HF_TOKEN", token.to_owned())]
}

async fn hub(
    folder: &std::path::Path,
    options: HubOptions,
) -> (Hub, std::sync::Arc<remoe_test_sources::Content>) {
    let content = remoe_test_sources::Content::new(folder);
    (Hub::start(ANY_PORT, content.clone(), options).await.unwrap(), content)
}

#[tokio::test(flavor = "multi_thread")]
async fn web_server_is_copied_once() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let (web, content) = web(model.path()).await;
    let cache = work.path().join("cache");
    for round in 0..2 {
        let copy = start_copy(&web.model(), &cache, &work.path().join("copy"), &[]).expect_files().await;
        assert_eq!(copy, files(model.path()));
        assert_eq!(content.bytes(), total_bytes(model.path()), "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn signed_s3_prefix_is_copied_once() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let content = remoe_test_sources::Content::new(model.path());
    // Without the right to list the bucket, a missing file gives 403, as is usual.
    let options = S3Options { no_listing: true, ..S3Options::default() };
    let s3 = S3::start(ANY_PORT, content.clone(), options).await.unwrap();
    let cache = work.path().join("cache");
    for round in 0..2 {
        let copying = start_copy(&s3.model(), &cache, &work.path().join("copy"), &s3.environment());
        assert_eq!(copying.expect_files().await, files(model.path()));
        assert_eq!(content.bytes(), total_bytes(model.path()), "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hub_repository_is_copied_once() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let options = HubOptions { token: Some("t0ken".to_owned()), ..HubOptions::default() };
    let (hub, content) = hub(model.path(), options.clone()).await;
    // Signed URLs expire during the transfer.
    content.change(|faults| faults.uses_of_signed_urls = 2);
    let environment = hub_environment(&hub, "t0ken");
    let cache = work.path().join("cache");
    let copying = start_copy(&hub.model(), &cache, &work.path().join("copy"), &environment);
    assert_eq!(copying.expect_files().await, files(model.path()));
    assert_eq!(content.bytes(), total_bytes(model.path()));
    assert_eq!(hub.leaked(), 0, "the storage is another server");
    // A commit never changes: the cached files are enough, and the hub is not needed.
    let described = hub.described();
    drop(hub);
    let pinned = format!("hf://{}@{}", options.repository, options.commit);
    let copying = start_copy(&pinned, &cache, &work.path().join("again"), &environment);
    assert_eq!(copying.expect_files().await, files(model.path()));
    assert_eq!(described, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_hub_checksum_is_refused() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let cache = work.path().join("cache");
    let to = work.path().join("copy");
    let wrong = HubOptions { wrong_checksums: true, ..HubOptions::default() };
    let (server, _) = hub(model.path(), wrong).await;
    let stderr =
        start_copy(&server.model(), &cache, &to, &hub_environment(&server, "")).expect_failure().await;
    assert!(stderr.contains("SHA-256") && stderr.contains(WEIGHTS), "{stderr}");
    // The cache discards the file: the next attempt fetches it again, with the same error.
    let before = journal_lengths(&cache).await;
    let stderr =
        start_copy(&server.model(), &cache, &to, &hub_environment(&server, "")).expect_failure().await;
    assert!(stderr.contains("SHA-256"), "{stderr}");
    assert_eq!(before, journal_lengths(&cache).await);
}

/// Returns the lengths of the journals in a cache, by file name.
async fn journal_lengths(cache: &std::path::Path) -> Vec<(String, usize)> {
    let source = std::fs::read_dir(cache).unwrap().next().unwrap().unwrap();
    let journals = files(&source.path()).into_iter().filter(|(name, _)| name.ends_with("journal"));
    journals.filter(|(name, _)| name.starts_with(WEIGHTS)).map(|(name, bytes)| (name, bytes.len())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_name_remedy_and_no_secret() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let options = HubOptions { token: Some("t0ken".to_owned()), ..HubOptions::default() };
    let (hub, _) = hub(model.path(), options).await;
    let content = remoe_test_sources::Content::new(model.path());
    let s3 = S3::start(ANY_PORT, content, S3Options::default()).await.unwrap();
    let cache = work.path().join("cache");
    let to = work.path().join("copy");
    let refusal = async |model: &str, environment: &[(&str, String)]| {
        start_copy(model, &cache, &to, environment).expect_failure().await
    };
    let stderr = refusal(&hub.model(), &hub_environment(&hub, "wr0ng")).await;
    assert!(stderr.contains("access denied") && stderr.contains("HF_TOKEN"), "{stderr}");
    assert!(!stderr.contains("wr0ng"), "{stderr}");
    let stderr = refusal(&format!("{}@dev", hub.model()), &hub_environment(&hub, "t0ken")).await;
    assert!(stderr.contains("org/model@dev does not exist"), "{stderr}");
    let stderr = refusal("hf://org/other", &hub_environment(&hub, "t0ken")).await;
    assert!(stderr.contains("hf://org/other does not exist"), "{stderr}");
    let mut environment = s3.environment();
    environment.retain(|(name, _)| *name != "AWS_SECRET_ACCESS_KEY");
    environment.push(("AWS_SECRET_ACCESS_KEY", "wr0ng".to_owned()));
    let stderr = refusal(&s3.model(), &environment).await;
    assert!(stderr.contains("SignatureDoesNotMatch") && stderr.contains("AWS_SECRET_ACCESS_KEY"), "{stderr}");
    assert!(!stderr.contains("wr0ng"), "{stderr}");
    let stderr = refusal("s3://models/nowhere", &s3.environment()).await;
    assert!(stderr.contains("missing s3://models/nowhere/config.json"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_weights_are_named() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let (web, content) = web(model.path()).await;
    content.change(|faults| faults.absent.extend([WEIGHTS.to_owned()]));
    let stderr =
        start_copy(&web.model(), &work.path().join("cache"), work.path(), &[]).expect_failure().await;
    assert!(stderr.contains("missing ") && stderr.contains("/models/model.safetensors: "), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unreachable_server_is_named() {
    let work = tempfile::tempdir().unwrap();
    // The listener is dropped at once, so that no server listens at the address.
    let address = std::net::TcpListener::bind(ANY_PORT).unwrap().local_addr().unwrap();
    let store = connect(&format!("http://{address}/models"), work.path()).await.unwrap();
    let stderr = crate::support::read(&store, "config.json").await.unwrap_err();
    assert!(stderr.contains(&address.to_string()) && stderr.contains("cannot reach"), "{stderr}");
}
