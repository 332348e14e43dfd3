//! Filters of texts.

use super::super::calls::CallArguments;
use super::super::error::{Error, fail};
use super::super::lexer::is_space;
use super::super::limits::Limits;
use super::super::methods::text::{capitalize, line_count, lines, strip};
use super::super::operators::expect_defined;
use super::super::python_text;
use super::super::renderer::Renderer;
use super::super::value::Value;

pub(super) fn apply(
    renderer: &mut Renderer<'_>,
    name: &str,
    value: &Value,
    args: CallArguments,
) -> Result<Value, Error> {
    if name == "indent" {
        return indent(renderer, value, args);
    }
    let text = renderer.soft_str(value)?;
    renderer.limits.charge_read(text.len())?;
    let result = match name {
        "string" => {
            args.expect_none(name)?;
            return Ok(Value::Text(text));
        }
        "safe" => {
            args.expect_none(name)?;
            return Ok(Value::markup(text));
        }
        "trim" => {
            let [set] = args.bind(name, ["chars"], 0)?;
            match set {
                None | Some(Value::None) => strip(&text, None, true, true).to_owned(),
                Some(Value::Text(set)) => {
                    renderer.limits.charge_search(&set)?;
                    strip(&text, Some(&set), true, true).to_owned()
                }
                Some(_) => return fail("strip arg must be None or str"),
            }
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["old", "new", "count"], 2)?;
            let old = renderer.soft_str(&old.unwrap_or(Value::None))?;
            let new = renderer.soft_str(&new.unwrap_or(Value::None))?;
            let count = match count {
                None | Some(Value::None) => -1,
                Some(count) => match count.as_int() {
                    Some(count) => count,
                    None => return fail("replace() argument 3 must be a whole number"),
                },
            };
            return renderer.replace(&text, &old, &new, count);
        }
        "format" => {
            return if args.named.is_empty() {
                renderer.format_percent(&text, &Value::tuple(args.positional))
            } else if args.positional.is_empty() {
                let mut map = super::super::value::Map::default();
                for (name, value) in args.named {
                    map.insert_text(&name, value);
                }
                renderer.format_percent(&text, &Value::map(map))
            } else {
                fail("can't handle positional and keyword arguments at the same time")
            };
        }
        "center" => {
            let [width] = args.bind(name, ["width"], 0)?;
            let width = width.unwrap_or(Value::Int(80));
            return renderer.pad(&text, name, CallArguments { positional: vec![width], named: Vec::new() });
        }
        "truncate" => truncate(renderer, &text, args)?,
        "pprint" => {
            args.expect_none(name)?;
            let text = python_text::repr(&mut renderer.limits, value)?;
            if text.chars().count() > 80 {
                return fail("pprint: expected a value of at most 80 characters");
            }
            text
        }
        "wordcount" => {
            args.expect_none(name)?;
            let word = |c: char| c == '_' || c.is_alphanumeric();
            return Ok(Value::from_count(text.split(|c| !word(c)).filter(|word| !word.is_empty()).count()));
        }
        _ => {
            args.expect_none(name)?;
            match name {
                "upper" => text.to_uppercase(),
                "lower" => text.to_lowercase(),
                "capitalize" => capitalize(&text),
                "title" => title(&text),
                "urlencode" => match value {
                    Value::List(_) | Value::Tuple(_) | Value::Map(_) | Value::Object(_) => {
                        return fail("urlencode: expected a text");
                    }
                    _ => url_encoded(&text),
                },
                _ => {
                    return Ok(Value::markup(html_escaped(&mut renderer.limits, &text)?));
                }
            }
        }
    };
    renderer.limits.charge_text(result.len())?;
    Ok(Value::Text(result.into()))
}

fn indent(renderer: &mut Renderer<'_>, value: &Value, args: CallArguments) -> Result<Value, Error> {
    let [width, first, blank] = args.bind("indent", ["width", "first", "blank"], 0)?;
    expect_defined(value)?;
    let Value::Text(text) = value else {
        return fail(format!("unsupported operand type(s) for +=: '{}' and 'str'", value.type_name()));
    };
    let text = format!("{text}\n");
    renderer.limits.charge_text(text.len())?;
    renderer.limits.charge_read(text.len())?;
    let count = line_count(&text);
    let width = match width {
        None => " ".repeat(4),
        Some(Value::Text(width)) => width.to_string(),
        Some(width) => match width.as_int() {
            Some(width) => {
                let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
                renderer.limits.charge_text(width.saturating_mul(count).saturating_add(text.len()))?;
                " ".repeat(width)
            }
            None => return fail("indent: expected a number of spaces, or a text"),
        },
    };
    renderer.limits.charge_text(width.len().saturating_mul(count).saturating_add(text.len()))?;
    let blank = blank.is_some_and(|blank| blank.is_truthy());
    let mut out = String::new();
    for (number, line) in lines(&text, false).enumerate() {
        if number > 0 {
            out.push('\n');
        }
        let indented = if number == 0 {
            first.as_ref().is_some_and(Value::is_truthy)
        } else {
            blank || !line.is_empty()
        };
        if indented {
            out.push_str(&width);
        }
        out.push_str(line);
    }
    Ok(Value::Text(out.into()))
}

fn truncate(renderer: &mut Renderer<'_>, text: &str, args: CallArguments) -> Result<String, Error> {
    let [length, kill, end, leeway] = args.bind("truncate", ["length", "killwords", "end", "leeway"], 0)?;
    let number = |value: Option<Value>, default: usize| match value {
        None | Some(Value::None) => Ok(default),
        Some(value) => match value.as_int().map(usize::try_from) {
            Some(Ok(number)) => Ok(number),
            _ => fail("truncate: expected whole numbers from 0 on"),
        },
    };
    let (length, leeway) = (number(length, 255)?, number(leeway, 5)?);
    let end = match end {
        Some(end) => renderer.soft_str(&end)?,
        None => "...".into(),
    };
    let ending = end.chars().count();
    if length < ending {
        return fail(format!("expected length >= {ending}, got {length}"));
    }
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.to_owned());
    }
    let cut: String = text.chars().take(length - ending).collect();
    let kept = if kill.is_some_and(|kill| kill.is_truthy()) {
        cut.as_str()
    } else {
        cut.rsplit_once(' ').map_or(cut.as_str(), |(before, _)| before)
    };
    Ok(format!("{kept}{end}"))
}

/// Capitalises words, which begin after white space, hyphens and opening brackets.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut begins = true;
    for character in text.chars() {
        if is_space(character) || "-({[<".contains(character) {
            out.push(character);
            begins = true;
        } else if begins {
            out.extend(character.to_uppercase());
            begins = false;
        } else {
            out.extend(character.to_lowercase());
        }
    }
    out
}

fn url_encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' | b'/' => {
                out.push(char::from(byte))
            }
            other => out.push_str(&format!("%{other:02X}")),
        }
    }
    out
}

/// Escapes a text for HTML, charging its length before it is built.
pub(in super::super) fn html_escaped(limits: &mut Limits, text: &str) -> Result<String, Error> {
    limits.charge_read(text.len())?;
    let longer = text.bytes().map(|byte| match byte {
        b'&' | b'\'' | b'"' => 4,
        b'<' | b'>' => 3,
        _ => 0,
    });
    let length = longer.sum::<usize>().saturating_add(text.len());
    limits.charge_text(length)?;
    let mut out = String::with_capacity(length);
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            other => out.push(other),
        }
    }
    Ok(out)
}
