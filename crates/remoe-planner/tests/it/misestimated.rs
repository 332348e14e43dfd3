//! Problems with one misestimated input.

use crate::generate::{BEYOND, beyond, small_problem};
use remoe_planner::{ErrorDirection, MisestimatedInput};

#[test]
fn misestimated_problems_are_valid_and_differ() {
    for seed in 0..60 {
        let mut problem = beyond(&small_problem(seed, 2), BEYOND[(seed % 4) as usize].1);
        if seed % 3 == 0 {
            problem.prediction_p95 = None;
        }
        for input in MisestimatedInput::ALL {
            for direction in ErrorDirection::ALL {
                let Some(actual) = input.apply(&problem, direction) else {
                    let life = problem.arrivals.as_ref();
                    let sleeps = life.is_some_and(|arrivals| arrivals.idle_seconds.is_some());
                    assert!(
                        input == MisestimatedInput::Starts && !sleeps
                            || input == MisestimatedInput::ArrivalRate && life.is_none(),
                        "{input:?} {seed}"
                    );
                    continue;
                };
                actual.check().unwrap_or_else(|error| panic!("{input:?} {direction:?} {seed}: {error}"));
                assert_ne!(actual, problem, "{input:?} {direction:?} {seed}");
            }
        }
    }
}
