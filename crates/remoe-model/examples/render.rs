//! Renders chats by a template, for comparisons with transformers (`tests/templates/published.py`).
//!
//! Reads lines of JSON with `template` or `folder`, `messages`, `tools`, `kwargs` and `add_generation_prompt`. Writes one
//! line for each: `text`, or `error` and whether the template raised it.

use std::io::{BufRead, Write};

use remoe_model::text::{ChatTemplate, Rendering, TextError};
use serde_json::{Map, Value, json};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let scratch = tempfile::tempdir()?;
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let request: Map<String, Value> = serde_json::from_str(&line?)?;
        let text = |name: &str| request.get(name).and_then(Value::as_str);
        let folder = match text("folder") {
            Some(folder) => folder.into(),
            None => {
                std::fs::write(
                    scratch.path().join("chat_template.jinja"),
                    text("template").unwrap_or_default(),
                )?;
                let tokens = request.get("special_tokens").cloned().unwrap_or_else(|| json!({}));
                std::fs::write(scratch.path().join("tokenizer_config.json"), tokens.to_string())?;
                scratch.path().to_owned()
            }
        };
        let messages = request.get("messages").and_then(Value::as_array).cloned().unwrap_or_default();
        let rendering = Rendering {
            tools: request.get("tools").and_then(Value::as_array).map(Vec::as_slice),
            reasoning_effort: None,
            kwargs: request.get("kwargs").and_then(Value::as_object),
            add_generation_prompt: request
                .get("add_generation_prompt")
                .and_then(Value::as_bool)
                .unwrap_or(true),
        };
        let rendered = match ChatTemplate::open(&folder) {
            Ok(Some(template)) => template.render_with(&messages, rendering),
            Ok(None) => return Err("no template".into()),
            Err(error) => Err(error),
        };
        let answer = match rendered {
            Ok(text) => json!({"text": text}),
            Err(error) => {
                json!({"error": error.to_string(), "raised": matches!(error, TextError::Refused(_))})
            }
        };
        writeln!(out, "{answer}")?;
    }
    Ok(())
}
