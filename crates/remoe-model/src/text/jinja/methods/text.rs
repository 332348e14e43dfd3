//! Methods of texts.

use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;

use super::super::calls::CallArguments;
use super::super::error::{Error, fail};
use super::super::lexer::is_space;
use super::super::python_text::is_printable;
use super::super::renderer::Renderer;
use super::super::value::{Items, Value};
use super::containers::slice_bounds;

/// Bytes charged for each piece of a split text.
const PIECE_BYTES: usize = 32;
/// Longest set of characters in bytes that is scanned for each character; a longer one is hashed.
const MAX_SCANNED_SET_BYTES: usize = 32;

fn text_value(text: impl Into<Arc<str>>) -> Value {
    Value::Text(text.into())
}

/// Returns an argument of `method` that must be a text.
fn expect_text(value: Option<&Value>, method: &str) -> Result<Arc<str>, Error> {
    match value {
        Some(Value::Text(text)) => Ok(text.clone()),
        Some(Value::Undefined(message)) => fail(&**message),
        other => {
            let name = other.map_or("NoneType", Value::type_name);
            fail(format!("{method}() argument must be str, not {name}"))
        }
    }
}

/// Returns an argument that must be a whole number, or `default` if it is absent.
fn expect_int(value: Option<&Value>, default: i128) -> Result<i128, Error> {
    match value {
        None => Ok(default),
        Some(value) => value.as_int().ok_or_else(|| {
            Error::new(format!("'{}' object cannot be interpreted as an integer", value.type_name()))
        }),
    }
}

impl Renderer<'_> {
    pub(super) fn text_method(
        &mut self,
        text: &Arc<str>,
        name: &str,
        args: CallArguments,
    ) -> Result<Value, Error> {
        self.limits.charge_read(text.len())?;
        let value = match name {
            "format" => return self.format_text(text, args),
            "format_map" => {
                let [map] = args.bind(name, ["mapping"], 1)?;
                let Some(Value::Map(map)) = map else {
                    return fail("format_map() argument must be a mapping");
                };
                let named = map.entries().iter();
                let named = named.filter_map(|(key, value)| match key {
                    Value::Text(name) => Some((name.clone(), value.clone())),
                    _ => None,
                });
                return self
                    .format_text(text, CallArguments { positional: Vec::new(), named: named.collect() });
            }
            "split" | "rsplit" => self.split(text, name == "rsplit", args)?,
            "splitlines" => {
                let [keep] = args.bind(name, ["keepends"], 0)?;
                let count = line_count(text);
                self.limits.charge_list(count)?;
                self.limits.charge_text(count.saturating_mul(PIECE_BYTES).saturating_add(text.len()))?;
                Value::list(lines(text, keep.is_some_and(|keep| keep.is_truthy())).map(Value::text).collect())
            }
            "strip" | "lstrip" | "rstrip" => {
                let [set] = args.bind(name, ["chars"], 0)?;
                let set = match set {
                    None | Some(Value::None) => None,
                    set => Some(expect_text(set.as_ref(), name)?),
                };
                self.limits.charge_search(set.as_deref().unwrap_or_default())?;
                let (start, end) = (name != "rstrip", name != "lstrip");
                text_value(strip(text, set.as_deref(), start, end))
            }
            "startswith" | "endswith" => self.affix(text, name, args)?,
            "find" | "rfind" | "index" | "rindex" | "count" => self.find(text, name, args)?,
            "partition" | "rpartition" => {
                let [separator] = args.bind(name, ["sep"], 1)?;
                let separator = expect_text(separator.as_ref(), name)?;
                if separator.is_empty() {
                    return fail("empty separator");
                }
                self.limits.charge_search(&separator)?;
                self.limits.charge_text(text.len())?;
                let found = if name == "partition" {
                    text.split_once(&*separator)
                } else {
                    text.rsplit_once(&*separator)
                };
                Value::tuple(match (found, name) {
                    (Some((before, after)), _) => {
                        vec![text_value(before), text_value(separator), text_value(after)]
                    }
                    (None, "partition") => vec![text_value(text.clone()), text_value(""), text_value("")],
                    (None, _) => vec![text_value(""), text_value(""), text_value(text.clone())],
                })
            }
            "removeprefix" | "removesuffix" => {
                let [affix] = args.bind(name, ["affix"], 1)?;
                let affix = expect_text(affix.as_ref(), name)?;
                let rest = if name == "removeprefix" {
                    text.strip_prefix(&*affix)
                } else {
                    text.strip_suffix(&*affix)
                };
                text_value(rest.unwrap_or(text))
            }
            "replace" => {
                let [old, new, count] = args.bind(name, ["old", "new", "count"], 2)?;
                let (old, new) = (expect_text(old.as_ref(), name)?, expect_text(new.as_ref(), name)?);
                let count = expect_int(count.as_ref(), -1)?;
                return self.replace(text, &old, &new, count);
            }
            "join" => {
                let [items] = args.bind(name, ["iterable"], 1)?;
                let items = self.iterate(&items.unwrap_or(Value::None))?;
                self.limits.charge_list(items.len())?;
                let mut texts = Vec::with_capacity(items.len());
                for (index, item) in items.iter().enumerate() {
                    self.limits.charge_visit(0)?;
                    match item {
                        Value::Text(text) => texts.push(text.clone()),
                        other => {
                            let name = other.type_name();
                            return fail(format!(
                                "sequence item {index}: expected str instance, {name} found"
                            ));
                        }
                    }
                }
                return self.join_texts(text, &texts);
            }
            "center" | "ljust" | "rjust" | "zfill" => return self.pad(text, name, args),
            "expandtabs" => {
                let [size] = args.bind(name, ["tabsize"], 0)?;
                let size = usize::try_from(expect_int(size.as_ref(), 8)?.max(0)).unwrap_or(usize::MAX);
                self.limits.charge_text(
                    text.matches('\t').count().saturating_mul(size).saturating_add(text.len()),
                )?;
                text_value(expand_tabs(text, size))
            }
            "encode" | "translate" | "maketrans" => {
                return fail(format!("the method '{name}' of texts is not available"));
            }
            _ => {
                args.expect_none(name)?;
                match change_case(text, name) {
                    Some(text) => text_value(text),
                    None => Value::Bool(has_property(text, name)),
                }
            }
        };
        if let Value::Text(text) = &value {
            self.limits.charge_text(text.len())?;
        }
        Ok(value)
    }

    /// Evaluates `text.replace(old, new, count)`; a negative count replaces all.
    pub(in super::super) fn replace(
        &mut self,
        text: &str,
        old: &str,
        new: &str,
        count: i128,
    ) -> Result<Value, Error> {
        self.limits.charge_read(text.len())?;
        let most = usize::try_from(count).unwrap_or(usize::MAX);
        self.limits.charge_search(old)?;
        let found = text.matches(old).take(most).count();
        self.limits.charge_matches(found)?;
        self.limits.charge_text(found.saturating_mul(new.len()).saturating_add(text.len()))?;
        Ok(text_value(text.replacen(old, new, most)))
    }

    pub(in super::super) fn join_texts(&mut self, between: &str, texts: &[Arc<str>]) -> Result<Value, Error> {
        let bytes: usize = texts.iter().map(|text| text.len()).fold(0, usize::saturating_add);
        self.limits.charge_text(between.len().saturating_mul(texts.len()).saturating_add(bytes))?;
        let texts: Vec<&str> = texts.iter().map(|text| &**text).collect();
        Ok(text_value(texts.join(between)))
    }

    /// Pads a text to the width in `args`, by the method `name`: `center`, `ljust`, `rjust` or `zfill`.
    pub(in super::super) fn pad(
        &mut self,
        text: &str,
        name: &str,
        args: CallArguments,
    ) -> Result<Value, Error> {
        let [width, fill] = args.bind(name, ["width", "fillchar"], 1)?;
        let width = usize::try_from(expect_int(width.as_ref(), 0)?.max(0)).unwrap_or(usize::MAX);
        let fill = match fill {
            None if name == "zfill" => '0',
            None => ' ',
            fill => {
                let fill = expect_text(fill.as_ref(), name)?;
                let mut characters = fill.chars();
                match (characters.next(), characters.next()) {
                    (Some(fill), None) => fill,
                    _ => return fail("The fill character must be exactly one character long"),
                }
            }
        };
        let missing = width.saturating_sub(text.chars().count());
        self.limits.charge_text(missing.saturating_mul(fill.len_utf8()).saturating_add(text.len()))?;
        let fill = |count: usize| String::from(fill).repeat(count);
        Ok(text_value(match name {
            "ljust" => format!("{text}{}", fill(missing)),
            "rjust" => format!("{}{text}", fill(missing)),
            "zfill" => {
                let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
                let (sign, digits) = text.split_at(text.len() - digits.len());
                format!("{sign}{}{digits}", fill(missing))
            }
            _ => {
                let left = missing / 2 + (missing & width & 1);
                format!("{}{text}{}", fill(left), fill(missing - left))
            }
        }))
    }

    fn split(&mut self, text: &str, from_end: bool, args: CallArguments) -> Result<Value, Error> {
        let [separator, most] = args.bind("split", ["sep", "maxsplit"], 0)?;
        let most = usize::try_from(expect_int(most.as_ref(), -1)?).unwrap_or(usize::MAX);
        let pieces: Vec<&str> = match separator {
            None | Some(Value::None) => split_spaces(text, most, from_end),
            separator => {
                let separator = expect_text(separator.as_ref(), "split")?;
                if separator.is_empty() {
                    return fail("empty separator");
                }
                self.limits.charge_search(&separator)?;
                let count = text.matches(&*separator).take(most).count() + 1;
                self.limits.charge_matches(count)?;
                self.limits.charge_list(count)?;
                if from_end {
                    let mut pieces: Vec<&str> = text.rsplitn(most.saturating_add(1), &*separator).collect();
                    pieces.reverse();
                    pieces
                } else {
                    text.splitn(most.saturating_add(1), &*separator).collect()
                }
            }
        };
        self.limits.charge_list(pieces.len())?;
        self.limits.charge_text(pieces.len().saturating_mul(PIECE_BYTES).saturating_add(text.len()))?;
        Ok(Value::list(pieces.into_iter().map(Value::text).collect()))
    }

    fn affix(&mut self, text: &str, name: &str, args: CallArguments) -> Result<Value, Error> {
        let [affixes, start, stop] = args.bind(name, ["affix", "start", "end"], 1)?;
        let affixes = match affixes {
            Some(Value::Tuple(affixes)) => affixes,
            other => Rc::new(Items::new(vec![other.unwrap_or(Value::None)])),
        };
        let part = if start.is_none() && stop.is_none() {
            text
        } else {
            let (start, stop) = slice_bounds(text.chars().count(), start.as_ref(), stop.as_ref())?;
            if start > stop {
                return Ok(Value::Bool(false));
            }
            characters(text, start, stop)
        };
        for affix in &*affixes {
            let affix = expect_text(Some(affix), name)?;
            self.limits.charge_visit(0)?;
            self.limits.charge_read(affix.len().min(part.len()))?;
            let is = if name == "startswith" { part.starts_with(&*affix) } else { part.ends_with(&*affix) };
            if is {
                return Ok(Value::Bool(true));
            }
        }
        Ok(Value::Bool(false))
    }

    fn find(&mut self, text: &str, name: &str, args: CallArguments) -> Result<Value, Error> {
        let [part, start, stop] = args.bind(name, ["sub", "start", "end"], 1)?;
        let wanted = expect_text(part.as_ref(), name)?;
        self.limits.charge_search(&wanted)?;
        let (start, part) = if start.is_none() && stop.is_none() {
            (0, Some(text))
        } else {
            let (start, stop) = slice_bounds(text.chars().count(), start.as_ref(), stop.as_ref())?;
            (start, (start <= stop).then(|| characters(text, start, stop)))
        };
        if name == "count" {
            let count = match part {
                Some(part) if wanted.is_empty() => part.chars().count() + 1,
                Some(part) => part.matches(&*wanted).count(),
                None => 0,
            };
            self.limits.charge_matches(count)?;
            return Ok(Value::from_count(count));
        }
        let found = part.and_then(|part| {
            let position = if name.starts_with('r') { part.rfind(&*wanted) } else { part.find(&*wanted) };
            position.map(|position| part.get(..position).unwrap_or_default().chars().count() + start)
        });
        match found {
            Some(position) => Ok(Value::from_count(position)),
            None if name.ends_with("index") => fail("substring not found"),
            None => Ok(Value::Int(-1)),
        }
    }
}

/// Returns the characters from `start` to `stop`, counted in characters.
fn characters(text: &str, start: usize, stop: usize) -> &str {
    let position =
        |number: usize| text.char_indices().nth(number).map_or(text.len(), |(position, _)| position);
    text.get(position(start)..position(stop)).unwrap_or_default()
}

/// Evaluates `text.strip(set)` at the start, at the end or at both; without a set, white space is stripped.
pub(in super::super) fn strip<'a>(text: &'a str, set: Option<&str>, start: bool, end: bool) -> &'a str {
    // A short set is scanned, a long one is hashed, so that the time is not the product of the lengths.
    let (mut ascii, mut others) = ([false; 128], HashSet::new());
    let long = set.is_some_and(|set| set.len() > MAX_SCANNED_SET_BYTES);
    for character in set.filter(|_| long).unwrap_or_default().chars() {
        match ascii.get_mut(character as usize) {
            Some(listed) => *listed = true,
            None => {
                others.insert(character);
            }
        }
    }
    let strips = |character: char| match set {
        Some(_) if long => {
            ascii.get(character as usize).copied().unwrap_or_else(|| others.contains(&character))
        }
        Some(set) => set.contains(character),
        None => is_space(character),
    };
    let text = if start { text.trim_start_matches(strips) } else { text };
    if end { text.trim_end_matches(strips) } else { text }
}

/// Splits a text at white space, at most `most` times, from the start or from the end.
fn split_spaces(text: &str, most: usize, from_end: bool) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text.trim_matches(is_space);
    while !rest.is_empty() {
        let cut = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(position) = cut.filter(|_| pieces.len() < most) else {
            break;
        };
        let (before, after) = rest.split_at(position);
        if from_end {
            pieces.push(after.trim_start_matches(is_space));
            rest = before.trim_end_matches(is_space);
        } else {
            pieces.push(before);
            rest = after.trim_start_matches(is_space);
        }
    }
    if !rest.is_empty() {
        // The unsplit rest keeps the white space at its far end.
        let kept = if pieces.is_empty() && most == 0 {
            if from_end { text.trim_end_matches(is_space) } else { text.trim_start_matches(is_space) }
        } else {
            rest
        };
        let whole = if pieces.len() == most && !from_end && most > 0 {
            let position = rest.as_ptr() as usize - text.as_ptr() as usize;
            text.get(position..).unwrap_or(kept)
        } else if pieces.len() == most && from_end && most > 0 {
            let end = rest.as_ptr() as usize - text.as_ptr() as usize + rest.len();
            text.get(..end).unwrap_or(kept)
        } else {
            kept
        };
        pieces.push(whole);
    }
    if from_end {
        pieces.reverse();
    }
    pieces
}

fn ends_line(character: char) -> bool {
    matches!(character, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// Counts the [`lines`].
pub(in super::super) fn line_count(text: &str) -> usize {
    let ends = text.chars().filter(|character| ends_line(*character)).count();
    let unfinished = text.chars().next_back().is_some_and(|last| !ends_line(last));
    ends - text.matches("\r\n").count() + usize::from(unfinished)
}

/// Splits a text as Python's `str.splitlines`; line ends stay if `keep`.
pub(in super::super) fn lines(text: &str, keep: bool) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let Some(position) = rest.find(ends_line) else {
            return Some(std::mem::take(&mut rest));
        };
        let (line, after) = rest.split_at(position);
        let width =
            if after.starts_with("\r\n") { 2 } else { after.chars().next().map_or(0, char::len_utf8) };
        let line = if keep { rest.get(..position + width).unwrap_or(line) } else { line };
        rest = after.get(width..).unwrap_or_default();
        Some(line)
    })
}

fn expand_tabs(text: &str, size: usize) -> String {
    let mut out = String::new();
    let mut column = 0;
    for character in text.chars() {
        match character {
            '\t' if size > 0 => {
                let width = size - column % size;
                out.push_str(&" ".repeat(width));
                column += width;
            }
            '\t' => (),
            other => {
                out.push(other);
                column = if other == '\n' || other == '\r' { 0 } else { column + 1 };
            }
        }
    }
    out
}

/// Reports if all cased letters have this case, and at least one is cased.
pub(in super::super) fn has_only_case(text: &str, upper: bool) -> bool {
    let right = |c: char| if upper { c.is_uppercase() } else { c.is_lowercase() };
    let wrong = |c: char| if upper { c.is_lowercase() } else { c.is_uppercase() };
    text.chars().any(right) && !text.chars().any(wrong)
}

pub(in super::super) fn capitalize(text: &str) -> String {
    let mut characters = text.chars();
    let first = characters.next().map(title_case).unwrap_or_default();
    first + &characters.as_str().to_lowercase()
}

/// Returns a letter in title case; of several resulting letters only the first is a capital.
fn title_case(letter: char) -> String {
    let mut upper = letter.to_uppercase();
    let mut title = String::from(upper.next().unwrap_or(letter));
    title.extend(upper.flat_map(char::to_lowercase));
    title
}

/// Changes the case of a text by the method `name`; `None` if it is not such a method.
fn change_case(text: &str, name: &str) -> Option<String> {
    Some(match name {
        "upper" => text.to_uppercase(),
        "lower" => text.to_lowercase(),
        "casefold" => text.to_lowercase().replace('ß', "ss"),
        "capitalize" => capitalize(text),
        "title" => {
            let mut inside = false;
            let mut out = String::with_capacity(text.len());
            for character in text.chars() {
                if inside {
                    out.extend(character.to_lowercase());
                } else {
                    out.push_str(&title_case(character));
                }
                inside = character.is_lowercase() || character.is_uppercase();
            }
            out
        }
        "swapcase" => {
            let mut out = String::with_capacity(text.len());
            for character in text.chars() {
                if character.is_uppercase() {
                    out.extend(character.to_lowercase());
                } else {
                    out.extend(character.to_uppercase());
                }
            }
            out
        }
        _ => return None,
    })
}

/// Evaluates the methods `is..`, which test all characters.
fn has_property(text: &str, name: &str) -> bool {
    let all = |holds: fn(char) -> bool| !text.is_empty() && text.chars().all(holds);
    match name {
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isascii" => text.is_ascii(),
        "isdecimal" | "isdigit" | "isnumeric" => all(char::is_numeric),
        "isspace" => all(is_space),
        "isprintable" => text.chars().all(is_printable),
        "islower" => has_only_case(text, false),
        "isupper" => has_only_case(text, true),
        "isidentifier" => {
            all(|c| c == '_' || c.is_alphanumeric()) && !text.starts_with(|c: char| c.is_numeric())
        }
        // `istitle`: each word begins with its only capital letter.
        _ => change_case(text, "title").as_deref() == Some(text) && text.chars().any(char::is_uppercase),
    }
}
