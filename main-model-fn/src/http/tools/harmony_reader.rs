//! Reads the messages of gpt-oss: thoughts, calls and content by their channels.
//!
//! Source: OpenAI's harmony response format.

use super::arguments::Balance;
use super::callable_tools::{CallableTools, Mode};
use super::format::HARMONY;
use super::parsed_delta::{CallWriter, ParsedDelta};
use super::reader::Step;

/// Texts that end a message.
const ENDS: [&str; 5] = ["<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"];
/// Longest head of a message in bytes.
const HEAD: usize = 4096;

/// Where in an answer the reader is.
#[derive(Debug, Clone, PartialEq)]
enum HarmonyState {
    /// Before it is known whether the answer has messages.
    Beginning,
    /// In a message's head.
    Channel,
    /// In a message.
    Body(MessageChannel),
    /// In the arguments of a call.
    Arguments(Balance),
}

/// Recipient of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MessageChannel {
    Content,
    Reasoning,
    /// Text behind the arguments of a call.
    Dropped,
}

/// Reads one choice.
#[derive(Debug)]
pub(super) struct HarmonyReader {
    asked: CallableTools,
    state: HarmonyState,
    /// Text that is not decided yet.
    held: String,
    calls: CallWriter,
    /// Messages of either voice have begun: further ones begin on a new line.
    has_content: bool,
    has_reasoning: bool,
}

impl HarmonyReader {
    pub(super) fn new(asked: CallableTools) -> Self {
        Self {
            asked,
            state: HarmonyState::Beginning,
            held: String::new(),
            calls: CallWriter::new(HARMONY.ids),
            has_content: false,
            has_reasoning: false,
        }
    }

    /// Returns true if the choice has called, and its last call is complete.
    pub(super) fn has_called(&self) -> bool {
        self.calls.begun > 0 && !matches!(self.state, HarmonyState::Arguments(_))
    }

    /// Returns true if the last text was a thought.
    pub(super) fn is_thinking(&self) -> bool {
        self.state == HarmonyState::Body(MessageChannel::Reasoning)
    }

    pub(super) fn push(&mut self, text: &str, said: &mut ParsedDelta) {
        self.held.push_str(text);
        while let Step::Again = self.step(said) {}
    }

    /// The rest, once no text follows. Where the answer was cut off, what may be the beginning of a head is left out.
    pub(super) fn finish(&mut self, is_cut: bool, said: &mut ParsedDelta) {
        let held = std::mem::take(&mut self.held);
        let is_cut = is_cut || self.asked.mode == Mode::Required;
        let has_begun = self.has_content || self.has_reasoning || self.calls.begun > 0;
        match self.state {
            HarmonyState::Beginning | HarmonyState::Body(_) if is_cut => (),
            HarmonyState::Beginning | HarmonyState::Body(MessageChannel::Content) => {
                said.content.push_str(&held)
            }
            HarmonyState::Body(MessageChannel::Reasoning) => said.reasoning.push_str(&held),
            HarmonyState::Arguments(_) if !is_cut => self.calls.argue(&held, said),
            // A head without a message is none.
            HarmonyState::Channel if !is_cut && !has_begun => said.content.push_str(&held),
            _ => (),
        }
    }

    fn step(&mut self, said: &mut ParsedDelta) -> Step {
        match &mut self.state {
            HarmonyState::Beginning => self.beginning(),
            HarmonyState::Channel => self.channel(said),
            HarmonyState::Body(voice) => {
                let voice = *voice;
                self.body(voice, said)
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
                self.calls.argue(&more, said);
                if is_over {
                    self.state = HarmonyState::Body(MessageChannel::Dropped);
                    return Step::Again;
                }
                if is_end { Step::Again } else { Step::Wait }
            }
        }
    }

    /// An answer without any head is content.
    fn beginning(&mut self) -> Step {
        // The prompt ends where a role may be followed by a recipient.
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

    /// `<|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>`, or the recipient
    /// before the channel.
    fn channel(&mut self, said: &mut ParsedDelta) -> Step {
        const MESSAGE: &str = "<|message|>";
        const FUNCTIONS: &str = "functions.";
        let Some(at) = self.held.find(MESSAGE) else {
            if self.held.len() > HEAD {
                // No model writes such a head: it is text.
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
        self.state = match function.filter(|name| !name.is_empty() && !self.asked.is_empty()) {
            Some(name) => {
                self.calls.begin(name.to_owned(), None, None, said);
                HarmonyState::Arguments(Balance::default())
            }
            // A call of a function that the request does not have is not for the client either.
            None if recipient.is_some() || head.contains("analysis") => {
                let is_further = std::mem::replace(&mut self.has_reasoning, true);
                said.reasoning.push_str(if is_further { "\n" } else { "" });
                HarmonyState::Body(MessageChannel::Reasoning)
            }
            None => {
                let is_further = std::mem::replace(&mut self.has_content, true);
                said.content.push_str(if is_further { "\n" } else { "" });
                HarmonyState::Body(MessageChannel::Content)
            }
        };
        Step::Again
    }

    /// A message up to the marker that ends it.
    fn body(&mut self, voice: MessageChannel, said: &mut ParsedDelta) -> Step {
        let found = ENDS.iter().filter_map(|end| Some((self.held.find(end)?, end.len()))).min();
        let text = self.take(found.map_or_else(|| undecided(&self.held), |(at, _)| at));
        match voice {
            MessageChannel::Content => said.content.push_str(&text),
            MessageChannel::Reasoning => said.reasoning.push_str(&text),
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

/// Where in `text` what may end a message begins.
fn undecided(text: &str) -> usize {
    let begins = |at: &usize| ENDS.iter().any(|end| end.starts_with(&text[*at..]));
    text.char_indices().map(|(at, _)| at).find(begins).unwrap_or(text.len())
}
