//! Latency of an honest model beside a hostile function, and beside an honest one that sends as many bytes at the
//! same pace.

use super::functions::HostileFixture;
use remoe_test_support::hostile::Cases;
use remoe_test_support::hostile_answers::{honest, hostile};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Number of clients of the neighbour.
const CLIENTS: usize = 8;
/// Duration of one measurement.
const MEASUREMENT_TIME: Duration = Duration::from_secs(4);
/// Number of measurements beside each neighbour, alternating so that other load affects both alike.
const ROUNDS: usize = 5;

/// Measures latencies of the honest model while clients send requests to the neighbour at `neighbour`, one per `pace`
/// if that is given. Returns the latencies and the number of requests to the neighbour. Cases begin with `first`.
async fn latencies(
    neighbour: SocketAddr,
    (cases, first): (Cases, usize),
    pace: Option<Duration>,
) -> (Vec<Duration>, usize) {
    let (fixture, _models) = HostileFixture::new(neighbour).await;
    let (fixture, neighbour_requests, started) =
        (Arc::new(fixture), Arc::new(AtomicUsize::new(0)), Instant::now());
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (fixture, neighbour_requests) = (fixture.clone(), neighbour_requests.clone());
            tokio::spawn(async move {
                loop {
                    let number = neighbour_requests.fetch_add(1, Ordering::Relaxed);
                    if let (Some(pace), Ok(number)) = (pace, u32::try_from(number)) {
                        tokio::time::sleep_until((started + pace * number).into()).await;
                    }
                    fixture.attack(cases, first + number).await;
                }
            })
        })
        .collect();
    let mut latencies = Vec::new();
    while started.elapsed() < MEASUREMENT_TIME {
        let sent = Instant::now();
        assert!(fixture.ask_honest().await.is_some());
        latencies.push(sent.elapsed());
    }
    clients.iter().for_each(tokio::task::JoinHandle::abort);
    (latencies, neighbour_requests.load(Ordering::Relaxed).saturating_sub(CLIENTS))
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
        let (neighbour, neighbour_requests) = latencies(address, (cases, first), None).await;
        let bytes = (sent.load(Ordering::Relaxed) - before) as usize;
        let each = bytes / neighbour_requests.max(1);
        let pace = MEASUREMENT_TIME / u32::try_from(neighbour_requests.max(1)).unwrap();
        let (beside_honest, asked_honest) = latencies(honest(each).await, (cases, first), Some(pace)).await;
        for (into, (latencies, neighbour_requests, bytes)) in measured
            .iter_mut()
            .zip([(neighbour, neighbour_requests, bytes), (beside_honest, asked_honest, each * asked_honest)])
        {
            into.0.extend(latencies);
            into.1 += neighbour_requests;
            into.2 += bytes;
        }
        first += neighbour_requests;
    }
    for (neighbour, (mut latencies, neighbour_requests, bytes)) in
        ["hostile", "honest"].into_iter().zip(measured)
    {
        latencies.sort_unstable();
        let percentile = |share: usize| latencies[latencies.len() * share / 100].as_micros();
        println!(
            "{neighbour} {neighbour_requests} {bytes} {} {} {}",
            latencies.len(),
            percentile(50),
            percentile(99)
        );
    }
}
