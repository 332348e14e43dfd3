//! `remoe up` with real functions: scale to zero, wakes, and API keys that change meanwhile.

use remoe_test_support::deadline::{LONG, SOON, until};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::process::signal;
use remoe_test_support::raw::{self, RawResponse};
use remoe_test_support::up::{Up, all_gone};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

const IDLE: &str = "1s";

/// Largest number of wakes until the expected state was observed.
const WAKES: usize = 30;

fn completion(model: &str, tokens: u32) -> String {
    json!({"model": model, "prompt": [1, 2, 3], "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
        "include_figures": true, "return_token_ids": true})
    .to_string()
}

async fn complete(address: SocketAddr, model: &str, tokens: u32) -> RawResponse {
    raw::ask(address, raw::post("/v1/completions", &completion(model, tokens))).await
}

fn tokens(answer: &RawResponse) -> Value {
    answer.ok()["choices"][0]["token_ids"].clone()
}

async fn status(address: SocketAddr) -> Value {
    raw::ask(address, raw::get("/status")).await.ok()["models"][0].clone()
}

/// Returns the milliseconds of each part.
fn timing(text: &str) -> Vec<(String, f64)> {
    let parts = text.split(", ").map(|part| part.split_once(";dur=").expect("a part"));
    parts.map(|(name, value)| (name.to_owned(), value.parse().expect("milliseconds"))).collect()
}

/// Kills the main function before it serves. Returns its process, or `None` if it served or `over` happened first.
async fn kill_while_it_starts(address: SocketAddr, over: impl Fn() -> bool) -> Option<u32> {
    let starting = async || {
        let functions = status(address).await["functions"].as_array().unwrap().clone();
        let main = functions.iter().find(|one| one["name"] == "main" && one["state"] != "serving")?;
        u32::try_from(main["pid"].as_u64()?).ok()
    };
    while !over() {
        let Some(main) = starting().await else { continue };
        signal(main, Signal::STOP);
        tokio::time::sleep(Duration::from_millis(50)).await;
        if starting().await == Some(main) {
            signal(main, Signal::KILL);
            return Some(main);
        }
        signal(main, Signal::CONT);
    }
    None
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_wake_a_model_and_none_is_lost() {
    let model = ModelFixture::fixture("olmoe-basic");
    let mut up = Up::start_with(&model.folder, &["--remote-ratio", "0.5", "--idle", IDLE]).await;
    let address = up.ready.http();
    let expected = tokens(&complete(address, "olmoe-basic", 4).await);
    let mut pids = up.ready.pids();

    // Fifty concurrent requests cause one wake. A request that arrives after it has not waited for it.
    assert!(up.next("asleep").await.pids().is_empty());
    all_gone(&pids, SOON).await;
    assert_eq!(raw::ask(address, raw::get("/health")).await.head.status, 200, "asleep is healthy");
    let clients: Vec<_> = (0..50).map(|_| tokio::spawn(complete(address, "olmoe-basic", 4))).collect();
    let mut cold = 0;
    for client in clients {
        let answer = client.await.unwrap();
        assert_eq!(tokens(&answer), expected);
        cold += u64::from(answer.head.header("x-remoe-cold-start") == "true");
    }
    assert!(cold > 0);
    pids = up.next("awake").await.pids();
    assert_eq!(pids.len(), 2);
    assert_eq!(status(address).await["wakes"], 1);
    assert_eq!(complete(address, "olmoe-basic", 4).await.head.header("x-remoe-cold-start"), "");

    // The parts of the time to first token equal the client's measurement but for the machine's delays, which show in
    // a wake of few milliseconds: one of several wakes must match.
    let mut missing = Vec::new();
    while missing.len() < WAKES {
        up.next("asleep").await;
        all_gone(&pids, SOON).await;
        let asked = Instant::now();
        let answer = complete(address, "olmoe-basic", 1).await;
        let seen = asked.elapsed().as_secs_f64() * 1e3;
        let parts = timing(answer.head.header("server-timing"));
        let names: Vec<&str> = parts.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["decide", "schedule", "start", "load", "ready", "first"]);
        let told = answer.ok()["usage"]["remoe"]["timing"].clone();
        for (name, value) in &parts {
            assert!((told[name].as_f64().unwrap() - value).abs() < 0.001, "{told} and {parts:?}");
        }
        let sum: f64 = parts.iter().map(|(_, value)| value).sum();
        assert!(sum <= seen, "{parts:?} of {seen} ms");
        pids = up.next("awake").await.pids();
        if sum >= 0.9 * seen {
            break;
        }
        missing.push((parts, seen));
    }
    assert!(missing.len() < WAKES, "the parts never add up to what the client saw: {missing:?}");

    // Its main function dies during the start. A start may end before the test observes it, so the test repeats. A
    // stopped function that does not serve yet has not served.
    let mut rounds = 0;
    loop {
        rounds += 1;
        assert!(rounds <= WAKES, "no start was seen");
        up.next("asleep").await;
        all_gone(&pids, SOON).await;
        let client = tokio::spawn(complete(address, "olmoe-basic", 4));
        let killed = kill_while_it_starts(address, || client.is_finished()).await;
        assert_eq!(tokens(&client.await.unwrap()), expected);
        pids = up.next("awake").await.pids();
        if let Some(main) = killed {
            assert!(!pids.contains(&main));
            break;
        }
    }

    // A stream reports at once that it waits, and the parts at the end.
    let first = async || {
        let page = raw::ask(address, raw::get("/metrics")).await.text();
        let sample = "remoe_gateway_cold_start_seconds_count{model=\"olmoe-basic\",part=\"first\"} ";
        page.lines().find_map(|line| line.strip_prefix(sample)).expect(sample).parse::<u64>().unwrap()
    };
    let before = first().await;
    assert!(before >= cold, "all that were woken for: {before}");
    up.next("asleep").await;
    let body = completion("olmoe-basic", 2).replacen('{', "{\"stream\": true, ", 1);
    let request = raw::post("/v1/completions", &body).replacen(
        "Host",
        "TE: trailers\r\nConnection: close, TE\r\nHost",
        1,
    );
    let mut connection = raw::Connection::open(address).await;
    connection.write(request).await.unwrap();
    let head = connection.head().await.unwrap();
    assert_eq!((head.status, head.header("x-remoe-cold-start")), (200, "true"));
    assert_eq!(connection.chunk().await.unwrap().unwrap(), b": keep-alive\n\n");
    let rest = String::from_utf8(connection.rest().await).unwrap();
    assert!(rest.contains("data: [DONE]\n\n"), "{rest}");
    let trailer = rest.lines().find_map(|line| line.strip_prefix("server-timing: ")).expect("a trailer");
    assert_eq!(timing(trailer).len(), 6, "{rest}");
    assert!(!rest.contains("x-remoe-tokens"), "{rest}");
    assert_eq!(first().await, before + 1);
    up.next("awake").await;

    // On a signal during sleep, it ends at once.
    up.next("asleep").await;
    up.process.signal(Signal::TERM);
    assert_eq!(up.process.end(LONG).await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_models_at_one_address_sleep_independently() {
    let (first, second) = (ModelFixture::fixture("olmoe-basic"), ModelFixture::fixture("mixtral-basic"));
    let further = second.folder.to_str().unwrap();
    let names = ["--served-model-name", "one", "--served-model-name", "two"];
    let arguments = [&["--remote-ratio", "0", "--idle", "3s"], &names[..]].concat();
    let folder = first.folder.to_str().unwrap();
    let mut up = Up::start_models(&[folder, further], &arguments).await;
    let other = up.next("ready").await;
    assert_eq!((up.ready.model.as_str(), other.model.as_str()), ("one", "two"));
    let address = up.ready.http();
    let list = raw::ask(address, raw::get("/v1/models")).await.ok();
    let ids: Vec<&str> =
        list["data"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["one", "two"]);
    for (name, model) in [("one", &first), ("two", &second)] {
        let expected = model.expected().unwrap();
        let prompt = &expected.prompts[0];
        let body = json!({"model": name, "prompt": prompt.ids, "max_tokens": prompt.greedy.len(), "temperature": 0,
            "ignore_eos": true, "return_token_ids": true});
        let answer = raw::ask(address, raw::post("/v1/completions", &body.to_string())).await;
        assert_eq!(tokens(&answer), json!(prompt.greedy), "{name}");
    }
    let unknown = complete(address, "three", 1).await.error(404);
    assert_eq!(unknown["code"], "model_not_found");
    raw::ask(address, raw::post("/v1/completions", r#"{"prompt": [1]}"#)).await.refuses("model");
    // One model is kept awake while the other falls asleep.
    let deadline = Instant::now() + LONG;
    while status(address).await["state"] != "asleep" {
        assert!(Instant::now() < deadline, "it stays awake");
        complete(address, "two", 1).await.ok();
    }
    assert_eq!(complete(address, "two", 1).await.head.header("x-remoe-cold-start"), "");
    assert_eq!(complete(address, "one", 1).await.head.header("x-remoe-cold-start"), "true");
}

/// A waking model gives the same answers as an awake one, also for structured output and embeddings.
#[tokio::test(flavor = "multi_thread")]
async fn structured_output_survives_a_sleep() {
    let arguments = ["--remote-ratio", "0.5", "--idle", IDLE];
    let up = Up::start_with(&ModelFixture::fixture("mixtral-text").folder, &arguments).await;
    let address = up.ready.http();
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["a", "b"],
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yz"]}}});
    let form = json!({"json": schema, "disable_any_whitespace": true});
    let bound =
        json!({"prompt": "a", "max_tokens": 60, "temperature": 1, "seed": 3, "structured_outputs": form});
    let answer = async || raw::ask(address, raw::post("/v1/completions", &bound.to_string())).await;
    let embedding = async || {
        raw::ask(address, raw::post("/v1/embeddings", r#"{"input": ["ab", "c"]}"#)).await.ok()["data"].clone()
    };
    let (said, embedded) = (answer().await.ok()["choices"].clone(), embedding().await);
    let form: Value = serde_json::from_str(said[0]["text"].as_str().unwrap()).unwrap();
    assert!(form["a"].is_u64() && form["b"].is_string() && said[0]["finish_reason"] == "stop", "{said}");
    assert_eq!(embedded.as_array().unwrap().len(), 2);
    // On a busy machine, two requests may be further apart than the idle window: only the present state counts.
    let asleep = async || {
        let asleep = async || (status(address).await["state"] == "asleep").then_some(());
        until(LONG, "a model that sleeps", asleep).await;
    };
    asleep().await;
    let cold = answer().await;
    assert_eq!(cold.head.header("x-remoe-cold-start"), "true");
    assert_eq!(cold.ok()["choices"], said);
    asleep().await;
    assert_eq!(embedding().await, embedded);
}

/// Keys are added and removed while `up` runs, and are never written to logs.
#[tokio::test(flavor = "multi_thread")]
async fn keys_change_without_a_restart_and_are_written_nowhere() {
    let model = ModelFixture::fixture("olmoe-basic");
    let folder = tempfile::tempdir().unwrap();
    let (keys, access) = (folder.path().join("keys.yaml"), folder.path().join("access.log"));
    let write = |text: &str| {
        // Replaces the file atomically, as a kubelet does.
        let next = folder.path().join("next");
        std::fs::write(&next, text).unwrap();
        std::fs::rename(next, &keys).unwrap();
    };
    write("tenants: [{name: a, keys: [secret-first]}]");
    let (keys, access_log) = (keys.to_str().unwrap(), access.to_str().unwrap());
    let arguments =
        ["--remote-ratio", "0", "--keys", keys, "--access-log", access_log, "--api-key", "secret-own"];
    let folder_of_model = model.folder.to_str().unwrap();
    let mut up = Up::start_logging(&[folder_of_model], &arguments, Some("trace")).await;
    let address = up.ready.http();
    let with = |request: String, key: &str| {
        request.replacen("\r\n", &format!("\r\nAuthorization: Bearer {key}\r\n"), 1)
    };
    let mut said = String::new();
    let mut ask = async |key: &str| {
        let answer =
            raw::ask(address, with(raw::post("/v1/completions", &completion("olmoe-basic", 1)), key)).await;
        said += &answer.text();
        answer.head.status
    };
    assert_eq!((ask("secret-first").await, ask("secret-own").await), (200, 200));
    assert_eq!((ask("secret-second").await, ask("secret-wrong").await), (401, 401));
    write("tenants: [{name: a, keys: [secret-second]}, {name: b, keys: [secret-third]}]");
    until(SOON, "the other keys", async || (ask("secret-third").await == 200).then_some(())).await;
    assert_eq!((ask("secret-second").await, ask("secret-first").await), (200, 401));
    assert_eq!(ask("secret-own").await, 200);

    // An invalid file changes nothing and is reported.
    let outdated = async |is: &str| {
        let line = format!("remoe_gateway_keys_outdated {is}");
        until(SOON, &line, async || {
            let page = raw::ask(address, with(raw::get("/metrics"), "secret-own")).await.text();
            page.lines().any(|shown| shown == line).then_some(page)
        })
        .await
    };
    for text in ["tenants: [{name: a, keys: secret-fourth}]", "tenants: [{name: a, keys: [secret-own]}]", ""]
    {
        write("tenants: [{name: a, keys: [secret-second]}]");
        outdated("0").await;
        write(text);
        outdated("1").await;
        assert_eq!(ask("secret-second").await, 200, "{text}");
    }
    said += &outdated("1").await;
    let long = format!("/v1/models/secret-in-a-path?key=secret-in-a-query-{}", "x".repeat(100));
    let answer = raw::ask(address, with(raw::get(&long), "secret-second")).await;
    assert_eq!(answer.head.status, 404);
    up.process.signal(Signal::TERM);
    assert_eq!(up.process.end(LONG).await.code(), Some(0));
    let log = up.process.log().join("\n");
    assert!(log.contains("TRACE"), "functions log everything: {log}");
    let lines = std::fs::read_to_string(access).unwrap();
    assert!(lines.lines().count() >= 10, "{lines}");
    for (what, text) in [("answers", &said), ("the log", &log), ("the access log", &lines)] {
        let keys = ["first", "second", "third", "fourth", "own", "wrong"];
        let shown = keys.iter().find(|key| text.contains(&format!("secret-{key}")));
        assert_eq!(shown, None, "{what}");
    }
}
