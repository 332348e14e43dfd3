//! Functions that die or hang during a generation, and their supervision by `remoe up`.

use remoe_test_support::control::greedy;
use remoe_test_support::deadline::{LONG, SOON, until};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::http;
use remoe_test_support::process::signal;
use remoe_test_support::up::{Up, all_gone};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Tokens of a disturbed generation, and tokens before the disturbance.
const TOKENS: u32 = 800;
const BEFORE: usize = 40;

fn prompt() -> Vec<u32> {
    ModelFixture::demo().prompts().pop().unwrap()
}

/// Sends `blow` to the first `victims` of two remote functions during a generation. The tokens are those of an
/// undisturbed generation; the functions return and are used again.
async fn survives(blow: Signal, victims: usize) {
    let mut up = Up::start(&ModelFixture::demo().folder, 2).await;
    let control = up.ready.control();
    let peace = control.generate_in_peace(&greedy(&prompt(), TOKENS)).await;
    let calls = peace.experts.unwrap();
    assert!(calls.local > 0 && calls.remote > 0, "{calls:?}");

    let mut generation = control.begin(greedy(&prompt(), TOKENS)).await.unwrap();
    generation.tokens(BEFORE).await.unwrap();
    let gone = up.ready.remote_pids()[..victims].to_vec();
    gone.iter().for_each(|&pid| signal(pid, blow));
    let disturbed = generation.finish().await.unwrap().finished;
    assert_eq!(disturbed.tokens, peace.tokens);
    let after = disturbed.experts.unwrap();
    assert_eq!(after.local + after.remote + after.fallback, calls.local + calls.remote, "{after:?}");
    assert_eq!(after.local, calls.local);
    assert_eq!(after.fallback > 0, victims == 2, "{after:?}");

    let event = up.whole_without(&gone).await;
    assert_eq!(event.main().pid, up.ready.main().pid, "the main function lives on");
    assert_eq!(event.endpoint, up.ready.endpoint);
    all_gone(&gone, SOON).await;
    let again = control.generate_in_peace(&greedy(&prompt(), TOKENS)).await;
    assert_eq!(again.tokens, peace.tokens);
    assert_eq!(again.experts, Some(calls), "remote functions serve again");
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_remote_function_is_replaced() {
    survives(Signal::KILL, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_killed_remote_functions_are_replaced() {
    survives(Signal::KILL, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_remote_function_is_replaced() {
    survives(Signal::STOP, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_stopped_remote_functions_are_replaced() {
    survives(Signal::STOP, 2).await;
}

fn completion(stream: bool, tokens: u32) -> Value {
    json!({
        "model": "model", "prompt": prompt(), "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
        "stream": stream,
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_main_function_loses_only_started_streams() {
    let mut up = Up::start(&ModelFixture::demo().folder, 1).await;
    let address = up.ready.http();
    let ask = async |tokens| {
        let answer = http::post(address, "/v1/completions", &completion(false, tokens)).await;
        let answer = answer.unwrap().finish().await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.body);
        let body: Value = serde_json::from_str(&answer.body).unwrap();
        body["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let before = ask(20).await;
    let mut stream = http::post(address, "/v1/completions", &completion(true, 900)).await.unwrap();
    assert_eq!(stream.status, 200);
    let (whole, last) = tokio::join!(ask(900), async {
        for _ in 0..5 {
            assert!(stream.chunk().await.unwrap().is_some(), "the stream ended early");
        }
        signal(up.ready.main().pid.unwrap(), Signal::KILL);
        let mut last = String::new();
        while let Some(chunk) = stream.chunk().await.unwrap() {
            assert!(!chunk.contains("[DONE]"), "the killed function ended its stream");
            last = chunk;
        }
        last
    });
    assert!(last.contains(r#""code":"service_unavailable""#), "{last}");
    assert!(whole.starts_with(&before), "the answer is that of another function, from its beginning");

    let event = up.whole_without(&[up.ready.main().pid.unwrap()]).await;
    assert_eq!(event.endpoint, up.ready.endpoint, "the same port");
    assert_eq!(event.remote_pids(), up.ready.remote_pids(), "the remote function lives on");
    assert_eq!(http::get(address, "/health").await.status, 200);
    assert_eq!(ask(20).await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_main_function_is_replaced() {
    let mut up = Up::start(&ModelFixture::demo().folder, 1).await;
    let control = up.ready.control();
    let peace = control.generate(greedy(&prompt(), 20)).await.finished;
    let mut generation = control.begin(greedy(&prompt(), 900)).await.unwrap();
    generation.tokens(5).await.unwrap();
    let main = up.ready.main().pid.unwrap();
    signal(main, Signal::STOP);
    assert!(generation.finish().await.is_err(), "a function that cannot run seems to have answered");
    let event = up.whole_without(&[main]).await;
    assert_eq!(event.endpoint, up.ready.endpoint, "the same port");
    let again = event.control().generate(greedy(&prompt(), 20)).await.finished;
    assert_eq!((again.tokens, again.experts), (peace.tokens, peace.experts));
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_up_leaves_no_process() {
    let mut up = Up::start(&ModelFixture::demo().folder, 2).await;
    let mut generation = up.ready.control().begin(greedy(&prompt(), 900)).await.unwrap();
    generation.tokens(5).await.unwrap();
    // No function is left either, even one that cannot run.
    signal(up.ready.remote_pids()[0], Signal::STOP);
    up.process.signal(Signal::KILL);
    up.process.end(SOON).await;
    all_gone(&up.ready.pids(), SOON).await;
    assert!(generation.finish().await.is_err(), "the client of a function that is gone");
}

/// On a signal during a generation, `up` lets the generation finish and leaves no process behind.
async fn drains(request: Signal) {
    let mut up = Up::start(&ModelFixture::demo().folder, 2).await;
    let address = up.ready.http();
    let mut stream = http::post(address, "/v1/completions", &completion(true, 300)).await.unwrap();
    for _ in 0..5 {
        assert!(stream.chunk().await.unwrap().is_some(), "the stream ended early");
    }
    up.process.signal(request);
    let mut last = String::new();
    while let Some(chunk) = stream.chunk().await.unwrap() {
        last = chunk;
    }
    assert!(last.contains("[DONE]"), "the generation did not come to its end: {last:?}");
    assert_eq!(up.process.end(LONG).await.code(), Some(0));
    assert!(up.unread().is_empty(), "nothing was restarted on the way out");
    all_gone(&up.ready.pids(), SOON).await;
    until(SOON, "the end of the listener", async || {
        tokio::net::TcpStream::connect(address).await.is_err().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn terminated_up_drains() {
    drains(Signal::TERM).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interrupted_up_drains() {
    drains(Signal::INT).await;
}

/// The main function is killed repeatedly while clients send requests. No request is refused or lost: requests wait
/// until it is back, and interrupted ones are retried.
#[tokio::test(flavor = "multi_thread")]
async fn clients_of_a_restarting_main_function_wait() {
    const KILLS: usize = 4;
    let mut up = Up::start(&ModelFixture::demo().folder, 1).await;
    let address = up.ready.http();
    let stop = Arc::new(AtomicBool::new(false));
    let answered: Vec<Arc<AtomicUsize>> = (0..4).map(|_| Arc::default()).collect();
    let clients: Vec<_> = answered
        .iter()
        .map(|answered| {
            let (stop, answered) = (stop.clone(), answered.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let exchange = http::post(address, "/v1/completions", &completion(false, 4)).await;
                    let answer = exchange.unwrap().finish().await.unwrap();
                    assert_eq!(answer.status, 200, "{}", answer.body);
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let mut main = up.ready.main().pid.unwrap();
    for _ in 0..KILLS {
        signal(main, Signal::KILL);
        main = up.whole_without(&[main]).await.main().pid.unwrap();
        // Every interrupted client gets its answer before the next kill, because retries are limited.
        let counts: Vec<usize> = answered.iter().map(|one| one.load(Ordering::Relaxed)).collect();
        until(LONG, "an answer to every client", async || {
            let mut pairs = answered.iter().zip(&counts);
            pairs.all(|(now, before)| now.load(Ordering::Relaxed) > *before).then_some(())
        })
        .await;
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.unwrap();
    }
}
