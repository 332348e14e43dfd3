//! Tests of call parsing, with texts divided in all ways.

use super::arguments::{Balance, Head};
use super::callable_tools::{CallableTools, Mode, ToolFunction};
use super::format::{
    FORMATS, Format, GLM, GRANITE, HARMONY, HERMES, KIMI, LLAMA, MINIMAX, MISTRAL_ID, MISTRAL_LIST,
    MISTRAL_NAMED, QWEN_CODER,
};
use super::parsed_delta::ParsedDelta;
use super::reader::ChoiceReader;
use super::thoughts::{Opening, THINK};
use super::writing::written;
use proptest::prelude::*;
use serde_json::json;

fn tools_f_and_g(mode: Mode) -> CallableTools {
    let function =
        |name: &str| ToolFunction { name: name.to_owned(), parameters: None, strict: false, place: 0 };
    let functions = vec![function("f"), function("g")];
    CallableTools { tools: Vec::new(), functions, mode, parallel: true }
}

fn reader(format: &'static Format) -> ChoiceReader {
    ChoiceReader::new(format, tools_f_and_g(Mode::Auto), None)
}

/// Parts of an answer: content, reasoning, and the names and arguments of its calls.
#[derive(Debug, Default, PartialEq)]
struct ParsedAnswer {
    content: String,
    reasoning: String,
    calls: Vec<(String, String)>,
}

impl ParsedAnswer {
    fn add(&mut self, delta: ParsedDelta) {
        self.content += &delta.content;
        self.reasoning += &delta.reasoning;
        for call in delta.calls {
            if let Some((id, name)) = call.start {
                assert!(!id.is_empty() && call.index == self.calls.len());
                self.calls.push((name, String::new()));
            }
            self.calls[call.index].1 += &call.arguments;
        }
    }
}

/// Parses `pieces` with `reader`; then the answer ends or is cut off.
fn parse(mut reader: ChoiceReader, pieces: &[&str], is_cut: bool) -> ParsedAnswer {
    let mut answer = ParsedAnswer::default();
    for piece in pieces {
        answer.add(reader.push(piece));
    }
    answer.add(reader.finish(is_cut));
    answer
}

/// Returns the content of `pieces` and the names and arguments of its calls.
fn read(format: &'static Format, pieces: &[&str]) -> (String, Vec<(String, String)>) {
    let answer = parse(reader(format), pieces, false);
    (answer.content, answer.calls)
}

/// A text, its content, and the names and arguments of its calls.
type ParsingCase = (&'static Format, &'static str, &'static str, Vec<(&'static str, &'static str)>);

fn texts() -> Vec<ParsingCase> {
    let one = || vec![("f", r#"{"x": "}"}"#)];
    let two = || vec![("f", r#"{"x": 1}"#), ("g", "{}")];
    vec![
        (&HERMES, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"}\"}}\n</tool_call>", "", one()),
        (
            &HERMES,
            "I call.\n<tool_call>{\"name\":\"f\",\"arguments\":{\"x\": 1}}</tool_call>\n<tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call>",
            "I call.",
            two(),
        ),
        (
            &HERMES,
            "<tool_call>{\"arguments\": {\"x\":2}, \"name\": \"f\"}</tool_call>",
            "",
            vec![("f", "{\"x\":2}")],
        ),
        (
            &HERMES,
            "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"x\\\":2}\"}</tool_call>",
            "",
            vec![("f", "{\"x\":2}")],
        ),
        (&HERMES, "1 < 2, <tool_cal> and\n\n", "1 < 2, <tool_cal> and\n\n", vec![]),
        (&HERMES, "a <tool_call>no</tool_call> b", "a <tool_call>no</tool_call> b", vec![]),
        (&HERMES, "a<tool_call>{\"name\": ", "a<tool_call>{\"name\": ", vec![]),
        (&HERMES, "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"é", "", vec![("f", "{\"x\": \"é")]),
        (
            &MISTRAL_LIST,
            "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"x\": 1}}, {\"name\": \"g\", \"arguments\": {}}]",
            "",
            two(),
        ),
        (&MISTRAL_NAMED, "Now: [TOOL_CALLS]f[ARGS]{\"x\": 1}[TOOL_CALLS]g[ARGS]{}", "Now:", two()),
        (
            &MISTRAL_ID,
            "Now: [TOOL_CALLS]f[CALL_ID]a1[ARGS]{\"x\": 1}[TOOL_CALLS]g[CALL_ID]b2[ARGS]{}",
            "Now:",
            two(),
        ),
        (
            &QWEN_CODER,
            "Now:\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
            "Now:",
            two(),
        ),
        (
            &QWEN_CODER,
            "<tool_call><function=f><parameter=text>\n\na </parameter> \"b\"\n\n</parameter><parameter=x>2</parameter></function></tool_call>",
            "",
            vec![("f", r#"{"text": "\na </parameter> \"b\"\n", "x": 2}"#)],
        ),
        // A missing brace, an extra one, and further keys.
        (
            &HERMES,
            "<tool_call>{\"name\":\"f\",\"arguments\":{\"x\": 1}</tool_call>\n<tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call>",
            "",
            two(),
        ),
        (
            &HERMES,
            "<tool_call>{\"name\":\"f\",\"arguments\":{\"x\": 1}}}\n</tool_call><tool_call>{\"name\":\"g\",\"arguments\":{},\"id\":\"a}b\"}</tool_call>",
            "",
            two(),
        ),
        (&LLAMA, "{\"name\": \"f\", \"price\": 3}", "{\"name\": \"f\", \"price\": 3}", vec![]),
        (&LLAMA, "<|python_tag|>print(1)", "print(1)", vec![]),
        (&GLM, "The tag <tool_call>name</tool_call>.", "The tag <tool_call>name</tool_call>.", vec![]),
        (&QWEN_CODER, "<tool_call>\n<function=f>\n<parameter=na", "", vec![("f", "{}")]),
        (&QWEN_CODER, "<tool_call>\n<function=f>\n<parameter=x>", "", vec![("f", "{\"x\": \"\"}")]),
        (
            &HARMONY,
            "<|channel|>commentary to=functions.f<|message|>print(1)<|call|><|start|>assistant<|channel|>final<|message|>Hi {x}",
            "Hi {x}",
            vec![("f", "print(1)")],
        ),
        // The model stops in a call.
        (
            &QWEN_CODER,
            "<tool_call>\n<function=f>\n<parameter=text>\nab",
            "",
            vec![("f", r#"{"text": "ab"}"#)],
        ),
        // A marker that begins no call, before one that does.
        (
            &QWEN_CODER,
            "<tool_call>\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>",
            vec![("f", r#"{"x": 1}"#)],
        ),
        (&QWEN_CODER, "<tool_call>\n<function=f>\nno", "<tool_call>\n<function=f>\nno", vec![]),
        (
            &GLM,
            "Now:\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
            "Now:",
            two(),
        ),
        (&GLM, "The tag <tool_call> opens a call.", "The tag <tool_call> opens a call.", vec![]),
        (
            &MINIMAX,
            "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"x\">1</parameter>\n</invoke>\n<invoke name=\"g\">\n</invoke>\n</minimax:tool_call>",
            "",
            two(),
        ),
        (
            &KIMI,
            "Now: <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"x\": 1}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            "Now:",
            two(),
        ),
        (
            &GRANITE,
            "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"x\": 1}}, {\"name\": \"g\", \"arguments\": {}}]",
            "",
            two(),
        ),
        (
            &LLAMA,
            "{\"name\": \"f\", \"parameters\": {\"x\": 1}}; {\"name\": \"g\", \"parameters\": {}}",
            "",
            two(),
        ),
        (
            &LLAMA,
            "<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {\"x\":1}}",
            "",
            vec![("f", "{\"x\":1}")],
        ),
        (&LLAMA, "{\"name\": \"Ada\", \"age\": 36}", "{\"name\": \"Ada\", \"age\": 36}", vec![]),
        (
            &LLAMA,
            "It is {\"name\": \"f\", \"parameters\": {}}",
            "It is {\"name\": \"f\", \"parameters\": {}}",
            vec![],
        ),
        (
            &HARMONY,
            "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"x\": \"}\"}<|call|>",
            "",
            one(),
        ),
        (
            &HARMONY,
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>a <| b",
            "a <| b",
            vec![],
        ),
    ]
}

#[test]
fn calls_are_separated_from_text_in_any_pieces() {
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

/// Wherever an answer is cut off, its parts are prefixes of the parts of the whole answer, without markers.
#[test]
fn cut_off_answer_is_a_prefix() {
    for (format, text, ..) in texts() {
        let whole = parse(reader(format), &[text], false);
        for (at, _) in text.char_indices() {
            let cut = parse(reader(format), &[&text[..at]], true);
            // Llama's calls may also be content until the function is known.
            let is_open = *format == LLAMA && !whole.calls.is_empty() && cut.calls.is_empty();
            assert!(is_open || whole.content.starts_with(&cut.content), "{}: {cut:?}", &text[..at]);
            assert!(whole.reasoning.starts_with(&cut.reasoning), "{}: {cut:?}", &text[..at]);
            for (call, whole) in cut.calls.iter().zip(&whole.calls) {
                assert!(call.0 == whole.0 && whole.1.starts_with(&call.1), "{}: {cut:?}", &text[..at]);
            }
            assert!(cut.calls.len() <= whole.calls.len());
            if !whole.calls.is_empty() && whole.content.is_empty() {
                let required = parse(
                    ChoiceReader::new(format, tools_f_and_g(Mode::Required), None),
                    &[&text[..at]],
                    true,
                );
                assert_eq!(required.content, "", "{}", &text[..at]);
            }
        }
    }
}

#[test]
fn gpt_oss_has_several_channels() {
    let none = || ChoiceReader::new(&HARMONY, CallableTools::default(), None);
    for (text, content, reasoning, calls) in [
        (
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
            "Yes",
            "Hm",
            0,
        ),
        ("<|channel|>analysis<|message|>Hm", "", "Hm", 0),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b",
            "",
            "a\nb",
            0,
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
            "I look.",
            "",
            1,
        ),
        (" to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", "", "", 1),
        ("<|channel|>commentary to=python<|message|>1+1<|call|>", "", "1+1", 0),
        // Channels that no template mentions are content.
        ("Yes", "Yes", "", 0),
        (" told", " told", "", 0),
        ("{\"a\": 1}", "{\"a\": 1}", "", 0),
        (" to=a", " to=a", "", 0),
        ("<|a", "<|a", "", 0),
        ("Yes<|start|>assistant", "Yes", "", 0),
        ("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant to=", "", "Hm", 0),
    ] {
        let singly: Vec<&str> = text.split_inclusive(|_: char| true).collect();
        for pieces in [vec![text], singly] {
            let answer = parse(reader(&HARMONY), &pieces, false);
            assert_eq!(
                (&*answer.content, &*answer.reasoning, answer.calls.len()),
                (content, reasoning, calls),
                "{text}"
            );
            // Without tools there are no calls.
            let alone = parse(none(), &pieces, false);
            let told = if calls > 0 { "{}" } else { reasoning };
            assert_eq!((&*alone.content, &*alone.reasoning, alone.calls.len()), (content, told, 0), "{text}");
        }
    }
}

#[test]
fn arguments_are_returned_as_they_are_written() {
    let mut reader = reader(&HERMES);
    assert!(reader.push("<tool_call>\n{\"name\": \"f\", \"argum").calls.is_empty());
    let begun = reader.push("ents\": {\"x\"").calls;
    assert_eq!((begun[0].index, begun[0].arguments.as_str()), (0, "{\"x\""));
    assert!(begun[0].start.as_ref().is_some_and(|(id, name)| id.starts_with("call_") && name == "f"));
    assert!(!reader.has_called(), "its arguments are not complete");
    let more = reader.push(": 1").calls;
    assert_eq!((more[0].start.as_ref(), more[0].arguments.as_str()), (None, ": 1"));
    reader.push("}");
    assert!(reader.has_called());
}

#[test]
fn heads_and_ends_of_calls_are_found() {
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
fn thoughts_are_separated_from_answers_in_any_pieces() {
    use Opening::{Closed, Open, Possible};
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let within = format!("<think>\nNot {call} yet.\n</think>\n\nNow: {call}");
    let thought = format!("Not {call} yet.");
    let unfinished = format!("Hm {call}");
    for (opening, text, content, reasoning, calls) in [
        (Possible, &*within, "Now:", &*thought, 1),
        (Open, within.trim_start_matches("<think>\n"), "Now:", &thought, 1),
        // A model may repeat the beginning of the thought from the prompt.
        (Open, &within, "Now:", &thought, 1),
        (Open, &unfinished, "", &unfinished, 0),
        (Possible, "\n<think>\n\n</think>\n\nYes", "Yes", "", 0),
        (Possible, "Yes </think>", "Yes </think>", "", 0),
        (Possible, "See <think>", "See <think>", "", 0),
        (Possible, " <thin", " <thin", "", 0),
        (Closed, "  Yes <think>a</think>", "  Yes <think>a</think>", "", 0),
        (Open, "a </thin b", "", "a </thin b", 0),
    ] {
        let reader = || ChoiceReader::new(&HERMES, tools_f_and_g(Mode::Auto), Some((&THINK, opening)));
        let singly: Vec<&str> = text.split_inclusive(|_: char| true).collect();
        for pieces in [vec![text], singly] {
            let answer = parse(reader(), &pieces, false);
            assert_eq!(
                (&*answer.content, &*answer.reasoning, answer.calls.len()),
                (content, reasoning, calls),
                "{opening:?}: {text}"
            );
        }
        let whole = parse(reader(), &[text], false);
        for (at, _) in text.char_indices() {
            let cut = parse(reader(), &[&text[..at]], true);
            assert!(whole.content.starts_with(&cut.content), "{opening:?}: {}: {cut:?}", &text[..at]);
            assert!(whole.reasoning.starts_with(&cut.reasoning), "{opening:?}: {}: {cut:?}", &text[..at]);
            assert!(cut.calls.len() <= whole.calls.len());
        }
    }
}

#[test]
fn written_calls_are_parsed() {
    let calls = [("f".to_owned(), json!({"x": 1, "text": "a\nb"})), ("g".to_owned(), json!({}))];
    for format in FORMATS {
        let calls = if *format == HARMONY { &calls[..1] } else { &calls };
        let text = written(format, calls, 0);
        let (content, read) = read(format, &[&text]);
        let read: Vec<(String, serde_json::Value)> =
            read.into_iter().map(|(name, text)| (name, serde_json::from_str(&text).unwrap())).collect();
        assert_eq!((content.as_str(), read.as_slice()), ("", calls), "{}: {text}", format.name);
    }
}

proptest! {
    /// No text causes a panic, and the content is part of the text.
    #[test]
    fn any_text_is_parsed(
        parts in prop::collection::vec(
            prop_oneof![
                Just("<tool_call>"), Just("</tool_call>"), Just("[TOOL_CALLS]"), Just("[ARGS]"), Just("{"), Just("}"),
                Just("\"name\""), Just(":"), Just("\"f\""), Just(","), Just("\"arguments\""), Just("\\"), Just("é "),
                Just("<function=f>"), Just("<parameter=x>"), Just("</parameter>"), Just("</function>"), Just("<arg_key>"),
                Just("</arg_key>"), Just("<arg_value>"), Just("</arg_value>"), Just("\n"), Just("<|channel|>"), Just("<|message|>"), Just("<|end|>"), Just("to=functions.f"), Just(";"), Just("["),
            ],
            0..24,
        ),
    ) {
        let text = parts.concat();
        for format in FORMATS {
            let whole = read(format, &[&text]);
            prop_assert_eq!(&read(format, &parts), &whole);
            prop_assert!(whole.0.len() <= text.len(), "{}: {:?}", format.name, whole.0);
        }
    }
}
