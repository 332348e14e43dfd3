//! Methods of lists and dictionaries.

use std::rc::Rc;

use super::super::ast::Comparison;
use super::super::calls::Given;
use super::super::error::{Error, fail};
use super::super::machine::Machine;
use super::super::objects::{Object, View};
use super::super::print;
use super::super::value::{Map, Value};

impl Machine<'_> {
    pub(super) fn list_method(
        &mut self,
        owner: &Value,
        items: &[Value],
        name: &str,
        given: Given,
    ) -> Result<Value, Error> {
        match name {
            "copy" => {
                given.none(name)?;
                Ok(owner.clone())
            }
            "count" => {
                let [wanted] = given.bind(name, ["value"], 1)?;
                let wanted = wanted.unwrap_or(Value::None);
                let mut count = 0;
                for item in items {
                    count += usize::from(self.compare(Comparison::Eq, item, &wanted)?);
                }
                Ok(Value::count(count))
            }
            _ => {
                let [wanted, start, stop] = given.bind(name, ["value", "start", "stop"], 1)?;
                let wanted = wanted.unwrap_or(Value::None);
                let (start, stop) = bounds(items.len(), start.as_ref(), stop.as_ref())?;
                for (index, item) in items.iter().enumerate().take(stop).skip(start) {
                    if self.compare(Comparison::Eq, item, &wanted)? {
                        return Ok(Value::count(index));
                    }
                }
                let wanted = print::repr(&mut self.limits, &wanted)?;
                fail(format!("{wanted} is not in list"))
            }
        }
    }

    pub(super) fn map_method(&mut self, map: &Rc<Map>, name: &str, given: Given) -> Result<Value, Error> {
        match name {
            "get" => {
                if !given.named.is_empty() {
                    return fail("dict.get() takes no keyword arguments");
                }
                let [key, default] = given.bind(name, ["key", "default"], 1)?;
                let key = key.unwrap_or(Value::None);
                let found = map.get(&key.key(&mut self.limits)?).cloned();
                Ok(found.or(default).unwrap_or(Value::None))
            }
            "copy" => {
                given.none(name)?;
                Ok(Value::Map(map.clone()))
            }
            "fromkeys" => self.keyed(given),
            _ => {
                given.none(name)?;
                let view = match name {
                    "keys" => View::Keys,
                    "values" => View::Values,
                    _ => View::Items,
                };
                Ok(Value::object(Object::View(view, map.clone())))
            }
        }
    }
}

/// Start and end as Python's methods take them: counted from the end where they are negative.
pub(super) fn bounds(
    length: usize,
    start: Option<&Value>,
    stop: Option<&Value>,
) -> Result<(usize, usize), Error> {
    let place = |value: Option<&Value>, default: usize| match value {
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
    Ok((place(start, 0)?, place(stop, length)?.min(length)))
}
