//! The rules, in Lark's syntax, of answers that call functions.

use super::asked::Function;
use super::calls::Calls;
use super::format::Format;
use crate::grammar::quoted;

/// Most calls of an answer that must call.
const CALLS: usize = 16;

/// Any text, as a lexeme.
const TEXT: &str = "TEXT: /(.|\\n)*/\n";

/// Writes the rules of `calls`; those of the arguments, `arguments_0` and so on, are not among them.
pub(super) struct Rules<'a> {
    pub(super) calls: &'a Calls,
    /// The id of a text that is a special token.
    pub(super) special: &'a dyn Fn(&str) -> Option<u32>,
}

impl Rules<'_> {
    /// The rule `start` and those below it. `is_free`: there may be no call, but any text, or only `answer`,
    /// JSON of a schema.
    pub(super) fn start(&self, is_free: bool, answer: Option<&str>) -> String {
        let rules = self.rules();
        match answer {
            Some(schema) => format!("start: calls | answer\nanswer: %json {schema}\n{rules}"),
            None if !is_free => format!("start: calls\n{rules}"),
            None => self.with_text(&rules),
        }
    }

    /// Calls, or one, and nothing else.
    fn rules(&self) -> String {
        match self.calls.format {
            Format::Hermes => {
                let body = self.objects("arguments");
                let (open, close) = (self.marker("<tool_call>"), self.marker("</tool_call>"));
                let calls = self.several("\"\\n\"");
                format!("calls: {calls}\ncall: {open} body\nbody: \"\\n\" {body} \"\\n\" {close}\n")
            }
            Format::MistralList => {
                let (open, calls) = (self.marker("[TOOL_CALLS]"), self.several("\", \""));
                format!("calls: {open} \" \"? \"[\" {calls} \"]\"\ncall: {}\n", self.objects("arguments"))
            }
            Format::MistralNamed => {
                let (open, between) = (self.marker("[TOOL_CALLS]"), self.marker("[ARGS]"));
                let call = self.each(|name, arguments| format!("{} {between} {arguments}", quoted(name)));
                format!("calls: {}\ncall: {open} {call}\n", self.several(""))
            }
            Format::Llama => {
                let calls = self.several("\"; \"");
                format!("calls: {calls}\ncall: {}\n", self.objects("parameters"))
            }
            Format::Harmony => {
                let call = self.each(|name, arguments| {
                    format!("{} json {arguments}", quoted(&format!("commentary to=functions.{name} ")))
                });
                format!(
                    "calls: {} {call}\njson: {} \"json\" {}\n",
                    self.marker("<|channel|>"),
                    self.marker("<|constrain|>"),
                    self.marker("<|message|>"),
                )
            }
        }
    }

    /// The same, with text around them.
    fn with_text(&self, rules: &str) -> String {
        let open = self.marker(self.calls.format.opening());
        let is_special = open.starts_with('<');
        match self.calls.format {
            // A special token ends a text, which has none.
            Format::Hermes if is_special => format!("start: TEXT (call TEXT)*\n{TEXT}{rules}"),
            // Text up to the tag: what ends it is found as soon as it is there.
            Format::Hermes => {
                format!("start: (head body)* TEXT\nhead[lazy]: TEXT {open}\n{TEXT}{rules}")
            }
            _ if is_special => format!("start: TEXT calls?\n{TEXT}{rules}"),
            Format::Llama => format!("start: calls | TEXT\nTEXT: /[^{{](.|\\n)*/\n{rules}"),
            _ => format!("start: calls | TEXT\nTEXT: /[^\\[](.|\\n)*/\n{rules}"),
        }
    }

    /// A call of each function by an object whose arguments stand behind `key`.
    fn objects(&self, key: &str) -> String {
        self.each(|name, arguments| {
            let before = quoted(&format!("{{\"name\": \"{name}\", \"{key}\": "));
            format!("{before} {arguments} \"}}\"")
        })
    }

    /// One of the functions: `call` of its name and of the rule of its arguments.
    fn each(&self, call: impl Fn(&str, &str) -> String) -> String {
        let call =
            |(index, function): (usize, &Function)| call(&function.name, &format!("arguments_{index}"));
        let calls: Vec<String> = self.calls.asked.functions.iter().enumerate().map(call).collect();
        format!("({})", calls.join(" | "))
    }

    /// One call, or as many as may be, with `between` them.
    fn several(&self, between: &str) -> String {
        match self.calls.asked.parallel && self.calls.format != Format::Harmony {
            true => format!("call ({between} call){{0,{}}}", CALLS - 1),
            false => "call".to_owned(),
        }
    }

    fn marker(&self, text: &str) -> String {
        (self.special)(text).map_or_else(|| quoted(text), |id| format!("<[{id}]>"))
    }
}
