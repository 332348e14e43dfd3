//! Input of prompts: a line editor with history, a pipe, or the command line.
//!
//! Reading blocks, and therefore runs on a separate thread. Nothing joins the thread: it ends with the process.

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

/// Delimiter of multi-line text.
const QUOTES: &str = "\"\"\"";
/// Size limit of a prompt from a pipe, in bytes.
const PROMPT_BYTES_LIMIT: usize = 4 << 20;
/// Number of prompts in the editor's history.
const HISTORY_LENGTH: usize = 1000;
/// Commands that Tab completes.
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

/// Result of reading one prompt.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PromptInput {
    Text(String),
    /// The user discarded the line with Ctrl-C.
    Discarded,
    /// End of the input.
    End,
}

type InputResult = Result<PromptInput, CliError>;

pub(super) struct Input {
    /// Requests the next prompt from the thread, which reads only on request, so that typing does not mix with an answer.
    requests: mpsc::Sender<()>,
    results: mpsc::Receiver<InputResult>,
    /// A request is pending.
    is_pending: bool,
    _terminal: Option<TerminalModes>,
}

impl Input {
    /// Creates an input of one prompt. With `append_stdin`, the text of standard input follows it.
    pub(super) fn once(prompt: String, append_stdin: bool) -> Self {
        let mut prompt = Some(prompt);
        let read = move || match prompt.take() {
            None => Ok(PromptInput::End),
            Some(prompt) if append_stdin => append_text(prompt, io::stdin()).map(PromptInput::Text),
            Some(prompt) => Ok(PromptInput::Text(prompt)),
        };
        Self::from_reader(read, None)
    }

    /// Creates an input that reads prompts from standard input, one per line.
    pub(super) fn pipe() -> Self {
        let mut lines = PipeReader(io::BufReader::new(io::stdin()));
        Self::from_reader(move || lines.next(), None)
    }

    /// Creates an input with a line editor on the terminal.
    pub(super) fn terminal() -> Result<Self, CliError> {
        let terminal = TerminalModes::save();
        let mut editor = LineEditor::open()?;
        Ok(Self::from_reader(move || editor.next(), terminal))
    }

    fn from_reader(
        mut read: impl FnMut() -> InputResult + Send + 'static,
        terminal: Option<TerminalModes>,
    ) -> Self {
        let (requests, mut request_receiver) = mpsc::channel(1);
        let (result_sender, results) = mpsc::channel(1);
        std::thread::spawn(move || {
            while request_receiver.blocking_recv().is_some() {
                if result_sender.blocking_send(read()).is_err() {
                    return;
                }
            }
        });
        Self { requests, results, is_pending: false, _terminal: terminal }
    }

    /// Waits for the next prompt. Cancel safe: if the future is dropped, the next call returns the same prompt.
    pub(super) async fn next(&mut self) -> InputResult {
        if !self.is_pending {
            self.is_pending = self.requests.send(()).await.is_ok();
        }
        let result = self.results.recv().await;
        self.is_pending = false;
        result.unwrap_or(Ok(PromptInput::End))
    }
}

/// Appends a blank line and the text of `piped` to `prompt`. If the text is blank, returns `prompt` alone.
fn append_text(prompt: String, piped: impl Read) -> Result<String, CliError> {
    let read_error = |error: &dyn std::fmt::Display| {
        CliError::runtime(format!("cannot read standard input, which follows the prompt: {error}"))
    };
    let mut text = Vec::new();
    let limit = (PROMPT_BYTES_LIMIT + 1).saturating_sub(prompt.len());
    piped.take(limit as u64).read_to_end(&mut text).map_err(|error| read_error(&error))?;
    if text.len() == limit {
        let message = format!(
            "invalid prompt: expected at most {PROMPT_BYTES_LIMIT} bytes of PROMPT and standard input; shorten the input"
        );
        return Err(CliError::arguments("PROMPT", message));
    }
    let text = String::from_utf8(text).map_err(|error| read_error(&error))?;
    let text = text.trim_end();
    Ok(if text.is_empty() { prompt } else { format!("{prompt}\n\n{text}") })
}

/// Reader of prompts from a pipe: one per line, or several lines in quotes or with backslashes.
struct PipeReader<R>(R);

impl<R: BufRead> PipeReader<R> {
    fn next(&mut self) -> InputResult {
        let mut text = String::new();
        loop {
            let limit = (PROMPT_BYTES_LIMIT + 1).saturating_sub(text.len());
            let read = (&mut self.0).take(limit as u64).read_line(&mut text).map_err(|error| {
                CliError::runtime(format!("cannot read a prompt from standard input: {error}"))
            })?;
            if text.len() > PROMPT_BYTES_LIMIT {
                let message =
                    format!("invalid prompt: expected at most {PROMPT_BYTES_LIMIT} bytes on standard input");
                return Err(CliError::arguments("PROMPT", message));
            }
            if read == 0 {
                return Ok(if text.is_empty() {
                    PromptInput::End
                } else {
                    PromptInput::Text(unquote(&text))
                });
            }
            if !is_incomplete(text.trim_end_matches(['\n', '\r'])) {
                return Ok(PromptInput::Text(unquote(text.trim_end_matches(['\n', '\r']))));
            }
        }
    }
}

/// Reports if the prompt continues on the next line.
fn is_incomplete(text: &str) -> bool {
    match text.trim_start().strip_prefix(QUOTES) {
        Some(quoted) => !quoted.contains(QUOTES),
        None => text.ends_with('\\'),
    }
}

/// Removes the quotes, and the backslashes at the ends of lines.
fn unquote(text: &str) -> String {
    match text.trim_start().strip_prefix(QUOTES) {
        Some(quoted) => match quoted.split_once(QUOTES) {
            Some((inside, after)) => format!("{inside}{after}"),
            None => quoted.to_owned(),
        }
        .trim_matches('\n')
        .to_owned(),
        None => text.replace("\\\r\n", "\n").replace("\\\n", "\n"),
    }
}

/// Line editor with its history file.
struct LineEditor {
    editor: Editor<PromptHelper, FileHistory>,
    history: Option<PathBuf>,
}

impl LineEditor {
    fn open() -> Result<Self, CliError> {
        let failed =
            |error: ReadlineError| CliError::runtime(format!("cannot read from the terminal: {error}"));
        let config = Config::builder()
            .max_history_size(HISTORY_LENGTH)
            .map_err(failed)?
            .history_ignore_space(true)
            .build();
        let mut editor = Editor::with_config(config).map_err(failed)?;
        editor.set_helper(Some(PromptHelper));
        let history = history_file();
        if let Some(file) = &history {
            // The file does not exist before the first session.
            let _none = editor.load_history(file);
        }
        Ok(Self { editor, history })
    }

    fn next(&mut self) -> InputResult {
        match self.editor.readline(">>> ") {
            Ok(text) => {
                if !text.trim().is_empty() && self.editor.add_history_entry(&text).is_ok_and(|added| added) {
                    // Failing to write the history does not end the session.
                    let _kept = self.history.as_ref().map(|file| self.editor.save_history(file));
                }
                Ok(PromptInput::Text(unquote(&text)))
            }
            Err(ReadlineError::Interrupted) => Ok(PromptInput::Discarded),
            Err(ReadlineError::Eof) => Ok(PromptInput::End),
            Err(error) => Err(CliError::runtime(format!("cannot read from the terminal: {error}"))),
        }
    }
}

/// Returns the file `remoe/history` in the user's state folder, which is created if necessary.
fn history_file() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))?;
    let folder = state.join("remoe");
    DirBuilder::new().recursive(true).mode(0o700).create(&folder).ok()?;
    Some(folder.join("history"))
}

/// Helper of the line editor: continuation lines, and completion of commands.
struct PromptHelper;

impl Validator for PromptHelper {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match is_incomplete(context.input()) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

impl Completer for PromptHelper {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let typed = line.get(..position).filter(|typed| typed.starts_with('/'));
        let candidates = typed.map(|typed| COMMANDS.iter().filter(move |command| command.starts_with(typed)));
        Ok((0, candidates.into_iter().flatten().map(|command| (*command).to_owned()).collect()))
    }
}

impl Hinter for PromptHelper {
    type Hint = String;
}

impl Highlighter for PromptHelper {}
impl Helper for PromptHelper {}

/// Original modes of the terminal, which are restored on drop. The editor changes them while it reads, and cannot restore
/// them if the command ends meanwhile.
struct TerminalModes(Termios);

impl TerminalModes {
    fn save() -> Option<Self> {
        tcgetattr(io::stdin()).ok().map(Self)
    }
}

impl Drop for TerminalModes {
    fn drop(&mut self) {
        // Fails only if the terminal is closed.
        let _gone = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
        let mut out = io::stdout();
        // Disables the bracketed paste mode that the editor enabled.
        let _gone = out.write_all(b"\x1b[?2004l").and_then(|()| out.flush());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn pipe_has_prompts_per_line_or_in_quotes() {
        let text = "one\n\"\"\"two\nlines\"\"\"\r\nthree\\\nfour\n\nlast";
        let mut pipe = PipeReader(text.as_bytes());
        let mut prompts = Vec::new();
        while let PromptInput::Text(text) = pipe.next().unwrap() {
            prompts.push(text);
        }
        assert_eq!(prompts, ["one", "two\nlines", "three\nfour", "", "last"]);
    }

    #[test]
    fn unclosed_quote_ends_with_the_pipe() {
        let mut pipe = PipeReader("\"\"\"open\nend".as_bytes());
        assert_eq!(pipe.next().unwrap(), PromptInput::Text("open\nend".to_owned()));
        assert_eq!(pipe.next().unwrap(), PromptInput::End);
    }

    #[test]
    fn endless_prompt_is_refused() {
        let mut pipe = PipeReader(io::BufReader::new(io::repeat(b'a')));
        assert!(pipe.next().unwrap_err().message.contains("expected at most"));
        let mut pipe = PipeReader(&b"\xff\xfe\n"[..]);
        assert!(pipe.next().is_err(), "no UTF-8");
    }

    #[test]
    fn piped_text_follows_the_prompt() {
        let with =
            |piped: &[u8]| append_text("Summarise this.".to_owned(), piped).map_err(|error| error.message);
        assert_eq!(with(b"one\n\ntwo\n"), Ok("Summarise this.\n\none\n\ntwo".to_owned()));
        assert_eq!(with(b""), Ok("Summarise this.".to_owned()));
        assert_eq!(with(b"\n \n"), Ok("Summarise this.".to_owned()));
        assert!(with(b"\xff").is_err_and(|error| error.contains("standard input")));
        let endless = append_text("Summarise this.".to_owned(), io::repeat(b'a'));
        assert!(endless.unwrap_err().message.contains("expected at most"));
    }

    #[test]
    fn commands_are_completed() {
        let history = rustyline::history::DefaultHistory::new();
        let fit = |typed: &str| PromptHelper.complete(typed, typed.len(), &Context::new(&history)).unwrap().1;
        assert_eq!(fit("/set to"), ["/set top_k ", "/set top_p "]);
        assert!(fit("hello").is_empty());
    }
}
