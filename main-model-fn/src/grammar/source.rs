//! Structure that a request demands of its answer, checked before a grammar is compiled.

use super::schema::{self, Checked};
use super::{Warnings, Whitespace};
use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};

/// Longest regular expression in bytes.
const MAX_REGEX_BYTES: usize = 16 << 10;
/// Longest Lark grammar in bytes.
const MAX_LARK_BYTES: usize = 64 << 10;
/// Most bytes of an answer's form: parameters of all callable functions, and the answer's schema.
const MAX_FORM_BYTES: usize = 256 << 10;
/// Deepest nesting of brackets, because the library parses them recursively.
const MAX_NESTING: usize = 100;
/// Most choices.
const MAX_CHOICES: usize = 5000;
/// Most bytes of all choices.
const MAX_CHOICE_BYTES: usize = 256 << 10;

/// Structure that an answer must match.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Source {
    /// JSON that matches a schema.
    Json {
        /// The checked schema.
        schema: Value,
        /// White space between parts of the JSON.
        whitespace: Whitespace,
        /// Keywords of the schema that are not enforced.
        warnings: Warnings,
    },
    /// Text that matches a regular expression as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Grammar in llguidance's dialect of Lark.
    Lark(String),
    /// Rules that this program generated, with checked schemas, and with a client's rules if there are any.
    Form {
        /// The grammar.
        rules: String,
        /// Line numbers of the grammar, from 1, and the request fields that they come from.
        fields: Vec<(usize, String)>,
        /// True if a client's rules are among the rules.
        has_client_rules: bool,
    },
}

impl Source {
    /// Creates the structure of JSON that matches `schema`, or of any object without a schema.
    ///
    /// # Errors
    /// Fails if the schema is invalid, or if a part of it is unsupported.
    pub(crate) fn json(schema: Option<Value>, whitespace: Whitespace) -> Result<Self, String> {
        let schema = schema.unwrap_or_else(|| json!({"type": "object"}));
        let Checked { schema, warnings } = schema::checked(schema)?;
        Ok(Self::Json { schema, whitespace, warnings })
    }

    /// Creates the structure of text that matches `regex`.
    ///
    /// # Errors
    /// Fails if it is empty, too long or nested too deeply.
    pub(crate) fn regex(regex: &str) -> Result<Self, String> {
        let regex = unanchored(regex);
        check_text(regex, MAX_REGEX_BYTES)?;
        Ok(Self::Regex(regex.to_owned()))
    }

    /// Creates the structure of one of several texts.
    ///
    /// # Errors
    /// Fails if there are none or too many, or if one is empty.
    pub(crate) fn choice(choices: Vec<String>) -> Result<Self, String> {
        if choices.is_empty() || choices.len() > MAX_CHOICES {
            return Err(format!("expected 1 to {MAX_CHOICES} choices, got {}", choices.len()));
        }
        if choices.iter().any(String::is_empty) {
            return Err("expected non-empty choices".to_owned());
        }
        let bytes: usize = choices.iter().map(String::len).sum();
        if bytes > MAX_CHOICE_BYTES {
            return Err(format!("choices too long: expected at most {MAX_CHOICE_BYTES} bytes, got {bytes}"));
        }
        Ok(Self::Choice(choices))
    }

    /// Creates the structure of a Lark grammar.
    ///
    /// # Errors
    /// Fails if it is empty, too long or nested too deeply, or if it has constructs with unbounded work: intersections,
    /// complements, and schemas within rules.
    pub(crate) fn lark(grammar: String) -> Result<Self, String> {
        check_text(&grammar, MAX_LARK_BYTES)?;
        if let Some(unbounded) = unbounded(&grammar) {
            return Err(format!("unsupported in grammars: `{unbounded}`"));
        }
        Ok(Self::Lark(grammar))
    }

    /// Creates the form of an answer with thoughts or calls. `fields` maps lines of the grammar, from 1, to request fields.
    ///
    /// # Errors
    /// Fails if it is too long.
    pub(crate) fn form(
        rules: String,
        fields: Vec<(usize, String)>,
        has_client_rules: bool,
    ) -> Result<Self, String> {
        match rules.len() {
            bytes if bytes > MAX_FORM_BYTES => {
                Err(format!("parameters too long: expected at most {MAX_FORM_BYTES} bytes, got {bytes}"))
            }
            _ => Ok(Self::Form { rules, fields, has_client_rules }),
        }
    }

    /// Returns a text that differs for different structures.
    pub(super) fn cache_key(&self) -> String {
        match self {
            Self::Json { schema, whitespace, .. } => format!("json {whitespace:?} {schema}"),
            Self::Regex(regex) => format!("regex {regex}"),
            Self::Choice(choices) => format!("choice {choices:?}"),
            Self::Lark(grammar) => format!("lark {grammar}"),
            Self::Form { rules, .. } => format!("form {rules}"),
        }
    }

    /// Splits `message` of the library into the request field at fault and the fault; `None` if no single field is at fault.
    pub(super) fn blamed<'a>(&self, message: &'a str) -> Option<(String, &'a str)> {
        let Self::Form { fields, .. } = self else { return None };
        let (place, what) = message.strip_prefix("at ")?.split_once("): ")?;
        let line: usize = place.split_once('(')?.0.parse().ok()?;
        let (_, field) = fields.iter().find(|(of, _)| *of == line)?;
        Some((field.clone(), what))
    }

    /// Returns the tokens that a client's rules name by text or id: `<|end|>`, `<[7,9-12]>`.
    pub(super) fn named_tokens(&self) -> Vec<&str> {
        let Self::Lark(grammar) = self else { return Vec::new() };
        let named = |rest: &'_ str| {
            let inside = rest.strip_prefix('<')?;
            let end = inside.find(|next: char| "<>".contains(next) || next.is_whitespace())?;
            inside[end..].starts_with('>').then_some(end + 2)
        };
        outside_literals(grammar).filter_map(|rest| named(rest).map(|length| &rest[..length])).collect()
    }

    /// Returns the right-hand side of a rule with this structure.
    pub(crate) fn rule(&self) -> String {
        match self {
            Self::Json { schema, whitespace, .. } => format!("%json {}", spaced(schema, whitespace)),
            Self::Regex(regex) => format!("/{}/", regex_literal(regex)),
            Self::Choice(choices) => {
                let choices: Vec<String> = choices.iter().map(|text| quoted(text)).collect();
                format!("({})", choices.join(" | "))
            }
            Self::Lark(rules) | Self::Form { rules, .. } => format!("%lark {{\n{rules}\n}}"),
        }
    }

    /// Returns sentences about the parts of the schema in `field` that are not enforced.
    pub(crate) fn warnings(&self, field: &str) -> Vec<String> {
        match self {
            Self::Json { warnings, .. } => warnings.sentences(field),
            _ => Vec::new(),
        }
    }

    /// Reports if a client's rules are among the rules. These may be ambiguous.
    pub(crate) fn has_client_rules(&self) -> bool {
        matches!(self, Self::Lark(_) | Self::Form { has_client_rules: true, .. })
    }

    /// Returns the grammar in the form of the library.
    pub(super) fn grammar(&self) -> TopLevelGrammar {
        match self {
            Self::Json { schema, whitespace, .. } => {
                TopLevelGrammar::from_json_schema(spaced(schema, whitespace))
            }
            Self::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Self::Choice(choices) => {
                let choices: Vec<String> = choices.iter().map(|text| quoted(text)).collect();
                // An upper-case name makes it a single lexeme, whose alternatives take no space in the parser.
                TopLevelGrammar::from_lark(format!("start: CHOICE\nCHOICE: {}", choices.join(" | ")))
            }
            Self::Lark(rules) | Self::Form { rules, .. } => TopLevelGrammar::from_lark(rules.clone()),
        }
    }
}

/// Arguments of a function in the form of rules.
pub(crate) struct Inlined {
    /// Right-hand side of a rule that matches the schema.
    pub(crate) schema: String,
    /// Keywords of the schema that are not enforced.
    pub(crate) warnings: Warnings,
}

/// Converts the `schema` of a function's parameters to rules; without a schema, any object matches.
///
/// # Errors
/// Fails if a part of the schema is unsupported.
pub(crate) fn inline_schema(schema: Option<Value>, whitespace: &Whitespace) -> Result<Inlined, String> {
    let mut schema = schema.unwrap_or_else(|| json!({}));
    if let Some(object) = schema.as_object_mut() {
        object.entry("type").or_insert_with(|| "object".into());
    }
    inline_value_schema(schema, whitespace)
}

/// Converts the `schema` of a value to rules.
///
/// # Errors
/// Fails if a part of the schema is unsupported.
pub(crate) fn inline_value_schema(schema: Value, whitespace: &Whitespace) -> Result<Inlined, String> {
    let Checked { schema, warnings } = schema::checked(schema)?;
    Ok(Inlined { schema: spaced(&schema, whitespace).to_string(), warnings })
}

/// Adds the library's options of white space to `schema`.
fn spaced(schema: &Value, whitespace: &Whitespace) -> Value {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        Value::Bool(false) => json!({"allOf": [false]}),
        schema => schema.clone(),
    };
    if let Some(object) = schema.as_object_mut() {
        object.insert(schema::OPTIONS.to_owned(), whitespace.options());
    }
    schema
}

/// Quotes a text for Lark.
pub(crate) fn quoted(text: &str) -> String {
    // JSON does not escape this character, but Lark needs it escaped.
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// Writes a regular expression between slashes.
fn regex_literal(regex: &str) -> String {
    let mut literal = String::with_capacity(regex.len());
    let mut is_escaped = false;
    for character in regex.chars() {
        match character {
            '/' if !is_escaped => literal.push_str("\\/"),
            '\n' => literal.push_str("\\n"),
            character => literal.push(character),
        }
        is_escaped = character == '\\' && !is_escaped;
    }
    literal
}

/// Returns a construct of a Lark grammar whose work the library does not bound, if there is one.
fn unbounded(grammar: &str) -> Option<&'static str> {
    outside_literals(grammar).find_map(|rest| match rest.as_bytes() {
        [b'&', ..] => Some("&"),
        // Before a number, it is a repetition count.
        [b'~', ..] if !rest[1..].trim_start().starts_with(|next: char| next.is_ascii_digit()) => Some("~"),
        [b'%', ..] => ["%json", "%regex", "%lark"].into_iter().find(|name| rest.starts_with(name)),
        _ => None,
    })
}

/// Returns the rests of a Lark grammar from each character that is outside of literals and comments.
fn outside_literals(grammar: &str) -> impl Iterator<Item = &str> {
    let mut rest = grammar;
    std::iter::from_fn(move || {
        let here = rest;
        let character = here.chars().next()?;
        let after = &here[character.len_utf8()..];
        rest = match character {
            '/' if after.starts_with('/') => after.find('\n').map_or("", |end| &after[end..]),
            '"' | '/' => past_literal(after, character),
            _ => after,
        };
        Some(here)
    })
}

/// Returns the text behind the `quote` that ends a literal.
fn past_literal(text: &str, quote: char) -> &str {
    let mut escaped = false;
    for (at, character) in text.char_indices() {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if character == quote => return &text[at + character.len_utf8()..],
            _ => (),
        }
    }
    ""
}

/// Checks the length and nesting of a text.
fn check_text(text: &str, most: usize) -> Result<(), String> {
    if text.trim().is_empty() {
        return Err("expected a non-empty text".to_owned());
    }
    if text.len() > most {
        return Err(format!("too long: expected at most {most} bytes, got {}", text.len()));
    }
    // Brackets within literals count as well, which only makes the bound stricter.
    let mut depth = 0_usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => (),
        }
        if depth > MAX_NESTING {
            return Err(format!("brackets nested deeper than {MAX_NESTING} levels"));
        }
    }
    Ok(())
}

/// Removes anchors from `regex`, because the whole answer must match anyway.
fn unanchored(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        Some(rest) if rest.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 0 => rest,
        _ => regex,
    }
}
