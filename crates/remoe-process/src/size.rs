//! Parses sizes in bytes.

use std::ops::RangeInclusive;

/// Units of sizes with their bytes: decimal ones, as for disks and prices, and binary ones, as for memory.
const UNITS: [(&str, u64); 9] = [
    ("B", 1),
    ("kB", 1000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

/// Invalid size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Invalid form.
    #[error("expected a size such as 500MB, 2GiB or plain bytes")]
    Form,
    /// Unknown unit.
    #[error("expected the unit kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)")]
    Unit,
    /// Out of range.
    #[error("expected {least} to {most} bytes")]
    Range {
        /// Minimum.
        least: u64,
        /// Maximum.
        most: u64,
    },
}

const OUT_OF_RANGE: SizeError = SizeError::Range { least: 0, most: u64::MAX };

/// Parses a size such as `500MB`, `1.5GiB`, `2 kB` or plain bytes. Units are case-insensitive; fractions of a byte
/// are dropped.
///
/// # Errors
/// The form or unit is invalid, or the size exceeds 64 bits.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.trim_start();
    let factor = match unit {
        "" => 1,
        _ => {
            let named = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
            named.map(|(_, bytes)| *bytes).ok_or(if number.is_empty() {
                SizeError::Form
            } else {
                SizeError::Unit
            })?
        }
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let is_plain = unit.is_empty() || factor == 1;
    // More than 18 fractional digits are meaningless, and so are fractions of a byte.
    if whole.is_empty() || fraction.is_empty() || fraction.len() > 18 || (is_plain && number.contains('.')) {
        return Err(SizeError::Form);
    }
    let whole: u128 = whole.parse().map_err(|_| OUT_OF_RANGE)?;
    let part: u128 = fraction.parse().map_err(|_| SizeError::Form)?;
    let factor = u128::from(factor);
    let bytes = whole
        .checked_mul(factor)
        .and_then(|bytes| bytes.checked_add(part * factor / 10_u128.pow(fraction.len() as u32)));
    bytes.and_then(|bytes| u64::try_from(bytes).ok()).ok_or(OUT_OF_RANGE)
}

/// Returns an argument parser for sizes within `range`, in bytes.
pub fn sizes<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, SizeError> + Clone + Send + Sync + 'static {
    move |text| {
        let out_of_range = || SizeError::Range { least: *range.start(), most: *range.end() };
        let bytes = Some(parse_size(text)?).filter(|bytes| range.contains(bytes)).ok_or_else(out_of_range)?;
        T::try_from(bytes).map_err(|_| out_of_range())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn plain_bytes_parse_to_themselves(bytes: u64) {
            prop_assert_eq!(parse_size(&bytes.to_string()), Ok(bytes));
            prop_assert_eq!(parse_size(&format!("{bytes}B")), Ok(bytes));
        }

        #[test]
        fn units_multiply(whole in 0..1_u64 << 24, thousandths in 0..1000_u128, unit in 1..UNITS.len()) {
            let (name, factor) = UNITS[unit];
            let expected = u128::from(whole) * u128::from(factor) + thousandths * u128::from(factor) / 1000;
            let expected = u64::try_from(expected).map_err(|_| OUT_OF_RANGE);
            prop_assert_eq!(parse_size(&format!("{whole}.{thousandths:03}{name}")), expected);
            prop_assert_eq!(parse_size(&format!("{whole}.{thousandths:03} {}", name.to_lowercase())), expected);
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in "\\PC{0,40}|[0-9.]{1,45} ?([kMGT]i?B)?") {
            if let Ok(bytes) = parse_size(&text) {
                prop_assert_eq!(parse_size(&bytes.to_string()), Ok(bytes));
            }
        }
    }

    #[test]
    fn sizes_have_units_or_are_bytes() {
        for (text, bytes) in [
            ("0", 0),
            ("1000000", 1_000_000),
            ("1MB", 1_000_000),
            ("500MB", 500_000_000),
            ("2GiB", 2 << 30),
            ("2 gib", 2 << 30),
            ("1.5GB", 1_500_000_000),
            ("0.5KiB", 512),
            ("64B", 64),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_the_reason() {
        for text in ["", "MB", "-1", "1.", ".5GB", "1.5", "1.5B", "1.2.3GB", "1e9", "1,5GB", "NaN"] {
            assert!(matches!(parse_size(text), Err(SizeError::Form | SizeError::Unit)), "{text}");
        }
        for text in ["1M", "1Gi", "5 apples", "1MBMB"] {
            assert_eq!(parse_size(text), Err(SizeError::Unit), "{text}");
        }
        for text in ["18446744073709551616", "99999999TB", "99999999999999999999999999999999999999999"] {
            assert_eq!(parse_size(text), Err(OUT_OF_RANGE), "{text}");
        }
    }

    #[test]
    fn a_range_holds() {
        let parse = sizes::<usize>(1..=1 << 30);
        assert_eq!(parse("1GiB"), Ok(1 << 30));
        for text in ["0", "1025MiB"] {
            assert_eq!(parse(text), Err(SizeError::Range { least: 1, most: 1 << 30 }), "{text}");
        }
        assert!(sizes::<u8>(0..=u64::MAX)("1kB").is_err());
    }
}
