//! `remoe generate`: answers one prompt.

use crate::deployment::{self, DesiredDeployment, Launch};
use crate::exit::CliError;
use crate::flags::{DeploymentArgs, RemoteArg, SamplingArgs, stop_string};
use crate::output::progress::Progress;
use crate::output::{json, table};
use crate::planning::PlanningArgs;
use crate::planning::{self, ProblemInputs};
use crate::profile_source::{MissingProfile, warn_missing_contention};
use crate::prompt::PromptArgs;
use crate::remote_set::PredictionSource;
use clap::Args;
use remoe_hub::ModelArgs;
use remoe_planner::{Comparison, Measured, Outcome};
use remoe_proto::v1::generate_event::Event;
use remoe_proto::v1::main_model_client::MainModelClient;
use remoe_proto::v1::{Finished, GenerateRequest};
use serde::Serialize;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use tonic::transport::Channel;

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// Generate at most this many tokens
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    /// Stop before this text; may be repeated
    #[arg(long, value_name = "TEXT", value_parser = stop_string)]
    pub(crate) stop: Vec<String>,
    /// Continue after an end-of-sequence token
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    #[command(flatten)]
    pub(crate) source: ModelArgs,
    #[command(flatten)]
    pub(crate) deployment: DeploymentArgs,
    /// Plan the placement before answering, and print expected and measured figures [default: no planning]
    #[arg(long, value_enum, value_name = "WHEN", help_heading = "Planning", conflicts_with_all = ["plan", "remote_ratio", "replicas"])]
    pub(crate) remote: Option<RemoteArg>,
    #[command(flatten)]
    pub(crate) planning: PlanningArgs,
}

/// Timeout of one token.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(600);

/// Limit of the number of stop strings, as in the engine.
pub(crate) const MAX_STOP_STRINGS: usize = 32;

/// Complete answer with its figures.
#[derive(Debug, Serialize)]
pub(crate) struct GenerateOutput {
    prompt_ids: Vec<u32>,
    tokens: Vec<u32>,
    pub(crate) text: Option<String>,
    pub(crate) finish_reason: String,
    pub(crate) usage: TokenUsage,
    pub(crate) timings: Timings,
    pub(crate) experts: ExpertCounts,
    forwarded_positions: u64,
    #[serde(skip)]
    remote_work: RemoteWork,
    /// Comparison with the plan. `None` if the placement was not planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<Comparison>,
}

/// Work of remote functions for one answer.
#[derive(Debug, Default)]
struct RemoteWork {
    compute_seconds: f64,
    calls: u64,
}

/// Returns the measured times of `generation`, for comparison with the plan.
fn measured(generation: &GenerateOutput) -> Measured {
    let (usage, timings) = (&generation.usage, &generation.timings);
    Measured {
        input_tokens: usage.prompt_tokens,
        output_tokens: usage.completion_tokens,
        ttft_seconds: timings.ttft_s,
        prefill_seconds: timings.prefill_s,
        decode_seconds: timings.decode_s,
        remote_seconds: generation.remote_work.compute_seconds,
        remote_calls: generation.remote_work.calls,
    }
}

/// Formats one figure of a comparison.
fn comparison_text(plan: &Comparison, select: impl Fn(&Outcome) -> f64, scale: f64, unit: &str) -> String {
    let (expected, measured) = (select(&plan.expected), select(&plan.measured));
    let difference = match expected > 0.0 {
        true => format!(" ({:+.0} %)", 100.0 * (measured / expected - 1.0)),
        false => String::new(),
    };
    format!("{:.2} {unit}, expected {:.2} {unit}{difference}", measured * scale, expected * scale)
}

#[derive(Debug, Serialize)]
pub(crate) struct TokenUsage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    total_tokens: usize,
}

#[derive(Debug, Serialize)]
pub(crate) struct Timings {
    load_s: f64,
    pub(crate) ttft_s: f64,
    prefill_s: f64,
    pub(crate) decode_s: f64,
}

#[derive(Debug, Serialize)]
pub(crate) struct ExpertCounts {
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) fallback: u64,
    retries: u64,
}

/// Runs the prompt, and streams the answer to standard output. With `as_json`, prints it when it is complete.
pub(crate) async fn run(
    args: &GenerateArgs,
    as_json: bool,
    progress: &Arc<Progress>,
) -> Result<(), CliError> {
    if args.stop.len() > MAX_STOP_STRINGS {
        let message =
            format!("invalid --stop: expected at most {MAX_STOP_STRINGS} texts, got {}", args.stop.len());
        return Err(CliError::arguments("--stop", message));
    }
    let desired = place(args, progress).await?;
    args.prompt.check(&desired.inspection, args.max_tokens)?;
    let request = GenerateRequest {
        prompt: Some(args.prompt.to_generate_prompt()),
        max_tokens: args.max_tokens,
        temperature: Some(args.sampling.temperature),
        top_p: args.sampling.top_p,
        top_k: args.sampling.top_k,
        seed: args.sampling.seed,
        stop: args.stop.clone(),
        ignore_eos: args.ignore_eos,
        ..GenerateRequest::default()
    };
    let mut generation = desired
        .run_once(progress, async |client| generate(client, request, &mut stdout_sink(!as_json)).await)
        .await?;
    if !as_json {
        generation.end_text()?;
    }
    generation.plan = desired.account.as_ref().map(|account| account.compare(&measured(&generation)));
    if as_json {
        json::print(&generation)?;
    } else {
        progress.line(&figures_table(&generation));
    }
    Ok(())
}

/// Places the experts as the flags state, or by a plan.
async fn place(args: &GenerateArgs, progress: &Arc<Progress>) -> Result<DesiredDeployment, CliError> {
    let Some(remote) = args.remote else {
        let predictor = args.planning.predictor.as_deref();
        return deployment::desired_deployment(
            &args.source,
            &args.deployment,
            0.0,
            PredictionSource { predictor, prompt: Some(&args.prompt) },
        );
    };
    let mut desired = deployment::unplaced_deployment(&args.source, &args.deployment)?;
    let prompt = args.prompt.prompt.as_deref().filter(|_| !args.prompt.chat);
    let inputs = ProblemInputs { prompt, concurrency: Some(1), ..ProblemInputs::default() };
    let planning = &args.planning;
    let profile =
        planning.resolve_profile(&desired, &args.deployment, MissingProfile::Measure, progress).await?;
    let problem = planning.problem_on(&profile, &desired, &args.deployment, inputs)?;
    warn_missing_contention(&profile, &problem, progress);
    let answer = planning::plan(&problem, remote, profile.certainty()).await?;
    desired.place_as_planned(&problem, &answer)?;
    Ok(desired)
}

/// Consumer of the pieces of an answer's text.
pub(crate) type TextSink<'a> = &'a mut dyn FnMut(&str) -> std::io::Result<()>;

/// Returns a sink that writes pieces to standard output immediately, or discards them unless `show`.
pub(crate) fn stdout_sink(show: bool) -> impl FnMut(&str) -> std::io::Result<()> {
    move |text| {
        if !show {
            return Ok(());
        }
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }
}

/// Receives an answer until it ends, and passes its text to `sink`.
pub(crate) async fn generate(
    mut client: MainModelClient<Channel>,
    request: GenerateRequest,
    sink: TextSink<'_>,
) -> Result<GenerateOutput, CliError> {
    let timeout_error =
        |_elapsed| CliError::runtime(format!("cannot generate: no token within {TOKEN_TIMEOUT:?}"));
    let stream = timeout(TOKEN_TIMEOUT, client.generate(request)).await;
    let mut stream = stream.map_err(timeout_error)??.into_inner();
    let mut prompt_ids = Vec::new();
    while let Some(message) = timeout(TOKEN_TIMEOUT, stream.message()).await.map_err(timeout_error)?? {
        match message.event {
            Some(Event::Started(started)) => prompt_ids = started.prompt_ids,
            Some(Event::Piece(piece)) => sink(&piece.text)?,
            None => {}
            Some(Event::Finished(finished)) => return Ok(GenerateOutput::new(prompt_ids, finished)),
        }
    }
    Err(CliError::runtime("cannot finish the answer: the main function closed the stream"))
}

impl GenerateOutput {
    fn new(prompt_ids: Vec<u32>, finished: Finished) -> Self {
        let completion_tokens = finished.completion_tokens as usize;
        let experts = finished.experts.unwrap_or_default();
        Self {
            usage: TokenUsage {
                prompt_tokens: prompt_ids.len(),
                completion_tokens,
                total_tokens: prompt_ids.len() + completion_tokens,
            },
            prompt_ids,
            tokens: finished.tokens,
            text: finished.text,
            finish_reason: finished.reason,
            timings: Timings {
                load_s: finished.load_s,
                ttft_s: finished.ttft_s,
                prefill_s: finished.prefill_s,
                decode_s: finished.decode_s,
            },
            experts: ExpertCounts {
                local: experts.local,
                remote: experts.remote,
                fallback: experts.fallback,
                retries: experts.retries,
            },
            forwarded_positions: finished.forwarded_positions,
            remote_work: [finished.prefill_experts, finished.decode_experts].into_iter().flatten().fold(
                RemoteWork::default(),
                |work, phase| RemoteWork {
                    compute_seconds: work.compute_seconds + phase.remote_s,
                    calls: work.calls + phase.remote_calls,
                },
            ),
            plan: None,
        }
    }

    /// Returns the decode rate of the tokens after the first one, or 0 if there are none.
    pub(crate) fn tokens_per_second(&self) -> f64 {
        let decoded = self.usage.completion_tokens.saturating_sub(1);
        if self.timings.decode_s > 0.0 { decoded as f64 / self.timings.decode_s } else { 0.0 }
    }

    /// Prints the line break after the text. Without a tokenizer, prints the token ids.
    pub(crate) fn end_text(&self) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        if self.text.is_none() {
            let ids: Vec<String> = self.tokens.iter().map(u32::to_string).collect();
            out.write_all(ids.join(",").as_bytes())?;
        }
        out.write_all(b"\n")?;
        out.flush()
    }
}

fn figures_table(generation: &GenerateOutput) -> String {
    let (usage, timings, experts) = (&generation.usage, &generation.timings, &generation.experts);
    let rate = generation.tokens_per_second();
    let mut figures = vec![
        ("finished", generation.finish_reason.clone()),
        ("tokens", format!("{} prompt, {} generated", usage.prompt_tokens, usage.completion_tokens)),
        ("loading", format!("{:.3} s", timings.load_s)),
        ("TTFT", format!("{:.3} s", timings.ttft_s)),
        ("decoding", format!("{:.3} s, {rate:.1} tokens/s", timings.decode_s)),
        (
            "expert calls",
            format!(
                "{} local, {} remote, {} fallback, {} retries",
                experts.local, experts.remote, experts.fallback, experts.retries
            ),
        ),
    ];
    if let Some(plan) = &generation.plan {
        figures.push(("TTFT vs plan", comparison_text(plan, |outcome| outcome.ttft_seconds, 1e3, "ms")));
        // With a single token there is no time per output token.
        if usage.completion_tokens > 1 {
            figures.push(("TPOT vs plan", comparison_text(plan, |outcome| outcome.tpot_seconds, 1e3, "ms")));
        }
        figures.push(("cost vs plan", comparison_text(plan, |outcome| outcome.cost, 1e6, "microdollars")));
    }
    format!("\n{}", table::of_pairs(&figures))
}
