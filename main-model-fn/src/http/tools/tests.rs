//! Calls in texts, however they are cut into pieces.

use super::arguments::{Balance, Head};
use super::asked::{Asked, Function, Mode};
use super::format::Format;
use super::reader::Reader;
use proptest::prelude::*;

fn reader(format: Format) -> Reader {
    let function = |name: &str| Function { name: name.to_owned(), parameters: None, strict: false, place: 0 };
    let functions = vec![function("f"), function("g")];
    Reader::new(format, Asked { tools: Vec::new(), functions, mode: Mode::Auto, parallel: true })
}

/// The content of `pieces` and its calls: name and arguments.
fn read(format: Format, pieces: &[&str]) -> (String, Vec<(String, String)>) {
    let mut reader = reader(format);
    let mut content = String::new();
    let mut calls: Vec<(String, String)> = Vec::new();
    for piece in pieces {
        let (more, deltas) = reader.push(piece);
        content += &more;
        for delta in deltas {
            if let Some((id, name)) = delta.start {
                assert!(!id.is_empty() && delta.index == calls.len());
                calls.push((name, String::new()));
            }
            calls[delta.index].1 += &delta.arguments;
        }
    }
    (content + &reader.finish(), calls)
}

/// A text, what it says, and the names and arguments of its calls.
type Case = (Format, &'static str, &'static str, Vec<(&'static str, &'static str)>);

fn texts() -> Vec<Case> {
    use Format::{Harmony, Hermes, Llama, MistralList, MistralNamed};
    let one = || vec![("f", r#"{"x": "}"}"#)];
    let two = || vec![("f", r#"{"x": 1}"#), ("g", "{}")];
    vec![
        (Hermes, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"}\"}}\n</tool_call>", "", one()),
        (
            Hermes,
            "I call.\n<tool_call>{\"name\":\"f\",\"arguments\":{\"x\": 1}}</tool_call>\n<tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call>",
            "I call.",
            two(),
        ),
        (
            Hermes,
            "<tool_call>{\"arguments\": {\"x\":2}, \"name\": \"f\"}</tool_call>",
            "",
            vec![("f", "{\"x\":2}")],
        ),
        (
            Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"x\\\":2}\"}</tool_call>",
            "",
            vec![("f", "{\"x\":2}")],
        ),
        (Hermes, "1 < 2, <tool_cal> and\n\n", "1 < 2, <tool_cal> and\n\n", vec![]),
        (Hermes, "a <tool_call>no</tool_call> b", "a<tool_call>no</tool_call> b", vec![]),
        (Hermes, "a<tool_call>{\"name\": ", "a<tool_call>{\"name\": ", vec![]),
        (Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"é", "", vec![("f", "{\"x\": \"é")]),
        (
            MistralList,
            "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"x\": 1}}, {\"name\": \"g\", \"arguments\": {}}]",
            "",
            two(),
        ),
        (MistralNamed, "Now: [TOOL_CALLS]f[ARGS]{\"x\": 1}[TOOL_CALLS]g[CALL_ID]123[ARGS]{}", "Now:", two()),
        (
            Llama,
            "{\"name\": \"f\", \"parameters\": {\"x\": 1}}; {\"name\": \"g\", \"parameters\": {}}",
            "",
            two(),
        ),
        (
            Llama,
            "<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {\"x\":1}}",
            "",
            vec![("f", "{\"x\":1}")],
        ),
        (Llama, "{\"name\": \"Ada\", \"age\": 36}", "{\"name\": \"Ada\", \"age\": 36}", vec![]),
        (
            Llama,
            "It is {\"name\": \"f\", \"parameters\": {}}",
            "It is {\"name\": \"f\", \"parameters\": {}}",
            vec![],
        ),
        (
            Harmony,
            "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"x\": \"}\"}<|call|>",
            "",
            one(),
        ),
        (
            Harmony,
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>a <| b",
            "a <| b",
            vec![],
        ),
    ]
}

#[test]
fn calls_are_told_from_text_however_it_is_cut() {
    for (format, text, content, calls) in texts() {
        let calls: Vec<(String, String)> =
            calls.into_iter().map(|(name, arguments)| (name.to_owned(), arguments.to_owned())).collect();
        let expected = (content.to_owned(), calls);
        assert_eq!(read(format, &[text]), expected, "{text}");
        let singly: Vec<&str> = text.split_inclusive(|_: char| true).collect();
        assert_eq!(read(format, &singly), expected, "by characters: {text}");
        for (at, _) in text.char_indices() {
            assert_eq!(
                read(format, &[&text[..at], &text[at..]]),
                expected,
                "{} | {}",
                &text[..at],
                &text[at..]
            );
        }
    }
}

#[test]
fn arguments_come_as_they_are_written() {
    let mut reader = reader(Format::Hermes);
    assert!(reader.push("<tool_call>\n{\"name\": \"f\", \"argum").1.is_empty());
    let (_, begun) = reader.push("ents\": {\"x\"");
    assert_eq!((begun[0].index, begun[0].arguments.as_str()), (0, "{\"x\""));
    assert!(begun[0].start.as_ref().is_some_and(|(id, name)| id.starts_with("call_") && name == "f"));
    let (_, more) = reader.push(": 1");
    assert_eq!((more[0].start.as_ref(), more[0].arguments.as_str()), (None, ": 1"));
    assert!(reader.has_called());
}

#[test]
fn heads_and_ends_of_calls() {
    let found = |text: &str| Head::Found("f".to_owned(), text.len());
    for text in ["{\"name\":\"f\",\"arguments\":", "{ \"name\" : \"f\" , \"parameters\" : "] {
        assert_eq!(Head::of(&format!("{text}{{")), found(text));
        assert!((0..text.len()).all(|end| Head::of(&text[..end]) == Head::Partial), "{text}");
    }
    for other in
        ["[", "{\"id\"", "{\"name\": 1", "{\"name\": \"f\"}", "{\"name\": \"f\", \"arguments\": \"{}\"}"]
    {
        assert_eq!(Head::of(other), Head::Other, "{other}");
    }
    assert_eq!(Balance::default().take(r#"{"a\"}": [1, {}]} rest"#), (17, true));
}

#[test]
fn formats_are_known_by_their_templates() {
    for (template, format) in [
        ("{% if tools %}<tool_call>{% endif %}", Some(Format::Hermes)),
        ("{{ '[TOOL_CALLS] [' }}", Some(Format::MistralList)),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", Some(Format::MistralNamed)),
        ("Environment: ipython <|python_tag|>", Some(Format::Llama)),
        ("<|start|>assistant<|channel|>", Some(Format::Harmony)),
        ("{{ messages }}", None),
    ] {
        assert_eq!(Format::of(template), format, "{template}");
    }
}

proptest! {
    /// Whatever a model writes, nothing panics and no text is made up.
    #[test]
    fn any_text_can_be_read(
        parts in prop::collection::vec(
            prop_oneof![
                Just("<tool_call>"), Just("</tool_call>"), Just("[TOOL_CALLS]"), Just("[ARGS]"), Just("{"), Just("}"),
                Just("\"name\""), Just(":"), Just("\"f\""), Just(","), Just("\"arguments\""), Just("\\"), Just("é "),
                Just("<|channel|>"), Just("<|message|>"), Just("<|end|>"), Just("to=functions.f"), Just(";"), Just("["),
            ],
            0..24,
        ),
    ) {
        let text = parts.concat();
        for format in [Format::Hermes, Format::MistralList, Format::MistralNamed, Format::Llama, Format::Harmony] {
            let whole = read(format, &[&text]);
            prop_assert_eq!(&read(format, &parts), &whole);
            prop_assert!(whole.0.len() <= text.len());
        }
    }
}
