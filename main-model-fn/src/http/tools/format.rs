//! The formats in which families of models call tools.

/// How a model writes a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::http) enum Format {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, of Hermes and Qwen, and of models whose
    /// template knows no tools.
    Hermes,
    /// `[TOOL_CALLS] [{"name": .., "arguments": {..}}, ..]`
    MistralList,
    /// `[TOOL_CALLS]name[ARGS]{..}`, Mistral's from 2025 on.
    MistralNamed,
    /// `{"name": .., "parameters": {..}}` and nothing else, perhaps behind `<|python_tag|>`, of Llama.
    Llama,
    /// `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{..}<|call|>`, of gpt-oss.
    Harmony,
}

impl Format {
    /// The format that `template` asks for, where it shows tools to the model at all.
    pub(in crate::http) fn of(template: &str) -> Option<Self> {
        // What none but the family's templates say; Hermes' tag is the most common, and so the last.
        let says = |text: &str| template.contains(text);
        if says("[TOOL_CALLS]") {
            return Some(if says("[ARGS]") { Self::MistralNamed } else { Self::MistralList });
        }
        if says("<|channel|>") {
            return Some(Self::Harmony);
        }
        if says("<tool_call>") {
            return Some(Self::Hermes);
        }
        (says("<|python_tag|>") || says("\"parameters\": dictionary")).then_some(Self::Llama)
    }

    /// The marker that opens a call.
    pub(super) fn opening(self) -> &'static str {
        match self {
            Self::Hermes => "<tool_call>",
            Self::MistralList | Self::MistralNamed => "[TOOL_CALLS]",
            Self::Llama => "<|python_tag|>",
            Self::Harmony => "<|channel|>",
        }
    }

    /// What tells calls from text. Where a tokenizer has them as special tokens they are written out all
    /// the same.
    pub(in crate::http) fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>", "</tool_call>"],
            Self::MistralList => &["[TOOL_CALLS]"],
            Self::MistralNamed => &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            Self::Llama => &["<|python_tag|>"],
            Self::Harmony => &[
                "<|start|>",
                "<|channel|>",
                "<|constrain|>",
                "<|message|>",
                "<|end|>",
                "<|call|>",
                "<|return|>",
            ],
        }
    }
}
