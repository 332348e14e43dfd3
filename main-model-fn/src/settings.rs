use clap::builder::RangedU64ValueParser;
use remoe_hub::ModelArgs;
use remoe_kernels::{InstructionPath, MAX_THREADS};
use remoe_model::kv_pages::PREFILL_ROWS;
use remoe_model::{DenseDtype, ExpertsDtype, KvCacheDtype};
use remoe_process::{parse_duration, sizes, whole_microseconds, whole_seconds};
use remoe_proto::identity::Identity;
use remoe_weights::ComputeDtype;
use serde_json::{Map, Value};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Variables of a chat template, from a JSON object.
fn template_variables(text: &str) -> Result<Map<String, Value>, String> {
    crate::http::check_variables(serde_json::from_str(text).map_err(|error| error.to_string())?)
}

/// Whole numbers from 1 to `most`.
fn up_to(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most)
}

/// Serves a Mixture-of-Experts model: computes its non-expert modules and frequently used experts, and calls remote
/// functions for the others.
#[derive(Debug, Clone, clap::Parser)]
#[command(name = "main-model-fn", version)]
pub struct Settings {
    /// The model.
    #[command(flatten)]
    pub source: ModelArgs,
    /// Compute dtype: float32 or bfloat16. Defaults to that of the checkpoint (float32 for float16).
    #[arg(long)]
    pub dtype: Option<ComputeDtype>,
    /// Quantisation of routed experts at load time: int8, int4 or mxfp4, or fp8 if they are stored as fp8.
    /// Defaults to the compute dtype. Must be equal for all functions of a deployment.
    #[arg(long)]
    pub experts_dtype: Option<ExpertsDtype>,
    /// Dtype of the other weights (embedding, attention, dense layers, shared experts, head): int8, int4, or the
    /// compute dtype by its name. Defaults to int8 beside quantised experts on CPUs, else to the compute dtype.
    #[arg(long)]
    pub dense_dtype: Option<DenseDtype>,
    /// Form of the KV cache: int8 takes about half of bfloat16, with other bits; native operations only. Defaults to
    /// the compute dtype. Must be equal for the main functions of a deployment.
    #[arg(long, value_name = "int8")]
    pub kv_cache_dtype: Option<KvCacheDtype>,
    /// Maximum context length in tokens, prompt and answer together. With longrope, a value above the trained length
    /// rotates every position as in long texts.
    #[arg(long, value_name = "N")]
    pub max_model_len: Option<usize>,
    /// Device: cpu, cuda or cuda:INDEX. Defaults to cuda if available.
    #[arg(long)]
    pub device: Option<crate::device::DeviceName>,
    /// Compute threads. Defaults to all cores.
    #[arg(long, value_parser = up_to(MAX_THREADS as u64))]
    pub threads: Option<usize>,
    /// Instruction path of the kernels. Defaults to the fastest measured one.
    #[arg(long)]
    pub instruction_path: Option<InstructionPath>,
    /// Address of the HTTP interface. Port 0 selects a free port.
    #[arg(long, default_value = "127.0.0.1:8000", conflicts_with = "no_http")]
    pub http_listen: SocketAddr,
    /// Serve the control interface only.
    #[arg(long)]
    pub no_http: bool,
    /// Address of /healthz and /readyz, isolated from client load. Default: none. Port 0 selects a free port.
    #[arg(long)]
    pub health_listen: Option<SocketAddr>,
    /// Additional address of /metrics alone. Default: none. Port 0 selects a free port.
    #[arg(long)]
    pub metrics_listen: Option<SocketAddr>,
    /// Address of the gRPC control interface. Port 0 selects a free port.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub control_listen: SocketAddr,
    /// Folder with tls.crt, tls.key and ca.crt: enables mutual TLS on the control interface and to remote
    /// functions. Files are reloaded on change.
    #[arg(long, value_name = "DIR", env = "REMOE_IDENTITY_DIR", requires = "operator_identity")]
    pub identity_dir: Option<PathBuf>,
    /// Identity allowed on the control interface: spiffe://remoe/NAMESPACE/operator.
    #[arg(long, value_name = "URI", env = "REMOE_OPERATOR_IDENTITY", requires = "identity_dir")]
    pub operator_identity: Option<Identity>,
    /// Identity allowed on the HTTP interface: spiffe://remoe/NAMESPACE/gateway. Default: all clients, without TLS.
    #[arg(long, value_name = "URI", env = "REMOE_GATEWAY_IDENTITY", requires = "identity_dir")]
    pub gateway_identity: Option<Identity>,
    /// Name of the model in the API. Defaults to that of its folder or repository. If repeated, all names are
    /// accepted and answers use the first.
    #[arg(long)]
    pub served_model_name: Vec<String>,
    /// Serve /v1/primer, a model summary (tokenizer and embedding) from which gateways predict expert usage.
    #[arg(long)]
    pub primer: bool,
    /// API key that HTTP clients must send as a bearer token.
    #[arg(long, env = "REMOE_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// API key of the gateway: the tenants that it names in x-remoe-tenant are believed. Not needed with
    /// --gateway-identity.
    #[arg(long, env = "REMOE_GATEWAY_KEY", hide_env_values = true)]
    pub gateway_key: Option<String>,
    /// Allowed CORS origins; * allows all. Default: none.
    #[arg(long, value_delimiter = ',')]
    pub cors_origins: Vec<String>,
    /// Maximum size of an HTTP request body.
    #[arg(long, value_name = "SIZE", default_value_t = 4 << 20, value_parser = sizes::<usize>(1..=1 << 30))]
    pub body_limit: usize,
    /// Memory of the KV cache. Bounds concurrency.
    #[arg(long, value_name = "SIZE", default_value_t = 2 << 30, value_parser = sizes::<u64>(1..=u64::MAX))]
    pub kv_cache_bytes: u64,
    /// Maximum batch size, in sequences.
    #[arg(long, default_value_t = 32, value_parser = up_to(4096))]
    pub max_batch: usize,
    /// Maximum number of requests that run or wait. Further ones get status 429.
    #[arg(long, default_value_t = 256, value_parser = up_to(1 << 20))]
    pub max_requests: usize,
    /// Tokens of a prompt that go through the layers together (layered prefill); longer prompts take several turns.
    /// Fewer where their hidden states would take more than 96 MiB.
    #[arg(long, default_value_t = PREFILL_ROWS, value_parser = up_to(1 << 16))]
    pub iteration_rows: usize,
    /// Target inter-token latency of running streams while prompts are computed, such as 50ms. Defaults to three
    /// times what a decode iteration takes alone.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub target_itl: Option<Duration>,
    /// Longest time that a request may wait before its first token is computed, such as 30s; then it fails with status 503.
    /// The request field `queue_deadline` overrides it. Default: no limit.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub queue_deadline: Option<Duration>,
    /// Variables of the chat template for requests that do not set them, as a JSON object, such as
    /// {"enable_thinking": false}. The request field `chat_template_kwargs` overrides single ones.
    #[arg(long, value_name = "JSON", value_parser = template_variables)]
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Memory of the fallback cache: remote experts that were loaded because no remote function answered.
    #[arg(long, value_name = "SIZE", default_value_t = 1 << 30, value_parser = sizes::<usize>(0..=u64::MAX))]
    pub fallback_bytes: usize,
    /// Polling time for remote answers before the engine sleeps, such as 100us or a number of microseconds: waking a
    /// thread takes ten times a loopback exchange. Polling keeps a core busy; use 0 below one vCPU.
    #[arg(long, value_name = "TIME", default_value_t = 100, value_parser = whole_microseconds::<u64>(0..=1_000_000))]
    pub poll_us: u64,
    /// Memory limit, if below those of the control groups and the machine. A placement whose experts do not fit
    /// is rejected.
    #[arg(long, value_name = "SIZE", value_parser = sizes::<u64>(1..=u64::MAX))]
    pub memory_bytes: Option<u64>,
    /// File to append the activation records of finished requests to.
    #[arg(long, value_name = "FILE")]
    pub record_activations: Option<PathBuf>,
    /// Record the experts of every token, not only counts.
    #[arg(long, requires = "record_activations")]
    pub record_tokens: bool,
    /// Grace period of the drain, such as 30s or a number of seconds; then running requests fail.
    #[arg(long, value_name = "TIME", default_value_t = 30, value_parser = whole_seconds::<u64>(0..=86_400))]
    pub drain_seconds: u64,
    /// Process id of the launcher; the function ends with it.
    #[arg(long)]
    pub launcher_pid: Option<u32>,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn durations_may_have_units() {
        let taken = |drain: &str, poll: &str| {
            let arguments = ["main-model-fn", "model", "--drain-seconds", drain, "--poll-us", poll];
            let settings = Settings::try_parse_from(arguments).map_err(|error| error.to_string())?;
            Ok::<_, String>((settings.drain_seconds, settings.poll_us))
        };
        assert_eq!(taken("30", "100"), Ok((30, 100)));
        assert_eq!(taken("1m", "1ms"), Ok((60, 1000)));
        assert_eq!(taken("0", "0"), Ok((0, 0)));
        let error = taken("30", "100ns").unwrap_err();
        assert!(error.contains("--poll-us") && error.contains("whole number of microseconds"), "{error}");
    }
}
