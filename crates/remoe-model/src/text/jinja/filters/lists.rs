//! Filters of lists.

use std::sync::Arc;

use super::super::calls::CallArguments;
use super::super::error::{Error, fail};
use super::super::objects::Object;
use super::super::predicates;
use super::super::renderer::Renderer;
use super::super::value::Value;

pub(super) fn apply(
    renderer: &mut Renderer<'_>,
    name: &str,
    value: Value,
    args: CallArguments,
) -> Result<Value, Error> {
    match name {
        "map" => map(renderer, &value, args),
        "select" | "reject" | "selectattr" | "rejectattr" => select(renderer, name, &value, args),
        "batch" => batch(renderer, &value, args),
        "slice" => slice(renderer, &value, args),
        "join" => join(renderer, &value, args),
        "first" => {
            args.expect_none(name)?;
            let first = renderer.iterate(&value)?.first().cloned();
            Ok(first.unwrap_or_else(|| Value::undefined("No first item, sequence was empty.")))
        }
        "last" => {
            args.expect_none(name)?;
            refuse_generator(&value)?;
            let last = renderer.iterate(&value)?.last().cloned();
            Ok(last.unwrap_or_else(|| Value::undefined("No last item, sequence was empty.")))
        }
        "items" => {
            args.expect_none(name)?;
            match &value {
                Value::Undefined(_) => Ok(Object::generator(Vec::new())),
                Value::Map(map) => {
                    renderer.limits.charge_list(map.len())?;
                    Ok(Object::generator(super::super::objects::DictView::Items.items(map)))
                }
                _ => fail("Can only get item pairs from a mapping."),
            }
        }
        "list" => {
            args.expect_none(name)?;
            Ok(Value::List(renderer.iterate(&value)?))
        }
        _ => {
            args.expect_none(name)?;
            if let Value::Text(text) = &value {
                renderer.limits.charge_text(text.len())?;
                return Ok(Value::Text(text.chars().rev().collect::<String>().into()));
            }
            let items = renderer.iterate(&value).map_err(|_| Error::new("argument must be iterable"))?;
            renderer.limits.charge_list(items.len())?;
            let items = items.iter().rev().cloned().collect();
            // Python iterates a reversible value lazily, but first copies a generator to a list.
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

/// Removes a keyword argument and returns it.
fn take_named(args: &mut CallArguments, wanted: &str) -> Option<Value> {
    let index = args.named.iter().position(|(name, _)| **name == *wanted)?;
    Some(args.named.remove(index).1)
}

fn map(renderer: &mut Renderer<'_>, value: &Value, mut args: CallArguments) -> Result<Value, Error> {
    if !value.is_truthy() {
        return Ok(Object::generator(Vec::new()));
    }
    let items = renderer.iterate(value)?;
    renderer.limits.charge_list(items.len())?;
    let mut mapped = Vec::with_capacity(items.len());
    if args.positional.is_empty() {
        let Some(attribute) = take_named(&mut args, "attribute") else {
            return fail("map requires a filter argument");
        };
        let default = take_named(&mut args, "default").filter(|default| !matches!(default, Value::None));
        if let Some((name, _)) = args.named.first() {
            return fail(format!("Unexpected keyword argument '{name}'"));
        }
        let path = renderer.parse_path(Some(&attribute))?;
        for item in &*items {
            mapped.push(renderer.resolve_path(item, &path, default.as_ref())?);
        }
    } else {
        let Value::Text(filter) = args.positional.remove(0) else {
            return fail("map requires the name of a filter");
        };
        for item in &*items {
            renderer.limits.charge_step()?;
            let again = CallArguments { positional: args.positional.clone(), named: args.named.clone() };
            mapped.push(super::apply(renderer, &filter, item.clone(), again)?);
        }
    }
    Ok(Object::generator(mapped))
}

fn select(
    renderer: &mut Renderer<'_>,
    name: &str,
    value: &Value,
    mut args: CallArguments,
) -> Result<Value, Error> {
    if !value.is_truthy() {
        return Ok(Object::generator(Vec::new()));
    }
    let attribute = match name.ends_with("attr") {
        true if args.positional.is_empty() => return fail("Missing parameter for attribute name"),
        true => Some(args.positional.remove(0)),
        false => None,
    };
    let test: Option<Arc<str>> = if args.positional.is_empty() {
        None
    } else {
        Some(match args.positional.remove(0) {
            Value::Text(test) => test,
            _ => return fail("expected the name of a test"),
        })
    };
    let path = attribute.map(|attribute| renderer.parse_path(Some(&attribute))).transpose()?;
    let items = renderer.iterate(value)?;
    renderer.limits.charge_list(items.len())?;
    let mut kept = Vec::new();
    for item in &*items {
        renderer.limits.charge_step()?;
        let tested = match &path {
            Some(path) => renderer.resolve_path(item, path, None)?,
            None => item.clone(),
        };
        let passes = match &test {
            Some(test) => {
                let again = CallArguments { positional: args.positional.clone(), named: args.named.clone() };
                predicates::apply(renderer, test, &tested, again)?
            }
            None => tested.is_truthy(),
        };
        if passes == name.starts_with("select") {
            kept.push(item.clone());
        }
    }
    Ok(Object::generator(kept))
}

/// Returns an argument that must be a whole number above 0.
fn expect_count(value: Option<Value>) -> Result<usize, Error> {
    let value = value.unwrap_or(Value::None);
    match value.as_int().map(usize::try_from) {
        Some(Ok(count)) if count > 0 => Ok(count),
        _ => fail("expected a whole number above 0"),
    }
}

fn batch(renderer: &mut Renderer<'_>, value: &Value, args: CallArguments) -> Result<Value, Error> {
    let [line, fill] = args.bind("batch", ["linecount", "fill_with"], 1)?;
    let line = expect_count(line)?;
    let items = renderer.iterate(value)?;
    renderer.limits.charge_list(items.len())?;
    let mut batches: Vec<Vec<Value>> = items.chunks(line).map(<[Value]>::to_vec).collect();
    if let (Some(fill), Some(last)) = (fill.filter(|fill| !matches!(fill, Value::None)), batches.last_mut()) {
        renderer.limits.charge_list(line)?;
        last.resize(line, fill);
    }
    Ok(Object::generator(batches.into_iter().map(Value::list).collect()))
}

fn slice(renderer: &mut Renderer<'_>, value: &Value, args: CallArguments) -> Result<Value, Error> {
    let [slices, fill] = args.bind("slice", ["slices", "fill_with"], 1)?;
    let slices = expect_count(slices)?;
    let items = renderer.iterate(value)?;
    renderer.limits.charge_list(items.len())?;
    renderer.limits.charge_list(slices)?;
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

fn join(renderer: &mut Renderer<'_>, value: &Value, args: CallArguments) -> Result<Value, Error> {
    let [between, attribute] = args.bind("join", ["d", "attribute"], 0)?;
    let between = match between {
        Some(between) => renderer.soft_str(&between)?,
        None => "".into(),
    };
    let path = renderer.parse_path(attribute.as_ref())?;
    let items = renderer.iterate(value)?;
    renderer.limits.charge_list(items.len())?;
    let mut texts = Vec::with_capacity(items.len());
    for item in &*items {
        renderer.limits.charge_visit(0)?;
        let item = renderer.resolve_path(item, &path, None)?;
        texts.push(renderer.soft_str(&item)?);
    }
    renderer.join_texts(&between, &texts)
}
