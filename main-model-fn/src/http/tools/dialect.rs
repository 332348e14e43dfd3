//! Dialect of a chat template: how it shows tools, writes calls and marks thoughts. Found by rendering probes.

use super::callable_tools::{CallableTools, Mode, ToolFunction};
use super::format::{FORMATS, Format, HERMES, Layout};
use super::reader::ChoiceReader;
use super::thoughts::Thoughts;
use crate::http::text_frontend::TextFrontend;
use remoe_model::text::Rendering;
use serde_json::{Value, json};

/// Dialect of a model's chat template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::http) struct Dialect {
    pub(in crate::http) format: &'static Format,
    /// True if the template shows tools to the model; otherwise a system message must.
    pub(in crate::http) shows_tools: bool,
    /// Parts that the template writes in chats with tools.
    with_tools: TemplateSupport,
    /// Parts that the template writes in chats without tools.
    without_tools: TemplateSupport,
    /// True if the template needs arguments as text, not as an object.
    pub(super) takes_text: bool,
    /// True if the template accepts system messages.
    pub(super) takes_system: bool,
    pub(in crate::http) thoughts: Option<&'static Thoughts>,
}

/// Parts of earlier messages that a template writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct TemplateSupport {
    /// True for calls. Otherwise they become content.
    pub(super) calls: bool,
    /// True for results of calls. Otherwise they become user messages.
    pub(super) results: bool,
}

// Texts of the probes, which no template contains itself.
const QUESTION: &str = "probe question";
const INSTRUCTION: &str = "probe instruction";
const FUNCTION: &str = "probe_function";
const KEY: &str = "probe_key";
const VALUE: &str = "probe value";
const RESULT: &str = "probe result";
/// Call ids in the forms that Mistral's and Kimi's templates require.
const IDS: [&str; 2] = ["probe0001", "functions.probe_function:0"];

/// Probes: chats that are rendered to examine a template.
struct Probe<'a> {
    text: &'a dyn TextFrontend,
    tools: [Value; 1],
}

impl Probe<'_> {
    /// Renders `messages` with or without the probe's tool; `None` if the template refuses them.
    fn render(&self, messages: &[Value], has_tools: bool) -> Option<String> {
        let tools = has_tools.then_some(self.tools.as_slice());
        let rendering = Rendering { tools, add_generation_prompt: true, ..Rendering::default() };
        self.text.render_chat(messages, rendering).ok()
    }

    /// Renders a question, a call and its result, or without the result if the template refuses it. Returns the text
    /// behind the question.
    fn called(&self, id: &str, takes_text: bool, has_tools: bool) -> Option<String> {
        let arguments = json!({KEY: VALUE});
        let arguments = if takes_text { Value::from(arguments.to_string()) } else { arguments };
        let call =
            json!({"id": id, "type": "function", "function": {"name": FUNCTION, "arguments": arguments}});
        let call = json!({"role": "assistant", "content": "", "tool_calls": [call]});
        let messages = [question(), call, result(id)];
        let whole = self.render(&messages, has_tools);
        let rendered = whole.or_else(|| self.render(&messages[..2], has_tools))?;
        Some(behind_question(&rendered).to_owned())
    }

    /// Reports if the template writes the result of a call that is content.
    fn writes_results(&self, has_tools: bool) -> bool {
        let answer = json!({"role": "assistant", "content": "probe answer"});
        let rendered = self.render(&[question(), answer, result(IDS[0])], has_tools);
        rendered.is_some_and(|rendered| rendered.contains(RESULT))
    }
}

fn question() -> Value {
    json!({"role": "user", "content": QUESTION})
}

fn result(id: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "name": FUNCTION, "content": RESULT})
}

fn behind_question(rendered: &str) -> &str {
    rendered.rsplit_once(QUESTION).map_or("", |(_, behind)| behind)
}

impl Dialect {
    /// Dialect of a model without a chat template.
    pub(in crate::http) const PLAIN: Self = Self {
        format: &HERMES,
        shows_tools: false,
        with_tools: TemplateSupport { calls: false, results: false },
        without_tools: TemplateSupport { calls: false, results: false },
        takes_text: false,
        takes_system: true,
        thoughts: None,
    };

    /// Reports if the model has thoughts.
    pub(in crate::http) fn may_think(&self) -> bool {
        self.thoughts.is_some() || self.format.is_harmony()
    }

    /// Returns the parts of earlier messages that the template writes, in a chat with tools or without.
    pub(super) fn written(&self, has_tools: bool) -> TemplateSupport {
        if has_tools && self.shows_tools { self.with_tools } else { self.without_tools }
    }

    /// Finds the dialect of the template of `text`: renders a chat with a tool, its call and its result, and searches the
    /// output for the call.
    pub(in crate::http) fn of(text: &dyn TextFrontend) -> Self {
        let Some(template) = text.template() else { return Self::PLAIN };
        let has_token = text.token_id(super::thoughts::THINK.open).is_some();
        let tool = json!({
            "type": "function",
            "function": {
                "name": FUNCTION,
                "description": "",
                "parameters": {
                    "type": "object",
                    "properties": {KEY: {"type": "string", "description": ""}},
                    "required": [KEY],
                },
            },
        });
        let probe = Probe { text, tools: [tool] };
        let system = json!({"role": "system", "content": INSTRUCTION});
        let instructed = probe.render(&[system, question()], false);
        let shown = probe.render(&[question()], true).unwrap_or_default();
        let mut dialect = Self {
            thoughts: Thoughts::of(template, has_token),
            shows_tools: shown.contains(FUNCTION),
            takes_system: instructed.is_some_and(|rendered| rendered.contains(INSTRUCTION)),
            ..Self::PLAIN
        };
        let mut writes_unknown = false;
        for (id, takes_text) in IDS.iter().flat_map(|id| [(id, false), (id, true)]) {
            let Some(behind) = probe.called(id, takes_text, true) else { continue };
            let opened = behind_question(&shown);
            let Some(format) = FORMATS.into_iter().find(|format| reads_call(format, &behind, opened)) else {
                writes_unknown |= behind.contains(FUNCTION) && behind.contains(VALUE);
                continue;
            };
            let alone = probe.called(id, takes_text, false).unwrap_or_default();
            let written = |text: &str| TemplateSupport {
                calls: text.contains(FUNCTION),
                results: text.contains(RESULT),
            };
            return Self {
                format,
                with_tools: written(&behind),
                without_tools: written(&alone),
                takes_text,
                ..dialect
            };
        }
        // A template may teach a format that it does not write itself.
        let teaches = |format: &&'static Format| {
            let texts = format.texts();
            !texts.is_empty()
                && texts.iter().all(|text| shown.contains(text))
                && shown.contains(format.marker())
        };
        let taught = FORMATS.into_iter().filter(|_| !writes_unknown).find(teaches);
        // If the call format is unknown, the template must not show tools.
        dialect.shows_tools &= taught.is_some();
        let results = |has_tools: bool| TemplateSupport {
            calls: false,
            // A template without tools may still write messages of any role.
            results: dialect.shows_tools && probe.writes_results(has_tools),
        };
        Self {
            format: taught.unwrap_or(&HERMES),
            with_tools: results(true),
            without_tools: results(false),
            ..dialect
        }
    }
}

/// Reports if `text`, behind a question, has the probe's call in `format`, and no other. `opened` begins each answer.
fn reads_call(format: &'static Format, text: &str, opened: &str) -> bool {
    let function = ToolFunction { name: FUNCTION.to_owned(), parameters: None, strict: false, place: 0 };
    let tools =
        CallableTools { tools: Vec::new(), functions: vec![function], mode: Mode::Auto, parallel: true };
    let text = match format.layout {
        // Without sections, a call is the whole answer.
        Layout::Bare { .. } => text.strip_prefix(opened).map_or("", str::trim_start),
        _ => text,
    };
    let mut reader = ChoiceReader::new(format, tools, None);
    let mut parsed = reader.push(text);
    let rest = reader.finish(false);
    parsed.calls.extend(rest.calls);
    let names = parsed.calls.iter().filter_map(|call| call.start.as_ref()).map(|(_, name)| name.as_str());
    let arguments: String = parsed.calls.iter().map(|call| call.arguments.as_str()).collect();
    let arguments: Option<Value> = serde_json::from_str(&arguments).ok();
    names.eq([FUNCTION]) && arguments == Some(json!({KEY: VALUE}))
}
