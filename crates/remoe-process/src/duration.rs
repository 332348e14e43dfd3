//! Parses and formats durations: `150ms`, `10s`, `1m30s`, `2h`. Flags, request fields and resources share one
//! grammar.

use std::ops::RangeInclusive;
use std::time::Duration;

/// Invalid duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DurationError {
    /// Not a sequence of numbers with units.
    #[error(
        "invalid duration {text:?}: expected numbers with units ms, s, m or h, such as 150ms, 10s or 1m30s"
    )]
    Form {
        /// Beginning of the text.
        text: String,
    },
    /// Number without a unit.
    #[error(
        "invalid duration {text:?}: missing unit of {number}; write {number}ms, {number}s, {number}m or {number}h"
    )]
    Unit {
        /// Beginning of the text.
        text: String,
        /// Beginning of the number.
        number: String,
    },
    /// Out of range.
    #[error("invalid duration {text:?}: expected {least} to {most}")]
    Range {
        /// Beginning of the text.
        text: String,
        /// Shortest valid duration.
        least: String,
        /// Longest valid duration.
        most: String,
    },
    /// Fraction where only whole units are valid.
    #[error("invalid duration {text:?}: expected a whole number of {unit}")]
    Whole {
        /// Beginning of the text.
        text: String,
        /// Unit, in the plural.
        unit: &'static str,
    },
}

/// Units with their nanoseconds. The documented ones are ms, s, m and h; the others are those of Kubernetes.
const UNITS: [(&str, u128); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("\u{b5}s", 1_000),
    ("\u{3bc}s", 1_000),
    ("ms", 1_000_000),
    ("s", NANOS),
    ("m", 60 * NANOS),
    ("h", 3_600 * NANOS),
];

/// Nanoseconds of a second.
const NANOS: u128 = 1_000_000_000;

/// Maximum duration in nanoseconds: that of Kubernetes, 292 years.
const MAX_NANOS: u128 = i64::MAX as u128;

/// Significant digits of a fraction. Further ones are less than a nanosecond of an hour.
const MAX_FRACTION_DIGITS: usize = 18;

/// Parses a duration above 0: numbers with optional fractions, each followed by a unit.
///
/// The grammar is that of `metav1.Duration` without negative durations, so that flags and resource fields accept the
/// same text.
///
/// # Errors
/// The form is invalid, a unit is missing, or the duration is 0 or above 292 years.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    let duration = parse(text)?;
    if duration.is_zero() {
        return Err(out_of_range(text, nanoseconds(1), nanoseconds(MAX_NANOS)));
    }
    Ok(duration)
}

/// Parses a duration above 0 of a flag that also accepts seconds without a unit.
///
/// # Errors
/// See [`parse_duration`].
pub fn parse_duration_or_seconds(text: &str) -> Result<Duration, DurationError> {
    let is_number = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_digit() || c == '.');
    match text.trim() {
        number if is_number(number) => parse_duration(&format!("{number}s")),
        text => parse_duration(text),
    }
}

/// Returns an argument parser for whole seconds within `range`: a duration, or a number without a unit.
pub fn whole_seconds<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, DurationError> + Clone + Send + Sync + 'static {
    move |text| whole(text, ("s", "seconds"), &range)
}

/// Returns an argument parser for whole microseconds within `range`: a duration, or a number without a unit.
pub fn whole_microseconds<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, DurationError> + Clone + Send + Sync + 'static {
    move |text| whole(text, ("us", "microseconds"), &range)
}

/// Formats `duration` in the largest units, as [`parse_duration`] accepts it, such as `1h30m` or `1.5s`.
pub fn format_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let whole = [(seconds / 3600, "h"), (seconds / 60 % 60, "m")].into_iter().filter(|(count, _)| *count > 0);
    let mut text: String = whole.map(|(count, unit)| format!("{count}{unit}")).collect();
    let rest = u128::from(seconds % 60) * NANOS + u128::from(duration.subsec_nanos());
    if rest == 0 {
        return if text.is_empty() { "0s".to_owned() } else { text };
    }
    let (unit, nanos) = match rest {
        NANOS.. => ("s", NANOS),
        1_000_000.. => ("ms", 1_000_000),
        1_000.. => ("us", 1_000),
        _ => ("ns", 1),
    };
    text += &(rest / nanos).to_string();
    let digits = nanos.ilog10() as usize;
    let fraction = format!("{:0digits$}", rest % nanos);
    let fraction = fraction.trim_end_matches('0');
    if !fraction.is_empty() {
        text = text + "." + fraction;
    }
    text + unit
}

fn whole<T: TryFrom<u64>>(
    text: &str,
    (unit, units): (&str, &'static str),
    range: &RangeInclusive<u64>,
) -> Result<T, DurationError> {
    let unit_nanos = UNITS.iter().find(|(name, _)| *name == unit).map_or(1, |(_, nanos)| *nanos);
    let shown = |count: u64| nanoseconds(u128::from(count).saturating_mul(unit_nanos).min(MAX_NANOS));
    let outside = || out_of_range(text, shown(*range.start()), shown(*range.end()));
    let number = text.trim();
    let count = if !number.is_empty() && number.chars().all(|c| c.is_ascii_digit()) {
        number.parse().map_err(|_| outside())?
    } else {
        let nanos = parse(text)?.as_nanos();
        if nanos % unit_nanos != 0 {
            return Err(DurationError::Whole { text: shortened(text), unit: units });
        }
        u64::try_from(nanos / unit_nanos).map_err(|_| outside())?
    };
    let count = Some(count).filter(|count| range.contains(count)).ok_or_else(outside)?;
    T::try_from(count).map_err(|_| outside())
}

/// Parses a duration, which may be 0.
fn parse(text: &str) -> Result<Duration, DurationError> {
    let form = || DurationError::Form { text: shortened(text) };
    let longer = || out_of_range(text, nanoseconds(1), nanoseconds(MAX_NANOS));
    let is_number = |c: char| c.is_ascii_digit() || c == '.';
    let trimmed = text.trim();
    let mut rest = trimmed.strip_prefix('+').unwrap_or(trimmed);
    if rest.is_empty() {
        return Err(form());
    }
    let mut nanos = 0_u128;
    while !rest.is_empty() {
        let (number, rest_after) = rest.split_at(rest.find(|c| !is_number(c)).unwrap_or(rest.len()));
        let (unit, rest_after) = rest_after.split_at(rest_after.find(is_number).unwrap_or(rest_after.len()));
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(form());
        }
        if unit.is_empty() {
            return Err(DurationError::Unit {
                text: shortened(text),
                number: number.chars().take(20).collect(),
            });
        }
        let &(_, factor) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(form)?;
        let fraction = &fraction[..fraction.len().min(MAX_FRACTION_DIGITS)];
        let digits = |text: &str| if text.is_empty() { Ok(0) } else { text.parse::<u128>() };
        let whole = digits(whole).map_err(|_| longer())?;
        let part = digits(fraction).map_err(|_| form())? * factor / 10_u128.pow(fraction.len() as u32);
        let added = whole.checked_mul(factor).and_then(|whole| whole.checked_add(part)?.checked_add(nanos));
        nanos = added.filter(|nanos| *nanos <= MAX_NANOS).ok_or_else(longer)?;
        rest = rest_after;
    }
    Ok(nanoseconds(nanos))
}

fn out_of_range(text: &str, least: Duration, most: Duration) -> DurationError {
    let most = if most == nanoseconds(MAX_NANOS) { "292 years".to_owned() } else { format_duration(most) };
    DurationError::Range { text: shortened(text), least: format_duration(least), most }
}

/// Returns the duration of `nanos` nanoseconds, at most [`MAX_NANOS`].
fn nanoseconds(nanos: u128) -> Duration {
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn durations_have_units() {
        for (text, ms) in [
            ("150ms", 150),
            ("10s", 10_000),
            ("1.5s", 1500),
            ("1m30s", 90_000),
            ("2h", 7_200_000),
            ("1h0m0.25s", 3_600_250),
            (" 5m ", 300_000),
            ("30s1m", 90_000),
            ("+.5s", 500),
            ("5.s", 5000),
            ("2000\u{b5}s", 2),
            ("2000us", 2),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
    }

    #[test]
    fn invalid_durations_are_refused_with_the_remedy() {
        for text in
            ["", "+", "-1s", "s", ".s", "1d", "1.2.3s", "1e3s", "1 s", "NaNs", "infs", "1S", "++1s", "1s-2s"]
        {
            assert!(matches!(parse_duration(text), Err(DurationError::Form { .. })), "{text}");
        }
        for (text, remedy) in [("10", "write 10ms, 10s, 10m or 10h"), ("1m30", "missing unit of 30; write")] {
            let error = parse_duration(text).unwrap_err().to_string();
            assert!(error.contains(remedy) && error.contains(text), "{error}");
        }
        for text in ["0s", "0h0m", "0.1ns", "2562048h", &format!("{}s", "9".repeat(100))] {
            assert!(matches!(parse_duration(text), Err(DurationError::Range { .. })), "{text}");
        }
        assert!(parse_duration(&"9".repeat(1000)).unwrap_err().to_string().len() < 250);
    }

    #[test]
    fn seconds_may_lack_a_unit_where_the_flag_allows_it() {
        for (text, ms) in [("120", 120_000), ("120s", 120_000), ("2m", 120_000), ("0.5", 500)] {
            assert_eq!(parse_duration_or_seconds(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "0", "soon", "1m30", "1.2.3", "-1", "1e3"] {
            assert!(parse_duration_or_seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn whole_units_are_within_the_range() {
        let seconds = whole_seconds::<u16>(1..=3600);
        for (text, expected) in [("15", 15), ("15s", 15), ("1m30s", 90), ("1h", 3600), ("2000ms", 2)] {
            assert_eq!(seconds(text), Ok(expected), "{text}");
        }
        for (text, reason) in [
            ("0", "expected 1s to 1h"),
            ("3601", "expected 1s to 1h"),
            ("2h", "expected 1s to 1h"),
            ("99999999999999999999", "expected 1s to 1h"),
            ("1.5s", "whole number of seconds"),
            ("1.5", "missing unit"),
            ("soon", "expected numbers with units"),
        ] {
            let error = seconds(text).unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains(text), "{error}");
        }
        let microseconds = whole_microseconds::<u64>(0..=1_000_000);
        assert_eq!(
            ["0", "100", "0s", "100us", "1ms"].map(|text| microseconds(text).unwrap()),
            [0, 100, 0, 100, 1000]
        );
        assert!(microseconds("2s").unwrap_err().to_string().contains("expected 0s to 1s"));
        assert!(whole_seconds::<u8>(0..=u64::MAX)("1h").is_err());
    }

    #[test]
    fn durations_are_shown_in_the_largest_units() {
        for (nanos, shown) in [
            (0, "0s"),
            (1, "1ns"),
            (1_500, "1.5us"),
            (200_000_000, "200ms"),
            (1_500_000_000, "1.5s"),
            (45_000_000_000, "45s"),
            (90_000_000_000, "1m30s"),
            (600_000_000_000, "10m"),
            (5_400_000_000_000, "1h30m"),
            (86_400_000_000_000, "24h"),
            (3_600_000_000_001, "1h1ns"),
        ] {
            assert_eq!(format_duration(Duration::from_nanos(nanos)), shown);
        }
    }

    proptest! {
        #[test]
        fn shown_durations_parse_to_what_they_were(nanos in 1..=i64::MAX as u64, scale in 0..18_u32) {
            let duration = Duration::from_nanos((nanos / 10_u64.pow(scale)).max(1));
            prop_assert_eq!(parse_duration(&format_duration(duration)), Ok(duration));
        }

        #[test]
        fn parts_add_up(hours in 0..2_000_000_u64, minutes in 0..100_000_u64, milliseconds in 1..100_000_000_u64) {
            let text = format!("{hours}h{minutes}m{}.{:03}s", milliseconds / 1000, milliseconds % 1000);
            let expected = Duration::from_secs(hours * 3600 + minutes * 60) + Duration::from_millis(milliseconds);
            prop_assert_eq!(parse_duration(&text), Ok(expected));
        }

        #[test]
        fn any_text_is_parsed_or_refused_by_name(text in "\\PC{0,40}|[0-9.a-z+]{0,40}|([0-9.]{1,30}(ms|s|m|h|us|ns)?){1,4}") {
            match parse_duration(&text) {
                Ok(duration) => {
                    prop_assert!(!duration.is_zero() && duration.as_nanos() <= MAX_NANOS);
                    prop_assert_eq!(parse_duration(&format_duration(duration)), Ok(duration));
                }
                Err(error) => {
                    let named = error.to_string().contains(&format!("{:?}", shortened(&text)));
                    prop_assert!(named, "{}", error);
                }
            }
        }

        #[test]
        fn numbers_without_units_are_refused(number in "[0-9]{1,25}(\\.[0-9]{1,25})?") {
            let is_refused = matches!(parse_duration(&number), Err(DurationError::Unit { .. }));
            prop_assert!(is_refused);
        }
    }
}
