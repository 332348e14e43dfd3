//! Methods of texts.

use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;

use super::super::calls::Given;
use super::super::error::{Error, fail};
use super::super::lexer::is_space;
use super::super::machine::Machine;
use super::super::print::is_printable;
use super::super::value::{Items, Value};
use super::containers::bounds;

/// Bytes that a piece of a text takes in a list.
const PIECE: usize = 32;
/// Bytes of a set of characters that is searched for each character.
const SHORT_SET: usize = 32;

fn string(text: impl Into<Arc<str>>) -> Value {
    Value::Text(text.into())
}

/// A text that a method needs.
fn text_of(value: Option<&Value>, method: &str) -> Result<Arc<str>, Error> {
    match value {
        Some(Value::Text(text)) => Ok(text.clone()),
        Some(Value::Undefined(message)) => fail(&**message),
        other => {
            let name = other.map_or("NoneType", Value::type_name);
            fail(format!("{method}() argument must be str, not {name}"))
        }
    }
}

/// A whole number that a method needs.
fn number_of(value: Option<&Value>, default: i128) -> Result<i128, Error> {
    match value {
        None => Ok(default),
        Some(value) => value.as_int().ok_or_else(|| {
            Error::new(format!("'{}' object cannot be interpreted as an integer", value.type_name()))
        }),
    }
}

impl Machine<'_> {
    pub(super) fn text_method(&mut self, text: &Arc<str>, name: &str, given: Given) -> Result<Value, Error> {
        self.limits.read(text.len())?;
        let value = match name {
            "format" => return self.format_text(text, given),
            "format_map" => {
                let [map] = given.bind(name, ["mapping"], 1)?;
                let Some(Value::Map(map)) = map else {
                    return fail("format_map() argument must be a mapping");
                };
                let named = map.entries().iter();
                let named = named.filter_map(|(key, value)| match key {
                    Value::Text(name) => Some((name.clone(), value.clone())),
                    _ => None,
                });
                return self.format_text(text, Given { positional: Vec::new(), named: named.collect() });
            }
            "split" | "rsplit" => self.split(text, name == "rsplit", given)?,
            "splitlines" => {
                let [keep] = given.bind(name, ["keepends"], 0)?;
                let count = line_count(text);
                self.limits.build_list(count)?;
                self.limits.build(count.saturating_mul(PIECE).saturating_add(text.len()))?;
                Value::list(lines(text, keep.is_some_and(|keep| keep.truth())).map(Value::text).collect())
            }
            "strip" | "lstrip" | "rstrip" => {
                let [set] = given.bind(name, ["chars"], 0)?;
                let set = match set {
                    None | Some(Value::None) => None,
                    set => Some(text_of(set.as_ref(), name)?),
                };
                self.limits.search(set.as_deref().unwrap_or_default())?;
                let (start, end) = (name != "rstrip", name != "lstrip");
                string(strip(text, set.as_deref(), start, end))
            }
            "startswith" | "endswith" => self.affix(text, name, given)?,
            "find" | "rfind" | "index" | "rindex" | "count" => self.find(text, name, given)?,
            "partition" | "rpartition" => {
                let [separator] = given.bind(name, ["sep"], 1)?;
                let separator = text_of(separator.as_ref(), name)?;
                if separator.is_empty() {
                    return fail("empty separator");
                }
                self.limits.search(&separator)?;
                self.limits.build(text.len())?;
                let found = if name == "partition" {
                    text.split_once(&*separator)
                } else {
                    text.rsplit_once(&*separator)
                };
                Value::tuple(match (found, name) {
                    (Some((before, after)), _) => vec![string(before), string(separator), string(after)],
                    (None, "partition") => vec![string(text.clone()), string(""), string("")],
                    (None, _) => vec![string(""), string(""), string(text.clone())],
                })
            }
            "removeprefix" | "removesuffix" => {
                let [affix] = given.bind(name, ["affix"], 1)?;
                let affix = text_of(affix.as_ref(), name)?;
                let rest = if name == "removeprefix" {
                    text.strip_prefix(&*affix)
                } else {
                    text.strip_suffix(&*affix)
                };
                string(rest.unwrap_or(text))
            }
            "replace" => {
                let [old, new, count] = given.bind(name, ["old", "new", "count"], 2)?;
                let (old, new) = (text_of(old.as_ref(), name)?, text_of(new.as_ref(), name)?);
                let count = number_of(count.as_ref(), -1)?;
                return self.replace(text, &old, &new, count);
            }
            "join" => {
                let [items] = given.bind(name, ["iterable"], 1)?;
                let items = self.iterate(&items.unwrap_or(Value::None))?;
                self.limits.build_list(items.len())?;
                let mut texts = Vec::with_capacity(items.len());
                for (index, item) in items.iter().enumerate() {
                    self.limits.look(0)?;
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
            "center" | "ljust" | "rjust" | "zfill" => return self.pad(text, name, given),
            "expandtabs" => {
                let [size] = given.bind(name, ["tabsize"], 0)?;
                let size = usize::try_from(number_of(size.as_ref(), 8)?.max(0)).unwrap_or(usize::MAX);
                self.limits
                    .build(text.matches('\t').count().saturating_mul(size).saturating_add(text.len()))?;
                string(expand_tabs(text, size))
            }
            "encode" | "translate" | "maketrans" => {
                return fail(format!("the method '{name}' of texts is not available"));
            }
            _ => {
                given.none(name)?;
                match cases(text, name) {
                    Some(text) => string(text),
                    None => Value::Bool(holds(text, name)),
                }
            }
        };
        if let Value::Text(text) = &value {
            self.limits.build(text.len())?;
        }
        Ok(value)
    }

    /// `text.replace(old, new, count)`.
    pub(in super::super) fn replace(
        &mut self,
        text: &str,
        old: &str,
        new: &str,
        count: i128,
    ) -> Result<Value, Error> {
        self.limits.read(text.len())?;
        let most = usize::try_from(count).unwrap_or(usize::MAX);
        self.limits.search(old)?;
        let found = text.matches(old).take(most).count();
        self.limits.found(found)?;
        self.limits.build(found.saturating_mul(new.len()).saturating_add(text.len()))?;
        Ok(string(text.replacen(old, new, most)))
    }

    pub(in super::super) fn join_texts(&mut self, between: &str, texts: &[Arc<str>]) -> Result<Value, Error> {
        let bytes: usize = texts.iter().map(|text| text.len()).fold(0, usize::saturating_add);
        self.limits.build(between.len().saturating_mul(texts.len()).saturating_add(bytes))?;
        let texts: Vec<&str> = texts.iter().map(|text| &**text).collect();
        Ok(string(texts.join(between)))
    }

    /// Text that is at least `width` characters long.
    pub(in super::super) fn pad(&mut self, text: &str, name: &str, given: Given) -> Result<Value, Error> {
        let [width, fill] = given.bind(name, ["width", "fillchar"], 1)?;
        let width = usize::try_from(number_of(width.as_ref(), 0)?.max(0)).unwrap_or(usize::MAX);
        let fill = match fill {
            None if name == "zfill" => '0',
            None => ' ',
            fill => {
                let fill = text_of(fill.as_ref(), name)?;
                let mut characters = fill.chars();
                match (characters.next(), characters.next()) {
                    (Some(fill), None) => fill,
                    _ => return fail("The fill character must be exactly one character long"),
                }
            }
        };
        let missing = width.saturating_sub(text.chars().count());
        self.limits.build(missing.saturating_mul(fill.len_utf8()).saturating_add(text.len()))?;
        let fill = |count: usize| String::from(fill).repeat(count);
        Ok(string(match name {
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

    fn split(&mut self, text: &str, from_end: bool, given: Given) -> Result<Value, Error> {
        let [separator, most] = given.bind("split", ["sep", "maxsplit"], 0)?;
        let most = usize::try_from(number_of(most.as_ref(), -1)?).unwrap_or(usize::MAX);
        let pieces: Vec<&str> = match separator {
            None | Some(Value::None) => split_spaces(text, most, from_end),
            separator => {
                let separator = text_of(separator.as_ref(), "split")?;
                if separator.is_empty() {
                    return fail("empty separator");
                }
                self.limits.search(&separator)?;
                let count = text.matches(&*separator).take(most).count() + 1;
                self.limits.found(count)?;
                self.limits.build_list(count)?;
                if from_end {
                    let mut pieces: Vec<&str> = text.rsplitn(most.saturating_add(1), &*separator).collect();
                    pieces.reverse();
                    pieces
                } else {
                    text.splitn(most.saturating_add(1), &*separator).collect()
                }
            }
        };
        self.limits.build_list(pieces.len())?;
        self.limits.build(pieces.len().saturating_mul(PIECE).saturating_add(text.len()))?;
        Ok(Value::list(pieces.into_iter().map(Value::text).collect()))
    }

    fn affix(&mut self, text: &str, name: &str, given: Given) -> Result<Value, Error> {
        let [affixes, start, stop] = given.bind(name, ["affix", "start", "end"], 1)?;
        let affixes = match affixes {
            Some(Value::Tuple(affixes)) => affixes,
            other => Rc::new(Items::new(vec![other.unwrap_or(Value::None)])),
        };
        let part = if start.is_none() && stop.is_none() {
            text
        } else {
            let (start, stop) = bounds(text.chars().count(), start.as_ref(), stop.as_ref())?;
            if start > stop {
                return Ok(Value::Bool(false));
            }
            characters(text, start, stop)
        };
        for affix in &*affixes {
            let affix = text_of(Some(affix), name)?;
            self.limits.look(0)?;
            self.limits.read(affix.len().min(part.len()))?;
            let is = if name == "startswith" { part.starts_with(&*affix) } else { part.ends_with(&*affix) };
            if is {
                return Ok(Value::Bool(true));
            }
        }
        Ok(Value::Bool(false))
    }

    fn find(&mut self, text: &str, name: &str, given: Given) -> Result<Value, Error> {
        let [part, start, stop] = given.bind(name, ["sub", "start", "end"], 1)?;
        let wanted = text_of(part.as_ref(), name)?;
        self.limits.search(&wanted)?;
        let (start, part) = if start.is_none() && stop.is_none() {
            (0, Some(text))
        } else {
            let (start, stop) = bounds(text.chars().count(), start.as_ref(), stop.as_ref())?;
            (start, (start <= stop).then(|| characters(text, start, stop)))
        };
        if name == "count" {
            let count = match part {
                Some(part) if wanted.is_empty() => part.chars().count() + 1,
                Some(part) => part.matches(&*wanted).count(),
                None => 0,
            };
            self.limits.found(count)?;
            return Ok(Value::count(count));
        }
        let found = part.and_then(|part| {
            let place = if name.starts_with('r') { part.rfind(&*wanted) } else { part.find(&*wanted) };
            place.map(|place| part.get(..place).unwrap_or_default().chars().count() + start)
        });
        match found {
            Some(place) => Ok(Value::count(place)),
            None if name.ends_with("index") => fail("substring not found"),
            None => Ok(Value::Int(-1)),
        }
    }
}

/// Characters from `start` to `stop`.
fn characters(text: &str, start: usize, stop: usize) -> &str {
    let place = |number: usize| text.char_indices().nth(number).map_or(text.len(), |(place, _)| place);
    text.get(place(start)..place(stop)).unwrap_or_default()
}

/// `text.strip(set)`, at the start, at the end or at both.
pub(in super::super) fn strip<'a>(text: &'a str, set: Option<&str>, start: bool, end: bool) -> &'a str {
    // A short set is searched, a long one is hashed: the time is not the product of the lengths.
    let (mut ascii, mut others) = ([false; 128], HashSet::new());
    let long = set.is_some_and(|set| set.len() > SHORT_SET);
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

/// Words between white space, `most` of them cut off.
fn split_spaces(text: &str, most: usize, from_end: bool) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text.trim_matches(is_space);
    while !rest.is_empty() {
        let cut = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(place) = cut.filter(|_| pieces.len() < most) else {
            break;
        };
        let (before, after) = rest.split_at(place);
        if from_end {
            pieces.push(after.trim_start_matches(is_space));
            rest = before.trim_end_matches(is_space);
        } else {
            pieces.push(before);
            rest = after.trim_start_matches(is_space);
        }
    }
    if !rest.is_empty() {
        // What is left keeps the white space at its other end.
        let kept = if pieces.is_empty() && most == 0 {
            if from_end { text.trim_end_matches(is_space) } else { text.trim_start_matches(is_space) }
        } else {
            rest
        };
        let whole = if pieces.len() == most && !from_end && most > 0 {
            let place = rest.as_ptr() as usize - text.as_ptr() as usize;
            text.get(place..).unwrap_or(kept)
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

/// Number of [`lines`].
pub(in super::super) fn line_count(text: &str) -> usize {
    let ends = text.chars().filter(|character| ends_line(*character)).count();
    let unfinished = text.chars().next_back().is_some_and(|last| !ends_line(last));
    ends - text.matches("\r\n").count() + usize::from(unfinished)
}

/// Lines as Python's `str.splitlines` cuts them.
pub(in super::super) fn lines(text: &str, keep: bool) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let Some(place) = rest.find(ends_line) else {
            return Some(std::mem::take(&mut rest));
        };
        let (line, after) = rest.split_at(place);
        let width =
            if after.starts_with("\r\n") { 2 } else { after.chars().next().map_or(0, char::len_utf8) };
        let line = if keep { rest.get(..place + width).unwrap_or(line) } else { line };
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

/// All letters that have a case have this one, and there is one.
pub(in super::super) fn cased(text: &str, upper: bool) -> bool {
    let right = |c: char| if upper { c.is_uppercase() } else { c.is_lowercase() };
    let wrong = |c: char| if upper { c.is_lowercase() } else { c.is_uppercase() };
    text.chars().any(right) && !text.chars().any(wrong)
}

pub(in super::super) fn capitalize(text: &str) -> String {
    let mut characters = text.chars();
    let first = characters.next().map(title_case).unwrap_or_default();
    first + &characters.as_str().to_lowercase()
}

/// One letter as a word's first: what becomes several letters has one capital among them.
fn title_case(letter: char) -> String {
    let mut upper = letter.to_uppercase();
    let mut title = String::from(upper.next().unwrap_or(letter));
    title.extend(upper.flat_map(char::to_lowercase));
    title
}

/// The text in another case.
fn cases(text: &str, name: &str) -> Option<String> {
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

/// Questions about all characters.
fn holds(text: &str, name: &str) -> bool {
    let all = |holds: fn(char) -> bool| !text.is_empty() && text.chars().all(holds);
    match name {
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isascii" => text.is_ascii(),
        "isdecimal" | "isdigit" | "isnumeric" => all(char::is_numeric),
        "isspace" => all(is_space),
        "isprintable" => text.chars().all(is_printable),
        "islower" => cased(text, false),
        "isupper" => cased(text, true),
        "isidentifier" => {
            all(|c| c == '_' || c.is_alphanumeric()) && !text.starts_with(|c: char| c.is_numeric())
        }
        // Each word begins with a capital letter and has no other.
        _ => cases(text, "title").as_deref() == Some(text) && text.chars().any(char::is_uppercase),
    }
}
