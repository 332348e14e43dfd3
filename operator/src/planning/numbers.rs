//! Numbers of a plan, for programs and for people.

use remoe_api::{PerBaseline, PlanCosts, PlanNumbers, PlanTimes, ShownNumbers};
use remoe_planner::{Baseline, PlanningResult};

/// Returns the numbers that `answer` expects of the typical request.
pub(super) fn numbers(answer: &PlanningResult) -> PlanNumbers {
    let evaluation = &answer.evaluation;
    let cost = |baseline: &Option<Baseline>| baseline.as_ref().map(|baseline| rounded(baseline.total_cost));
    let baselines = &answer.baselines;
    let saving = &answer.explanation.saving;
    PlanNumbers {
        times: PlanTimes {
            ttft_seconds: rounded(evaluation.ttft_seconds),
            tpot_seconds: rounded(evaluation.tpot_seconds),
            prefill_seconds: rounded(evaluation.prefill_seconds),
            decode_seconds: rounded(evaluation.decode_seconds),
        },
        costs: PlanCosts {
            main: rounded(evaluation.main_cost),
            remote: rounded(evaluation.remote_cost),
            total: rounded(evaluation.total_cost),
        },
        baselines: PerBaseline {
            mix: cost(&baselines.mix),
            cpu: cost(&baselines.cpu),
            gpu: cost(&baselines.gpu),
            fetch: cost(&baselines.fetch),
        },
        savings: PerBaseline {
            mix: saving.mix.map(rounded),
            cpu: saving.cpu.map(rounded),
            gpu: saving.gpu.map(rounded),
            fetch: saving.fetch.map(rounded),
        },
    }
}

/// To nine significant digits: more than any figure here is worth, and few enough to be the same number
/// after it was written and read by others.
pub(super) fn rounded(value: f64) -> f64 {
    format!("{value:.8e}").parse().unwrap_or(value)
}

/// Returns the columns of `kubectl get moeplans` for `numbers`, and for a plan whose remote experts are in functions of
/// so many layers or groups.
pub(super) fn shown(numbers: &PlanNumbers, layers: usize, groups: usize) -> ShownNumbers {
    let remote = match (layers, groups) {
        (0, 0) => "none".to_owned(),
        (layers, 0) => counted(layers, "layer"),
        (_, groups) => counted(groups, "group"),
    };
    ShownNumbers {
        ttft: time(numbers.times.ttft_seconds),
        tpot: time(numbers.times.tpot_seconds),
        cost_of_million: format!("${}", three_digits(numbers.costs.total * 1e6)),
        remote: Some(remote),
    }
}

/// Returns `count` and `what`, such as 1 group or 2 groups.
pub(crate) fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
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
pub(crate) fn three_digits(value: f64) -> String {
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
