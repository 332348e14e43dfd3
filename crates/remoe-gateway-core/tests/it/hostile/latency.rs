//! Latency of an honest model beside a hostile function, and beside an honest one that sends as many bytes at the
//! same pace.

use super::functions::HostileFixture;
use remoe_test_support::hostile::Cases;
use remoe_test_support::hostile_answers::{honest, hostile};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Clients of the function beside.
const CLIENTS: usize = 8;
/// Time of one measurement.
const TIME: Duration = Duration::from_secs(4);
/// Measurements beside each function, in turn: what else the machine does meets both.
const ROUNDS: usize = 5;

/// Latencies of the honest model while clients have the function at `beside` answer, one request each `pace` if there
/// is one, and how often it was asked. Cases begin with `first`.
async fn latencies(
    beside: SocketAddr,
    (cases, first): (Cases, usize),
    pace: Option<Duration>,
) -> (Vec<Duration>, usize) {
    let (fixture, _models) = HostileFixture::new(beside).await;
    let (fixture, asked, begun) = (Arc::new(fixture), Arc::new(AtomicUsize::new(0)), Instant::now());
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (fixture, asked) = (fixture.clone(), asked.clone());
            tokio::spawn(async move {
                loop {
                    let number = asked.fetch_add(1, Ordering::Relaxed);
                    if let (Some(pace), Ok(number)) = (pace, u32::try_from(number)) {
                        tokio::time::sleep_until((begun + pace * number).into()).await;
                    }
                    fixture.attack(cases, first + number).await;
                }
            })
        })
        .collect();
    let mut latencies = Vec::new();
    while begun.elapsed() < TIME {
        let sent = Instant::now();
        assert!(fixture.ask_honest().await.is_some());
        latencies.push(sent.elapsed());
    }
    clients.iter().for_each(tokio::task::JoinHandle::abort);
    (latencies, asked.load(Ordering::Relaxed).saturating_sub(CLIENTS))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement: bench/hostile_neighbour.py"]
async fn latency_beside_a_hostile_function_is_measured() {
    let cases = Cases::new("latency", 0);
    let (address, sent) = hostile(cases).await;
    let mut measured = [(Vec::new(), 0, 0), (Vec::new(), 0, 0)];
    let mut first = 0;
    for _ in 0..ROUNDS {
        let before = sent.load(Ordering::Relaxed);
        let (beside, asked) = latencies(address, (cases, first), None).await;
        let bytes = (sent.load(Ordering::Relaxed) - before) as usize;
        let each = bytes / asked.max(1);
        let pace = TIME / u32::try_from(asked.max(1)).unwrap();
        let (beside_honest, asked_honest) = latencies(honest(each).await, (cases, first), Some(pace)).await;
        for (into, (latencies, asked, bytes)) in measured
            .iter_mut()
            .zip([(beside, asked, bytes), (beside_honest, asked_honest, each * asked_honest)])
        {
            into.0.extend(latencies);
            into.1 += asked;
            into.2 += bytes;
        }
        first += asked;
    }
    for (beside, (mut latencies, asked, bytes)) in ["hostile", "honest"].into_iter().zip(measured) {
        latencies.sort_unstable();
        let at = |share: usize| latencies[latencies.len() * share / 100].as_micros();
        println!("{beside} {asked} {bytes} {} {} {}", latencies.len(), at(50), at(99));
    }
}
