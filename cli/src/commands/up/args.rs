//! Flags of `remoe up`.

use crate::flags::{DeploymentArgs, RemoteArg};
use crate::planning::{self, PlanningArgs};
use crate::workload::ConcurrencyArgs;
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{ArgMatches, Args, FromArgMatches, ValueEnum};
use remoe_gateway_core::AccessLogTarget;
use remoe_hub::{ModelArgs, ModelLocation, SourceArgs};
use remoe_process::{parse_duration, sizes};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

// A plan file states its own concurrency.
#[derive(Debug, Args)]
#[command(mut_arg("concurrency", |concurrency| concurrency.conflicts_with("plan")))]
#[command(mut_args(|argument| match argument.get_id() == "pricing" {
    // Prices apply to every placement, also to one by --remote-ratio.
    true => argument,
    false => planning::conflicting_with("remote_ratio", argument),
}))]
#[command(mut_args(help_for_up))]
pub(crate) struct UpArgs {
    #[command(flatten)]
    pub(crate) source: FirstModel,
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

/// First model, and the model cache and source settings that all models share.
#[derive(Debug, Clone)]
pub(crate) struct FirstModel {
    /// Absent if the file of `--file` states the model instead.
    pub(crate) model: Option<ModelLocation>,
    model_cache: Option<PathBuf>,
    sources: SourceArgs,
}

impl FirstModel {
    /// Returns the model arguments for `location`.
    pub(crate) fn at(&self, location: &ModelLocation) -> ModelArgs {
        ModelArgs {
            model: location.clone(),
            model_cache: self.model_cache.clone(),
            sources: self.sources.clone(),
        }
    }
}

impl FromArgMatches for FirstModel {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_left_to_file = matches.contains_id("file") && !matches.contains_id("model_source");
        if is_left_to_file {
            let model_cache = matches.get_one::<PathBuf>("model_cache").cloned();
            return Ok(Self { model: None, model_cache, sources: SourceArgs::from_arg_matches(matches)? });
        }
        let ModelArgs { model, model_cache, sources } = ModelArgs::from_arg_matches(matches)?;
        Ok(Self { model: Some(model), model_cache, sources })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for FirstModel {
    fn group_id() -> Option<clap::Id> {
        ModelArgs::group_id()
    }

    fn augment_args(command: clap::Command) -> clap::Command {
        ModelArgs::augment_args(command)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        ModelArgs::augment_args_for_update(command)
    }
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

/// Adapts the help of shared arguments to `up`.
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

/// Checks that `text` is a JSON object and returns it in canonical form.
fn json_object(text: &str) -> Result<String, String> {
    let object: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(text).map_err(|error| format!("expected a JSON object: {error}"))?;
    Ok(serde_json::Value::Object(object).to_string())
}

fn host(text: &str) -> Result<IpAddr, String> {
    match text {
        "localhost" => Ok(IpAddr::from([127, 0, 0, 1])),
        _ => text.parse().map_err(|_| "expected an IP address".to_owned()),
    }
}
