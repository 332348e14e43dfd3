//! Placement that follows expert usage, with the two kinds of routing in the demo model.

use remoe_test_support::command::remoe;
use remoe_test_support::deadline::{LONG, until};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::raw;
use remoe_test_support::up::Up;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::net::SocketAddr;

const SCRIPTURE: [&str; 4] = [
    "And the LORD spake unto Moses, saying, Speak unto the children of Israel, and say unto them",
    "And it came to pass in those days, that he went out into a mountain to pray, and continued all night",
    "Blessed is the man that walketh not in the counsel of the ungodly, nor standeth in the way of sinners",
    "Now these are the names of the children of Israel, which came into Egypt; every man and his household",
];
const CODE: [&str; 4] = [
    "use std::collections::HashMap;\n\nfn main() {\n    let mut map = HashMap::new();\n    map.insert(\"key\", 1);",
    "impl<T> Vec<T> {\n    pub fn push(&mut self, value: T) {\n        if self.len == self.buf.capacity() {",
    "let x: Option<u32> = Some(2);\nassert_eq!(x.is_some(), true);\n\nlet x: Option<u32> = None;",
    "pub trait Iterator {\n    type Item;\n    fn next(&mut self) -> Option<Self::Item>;\n}\n\nstruct Counter {",
];

async fn ask(address: SocketAddr, prompt: &str) -> Value {
    let body = json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": true,
        "include_figures": true, "return_token_ids": true});
    raw::ask(address, raw::post("/v1/completions", &body.to_string())).await.ok()
}

/// Returns the share of remote pairs and the tokens of the answer.
async fn remote(address: SocketAddr, prompt: &str) -> (f64, Value) {
    let answer = ask(address, prompt).await;
    let experts = &answer["usage"]["remoe"]["experts"];
    let count = |name: &str| experts[name].as_f64().unwrap();
    let all = count("remote") + count("local") + count("fallback");
    (count("remote") / all, answer["choices"][0]["token_ids"].clone())
}

/// Returns the mean share and all answers.
async fn round(address: SocketAddr, prompts: &[&str]) -> (f64, Vec<Value>) {
    let (mut sum, mut answers) = (0.0, Vec::new());
    for prompt in prompts {
        let (share, tokens) = remote(address, prompt).await;
        sum += share;
        answers.push(tokens);
    }
    (sum / prompts.len() as f64, answers)
}

#[tokio::test(flavor = "multi_thread")]
async fn placement_follows_topic_and_wake_follows_waiting_requests() {
    let model = ModelFixture::demo();
    let stays = Up::start_with(&model.folder, &["--remote-ratio", "0.5"]).await;
    let (_, scripture) = round(stays.ready.http(), &SCRIPTURE).await;
    let (code_before, code) = round(stays.ready.http(), &CODE).await;
    drop(stays);

    let folder = tempfile::tempdir().unwrap();
    let experience = folder.path().to_str().unwrap();
    let books = tempfile::tempdir().unwrap();
    let ledger = books.path().to_str().unwrap();
    let arguments =
        ["--remote-ratio", "0.5", "--replan", "300ms", "--experience", experience, "--ledger", ledger];
    let mut up = Up::start_with(&model.folder, &arguments).await;
    let address = up.ready.http();
    let first = up.ready.pids();
    // Answers do not depend on the placement, even during a change.
    let until_replanned = async |up: &mut Up, prompts: &[&str], expected: &[Value]| {
        until(LONG, "another placement", async || {
            assert_eq!(round(address, prompts).await.1, expected);
            up.unread().iter().any(|event| event.event == "replanned").then_some(())
        })
        .await;
    };
    // The first placements for a topic know little about it; later ones lower the share.
    let until_share = async |prompts: &[&str], expected: &[Value], highest: f64| {
        until(LONG, &format!("a placement with less than {highest} of the pairs remote"), async || {
            let (share, answers) = round(address, prompts).await;
            assert_eq!(answers, expected);
            (share < highest).then_some(())
        })
        .await;
    };
    until_replanned(&mut up, &SCRIPTURE, &scripture).await;
    until_share(&SCRIPTURE, &scripture, 0.45).await;
    let (turned, answers) = round(address, &CODE).await;
    assert_eq!(answers, code);
    until_replanned(&mut up, &CODE, &code).await;
    until_share(&CODE, &code, turned.min(code_before).min(0.45)).await;
    let metrics = raw::ask(address, raw::get("/metrics")).await.text();
    assert!(metrics.contains("remoe_replans_total{cause=\"drift\",model=\"model\"}"), "{metrics}");
    assert!(metrics.contains("remoe_prediction_divergence_nats{model=\"model\",phase=\"decode\"}"));
    // The overlap cost of old and new functions is reported, and all parts add up.
    up.process.signal(Signal::TERM);
    assert_eq!(up.process.end(LONG).await.code(), Some(0));
    let (code_of_cost, cost) = remoe(&["cost", ledger]).await;
    assert_eq!(code_of_cost, Some(0), "{cost}");
    assert!(cost["overlap"].as_u64().unwrap() > 0, "{cost}");
    let (paid, residual) = (cost["paid"].as_f64().unwrap(), cost["residual"].as_f64().unwrap());
    assert!(residual.abs() <= 0.001 * paid, "{cost}");

    // Another process reuses the history and plans its first wake for the waiting requests.
    let arguments = [&arguments[..3], &["3600s"], &arguments[4..6], &["--idle", "1s"]].concat();
    let mut up = Up::start_with(&model.folder, &arguments).await;
    assert_ne!(up.ready.pids(), first);
    let address = up.ready.http();
    up.next("asleep").await;
    let (woken, tokens) = remote(address, CODE[0]).await;
    assert_eq!(tokens, code[0]);
    assert!(
        woken < code_before,
        "{woken} of the pairs are remote, of a placement without a waiting request {code_before}"
    );
    let metrics = raw::ask(address, raw::get("/metrics")).await.text();
    assert!(metrics.contains("remoe_replans_total{cause=\"wake\",model=\"model\"} 1"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn placement_that_cannot_start_is_rolled_back() {
    let model = ModelFixture::demo();
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("model");
    std::fs::create_dir(&copy).unwrap();
    for file in std::fs::read_dir(&model.folder).unwrap().map(Result::unwrap) {
        if file.file_type().unwrap().is_file() {
            std::fs::copy(file.path(), copy.join(file.file_name())).unwrap();
        }
    }
    let arguments = ["--remote-ratio", "0.5", "--replan", "300ms", "--ready-timeout", "8"];
    let mut up = Up::start_with(&copy, &arguments).await;
    let address = up.ready.http();
    // Running functions have loaded their weights; new ones find none.
    let weights: Vec<_> = std::fs::read_dir(&copy).unwrap().map(|file| file.unwrap().path()).collect();
    let weights: Vec<_> =
        weights.iter().filter(|path| path.extension().is_some_and(|it| it == "safetensors")).collect();
    assert!(!weights.is_empty());
    weights.iter().for_each(|path| std::fs::rename(path, path.with_extension("away")).unwrap());
    until(LONG, "a revision that is taken back", async || {
        round(address, &SCRIPTURE).await;
        let metrics = raw::ask(address, raw::get("/metrics")).await.text();
        metrics.contains("remoe_replans_total{cause=\"failed\"").then_some(())
    })
    .await;
    assert!(up.unread().iter().all(|event| event.event != "replanned"), "it was never in force");
    let (share, _) = remote(address, SCRIPTURE[0]).await;
    assert!(share > 0.0, "the remote functions before it go on");
    weights.iter().for_each(|path| std::fs::rename(path.with_extension("away"), path).unwrap());
    until(LONG, "a revision that starts", async || {
        round(address, &SCRIPTURE).await;
        up.unread().iter().any(|event| event.event == "replanned").then_some(())
    })
    .await;
}
