//! `remoe run`: chats in the terminal, or answers prompts from a pipe. It starts its own functions, and stops them at the
//! end.

mod chat;
mod input;
mod settings;

use crate::commands::generate::{GenerateOutput, generate, stdout_sink};
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

/// Answer in JSON, with its prompt.
#[derive(Serialize)]
struct PromptOutput {
    prompt: String,
    #[serde(flatten)]
    generation: GenerateOutput,
}

/// Answers prompts until the input ends.
pub(crate) async fn run(
    args: &RunArgs,
    as_json: bool,
    verbose: bool,
    progress: &Arc<Progress>,
) -> Result<(), CliError> {
    let is_interactive = !as_json
        && args.prompt.is_none()
        && std::io::stdin().is_terminal()
        && std::io::stdout().is_terminal();
    let prediction = PredictionSource { predictor: args.predictor.predictor.as_deref(), prompt: None };
    let desired = deployment::desired_deployment(&args.source, &args.deployment, 0.0, prediction)?;
    let chat = Chat::open(&desired)?;
    // Before this, signals end the process by default, while the model is fetched and no function runs.
    let mut signals = TerminationSignals::listen()?;
    let _registered = running_commands::register("run", vec![desired.name()], None).inspect_err(|error| {
        print_warning(&format!("`remoe ps` cannot list this process: {}", error.message));
    });
    let (supervisor, _) = tokio::select! {
        started = desired.start(progress) => started?,
        // Dropping the launcher ends the started functions.
        () = signals.next() => return Err(CliError::interrupted()),
    };
    let input = match (&args.prompt, is_interactive) {
        (Some(prompt), _) => Input::once(prompt.clone(), !std::io::stdin().is_terminal()),
        (None, true) => Input::terminal()?,
        (None, false) => Input::pipe(),
    };
    let mut session = RunSession {
        settings: SamplingSettings::new(args, desired.checkpoint.generation()),
        desired,
        chat,
        supervisor,
        input,
        signals,
        progress,
        is_interactive,
        streams_answers: !as_json,
        figures: is_interactive || verbose,
        answers: Vec::new(),
    };
    if is_interactive {
        session.print_line(&format!(
            "{}: type a prompt; /help lists commands, Ctrl-D exits.",
            session.desired.name()
        ));
    }
    let result = session.run().await;
    session.supervisor.shutdown(session.desired.drain).await;
    result?;
    if as_json {
        #[derive(Serialize)]
        struct Answers {
            model: String,
            answers: Vec<PromptOutput>,
        }
        json::print(&Answers { model: session.desired.name(), answers: session.answers })?;
    }
    Ok(())
}

struct RunSession<'a> {
    settings: SamplingSettings,
    desired: DesiredDeployment,
    chat: Chat,
    supervisor: Supervisor,
    input: Input,
    signals: TerminationSignals,
    progress: &'a Arc<Progress>,
    /// The input is a terminal: `/` starts a command, and errors do not end the session.
    is_interactive: bool,
    /// Answers are streamed to the output. Otherwise they are collected.
    streams_answers: bool,
    /// The figures of an answer are printed after it.
    figures: bool,
    answers: Vec<PromptOutput>,
}

impl RunSession<'_> {
    /// Prints a line on standard output. If the output is closed, the next answer reports the error.
    fn print_line(&self, line: &str) {
        let _closed = writeln!(std::io::stdout(), "{line}");
    }

    async fn run(&mut self) -> Result<(), CliError> {
        loop {
            let input = tokio::select! {
                input = self.input.next() => input?,
                ended = self.signals.next_cause() => match ended {
                    // Ctrl-C arrived after the end of an answer.
                    TerminationCause::Interrupted if self.is_interactive => continue,
                    _ => return Err(CliError::interrupted()),
                },
            };
            let text = match input {
                PromptInput::Text(text) => text,
                // Ctrl-C discarded the line.
                PromptInput::Discarded => continue,
                PromptInput::End => return Ok(()),
            };
            if text.trim().is_empty() {
                continue;
            }
            let result = match text.trim().strip_prefix('/').filter(|_| self.is_interactive) {
                Some(command) => match self.run_command(command) {
                    Ok(true) => Ok(()),
                    Ok(false) => return Ok(()),
                    Err(error) => Err(error),
                },
                None => self.answer(text).await,
            };
            match result {
                Err(error)
                    if self.is_interactive
                        && !matches!(error.code, CliExitCode::Interrupted | CliExitCode::ClosedOutput) =>
                {
                    print_error(&error.text());
                }
                result => result?,
            }
        }
    }

    /// Runs a command such as `/set`. Returns `false` if it ends the session.
    fn run_command(&mut self, text: &str) -> Result<bool, CliError> {
        let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let rest = rest.trim();
        let mut out = anstream::stdout().lock();
        match name {
            "help" | "?" => writeln!(out, "{}", settings::HELP)?,
            "bye" | "exit" | "quit" => return Ok(false),
            "clear" => {
                self.chat.clear();
                writeln!(out, "conversation cleared")?;
            }
            "set" if rest.is_empty() => writeln!(out, "{}", self.settings.show())?,
            "set" => {
                let setting =
                    self.settings.set(rest).map_err(|problem| CliError::arguments("/set", problem))?;
                writeln!(out, "{setting}")?;
            }
            "show" => {
                let status = self.supervisor.status().borrow().clone();
                writeln!(out, "{}\n\n{}", functions_table(&self.desired, &status), self.settings.show())?;
            }
            other => {
                let message = format!("unknown command /{other}; see /help");
                return Err(CliError::arguments("/", message));
            }
        }
        Ok(true)
    }

    async fn answer(&mut self, prompt: String) -> Result<(), CliError> {
        let (request, dropped_messages) = self.chat.build_request(&prompt, &self.settings)?;
        if dropped_messages > 0 {
            let message =
                format!("conversation exceeds the context: dropped the first {dropped_messages} messages");
            self.progress.line(&message);
        }
        // Waits until the supervisor has restarted a failed main function.
        let status = self.desired.ready(&self.supervisor, self.progress).await?;
        let main = status.functions.iter().find(|function| function.role == Role::Main);
        let main = main
            .and_then(|main| main.grpc)
            .ok_or_else(|| CliError::runtime("cannot reach the main function: it ended"))?;
        let client = control::main_client(main)?;
        let mut text = String::new();
        let mut print = stdout_sink(self.streams_answers);
        let mut sink = |piece: &str| {
            text.push_str(piece);
            print(piece)
        };
        let answered = tokio::select! {
            answered = generate(client, request, &mut sink) => Some(answered),
            ended = self.signals.next_cause() => match ended {
                // Dropping the stream cancels the request in the engine.
                TerminationCause::Interrupted if self.is_interactive => None,
                _ => return Err(CliError::interrupted()),
            },
        };
        match answered {
            None => {
                self.print_line("");
                self.progress.line("interrupted");
                self.chat.add_turn(prompt, text);
            }
            Some(Err(error)) => {
                if self.streams_answers && !text.is_empty() {
                    self.print_line("");
                }
                return Err(error);
            }
            Some(Ok(generation)) => {
                if self.streams_answers {
                    generation.end_text()?;
                }
                if self.figures {
                    self.progress.line(&figures_line(&generation));
                }
                self.chat.add_turn(prompt.clone(), generation.text.clone().unwrap_or(text));
                if !self.streams_answers {
                    self.answers.push(PromptOutput { prompt, generation });
                }
            }
        }
        Ok(())
    }
}

/// Formats the figures of an answer in one line.
fn figures_line(generation: &GenerateOutput) -> String {
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

/// Formats the functions with their experts.
fn functions_table(desired: &DesiredDeployment, status: &Status) -> String {
    let remote = desired.placement.remote();
    let rows = status.functions.iter().map(|function| {
        let experts = match function.role {
            Role::Main => table::experts(&placement::local_experts(&desired.moe_layers, &remote)),
            Role::Remote => table::experts(&function.hosted),
        };
        vec![function.name.clone(), function.state.name().to_owned(), experts]
    });
    table::with_header(&["function", "state", "experts"], rows.collect())
}
