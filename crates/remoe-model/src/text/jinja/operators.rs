//! Python's operators.

use std::cmp::Ordering;

use super::ast::{Comparison, Operator};
use super::error::{Error, fail};
use super::filters::texts::html_escaped;
use super::limits::Limits;
use super::objects::Object;
use super::renderer::Renderer;
use super::value::Value;

impl Renderer<'_> {
    pub(super) fn binary(&mut self, operator: Operator, a: &Value, b: &Value) -> Result<Value, Error> {
        expect_defined(a)?;
        if let Some(value) = self.operate_on_markup(operator, a, b)? {
            return Ok(value);
        }
        let (a, b) = (&a.clone().without_markup(), &b.clone().without_markup());
        if let (Operator::Mod, Value::Text(format)) = (operator, a) {
            return self.format_percent(format, b);
        }
        expect_defined(b)?;
        if let (Some(a), Some(b)) = (a.as_int(), b.as_int()) {
            return int_operation(operator, a, b);
        }
        if let (Some(a), Some(b)) = (a.as_float(), b.as_float()) {
            return float_operation(operator, a, b);
        }
        match (operator, a, b) {
            (Operator::Add, Value::Text(left), Value::Text(right)) => {
                self.limits.charge_text(left.len() + right.len())?;
                Ok(Value::Text(format!("{left}{right}").into()))
            }
            (Operator::Add, Value::List(left), Value::List(right)) => {
                self.limits.charge_list(left.len() + right.len())?;
                Ok(Value::list(left.iter().chain(&**right).cloned().collect()))
            }
            (Operator::Add, Value::Tuple(left), Value::Tuple(right)) => {
                self.limits.charge_list(left.len() + right.len())?;
                Ok(Value::tuple(left.iter().chain(&**right).cloned().collect()))
            }
            (Operator::Mul, value, times) | (Operator::Mul, times, value)
                if times.as_int().is_some() && value.as_int().is_none() =>
            {
                self.repeat(value, times.as_int().unwrap_or_default())
            }
            _ => unsupported(operator, a, b),
        }
    }

    /// Evaluates an operator with a marked text: the result is marked, unmarked texts are escaped. `None` if no operand
    /// is marked.
    fn operate_on_markup(
        &mut self,
        operator: Operator,
        a: &Value,
        b: &Value,
    ) -> Result<Option<Value>, Error> {
        let is_marked = |value| text_and_mark(value).is_some_and(|(_, safe)| safe);
        if !is_marked(a) && !is_marked(b) {
            return Ok(None);
        }
        match (operator, text_and_mark(a), text_and_mark(b)) {
            (Operator::Add, Some(left), Some(right)) => {
                let mut escape = |(text, safe): (&str, bool)| {
                    if safe { Ok(text.to_owned()) } else { html_escaped(&mut self.limits, text) }
                };
                let (left, right) = (escape(left)?, escape(right)?);
                self.limits.charge_text(left.len() + right.len())?;
                Ok(Some(Value::markup(left + &right)))
            }
            (Operator::Mul, ..) => {
                let repeated =
                    self.binary(operator, &a.clone().without_markup(), &b.clone().without_markup())?;
                Ok(repeated.as_text().map(Value::markup))
            }
            (Operator::Mod, Some((format, true)), _) => {
                let mut escape = |value: &Value| match value {
                    Value::Text(text) => Ok(Value::Text(html_escaped(&mut self.limits, text)?.into())),
                    other => Ok(other.clone()),
                };
                let values = match b {
                    Value::Tuple(items) => {
                        Value::tuple(items.iter().map(escape).collect::<Result<_, Error>>()?)
                    }
                    other => escape(other)?,
                };
                let text = self.format_percent(format, &values.without_markup())?;
                Ok(text.as_text().map(Value::markup))
            }
            _ => Ok(None),
        }
    }

    fn repeat(&mut self, value: &Value, times: i128) -> Result<Value, Error> {
        let times = usize::try_from(times.max(0)).unwrap_or(usize::MAX);
        match value {
            Value::Text(text) => {
                self.limits.charge_text(text.len().saturating_mul(times))?;
                Ok(Value::Text(text.repeat(times).into()))
            }
            Value::List(items) | Value::Tuple(items) => {
                self.limits.charge_list(items.len().saturating_mul(times))?;
                let times = if items.is_empty() { 0 } else { times };
                let repeated = (0..times).flat_map(|_| items.iter().cloned()).collect();
                Ok(if matches!(value, Value::List(_)) {
                    Value::list(repeated)
                } else {
                    Value::tuple(repeated)
                })
            }
            other => fail(format!("can't multiply sequence by non-int of type '{}'", other.type_name())),
        }
    }

    pub(super) fn negative(&mut self, value: &Value) -> Result<Value, Error> {
        expect_defined(value)?;
        match (value.as_int(), value.as_float()) {
            (Some(number), _) => number.checked_neg().map(Value::Int).ok_or_else(int_overflow),
            (None, Some(number)) => Ok(Value::Float(-number)),
            _ => fail(format!("bad operand type for unary -: '{}'", value.type_name())),
        }
    }

    pub(super) fn compare(&mut self, comparison: Comparison, a: &Value, b: &Value) -> Result<bool, Error> {
        Ok(match comparison {
            Comparison::Eq => equal(&mut self.limits, a, b, 0)?,
            Comparison::Ne => !equal(&mut self.limits, a, b, 0)?,
            Comparison::In => self.contains(b, a)?,
            Comparison::NotIn => !self.contains(b, a)?,
            Comparison::Lt => ordering(&mut self.limits, a, b, "<", 0)? == Some(Ordering::Less),
            Comparison::Gt => ordering(&mut self.limits, a, b, ">", 0)? == Some(Ordering::Greater),
            Comparison::Le => ordering(&mut self.limits, a, b, "<=", 0)?.is_some_and(Ordering::is_le),
            Comparison::Ge => ordering(&mut self.limits, a, b, ">=", 0)?.is_some_and(Ordering::is_ge),
        })
    }

    /// Evaluates `item in container`.
    pub(super) fn contains(&mut self, container: &Value, item: &Value) -> Result<bool, Error> {
        match (container, item) {
            (Value::Text(text), Value::Text(part)) => {
                self.limits.charge_read(text.len())?;
                self.limits.charge_search(part)?;
                Ok(text.contains(&**part))
            }
            (Value::Text(_), other) => {
                expect_defined(other)?;
                let name = other.type_name();
                fail(format!("'in <string>' requires string as left operand, not {name}"))
            }
            (Value::Map(map), _) => Ok(map.get(&item.key(&mut self.limits)?).is_some()),
            (Value::Object(object), _) if matches!(**object, Object::Namespace(_)) => {
                fail("argument of type 'Namespace' is not iterable")
            }
            _ => {
                let Ok(items) = self.iterate(container) else {
                    return fail(format!("argument of type '{}' is not iterable", container.type_name()));
                };
                for candidate in &*items {
                    if equal(&mut self.limits, candidate, item, 0)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }
}

/// Returns a text, and true if `safe` or `escape` has marked it.
fn text_and_mark(value: &Value) -> Option<(&str, bool)> {
    match value {
        Value::Text(text) => Some((text, false)),
        Value::Object(object) => match &**object {
            Object::Markup(text) => Some((text, true)),
            _ => None,
        },
        _ => None,
    }
}

/// Fails for an undefined value, as Python's operators do.
pub(super) fn expect_defined(value: &Value) -> Result<(), Error> {
    if let Value::Undefined(message) = value { fail(&**message) } else { Ok(()) }
}

pub(super) fn int_overflow() -> Error {
    Error::new("a whole number would have more than 127 bits")
}

fn unsupported<T>(operator: Operator, a: &Value, b: &Value) -> Result<T, Error> {
    let sign = match operator {
        Operator::Add => "+",
        Operator::Sub => "-",
        Operator::Mul => "*",
        Operator::Div => "/",
        Operator::FloorDiv => "//",
        Operator::Mod => "%",
        Operator::Pow => "** or pow()",
    };
    match (operator, a) {
        (Operator::Add, Value::Text(_)) => {
            fail(format!("can only concatenate str (not \"{}\") to str", b.type_name()))
        }
        _ => fail(format!(
            "unsupported operand type(s) for {sign}: '{}' and '{}'",
            a.type_name(),
            b.type_name()
        )),
    }
}

#[allow(clippy::cast_precision_loss)]
fn int_operation(operator: Operator, a: i128, b: i128) -> Result<Value, Error> {
    let checked = |number: Option<i128>| number.map(Value::Int).ok_or_else(int_overflow);
    match operator {
        Operator::Add => checked(a.checked_add(b)),
        Operator::Sub => checked(a.checked_sub(b)),
        Operator::Mul => checked(a.checked_mul(b)),
        Operator::Div if b == 0 => fail("division by zero"),
        Operator::FloorDiv | Operator::Mod if b == 0 => fail("integer division or modulo by zero"),
        Operator::Div => Ok(Value::Float(a as f64 / b as f64)),
        Operator::FloorDiv => {
            let below = a.checked_rem(b).is_some_and(|rest| rest != 0 && (rest < 0) != (b < 0));
            checked(a.checked_div(b).map(|quotient| quotient - i128::from(below)))
        }
        Operator::Mod => {
            let rest = a.checked_rem(b);
            checked(rest.map(|rest| if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }))
        }
        Operator::Pow if b < 0 => float_operation(operator, a as f64, b as f64),
        Operator::Pow => match (a, u32::try_from(b)) {
            (0 | 1, _) => Ok(Value::Int(if b == 0 { 1 } else { a })),
            (-1, _) => Ok(Value::Int(if b % 2 == 0 { 1 } else { -1 })),
            (_, Ok(exponent)) => checked(a.checked_pow(exponent)),
            _ => Err(int_overflow()),
        },
    }
}

fn float_operation(operator: Operator, a: f64, b: f64) -> Result<Value, Error> {
    let zero = b == 0.0;
    Ok(Value::Float(match operator {
        Operator::Add => a + b,
        Operator::Sub => a - b,
        Operator::Mul => a * b,
        Operator::Div if zero => return fail("float division by zero"),
        Operator::FloorDiv if zero => return fail("float floor division by zero"),
        Operator::Mod if zero => return fail("float modulo"),
        Operator::Div => a / b,
        Operator::FloorDiv => ((a - python_modulo(a, b)) / b).round(),
        Operator::Mod => python_modulo(a, b),
        Operator::Pow if a == 0.0 && b < 0.0 => return fail("0.0 cannot be raised to a negative power"),
        Operator::Pow if a < 0.0 && b.fract() != 0.0 => return fail("complex numbers are not supported"),
        Operator::Pow => {
            let power = a.powf(b);
            if power.is_infinite() && a.is_finite() && b.is_finite() {
                return fail("(34, 'Numerical result out of range')");
            }
            power
        }
    }))
}

/// Evaluates Python's `a % b`, whose result has the sign of `b`.
fn python_modulo(a: f64, b: f64) -> f64 {
    let rest = a % b;
    if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }
}

/// Evaluates `a == b`; `depth` is the nesting of the operands.
#[allow(clippy::float_cmp)]
pub(super) fn equal(limits: &mut Limits, a: &Value, b: &Value, depth: usize) -> Result<bool, Error> {
    limits.charge_visit(depth)?;
    Ok(match (a, b) {
        (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
        (Value::Text(a), Value::Text(b)) => {
            if a.len() == b.len() {
                limits.charge_read(a.len())?;
            }
            a == b
        }
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
            if a.len() != b.len() {
                return Ok(false);
            }
            for (a, b) in a.iter().zip(&**b) {
                if !equal(limits, a, b, depth + 1)? {
                    return Ok(false);
                }
            }
            true
        }
        (Value::Map(a), Value::Map(b)) => {
            if a.len() != b.len() {
                return Ok(false);
            }
            for (key, value) in a.entries() {
                match b.get(&key.key(limits)?) {
                    Some(other) if equal(limits, value, other, depth + 1)? => (),
                    _ => return Ok(false),
                }
            }
            true
        }
        (Value::Object(a), Value::Object(b)) => match (&**a, &**b) {
            (Object::Range(a), Object::Range(b)) => {
                a.length == b.length
                    && (a.length == 0 || (a.start == b.start && (a.length == 1 || a.step == b.step)))
            }
            (Object::Macro(a, ..), Object::Macro(b, ..)) => a == b,
            _ => std::rc::Rc::ptr_eq(a, b),
        },
        _ => match (a.as_int(), b.as_int()) {
            (Some(a), Some(b)) => a == b,
            _ => a.as_float().zip(b.as_float()).is_some_and(|(a, b)| a == b),
        },
    })
}

/// Compares two values, for the operator `sign` in errors; `None` for a NaN.
pub(super) fn ordering(
    limits: &mut Limits,
    a: &Value,
    b: &Value,
    sign: &str,
    depth: usize,
) -> Result<Option<Ordering>, Error> {
    limits.charge_visit(depth)?;
    expect_defined(a)?;
    expect_defined(b)?;
    match (a, b) {
        (Value::Text(a), Value::Text(b)) => {
            limits.charge_read(a.len().min(b.len()))?;
            Ok(Some(a.cmp(b)))
        }
        (Value::List(left), Value::List(right)) | (Value::Tuple(left), Value::Tuple(right)) => {
            for (a, b) in left.iter().zip(&**right) {
                if !equal(limits, a, b, depth + 1)? {
                    return ordering(limits, a, b, sign, depth + 1);
                }
            }
            Ok(Some(left.len().cmp(&right.len())))
        }
        _ => match (a.as_int(), b.as_int()) {
            (Some(a), Some(b)) => Ok(Some(a.cmp(&b))),
            _ => match a.as_float().zip(b.as_float()) {
                Some((a, b)) => Ok(a.partial_cmp(&b)),
                None => fail(format!(
                    "'{sign}' not supported between instances of '{}' and '{}'",
                    a.type_name(),
                    b.type_name()
                )),
            },
        },
    }
}
