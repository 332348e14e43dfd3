//! Remedies for keys files that are not of the form. No part of a remedy comes from the file, which has keys in it.

/// Returns what `message`, which serde gave, says of the form alone: a missing field, or what was expected.
pub(super) fn remedy(message: &str) -> String {
    let place = message.rfind(" at line ").unwrap_or(message.len());
    let message = message.get(..place).unwrap_or(message);
    // Either may follow the place of what it is about.
    if let Some((_, field)) = message.rsplit_once("missing field ").filter(|(_, field)| is_name(field)) {
        return format!("missing field {field}; add it");
    }
    // The last one is serde's own, whatever values are quoted before it.
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
        for (message, says) in [
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
            assert_eq!(remedy(message), says);
        }
    }
}
