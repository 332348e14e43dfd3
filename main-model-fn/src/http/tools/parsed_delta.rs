//! Additions to an answer, separated into content, thoughts and calls.

use super::format::Ids;
use remoe_http::random_id;

/// Addition to one choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub(in crate::http) struct ParsedDelta {
    pub(in crate::http) content: String,
    /// Thoughts (reasoning).
    pub(in crate::http) reasoning: String,
    pub(in crate::http) calls: Vec<CallDelta>,
}

/// Addition to one call.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::http) struct CallDelta {
    /// Index of the call in the choice.
    pub(in crate::http) index: usize,
    /// Id and function name, in the first addition of a call.
    pub(in crate::http) start: Option<(String, String)>,
    /// Further arguments, as JSON text.
    pub(in crate::http) arguments: String,
}

/// Numbers the calls of a choice, and writes to the last one.
#[derive(Debug)]
pub(super) struct CallWriter {
    ids: Ids,
    /// Number of calls that have begun.
    pub(super) begun: usize,
}

impl CallWriter {
    pub(super) fn new(ids: Ids) -> Self {
        Self { ids, begun: 0 }
    }

    /// Begins a call of `name`. `id` and `number` are those that the model wrote.
    pub(super) fn begin(
        &mut self,
        name: String,
        id: Option<String>,
        number: Option<String>,
        parsed: &mut ParsedDelta,
    ) {
        let random = random_id();
        let id = id.unwrap_or_else(|| match self.ids {
            Ids::Random => format!("call_{random}"),
            Ids::Nine => random.chars().take(9).collect(),
            Ids::Numbered => format!("functions.{name}:{}", number.unwrap_or_else(|| self.begun.to_string())),
        });
        parsed.calls.push(CallDelta { index: self.begun, start: Some((id, name)), arguments: String::new() });
        self.begun += 1;
    }

    /// Appends to the arguments of the last call.
    pub(super) fn append_arguments(&self, arguments: &str, parsed: &mut ParsedDelta) {
        let index = self.begun.saturating_sub(1);
        match parsed.calls.last_mut().filter(|call| call.index == index) {
            Some(call) => call.arguments.push_str(arguments),
            None if arguments.is_empty() => (),
            None => parsed.calls.push(CallDelta { index, start: None, arguments: arguments.to_owned() }),
        }
    }
}
