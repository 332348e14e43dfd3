//! Replicas by the load of each group, on a trace with bursts and skew: against a fixed number, and against one number for
//! all groups by concurrency alone.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use remoe_foresight::{ReplicaRules, ReplicaScaler};

const GROUPS: usize = 6;
/// Ticks of a second.
const TICKS: usize = 1800;
/// Seconds that a new replica takes to start.
const START: usize = 3;
const BYTES: u64 = 500_000_000;

/// Work that arrives in each second, of every group: the hot group changes every five minutes, bursts come
/// every four for twenty seconds.
fn trace() -> Vec<Vec<f64>> {
    let mut state = 7_u64;
    let mut noise = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        0.7 + 0.6 * ((state >> 33) % 1000) as f64 / 1000.0
    };
    let second = |tick: usize| {
        let requests = if tick % 240 >= 120 && tick % 240 < 140 { 3.0 } else { 0.8 };
        let hot = tick / 300 % GROUPS;
        (0..GROUPS).map(|group| noise() * requests * if group == hot { 1.6 } else { 0.3 }).collect()
    };
    (0..TICKS).map(second).collect()
}

/// What a policy leads to.
#[derive(Debug, Clone, Copy)]
struct Outcome {
    /// The 95th percentile over seconds of the work that waits before the slowest group, in seconds.
    p95: f64,
    /// Mean memory of all replicas.
    bytes: f64,
}

/// Runs `policy`, which is told the work of each second, against the trace.
fn run(trace: &[Vec<f64>], first: u32, mut policy: impl FnMut(&[f64]) -> Vec<u32>) -> Outcome {
    let mut waits = [0.0; GROUPS];
    let mut wanted = vec![vec![first; GROUPS]; START];
    let (mut slowest, mut bytes) = (Vec::new(), 0.0);
    for work in trace {
        // What was wanted when it began to start serves now; what is given up ends at once.
        let now = wanted.last().unwrap().clone();
        let since = &wanted[wanted.len() - START..];
        let ready = |group: usize| since.iter().map(|wanted| wanted[group]).min().unwrap();
        for group in 0..GROUPS {
            waits[group] = f64::max(0.0, waits[group] + work[group] - f64::from(ready(group)));
        }
        slowest.push((0..GROUPS).map(|group| waits[group] / f64::from(ready(group))).fold(0.0, f64::max));
        bytes += now.iter().map(|count| f64::from(*count)).sum::<f64>() * BYTES as f64 / trace.len() as f64;
        wanted.push(policy(work));
    }
    slowest.sort_by(f64::total_cmp);
    Outcome { p95: slowest[slowest.len() * 95 / 100], bytes }
}

#[test]
fn replicas_follow_the_groups_that_have_work() {
    let trace = trace();
    let rules = ReplicaRules::default();
    let mut scaler = ReplicaScaler::new(rules, vec![BYTES; GROUPS]);
    let ours = run(&trace, 1, |work| scaler.tick(work).to_vec());
    // The same windows and use, of the work of all groups together: each gets as many.
    let mut one = ReplicaScaler::new(rules, vec![BYTES]);
    let by_concurrency = run(&trace, 1, |work| {
        let mean = work.iter().sum::<f64>() / GROUPS as f64;
        vec![one.tick(&[mean])[0]; GROUPS]
    });
    let fixed = |count: u32| run(&trace, count, |_| vec![count; GROUPS]);
    let (two, four) = (fixed(2), fixed(4));
    assert!(ours.p95 < by_concurrency.p95 / 2.0 && ours.bytes < by_concurrency.bytes * 1.2);
    assert!(ours.p95 < two.p95 / 2.0 && ours.bytes < two.bytes * 1.1, "with no more memory than two each");
    assert!(ours.bytes < four.bytes / 1.5);
}

#[test]
fn memory_and_counts_are_bounded_and_everybody_has_one() {
    let rules = ReplicaRules { most_bytes: 5 * BYTES, most_replicas: 3, ..ReplicaRules::default() };
    let mut scaler = ReplicaScaler::new(rules, vec![BYTES; 3]);
    assert_eq!(scaler.tick(&[100.0, 0.0, f64::NAN]), [3, 1, 1]);
    assert_eq!(scaler.tick(&[0.0, 100.0, 100.0]).iter().sum::<u32>(), 5);
    let mut none = ReplicaScaler::new(ReplicaRules { most_bytes: 0, ..rules }, vec![BYTES; 2]);
    assert_eq!(none.tick(&[9.0]), [1, 1]);
}

#[test]
fn a_burst_takes_nothing_away_and_quiet_does() {
    let rules = ReplicaRules { stable: 10, panic: 2, ..ReplicaRules::default() };
    let mut scaler = ReplicaScaler::new(rules, vec![BYTES; 2]);
    (0..20).for_each(|_| drop(scaler.tick(&[0.2, 0.2]).to_vec()));
    assert_eq!(scaler.tick(&[0.2, 0.2]), [1, 1]);
    let burst = scaler.tick(&[6.0, 0.2]).to_vec();
    assert!(burst[0] >= 4 && burst[1] == 1, "{burst:?}");
    for _ in 0..5 {
        let after = scaler.tick(&[0.0, 0.0]);
        assert!(after[0] >= burst[0], "{after:?}");
    }
    (0..20).for_each(|_| drop(scaler.tick(&[0.2, 0.2]).to_vec()));
    assert_eq!(scaler.tick(&[0.2, 0.2]), [1, 1]);
}
