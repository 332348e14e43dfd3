//! Ten times what functions can answer, from two tenants: what is held stays bounded, who is refused is told when to
//! come back, who is let in is served in turns, and nothing is left of it afterwards.

use crate::stage;

use axum::http::Request;
use remoe_gateway_core::{GatewayOptions, Keys};
use serde_json::{Value, json};
use stage::{LONG, Stage};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::time::{MissedTickBehavior, interval};

/// Requests that functions answer in a second.
const RATE: u32 = 50;
/// How long more come.
const PRESSED: Duration = Duration::from_secs(8);
/// Requests that run or wait, at most.
const MOST: usize = 40;
/// Requests of a tenant that are on their way or answered at the same time: each is one descriptor here and two at the
/// gateway.
const OPEN: usize = 60;
/// Bytes of a body, about.
const BODY: usize = 16 << 10;

/// Outcomes of a tenant's requests.
#[derive(Default)]
struct Tally {
    answered: AtomicUsize,
    refused: AtomicUsize,
    /// The most answers of others that an answered request has waited for.
    overtaken: AtomicUsize,
}

/// Sends what the clients of one tenant send in all the time, `rate` times as much as functions can answer.
async fn press(stage: &Stage, key: &'static str, rate: u32, all: &Arc<AtomicUsize>) -> Tally {
    let tally = Arc::new(Tally::default());
    let mut due = interval(Duration::from_secs(1) / (rate * RATE));
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let open = Arc::new(Semaphore::new(OPEN));
    let mut sent = tokio::task::JoinSet::new();
    let begun = Instant::now();
    let mut x = 0;
    while begun.elapsed() < PRESSED {
        due.tick().await;
        let permit = open.clone().acquire_owned().await.unwrap();
        x += 1;
        let body = json!({"model": "m", "x": x, "filler": "f".repeat(BODY)});
        let request = Request::post(format!("http://{}/v1/completions", stage.address));
        let request =
            request.header("authorization", format!("Bearer {key}")).body(body.to_string().into()).unwrap();
        let (client, tally, all) = (stage.client.clone(), tally.clone(), all.clone());
        sent.spawn(async move {
            let _until_answered = permit;
            let before = all.load(Ordering::SeqCst);
            let answer =
                tokio::time::timeout(LONG, client.request(request)).await.expect("an answer").unwrap();
            match answer.status().as_u16() {
                200 => {
                    let others = all.fetch_add(1, Ordering::SeqCst) - before;
                    tally.answered.fetch_add(1, Ordering::SeqCst);
                    tally.overtaken.fetch_max(others, Ordering::SeqCst);
                }
                429 | 503 => {
                    let after = answer.headers()["retry-after"].to_str().unwrap().parse::<u32>().unwrap();
                    assert!((1..=60).contains(&after), "come back after {after} s");
                    tally.refused.fetch_add(1, Ordering::SeqCst);
                }
                other => panic!("status {other}"),
            }
        });
    }
    while let Some(ended) = sent.join_next().await {
        ended.unwrap();
    }
    Arc::into_inner(tally).expect("all clients are done")
}

#[tokio::test(flavor = "multi_thread")]
async fn tenfold_load_is_shed_fairly_and_leaves_no_state() {
    let keys =
        Keys::none().with_key("loud", "key-of-loud").unwrap().with_key("quiet", "key-of-quiet").unwrap();
    let options = GatewayOptions { keys, ..GatewayOptions::default() };
    let change = |model: &mut remoe_gateway_core::ModelOptions| {
        model.max_requests = MOST;
        model.waiting_bytes = 2 * MOST * BODY;
    };
    let stage = Stage::new(options, change, 4, None).await;
    // Functions answer at a steady rate, however many ask.
    stage.functions.turns.forget_permits(usize::MAX >> 4);
    let functions = stage.functions.clone();
    let pace = tokio::spawn(async move {
        let mut due = interval(Duration::from_secs(1) / RATE);
        loop {
            due.tick().await;
            functions.turns.add_permits(1);
        }
    });
    let model = stage.model.clone();
    let watch = tokio::spawn(async move {
        let mut most = 0;
        loop {
            let (waiting, running) = model.load();
            most = most.max(waiting + running);
            assert!(most <= MOST, "{waiting} wait and {running} run");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let all = Arc::new(AtomicUsize::new(0));
    let begun = Instant::now();
    // Eight times as much as there is room for from one tenant, twice from the other.
    let (loud, quiet) =
        tokio::join!(press(&stage, "key-of-loud", 8, &all), press(&stage, "key-of-quiet", 2, &all));
    let took = begun.elapsed();
    let of = |count: &AtomicUsize| count.load(Ordering::SeqCst);
    for (name, tally) in [("loud", &loud), ("quiet", &quiet)] {
        let (answered, refused, overtaken) = (of(&tally.answered), of(&tally.refused), of(&tally.overtaken));
        eprintln!(
            "{name}: {answered} answered, {refused} refused, none after more than {overtaken} others; {took:?} in all"
        );
        // Both wanted more than half of what there is: neither gets much more.
        assert!(10 * answered >= 4 * of(&all), "{name}: {answered} of {}", of(&all));
        assert!(refused > 0, "{name}");
        // Two clients take turns, so that who is let in waits for each of those before it twice at most. A client
        // begins to count before it is let in: those that are open then may come first.
        assert!(overtaken <= 2 * MOST + 2 * OPEN, "{name}: {overtaken} others were answered meanwhile");
    }
    assert!(!watch.is_finished(), "there were more than may be");
    watch.abort();
    // It is over: no request waits, and the next is served at once.
    stage.until(|stage| stage.model.load() == (0, 0)).await;
    let key = [("authorization", "Bearer key-of-loud")];
    let (head, _) = stage.ask(&json!({"model": "m", "x": 1}), &key).await;
    assert_eq!(head.status(), 200);
    pace.abort();
    let (_, status) = stage.get("/status", Some("key-of-loud")).await;
    let status: Value = serde_json::from_str(&status).unwrap();
    let left = &status["models"][0];
    assert_eq!(
        (&left["waiting"], &left["in_flight"], &left["waiting_bytes"]),
        (&json!(0), &json!(0), &json!(0))
    );
}
