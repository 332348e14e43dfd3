//! Comparison of groups that scale to zero with a simulation.

use crate::generate::SplitMix64;
use remoe_planner::{ScalingGroup, ScalingGroupTime};

/// Simulates a group request by request.
fn observed(alone: &ScalingGroup, wakes: usize, seed: u64) -> ScalingGroupTime {
    let random = &mut SplitMix64::new(seed);
    let (mut now, mut ready, mut ends) = (0.0, 0.0, 0.0);
    let (mut alive, mut woken, mut requests, mut cold) = (0.0, 0, 0.0, 0.0);
    let mut began = 0.0;
    while woken < wakes {
        now -= (1.0 - random.unit()).ln() / alone.per_second;
        requests += 1.0;
        if now >= ends {
            alive += ends - began;
            (began, ready) = (now, now + alone.start_seconds);
            ends = ready + alone.idle_seconds;
            woken += 1;
        }
        let takes = if now < ready {
            cold += 1.0;
            alone.cold_seconds
        } else {
            alone.service_seconds
        };
        ends = f64::max(ends, now + takes + alone.idle_seconds);
    }
    ScalingGroupTime {
        share: alive / began,
        wakes_per_second: woken as f64 / began,
        cold_share: cold / requests,
    }
}

#[test]
fn closed_form_matches_simulated_scaling_groups() {
    let random = &mut SplitMix64::new(11);
    let (mut worst, mut compared) = (0.0_f64, 0);
    for seed in 0..200 {
        let service = random.between(0.1, 20.0);
        let alone = ScalingGroup {
            per_second: 10f64.powf(random.between(-3.0, -0.5)),
            idle_seconds: random.between(0.5, 120.0),
            start_seconds: 10f64.powf(random.between(-1.0, 2.0)),
            service_seconds: service,
            cold_seconds: service * if seed % 3 == 0 { 1.0 } else { random.between(1.0, 10.0) },
        };
        let time = alone.time();
        // Wakes that never come cannot be counted.
        if alone.per_second * (alone.service_seconds + alone.idle_seconds) > 5.0 {
            continue;
        }
        compared += 1;
        let seen = observed(&alone, 60_000, seed);
        for (stated, seen) in [
            (time.share, seen.share),
            (time.wakes_per_second, seen.wakes_per_second),
            (time.cold_share, seen.cold_share),
        ] {
            let error = (stated / seen - 1.0).abs();
            worst = worst.max(error);
            assert!(error <= 0.02, "{seed}: {stated} {seen} {alone:?}");
        }
    }
    println!("{compared} groups, {worst} at most");
    assert!(compared >= 100, "{compared}");
}
