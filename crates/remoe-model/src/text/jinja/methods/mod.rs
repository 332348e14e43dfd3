//! Methods of Python's values.

mod containers;
pub(super) mod text;

use super::calls::CallArguments;
use super::error::{Error, fail};
use super::objects::Object;
use super::renderer::Renderer;
use super::value::Value;

/// Names of the methods of texts.
pub(super) const TEXT_METHODS: [&str; 47] = [
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

/// Names of the methods of dictionaries.
pub(super) const DICT_METHODS: [&str; 6] = ["copy", "fromkeys", "get", "items", "keys", "values"];

impl Renderer<'_> {
    pub(super) fn call_method(
        &mut self,
        owner: &Value,
        name: &str,
        args: CallArguments,
    ) -> Result<Value, Error> {
        match owner {
            Value::Text(text) => self.text_method(text, name, args),
            Value::List(items) | Value::Tuple(items) => self.list_method(owner, items, name, args),
            Value::Map(map) => self.map_method(map, name, args),
            Value::Object(object) => match &**object {
                Object::Loop(state) if name == "cycle" => {
                    if args.positional.is_empty() || !args.named.is_empty() {
                        return fail("no items for cycling given");
                    }
                    let index = state.index.get() % args.positional.len();
                    Ok(args.positional.into_iter().nth(index).unwrap_or(Value::None))
                }
                Object::Loop(state) => {
                    // A loop that contained itself would never be dropped.
                    args.positional.iter().try_for_each(|value| self.limits.check_stored(value, 1))?;
                    let now = Value::tuple(args.positional.clone());
                    let before = state.changed.replace(Some(args.positional)).map(Value::tuple);
                    let same = match before {
                        Some(before) => self.compare(super::ast::Comparison::Eq, &before, &now)?,
                        None => false,
                    };
                    Ok(Value::Bool(!same))
                }
                Object::Cycler(items, position) => {
                    args.expect_none(name)?;
                    let current = position.get();
                    position.set(if name == "reset" { 0 } else { (current + 1) % items.len().max(1) });
                    Ok(items.get(current).filter(|_| name == "next").cloned().unwrap_or(Value::None))
                }
                Object::Function("dict") => self.dict_from_keys(args),
                other => fail(format!("'{}' object has no method '{name}'", other.type_name())),
            },
            other => fail(format!("'{}' object has no method '{name}'", other.type_name())),
        }
    }
}
