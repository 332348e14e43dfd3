use remoe_function::{sizes, whole_seconds};
use std::net::SocketAddr;
use std::path::PathBuf;

/// Serves all MoEDeployments of the operator at one address.
#[derive(Debug, Clone, clap::Parser)]
#[command(name = "remoe-gateway", version)]
pub(crate) struct Settings {
    /// Address of the HTTP interface. Port 0 selects a free port.
    #[arg(long, env = "REMOE_LISTEN", default_value = "[::]:8000")]
    pub(crate) listen: SocketAddr,
    /// Address of /metrics.
    #[arg(long, env = "REMOE_METRICS_LISTEN", default_value = "[::]:9090")]
    pub(crate) metrics_listen: SocketAddr,
    /// Namespaces whose MoEDeployments are served, separated by commas. Default: all.
    #[arg(
        long = "watch-namespace",
        env = "REMOE_WATCH_NAMESPACE",
        value_name = "NAMES",
        value_delimiter = ','
    )]
    pub(crate) watch_namespaces: Vec<String>,
    /// Namespace of this pod.
    #[arg(long, env = "POD_NAMESPACE")]
    pub(crate) namespace: String,
    /// Helm release of this gateway, as set at its operator.
    #[arg(long, env = "REMOE_RELEASE", default_value = "remoe")]
    pub(crate) release: String,
    /// Number of Leases RELEASE-gateway-N: gateways of the release that live or end at the same time.
    #[arg(long, env = "REMOE_LEASE_SLOTS", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) lease_slots: u16,
    /// Name of this pod.
    #[arg(long, env = "POD_NAME")]
    pub(crate) pod: String,
    /// UID of this pod.
    #[arg(long, env = "POD_UID")]
    pub(crate) uid: String,
    /// File of API keys by tenant. Default: no authentication.
    #[arg(long, env = "REMOE_KEYS", value_name = "FILE")]
    pub(crate) keys: Option<PathBuf>,
    /// Folder with tls.crt, tls.key and ca.crt: client certificate for main functions that take requests from gateways
    /// alone. Files are reloaded on change.
    #[arg(long, env = "REMOE_IDENTITY_DIR", value_name = "DIR")]
    pub(crate) identity_dir: Option<PathBuf>,
    /// Folder of ledgers, one per pod, by its name. Default: costs are kept in memory.
    #[arg(long, env = "REMOE_LEDGER", value_name = "DIR")]
    pub(crate) ledger: Option<PathBuf>,
    /// Dollars per core hour, for the cost of the gateway itself.
    #[arg(long, env = "REMOE_CPU_CORE_HOUR", default_value_t = 0.03)]
    pub(crate) cpu_core_hour: f64,
    /// Dollars per GB (1e9 bytes) of memory and hour, for the cost of the gateway itself.
    #[arg(long, env = "REMOE_MEMORY_GB_HOUR", default_value_t = 0.004)]
    pub(crate) memory_gb_hour: f64,
    /// Folder of model summaries and of the training history, one part per gateway: predictions survive restarts.
    /// Default: in memory.
    #[arg(long, env = "REMOE_EXPERIENCE", value_name = "DIR")]
    pub(crate) experience: Option<PathBuf>,
    /// Limit of the training history of one model, such as 16MiB or a number of bytes.
    #[arg(long, env = "REMOE_EXPERIENCE_BYTES", value_name = "SIZE", default_value_t = 16 << 20, value_parser = sizes::<u64>(1 << 20..=1 << 40))]
    pub(crate) experience_bytes: u64,
    /// Memory of the predictors of all models, such as 512MiB or a number of bytes. Models beyond it get no predictions.
    #[arg(long, env = "REMOE_PREDICTION_BYTES", value_name = "SIZE", default_value_t = 512 << 20, value_parser = sizes::<u64>(0..=u64::MAX))]
    pub(crate) prediction_bytes: u64,
    /// Origins that browsers may call from, separated by commas. Default: none.
    #[arg(long, env = "REMOE_CORS_ORIGINS", value_delimiter = ',')]
    pub(crate) cors_origins: Vec<String>,
    /// Maximum size of a request body, such as 4MiB or a number of bytes.
    #[arg(long, env = "REMOE_BODY_LIMIT", value_name = "SIZE", default_value_t = 4 << 20, value_parser = sizes::<usize>(0..=u64::MAX))]
    pub(crate) body_limit: usize,
    /// Maximum number of requests of a model that run or wait.
    #[arg(long, env = "REMOE_MAX_REQUESTS", default_value_t = 1024)]
    pub(crate) max_requests: usize,
    /// Maximum wait of a request for a wake, such as 10m or a number of seconds.
    #[arg(long, env = "REMOE_WAKE_SECONDS", value_name = "TIME", default_value_t = 600, value_parser = whole_seconds::<u64>(1..=3600))]
    pub(crate) wake_seconds: u64,
    /// Grace period for running and waiting requests at shutdown, such as 5m or a number of seconds.
    #[arg(long, env = "REMOE_DRAIN_SECONDS", value_name = "TIME", default_value_t = 300, value_parser = whole_seconds::<u64>(1..=3600))]
    pub(crate) drain_seconds: u64,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn durations_and_sizes_may_have_units() {
        let taken = |wake: &str, drain: &str, body: &str, history: &str| {
            let arguments = ["remoe-gateway", "--namespace", "n", "--pod", "p", "--uid", "u"];
            let flags = ["--wake-seconds", wake, "--drain-seconds", drain, "--body-limit", body];
            let flags = [&arguments[..], &flags, &["--experience-bytes", history]].concat();
            let it = Settings::try_parse_from(flags).map_err(|error| error.to_string())?;
            Ok::<_, String>((it.wake_seconds, it.drain_seconds, it.body_limit, it.experience_bytes))
        };
        let expected = Ok((600, 300, 4 << 20, 16 << 20));
        assert_eq!(taken("600", "300", "4194304", "16777216"), expected);
        assert_eq!(taken("10m", "5m", "4MiB", "16MiB"), expected);
        let error = taken("10m", "5m", "4Mi", "16MiB").unwrap_err();
        assert!(error.contains("'4Mi'") && error.contains("MiB"), "{error}");
        assert!(taken("2h", "5m", "4MiB", "16MiB").is_err() && taken("10m", "5m", "4MiB", "1kB").is_err());
    }
}
