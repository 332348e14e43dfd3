//! Expressions and small templates, compared with the texts of Jinja2 in the environment of transformers, which
//! `tests/fixtures/templates/make_expressions.py` wrote.

#![cfg(feature = "text")]

use remoe_model::text::{ChatTemplate, Rendering, TextError};
use serde_json::Value;

const CASES: &str = include_str!("../../../../tests/fixtures/templates/expressions.json");

fn rendered(source: &str, context: &serde_json::Map<String, Value>) -> Result<String, TextError> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("chat_template.jinja"), source).unwrap();
    let template = ChatTemplate::open(folder.path())?.unwrap();
    let messages = context["messages"].as_array().unwrap();
    let mut kwargs = context.clone();
    for reserved in ["messages", "tools"] {
        kwargs.remove(reserved);
    }
    template.render_with(messages, Rendering { kwargs: Some(&kwargs), ..Rendering::default() })
}

#[test]
fn expressions_render_as_in_jinja2() {
    let fixture: Value = serde_json::from_str(CASES).unwrap();
    let context = fixture["context"].as_object().unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    assert!(cases.len() >= 300);
    let mut differences = Vec::new();
    for case in cases {
        let source = case["template"].as_str().unwrap();
        let ours = rendered(source, context);
        let same = match (&ours, case["text"].as_str(), case["raised"].as_str()) {
            (Ok(ours), Some(theirs), _) => ours == theirs,
            (Err(TextError::Refused(ours)), None, Some(theirs)) => ours == theirs,
            (Err(TextError::Template { .. }), None, None) => true,
            _ => false,
        };
        if !same {
            let theirs = case["text"].as_str().map_or_else(|| case.to_string(), |text| format!("{text:?}"));
            differences.push(format!("{source:?}\n  jinja2: {theirs}\n  ours:   {ours:?}"));
        }
    }
    assert!(differences.is_empty(), "{} of {}:\n{}", differences.len(), cases.len(), differences.join("\n"));
}
