//! Bounds of single figures and of tables of them, and the messages about figures outside.

use crate::error::FieldError;
use crate::problem::{Affine, CpuProfile, GpuProfile};
use std::fmt::Display;

/// No figure is larger.
pub(super) const LARGEST: f64 = 1e15;
/// No figure that divides or prices is smaller.
pub(super) const SMALLEST: f64 = 1e-15;
pub(super) const MAX_TOKENS: f64 = 1e12;
pub(super) const MAX_GRID: usize = 1024;

pub(super) type Checked = Result<(), FieldError>;

pub(super) fn cpu_profile(name: &str, profile: &CpuProfile) -> Checked {
    ascending(&format!("{name}.vcpus"), &profile.vcpus, "vCPUs")?;
    ascending(&format!("{name}.tokens"), &profile.tokens, "tokens")?;
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
            not_negative(format_args!("{name}.seconds[{index}][{column}]"), *seconds, "seconds")?;
        }
    }
    Ok(())
}

pub(super) fn gpu_profile(name: &str, profile: &GpuProfile) -> Checked {
    ascending(&format!("{name}.tokens"), &profile.tokens, "tokens")?;
    if profile.seconds.len() != profile.tokens.len() {
        let (have, want) = (profile.seconds.len(), profile.tokens.len());
        let message = format!("has {have} entries, expected {want}: one per entry of tokens");
        return Err(FieldError::new(format!("{name}.seconds"), message));
    }
    for (index, seconds) in profile.seconds.iter().enumerate() {
        not_negative(format_args!("{name}.seconds[{index}]"), *seconds, "seconds")?;
    }
    Ok(())
}

fn ascending(field: &str, values: &[f64], unit: &str) -> Checked {
    if values.is_empty() || values.len() > MAX_GRID {
        let message = format!("has {} entries, expected 1 to {MAX_GRID}", values.len());
        return Err(FieldError::new(field, message));
    }
    for (index, value) in values.iter().enumerate() {
        between(format_args!("{field}[{index}]"), *value, SMALLEST, MAX_TOKENS, unit)?;
        let before = index.checked_sub(1).and_then(|before| values.get(before));
        if let Some(before) = before.filter(|before| *before >= value) {
            let message = format!("is {value} after {before}; list them ascending, each once");
            return Err(FieldError::new(format!("{field}[{index}]"), message));
        }
    }
    Ok(())
}

pub(super) fn affine(name: &str, affine: Affine) -> Checked {
    not_negative(format_args!("{name}.base"), affine.base, "seconds")?;
    not_negative(format_args!("{name}.per_token"), affine.per_token, "seconds per token")
}

pub(super) fn count(field: &str, value: u32, most: u32) -> Checked {
    if (1..=most).contains(&value) {
        return Ok(());
    }
    Err(FieldError::new(field, format!("is {value}, expected 1 to {most}")))
}

pub(super) fn price(field: &str, value: f64, unit: &str) -> Checked {
    if value == 0.0 {
        let message = "is 0: all plans would cost the same; state the price of memory";
        return Err(FieldError::new(field, message));
    }
    above_zero(field, value, unit)
}

pub(super) fn not_negative(field: impl Display, value: f64, unit: &str) -> Checked {
    between(field, value, 0.0, LARGEST, unit)
}

pub(super) fn above_zero(field: impl Display, value: f64, unit: &str) -> Checked {
    between(field, value, SMALLEST, LARGEST, unit)
}

/// Also refuses NaN, which is between nothing.
pub(super) fn between(field: impl Display, value: f64, least: f64, most: f64, unit: &str) -> Checked {
    if value >= least && value <= most {
        return Ok(());
    }
    let (value, least, most) = (figure(value, 1e16), figure(least, 1e6), figure(most, 1e6));
    Err(FieldError::new(field.to_string(), format!("is {value}, expected {unit} from {least} to {most}")))
}

/// Returns a figure in digits, or as a power of ten from `long` on and for fractions below a hundred-thousandth.
fn figure(value: f64, long: f64) -> String {
    let plain = value == 0.0 || !value.is_finite() || (1e-5..long).contains(&value.abs());
    if plain { value.to_string() } else { format!("{value:e}") }
}
