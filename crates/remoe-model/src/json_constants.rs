//! Numbers that Python's `json` module writes, but JSON does not allow: `NaN`, `Infinity` and `-Infinity`.
//!
//! Each is replaced by a string of the same length, its placeholder, so that positions in errors stay right. No config
//! contains such strings otherwise. The typed access of [`crate::fields`] recognises them.

use std::borrow::Cow;

use serde_json::Value;

/// First character of placeholders. JSON allows it unescaped, and no text of a config contains it.
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

    /// Returns the spelling of Python.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::NaN => "NaN",
            Self::Infinity => "Infinity",
            Self::MinusInfinity => "-Infinity",
        }
    }

    /// Returns the constant of which `value` is the placeholder, if it is one.
    pub(crate) fn from_value(value: &Value) -> Option<Self> {
        let text = value.as_str()?;
        Self::ALL.into_iter().find(|constant| constant.placeholder() == text)
    }

    /// Returns the placeholder: a string that in quotes is as long as the name.
    fn placeholder(self) -> String {
        let rest = self.name().len().saturating_sub("\"\"".len() + MARK.len_utf8());
        format!("{MARK}{}", self.name().get(..rest).unwrap_or_default())
    }
}

/// Replaces each constant that is a value, outside of strings, by its placeholder.
pub(crate) fn replace_constants(text: &[u8]) -> Cow<'_, [u8]> {
    let mut written: Option<Vec<u8>> = None;
    let (mut position, mut in_string) = (0, false);
    while let Some(&byte) = text.get(position) {
        match byte {
            // An escaped quote does not end a string.
            b'\\' if in_string => position += 1,
            b'"' => in_string = !in_string,
            b'N' | b'I' | b'-' if !in_string => {
                if let Some(constant) = constant_at(text, position) {
                    let placeholder = format!("\"{}\"", constant.placeholder());
                    let target = written.get_or_insert_with(|| text.to_vec());
                    let end = position + constant.name().len();
                    if let Some(place) = target.get_mut(position..end) {
                        place.copy_from_slice(placeholder.as_bytes());
                    }
                    position = end - 1;
                }
            }
            _ => (),
        }
        position += 1;
    }
    written.map_or(Cow::Borrowed(text), Cow::Owned)
}

/// Returns the constant at a position, unless it is the name of a field.
fn constant_at(text: &[u8], position: usize) -> Option<Constant> {
    let rest = text.get(position..)?;
    let constant = Constant::ALL.into_iter().find(|constant| rest.starts_with(constant.name().as_bytes()))?;
    let after = rest.get(constant.name().len()..)?.trim_ascii_start();
    (after.first() != Some(&b':')).then_some(constant)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{Constant, replace_constants};
    use serde_json::{Value, json};
    use std::borrow::Cow;

    #[test]
    fn constants_outside_of_strings_are_recognised() {
        let text =
            r#"{"a": NaN, "b":[Infinity,-Infinity, -1], "NaN": "Infinity \" NaN \\", "c": "-Infinity"}"#;
        let replaced = replace_constants(text.as_bytes());
        assert_eq!(replaced.len(), text.len());
        let value: Value = serde_json::from_slice(&replaced).unwrap();
        assert_eq!(Constant::from_value(&value["a"]), Some(Constant::NaN));
        assert_eq!(Constant::from_value(&value["b"][0]), Some(Constant::Infinity));
        assert_eq!(Constant::from_value(&value["b"][1]), Some(Constant::MinusInfinity));
        assert_eq!(value["b"][2], json!(-1));
        assert_eq!((&value["NaN"], &value["c"]), (&json!("Infinity \" NaN \\"), &json!("-Infinity")));
        assert_eq!((Constant::from_value(&value["NaN"]), Constant::from_value(&value["c"])), (None, None));
    }

    #[test]
    fn text_without_constants_is_borrowed() {
        for text in [r#"{"a": "NaN"}"#, "{Infinity: 1}", r#""\"NaN"#, "", "-", "Inf"] {
            assert!(matches!(replace_constants(text.as_bytes()), Cow::Borrowed(_)), "{text}");
        }
        // Other invalid JSON stays invalid.
        for text in ["[NaNs]", "[xInfinity]", "[--Infinity]", "[+Infinity]", "[1NaN]"] {
            assert!(serde_json::from_slice::<Value>(&replace_constants(text.as_bytes())).is_err(), "{text}");
        }
    }
}
