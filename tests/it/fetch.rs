//! Functions with a remote model source.

use remoe_proto::format_listing;
use remoe_test_sources::{Content, Hub, HubOptions, Web};
use remoe_test_support::binaries;
use remoe_test_support::checkpoint::{Sizes, generate};
use remoe_test_support::control::greedy;
use remoe_test_support::expert_stream::describe;
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::function::{MainFunction, RemoteFunction, StartOptions};
use remoe_test_support::placement::{all_experts, remote_sets};
use serde_json::Value;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
const TOKEN: &str = "t0ken";

async fn hub(folder: &Path) -> (Hub, Arc<Content>) {
    let content = Content::new(folder);
    let options = HubOptions { token: Some(TOKEN.to_owned()), ..HubOptions::default() };
    (Hub::start(ANY, content.clone(), options).await.unwrap(), content)
}

fn options(cache: &Path, hub: &Hub, token: &str) -> StartOptions {
    let environment = vec![("HF_ENDPOINT", hub.endpoint()), ("HF_TOKEN", token.to_owned())];
    StartOptions { environment, ..StartOptions::default() }.with("--model-cache", cache.display())
}

#[tokio::test(flavor = "multi_thread")]
async fn remote_function_fetches_only_its_experts() {
    let sizes =
        Sizes { layers: 1, hidden: 256, width: 1024, experts: 8, top_k: 2, vocabulary: 256, context: 64 };
    let model = generate(sizes);
    let folder = remoe_model::Checkpoint::open(model.path()).unwrap();
    let content = Content::new(model.path());
    let web = Web::start(ANY, content.clone()).await.unwrap();
    let cache = tempfile::tempdir().unwrap();
    let start = async || {
        let options = StartOptions::default().with("--model-cache", cache.path().display());
        let function = RemoteFunction::start(Path::new(&web.model()), "0:2,5", options).await;
        let description = describe(function.address()).await;
        assert_eq!(description.checkpoint, folder.fingerprint().unwrap().to_string());
        function
    };
    let function = start().await;
    let hosted: u64 = [2, 5].map(|expert| folder.expert(0, expert).unwrap().bytes()).iter().sum();
    // Reads the header of each file and, for the fingerprint, 64 pages and the start of each tensor.
    let besides = (64 << 10) + (64 + folder.tensor_names().len() as u64) * (8 << 10);
    let bytes = content.bytes();
    assert!((hosted..hosted + besides).contains(&bytes), "{bytes} for {hosted} bytes of experts");
    assert!(function.process.log().iter().any(|line| line.starts_with("fetch: ")), "no progress");
    // A second replica on the same cache fetches nothing.
    let _other = start().await;
    assert_eq!(content.bytes(), bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn model_from_a_hub_answers_as_from_a_folder() {
    const TOKENS: u32 = 24;
    let model = ModelFixture::demo();
    let checkpoint = model.checkpoint();
    let prompt = model.prompts().pop().unwrap();
    let expected = {
        let main = MainFunction::start(&model.folder, StartOptions::default()).await;
        main.control.route(&[], &[]).await;
        main.control.generate(greedy(&prompt, TOKENS)).await.finished
    };
    let (hub, content) = hub(&model.folder).await;
    let cache = tempfile::tempdir().unwrap();
    let place = PathBuf::from(hub.model());
    let remote = remote_sets(&checkpoint, 0.5);
    let options = options(cache.path(), &hub, TOKEN);
    // Both start at the same time on one cache.
    let listing = format_listing(&remote);
    let (function, main) = tokio::join!(
        RemoteFunction::start(&place, &listing, options.clone()),
        MainFunction::start(&place, options.clone())
    );
    main.control.route(&[function.address()], &remote).await;
    let answer = main.control.generate(greedy(&prompt, TOKENS)).await.finished;
    assert_eq!(answer.tokens, expected.tokens);
    assert!(answer.experts.unwrap().remote > 0);
    drop(function);
    let answer = main.control.generate(greedy(&prompt, TOKENS)).await.finished;
    assert_eq!(answer.tokens, expected.tokens);
    assert!(answer.experts.unwrap().fallback > 0);
    let size = std::fs::metadata(model.folder.join("model.safetensors")).unwrap().len();
    assert!(content.counted()["model.safetensors"].bytes <= size, "some bytes were fetched twice");
    assert_eq!(hub.leaked(), 0);
}

/// A main function fetches experts that are not in its cache when their remote function dies.
#[tokio::test(flavor = "multi_thread")]
async fn main_function_fetches_experts_of_a_dead_replica() {
    let model = generate(Sizes {
        layers: 1,
        hidden: 256,
        width: 1024,
        experts: 8,
        top_k: 2,
        vocabulary: 256,
        context: 64,
    });
    let checkpoint = remoe_model::Checkpoint::open(model.path()).unwrap();
    let (hub, content) = hub(model.path()).await;
    let (cache, others) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let place = PathBuf::from(hub.model());
    let all = all_experts(&checkpoint);
    let function = RemoteFunction::start(&place, &all, options(others.path(), &hub, TOKEN)).await;
    content.take_counted();
    let main = MainFunction::start(&place, options(cache.path(), &hub, TOKEN)).await;
    main.control.route(&[function.address()], &remote_sets(&checkpoint, 1.0)).await;
    let prompt = [1, 2, 3];
    let answer = main.control.generate(greedy(&prompt, 8)).await.finished;
    let expert = checkpoint.expert(0, 0).unwrap().bytes();
    assert!(content.bytes() < 2 * expert, "{} bytes without an expert", content.bytes());
    drop(function);
    let alone = main.control.generate(greedy(&prompt, 8)).await.finished;
    assert_eq!(alone.tokens, answer.tokens);
    assert!(alone.experts.unwrap().fallback > 0);
    assert!(content.bytes() >= 2 * expert, "{} bytes with experts", content.bytes());
}

fn inspect(model: &str, cache: &Path, environment: &[(&str, String)]) -> Output {
    let mut command = Command::new(binaries::program("remoe"));
    command.args(["inspect", "--json", "--model", model, "--model-cache"]).arg(cache);
    command.envs(environment.iter().map(|(name, value)| (name, value))).output().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn inspection_names_the_commit() {
    let model = ModelFixture::demo();
    let (hub, _content) = hub(&model.folder).await;
    let cache = tempfile::tempdir().unwrap();
    let environment = options(cache.path(), &hub, TOKEN).environment;
    let place = hub.model();
    let path = cache.path().to_owned();
    let output = tokio::task::spawn_blocking(move || inspect(&place, &path, &environment)).await.unwrap();
    let mut printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let revision = printed.as_object_mut().unwrap().remove("revision");
    assert_eq!(revision.unwrap(), HubOptions::default().commit);
    let local = inspect(model.folder.to_str().unwrap(), cache.path(), &[]);
    assert_eq!(printed, serde_json::from_slice::<Value>(&local.stdout).unwrap());
}

/// Exit codes tell whether a restart can help.
#[tokio::test(flavor = "multi_thread")]
async fn functions_that_cannot_have_their_model_say_so() {
    let model = ModelFixture::demo();
    let (hub, _content) = hub(&model.folder).await;
    let cache = tempfile::tempdir().unwrap();
    let refused = options(cache.path(), &hub, "wr0ng");
    let (status, log) = RemoteFunction::refuse(Path::new(&hub.model()), "0:0", refused).await;
    assert_eq!(status.code(), Some(4), "{log:?}");
    let last = log.last().unwrap();
    assert!(last.contains("access denied") && !last.contains("wr0ng"), "{last}");
    let gone = format!("{}@{}", hub.model(), "f".repeat(40));
    let (status, log) =
        RemoteFunction::refuse(Path::new(&gone), "0:0", options(cache.path(), &hub, TOKEN)).await;
    assert_eq!(status.code(), Some(4), "{log:?}");
    assert!(log.last().unwrap().contains(&gone), "{log:?}");
    let down = options(cache.path(), &hub, TOKEN);
    let place = hub.model();
    drop(hub);
    let (status, log) = RemoteFunction::refuse(Path::new(&place), "0:0", down).await;
    assert_eq!(status.code(), Some(1), "{log:?}");
    assert!(log.last().unwrap().contains("cannot reach"), "{log:?}");
}
