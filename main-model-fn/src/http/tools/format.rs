//! Tool-call formats of model families, as data: one description serves reading, writing and grammars.
//!
//! Sources: the chat templates that the families publish.

/// Format in which a family of models writes calls.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::http) struct Format {
    /// Name in logs and tests.
    pub(in crate::http) name: &'static str,
    pub(super) layout: Layout,
    /// Texts that may be special tokens of the tokenizer.
    pub(in crate::http) markers: &'static [&'static str],
    pub(super) ids: Ids,
}

/// Position of calls in an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// In sections that begin with a marker, with text before and after them.
    Sections(Section),
    /// The whole answer is calls as JSON, possibly after a marker.
    Bare { marker: &'static str, between: &'static str, call: &'static [Element] },
    /// In separate messages, as gpt-oss writes them.
    Harmony,
}

/// A part of an answer that contains calls.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Section {
    /// Text that distinguishes a section from content.
    pub(super) marker: &'static str,
    /// Text between the marker and the first call.
    pub(super) before: &'static str,
    pub(super) call: &'static [Element],
    /// Text between calls. `None`: a section has one call.
    pub(super) between: Option<&'static str>,
    /// Text after the last call.
    pub(super) after: &'static str,
    /// Text between sections. `None`: an answer has one section.
    pub(super) next: Option<&'static str>,
}

/// Element of a call. Whitespace between elements is written as given and read in any amount.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Element {
    Text(&'static str),
    /// Name of the function.
    Name,
    /// Number of the call within the conversation's turn, from 0.
    Number,
    /// Id of the call, of letters and digits.
    Id,
    /// Arguments as a JSON object.
    Arguments,
    /// JSON object with the function's `name` and its arguments under this key.
    Object(&'static str),
    /// Arguments one by one.
    Parameters(Parameters),
}

/// Syntax of arguments that are written one by one: strings as they are, other values as JSON.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parameters {
    pub(super) open: &'static str,
    /// Text after the argument's name.
    pub(super) named: &'static str,
    /// Text before the value, after [`named`](Self::named) and whitespace.
    pub(super) value: &'static str,
    /// Text on both sides of the value that does not belong to it.
    pub(super) padding: &'static str,
    pub(super) close: &'static str,
    /// Text after each argument.
    pub(super) after: &'static str,
    /// Whitespace between [`named`](Self::named) and [`value`](Self::value).
    pub(super) gap: &'static str,
}

/// Form of call ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ids {
    /// `call_` and 24 random letters and digits.
    Random,
    /// Nine letters and digits, as Mistral's templates require.
    Nine,
    /// `functions.NAME:NUMBER`, as Kimi's templates write them.
    Numbered,
}

use Element::{Arguments, Id, Name, Number, Object, Text};

/// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen, Granite 4, and models whose template does not
/// write tools.
pub(in crate::http) static HERMES: Format = Format {
    name: "hermes",
    layout: one_call("<tool_call>", &[Object("arguments")], "\n</tool_call>"),
    markers: &["<tool_call>", "</tool_call>"],
    ids: Ids::Random,
};

/// Returns a call with tags for its function and its parameters, with `padding` around values.
const fn function_tags(padding: &'static str) -> [Element; 5] {
    let parameters = Parameters {
        open: "<parameter=",
        named: ">",
        value: "",
        padding,
        close: "</parameter>",
        after: "\n",
        gap: "",
    };
    [Text("<function="), Name, Text(">\n"), Element::Parameters(parameters), Text("</function>")]
}

static QWEN_CODER_CALL: [Element; 5] = function_tags("\n");
static SEED_CALL: [Element; 5] = function_tags("");

/// Returns sections of one call each, on separate lines.
const fn one_call(marker: &'static str, call: &'static [Element], after: &'static str) -> Layout {
    Layout::Sections(Section { marker, before: "\n", call, between: None, after, next: Some("\n") })
}

/// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5,
/// Nemotron 3.
pub(in crate::http) static QWEN_CODER: Format = Format {
    name: "qwen3-coder",
    layout: one_call("<tool_call>", &QWEN_CODER_CALL, "\n</tool_call>"),
    markers: &["<tool_call>", "</tool_call>"],
    ids: Ids::Random,
};

/// The tags of Qwen3-Coder within `<seed:tool_call>`: Seed-OSS.
pub(in crate::http) static SEED: Format = Format {
    name: "seed-oss",
    layout: one_call("<seed:tool_call>", &SEED_CALL, "\n</seed:tool_call>"),
    markers: &["<seed:tool_call>", "</seed:tool_call>"],
    ids: Ids::Random,
};

/// Returns a JSON list of calls between two markers.
const fn list(marker: &'static str, after: &'static str) -> Layout {
    Layout::Sections(Section {
        marker,
        before: "[",
        call: &[Object("arguments")],
        between: Some(", "),
        after,
        next: None,
    })
}

/// `<TOOLCALL>[{"name": .., "arguments": {..}}, ..]</TOOLCALL>`: Nemotron Nano v2.
pub(in crate::http) static NEMOTRON: Format = Format {
    name: "nemotron-v2",
    layout: list("<TOOLCALL>", "]</TOOLCALL>"),
    markers: &["<TOOLCALL>", "</TOOLCALL>"],
    ids: Ids::Random,
};

/// `<tool_calls>[{"name": .., "arguments": {..}}, ..]</tool_calls>`: Apriel.
pub(in crate::http) static APRIEL: Format = Format {
    name: "apriel",
    layout: list("<tool_calls>", "]</tool_calls>"),
    markers: &["<tool_calls>", "</tool_calls>"],
    ids: Ids::Random,
};

/// `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM 4.5 and later.
pub(in crate::http) static GLM: Format = Format {
    name: "glm",
    layout: Layout::Sections(Section {
        marker: "<tool_call>",
        before: "",
        call: &[
            Name,
            Text("\n"),
            Element::Parameters(Parameters {
                open: "<arg_key>",
                named: "</arg_key>",
                value: "<arg_value>",
                padding: "",
                close: "</arg_value>",
                after: "\n",
                gap: "\n",
            }),
        ],
        between: None,
        after: "</tool_call>",
        next: Some("\n"),
    }),
    markers: &["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    ids: Ids::Random,
};

/// `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>`:
/// MiniMax-M2.
pub(in crate::http) static MINIMAX: Format = Format {
    name: "minimax-m2",
    layout: Layout::Sections(Section {
        marker: "<minimax:tool_call>",
        before: "\n",
        call: &[
            Text("<invoke name=\""),
            Name,
            Text("\">\n"),
            Element::Parameters(Parameters {
                open: "<parameter name=\"",
                named: "\">",
                value: "",
                padding: "",
                close: "</parameter>",
                after: "\n",
                gap: "",
            }),
            Text("</invoke>"),
        ],
        between: Some("\n"),
        after: "\n</minimax:tool_call>",
        next: None,
    }),
    markers: &["<minimax:tool_call>", "</minimax:tool_call>"],
    ids: Ids::Random,
};

/// `<tool_calls>{"name": .., "arguments": {..}}</tool_calls>`, one line per call: MiniMax-M1.
pub(in crate::http) static MINIMAX_M1: Format = Format {
    name: "minimax-m1",
    layout: Layout::Sections(Section {
        marker: "<tool_calls>",
        before: "\n",
        call: &[Object("arguments")],
        between: Some("\n"),
        after: "\n</tool_calls>",
        next: None,
    }),
    markers: &["<tool_calls>", "</tool_calls>"],
    ids: Ids::Random,
};

/// `[TOOL_CALLS] [{"name": .., "arguments": {..}}, ..]`: Mistral until 2024.
pub(in crate::http) static MISTRAL_LIST: Format = Format {
    name: "mistral-list",
    layout: Layout::Sections(Section {
        marker: "[TOOL_CALLS]",
        before: " [",
        call: &[Object("arguments")],
        between: Some(", "),
        after: "]",
        next: None,
    }),
    markers: &["[TOOL_CALLS]"],
    ids: Ids::Nine,
};

/// `[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{..}`: Mistral Small 3.2, Devstral.
pub(in crate::http) static MISTRAL_ID: Format = Format {
    name: "mistral-id",
    layout: Layout::Sections(Section {
        marker: "[TOOL_CALLS]",
        before: "",
        call: &[Name, Text("[CALL_ID]"), Id, Text("[ARGS]"), Arguments],
        between: None,
        after: "",
        next: Some(""),
    }),
    markers: &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
    ids: Ids::Nine,
};

/// `[TOOL_CALLS]NAME[ARGS]{..}`: Mistral from 2025 on.
pub(in crate::http) static MISTRAL_NAMED: Format = Format {
    name: "mistral-named",
    layout: Layout::Sections(Section {
        marker: "[TOOL_CALLS]",
        before: "",
        call: &[Name, Text("[ARGS]"), Arguments],
        between: None,
        after: "",
        next: Some(""),
    }),
    markers: &["[TOOL_CALLS]", "[ARGS]"],
    ids: Ids::Nine,
};

/// Returns DeepSeek's sections of one or more calls.
const fn deepseek(call: &'static [Element], between: &'static str) -> Layout {
    Layout::Sections(Section {
        marker: "<｜tool▁calls▁begin｜>",
        before: "",
        call,
        between: Some(between),
        after: "<｜tool▁calls▁end｜>",
        next: None,
    })
}

const DEEPSEEK_MARKERS: &[&str] = &[
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
];

/// Calls as name and JSON between DeepSeek's markers: DeepSeek-V3.1.
pub(in crate::http) static DEEPSEEK: Format = Format {
    name: "deepseek-v3.1",
    layout: deepseek(
        &[
            Text("<｜tool▁call▁begin｜>"),
            Name,
            Text("<｜tool▁sep｜>"),
            Arguments,
            Text("<｜tool▁call▁end｜>"),
        ],
        "",
    ),
    markers: DEEPSEEK_MARKERS,
    ids: Ids::Random,
};

/// Calls as name and JSON in a code block between DeepSeek's markers: DeepSeek-V3, DeepSeek-R1.
pub(in crate::http) static DEEPSEEK_FENCED: Format = Format {
    name: "deepseek-v3",
    layout: deepseek(
        &[
            Text("<｜tool▁call▁begin｜>"),
            Text("function"),
            Text("<｜tool▁sep｜>"),
            Name,
            Text("\n```json\n"),
            Arguments,
            Text("\n```"),
            Text("<｜tool▁call▁end｜>"),
        ],
        "\n",
    ),
    markers: DEEPSEEK_MARKERS,
    ids: Ids::Random,
};

/// `<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{..}<|tool_call_end|>` in a section: Kimi-K2.
pub(in crate::http) static KIMI: Format = Format {
    name: "kimi-k2",
    layout: Layout::Sections(Section {
        marker: "<|tool_calls_section_begin|>",
        before: "",
        call: &[
            Text("<|tool_call_begin|>"),
            Text("functions."),
            Name,
            Text(":"),
            Number,
            Text("<|tool_call_argument_begin|>"),
            Arguments,
            Text("<|tool_call_end|>"),
        ],
        between: Some(""),
        after: "<|tool_calls_section_end|>",
        next: None,
    }),
    markers: &[
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ],
    ids: Ids::Numbered,
};

/// `<|tool_call|>[{"name": .., "arguments": {..}}, ..]`: Granite 3.
pub(in crate::http) static GRANITE: Format = Format {
    name: "granite-3",
    layout: list("<|tool_call|>", "]"),
    markers: &["<|tool_call|>"],
    ids: Ids::Random,
};

/// `{"name": .., "parameters": {..}}` and nothing else, possibly after `<|python_tag|>`: Llama 3 and 4.
pub(in crate::http) static LLAMA: Format = Format {
    name: "llama",
    layout: Layout::Bare { marker: "<|python_tag|>", between: "; ", call: &[Object("parameters")] },
    markers: &["<|python_tag|>"],
    ids: Ids::Random,
};

/// `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{..}<|call|>`: gpt-oss.
pub(in crate::http) static HARMONY: Format = Format {
    name: "harmony",
    layout: Layout::Harmony,
    markers: &[
        "<|start|>",
        "<|channel|>",
        "<|constrain|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ],
    ids: Ids::Random,
};

/// All formats. If several can read a text, the first one does.
pub(super) static FORMATS: [&Format; 17] = [
    &HARMONY,
    &MISTRAL_ID,
    &MISTRAL_NAMED,
    &MISTRAL_LIST,
    &DEEPSEEK_FENCED,
    &DEEPSEEK,
    &KIMI,
    &MINIMAX,
    &GRANITE,
    &NEMOTRON,
    &APRIEL,
    &MINIMAX_M1,
    &SEED,
    &QWEN_CODER,
    &GLM,
    &HERMES,
    &LLAMA,
];

impl Format {
    /// Reports if answers consist of messages in channels.
    pub(in crate::http) fn is_harmony(&self) -> bool {
        self.layout == Layout::Harmony
    }

    /// Returns the text that begins calls.
    pub(super) fn marker(&self) -> &'static str {
        match &self.layout {
            Layout::Sections(section) => section.marker,
            Layout::Bare { marker, .. } => marker,
            Layout::Harmony => "<|channel|>",
        }
    }

    /// Returns the texts that every call contains, without whitespace.
    pub(super) fn texts(&self) -> Vec<&'static str> {
        let (own, call): (Vec<&'static str>, &'static [Element]) = match &self.layout {
            Layout::Sections(section) => (vec![section.marker, section.before, section.after], section.call),
            Layout::Bare { call, .. } => (Vec::new(), call),
            Layout::Harmony => (vec!["<|channel|>", "<|message|>", "functions."], &[]),
        };
        let within = call.iter().flat_map(|element| match element {
            Text(text) => vec![*text],
            Element::Parameters(it) => vec![it.open, it.named, it.value, it.close],
            _ => Vec::new(),
        });
        own.into_iter().chain(within).map(str::trim).filter(|text| !text.is_empty()).collect()
    }
}
