//! What the text of an answer says, as it comes: content, reasoning and calls.

use super::arguments::{Balance, Head, whole};
use super::asked::{Asked, Mode};
use super::format::Format;
use remoe_http::random_id;

/// What is new of a choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub(in crate::http) struct Said {
    pub(in crate::http) content: String,
    /// What the model says to itself, where its format tells that apart.
    pub(in crate::http) reasoning: String,
    pub(in crate::http) calls: Vec<CallDelta>,
}

/// An addition to one call.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::http) struct CallDelta {
    /// Which call of the choice.
    pub(in crate::http) index: usize,
    /// At the beginning of a call: its id and the function's name.
    pub(in crate::http) start: Option<(String, String)>,
    /// More of its arguments, as text.
    pub(in crate::http) arguments: String,
}

/// Where in an answer the reader is.
#[derive(Debug, Clone, PartialEq)]
enum State {
    /// Text, in which a call may begin.
    Text,
    /// Text to the end.
    Plain,
    /// Between the calls of a list.
    List,
    /// In a name that ends with a marker.
    Name,
    /// A call has begun, its function is not known yet.
    Head,
    /// The same, in an order of its own: its end is looked for.
    Whole(Balance),
    /// In the arguments of a call.
    Arguments(Balance),
    /// Behind the arguments, before the end of the call's object.
    Tail,
    /// Behind a call.
    After,
    /// At the beginning of an answer of gpt-oss, before it is known whether it has messages.
    Beginning,
    /// In a message's head, of gpt-oss.
    Channel,
    /// In a message of gpt-oss.
    Body(Voice),
}

/// Whom a message of gpt-oss is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Voice {
    Content,
    Reasoning,
    /// What follows the arguments of a call.
    Nobody,
}

/// Reads one choice.
pub(in crate::http) struct Reader {
    format: Format,
    asked: Asked,
    state: State,
    /// What is not decided yet.
    held: String,
    /// What opened the call that has begun, to be given back if it is none.
    opened: String,
    /// Calls that have begun.
    calls: usize,
    /// Messages of gpt-oss that have begun, for either voice: further ones begin on a new line.
    has_content: bool,
    has_reasoning: bool,
}

/// What a step of the reader comes to.
enum Step {
    /// There may be more to do.
    Again,
    /// More text is needed.
    Wait,
}

impl Reader {
    pub(in crate::http) fn new(format: Format, asked: Asked) -> Self {
        let state = if format == Format::Harmony { State::Beginning } else { State::Text };
        Self {
            format,
            asked,
            state,
            held: String::new(),
            opened: String::new(),
            calls: 0,
            has_content: false,
            has_reasoning: false,
        }
    }

    /// Whether the choice has called, and its last call is complete.
    pub(in crate::http) fn has_called(&self) -> bool {
        self.calls > 0 && !matches!(self.state, State::Arguments(_))
    }

    /// Takes more of the answer.
    pub(in crate::http) fn push(&mut self, text: &str) -> Said {
        self.held.push_str(text);
        let mut read = Said::default();
        while let Step::Again = self.step(&mut read) {}
        read
    }

    /// The rest of what it says, once no text follows. Where the answer was cut off, what may be the beginning of a
    /// call is left out: what is said is a beginning of what would have been said.
    pub(in crate::http) fn finish(&mut self, is_cut: bool) -> Said {
        let held = std::mem::take(&mut self.held);
        let is_cut = is_cut || self.asked.mode == Mode::Required;
        let mut read = Said::default();
        match &self.state {
            State::Text | State::Beginning | State::Body(_) if is_cut => (),
            State::Text if self.calls > 0 && held.trim().is_empty() => (),
            State::Text | State::Plain | State::Beginning | State::Body(Voice::Content) => {
                read.content = held
            }
            State::Body(Voice::Reasoning) => read.reasoning = held,
            // A head without a message is none.
            State::Channel if !is_cut && !self.has_begun() => read.content = held,
            // Behind a marker it is a call; an object without one may be anything.
            State::Head | State::Whole(_) | State::Name if is_cut && self.is_marked() => (),
            State::Head | State::Whole(_) | State::Name => {
                read.content = std::mem::take(&mut self.opened) + &held;
            }
            _ => (),
        }
        read
    }

    /// Whether a message or a call of gpt-oss has begun.
    fn has_begun(&self) -> bool {
        self.has_content || self.has_reasoning || self.calls > 0
    }

    /// Whether what has begun is a call whatever follows.
    fn is_marked(&self) -> bool {
        // What follows a call in a list is another one.
        self.asked.mode == Mode::Required || self.calls > 0 || self.opened.contains(self.format.opening())
    }

    fn step(&mut self, read: &mut Said) -> Step {
        match &mut self.state {
            State::Text if self.format == Format::Llama => self.llama_text(),
            State::Text => self.text(read),
            State::Plain => {
                read.content.push_str(&std::mem::take(&mut self.held));
                Step::Wait
            }
            State::List => self.list(),
            State::Name => self.name(read),
            State::Head => self.head(read),
            State::Whole(balance) => {
                // What was looked at before is looked at again: a call is short.
                *balance = Balance::default();
                let (length, complete) = balance.take(&self.held);
                if !complete {
                    return Step::Wait;
                }
                let object = self.take(length);
                match whole(&object).filter(|(name, _)| self.may_call(name)) {
                    Some((name, arguments)) => {
                        self.begin(name, read);
                        self.argue(arguments, read);
                        self.state = State::After;
                    }
                    None => {
                        read.content.push_str(&std::mem::take(&mut self.opened));
                        read.content.push_str(&object);
                        self.state = if self.format == Format::Hermes { State::Text } else { State::Plain };
                    }
                }
                Step::Again
            }
            State::Arguments(balance) => {
                let (length, complete) = balance.take(&self.held);
                let more = self.take(length);
                self.argue(more, read);
                if !complete {
                    return Step::Wait;
                }
                self.state = match self.format {
                    Format::Hermes | Format::MistralList | Format::Llama => State::Tail,
                    Format::MistralNamed => State::Text,
                    Format::Harmony => State::Body(Voice::Nobody),
                };
                Step::Again
            }
            State::Tail => match self.held.find('}') {
                Some(at) => {
                    self.take(at + 1);
                    self.state = State::After;
                    Step::Again
                }
                None => self.drop_held(),
            },
            State::After => self.after(),
            State::Beginning => self.beginning(),
            State::Channel => self.channel(read),
            State::Body(voice) => {
                let voice = *voice;
                self.body(voice, read)
            }
        }
    }

    /// Text up to the marker that opens a call.
    fn text(&mut self, read: &mut Said) -> Step {
        let open = self.format.opening();
        if let Some(at) = self.held.find(open) {
            let text = self.take(at);
            // White space between text and calls belongs to neither.
            read.content.push_str(text.trim_end());
            self.opened = self.take(open.len());
            self.state = match self.format {
                Format::MistralList => State::List,
                Format::MistralNamed => State::Name,
                _ => State::Head,
            };
            return Step::Again;
        }
        // What may begin a marker waits, and so does the white space before it.
        let begins = |at: &usize| open.starts_with(&self.held[*at..]);
        let keep = self.held.char_indices().map(|(at, _)| at).find(begins).unwrap_or(self.held.len());
        let keep = self.held[..keep].trim_end().len();
        let text = self.take(keep);
        read.content.push_str(&text);
        Step::Wait
    }

    /// Llama's calls begin the answer.
    fn llama_text(&mut self) -> Step {
        let begun = self.held.trim_start();
        let call = begun.strip_prefix(self.format.opening()).unwrap_or(begun).trim_start();
        if call.starts_with('{') {
            let call = self.held.len() - call.len();
            self.opened = self.take(call);
            self.state = State::Head;
        } else if call.is_empty() || self.format.opening().starts_with(call) {
            return Step::Wait;
        } else {
            self.state = State::Plain;
        }
        Step::Again
    }

    fn list(&mut self) -> Step {
        self.held =
            self.held.trim_start_matches(|c: char| c.is_whitespace() || c == '[' || c == ',').to_owned();
        match self.held.bytes().next() {
            None => return Step::Wait,
            Some(b'{') => self.state = State::Head,
            Some(b']') => {
                self.take(1);
                self.state = State::Text;
            }
            Some(_) => self.state = State::Plain,
        }
        Step::Again
    }

    /// `name[ARGS]{..}`, an id perhaps between.
    fn name(&mut self, read: &mut Said) -> Step {
        let Some(at) = self.held.find('{') else { return Step::Wait };
        let head = self.take(at);
        let name = head.split('[').next().unwrap_or_default().trim();
        self.begin(name.to_owned(), read);
        self.state = State::Arguments(Balance::default());
        Step::Again
    }

    fn head(&mut self, read: &mut Said) -> Step {
        let blank = self.held.len() - self.held.trim_start().len();
        self.take(blank);
        match Head::of(&self.held) {
            Head::Partial => return Step::Wait,
            Head::Found(name, at) if self.may_call(&name) => {
                self.take(at);
                self.begin(name, read);
                self.state = State::Arguments(Balance::default());
            }
            Head::Found(..) | Head::Other if self.held.starts_with('{') => {
                self.state = State::Whole(Balance::default());
            }
            Head::Found(..) | Head::Other => {
                read.content.push_str(&std::mem::take(&mut self.opened));
                self.state = if self.format == Format::Hermes { State::Text } else { State::Plain };
            }
        }
        Step::Again
    }

    fn after(&mut self) -> Step {
        self.held = self.held.trim_start().to_owned();
        match self.format {
            Format::Hermes => {
                const CLOSE: &str = "</tool_call>";
                if let Some(rest) = self.held.strip_prefix(CLOSE) {
                    self.held = rest.to_owned();
                } else if CLOSE.starts_with(&self.held) {
                    return Step::Wait;
                }
                self.state = State::Text;
            }
            Format::MistralList => self.state = State::List,
            _ => match self.held.strip_prefix(';') {
                Some(rest) => {
                    self.held = rest.to_owned();
                    self.state = State::Head;
                }
                None if self.held.is_empty() => return Step::Wait,
                None => self.state = State::Plain,
            },
        }
        Step::Again
    }

    /// An answer without any head is content.
    fn beginning(&mut self) -> Step {
        // The prompt ends where a role may be followed by a recipient.
        const HEADS: [&str; 2] = ["<|", " to="];
        self.state =
            match HEADS.iter().find(|head| head.starts_with(&self.held) || self.held.starts_with(**head)) {
                Some(head) if self.held.len() < head.len() => return Step::Wait,
                Some(_) => State::Channel,
                None => {
                    self.has_content = true;
                    State::Body(Voice::Content)
                }
            };
        Step::Again
    }

    /// `<|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>`, or the recipient
    /// before the channel.
    fn channel(&mut self, read: &mut Said) -> Step {
        const MESSAGE: &str = "<|message|>";
        const FUNCTIONS: &str = "functions.";
        let Some(at) = self.held.find(MESSAGE) else { return Step::Wait };
        let head = self.take(at);
        self.take(MESSAGE.len());
        let recipient = head.split("to=").nth(1).map(|rest| {
            let end = rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len());
            rest[..end].to_owned()
        });
        let function = recipient.as_deref().and_then(|recipient| recipient.strip_prefix(FUNCTIONS));
        self.state = match function.filter(|_| !self.asked.functions.is_empty()) {
            Some(name) => {
                self.begin(name.to_owned(), read);
                State::Arguments(Balance::default())
            }
            // A call of what nobody offered is not for the client either.
            None if recipient.is_some() || head.contains("analysis") => {
                let is_further = std::mem::replace(&mut self.has_reasoning, true);
                read.reasoning.push_str(if is_further { "\n" } else { "" });
                State::Body(Voice::Reasoning)
            }
            None => {
                let is_further = std::mem::replace(&mut self.has_content, true);
                read.content.push_str(if is_further { "\n" } else { "" });
                State::Body(Voice::Content)
            }
        };
        Step::Again
    }

    /// A message up to the marker that ends it.
    fn body(&mut self, voice: Voice, read: &mut Said) -> Step {
        const ENDS: [&str; 5] = ["<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"];
        let found = ENDS.iter().filter_map(|end| Some((self.held.find(end)?, end.len()))).min();
        let keep = |text: &str| {
            let begins = |at: &usize| ENDS.iter().any(|end| end.starts_with(&text[*at..]));
            text.char_indices().map(|(at, _)| at).find(begins).unwrap_or(text.len())
        };
        let text = self.take(found.map_or_else(|| keep(&self.held), |(at, _)| at));
        match voice {
            Voice::Content => read.content.push_str(&text),
            Voice::Reasoning => read.reasoning.push_str(&text),
            Voice::Nobody => (),
        }
        match found {
            Some((_, length)) => {
                self.take(length);
                self.state = State::Channel;
                Step::Again
            }
            None => Step::Wait,
        }
    }

    /// Whether a call of `name` is one. Where a marker says that it is, the name need not be right.
    fn may_call(&self, name: &str) -> bool {
        self.format != Format::Llama || self.asked.has(name)
    }

    fn begin(&mut self, name: String, read: &mut Said) {
        let id = random_id();
        let id = match self.format {
            // Its templates take no others.
            Format::MistralList | Format::MistralNamed => id.chars().take(9).collect(),
            _ => format!("call_{id}"),
        };
        self.opened.clear();
        read.calls.push(CallDelta { index: self.calls, start: Some((id, name)), arguments: String::new() });
        self.calls += 1;
    }

    /// More of the arguments of the last call.
    fn argue(&self, arguments: String, read: &mut Said) {
        let index = self.calls.saturating_sub(1);
        match read.calls.last_mut().filter(|call| call.index == index) {
            Some(call) => call.arguments.push_str(&arguments),
            None if arguments.is_empty() => (),
            None => read.calls.push(CallDelta { index, start: None, arguments }),
        }
    }

    fn take(&mut self, length: usize) -> String {
        let rest = self.held.split_off(length);
        std::mem::replace(&mut self.held, rest)
    }

    fn drop_held(&mut self) -> Step {
        self.held.clear();
        Step::Wait
    }
}
