//! Formats the numbers of a plan.

use remoe_api::{PerBaseline, PlanCosts, PlanNumbers, PlanTimes, ShownNumbers};
use remoe_planner::{Baseline, PlanningResult};

/// Returns the numbers that `result` expects for the typical request.
pub(super) fn numbers(result: &PlanningResult) -> PlanNumbers {
    let evaluation = &result.evaluation;
    let cost = |baseline: &Option<Baseline>| baseline.as_ref().map(|baseline| rounded(baseline.total_cost));
    let baselines = &result.baselines;
    let saving = &result.explanation.saving;
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

/// Rounds to nine significant digits: more than the figures' precision, and few enough to survive a round trip
/// through JSON.
pub(super) fn rounded(value: f64) -> f64 {
    format!("{value:.8e}").parse().unwrap_or(value)
}

/// Returns the columns of `kubectl get moeplans`, for a plan with this number of remote layers or groups.
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

/// Formats a count with a noun: "1 group", "2 groups".
pub(crate) fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// Formats `seconds` in us, ms or s, so that the number is between 1 and 1000.
fn time(seconds: f64) -> String {
    let (unit, value) = match seconds {
        // A value that rounds up to the next unit uses that unit.
        seconds if seconds < 999.5e-6 => ("us", seconds * 1e6),
        seconds if seconds < 999.5e-3 => ("ms", seconds * 1e3),
        seconds => ("s", seconds),
    };
    format!("{} {unit}", three_digits(value))
}

/// Rounds `value` to three significant digits, as a plain decimal number.
pub(crate) fn three_digits(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    // Rounding comes first: 9.999 becomes 10.0, which has two digits before the point.
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
