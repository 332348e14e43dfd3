//! Methods of Python's values.

mod containers;
pub(super) mod text;

use super::calls::Given;
use super::error::{Error, fail};
use super::machine::Machine;
use super::objects::Object;
use super::value::Value;

/// Methods of texts.
pub(super) const TEXT: [&str; 47] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];

/// Methods of objects.
pub(super) const MAP: [&str; 6] = ["copy", "fromkeys", "get", "items", "keys", "values"];

impl Machine<'_> {
    pub(super) fn call_method(&mut self, owner: &Value, name: &str, given: Given) -> Result<Value, Error> {
        match owner {
            Value::Text(text) => self.text_method(text, name, given),
            Value::List(items) | Value::Tuple(items) => self.list_method(owner, items, name, given),
            Value::Map(map) => self.map_method(map, name, given),
            Value::Object(object) => match &**object {
                Object::Loop(state) if name == "cycle" => {
                    if given.positional.is_empty() || !given.named.is_empty() {
                        return fail("no items for cycling given");
                    }
                    let place = state.index.get() % given.positional.len();
                    Ok(given.positional.into_iter().nth(place).unwrap_or(Value::None))
                }
                Object::Loop(state) => {
                    // A loop that held itself would never be dropped.
                    given.positional.iter().try_for_each(|value| self.limits.keep(value, 1))?;
                    let now = Value::tuple(given.positional.clone());
                    let before = state.changed.replace(Some(given.positional)).map(Value::tuple);
                    let same = match before {
                        Some(before) => self.compare(super::ast::Comparison::Eq, &before, &now)?,
                        None => false,
                    };
                    Ok(Value::Bool(!same))
                }
                Object::Cycler(items, position) => {
                    given.none(name)?;
                    let current = position.get();
                    position.set(if name == "reset" { 0 } else { (current + 1) % items.len().max(1) });
                    Ok(items.get(current).filter(|_| name == "next").cloned().unwrap_or(Value::None))
                }
                Object::Function("dict") => self.keyed(given),
                other => fail(format!("'{}' object has no method '{name}'", other.type_name())),
            },
            other => fail(format!("'{}' object has no method '{name}'", other.type_name())),
        }
    }
}
