//! Latency of an honest model beside a hostile function, and beside an honest one that sends as many bytes.

use super::functions::{Theatre, honest, hostile};
use remoe_test_support::hostile::Cases;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Clients of the function beside.
const CLIENTS: usize = 8;
/// Time of one measurement.
const TIME: Duration = Duration::from_secs(10);

/// Latencies of the honest model while clients have the function at `beside` answer, ascending, and how often it was asked.
async fn latencies(beside: SocketAddr, cases: Cases) -> (Vec<Duration>, usize) {
    let (theatre, _models) = Theatre::new(beside).await;
    let (theatre, asked) = (Arc::new(theatre), Arc::new(AtomicUsize::new(0)));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (theatre, asked) = (theatre.clone(), asked.clone());
            tokio::spawn(async move {
                loop {
                    theatre.attack(cases, asked.fetch_add(1, Ordering::Relaxed)).await;
                }
            })
        })
        .collect();
    let (mut latencies, begun) = (Vec::new(), Instant::now());
    while begun.elapsed() < TIME {
        let sent = Instant::now();
        assert!(theatre.ask_honest().await.is_some());
        latencies.push(sent.elapsed());
    }
    clients.iter().for_each(tokio::task::JoinHandle::abort);
    latencies.sort_unstable();
    (latencies, asked.load(Ordering::Relaxed))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement: bench/hostile_neighbour.py"]
async fn latency_beside_a_hostile_function_is_measured() {
    let cases = Cases::new("latency", 0);
    let (address, sent) = hostile(cases).await;
    let (beside_hostile, asked) = latencies(address, cases).await;
    let bytes = sent.load(Ordering::Relaxed) as usize / asked.max(1);
    let (beside_honest, _) = latencies(honest(bytes).await, cases).await;
    for (beside, latencies) in [("hostile", &beside_hostile), ("honest", &beside_honest)] {
        let at = |share: usize| latencies[latencies.len() * share / 100].as_micros();
        println!("{beside} {} {bytes} {} {}", latencies.len(), at(50), at(99));
    }
}
