//! Filters of lists.

use std::sync::Arc;

use super::super::calls::Given;
use super::super::error::{Error, fail};
use super::super::machine::Machine;
use super::super::objects::Object;
use super::super::tests;
use super::super::value::Value;

pub(super) fn apply(
    machine: &mut Machine<'_>,
    name: &str,
    value: Value,
    given: Given,
) -> Result<Value, Error> {
    match name {
        "map" => map(machine, &value, given),
        "select" | "reject" | "selectattr" | "rejectattr" => select(machine, name, &value, given),
        "batch" => batch(machine, &value, given),
        "slice" => slice(machine, &value, given),
        "join" => join(machine, &value, given),
        "first" => {
            given.none(name)?;
            let first = machine.iterate(&value)?.first().cloned();
            Ok(first.unwrap_or_else(|| Value::undefined("No first item, sequence was empty.")))
        }
        "last" => {
            given.none(name)?;
            refuse_generator(&value)?;
            let last = machine.iterate(&value)?.last().cloned();
            Ok(last.unwrap_or_else(|| Value::undefined("No last item, sequence was empty.")))
        }
        "items" => {
            given.none(name)?;
            match &value {
                Value::Undefined(_) => Ok(Object::generator(Vec::new())),
                Value::Map(map) => {
                    machine.limits.build_list(map.len())?;
                    Ok(Object::generator(super::super::objects::View::Items.items(map)))
                }
                _ => fail("Can only get item pairs from a mapping."),
            }
        }
        "list" => {
            given.none(name)?;
            Ok(Value::List(machine.iterate(&value)?))
        }
        _ => {
            given.none(name)?;
            if let Value::Text(text) = &value {
                machine.limits.build(text.len())?;
                return Ok(Value::Text(text.chars().rev().collect::<String>().into()));
            }
            let items = machine.iterate(&value).map_err(|_| Error::new("argument must be iterable"))?;
            machine.limits.build_list(items.len())?;
            let items = items.iter().rev().cloned().collect();
            // What Python cannot go over from its end becomes a list first.
            let is_list = refuse_generator(&value).is_err();
            Ok(if is_list { Value::list(items) } else { Object::generator(items) })
        }
    }
}

fn refuse_generator(value: &Value) -> Result<(), Error> {
    match value {
        Value::Object(object) if matches!(**object, Object::Generator(_)) => {
            fail("'generator' object is not reversible")
        }
        _ => Ok(()),
    }
}

/// A named argument, taken out.
fn take(given: &mut Given, wanted: &str) -> Option<Value> {
    let place = given.named.iter().position(|(name, _)| **name == *wanted)?;
    Some(given.named.remove(place).1)
}

fn map(machine: &mut Machine<'_>, value: &Value, mut given: Given) -> Result<Value, Error> {
    if !value.truth() {
        return Ok(Object::generator(Vec::new()));
    }
    let items = machine.iterate(value)?;
    machine.limits.build_list(items.len())?;
    let mut mapped = Vec::with_capacity(items.len());
    if given.positional.is_empty() {
        let Some(attribute) = take(&mut given, "attribute") else {
            return fail("map requires a filter argument");
        };
        let default = take(&mut given, "default").filter(|default| !matches!(default, Value::None));
        if let Some((name, _)) = given.named.first() {
            return fail(format!("Unexpected keyword argument '{name}'"));
        }
        let path = machine.path_parts(Some(&attribute))?;
        for item in &*items {
            mapped.push(machine.path(item, &path, default.as_ref())?);
        }
    } else {
        let Value::Text(filter) = given.positional.remove(0) else {
            return fail("map requires the name of a filter");
        };
        for item in &*items {
            machine.limits.step()?;
            let again = Given { positional: given.positional.clone(), named: given.named.clone() };
            mapped.push(super::apply(machine, &filter, item.clone(), again)?);
        }
    }
    Ok(Object::generator(mapped))
}

fn select(machine: &mut Machine<'_>, name: &str, value: &Value, mut given: Given) -> Result<Value, Error> {
    if !value.truth() {
        return Ok(Object::generator(Vec::new()));
    }
    let attribute = match name.ends_with("attr") {
        true if given.positional.is_empty() => return fail("Missing parameter for attribute name"),
        true => Some(given.positional.remove(0)),
        false => None,
    };
    let test: Option<Arc<str>> = if given.positional.is_empty() {
        None
    } else {
        Some(match given.positional.remove(0) {
            Value::Text(test) => test,
            _ => return fail("expected the name of a test"),
        })
    };
    let path = attribute.map(|attribute| machine.path_parts(Some(&attribute))).transpose()?;
    let items = machine.iterate(value)?;
    machine.limits.build_list(items.len())?;
    let mut kept = Vec::new();
    for item in &*items {
        machine.limits.step()?;
        let tested = match &path {
            Some(path) => machine.path(item, path, None)?,
            None => item.clone(),
        };
        let passes = match &test {
            Some(test) => {
                let again = Given { positional: given.positional.clone(), named: given.named.clone() };
                tests::apply(machine, test, &tested, again)?
            }
            None => tested.truth(),
        };
        if passes == name.starts_with("select") {
            kept.push(item.clone());
        }
    }
    Ok(Object::generator(kept))
}

/// A count that a filter was given.
fn count(value: Option<Value>) -> Result<usize, Error> {
    let value = value.unwrap_or(Value::None);
    match value.as_int().map(usize::try_from) {
        Some(Ok(count)) if count > 0 => Ok(count),
        _ => fail("expected a whole number above 0"),
    }
}

fn batch(machine: &mut Machine<'_>, value: &Value, given: Given) -> Result<Value, Error> {
    let [line, fill] = given.bind("batch", ["linecount", "fill_with"], 1)?;
    let line = count(line)?;
    let items = machine.iterate(value)?;
    machine.limits.build_list(items.len())?;
    let mut batches: Vec<Vec<Value>> = items.chunks(line).map(<[Value]>::to_vec).collect();
    if let (Some(fill), Some(last)) = (fill.filter(|fill| !matches!(fill, Value::None)), batches.last_mut()) {
        machine.limits.build_list(line)?;
        last.resize(line, fill);
    }
    Ok(Object::generator(batches.into_iter().map(Value::list).collect()))
}

fn slice(machine: &mut Machine<'_>, value: &Value, given: Given) -> Result<Value, Error> {
    let [slices, fill] = given.bind("slice", ["slices", "fill_with"], 1)?;
    let slices = count(slices)?;
    let items = machine.iterate(value)?;
    machine.limits.build_list(items.len())?;
    machine.limits.build_list(slices)?;
    let (each, longer) = (items.len() / slices, items.len() % slices);
    let mut rest = items.iter().cloned();
    let mut sliced = Vec::new();
    for number in 0..slices {
        let mut part: Vec<Value> = rest.by_ref().take(each + usize::from(number < longer)).collect();
        if let Some(fill) = fill.as_ref().filter(|fill| !matches!(fill, Value::None) && number >= longer) {
            part.push(fill.clone());
        }
        sliced.push(Value::list(part));
    }
    Ok(Object::generator(sliced))
}

fn join(machine: &mut Machine<'_>, value: &Value, given: Given) -> Result<Value, Error> {
    let [between, attribute] = given.bind("join", ["d", "attribute"], 0)?;
    let between = match between {
        Some(between) => machine.soft_text(&between)?,
        None => "".into(),
    };
    let path = machine.path_parts(attribute.as_ref())?;
    let items = machine.iterate(value)?;
    machine.limits.build_list(items.len())?;
    let mut texts = Vec::with_capacity(items.len());
    for item in &*items {
        machine.limits.look(0)?;
        let item = machine.path(item, &path, None)?;
        texts.push(machine.soft_text(&item)?);
    }
    machine.join_texts(&between, &texts)
}
