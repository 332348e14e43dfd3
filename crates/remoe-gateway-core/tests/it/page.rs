//! The page, `/v1/placement`, `/metrics` and the access log.

use crate::stage;

use remoe_gateway_core::{AccessLog, GatewayOptions, InactiveGroup, KeyFile, Keys};
use serde_json::{Value, json};
use stage::{LONG, Stage};
use std::path::Path;
use std::process::Command;
use std::slice;
use std::time::{Duration, Instant};

const KEYS: &str = "tenants:\n- {name: mine, keys: [my-key]}\n- {name: other, keys: [other-key]}\n- {name: strange, keys: [strange-key], models: [elsewhere]}\n";

fn keys(folder: &Path) -> Keys {
    let file = folder.join("keys.yaml");
    std::fs::write(&file, KEYS).unwrap();
    KeyFile::open(file).unwrap().1
}

#[tokio::test(flavor = "multi_thread")]
async fn page_is_public_and_loads_no_foreign_resource() {
    let folder = tempfile::tempdir().unwrap();
    let options = GatewayOptions { keys: keys(folder.path()), ..GatewayOptions::default() };
    let stage = Stage::new(options, |_| {}, 8, None).await;
    let (head, page) = stage.get("/", None).await;
    assert_eq!(head.status(), 200);
    let kinds: Vec<_> = head.headers().get_all("content-type").iter().collect();
    assert_eq!(kinds, ["text/html; charset=utf-8"]);
    let policy = head.headers()["content-security-policy"].to_str().unwrap();
    assert!(policy.starts_with("default-src 'none';") && !policy.contains("unsafe"), "{policy}");
    // Every file that the page names exists, and none is on another server.
    let named: Vec<&str> = page.split(['"', '\'']).filter(|text| text.starts_with("/page/")).collect();
    assert_eq!(named.len(), 11, "{named:?}");
    let mut all_text = page.clone();
    for path in named {
        let (head, text) = stage.get(path, None).await;
        assert_eq!(head.status(), 200, "{path}");
        all_text += &text;
    }
    let outside: Vec<_> =
        all_text.match_indices("//").filter(|(at, _)| all_text[..*at].ends_with(':')).collect();
    let named = "http://www.w3.org/2000/svg";
    assert!(outside.iter().all(|(at, _)| all_text[at - 5..].starts_with(named)), "{outside:?}");
    assert!(!page.contains("<style") && !page.contains("style=") && !page.contains("onclick"));
    assert_eq!(stage.get("/page/other.js", None).await.0.status(), 404);
    assert_eq!(stage.get("/v1/placement", None).await.0.status(), 401);
}

#[test]
fn scripts_of_the_page_pass_their_tests() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/javascript");
    let node = Command::new("node").arg("--test").arg(folder.join("page.test.mjs")).output();
    let Ok(output) = node else {
        println!("SKIPPED: the scripts of the page, there is no node here");
        return;
    };
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&text));
}

#[tokio::test(flavor = "multi_thread")]
async fn placement_is_shown_without_waking_the_model() {
    let stage = Stage::new(GatewayOptions::default(), |_| {}, 8, Some(Duration::from_millis(20))).await;
    let get_placement = async |query: &str| {
        let (head, text) = stage.get(&format!("/v1/placement{query}"), None).await;
        (head.status().as_u16(), serde_json::from_str::<Value>(&text).unwrap())
    };
    let _awake = stage.ask(&json!({"model": "m", "x": 1}), &[]).await;
    stage.wait_for_sleep().await;
    let starts = stage.functions.starts.load(std::sync::atomic::Ordering::SeqCst);
    let (status, page) = get_placement("?model=m").await;
    assert_eq!((status, &page["state"], &page["groups"]), (200, &json!("asleep"), &json!([])));
    let changes = page["sleep"]["history"].as_array().unwrap();
    let states: Vec<_> = changes.iter().map(|change| change["state"].as_str().unwrap()).collect();
    assert!(
        states.starts_with(&["waking", "active"]) && states.ends_with(&["draining", "asleep"]),
        "{states:?}"
    );
    assert!(changes.is_sorted_by(|one, next| one["ago_s"].as_f64() >= next["ago_s"].as_f64()), "{changes:?}");
    assert_eq!(page["sleep"]["idle_s"], 0.02);
    for field in ["generation", "plan", "groups", "expected", "measured", "cost"] {
        assert!(page.get(field).is_some(), "{field}: {page}");
    }
    assert_eq!(get_placement("?model=n").await.0, 404);
    assert_eq!(stage.functions.starts.load(std::sync::atomic::Ordering::SeqCst), starts);
    // While the model is awake, the function's own placement is shown.
    stage.functions.turns.forget_permits(1 << 20);
    let held = json!({"model": "m", "x": 2});
    let (page, _) = tokio::join!(
        async {
            stage.until(|stage| stage.model.load().1 == 1).await;
            let page = get_placement("").await.1;
            stage.functions.turns.add_permits(1);
            page
        },
        stage.ask(&held, &[])
    );
    assert_eq!(
        (&page["generation"], &page["model"], &page["state"]),
        (&json!(7), &json!("m"), &json!("active"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_that_sleep_or_start_are_listed_until_they_are_called() {
    let stage = Stage::new(GatewayOptions::default(), |_| {}, 8, None).await;
    let groups = async || {
        let (_, text) = stage.get("/v1/placement", None).await;
        let page = serde_json::from_str::<Value>(&text).unwrap();
        let line = |group: &Value| {
            ["name", "experts", "asleep", "starting", "replicas"].map(|field| group[field].clone())
        };
        page["groups"].as_array().unwrap().iter().map(line).collect::<Vec<_>>()
    };
    let called = [Value::Null, json!("0:0-3"), json!(false), json!(false), json!(1)];
    let inactive = |name: &str, experts: &str, asleep| InactiveGroup {
        name: name.to_owned(),
        experts: experts.to_owned(),
        asleep,
    };
    assert_eq!(groups().await, slice::from_ref(&called));
    stage.model.set_inactive_groups(vec![inactive("group-1", "0:4-7,1:4-7", true)], 0);
    assert_eq!(
        groups().await,
        [called.clone(), [json!("group-1"), json!("0:4-7,1:4-7"), json!(true), json!(false), json!(0)]]
    );
    let (_, page) = stage.get("/metrics", None).await;
    assert!(page.contains("remoe_gateway_groups_asleep{model=\"m\"} 1"), "{page}");
    // A group that the main function still calls counts as awake.
    stage.model.set_inactive_groups(vec![inactive("group-0", "0:0-3", true)], 0);
    assert_eq!(groups().await, slice::from_ref(&called));
    // The group was woken, and the main function does not call it yet.
    stage.model.set_inactive_groups(
        vec![inactive("group-1", "0:4-7,1:4-7", false), inactive("group-0", "0:0-3", false)],
        0,
    );
    assert_eq!(
        groups().await,
        [called, [json!("group-1"), json!("0:4-7,1:4-7"), json!(false), json!(true), json!(0)]]
    );
    let (_, page) = stage.get("/metrics", None).await;
    assert!(page.contains("remoe_gateway_groups_asleep{model=\"m\"} 0"), "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tenant_sees_its_own_metrics_and_operator_sees_all() {
    let folder = tempfile::tempdir().unwrap();
    let keys = keys(folder.path()).with_key("default", "operator").unwrap();
    let stage = Stage::new(GatewayOptions { keys, ..GatewayOptions::default() }, |_| {}, 8, None).await;
    for key in ["my-key", "other-key"] {
        let authorization = format!("Bearer {key}");
        let (head, _) = stage.ask(&json!({"model": "m", "x": 1}), &[("authorization", &authorization)]).await;
        assert_eq!(head.status(), 200);
    }
    let rows = async |key: &str| {
        let (head, text) = stage.get("/metrics", Some(key)).await;
        assert_eq!(head.status(), 200);
        let is_row = |line: &&str| line.contains("tenant=") || line.contains("model=");
        text.lines().filter(is_row).map(str::to_owned).collect::<Vec<_>>()
    };
    let own_rows = rows("my-key").await;
    assert!(own_rows.iter().any(|row| row.contains(r#"tenant="mine""#)), "{own_rows:?}");
    assert!(
        !own_rows.iter().any(|row| row.contains("other"))
            && own_rows.iter().any(|row| row.contains(r#"model="m""#))
    );
    assert!(rows("strange-key").await.is_empty());
    let all = rows("operator").await;
    assert!(["mine", "other"].iter().all(|name| all.iter().any(|row| row.contains(name))), "{all:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn access_log_has_one_line_per_request() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("access.jsonl");
    let options = GatewayOptions {
        keys: keys(folder.path()),
        access_log: Some(AccessLog::open(&file).unwrap()),
        ..GatewayOptions::default()
    };
    let stage = Stage::new(options, |_| {}, 8, None).await;
    let headers = [("authorization", "Bearer my-key"), ("x-request-id", "abc")];
    let secret = json!({"model": "m", "x": "the prompt", "stream": true});
    let (_, answer) = stage.ask(&secret, &headers).await;
    let _refused = stage.ask(&secret, &[("authorization", "Bearer wrong")]).await;
    let (response, started) = (
        stage.send(&json!({"model": "m", "stream": true, "forever": true}), &headers[..1]).await,
        Instant::now(),
    );
    drop(response);
    let (answer_head, _) = stage.ask(&json!({"model": "m", "x": "the prompt"}), &headers).await;
    assert_eq!(answer_head.status(), 200);
    let (unknown, _) = stage.ask(&json!({"model": "secret-model"}), &headers).await;
    assert_eq!(unknown.status(), 404);
    // The client disconnects before the answer begins.
    stage.functions.turns.forget_permits(usize::MAX >> 4);
    let body = json!({"model": "m", "x": "unanswered"});
    let unanswered = stage.send(&body, &headers);
    let arrived =
        stage.until(|stage| stage.functions.asked.lock().unwrap().last() == Some(&json!("unanswered")));
    tokio::select! {
        _ = unanswered => panic!("answered"),
        () = arrived => {}
    }
    let lines = loop {
        let text = std::fs::read_to_string(&file).unwrap();
        if text.lines().count() == 6 {
            break text;
        }
        assert!(started.elapsed() < LONG, "{text}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    };
    let secrets = ["the prompt", "-key", "wrong", "secret-model"];
    assert!(!secrets.iter().any(|secret| lines.contains(secret)), "{lines}");
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let line_of = |status: u16, complete: bool| {
        lines.iter().find(|line| line["status"] == status && line["complete"] == complete).unwrap()
    };
    let fields =
        |line: &Value, names: &[&str]| names.iter().map(|name| line[name].clone()).collect::<Vec<_>>();
    let answered = line_of(200, true);
    assert_eq!(
        fields(answered, &["client", "tenant", "model", "method", "route", "request_id", "bytes"]),
        [
            json!("mine"),
            json!("mine"),
            json!("m"),
            json!("POST"),
            json!("/v1/completions"),
            json!("abc"),
            json!(answer.len())
        ]
    );
    let answered_line = lines.iter().find(|line| !line["prompt_tokens"].is_null()).unwrap();
    assert_eq!(
        fields(answered_line, &["status", "prompt_tokens", "completion_tokens", "ttft_ms", "complete"]),
        [json!(200), json!(3), json!(4), json!(250.0), json!(true)]
    );
    assert_eq!(
        fields(line_of(401, true), &["client", "tenant", "model"]),
        [json!(""), Value::Null, Value::Null]
    );
    assert_eq!(fields(line_of(404, true), &["tenant", "model"]), [json!("mine"), Value::Null]);
    assert_eq!(line_of(200, false)["client"], "mine");
    assert_eq!(
        fields(line_of(499, false), &["tenant", "model", "bytes"]),
        [json!("mine"), json!("m"), json!(0)]
    );
}
