//! Log lines of functions, for people.

use anstyle::{AnsiColor, Style};
use serde_json::Value;
use std::fmt::Write;

/// A function's log line as it is shown; `None`: it is not, unless `verbose`.
///
/// Functions log JSON objects. Other lines come from below them (the dynamic linker, a panic) and
/// are always shown.
pub(crate) fn render(name: &str, line: &str, verbose: bool) -> Option<String> {
    if line.is_empty() {
        return None;
    }
    let Ok(Value::Object(record)) = serde_json::from_str(line) else {
        return Some(format!("{name}: {line}"));
    };
    let level = record.get("level").and_then(Value::as_str).unwrap_or("INFO");
    let (shown, style) = match level {
        "ERROR" => (true, AnsiColor::Red.on_default()),
        "WARN" => (true, AnsiColor::Yellow.on_default()),
        _ => (verbose, Style::new()),
    };
    if !shown {
        return None;
    }
    let message = record.get("message").and_then(Value::as_str).unwrap_or("");
    let mut text = format!("{name}: {style}{level}{style:#} {message}");
    for (key, value) in &record {
        if !matches!(key.as_str(), "level" | "message" | "timestamp" | "target" | "span" | "spans") {
            match value {
                Value::String(value) => write!(text, " {key}={value}"),
                value => write!(text, " {key}={value}"),
            }
            // Writing to a string does not fail.
            .unwrap_or_default();
        }
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_shown_and_details_only_on_request() {
        let info = r#"{"timestamp":"t","level":"INFO","message":"loaded","target":"x","experts":4}"#;
        assert_eq!(render("main", info, false), None);
        assert_eq!(render("main", info, true).as_deref(), Some("main: INFO loaded experts=4"));
        let warning = r#"{"level":"WARN","message":"slow"}"#;
        assert!(render("main", warning, false).is_some_and(|text| text.ends_with(" slow")));
    }

    #[test]
    fn what_is_no_record_is_shown_as_it_is() {
        let line = "error while loading shared libraries";
        assert_eq!(render("main", line, false), Some(format!("main: {line}")));
        assert_eq!(render("main", "", true), None);
    }
}
