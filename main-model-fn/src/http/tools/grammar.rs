//! Rules, in Lark's syntax, of answers that have thoughts, call functions or match a schema.

use super::callable_tools::{CallableTools, ToolFunction};
use super::format::{Element, Format, Layout, Parameters, Section};
use super::parameters::Types;
use super::thoughts::{Opening, Thinking};
use crate::grammar::quoted;
use serde_json::{Value, json};
use std::fmt::Write;

/// Most calls of an answer that must call.
const MAX_CALLS: usize = 16;

/// Rules of an answer. The `%json` rules of arguments are appended later, so that their line numbers are known.
pub(super) struct Rules<'a> {
    pub(super) format: &'static Format,
    pub(super) tools: &'a CallableTools,
    /// Format of the model's thoughts, if it has any, and how they may begin.
    pub(super) thinking: Thinking,
    /// True if the model decides whether it calls.
    pub(super) is_free: bool,
    /// Id of a text that is a special token.
    pub(super) special: &'a dyn Fn(&str) -> Option<u32>,
    /// Rules below `start`, one per line.
    text: String,
    /// Rules of JSON that `text` refers to.
    schemas: Vec<Schema>,
}

/// Rule of JSON that matches a schema.
pub(super) struct Schema {
    pub(super) rule: String,
    /// Index in the callable functions.
    pub(super) function: usize,
    /// Name of an argument; `None`: all arguments as one object.
    pub(super) argument: Option<String>,
}

impl<'a> Rules<'a> {
    pub(super) fn new(
        format: &'static Format,
        tools: &'a CallableTools,
        thinking: Thinking,
        is_free: bool,
        special: &'a dyn Fn(&str) -> Option<u32>,
    ) -> Self {
        Self { format, tools, thinking, is_free, special, text: String::new(), schemas: Vec::new() }
    }

    /// Writes the rule `start` and those below it. `answer` is the right side of the rule for answers without calls. Returns the
    /// rules, and the schemas that they refer to.
    pub(super) fn write(mut self, answer: Option<&str>) -> (String, Vec<Schema>) {
        if let Some(answer) = answer {
            self.rule("answer", answer);
        }
        let start = match &self.format.layout {
            Layout::Harmony => self.messages(answer.is_some()),
            _ => {
                let rest = self.rest(answer.is_some());
                self.after_thoughts(rest)
            }
        };
        (format!("start: {start}\n{}", self.text), self.schemas)
    }

    fn rule(&mut self, name: &str, right: &str) {
        // Writing to memory cannot fail.
        let _written = writeln!(self.text, "{name}: {right}");
    }

    /// Returns the rule of an answer after its thoughts, as its right side.
    fn rest(&mut self, has_answer: bool) -> String {
        if self.tools.is_empty() {
            return if has_answer { "answer".to_owned() } else { self.first_text() };
        }
        let layout = &self.format.layout;
        let parallel = self.tools.parallel;
        match layout {
            Layout::Sections(section) => {
                let body = self.section_body(section, parallel);
                let marker = self.literal(section.marker);
                self.rule("body", &body);
                self.rule("section", &format!("{marker} body"));
                let sections = match section.next.filter(|_| parallel) {
                    Some(next) => format!("section ({} section){{0,{}}}", self.literal(next), MAX_CALLS - 1),
                    None => "section".to_owned(),
                };
                if has_answer && self.is_free {
                    format!("{sections} | answer")
                } else if self.is_free {
                    self.calls_with_text(section, parallel)
                } else {
                    sections
                }
            }
            Layout::Bare { between, call, .. } => {
                let call = self.call(call);
                self.rule("call", &call);
                let calls = match parallel {
                    true => format!("call ({} call){{0,{}}}", self.literal(between), MAX_CALLS - 1),
                    false => "call".to_owned(),
                };
                if has_answer && self.is_free {
                    format!("{calls} | answer")
                } else if self.is_free {
                    // A text that begins in another way has no calls.
                    self.rule("OTHER", "/\\s*[^\\s{](.|\\n)*/");
                    format!("({calls} | OTHER)?")
                } else {
                    calls
                }
            }
            Layout::Harmony => String::new(),
        }
    }

    /// Returns the rule of calls with text around them, or text alone.
    fn calls_with_text(&mut self, section: &Section, parallel: bool) -> String {
        let text = self.any_text();
        let marker = self.literal(section.marker);
        // A special token ends a text, which contains none; a text that is no token must be searched for.
        let is_special = marker.starts_with('<');
        let parallel = parallel && section.next.is_some();
        if is_special {
            let first = self.first_text();
            return match parallel {
                true => format!("{first} (section {text})*"),
                false => format!("{first} section?"),
            };
        }
        if !self.may_open_by_text() {
            self.rule("head[lazy]", &format!("{text} {marker}"));
            return match parallel {
                true => format!("(head body)* {text}"),
                false => format!("head body | {text}"),
            };
        }
        // The first text must not begin like a thought, or the lexer would read the thought as that text.
        let first = self.first_text();
        self.rule("first[lazy]", &format!("{first} {marker}"));
        if parallel {
            self.rule("head[lazy]", &format!("{text} {marker}"));
            format!("first body (head body)* {text} | {first}")
        } else {
            format!("first body | {first}")
        }
    }

    /// Reports if the model may begin a thought by a text that is no special token.
    fn may_open_by_text(&self) -> bool {
        let opening = self.thinking.filter(|(_, opening)| *opening == Opening::Possible);
        opening.is_some_and(|(thoughts, _)| (self.special)(thoughts.open).is_none())
    }

    /// Returns the rule of any text at the beginning of an answer.
    fn first_text(&mut self) -> String {
        if !self.may_open_by_text() {
            return self.any_text();
        }
        if !self.text.contains("FIRST:") {
            self.rule("FIRST", "/\\s*([^\\s<\\[](.|\\n)*)?/");
        }
        "FIRST".to_owned()
    }

    /// Returns the rule of text and calls after the marker of a section.
    fn section_body(&mut self, section: &Section, parallel: bool) -> String {
        let call = self.call(section.call);
        self.rule("call", &call);
        let calls = match section.between.filter(|_| parallel) {
            Some(between) => format!("call ({} call){{0,{}}}", self.literal(between), MAX_CALLS - 1),
            None => "call".to_owned(),
        };
        format!("{} {calls} {}", self.literal(section.before), self.literal(section.after))
    }

    /// Returns the rule of a call of one of the functions.
    fn call(&mut self, elements: &'static [Element]) -> String {
        let tools = self.tools;
        let mut calls = Vec::new();
        for (index, function) in tools.functions.iter().enumerate() {
            let parts: Vec<String> =
                elements.iter().map(|element| self.element(element, index, function)).collect();
            calls.push(parts.join(" "));
        }
        calls.join(" | ")
    }

    fn element(&mut self, element: &'static Element, index: usize, function: &ToolFunction) -> String {
        match element {
            Element::Text(text) => self.literal(text),
            Element::Name => quoted(&function.name),
            Element::Number => "/[0-9]{1,3}/".to_owned(),
            Element::Id => "/[a-zA-Z0-9]{9}/".to_owned(),
            Element::Arguments => self.schema(index, None),
            Element::Object(key) => {
                let before = quoted(&format!("{{\"name\": \"{}\", \"{key}\": ", function.name));
                format!("{before} {} \"}}\"", self.schema(index, None))
            }
            Element::Parameters(parameters) => self.parameters(parameters, index, function),
        }
    }

    /// Returns the name of the JSON rule that the arguments of a function, or one of them, must match.
    fn schema(&mut self, function: usize, argument: Option<&str>) -> String {
        let rule = match argument {
            None => format!("arguments_{function}"),
            Some(_) => format!("argument_{}", self.schemas.len()),
        };
        if argument.is_some() || self.schemas.iter().all(|schema| schema.rule != rule) {
            let argument = argument.map(str::to_owned);
            self.schemas.push(Schema { rule: rule.clone(), function, argument });
        }
        rule
    }

    /// Returns the rule of a function's arguments one by one, in the order of its schema; optional ones may be absent.
    fn parameters(&mut self, parameters: &Parameters, index: usize, function: &ToolFunction) -> String {
        let properties =
            function.parameters.as_ref().and_then(|schema| schema.get("properties")?.as_object());
        let is_bound = !self.is_free || function.strict;
        let Some(properties) = properties.filter(|properties| is_bound && !properties.is_empty()) else {
            let value = self.string_value(parameters);
            let before =
                self.literals(&[parameters.named, parameters.gap, parameters.value, parameters.padding]);
            let key = "/[a-zA-Z0-9_.-]{1,64}/";
            return format!("({} {key} {before} {value}){{0,64}}", self.literal(parameters.open));
        };
        let required: Vec<&str> = function
            .parameters
            .as_ref()
            .and_then(|schema| schema.get("required")?.as_array())
            .map(|names| names.iter().filter_map(Value::as_str).collect())
            .unwrap_or_default();
        let mut parts = Vec::new();
        for (key, schema) in properties {
            let before = self.literals(&[
                parameters.open,
                key,
                parameters.named,
                parameters.gap,
                parameters.value,
                parameters.padding,
            ]);
            let after = self.literals(&[parameters.padding, parameters.close, parameters.after]);
            let choices = schema.get("enum").and_then(Value::as_array);
            let value = match choices {
                Some(choices) if choices.iter().all(Value::is_string) => {
                    let choices: Vec<String> = choices.iter().filter_map(Value::as_str).map(quoted).collect();
                    format!("({}) {after}", choices.join(" | "))
                }
                _ if Types::of(function.parameters.as_ref(), key).is_string() => {
                    self.string_value(parameters)
                }
                _ => format!("{} {after}", self.schema(index, Some(key))),
            };
            let optional = if required.contains(&key.as_str()) { "" } else { "?" };
            parts.push(format!("({before} {value}){optional}"));
        }
        parts.join(" ")
    }

    /// Returns the rule of any text up to the end of a value, and that end.
    fn string_value(&mut self, parameters: &Parameters) -> String {
        let text = self.any_text();
        let close = self.literal(parameters.close);
        let after = self.literal(parameters.after);
        if close.starts_with('<') {
            return format!("{text} {close} {after}");
        }
        if !self.text.contains("value[lazy]:") {
            let close = quoted(&[parameters.padding, parameters.close].concat());
            self.rule("value[lazy]", &format!("{text} {close}"));
        }
        format!("value {after}")
    }

    /// Returns the rule of `rest` after the thoughts that the answer has or may have.
    fn after_thoughts(&mut self, rest: String) -> String {
        let Some((thoughts, opening)) = self.thinking else { return rest };
        if opening == Opening::Closed {
            return rest;
        }
        let thought = self.thought(thoughts.close);
        self.rule("thought", &format!("{thought} BREAK?"));
        self.rule("BREAK", "/\\n{1,2}/");
        self.rule("rest", &rest);
        let opened = format!("{} thought rest", self.literal(thoughts.open));
        match opening {
            Opening::Open => "thought rest".to_owned(),
            _ => format!("{opened} | rest"),
        }
    }

    /// Returns the rule of a thought's text and its end.
    fn thought(&mut self, close: &str) -> String {
        let text = self.any_text();
        let end = self.literal(close);
        if end.starts_with('<') {
            return format!("{text} {end}");
        }
        self.rule("spoken[lazy]", &format!("{text} {end}"));
        "spoken".to_owned()
    }

    /// Returns the rule of gpt-oss's messages: thoughts and remarks, then a call or the answer.
    fn messages(&mut self, has_answer: bool) -> String {
        let [open, message, start] =
            ["<|channel|>", "<|message|>", "<|start|>"].map(|text| self.literal(text));
        let thought = self.thought("<|end|>");
        let thought_message =
            format!("{open} (\"analysis\" | \"commentary\") {message} {thought} {start} \"assistant\"");
        self.rule("message", &thought_message);
        let may_call = !self.tools.is_empty();
        if may_call {
            let constrain = self.literal("<|constrain|>");
            self.rule("json", &format!("{constrain} \"json\" {message}"));
            let tools = self.tools;
            let mut calls = Vec::new();
            for (index, function) in tools.functions.iter().enumerate() {
                let name = quoted(&format!("commentary to=functions.{} ", function.name));
                calls.push(format!("{name} json {}", self.schema(index, None)));
            }
            self.rule("calls", &format!("{open} ({})", calls.join(" | ")));
        }
        if self.is_free {
            let text = if has_answer { "answer".to_owned() } else { self.any_text() };
            self.rule("final", &format!("{open} \"final\" {message} {text}"));
        }
        let last = match (self.is_free, may_call) {
            (false, _) => "calls",
            (true, true) => "(calls | final)",
            (true, false) => "final",
        };
        format!("message* {last}")
    }

    /// Returns the rule of any text, as a lexeme.
    fn any_text(&mut self) -> String {
        if !self.text.contains("TEXT:") {
            self.rule("TEXT", "/(.|\\n)*/");
        }
        "TEXT".to_owned()
    }

    fn literals(&self, texts: &[&str]) -> String {
        // Adjacent texts are one text, unless there is a token in it.
        self.literal(&texts.concat())
    }

    /// Returns the rule of a text of the format, with its special tokens.
    fn literal(&self, text: &str) -> String {
        let own = self.thinking.map(|(thoughts, _)| thoughts.markers());
        let markers = self.format.markers.iter().copied().chain(own.into_iter().flatten());
        let found = markers.filter_map(|marker| Some((text.find(marker)?, marker, (self.special)(marker)?)));
        let parts = match found.min_by_key(|(at, ..)| *at) {
            Some((at, marker, id)) => {
                let (before, after) = (&text[..at], &text[at + marker.len()..]);
                vec![self.literal(before), format!("<[{id}]>"), self.literal(after)]
            }
            // Whitespace is separate: the lexer takes the longest text that may come, so two alternatives that begin with a
            // line break would hide each other.
            None => {
                let core = text.trim();
                let (before, after) = text.split_once(core).unwrap_or((text, ""));
                let texts = if core.is_empty() { vec![text] } else { vec![before, core, after] };
                texts
                    .into_iter()
                    .map(|text| if text.is_empty() { String::new() } else { quoted(text) })
                    .collect()
            }
        };
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
    }
}

/// Returns the schema of the argument `key` alone, of a function with these `parameters`.
pub(super) fn argument_schema(parameters: &Value, key: &str) -> Value {
    let mut schema = parameters["properties"][key].clone();
    for definitions in ["$defs", "definitions"] {
        if let (Some(shared), Some(schema)) = (parameters.get(definitions), schema.as_object_mut()) {
            schema.entry(definitions).or_insert_with(|| shared.clone());
        }
    }
    if schema.is_null() { json!({}) } else { schema }
}
