//! Filter `tojson` of transformers, which writes JSON as Python's `json.dumps`.

use super::calls::CallArguments;
use super::error::{Error, fail};
use super::limits::MAX_TEXT_BYTES;
use super::python_text::float_repr;
use super::renderer::Renderer;
use super::value::{Map, Value};

/// Longest indent or separator in bytes.
const MAX_SEPARATOR_BYTES: usize = 64;

/// Layout of the text.
struct JsonStyle {
    ascii: bool,
    /// Indent of one level of nesting; without it, the text is a single line.
    indent: Option<String>,
    between_items: String,
    after_key: String,
    sort_keys: bool,
}

/// Evaluates `tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, which does
/// not escape HTML, unlike Jinja2's own filter.
pub(super) fn to_json(
    renderer: &mut Renderer<'_>,
    value: &Value,
    args: CallArguments,
) -> Result<Value, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ascii, indent, separators, sort_keys] = args.bind("tojson", names, 0)?;
    let indent = match indent {
        None | Some(Value::None) => None,
        Some(Value::Text(indent)) => Some(indent.to_string()),
        Some(indent) => match indent.as_int() {
            Some(width) => Some(
                " ".repeat(usize::try_from(width.max(0)).unwrap_or(usize::MAX).min(MAX_SEPARATOR_BYTES + 1)),
            ),
            None => return fail("tojson: expected an indent that is a number or a text"),
        },
    };
    let (between_items, after_key) = match separators {
        None | Some(Value::None) if indent.is_some() => (",".into(), ": ".into()),
        None | Some(Value::None) => (", ".into(), ": ".into()),
        Some(separators) => match renderer.iterate(&separators)?.as_slice() {
            [Value::Text(items), Value::Text(key)] => (items.to_string(), key.to_string()),
            _ => return fail("tojson: expected two separators"),
        },
    };
    let is_truthy = |value: Option<Value>| value.is_some_and(|value| value.is_truthy());
    let style = JsonStyle {
        ascii: is_truthy(ascii),
        indent,
        between_items,
        after_key,
        sort_keys: is_truthy(sort_keys),
    };
    let texts = [style.indent.as_deref().unwrap_or_default(), &style.between_items, &style.after_key];
    if texts.iter().any(|text| text.len() > MAX_SEPARATOR_BYTES) {
        return fail(format!(
            "tojson: expected indent and separators of at most {MAX_SEPARATOR_BYTES} bytes"
        ));
    }
    let mut out = String::new();
    write_json(renderer, &mut out, value, &style, 0)?;
    renderer.limits.charge_text(out.len())?;
    Ok(Value::Text(out.into()))
}

fn write_json(
    renderer: &mut Renderer<'_>,
    out: &mut String,
    value: &Value,
    style: &JsonStyle,
    level: usize,
) -> Result<(), Error> {
    renderer.limits.charge_visit(level)?;
    if out.len() > MAX_TEXT_BYTES {
        return fail(format!("a text would be longer than {MAX_TEXT_BYTES} bytes"));
    }
    match value {
        Value::None => out.push_str("null"),
        Value::Bool(flag) => out.push_str(if *flag { "true" } else { "false" }),
        Value::Int(number) => out.push_str(&number.to_string()),
        Value::Float(number) => out.push_str(&number_text(*number)),
        Value::Text(text) => write_text(out, text, style.ascii),
        Value::List(items) | Value::Tuple(items) => {
            out.push('[');
            for (number, item) in items.iter().enumerate() {
                begin_item(out, style, level, number);
                write_json(renderer, out, item, style, level + 1)?;
            }
            end_items(out, style, level, items.len());
            out.push(']');
        }
        Value::Map(map) => {
            out.push('{');
            for (number, (key, item)) in sorted_entries(map, style.sort_keys)?.into_iter().enumerate() {
                begin_item(out, style, level, number);
                write_text(out, &key, style.ascii);
                out.push_str(&style.after_key);
                write_json(renderer, out, item, style, level + 1)?;
            }
            end_items(out, style, level, map.len());
            out.push('}');
        }
        other => {
            return fail(format!("Object of type {} is not JSON serializable", other.type_name()));
        }
    }
    Ok(())
}

fn new_line(out: &mut String, style: &JsonStyle, level: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        out.push_str(&indent.repeat(level));
    }
}

fn begin_item(out: &mut String, style: &JsonStyle, level: usize, number: usize) {
    if number > 0 {
        out.push_str(&style.between_items);
    }
    new_line(out, style, level + 1);
}

fn end_items(out: &mut String, style: &JsonStyle, level: usize, count: usize) {
    if count > 0 {
        new_line(out, style, level);
    }
}

fn number_text(number: f64) -> String {
    if number.is_nan() {
        "NaN".to_owned()
    } else if number.is_infinite() {
        if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
    } else {
        float_repr(number)
    }
}

/// Returns entries with their keys as texts, sorted by key if `sort`.
fn sorted_entries(map: &Map, sort: bool) -> Result<Vec<(String, &Value)>, Error> {
    let mut entries = Vec::with_capacity(map.len());
    for (key, value) in map.entries() {
        let text = match key {
            Value::Text(text) => text.to_string(),
            Value::None => "null".to_owned(),
            Value::Bool(flag) => flag.to_string(),
            Value::Int(number) => number.to_string(),
            Value::Float(number) => number_text(*number),
            other => {
                let name = other.type_name();
                return fail(format!("keys must be str, int, float, bool or None, not {name}"));
            }
        };
        entries.push((text, value));
    }
    if sort {
        let texts = map.entries().iter().filter(|(key, _)| matches!(key, Value::Text(_))).count();
        if texts > 0 && texts < entries.len() {
            return fail("'<' not supported between keys of different types");
        }
        entries.sort_by(|(a, _), (b, _)| a.cmp(b));
    }
    Ok(entries)
}

fn write_text(out: &mut String, text: &str, ascii: bool) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            control if control < ' ' => escape(out, control),
            other if ascii && !other.is_ascii() => escape(out, other),
            other => out.push(other),
        }
    }
    out.push('"');
}

fn escape(out: &mut String, character: char) {
    for unit in character.encode_utf16(&mut [0; 2]) {
        out.push_str(&format!("\\u{unit:04x}"));
    }
}
