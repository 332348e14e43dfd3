//! Header that tells a client which parts of its request are accepted but not enforced.

use axum::http::{HeaderName, HeaderValue};

pub(super) const WARNING: HeaderName = HeaderName::from_static("x-remoe-warning");

/// Longest value in bytes: proxies limit the headers of an answer, often to 4 KiB in all.
const MAX_BYTES: usize = 1000;
/// Marks the end of a value that was cut off.
const ELLIPSIS: &str = "..";

/// Formats `sentences` in visible ASCII; other characters are escaped as in Rust. Returns `None` without sentences.
pub(super) fn header(sentences: &[String]) -> Option<HeaderValue> {
    if sentences.is_empty() {
        return None;
    }
    let mut text = String::new();
    for character in sentences.join("; ").chars() {
        let length = text.len();
        match character {
            ' '..='~' => text.push(character),
            other => text.extend(other.escape_default()),
        }
        if text.len() > MAX_BYTES - ELLIPSIS.len() {
            text.truncate(length);
            text.push_str(ELLIPSIS);
            break;
        }
    }
    HeaderValue::try_from(text).ok()
}

#[cfg(test)]
mod tests {
    use super::{MAX_BYTES, header};

    #[test]
    fn sentences_become_one_line_of_bounded_ascii() {
        let text = |sentences: &[&str]| {
            let sentences: Vec<String> = sentences.iter().map(ToString::to_string).collect();
            header(&sentences).map(|value| value.to_str().map(str::to_owned).unwrap_or_default())
        };
        assert_eq!(text(&[]), None);
        assert_eq!(text(&["a: \"b\"", "c\nd é"]).as_deref(), Some("a: \"b\"; c\\nd \\u{e9}"));
        let long = text(&[&"\u{1f30a}".repeat(1000)]).unwrap_or_default();
        assert!(
            long.len() <= MAX_BYTES && long.len() > MAX_BYTES - 20 && long.ends_with("\\u{1f30a}.."),
            "{long}"
        );
    }
}
