//! Attributes, items, slices and iteration, with the restrictions of Jinja2's sandbox.

use std::rc::Rc;
use std::sync::Arc;

use super::error::{Error, fail};
use super::methods;
use super::objects::Object;
use super::operators::expect_defined;
use super::python_text;
use super::renderer::Renderer;
use super::value::{Items, Value};

/// Longest name in the message of an undefined value, in bytes.
const MAX_NAME_BYTES: usize = 100;

/// Methods that the sandbox withholds because they modify their object, by Python's type.
const MUTATING_METHODS: [(&str, &[&str]); 2] = [
    ("list", &["append", "clear", "pop", "reverse", "insert", "sort", "extend", "remove"]),
    ("dict", &["clear", "pop", "popitem", "setdefault", "update"]),
];

impl Renderer<'_> {
    /// Evaluates `value.name`: an attribute of the Python object, or else an item.
    pub(super) fn attribute(&mut self, value: &Value, name: &Arc<str>) -> Result<Value, Error> {
        expect_defined(value)?;
        if let Some(attribute) = python_attribute(value, name) {
            return Ok(attribute);
        }
        let item = match value {
            Value::Map(map) => map.get_text(name).cloned(),
            _ => None,
        };
        Ok(item.unwrap_or_else(|| no_attribute(value, name)))
    }

    /// Evaluates `value[key]`: an item, or else an attribute of the Python object.
    pub(super) fn item(&mut self, value: &Value, key: &Value) -> Result<Value, Error> {
        expect_defined(value)?;
        let item = match value {
            Value::Map(map) => key.key(&mut self.limits).ok().and_then(|key| map.get(&key).cloned()),
            Value::List(items) | Value::Tuple(items) => {
                absolute_index(key, items.len()).and_then(|index| items.get(index).cloned())
            }
            Value::Text(text) => match key.as_int() {
                Some(_) => {
                    self.limits.charge_read(text.len())?;
                    let length = text.chars().count();
                    let character = absolute_index(key, length).and_then(|index| text.chars().nth(index));
                    character.map(|character| Value::text(character.encode_utf8(&mut [0; 4])))
                }
                None => None,
            },
            Value::Object(object) => match &**object {
                Object::Range(range) => {
                    let index = absolute_index(key, range.length).filter(|index| *index < range.length);
                    index.map(|index| range.get(index))
                }
                Object::Namespace(values) => {
                    key.as_text().and_then(|name| values.borrow().get_text(name).cloned())
                }
                _ => None,
            },
            _ => None,
        };
        if let Some(item) = item {
            return Ok(item);
        }
        match key {
            Value::Text(name) => {
                Ok(python_attribute(value, name).unwrap_or_else(|| no_attribute(value, name)))
            }
            other => {
                let key = python_text::repr(&mut self.limits, other)
                    .unwrap_or_else(|_| other.type_name().to_owned());
                Ok(Value::undefined(format!("{} has no element {}", described(value), abbreviated(&key))))
            }
        }
    }

    /// Evaluates `value[start:stop:step]`.
    pub(super) fn slice(&mut self, value: &Value, parts: [Option<Value>; 3]) -> Result<Value, Error> {
        expect_defined(value)?;
        let mut numbers = [None; 3];
        for (number, part) in numbers.iter_mut().zip(&parts) {
            *number = match part {
                None | Some(Value::None) => None,
                Some(part) => match part.as_int() {
                    Some(whole) => Some(whole),
                    None => {
                        return fail("slice indices must be integers or None or have an __index__ method");
                    }
                },
            };
        }
        let [start, stop, step] = numbers;
        if step == Some(0) {
            return fail("slice step cannot be zero");
        }
        match value {
            Value::Text(text) => {
                self.limits.charge_read(text.len())?;
                self.limits.charge_text(text.len())?;
                let sliced: String = match (start.unwrap_or(0), stop, step.unwrap_or(1)) {
                    (start, None, 1) if start >= 0 => {
                        text.chars().skip(usize::try_from(start).unwrap_or(usize::MAX)).collect()
                    }
                    (start, Some(stop), 1) if start >= 0 && stop >= 0 => {
                        let skipped = usize::try_from(start).unwrap_or(usize::MAX);
                        let taken = usize::try_from((stop - start).max(0)).unwrap_or(usize::MAX);
                        text.chars().skip(skipped).take(taken).collect()
                    }
                    _ => {
                        let characters: Vec<char> = text.chars().collect();
                        let indices = slice_indices(characters.len(), [start, stop, step]);
                        indices.filter_map(|index| characters.get(index)).collect()
                    }
                };
                Ok(Value::Text(sliced.into()))
            }
            Value::List(items) | Value::Tuple(items) => {
                self.limits.charge_list(items.len())?;
                let indices = slice_indices(items.len(), [start, stop, step]);
                let sliced = indices.filter_map(|index| items.get(index).cloned()).collect();
                Ok(if matches!(value, Value::List(_)) { Value::list(sliced) } else { Value::tuple(sliced) })
            }
            Value::Object(object) => match &**object {
                Object::Range(range) => {
                    self.limits.charge_list(range.length)?;
                    let indices = slice_indices(range.length, [start, stop, step]);
                    Ok(Value::list(indices.map(|index| range.get(index)).collect()))
                }
                other => fail(format!("'{}' object is not subscriptable", other.type_name())),
            },
            Value::Map(_) => fail("unhashable type: 'slice'"),
            other => fail(format!("'{}' object is not subscriptable", other.type_name())),
        }
    }

    /// Returns the items that a loop over `value` visits. A generator is empty afterwards.
    pub(super) fn iterate(&mut self, value: &Value) -> Result<Rc<Items>, Error> {
        let items = match value {
            Value::Undefined(_) => Vec::new(),
            Value::List(items) | Value::Tuple(items) => return Ok(items.clone()),
            Value::Text(text) => {
                self.limits.charge_read(text.len())?;
                self.limits.charge_list(text.chars().count())?;
                text.chars().map(|character| Value::text(character.encode_utf8(&mut [0; 4]))).collect()
            }
            Value::Map(map) => {
                self.limits.charge_list(map.len())?;
                map.entries().iter().map(|(key, _)| key.clone()).collect()
            }
            Value::Object(object) => match &**object {
                Object::Generator(items) => {
                    let mut items = items.take().into_values();
                    items.reverse();
                    items
                }
                Object::View(view, map) => {
                    self.limits.charge_list(map.len())?;
                    view.items(map)
                }
                Object::Range(range) => {
                    self.limits.charge_list(range.length)?;
                    range.items()
                }
                other => return fail(format!("'{}' object is not iterable", other.type_name())),
            },
            other => return fail(format!("'{}' object is not iterable", other.type_name())),
        };
        Ok(Rc::new(Items::new(items)))
    }

    /// Evaluates `len(value)`; an undefined value has length 0.
    pub(super) fn length(&mut self, value: &Value) -> Result<usize, Error> {
        match value {
            Value::Undefined(_) => Ok(0),
            Value::Text(text) => {
                self.limits.charge_read(text.len())?;
                Ok(text.chars().count())
            }
            Value::List(items) | Value::Tuple(items) => Ok(items.len()),
            Value::Map(map) => Ok(map.len()),
            other => {
                let length = if let Value::Object(object) = other { object.length() } else { None };
                length
                    .ok_or_else(|| Error::new(format!("object of type '{}' has no len()", other.type_name())))
            }
        }
    }
}

/// Describes a value as Jinja2's messages do.
fn described(value: &Value) -> String {
    match value {
        Value::None => "None".to_owned(),
        other => format!("'{} object'", other.type_name()),
    }
}

/// Returns the undefined value of a missing attribute.
fn no_attribute(value: &Value, name: &str) -> Value {
    Value::undefined(format!("{} has no attribute '{}'", described(value), abbreviated(name)))
}

/// Shortens a name for the message of an undefined value, as a template can store many such values.
pub(super) fn abbreviated(name: &str) -> String {
    let mut end = name.len().min(MAX_NAME_BYTES);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    let kept = name.get(..end).unwrap_or_default();
    if end < name.len() { format!("{kept}…") } else { kept.to_owned() }
}

/// Returns an attribute that the Python object itself has, undefined if the sandbox withholds it.
fn python_attribute(value: &Value, name: &Arc<str>) -> Option<Value> {
    let type_name = value.type_name();
    let mutating = MUTATING_METHODS.iter().find(|(of, _)| *of == type_name);
    if name.starts_with("__") && name.ends_with("__")
        || mutating.is_some_and(|(_, all)| all.contains(&&**name))
    {
        let message =
            format!("access to attribute '{}' of '{type_name}' object is unsafe.", abbreviated(name));
        return Some(Value::undefined(message));
    }
    let method = || Some(Value::object(Object::Method(value.clone(), name.clone())));
    match value {
        Value::Text(_) if methods::TEXT_METHODS.contains(&&**name) => method(),
        Value::List(_) if ["index", "count", "copy"].contains(&&**name) => method(),
        Value::Tuple(items) => match (&**name, items.as_slice()) {
            ("index" | "count", _) => method(),
            // `groupby` returns named tuples.
            ("grouper", [grouper, Value::List(_)]) => Some(grouper.clone()),
            ("list", [_, list @ Value::List(_)]) => Some(list.clone()),
            _ => None,
        },
        Value::Bool(_) | Value::Int(_) | Value::Float(_) => match &**name {
            "real" => Some(value.as_int().map_or_else(|| value.clone(), Value::Int)),
            "imag" => Some(if value.as_int().is_some() { Value::Int(0) } else { Value::Float(0.0) }),
            "numerator" => value.as_int().map(Value::Int),
            "denominator" => value.as_int().map(|_| Value::Int(1)),
            _ => None,
        },
        Value::Map(_) if methods::DICT_METHODS.contains(&&**name) => method(),
        Value::Object(object) => match &**object {
            Object::Namespace(values) => values.borrow().get_text(name).cloned(),
            Object::Loop(_) if ["cycle", "changed"].contains(&&**name) => method(),
            Object::Loop(state) => state.attribute(name),
            Object::Cycler(items, position) => match &**name {
                "current" => items.get(position.get()).cloned(),
                "next" | "reset" => method(),
                _ => None,
            },
            Object::Macro(_, _, macro_name) if &**name == "name" => Some(Value::Text(macro_name.clone())),
            Object::Function("dict") if &**name == "fromkeys" => method(),
            _ => None,
        },
        _ => None,
    }
}

/// Resolves an index; a negative one counts from the end.
fn absolute_index(key: &Value, length: usize) -> Option<usize> {
    let index = key.as_int()?;
    let length = i128::try_from(length).ok()?;
    let index = if index < 0 { index + length } else { index };
    usize::try_from(index).ok()
}

/// Returns the indices that a slice selects, as Python's `slice.indices`.
fn slice_indices(length: usize, [start, stop, step]: [Option<i128>; 3]) -> impl Iterator<Item = usize> {
    let length = i128::try_from(length).unwrap_or(i128::MAX);
    let step = step.unwrap_or(1);
    let (low, high) = if step < 0 { (-1, length - 1) } else { (0, length) };
    let bound = |part: Option<i128>, default: i128| match part {
        None => default,
        Some(part) if part < 0 => part.saturating_add(length).max(low),
        Some(part) => part.min(high),
    };
    let (first, last) = if step < 0 { (high, low) } else { (low, high) };
    let (start, stop) = (bound(start, first), bound(stop, last));
    let mut next = Some(start);
    std::iter::from_fn(move || {
        let index = next.filter(|index| if step < 0 { *index > stop } else { *index < stop })?;
        next = index.checked_add(step);
        usize::try_from(index).ok()
    })
}
