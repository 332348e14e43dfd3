//! Python's string formatting: `text % values` and `text.format(..)`.

use std::sync::Arc;

use super::calls::CallArguments;
use super::error::{Error, fail};
use super::number_format::{FormatSpec, float_digits, grouped, padded};
use super::python_text;
use super::renderer::Renderer;
use super::value::Value;

/// Most digits of a width or a precision.
const MAX_WIDTH_DIGITS: usize = 9;
/// Largest precision of a number.
const MAX_PRECISION: usize = 4096;

impl Renderer<'_> {
    /// Evaluates `format % values`.
    pub(super) fn format_percent(&mut self, format: &str, values: &Value) -> Result<Value, Error> {
        self.limits.charge_read(format.len())?;
        let single = [values.clone()];
        let mut positional = match values {
            Value::Tuple(items) => items.iter(),
            _ => single.iter(),
        };
        let mut out = String::new();
        let mut rest = format;
        let mut named = false;
        while let Some(position) = rest.find('%') {
            let (before, after) = rest.split_at(position);
            out.push_str(before);
            rest = after.get(1..).unwrap_or_default();
            let mut value = None;
            if let Some(after) = rest.strip_prefix('(') {
                let Some((name, after)) = after.split_once(')') else {
                    return fail("incomplete format key");
                };
                let Value::Map(map) = values else {
                    return fail("format requires a mapping");
                };
                match map.get_text(name) {
                    Some(found) => value = Some(found.clone()),
                    None => return fail(format!("'{name}'")),
                }
                named = true;
                rest = after;
            }
            let mut spec = FormatSpec { align: '>', ..FormatSpec::default() };
            rest = rest.trim_start_matches(|flag| {
                match flag {
                    '-' => spec.align = '<',
                    '+' => spec.sign = '+',
                    ' ' if spec.sign != '+' => spec.sign = ' ',
                    '#' => spec.alternate = true,
                    '0' => spec.zero = true,
                    other => return other == ' ',
                }
                true
            });
            let mut next = || {
                positional.next().cloned().ok_or_else(|| Error::new("not enough arguments for format string"))
            };
            if let Some(after) = rest.strip_prefix('*') {
                let width = next()?.as_int().unwrap_or(0);
                if width < 0 {
                    spec.align = '<';
                }
                spec.width = usize::try_from(width.unsigned_abs()).unwrap_or(usize::MAX);
                rest = after;
            } else {
                spec.width = take_digits(&mut rest)?.unwrap_or(0);
            }
            if let Some(after) = rest.strip_prefix('.') {
                rest = after;
                spec.precision = if let Some(after) = rest.strip_prefix('*') {
                    rest = after;
                    Some(next()?.as_int().and_then(|number| usize::try_from(number).ok()).unwrap_or(0))
                } else {
                    Some(take_digits(&mut rest)?.unwrap_or(0))
                };
            }
            rest = rest.trim_start_matches(['h', 'l', 'L']);
            let mut characters = rest.chars();
            let Some(kind) = characters.next() else {
                return fail("incomplete format");
            };
            rest = characters.as_str();
            if kind == '%' {
                out.push('%');
                continue;
            }
            let value = match value {
                Some(value) => value,
                None => next()?,
            };
            let text = self.percent_value(kind, &value, spec)?;
            self.limits.charge_text(out.len().saturating_add(text.len()))?;
            out.push_str(&text);
        }
        out.push_str(rest);
        let plain = matches!(values, Value::Map(_) | Value::List(_)) || named;
        if positional.next().is_some() && !plain {
            return fail("not all arguments converted during string formatting");
        }
        self.limits.charge_text(out.len())?;
        Ok(Value::Text(out.into()))
    }

    fn percent_value(&mut self, kind: char, value: &Value, mut spec: FormatSpec) -> Result<String, Error> {
        self.limits.charge_text(spec.width.saturating_add(spec.precision.unwrap_or(0)))?;
        if "sra".contains(kind) {
            spec.zero = false;
            spec.sign = '-';
            let text = self.converted(value, kind)?;
            let text = match spec.precision {
                Some(most) => text.chars().take(most).collect(),
                None => text,
            };
            return Ok(padded(&text, spec, ' '));
        }
        if kind == 'c' {
            let text = match (value, value.as_int().and_then(|code| u32::try_from(code).ok())) {
                (Value::Text(text), _) if text.chars().count() == 1 => text.to_string(),
                (_, Some(code)) => char::from_u32(code).map(String::from).unwrap_or_default(),
                _ => return fail("%c requires int or char"),
            };
            return Ok(padded(&text, FormatSpec { zero: false, ..spec }, ' '));
        }
        if spec.align == '<' {
            spec.zero = false;
        }
        #[allow(clippy::cast_possible_truncation)]
        let whole = match value {
            Value::Float(number) if "diu".contains(kind) && number.is_finite() => Some(*number as i128),
            other => other.as_int(),
        };
        match kind {
            'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
                let Some(whole) = whole else {
                    let name = value.type_name();
                    return fail(format!("%{kind} format: a real number is required, not {name}"));
                };
                let least = spec.precision.take().unwrap_or(0);
                let kind = if "iu".contains(kind) { 'd' } else { kind };
                let mut digits = int_digits(whole.unsigned_abs(), kind);
                if digits.len() < least {
                    digits = format!("{}{digits}", "0".repeat(least - digits.len()));
                }
                Ok(with_sign(whole < 0, &prefix(kind, spec.alternate), &digits, spec))
            }
            'e' | 'E' | 'f' | 'F' | 'g' | 'G'
                if spec.precision.is_some_and(|digits| digits > MAX_PRECISION) =>
            {
                fail(format!("expected a precision of at most {MAX_PRECISION}"))
            }
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' => match value.as_float() {
                Some(number) => {
                    let digits = float_digits(number.abs(), kind, spec.precision, spec.alternate);
                    let spec = if number.is_finite() { spec } else { FormatSpec { zero: false, ..spec } };
                    Ok(with_sign(number.is_sign_negative() && !number.is_nan(), "", &digits, spec))
                }
                None => fail(format!("must be real number, not {}", value.type_name())),
            },
            other => fail(format!("unsupported format character '{other}'")),
        }
    }

    /// Converts a value by `str`, `repr` or `ascii`; `kind` is `s`, `r` or `a`.
    fn converted(&mut self, value: &Value, kind: char) -> Result<String, Error> {
        match (kind, value) {
            ('s', _) => python_text::to_str(&mut self.limits, value),
            ('a', Value::Text(text)) => {
                let mut out = String::new();
                python_text::push_quoted(&mut out, text, true);
                Ok(out)
            }
            _ => python_text::repr(&mut self.limits, value),
        }
    }

    /// Evaluates `format.format(..)`.
    pub(super) fn format_text(&mut self, format: &Arc<str>, args: CallArguments) -> Result<Value, Error> {
        self.limits.charge_read(format.len())?;
        let mut counter = Some(0);
        let text = self.format_fields(format, &args, &mut counter, 3)?;
        self.limits.charge_text(text.len())?;
        Ok(Value::Text(text.into()))
    }

    /// Formats the replacement fields of `format`. `counter` numbers fields without a name, `levels` bounds the
    /// nesting of fields in specifications.
    fn format_fields(
        &mut self,
        format: &str,
        args: &CallArguments,
        counter: &mut Option<usize>,
        levels: usize,
    ) -> Result<String, Error> {
        if levels == 0 {
            return fail("Max string recursion exceeded");
        }
        let mut out = String::new();
        let mut rest = format;
        while let Some(position) = rest.find(['{', '}']) {
            let (before, after) = rest.split_at(position);
            out.push_str(before);
            if after.starts_with("{{") || after.starts_with("}}") {
                out.push_str(after.get(..1).unwrap_or_default());
                rest = after.get(2..).unwrap_or_default();
                continue;
            }
            if after.starts_with('}') {
                return fail("Single '}' encountered in format string");
            }
            let Some(end) = closing_brace(after) else {
                return fail("expected '}' before end of string");
            };
            let field = after.get(1..end).unwrap_or_default();
            rest = after.get(end + 1..).unwrap_or_default();
            let name_end = field.find(['!', ':']).unwrap_or(field.len());
            let (name, more) = field.split_at(name_end);
            let (conversion, spec) = match more.strip_prefix('!') {
                Some(more) => {
                    let (conversion, spec) = more.split_once(':').unwrap_or((more, ""));
                    (Some(conversion), spec)
                }
                None => (None, more.strip_prefix(':').unwrap_or_default()),
            };
            let mut value = self.field(name, args, counter)?;
            match conversion {
                None => (),
                Some("s") => value = Value::text(&self.converted(&value, 's')?),
                Some("r") => value = Value::text(&self.converted(&value, 'r')?),
                Some("a") => value = Value::text(&self.converted(&value, 'a')?),
                Some(other) => return fail(format!("Unknown conversion specifier {other}")),
            }
            let spec = self.format_fields(spec, args, counter, levels - 1)?;
            let text = self.format_value(&value, &spec)?;
            self.limits.charge_text(out.len().saturating_add(text.len()))?;
            out.push_str(&text);
        }
        out.push_str(rest);
        Ok(out)
    }

    /// Returns the value of a replacement field: an argument, followed by attributes and items.
    fn field(
        &mut self,
        path: &str,
        args: &CallArguments,
        counter: &mut Option<usize>,
    ) -> Result<Value, Error> {
        let end = path.find(['.', '[']).unwrap_or(path.len());
        let (first, mut rest) = path.split_at(end);
        let index = if first.is_empty() {
            let Some(number) = counter.as_mut() else {
                return fail("cannot switch from manual field specification to automatic field numbering");
            };
            *number += 1;
            Some(*number - 1)
        } else {
            let number = first.parse().ok();
            if number.is_some() {
                if counter.is_some_and(|count| count > 0) {
                    return fail(
                        "cannot switch from automatic field numbering to manual field specification",
                    );
                }
                *counter = None;
            }
            number
        };
        let found = match index {
            Some(index) => args.positional.get(index).cloned(),
            None => args.named.iter().find(|(name, _)| **name == *first).map(|(_, value)| value.clone()),
        };
        let Some(mut value) = found else {
            return fail(format!("Replacement field '{first}' has no argument"));
        };
        while !rest.is_empty() {
            if let Some(after) = rest.strip_prefix('.') {
                let end = after.find(['.', '[']).unwrap_or(after.len());
                let (name, more) = after.split_at(end);
                value = self.attribute(&value, &name.into())?;
                rest = more;
            } else {
                let Some((key, more)) = rest.get(1..).and_then(|after| after.split_once(']')) else {
                    return fail("Missing ']' in format string");
                };
                let key = key.parse().map_or_else(|_| Value::text(key), Value::Int);
                value = self.item(&value, &key)?;
                rest = more;
            }
        }
        Ok(value)
    }

    /// Evaluates `format(value, spec)`.
    fn format_value(&mut self, value: &Value, spec: &str) -> Result<String, Error> {
        if spec.is_empty() {
            return python_text::to_str(&mut self.limits, value);
        }
        let (mut spec, kind) = parse_spec(spec)?;
        self.limits.charge_text(spec.width.saturating_add(spec.precision.unwrap_or(0)).saturating_mul(4))?;
        let unknown = |kind: char, value: &Value| {
            fail(format!("Unknown format code '{kind}' for object of type '{}'", value.type_name()))
        };
        match value {
            Value::Text(text) => {
                if kind.is_some_and(|kind| kind != 's') {
                    return unknown(kind.unwrap_or('s'), value);
                }
                let text: String = match spec.precision {
                    Some(most) => text.chars().take(most).collect(),
                    None => text.to_string(),
                };
                if spec.zero && spec.align == '\0' {
                    spec.align = '<';
                    spec.fill = '0';
                }
                Ok(padded(&text, FormatSpec { zero: false, ..spec }, '<'))
            }
            Value::Bool(_) | Value::Int(_) => {
                let whole = value.as_int().unwrap_or_default();
                match kind {
                    None | Some('d' | 'n' | 'b' | 'o' | 'x' | 'X') => {
                        let kind = kind.filter(|kind| *kind != 'n').unwrap_or('d');
                        let digits = int_digits(whole.unsigned_abs(), kind);
                        let digits = grouped(&digits, spec.grouping, if kind == 'd' { 3 } else { 4 });
                        let prefix = if kind == 'b' && spec.alternate {
                            "0b".to_owned()
                        } else {
                            prefix(kind, spec.alternate)
                        };
                        Ok(with_sign(whole < 0, &prefix, &digits, spec))
                    }
                    Some('c') => match u32::try_from(whole).ok().and_then(char::from_u32) {
                        Some(character) => Ok(padded(&character.to_string(), spec, '<')),
                        None => fail("%c arg not in range(0x110000)"),
                    },
                    Some(kind) => self.format_float(value, Some(kind), spec),
                }
            }
            Value::Float(_) => self.format_float(value, kind, spec),
            other => fail(format!("unsupported format string passed to {}.__format__", other.type_name())),
        }
    }

    fn format_float(&mut self, value: &Value, kind: Option<char>, spec: FormatSpec) -> Result<String, Error> {
        if spec.precision.is_some_and(|digits| digits > MAX_PRECISION) {
            return fail(format!("expected a precision of at most {MAX_PRECISION}"));
        }
        let number = value.as_float().unwrap_or_default();
        let size = number.abs();
        let digits = match kind {
            Some('%') => format!("{}%", float_digits(size * 100.0, 'f', spec.precision, spec.alternate)),
            Some(kind @ ('e' | 'E' | 'f' | 'F' | 'g' | 'G')) => {
                float_digits(size, kind, spec.precision, spec.alternate)
            }
            None | Some('n') => match spec.precision {
                None if kind.is_none() => python_text::float_repr(size),
                precision => {
                    let digits = float_digits(size, 'g', precision, spec.alternate);
                    let whole = kind.is_none() && size.is_finite() && !digits.contains(['.', 'e']);
                    if whole { format!("{digits}.0") } else { digits }
                }
            },
            Some(other) => {
                let name = value.type_name();
                return fail(format!("Unknown format code '{other}' for object of type '{name}'"));
            }
        };
        let (whole, fraction) = digits.split_at(digits.find(['.', 'e', '%']).unwrap_or(digits.len()));
        let digits = format!("{}{fraction}", grouped(whole, spec.grouping, 3));
        Ok(with_sign(number.is_sign_negative() && !number.is_nan(), "", &digits, spec))
    }
}

/// Finds the brace that closes the field at the start of `text`.
fn closing_brace(text: &str) -> Option<usize> {
    let mut depth = 0_usize;
    for (position, character) in text.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 1 => return Some(position),
            '}' => depth -= 1,
            _ => (),
        }
    }
    None
}

/// Takes the digits at the start of `rest` as a number.
fn take_digits(rest: &mut &str) -> Result<Option<usize>, Error> {
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    if end > MAX_WIDTH_DIGITS {
        return fail(format!("expected format widths of at most {MAX_WIDTH_DIGITS} digits"));
    }
    let (digits, after) = rest.split_at(end);
    *rest = after;
    Ok(digits.parse().ok())
}

/// Parses a format specification and its type.
fn parse_spec(text: &str) -> Result<(FormatSpec, Option<char>), Error> {
    let mut spec = FormatSpec::default();
    let mut rest = text;
    let mut characters = text.chars();
    let (first, second) = (characters.next(), characters.next());
    if let (Some(fill), Some(align @ ('<' | '>' | '=' | '^'))) = (first, second) {
        (spec.fill, spec.align) = (fill, align);
        rest = characters.as_str();
    } else if let Some(align @ ('<' | '>' | '=' | '^')) = first {
        spec.align = align;
        rest = text.get(1..).unwrap_or_default();
    }
    if let Some(sign @ ('+' | '-' | ' ')) = rest.chars().next() {
        spec.sign = sign;
        rest = rest.get(1..).unwrap_or_default();
    }
    if let Some(after) = rest.strip_prefix('#') {
        spec.alternate = true;
        rest = after;
    }
    if let Some(after) = rest.strip_prefix('0') {
        spec.zero = true;
        rest = after;
    }
    spec.width = take_digits(&mut rest)?.unwrap_or(0);
    if let Some(grouping @ (',' | '_')) = rest.chars().next() {
        spec.grouping = Some(grouping);
        rest = rest.get(1..).unwrap_or_default();
    }
    if let Some(after) = rest.strip_prefix('.') {
        rest = after;
        spec.precision = take_digits(&mut rest)?;
        if spec.precision.is_none() {
            return fail("Format specifier missing precision");
        }
    }
    let mut characters = rest.chars();
    let kind = characters.next();
    if characters.next().is_some() {
        return fail(format!("Invalid format specifier '{text}'"));
    }
    Ok((spec, kind))
}

fn int_digits(number: u128, kind: char) -> String {
    match kind {
        'x' => format!("{number:x}"),
        'X' => format!("{number:X}"),
        'o' => format!("{number:o}"),
        'b' => format!("{number:b}"),
        _ => number.to_string(),
    }
}

fn prefix(kind: char, alternate: bool) -> String {
    if alternate && "xXo".contains(kind) { format!("0{kind}") } else { String::new() }
}

/// Adds sign, prefix and padding to digits.
fn with_sign(negative: bool, prefix: &str, digits: &str, spec: FormatSpec) -> String {
    let sign = match (negative, spec.sign) {
        (true, _) => "-",
        (false, '+') => "+",
        (false, ' ') => " ",
        (false, _) => "",
    };
    let head = format!("{sign}{prefix}");
    let inside = (spec.zero && matches!(spec.align, '\0' | '>') && spec.fill == ' ') || spec.align == '=';
    if inside {
        let fill = if spec.zero { '0' } else { spec.fill };
        let missing = spec.width.saturating_sub(head.chars().count() + digits.chars().count());
        return format!("{head}{}{digits}", String::from(fill).repeat(missing));
    }
    padded(&format!("{head}{digits}"), spec, '>')
}
