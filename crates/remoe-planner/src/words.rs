//! Names of limits and amounts with units, for reports and errors.

/// Returns the description of a limit, given its name in [`crate::Violation`].
#[must_use]
pub fn limit_name(limit: &str) -> String {
    let name = limit.trim_end_matches(|c: char| c.is_ascii_digit());
    let layer = &limit[name.len()..];
    match name {
        "ttft" => "time to first token".to_owned(),
        "tpot" => "time per output token".to_owned(),
        "groups" => "number of groups".to_owned(),
        "load" => "utilisation of the main functions".to_owned(),
        "cold_ttft" => "time to first token of a cold request".to_owned(),
        "cold_share" => "share of cold requests".to_owned(),
        "mains" => "number of main functions".to_owned(),
        "mem_group" => format!("memory of group-{layer}"),
        "payload_group" => format!("payload of group-{layer}"),
        "z_group" => format!("replicas of group-{layer}"),
        "spec_group" => format!("memory of group-{layer} (not an allowed size)"),
        "vcpus_group" => format!("vCPUs of group-{layer} (not an allowed number)"),
        "vcpus_main" => "vCPUs of the main function (not an allowed number)".to_owned(),
        "gpu" => "GPU memory".to_owned(),
        "main" => "memory of the main function".to_owned(),
        "mem" => format!("memory of layer {layer}'s remote function"),
        "payload" => format!("payload of layer {layer}"),
        "z" => format!("replicas of layer {layer}"),
        "spec_main" => "memory of the main function (not an allowed size)".to_owned(),
        "spec" => format!("memory of layer {layer}'s remote function (not an allowed size)"),
        _ => limit.to_owned(),
    }
}

/// Formats `value` of a limit with its unit, to three significant digits.
#[must_use]
pub fn amount(limit: &str, value: f64) -> String {
    amount_to(limit, value, THREE_DIGITS)
}

/// Formats a value and the limit that it breaks with as many digits as tell them distinct_amounts, at most eight.
#[must_use]
pub(crate) fn distinct_amounts(limit: &str, value: f64, allowed: f64) -> (String, String) {
    let both = |more: usize| {
        (amount_to(limit, value, THREE_DIGITS + more), amount_to(limit, allowed, THREE_DIGITS + more))
    };
    (0..MAX_FURTHER_DIGITS).map(both).find(|(value, allowed)| value != allowed).unwrap_or_else(|| both(0))
}

const THREE_DIGITS: usize = 3;
const MAX_FURTHER_DIGITS: usize = 6;

fn amount_to(limit: &str, value: f64, figures: usize) -> String {
    match limit.trim_end_matches(|c: char| c.is_ascii_digit()) {
        "ttft" | "tpot" | "cold_ttft" => seconds_to(value, figures),
        "load" | "cold_share" => format!("{} %", digits(100.0 * value, figures)),
        "z" | "groups" | "mains" | "z_group" | "vcpus_group" | "vcpus_main" => value.to_string(),
        _ => bytes(value, figures),
    }
}

/// Formats seconds as `us`, `ms` or `s`, to three significant digits.
#[must_use]
pub fn seconds(value: f64) -> String {
    seconds_to(value, THREE_DIGITS)
}

fn seconds_to(value: f64, figures: usize) -> String {
    let (scaled, unit) = match value {
        short if short < 1e-3 => (short * 1e6, "us"),
        short if short < 1.0 => (short * 1e3, "ms"),
        long => (long, "s"),
    };
    format!("{} {unit}", digits(scaled, figures))
}

/// Formats dollars: whole from 1000 on, with cents from 1 on, with three significant digits below, so that no amount other
/// than 0 is shown as 0.
#[must_use]
pub fn dollars(value: f64) -> String {
    let (sign, size) = (if value < 0.0 { "-" } else { "" }, value.abs());
    // 0.9995 is 1.00 to three digits.
    let decimals = match size {
        0.0 => return "$0".to_owned(),
        large if large >= 999.995 => 0,
        middle if middle >= 0.9995 => 2,
        tiny if tiny < 1e-9 => return format!("{sign}${size:.2e}"),
        small => (2.0 - small.log10().floor()) as usize,
    };
    format!("{sign}${size:.decimals$}")
}

/// Formats bytes as `B`, `kB`, `MB`, `GB` or `TB`.
fn bytes(value: f64, figures: usize) -> String {
    let units = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    let (unit, name) = units.into_iter().find(|(unit, _)| value >= *unit).unwrap_or((1.0, "B"));
    format!("{} {name}", digits(value / unit, figures))
}

/// Formats `value` with `figures` significant digits, at least three, without trailing zeros.
fn digits(value: f64, figures: usize) -> String {
    let further = figures - THREE_DIGITS;
    let decimals = further
        + match value.abs() {
            large if large >= 99.95 => 0,
            middle if middle >= 9.995 => 1,
            _ => 2,
        };
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Rounds `value` up to three significant digits.
#[must_use]
pub fn rounded_up(value: f64) -> f64 {
    if value <= 0.0 || !value.is_finite() {
        return value;
    }
    let unit = 10_f64.powi(value.log10().floor() as i32 - 2);
    // The slack keeps values that have three digits already, despite rounding of the division.
    (value / unit - 1e-9).ceil() * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_have_units_and_three_digits() {
        let shown = [1e-4, 0.001_234_5, 0.3, 2.0, 12.345, 5e-7].map(seconds);
        assert_eq!(shown, ["100 us", "1.23 ms", "300 ms", "2 s", "12.3 s", "0.5 us"]);
        assert_eq!(amount("main", 5_271_400_000.0), "5.27 GB");
        assert_eq!((amount("z3", 4.0), amount("mem12", 999.0)), ("4".to_owned(), "999 B".to_owned()));
    }

    #[test]
    fn value_above_limit_never_reads_like_the_limit() {
        assert_eq!(distinct_amounts("tpot", 0.250, 0.2), ("250 ms".to_owned(), "200 ms".to_owned()));
        assert_eq!(distinct_amounts("tpot", 0.200_04, 0.2), ("200.04 ms".to_owned(), "200 ms".to_owned()));
        assert_eq!(distinct_amounts("memory", 95.004e9, 95e9), ("95.004 GB".to_owned(), "95 GB".to_owned()));
    }

    #[test]
    fn dollars_have_three_digits_and_are_never_shown_as_nothing() {
        for (value, text) in [
            (0.0, "$0"),
            (5042.4, "$5042"),
            (999.999, "$1000"),
            (165.0, "$165.00"),
            (12.704, "$12.70"),
            (1.0, "$1.00"),
            (0.9996, "$1.00"),
            (0.25, "$0.250"),
            (0.04456, "$0.0446"),
            (0.001_234_5, "$0.00123"),
            (4.47e-6, "$0.00000447"),
            (6.52e-7, "$0.000000652"),
            (3.456e-10, "$3.46e-10"),
            (-0.5, "-$0.500"),
            (-2.5, "-$2.50"),
        ] {
            assert_eq!(dollars(value), text);
        }
    }

    #[test]
    fn rounding_up_never_falls_below() {
        for value in [1e-4, 0.001_234_5, 0.3, 1.0, 9.999, 12_345.6, 1e9] {
            let rounded = rounded_up(value);
            assert!(rounded >= value * (1.0 - 1e-9) && rounded <= value * 1.011, "{value} {rounded}");
        }
    }

    #[test]
    fn limits_are_named_with_their_layer() {
        assert_eq!(limit_name("mem12"), "memory of layer 12's remote function");
        assert_eq!(limit_name("mem_group3"), "memory of group-3");
        assert_eq!(limit_name("ttft"), "time to first token");
    }
}
