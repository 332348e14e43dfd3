//! JSON Schemas of requests: which keywords are enforced, and which are refused by name.

use super::compiler::short;
use super::multiple::Multiple;
use super::{Warnings, finite};
use llguidance::regex_to_lark;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use regex_syntax::ast::parse::Parser;
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// Key of the library's own options; a request must not set them.
pub(super) const OPTIONS: &str = "x-guidance";

/// Longest schema as text, in bytes.
const MAX_BYTES: usize = 256 << 10;
/// Deepest nesting of schemas.
const MAX_DEPTH: usize = 48;
/// Most schemas within a schema.
const MAX_SCHEMAS: usize = 2000;
/// Most values of `enum` and `const`, all together.
const MAX_VALUES: usize = 5000;
/// Most options of `allOf`, `anyOf` and `oneOf`, all together.
const MAX_OPTIONS: usize = 150;
/// Most options of all `allOf` with several options: the parser follows all of them at once.
const MAX_ALL_OF_OPTIONS: usize = 16;
/// Longest pointer to a schema in bytes: the names above each schema are stored with it.
const MAX_POINTER_BYTES: usize = 4 << 10;
/// Most optional properties of an object: any of them may come next, and the library follows all.
const MAX_OPTIONAL: usize = 300;
/// Most patterns of names: the library checks each pair for overlap.
const MAX_NAME_PATTERNS: usize = 24;
/// Characters of a pointer that messages show.
const MAX_SHOWN_CHARS: usize = 200;
/// Longest pattern in bytes.
const MAX_PATTERN_BYTES: usize = 2 << 10;
/// Longest text of `const` and `enum` in bytes.
const MAX_LITERAL_BYTES: usize = 4 << 10;
/// Keywords of counts.
const COUNTS: [&str; 6] =
    ["minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"];
/// Largest value of a count.
const MAX_COUNT: u64 = 10_000;
/// Largest `multipleOf`: the library has a state for every remainder.
pub(super) const MAX_DIVISOR: f64 = 10_000.0;
/// Largest sum of all `multipleOf`, not counting decimal places.
const MAX_DIVISOR_SUM: u64 = 20_000;
/// Most patterns and formats in the options of one `allOf`: the parser follows all of them at once.
const MAX_COMBINED_PATTERNS: usize = 4;
/// First integer from which on float64, the library's type, cannot represent every integer.
const MAX_EXACT_INTEGER: u64 = 1 << 53;

/// Smallest absolute value of bounds other than 0: the library nests brackets for every decimal place.
const MIN_BOUND: f64 = 1e-50;

/// Keywords that are enforced.
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

/// Keywords of any draft that demand something and are not enforced: they are refused. All others demand nothing.
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

/// Values of `format` that demand nothing: they tell programs how to interpret a text.
const NOTES: [&str; 3] = ["binary", "byte", "password"];
/// Longest host name: the library bounds only its labels.
const HOSTNAME: u64 = 253;
/// ASCII characters that a pointer must escape in the fragment of a URI.
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

/// Values of `format` that are enforced.
const FORMATS: [&str; 10] =
    ["date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// A schema that the library can compile.
pub(super) struct Checked {
    pub(super) schema: Value,
    /// Keywords that are not enforced and were removed.
    pub(super) warnings: Warnings,
}

/// Checks that every keyword of `schema` is enforced or an annotation, and that it is within the limits.
///
/// # Errors
/// Fails with the first position and keyword that is not.
pub(super) fn checked(mut schema: Value) -> Result<Checked, String> {
    let bytes = schema.to_string().len();
    if bytes > MAX_BYTES {
        return Err(format!("schema too large: expected at most {MAX_BYTES} bytes, got {bytes}"));
    }
    let mut walk = SchemaWalk::default();
    walk.schema(&mut schema, "", 0)?;
    if walk.meet && walk.multiple.digits as f64 > MAX_DIVISOR {
        return Err(format!(
            "the schema: unsupported `multipleOf`: without decimal point, the least common multiple of all exceeds \
             {MAX_DIVISOR}; `allOf`, `patternProperties` and keywords beside `$ref` may combine them"
        ));
    }
    for (path, target) in &walk.references {
        if !walk.places.contains(target) {
            return Err(at(path, "invalid `$ref`: its target is not in this schema"));
        }
    }
    let endless = finite::endless(&schema, &walk.places);
    if endless.contains("") {
        // A schema can contain itself only through a reference.
        let through = walk.references.iter().find(|(_, target)| endless.contains(target));
        let path = through.map_or("", |(path, _)| path);
        return Err(at(path, "unsatisfiable `$ref`: the schema requires itself"));
    }
    for place in &endless {
        if let Some(Value::Object(object)) = schema.pointer_mut(place) {
            // The library would recurse without end.
            object.shift_remove("$ref");
            object.insert("enum".to_owned(), json!([]));
        }
    }
    Ok(Checked { schema, warnings: walk.warnings })
}

/// Counts and findings of a walk through a schema.
#[derive(Default)]
struct SchemaWalk {
    /// Pointers to all schemas.
    places: HashSet<String>,
    /// Positions and targets of references.
    references: Vec<(String, String)>,
    values: usize,
    options: usize,
    /// Number of options of `allOf`.
    together: usize,
    name_patterns: usize,
    /// Sum of all `multipleOf`.
    divisors: u64,
    /// Least common multiple of all `multipleOf`, times ten to the power of its decimal places.
    multiple: Multiple,
    /// True if two `multipleOf` may apply to the same number.
    meet: bool,
    warnings: Warnings,
}

impl SchemaWalk {
    fn schema(&mut self, schema: &mut Value, path: &str, depth: usize) -> Result<(), String> {
        if path.len() > MAX_POINTER_BYTES {
            let message = format!("path too long: more than {MAX_POINTER_BYTES} bytes");
            return Err(at(path, &message));
        }
        self.places.insert(path.to_owned());
        if self.places.len() > MAX_SCHEMAS {
            return Err(format!("schema too large: more than {MAX_SCHEMAS} subschemas"));
        }
        if depth > MAX_DEPTH {
            return Err(at(path, &format!("schema nested deeper than {MAX_DEPTH} levels")));
        }
        let object = match schema {
            Value::Bool(_) => return Ok(()),
            Value::Object(object) => object,
            _ => return Err(at(path, "invalid schema: expected an object or a boolean")),
        };
        rewrite_for_library(object);
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

    /// Removes keywords that JSON Schema lets validators treat as annotations, with a warning.
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
        if optional.count() > MAX_OPTIONAL {
            let message = format!("too many optional `properties`: expected at most {MAX_OPTIONAL}");
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
                    if self.together > MAX_ALL_OF_OPTIONS {
                        return refuse(format!(
                            "too many options of `allOf`: expected at most {MAX_ALL_OF_OPTIONS}"
                        ));
                    }
                    let has_format = |option: &Value| {
                        option.get("format").is_some_and(|format| FORMATS.iter().any(|known| format == known))
                    };
                    let is_pattern = |option: &&Value| option.get("pattern").is_some() || has_format(option);
                    if list.iter().filter(is_pattern).count() > MAX_COMBINED_PATTERNS {
                        return refuse(format!(
                            "too many options of `allOf` with a pattern: expected at most {MAX_COMBINED_PATTERNS}"
                        ));
                    }
                }
                if self.options > MAX_OPTIONS {
                    return refuse(format!(
                        "too many options of `allOf`, `anyOf` and `oneOf`: expected at most {MAX_OPTIONS}"
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
                if self.name_patterns > MAX_NAME_PATTERNS {
                    return refuse(format!(
                        "too many names of `patternProperties`: expected at most {MAX_NAME_PATTERNS}"
                    ));
                }
                patterns.keys().try_for_each(|pattern| check_pattern(name, pattern, path))
            }
            ("pattern", Value::String(pattern)) => check_pattern(name, pattern, path),
            (name, count)
                if COUNTS.contains(&name) && count.as_u64().is_some_and(|count| count > MAX_COUNT) =>
            {
                refuse(format!("invalid `{name}`: expected at most {MAX_COUNT}, got {count}"))
            }
            ("minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum", number) => {
                if number.as_f64().is_some_and(|number| number != 0.0 && number.abs() < MIN_BOUND) {
                    return refuse(format!(
                        "unsupported `{name}`: expected 0 or a magnitude of at least {MIN_BOUND:e}, got {number}"
                    ));
                }
                check_number(number, path)
            }
            ("multipleOf", number) => match Multiple::of(number.as_f64().unwrap_or_default()) {
                Some(multiple) => {
                    self.divisors += multiple.digits;
                    if self.divisors > MAX_DIVISOR_SUM {
                        return refuse(format!(
                            "unsupported `multipleOf`: the sum of all exceeds {MAX_DIVISOR_SUM}"
                        ));
                    }
                    self.multiple = self.multiple.with(multiple);
                    Ok(())
                }
                None => refuse(format!(
                    "unsupported `multipleOf` {number}: without decimal point it exceeds {MAX_DIVISOR}"
                )),
            },
            _ => Ok(()),
        }
    }

    /// Checks a value that an answer must contain literally.
    fn literal(&mut self, value: &Value, path: &str, depth: usize) -> Result<(), String> {
        match value {
            Value::String(text) if text.len() > MAX_LITERAL_BYTES => {
                let bytes = text.len();
                Err(at(
                    path,
                    &format!("text too long: expected at most {MAX_LITERAL_BYTES} bytes, got {bytes}"),
                ))
            }
            Value::Number(_) => check_number(value, path),
            Value::Array(_) | Value::Object(_) if depth > MAX_DEPTH => {
                Err(at(path, &format!("value nested deeper than {MAX_DEPTH} levels")))
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
        if self.values > MAX_VALUES {
            return Err(at(
                path,
                &format!(
                    "too many values of `enum` and `const`: expected at most {MAX_VALUES}, nested ones included"
                ),
            ));
        }
        Ok(())
    }
}

/// Rewrites constructs that the library cannot read: numbers like 2.0 become integers, pointers become URIs, and annotations
/// are removed.
fn rewrite_for_library(object: &mut Map<String, Value>) {
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
    let shown: String = path.chars().take(MAX_SHOWN_CHARS).collect();
    let more = if shown.len() < path.len() { ".." } else { "" };
    let place =
        if path.is_empty() { "the schema".to_owned() } else { format!("the schema at {shown}{more}") };
    format!("{place}: {what}")
}

fn check_number(number: &Value, path: &str) -> Result<(), String> {
    let whole = number.as_u64().or_else(|| number.as_i64().map(i64::unsigned_abs));
    let is_large = match whole {
        Some(whole) => whole > MAX_EXACT_INTEGER,
        None => number.as_f64().is_some_and(|number| number.abs() > MAX_EXACT_INTEGER as f64),
    };
    if !is_large {
        return Ok(());
    }
    Err(at(path, &format!("unsupported number {number}: beyond 2^53 numbers are not exact")))
}

fn check_pattern(keyword: &str, pattern: &str, path: &str) -> Result<(), String> {
    if pattern.len() > MAX_PATTERN_BYTES {
        let bytes = pattern.len();
        return Err(at(
            path,
            &format!("pattern too long: expected at most {MAX_PATTERN_BYTES} bytes, got {bytes}"),
        ));
    }
    // Parsed here, because the library's error does not say where the pattern is.
    let read = Parser::new().parse(&regex_to_lark(pattern, "dw"));
    read.map(drop)
        .map_err(|error| at(path, &format!("invalid `{keyword}` {}: {}", short(pattern), error.kind())))
}

/// Escapes a name for a pointer.
pub(super) fn step(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// Decodes the `%..` of a pointer behind `#`.
pub(super) fn unescaped(pointer: &str) -> String {
    percent_encoding::percent_decode_str(pointer).decode_utf8_lossy().into_owned()
}
