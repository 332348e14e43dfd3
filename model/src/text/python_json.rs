//! JSON as Python's `json.dumps` writes it, which is what templates were written against.

use serde_json::{Map, Number, Value};

/// The arguments of `json.dumps` that templates use.
#[derive(Debug, Clone)]
pub(super) struct Style {
    pub(super) ascii: bool,
    /// What one level of nesting is indented with; everything on one line without.
    pub(super) indent: Option<String>,
    pub(super) between_items: String,
    pub(super) after_key: String,
    pub(super) sort_keys: bool,
}

/// `value` as text, none where that is longer than `most` bytes.
pub(super) fn write(value: &Value, style: &Style, most: usize) -> Option<String> {
    let mut out = String::new();
    put(&mut out, value, style, 0, most);
    (out.len() <= most).then_some(out)
}

fn put(out: &mut String, value: &Value, style: &Style, level: usize, most: usize) {
    if out.len() > most {
        return;
    }
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(flag) => out.push_str(if *flag { "true" } else { "false" }),
        Value::Number(number) => out.push_str(&python_number(number)),
        Value::String(text) => put_text(out, text, style.ascii),
        Value::Array(list) => {
            put_items(out, ('[', ']'), list.iter(), style, level, |out, item| {
                put(out, item, style, level + 1, most);
            });
        }
        Value::Object(map) => {
            let entries = ordered(map, style.sort_keys);
            put_items(out, ('{', '}'), entries.into_iter(), style, level, |out, (key, item)| {
                put_text(out, key, style.ascii);
                out.push_str(&style.after_key);
                put(out, item, style, level + 1, most);
            });
        }
    }
}

fn ordered(map: &Map<String, Value>, sort: bool) -> Vec<(&String, &Value)> {
    let mut entries: Vec<_> = map.iter().collect();
    if sort {
        entries.sort_by_key(|(key, _)| key.as_str());
    }
    entries
}

fn put_items<T>(
    out: &mut String,
    (open, close): (char, char),
    items: impl ExactSizeIterator<Item = T>,
    style: &Style,
    level: usize,
    mut put_item: impl FnMut(&mut String, T),
) {
    let empty = items.len() == 0;
    let new_line = |out: &mut String, level: usize| {
        if let Some(indent) = style.indent.as_ref().filter(|_| !empty) {
            out.push('\n');
            out.push_str(&indent.repeat(level));
        }
    };
    out.push(open);
    for (number, item) in items.enumerate() {
        if number > 0 {
            out.push_str(&style.between_items);
        }
        new_line(out, level + 1);
        put_item(out, item);
    }
    new_line(out, level);
    out.push(close);
}

fn put_text(out: &mut String, text: &str, ascii: bool) {
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

/// Python's `repr` of a number: an exponent from 1e16 on and below 1e-4, with a sign and two digits.
fn python_number(number: &Number) -> String {
    let Some(float) = number.as_f64().filter(|_| number.is_f64()) else {
        return number.to_string();
    };
    let size = float.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{float:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{float:?}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn style() -> Style {
        Style {
            ascii: false,
            indent: None,
            between_items: ", ".to_owned(),
            after_key: ": ".to_owned(),
            sort_keys: false,
        }
    }

    /// Expected values: `json.dumps(value, ensure_ascii=False)` and variants of Python 3.11.
    #[test]
    fn as_python_writes_it() {
        let value =
            serde_json::json!({"b": [1, 2.0, 1e20, 1e-5, 0.0001], "a": {}, "é\n": [null, true, "\u{1}😀"]});
        assert_eq!(
            write(&value, &style(), 1000).unwrap(),
            "{\"b\": [1, 2.0, 1e+20, 1e-05, 0.0001], \"a\": {}, \"é\\n\": [null, true, \"\\u0001😀\"]}"
        );
        let indented = Style {
            indent: Some("  ".to_owned()),
            between_items: ",".to_owned(),
            sort_keys: true,
            ascii: true,
            ..style()
        };
        assert_eq!(
            write(&serde_json::json!({"b": [1, "😀"], "a": []}), &indented, 1000).unwrap(),
            "{\n  \"a\": [],\n  \"b\": [\n    1,\n    \"\\ud83d\\ude00\"\n  ]\n}"
        );
    }
}
