//! Numbers that Python's `json` writes and JSON does not have: `NaN`, `Infinity` and `-Infinity`.
//!
//! Each becomes a string that no file holds otherwise, as long as the constant, so that positions in errors stay right. The
//! typed access of [`crate::fields`] knows those strings.

use std::borrow::Cow;

use serde_json::Value;

/// Begins the strings that stand for constants: a character that JSON takes unescaped and no text of a config has.
const MARK: char = '\u{7f}';

/// A number that is not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Constant {
    NaN,
    Infinity,
    MinusInfinity,
}

impl Constant {
    const ALL: [Self; 3] = [Self::NaN, Self::Infinity, Self::MinusInfinity];

    /// As Python writes it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::NaN => "NaN",
            Self::Infinity => "Infinity",
            Self::MinusInfinity => "-Infinity",
        }
    }

    /// The constant that `value` stands for, if it stands for one.
    pub(crate) fn of(value: &Value) -> Option<Self> {
        let text = value.as_str()?;
        Self::ALL.into_iter().find(|constant| constant.stand_in() == text)
    }

    /// A string that is as long as the name when it stands in quotes.
    fn stand_in(self) -> String {
        let rest = self.name().len().saturating_sub("\"\"".len() + MARK.len_utf8());
        format!("{MARK}{}", self.name().get(..rest).unwrap_or_default())
    }
}

/// The text with a string in place of each constant that stands as a value, outside of strings.
pub(crate) fn without_constants(text: &[u8]) -> Cow<'_, [u8]> {
    let mut written: Option<Vec<u8>> = None;
    let (mut at, mut in_string) = (0, false);
    while let Some(&byte) = text.get(at) {
        match byte {
            // An escaped character ends no string.
            b'\\' if in_string => at += 1,
            b'"' => in_string = !in_string,
            b'N' | b'I' | b'-' if !in_string => {
                if let Some(constant) = constant_at(text, at) {
                    let stand_in = format!("\"{}\"", constant.stand_in());
                    let target = written.get_or_insert_with(|| text.to_vec());
                    let end = at + constant.name().len();
                    if let Some(place) = target.get_mut(at..end) {
                        place.copy_from_slice(stand_in.as_bytes());
                    }
                    at = end - 1;
                }
            }
            _ => (),
        }
        at += 1;
    }
    written.map_or(Cow::Borrowed(text), Cow::Owned)
}

/// The constant at `at`, unless it is a part of a word or the name of a field.
fn constant_at(text: &[u8], at: usize) -> Option<Constant> {
    let rest = text.get(at..)?;
    let constant = Constant::ALL.into_iter().find(|constant| rest.starts_with(constant.name().as_bytes()))?;
    let after = rest.get(constant.name().len()..)?.trim_ascii_start();
    (after.first() != Some(&b':')).then_some(constant)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{Constant, without_constants};
    use serde_json::{Value, json};
    use std::borrow::Cow;

    #[test]
    fn constants_outside_of_strings_are_recognised() {
        let text =
            r#"{"a": NaN, "b":[Infinity,-Infinity, -1], "NaN": "Infinity \" NaN \\", "c": "-Infinity"}"#;
        let replaced = without_constants(text.as_bytes());
        assert_eq!(replaced.len(), text.len());
        let value: Value = serde_json::from_slice(&replaced).unwrap();
        assert_eq!(Constant::of(&value["a"]), Some(Constant::NaN));
        assert_eq!(Constant::of(&value["b"][0]), Some(Constant::Infinity));
        assert_eq!(Constant::of(&value["b"][1]), Some(Constant::MinusInfinity));
        assert_eq!(value["b"][2], json!(-1));
        assert_eq!((&value["NaN"], &value["c"]), (&json!("Infinity \" NaN \\"), &json!("-Infinity")));
        assert_eq!((Constant::of(&value["NaN"]), Constant::of(&value["c"])), (None, None));
    }

    #[test]
    fn text_without_constants_is_borrowed() {
        for text in [r#"{"a": "NaN"}"#, "{Infinity: 1}", r#""\"NaN"#, "", "-", "Inf"] {
            assert!(matches!(without_constants(text.as_bytes()), Cow::Borrowed(_)), "{text}");
        }
        // What is no JSON otherwise stays none.
        for text in ["[NaNs]", "[xInfinity]", "[--Infinity]", "[+Infinity]", "[1NaN]"] {
            assert!(serde_json::from_slice::<Value>(&without_constants(text.as_bytes())).is_err(), "{text}");
        }
    }
}
