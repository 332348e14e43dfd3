//! Ten times the load that functions can answer, from two tenants. The queue stays bounded, refusals state when to
//! retry, admitted requests are served fairly, and no state is left afterwards.

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

/// Requests per second that functions answer.
const RATE: u32 = 50;
/// Duration of the load.
const LOAD_TIME: Duration = Duration::from_secs(8);
/// Largest number of requests that run or wait.
const MAX_REQUESTS: usize = 40;
/// Largest number of a tenant's open requests. Each takes one file descriptor here and two at the gateway.
const MAX_OPEN: usize = 60;
/// Approximate size of a body in bytes.
const BODY_BYTES: usize = 16 << 10;

/// Outcomes of a tenant's requests.
#[derive(Default)]
struct Tally {
    answered: AtomicUsize,
    refused: AtomicUsize,
    /// Largest number of other answers while a request waited for its own.
    overtaken: AtomicUsize,
}

/// Sends the requests of one tenant for [`LOAD_TIME`], at `rate` times the rate that functions can answer.
async fn send_load(stage: &Stage, key: &'static str, rate: u32, all: &Arc<AtomicUsize>) -> Tally {
    let tally = Arc::new(Tally::default());
    let mut due = interval(Duration::from_secs(1) / (rate * RATE));
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let open = Arc::new(Semaphore::new(MAX_OPEN));
    let mut sent = tokio::task::JoinSet::new();
    let started = Instant::now();
    let mut x = 0;
    while started.elapsed() < LOAD_TIME {
        due.tick().await;
        let permit = open.clone().acquire_owned().await.unwrap();
        x += 1;
        let body = json!({"model": "m", "x": x, "filler": "f".repeat(BODY_BYTES)});
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
                    let overtaking = all.fetch_add(1, Ordering::SeqCst) - before;
                    tally.answered.fetch_add(1, Ordering::SeqCst);
                    tally.overtaken.fetch_max(overtaking, Ordering::SeqCst);
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
        model.max_requests = MAX_REQUESTS;
        model.waiting_bytes = 2 * MAX_REQUESTS * BODY_BYTES;
    };
    let stage = Stage::new(options, change, 4, None).await;
    // Functions answer at a steady rate.
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
        let mut max_seen = 0;
        loop {
            let (waiting, running) = model.load();
            max_seen = max_seen.max(waiting + running);
            assert!(max_seen <= MAX_REQUESTS, "{waiting} wait and {running} run");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let all = Arc::new(AtomicUsize::new(0));
    let started = Instant::now();
    // One tenant sends eight times the rate of answers, the other twice.
    let (loud, quiet) =
        tokio::join!(send_load(&stage, "key-of-loud", 8, &all), send_load(&stage, "key-of-quiet", 2, &all));
    let took = started.elapsed();
    let load = |count: &AtomicUsize| count.load(Ordering::SeqCst);
    for (name, tally) in [("loud", &loud), ("quiet", &quiet)] {
        let (answered, refused, overtaken) =
            (load(&tally.answered), load(&tally.refused), load(&tally.overtaken));
        eprintln!(
            "{name}: {answered} answered, {refused} refused, none after more than {overtaken} others; {took:?} in all"
        );
        // Both send more than half of the capacity, so neither gets much more than half.
        assert!(10 * answered >= 4 * load(&all), "{name}: {answered} of {}", load(&all));
        assert!(refused > 0, "{name}");
        // Two clients take turns, so an admitted request waits for each earlier one at most twice. Counting begins
        // before admission: requests that are open then may come first.
        assert!(
            overtaken <= 2 * MAX_REQUESTS + 2 * MAX_OPEN,
            "{name}: {overtaken} others were answered meanwhile"
        );
    }
    assert!(!watch.is_finished(), "the limit was exceeded");
    watch.abort();
    // Afterwards no request waits, and the next is served at once.
    stage.until(|stage| stage.model.load() == (0, 0)).await;
    let key = [("authorization", "Bearer key-of-loud")];
    let (head, _) = stage.ask(&json!({"model": "m", "x": 1}), &key).await;
    assert_eq!(head.status(), 200);
    pace.abort();
    let (_, status) = stage.get("/status", Some("key-of-loud")).await;
    let status: Value = serde_json::from_str(&status).unwrap();
    let model_status = &status["models"][0];
    assert_eq!(
        (&model_status["waiting"], &model_status["in_flight"], &model_status["waiting_bytes"]),
        (&json!(0), &json!(0), &json!(0))
    );
}
