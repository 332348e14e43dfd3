//! Problems with one wrong figure.

use crate::generate::{BEYOND, beyond, small_problem};
use remoe_planner::{Truth, WrongFigure};

#[test]
fn wrong_problems_are_problems_that_differ() {
    for seed in 0..60 {
        let mut problem = beyond(&small_problem(seed, 2), BEYOND[(seed % 4) as usize].1);
        if seed % 3 == 0 {
            problem.prediction_p95 = None;
        }
        for figure in WrongFigure::ALL {
            for truth in Truth::ALL {
                let Some(wrong) = figure.of(&problem, truth) else {
                    let life = problem.arrivals.as_ref();
                    let sleeps = life.is_some_and(|arrivals| arrivals.idle_seconds.is_some());
                    assert!(
                        figure == WrongFigure::Starts && !sleeps
                            || figure == WrongFigure::ArrivalRate && life.is_none(),
                        "{figure:?} {seed}"
                    );
                    continue;
                };
                wrong.check().unwrap_or_else(|error| panic!("{figure:?} {truth:?} {seed}: {error}"));
                assert_ne!(wrong, problem, "{figure:?} {truth:?} {seed}");
            }
        }
    }
}
