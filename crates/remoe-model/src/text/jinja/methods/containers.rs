//! Methods of lists and dictionaries.

use std::rc::Rc;

use super::super::ast::Comparison;
use super::super::calls::CallArguments;
use super::super::error::{Error, fail};
use super::super::objects::{DictView, Object};
use super::super::python_text;
use super::super::renderer::Renderer;
use super::super::value::{Map, Value};

impl Renderer<'_> {
    pub(super) fn list_method(
        &mut self,
        owner: &Value,
        items: &[Value],
        name: &str,
        args: CallArguments,
    ) -> Result<Value, Error> {
        match name {
            "copy" => {
                args.expect_none(name)?;
                Ok(owner.clone())
            }
            "count" => {
                let [wanted] = args.bind(name, ["value"], 1)?;
                let wanted = wanted.unwrap_or(Value::None);
                let mut count = 0;
                for item in items {
                    count += usize::from(self.compare(Comparison::Eq, item, &wanted)?);
                }
                Ok(Value::from_count(count))
            }
            _ => {
                let [wanted, start, stop] = args.bind(name, ["value", "start", "stop"], 1)?;
                let wanted = wanted.unwrap_or(Value::None);
                let (start, stop) = slice_bounds(items.len(), start.as_ref(), stop.as_ref())?;
                for (index, item) in items.iter().enumerate().take(stop).skip(start) {
                    if self.compare(Comparison::Eq, item, &wanted)? {
                        return Ok(Value::from_count(index));
                    }
                }
                let wanted = python_text::repr(&mut self.limits, &wanted)?;
                fail(format!("{wanted} is not in list"))
            }
        }
    }

    pub(super) fn map_method(
        &mut self,
        map: &Rc<Map>,
        name: &str,
        args: CallArguments,
    ) -> Result<Value, Error> {
        match name {
            "get" => {
                if !args.named.is_empty() {
                    return fail("dict.get() takes no keyword arguments");
                }
                let [key, default] = args.bind(name, ["key", "default"], 1)?;
                let key = key.unwrap_or(Value::None);
                let found = map.get(&key.key(&mut self.limits)?).cloned();
                Ok(found.or(default).unwrap_or(Value::None))
            }
            "copy" => {
                args.expect_none(name)?;
                Ok(Value::Map(map.clone()))
            }
            "fromkeys" => self.dict_from_keys(args),
            _ => {
                args.expect_none(name)?;
                let view = match name {
                    "keys" => DictView::Keys,
                    "values" => DictView::Values,
                    _ => DictView::Items,
                };
                Ok(Value::object(Object::View(view, map.clone())))
            }
        }
    }
}

/// Resolves the start and stop arguments of a method, where negative ones count from the end.
pub(super) fn slice_bounds(
    length: usize,
    start: Option<&Value>,
    stop: Option<&Value>,
) -> Result<(usize, usize), Error> {
    let resolve = |value: Option<&Value>, default: usize| match value {
        None | Some(Value::None) => Ok(default),
        Some(value) => match value.as_int() {
            None => fail("slice indices must be integers or None or have an __index__ method"),
            Some(index) => {
                let size = i128::try_from(length).unwrap_or(i128::MAX);
                let index = if index < 0 { index.saturating_add(size).max(0) } else { index };
                Ok(usize::try_from(index).unwrap_or(usize::MAX))
            }
        },
    };
    Ok((resolve(start, 0)?, resolve(stop, length)?.min(length)))
}
