//! Tests (`is ..`) as Jinja2's `tests.py`.

use super::ast::{Comparison, Operator};
use super::calls::Given;
use super::error::{Error, fail};
use super::filters;
use super::machine::Machine;
use super::methods::text::cased;
use super::objects::Object;
use super::operators::defined;
use super::print;
use super::value::Value;

const NAMES: [&str; 39] = [
    "odd",
    "even",
    "divisibleby",
    "defined",
    "undefined",
    "filter",
    "test",
    "none",
    "boolean",
    "false",
    "true",
    "integer",
    "float",
    "lower",
    "upper",
    "string",
    "mapping",
    "number",
    "sequence",
    "iterable",
    "callable",
    "sameas",
    "escaped",
    "in",
    "==",
    "eq",
    "equalto",
    "!=",
    "ne",
    ">",
    "gt",
    "greaterthan",
    ">=",
    "ge",
    "<",
    "lt",
    "lessthan",
    "<=",
    "le",
];

/// Returns whether `value` passes the test `name`.
pub(super) fn apply(
    machine: &mut Machine<'_>,
    name: &str,
    value: &Value,
    given: Given,
) -> Result<bool, Error> {
    let comparison = match name {
        "==" | "eq" | "equalto" => Some(Comparison::Eq),
        "!=" | "ne" => Some(Comparison::Ne),
        ">" | "gt" | "greaterthan" => Some(Comparison::Gt),
        ">=" | "ge" => Some(Comparison::Ge),
        "<" | "lt" | "lessthan" => Some(Comparison::Lt),
        "<=" | "le" => Some(Comparison::Le),
        "in" => Some(Comparison::In),
        _ => None,
    };
    if let Some(comparison) = comparison {
        let [other] = given.bind(name, ["other"], 1)?;
        return machine.compare(comparison, value, &other.unwrap_or(Value::None));
    }
    match name {
        "divisibleby" => {
            let [by] = given.bind(name, ["num"], 1)?;
            return remainder(machine, value, by.unwrap_or(Value::None), 0);
        }
        "sameas" => {
            let [other] = given.bind(name, ["other"], 1)?;
            return Ok(same(value, &other.unwrap_or(Value::None)));
        }
        _ => given.none(name)?,
    }
    Ok(match name {
        "odd" => return remainder(machine, value, Value::Int(2), 1),
        "even" => return remainder(machine, value, Value::Int(2), 0),
        "defined" => !value.is_undefined(),
        "undefined" => value.is_undefined(),
        "filter" => value.as_text().is_some_and(|name| filters::NAMES.contains(&name)),
        "test" => value.as_text().is_some_and(|name| NAMES.contains(&name)),
        "none" => matches!(value, Value::None),
        "boolean" => matches!(value, Value::Bool(_)),
        "false" => matches!(value, Value::Bool(false)),
        "true" => matches!(value, Value::Bool(true)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => matches!(value, Value::Bool(_) | Value::Int(_) | Value::Float(_)),
        "string" => matches!(value, Value::Text(_)),
        "mapping" => matches!(value, Value::Map(_)),
        "lower" | "upper" => {
            let text = print::text(&mut machine.limits, value)?;
            machine.limits.read(text.len())?;
            cased(&text, name == "upper")
        }
        "sequence" => match value {
            Value::Undefined(_) | Value::Text(_) | Value::List(_) | Value::Tuple(_) | Value::Map(_) => true,
            Value::Object(object) => matches!(**object, Object::Range(_)),
            _ => false,
        },
        "iterable" => match value {
            Value::Undefined(_) | Value::Text(_) | Value::List(_) | Value::Tuple(_) | Value::Map(_) => true,
            Value::Object(object) => {
                matches!(
                    **object,
                    Object::Generator(_) | Object::View(..) | Object::Range(_) | Object::Loop(_)
                )
            }
            _ => false,
        },
        "callable" => match value {
            // `Undefined` has `__call__`, which fails.
            Value::Undefined(_) => true,
            Value::Object(object) => object.is_callable(),
            _ => false,
        },
        "escaped" => false,
        other => return fail(format!("No test named '{other}'.")),
    })
}

fn remainder(machine: &mut Machine<'_>, value: &Value, by: Value, expected: i128) -> Result<bool, Error> {
    let rest = machine.binary(Operator::Mod, value, &by)?;
    machine.compare(Comparison::Eq, &rest, &Value::Int(expected))
}

/// Python's `is`, as far as values here have an identity: small whole numbers, and texts, are one object each.
#[allow(clippy::float_cmp)]
fn same(a: &Value, b: &Value) -> bool {
    if defined(a).is_err() || defined(b).is_err() {
        return false;
    }
    match (a, b) {
        (Value::None, Value::None) => true,
        (Value::Bool(a), Value::Bool(b)) => a == b,
        (Value::Int(a), Value::Int(b)) => a == b,
        (Value::Text(a), Value::Text(b)) => a == b,
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => std::rc::Rc::ptr_eq(a, b),
        (Value::Map(a), Value::Map(b)) => std::rc::Rc::ptr_eq(a, b),
        (Value::Object(a), Value::Object(b)) => std::rc::Rc::ptr_eq(a, b),
        _ => false,
    }
}
