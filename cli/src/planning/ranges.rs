//! Parsing of the ranges of memory sizes and vCPUs that plans may choose from.

use super::MB;
use remoe_planner::{SizeRange, VcpuRange};
use remoe_process::parse_size;

/// Limit of the number of values in a range.
const MAX_VALUES: f64 = 10_000.0;
/// Limit of a memory size in bytes.
const MAX_BYTES: f64 = 1e15;
/// Limit of vCPUs in millicores.
const MAX_MILLICORES: f64 = 1e7;

/// Converts minimum, maximum and step in millicores to a range of vCPUs. Returns `None` if they are not a valid range.
///
/// # Errors
/// The range has more than [`MAX_VALUES`] values.
pub(crate) fn vcpu_range([min, max, step]: [f64; 3]) -> Result<Option<VcpuRange>, String> {
    let is_range =
        min >= 1.0 && (min..=MAX_MILLICORES).contains(&max) && (1.0..=MAX_MILLICORES).contains(&step);
    if !is_range {
        return Ok(None);
    }
    check_count(min, max, step, "millicores")?;
    Ok(Some(VcpuRange { min: min / 1e3, max: max / 1e3, step: step / 1e3 }))
}

/// Converts minimum, maximum and step in bytes to a range of sizes. Returns `None` if they are not a valid range.
///
/// # Errors
/// The range has more than [`MAX_VALUES`] values.
pub(crate) fn size_range([min_bytes, max_bytes, step_bytes]: [f64; 3]) -> Result<Option<SizeRange>, String> {
    let is_range = min_bytes >= 1.0 && (min_bytes..=MAX_BYTES).contains(&max_bytes) && step_bytes >= 1.0;
    if !is_range {
        return Ok(None);
    }
    check_count(min_bytes / MB, max_bytes / MB, step_bytes / MB, "MB")?;
    Ok(Some(SizeRange { min_bytes, max_bytes, step_bytes }))
}

/// Checks that a range has at most [`MAX_VALUES`] values. Errors state them in `unit`.
fn check_count(min: f64, max: f64, step: f64, unit: &str) -> Result<(), String> {
    let values = ((max - min) / step).floor() + 1.0;
    if values <= MAX_VALUES {
        return Ok(());
    }
    Err(format!("expected at most {MAX_VALUES} values, got {values}; use steps of more than {step} {unit}"))
}

/// Parses `MIN:MAX:STEP` in millicores.
pub(super) fn millicores(text: &str) -> Result<VcpuRange, String> {
    let parts: Vec<f64> = text.split(':').map(|part| part.parse().unwrap_or(f64::NAN)).collect();
    let range = <[f64; 3]>::try_from(parts).map_or(Ok(None), vcpu_range)?;
    range.ok_or_else(|| "expected MIN:MAX:STEP in millicores, such as 500:8000:500".to_owned())
}

/// Parses `MIN:MAX:STEP` in MB, or as sizes with units.
pub(super) fn sizes(text: &str) -> Result<SizeRange, String> {
    let is_number = |part: &str| part.chars().all(|c| c.is_ascii_digit() || c == '.');
    let bytes = |part: &str| match part.parse::<f64>() {
        Ok(megabytes) if is_number(part) => megabytes * MB,
        _ => parse_size(part).map_or(f64::NAN, |bytes| bytes as f64),
    };
    let parts: Vec<f64> = text.split(':').map(bytes).collect();
    let range = <[f64; 3]>::try_from(parts).map_or(Ok(None), size_range)?;
    range.ok_or_else(|| "expected MIN:MAX:STEP, such as 100:5000:100 (MB) or 100MB:5GB:100MB".to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn millicores_parse_as_vcpu_range() {
        assert_eq!(millicores("500:8000:250"), Ok(VcpuRange { min: 0.5, max: 8.0, step: 0.25 }));
        for wrong in ["500", "500m:1000m:1", "1:100000:1", "0:1:1", "2:1:1", "1:2:0", "1:inf:1", "1:2:3:4"] {
            assert!(millicores(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_parse_as_range() {
        let range = sizes("100:500:50").unwrap();
        assert_eq!((range.min_bytes, range.max_bytes, range.step_bytes), (1e8, 5e8, 5e7));
        assert_eq!(sizes("100MB:0.5GB:50"), Ok(range));
        assert!(sizes("100:20000:1").unwrap_err().starts_with("expected at most 10000 values, got 19901"));
        for wrong in ["100", "1:inf:1", "100M:1GB:1", "500:100:10", "0:1:1", "a:b:c", "1:2:0", "1:2:3:4"] {
            assert!(sizes(wrong).is_err(), "{wrong}");
        }
    }
}
