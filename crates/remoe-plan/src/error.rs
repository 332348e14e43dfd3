//! Errors of a field of a problem or a plan.

/// A field with a value that cannot be: which field, which value, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", render(field, message))]
pub struct FieldError {
    /// Where it stands, as `layers[0].expert_seconds.seconds[1][2]`; empty: the file as a whole.
    pub field: String,
    /// The value, what was expected, and what to do.
    pub message: String,
}

/// Longest field and longest message in bytes: they quote input.
const FIELD_BYTES: usize = 200;
const MESSAGE_BYTES: usize = 1000;

/// At most `limit` bytes of `text`, whole characters.
fn shown(mut text: String, limit: usize) -> String {
    let end = (0..=limit.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
    text
}

fn render(field: &str, message: &str) -> String {
    if field.is_empty() { message.to_owned() } else { format!("{field} {message}") }
}

impl FieldError {
    /// Makes an error of `field`; both texts are cut to what a report can show.
    pub fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: shown(field.into(), FIELD_BYTES), message: shown(message.into(), MESSAGE_BYTES) }
    }

    /// Returns the error of a parser that knows where it stood.
    pub fn from_json(error: serde_path_to_error::Error<serde_json::Error>) -> Self {
        let path = error.path().to_string();
        Self::unreadable(&path, &error.into_inner().to_string())
    }

    /// Returns what a person reads of `message`, which serde gave for the value at `path` (`.`: the file as a whole).
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
            // The path ends with the name of such a field.
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
        // Parsers of YAML write the path, or that of the field's parent, before their messages.
        let message = match message.split_once(": ") {
            Some((before, rest)) if !before.is_empty() && path.starts_with(before) => rest,
            _ => message,
        };
        let invalid = if path.is_empty() { "invalid" } else { "is invalid" };
        Self::new(path, format!("{invalid}: {message}"))
    }

    /// Reports if the field is one that the file's form does not have.
    pub fn is_unknown_field(&self) -> bool {
        self.message.starts_with(UNKNOWN_FIELD)
    }
}

const UNKNOWN_FIELD: &str = "is an unknown field";

/// Returns the name that `message` complains about behind `about`, and the rest. Parsers of YAML write a path before it.
fn complaint<'m>(message: &'m str, about: &str) -> Option<(&'m str, &'m str)> {
    let (before, rest) = message.split_once(about)?;
    let path = if before.is_empty() { before } else { before.strip_suffix(": ")? };
    let is_path = !path.contains(['"', '`', ' ']);
    rest.split_once('`').filter(|_| is_path)
}

/// Returns the one of `known` that `name` was probably meant to be.
fn nearest<'k>(name: &str, known: &[&'k str]) -> Option<&'k str> {
    let plain = |name: &str| name.replace(['_', '-'], "").to_lowercase();
    // Names of files are short; a long one resembles none.
    let wanted = Some(plain(name)).filter(|name| name.len() <= FIELD_BYTES)?;
    let apart = |known: &&str| {
        let known = plain(known);
        // A name with its unit left out, or with one too many.
        let is_part = wanted.len() > 2 && (known.contains(&wanted) || wanted.contains(&known));
        let typos = strsim::osa_distance(&wanted, &known);
        if is_part { typos.min(1) } else { typos }
    };
    let near = known.iter().map(|known| (apart(known), *known)).min_by_key(|(apart, _)| *apart);
    near.filter(|(apart, _)| *apart <= (wanted.chars().count() / 3).max(1)).map(|(_, known)| known)
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
