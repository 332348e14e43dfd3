//! Checks of single numbers and tables against bounds, with their error messages.

use crate::error::FieldError;
use crate::problem::{Affine, CpuProfile, GpuProfile};
use std::fmt::Display;

/// Upper bound of all numbers without a smaller one.
pub(super) const LARGEST: f64 = 1e15;
/// Lower bound of divisors and prices.
pub(super) const SMALLEST: f64 = 1e-15;
/// Largest number of tokens.
pub(super) const MAX_TOKENS: f64 = 1e12;
/// Most rows or columns of a table.
pub(super) const MAX_POINTS: usize = 1024;

/// Result of a check: the first invalid field, if any.
pub(super) type CheckResult = Result<(), FieldError>;

pub(super) fn check_cpu_profile(name: &str, profile: &CpuProfile) -> CheckResult {
    check_ascending(&format!("{name}.vcpus"), &profile.vcpus, "vCPUs")?;
    check_ascending(&format!("{name}.tokens"), &profile.tokens, "tokens")?;
    let (rows, columns) = (profile.tokens.len(), profile.vcpus.len());
    if profile.seconds.len() != rows {
        let message = format!("has {} rows, expected {rows}: one per entry of tokens", profile.seconds.len());
        return Err(FieldError::new(format!("{name}.seconds"), message));
    }
    for (index, row) in profile.seconds.iter().enumerate() {
        if row.len() != columns {
            let message = format!("has {} columns, expected {columns}: one per entry of vcpus", row.len());
            return Err(FieldError::new(format!("{name}.seconds[{index}]"), message));
        }
        for (column, seconds) in row.iter().enumerate() {
            check_not_negative(format_args!("{name}.seconds[{index}][{column}]"), *seconds, "seconds")?;
        }
    }
    Ok(())
}

pub(super) fn check_gpu_profile(name: &str, profile: &GpuProfile) -> CheckResult {
    check_ascending(&format!("{name}.tokens"), &profile.tokens, "tokens")?;
    if profile.seconds.len() != profile.tokens.len() {
        let (have, want) = (profile.seconds.len(), profile.tokens.len());
        let message = format!("has {have} entries, expected {want}: one per entry of tokens");
        return Err(FieldError::new(format!("{name}.seconds"), message));
    }
    for (index, seconds) in profile.seconds.iter().enumerate() {
        check_not_negative(format_args!("{name}.seconds[{index}]"), *seconds, "seconds")?;
    }
    Ok(())
}

fn check_ascending(field: &str, values: &[f64], unit: &str) -> CheckResult {
    if values.is_empty() || values.len() > MAX_POINTS {
        let message = format!("has {} entries, expected 1 to {MAX_POINTS}", values.len());
        return Err(FieldError::new(field, message));
    }
    for (index, value) in values.iter().enumerate() {
        check_between(format_args!("{field}[{index}]"), *value, SMALLEST, MAX_TOKENS, unit)?;
        let before = index.checked_sub(1).and_then(|before| values.get(before));
        if let Some(before) = before.filter(|before| *before >= value) {
            let message = format!("is {value} after {before}; list them ascending, each once");
            return Err(FieldError::new(format!("{field}[{index}]"), message));
        }
    }
    Ok(())
}

pub(super) fn check_affine(name: &str, affine: Affine) -> CheckResult {
    check_not_negative(format_args!("{name}.base"), affine.base, "seconds")?;
    check_not_negative(format_args!("{name}.per_token"), affine.per_token, "seconds per token")
}

pub(super) fn check_count(field: &str, value: u32, most: u32) -> CheckResult {
    if (1..=most).contains(&value) {
        return Ok(());
    }
    Err(FieldError::new(field, format!("is {value}, expected 1 to {most}")))
}

/// Checks that a price is above 0, since plans could not be compared otherwise.
pub(super) fn check_price(field: &str, value: f64, unit: &str) -> CheckResult {
    if value == 0.0 {
        let message = "is 0: all plans would cost the same; state the price of memory";
        return Err(FieldError::new(field, message));
    }
    check_above_zero(field, value, unit)
}

pub(super) fn check_not_negative(field: impl Display, value: f64, unit: &str) -> CheckResult {
    check_between(field, value, 0.0, LARGEST, unit)
}

pub(super) fn check_above_zero(field: impl Display, value: f64, unit: &str) -> CheckResult {
    check_between(field, value, SMALLEST, LARGEST, unit)
}

/// Checks that `value` is from `least` to `most`; NaN is not.
pub(super) fn check_between(
    field: impl Display,
    value: f64,
    least: f64,
    most: f64,
    unit: &str,
) -> CheckResult {
    if value >= least && value <= most {
        return Ok(());
    }
    let (value, least, most) =
        (format_number(value, 1e16), format_number(least, 1e6), format_number(most, 1e6));
    Err(FieldError::new(field.to_string(), format!("is {value}, expected {unit} from {least} to {most}")))
}

/// Formats `value` in plain digits, or in scientific notation from `long` on and below 1e-5.
fn format_number(value: f64, long: f64) -> String {
    let plain = value == 0.0 || !value.is_finite() || (1e-5..long).contains(&value.abs());
    if plain { value.to_string() } else { format!("{value:e}") }
}
