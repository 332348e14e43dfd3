//! Reads the messages of gpt-oss: thoughts, calls and content by their channels.
//!
//! Format: OpenAI's harmony response format.

use super::arguments::Balance;
use super::callable_tools::{CallableTools, Mode};
use super::format::HARMONY;
use super::parsed_delta::{CallWriter, ParsedDelta};
use super::reader::Step;

/// Markers that end a message.
const ENDS: [&str; 5] = ["<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"];
/// Longest head of a message in bytes.
const MAX_HEAD_BYTES: usize = 4096;

/// Position of the reader in an answer.
#[derive(Debug, Clone, PartialEq)]
enum HarmonyState {
    /// At the beginning, before it is known if the answer has messages.
    Beginning,
    /// In the head of a message.
    Channel,
    /// In the body of a message.
    Body(MessageChannel),
    /// In the arguments of a call.
    Arguments(Balance),
}

/// Destination of a message's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MessageChannel {
    Content,
    Reasoning,
    /// Discarded: text behind the arguments of a call.
    Dropped,
}

/// Reader of one choice.
#[derive(Debug)]
pub(super) struct HarmonyReader {
    tools: CallableTools,
    state: HarmonyState,
    /// Text whose meaning is not decided yet.
    held: String,
    calls: CallWriter,
    /// True if content has begun: further content messages begin on a new line.
    has_content: bool,
    /// True if thoughts have begun: further thoughts begin on a new line.
    has_reasoning: bool,
}

impl HarmonyReader {
    pub(super) fn new(tools: CallableTools) -> Self {
        Self {
            tools,
            state: HarmonyState::Beginning,
            held: String::new(),
            calls: CallWriter::new(HARMONY.ids),
            has_content: false,
            has_reasoning: false,
        }
    }

    /// Reports if the choice has called a tool and its last call is complete.
    pub(super) fn has_called(&self) -> bool {
        self.calls.begun > 0 && !matches!(self.state, HarmonyState::Arguments(_))
    }

    /// Reports if the last text was a thought.
    pub(super) fn is_thinking(&self) -> bool {
        self.state == HarmonyState::Body(MessageChannel::Reasoning)
    }

    /// Adds text of the answer.
    pub(super) fn push(&mut self, text: &str, parsed: &mut ParsedDelta) {
        self.held.push_str(text);
        while let Step::Again = self.step(parsed) {}
    }

    /// Adds the rest of the answer when no text follows. If the answer was cut off, leaves out a possible head.
    pub(super) fn finish(&mut self, is_cut: bool, parsed: &mut ParsedDelta) {
        let held = std::mem::take(&mut self.held);
        let is_cut = is_cut || self.tools.mode == Mode::Required;
        let has_begun = self.has_content || self.has_reasoning || self.calls.begun > 0;
        match self.state {
            HarmonyState::Beginning | HarmonyState::Body(_) if is_cut => (),
            HarmonyState::Beginning | HarmonyState::Body(MessageChannel::Content) => {
                parsed.content.push_str(&held)
            }
            HarmonyState::Body(MessageChannel::Reasoning) => parsed.reasoning.push_str(&held),
            HarmonyState::Arguments(_) if !is_cut => self.calls.append_arguments(&held, parsed),
            // A head without a message is content.
            HarmonyState::Channel if !is_cut && !has_begun => parsed.content.push_str(&held),
            _ => (),
        }
    }

    fn step(&mut self, parsed: &mut ParsedDelta) -> Step {
        match &mut self.state {
            HarmonyState::Beginning => self.beginning(),
            HarmonyState::Channel => self.channel(parsed),
            HarmonyState::Body(channel) => {
                let channel = *channel;
                self.body(channel, parsed)
            }
            HarmonyState::Arguments(balance) => {
                // Text that is no JSON ends with its message.
                let (end, is_end) = match ENDS.iter().filter_map(|end| self.held.find(end)).min() {
                    Some(at) => (at, true),
                    None => (undecided(&self.held), false),
                };
                let (length, is_complete) = balance.take(&self.held[..end]);
                let is_over = is_complete || is_end && !balance.is_in_text();
                // A marker within a string is part of it.
                let length = if is_end && !is_over {
                    let marker = ENDS.iter().find(|end| self.held[length..].starts_with(**end));
                    length + balance.take(marker.unwrap_or(&"")).0
                } else {
                    length
                };
                let more = self.take(length);
                self.calls.append_arguments(&more, parsed);
                if is_over {
                    self.state = HarmonyState::Body(MessageChannel::Dropped);
                    return Step::Again;
                }
                if is_end { Step::Again } else { Step::Wait }
            }
        }
    }

    /// Decides if the answer has messages; an answer without a head is content.
    fn beginning(&mut self) -> Step {
        // The prompt ends with a role, behind which a recipient may follow.
        const HEADS: [&str; 2] = ["<|", " to="];
        self.state =
            match HEADS.iter().find(|head| head.starts_with(&self.held) || self.held.starts_with(**head)) {
                Some(head) if self.held.len() < head.len() => return Step::Wait,
                Some(_) => HarmonyState::Channel,
                None => {
                    self.has_content = true;
                    HarmonyState::Body(MessageChannel::Content)
                }
            };
        Step::Again
    }

    /// Reads a head: `<|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>`, or the recipient
    /// before the channel.
    fn channel(&mut self, parsed: &mut ParsedDelta) -> Step {
        const MESSAGE: &str = "<|message|>";
        const FUNCTIONS: &str = "functions.";
        let Some(at) = self.held.find(MESSAGE) else {
            if self.held.len() > MAX_HEAD_BYTES {
                // No model writes such a head: the text is content.
                self.has_content = true;
                self.state = HarmonyState::Body(MessageChannel::Content);
                return Step::Again;
            }
            return Step::Wait;
        };
        let head = self.take(at);
        self.take(MESSAGE.len());
        let recipient = head.split("to=").nth(1).map(|rest| {
            let end = rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len());
            rest[..end].to_owned()
        });
        let function = recipient.as_deref().and_then(|recipient| recipient.strip_prefix(FUNCTIONS));
        self.state = match function.filter(|name| !name.is_empty() && !self.tools.is_empty()) {
            Some(name) => {
                self.calls.begin(name.to_owned(), None, None, parsed);
                HarmonyState::Arguments(Balance::default())
            }
            // A call of an unknown function is not for the client; it counts as a thought.
            None if recipient.is_some() || head.contains("analysis") => {
                let is_further = std::mem::replace(&mut self.has_reasoning, true);
                parsed.reasoning.push_str(if is_further { "\n" } else { "" });
                HarmonyState::Body(MessageChannel::Reasoning)
            }
            None => {
                let is_further = std::mem::replace(&mut self.has_content, true);
                parsed.content.push_str(if is_further { "\n" } else { "" });
                HarmonyState::Body(MessageChannel::Content)
            }
        };
        Step::Again
    }

    /// Reads a body up to the marker that ends it.
    fn body(&mut self, channel: MessageChannel, parsed: &mut ParsedDelta) -> Step {
        let found = ENDS.iter().filter_map(|end| Some((self.held.find(end)?, end.len()))).min();
        let text = self.take(found.map_or_else(|| undecided(&self.held), |(at, _)| at));
        match channel {
            MessageChannel::Content => parsed.content.push_str(&text),
            MessageChannel::Reasoning => parsed.reasoning.push_str(&text),
            MessageChannel::Dropped => (),
        }
        match found {
            Some((_, length)) => {
                self.take(length);
                self.state = HarmonyState::Channel;
                Step::Again
            }
            None => Step::Wait,
        }
    }

    fn take(&mut self, length: usize) -> String {
        let rest = self.held.split_off(length);
        std::mem::replace(&mut self.held, rest)
    }
}

/// Returns the offset in `text` of a possible beginning of an end marker.
fn undecided(text: &str) -> usize {
    let begins = |at: &usize| ENDS.iter().any(|end| end.starts_with(&text[*at..]));
    text.char_indices().map(|(at, _)| at).find(begins).unwrap_or(text.len())
}
