#![allow(clippy::unwrap_used)]

use super::*;
use crate::GatewayMetrics;
use crate::prefix_index::PromptPrefix;
use std::net::SocketAddr;

const TURN: Directive = Directive { phase: ScalingPhase::Active, turn: 1 };

fn backend(id: u64) -> Backend {
    let address = SocketAddr::from(([127, 0, 0, 1], 8000));
    Backend { id, address, identity: None, capacity: 16, authorization: None, billing: None }
}

/// Makes a model with these backends, which serve.
fn model(backends: &[u64]) -> (Arc<Model>, GatewayMetrics) {
    let metrics = GatewayMetrics::new().unwrap();
    let options = ModelOptions {
        name: "m".to_owned(),
        short_names: Vec::new(),
        context_length: 0,
        max_requests: 1000,
        waiting_bytes: 1 << 20,
        wake_limit: Duration::from_secs(60),
    };
    let model = Model::new(options, &metrics, &PrefixIndex::default());
    model.follow_directive(TURN, backends.iter().map(|id| backend(*id)).collect(), WakeMarks::default());
    (model, metrics)
}

async fn granted(model: &Arc<Model>, body: &str) -> Grant {
    let request = AdmissionRequest {
        client: "c".into(),
        bytes: body.len(),
        arrived: Instant::now(),
        client_deadline: None,
        queue_deadline: None,
        is_retry: false,
        prefix: PromptPrefix::new("", body.as_bytes()),
    };
    model.admit(&request).unwrap().granted().await.unwrap()
}

/// Two conversations of 20 turns each.
#[tokio::test]
async fn conversations_stay_on_their_backend_and_loads_stay_even() {
    let (model, metrics) = model(&[1, 2]);
    let body = |letter: &str, turn: usize| letter.repeat(2000 * (turn + 1));
    let (first, second) = (granted(&model, &body("a", 0)).await, granted(&model, &body("b", 0)).await);
    let backends = [first.backend().id, second.backend().id];
    assert_ne!(backends[0], backends[1], "each goes to the backend with the fewest requests in flight");
    drop((first, second));
    for turn in 1..20 {
        for (letter, backend) in ["a", "b"].into_iter().zip(backends) {
            assert_eq!(granted(&model, &body(letter, turn)).await.backend().id, backend);
        }
    }
    let page = metrics.registry().gather();
    let routed = page.iter().find(|family| family.name() == "remoe_gateway_prefix_routed_total").unwrap();
    assert_eq!(routed.get_metric()[0].get_counter().get_value() as u64, 38);
    // A prefix that all requests have does not send all of them to one backend.
    let mut held = Vec::new();
    for _ in 0..20 {
        held.push(granted(&model, &body("a", 5)).await);
    }
    let on_first = held.iter().filter(|grant| grant.backend().id == backends[0]).count();
    assert!((10..=12).contains(&on_first), "{on_first} of 20");
}

#[tokio::test]
async fn endpoint_picker_gauges_show_waiting_requests_and_used_slots() {
    let (model, _metrics) = model(&[1, 2]);
    let mut held = Vec::new();
    for _ in 0..8 {
        held.push(granted(&model, "x").await);
    }
    let text = crate::endpoint_picker::gauges(std::slice::from_ref(&model));
    let value = |name: &str| {
        text.lines().find_map(|line| line.strip_prefix(&format!("{name} "))?.parse::<f64>().ok())
    };
    assert_eq!(value("vllm:num_requests_waiting"), Some(0.0));
    assert_eq!(value("vllm:num_requests_running"), Some(8.0));
    assert_eq!(value("vllm:kv_cache_usage_perc"), Some(0.25));
    model.follow_directive(
        Directive { phase: ScalingPhase::Asleep, turn: 2 },
        Vec::new(),
        WakeMarks::default(),
    );
    assert!(crate::endpoint_picker::gauges(&[model]).contains("\nvllm:kv_cache_usage_perc 0\n"));
}

#[tokio::test]
async fn total_request_time_counts_requests_of_all_clients() {
    let (model, _metrics) = model(&[1]);
    let start = Instant::now();
    let grants = (granted(&model, "x").await, granted(&model, "y").await);
    tokio::time::sleep(Duration::from_millis(20)).await;
    let before = model.total_request_time();
    assert!(before >= Duration::from_millis(40) && before <= 2 * start.elapsed(), "{before:?}");
    drop(grants);
    let after = model.total_request_time();
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(model.total_request_time(), after, "no request runs");
}

/// Returns a model that fell asleep, and the time when it did.
fn sleeping_model(start: Instant) -> (Arc<Model>, Instant) {
    let (model, _metrics) = model(&[]);
    model.state().directive = None;
    model.set_running_functions(RunningFunctions {
        backends: vec![backend(1)],
        ..RunningFunctions::default()
    });
    let window = Duration::from_secs(600);
    model.sleep_when_idle(window);
    let end = start + 2 * window;
    model.advance(end);
    assert_eq!(model.phase(), ScalingPhase::Draining);
    model.state().engine_requests = Some(0);
    model.advance(end);
    assert_eq!(model.phase(), ScalingPhase::Asleep);
    (model, end)
}

/// A thread may read the clock before the model falls asleep, and get the lock after that. Its older time must not
/// wake the model.
#[tokio::test]
async fn time_read_before_the_sleep_does_not_wake_the_model() {
    let start = Instant::now();
    let (model, end) = sleeping_model(start);
    let before = model.launcher_orders().borrow().order;
    for earlier in [start, start + Duration::from_secs(1), end] {
        model.apply_changes(earlier);
        assert_eq!(
            (model.phase(), model.launcher_orders().borrow().order),
            (ScalingPhase::Asleep, before),
            "woken without a request"
        );
    }
}

/// A request that the queue refuses does not wake the model.
#[tokio::test]
async fn request_refused_for_capacity_wakes_no_model() {
    let (model, end) = sleeping_model(Instant::now());
    let request = |bytes: usize| AdmissionRequest {
        client: "c".into(),
        bytes,
        arrived: end,
        client_deadline: None,
        queue_deadline: None,
        is_retry: false,
        prefix: PromptPrefix::new("", b""),
    };
    assert!(model.admit(&request(2 << 20)).is_err(), "larger than the queue's bytes");
    model.apply_changes(end);
    assert_eq!(model.phase(), ScalingPhase::Asleep);
    let _waiter = model.admit(&request(1)).unwrap();
    assert_eq!(model.phase(), ScalingPhase::Waking);
}

/// Pauses of an unreachable backend double up to a second, and begin at 100 ms again after it was reachable for a
/// while.
#[tokio::test]
async fn pauses_grow_while_a_function_cannot_be_reached() {
    let (model, _metrics) = model(&[1]);
    let mut now = Instant::now() + Duration::from_secs(1);
    let pause = |now: Instant| {
        let mut state = model.state();
        state.pause(1, now);
        // Another request reports the same failure.
        state.pause(1, now + Duration::from_millis(1));
        drop(state);
        let end = model.state().next_deadline(now, Duration::ZERO).unwrap();
        end - now
    };
    model.state().pause(1, now);
    let request = AdmissionRequest {
        client: "c".into(),
        bytes: 1,
        arrived: now,
        client_deadline: None,
        queue_deadline: None,
        is_retry: false,
        prefix: PromptPrefix::new("", b""),
    };
    let _waits = model.admit(&request).unwrap();
    let mut pauses = Vec::new();
    for _ in 0..5 {
        now = model.state().next_deadline(now, Duration::ZERO).unwrap();
        pauses.push(pause(now).as_millis());
    }
    assert_eq!(pauses, [200, 400, 800, 1000, 1000]);
    assert_eq!(pause(now + Duration::from_secs(10)).as_millis(), 100);
}

/// While a shorter context is rolled out, older functions still serve with the longer one.
#[test]
fn longer_context_bounds_usage_while_old_functions_serve() {
    let (model, _metrics) = model(&[1]);
    let follow = |ids: &[u64]| {
        model.follow_directive(TURN, ids.iter().map(|id| backend(*id)).collect(), WakeMarks::default());
        model.longest_context()
    };
    assert_eq!(model.longest_context(), 0);
    model.describe(Vec::new(), 4096);
    assert_eq!(model.longest_context(), 4096);
    model.describe(Vec::new(), 1024);
    assert_eq!((model.description().1, follow(&[1, 2])), (1024, 4096));
    // A third, even shorter context does not hide that of the first function.
    model.describe(Vec::new(), 512);
    assert_eq!((follow(&[1, 2]), follow(&[2]), follow(&[3])), (4096, 4096, 512));
    model.describe(Vec::new(), 8192);
    assert_eq!(follow(&[3]), 8192);
}
