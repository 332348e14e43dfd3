//! Remedies for invalid keys files. No part of a remedy comes from the file, because it contains keys.

/// Extracts the remedy from serde's `message`: a missing field, or what was expected. Leaves out all values.
pub(super) fn remedy(message: &str) -> String {
    let end = message.rfind(" at line ").unwrap_or(message.len());
    let message = message.get(..end).unwrap_or(message);
    // A path may stand before either phrase.
    if let Some((_, field)) = message.rsplit_once("missing field ").filter(|(_, field)| is_name(field)) {
        return format!("missing field {field}; add it");
    }
    // The last ", expected " is serde's own; earlier ones may be quoted from the file.
    let Some((_, expected)) = message.rsplit_once(", expected ") else {
        return "expected the fields of docs/gateway.md".to_owned();
    };
    match message.starts_with("unknown field ") || message.contains(": unknown field ") {
        true => format!("unknown field, expected {expected}"),
        false => format!("expected {expected}"),
    }
}

/// Reports if `text` is the name of a field in backquotes.
fn is_name(text: &str) -> bool {
    let name = text.strip_prefix('`').and_then(|text| text.strip_suffix('`'));
    name.is_some_and(|name| name.chars().all(|c| c.is_ascii_alphanumeric()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedy_quotes_nothing_of_the_file() {
        for (message, expected) in [
            (
                "unknown field `secret`, expected `name` or `keys` at line 2 column 3",
                "unknown field, expected `name` or `keys`",
            ),
            ("tenants[0]: unknown field `x`, expected `keys` at line 2", "unknown field, expected `keys`"),
            ("tenants[0]: missing field `keys` at line 1", "missing field `keys`; add it"),
            ("missing field `keys` at line 1 column 2", "missing field `keys`; add it"),
            ("invalid type: string \"secret, expected x\", expected a sequence", "expected a sequence"),
            ("invalid value: integer `0`, expected a nonzero u64", "expected a nonzero u64"),
            ("found a tab character: secret at line 1", "expected the fields of docs/gateway.md"),
        ] {
            assert_eq!(remedy(message), expected);
        }
    }
}
