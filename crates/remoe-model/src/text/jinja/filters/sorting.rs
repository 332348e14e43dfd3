//! Filters that compare items.

use std::cmp::Ordering;

use super::super::ast::Comparison;
use super::super::calls::Given;
use super::super::error::{Error, fail};
use super::super::machine::Machine;
use super::super::objects::Object;
use super::super::operators::order;
use super::super::value::Value;

pub(super) fn apply(
    machine: &mut Machine<'_>,
    name: &str,
    value: &Value,
    given: Given,
) -> Result<Value, Error> {
    match name {
        "sort" => {
            let [reverse, case, attribute] =
                given.bind(name, ["reverse", "case_sensitive", "attribute"], 0)?;
            let paths: Vec<Vec<Value>> = match attribute {
                Some(Value::Text(paths)) => {
                    // Refuses a text that is too long before it is split.
                    machine.path_parts(Some(&Value::Text(paths.clone())))?;
                    let split = paths.split(',').map(Value::text);
                    split.map(|path| machine.path_parts(Some(&path))).collect::<Result<_, _>>()?
                }
                other => vec![machine.path_parts(other.as_ref())?],
            };
            let mut keyed = Vec::new();
            for item in &*machine.iterate(value)? {
                let mut keys = Vec::new();
                for path in &paths {
                    let key = machine.path(item, path, None)?;
                    keys.push(folded(machine, key, truth(case.as_ref()))?);
                }
                let key = if keys.len() == 1 { keys.pop().unwrap_or(Value::None) } else { Value::list(keys) };
                keyed.push((key, item.clone()));
            }
            Ok(Value::list(sorted(machine, keyed, truth(reverse.as_ref()))?))
        }
        "dictsort" => {
            let [case, by, reverse] = given.bind(name, ["case_sensitive", "by", "reverse"], 0)?;
            let by_value = match by.as_ref().map_or(Some("key"), Value::as_text) {
                Some("key") => false,
                Some("value") => true,
                _ => return fail("You can only sort by either \"key\" or \"value\""),
            };
            let Value::Map(map) = value else {
                return match value {
                    Value::Undefined(message) => fail(&**message),
                    other => fail(format!("'{}' object has no attribute 'items'", other.type_name())),
                };
            };
            let mut keyed = Vec::new();
            for (key, item) in map.entries() {
                let by = if by_value { item } else { key };
                let by = folded(machine, by.clone(), truth(case.as_ref()))?;
                keyed.push((by, Value::tuple(vec![key.clone(), item.clone()])));
            }
            Ok(Value::list(sorted(machine, keyed, truth(reverse.as_ref()))?))
        }
        "groupby" => group(machine, value, given),
        "unique" => {
            let [case, attribute] = given.bind(name, ["case_sensitive", "attribute"], 0)?;
            let path = machine.path_parts(attribute.as_ref())?;
            let items = machine.iterate(value)?;
            // Of keys and of items.
            machine.limits.build_list(items.len())?;
            machine.limits.build_list(items.len())?;
            let mut seen = std::collections::HashSet::new();
            let mut kept = Vec::new();
            for item in &*items {
                let key = machine.path(item, &path, None)?;
                let key = folded(machine, key, truth(case.as_ref()))?;
                if seen.insert(key.key(&mut machine.limits)?) {
                    kept.push(item.clone());
                }
            }
            Ok(Object::generator(kept))
        }
        _ => {
            let [case, attribute] = given.bind(name, ["case_sensitive", "attribute"], 0)?;
            let path = machine.path_parts(attribute.as_ref())?;
            let mut best: Option<(Value, Value)> = None;
            for item in &*machine.iterate(value)? {
                let key = machine.path(item, &path, None)?;
                let key = folded(machine, key, truth(case.as_ref()))?;
                let better = match &best {
                    None => true,
                    Some((found, _)) if name == "max" => machine.compare(Comparison::Gt, &key, found)?,
                    Some((found, _)) => machine.compare(Comparison::Lt, &key, found)?,
                };
                if better {
                    best = Some((key, item.clone()));
                }
            }
            Ok(match best {
                Some((_, item)) => item,
                None => Value::undefined("No aggregated item, sequence was empty."),
            })
        }
    }
}

fn truth(value: Option<&Value>) -> bool {
    value.is_some_and(Value::truth)
}

/// A text in lower case unless cases differ.
fn folded(machine: &mut Machine<'_>, value: Value, case_sensitive: bool) -> Result<Value, Error> {
    match value {
        Value::Text(text) if !case_sensitive => {
            machine.limits.build(text.len())?;
            Ok(Value::Text(text.to_lowercase().into()))
        }
        other => Ok(other),
    }
}

/// The items in the order of their keys; equal ones stay as they are.
fn sorted(
    machine: &mut Machine<'_>,
    mut keyed: Vec<(Value, Value)>,
    reverse: bool,
) -> Result<Vec<Value>, Error> {
    machine.limits.build_list(keyed.len())?;
    if reverse {
        keyed.reverse();
    }
    let mut width = 1;
    while width < keyed.len() {
        let mut merged = Vec::with_capacity(keyed.len());
        for pair in keyed.chunks(width.saturating_mul(2)) {
            let (left, right) = pair.split_at(width.min(pair.len()));
            let (mut left, mut right) = (left.iter().peekable(), right.iter().peekable());
            while let (Some((a, _)), Some((b, _))) = (left.peek(), right.peek()) {
                let first = order(&mut machine.limits, b, a, "<", 0)? == Some(Ordering::Less);
                merged.extend(if first { right.next() } else { left.next() }.cloned());
            }
            merged.extend(left.cloned());
            merged.extend(right.cloned());
        }
        keyed = merged;
        width = width.saturating_mul(2);
    }
    let mut items: Vec<Value> = keyed.into_iter().map(|(_, item)| item).collect();
    if reverse {
        items.reverse();
    }
    Ok(items)
}

fn group(machine: &mut Machine<'_>, value: &Value, given: Given) -> Result<Value, Error> {
    let [attribute, default, case] = given.bind("groupby", ["attribute", "default", "case_sensitive"], 1)?;
    let (attribute, default) =
        (attribute.unwrap_or(Value::None), default.filter(|d| !matches!(d, Value::None)));
    let path = machine.path_parts(Some(&attribute))?;
    let mut keyed = Vec::new();
    for item in &*machine.iterate(value)? {
        let key = machine.path(item, &path, default.as_ref())?;
        keyed.push((folded(machine, key, truth(case.as_ref()))?, item.clone()));
    }
    let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
    for item in sorted(machine, keyed, false)? {
        let grouper = machine.path(&item, &path, default.as_ref())?;
        let key = folded(machine, grouper.clone(), truth(case.as_ref()))?;
        match groups.last_mut() {
            Some((last, _, items)) if machine.compare(Comparison::Eq, last, &key)? => items.push(item),
            _ => groups.push((key, grouper, vec![item])),
        }
    }
    let group = |(_, grouper, items)| Value::tuple(vec![grouper, Value::list(items)]);
    Ok(Value::list(groups.into_iter().map(group).collect()))
}
