//! Lexer of templates, as Jinja2's `lexer.py` with `trim_blocks` and `lstrip_blocks`.

use std::sync::Arc;

use super::error::Error;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Data(String),
    VariableBegin,
    VariableEnd,
    BlockBegin,
    BlockEnd,
    Name(Arc<str>),
    Text(Arc<str>),
    Int(i128),
    Float(f64),
    Operator(&'static str),
}

/// Operators, the longer ones first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<",
    "=", ".", ":", "|", ",", ";",
];

/// Reports if a character is white space in Python.
pub(super) fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}

struct Lexer<'a> {
    rest: &'a str,
    line: u32,
    /// Reports if the last skipped character ended a line.
    at_line_start: bool,
    /// Reports if the last skipped character is a dot.
    after_dot: bool,
    tokens: Vec<(Token, u32)>,
}

/// Splits `source` into tokens with their lines.
///
/// # Errors
/// A tag, comment, text or number is malformed.
pub(super) fn tokenize(source: &str) -> Result<Vec<(Token, u32)>, Error> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer =
        Lexer { rest: source, line: 1, at_line_start: true, after_dot: false, tokens: Vec::new() };
    lexer.template()?;
    Ok(lexer.tokens)
}

impl Lexer<'_> {
    /// Skips `bytes` of the source and counts their lines.
    fn skip(&mut self, bytes: usize) {
        let (before, rest) = self.rest.split_at_checked(bytes).unwrap_or((self.rest, ""));
        self.line += u32::try_from(before.matches('\n').count()).unwrap_or(0);
        if let Some(last) = before.chars().last() {
            self.at_line_start = last == '\n';
            self.after_dot = last == '.';
        }
        self.rest = rest;
    }

    fn skip_space(&mut self) {
        self.skip(self.rest.len() - self.rest.trim_start_matches(is_space).len());
    }

    fn fail<T>(&self, message: impl Into<String>) -> Result<T, Error> {
        Err(Error::at(message, self.line))
    }

    /// Adds the text before a tag, stripped as the tag's `sign` says. Tags of variables do not strip it by
    /// themselves.
    fn push_data(&mut self, text: &str, sign: Option<char>, variable: bool) {
        let kept = match sign {
            Some('-') => text.trim_end_matches(is_space),
            Some(_) => text,
            None if variable => text,
            None => {
                let last_line = text.rfind('\n').map_or(0, |position| position + 1);
                let (before, line) = text.split_at(last_line);
                if (last_line > 0 || self.at_line_start) && line.chars().all(is_space) {
                    before
                } else {
                    text
                }
            }
        };
        if !kept.is_empty() {
            self.tokens.push((Token::Data(kept.to_owned()), self.line));
        }
        self.skip(text.len());
    }

    fn template(&mut self) -> Result<(), Error> {
        loop {
            let tag = self.rest.match_indices('{').find_map(|(position, _)| {
                let kind = self.rest.get(position + 1..)?.chars().next()?;
                "%#{".contains(kind).then_some((position, kind))
            });
            let Some((position, kind)) = tag else {
                if !self.rest.is_empty() {
                    self.tokens.push((Token::Data(self.rest.to_owned()), self.line));
                }
                return Ok(());
            };
            let (text, tag) = self.rest.split_at(position);
            let sign = tag.get(2..).and_then(|tag| tag.chars().next()).filter(|sign| "-+".contains(*sign));
            self.push_data(text, sign, kind == '{');
            self.skip(2 + usize::from(sign.is_some()));
            match kind {
                '#' => self.comment()?,
                '{' => self.tag(Token::VariableBegin, Token::VariableEnd)?,
                _ if self.starts_raw() => self.raw()?,
                _ => self.tag(Token::BlockBegin, Token::BlockEnd)?,
            }
        }
    }

    /// Skips the end of a block's tag with the white space that it strips; returns false if it is not here.
    fn skip_block_end(&mut self, end: &str) -> bool {
        if let Some(rest) = self.rest.strip_prefix('-').and_then(|rest| rest.strip_prefix(end)) {
            self.skip(self.rest.len() - rest.len());
            self.skip_space();
        } else if let Some(rest) = self.rest.strip_prefix('+').and_then(|rest| rest.strip_prefix(end)) {
            self.skip(self.rest.len() - rest.len());
        } else if let Some(rest) = self.rest.strip_prefix(end) {
            self.skip(end.len() + usize::from(rest.starts_with('\n')));
        } else {
            return false;
        }
        true
    }

    fn comment(&mut self) -> Result<(), Error> {
        let Some(end) = self.rest.find("#}") else {
            return self.fail("missing end of comment tag");
        };
        // A sign before the end is a part of the end.
        let sign = self.rest.get(..end).is_some_and(|comment| comment.ends_with(['-', '+']));
        self.skip(end - usize::from(sign));
        self.skip_block_end("#}");
        Ok(())
    }

    fn starts_raw(&self) -> bool {
        let Some(rest) = self.rest.trim_start_matches(is_space).strip_prefix("raw") else {
            return false;
        };
        let rest = rest.trim_start_matches(is_space);
        rest.starts_with("%}") || rest.starts_with("-%}")
    }

    fn raw(&mut self) -> Result<(), Error> {
        let end = self.rest.find("%}").unwrap_or(0);
        let strips = self.rest.get(..end).is_some_and(|tag| tag.ends_with('-'));
        self.skip(end + 2);
        if strips {
            self.skip_space();
        }
        for (position, _) in self.rest.match_indices("{%") {
            let (text, tag) = self.rest.split_at(position);
            let tag = tag.get(2..).unwrap_or_default();
            let sign = tag.chars().next().filter(|sign| "-+".contains(*sign));
            let inner = tag.strip_prefix(['-', '+']).unwrap_or(tag).trim_start_matches(is_space);
            let Some(inner) = inner.strip_prefix("endraw") else {
                continue;
            };
            let inner = inner.trim_start_matches(is_space);
            if ["%}", "-%}", "+%}"].iter().any(|end| inner.starts_with(end)) {
                let left = inner.len();
                self.push_data(text, sign, false);
                self.skip(self.rest.len() - left);
                self.skip_block_end("%}");
                return Ok(());
            }
        }
        self.fail("missing end of raw directive")
    }

    fn tag(&mut self, begin: Token, end: Token) -> Result<(), Error> {
        self.tokens.push((begin, self.line));
        let mut open: Vec<&'static str> = Vec::new();
        loop {
            if open.is_empty() && self.take_tag_end(&end) {
                return Ok(());
            }
            self.skip_space();
            if open.is_empty() && self.take_tag_end(&end) {
                return Ok(());
            }
            let line = self.line;
            let Some(first) = self.rest.chars().next() else {
                return self.fail("unexpected end of template in a tag");
            };
            let token = if first.is_ascii_digit() {
                self.number()?
            } else if first == '_' || first.is_alphabetic() {
                let length = self.rest.find(|c: char| c != '_' && !c.is_alphanumeric());
                let name = self.rest.get(..length.unwrap_or(self.rest.len())).unwrap_or_default();
                let token = Token::Name(name.into());
                self.skip(name.len());
                token
            } else if first == '\'' || first == '"' {
                self.string(first)?
            } else if let Some(operator) = OPERATORS.iter().find(|operator| self.rest.starts_with(**operator))
            {
                match *operator {
                    "(" => open.push(")"),
                    "[" => open.push("]"),
                    "{" => open.push("}"),
                    ")" | "]" | "}" if open.pop() != Some(operator) => {
                        return self.fail(format!("unexpected '{operator}'"));
                    }
                    _ => (),
                }
                self.skip(operator.len());
                Token::Operator(operator)
            } else {
                return self.fail(format!("unexpected char {first:?}"));
            };
            self.tokens.push((token, line));
        }
    }

    fn take_tag_end(&mut self, end: &Token) -> bool {
        let line = self.line;
        let ends = if *end == Token::BlockEnd {
            self.skip_block_end("%}")
        } else if self.rest.starts_with("-}}") {
            self.skip(3);
            self.skip_space();
            true
        } else if self.rest.starts_with("}}") {
            self.skip(2);
            true
        } else {
            false
        };
        if ends {
            self.tokens.push((end.clone(), line));
        }
        ends
    }

    /// Counts the characters of a number: digits of a base with single underscores between them.
    fn count_digits(text: &str, base: u32) -> usize {
        let mut length = 0;
        let mut characters = text.chars().peekable();
        while let Some(character) = characters.next() {
            let more = characters.peek().is_some_and(|next| next.is_digit(base));
            if character.is_digit(base) || (character == '_' && length > 0 && more) {
                length += 1;
            } else {
                break;
            }
        }
        length
    }

    fn number(&mut self) -> Result<Token, Error> {
        let lower = self.rest.get(..2).unwrap_or_default().to_ascii_lowercase();
        let base = match lower.as_str() {
            "0x" => 16,
            "0o" => 8,
            "0b" => 2,
            _ => 10,
        };
        let start = if base == 10 { 0 } else { 2 };
        let from = |position: usize| self.rest.get(position..).unwrap_or_default();
        let whole = start + Self::count_digits(from(start), base);
        // `x.0.1` has two items, not the number 0.1.
        if base == 10 && !self.after_dot {
            let mut end = whole;
            if let Some(fraction) = from(whole).strip_prefix('.') {
                let digits = Self::count_digits(fraction, 10);
                end += if digits > 0 { digits + 1 } else { 0 };
            }
            if let Some(exponent) = from(end).strip_prefix(['e', 'E']) {
                let sign = usize::from(exponent.starts_with(['+', '-']));
                let digits = Self::count_digits(exponent.get(sign..).unwrap_or_default(), 10);
                end += if digits > 0 { 1 + sign + digits } else { 0 };
            }
            if end > whole {
                let text = self.rest.get(..end).unwrap_or_default().replace('_', "");
                let Ok(number) = text.parse() else {
                    return self.fail(format!("invalid number {text}"));
                };
                self.skip(end);
                return Ok(Token::Float(number));
            }
        }
        let text = self.rest.get(start..whole).unwrap_or_default().replace('_', "");
        let Ok(number) = i128::from_str_radix(&text, base) else {
            return self.fail("invalid integer: expected at most 127 bits");
        };
        self.skip(whole);
        Ok(Token::Int(number))
    }

    fn string(&mut self, quote: char) -> Result<Token, Error> {
        let mut escaped = false;
        let end = self.rest.char_indices().skip(1).find(|(_, character)| {
            let ends = *character == quote && !escaped;
            escaped = *character == '\\' && !escaped;
            ends
        });
        let Some((end, _)) = end else {
            return self.fail("unexpected end of template in a string");
        };
        let inner = self.rest.get(1..end).unwrap_or_default();
        let text = match unescape(inner) {
            Some(text) => text,
            None => return self.fail("invalid escape in a string"),
        };
        self.skip(end + 1);
        Ok(Token::Text(text.into()))
    }
}

/// Resolves Python's escapes; an unknown escape stays as it is, a malformed one gives `None`.
fn unescape(inner: &str) -> Option<String> {
    let mut out = String::with_capacity(inner.len());
    let mut rest = inner;
    while let Some(position) = rest.find('\\') {
        out.push_str(rest.get(..position)?);
        let mut after = rest.get(position + 1..)?.chars();
        let kind = after.next()?;
        rest = after.as_str();
        let mut code = |digits: usize| {
            let number = u32::from_str_radix(rest.get(..digits)?, 16).ok()?;
            rest = rest.get(digits..)?;
            Some(number)
        };
        match kind {
            '\n' => (),
            '\\' | '\'' | '"' => out.push(kind),
            'a' => out.push('\x07'),
            'b' => out.push('\x08'),
            'f' => out.push('\x0c'),
            'n' => out.push('\n'),
            'r' => out.push('\r'),
            't' => out.push('\t'),
            'v' => out.push('\x0b'),
            'x' => out.push(char::from_u32(code(2)?)?),
            'u' => {
                let first = code(4)?;
                if (0xd800..0xdc00).contains(&first) {
                    rest = rest.strip_prefix("\\u")?;
                    let second = u32::from_str_radix(rest.get(..4)?, 16).ok()?;
                    rest = rest.get(4..)?;
                    let both =
                        std::char::decode_utf16([u16::try_from(first).ok()?, u16::try_from(second).ok()?]);
                    out.push(both.into_iter().next()?.ok()?);
                } else {
                    out.push(char::from_u32(first)?);
                }
            }
            'U' => out.push(char::from_u32(code(8)?)?),
            'N' => return None,
            '0'..='7' => {
                let more = rest.chars().take(2).take_while(|digit| digit.is_digit(8)).count();
                let digits = format!("{kind}{}", rest.get(..more)?);
                rest = rest.get(more..)?;
                out.push(char::from_u32(u32::from_str_radix(&digits, 8).ok()?)?);
            }
            other => {
                out.push('\\');
                out.push(other);
            }
        }
    }
    out.push_str(rest);
    Some(out)
}
