//! Thoughts (reasoning): text that a model writes for itself before its answer.

/// Markers of a model family's thoughts.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::http) struct Thoughts {
    pub(in crate::http) open: &'static str,
    pub(in crate::http) close: &'static str,
    /// Markers of the answer behind thoughts, in families that have them.
    answer: Option<(&'static str, &'static str)>,
}

/// DeepSeek, Qwen, GLM, MiniMax, Kimi, Nemotron.
pub(in crate::http) static THINK: Thoughts = Thoughts { open: "<think>", close: "</think>", answer: None };

/// Granite 3.3.
static GRANITE: Thoughts =
    Thoughts { open: "<think>", close: "</think>", answer: Some(("<response>", "</response>")) };

/// Granite 3.2.
static GRANITE_WORDS: Thoughts =
    Thoughts { open: "Here is my thought process:", close: "Here is my response:", answer: None };

static MISTRAL: Thoughts = Thoughts { open: "[THINK]", close: "[/THINK]", answer: None };
static SEED: Thoughts = Thoughts { open: "<seed:think>", close: "</seed:think>", answer: None };
static KIMI_VL: Thoughts = Thoughts { open: "◁think▷", close: "◁/think▷", answer: None };
static COHERE: Thoughts = Thoughts { open: "<|START_THINKING|>", close: "<|END_THINKING|>", answer: None };

static MINIMAX_M3: Thoughts = Thoughts { open: "<mm:think>", close: "</mm:think>", answer: None };

static FAMILIES: [&Thoughts; 7] = [&MISTRAL, &SEED, &MINIMAX_M3, &KIMI_VL, &COHERE, &GRANITE_WORDS, &THINK];

/// Possible beginning of a thought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::http) enum Opening {
    /// The prompt has opened a thought.
    Open,
    /// The model may open a thought.
    Possible,
    /// The request or the end of the prompt excludes thoughts.
    Closed,
}

/// Markers of a model's thoughts and the possible beginning of an answer's thought; `None` without thoughts.
pub(in crate::http) type Thinking = Option<(&'static Thoughts, Opening)>;

impl Thoughts {
    /// Finds the thoughts of a model by its chat `template`. `has_token`: the tokenizer has the token `<think>`.
    pub(in crate::http) fn of(template: &str, has_token: bool) -> Option<&'static Self> {
        if template.contains("<response></response>") && template.contains("<think>") {
            return Some(&GRANITE);
        }
        let known = |family: &&&Thoughts| template.contains(family.close) || template.contains(family.open);
        let named = FAMILIES.iter().find(known);
        named.copied().or_else(|| has_token.then_some(&THINK))
    }

    /// Returns the markers, which may be special tokens of the tokenizer.
    pub(in crate::http) fn markers(&self) -> [&'static str; 2] {
        [self.open, self.close]
    }

    /// Returns the possible beginning of a thought in an answer to `prompt`.
    pub(in crate::http) fn opening(&self, prompt: &str) -> Opening {
        let end = prompt.trim_end();
        if end.ends_with(self.open) {
            Opening::Open
        } else if end.ends_with(self.close) {
            Opening::Closed
        } else {
            Opening::Possible
        }
    }
}

/// Position of the reader in an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ThinkTagState {
    /// Before it is decided if there are thoughts.
    Beginning,
    /// At the beginning of a thought.
    Opened,
    Thought,
    /// At the beginning of the answer behind a thought.
    Closed,
    Answer,
    /// In an answer with an end marker.
    Marked,
}

/// Separates thoughts from the rest of an answer.
#[derive(Debug)]
pub(super) struct ThoughtReader {
    thoughts: &'static Thoughts,
    state: ThinkTagState,
    /// Text whose meaning is not decided yet.
    held: String,
}

impl ThoughtReader {
    pub(super) fn new(thoughts: &'static Thoughts, opening: Opening) -> Self {
        let state = match opening {
            Opening::Open => ThinkTagState::Opened,
            Opening::Possible => ThinkTagState::Beginning,
            Opening::Closed if thoughts.answer.is_none() => ThinkTagState::Answer,
            Opening::Closed => ThinkTagState::Closed,
        };
        Self { thoughts, state, held: String::new() }
    }

    /// Reports if it is still open whether the answer has a thought.
    pub(super) fn is_undecided(&self) -> bool {
        self.state == ThinkTagState::Beginning
    }

    /// Reports if the last text ended within a thought.
    pub(super) fn is_thinking(&self) -> bool {
        matches!(self.state, ThinkTagState::Opened | ThinkTagState::Thought)
    }

    /// Adds text of an answer. Appends thoughts to `reasoning`, and returns the rest.
    pub(super) fn push(&mut self, text: &str, reasoning: &mut String) -> String {
        if self.state == ThinkTagState::Answer {
            return text.to_owned();
        }
        self.held.push_str(text);
        let mut answer = String::new();
        while self.step(reasoning, &mut answer) {}
        answer
    }

    /// Returns the rest of the answer when no text follows. If the answer was cut off, leaves out undecided text.
    pub(super) fn finish(&mut self, is_cut: bool, reasoning: &mut String) -> String {
        let held = std::mem::take(&mut self.held);
        match self.state {
            ThinkTagState::Beginning | ThinkTagState::Closed | ThinkTagState::Marked if is_cut => {
                String::new()
            }
            ThinkTagState::Thought | ThinkTagState::Opened if is_cut => String::new(),
            ThinkTagState::Thought | ThinkTagState::Opened => {
                reasoning.push_str(held.trim_end());
                String::new()
            }
            ThinkTagState::Beginning
            | ThinkTagState::Closed
            | ThinkTagState::Marked
            | ThinkTagState::Answer => held,
        }
    }

    /// Takes one step; returns false if more text is needed.
    fn step(&mut self, reasoning: &mut String, answer: &mut String) -> bool {
        let Thoughts { open, close, answer: marks } = *self.thoughts;
        let begun = self.held.trim_start();
        match self.state {
            ThinkTagState::Beginning if begun.starts_with(open) => {
                self.held = begun[open.len()..].to_owned();
                self.state = ThinkTagState::Opened;
            }
            ThinkTagState::Beginning if open.starts_with(begun) => return false,
            ThinkTagState::Beginning => self.state = ThinkTagState::Answer,
            ThinkTagState::Opened => {
                // A model may repeat the marker that the prompt has written.
                if let Some(rest) = begun.strip_prefix(open) {
                    self.held = rest.to_owned();
                } else if open.starts_with(begun) {
                    return false;
                } else {
                    self.held = begun.to_owned();
                    self.state = ThinkTagState::Thought;
                }
            }
            ThinkTagState::Thought => match self.held.find(close) {
                Some(at) => {
                    reasoning.push_str(self.held[..at].trim_end());
                    self.held.drain(..at + close.len());
                    self.state = ThinkTagState::Closed;
                }
                None => {
                    let keep = decided(&self.held, close);
                    reasoning.push_str(&self.held[..keep]);
                    self.held.drain(..keep);
                    return false;
                }
            },
            ThinkTagState::Closed => {
                let opened = marks.map(|(opened, _)| opened);
                match opened {
                    _ if begun.is_empty() => return false,
                    Some(opened) if begun.starts_with(opened) => {
                        self.held = begun[opened.len()..].trim_start().to_owned();
                        self.state = ThinkTagState::Marked;
                    }
                    Some(opened) if opened.starts_with(begun) => return false,
                    _ => {
                        self.held = begun.to_owned();
                        self.state = ThinkTagState::Answer;
                    }
                }
            }
            ThinkTagState::Marked => {
                let end = marks.map_or("", |(_, end)| end);
                match self.held.find(end) {
                    Some(at) => {
                        answer.push_str(&self.held[..at]);
                        self.held.drain(..at + end.len());
                        self.state = ThinkTagState::Answer;
                    }
                    None => {
                        let keep = decided(&self.held, end);
                        answer.push_str(&self.held[..keep]);
                        self.held.drain(..keep);
                        return false;
                    }
                }
            }
            ThinkTagState::Answer => {
                answer.push_str(&std::mem::take(&mut self.held));
                return false;
            }
        }
        true
    }
}

/// Longest white space that is held back until more text follows; in bytes.
const MAX_HELD_BLANK: usize = 256;

/// Returns the length of the beginning of `text` that is neither part of a possible `marker` nor white space before it.
pub(super) fn decided(text: &str, marker: &str) -> usize {
    let begins = |at: &usize| marker.starts_with(&text[*at..]);
    let keep = text.char_indices().map(|(at, _)| at).find(begins).unwrap_or(text.len());
    let blank = text[..keep].trim_end().len();
    // If a model repeats white space without end, it counts as text.
    if keep - blank > MAX_HELD_BLANK { keep } else { blank }
}
