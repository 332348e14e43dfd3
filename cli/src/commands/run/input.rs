//! Where prompts come from: a line editor with history, a pipe, or the command line.
//!
//! Reading blocks, so that a thread of its own does it. It is never waited for: when the command ends
//! meanwhile, the process ends with it.

use crate::exit::CliError;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Context, Editor, Helper};
use std::fs::DirBuilder;
use std::io::{self, BufRead, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use tokio::sync::mpsc;

/// Begins and ends text of several lines.
const QUOTES: &str = "\"\"\"";
/// Longest prompt from a pipe.
const PROMPT_LIMIT: usize = 4 << 20;
/// Prompts that the editor remembers.
const HISTORY: usize = 1000;
/// Commands beside prompts, for completion with Tab.
const COMMANDS: [&str; 14] = [
    "/bye",
    "/clear",
    "/help",
    "/set max_tokens ",
    "/set min_p ",
    "/set repetition_penalty ",
    "/set seed ",
    "/set stop ",
    "/set system ",
    "/set temperature ",
    "/set top_k ",
    "/set top_p ",
    "/set",
    "/show",
];

/// Outcome of reading one prompt.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PromptInput {
    Text(String),
    /// A line was begun and thrown away.
    Nothing,
    /// There is no more.
    End,
}

type InputResult = Result<PromptInput, CliError>;

pub(super) struct Input {
    /// Asks the thread to read on: two prompts are never read at once, so that an answer is not typed over.
    asks: mpsc::Sender<()>,
    comes: mpsc::Receiver<InputResult>,
    /// It has been asked, and has not said anything yet.
    reading: bool,
    _terminal: Option<Terminal>,
}

impl Input {
    /// Returns one prompt, followed by the text of standard input if `joins`.
    pub(super) fn once(prompt: String, joins: bool) -> Self {
        let mut prompt = Some(prompt);
        let read = move || match prompt.take() {
            None => Ok(PromptInput::End),
            Some(prompt) if joins => joined(prompt, io::stdin()).map(PromptInput::Text),
            Some(prompt) => Ok(PromptInput::Text(prompt)),
        };
        Self::from_reader(read, None)
    }

    /// The lines of standard input.
    pub(super) fn pipe() -> Self {
        let mut lines = Pipe(io::BufReader::new(io::stdin()));
        Self::from_reader(move || lines.next(), None)
    }

    /// Reads prompts that are typed.
    pub(super) fn terminal() -> Result<Self, CliError> {
        let terminal = Terminal::keep();
        let mut editor = LineEditor::open()?;
        Ok(Self::from_reader(move || editor.next(), terminal))
    }

    fn from_reader(
        mut read: impl FnMut() -> InputResult + Send + 'static,
        terminal: Option<Terminal>,
    ) -> Self {
        let (asks, mut asked) = mpsc::channel(1);
        let (says, comes) = mpsc::channel(1);
        std::thread::spawn(move || {
            while asked.blocking_recv().is_some() {
                if says.blocking_send(read()).is_err() {
                    return;
                }
            }
        });
        Self { asks, comes, reading: false, _terminal: terminal }
    }

    /// Waits for what comes next. May be given up and called again.
    pub(super) async fn next(&mut self) -> InputResult {
        if !self.reading {
            self.reading = self.asks.send(()).await.is_ok();
        }
        let come = self.comes.recv().await;
        self.reading = false;
        come.unwrap_or(Ok(PromptInput::End))
    }
}

/// Returns `prompt`, a blank line and the text of `piped`, or `prompt` alone if that text is blank.
fn joined(prompt: String, piped: impl Read) -> Result<String, CliError> {
    let failed = |error: &dyn std::fmt::Display| {
        CliError::runtime(format!("cannot read standard input, which follows the prompt: {error}"))
    };
    let mut text = Vec::new();
    let room = (PROMPT_LIMIT + 1).saturating_sub(prompt.len());
    piped.take(room as u64).read_to_end(&mut text).map_err(|error| failed(&error))?;
    if text.len() == room {
        let message = format!(
            "invalid prompt: expected at most {PROMPT_LIMIT} bytes of PROMPT and standard input; shorten the input"
        );
        return Err(CliError::arguments("PROMPT", message));
    }
    let text = String::from_utf8(text).map_err(|error| failed(&error))?;
    let text = text.trim_end();
    Ok(if text.is_empty() { prompt } else { format!("{prompt}\n\n{text}") })
}

/// Prompts of standard input: a line each, or several lines as in the terminal.
struct Pipe<R>(R);

impl<R: BufRead> Pipe<R> {
    fn next(&mut self) -> InputResult {
        let mut text = String::new();
        loop {
            let room = (PROMPT_LIMIT + 1).saturating_sub(text.len());
            let read = (&mut self.0).take(room as u64).read_line(&mut text).map_err(|error| {
                CliError::runtime(format!("cannot read a prompt from standard input: {error}"))
            })?;
            if text.len() > PROMPT_LIMIT {
                let message =
                    format!("invalid prompt: expected at most {PROMPT_LIMIT} bytes on standard input");
                return Err(CliError::arguments("PROMPT", message));
            }
            if read == 0 {
                return Ok(if text.is_empty() {
                    PromptInput::End
                } else {
                    PromptInput::Text(unfolded(&text))
                });
            }
            if !goes_on(text.trim_end_matches(['\n', '\r'])) {
                return Ok(PromptInput::Text(unfolded(text.trim_end_matches(['\n', '\r']))));
            }
        }
    }
}

/// Reports if another line belongs to what was typed.
fn goes_on(text: &str) -> bool {
    match text.trim_start().strip_prefix(QUOTES) {
        Some(quoted) => !quoted.contains(QUOTES),
        None => text.ends_with('\\'),
    }
}

/// Returns the typed text without quotes, and without the backslashes at the ends of lines.
fn unfolded(text: &str) -> String {
    match text.trim_start().strip_prefix(QUOTES) {
        Some(quoted) => match quoted.split_once(QUOTES) {
            Some((inside, behind)) => format!("{inside}{behind}"),
            None => quoted.to_owned(),
        }
        .trim_matches('\n')
        .to_owned(),
        None => text.replace("\\\r\n", "\n").replace("\\\n", "\n"),
    }
}

/// The editor, and where its history is kept.
struct LineEditor {
    editor: Editor<Typing, FileHistory>,
    history: Option<PathBuf>,
}

impl LineEditor {
    fn open() -> Result<Self, CliError> {
        let failed =
            |error: ReadlineError| CliError::runtime(format!("cannot read from the terminal: {error}"));
        let config =
            Config::builder().max_history_size(HISTORY).map_err(failed)?.history_ignore_space(true).build();
        let mut editor = Editor::with_config(config).map_err(failed)?;
        editor.set_helper(Some(Typing));
        let history = history_file();
        if let Some(file) = &history {
            // There is none before the first conversation.
            let _none = editor.load_history(file);
        }
        Ok(Self { editor, history })
    }

    fn next(&mut self) -> InputResult {
        match self.editor.readline(">>> ") {
            Ok(text) => {
                if !text.trim().is_empty() && self.editor.add_history_entry(&text).is_ok_and(|added| added) {
                    // A conversation goes on where its history cannot be written.
                    let _kept = self.history.as_ref().map(|file| self.editor.save_history(file));
                }
                Ok(PromptInput::Text(unfolded(&text)))
            }
            Err(ReadlineError::Interrupted) => Ok(PromptInput::Nothing),
            Err(ReadlineError::Eof) => Ok(PromptInput::End),
            Err(error) => Err(CliError::runtime(format!("cannot read from the terminal: {error}"))),
        }
    }
}

/// `remoe/history` in the user's state folder, where one can be had.
fn history_file() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))?;
    let folder = state.join("remoe");
    DirBuilder::new().recursive(true).mode(0o700).create(&folder).ok()?;
    Some(folder.join("history"))
}

/// Helps while something is typed.
struct Typing;

impl Validator for Typing {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match goes_on(context.input()) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

impl Completer for Typing {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let typed = line.get(..position).filter(|typed| typed.starts_with('/'));
        let fit = typed.map(|typed| COMMANDS.iter().filter(move |command| command.starts_with(typed)));
        Ok((0, fit.into_iter().flatten().map(|command| (*command).to_owned()).collect()))
    }
}

impl Hinter for Typing {
    type Hint = String;
}

impl Highlighter for Typing {}
impl Helper for Typing {}

/// The terminal's modes as they were: the editor changes them while it reads, and does not get to change them
/// back where the command ends meanwhile.
struct Terminal(Termios);

impl Terminal {
    fn keep() -> Option<Self> {
        tcgetattr(io::stdin()).ok().map(Self)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing any more.
        let _gone = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
        let mut out = io::stdout();
        // The editor asked for pasted text in brackets.
        let _gone = out.write_all(b"\x1b[?2004l").and_then(|()| out.flush());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_has_a_prompt_on_each_line_or_in_quotes() {
        let text = "one\n\"\"\"two\nlines\"\"\"\r\nthree\\\nfour\n\nlast";
        let mut pipe = Pipe(text.as_bytes());
        let mut said = Vec::new();
        while let PromptInput::Text(text) = pipe.next().unwrap() {
            said.push(text);
        }
        assert_eq!(said, ["one", "two\nlines", "three\nfour", "", "last"]);
    }

    #[test]
    fn what_is_never_closed_ends_with_the_pipe() {
        let mut pipe = Pipe("\"\"\"open\nend".as_bytes());
        assert_eq!(pipe.next().unwrap(), PromptInput::Text("open\nend".to_owned()));
        assert_eq!(pipe.next().unwrap(), PromptInput::End);
    }

    #[test]
    fn a_prompt_without_an_end_is_refused() {
        let mut pipe = Pipe(io::BufReader::new(io::repeat(b'a')));
        assert!(pipe.next().unwrap_err().message.contains("expected at most"));
        let mut pipe = Pipe(&b"\xff\xfe\n"[..]);
        assert!(pipe.next().is_err(), "no UTF-8");
    }

    #[test]
    fn piped_text_follows_the_prompt() {
        let with = |piped: &[u8]| joined("Summarise this.".to_owned(), piped).map_err(|error| error.message);
        assert_eq!(with(b"one\n\ntwo\n"), Ok("Summarise this.\n\none\n\ntwo".to_owned()));
        assert_eq!(with(b""), Ok("Summarise this.".to_owned()));
        assert_eq!(with(b"\n \n"), Ok("Summarise this.".to_owned()));
        assert!(with(b"\xff").is_err_and(|error| error.contains("standard input")));
        let endless = joined("Summarise this.".to_owned(), io::repeat(b'a'));
        assert!(endless.unwrap_err().message.contains("expected at most"));
    }

    #[test]
    fn commands_are_completed() {
        let history = rustyline::history::DefaultHistory::new();
        let fit = |typed: &str| Typing.complete(typed, typed.len(), &Context::new(&history)).unwrap().1;
        assert_eq!(fit("/set to"), ["/set top_k ", "/set top_p "]);
        assert!(fit("hello").is_empty());
    }
}
