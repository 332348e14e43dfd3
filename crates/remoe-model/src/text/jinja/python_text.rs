//! Texts of values: Python's `str` and `repr`.

use super::error::{Error, fail};
use super::limits::{Limits, MAX_TEXT_BYTES};
use super::objects::Object;
use super::value::{Map, Value};

/// Evaluates `str(value)`.
pub(super) fn to_str(limits: &mut Limits, value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    match value {
        Value::Undefined(_) => (),
        Value::Text(text) => {
            limits.charge_text(text.len())?;
            out.push_str(text);
        }
        other => {
            match other.clone().without_markup() {
                Value::Text(text) => out.push_str(&text),
                other => write_repr(limits, &mut out, &other, 0)?,
            }
            limits.charge_text(out.len())?;
        }
    }
    Ok(out)
}

/// Evaluates `repr(value)`.
pub(super) fn repr(limits: &mut Limits, value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_repr(limits, &mut out, value, 0)?;
    limits.charge_text(out.len())?;
    Ok(out)
}

fn write_repr(limits: &mut Limits, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    limits.charge_visit(depth)?;
    if out.len() > MAX_TEXT_BYTES {
        return fail(format!("a text would be longer than {MAX_TEXT_BYTES} bytes"));
    }
    match value {
        Value::Undefined(_) => out.push_str("Undefined"),
        Value::None => out.push_str("None"),
        Value::Bool(true) => out.push_str("True"),
        Value::Bool(false) => out.push_str("False"),
        Value::Int(number) => out.push_str(&number.to_string()),
        Value::Float(number) => out.push_str(&float_repr(*number)),
        Value::Text(text) => push_quoted(out, text, false),
        Value::List(items) => write_items(limits, out, ("[", "]"), items, depth)?,
        Value::Tuple(items) => {
            let end = if items.len() == 1 { ",)" } else { ")" };
            write_items(limits, out, ("(", end), items, depth)?;
        }
        Value::Map(map) => write_map(limits, out, map, depth)?,
        Value::Object(object) => match &**object {
            Object::View(view, map) => {
                out.push_str(view.type_name());
                write_items(limits, out, ("([", "])"), &view.items(map), depth)?;
            }
            Object::Range(range) => {
                out.push_str(&format!("range({}, {}", range.start, range.stop));
                if range.step != 1 {
                    out.push_str(&format!(", {}", range.step));
                }
                out.push(')');
            }
            Object::Namespace(values) => {
                out.push_str("<Namespace ");
                write_map(limits, out, &values.borrow(), depth)?;
                out.push('>');
            }
            Object::Macro(_, _, name) => {
                out.push_str("<Macro ");
                push_quoted(out, name, false);
                out.push('>');
            }
            Object::Loop(state) => {
                out.push_str(&format!("<LoopContext {}/{}>", state.index.get() + 1, state.items.len()));
            }
            other => {
                let name = other.type_name();
                return fail(format!("cannot write a {name}: Python's text for it has an address of memory"));
            }
        },
    }
    Ok(())
}

fn write_items(
    limits: &mut Limits,
    out: &mut String,
    (open, close): (&str, &str),
    items: &[Value],
    depth: usize,
) -> Result<(), Error> {
    out.push_str(open);
    for (number, item) in items.iter().enumerate() {
        if number > 0 {
            out.push_str(", ");
        }
        write_repr(limits, out, item, depth + 1)?;
    }
    out.push_str(close);
    Ok(())
}

fn write_map(limits: &mut Limits, out: &mut String, map: &Map, depth: usize) -> Result<(), Error> {
    out.push('{');
    for (number, (key, value)) in map.entries().iter().enumerate() {
        if number > 0 {
            out.push_str(", ");
        }
        write_repr(limits, out, key, depth + 1)?;
        out.push_str(": ");
        write_repr(limits, out, value, depth + 1)?;
    }
    out.push('}');
    Ok(())
}

/// Returns `repr` of a float: from 1e16 on and below 1e-4 with an exponent of a sign and at least two digits.
pub(super) fn float_repr(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    if number != 0.0 && !(1e-4..1e16).contains(&number.abs()) {
        return python_exponent(&format!("{number:e}"), 'e');
    }
    format!("{number:?}")
}

/// Rewrites a number with Rust's exponent as Python and C write it: with a sign and at least two digits.
pub(super) fn python_exponent(text: &str, letter: char) -> String {
    let (digits, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    format!("{digits}{letter}{sign}{exponent:0>2}")
}

/// Appends a text in quotes, with escapes for characters that are not printable, or not ASCII if `ascii`.
pub(super) fn push_quoted(out: &mut String, text: &str, ascii: bool) {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(mark);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            same if same == mark => {
                out.push('\\');
                out.push(mark);
            }
            other if (ascii && !other.is_ascii()) || !is_printable(other) => {
                out.push_str(&match u32::from(other) {
                    code @ ..=0xff => format!("\\x{code:02x}"),
                    code @ ..=0xffff => format!("\\u{code:04x}"),
                    code => format!("\\U{code:08x}"),
                });
            }
            other => out.push(other),
        }
    }
    out.push(mark);
}

/// Evaluates Python's `str.isprintable` for one character, except that unassigned code points count as printable.
pub(super) fn is_printable(character: char) -> bool {
    let format = matches!(u32::from(character),
        0xad | 0x600..=0x605 | 0x61c | 0x6dd | 0x70f | 0x890..=0x891 | 0x8e2 | 0x180e | 0x200b..=0x200f
        | 0x202a..=0x202e | 0x2060..=0x2064 | 0x2066..=0x206f | 0xfeff | 0xfff9..=0xfffb | 0x110bd | 0x110cd
        | 0x13430..=0x1343f | 0x1bca0..=0x1bca3 | 0x1d173..=0x1d17a | 0xe0001 | 0xe0020..=0xe007f);
    let private =
        matches!(u32::from(character), 0xe000..=0xf8ff | 0xf_0000..=0xf_fffd | 0x10_0000..=0x10_fffd);
    character == ' ' || !(character.is_control() || character.is_whitespace() || format || private)
}
