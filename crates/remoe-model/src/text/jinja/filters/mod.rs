//! Filters as Jinja2's `filters.py`, and `tojson` as in transformers.

mod lists;
mod numbers;
mod sorting;
pub(super) mod texts;

use std::sync::Arc;

use super::access::abbreviated;
use super::calls::CallArguments;
use super::error::{Error, fail};
use super::json;
use super::python_text;
use super::renderer::Renderer;
use super::value::Value;

/// Longest path of an attribute in bytes.
const MAX_PATH_BYTES: usize = 4 << 10;

/// Names of all filters, including the unavailable ones.
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
    renderer: &mut Renderer<'_>,
    name: &str,
    value: Value,
    args: CallArguments,
) -> Result<Value, Error> {
    match name {
        "default" | "d" => {
            let [default, boolean] = args.bind(name, ["default_value", "boolean"], 0)?;
            let replaced =
                value.is_undefined() || (boolean.is_some_and(|flag| flag.is_truthy()) && !value.is_truthy());
            Ok(if replaced { default.unwrap_or_else(|| Value::text("")) } else { value })
        }
        "attr" => {
            let [attribute] = args.bind(name, ["name"], 1)?;
            match attribute {
                // Attributes of the Python object only, not items of a dictionary.
                Some(Value::Text(attribute))
                    if !matches!(value, Value::Map(_))
                        || super::methods::DICT_METHODS.contains(&&*attribute) =>
                {
                    renderer.attribute(&value, &attribute)
                }
                Some(Value::Text(attribute)) => Ok(Value::undefined(format!(
                    "'dict object' has no attribute '{}'",
                    abbreviated(&attribute)
                ))),
                _ => fail("attribute name must be string"),
            }
        }
        "length" | "count" => {
            args.expect_none(name)?;
            Ok(Value::from_count(renderer.length(&value)?))
        }
        "tojson" => json::to_json(renderer, &value, args),
        "abs" | "round" | "int" | "float" | "sum" | "filesizeformat" => {
            numbers::apply(renderer, name, value, args)
        }
        "sort" | "unique" | "min" | "max" | "groupby" | "dictsort" => {
            sorting::apply(renderer, name, &value, args)
        }
        "batch" | "slice" | "first" | "last" | "items" | "list" | "map" | "reject" | "rejectattr"
        | "reverse" | "select" | "selectattr" | "join" => lists::apply(renderer, name, value, args),
        "random" | "striptags" | "urlize" | "wordwrap" | "xmlattr" => {
            fail(format!("the filter '{name}' is not available"))
        }
        _ if NAMES.contains(&name) => texts::apply(renderer, name, &value, args),
        other => fail(format!("No filter named '{other}'.")),
    }
}

impl Renderer<'_> {
    /// Evaluates `str(value)`, as `soft_str` of Jinja2; a text is returned as it is.
    pub(super) fn soft_str(&mut self, value: &Value) -> Result<Arc<str>, Error> {
        match value {
            Value::Text(text) => Ok(text.clone()),
            other => Ok(python_text::to_str(&mut self.limits, other)?.into()),
        }
    }

    /// Splits the path of an attribute that a filter takes: names and numbers separated by dots, or a number.
    pub(super) fn parse_path(&mut self, path: Option<&Value>) -> Result<Vec<Value>, Error> {
        Ok(match path {
            None | Some(Value::None) => Vec::new(),
            Some(Value::Text(path)) => {
                self.limits.charge_read(path.len())?;
                if path.len() > MAX_PATH_BYTES {
                    return fail(format!("the path of an attribute is longer than {MAX_PATH_BYTES} bytes"));
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

    /// Follows a path of attributes from `value`; `default` replaces an undefined attribute.
    pub(super) fn resolve_path(
        &mut self,
        value: &Value,
        parts: &[Value],
        default: Option<&Value>,
    ) -> Result<Value, Error> {
        let mut value = value.clone();
        for part in parts {
            self.limits.charge_step()?;
            value = self.item(&value, part)?;
            if let Some(default) = default.filter(|_| value.is_undefined()) {
                value = default.clone();
            }
        }
        Ok(value)
    }
}
