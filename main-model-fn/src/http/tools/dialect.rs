//! How a model's chat template shows tools, writes calls and opens thoughts, found out by rendering.

use super::asked::{Asked, Function, Mode};
use super::format::{FORMATS, Format, HERMES};
use super::reader::Reader;
use super::thoughts::Thoughts;
use crate::http::text_frontend::TextFrontend;
use remoe_model::text::Rendering;
use serde_json::{Value, json};

/// Ways of a model's template with tools and thoughts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::http) struct Dialect {
    pub(in crate::http) format: &'static Format,
    /// The template tells the model of tools. Where it does not, a system message has to.
    pub(in crate::http) shows_tools: bool,
    /// The template writes calls of earlier messages. Where it does not, they become content.
    pub(super) writes_calls: bool,
    /// The template writes results of calls. Where it does not, they become messages of the user.
    pub(super) writes_results: bool,
    /// The template joins arguments as text, which objects are not.
    pub(super) takes_text: bool,
    pub(in crate::http) thoughts: Option<&'static Thoughts>,
}

// No template has these words by itself.
const QUESTION: &str = "probe question";
const FUNCTION: &str = "probe_function";
const KEY: &str = "probe_key";
const VALUE: &str = "probe value";
const RESULT: &str = "probe result";
/// Ids of calls as Mistral's templates demand them, and as Kimi's write them.
const IDS: [&str; 2] = ["probe0001", "functions.probe_function:0"];

impl Dialect {
    /// Dialect of a model without a template.
    pub(in crate::http) const PLAIN: Self = Self {
        format: &HERMES,
        shows_tools: false,
        writes_calls: false,
        writes_results: false,
        takes_text: false,
        thoughts: None,
    };

    /// Returns true if the model has thoughts.
    pub(in crate::http) fn may_think(&self) -> bool {
        self.thoughts.is_some() || self.format.is_harmony()
    }

    /// Finds the dialect of the template of `text`: a chat with a tool, its call and its result is rendered, and the call is looked for
    /// in what comes out.
    pub(in crate::http) fn of(text: &dyn TextFrontend) -> Self {
        let Some(template) = text.template() else { return Self::PLAIN };
        let has_token = text.token_id(super::thoughts::THINK.open).is_some();
        let thoughts = Thoughts::of(template, has_token);
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
        let tools = [tool];
        let render = |messages: &[Value]| {
            let rendering =
                Rendering { tools: Some(&tools), add_generation_prompt: true, ..Rendering::default() };
            text.render_chat(messages, rendering).ok()
        };
        let question = json!({"role": "user", "content": QUESTION});
        let shown = render(std::slice::from_ref(&question)).unwrap_or_default();
        let mut dialect = Self { thoughts, shows_tools: shown.contains(FUNCTION), ..Self::PLAIN };
        for (id, takes_text) in IDS.iter().flat_map(|id| [(id, false), (id, true)]) {
            let arguments = json!({KEY: VALUE});
            let arguments = if takes_text { Value::from(arguments.to_string()) } else { arguments };
            let call =
                json!({"id": id, "type": "function", "function": {"name": FUNCTION, "arguments": arguments}});
            let call = json!({"role": "assistant", "content": "", "tool_calls": [call]});
            let result = json!({"role": "tool", "tool_call_id": id, "name": FUNCTION, "content": RESULT});
            let whole = render(&[question.clone(), call.clone(), result]);
            let Some(rendered) = whole.or_else(|| render(&[question.clone(), call])) else { continue };
            let behind = rendered.rsplit_once(QUESTION).map_or("", |(_, behind)| behind);
            dialect.writes_results |= behind.contains(RESULT);
            if let Some(format) = FORMATS.into_iter().find(|format| reads_call(format, behind)) {
                return Self { format, writes_calls: true, takes_text, ..dialect };
            }
        }
        // A template that knows nothing of tools may still write any role.
        dialect.writes_results &= dialect.shows_tools;
        // A template may teach a format that it does not write itself.
        let teaches = |format: &&'static Format| format.texts().iter().all(|text| shown.contains(text));
        let marked =
            |format: &&'static Format| !format.marker().is_empty() && shown.contains(format.marker());
        match FORMATS
            .into_iter()
            .filter(|_| dialect.shows_tools)
            .find(|format| marked(format) && teaches(format))
        {
            Some(format) => Self { format, ..dialect },
            // Of tools whose calls are not known, the template had better not tell.
            None => Self { shows_tools: false, ..dialect },
        }
    }
}

/// Returns true if `text` has the probe's call in `format`, and no other.
fn reads_call(format: &'static Format, text: &str) -> bool {
    let function = Function { name: FUNCTION.to_owned(), parameters: None, strict: false, place: 0 };
    let asked = Asked { tools: Vec::new(), functions: vec![function], mode: Mode::Auto, parallel: true };
    let text = match format.marker() {
        // Alone, a call is the whole message: it begins at its brace.
        "<|python_tag|>" => text.find("{\"name\"").map_or("", |at| &text[at..]),
        _ => text,
    };
    let mut reader = Reader::new(format, asked, None);
    let mut said = reader.push(text);
    let rest = reader.finish(false);
    said.calls.extend(rest.calls);
    let names = said.calls.iter().filter_map(|call| call.start.as_ref()).map(|(_, name)| name.as_str());
    let arguments: String = said.calls.iter().map(|call| call.arguments.as_str()).collect();
    let arguments: Option<Value> = serde_json::from_str(&arguments).ok();
    names.eq([FUNCTION]) && arguments == Some(json!({KEY: VALUE}))
}
