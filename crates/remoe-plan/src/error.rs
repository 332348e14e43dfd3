//! Error of a field of a problem or a plan.

/// Invalid field: its path, its value and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", render(field, message))]
pub struct FieldError {
    /// Path, such as `layers[0].expert_seconds.seconds[1][2]`; empty for the whole file.
    pub field: String,
    /// Value, expected values and remedy.
    pub message: String,
}

/// Limits of field and message in bytes, since they quote input.
const FIELD_BYTES: usize = 200;
const MESSAGE_BYTES: usize = 1000;

/// Truncates `text` to at most `limit` bytes, at a character boundary.
fn truncated(mut text: String, limit: usize) -> String {
    let end = (0..=limit.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
    text
}

fn render(field: &str, message: &str) -> String {
    if field.is_empty() { message.to_owned() } else { format!("{field} {message}") }
}

impl FieldError {
    /// Creates an error of `field`. Truncates both texts.
    pub fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            field: truncated(field.into(), FIELD_BYTES),
            message: truncated(message.into(), MESSAGE_BYTES),
        }
    }

    /// Converts the error of a JSON parser with its path.
    pub fn from_json(error: serde_path_to_error::Error<serde_json::Error>) -> Self {
        let path = error.path().to_string();
        Self::unreadable(&path, &error.into_inner().to_string())
    }

    /// Converts the `message` of serde for the value at `path` to a readable error. `.` is the whole file.
    #[must_use]
    pub fn unreadable(path: &str, message: &str) -> Self {
        let path = if path == "." { "" } else { path };
        let within = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        if let Some((name, _)) = complaint(message, "missing field `") {
            return Self::new(within(name), "is missing; add it");
        }
        if let Some((name, _)) = complaint(message, "duplicate field `") {
            return Self::new(within(name), "is stated twice; keep one");
        }
        if let Some((name, rest)) = complaint(message, "unknown field `") {
            // The path ends with the name of the unknown field.
            let (known, place) = rest.split_once(" at line ").unwrap_or((rest, ""));
            let place = if place.is_empty() { String::new() } else { format!(" (line {place})") };
            let known: Vec<&str> = known.split('`').skip(1).step_by(2).collect();
            let remedy = match (nearest(name, &known), known.is_empty()) {
                (Some(near), _) => format!("did you mean `{near}`?"),
                (None, true) => "remove it".to_owned(),
                (None, false) => format!("expected one of {}", known.join(", ")),
            };
            return Self::new(path, format!("{UNKNOWN_FIELD}{place}; {remedy}"));
        }
        // YAML parsers prefix messages with the path, or with that of the parent.
        let message = match message.split_once(": ") {
            Some((before, rest)) if !before.is_empty() && path.starts_with(before) => rest,
            _ => message,
        };
        let invalid = if path.is_empty() { "invalid" } else { "is invalid" };
        Self::new(path, format!("{invalid}: {message}"))
    }

    /// Reports if the error is an unknown field.
    pub fn is_unknown_field(&self) -> bool {
        self.message.starts_with(UNKNOWN_FIELD)
    }
}

const UNKNOWN_FIELD: &str = "is an unknown field";

/// Returns the quoted name in `message` after the prefix `about`, and the rest. YAML parsers put a path before the prefix.
fn complaint<'m>(message: &'m str, about: &str) -> Option<(&'m str, &'m str)> {
    let (before, rest) = message.split_once(about)?;
    let path = if before.is_empty() { before } else { before.strip_suffix(": ")? };
    let is_path = !path.contains(['"', '`', ' ']);
    rest.split_once('`').filter(|_| is_path)
}

/// Returns the name of `known` that is most similar to `name`, if any is similar enough.
fn nearest<'k>(name: &str, known: &[&'k str]) -> Option<&'k str> {
    let plain = |name: &str| name.replace(['_', '-'], "").to_lowercase();
    // Names of files are short; a long one resembles none.
    let wanted = Some(plain(name)).filter(|name| name.len() <= FIELD_BYTES)?;
    let distance = |known: &&str| {
        let known = plain(known);
        // A missing or additional unit counts as one typo.
        let is_part = wanted.len() > 2 && (known.contains(&wanted) || wanted.contains(&known));
        let typos = strsim::osa_distance(&wanted, &known);
        if is_part { typos.min(1) } else { typos }
    };
    let near = known.iter().map(|known| (distance(known), *known)).min_by_key(|(distance, _)| *distance);
    near.filter(|(distance, _)| *distance <= (wanted.chars().count() / 3).max(1)).map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_field_names_its_path_and_the_nearest_known_one() {
        for (path, message, text) in [
            (
                "pricing.biling",
                "unknown field `biling`, expected one of `gpu_bytes_each`, `billing` at line 3 column 5",
                "pricing.biling is an unknown field (line 3 column 5); did you mean `billing`?",
            ),
            (
                "nodes[1].memory_gb",
                "nodes[1]: unknown field `memory_gb`, expected `name` or `memoryGB`",
                "nodes[1].memory_gb is an unknown field; did you mean `memoryGB`?",
            ),
            (
                "ttft",
                "unknown field `ttft`, expected `ttft_seconds`",
                "ttft is an unknown field; did you mean `ttft_seconds`?",
            ),
            (
                "x",
                "unknown field `x`, expected `base` or `tokens`",
                "x is an unknown field; expected one of base, tokens",
            ),
            ("x", "unknown field `x`, there are no fields", "x is an unknown field; remove it"),
            ("slo", "duplicate field `ttft_seconds`", "slo.ttft_seconds is stated twice; keep one"),
            (".", "missing field `slo`", "slo is missing; add it"),
            (
                "a[1]",
                "a[1]: invalid type: map, expected f64",
                "a[1] is invalid: invalid type: map, expected f64",
            ),
            ("a.b", "a: expected a number", "a.b is invalid: expected a number"),
            (
                "a",
                "invalid type: string \"unknown field `b`\"",
                "a is invalid: invalid type: string \"unknown field `b`\"",
            ),
        ] {
            assert_eq!(FieldError::unreadable(path, message).to_string(), text);
        }
    }
}
