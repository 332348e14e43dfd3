//! Model families: templates similar to theirs, and calls in their formats.

use super::{BOS, TextOverride};
use remoe_model::text::{ChatTemplate, Rendering, tools_for_template};
use remoe_proto::ServiceError;
use serde_json::Value;

/// Calls of `f` with x = 7 and of `g` with x = 8.
pub(super) struct ToolFamily {
    pub(super) name: &'static str,
    template: &'static str,
    pub(super) first: &'static str,
    /// Empty if an answer has only one call.
    pub(super) second: &'static str,
    /// Text after the last call.
    pub(super) end: &'static str,
    /// Special tokens of real tokenizers.
    pub(super) special: &'static [&'static str],
}

impl ToolFamily {
    /// Returns an answer with the first call.
    pub(super) fn one(&self) -> String {
        format!("{}{}", self.first, self.end)
    }

    /// Returns an answer with both calls, if the format allows two.
    pub(super) fn two(&self) -> String {
        format!("{}{}{}", self.first, self.second, self.end)
    }
}

macro_rules! template {
    ($name:literal) => {
        include_str!(concat!("templates/", $name, ".jinja"))
    };
}

const DEEPSEEK: &[&str] = &[
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
];

pub(super) const FAMILIES: [ToolFamily; 14] = [
    ToolFamily {
        name: "hermes",
        template: template!("hermes"),
        first: "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 7}}\n</tool_call>",
        second: "\n<tool_call>\n{\"name\": \"g\", \"arguments\": {\"x\": 8}}\n</tool_call>",
        end: "",
        special: &["<tool_call>", "</tool_call>"],
    },
    ToolFamily {
        name: "qwen3-coder",
        template: template!("qwen3-coder"),
        first: "<tool_call>\n<function=f>\n<parameter=x>\n7\n</parameter>\n</function>\n</tool_call>",
        second: "\n<tool_call>\n<function=g>\n<parameter=x>\n8\n</parameter>\n</function>\n</tool_call>",
        end: "",
        special: &["<tool_call>", "</tool_call>"],
    },
    ToolFamily {
        name: "glm",
        template: template!("glm"),
        first: "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
        second: "\n<tool_call>g\n<arg_key>x</arg_key>\n<arg_value>8</arg_value>\n</tool_call>",
        end: "",
        special: &["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    },
    ToolFamily {
        name: "minimax-m2",
        template: template!("minimax-m2"),
        first: "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"x\">7</parameter>\n</invoke>",
        second: "\n<invoke name=\"g\">\n<parameter name=\"x\">8</parameter>\n</invoke>",
        end: "\n</minimax:tool_call>",
        special: &["<minimax:tool_call>", "</minimax:tool_call>"],
    },
    ToolFamily {
        name: "minimax-m1",
        template: template!("minimax-m1"),
        first: "<tool_calls>\n{\"name\": \"f\", \"arguments\": {\"x\": 7}}",
        second: "\n{\"name\": \"g\", \"arguments\": {\"x\": 8}}",
        end: "\n</tool_calls>",
        special: &[],
    },
    ToolFamily {
        name: "mistral-list",
        template: template!("mistral-list"),
        first: "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"x\": 7}}",
        second: ", {\"name\": \"g\", \"arguments\": {\"x\": 8}}",
        end: "]",
        special: &["[TOOL_CALLS]"],
    },
    ToolFamily {
        name: "mistral-id",
        template: template!("mistral-id"),
        first: "[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{\"x\": 7}",
        second: "[TOOL_CALLS]g[CALL_ID]abcdefgh2[ARGS]{\"x\": 8}",
        end: "",
        special: &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
    },
    ToolFamily {
        name: "mistral-named",
        template: template!("mistral-named"),
        first: "[TOOL_CALLS]f[ARGS]{\"x\": 7}",
        second: "[TOOL_CALLS]g[ARGS]{\"x\": 8}",
        end: "",
        special: &["[TOOL_CALLS]", "[ARGS]"],
    },
    ToolFamily {
        name: "deepseek-v3.1",
        template: template!("deepseek-v3.1"),
        first: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"x\": 7}<｜tool▁call▁end｜>",
        second: "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{\"x\": 8}<｜tool▁call▁end｜>",
        end: "<｜tool▁calls▁end｜>",
        special: DEEPSEEK,
    },
    ToolFamily {
        name: "deepseek-v3",
        template: template!("deepseek-v3"),
        first: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"x\": 7}\n```<｜tool▁call▁end｜>",
        second: "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{\"x\": 8}\n```<｜tool▁call▁end｜>",
        end: "<｜tool▁calls▁end｜>",
        special: DEEPSEEK,
    },
    ToolFamily {
        name: "kimi-k2",
        template: template!("kimi-k2"),
        first: "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"x\": 7}<|tool_call_end|>",
        second: "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{\"x\": 8}<|tool_call_end|>",
        end: "<|tool_calls_section_end|>",
        special: &[
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ],
    },
    ToolFamily {
        name: "granite-3",
        template: template!("granite-3"),
        first: "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"x\": 7}}",
        second: ", {\"name\": \"g\", \"arguments\": {\"x\": 8}}",
        end: "]",
        special: &["<|tool_call|>"],
    },
    ToolFamily {
        name: "llama",
        template: template!("llama"),
        first: "{\"name\": \"f\", \"parameters\": {\"x\": 7}}",
        second: "; {\"name\": \"g\", \"parameters\": {\"x\": 8}}",
        end: "",
        special: &["<|python_tag|>"],
    },
    ToolFamily {
        name: "harmony",
        template: template!("harmony"),
        first: "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"x\": 7}",
        second: "",
        end: "",
        special: &[
            "<|start|>",
            "<|channel|>",
            "<|constrain|>",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ],
    },
];

/// Returns the family `name`.
pub(super) fn family(name: &str) -> &'static ToolFamily {
    FAMILIES.iter().find(|family| family.name == name).unwrap()
}

/// Byte tokenizer with special tokens and a chat template.
pub(super) struct Templated {
    template: ChatTemplate,
    special: &'static [&'static str],
}

impl Templated {
    pub(super) fn new(source: &str, special: &'static [&'static str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("chat_template.jinja"), source).unwrap();
        Self { template: ChatTemplate::open(folder.path()).unwrap().unwrap(), special }
    }

    /// Creates the template of `family`. `has_special`: its markers are special tokens.
    pub(super) fn of(family: &ToolFamily, has_special: bool) -> Self {
        Self::new(family.template, if has_special { family.special } else { &[] })
    }
}

impl TextOverride for Templated {
    fn template(&self) -> Option<&str> {
        Some(self.template.source())
    }

    fn special(&self) -> &[&str] {
        self.special
    }

    fn reads(&self, name: &str) -> bool {
        self.template.reads(name)
    }

    fn render_chat(&self, messages: &[Value], rendering: Rendering<'_>) -> Result<String, ServiceError> {
        let tools = rendering.tools.map(tools_for_template);
        let rendering = Rendering { tools: tools.as_deref(), ..rendering };
        let rendered = self.template.render_with(messages, rendering);
        rendered.map_err(|error| ServiceError::invalid("messages", error.to_string()))
    }
}

/// Returns the tokens of `text` in a server with these special tokens.
pub(super) fn tokens(mut text: &str, special: &[&str]) -> Vec<u32> {
    let mut tokens = Vec::new();
    while !text.is_empty() {
        let found = (BOS + 1..).zip(special).find_map(|(id, token)| Some((id, text.strip_prefix(token)?)));
        match found {
            Some((token, rest)) => {
                tokens.push(token);
                text = rest;
            }
            None => {
                let length = text.chars().next().map_or(0, char::len_utf8);
                tokens.extend(text.as_bytes()[..length].iter().copied().map(u32::from));
                text = &text[length..];
            }
        }
    }
    tokens
}
