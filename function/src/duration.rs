//! Durations as people write them: `150ms`, `10s`, `1m30s`, `2h`.

use std::time::Duration;

/// A text that is no duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid duration {text:?}: expected numbers with units ms, s, m or h, such as 150ms, 10s or 1m30s")]
pub struct DurationError {
    text: String,
}

/// Units with their seconds; what another ends with comes after that.
const UNITS: [(&str, f64); 4] = [("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];

/// The longest duration that is taken, in seconds: some thirty years.
const MOST: f64 = 1e9;

/// Reads a duration above 0: numbers, which may have a fraction, each with its unit, largest unit first.
///
/// # Errors
/// Anything else.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    let wrong = || DurationError { text: text.chars().take(64).collect() };
    let (mut rest, mut seconds, mut largest) = (text.trim(), 0.0, f64::INFINITY);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
        let number: f64 = rest[..digits].parse().map_err(|_| wrong())?;
        let letters = rest[digits..].find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len() - digits);
        let unit = &rest[digits..digits + letters];
        let &(_, factor) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
        if factor >= largest {
            return Err(wrong());
        }
        (largest, seconds, rest) = (factor, seconds + number * factor, &rest[digits + letters..]);
    }
    if seconds > 0.0 && seconds <= MOST { Ok(Duration::from_secs_f64(seconds)) } else { Err(wrong()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

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
        ] {
            assert_eq!(parse_duration(text).unwrap(), Duration::from_millis(ms), "{text}");
        }
        for text in [
            "",
            "10",
            "0s",
            "-1s",
            "s",
            "1s1m",
            "1s1s",
            "1d",
            "1.2.3s",
            "1e3s",
            "1 s",
            "NaNs",
            "9999999999s",
            "1µs",
        ] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        assert!(parse_duration(&"9".repeat(1000)).unwrap_err().to_string().len() < 200);
    }
}
