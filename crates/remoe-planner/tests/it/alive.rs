//! Comparison of the closed form of alive time with simulated engines, with known queueing results, and with the replay of
//! recorded arrivals.

use crate::engine;
use crate::generate;

use engine::{Lengths, Setting, SimulatedFigures, observe};
use generate::{Sample, SplitMix64};
use proptest::prelude::*;
use remoe_planner::{Alive, Arrivals, Service, alive};

impl Setting {
    /// From asleep most of the time to nearly saturated; half of them with one main.
    fn random(seed: u64) -> Self {
        let random = &mut SplitMix64::new(seed);
        let slots = random.whole(1, 16) as usize;
        let mains = if random.one_in(2) { 1 } else { random.whole(2, 4) as usize };
        let (first, slope) = (random.between(0.01, 0.1), random.unit());
        let step_seconds: Vec<f64> = (0..slots).map(|more| first * (1.0 + slope * more as f64)).collect();
        let steps = random.whole(5, 60) as f64;
        // A prefill of half a step up to half of a lone request's time.
        let prefill_seconds = first * random.between(0.5, steps);
        let alone = prefill_seconds + steps * first;
        let full = slots as f64 * prefill_seconds + steps * step_seconds[slots - 1];
        let rarely = random.one_in(3);
        let utilisation = if rarely { random.between(0.001, 0.1) } else { random.between(0.1, 0.95) };
        let per_second = utilisation * (mains * slots) as f64 / full;
        let burst = if random.one_in(3) { random.between(1.0, 10.0) } else { 1.0 };
        let idle = random.between(0.0, 3.0) * burst / per_second;
        Self {
            per_second,
            burst,
            idle_seconds: (!random.one_in(5)).then_some(idle),
            start_seconds: alone * random.between(0.0, 10.0),
            prefill_seconds,
            step_seconds,
            steps,
            lengths: if random.one_in(2) { Lengths::Fixed } else { Lengths::Geometric },
            prefill_variation: 0.0,
            target_itl: None,
            slots,
            mains,
        }
    }

    fn arrivals(&self) -> Arrivals {
        arrivals(self.per_second, self.burst, self.idle_seconds)
    }

    fn service(&self) -> Service {
        Service {
            prefill_seconds: self.prefill_seconds,
            step_seconds: self.step_seconds.clone(),
            steps: self.steps,
            concurrency: self.slots as u32,
            mains: self.mains as u32,
        }
    }

    fn alive(&self) -> Alive {
        alive(&self.arrivals(), &self.service(), self.start_seconds)
    }
}

fn arrivals(per_second: f64, burst: f64, idle_seconds: Option<f64>) -> Arrivals {
    Arrivals {
        per_second,
        burst,
        recorded_seconds: None,
        idle_seconds,
        input_variation: 0.0,
        output_variation: 0.0,
    }
}

/// A service in which each request takes `seconds` at any load.
fn constant(seconds: f64, concurrency: u32) -> Service {
    Service { prefill_seconds: 0.0, step_seconds: vec![seconds / 10.0], steps: 10.0, concurrency, mains: 1 }
}

fn close(left: f64, right: f64, relative: f64) {
    let error = (left - right).abs();
    assert!(error <= relative * left.abs().max(right.abs()), "{left} is not {right}");
}

/// Relative errors of the closed form against the simulation, by part.
fn errors(expected: &Alive, seen: &SimulatedFigures) -> [f64; 9] {
    let relative = |expected: f64, seen: f64| if seen > 0.0 { (expected - seen).abs() / seen } else { 0.0 };
    [
        (expected.share - seen.share).abs(),
        (expected.cold_share - seen.cold_share).abs(),
        // Where hardly any are seen their means are those of a few.
        if seen.cold_share < 0.01 {
            0.0
        } else {
            relative(expected.cold_wait_seconds, seen.cold_wait_seconds)
        },
        if seen.cold_share < 0.01 { 0.0 } else { relative(expected.wakes_per_second, seen.wakes_per_second) },
        relative(expected.in_flight, seen.in_flight),
        relative(expected.service_seconds, seen.service_seconds),
        relative(expected.tpot_seconds, seen.tpot_seconds),
        (expected.wait_seconds - seen.wait_seconds).abs() / seen.service_seconds,
        relative(expected.first_token_seconds + expected.wait_seconds, seen.mean_ttft()),
    ]
}

const PARTS: [&str; 9] = [
    "share",
    "cold_share",
    "cold_wait",
    "wakes",
    "in_flight",
    "service",
    "tpot",
    "wait over service",
    "first token",
];

/// Settings of one kind with the permitted median and largest error of each part: the measured ones plus a fifth.
struct SettingKind {
    name: &'static str,
    of: fn(&Setting, &Alive) -> bool,
    median: [f64; 9],
    most: [f64; 9],
}

#[test]
fn closed_form_matches_simulated_engines() {
    let kinds = [
        SettingKind {
            name: "single requests of varying length",
            of: |setting, expected| {
                setting.burst == 1.0 && setting.lengths == Lengths::Geometric && expected.utilisation <= 0.8
            },
            median: [0.0011, 0.0034, 0.0021, 0.0096, 0.028, 0.030, 0.085, 0.0026, 0.12],
            most: [0.010, 0.057, 0.025, 0.90, 0.28, 0.28, 1.09, 0.46, 0.67],
        },
        SettingKind {
            name: "single requests of one length",
            of: |setting, expected| {
                setting.burst == 1.0 && setting.lengths == Lengths::Fixed && expected.utilisation <= 0.8
            },
            median: [0.0010, 0.0022, 0.0015, 0.0085, 0.056, 0.059, 0.035, 0.0040, 0.16],
            most: [0.010, 0.074, 0.019, 1.05, 0.36, 0.35, 2.30, 0.87, 1.03],
        },
        SettingKind {
            name: "bursts of varying length",
            of: |setting, expected| {
                setting.burst > 1.0 && setting.lengths == Lengths::Geometric && expected.utilisation <= 0.8
            },
            median: [0.0045, 0.0044, 0.0095, 0.027, 0.047, 0.045, 0.35, 0.14, 0.43],
            most: [0.019, 0.035, 0.095, 0.37, 0.16, 0.16, 1.60, 0.74, 0.70],
        },
        SettingKind {
            name: "bursts of one length",
            of: |setting, expected| {
                setting.burst > 1.0 && setting.lengths == Lengths::Fixed && expected.utilisation <= 0.8
            },
            median: [0.0055, 0.0060, 0.0061, 0.017, 0.10, 0.11, 0.18, 0.12, 0.48],
            most: [0.039, 0.053, 0.048, 0.32, 0.31, 0.29, 2.25, 4.05, 0.76],
        },
        SettingKind {
            name: "nearly saturated",
            of: |_, expected| expected.utilisation > 0.8,
            // Waits are estimates for a search here; plans are judged by simulated latencies (`latency.rs`).
            median: [0.0014, 0.0054, 0.0055, 0.028, 0.058, 0.048, 0.18, 0.56, 0.47],
            most: [0.013, 0.091, 0.074, 3.33, 0.48, 0.48, 4.78, 313.0, 9.9],
        },
    ];
    let mut found: Vec<Vec<[f64; 9]>> = vec![Vec::new(); kinds.len()];
    for seed in Sample::one_in(2).of(0..300) {
        let setting = Setting::random(seed);
        let expected = setting.alive();
        // More may come than prompts can feed streams: nothing settles then.
        // So near to that, waits of a run are no means.
        if expected.saturated || expected.utilisation > 0.95 {
            continue;
        }
        let seen = observe(&setting, 40_000, seed + 1_000_000);
        let errors = errors(&expected, &seen);
        for (kind, found) in kinds.iter().zip(&mut found) {
            if (kind.of)(&setting, &expected) {
                found.push(errors);
            }
        }
    }
    let mut wrong = Vec::new();
    for (kind, found) in kinds.iter().zip(&found) {
        assert!(found.len() >= 8, "{}: {} settings", kind.name, found.len());
        for (part, name) in PARTS.iter().enumerate() {
            let mut errors: Vec<f64> = found.iter().map(|errors| errors[part]).collect();
            errors.sort_by(f64::total_cmp);
            let (median, most) = (errors[errors.len() / 2], errors[errors.len() - 1]);
            println!("{} ({}), {name}: {median:.4}, at most {most:.4}", kind.name, found.len());
            // A sample has other medians than all settings by chance.
            let margin = if found.len() < 60 { 1.5 } else { 1.0 };
            if median > margin * kind.median[part] || most > margin * kind.most[part] {
                wrong.push(format!("{}, {name}: {median:.4}, at most {most:.4}", kind.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn busy_period_of_unbounded_mains_matches_takacs() {
    for (rate, service, idle, start) in [(0.01, 5.0, 60.0, 30.0), (0.5, 3.0, 2.0, 0.0), (2.0, 1.5, 0.0, 0.0)]
    {
        let found = alive(&arrivals(rate, 1.0, Some(idle)), &constant(service, 1000), start);
        let at = |start: f64| start + (rate * (service + idle)).exp_m1() / rate;
        // Without a start it is Takács's exactly. With one, those that come meanwhile begin together: they
        // end together where lengths are the same, and one by one here.
        if start == 0.0 {
            close(found.share, at(start) / (at(start) + 1.0 / rate), 1e-9);
            close(found.wakes_per_second, 1.0 / (at(start) + 1.0 / rate), 1e-9);
            close(found.in_flight, rate * service, 1e-9);
        } else {
            close(found.share, at(start) / (at(start) + 1.0 / rate), 0.02);
        }
        assert!(found.wait_seconds < 1e-9);
        close(found.service_seconds, service, 1e-9);
    }
}

#[test]
fn wait_for_a_slot_matches_erlang_c() {
    for (rate, seconds, slots) in [(0.7, 1.0, 1_u32), (3.2, 2.0, 8), (0.4, 4.0, 2)] {
        let found = alive(&arrivals(rate, 1.0, None), &constant(seconds, slots), 10.0);
        let load = rate * seconds;
        let blocked = (1..=slots).fold(1.0, |blocked, n| load * blocked / (f64::from(n) + load * blocked));
        let use_of_all = load / f64::from(slots);
        let waits = blocked / (1.0 - use_of_all * (1.0 - blocked));
        close(found.wait_seconds, waits * seconds / (f64::from(slots) - load), 1e-9);
        close(found.utilisation, use_of_all, 1e-9);
    }
}

#[test]
fn requests_of_a_burst_wait_for_earlier_ones() {
    // M^X/M/1: the wait of a queue with single arrivals at the same load, and for the mean of b - 1 before
    // in the burst, both longer by the load.
    let (rate, seconds, burst) = (0.1, 4.0, 3.0);
    let found = alive(&arrivals(rate, burst, None), &constant(seconds, 1), 0.0);
    let load = rate * seconds;
    close(found.wait_seconds, (load * seconds + (burst - 1.0) * seconds) / (1.0 - load), 1e-9);
}

#[test]
fn rare_requests_cost_a_start_a_request_and_an_idle_window() {
    for burst in [1.0, 4.0] {
        let setting = Setting { burst, per_second: 1e-9, ..Setting::random(4) };
        let service = setting.service();
        let found = alive(&arrivals(1e-9, burst, Some(60.0)), &service, 30.0);
        close(found.cold_share, 1.0, 1e-6);
        close(found.cold_wait_seconds, 30.0, 1e-6);
        close(found.wakes_per_second, 1e-9 / burst, 1e-6);
        let alone = setting.prefill_seconds + setting.steps * setting.step_seconds[0];
        let each = found.share / found.wakes_per_second;
        if burst == 1.0 {
            close(each, 30.0 + alone + 60.0, 1e-6);
            close(found.tpot_seconds, setting.step_seconds[0], 1e-6);
            close(found.first_token_seconds, setting.prefill_seconds, 1e-6);
        } else {
            assert!(each > 30.0 + alone + 60.0);
        }
    }
}

#[test]
fn requests_during_a_start_wait_for_half_of_it() {
    let found = alive(&arrivals(0.1, 2.0, Some(0.0)), &constant(0.001, 1000), 40.0);
    // The burst of 2 waits for 40 s, the 4 that come meanwhile for 20 s.
    close(found.cold_wait_seconds, (2.0 * 40.0 + 4.0 * 20.0) / 6.0, 1e-9);
    close(found.cold_share, found.wakes_per_second * 6.0 / 0.1, 1e-9);
}

#[test]
fn requests_of_zero_time_are_served_without_wait() {
    let recorded_seconds = Some(vec![0.0, 1.0, 50.0]);
    let random = arrivals(0.05, 1.0, Some(10.0));
    for arrivals in [Arrivals { recorded_seconds, ..random.clone() }, random] {
        let found = alive(&arrivals, &constant(0.0, 4), 0.0);
        assert_eq!((found.in_flight, found.service_seconds, found.wait_seconds), (0.0, 0.0, 0.0));
        assert!(found.share > 0.1 && found.share < 0.9, "{found:?}");
    }
}

#[test]
fn constant_prefills_shorten_waits() {
    // M/G/1 (Pollaczek and Khinchine): a prefill of 3 s, then decode steps of 1 s in the mean.
    let service =
        Service { prefill_seconds: 3.0, step_seconds: vec![0.1], steps: 10.0, concurrency: 1, mains: 1 };
    let found = alive(&arrivals(0.2, 1.0, None), &service, 0.0);
    let square = 4.0 * 4.0 + 1.0;
    close(found.wait_seconds, 0.2 * square / (2.0 * (1.0 - 0.8)), 1e-9);
    close(found.service_seconds, 4.0, 1e-9);
}

#[test]
fn many_requests_keep_the_deployment_awake() {
    for (rate, idle) in [(50.0, 600.0), (1e6, 1e9), (1.0, 1e15)] {
        let found = alive(&arrivals(rate, 1.0, Some(idle)), &constant(0.5 / rate, 1000), 100.0);
        assert_eq!((found.share, found.wakes_per_second, found.cold_share), (1.0, 0.0, 0.0));
        close(found.in_flight, 0.5, 1e-9);
    }
}

#[test]
fn deployment_without_an_idle_window_never_sleeps() {
    let setting = Setting { idle_seconds: None, ..Setting::random(11) };
    let found = setting.alive();
    assert_eq!((found.share, found.wakes_per_second), (1.0, 0.0));
    assert_eq!((found.cold_share, found.cold_wait_seconds), (0.0, 0.0));
    assert!(found.in_flight > 0.0);
}

#[test]
fn overload_is_reported() {
    let full = alive(&arrivals(4.0, 1.0, Some(60.0)), &constant(2.0, 8), 10.0);
    assert!(full.saturated && full.wait_seconds.is_infinite());
    assert_eq!((full.share, full.utilisation, full.in_flight), (1.0, 1.0, 8.0));
    assert!(!alive(&arrivals(3.99, 1.0, Some(60.0)), &constant(2.0, 8), 10.0).saturated);
    let two = Service { mains: 2, ..constant(2.0, 8) };
    assert!(!alive(&arrivals(7.9, 1.0, Some(60.0)), &two, 10.0).saturated);
}

#[test]
fn deployment_without_requests_sleeps_if_it_has_an_idle_window() {
    let service = constant(2.0, 8);
    let recorded = Arrivals { recorded_seconds: Some(vec![3.0]), ..arrivals(1.0, 1.0, Some(5.0)) };
    for arrivals in [arrivals(0.0, 1.0, Some(5.0)), recorded] {
        let found = alive(&arrivals, &service, 10.0);
        assert_eq!((found.share, found.wakes_per_second, found.in_flight), (0.0, 0.0, 0.0));
        assert_eq!(found.service_seconds, 2.0);
        assert_eq!(alive(&Arrivals { idle_seconds: None, ..arrivals }, &service, 10.0).share, 1.0);
    }
}

#[test]
fn a_recording_is_replayed_exactly() {
    // Four requests, 20 s from one end to the next repetition: (15 - 0) * 4 / 3.
    let times = Some(vec![100.0, 101.0, 104.0, 115.0]);
    let recorded = Arrivals { recorded_seconds: times, ..arrivals(0.0, 1.0, Some(1.0)) };
    // Two slots of 4 s each. The first request starts at 0 and is ready at 2: two begin then and end at 6,
    // the third waits from 4 to 6 and ends at 10, asleep at 11. The fourth comes at 15: 17, 21, which is
    // 1 of the next repetition: its first two requests find it awake. They begin at 0 (two slots: one is
    // taken until 1) and 1 and end at 4 and 5, asleep at 9: the third runs from 4 to 8.
    let found = alive(&recorded, &constant(4.0, 2), 2.0);
    close(found.share, (9.0 + 5.0) / 20.0, 1e-12);
    close(found.wakes_per_second, 1.0 / 20.0, 1e-12);
    close(found.cold_share, 1.0 / 4.0, 1e-12);
    close(found.cold_wait_seconds, 2.0, 1e-12);
    close(found.service_seconds, 4.0, 1e-12);
    assert_eq!(found.wait_seconds, 0.0);
    // One slot: 0 to 4 is the wait for the one before, and so on.
    let one = Arrivals { idle_seconds: None, ..recorded };
    close(alive(&one, &constant(4.0, 1), 2.0).wait_seconds, (0.0 + 3.0 + 4.0 + 0.0) / 4.0, 1e-12);
}

#[test]
fn recorded_poisson_arrivals_match_random_ones() {
    let random = &mut SplitMix64::new(17);
    for (idle, mains) in [(20.0, 1), (60.0, 1), (20.0, 3)] {
        let rate = 0.05;
        let mut now = 0.0;
        let times = (0..200_000).map(|_| {
            now -= (1.0 - random.unit()).ln() / rate;
            now
        });
        let times = Some(times.collect());
        let service = Service {
            prefill_seconds: 0.5,
            step_seconds: (0..8).map(|more| 0.05 * (1.0 + 0.3 * f64::from(more))).collect(),
            steps: 100.0,
            concurrency: 8,
            mains,
        };
        let random = arrivals(rate, 1.0, Some(idle));
        let expected = alive(&random, &service, 15.0);
        let found = alive(&Arrivals { recorded_seconds: times, ..random }, &service, 15.0);
        assert!((found.share - expected.share).abs() < 0.005, "{found:?} {expected:?}");
        assert!((found.cold_share - expected.cold_share).abs() < 0.01, "{found:?} {expected:?}");
        close(found.cold_wait_seconds, expected.cold_wait_seconds, 0.01);
        close(found.wakes_per_second, expected.wakes_per_second, 0.02);
        // Recorded requests are of one length: those that begin together after a start end together.
        close(found.in_flight, expected.in_flight, 0.1);
        close(found.tpot_seconds, expected.tpot_seconds, 0.1);
    }
}

proptest! {
    #[test]
    fn more_of_anything_keeps_it_alive_longer(seed in 0_u64..1_000_000, factor in 1.0_f64..1.5) {
        let setting = Setting::random(seed);
        let before = setting.alive().share;
        let longer = |seconds: f64| seconds * factor;
        let more = [
            Setting { per_second: longer(setting.per_second), ..setting.clone() },
            Setting { prefill_seconds: longer(setting.prefill_seconds), ..setting.clone() },
            Setting { steps: longer(setting.steps), ..setting.clone() },
            Setting { idle_seconds: setting.idle_seconds.map(longer), ..setting.clone() },
            Setting { start_seconds: longer(setting.start_seconds), ..setting.clone() },
        ];
        for more in more {
            prop_assert!(more.alive().share >= before - 1e-9, "{setting:?}\n{more:?}");
        }
    }

    #[test]
    fn figures_are_numbers_whatever_the_sizes(
        (rate, burst, idle) in (-12.0_f64..8.0, 0.0_f64..3.0, -3.0_f64..9.0),
        (start, prefill, step) in (-3.0_f64..6.0, -9.0_f64..3.0, -9.0_f64..2.0),
        (steps, slots, mains) in (0_u32..5000, 1_u32..300, 1_u32..20),
    ) {
        let ten = |exponent: f64| 10_f64.powf(exponent);
        let service = Service {
            prefill_seconds: ten(prefill),
            step_seconds: (0..slots).map(|more| ten(step) * (1.0 + f64::from(more) / 50.0)).collect(),
            steps: f64::from(steps),
            concurrency: slots,
            mains,
        };
        let found = alive(&arrivals(ten(rate), ten(burst), Some(ten(idle))), &service, ten(start));
        prop_assert!((0.0..=1.0).contains(&found.share), "{found:?}");
        prop_assert!((0.0..=1.0).contains(&found.cold_share), "{found:?}");
        prop_assert!(found.cold_wait_seconds >= 0.0 && found.cold_wait_seconds <= ten(start) * (1.0 + 1e-9));
        prop_assert!(found.in_flight >= 0.0 && found.in_flight <= f64::from(slots) * (1.0 + 1e-9));
        prop_assert!(found.service_seconds >= 0.0 && found.tpot_seconds >= 0.0, "{found:?}");
        prop_assert!(found.saturated || found.wait_seconds.is_finite(), "{found:?}");
        prop_assert!(found.saturated == (found.utilisation >= 1.0));
    }
}
