//! Log lines of functions, for people.

use crate::machine;
use anstyle::{AnsiColor, Style};
use serde_json::Value;
use std::fmt::Write;

/// A function's log line as it is shown; `None`: it is not, unless `verbose`, which also says when.
///
/// Functions log JSON objects. Other lines come from below them (the dynamic linker, a panic) and
/// are always shown.
pub(crate) fn render(name: &str, line: &str, verbose: bool) -> Option<String> {
    if line.is_empty() {
        return None;
    }
    let at = |time: &str| if verbose { format!("{time} ") } else { String::new() };
    let Ok(Value::Object(record)) = serde_json::from_str(line) else {
        return Some(format!("{}{name}: {line}", at(&machine::now_micros())));
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
    let logged =
        record.get("timestamp").and_then(Value::as_str).map_or_else(machine::now_micros, str::to_owned);
    let mut text = format!("{}{name}: {style}{level}{style:#} {message}", at(&logged));
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
    // Of what stands around a line, what finds the request that it is of.
    if let Some(trace) = record.get("span").and_then(|span| span.get("trace_id")).and_then(Value::as_str) {
        write!(text, " trace_id={trace}").unwrap_or_default();
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_shown_and_details_only_on_request() {
        let info = r#"{"timestamp":"2026-01-02T03:04:05.678901Z","level":"INFO","message":"loaded","target":"x","experts":4}"#;
        assert_eq!(render("main", info, false), None);
        let shown = render("main", info, true);
        assert_eq!(shown.as_deref(), Some("2026-01-02T03:04:05.678901Z main: INFO loaded experts=4"));
        let traced = r#"{"level":"WARN","message":"broke off","span":{"trace_id":"4bf9","name":"request"},"spans":[]}"#;
        assert!(render("main", traced, false).is_some_and(|text| text.ends_with(" broke off trace_id=4bf9")));
        let warning = r#"{"level":"WARN","message":"slow"}"#;
        assert!(render("main", warning, false).is_some_and(|text| text.ends_with(" slow")));
    }

    #[test]
    fn what_is_no_record_is_shown_as_it_is() {
        let line = "error while loading shared libraries";
        assert_eq!(render("main", line, false), Some(format!("main: {line}")));
        assert_eq!(render("main", "", true), None);
        let dated = render("main", line, true).unwrap_or_default();
        assert!(dated.starts_with("20") && dated.ends_with(&format!("Z main: {line}")), "{dated}");
    }
}
