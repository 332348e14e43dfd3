//! Filters of numbers.

use super::super::ast::Operator;
use super::super::calls::CallArguments;
use super::super::error::{Error, fail};
use super::super::operators::{expect_defined, int_overflow};
use super::super::renderer::Renderer;
use super::super::value::Value;

pub(super) fn apply(
    renderer: &mut Renderer<'_>,
    name: &str,
    value: Value,
    args: CallArguments,
) -> Result<Value, Error> {
    if let Value::Text(text) = &value {
        renderer.limits.charge_read(text.len())?;
    }
    match name {
        "abs" => {
            args.expect_none(name)?;
            expect_defined(&value)?;
            match (value.as_int(), value.as_float()) {
                (Some(number), _) if number >= 0 => Ok(Value::Int(number)),
                (Some(_), _) => renderer.negative(&value),
                (None, Some(number)) => Ok(Value::Float(number.abs())),
                _ => fail(format!("bad operand type for abs(): '{}'", value.type_name())),
            }
        }
        "round" => round(renderer, &value, args),
        "int" => {
            let [default, base] = args.bind(name, ["default", "base"], 0)?;
            expect_defined(&value)?;
            let base = base.and_then(|base| base.as_int()).unwrap_or(10);
            let whole = match &value {
                Value::Text(text) => parse_int(text, base),
                Value::Float(number) => truncate_to_int(*number),
                other => other.as_int(),
            };
            let whole = whole.or_else(|| match &value {
                Value::Text(text) => parse_float(text).and_then(truncate_to_int),
                _ => None,
            });
            Ok(whole.map(Value::Int).or(default).unwrap_or(Value::Int(0)))
        }
        "float" => {
            let [default] = args.bind(name, ["default"], 0)?;
            expect_defined(&value)?;
            let number = match &value {
                Value::Text(text) => parse_float(text),
                other => other.as_float(),
            };
            Ok(number.map(Value::Float).or(default).unwrap_or(Value::Float(0.0)))
        }
        "sum" => {
            let [attribute, start] = args.bind(name, ["attribute", "start"], 0)?;
            let mut sum = start.unwrap_or(Value::Int(0));
            if matches!(sum, Value::Text(_)) {
                return fail("sum() can't sum strings [use ''.join(seq) instead]");
            }
            let path = renderer.parse_path(attribute.as_ref())?;
            for item in &*renderer.iterate(&value)? {
                renderer.limits.charge_step()?;
                let item = renderer.resolve_path(item, &path, None)?;
                sum = renderer.binary(Operator::Add, &sum, &item)?;
            }
            Ok(sum)
        }
        _ => {
            let [binary] = args.bind(name, ["binary"], 0)?;
            let number = match &value {
                Value::Text(text) => parse_float(text),
                other => other.as_float(),
            };
            match number {
                Some(number) => {
                    Ok(Value::text(&file_size(number, binary.is_some_and(|binary| binary.is_truthy()))))
                }
                None => fail("expected a number of bytes"),
            }
        }
    }
}

/// Truncates a number; `None` if it is not finite or too large.
#[allow(clippy::cast_possible_truncation)]
fn truncate_to_int(number: f64) -> Option<i128> {
    (number.is_finite() && number.abs() < 1e38).then_some(number as i128)
}

/// Evaluates Python's `int(text, base)`; `None` if the text is not such a number.
pub(in super::super) fn parse_int(text: &str, base: i128) -> Option<i128> {
    let text = text.trim_matches(super::super::lexer::is_space);
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let lower = digits.get(..2).unwrap_or_default().to_ascii_lowercase();
    let prefixed = match lower.as_str() {
        "0x" => 16,
        "0o" => 8,
        "0b" => 2,
        _ => 0,
    };
    let has_prefix = prefixed > 0 && (base == prefixed || base == 0);
    let base = if base == 0 { prefixed.max(10).min(if prefixed > 0 { prefixed } else { 10 }) } else { base };
    let digits =
        if has_prefix { digits.get(2..)?.strip_prefix('_').unwrap_or(digits.get(2..)?) } else { digits };
    let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base))?;
    let plain = without_underscores(digits)?;
    let number = i128::from_str_radix(&plain, base).ok().filter(|_| !plain.starts_with(['+', '-']))?;
    Some(if text.starts_with('-') { -number } else { number })
}

/// Removes single underscores between digits; `None` if others are present.
fn without_underscores(text: &str) -> Option<String> {
    if text.starts_with('_') || text.ends_with('_') || text.contains("__") {
        return None;
    }
    Some(text.replace('_', ""))
}

/// Evaluates Python's `float(text)`; `None` if the text is not a number.
pub(in super::super) fn parse_float(text: &str) -> Option<f64> {
    let text = text.trim_matches(super::super::lexer::is_space);
    let plain = without_underscores(text)?;
    let lower = plain.trim_start_matches(['+', '-']).to_ascii_lowercase();
    let named = ["inf", "infinity", "nan"].contains(&lower.as_str());
    let digits = lower.chars().next().is_some_and(|first| first.is_ascii_digit() || first == '.');
    if named || digits { plain.parse().ok() } else { None }
}

#[allow(clippy::cast_precision_loss)]
fn round(renderer: &mut Renderer<'_>, value: &Value, args: CallArguments) -> Result<Value, Error> {
    let [precision, method] = args.bind("round", ["precision", "method"], 0)?;
    let method = method.unwrap_or_else(|| Value::text("common"));
    let precision = match precision {
        None => 0,
        Some(precision) => match precision.as_int().and_then(|precision| i32::try_from(precision).ok()) {
            Some(precision) if (-400..=400).contains(&precision) => precision,
            _ => return fail("expected a precision from -400 to 400"),
        },
    };
    expect_defined(value)?;
    match method.as_text() {
        Some("common") => match (value.as_int(), value) {
            (Some(number), _) if precision >= 0 => Ok(Value::Int(number)),
            (Some(number), _) => {
                let Some(unit) = 10_i128.checked_pow(precision.unsigned_abs()) else {
                    return Ok(Value::Int(0));
                };
                let (quotient, rest) = (number.div_euclid(unit), number.rem_euclid(unit));
                let above = unit - rest;
                let up = rest > above || (rest == above && quotient % 2 != 0);
                quotient
                    .checked_add(i128::from(up))
                    .and_then(|quotient| quotient.checked_mul(unit))
                    .map(Value::Int)
                    .ok_or_else(int_overflow)
            }
            (None, Value::Float(number)) => Ok(Value::Float(rounded(*number, precision))),
            _ => fail(format!("type {} doesn't define __round__ method", value.type_name())),
        },
        Some(method @ ("ceil" | "floor")) => {
            let Some(number) = value.as_float() else {
                return fail(format!("can't multiply sequence by non-int of type '{}'", value.type_name()));
            };
            let unit = 10_f64.powi(precision);
            let scaled = renderer.binary(Operator::Mul, &Value::Float(number), &Value::Float(unit))?;
            let scaled = scaled.as_float().unwrap_or_default();
            let scaled = if method == "ceil" { scaled.ceil() } else { scaled.floor() };
            Ok(Value::Float(scaled / unit))
        }
        _ => fail("method must be common, ceil or floor"),
    }
}

/// Evaluates Python's `round(number, precision)`, which is correctly rounded with ties to even.
fn rounded(number: f64, precision: i32) -> f64 {
    if !number.is_finite() {
        return number;
    }
    match usize::try_from(precision) {
        Ok(digits) => format!("{number:.digits$}").parse().unwrap_or(number),
        Err(_) => {
            let unit = 10_f64.powi(-precision);
            (number / unit).round_ties_even() * unit
        }
    }
}

/// Formats a number of bytes as Jinja2's `filesizeformat`.
#[allow(clippy::cast_precision_loss)]
fn file_size(number: f64, binary: bool) -> String {
    let base: f64 = if binary { 1024.0 } else { 1000.0 };
    let prefixes = if binary {
        ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"]
    } else {
        ["kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"]
    };
    #[allow(clippy::float_cmp)]
    if number == 1.0 {
        return "1 Byte".to_owned();
    }
    if number < base {
        return format!("{} Bytes", number.trunc());
    }
    let mut unit = base;
    let mut prefix = "";
    for next in prefixes {
        unit *= base;
        prefix = next;
        if number < unit {
            break;
        }
    }
    format!("{:.1} {prefix}", base * number / unit)
}
