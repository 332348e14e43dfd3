//! The command line.

use crate::commands::convert::ConvertArgs;
use crate::commands::eval::EvalArgs;
use crate::commands::plan::PlanArgs;
use crate::commands::predictor::PredictorArgs;
use crate::commands::profile::ProfileArgs;
use crate::planning::{self, PlanningArgs, RemoteArg};
use crate::workload::ConcurrencyArgs;
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use remoe_fetch::{ModelArgs, ModelLocation};
use remoe_function::sizes;
use remoe_model::{DenseDtype, ExpertsDtype};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Serves Mixture-of-Experts models with remote experts.
#[derive(Debug, Parser)]
#[command(name = "remoe", version, propagate_version = true, after_help = EXAMPLES)]
pub(crate) struct Cli {
    /// Print one JSON object on standard output, everything else on standard error
    #[arg(long, global = true, help_heading = "Output")]
    pub(crate) json: bool,
    /// Show everything that the functions log
    #[arg(long, short, global = true, help_heading = "Output")]
    pub(crate) verbose: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show what a checkpoint is and what its parts weigh
    #[command(after_help = INSPECT_EXAMPLES)]
    Inspect(InspectArgs),
    /// Show the next-token logits of a prompt and the experts that it used
    #[command(after_help = LOGITS_EXAMPLES)]
    Logits(LogitsArgs),
    /// Answer one prompt
    #[command(after_help = GENERATE_EXAMPLES)]
    Generate(GenerateArgs),
    /// Chat with a model in the terminal, or answer prompts from a pipe
    #[command(after_help = RUN_EXAMPLES)]
    Run(RunArgs),
    /// Serve a model over HTTP until Ctrl-C
    #[command(after_help = UP_EXAMPLES)]
    Up(Box<UpArgs>),
    /// Show what runs on this machine
    Ps,
    /// End what runs on this machine, by its model or process
    Stop(StopArgs),
    /// Show what runs, waits and sleeps behind an address, until Ctrl-C
    Top(TopArgs),
    /// Show what requests cost and where the money for functions went
    Cost(CostArgs),
    /// Write what a Prometheus and a Grafana need to show cost, serving, plan and health
    Dashboards(DashboardsArgs),
    /// Decide where every expert lives, and what that costs
    #[command(after_help = PLAN_EXAMPLES)]
    Plan(PlanArgs),
    /// Measure what this machine takes to run a model
    #[command(after_help = PROFILE_EXAMPLES)]
    Profile(ProfileArgs),
    /// Run a set of prompts and record which experts they use
    #[command(after_help = RECORD_EXAMPLES)]
    Record(RecordArgs),
    /// Predict which experts prompts use, from recorded activations
    Predictor(PredictorArgs),
    /// Compare what strategies of placing experts cost, on published models and on one's own
    #[command(after_help = EVAL_EXAMPLES)]
    Eval(EvalArgs),
    /// Make a Mixture-of-Experts checkpoint of a dense one
    Convert(ConvertArgs),
    /// Look at what this machine has for serving models, and say what to do about what is missing
    Doctor(DoctorArgs),
    /// Print the completion script of a shell
    #[command(after_help = COMPLETIONS_EXAMPLES)]
    Completions(CompletionsArgs),
    /// Write the manual pages into a folder
    Man(ManArgs),
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) deployment: DeploymentArgs,
    #[command(flatten)]
    pub(crate) predictor: PredictorFolder,
    /// One prompt to answer, instead of a conversation
    #[arg(value_name = "PROMPT")]
    pub(crate) prompt: Option<String>,
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Generate at most this many tokens for each answer [default: what the context leaves]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: Option<u32>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// Name of a model, or a process id, as `remoe ps` shows them
    #[arg(value_name = "NAME|PID", required_unless_present = "all", conflicts_with = "all")]
    pub(crate) what: Option<String>,
    /// End everything
    #[arg(long)]
    pub(crate) all: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// A model that is to fit
    #[command(flatten)]
    pub(crate) source: Option<ModelArgs>,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Folder for the pages; made where it is missing
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) source: ModelArgs,
    /// Also compare experts with themselves quantised to int8, int4 and MXFP4: reads some of each layer's weights
    #[arg(long)]
    pub(crate) quantization_error: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LogitsArgs {
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    #[command(flatten)]
    pub(crate) predictor: PredictorFolder,
    #[command(flatten)]
    pub(crate) deployment: DeploymentArgs,
}

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct SamplingArgs {
    /// Randomness of the choice; 0 takes the likeliest token
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature, allow_negative_numbers = true)]
    pub(crate) temperature: f32,
    /// Choose among the likeliest tokens that make up this probability
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Choose among this many of the likeliest tokens
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<u32>,
    /// The same seed gives the same answers
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// Generate at most this many tokens
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    /// End before this text; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = stop_string)]
    pub(crate) stop: Vec<String>,
    /// Go on after an end-of-sequence token
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    #[command(flatten)]
    pub(crate) deployment: DeploymentArgs,
    /// Plan the placement, and show what the plan expected beside what was measured
    #[arg(long, value_enum, value_name = "WHERE", help_heading = "Planning", conflicts_with_all = ["plan", "remote_ratio", "replicas"])]
    pub(crate) remote: Option<RemoteArg>,
    #[command(flatten)]
    pub(crate) planning: PlanningArgs,
}

// A plan file says for how many requests it is.
#[derive(Debug, Args)]
#[command(mut_arg("concurrency", |concurrency| concurrency.conflicts_with("plan")))]
#[command(mut_args(|argument| match argument.get_id() == "pricing" {
    // What runs costs, whoever decided it.
    true => argument,
    false => planning::not_beside("remote_ratio", argument),
}))]
pub(crate) struct UpArgs {
    #[command(flatten)]
    pub(crate) deployment: DeploymentArgs,
    /// Further models, served at the same address
    #[arg(value_name = "MODEL", value_parser = OsStringValueParser::new().try_map(ModelLocation::try_from))]
    pub(crate) further: Vec<ModelLocation>,
    /// MoEDeployment to serve here as a cluster would; flags stand in place of its fields
    #[arg(long, short, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Whether planned experts may be remote
    #[arg(long, value_enum, default_value_t, help_heading = "Planning", conflicts_with_all = ["plan", "remote_ratio", "replicas"])]
    pub(crate) remote: RemoteArg,
    #[command(flatten)]
    pub(crate) planning: PlanningArgs,
    #[command(flatten)]
    pub(crate) concurrency: ConcurrencyArgs,
    /// What starts when
    #[arg(long, value_enum, default_value_t, value_name = "ORDER", help_heading = "Planning")]
    pub(crate) start: StartOrder,
    /// Address to listen on
    #[arg(long, value_name = "IP", default_value = "127.0.0.1", value_parser = host)]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 takes any free one
    #[arg(long, default_value_t = 8000)]
    pub(crate) port: u16,
    /// The model's name in the HTTP interface, one for each model in order [default: its folder's or
    /// repository's]
    #[arg(long, value_name = "NAME")]
    pub(crate) served_model_name: Vec<String>,
    /// Time without requests, as 60s or 500ms, after which a model sleeps: its functions end, and the next
    /// request starts them [default: never]
    #[arg(long, value_name = "TIME", value_parser = planning::duration)]
    pub(crate) idle: Option<Duration>,
    /// Time without use, as 10s or 500ms, after which a group of remote functions sleeps while its main function runs: who
    /// asks for its experts wakes it, and the main function loads them itself until it is there [default: groups sleep with
    /// their model]
    #[arg(long, value_name = "TIME", value_parser = planning::duration)]
    pub(crate) remote_idle: Option<Duration>,
    #[command(flatten)]
    pub(crate) follow: FollowArgs,
    /// File of keys and the tenants that they belong to, with what each may use
    #[arg(long, value_name = "FILE")]
    pub(crate) keys: Option<PathBuf>,
    /// Folder that is told what every request and every function costs; `remoe cost` adds it up
    #[arg(long, value_name = "DIR")]
    pub(crate) ledger: Option<PathBuf>,
    /// Key that clients must present as a bearer token
    #[arg(long, value_name = "KEY", env = "REMOE_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// File that gets a line of JSON for every answer; - is standard error [default: none]
    #[arg(long, value_name = "FILE")]
    pub(crate) access_log: Option<PathBuf>,
    /// Port that answers /metrics of everything without a key [default: none]
    #[arg(long, value_name = "PORT")]
    pub(crate) metrics_port: Option<u16>,
    /// Origins that browsers may call from; * is all of them [default: none]
    #[arg(long, value_name = "ORIGIN,ORIGIN,..", value_delimiter = ',')]
    pub(crate) cors_origins: Vec<String>,
    /// Largest body of a request [default: 4MiB]
    #[arg(long, value_name = "SIZE", value_parser = sizes::<u64>(1..=1 << 30))]
    pub(crate) body_limit: Option<u64>,
    /// Requests that run or wait; further ones are refused with 429 [default: 256]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) max_requests: Option<u32>,
}

/// How a placement follows what requests use.
#[derive(Debug, Clone, Args)]
pub(crate) struct FollowArgs {
    /// Let the placement follow requests: a wake is planned for those that wait, and when others are used than it
    /// was made for it is revised, at most once in so long, as 60s [default: it stays as it is]
    #[arg(long, value_name = "TIME", value_parser = planning::duration, conflicts_with = "plan", help_heading = "Following requests")]
    pub(crate) replan: Option<Duration>,
    /// Folder that remembers past requests, by the vectors of their prompts and counts of experts, nothing of their
    /// text [default: they are remembered until this ends]
    #[arg(long, value_name = "DIR", requires = "replan", help_heading = "Following requests")]
    pub(crate) experience: Option<PathBuf>,
    /// What that folder may take for each model
    #[arg(long, value_name = "SIZE", requires = "experience", default_value = "64MiB", value_parser = sizes::<u64>(1..=1 << 40), help_heading = "Following requests")]
    pub(crate) experience_bytes: u64,
    /// Remember nothing of single requests; predictions come from the predictor alone
    #[arg(long, requires = "replan", conflicts_with = "experience", help_heading = "Following requests")]
    pub(crate) forget: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Where the models answer
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub(crate) endpoint: String,
    /// Key to present, where keys are asked for
    #[arg(long, value_name = "KEY", env = "REMOE_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CostArgs {
    /// Folder that `remoe up --ledger` was given, or one with such folders in it, as a cluster's gateways have
    #[arg(value_name = "DIR", required_unless_present = "ledger", conflicts_with = "ledger")]
    folder: Option<PathBuf>,
    /// The same
    #[arg(long, value_name = "DIR")]
    ledger: Option<PathBuf>,
    /// Show that what was paid for the time of functions is what the ledger says it was for; fails where more than 1 %
    /// is left over
    #[arg(long)]
    pub(crate) reconcile: bool,
    /// Print every request instead
    #[arg(long, value_enum, value_name = "FORM", conflicts_with = "reconcile")]
    pub(crate) export: Option<ExportForm>,
}

impl CostArgs {
    /// Where the ledger is.
    pub(crate) fn ledger(&self) -> &Path {
        self.folder.as_deref().or(self.ledger.as_deref()).unwrap_or(Path::new("."))
    }
}

#[derive(Debug, Args)]
pub(crate) struct DashboardsArgs {
    /// Folder to write to
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
    /// Where the models answer
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub(crate) endpoint: String,
    /// File with the key to present, where keys are asked for
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Where Grafana reaches Prometheus
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9090")]
    pub(crate) prometheus: String,
    /// Between two looks of Prometheus, as 15s
    #[arg(long, value_name = "TIME", default_value = "15s")]
    pub(crate) interval: String,
}

/// How requests are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportForm {
    /// A table with a header
    Csv,
    /// A JSON object a line
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct RecordArgs {
    /// Prompts, one JSON object a line: {"prompt": ".."}, or a line of LMSYS-Chat-1M, ShareGPT, WikiText,
    /// C4 or SlimPajama; the first 500 characters of each are taken
    #[arg(long, value_name = "FILE")]
    pub(crate) prompts: PathBuf,
    /// File that the records are appended to
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Generate at most this many tokens for each prompt
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// Randomness of the choice; 0 takes the likeliest token
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature, allow_negative_numbers = true)]
    pub(crate) temperature: f32,
    /// The same seed gives the same answers
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Record the experts of every token, not only counts
    #[arg(long)]
    pub(crate) tokens: bool,
    /// Prompts that are answered at the same time
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub(crate) concurrency: usize,
    #[command(flatten)]
    pub(crate) predictor: PredictorFolder,
    #[command(flatten)]
    pub(crate) deployment: DeploymentArgs,
}

/// The prompt, in one of its forms.
#[derive(Debug, Args)]
pub(crate) struct PromptArgs {
    /// The prompt as text
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_ids", conflicts_with = "prompt_ids")]
    pub(crate) prompt: Option<String>,
    /// The prompt as token ids, exactly these
    #[arg(long, value_name = "ID,ID,..", value_delimiter = ',', num_args = 1, value_parser = token_id)]
    pub(crate) prompt_ids: Vec<u32>,
    /// Render the text as a user's message with the model's chat template
    #[arg(long, requires = "prompt", conflicts_with = "prompt_ids")]
    pub(crate) chat: bool,
}

/// Which functions run, and how.
#[derive(Debug, Clone, Args)]
pub(crate) struct DeploymentArgs {
    #[command(flatten)]
    pub(crate) source: ModelArgs,
    /// Type to compute in [default: the checkpoint's]
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<Dtype>,
    /// Keep routed experts as int8, int4 or mxfp4, quantised as they are loaded, or as fp8 where they are stored so [default: they stay in the type computed in]
    #[arg(long, value_name = "int8|int4|mxfp4|fp8")]
    pub(crate) experts_dtype: Option<ExpertsDtype>,
    /// Keep the embedding, attention, dense layers, shared experts and the head as int8 or int4, or by its name in the type computed in
    /// [default: int8 beside quantised experts, on CPUs]
    #[arg(long, value_name = "int8|int4|bfloat16|float32")]
    pub(crate) dense_dtype: Option<DenseDtype>,
    /// Positions of a text at most: fewer than the model serves otherwise, or more than the training of its longrope had, which
    /// rotates every position as in long texts
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) max_model_len: Option<usize>,
    /// cpu, cuda or cuda:INDEX [default: cuda where there is one]
    #[arg(long, value_parser = device)]
    pub(crate) device: Option<String>,
    /// Operations of the main function [default: torch on cuda, native on CPUs]
    #[arg(long, value_enum, env = "REMOE_BACKEND")]
    pub(crate) backend: Option<Backend>,
    /// Share of each layer's experts that are remote [default: 0; for up planned, with --replicas 0.5]
    #[arg(
        long,
        value_name = "B",
        allow_negative_numbers = true,
        help_heading = "Placement",
        conflicts_with = "plan"
    )]
    pub(crate) remote_ratio: Option<f64>,
    /// Which experts make up that share
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "SET",
        help_heading = "Placement",
        requires = "remote_ratio"
    )]
    pub(crate) remote_set: RemoteSet,
    /// Recorded activations that say which experts are used least, for --remote-set history
    #[arg(long, value_name = "FILE", help_heading = "Placement", requires = "remote_ratio")]
    pub(crate) history: Option<PathBuf>,
    /// Remote processes, each hosting all remote experts; with --groups those of each group [default: 1]
    #[arg(long, value_name = "Z", help_heading = "Placement", conflicts_with = "plan")]
    pub(crate) replicas: Option<u32>,
    /// Deal the remote experts of each layer to this many groups of processes, which work at the same time
    #[arg(
        long,
        value_name = "G",
        help_heading = "Placement",
        requires = "remote_ratio",
        conflicts_with = "plan"
    )]
    pub(crate) groups: Option<u32>,
    /// File that names the remote experts of each layer, or of each group of processes
    #[arg(long, value_name = "FILE", help_heading = "Placement")]
    pub(crate) plan: Option<PathBuf>,
    /// Threads of each function; in a plan of the main function, and of a remote one at most [default: all
    /// cores, or as planned]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) threads: Option<usize>,
    /// Memory limit of each remote function, as 500MB, 2GiB or plain bytes; in a plan exactly this much
    #[arg(long, value_name = "SIZE", value_parser = sizes::<u64>(1..=u64::MAX))]
    pub(crate) remote_memory: Option<u64>,
    /// Memory for keys and values
    #[arg(long, value_name = "SIZE", value_parser = sizes::<u64>(1..=u64::MAX))]
    pub(crate) kv_cache_bytes: Option<u64>,
    /// Sequences in one forward, at most
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) max_batch: Option<usize>,
    /// Remote functions that start at the same time, at most, those first that waiting requests need most; after a
    /// sleep it is served when so many of them are there [default: all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) starts_at_once: Option<usize>,
    /// Seconds until everything must be ready
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds)]
    pub(crate) ready_timeout: Duration,
}

impl DeploymentArgs {
    /// `source` with nothing else said.
    pub(crate) fn of(source: ModelArgs) -> Self {
        Self {
            source,
            dtype: None,
            experts_dtype: None,
            dense_dtype: None,
            max_model_len: None,
            device: None,
            backend: None,
            remote_ratio: None,
            remote_set: RemoteSet::default(),
            history: None,
            replicas: None,
            groups: None,
            plan: None,
            threads: None,
            remote_memory: None,
            kv_cache_bytes: None,
            max_batch: None,
            starts_at_once: None,
            ready_timeout: READY_TIMEOUT,
        }
    }
}

/// How long functions may take to be ready where nobody says.
const READY_TIMEOUT: Duration = Duration::from_secs(120);

/// A predictor that was saved.
#[derive(Debug, Args)]
pub(crate) struct PredictorFolder {
    /// Folder of a predictor, made by `remoe predictor build`, for --remote-set prediction [default:
    /// MODEL/predictor]
    #[arg(long, value_name = "DIR", help_heading = "Placement")]
    pub(crate) predictor: Option<PathBuf>,
}

/// Which experts are remote where a share of them is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum RemoteSet {
    /// The last ids
    #[default]
    Last,
    /// Those that the recorded activations of --history used least
    History,
    /// Those that a saved predictor expects to be used least, by the prompt where there is one
    Prediction,
}

/// What starts when.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum StartOrder {
    /// The plan is made, then all functions start at the same time
    #[default]
    Planned,
    /// The main function starts at once with the memory that the worst case needs, while the plan for the
    /// rest is made
    Preallocated,
    /// The plan is made, then one function starts after the other
    Sequential,
}

/// Which set of operations computes what is no expert; answers are the same bits within one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// The kernels' own, on CPUs
    Native,
    /// LibTorch's
    Torch,
}

/// What can be computed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    Float32,
    Bfloat16,
}

impl Dtype {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
        }
    }
}

// What the engine takes: it would refuse the rest too, after the model has been loaded.
const MOST_TEMPERATURE: f32 = 2.0;
const STOP_BYTES: usize = 1024;

pub(crate) fn temperature(text: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| "is not a number".to_owned())?;
    if (0.0..=MOST_TEMPERATURE).contains(&value) {
        Ok(value)
    } else {
        Err(format!("must be from 0 to {MOST_TEMPERATURE}"))
    }
}

pub(crate) fn stop_string(text: &str) -> Result<String, String> {
    if (1..=STOP_BYTES).contains(&text.len()) {
        Ok(text.to_owned())
    } else {
        Err(format!("must have 1 to {STOP_BYTES} bytes"))
    }
}

pub(crate) fn probability(text: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| "is not a number".to_owned())?;
    if value > 0.0 && value <= 1.0 { Ok(value) } else { Err("must be above 0 and at most 1".to_owned()) }
}

fn token_id(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| "token ids are whole numbers".to_owned())
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(value @ 1..) => Ok(value),
        _ => Err("must be 1 or more".to_owned()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let value: f64 = text.parse().map_err(|_| "is not a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(value) {
        Ok(duration) if !duration.is_zero() && value <= 1e6 => Ok(duration),
        _ => Err("must be above 0 and at most 1000000".to_owned()),
    }
}

fn host(text: &str) -> Result<IpAddr, String> {
    match text {
        "localhost" => Ok(IpAddr::from([127, 0, 0, 1])),
        _ => text.parse().map_err(|_| "must be an IP address".to_owned()),
    }
}

fn device(text: &str) -> Result<String, String> {
    let index_is_number = || {
        let index = text.strip_prefix("cuda:");
        index.is_some_and(|index| index.parse::<u16>().is_ok())
    };
    if matches!(text, "cpu" | "cuda") || index_is_number() {
        Ok(text.to_owned())
    } else {
        Err("must be cpu, cuda or cuda:INDEX".to_owned())
    }
}

const EXAMPLES: &str = "Examples:
  remoe run ./model
  remoe inspect ./model
  remoe generate ./model --prompt 'Once upon a time' --remote-ratio 0.5
  remoe up ./model --port 8000

Sizes are 500MB, 2GiB or plain bytes.

Environment:
  REMOE_BIN_DIR  Folder of the function programs, where they are not beside remoe
  REMOE_BACKEND  As --backend
  REMOE_LOG      What the functions log, for example debug; all of it is shown
  REMOE_API_KEY  As --api-key of up
  REMOE_MODEL_CACHE  As --model-cache
  HF_TOKEN, HF_ENDPOINT  For models hf://ORGANISATION/NAME
  AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL  For models s3://BUCKET/PREFIX";

const INSPECT_EXAMPLES: &str = "Examples:
  remoe inspect --model ./model
  remoe inspect --model hf://org/name --json";

const LOGITS_EXAMPLES: &str = "Examples:
  remoe logits --model ./model --prompt-ids 1,2,3 --json
  remoe logits --model ./model --prompt 'Once upon' --dtype float32 --remote-ratio 0.25";

const GENERATE_EXAMPLES: &str = "Examples:
  remoe generate --model ./model --prompt 'Once upon a time' --max-tokens 64
  remoe generate --model ./model --chat --prompt 'What is a lake?' --temperature 0.7 --seed 3
  remoe generate --model ./model --prompt-ids 1,2,3 --remote-ratio 0.5 --replicas 2 --json";

const RUN_EXAMPLES: &str = "Examples:
  remoe run ./model
  remoe run ./model 'What is a lake?' --remote-ratio 0.5
  printf 'What is a lake?\\nAnd a pond?\\n' | remoe run ./model

In the terminal: /help lists what can be set, Ctrl-C ends an answer, Ctrl-D the conversation. Text between
\"\"\" and \"\"\" and lines that end in a backslash go on in the next line.";

const COMPLETIONS_EXAMPLES: &str = "Examples:
  remoe completions bash > ~/.local/share/bash-completion/completions/remoe
  remoe completions zsh > ~/.zfunc/_remoe
  remoe completions fish > ~/.config/fish/completions/remoe.fish";

const PROFILE_EXAMPLES: &str = "Examples:
  remoe profile --model ./model --quick
  remoe profile --model ./model --out profile.json --dtype bfloat16
  remoe profile --model ./model --address 10.0.0.7:50051 --json";

const RECORD_EXAMPLES: &str = "Examples:
  remoe record --model demo/model --prompts prompts.jsonl --out history.npy
  remoe record --model demo/model --prompts chats.jsonl --out history.npy --max-tokens 100 --tokens";

const UP_EXAMPLES: &str = "Examples:
  remoe up --model ./model
  remoe up --model ./model --remote-ratio 0.25 --replicas 2 --port 0 --json
  remoe up --model ./model --remote-ratio 0.5 --groups 3 --replicas 2
  remoe up --model ./model --remote-ratio 0.5 --remote-set history --history history.npy
  remoe up --file deployment.yaml
  remoe up --model ./model --plan plan.json --host 0.0.0.0 --api-key secret";

const PLAN_EXAMPLES: &str = "Examples:
  remoe plan --model ./model --tpot 50ms
  remoe plan ./model --explain
  remoe plan hf://deepseek-ai/DeepSeek-V3 --nodes examples/nodes/aws-us-east-1.yaml
  remoe plan ./model --nodes nodes.yaml --manifest > deployment.yaml
  remoe plan --problem problem.json
  remoe plan --problem problem.json --previous plan.json --hysteresis 0.1
  remoe plan --problem problem.json --evaluate plan.json --json
  remoe plan --problem problem.json --preallocate";

const EVAL_EXAMPLES: &str = "Examples:
  remoe eval --out evaluation
  remoe eval --model ./model --records history.npy --predictor ./model/predictor --json
  remoe eval --model ./model --profile profile.json --pricing prices.yaml
  remoe eval --only regret --problem problem.json --out evaluation";
