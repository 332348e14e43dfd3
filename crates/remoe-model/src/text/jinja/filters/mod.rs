//! Filters as Jinja2's `filters.py`, and `tojson` as transformers'.

mod lists;
mod numbers;
mod sorting;
pub(super) mod texts;

use std::sync::Arc;

use super::access::cut;
use super::calls::Given;
use super::error::{Error, fail};
use super::json;
use super::machine::Machine;
use super::print;
use super::value::Value;

/// Bytes of the path of an attribute.
const PATH: usize = 4 << 10;

/// Filters that there are.
pub(super) const NAMES: [&str; 54] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "random",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "urlize",
    "wordcount",
    "wordwrap",
    "xmlattr",
];

/// Applies the filter `name`.
///
/// # Errors
/// There is no such filter, or it fails.
pub(super) fn apply(
    machine: &mut Machine<'_>,
    name: &str,
    value: Value,
    given: Given,
) -> Result<Value, Error> {
    match name {
        "default" | "d" => {
            let [default, boolean] = given.bind(name, ["default_value", "boolean"], 0)?;
            let replaced =
                value.is_undefined() || (boolean.is_some_and(|flag| flag.truth()) && !value.truth());
            Ok(if replaced { default.unwrap_or_else(|| Value::text("")) } else { value })
        }
        "attr" => {
            let [attribute] = given.bind(name, ["name"], 1)?;
            match attribute {
                // Only attributes of Python's: an item of an object is none.
                Some(Value::Text(attribute))
                    if !matches!(value, Value::Map(_)) || super::methods::MAP.contains(&&*attribute) =>
                {
                    machine.attribute(&value, &attribute)
                }
                Some(Value::Text(attribute)) => {
                    Ok(Value::undefined(format!("'dict object' has no attribute '{}'", cut(&attribute))))
                }
                _ => fail("attribute name must be string"),
            }
        }
        "length" | "count" => {
            given.none(name)?;
            Ok(Value::count(machine.length(&value)?))
        }
        "tojson" => json::to_json(machine, &value, given),
        "abs" | "round" | "int" | "float" | "sum" | "filesizeformat" => {
            numbers::apply(machine, name, value, given)
        }
        "sort" | "unique" | "min" | "max" | "groupby" | "dictsort" => {
            sorting::apply(machine, name, &value, given)
        }
        "batch" | "slice" | "first" | "last" | "items" | "list" | "map" | "reject" | "rejectattr"
        | "reverse" | "select" | "selectattr" | "join" => lists::apply(machine, name, value, given),
        "random" | "striptags" | "urlize" | "wordwrap" | "xmlattr" => {
            fail(format!("the filter '{name}' is not available"))
        }
        _ if NAMES.contains(&name) => texts::apply(machine, name, &value, given),
        other => fail(format!("No filter named '{other}'.")),
    }
}

impl Machine<'_> {
    /// `str(value)`, which is the value itself where it is a text.
    pub(super) fn soft_text(&mut self, value: &Value) -> Result<Arc<str>, Error> {
        match value {
            Value::Text(text) => Ok(text.clone()),
            other => Ok(print::text(&mut self.limits, other)?.into()),
        }
    }

    /// Splits the path of an attribute, as filters have it: names with dots between them, or a number.
    pub(super) fn path_parts(&mut self, path: Option<&Value>) -> Result<Vec<Value>, Error> {
        Ok(match path {
            None | Some(Value::None) => Vec::new(),
            Some(Value::Text(path)) => {
                self.limits.read(path.len())?;
                if path.len() > PATH {
                    return fail(format!("the path of an attribute is longer than {PATH} bytes"));
                }
                let number =
                    |part: &str| part.parse().ok().filter(|_| part.chars().all(|c| c.is_ascii_digit()));
                path.split('.')
                    .map(|part| number(part).map_or_else(|| Value::text(part), Value::Int))
                    .collect()
            }
            Some(other) => vec![other.clone()],
        })
    }

    /// Returns the attribute at the end of a path.
    pub(super) fn path(
        &mut self,
        value: &Value,
        parts: &[Value],
        default: Option<&Value>,
    ) -> Result<Value, Error> {
        let mut value = value.clone();
        for part in parts {
            self.limits.step()?;
            value = self.item(&value, part)?;
            if let Some(default) = default.filter(|_| value.is_undefined()) {
                value = default.clone();
            }
        }
        Ok(value)
    }
}
