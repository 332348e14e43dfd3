//! Tests of the `is` operator, as Jinja2's `tests.py`.

use super::ast::{Comparison, Operator};
use super::calls::CallArguments;
use super::error::{Error, fail};
use super::filters;
use super::methods::text::has_only_case;
use super::objects::Object;
use super::operators::expect_defined;
use super::python_text;
use super::renderer::Renderer;
use super::value::Value;

/// Names of all tests.
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

/// Reports if `value` passes the test `name`.
///
/// # Errors
/// There is no such test, or it fails.
pub(super) fn apply(
    renderer: &mut Renderer<'_>,
    name: &str,
    value: &Value,
    args: CallArguments,
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
        let [other] = args.bind(name, ["other"], 1)?;
        return renderer.compare(comparison, value, &other.unwrap_or(Value::None));
    }
    match name {
        "divisibleby" => {
            let [by] = args.bind(name, ["num"], 1)?;
            return remainder(renderer, value, by.unwrap_or(Value::None), 0);
        }
        "sameas" => {
            let [other] = args.bind(name, ["other"], 1)?;
            return Ok(is_identical(value, &other.unwrap_or(Value::None)));
        }
        _ => args.expect_none(name)?,
    }
    Ok(match name {
        "odd" => return remainder(renderer, value, Value::Int(2), 1),
        "even" => return remainder(renderer, value, Value::Int(2), 0),
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
            let text = python_text::to_str(&mut renderer.limits, value)?;
            renderer.limits.charge_read(text.len())?;
            has_only_case(&text, name == "upper")
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

/// Reports if `value % by` equals `expected`.
fn remainder(renderer: &mut Renderer<'_>, value: &Value, by: Value, expected: i128) -> Result<bool, Error> {
    let rest = renderer.binary(Operator::Mod, value, &by)?;
    renderer.compare(Comparison::Eq, &rest, &Value::Int(expected))
}

/// Evaluates Python's `is`. Equal whole numbers are one object, and so are equal texts.
#[allow(clippy::float_cmp)]
fn is_identical(a: &Value, b: &Value) -> bool {
    if expect_defined(a).is_err() || expect_defined(b).is_err() {
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
