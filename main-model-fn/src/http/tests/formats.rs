//! Property tests: calls that templates write are parsed again.

use super::families::{FAMILIES, Templated, ToolFamily};
use super::{TextFrontend, TextOverride};
use crate::http::tools::{AnswerForm, CallableTools, Dialect, Tools, adapt_messages};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use remoe_model::text::Rendering;
use serde_json::{Map, Value, json};

const CALLS_PER_FORMAT: u32 = 200;

/// Generates strings of arguments, including markers of every format.
fn texts() -> impl Strategy<Value = String> {
    let marker = prop::sample::select(vec![
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function> x",
        "</parameter> x",
        "<arg_key>",
        "</arg_value> x",
        "[TOOL_CALLS]",
        "[ARGS]{",
        "<｜tool▁calls▁end｜>",
        "<|tool_call_end|>",
        "</invoke>",
        "<|call|>",
        "<think>",
        "```",
        "\"",
        "\\",
        "}",
        "{\"name\": \"f\"",
        "é",
        "日本",
        "\u{1f600}",
        "7",
        "true",
        "null",
        " ",
        "\n",
        "a",
    ]);
    prop::collection::vec(marker, 0..6).prop_map(|parts| parts.concat())
}

/// Generates a value and its schema.
fn values() -> impl Strategy<Value = (Value, Value)> {
    let nested = prop_oneof![
        Just(json!({"a": {"b": [1, 2.5, null, true, "</tool_call>"]}})),
        texts().prop_map(|text| json!({"text": text, "list": [text]})),
    ];
    prop_oneof![
        texts().prop_map(|text| (json!(text), json!({"type": "string"}))),
        any::<i32>().prop_map(|number| (json!(number), json!({"type": "integer"}))),
        (-1000_i32..1000).prop_map(|number| (json!(f64::from(number) / 8.0), json!({"type": "number"}))),
        any::<bool>().prop_map(|flag| (json!(flag), json!({"type": "boolean"}))),
        Just((Value::Null, json!({"type": ["integer", "null"]}))),
        nested.clone().prop_map(|value| (value, json!({"type": "object"}))),
        nested.prop_map(|value| (json!([value]), json!({"type": "array"}))),
        // A number as text becomes the type that its schema prefers.
        any::<u16>()
            .prop_map(|number| (json!(number.to_string()), json!({"enum": [number.to_string(), "no"]}))),
    ]
}

/// Function name, arguments, and their schemas.
type Call = (String, Map<String, Value>, Map<String, Value>);

/// Generates up to three calls.
fn calls() -> impl Strategy<Value = Vec<Call>> {
    let arguments = prop::collection::btree_map("[a-z]{1,3}[_0-9]?", values(), 0..4);
    prop::collection::vec(arguments, 1..4).prop_map(|all| {
        let call = |(index, arguments): (usize, std::collections::BTreeMap<String, (Value, Value)>)| {
            let schemas = arguments.iter().map(|(key, (_, schema))| (key.clone(), schema.clone())).collect();
            let values = arguments.into_iter().map(|(key, (value, _))| (key, value)).collect();
            (format!("f_{index}"), values, schemas)
        };
        all.into_iter().enumerate().map(call).collect()
    })
}

/// Returns the template's text of an assistant message with `calls`, and the tools for them.
fn rendered(server: &Templated, dialect: &Dialect, calls: &[Call]) -> (String, Value) {
    let tools: Vec<Value> = calls
        .iter()
        .map(|(name, _, schemas)| {
            let parameters = json!({"type": "object", "properties": schemas});
            json!({"type": "function", "function": {"name": name, "description": "", "parameters": parameters}})
        })
        .collect();
    let written: Vec<Value> = calls
        .iter()
        .enumerate()
        .map(|(index, (name, arguments, _))| {
            let id = if dialect.format.name == "kimi-k2" {
                format!("functions.{name}:{index}")
            } else {
                format!("abcdefgh{index}")
            };
            json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
        })
        .collect();
    let messages = vec![
        json!({"role": "user", "content": "QUESTION"}),
        json!({"role": "assistant", "content": "", "tool_calls": written}),
    ];
    let messages = adapt_messages(dialect, messages, &tools);
    let rendering = Rendering { tools: dialect.shows_tools.then_some(&tools), ..Rendering::default() };
    let text = TextOverride::render_chat(server, &messages, rendering).unwrap();
    (text.rsplit_once("QUESTION").unwrap().1.to_owned(), json!(tools))
}

/// Returns the part of a rendered conversation that the model would write.
fn answer<'a>(family: &ToolFamily, text: &'a str) -> &'a str {
    match family.name {
        "harmony" => text.split_once("<|start|>assistant").unwrap().1,
        "granite-3" => text.split_once("<|assistant|>").unwrap().1.trim_end(),
        _ => text.split_once("<|assistant|>").unwrap().1.split("<|stop|>").next().unwrap(),
    }
}

#[test]
fn calls_in_templates_are_parsed() {
    for family in &FAMILIES {
        let server = Templated::of(family, false);
        let dialect = Dialect::of(&server);
        assert_eq!(dialect.format.name, family.name);
        let most = if matches!(family.name, "harmony" | "llama") { 1 } else { 3 };
        let mut runner = TestRunner::new(Config { cases: CALLS_PER_FORMAT, ..Config::default() });
        let cuts = prop::collection::vec(any::<prop::sample::Index>(), 0..12);
        let outcome = runner.run(&(calls(), cuts), |(calls, cuts)| {
            let calls = &calls[..calls.len().min(most)];
            let (text, tools) = rendered(&server, &dialect, calls);
            let text = answer(family, &text);
            let tools: Tools = serde_json::from_value(tools).unwrap();
            let tools = CallableTools::new(Some(tools), None, None).unwrap().unwrap();
            let form = AnswerForm { format: dialect.format, tools, thinking: None };
            let mut reader = form.readers(1).next().unwrap();
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
            at.extend([0, text.len()]);
            at.retain(|&at| text.is_char_boundary(at));
            at.sort_unstable();
            let mut read: Vec<(String, String)> = Vec::new();
            let mut content = String::new();
            let mut deltas: Vec<_> = at.windows(2).map(|cut| reader.push(&text[cut[0]..cut[1]])).collect();
            deltas.push(reader.finish(false));
            for parsed in deltas {
                content += &parsed.content;
                for delta in parsed.calls {
                    if let Some((_, name)) = delta.start {
                        read.push((name, String::new()));
                    }
                    read[delta.index].1 += &delta.arguments;
                }
            }
            prop_assert_eq!(content.trim(), "", "{}", text);
            prop_assert_eq!(read.len(), calls.len(), "{}", text);
            for ((name, arguments), (expected, values, _)) in read.iter().zip(calls) {
                prop_assert_eq!(name, expected);
                let arguments: Value = serde_json::from_str(arguments)
                    .map_err(|error| TestCaseError::fail(format!("{error}: {arguments}: {text}")))?;
                prop_assert_eq!(&arguments, &Value::Object(values.clone()), "{}", text);
            }
            Ok(())
        });
        if let Err(error) = outcome {
            panic!("{}: {error}", family.name);
        }
    }
}

#[test]
fn tools_are_described_in_words_if_the_template_omits_them() {
    const TEMPLATE: &str =
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}";
    let dialect = Dialect::of(&Templated::new(TEMPLATE, &[]));
    assert_eq!((dialect.format.name, dialect.shows_tools), ("hermes", false));
    assert_eq!(TextFrontend::template(&Templated::new(TEMPLATE, &[])), Some(TEMPLATE));
}
