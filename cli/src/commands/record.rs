//! `remoe record`: runs a set of prompts, and records their expert usage.

use crate::deployment::{self, Launch};
use crate::exit::CliError;
use crate::flags::{DeploymentArgs, PredictorFolder, at_least_one, temperature};
use crate::output::progress::{Progress, bar};
use crate::output::{folders, json, table};
use crate::remote_set::PredictionSource;
use clap::Args;
use futures_util::StreamExt;
use remoe_hub::ModelArgs;
use remoe_predictor::prompts;
use remoe_proto::v1::generate_event::Event;
use remoe_proto::v1::main_model_client::MainModelClient;
use remoe_proto::v1::{Finished, GenerateRequest, generate_request};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tonic::Code;
use tonic::transport::Channel;

#[derive(Debug, Args)]
pub(crate) struct RecordArgs {
    /// Prompts, one JSON object per line: {"prompt": ".."} or a line of LMSYS-Chat-1M, ShareGPT, WikiText, C4 or
    /// SlimPajama; uses the first 500 characters of each
    #[arg(long, value_name = "FILE")]
    pub(crate) prompts: PathBuf,
    /// File to append the activation records to
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Generate at most this many tokens for each prompt
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// Sampling temperature; 0 takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature, allow_negative_numbers = true)]
    pub(crate) temperature: f32,
    /// Random seed; equal seeds give equal answers
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Record the experts of every token, not only counts
    #[arg(long)]
    pub(crate) tokens: bool,
    /// Concurrent prompts
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub(crate) concurrency: usize,
    #[command(flatten)]
    pub(crate) predictor: PredictorFolder,
    #[command(flatten)]
    pub(crate) source: ModelArgs,
    #[command(flatten)]
    pub(crate) deployment: DeploymentArgs,
}

/// Drain time of the main function, in which it writes its last records.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, Serialize)]
struct Summary {
    file: PathBuf,
    records: usize,
    /// Prompts that the model rejects, such as those that exceed its context.
    refused: usize,
    prompt_tokens: u64,
    generated_tokens: u64,
    seconds: f64,
}

/// Runs the prompts, and prints a summary of the records.
pub(crate) async fn run(args: &RecordArgs, as_json: bool, progress: &Arc<Progress>) -> Result<(), CliError> {
    let prompts = read_prompts(&args.prompts)?;
    folders::require_parent("--out", &args.out)?;
    let prediction = PredictionSource { predictor: args.predictor.predictor.as_deref(), prompt: None };
    let mut desired = deployment::desired_deployment(&args.source, &args.deployment, 0.0, prediction)?;
    let file = std::path::absolute(&args.out)?;
    desired.options.record_activations = Some(file.clone());
    desired.options.record_tokens = args.tokens;
    desired.drain = WRITE_TIMEOUT;
    let summary =
        Summary { file, records: 0, refused: 0, prompt_tokens: 0, generated_tokens: 0, seconds: 0.0 };
    let summary = desired
        .run_once(progress, async |client| record(client, args, prompts, summary, progress).await)
        .await?;
    if as_json {
        json::print(&summary)?;
    } else {
        progress.line(&summary.to_table());
    }
    Ok(())
}

/// Reads the prompts of a file.
fn read_prompts(path: &Path) -> Result<Vec<String>, CliError> {
    let file_error = |message: String| CliError {
        path: Some(path.to_owned()),
        ..CliError::arguments("--prompts", message)
    };
    let text = std::fs::read_to_string(path)
        .map_err(|error| file_error(format!("cannot read {}: {error}", path.display())))?;
    let mut texts = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let prompt = prompts::of_line(line)
            .map_err(|error| file_error(format!("{}, line {number}: {error}", path.display())))?;
        texts.extend(prompt.map(|prompt| prompt.text));
    }
    match texts.is_empty() {
        true => Err(file_error(format!("invalid --prompts: no prompt in {}", path.display()))),
        false => Ok(texts),
    }
}

async fn record(
    client: MainModelClient<Channel>,
    args: &RecordArgs,
    prompts: Vec<String>,
    mut summary: Summary,
    progress: &Progress,
) -> Result<Summary, CliError> {
    let started = Instant::now();
    let bar = bar(prompts.len(), "prompts");
    let requests = prompts.into_iter().map(|prompt| GenerateRequest {
        prompt: Some(generate_request::Prompt::Text(prompt)),
        max_tokens: args.max_tokens,
        temperature: Some(args.temperature),
        seed: args.seed,
        ..GenerateRequest::default()
    });
    let mut answers = futures_util::stream::iter(requests.map(|request| generate(client.clone(), request)))
        .buffer_unordered(args.concurrency);
    while let Some(answer) = answers.next().await {
        match answer {
            Ok((prompt_tokens, finished)) => {
                summary.records += 1;
                summary.prompt_tokens += prompt_tokens;
                summary.generated_tokens += u64::from(finished.completion_tokens);
            }
            Err(status) if matches!(status.code(), Code::OutOfRange | Code::InvalidArgument) => {
                if summary.refused == 0 {
                    progress.line(&format!("prompt rejected: {}", status.message()));
                }
                summary.refused += 1;
            }
            Err(status) => return Err(status.into()),
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    summary.seconds = started.elapsed().as_secs_f64();
    Ok(summary)
}

/// Runs one prompt. Returns the number of its tokens, and the final event.
async fn generate(
    mut client: MainModelClient<Channel>,
    request: GenerateRequest,
) -> Result<(u64, Finished), tonic::Status> {
    let mut events = client.generate(request).await?.into_inner();
    let mut prompt_tokens = 0;
    while let Some(message) = events.message().await? {
        match message.event {
            Some(Event::Started(started)) => prompt_tokens = started.prompt_ids.len() as u64,
            Some(Event::Finished(finished)) => return Ok((prompt_tokens, finished)),
            Some(Event::Piece(_)) | None => {}
        }
    }
    Err(tonic::Status::unavailable("cannot read the answer: the stream ended early"))
}

impl Summary {
    fn to_table(&self) -> String {
        let tokens = self.prompt_tokens + self.generated_tokens;
        table::of_pairs(&[
            ("file", self.file.display().to_string()),
            ("records", format!("{} added, {} prompts rejected", self.records, self.refused)),
            ("tokens", format!("{} prompt, {} generated", self.prompt_tokens, self.generated_tokens)),
            (
                "time",
                format!("{:.1} s, {:.0} tokens/s", self.seconds, tokens as f64 / self.seconds.max(1e-9)),
            ),
        ])
    }
}
