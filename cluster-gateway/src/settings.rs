use std::net::SocketAddr;
use std::path::PathBuf;

/// One address for all MoEDeployments that the operator serves.
#[derive(Debug, Clone, clap::Parser)]
#[command(name = "remoe-gateway", version)]
pub(crate) struct Settings {
    /// Where clients are served; port 0 takes any free one.
    #[arg(long, env = "REMOE_LISTEN", default_value = "[::]:8000")]
    pub(crate) listen: SocketAddr,
    /// Where /metrics is served.
    #[arg(long, env = "REMOE_METRICS_LISTEN", default_value = "[::]:9090")]
    pub(crate) metrics_listen: SocketAddr,
    /// Namespaces whose MoEDeployments are served, separated by commas; all by default.
    #[arg(
        long = "watch-namespace",
        env = "REMOE_WATCH_NAMESPACE",
        value_name = "NAMES",
        value_delimiter = ','
    )]
    pub(crate) watch_namespaces: Vec<String>,
    /// Namespace that this pod runs in.
    #[arg(long, env = "POD_NAMESPACE")]
    pub(crate) namespace: String,
    /// Name of the release that this gateway is of, as its operator has it.
    #[arg(long, env = "REMOE_RELEASE", default_value = "remoe")]
    pub(crate) release: String,
    /// Name of this pod.
    #[arg(long, env = "POD_NAME")]
    pub(crate) pod: String,
    /// Identity of this pod.
    #[arg(long, env = "POD_UID")]
    pub(crate) uid: String,
    /// File with tenants and their keys; without it, everybody may ask for everything.
    #[arg(long, env = "REMOE_KEYS", value_name = "FILE")]
    pub(crate) keys: Option<PathBuf>,
    /// Folder with tls.crt, tls.key and ca.crt: what is shown to main functions that take requests from gateways alone. Files
    /// are read again when they change.
    #[arg(long, env = "REMOE_IDENTITY_DIR", value_name = "DIR")]
    pub(crate) identity_dir: Option<PathBuf>,
    /// Folder of ledgers, in which this pod has one of its own name; without it what requests cost is known as long as this
    /// process lives.
    #[arg(long, env = "REMOE_LEDGER", value_name = "DIR")]
    pub(crate) ledger: Option<PathBuf>,
    /// Dollars that a core costs an hour: this process's own is paid for by it.
    #[arg(long, env = "REMOE_CPU_CORE_HOUR", default_value_t = 0.03)]
    pub(crate) cpu_core_hour: f64,
    /// Dollars that 1 GB (1e9 bytes) of memory costs an hour, likewise.
    #[arg(long, env = "REMOE_MEMORY_GB_HOUR", default_value_t = 0.004)]
    pub(crate) memory_gb_hour: f64,
    /// Folder in which is kept what is known of models and of past requests, so that one who begins anew can predict; each
    /// gateway takes a part of its own. Without it that is known as long as this process lives.
    #[arg(long, env = "REMOE_EXPERIENCE", value_name = "DIR")]
    pub(crate) experience: Option<PathBuf>,
    /// Bytes of past requests of one model.
    #[arg(long, env = "REMOE_EXPERIENCE_BYTES", default_value_t = 16 << 20, value_parser = clap::value_parser!(u64).range(1 << 20..=1 << 40))]
    pub(crate) experience_bytes: u64,
    /// Memory for predictions about all models together, in bytes; requests to those that find no room are not followed.
    #[arg(long, env = "REMOE_PREDICTION_BYTES", default_value_t = 512 << 20)]
    pub(crate) prediction_bytes: u64,
    /// Origins that browsers may call from; none by default.
    #[arg(long, env = "REMOE_CORS_ORIGINS", value_delimiter = ',')]
    pub(crate) cors_origins: Vec<String>,
    /// Largest body of a request in bytes.
    #[arg(long, env = "REMOE_BODY_LIMIT", default_value_t = 4 << 20)]
    pub(crate) body_limit: usize,
    /// Requests of a model that run or wait, at most.
    #[arg(long, env = "REMOE_MAX_REQUESTS", default_value_t = 1024)]
    pub(crate) max_requests: usize,
    /// Seconds that a request is held while functions start, at most.
    #[arg(long, env = "REMOE_WAKE_SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) wake_seconds: u64,
    /// Seconds that requests which run or wait have to end when this process is asked to.
    #[arg(long, env = "REMOE_DRAIN_SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) drain_seconds: u64,
}
