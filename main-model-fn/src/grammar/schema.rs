//! JSON Schemas: what is claimed of them, and what is refused by name.

use super::compiler::short;
use super::multiple::Multiple;
use super::{Warnings, finite};
use llguidance::regex_to_lark;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use regex_syntax::ast::parse::Parser;
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// Where the library's own options stand; a request must not set them.
pub(super) const OPTIONS: &str = "x-guidance";

/// Longest schema as text.
const BYTES: usize = 256 << 10;
/// How deep schemas lie in each other.
const DEPTH: usize = 48;
/// Most schemas within a schema, values of `enum` and `const`, and options of `allOf`, `anyOf` and `oneOf`, all
/// together.
const SCHEMAS: usize = 2000;
const VALUES: usize = 5000;
const OPTIONS_OF_ALL: usize = 150;
/// Most options of all `allOf` that have several: an answer is followed through all of them at once.
const TOGETHER: usize = 16;
/// Longest pointer to a schema: names above it are kept with each.
const POINTER_BYTES: usize = 4 << 10;
/// Most properties of an object that may be left out: any of them may come next, and the library follows all.
const OPTIONAL: usize = 300;
/// Most patterns of names: the library looks whether any two of them meet.
const NAME_PATTERNS: usize = 24;
/// Characters of a pointer that messages show.
const SHOWN: usize = 200;
/// Longest pattern, and longest text of `const` and `enum`.
const PATTERN_BYTES: usize = 2 << 10;
const LITERAL_BYTES: usize = 4 << 10;
/// Keywords that count something, and their largest value.
const COUNTS: [&str; 6] =
    ["minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"];
const MOST: u64 = 10_000;
/// Largest `multipleOf`, and the largest sum of all of them, decimal places apart: the library has a state for every
/// remainder.
pub(super) const DIVISOR: f64 = 10_000.0;
const DIVISORS: u64 = 20_000;
/// Most patterns and formats in options of one `allOf`: a text is followed through all of them at once.
const PATTERNS_TOGETHER: usize = 4;
/// From here on floating-point numbers, which the library works with, skip whole numbers.
const WHOLE: u64 = 1 << 53;

/// Least distance of bounds from 0: the library has brackets in brackets for every decimal place.
const LEAST: f64 = 1e-50;

/// Keywords that answers obey.
const CLAIMED: [&str; 27] = [
    "type",
    "enum",
    "const",
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "properties",
    "additionalProperties",
    "patternProperties",
    "required",
    "minProperties",
    "maxProperties",
    "items",
    "prefixItems",
    "additionalItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];

/// Keywords that ask for something, of any draft, and are not claimed. All others ask for nothing.
const REFUSED: [&str; 20] = [
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
    "extends",
    "disallow",
];

/// Values of `format` that ask for nothing: they tell programs what to make of a text.
const NOTES: [&str; 3] = ["binary", "byte", "password"];
/// Longest host name: the library knows only how long its labels are.
const HOSTNAME: u64 = 253;
/// Characters that a pointer must escape to be the fragment of a URI, beside those that are not ASCII.
const NO_FRAGMENT: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'<')
    .add(b'>')
    .add(b'[')
    .add(b'\\')
    .add(b']')
    .add(b'^')
    .add(b'`')
    .add(b'{')
    .add(b'|')
    .add(b'}');

/// Values of `format` that answers obey.
const FORMATS: [&str; 10] =
    ["date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// A schema that the library can compile.
pub(super) struct Checked {
    pub(super) schema: Value,
    /// Keywords of it that are not enforced, and are taken out.
    pub(super) warnings: Warnings,
}

/// `schema`, once everything in it is claimed or only an annotation, and within bounds.
///
/// # Errors
/// The first place and keyword that is not.
pub(super) fn checked(mut schema: Value) -> Result<Checked, String> {
    let bytes = schema.to_string().len();
    if bytes > BYTES {
        return Err(format!("schema too large: expected at most {BYTES} bytes, got {bytes}"));
    }
    let mut walk = SchemaWalk::default();
    walk.schema(&mut schema, "", 0)?;
    if walk.meet && walk.multiple.digits as f64 > DIVISOR {
        return Err(format!(
            "the schema: unsupported `multipleOf`: without decimal point, the least common multiple of all exceeds \
             {DIVISOR}; `allOf`, `patternProperties` and keywords beside `$ref` may combine them"
        ));
    }
    for (path, target) in &walk.references {
        if !walk.places.contains(target) {
            return Err(at(path, "invalid `$ref`: its target is not in this schema"));
        }
    }
    let endless = finite::endless(&schema, &walk.places);
    if endless.contains("") {
        // Nothing lies within itself but by a reference.
        let through = walk.references.iter().find(|(_, target)| endless.contains(target));
        let path = through.map_or("", |(path, _)| path);
        return Err(at(path, "unsatisfiable `$ref`: the schema requires itself"));
    }
    for place in &endless {
        if let Some(Value::Object(object)) = schema.pointer_mut(place) {
            // The library would begin it and never come to its end.
            object.shift_remove("$ref");
            object.insert("enum".to_owned(), json!([]));
        }
    }
    Ok(Checked { schema, warnings: walk.warnings })
}

/// Findings on the way through a schema.
#[derive(Default)]
struct SchemaWalk {
    /// Pointers of all schemas.
    places: HashSet<String>,
    /// Where references are, and what they point to.
    references: Vec<(String, String)>,
    values: usize,
    options: usize,
    /// Options of `allOf`.
    together: usize,
    name_patterns: usize,
    /// The sum of all `multipleOf`.
    divisors: u64,
    /// The least common multiple of all `multipleOf`, times ten to the power of its decimal places.
    multiple: Multiple,
    /// Set if two `multipleOf` may hold for the same number.
    meet: bool,
    warnings: Warnings,
}

impl SchemaWalk {
    fn schema(&mut self, schema: &mut Value, path: &str, depth: usize) -> Result<(), String> {
        if path.len() > POINTER_BYTES {
            let message = format!("path too long: more than {POINTER_BYTES} bytes");
            return Err(at(path, &message));
        }
        self.places.insert(path.to_owned());
        if self.places.len() > SCHEMAS {
            return Err(format!("schema too large: more than {SCHEMAS} subschemas"));
        }
        if depth > DEPTH {
            return Err(at(path, &format!("schema nested deeper than {DEPTH} levels")));
        }
        let object = match schema {
            Value::Bool(_) => return Ok(()),
            Value::Object(object) => object,
            _ => return Err(at(path, "invalid schema: expected an object or a boolean")),
        };
        spell_plainly(object);
        self.annotations(object, path);
        self.keywords(object, path)?;
        for (name, value) in object.iter_mut() {
            let path = format!("{path}/{}", step(name));
            match (name.as_str(), value) {
                ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(map)) => {
                    for (name, schema) in map {
                        let path = format!("{path}/{}", step(name));
                        self.schema(schema, &path, depth + 1)?;
                    }
                }
                ("allOf" | "anyOf" | "oneOf" | "prefixItems" | "items", Value::Array(list)) => {
                    for (index, schema) in list.iter_mut().enumerate() {
                        self.schema(schema, &format!("{path}/{index}"), depth + 1)?;
                    }
                }
                ("items" | "additionalItems" | "additionalProperties", schema) => {
                    self.schema(schema, &path, depth + 1)?;
                }
                _ => (),
            }
        }
        Ok(())
    }

    /// Takes out what JSON Schema lets validators treat as annotations, with a warning.
    fn annotations(&mut self, object: &mut Map<String, Value>, path: &str) {
        if let Some(format) = object.get("format").and_then(Value::as_str)
            && !FORMATS.contains(&format)
        {
            self.warnings.add(path, format!("unknown format {:?} is not enforced", short(format)));
            object.shift_remove("format");
        }
        if object.get("uniqueItems") == Some(&Value::Bool(true)) {
            self.warnings.add(path, "`uniqueItems` is not enforced".to_owned());
            object.shift_remove("uniqueItems");
        }
    }

    fn keywords(&mut self, object: &Map<String, Value>, path: &str) -> Result<(), String> {
        for (name, value) in object {
            if name == OPTIONS || REFUSED.contains(&name.as_str()) || (name == "$id" && !path.is_empty()) {
                return Err(at(path, &format!("unsupported keyword `{name}`")));
            }
            if CLAIMED.contains(&name.as_str()) {
                self.keyword(name, value, path)?;
            }
        }
        let joins = ["$ref", "anyOf", "oneOf"].iter().filter(|name| object.contains_key(**name)).count();
        let asks = object.keys().filter(|name| CLAIMED.contains(&name.as_str())).count();
        self.meet |= (joins > 0 && asks > 1)
            || ["allOf", "patternProperties"].iter().any(|name| object.contains_key(*name));
        let required = object.get("required").and_then(Value::as_array);
        let required: HashSet<&str> = required.into_iter().flatten().filter_map(Value::as_str).collect();
        let properties = object.get("properties").and_then(Value::as_object);
        let optional =
            properties.into_iter().flat_map(Map::keys).filter(|name| !required.contains(name.as_str()));
        if optional.count() > OPTIONAL {
            let message = format!("too many optional `properties`: expected at most {OPTIONAL}");
            return Err(at(path, &message));
        }
        let required = required.len() as u64;
        match object.get("minProperties").and_then(Value::as_u64) {
            Some(least) if least > required + 1 => Err(at(
                path,
                "unsupported `minProperties`: expected at most one more than the number of `required` properties",
            )),
            _ => Ok(()),
        }
    }

    fn keyword(&mut self, name: &str, value: &Value, path: &str) -> Result<(), String> {
        let refuse = |what: String| Err(at(path, &what));
        match (name, value) {
            ("enum", Value::Array(values)) => {
                self.count_values(values.len(), path)?;
                values.iter().try_for_each(|value| self.literal(value, path, 0))
            }
            ("const", value) => self.literal(value, path, 0),
            ("allOf" | "anyOf" | "oneOf", Value::Array(list)) => {
                self.options += list.len();
                if name == "allOf" && list.len() > 1 {
                    self.together += list.len();
                    if self.together > TOGETHER {
                        return refuse(format!("too many options of `allOf`: expected at most {TOGETHER}"));
                    }
                    let has_format = |option: &Value| {
                        option.get("format").is_some_and(|format| FORMATS.iter().any(|known| format == known))
                    };
                    let is_pattern = |option: &&Value| option.get("pattern").is_some() || has_format(option);
                    if list.iter().filter(is_pattern).count() > PATTERNS_TOGETHER {
                        return refuse(format!(
                            "too many options of `allOf` with a pattern: expected at most {PATTERNS_TOGETHER}"
                        ));
                    }
                }
                if self.options > OPTIONS_OF_ALL {
                    return refuse(format!(
                        "too many options of `allOf`, `anyOf` and `oneOf`: expected at most {OPTIONS_OF_ALL}"
                    ));
                }
                Ok(())
            }
            ("$ref", Value::String(reference)) => match reference.strip_prefix('#').map(unescaped) {
                Some(pointer) if pointer.is_empty() || pointer.starts_with('/') => {
                    self.references.push((path.to_owned(), pointer));
                    Ok(())
                }
                _ => refuse(format!("unsupported `$ref` {reference:?}: expected a pointer into this schema")),
            },
            ("patternProperties", Value::Object(patterns)) => {
                self.name_patterns += patterns.len();
                if self.name_patterns > NAME_PATTERNS {
                    return refuse(format!(
                        "too many names of `patternProperties`: expected at most {NAME_PATTERNS}"
                    ));
                }
                patterns.keys().try_for_each(|pattern| check_pattern(name, pattern, path))
            }
            ("pattern", Value::String(pattern)) => check_pattern(name, pattern, path),
            (name, count) if COUNTS.contains(&name) && count.as_u64().is_some_and(|count| count > MOST) => {
                refuse(format!("invalid `{name}`: expected at most {MOST}, got {count}"))
            }
            ("minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum", number) => {
                if number.as_f64().is_some_and(|number| number != 0.0 && number.abs() < LEAST) {
                    return refuse(format!(
                        "unsupported `{name}`: expected 0 or a magnitude of at least {LEAST:e}, got {number}"
                    ));
                }
                check_number(number, path)
            }
            ("multipleOf", number) => match Multiple::of(number.as_f64().unwrap_or_default()) {
                Some(multiple) => {
                    self.divisors += multiple.digits;
                    if self.divisors > DIVISORS {
                        return refuse(format!(
                            "unsupported `multipleOf`: the sum of all exceeds {DIVISORS}"
                        ));
                    }
                    self.multiple = self.multiple.with(multiple);
                    Ok(())
                }
                None => refuse(format!(
                    "unsupported `multipleOf` {number}: without decimal point it exceeds {DIVISOR}"
                )),
            },
            _ => Ok(()),
        }
    }

    /// A value that an answer must have as it stands.
    fn literal(&mut self, value: &Value, path: &str, depth: usize) -> Result<(), String> {
        match value {
            Value::String(text) if text.len() > LITERAL_BYTES => {
                let bytes = text.len();
                Err(at(path, &format!("text too long: expected at most {LITERAL_BYTES} bytes, got {bytes}")))
            }
            Value::Number(_) => check_number(value, path),
            Value::Array(_) | Value::Object(_) if depth > DEPTH => {
                Err(at(path, &format!("value nested deeper than {DEPTH} levels")))
            }
            Value::Array(list) => {
                self.count_values(list.len(), path)?;
                list.iter().try_for_each(|value| self.literal(value, path, depth + 1))
            }
            Value::Object(map) => {
                self.count_values(map.len(), path)?;
                map.values().try_for_each(|value| self.literal(value, path, depth + 1))
            }
            _ => Ok(()),
        }
    }

    fn count_values(&mut self, more: usize, path: &str) -> Result<(), String> {
        self.values += more;
        if self.values > VALUES {
            return Err(at(
                path,
                &format!(
                    "too many values of `enum` and `const`: expected at most {VALUES}, nested ones included"
                ),
            ));
        }
        Ok(())
    }
}

/// Writes what the library cannot read in the way that it can: numbers like 2.0 as whole ones, pointers as URIs,
/// and what asks for nothing not at all.
fn spell_plainly(object: &mut Map<String, Value>) {
    if object.get("uniqueItems") == Some(&Value::Bool(false)) {
        object.shift_remove("uniqueItems");
    }
    let may_be_text = object.get("type").is_none_or(|types| {
        types == "string" || types.as_array().is_some_and(|types| types.contains(&"string".into()))
    });
    match object.get("format").and_then(Value::as_str) {
        Some(format) if !may_be_text || NOTES.contains(&format) => {
            object.shift_remove("format");
        }
        Some("hostname") => {
            let longest = object.entry("maxLength").or_insert_with(|| HOSTNAME.into());
            if longest.as_f64().is_some_and(|length| length > HOSTNAME as f64) {
                *longest = HOSTNAME.into();
            }
        }
        _ => (),
    }
    if let Some(Value::String(reference)) = object.get_mut("$ref")
        && let Some(pointer) = reference.strip_prefix('#')
    {
        *reference = format!("#{}", utf8_percent_encode(&unescaped(pointer), NO_FRAGMENT));
    }
    for name in COUNTS {
        if let Some(count) = object.get_mut(name)
            && let Some(number) = count.as_f64().filter(|number| number.fract() == 0.0 && *number >= 0.0)
            && count.as_u64().is_none()
        {
            *count = (number as u64).into();
        }
    }
}

fn at(path: &str, what: &str) -> String {
    let shown: String = path.chars().take(SHOWN).collect();
    let more = if shown.len() < path.len() { ".." } else { "" };
    let place =
        if path.is_empty() { "the schema".to_owned() } else { format!("the schema at {shown}{more}") };
    format!("{place}: {what}")
}

fn check_number(number: &Value, path: &str) -> Result<(), String> {
    let whole = number.as_u64().or_else(|| number.as_i64().map(i64::unsigned_abs));
    let is_large = match whole {
        Some(whole) => whole > WHOLE,
        None => number.as_f64().is_some_and(|number| number.abs() > WHOLE as f64),
    };
    if !is_large {
        return Ok(());
    }
    Err(at(path, &format!("unsupported number {number}: beyond 2^53 numbers are not exact")))
}

fn check_pattern(keyword: &str, pattern: &str, path: &str) -> Result<(), String> {
    if pattern.len() > PATTERN_BYTES {
        let bytes = pattern.len();
        return Err(at(
            path,
            &format!("pattern too long: expected at most {PATTERN_BYTES} bytes, got {bytes}"),
        ));
    }
    // As the library reads it, which does not say where it stands.
    let read = Parser::new().parse(&regex_to_lark(pattern, "dw"));
    read.map(drop)
        .map_err(|error| at(path, &format!("invalid `{keyword}` {}: {}", short(pattern), error.kind())))
}

/// A name as it stands in pointers.
pub(super) fn step(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// A pointer as it stands behind `#`, its `%..` being characters.
pub(super) fn unescaped(pointer: &str) -> String {
    percent_encoding::percent_decode_str(pointer).decode_utf8_lossy().into_owned()
}
