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
        if self.calls.format == Format::Harmony {
            return self.messages(is_free, answer);
        }
        let rules = self.rules();
        match answer {
            Some(schema) => format!("start: calls | answer\nanswer: %json {schema}\n{rules}"),
            None if !is_free => format!("start: calls\n{rules}"),
            None => self.with_text() + &rules,
        }
    }

    /// Calls, or one, and nothing else: `calls`, of which each is a `call`, and `body`, what follows the first marker.
    fn rules(&self) -> String {
        let open = self.marker(self.calls.format.opening());
        match self.calls.format {
            Format::Hermes => {
                let (object, close) = (self.objects("arguments"), self.marker("</tool_call>"));
                let calls = self.several("\"\\n\"");
                format!("calls: {calls}\ncall: {open} body\nbody: \"\\n\" {object} \"\\n\" {close}\n")
            }
            Format::MistralList => {
                let (object, calls) = (self.objects("arguments"), self.several("\", \""));
                format!("calls: {open} body\nbody: \" \"? \"[\" {calls} \"]\"\ncall: {object}\n")
            }
            Format::MistralNamed => {
                let between = self.marker("[ARGS]");
                let call = self.each(|name, arguments| format!("{} {between} {arguments}", quoted(name)));
                format!("calls: {}\ncall: {open} body\nbody: {call}\n", self.several(""))
            }
            Format::Llama => {
                format!("calls: {}\ncall: {}\n", self.several("\"; \""), self.objects("parameters"))
            }
            Format::Harmony => {
                let call = self.each(|name, arguments| {
                    format!("{} json {arguments}", quoted(&format!("commentary to=functions.{name} ")))
                });
                let (constrain, message) = (self.marker("<|constrain|>"), self.marker("<|message|>"));
                format!("calls: {open} {call}\njson: {constrain} \"json\" {message}\n")
            }
        }
    }

    /// The rule `start` of calls with text around them, or of text alone.
    fn with_text(&self) -> String {
        let open = self.marker(self.calls.format.opening());
        let is_special = open.starts_with('<');
        // Of the formats in which every call has a marker.
        let are_several =
            self.calls.asked.parallel && matches!(self.calls.format, Format::Hermes | Format::MistralNamed);
        let start = match are_several {
            // They stand alone: a text that begins otherwise has none.
            _ if self.calls.format == Format::Llama => {
                return "start: (calls | TEXT)?\nTEXT: /\\s*[^\\s{](.|\\n)*/\n".to_owned();
            }
            // A special token ends a text, which has none.
            true if is_special => "start: TEXT (call TEXT)*".to_owned(),
            false if is_special => "start: TEXT calls?".to_owned(),
            // Text up to the marker: what ends it is found as soon as it is there.
            true => format!("start: (head body)* TEXT\nhead[lazy]: TEXT {open}"),
            false => format!("start: head body | TEXT\nhead[lazy]: TEXT {open}"),
        };
        format!("{start}\n{TEXT}")
    }

    /// The messages of gpt-oss: what it says to itself or on the way, then a call or the answer.
    fn messages(&self, is_free: bool, answer: Option<&str>) -> String {
        let [open, message, end, start] =
            ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"].map(|text| self.marker(text));
        let said = if end.starts_with('<') { "said" } else { "said[lazy]" };
        let mut rules = format!(
            "{said}: TEXT {end}\n{TEXT}thought: {open} (\"analysis\" | \"commentary\") {message} said {start} \"assistant\"\n"
        );
        let may_call = !self.calls.asked.functions.is_empty();
        if may_call {
            rules += &self.rules();
        }
        let last = match answer {
            _ if !is_free => "calls",
            _ if may_call => "(calls | final)",
            _ => "final",
        };
        if is_free {
            let said = if answer.is_some() { "answer" } else { "TEXT" };
            rules += &format!("final: {open} \"final\" {message} {said}\n");
        }
        if let Some(schema) = answer {
            rules += &format!("answer: %json {schema}\n");
        }
        format!("start: thought* {last}\n{rules}")
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
