//! Numbers of a plan for people.

use crate::cluster::api::{PlanNumbers, ShownNumbers};

/// What `kubectl get moeplans` shows of `numbers`.
pub(super) fn shown(numbers: &PlanNumbers) -> ShownNumbers {
    ShownNumbers {
        ttft: time(numbers.times.ttft_seconds),
        tpot: time(numbers.times.tpot_seconds),
        cost_of_million: format!("${}", three_digits(numbers.costs.total * 1e6)),
    }
}

/// `seconds` in the unit in which it is a number from 1 to 1000, from microseconds to seconds.
fn time(seconds: f64) -> String {
    let (unit, value) = match seconds {
        // What rounds up to the next unit is written in it.
        seconds if seconds < 999.5e-6 => ("us", seconds * 1e6),
        seconds if seconds < 999.5e-3 => ("ms", seconds * 1e3),
        seconds => ("s", seconds),
    };
    format!("{} {unit}", three_digits(value))
}

/// `value` rounded to three digits, as a plain decimal number.
fn three_digits(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    // Rounded first: 9.999 has one digit before the point, 10.0 has two.
    let rounded: f64 = format!("{value:.2e}").parse().unwrap_or(value);
    let magnitude = rounded.abs().log10().floor();
    let decimals = (2.0 - magnitude).clamp(0.0, 12.0) as usize;
    format!("{rounded:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::{three_digits, time};

    #[test]
    fn numbers_have_three_digits_and_times_the_unit_that_fits() {
        for (seconds, text) in [
            (0.0, "0 us"),
            (2.198_631_18e-6, "2.20 us"),
            (0.000_999_4, "999 us"),
            (0.000_999_7, "1.00 ms"),
            (0.037_830_182_4, "37.8 ms"),
            (0.9999, "1.00 s"),
            (9.996, "10.0 s"),
            (154.3, "154 s"),
            (12_345.0, "12300 s"),
        ] {
            assert_eq!(time(seconds), text);
        }
        for (value, text) in [(2.198_631_18, "2.20"), (0.021_986, "0.0220"), (999.7, "1000"), (0.0, "0")] {
            assert_eq!(three_digits(value), text);
        }
    }
}
