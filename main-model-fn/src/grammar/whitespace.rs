//! White space between parts of JSON: bounded by default, or as the request demands.

use super::compiler::short;
use regex_syntax::hir::{Class, Hir, HirKind};
use serde_json::{Value, json};

/// A space, or a line break with indentation, at most once between two parts. So a model cannot get stuck in white space,
/// but can write JSON as models do: compact, with spaces behind `,` and `:`, or indented.
const BOUNDED: &str = r"\x20|\n(\x20{0,20}|\x09{0,8})";

/// Longest pattern of a request in bytes.
const MAX_PATTERN_BYTES: usize = 256;

/// White space of JSON (RFC 8259, section 2).
const CHARACTERS: [char; 4] = [' ', '\t', '\n', '\r'];

/// White space that may stand between two parts of JSON.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) enum Whitespace {
    /// A space, or a line break with indentation.
    #[default]
    Bounded,
    /// No white space.
    Compact,
    /// A match of this regular expression.
    Pattern(String),
}

impl Whitespace {
    /// Parses the pattern of a request.
    ///
    /// # Errors
    /// Fails if the pattern is too long or invalid, or if it matches other text than white space.
    pub(crate) fn pattern(pattern: &str) -> Result<Self, String> {
        if pattern.len() > MAX_PATTERN_BYTES {
            let bytes = pattern.len();
            return Err(format!("too long: expected at most {MAX_PATTERN_BYTES} bytes, got {bytes}"));
        }
        let hir = regex_syntax::parse(pattern).map_err(|error| {
            let why = error.to_string();
            let why = why.lines().filter_map(|line| line.strip_prefix("error: ")).next().unwrap_or_default();
            format!("invalid regular expression {}: {why}", short(pattern))
        })?;
        if !is_white(&hir) {
            let pattern = short(pattern);
            return Err(format!(
                "expected a pattern of spaces, tabs and line breaks such as `[ \\n]?`, got {pattern:?}"
            ));
        }
        match hir.properties().maximum_len() {
            Some(0) => Ok(Self::Compact),
            _ => Ok(Self::Pattern(pattern.to_owned())),
        }
    }

    /// Returns the library's options.
    pub(super) fn options(&self) -> Value {
        match self {
            Self::Bounded => json!({ "whitespace_pattern": BOUNDED }),
            Self::Compact => json!({ "whitespace_flexible": false }),
            Self::Pattern(pattern) => json!({ "whitespace_pattern": pattern }),
        }
    }
}

/// Reports if `hir` matches only white space of JSON.
fn is_white(hir: &Hir) -> bool {
    match hir.kind() {
        HirKind::Empty => true,
        HirKind::Literal(literal) => literal.0.iter().all(|&byte| CHARACTERS.contains(&char::from(byte))),
        HirKind::Class(Class::Unicode(class)) => class
            .iter()
            .all(|range| (range.start()..=range.end()).all(|character| CHARACTERS.contains(&character))),
        HirKind::Class(Class::Bytes(class)) => class
            .iter()
            .all(|range| (range.start()..=range.end()).all(|byte| CHARACTERS.contains(&char::from(byte)))),
        HirKind::Look(_) => false,
        HirKind::Repetition(repetition) => is_white(&repetition.sub),
        HirKind::Capture(capture) => is_white(&capture.sub),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => parts.iter().all(is_white),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::tests::{accepts, compiler};
    use super::super::{Compiler, Grammar, Source, Tokens, inline_schema};
    use super::Whitespace;
    use serde_json::{Value, json};
    use std::sync::Arc;

    /// Longest white space in one place by default: a line break and 20 spaces.
    const LONGEST: usize = 21;
    /// Tokens of an answer.
    const ANSWER: usize = 160;

    /// Vocabulary of all single bytes, runs of white space, and parts of JSON.
    struct Pieces(Vec<Vec<u8>>);

    impl Pieces {
        fn new() -> Self {
            let mut pieces: Vec<Vec<u8>> = (0..=255_u8).map(|byte| vec![byte]).collect();
            for count in 2..=24 {
                pieces.push(vec![b' '; count]);
                pieces.push([b"\n".to_vec(), vec![b' '; count]].concat());
            }
            for piece in
                ["\n\n", "\n\n\n", " \n", "\t\t", "\r\n", ", ", ",\n", "\": ", "\": \"", " \"", "{\"", "{\n"]
            {
                pieces.push(piece.as_bytes().to_vec());
            }
            Self(pieces)
        }
    }

    impl Tokens for Pieces {
        fn bytes(&self, id: u32) -> Vec<u8> {
            self.0.get(id as usize).cloned().unwrap_or_else(|| b"<end>".to_vec())
        }

        fn is_special(&self, id: u32) -> bool {
            id as usize >= self.0.len()
        }
    }

    fn person() -> Value {
        json!({
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
                "home": {
                    "type": "object", "properties": {"town": {"type": "string", "maxLength": 20}},
                    "required": ["town"], "additionalProperties": false,
                },
            },
            "required": ["name", "age", "tags", "home"],
            "additionalProperties": false,
        })
    }

    fn call(whitespace: &Whitespace) -> Source {
        let arguments = inline_schema(Some(person()), whitespace).unwrap().schema;
        let rules = format!("start: \"call: \" arguments \"\\n\"\narguments: %json {arguments}");
        Source::form(rules, Vec::new(), false).unwrap()
    }

    /// Structures that contain JSON.
    fn forms(whitespace: &Whitespace) -> Vec<(&'static str, Source)> {
        vec![
            ("any object", Source::json(None, whitespace.clone()).unwrap()),
            ("a schema", Source::json(Some(person()), whitespace.clone()).unwrap()),
            ("arguments of a call", call(whitespace)),
        ]
    }

    /// Generates an answer with a model that selects by `choose` from the allowed tokens. Returns true if it is complete.
    fn answer(pieces: &Pieces, grammar: &Grammar, mut choose: impl FnMut(&[u32]) -> u32) -> (Vec<u32>, bool) {
        let end = pieces.0.len() as u32;
        let (mut progress, mut tokens) = (grammar.begin(), Vec::new());
        while tokens.len() < ANSWER {
            let mask = progress.mask().unwrap();
            let allowed: Vec<u32> = (0..=end).filter(|&token| mask.allows(token)).collect();
            let token = choose(&allowed);
            if token == end {
                return (tokens, true);
            }
            tokens.push(token);
            if progress.step(token).unwrap() {
                return (tokens, true);
            }
        }
        (tokens, false)
    }

    fn compiler_of(pieces: Pieces) -> Compiler {
        let end = pieces.0.len();
        Compiler::new(Arc::new(pieces), end + 1, vec![end as u32])
    }

    /// Returns the lengths of runs of white space outside of JSON strings.
    fn runs(text: &[u8]) -> Vec<usize> {
        let (mut runs, mut run) = (Vec::new(), 0);
        let (mut in_text, mut is_escaped) = (false, false);
        for &byte in text {
            match byte {
                _ if is_escaped => is_escaped = false,
                b'\\' if in_text => is_escaped = true,
                b'"' => in_text = !in_text,
                _ => (),
            }
            match !in_text && byte.is_ascii_whitespace() {
                true => run += 1,
                false => runs.push(std::mem::take(&mut run)),
            }
        }
        runs.push(run);
        runs
    }

    fn is_white(piece: &[u8]) -> bool {
        piece.iter().all(u8::is_ascii_whitespace)
    }

    #[tokio::test]
    async fn random_answers_spend_little_on_white_space() {
        let pieces = Pieces::new();
        let compiler = compiler_of(Pieces::new());
        let mut state = 1_u64;
        for (name, source) in forms(&Whitespace::default()) {
            let grammar = compiler.compile(source, "f").await.unwrap();
            let (mut white, mut all, mut complete) = (0, 0, 0);
            for _ in 0..20 {
                let (tokens, is_done) = answer(&pieces, &grammar, |allowed| {
                    state =
                        state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    allowed[(state >> 33) as usize % allowed.len()]
                });
                complete += usize::from(is_done);
                let text: Vec<u8> = tokens.iter().flat_map(|&token| pieces.bytes(token)).collect();
                let longest = runs(&text).into_iter().max().unwrap_or_default();
                assert!(longest <= LONGEST, "{name}: {}", String::from_utf8_lossy(&text));
                let mut before = Vec::new();
                for token in tokens {
                    let piece = pieces.bytes(token);
                    before.extend(&piece);
                    let outside = runs(&before).last().is_some_and(|&run| run > 0);
                    (white, all) = (white + usize::from(is_white(&piece) && outside), all + 1);
                }
            }
            // Half of the tokens behind a part are white space: without a bound, some answers would be all white space.
            assert!(white * 3 < all, "{name}: {white} of {all} tokens are white space");
            assert!(complete == 20 || name == "any object", "{name}: {complete} of 20 answers are complete");
        }
    }

    /// Whitespace is a bounded part of an answer, whichever tokens the model prefers.
    #[tokio::test]
    async fn model_that_prefers_white_space_completes_the_answer() {
        let pieces = Pieces::new();
        let compiler = compiler_of(Pieces::new());
        for (name, source) in forms(&Whitespace::default()).into_iter().skip(1) {
            let grammar = compiler.compile(source, "f").await.unwrap();
            let (tokens, is_done) = answer(&pieces, &grammar, |allowed| {
                let white = allowed.iter().copied().filter(|&token| is_white(&pieces.bytes(token)));
                white.max_by_key(|&token| pieces.bytes(token).len()).unwrap_or(allowed[0])
            });
            let text: Vec<u8> = tokens.iter().flat_map(|&token| pieces.bytes(token)).collect();
            let text = String::from_utf8(text).unwrap();
            assert!(is_done, "{name}: {text}");
            assert_eq!(runs(text.as_bytes()).into_iter().max(), Some(LONGEST), "{name}: {text}");
        }
    }

    #[tokio::test]
    async fn compact_and_indented_json_is_writable_by_default() {
        let compiler = compiler();
        let written = json!({"name": "Ada", "age": 36, "tags": ["red", "blue"], "home": {"town": "London"}});
        let indented = |indentation: &str| {
            let broken = serde_json::to_string_pretty(&written).unwrap();
            broken.replace("  ", indentation)
        };
        let compact = written.to_string();
        let mut texts = vec![
            compact.clone(),
            compact.replace(',', ", ").replace("\":", "\": "),
            compact.replace('{', "{ ").replace('}', " }"),
        ];
        texts.extend(["  ", "    ", "\t"].map(indented));
        let grammar = compiler
            .compile(Source::json(Some(person()), Whitespace::default()).unwrap(), "f")
            .await
            .unwrap();
        for text in texts {
            assert!(accepts(&grammar, &text), "{text}");
        }
        for refused in ["  ", "\n\n", " \n", "\r\n", "\n \n", &format!("\n{}", " ".repeat(21))] {
            let text = compact.replace(':', &format!(":{refused}"));
            assert!(!accepts(&grammar, &text), "{refused:?}");
        }
        assert!(!accepts(&grammar, &format!(" {compact}")) && !accepts(&grammar, &format!("{compact} ")));
    }

    #[tokio::test]
    async fn white_space_is_what_the_request_asks_for() {
        let compiler = compiler();
        for (pattern, taken, refused) in [
            ("", "", " "),
            (" ", " ", "  "),
            ("[ ]?", " ", "  "),
            ("[ \\n]*", " \n \n   ", "\t"),
            (r"\r\n( {2}|\t){0,3}|[\x20]", "\r\n    ", "\r\n     "),
        ] {
            let whitespace = Whitespace::pattern(pattern).unwrap();
            for (name, source) in forms(&whitespace).into_iter().skip(1) {
                let grammar = compiler.compile(source, "f").await.unwrap();
                let answer = |space: &str| {
                    let text = r#"{"name":"a","age":1,"tags":[],"home":{"town":"b"}}"#;
                    let text = text.replace(':', &format!(":{space}"));
                    if name == "a schema" { text } else { format!("call: {text}\n") }
                };
                assert!(
                    accepts(&grammar, &answer(taken)) && accepts(&grammar, &answer("")),
                    "{name}: {pattern:?}"
                );
                assert!(!accepts(&grammar, &answer(refused)), "{name}: {pattern:?}");
            }
        }
        for (pattern, words) in [
            ("x", "spaces, tabs and line breaks"),
            ("[ x]", "spaces, tabs and line breaks"),
            (r"\s", "spaces, tabs and line breaks"),
            (r"\b ", "spaces, tabs and line breaks"),
            ("(", "unclosed group"),
            (&" ".repeat(300), "at most 256 bytes, got 300"),
        ] {
            let message = Whitespace::pattern(pattern).unwrap_err();
            assert!(message.contains(words), "{pattern}: {message}");
        }
    }
}
