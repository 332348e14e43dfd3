//! First start of a model: without a profile, from a slow source, and its output.

use remoe_test_sources::{Content, Web};
use remoe_test_support::binaries;
use remoe_test_support::checkpoint::{Sizes, generate, generate_in};
use remoe_test_support::command::remoe;
use remoe_test_support::deadline::{LONG, until};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::many_experts::ManyExperts;
use remoe_test_support::process::Process;
use remoe_test_support::raw;
use remoe_test_support::up::Up;
use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
/// Largest number of lines of a start, and of columns per line.
const LINES: usize = 12;
const COLUMNS: usize = 80;

fn demo() -> String {
    ModelFixture::demo().folder.to_str().unwrap().to_owned()
}

/// Returns the children of the process `parent` with their state letters.
fn children(parent: u32) -> Vec<(u32, char)> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let child = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?.chars().next()?;
        (fields.next()?.parse() == Ok(parent)).then_some((pid, state))
    };
    pids.filter_map(child).collect()
}

async fn ask(address: SocketAddr, tokens: u32) -> Value {
    let body = json!({"prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true});
    raw::ask(address, raw::post("/v1/completions", &body.to_string())).await.ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn up_without_a_profile_serves_first_and_measures_when_idle() {
    let cache = tempfile::tempdir().unwrap();
    let variables = [("XDG_CACHE_HOME", cache.path().to_str().unwrap().to_owned())];
    let up = Up::start_in(&[&demo()], &[], &variables).await;
    let profiles = cache.path().join("remoe/profiles");
    assert!(!profiles.exists(), "it was measured before it was ready");
    let (address, own) = (up.ready.http(), up.ready.pids());
    let expected = ask(address, 16).await["choices"][0]["token_ids"].clone();
    let measured = || children(up.process.pid()).into_iter().filter(|(pid, _)| !own.contains(pid));
    until(LONG, "functions under measurement", async || measured().next().map(drop)).await;
    // Sends long requests one after another: meanwhile the measurement pauses.
    let (mut stood_still, mut rounds) = (false, 0);
    while !stood_still && rounds < 100 {
        rounds += 1;
        let answering = tokio::spawn(async move { ask(address, 400).await });
        let mut seen = Vec::new();
        while !answering.is_finished() {
            seen.push(measured().map(|(_, state)| state).collect::<Vec<_>>());
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        answering.await.unwrap();
        stood_still =
            seen.iter().any(|states| !states.is_empty() && states.iter().all(|state| *state == 'T'));
    }
    assert!(stood_still, "nothing was stopped");
    // Requests continue at intervals, and none is lost or changed by the measurement and the new plan.
    until(LONG * 4, "a plan on measurements", async || {
        assert_eq!(ask(address, 16).await["choices"][0]["token_ids"], expected);
        tokio::time::sleep(std::time::Duration::from_secs(15)).await;
        up.process.log().iter().any(|line| line.contains("measured this machine in")).then_some(())
    })
    .await;
    assert_eq!(std::fs::read_dir(&profiles).unwrap().count(), 1);
    assert_eq!(ask(address, 16).await["choices"][0]["token_ids"], expected);
    until(LONG, "functions under measurement to end", async || (measured().count() == 0).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn profile_first_measures_before_it_serves() {
    let cache = tempfile::tempdir().unwrap();
    let variables = [("XDG_CACHE_HOME", cache.path().to_str().unwrap().to_owned())];
    let up = Up::start_in(&[&demo()], &["--profile-first"], &variables).await;
    assert_eq!(std::fs::read_dir(cache.path().join("remoe/profiles")).unwrap().count(), 1);
    assert_eq!(children(up.process.pid()).len(), up.ready.pids().len());
}

/// Returns the lines of `remoe up` on both streams until its hint how to stop it.
async fn printed(model: &Path, arguments: &[&str]) -> Vec<String> {
    let cache = tempfile::tempdir().unwrap();
    let mut command = Command::new(binaries::program("remoe"));
    command.args(["up", "--port", "0"]).args(arguments).arg(model);
    command.env_remove("REMOE_LOG").env_remove("REMOE_API_KEY");
    command.env("REMOE_BIN_DIR", binaries::folder()).env("XDG_CACHE_HOME", cache.path());
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = lines.clone();
    let process = Process::start("remoe up", command, move |line| sink.lock().unwrap().push(line));
    until(LONG, "the end of what is said of a start", async || {
        let said = lines.lock().unwrap().iter().any(|line: &String| line.starts_with("Ctrl-C"));
        said.then_some(())
    })
    .await;
    let mut all = process.log();
    all.extend(lines.lock().unwrap().iter().cloned());
    all
}

fn assert_short(lines: &[String]) {
    assert!(lines.len() <= LINES, "{} lines: {lines:#?}", lines.len());
    for line in lines {
        assert!(line.chars().count() <= COLUMNS, "{} columns: {line}", line.chars().count());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn start_with_many_experts_is_told_in_few_short_lines() {
    let many = ManyExperts::get().await;
    let folder = tempfile::tempdir().unwrap();
    let deep = folder.path().join("a-folder-with-quite-a-long-name".repeat(3)).join("m".repeat(90));
    std::fs::create_dir_all(&deep).unwrap();
    let sizes =
        Sizes { layers: 16, hidden: 64, width: 32, experts: 64, top_k: 8, vocabulary: 512, context: 512 };
    generate_in(&deep, sizes);
    for (model, arguments) in [
        (many.folder.as_path(), &[][..]),
        (&many.folder, &["--remote-ratio", "0.5", "--groups", "3", "--replicas", "2"]),
        (&many.folder, &["--remote", "always"]),
        (&deep, &[]),
        (&deep, &["--remote-ratio", "0.5"]),
    ] {
        let lines = printed(model, arguments).await;
        assert_short(&lines);
        let text = lines.join("\n");
        for word in ["main function: ", "remote functions: ", "why: ", "cost: "] {
            assert!(text.contains(word), "{word}: {text}");
        }
        assert!(!text.contains("1 threads") && !text.contains("cheapest plan"), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn verbose_start_shows_the_plan() {
    let lines = printed(&ModelFixture::demo().folder, &["--verbose"]).await;
    assert!(lines.iter().any(|line| line.contains("sized for")), "{lines:#?}");
    assert!(lines.iter().any(|line| line.starts_with("placement ")), "{lines:#?}");
}

/// Generates a model of about 600 kB.
fn small() -> TempDir {
    generate(Sizes { layers: 1, hidden: 64, width: 96, experts: 8, top_k: 2, vocabulary: 256, context: 64 })
}

/// Starts `up` for the model at `url` and stops it `seconds` after its last progress.
fn from_source(url: &str, cache: &Path, seconds: &str) -> (Process, Arc<Mutex<Vec<String>>>) {
    let mut command = Command::new(binaries::program("remoe"));
    command.args(["up", "--json", "--port", "0", "--threads", "1", "--remote-ratio", "0", url]);
    command.args(["--ready-timeout", seconds, "--model-cache"]).arg(cache);
    command.env_remove("REMOE_LOG").env_remove("REMOE_API_KEY").env("REMOE_BIN_DIR", binaries::folder());
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = lines.clone();
    (Process::start("remoe up", command, move |line| sink.lock().unwrap().push(line)), lines)
}

async fn ready(lines: &Arc<Mutex<Vec<String>>>) {
    until(LONG, "readiness", async || {
        let said = lines.lock().unwrap().iter().any(|line| line.contains("\"event\":\"ready\""));
        said.then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_source_is_waited_for_while_bytes_arrive() {
    let (model, cache) = (small(), tempfile::tempdir().unwrap());
    let content = Content::new(model.path());
    let web = Web::start(ANY, content.clone()).await.unwrap();
    let size = std::fs::metadata(model.path().join("model.safetensors")).unwrap().len();
    // Takes four times the timeout; chunks of 16 kB arrive more often than that.
    content.change(|faults| faults.bytes_per_second = Some(size / 12));
    let started = std::time::Instant::now();
    let (_process, lines) = from_source(&web.model(), cache.path(), "3");
    ready(&lines).await;
    assert!(started.elapsed().as_secs() >= 6, "the source was not slow: {:?}", started.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn source_that_stalls_before_the_weights_is_named() {
    let (model, cache) = (small(), tempfile::tempdir().unwrap());
    let content = Content::new(model.path());
    content.change(|faults| faults.hang = true);
    let web = Web::start(ANY, content).await.unwrap();
    let (mut process, _lines) = from_source(&web.model(), cache.path(), "2");
    assert!(!process.end(LONG).await.success());
    let said = process.log().join("\n");
    for part in ["no byte for 2s", &web.model(), "raise --ready-timeout to wait longer"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn download_goes_on_after_a_kill() {
    let (model, cache) = (small(), tempfile::tempdir().unwrap());
    let content = Content::new(model.path());
    let web = Web::start(ANY, content.clone()).await.unwrap();
    let size = std::fs::metadata(model.path().join("model.safetensors")).unwrap().len();
    content.change(|faults| faults.bytes_per_second = Some(size / 12));
    let (mut process, _lines) = from_source(&web.model(), cache.path(), "60");
    until(LONG, "half of the weights", async || (content.bytes() > size / 2).then_some(())).await;
    process.signal(rustix::process::Signal::KILL);
    process.end(LONG).await;
    let before = content.take_counted()["model.safetensors"].bytes;
    content.change(|faults| faults.bytes_per_second = None);
    let (_process, lines) = from_source(&web.model(), cache.path(), "60");
    ready(&lines).await;
    let after = content.counted()["model.safetensors"].bytes;
    // Bytes in transit and bytes not yet in the journal are fetched twice.
    assert!(after < size * 3 / 4, "{before} bytes before, {after} after, of {size}");
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_pulled_listed_and_removed() {
    let (model, cache) = (small(), tempfile::tempdir().unwrap());
    let content = Content::new(model.path());
    let web = Web::start(ANY, content.clone()).await.unwrap();
    let (place, kept_in) = (web.model(), cache.path().to_str().unwrap());
    let run = async |arguments: &[&str]| remoe(&[arguments, &["--model-cache", kept_in]].concat()).await;
    let size = std::fs::metadata(model.path().join("model.safetensors")).unwrap().len();
    let (code, pulled) = run(&["pull", &place]).await;
    assert_eq!((code, &pulled["model"]), (Some(0), &json!(place)), "{pulled}");
    assert!(pulled["bytes"].as_u64() >= Some(size), "{pulled}");
    // The cache is complete: another start fetches no weights.
    content.take_counted();
    assert_eq!(run(&["pull", &place]).await.0, Some(0));
    assert_eq!(content.bytes(), 0);
    let (_, list) = run(&["list"]).await;
    assert_eq!(list["models"][0]["model"], place, "{list}");
    let (code, removed) = run(&["rm", &place]).await;
    assert_eq!((code, &removed["removed"][0]["model"]), (Some(0), &json!(place)));
    assert_eq!(run(&["list"]).await.1["models"], json!([]));
    assert_eq!(run(&["rm", &place]).await.0, Some(2));
}
