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

/// A model that runs on these backends.
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
    model.follow(TURN, backends.iter().map(|id| backend(*id)).collect(), WakeMarks::default());
    (model, metrics)
}

async fn granted(model: &Arc<Model>, body: &str) -> Grant {
    let entry = AdmissionRequest {
        client: "c".into(),
        bytes: body.len(),
        arrived: Instant::now(),
        until: None,
        queue_until: None,
        again: false,
        beginning: PromptPrefix::of("", body.as_bytes()),
    };
    model.enter(&entry).unwrap().granted().await.unwrap()
}

/// Two conversations, turn by turn.
#[tokio::test]
async fn conversations_stay_where_they_began_and_loads_stay_even() {
    let (model, metrics) = model(&[1, 2]);
    let turn = |of: &str, turn: usize| of.repeat(2000 * (turn + 1));
    let (one, other) = (granted(&model, &turn("a", 0)).await, granted(&model, &turn("b", 0)).await);
    let homes = [one.backend().id, other.backend().id];
    assert_ne!(homes[0], homes[1], "the least work in flight");
    drop((one, other));
    for number in 1..20 {
        for (of, home) in ["a", "b"].into_iter().zip(homes) {
            assert_eq!(granted(&model, &turn(of, number)).await.backend().id, home);
        }
    }
    let page = metrics.registry().gather();
    let seen = page.iter().find(|family| family.name() == "remoe_gateway_prefix_routed_total").unwrap();
    assert_eq!(seen.get_metric()[0].get_counter().get_value() as u64, 38);
    // What all begin with does not draw all to one.
    let mut held = Vec::new();
    for _ in 0..20 {
        held.push(granted(&model, &turn("a", 5)).await);
    }
    let at_home = held.iter().filter(|grant| grant.backend().id == homes[0]).count();
    assert!((10..=12).contains(&at_home), "{at_home} of 20");
}

#[tokio::test]
async fn pickers_are_told_what_waits_and_how_much_room_is_in_use() {
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
    model.follow(Directive { phase: ScalingPhase::Asleep, turn: 2 }, Vec::new(), WakeMarks::default());
    assert!(crate::endpoint_picker::gauges(&[model]).contains("\nvllm:kv_cache_usage_perc 0\n"));
}

#[tokio::test]
async fn occupied_time_counts_requests_of_all_clients() {
    let (model, _metrics) = model(&[1]);
    let start = Instant::now();
    let (one, two) = (granted(&model, "x").await, granted(&model, "y").await);
    tokio::time::sleep(Duration::from_millis(20)).await;
    let before = model.occupied();
    assert!(before >= Duration::from_millis(40) && before <= 2 * start.elapsed(), "{before:?}");
    drop((one, two));
    let after = model.occupied();
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(model.occupied(), after, "no request runs");
}

/// A model that has slept since `end`, and what it wants.
fn asleep(start: Instant) -> (Arc<Model>, Instant) {
    let (model, _metrics) = model(&[]);
    model.state().directive = None;
    model.runs(RunningFunctions { backends: vec![backend(1)], ..RunningFunctions::default() });
    let window = Duration::from_secs(600);
    model.sleep_when_idle(window);
    let end = start + 2 * window;
    model.advance(end);
    assert_eq!(model.phase(), ScalingPhase::Draining);
    model.state().engine = Some(0);
    model.advance(end);
    assert_eq!(model.phase(), ScalingPhase::Asleep);
    (model, end)
}

/// A thread that read the clock before the model fell asleep, and gets the lock after that, does not wake the model: a
/// request had ended, say, and its thread had no processor for a while.
#[tokio::test]
async fn a_clock_that_was_read_before_the_sleep_is_no_reason_to_wake() {
    let start = Instant::now();
    let (model, end) = asleep(start);
    let before = model.want().borrow().order;
    for late in [start, start + Duration::from_secs(1), end] {
        model.changed(late);
        assert_eq!(
            (model.phase(), model.want().borrow().order),
            (ScalingPhase::Asleep, before),
            "woken without a request"
        );
    }
}

/// A request that was never let in does not wake the model either.
#[tokio::test]
async fn request_refused_for_capacity_wakes_no_model() {
    let (model, end) = asleep(Instant::now());
    let entry = |bytes: usize| AdmissionRequest {
        client: "c".into(),
        bytes,
        arrived: end,
        until: None,
        queue_until: None,
        again: false,
        beginning: PromptPrefix::of("", b""),
    };
    assert!(model.enter(&entry(2 << 20)).is_err(), "larger than all that may wait");
    model.changed(end);
    assert_eq!(model.phase(), ScalingPhase::Asleep);
    let _waiter = model.enter(&entry(1)).unwrap();
    assert_eq!(model.phase(), ScalingPhase::Waking);
}

/// Waiting requests try an unreachable backend ever more rarely, and soon again one that was reachable for a while.
#[tokio::test]
async fn pauses_grow_while_a_function_cannot_be_reached() {
    let (model, _metrics) = model(&[1]);
    let mut now = Instant::now() + Duration::from_secs(1);
    let pause = |now: Instant| {
        let mut state = model.state();
        state.pause(1, now);
        // Another request found out at the same time.
        state.pause(1, now + Duration::from_millis(1));
        drop(state);
        // What it was for the first request that waits.
        let end = model.state().deadline(now, Duration::ZERO).unwrap();
        end - now
    };
    model.state().pause(1, now);
    let entry = AdmissionRequest {
        client: "c".into(),
        bytes: 1,
        arrived: now,
        until: None,
        queue_until: None,
        again: false,
        beginning: PromptPrefix::of("", b""),
    };
    let _waits = model.enter(&entry).unwrap();
    let mut pauses = Vec::new();
    for _ in 0..5 {
        now = model.state().deadline(now, Duration::ZERO).unwrap();
        pauses.push(pause(now).as_millis());
    }
    assert_eq!(pauses, [200, 400, 800, 1000, 1000]);
    assert_eq!(pause(now + Duration::from_secs(10)).as_millis(), 100);
}

/// A shorter context is rolled out: the functions that serve meanwhile still have the longer one.
#[test]
fn longer_context_bounds_usage_while_old_functions_serve() {
    let (model, _metrics) = model(&[1]);
    let follow = |ids: &[u64]| {
        model.follow(TURN, ids.iter().map(|id| backend(*id)).collect(), WakeMarks::default());
        model.longest_context()
    };
    assert_eq!(model.longest_context(), 0);
    model.describe(Vec::new(), 4096);
    assert_eq!(model.longest_context(), 4096);
    model.describe(Vec::new(), 1024);
    assert_eq!((model.described().1, follow(&[1, 2])), (1024, 4096));
    // Even shorter ones change nothing of the first.
    model.describe(Vec::new(), 512);
    assert_eq!((follow(&[1, 2]), follow(&[2]), follow(&[3])), (4096, 4096, 512));
    model.describe(Vec::new(), 8192);
    assert_eq!(follow(&[3]), 8192);
}
