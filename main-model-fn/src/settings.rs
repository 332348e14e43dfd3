use clap::builder::RangedU64ValueParser;
use remoe_experts::ComputeDtype;
use remoe_fetch::ModelArgs;
use remoe_function::sizes;
use remoe_kernels::{InstructionPath, MAX_THREADS};
use remoe_model::{DenseDtype, ExpertsDtype};
use remoe_wire::identity::Identity;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Whole numbers from 1 to `most`.
fn up_to(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most)
}

/// Serves a Mixture-of-Experts model: its non-expert modules and frequent experts here, the others in
/// remote functions.
#[derive(Debug, Clone, clap::Parser)]
#[command(name = "main-model-fn", version)]
pub struct Settings {
    /// The model.
    #[command(flatten)]
    pub source: ModelArgs,
    /// Compute dtype: float32 or bfloat16; the checkpoint's by default (float32 for float16).
    #[arg(long)]
    pub dtype: Option<ComputeDtype>,
    /// Form in which routed experts are kept: int8, int4 or mxfp4, quantised as they are loaded, or fp8, as it is stored; the compute dtype
    /// by default. The same for all functions of a deployment.
    #[arg(long)]
    pub experts_dtype: Option<ExpertsDtype>,
    /// Form in which the embedding, attention, dense layers, shared experts and the head are kept: int8, int4, or the compute dtype by
    /// its name. int8 beside quantised experts by default, on CPUs.
    #[arg(long)]
    pub dense_dtype: Option<DenseDtype>,
    /// Positions of a text at most: fewer than the model serves otherwise, or more than the training of its longrope had,
    /// which rotates every position as in long texts.
    #[arg(long, value_name = "N")]
    pub max_model_len: Option<usize>,
    /// cpu, cuda or cuda:INDEX; CUDA where there is one, by default.
    #[arg(long)]
    pub device: Option<crate::device::DeviceName>,
    /// Threads that compute; all cores by default.
    #[arg(long, value_parser = up_to(MAX_THREADS as u64))]
    pub threads: Option<usize>,
    /// Instruction path of the kernels: what is measured fastest, by default.
    #[arg(long)]
    pub instruction_path: Option<InstructionPath>,
    /// Where users speak HTTP; port 0 takes any free one.
    #[arg(long, default_value = "127.0.0.1:8000", conflicts_with = "no_http")]
    pub http_listen: SocketAddr,
    /// Serve the control interface only.
    #[arg(long)]
    pub no_http: bool,
    /// Where probes find /healthz and /readyz, whatever clients do to the other addresses; nowhere by
    /// default. Port 0 takes any free one.
    #[arg(long)]
    pub health_listen: Option<SocketAddr>,
    /// Where to serve /metrics alone, beside the HTTP interface; nowhere by default. Port 0 takes any free one.
    #[arg(long)]
    pub metrics_listen: Option<SocketAddr>,
    /// Where launchers speak gRPC; port 0 takes any free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub control_listen: SocketAddr,
    /// Folder with tls.crt, tls.key and ca.crt: the control interface and the connections to remote functions
    /// are within TLS then, both ends showing a certificate. Files are read again when they change.
    #[arg(long, value_name = "DIR", env = "REMOE_IDENTITY_DIR", requires = "operator_identity")]
    pub identity_dir: Option<PathBuf>,
    /// Who may use the control interface, as its certificate names it: spiffe://remoe/NAMESPACE/operator.
    #[arg(long, value_name = "URI", env = "REMOE_OPERATOR_IDENTITY", requires = "identity_dir")]
    pub operator_identity: Option<Identity>,
    /// Who may use the HTTP interface, as its certificate names it: spiffe://remoe/NAMESPACE/gateway. Everybody by default,
    /// without TLS.
    #[arg(long, value_name = "URI", env = "REMOE_GATEWAY_IDENTITY", requires = "identity_dir")]
    pub gateway_identity: Option<Identity>,
    /// The model's name in the API; by default that of its folder or repository. Given several times, requests may use
    /// each, and answers have the first.
    #[arg(long)]
    pub served_model_name: Vec<String>,
    /// Tell whoever asks for /v1/primer how the model makes tokens of text and what its embedding is like: gateways
    /// predict from that.
    #[arg(long)]
    pub primer: bool,
    /// Key that HTTP clients must send as a bearer token.
    #[arg(long, env = "REMOE_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Origins that browsers may call from; none by default.
    #[arg(long, value_delimiter = ',')]
    pub cors_origins: Vec<String>,
    /// Largest HTTP request body.
    #[arg(long, value_name = "SIZE", default_value_t = 4 << 20, value_parser = sizes::<usize>(1..=1 << 30))]
    pub body_limit: usize,
    /// Memory for keys and values; bounds what runs at the same time.
    #[arg(long, value_name = "SIZE", default_value_t = 2 << 30, value_parser = sizes::<u64>(1..=u64::MAX))]
    pub kv_cache_bytes: u64,
    /// Sequences that run at the same time.
    #[arg(long, default_value_t = 32, value_parser = up_to(4096))]
    pub max_batch: usize,
    /// Requests that run or wait; further ones are refused with 429.
    #[arg(long, default_value_t = 256, value_parser = up_to(1 << 20))]
    pub max_requests: usize,
    /// Rows of one iteration: decoding rows first, prompts fill the rest.
    #[arg(long, default_value_t = 512, value_parser = up_to(1 << 16))]
    pub iteration_rows: usize,
    /// Memory for experts that had to be loaded because no remote function answered.
    #[arg(long, value_name = "SIZE", default_value_t = 1 << 30, value_parser = sizes::<usize>(0..=u64::MAX))]
    pub fallback_bytes: usize,
    /// Microseconds for which the engine polls for answers of remote functions before it sleeps: waking a thread
    /// takes ten times a loopback exchange. Polling keeps a core busy: 0 for a function with less than a vCPU of
    /// its own.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    pub poll_us: u64,
    /// Memory that the function may take, where that is less than its control groups and the machine
    /// allow. A placement whose experts do not fit is refused.
    #[arg(long, value_name = "SIZE", value_parser = sizes::<u64>(1..=u64::MAX))]
    pub memory_bytes: Option<u64>,
    /// File to which the expert activations of every finished request are appended.
    #[arg(long, value_name = "FILE")]
    pub record_activations: Option<PathBuf>,
    /// Record the experts of every token, not only counts.
    #[arg(long, requires = "record_activations")]
    pub record_tokens: bool,
    /// Seconds from the request to end until requests that are still running are failed.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(..=86_400))]
    pub drain_seconds: u64,
    /// End with this process.
    #[arg(long)]
    pub launcher_pid: Option<u32>,
}
