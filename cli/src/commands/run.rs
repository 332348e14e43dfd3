//! `remoe run`: a conversation in the terminal, or answers to prompts from a pipe. It starts the functions that
//! it needs and ends them with itself.

mod chat;
mod input;
mod settings;

use crate::commands::generate::{GenerateOutput, generate, shown};
use crate::deployment::{self, DesiredDeployment, Launch};
use crate::exit::{CliError, CliExitCode};
use crate::flags::{ChatSamplingArgs, DeploymentArgs, PredictorFolder};
use crate::output::progress::{Progress, print_error, print_warning};
use crate::output::{json, table};
use crate::remote_set::PredictionSource;
use crate::running_commands;
use crate::signals::{TerminationCause, TerminationSignals};
use chat::Chat;
use clap::Args;
use input::{Input, PromptInput};
use remoe_hub::ModelArgs;
use remoe_process::Role;
use remoe_rollout::{Status, Supervisor, control, placement};
use serde::Serialize;
use settings::SamplingSettings;
use std::io::{IsTerminal, Write};
use std::sync::Arc;

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) source: ModelArgs,
    #[command(flatten)]
    pub(crate) deployment: DeploymentArgs,
    #[command(flatten)]
    pub(crate) predictor: PredictorFolder,
    /// One prompt to answer, instead of a conversation; text from a pipe or a file on standard input follows it
    #[arg(value_name = "PROMPT")]
    pub(crate) prompt: Option<String>,
    /// System prompt
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Generate at most this many tokens for each answer [default: the rest of the context]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: Option<u32>,
    #[command(flatten)]
    pub(crate) sampling: ChatSamplingArgs,
}

/// An answer, for scripts.
#[derive(Serialize)]
struct PromptOutput {
    prompt: String,
    #[serde(flatten)]
    generation: GenerateOutput,
}

/// Answers prompts until there are no more of them.
pub(crate) async fn run(
    args: &RunArgs,
    as_json: bool,
    verbose: bool,
    progress: &Arc<Progress>,
) -> Result<(), CliError> {
    let talks = !as_json
        && args.prompt.is_none()
        && std::io::stdin().is_terminal()
        && std::io::stdout().is_terminal();
    let prediction = PredictionSource { predictor: args.predictor.predictor.as_deref(), prompt: None };
    let wanted = deployment::desired_deployment(&args.source, &args.deployment, 0.0, prediction)?;
    let chat = Chat::open(&wanted)?;
    // A model that is fetched until here ends with its process, as nothing runs yet.
    let mut signals = TerminationSignals::listen()?;
    let _registered = running_commands::register("run", vec![wanted.name()], None).inspect_err(|error| {
        print_warning(&format!("`remoe ps` cannot list this process: {}", error.message));
    });
    let (supervisor, _) = tokio::select! {
        started = wanted.start(progress) => started?,
        // What has been started ends with its launcher.
        () = signals.next() => return Err(CliError::interrupted()),
    };
    let input = match (&args.prompt, talks) {
        (Some(prompt), _) => Input::once(prompt.clone(), !std::io::stdin().is_terminal()),
        (None, true) => Input::terminal()?,
        (None, false) => Input::pipe(),
    };
    let mut session = Session {
        settings: SamplingSettings::of(args, wanted.checkpoint.generation()),
        wanted,
        chat,
        supervisor,
        input,
        signals,
        progress,
        talks,
        shows: !as_json,
        figures: talks || verbose,
        answers: Vec::new(),
    };
    if talks {
        session
            .say(&format!("{}: type a prompt; /help lists commands, Ctrl-D exits.", session.wanted.name()));
    }
    let ended = session.talk().await;
    session.supervisor.shutdown(session.wanted.drain).await;
    ended?;
    if as_json {
        #[derive(Serialize)]
        struct Answers {
            model: String,
            answers: Vec<PromptOutput>,
        }
        json::print(&Answers { model: session.wanted.name(), answers: session.answers })?;
    }
    Ok(())
}

struct Session<'a> {
    settings: SamplingSettings,
    wanted: DesiredDeployment,
    chat: Chat,
    supervisor: Supervisor,
    input: Input,
    signals: TerminationSignals,
    progress: &'a Arc<Progress>,
    /// A person is at the other end: `/` begins a command, and what fails does not end the conversation.
    talks: bool,
    /// Answers are shown as they come, else kept.
    shows: bool,
    /// Set if the figures of an answer are printed after it.
    figures: bool,
    answers: Vec<PromptOutput>,
}

impl Session<'_> {
    /// Prints a line where answers are. If the output is closed, the next answer reports that.
    fn say(&self, line: &str) {
        let _closed = writeln!(std::io::stdout(), "{line}");
    }

    async fn talk(&mut self) -> Result<(), CliError> {
        loop {
            let said = tokio::select! {
                said = self.input.next() => said?,
                ended = self.signals.next_cause() => match ended {
                    // An answer was over before the key came.
                    TerminationCause::Interrupted if self.talks => continue,
                    _ => return Err(CliError::interrupted()),
                },
            };
            let text = match said {
                PromptInput::Text(text) => text,
                // Ctrl-C at an empty line; a line that was begun has been thrown away.
                PromptInput::Nothing => continue,
                PromptInput::End => return Ok(()),
            };
            if text.trim().is_empty() {
                continue;
            }
            let done = match text.trim().strip_prefix('/').filter(|_| self.talks) {
                Some(command) => match self.command(command) {
                    Ok(true) => Ok(()),
                    Ok(false) => return Ok(()),
                    Err(error) => Err(error),
                },
                None => self.answer(text).await,
            };
            match done {
                Err(error)
                    if self.talks
                        && !matches!(error.code, CliExitCode::Interrupted | CliExitCode::ClosedOutput) =>
                {
                    print_error(&error.text());
                }
                done => done?,
            }
        }
    }

    /// Follows `/command`; false where it ends the conversation.
    fn command(&mut self, text: &str) -> Result<bool, CliError> {
        let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let rest = rest.trim();
        let mut out = anstream::stdout().lock();
        match name {
            "help" | "?" => writeln!(out, "{}", settings::HELP)?,
            "bye" | "exit" | "quit" => return Ok(false),
            "clear" => {
                self.chat.forget();
                writeln!(out, "conversation cleared")?;
            }
            "set" if rest.is_empty() => writeln!(out, "{}", self.settings.show())?,
            "set" => {
                let said = self.settings.set(rest).map_err(|problem| CliError::arguments("/set", problem))?;
                writeln!(out, "{said}")?;
            }
            "show" => {
                let status = self.supervisor.status().borrow().clone();
                writeln!(out, "{}\n\n{}", functions(&self.wanted, &status), self.settings.show())?;
            }
            other => {
                let message = format!("unknown command /{other}; see /help");
                return Err(CliError::arguments("/", message));
            }
        }
        Ok(true)
    }

    async fn answer(&mut self, prompt: String) -> Result<(), CliError> {
        let (request, left_out) = self.chat.ask(&prompt, &self.settings)?;
        if left_out > 0 {
            let message = format!("conversation exceeds the context: dropped the first {left_out} messages");
            self.progress.line(&message);
        }
        // A main function that died is there again.
        let status = self.wanted.ready(&self.supervisor, self.progress).await?;
        let main = status.functions.iter().find(|function| function.role == Role::Main);
        let main = main
            .and_then(|main| main.grpc)
            .ok_or_else(|| CliError::runtime("cannot reach the main function: it ended"))?;
        let client = control::main_client(main)?;
        let mut said = String::new();
        let mut show = shown(self.shows);
        let mut sink = |piece: &str| {
            said.push_str(piece);
            show(piece)
        };
        let answered = tokio::select! {
            answered = generate(client, request, &mut sink) => Some(answered),
            ended = self.signals.next_cause() => match ended {
                // Dropping the stream ends the work in the engine.
                TerminationCause::Interrupted if self.talks => None,
                _ => return Err(CliError::interrupted()),
            },
        };
        match answered {
            None => {
                self.say("");
                self.progress.line("interrupted");
                self.chat.note(prompt, said);
            }
            Some(Err(error)) => {
                if self.shows && !said.is_empty() {
                    self.say("");
                }
                return Err(error);
            }
            Some(Ok(generation)) => {
                if self.shows {
                    generation.end_text()?;
                }
                if self.figures {
                    self.progress.line(&figures(&generation));
                }
                self.chat.note(prompt.clone(), generation.text.clone().unwrap_or(said));
                if !self.shows {
                    self.answers.push(PromptOutput { prompt, generation });
                }
            }
        }
        Ok(())
    }
}

/// Formats the figures of an answer, in a line.
fn figures(generation: &GenerateOutput) -> String {
    let dim = anstyle::Style::new().dimmed();
    let (usage, experts) = (&generation.usage, &generation.experts);
    let calls = experts.local + experts.remote + experts.fallback;
    let share = |part: u64| 100.0 * part as f64 / calls.max(1) as f64;
    let mut text = format!(
        "{dim}{} {}, TTFT {:.0} ms, {:.0} tokens/s; expert calls: {} local, {} remote ({:.0} %)",
        usage.completion_tokens,
        if usage.completion_tokens == 1 { "token" } else { "tokens" },
        1e3 * generation.timings.ttft_s,
        generation.tokens_per_second(),
        experts.local,
        experts.remote,
        share(experts.remote),
    );
    if experts.fallback > 0 {
        text += &format!(", {} by local fallback", experts.fallback);
    }
    if generation.finish_reason == "length" {
        text += "; stopped at the token limit";
    }
    format!("{text}{dim:#}\n")
}

/// Lists the functions, with the experts that each holds.
fn functions(wanted: &DesiredDeployment, status: &Status) -> String {
    let remote = wanted.placement.remote();
    let rows = status.functions.iter().map(|function| {
        let experts = match function.role {
            Role::Main => table::experts(&placement::local_experts(&wanted.moe_layers, &remote)),
            Role::Remote => table::experts(&function.hosted),
        };
        vec![function.name.clone(), function.state.name().to_owned(), experts]
    });
    table::with_header(&["function", "state", "experts"], rows.collect())
}
