//! Remote groups that scale to zero while their main function runs: answers do not depend on sleeping groups, a
//! request wakes only the groups that it needs, and a sleeping group costs nothing.

use remoe_proto::format_listing;
use remoe_proto::v1::LayerExperts;
use remoe_test_support::deadline::{LONG, SOON, until};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::process::signal;
use remoe_test_support::raw::{self, RawResponse};
use remoe_test_support::up::{Up, all_gone};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;

/// Timeout of repeated checks, also on a busy machine.
const WINDOW: &str = "2s";

async fn complete(address: SocketAddr, model: &str, prompt: &[u32], tokens: u32) -> RawResponse {
    let body = json!({"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
        "include_figures": true, "return_token_ids": true});
    raw::ask(address, raw::post("/v1/completions", &body.to_string())).await
}

fn tokens(answer: &RawResponse) -> Value {
    answer.ok()["choices"][0]["token_ids"].clone()
}

/// Returns the (token, expert) pairs of the answer by place of computation.
fn pairs(answer: &RawResponse, how: &str) -> u64 {
    answer.ok()["usage"]["remoe"]["experts"][how].as_u64().unwrap()
}

async fn status(address: SocketAddr) -> Value {
    raw::ask(address, raw::get("/status")).await.ok()["models"][0].clone()
}

/// Returns the states of the remote functions, with their names and process ids.
async fn remote(address: SocketAddr) -> Vec<(String, String, Option<u32>)> {
    let functions = status(address).await["functions"].as_array().unwrap().clone();
    let functions = functions.iter().filter(|function| function["name"] != "main");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let pid = |function: &Value| function["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
    functions.map(|function| (text(&function["name"]), text(&function["state"]), pid(function))).collect()
}

async fn all_are(address: SocketAddr, state: &str) {
    let what = format!("all remote functions are {state}");
    until(LONG, &what, async || remote(address).await.iter().all(|(_, is, _)| is == state).then_some(()))
        .await;
}

/// Returns the displayed name and experts of each group, and true if it sleeps.
async fn placed(address: SocketAddr) -> Vec<(String, String, bool)> {
    let page = raw::ask(address, raw::get("/v1/placement")).await.ok();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let line = |group: &Value| (text(&group["name"]), text(&group["experts"]), group["asleep"] == true);
    page["groups"].as_array().unwrap().iter().map(line).collect()
}

async fn gauge(address: SocketAddr, series: &str) -> u64 {
    let page = raw::ask(address, raw::get("/metrics")).await.text();
    let line = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series}")).parse::<f64>().unwrap() as u64
}

/// Returns the experts of each layer for the single token of `prompt`.
async fn used(up: &Up, prompt: u32) -> Vec<(u32, BTreeSet<u32>)> {
    let reply = up.ready.control().inspect_ids(&[prompt]).await;
    let experts = |tokens: &[remoe_proto::v1::TokenRouting]| {
        tokens.iter().flat_map(|token| token.experts.iter().copied()).collect()
    };
    reply.routing.iter().map(|routing| (routing.layer, experts(&routing.tokens))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_model_sleeps_and_wakes_on_request() {
    let model = ModelFixture::fixture("olmoe-basic");
    let whole = Up::start_with(&model.folder, &["--remote-ratio", "0"]).await;
    let (often, seldom) = (5, 11);
    let used_often = used(&whole, often).await;
    let expected = tokens(&complete(whole.ready.http(), "olmoe-basic", &[often], 1).await);
    let other = tokens(&complete(whole.ready.http(), "olmoe-basic", &[seldom], 4).await);
    drop(whole);

    // Every request uses one group; frequent requests never use the other.
    let set = |layer: u32, of: Vec<u32>| LayerExperts { layer, experts: of };
    let busy: Vec<LayerExperts> =
        used_often.iter().map(|(layer, used)| set(*layer, used.iter().copied().take(3).collect())).collect();
    let idle: Vec<LayerExperts> = used_often
        .iter()
        .map(|(layer, used)| set(*layer, (0..12).filter(|expert| !used.contains(expert)).collect()))
        .collect();
    let listings = [&busy, &idle].map(|sets| format_listing(sets));
    let groups = listings.each_ref().map(|experts| json!({"experts": experts, "replicas": 1}));
    let folder = tempfile::tempdir().unwrap();
    let plan = folder.path().join("plan.json");
    std::fs::write(&plan, json!({ "groups": groups }).to_string()).unwrap();
    let arguments = ["--plan", plan.to_str().unwrap(), "--remote-idle", WINDOW];
    let up = Up::start_with(&model.folder, &arguments).await;
    let address = up.ready.http();
    let main = up.ready.main().clone();
    let first = remote(address).await;

    let rests = async || {
        let answer = complete(address, "olmoe-basic", &[often], 1).await;
        assert_eq!((tokens(&answer), pairs(&answer, "fallback")), (expected.clone(), 0));
        assert!(pairs(&answer, "remote") > 0);
        remote(address).await[1].1.eq("asleep").then_some(())
    };
    until(LONG, "the idle group to sleep", rests).await;
    all_gone(&[first[1].2.unwrap()], SOON).await;
    assert_eq!(remote(address).await[0], first[0], "the other goes on");
    assert_eq!(gauge(address, "remoe_gateway_groups_asleep{model=\"olmoe-basic\"}").await, 1);
    let expected_groups = [("group-0", &listings[0], false), ("group-1", &listings[1], true)];
    let expected_groups =
        expected_groups.map(|(name, experts, asleep)| (name.to_owned(), experts.clone(), asleep));
    assert_eq!(placed(address).await, expected_groups);

    // The main function itself answers a request for it, with the same bits and without waiting for a function.
    let asked = complete(address, "olmoe-basic", &[seldom], 4).await;
    assert_eq!(tokens(&asked), other);
    assert!(pairs(&asked, "fallback") > 0);
    assert_eq!(pairs(&asked, "retries"), 0);
    let wakes = async || {
        let answer = complete(address, "olmoe-basic", &[seldom], 4).await;
        assert_eq!((tokens(&answer), pairs(&answer, "retries")), (other.clone(), 0));
        (pairs(&answer, "fallback") == 0).then_some(())
    };
    until(LONG, "requests go to the group that was woken", wakes).await;
    assert!(placed(address).await.iter().all(|(.., asleep)| !asleep));
    let now = remote(address).await;
    assert!(now[1].2.is_some_and(|pid| Some(pid) != first[1].2), "{now:?}");
    let woken = "remoe_gateway_group_wakes_total{cause=\"asked\",model=\"olmoe-basic\"}";
    assert!(gauge(address, woken).await >= 1);
    assert!(gauge(address, "remoe_gateway_group_sleeping_pairs_total{model=\"olmoe-basic\"}").await > 0);
    let counted = async |name: &str| gauge(address, &format!("{name}{{model=\"olmoe-basic\"}}")).await;
    assert!(counted("remoe_expert_unhosted_pairs_total").await >= pairs(&asked, "fallback"));
    assert_eq!(counted("remoe_expert_retries_total").await, 0);
    assert_eq!(status(address).await["functions"][0]["pid"].as_u64(), main.pid.map(u64::from));
}

/// Kills the first restarted remote function, whether it serves or not.
async fn kill_what_wakes(address: SocketAddr) {
    let there = async || remote(address).await.into_iter().find_map(|(_, _, pid)| pid);
    signal(until(SOON, "a group wakes", there).await, Signal::KILL);
}

#[tokio::test(flavor = "multi_thread")]
async fn sleeping_groups_cost_nothing_and_survive_deaths_during_wake() {
    let model = ModelFixture::fixture("olmoe-basic");
    let arguments = ["--remote-ratio", "0.5", "--groups", "2", "--remote-idle", "500ms"];
    let up = Up::start_with(&model.folder, &arguments).await;
    let address = up.ready.http();
    let expected = tokens(&complete(address, "olmoe-basic", &[1, 2, 3], 6).await);
    let main = up.ready.main().pid.unwrap();
    let rate = async |tier: &str| {
        gauge(
            address,
            &format!("remoe_cost_rate_nanodollars_per_hour{{model=\"olmoe-basic\",tier=\"{tier}\"}}"),
        )
        .await
    };
    all_are(address, "asleep").await;
    until(SOON, "what sleeps costs nothing", async || {
        (rate("group-0").await + rate("group-1").await == 0).then_some(())
    })
    .await;
    assert!(rate("main").await > 0);
    let client = tokio::spawn(async move { complete(address, "olmoe-basic", &[1, 2, 3], 6).await });
    kill_what_wakes(address).await;
    let answer = client.await.unwrap();
    assert_eq!(tokens(&answer), expected);
    assert!(pairs(&answer, "fallback") > 0);
    let joins = async || {
        let answer = complete(address, "olmoe-basic", &[1, 2, 3], 6).await;
        assert_eq!(tokens(&answer), expected);
        (pairs(&answer, "fallback") == 0 && pairs(&answer, "remote") > 0).then_some(())
    };
    until(LONG, "requests go to groups again", joins).await;
    assert_eq!(status(address).await["functions"][0]["pid"], main, "the main function never ended");

    // After the main function dies while groups sleep, the next one serves without them.
    all_are(address, "asleep").await;
    signal(main, Signal::KILL);
    let answer = complete(address, "olmoe-basic", &[1, 2, 3], 6).await;
    assert_eq!(tokens(&answer), expected);
    until(LONG, "requests go to groups again", joins).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn main_function_sleeps_last() {
    let model = ModelFixture::fixture("olmoe-basic");
    let arguments = ["--remote-ratio", "0.5", "--remote-idle", "200ms", "--idle", "2s"];
    let mut up = Up::start_with(&model.folder, &arguments).await;
    let address = up.ready.http();
    let pids = up.ready.remote_pids();
    let rested = up.next("resting").await;
    assert_eq!((rested.remote_pids(), rested.main().pid), (vec![], up.ready.main().pid));
    all_gone(&pids, SOON).await;
    assert!(up.next("asleep").await.pids().is_empty());
    // Without a prediction for the waiting requests, all groups wake.
    let answer = complete(address, "olmoe-basic", &[1, 2, 3], 4).await;
    assert_eq!(pairs(&answer, "fallback"), 0);
    let awake = up.next("awake").await;
    assert_eq!(awake.pids().len(), 2);
    up.next("resting").await;
    complete(address, "olmoe-basic", &[1, 2, 3], 4).await;
    let resumed = up.next("resumed").await;
    assert_eq!((resumed.pids().len(), resumed.main().pid), (2, awake.main().pid));
}
