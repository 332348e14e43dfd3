//! Filters of texts.

use super::super::calls::Given;
use super::super::error::{Error, fail};
use super::super::lexer::is_space;
use super::super::limits::Limits;
use super::super::machine::Machine;
use super::super::methods::text::{capitalize, line_count, lines, strip};
use super::super::operators::defined;
use super::super::print;
use super::super::value::Value;

pub(super) fn apply(
    machine: &mut Machine<'_>,
    name: &str,
    value: &Value,
    given: Given,
) -> Result<Value, Error> {
    if name == "indent" {
        return indent(machine, value, given);
    }
    let text = machine.soft_text(value)?;
    machine.limits.read(text.len())?;
    let result = match name {
        "string" => {
            given.none(name)?;
            return Ok(Value::Text(text));
        }
        "safe" => {
            given.none(name)?;
            return Ok(Value::markup(text));
        }
        "trim" => {
            let [set] = given.bind(name, ["chars"], 0)?;
            match set {
                None | Some(Value::None) => strip(&text, None, true, true).to_owned(),
                Some(Value::Text(set)) => {
                    machine.limits.search(&set)?;
                    strip(&text, Some(&set), true, true).to_owned()
                }
                Some(_) => return fail("strip arg must be None or str"),
            }
        }
        "replace" => {
            let [old, new, count] = given.bind(name, ["old", "new", "count"], 2)?;
            let old = machine.soft_text(&old.unwrap_or(Value::None))?;
            let new = machine.soft_text(&new.unwrap_or(Value::None))?;
            let count = match count {
                None | Some(Value::None) => -1,
                Some(count) => match count.as_int() {
                    Some(count) => count,
                    None => return fail("replace() argument 3 must be a whole number"),
                },
            };
            return machine.replace(&text, &old, &new, count);
        }
        "format" => {
            return if given.named.is_empty() {
                machine.percent(&text, &Value::tuple(given.positional))
            } else if given.positional.is_empty() {
                let mut map = super::super::value::Map::default();
                for (name, value) in given.named {
                    map.insert_text(&name, value);
                }
                machine.percent(&text, &Value::map(map))
            } else {
                fail("can't handle positional and keyword arguments at the same time")
            };
        }
        "center" => {
            let [width] = given.bind(name, ["width"], 0)?;
            let width = width.unwrap_or(Value::Int(80));
            return machine.pad(&text, name, Given { positional: vec![width], named: Vec::new() });
        }
        "truncate" => truncate(machine, &text, given)?,
        "pprint" => {
            given.none(name)?;
            let text = print::repr(&mut machine.limits, value)?;
            if text.chars().count() > 80 {
                return fail("pprint: expected a value of at most 80 characters");
            }
            text
        }
        "wordcount" => {
            given.none(name)?;
            let word = |c: char| c == '_' || c.is_alphanumeric();
            return Ok(Value::count(text.split(|c| !word(c)).filter(|word| !word.is_empty()).count()));
        }
        _ => {
            given.none(name)?;
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
                    return Ok(Value::markup(escaped(&mut machine.limits, &text)?));
                }
            }
        }
    };
    machine.limits.build(result.len())?;
    Ok(Value::Text(result.into()))
}

fn indent(machine: &mut Machine<'_>, value: &Value, given: Given) -> Result<Value, Error> {
    let [width, first, blank] = given.bind("indent", ["width", "first", "blank"], 0)?;
    defined(value)?;
    let Value::Text(text) = value else {
        return fail(format!("unsupported operand type(s) for +=: '{}' and 'str'", value.type_name()));
    };
    let text = format!("{text}\n");
    machine.limits.build(text.len())?;
    machine.limits.read(text.len())?;
    let count = line_count(&text);
    let width = match width {
        None => " ".repeat(4),
        Some(Value::Text(width)) => width.to_string(),
        Some(width) => match width.as_int() {
            Some(width) => {
                let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
                machine.limits.build(width.saturating_mul(count).saturating_add(text.len()))?;
                " ".repeat(width)
            }
            None => return fail("indent: expected a number of spaces, or a text"),
        },
    };
    machine.limits.build(width.len().saturating_mul(count).saturating_add(text.len()))?;
    let blank = blank.is_some_and(|blank| blank.truth());
    let mut out = String::new();
    for (number, line) in lines(&text, false).enumerate() {
        if number > 0 {
            out.push('\n');
        }
        let indented =
            if number == 0 { first.as_ref().is_some_and(Value::truth) } else { blank || !line.is_empty() };
        if indented {
            out.push_str(&width);
        }
        out.push_str(line);
    }
    Ok(Value::Text(out.into()))
}

fn truncate(machine: &mut Machine<'_>, text: &str, given: Given) -> Result<String, Error> {
    let [length, kill, end, leeway] = given.bind("truncate", ["length", "killwords", "end", "leeway"], 0)?;
    let number = |value: Option<Value>, default: usize| match value {
        None | Some(Value::None) => Ok(default),
        Some(value) => match value.as_int().map(usize::try_from) {
            Some(Ok(number)) => Ok(number),
            _ => fail("truncate: expected whole numbers from 0 on"),
        },
    };
    let (length, leeway) = (number(length, 255)?, number(leeway, 5)?);
    let end = match end {
        Some(end) => machine.soft_text(&end)?,
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
    let kept = if kill.is_some_and(|kill| kill.truth()) {
        cut.as_str()
    } else {
        cut.rsplit_once(' ').map_or(cut.as_str(), |(before, _)| before)
    };
    Ok(format!("{kept}{end}"))
}

/// Capital letters behind white space, hyphens and brackets.
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

/// Escapes a text for HTML. Its length is counted before it is built.
pub(in super::super) fn escaped(limits: &mut Limits, text: &str) -> Result<String, Error> {
    limits.read(text.len())?;
    let longer = text.bytes().map(|byte| match byte {
        b'&' | b'\'' | b'"' => 4,
        b'<' | b'>' => 3,
        _ => 0,
    });
    let length = longer.sum::<usize>().saturating_add(text.len());
    limits.build(length)?;
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
