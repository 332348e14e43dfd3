//! Wakes with limited concurrent starts: waiting requests are served once the first functions are ready, and the
//! others join.

use remoe_test_support::checkpoint::{Sizes, generate};
use remoe_test_support::deadline::{LONG, within};
use remoe_test_support::process::signal;
use remoe_test_support::raw;
use remoe_test_support::up::{Up, UpEvent};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;

/// Model whose functions load long enough to be observed.
const SIZES: Sizes =
    Sizes { layers: 2, hidden: 256, width: 2048, experts: 8, top_k: 4, vocabulary: 512, context: 512 };
/// Number of remote functions, which start one at a time.
const GROUPS: usize = 4;
/// Largest number of wakes until the expected state was observed.
const WAKES: usize = 30;

/// Returns the tokens of an answer and where its experts were computed.
#[derive(Debug, Clone, PartialEq)]
struct ServedTokens {
    tokens: Value,
    remote: u64,
    fallback: u64,
    was_cold: bool,
}

async fn ask(address: SocketAddr, name: &str) -> ServedTokens {
    let body = json!({"model": name, "prompt": [1, 2, 3, 5, 8, 13, 21, 34], "max_tokens": 12, "temperature": 0,
        "ignore_eos": true, "include_figures": true, "return_token_ids": true});
    let answer = raw::ask(address, raw::post("/v1/completions", &body.to_string())).await;
    let was_cold = answer.head.header("x-remoe-cold-start") == "true";
    let answer = answer.ok();
    let experts = &answer["usage"]["remoe"]["experts"];
    let count = |name: &str| experts[name].as_u64().unwrap();
    let (remote, fallback) = (count("remote"), count("fallback"));
    ServedTokens { tokens: answer["choices"][0]["token_ids"].clone(), remote, fallback, was_cold }
}

async fn functions(address: SocketAddr) -> Vec<Value> {
    let status = raw::ask(address, raw::get("/status")).await.ok();
    status["models"][0]["functions"].as_array().unwrap().clone()
}

fn pid(function: &Value) -> Option<u32> {
    function["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok())
}

/// Stops a remote function that starts after another one is ready. Returns `None` if `over` happened first.
async fn stop_one_that_joins(address: SocketAddr, over: impl Fn() -> bool) -> Option<u32> {
    let joining = async || {
        let functions = functions(address).await;
        let is_remote = |one: &&Value| one["name"].as_str().is_some_and(|name| name.starts_with("group-"));
        let serves = |one: &Value| one["state"] == "serving";
        let is_first = !functions.iter().filter(is_remote).any(serves);
        let starts = functions.iter().filter(is_remote).find(|one| !serves(one) && pid(one).is_some());
        starts.filter(|_| !is_first).and_then(pid)
    };
    while !over() {
        let Some(process) = joining().await else { continue };
        signal(process, Signal::STOP);
        tokio::time::sleep(Duration::from_millis(50)).await;
        if joining().await == Some(process) {
            return Some(process);
        }
        signal(process, Signal::CONT);
    }
    None
}

/// Puts the model to sleep, wakes it with one request, and stops a joining function. The request is still answered.
async fn served_while_one_is_stopped(up: &mut Up, name: &'static str) -> (ServedTokens, u32, UpEvent) {
    let address = up.ready.http();
    for _ in 0..WAKES {
        let asleep = async {
            while up.next_of(&["asleep", "joined", "restarted", "awake"]).await.event != "asleep" {}
        };
        within(LONG, "a model that sleeps", asleep).await;
        let client = tokio::spawn(ask(address, name));
        let stopped = stop_one_that_joins(address, || client.is_finished()).await;
        let answer = within(LONG, "an answer while a function is stopped", client).await.unwrap();
        let awake = up.next_of(&["awake"]).await;
        if let Some(stopped) = stopped {
            return (answer, stopped, awake);
        }
    }
    panic!("no function was seen to join in {WAKES} wakes");
}

/// Sends requests until all functions serve, without `gone`. Returns the events until then.
async fn until_whole(up: &mut Up, name: &str, expected: &ServedTokens, gone: &[u32]) -> Vec<String> {
    let address = up.ready.http();
    let mut events = Vec::new();
    let whole = async {
        loop {
            let answer = ask(address, name).await;
            assert_eq!(answer.tokens, expected.tokens);
            for event in up.unread() {
                let is_whole = event.is_whole_without(gone);
                events.push(event.event);
                if is_whole {
                    return;
                }
            }
        }
    };
    within(LONG, "all functions", whole).await;
    events
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_request_is_served_by_first_functions_and_others_join() {
    let model = generate(SIZES);
    let (groups, name) = (GROUPS.to_string(), "joining");
    let arguments = ["--remote-ratio", "0.5", "--groups", &groups, "--starts-at-once", "1", "--idle", "2s"];
    let named = [&arguments[..], &["--served-model-name", name]].concat();
    let mut up = Up::start_with(model.path(), &named).await;
    let address = up.ready.http();
    assert_eq!(up.ready.remote_pids().len(), GROUPS, "the first start waits for all");
    let expected = ask(address, name).await;
    assert!(expected.remote > 0 && expected.fallback == 0, "{expected:?}");

    // One function is stopped while it starts, and so are those after it. The answer is the same, with experts loaded
    // by the main function.
    let (answer, stopped, awake) = served_while_one_is_stopped(&mut up, name).await;
    assert_eq!(answer.tokens, expected.tokens);
    assert!(answer.was_cold && answer.fallback > 0 && answer.remote > 0, "{answer:?}");
    let serving: Vec<u32> =
        awake.functions.iter().filter(|one| one.state == "serving").filter_map(|one| one.pid).collect();
    assert!(!serving.contains(&stopped) && serving.len() <= GROUPS, "{awake:?}");
    signal(stopped, Signal::CONT);
    let events = until_whole(&mut up, name, &expected, &[]).await;
    assert!(events.iter().all(|event| event == "joined"), "{events:?}");
    let whole = ask(address, name).await;
    assert_eq!((whole.tokens, whole.fallback), (expected.tokens.clone(), 0));

    // A function that dies while it joins is restarted and joins then.
    let (answer, killed, _) = served_while_one_is_stopped(&mut up, name).await;
    assert_eq!(answer.tokens, expected.tokens);
    assert!(answer.fallback > 0, "{answer:?}");
    signal(killed, Signal::KILL);
    // It may have been stopped just after it became ready, which is noticed later: then it is reported as lost.
    let events = until_whole(&mut up, name, &expected, &[killed]).await;
    assert!(events.iter().all(|event| event == "joined" || event == "restarted"), "{events:?}");
    let whole = ask(address, name).await;
    assert_eq!((whole.tokens, whole.fallback), (expected.tokens, 0));
}
