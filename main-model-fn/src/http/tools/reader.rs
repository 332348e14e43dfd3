//! Calls in the text of an answer, as it comes.

use super::arguments::{Balance, Head, whole};
use super::asked::Asked;
use super::format::Format;
use remoe_http::random_id;

/// What is new of a choice.
#[derive(Default)]
struct Read {
    content: String,
    calls: Vec<CallDelta>,
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
    /// In a message's head, of gpt-oss.
    Channel,
    /// In a message that is content, or is not for the client.
    Body { shown: bool },
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
        let state = if format == Format::Harmony { State::Channel } else { State::Text };
        Self { format, asked, state, held: String::new(), opened: String::new(), calls: 0 }
    }

    /// Whether the choice has called.
    pub(in crate::http) fn has_called(&self) -> bool {
        self.calls > 0
    }

    /// Takes more of the answer: what it says besides its calls, and what is new of those.
    pub(in crate::http) fn push(&mut self, text: &str) -> (String, Vec<CallDelta>) {
        self.held.push_str(text);
        let mut read = Read::default();
        while let Step::Again = self.step(&mut read) {}
        (read.content, read.calls)
    }

    /// The rest of what it says, once no text follows.
    pub(in crate::http) fn finish(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        match &self.state {
            State::Text if self.calls > 0 && held.trim().is_empty() => String::new(),
            State::Text | State::Plain | State::Body { shown: true } => held,
            // A call that was cut off before its function was known.
            State::Head | State::Whole(_) | State::Name => std::mem::take(&mut self.opened) + &held,
            // A text without any head.
            State::Channel if self.calls == 0 && !held.contains("<|") => held,
            _ => String::new(),
        }
    }

    fn step(&mut self, read: &mut Read) -> Step {
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
                    Format::Harmony => State::Body { shown: false },
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
            State::Channel => self.channel(read),
            State::Body { shown } => {
                let shown = *shown;
                self.body(shown, read)
            }
        }
    }

    /// Text up to the marker that opens a call.
    fn text(&mut self, read: &mut Read) -> Step {
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
    fn name(&mut self, read: &mut Read) -> Step {
        let Some(at) = self.held.find('{') else { return Step::Wait };
        let head = self.take(at);
        let name = head.split('[').next().unwrap_or_default().trim();
        self.begin(name.to_owned(), read);
        self.state = State::Arguments(Balance::default());
        Step::Again
    }

    fn head(&mut self, read: &mut Read) -> Step {
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

    /// `<|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>`
    fn channel(&mut self, read: &mut Read) -> Step {
        const MESSAGE: &str = "<|message|>";
        let Some(at) = self.held.find(MESSAGE) else { return Step::Wait };
        let head = self.take(at);
        self.take(MESSAGE.len());
        let name = head.split("to=functions.").nth(1).map(|rest| {
            let end = rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len());
            rest[..end].to_owned()
        });
        self.state = match name {
            Some(name) => {
                self.begin(name, read);
                State::Arguments(Balance::default())
            }
            None => State::Body { shown: !head.contains("analysis") },
        };
        Step::Again
    }

    /// A message up to the marker that ends it.
    fn body(&mut self, shown: bool, read: &mut Read) -> Step {
        const ENDS: [&str; 4] = ["<|end|>", "<|call|>", "<|return|>", "<|start|>"];
        let found = ENDS.iter().filter_map(|end| Some((self.held.find(end)?, end.len()))).min();
        let keep = |text: &str| {
            let begins = |at: &usize| ENDS.iter().any(|end| end.starts_with(&text[*at..]));
            text.char_indices().map(|(at, _)| at).find(begins).unwrap_or(text.len())
        };
        let text = self.take(found.map_or_else(|| keep(&self.held), |(at, _)| at));
        if shown {
            read.content.push_str(&text);
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

    fn begin(&mut self, name: String, read: &mut Read) {
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
    fn argue(&self, arguments: String, read: &mut Read) {
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
