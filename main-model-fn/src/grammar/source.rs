//! Form that a request asks of its answer, checked before anything is compiled.

use super::schema::{self, Checked};
use super::{Warnings, Whitespace};
use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};

/// Longest regular expression and Lark grammar in bytes.
const REGEX_BYTES: usize = 16 << 10;
const LARK_BYTES: usize = 64 << 10;
/// Most bytes of an answer's form: of the parameters of all functions that may be called, and of an answer's schema.
const FORM_BYTES: usize = 256 << 10;
/// How deep brackets lie in each other: the library reads them by recursion.
const NESTING: usize = 100;
/// Most choices, and bytes of all of them.
const CHOICES: usize = 5000;
const CHOICE_BYTES: usize = 256 << 10;

/// Form that an answer must match.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Source {
    /// JSON that a schema takes.
    Json {
        /// The schema, checked.
        schema: Value,
        /// White space between the parts of the JSON.
        whitespace: Whitespace,
        /// Keywords of the schema that are not enforced.
        warnings: Warnings,
    },
    /// All of it matches a regular expression.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in Lark's syntax, as llguidance reads it.
    Lark(String),
    /// Rules of ours, with schemas that are checked, and with a client's rules in one of them or not.
    Form {
        /// The grammar.
        rules: String,
        /// Lines of it, the first being 1, and the fields of the request that say them.
        fields: Vec<(usize, String)>,
        /// A client's rules are among them.
        has_client_rules: bool,
    },
}

impl Source {
    /// JSON that `schema` takes; any object without one.
    ///
    /// # Errors
    /// A part of the schema is not supported, or it is no schema.
    pub(crate) fn json(schema: Option<Value>, whitespace: Whitespace) -> Result<Self, String> {
        let schema = schema.unwrap_or_else(|| json!({"type": "object"}));
        let Checked { schema, warnings } = schema::checked(schema)?;
        Ok(Self::Json { schema, whitespace, warnings })
    }

    /// # Errors
    /// It is empty, too long or too deep.
    pub(crate) fn regex(regex: &str) -> Result<Self, String> {
        let regex = unanchored(regex);
        check_text(regex, REGEX_BYTES)?;
        Ok(Self::Regex(regex.to_owned()))
    }

    /// # Errors
    /// There are none or too many, or one is empty.
    pub(crate) fn choice(choices: Vec<String>) -> Result<Self, String> {
        if choices.is_empty() || choices.len() > CHOICES {
            return Err(format!("expected 1 to {CHOICES} choices, got {}", choices.len()));
        }
        if choices.iter().any(String::is_empty) {
            return Err("expected non-empty choices".to_owned());
        }
        let bytes: usize = choices.iter().map(String::len).sum();
        if bytes > CHOICE_BYTES {
            return Err(format!("choices too long: expected at most {CHOICE_BYTES} bytes, got {bytes}"));
        }
        Ok(Self::Choice(choices))
    }

    /// # Errors
    /// It is empty, too long or too deep, or asks for what takes unbounded work: intersections, complements and
    /// schemas within rules.
    pub(crate) fn lark(grammar: String) -> Result<Self, String> {
        check_text(&grammar, LARK_BYTES)?;
        if let Some(unbounded) = unbounded(&grammar) {
            return Err(format!("unsupported in grammars: `{unbounded}`"));
        }
        Ok(Self::Lark(grammar))
    }

    /// Makes the form of an answer with thoughts or calls; `fields` of the request say these lines, the first being 1.
    ///
    /// # Errors
    /// It is too long.
    pub(crate) fn form(
        rules: String,
        fields: Vec<(usize, String)>,
        has_client_rules: bool,
    ) -> Result<Self, String> {
        match rules.len() {
            bytes if bytes > FORM_BYTES => {
                Err(format!("parameters too long: expected at most {FORM_BYTES} bytes, got {bytes}"))
            }
            _ => Ok(Self::Form { rules, fields, has_client_rules }),
        }
    }

    /// Returns the key that tells it from all others.
    pub(super) fn key(&self) -> String {
        match self {
            Self::Json { schema, whitespace, .. } => format!("json {whitespace:?} {schema}"),
            Self::Regex(regex) => format!("regex {regex}"),
            Self::Choice(choices) => format!("choice {choices:?}"),
            Self::Lark(grammar) => format!("lark {grammar}"),
            Self::Form { rules, .. } => format!("form {rules}"),
        }
    }

    /// Returns the field that caused the fault in `message`, and the fault; `None` if it stands in no field of its
    /// own.
    pub(super) fn blamed<'a>(&self, message: &'a str) -> Option<(String, &'a str)> {
        let Self::Form { fields, .. } = self else { return None };
        let (place, what) = message.strip_prefix("at ")?.split_once("): ")?;
        let line: usize = place.split_once('(')?.0.parse().ok()?;
        let (_, field) = fields.iter().find(|(of, _)| *of == line)?;
        Some((field.clone(), what))
    }

    /// Tokens that a client's rules name by their texts or ids: `<|end|>`, `<[7,9-12]>`.
    pub(super) fn named_tokens(&self) -> Vec<&str> {
        let Self::Lark(grammar) = self else { return Vec::new() };
        let named = |rest: &'_ str| {
            let inside = rest.strip_prefix('<')?;
            let end = inside.find(|next: char| "<>".contains(next) || next.is_whitespace())?;
            inside[end..].starts_with('>').then_some(end + 2)
        };
        outside_literals(grammar).filter_map(|rest| named(rest).map(|length| &rest[..length])).collect()
    }

    /// The right side of a rule that stands for it within other rules.
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

    /// Sentences about what of the schema in `field` is not enforced.
    pub(crate) fn warnings(&self, field: &str) -> Vec<String> {
        match self {
            Self::Json { warnings, .. } => warnings.of(field),
            _ => Vec::new(),
        }
    }

    /// Reports if a client's rules are among its rules, which may be ambiguous in any way.
    pub(crate) fn has_client_rules(&self) -> bool {
        matches!(self, Self::Lark(_) | Self::Form { has_client_rules: true, .. })
    }

    /// As the library takes it.
    pub(super) fn grammar(&self) -> TopLevelGrammar {
        match self {
            Self::Json { schema, whitespace, .. } => {
                TopLevelGrammar::from_json_schema(spaced(schema, whitespace))
            }
            Self::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Self::Choice(choices) => {
                let choices: Vec<String> = choices.iter().map(|text| quoted(text)).collect();
                // In capitals: one lexeme, whose alternatives take no room in the parser.
                TopLevelGrammar::from_lark(format!("start: CHOICE\nCHOICE: {}", choices.join(" | ")))
            }
            Self::Lark(rules) | Self::Form { rules, .. } => TopLevelGrammar::from_lark(rules.clone()),
        }
    }
}

/// The arguments of a function as they stand in rules.
pub(crate) struct Inlined {
    /// Their schema.
    pub(crate) schema: String,
    /// Keywords of the schema that are not enforced.
    pub(crate) warnings: Warnings,
}

/// The arguments of a function whose parameters are `schema`, as they stand in rules; any object without one.
///
/// # Errors
/// A part of the schema that is not supported.
pub(crate) fn inline_schema(schema: Option<Value>, whitespace: &Whitespace) -> Result<Inlined, String> {
    let mut schema = schema.unwrap_or_else(|| json!({}));
    if let Some(object) = schema.as_object_mut() {
        object.entry("type").or_insert_with(|| "object".into());
    }
    inline_value_schema(schema, whitespace)
}

/// JSON of `schema`, as it stands in rules.
///
/// # Errors
/// A part of the schema that is not supported.
pub(crate) fn inline_value_schema(schema: Value, whitespace: &Whitespace) -> Result<Inlined, String> {
    let Checked { schema, warnings } = schema::checked(schema)?;
    Ok(Inlined { schema: spaced(&schema, whitespace).to_string(), warnings })
}

/// `schema` with what the library must know about white space.
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

/// A text as Lark writes it.
pub(crate) fn quoted(text: &str) -> String {
    // JSON leaves this character as it is, Lark does not take it.
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// A regular expression between slashes.
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

/// Returns a construct of a Lark grammar that no bound of the library holds for, if it has one.
fn unbounded(grammar: &str) -> Option<&'static str> {
    outside_literals(grammar).find_map(|rest| match rest.as_bytes() {
        [b'&', ..] => Some("&"),
        // Before a number it says how often.
        [b'~', ..] if !rest[1..].trim_start().starts_with(|next: char| next.is_ascii_digit()) => Some("~"),
        [b'%', ..] => ["%json", "%regex", "%lark"].into_iter().find(|name| rest.starts_with(name)),
        _ => None,
    })
}

/// A Lark grammar from each of its characters on that is not within a literal or a comment.
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

fn check_text(text: &str, most: usize) -> Result<(), String> {
    if text.trim().is_empty() {
        return Err("expected a non-empty text".to_owned());
    }
    if text.len() > most {
        return Err(format!("too long: expected at most {most} bytes, got {}", text.len()));
    }
    // Brackets in literals count too: that makes the bound narrower, never wider.
    let mut depth = 0_usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => (),
        }
        if depth > NESTING {
            return Err(format!("brackets nested deeper than {NESTING} levels"));
        }
    }
    Ok(())
}

/// `regex` without the anchors that say again that all of the answer must match.
fn unanchored(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        Some(rest) if rest.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 0 => rest,
        _ => regex,
    }
}
