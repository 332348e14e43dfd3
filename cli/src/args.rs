//! The command line.

use crate::commands::check::CheckArgs;
use crate::commands::convert::ConvertArgs;
use crate::commands::dashboards::scrape_interval;
use crate::commands::eval::EvalArgs;
use crate::commands::plan::PlanArgs;
use crate::commands::predictor::PredictorArgs;
use crate::commands::profile::ProfileArgs;
use crate::commands::schema::SchemaArgs;
use crate::planning::{self, PlanningArgs, RemoteArg};
use crate::workload::ConcurrencyArgs;
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use remoe_fetch::{ModelArgs, ModelLocation};
use remoe_function::{parse_duration, parse_duration_or_seconds, sizes};
use remoe_gateway::AccessLogTarget;
use remoe_model::{DenseDtype, ExpertsDtype};
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Serves Mixture-of-Experts models with remote experts.
#[derive(Debug, Parser)]
#[command(name = "remoe", version, about = ABOUT, propagate_version = true, after_help = EXAMPLES)]
pub(crate) struct Cli {
    /// Print JSON on standard output (one object; `up`: one per event), everything else on standard error
    #[arg(long, global = true, help_heading = "Output")]
    pub(crate) json: bool,
    /// Show all log lines of the functions, not only warnings and errors; in `plan`, show how the plan was found
    #[arg(long, short, global = true, help_heading = "Output")]
    pub(crate) verbose: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show the architecture of a checkpoint and the sizes of its parts
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
    #[command(after_help = UP_EXAMPLES, override_usage = "remoe up [OPTIONS] [MODEL]...")]
    Up(Box<UpArgs>),
    /// Fetch a whole model into the cache, if disk has room for it; a download that ended early is continued
    #[command(after_help = PULL_EXAMPLES)]
    Pull(PullArgs),
    /// List the models in the cache and the disk space that they take
    #[command(after_help = LIST_EXAMPLES)]
    List(ListArgs),
    /// Remove a model from the cache
    #[command(after_help = RM_EXAMPLES)]
    Rm(RmArgs),
    /// List the deployments on this machine
    #[command(after_help = PS_EXAMPLES)]
    Ps(PsArgs),
    /// Stop a deployment on this machine, by model name or process id
    #[command(after_help = STOP_EXAMPLES)]
    Stop(StopArgs),
    /// Show requests, rates, latencies, memory and cost of each model at an endpoint, every second until q or Ctrl-C
    #[command(after_help = TOP_EXAMPLES)]
    Top(TopArgs),
    /// Show the cost of requests and of functions in US dollars, from a ledger
    #[command(after_help = COST_EXAMPLES)]
    Cost(CostArgs),
    /// Write a configuration for Prometheus and Grafana, with dashboards of cost, serving, plan and health
    #[command(after_help = DASHBOARDS_EXAMPLES)]
    Dashboards(DashboardsArgs),
    /// Plan the placement of experts, with its latency and cost
    #[command(after_help = PLAN_EXAMPLES)]
    Plan(PlanArgs),
    /// Measure the hardware profile of this machine for a model
    #[command(after_help = PROFILE_EXAMPLES)]
    Profile(ProfileArgs),
    /// Run a set of prompts and record which experts they use
    #[command(after_help = RECORD_EXAMPLES)]
    Record(RecordArgs),
    /// Predict which experts a prompt will use, from recorded activations
    Predictor(PredictorArgs),
    /// Compare the cost of placement strategies, on published models and on your own
    #[command(after_help = EVAL_EXAMPLES)]
    Eval(EvalArgs),
    /// Convert a dense checkpoint into a Mixture-of-Experts one
    Convert(ConvertArgs),
    /// Check this machine for serving models, and advise on what is missing
    #[command(after_help = DOCTOR_EXAMPLES)]
    Doctor(DoctorArgs),
    /// Check files before they are used: keys, workloads, plans, problems, profiles, nodes, prices, MoEDeployments
    #[command(after_help = CHECK_EXAMPLES)]
    Check(CheckArgs),
    /// Print the JSON schema of a file that planning reads, or list these files
    #[command(after_help = SCHEMA_EXAMPLES)]
    Schema(SchemaArgs),
    /// Print the completion script of a shell
    #[command(visible_alias = "completion", after_help = COMPLETIONS_EXAMPLES)]
    Completions(CompletionsArgs),
    /// Write the manual pages into a folder
    #[command(after_help = MAN_EXAMPLES)]
    Man(ManArgs),
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
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

#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    #[command(flatten)]
    pub(crate) source: ModelArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Cache folder of fetched models [env: REMOE_MODEL_CACHE] [default: remoe/models in the user's cache folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) model_cache: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// Model as `remoe list` shows it, with or without @REVISION; without it, all revisions
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    /// Cache folder of fetched models [env: REMOE_MODEL_CACHE] [default: remoe/models in the user's cache folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) model_cache: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// Print the names of models and nothing else, one per line
    #[arg(long, short)]
    pub(crate) quiet: bool,
    /// API key to read the state of models with, if their gateway needs one
    #[arg(long, value_name = "KEY", env = "REMOE_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// Model name or process id, as shown by `remoe ps`; required unless --all. A name stops every process that
    /// serves this model, and with it the other models of that process
    #[arg(value_name = "NAME|PID", required_unless_present = "all", conflicts_with = "all")]
    pub(crate) what: Option<String>,
    /// Stop all deployments
    #[arg(long)]
    pub(crate) all: bool,
}

#[derive(Debug, Args)]
#[command(mut_arg("model_positional", |model| model.help(
    "Model to check for fit, optional, here or as --model: a Hugging Face folder, hf://ORGANISATION/NAME[@REVISION], \
     s3://BUCKET/PREFIX or https://HOST/PATH"
)))]
pub(crate) struct DoctorArgs {
    /// Model to check for fit
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
    /// Output folder; created if missing
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) source: ModelArgs,
    /// Measure the error of int8, int4 and MXFP4 experts; reads some weights of each layer
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

/// Sampling of a conversation, whose defaults are the model's.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct ChatSamplingArgs {
    /// Sampling temperature; 0 takes the most likely token [default: that of the model's generation_config.json, else
    /// 0]
    #[arg(long, value_name = "T", value_parser = temperature, allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Nucleus sampling: sample from the most likely tokens up to this probability mass [default: that of
    /// generation_config.json, else all tokens]
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Sample from the K most likely tokens; 0 for all [default: that of generation_config.json, else all tokens]
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<u32>,
    /// Leave out tokens that are less likely than this share of the most likely one [default: that of
    /// generation_config.json, else none]
    #[arg(long, value_name = "P", value_parser = min_p, allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Make tokens that were there already less likely by this factor; 1 for none [default: that of
    /// generation_config.json, else 1]
    #[arg(long, value_name = "X", value_parser = repetition_penalty, allow_negative_numbers = true)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Random seed; equal seeds give equal answers
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
}

/// Sampling of tokens.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct SamplingArgs {
    /// Sampling temperature; 0 takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature, allow_negative_numbers = true)]
    pub(crate) temperature: f32,
    /// Nucleus sampling: sample from the most likely tokens up to this probability mass [default: all tokens]
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Sample from the K most likely tokens [default: all tokens]
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<u32>,
    /// Random seed; equal seeds give equal answers
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
    /// Stop before this text; may be repeated
    #[arg(long, value_name = "TEXT", value_parser = stop_string)]
    pub(crate) stop: Vec<String>,
    /// Continue after an end-of-sequence token
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    #[command(flatten)]
    pub(crate) deployment: DeploymentArgs,
    /// Plan the placement before answering, and print expected and measured figures [default: no planning]
    #[arg(long, value_enum, value_name = "WHEN", help_heading = "Planning", conflicts_with_all = ["plan", "remote_ratio", "replicas"])]
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
#[command(mut_args(help_for_up))]
pub(crate) struct UpArgs {
    #[command(flatten)]
    pub(crate) deployment: DeploymentArgs,
    /// Further models at the same endpoint. Flags apply to every model, except --served-model-name (one per model);
    /// --plan, --profile, --predictor and --history fit one model only
    #[arg(value_name = "MODEL", value_parser = OsStringValueParser::new().try_map(ModelLocation::try_from))]
    pub(crate) further: Vec<ModelLocation>,
    /// MoEDeployment manifest (YAML, as from `remoe plan --nodes FILE --manifest`) to serve on this machine; flags
    /// override its fields
    #[arg(long, short, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Use of remote experts in the plan
    #[arg(long, value_enum, value_name = "WHEN", default_value_t, help_heading = "Planning", conflicts_with_all = ["plan", "remote_ratio", "replicas"])]
    pub(crate) remote: RemoteArg,
    #[command(flatten)]
    pub(crate) planning: PlanningArgs,
    #[command(flatten)]
    pub(crate) concurrency: ConcurrencyArgs,
    /// Without a profile, measure this machine before the model starts. By default the model starts on assumed speeds,
    /// and the machine is measured while no request runs
    #[arg(long, help_heading = "Planning", conflicts_with_all = ["profile", "plan", "remote_ratio", "replicas"])]
    pub(crate) profile_first: bool,
    /// Start order of the functions
    #[arg(long, value_enum, default_value_t, value_name = "ORDER", help_heading = "Planning")]
    pub(crate) start: StartOrder,
    /// Address to listen on
    #[arg(long, value_name = "IP", default_value = "127.0.0.1", value_parser = host)]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 takes any free one
    #[arg(long, default_value_t = 8000)]
    pub(crate) port: u16,
    /// Name of the model in the HTTP interface; repeat the flag for several models, in their order
    /// [default: the name of its folder or repository]
    #[arg(long, value_name = "NAME")]
    pub(crate) served_model_name: Vec<String>,
    /// Idle window, such as 60s or 500ms: a model without requests for this long scales to zero, and the next
    /// request wakes it [default: never]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) idle: Option<Duration>,
    /// Idle window of a remote group, such as 10s or 500ms: a group that is unused for this long sleeps while its model
    /// runs. A request for experts of the group wakes it. Meanwhile, the main function computes these experts
    /// [default: groups sleep only with their model]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) remote_idle: Option<Duration>,
    #[command(flatten)]
    pub(crate) follow: FollowArgs,
    /// File of API keys by tenant, with models, rate limits and budgets [default: none]
    #[arg(long, value_name = "FILE")]
    pub(crate) keys: Option<PathBuf>,
    /// Folder of the ledger: usage records of requests and functions, for `remoe cost` [default: none]
    #[arg(long, value_name = "DIR")]
    pub(crate) ledger: Option<PathBuf>,
    /// Folder of what outlives a restart: responses that `previous_response_id` names, in `responses/` below it
    /// [default: none; responses are kept in memory]
    #[arg(long, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// API key that clients send as a bearer token, or as x-api-key [default: none]
    #[arg(long, value_name = "KEY", env = "REMOE_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// Access log, one line per request: `text` or `json` on standard error, `off`, or a file that gets JSON
    /// [default: text if standard error is a terminal, else off]
    #[arg(long, value_name = "off|text|json|FILE")]
    pub(crate) access_log: Option<AccessLogTarget>,
    /// Additional port that serves /metrics of all tenants and needs no API key [default: none]
    #[arg(long, value_name = "PORT")]
    pub(crate) metrics_port: Option<u16>,
    /// Allowed CORS origins; * allows all [default: none]
    #[arg(long, value_name = "ORIGIN,ORIGIN,..", value_delimiter = ',')]
    pub(crate) cors_origins: Vec<String>,
    /// Maximum size of a request body [default: 4MiB]
    #[arg(long, value_name = "SIZE", value_parser = sizes::<u64>(1..=1 << 30))]
    pub(crate) body_limit: Option<u64>,
    /// Maximum number of running and waiting requests per model; further ones get 429 [default: 256]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) max_requests: Option<u32>,
    /// Target inter-token latency of running streams while prompts are computed, such as 50ms [default: the limit --tpot
    /// of the plan; without a plan, three times what a decode iteration takes alone]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) target_itl: Option<Duration>,
    /// Variables of the chat template for requests that do not set them, as a JSON object, such as
    /// {"enable_thinking": false} [default: none]
    #[arg(long, value_name = "JSON", value_parser = json_object)]
    pub(crate) chat_template_kwargs: Option<String>,
    /// Longest time that a request may wait for capacity, such as 30s; then it gets 503. The request field
    /// `queue_deadline` overrides it [default: no limit]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) queue_deadline: Option<Duration>,
}

/// Placement that follows expert usage.
#[derive(Debug, Clone, Args)]
pub(crate) struct FollowArgs {
    /// Revise the placement when expert usage drifts, at most once per TIME, such as 60s. Also replans at each wake,
    /// for the requests then waiting [default: keep the placement]
    #[arg(long, value_name = "TIME", value_parser = parse_duration, conflicts_with = "plan", help_heading = "Adapting to traffic")]
    pub(crate) replan: Option<Duration>,
    /// Folder where `up` keeps what it learns from requests: prompt vectors and expert usage, no text
    /// [default: in memory only]
    #[arg(long, value_name = "DIR", requires = "replan", help_heading = "Adapting to traffic")]
    pub(crate) experience: Option<PathBuf>,
    /// Size limit of --experience per model
    #[arg(long, value_name = "SIZE", requires = "experience", default_value = "64MiB", value_parser = sizes::<u64>(1..=1 << 40), help_heading = "Adapting to traffic")]
    pub(crate) experience_bytes: u64,
    /// Predict each request from --predictor alone, not from earlier requests. Replanning still uses the recent expert
    /// usage of all requests together
    #[arg(long, requires = "replan", conflicts_with = "experience", help_heading = "Adapting to traffic")]
    pub(crate) forget: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// URL of the gateway [default: that of the deployment on this machine, else http://127.0.0.1:8000]
    #[arg(long, value_name = "URL")]
    pub(crate) endpoint: Option<String>,
    /// API key, if the gateway needs one
    #[arg(long, value_name = "KEY", env = "REMOE_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// Print one table and end
    #[arg(long)]
    pub(crate) once: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CostArgs {
    /// Ledger folder of `remoe up --ledger`, or a folder of ledgers, as cluster gateways write them
    #[arg(value_name = "DIR", required_unless_present = "ledger", conflicts_with = "ledger")]
    folder: Option<PathBuf>,
    /// Same as DIR
    #[arg(long, value_name = "DIR")]
    ledger: Option<PathBuf>,
    /// Reconcile the ledger: compare the cost of all functions with the sum of requests, idle time, cold starts and
    /// other parts; fails if more than 1% is not accounted for
    #[arg(long)]
    pub(crate) reconcile: bool,
    /// Print every request instead of the summary
    #[arg(long, value_enum, value_name = "FORM", conflicts_with = "reconcile")]
    pub(crate) export: Option<ExportForm>,
}

impl CostArgs {
    /// Folder of the ledger.
    pub(crate) fn ledger(&self) -> &Path {
        self.folder.as_deref().or(self.ledger.as_deref()).unwrap_or(Path::new("."))
    }
}

#[derive(Debug, Args)]
pub(crate) struct DashboardsArgs {
    /// Folder to write to
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
    /// URL of the gateway; metrics are read at /metrics below its path
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub(crate) endpoint: String,
    /// File with the API key, if the gateway needs one
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// URL of Prometheus for Grafana
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9090")]
    pub(crate) prometheus: String,
    /// Scrape interval of Prometheus, such as 15s
    #[arg(long, value_name = "TIME", default_value = "15s", value_parser = scrape_interval)]
    pub(crate) interval: Duration,
}

/// Form of the exported requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportForm {
    /// A table with a header
    Csv,
    /// One JSON object per line
    Json,
}

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
    pub(crate) deployment: DeploymentArgs,
}

/// The prompt, in one of its forms.
#[derive(Debug, Args)]
pub(crate) struct PromptArgs {
    /// Prompt as text
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_ids", conflicts_with = "prompt_ids")]
    pub(crate) prompt: Option<String>,
    /// Prompt as token ids, used as they are
    #[arg(long, value_name = "ID,ID,..", value_delimiter = ',', num_args = 1, value_parser = token_id)]
    pub(crate) prompt_ids: Vec<u32>,
    /// Apply the model's chat template to the prompt, as a user message
    #[arg(long, requires = "prompt", conflicts_with = "prompt_ids")]
    pub(crate) chat: bool,
}

/// Functions of a deployment.
#[derive(Debug, Clone, Args)]
pub(crate) struct DeploymentArgs {
    #[command(flatten)]
    pub(crate) source: ModelArgs,
    /// Compute dtype [default: that of the checkpoint]
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<Dtype>,
    /// Quantise routed experts to int8, int4 or mxfp4 at load time, or keep stored fp8 experts
    /// [default: the compute dtype]
    #[arg(long, value_name = "int8|int4|mxfp4|fp8")]
    pub(crate) experts_dtype: Option<ExpertsDtype>,
    /// Dtype of all weights but routed experts (embedding, attention, dense layers, shared experts, head): int8 or int4
    /// on CPUs, or the compute dtype [default: int8 on CPUs if --experts-dtype is int8, int4 or mxfp4, else the compute
    /// dtype]
    #[arg(long, value_name = "int8|int4|bfloat16|float32")]
    pub(crate) dense_dtype: Option<DenseDtype>,
    /// Maximum context length in tokens, prompt and answer together. For models with longrope, a value above the
    /// trained length applies long-context scaling to short prompts too [default: that of the model; with longrope, the
    /// trained length]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) max_model_len: Option<usize>,
    /// Device of the main function: cpu, cuda or cuda:INDEX [default: cuda if available]
    #[arg(long, value_parser = device)]
    pub(crate) device: Option<String>,
    /// Backend of the main function [default: torch on cuda, native on CPUs]
    #[arg(long, value_enum, env = "REMOE_BACKEND")]
    pub(crate) backend: Option<Backend>,
    /// Share of each layer's experts that are remote [default: 0]
    #[arg(
        long,
        value_name = "B",
        allow_negative_numbers = true,
        help_heading = "Placement",
        conflicts_with = "plan"
    )]
    pub(crate) remote_ratio: Option<f64>,
    /// Selection of the remote experts
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "SET",
        help_heading = "Placement",
        requires = "remote_ratio"
    )]
    pub(crate) remote_set: RemoteSet,
    /// Activation records from `remoe record`, required with --remote-set history
    #[arg(long, value_name = "FILE", help_heading = "Placement", requires = "remote_ratio")]
    pub(crate) history: Option<PathBuf>,
    /// Replicas of each remote group [default: 1]
    #[arg(long, value_name = "Z", help_heading = "Placement", conflicts_with = "plan")]
    pub(crate) replicas: Option<u32>,
    /// Number of remote groups; requires --remote-ratio. Each group holds a slice of every layer's remote experts, and
    /// all groups work in parallel [default: 1]
    #[arg(
        long,
        value_name = "G",
        help_heading = "Placement",
        requires = "remote_ratio",
        conflicts_with = "plan"
    )]
    pub(crate) groups: Option<u32>,
    /// Plan file: the remote experts of each layer or group, as from `remoe plan MODEL --json > plan.json`
    #[arg(long, value_name = "FILE", help_heading = "Placement")]
    pub(crate) plan: Option<PathBuf>,
    /// Threads of each function; a plan may give remote functions fewer [default: all cores, or as planned]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) threads: Option<usize>,
    /// Memory limit of each remote function, such as 500MB or 2GiB. If `up` or `generate` makes a plan, remote
    /// functions get exactly this size [default: no limit, or as planned]
    #[arg(long, value_name = "SIZE", value_parser = sizes::<u64>(1..=u64::MAX))]
    pub(crate) remote_memory: Option<u64>,
    /// Memory of the KV cache [default: 2GiB, or as planned]
    #[arg(long, value_name = "SIZE", value_parser = sizes::<u64>(1..=u64::MAX))]
    pub(crate) kv_cache_bytes: Option<u64>,
    /// Maximum batch size, in sequences [default: 32, or the planned concurrency if that is more]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) max_batch: Option<usize>,
    /// Start at most N remote functions at a time [default: all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) starts_at_once: Option<usize>,
    /// Longest time without progress until all functions are ready (no byte of the weights arrives or is read), such as
    /// 120s or 10m; a number without a unit is in seconds
    #[arg(long, value_name = "TIME", default_value = "120s", value_parser = parse_duration_or_seconds)]
    pub(crate) ready_timeout: Duration,
}

/// Adapts the help of shared arguments to `up`, which plans, wakes and charges.
fn help_for_up(argument: clap::Arg) -> clap::Arg {
    match argument.get_id().as_str() {
        "model_positional" => argument.help(
            "Model, required here or as --model unless --file names one: a Hugging Face folder, \
             hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX or https://HOST/PATH; demo is the demo model of an \
             installed package",
        ),
        "remote_ratio" => argument.help(
            "Share of each layer's experts that are remote, in place of a plan [default: as planned; 0.5 with \
             --replicas]",
        ),
        "replicas" => {
            argument.help("Replicas of each remote group [default: planned; 1 with --remote-ratio]")
        }
        "starts_at_once" => argument.help(
            "Start at most N remote functions at a time. When a model wakes, requests begin once the main function and \
             the N remote functions that start first are ready. --replan starts those first that are expected to be \
             used most [default: all]",
        ),
        "pricing" => argument.help(
            "Price list (examples/pricing) for the plan, the ledger and budgets [default: $0.04 per core hour, $0.004 \
             per GB hour]",
        ),
        _ => argument,
    }
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
    /// Folder of a predictor from `remoe predictor build`, for --remote-set prediction [default: MODEL/predictor]
    #[arg(long, value_name = "DIR", help_heading = "Placement")]
    pub(crate) predictor: Option<PathBuf>,
}

/// Selection of the remote experts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum RemoteSet {
    /// The experts with the highest ids
    #[default]
    Last,
    /// The least used experts in --history
    History,
    /// The experts that --predictor expects to be used least: for the prompt of `generate` or `logits`, in other
    /// commands for the average past prompt
    Prediction,
}

/// Start order of the functions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum StartOrder {
    /// Plan, then start all functions together, at most --starts-at-once remote ones at a time
    #[default]
    Planned,
    /// Start the main function at once, with memory for the worst case of expert usage; meanwhile plan the rest, then
    /// start the remote functions as with `planned`
    Preallocated,
    /// Plan, then start one function after the other
    Sequential,
}

/// Backend of the non-expert operations; answers are bit-identical within one backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// Remoe's kernels, on CPUs
    Native,
    /// LibTorch
    Torch,
}

/// Compute dtype.
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
    let value: f32 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if (0.0..=MOST_TEMPERATURE).contains(&value) {
        Ok(value)
    } else {
        Err(format!("expected 0 to {MOST_TEMPERATURE}"))
    }
}

pub(crate) fn stop_string(text: &str) -> Result<String, String> {
    if (1..=STOP_BYTES).contains(&text.len()) {
        Ok(text.to_owned())
    } else {
        Err(format!("expected 1 to {STOP_BYTES} bytes"))
    }
}

pub(crate) fn min_p(text: &str) -> Result<f32, String> {
    number_within(text, 0.0..=1.0)
}

pub(crate) fn repetition_penalty(text: &str) -> Result<f32, String> {
    number_within(text, 0.01..=100.0)
}

fn number_within(text: &str, range: RangeInclusive<f32>) -> Result<f32, String> {
    let expected = || format!("expected a number from {} to {}, got {text}", range.start(), range.end());
    let value: f32 = text.parse().map_err(|_| expected())?;
    if range.contains(&value) { Ok(value) } else { Err(expected()) }
}

pub(crate) fn probability(text: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if value > 0.0 && value <= 1.0 {
        Ok(value)
    } else {
        Err("expected a number above 0 and up to 1".to_owned())
    }
}

/// A JSON object, as text.
fn json_object(text: &str) -> Result<String, String> {
    let object: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(text).map_err(|error| format!("expected a JSON object: {error}"))?;
    Ok(serde_json::Value::Object(object).to_string())
}

fn token_id(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| "expected token ids as whole numbers".to_owned())
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(value @ 1..) => Ok(value),
        _ => Err("expected 1 or more".to_owned()),
    }
}

fn host(text: &str) -> Result<IpAddr, String> {
    match text {
        "localhost" => Ok(IpAddr::from([127, 0, 0, 1])),
        _ => text.parse().map_err(|_| "expected an IP address".to_owned()),
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
        Err("expected cpu, cuda or cuda:INDEX".to_owned())
    }
}

const ABOUT: &str = "Serves Mixture-of-Experts models with remote experts.\n\
                     A model runs as one main function and, if planned or asked for, remote functions that hold some \
                     of its experts. Each function is a process.";

const EXAMPLES: &str = "Examples:
  remoe run ./model
  remoe inspect ./model
  remoe generate ./model --prompt 'Once upon a time' --remote-ratio 0.5
  remoe up ./model --port 8000

Values:
  SIZE   500MB, 2GiB or plain bytes
  TIME   200ms, 10s, 1.5s, 10m, 2h or 1m30s: always with the unit
  SHARE  0.05 for 5%; --cold-share accepts both forms

Environment:
  REMOE_BIN_DIR          Folder of main-model-fn and remote-expert-fn [default: that of remoe]
  REMOE_BACKEND          Same as --backend
  REMOE_LOG              Log level or filter of the functions, e.g. debug; implies --verbose
  REMOE_API_KEY          Same as --api-key
  REMOE_MODEL_CACHE      Same as --model-cache
  HF_TOKEN, HF_ENDPOINT  Access to models hf://ORGANISATION/NAME
  AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL
                         Access to models s3://BUCKET/PREFIX";

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
  remoe run ./model 'Summarise this text.' < lake.txt

In the terminal: /help lists the commands and settings, Ctrl-C ends an answer, Ctrl-D the
conversation. Text between \"\"\" and \"\"\" may span lines; a backslash at the end of a line
continues it.";

const PULL_EXAMPLES: &str = "Examples:
  remoe pull hf://allenai/OLMoE-1B-7B-0125-Instruct
  remoe pull s3://bucket/models/olmoe --model-cache /data/models";

const LIST_EXAMPLES: &str = "Examples:
  remoe list
  remoe list --json";

const RM_EXAMPLES: &str = "Examples:
  remoe rm hf://allenai/OLMoE-1B-7B-0125-Instruct";

const PS_EXAMPLES: &str = "Examples:
  remoe ps
  remoe ps --quiet
  remoe ps --json

States are those of `remoe top`: `active`, `asleep`, `waking` or `draining`; `loading` before a model
answers for the first time, `locked` if its gateway needs a key, `unreachable` if it does not answer.";

const STOP_EXAMPLES: &str = "Examples:
  remoe stop model
  remoe stop 4711
  remoe stop --all

`stop` waits up to 60 s for running requests to end.";

const TOP_EXAMPLES: &str = "Examples:
  remoe top
  remoe top --endpoint http://10.0.0.7:8000 --api-key secret
  remoe top --once
  remoe top --json

Keys: q or Ctrl-C quits, s and the arrow keys choose the column to sort by, r reverses the order.
Rates and times to first token (TTFT) are those of the last 10 s. With --once or --json, or if the
output is not a terminal, `top` measures for a second, prints once and ends.";

const COST_EXAMPLES: &str = "Examples:
  remoe cost ./ledger
  remoe cost ./ledger --reconcile
  remoe cost ./ledger --export csv > requests.csv

Amounts are US dollars (with --json and --export: nano-dollars), at the prices that
`remoe up --pricing` (on a cluster: spec.pricing) had when the functions ran. The report covers the
whole ledger, with a sum for each day in UTC. For another time range, export the requests and
filter them by their time in nanoseconds since 1970: column `unix_ns` of CSV, field `at` of JSON.";

const DASHBOARDS_EXAMPLES: &str = "Examples:
  remoe dashboards ./monitoring
  remoe dashboards ./monitoring --endpoint http://10.0.0.7:8000 --api-key-file key.txt

The command prints how to start Prometheus and Grafana with the folder.";

const DOCTOR_EXAMPLES: &str = "Examples:
  remoe doctor
  remoe doctor ./model
  remoe doctor hf://org/name --json

The exit code is 1 if a check fails.";

const MAN_EXAMPLES: &str = "Examples:
  remoe man ~/.local/share/man/man1";

const SCHEMA_EXAMPLES: &str = "Examples:
  remoe schema
  remoe schema problem > problem.schema.json";

const CHECK_EXAMPLES: &str = "Examples:
  remoe check keys.yaml
  remoe check deployments/*.yaml prices.yaml --json
  remoe check --kind workload workload.yaml

The exit code is 0 if all files can be used, else 2. Of MoEDeployments, fields that only a cluster
uses are checked by name; `kubectl apply --dry-run=server` checks their values.";

const COMPLETIONS_EXAMPLES: &str = "Examples:
  remoe completions bash > ~/.local/share/bash-completion/completions/remoe
  remoe completions zsh > ~/.zfunc/_remoe
  remoe completions fish > ~/.config/fish/completions/remoe.fish

In bash, zsh and fish, `remoe stop` completes the names of running models.";

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
  remoe up --model ./model --plan plan.json --host 0.0.0.0 --api-key secret
  remoe up ./model --idle 60s --replan 60s --experience ./experience
  remoe up ./model --pricing examples/pricing/aws-fargate.yaml --ledger ./ledger
  remoe up ./model --keys keys.yaml --ledger ./ledger
  remoe up ./small ./large --served-model-name small --served-model-name large --idle 10s";

const PLAN_EXAMPLES: &str = "Examples:
  remoe plan --model ./model --tpot 50ms
  remoe plan ./model --explain
  remoe plan ./model --json > plan.json
  remoe up ./model --plan plan.json
  remoe plan ./model --previous plan.json --json > next.json
  remoe plan hf://deepseek-ai/DeepSeek-V3 --nodes examples/nodes/aws-us-east-1.yaml
  remoe plan ./model --nodes nodes.yaml --manifest > deployment.yaml
  remoe plan --problem problem.json
  remoe plan --problem problem.json --previous plan.json --hysteresis 0.1
  remoe plan --problem problem.json --evaluate plan.json --json
  remoe plan --problem problem.json --preallocate

`plan --json` prints plan files. --previous and --evaluate read them, and so does --plan of up,
run, generate, logits and record. docs/reference/plan-files.md has the fields of plan and problem
files.
tests/fixtures/planning/example-problem.json is an example problem.";

const EVAL_EXAMPLES: &str = "Examples:
  remoe eval --out evaluation
  remoe eval --model ./model --records history.npy --predictor ./model/predictor --json
  remoe eval --model ./model --profile profile.json --pricing prices.yaml
  remoe eval --only regret --problem problem.json --out evaluation

docs/evaluation.md describes the experiments, the Remoe paper and the assumed server.";

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn up(arguments: &[&str]) -> Result<UpArgs, String> {
        let line = [&["remoe", "up", "model"], arguments].concat();
        match Cli::try_parse_from(line).map_err(|error| error.to_string())?.command {
            Command::Up(args) => Ok(*args),
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn flags_take_one_grammar_of_durations() {
        for (text, seconds) in [("10m", 600), ("2h", 7200), ("1m30s", 90), ("1500ms", 1)] {
            let args =
                up(&["--idle", text, "--tpot", text, "--queue-deadline", text, "--ready-timeout", text]);
            let args = args.unwrap();
            let taken = [
                args.idle,
                Some(args.planning.tpot),
                args.queue_deadline,
                Some(args.deployment.ready_timeout),
            ];
            assert!(taken.iter().all(|taken| taken.unwrap().as_secs() == seconds), "{text}: {taken:?}");
        }
        let error = up(&["--idle", "10"]).unwrap_err();
        assert!(error.contains("'10'") && error.contains("write 10ms, 10s, 10m or 10h"), "{error}");
    }

    #[test]
    fn ready_timeout_takes_seconds_without_a_unit() {
        for (text, seconds) in [("120", 120), ("120s", 120), ("2m", 120), ("3600", 3600)] {
            assert_eq!(up(&["--ready-timeout", text]).unwrap().deployment.ready_timeout.as_secs(), seconds);
        }
        assert_eq!(up(&[]).unwrap().deployment.ready_timeout, READY_TIMEOUT);
        for text in ["0", "soon", "1e3", "-1"] {
            assert!(
                up(&[&format!("--ready-timeout={text}")]).unwrap_err().contains("--ready-timeout"),
                "{text}"
            );
        }
    }
}
