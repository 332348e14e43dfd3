//! Comparison of latencies under load with simulated engines and with known queueing results.

use crate::engine;
use crate::generate;

use engine::{Lengths, Setting, SimulatedFigures, observe, quantile, saturated_per_second};
use generate::{Sample, small_problem};
use remoe_planner::{
    Arrivals, Latency, Options, PlanDraft, Problem, Quantile, Remote, Service, evaluate, latency, solve,
};

/// Seconds of a decode step of one request.
const STEP: f64 = 0.02;
const STEPS: f64 = 64.0;

/// One cell of the table in the README.
#[derive(Debug, Clone, Copy)]
struct Cell {
    slots: usize,
    utilisation: f64,
    burst: f64,
    /// Prefill over all decode steps of a request that runs alone.
    prefill: f64,
    /// By how much a request more makes a step longer.
    slope: f64,
    variation: f64,
}

fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for slots in [1, 2, 4, 8, 16, 32, 64] {
        for utilisation in [0.1, 0.3, 0.5, 0.8] {
            for burst in [1.0, 2.0, 4.0] {
                for (prefill, slope) in [(5.0, 0.1), (0.8, 0.0), (0.8, 0.3), (0.06, 0.0), (0.06, 0.3)] {
                    for variation in [0.0, 1.0] {
                        cells.push(Cell { slots, utilisation, burst, prefill, slope, variation });
                    }
                }
            }
        }
    }
    cells
}

impl Cell {
    fn setting(&self) -> Setting {
        let steps = (0..self.slots).map(|more| STEP * (1.0 + self.slope * more as f64));
        let mut setting = Setting {
            per_second: 0.0,
            burst: self.burst,
            idle_seconds: None,
            start_seconds: 0.0,
            prefill_seconds: self.prefill * STEP * STEPS,
            prefill_variation: self.variation,
            step_seconds: steps.collect(),
            steps: STEPS,
            lengths: if self.variation > 0.0 { Lengths::Lognormal(self.variation) } else { Lengths::Fixed },
            slots: self.slots,
            mains: 1,
            target_itl: None,
        };
        setting.per_second = self.utilisation * saturated_per_second(&setting);
        setting
    }

    fn observed(&self, setting: &Setting) -> SimulatedFigures {
        // Long queues take many requests to be seen well.
        let requests = 20_000.0 * self.burst * if self.utilisation > 0.6 { 6.0 } else { 1.0 };
        observe(setting, requests as usize, 77)
    }
}

impl Setting {
    fn latency(&self) -> Latency {
        let variation = match self.lengths {
            Lengths::Lognormal(variation) => variation,
            Lengths::Fixed => 0.0,
            Lengths::Geometric => 1.0,
        };
        let arrivals = Arrivals {
            per_second: self.per_second,
            burst: self.burst,
            recorded_seconds: None,
            idle_seconds: self.idle_seconds,
            input_variation: self.prefill_variation,
            output_variation: variation,
        };
        let service = Service {
            prefill_seconds: self.prefill_seconds,
            step_seconds: self.step_seconds.clone(),
            steps: self.steps,
            concurrency: self.slots as u32,
            mains: self.mains as u32,
        };
        latency(&arrivals, &service, self.start_seconds, self.target_itl).unwrap()
    }
}

/// Relative errors of TTFT (mean, p50, p95, p99) and TPOT (mean, p95).
fn errors(found: &Latency, seen: &SimulatedFigures) -> [f64; 6] {
    let tpot = seen.tpot.iter().sum::<f64>() / seen.tpot.len() as f64;
    [
        found.ttft.mean / seen.mean_ttft(),
        found.ttft.p50 / quantile(&seen.ttft, 0.5),
        found.ttft.p95 / quantile(&seen.ttft, 0.95),
        found.ttft.p99 / quantile(&seen.ttft, 0.99),
        found.tpot.mean / tpot,
        found.tpot.p95 / quantile(&seen.tpot, 0.95),
    ]
    .map(|ratio| ratio - 1.0)
}

const FIGURES: [&str; 6] = ["ttft mean", "ttft p50", "ttft p95", "ttft p99", "tpot mean", "tpot p95"];

/// Prints the table of the README: the median and the largest error of each figure, and checks the largest ones.
#[test]
fn latency_matches_the_simulated_engine_at_each_load() {
    const MOST: [f64; 6] = [0.10, 0.25, 0.15, 0.35, 0.10, 0.25];
    let cells = cells();
    let sample = Sample::one_in(47);
    let tried = sample.of(0..cells.len() as u64).map(|index| cells[index as usize]);
    let mut found = Vec::new();
    for cell in tried {
        let setting = cell.setting();
        found.push((cell, errors(&setting.latency(), &cell.observed(&setting))));
    }
    let mut wrong = Vec::new();
    for (cell, errors) in &found {
        for ((error, most), name) in errors.iter().zip(MOST).zip(FIGURES) {
            if error.abs() > most {
                wrong.push(format!("{name} {error:+.3}: {cell:?}"));
            }
        }
    }
    for (name, of) in [
        ("constant, single", (|cell| cell.variation == 0.0 && cell.burst == 1.0) as fn(&Cell) -> bool),
        ("constant, bursts", |cell| cell.variation == 0.0 && cell.burst > 1.0),
        ("varying, single", |cell| cell.variation > 0.0 && cell.burst == 1.0),
        ("varying, bursts", |cell| cell.variation > 0.0 && cell.burst > 1.0),
        ("1 slot", |cell| cell.slots == 1),
        ("2 to 8 slots", |cell| (2..=8).contains(&cell.slots)),
        ("16 to 64 slots", |cell| cell.slots >= 16),
        ("utilisation 0.8", |cell| cell.utilisation == 0.8),
    ] {
        let these: Vec<&[f64; 6]> =
            found.iter().filter(|(cell, _)| of(cell)).map(|(_, errors)| errors).collect();
        if these.is_empty() {
            continue;
        }
        let figures = FIGURES.iter().enumerate().map(|(figure, name)| {
            let mut errors: Vec<f64> = these.iter().map(|errors| errors[figure].abs()).collect();
            errors.sort_by(f64::total_cmp);
            format!("{name} {:.3}, {:.3}", errors[errors.len() / 2], errors[errors.len() - 1])
        });
        println!("{name} ({}): {}", these.len(), figures.collect::<Vec<_>>().join(" | "));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn one_slot(load: f64, burst: f64) -> (Setting, f64) {
    let (prefill, alone) = (0.7, 0.7 + STEPS * STEP);
    let setting = Setting {
        per_second: load / alone,
        burst,
        idle_seconds: None,
        start_seconds: 0.0,
        prefill_seconds: prefill,
        prefill_variation: 0.0,
        step_seconds: vec![STEP],
        steps: STEPS,
        lengths: Lengths::Fixed,
        slots: 1,
        mains: 1,
        target_itl: None,
    };
    // Pollaczek and Khinchine, for bursts of geometric sizes.
    let wait = alone * (load / 2.0 + burst - 1.0) / (1.0 - load);
    (setting, prefill + wait)
}

#[test]
fn ttft_of_one_slot_matches_m_d_1() {
    for load in [0.1, 0.3, 0.5, 0.8, 0.95] {
        for burst in [1.0, 2.0, 4.0] {
            let (setting, expected) = one_slot(load, burst);
            let found = setting.latency().ttft;
            assert!((found.mean / expected - 1.0).abs() < 0.01, "{load} {burst}: {found:?} {expected}");
            assert!(found.p50 <= found.p95 && found.p95 <= found.p99, "{found:?}");
            assert!((setting.latency().tpot.p99 - STEP).abs() < 1e-9);
        }
    }
}

#[test]
fn latency_without_load_is_that_of_one_request() {
    let (setting, _) = one_slot(1e-6, 1.0);
    let found = setting.latency();
    assert!((found.ttft.p99 - setting.prefill_seconds).abs() < 1e-6, "{found:?}");
    let (never, _) = one_slot(0.0, 1.0);
    assert_eq!(never.latency().ttft.mean, setting.prefill_seconds);
}

#[test]
fn latency_is_none_under_overload() {
    let (setting, _) = one_slot(1.0, 1.0);
    let arrivals = Arrivals {
        per_second: setting.per_second,
        burst: 1.0,
        recorded_seconds: None,
        idle_seconds: None,
        input_variation: 0.0,
        output_variation: 0.0,
    };
    let service = Service {
        prefill_seconds: setting.prefill_seconds,
        step_seconds: vec![STEP],
        steps: STEPS,
        concurrency: 1,
        mains: 1,
    };
    assert_eq!(latency(&arrivals, &service, 0.0, None), None);
}

/// Cold starts, two main functions and a stated target.
#[test]
fn latency_with_sleep_and_mains_matches_the_simulated_engine() {
    for (seed, (utilisation, target_itl)) in
        [(0.05, None), (0.2, Some(0.2)), (0.5, Some(0.03))].into_iter().enumerate()
    {
        let slots = 4;
        let mut setting = Setting {
            slots,
            mains: 2,
            step_seconds: (0..slots).map(|more| STEP * (1.0 + 0.1 * more as f64)).collect(),
            target_itl,
            start_seconds: 5.0,
            ..one_slot(0.5, 2.0).0
        };
        setting.per_second = utilisation * saturated_per_second(&setting);
        setting.idle_seconds = Some(0.7 * setting.burst / setting.per_second);
        let (found, seen) = (setting.latency(), observe(&setting, 200_000, seed as u64));
        let errors = errors(&found, &seen);
        let all = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let with_starts = found.ttft_with_starts.mean / all(&seen.ttft_with_starts) - 1.0;
        assert!(errors[0].abs() < 0.10 && errors[2].abs() < 0.15, "{utilisation}: {errors:?}");
        assert!(
            errors[4].abs() < 0.10 && with_starts.abs() < 0.10,
            "{utilisation}: {errors:?} {with_starts}"
        );
        assert!(seen.cold_share > 0.01, "{}", seen.cold_share);
    }
}

/// For rare and frequent, short and long requests, latencies are finite and their computation ends.
#[test]
fn latency_is_finite_for_extreme_sizes() {
    let ten = |exponent: i32| 10_f64.powi(exponent);
    for prefill in [-9, -3, 0, 6] {
        for step in [-12, -6, 0, 4] {
            for (load, burst, variation) in [(0.01, 1.0, 0.0), (0.9, 50.0, 3.0), (0.5, 65_536.0, 10.0)] {
                let mut setting = Setting {
                    prefill_seconds: ten(prefill),
                    prefill_variation: variation,
                    step_seconds: vec![ten(step); 8],
                    slots: 8,
                    burst,
                    target_itl: (variation > 0.0).then_some(1.0),
                    ..one_slot(0.5, 1.0).0
                };
                setting.per_second = load / (ten(prefill) + STEPS * ten(step)) / 4.0;
                let found = setting.latency();
                assert!(
                    found.ttft.mean.is_finite() && found.ttft.p99 >= found.ttft.p50,
                    "{setting:?} {found:?}"
                );
                assert!(found.tpot.mean >= 0.0 && found.tpot.p99.is_finite(), "{setting:?} {found:?}");
            }
        }
    }
}

#[test]
fn limit_of_a_quantile_can_fail_while_the_mean_keeps_it() {
    let mut tried = 0;
    for seed in 0..40 {
        let mut problem = small_problem(seed, 1);
        (problem.slo.ttft_seconds, problem.slo.tpot_seconds) = (1e3, 1e3);
        problem.request.concurrency = 4;
        let options = Options { remote: Remote::Never, ..Options::default() };
        let Ok(alone) = solve(&problem, None, &options) else { continue };
        let plan = PlanDraft::from(&alone.plan);
        let seconds = alone.evaluation.prefill_seconds + alone.evaluation.decode_seconds;
        problem.arrivals = Some(Arrivals {
            per_second: 0.5 / seconds,
            burst: 1.0,
            recorded_seconds: None,
            idle_seconds: None,
            input_variation: 0.0,
            output_variation: 0.0,
        });
        let late = |problem: &Problem| {
            let found = evaluate(problem, &plan, false).unwrap();
            let ttft = found.violations.iter().find(|violation| violation.limit == "ttft");
            (found.life.unwrap().latency.unwrap().ttft, ttft.map(|violation| violation.value))
        };
        let (ttft, _) = late(&problem);
        problem.slo.ttft_seconds = (ttft.mean + ttft.p95) / 2.0;
        if ttft.p95 < 1.05 * ttft.mean {
            continue;
        }
        tried += 1;
        assert_eq!(late(&problem), (ttft, None), "{seed}");
        problem.slo.quantile = Some(Quantile::P95);
        assert_eq!(late(&problem), (ttft, Some(ttft.p95)), "{seed}");
        problem.slo.quantile = Some(Quantile::P50);
        assert_eq!(late(&problem), (ttft, None), "{seed}");
    }
    assert!(tried >= 5, "{tried}");
}
