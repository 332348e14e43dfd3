//! The gateway over real sockets: queueing, wakes, retries, refusals and fairness.

use crate::stage;

use axum::Router;
use axum::routing::post;
use futures_util::future::join_all;
use http_body_util::BodyExt;
use remoe_gateway_core::{Backend, GatewayOptions, Keys, RunningFunctions};
use serde_json::{Value, json};
use stage::{LONG, Stage};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket};

const SHORT: Option<Duration> = Some(Duration::from_millis(4));

fn body(x: usize) -> Value {
    json!({"model": "m", "x": x})
}

/// Requests arrive just before the model falls asleep, while it does, and while it wakes.
#[tokio::test(flavor = "multi_thread")]
async fn hundred_sleeps_and_wakes_lose_no_request() {
    let stage = Stage::new(GatewayOptions::default(), |_| {}, 8, SHORT).await;
    let mut asked = 0;
    for round in 0..150_u64 {
        *stage.functions.start.lock().unwrap() = Duration::from_micros(round * 40);
        // Around the end of the idle window, and long after it.
        tokio::time::sleep(Duration::from_micros(3_000 + round * 20)).await;
        let answers = join_all((0..3).map(|client| {
            let stage = &stage;
            async move {
                tokio::time::sleep(Duration::from_micros(client * round * 17)).await;
                stage.ask(&body(7), &[]).await
            }
        }))
        .await;
        for (head, text) in answers {
            assert_eq!((head.status().as_u16(), text.as_str()), (200, r#"{"x":7}"#));
            asked += 1;
        }
        if round % 3 == 0 {
            stage.wait_for_sleep().await;
        }
    }
    let sleeps = stage.functions.stops.load(Ordering::SeqCst);
    let starts = stage.functions.starts.load(Ordering::SeqCst);
    assert_eq!(stage.functions.asked.lock().unwrap().len(), asked, "every request was answered once");
    assert!(sleeps >= 50 && starts <= sleeps + 1, "{sleeps} sleeps, {starts} starts");
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_concurrent_requests_wake_a_model_once() {
    let stage = Stage::new(GatewayOptions::default(), |_| {}, 8, SHORT).await;
    stage.wait_for_sleep().await;
    // Long enough that all requests arrive before the start ends, even on a busy machine.
    *stage.functions.start.lock().unwrap() = Duration::from_secs(2);
    let answers = join_all((0..50).map(|x| {
        let stage = &stage;
        async move { stage.ask(&body(x), &[]).await }
    }))
    .await;
    for (x, (head, text)) in answers.into_iter().enumerate() {
        assert_eq!((head.status().as_u16(), text), (200, format!("{{\"x\":{x}}}")));
        assert_eq!(head.headers()["x-remoe-cold-start"], "true");
    }
    assert_eq!(stage.functions.starts.load(Ordering::SeqCst), 2, "the first start, and one wake");
    let timing = stage.functions.headers.lock().unwrap()["x-remoe-timing"].to_str().unwrap().to_owned();
    let parts = timing.split(", ").map(|part| part.split_once(";dur=").unwrap());
    let longest = parts.max_by(|(_, a), (_, b)| a.parse::<f64>().unwrap().total_cmp(&b.parse().unwrap()));
    assert_eq!(longest.unwrap().0, "start", "{timing}");

    // The cold start histogram counts exactly the requests that waited for functions.
    *stage.functions.start.lock().unwrap() = Duration::from_millis(5);
    stage.model.sleep_when_idle(LONG);
    let mut cold = 50.0;
    while stage.ask(&body(7), &[]).await.0.headers().contains_key("x-remoe-cold-start") {
        cold += 1.0;
    }
    let (_, page) = stage.get("/metrics", None).await;
    let value = |part: &str, of: &str| -> f64 {
        let sample = format!("remoe_gateway_cold_start_seconds_{of}{{model=\"m\",part=\"{part}\"}} ");
        page.lines().find_map(|line| line.strip_prefix(&sample)).expect(part).parse().unwrap()
    };
    let parts = ["decide", "schedule", "start", "load", "ready", "first"];
    assert!(parts.iter().all(|part| value(part, "count") == cold), "{page}");
    // A first token later than the wake counts as the wake's whole duration, which is short for those beyond the fifty.
    let first_tokens = value("first", "sum");
    assert!((0.25 * 50.0 - 1e-6..=0.25 * cold + 1e-6).contains(&first_tokens), "{page}");
    assert!(parts[..5].iter().all(|part| value(part, "sum") <= value("start", "sum")), "{page}");
}

/// Half an hour without requests at a thousandth of real time, with an idle window of ten minutes. Then 300
/// concurrent requests arrive while nothing runs.
#[tokio::test(flavor = "multi_thread")]
async fn burst_after_a_long_sleep_causes_one_wake() {
    let half_an_hour = Duration::from_millis(1_800);
    let options = GatewayOptions::default();
    let stage = Stage::new(options, |model| model.max_requests = 300, 64, Some(half_an_hour / 3)).await;
    stage.wait_for_sleep().await;
    tokio::time::sleep(half_an_hour).await;
    assert_eq!(stage.functions.starts.load(Ordering::SeqCst), 1, "no request came");
    *stage.functions.start.lock().unwrap() = Duration::from_millis(200);
    let answers = join_all((0..300).map(|x| {
        let stage = &stage;
        async move { stage.ask(&body(x), &[]).await }
    }))
    .await;
    for (x, (head, text)) in answers.into_iter().enumerate() {
        assert_eq!((head.status().as_u16(), text), (200, format!("{{\"x\":{x}}}")));
    }
    assert_eq!(stage.functions.starts.load(Ordering::SeqCst), 2, "one wake");
    assert_eq!(stage.model.load(), (0, 0));
}

/// A listed function that cannot be reached, for example during its replacement, does not count as a failed attempt.
/// A request waits for a reachable one, however many are unreachable.
#[tokio::test(flavor = "multi_thread")]
async fn request_waits_while_functions_are_unreachable() {
    let stage = Stage::new(GatewayOptions::default(), |_| {}, 8, None).await;
    // The port is taken, and no process listens on it.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let closed = socket.local_addr().unwrap();
    let open = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let live = open.local_addr().unwrap();
    let router = Router::new().route("/v1/completions", post(|| async { "served" }));
    tokio::spawn(async move { axum::serve(open, router).await });
    let backend = |(id, address): (u64, SocketAddr)| Backend {
        id,
        address,
        identity: None,
        capacity: 8,
        authorization: None,
        billing: None,
    };
    let report_running = |backends: Vec<(u64, SocketAddr)>| {
        let backends = backends.into_iter().map(backend).collect();
        stage.model.set_running_functions(RunningFunctions {
            order: u64::MAX,
            backends,
            ..RunningFunctions::default()
        });
    };
    // With equal loads the first backend is chosen.
    let unreachable: Vec<_> = (100..106).map(|id| (id, closed)).collect();
    report_running([unreachable.clone(), vec![(200, live)]].concat());
    let (head, text) = stage.ask(&body(1), &[]).await;
    assert_eq!((head.status().as_u16(), text.as_str()), (200, "served"));
    // No function is reachable, and then another one starts.
    report_running(unreachable);
    let late = async {
        stage.until(|stage| stage.model.load() == (1, 0)).await;
        report_running(vec![(201, live)]);
    };
    let request = body(2);
    let (answer, ()) = tokio::join!(stage.ask(&request, &[]), late);
    assert_eq!((answer.0.status().as_u16(), answer.1.as_str()), (200, "served"));
    // A request waits no longer than its client.
    report_running(vec![(300, closed)]);
    let (head, text) = stage.ask(&body(3), &[("x-request-timeout", "0.2")]).await;
    assert_eq!(head.status().as_u16(), 503, "{text}");
    assert_eq!(stage.model.load(), (0, 0));
    // Nor longer than its queue deadline, which has its own error code.
    let mut request = body(4);
    request["queue_deadline"] = "200ms".into();
    let (head, text) = stage.ask(&request, &[]).await;
    assert_eq!((head.status().as_u16(), &head.headers()["x-should-retry"]), (503, &"false".parse().unwrap()));
    assert!(text.contains("queue_deadline_exceeded"), "{text}");
    assert_eq!(stage.model.load(), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_stream_begins_at_once_and_fails_as_an_event() {
    let stage = Stage::new(GatewayOptions::default(), |_| {}, 8, SHORT).await;
    for (extra, end) in [
        (json!({}), "data: [DONE]\n\n"),
        (json!({"refuse": true}), "\"code\":null}}\n\n"),
        (json!({"breaks": true}), "\"code\":\"service_unavailable\"}}\n\n"),
    ] {
        stage.wait_for_sleep().await;
        *stage.functions.start.lock().unwrap() = Duration::from_millis(1200);
        let mut request = body(1);
        request.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        request["stream"] = true.into();
        let answer = stage.send(&request, &[]).await;
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()["x-remoe-cold-start"], "true");
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        assert_ne!(stage.model.phase(), remoe_gateway_core::ScalingPhase::Active, "the head came first");
        let text = answer.into_body().collect().await.unwrap().to_bytes();
        let text = String::from_utf8(text.to_vec()).unwrap();
        assert!(
            text.matches(": keep-alive\n\n").count() >= 2 && text.starts_with(": keep-alive\n\n"),
            "{text:?}"
        );
        assert!(text.ends_with(end), "{text:?}");
        // While the model is awake, the same request gets its own status.
        stage.model.sleep_when_idle(LONG);
        let awake = loop {
            let (head, _) = stage.ask(&request, &[]).await;
            if !head.headers().contains_key("x-remoe-cold-start") {
                break head;
            }
        };
        assert_eq!(awake.status().as_u16(), if request["refuse"] == true { 400 } else { 200 });
        stage.model.sleep_when_idle(SHORT.unwrap());
    }
    let (_, page) = stage.get("/metrics", None).await;
    let failed = |reason: &str| -> f64 {
        let sample = format!("remoe_gateway_streams_failed_total{{model=\"m\",reason=\"{reason}\"}} ");
        page.lines().find_map(|line| line.strip_prefix(&sample)).expect(reason).parse().unwrap()
    };
    // The breaking request was sent at least twice. A refusal by the function is an answer, not a failed stream.
    assert!(failed("broken_off") >= 2.0 && failed("not_begun") == 0.0, "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_without_wake_is_counted() {
    let stage =
        Stage::new(GatewayOptions::default(), |m| m.wake_limit = Duration::from_millis(200), 8, SHORT).await;
    stage.wait_for_sleep().await;
    *stage.functions.start.lock().unwrap() = LONG;
    let (head, text) = stage.ask(&json!({"model": "m", "x": 1, "stream": true}), &[]).await;
    assert_eq!(head.status(), 200, "the status was sent before the failure");
    assert!(text.contains("\"code\":\"service_unavailable\""), "{text}");
    let (_, page) = stage.get("/metrics", None).await;
    let sample = "remoe_gateway_streams_failed_total{model=\"m\",reason=\"not_begun\"} 1";
    assert!(page.contains(sample), "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unanswered_broken_request_is_retried_with_a_bound() {
    let stage = Stage::new(GatewayOptions::default(), |_| {}, 8, None).await;
    stage.functions.breaks.store(2, Ordering::SeqCst);
    let (head, text) = stage.ask(&body(5), &[]).await;
    assert_eq!((head.status().as_u16(), text.as_str()), (200, r#"{"x":5}"#));
    stage.functions.breaks.store(3, Ordering::SeqCst);
    let (head, text) = stage.ask(&body(6), &[]).await;
    assert_eq!(head.status().as_u16(), 503, "{text}");
    assert_eq!(head.headers()["retry-after"], "1");
    assert_eq!(stage.functions.asked.lock().unwrap().len(), 6);
    // A main function's own queue deadline error is not retried.
    let (head, text) = stage.ask(&json!({"model": "m", "overdue": true}), &[]).await;
    assert_eq!(head.status().as_u16(), 503);
    assert!(text.contains("queue_deadline_exceeded"), "{text}");
    assert_eq!(stage.functions.asked.lock().unwrap().len(), 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn impatient_client_is_told_the_time_of_a_cold_start() {
    let stage = Stage::new(GatewayOptions::default(), |_| {}, 8, Some(Duration::from_millis(40))).await;
    *stage.functions.start.lock().unwrap() = Duration::from_millis(300);
    // The model learns the duration of a wake.
    stage.wait_for_sleep().await;
    stage.ask(&body(0), &[]).await;
    stage.wait_for_sleep().await;
    for name in ["x-request-timeout", "x-stainless-read-timeout"] {
        let (head, text) = stage.ask(&body(1), &[(name, "0.1")]).await;
        assert_eq!(head.status().as_u16(), 503, "{text}");
        assert_eq!(head.headers()["retry-after"], "1");
    }
    let mut request = body(1);
    request["queue_deadline"] = "100ms".into();
    let (head, text) = stage.ask(&request, &[]).await;
    assert_eq!(head.status().as_u16(), 503);
    assert!(text.contains("queue_deadline_exceeded") && text.contains("cold start"), "{text}");
    let (head, _) = stage.ask(&body(2), &[("x-request-timeout", "20")]).await;
    assert_eq!(head.status().as_u16(), 200, "refused requests woke the model");
    assert_eq!(stage.functions.starts.load(Ordering::SeqCst), 3);
    let (head, _) = stage.ask(&body(2), &[("x-request-timeout", "soon")]).await;
    assert_eq!(head.status().as_u16(), 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_disconnected_clients_are_dropped() {
    let stage = Stage::new(GatewayOptions::default(), |_| {}, 1, None).await;
    let streaming = stage.send(&json!({"model": "m", "stream": true, "forever": true}), &[]).await;
    assert_eq!(stage.functions.running(), 1);
    // A separate client, because dropping a request of the pooled one would keep its connection.
    let waiting = tokio::spawn({
        let (client, address) = (stage.client.clone(), stage.address);
        async move {
            let request = axum::http::Request::post(format!("http://{address}/v1/completions"));
            drop(client.request(request.body(body(1).to_string().into()).unwrap()).await);
        }
    });
    stage.until(|stage| stage.model.load() == (1, 1)).await;
    waiting.abort();
    stage.until(|stage| stage.model.load() == (0, 1)).await;
    drop(streaming);
    stage.until(|stage| stage.model.load() == (0, 0) && stage.functions.running() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn full_queue_refuses_requests_and_tenants_take_turns() {
    let keys = Keys::none().with_key("big", "key-of-big").unwrap().with_key("small", "key-of-small").unwrap();
    let options = GatewayOptions { keys, ..GatewayOptions::default() };
    let stage = Stage::new(options, |model| model.max_requests = 9, 1, None).await;
    // The function answers one request at a time, and none yet.
    stage.functions.turns.forget_permits(usize::MAX >> 4);
    let big = [("authorization", "Bearer key-of-big")];
    let small = [("authorization", "Bearer key-of-small")];
    let ask = |x: usize, key: [(&'static str, &'static str); 1]| {
        let (client, address) = (stage.client.clone(), stage.address);
        tokio::spawn(async move {
            let request = axum::http::Request::post(format!("http://{address}/v1/completions"));
            let request = request.header(key[0].0, key[0].1).body(body(x).to_string().into()).unwrap();
            tokio::time::timeout(LONG, client.request(request)).await.unwrap().unwrap()
        })
    };
    let mut asked = Vec::new();
    for x in 0..9 {
        asked.push(ask(x, big));
        stage.until(|stage| stage.model.load().0 + stage.model.load().1 == x + 1).await;
    }
    let (head, text) = stage.ask(&body(9), &big).await;
    assert_eq!(head.status().as_u16(), 429, "{text}");
    assert_eq!(head.headers()["retry-after"], "1");
    assert!(!text.contains("key-of"), "{text}");
    // The other tenant is admitted, and the first one's newest requests are displaced.
    let other_tenant = [ask(100, small), ask(101, small)];
    stage.until(|stage| stage.model.load() == (8, 1)).await;
    let displaced = join_all(asked.drain(7..)).await;
    assert!(displaced.into_iter().all(|answer| answer.unwrap().status() == 429));
    stage.functions.turns.add_permits(100);
    for answer in join_all(asked.into_iter().chain(other_tenant)).await {
        assert_eq!(answer.unwrap().status(), 200);
    }
    let order = stage.functions.asked.lock().unwrap().clone();
    let order: Vec<u64> = order.iter().map(|x| x.as_u64().unwrap()).collect();
    assert_eq!(order[..5].iter().filter(|x| **x >= 100).count(), 2, "{order:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn key_is_required_everywhere_except_for_health() {
    let keys = Keys::none().with_key("one", "secret-one").unwrap();
    let again = |name, key| Keys::none().with_key("one", "secret-one").unwrap().with_key(name, key).is_none();
    assert!(again("two", "secret-one") && again("one", "x") && !again("two", "x"));
    let stage = Stage::new(GatewayOptions { keys, ..GatewayOptions::default() }, |_| {}, 8, None).await;
    let get = async |path: &str, key: Option<&str>| {
        let mut request = axum::http::Request::get(format!("http://{}{path}", stage.address));
        if let Some(key) = key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let request = request.body(axum::body::Bytes::new().into()).unwrap();
        let (head, body) = stage.client.request(request).await.unwrap().into_parts();
        let text = body.collect().await.unwrap().to_bytes();
        (head.status.as_u16(), String::from_utf8(text.to_vec()).unwrap())
    };
    for path in ["/v1/models", "/v1/models/m", "/status", "/metrics", "/version", "/nothing"] {
        for key in [None, Some("wrong"), Some("secret-one ")] {
            let (status, text) = get(path, key).await;
            // Spaces around a key are part of the header's syntax.
            let expected =
                if key == Some("secret-one ") { if path == "/nothing" { 404 } else { 200 } } else { 401 };
            assert_eq!(status, expected, "{path} {text}");
            assert!(!text.contains("secret-one"), "{text}");
        }
    }
    assert_eq!(get("/health", None).await.0, 200);
    let (_, models) = get("/v1/models", Some("secret-one")).await;
    assert!(models.contains(r#""id":"m""#) && models.contains(r#""state":"active""#), "{models}");
    let (head, text) = stage.ask(&json!({"model": "n"}), &[("authorization", "Bearer secret-one")]).await;
    assert_eq!(head.status().as_u16(), 404, "{text}");
    assert!(text.contains("The model `n` does not exist; available: `m`"), "{text}");
    // Neither the key nor internal headers of a client reach a function.
    let claims = [
        ("authorization", "Bearer secret-one"),
        ("x-remoe-tenant", "root"),
        ("x-remoe-timing", "first;dur=1"),
    ];
    let (head, _) = stage.ask(&body(1), &claims).await;
    assert_eq!(head.status(), 200);
    assert!(!head.headers().contains_key("x-remoe-tokens"), "{head:?}");
    // A timeout beyond the range of the clock.
    let patient = [("authorization", "Bearer secret-one"), ("x-request-timeout", "1e19")];
    assert_eq!(stage.ask(&body(1), &patient).await.0.status(), 200);
    let headers = stage.functions.headers.lock().unwrap().clone();
    assert!(!headers.contains_key("authorization"));
    assert_eq!(headers["x-remoe-tenant"], "one");
    assert!(headers["x-remoe-timing"].to_str().unwrap().starts_with("decide;dur="));
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_request_is_refused_when_its_model_ends() {
    let mut stage = Stage::new(GatewayOptions::default(), |_| {}, 1, None).await;
    stage.functions.turns.forget_permits(1 << 20);
    stage.stop_launcher().await;
    let stage = Arc::new(stage);
    let ask = |number: usize| {
        let stage = stage.clone();
        tokio::spawn(async move { stage.ask(&body(number), &[]).await })
    };
    let first = ask(1);
    stage.until(|stage| stage.functions.running() == 1).await;
    let second = ask(2);
    stage.until(|stage| stage.model.load() == (1, 1)).await;
    stage.model.end();
    assert_eq!(second.await.unwrap().0.status(), 503);
    assert_eq!(ask(3).await.unwrap().0.status(), 503);
    let waiting =
        |page: &str| page.lines().any(|line| line == "remoe_gateway_requests_waiting{model=\"m\"} 0");
    let (_, page) = stage.get("/metrics", None).await;
    assert!(waiting(&page), "{page}");
    // The request in flight is answered.
    stage.functions.turns.add_permits(1);
    assert_eq!(first.await.unwrap().0.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn warning_of_a_function_reaches_the_client() {
    let stage = Stage::new(GatewayOptions::default(), |_| {}, 8, None).await;
    for stream in [false, true] {
        let mut request = body(1);
        request["stream"] = stream.into();
        request["warns"] = true.into();
        let (head, text) = stage.ask(&request, &[]).await;
        assert_eq!(
            (head.status().as_u16(), &head.headers()["x-remoe-warning"]),
            (200, &"a: b".parse().unwrap()),
            "{text}"
        );
    }
}
