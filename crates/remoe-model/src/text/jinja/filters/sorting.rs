//! Filters that compare items.

use std::cmp::Ordering;

use super::super::ast::Comparison;
use super::super::calls::CallArguments;
use super::super::error::{Error, fail};
use super::super::objects::Object;
use super::super::operators::ordering;
use super::super::renderer::Renderer;
use super::super::value::Value;

pub(super) fn apply(
    renderer: &mut Renderer<'_>,
    name: &str,
    value: &Value,
    args: CallArguments,
) -> Result<Value, Error> {
    match name {
        "sort" => {
            let [reverse, case, attribute] =
                args.bind(name, ["reverse", "case_sensitive", "attribute"], 0)?;
            let paths: Vec<Vec<Value>> = match attribute {
                Some(Value::Text(paths)) => {
                    // Checks the length of the text before splitting it.
                    renderer.parse_path(Some(&Value::Text(paths.clone())))?;
                    let split = paths.split(',').map(Value::text);
                    split.map(|path| renderer.parse_path(Some(&path))).collect::<Result<_, _>>()?
                }
                other => vec![renderer.parse_path(other.as_ref())?],
            };
            let mut keyed = Vec::new();
            for item in &*renderer.iterate(value)? {
                let mut keys = Vec::new();
                for path in &paths {
                    let key = renderer.resolve_path(item, path, None)?;
                    keys.push(sort_key(renderer, key, is_set(case.as_ref()))?);
                }
                let key = if keys.len() == 1 { keys.pop().unwrap_or(Value::None) } else { Value::list(keys) };
                keyed.push((key, item.clone()));
            }
            Ok(Value::list(sort_by_keys(renderer, keyed, is_set(reverse.as_ref()))?))
        }
        "dictsort" => {
            let [case, by, reverse] = args.bind(name, ["case_sensitive", "by", "reverse"], 0)?;
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
                let by = sort_key(renderer, by.clone(), is_set(case.as_ref()))?;
                keyed.push((by, Value::tuple(vec![key.clone(), item.clone()])));
            }
            Ok(Value::list(sort_by_keys(renderer, keyed, is_set(reverse.as_ref()))?))
        }
        "groupby" => group(renderer, value, args),
        "unique" => {
            let [case, attribute] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
            let path = renderer.parse_path(attribute.as_ref())?;
            let items = renderer.iterate(value)?;
            // One list for the keys, one for the items.
            renderer.limits.charge_list(items.len())?;
            renderer.limits.charge_list(items.len())?;
            let mut seen = std::collections::HashSet::new();
            let mut kept = Vec::new();
            for item in &*items {
                let key = renderer.resolve_path(item, &path, None)?;
                let key = sort_key(renderer, key, is_set(case.as_ref()))?;
                if seen.insert(key.key(&mut renderer.limits)?) {
                    kept.push(item.clone());
                }
            }
            Ok(Object::generator(kept))
        }
        _ => {
            let [case, attribute] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
            let path = renderer.parse_path(attribute.as_ref())?;
            let mut best: Option<(Value, Value)> = None;
            for item in &*renderer.iterate(value)? {
                let key = renderer.resolve_path(item, &path, None)?;
                let key = sort_key(renderer, key, is_set(case.as_ref()))?;
                let better = match &best {
                    None => true,
                    Some((found, _)) if name == "max" => renderer.compare(Comparison::Gt, &key, found)?,
                    Some((found, _)) => renderer.compare(Comparison::Lt, &key, found)?,
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

fn is_set(value: Option<&Value>) -> bool {
    value.is_some_and(Value::is_truthy)
}

/// Returns the key of a comparison: a text in lower case, unless `case_sensitive`.
fn sort_key(renderer: &mut Renderer<'_>, value: Value, case_sensitive: bool) -> Result<Value, Error> {
    match value {
        Value::Text(text) if !case_sensitive => {
            renderer.limits.charge_text(text.len())?;
            Ok(Value::Text(text.to_lowercase().into()))
        }
        other => Ok(other),
    }
}

/// Sorts items by their keys. The sort is stable, also if `reverse`.
fn sort_by_keys(
    renderer: &mut Renderer<'_>,
    mut keyed: Vec<(Value, Value)>,
    reverse: bool,
) -> Result<Vec<Value>, Error> {
    renderer.limits.charge_list(keyed.len())?;
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
                let first = ordering(&mut renderer.limits, b, a, "<", 0)? == Some(Ordering::Less);
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

fn group(renderer: &mut Renderer<'_>, value: &Value, args: CallArguments) -> Result<Value, Error> {
    let [attribute, default, case] = args.bind("groupby", ["attribute", "default", "case_sensitive"], 1)?;
    let (attribute, default) =
        (attribute.unwrap_or(Value::None), default.filter(|d| !matches!(d, Value::None)));
    let path = renderer.parse_path(Some(&attribute))?;
    let mut keyed = Vec::new();
    for item in &*renderer.iterate(value)? {
        let key = renderer.resolve_path(item, &path, default.as_ref())?;
        keyed.push((sort_key(renderer, key, is_set(case.as_ref()))?, item.clone()));
    }
    let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
    for item in sort_by_keys(renderer, keyed, false)? {
        let grouper = renderer.resolve_path(&item, &path, default.as_ref())?;
        let key = sort_key(renderer, grouper.clone(), is_set(case.as_ref()))?;
        match groups.last_mut() {
            Some((last, _, items)) if renderer.compare(Comparison::Eq, last, &key)? => items.push(item),
            _ => groups.push((key, grouper, vec![item])),
        }
    }
    let group = |(_, grouper, items)| Value::tuple(vec![grouper, Value::list(items)]);
    Ok(Value::list(groups.into_iter().map(group).collect()))
}
