use remoe_gateway_core::{AccessLogTarget, ShortNames};
use remoe_process::{sizes, whole_seconds};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Serves all MoEDeployments of the operator at one address.
#[derive(Debug, Clone, clap::Parser)]
#[command(name = "remoe-gateway", version)]
pub(crate) struct GatewaySettings {
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
    /// Which short names of models requests may use beside NAMESPACE/NAME. With one watched namespace, all of its
    /// names count.
    #[arg(long = "short-names", env = "REMOE_SHORT_NAMES", value_enum, default_value_t = NameScope::Scoped)]
    pub(crate) name_scope: NameScope,
    /// Grant of a short name: requests that name NAME go to the deployment of NAMESPACE that has this name or served
    /// name, and to none of another namespace. Repeatable.
    #[arg(long = "short-name", value_name = "NAME=NAMESPACE", value_parser = grant)]
    pub(crate) granted: Vec<(String, String)>,
    /// File of API keys by tenant. Without --open it is required.
    #[arg(long, env = "REMOE_KEYS", value_name = "FILE", required_unless_present = "open")]
    pub(crate) keys: Option<PathBuf>,
    /// Let every client that reaches this gateway use all models, without a key.
    #[arg(long, env = "REMOE_OPEN", conflicts_with = "keys")]
    pub(crate) open: bool,
    /// Folder with tls.crt, tls.key and ca.crt: client certificate for main functions that take requests from gateways
    /// alone. Files are reloaded on change.
    #[arg(long, env = "REMOE_IDENTITY_DIR", value_name = "DIR")]
    pub(crate) identity_dir: Option<PathBuf>,
    /// Folder with tls.crt and tls.key: TLS for clients. Files are reloaded on change. Default: plaintext.
    #[arg(long, env = "REMOE_TLS_DIR", value_name = "DIR")]
    pub(crate) tls_dir: Option<PathBuf>,
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
    /// Memory of the predictors of all models, such as 512MiB or a number of bytes. Models beyond it get no
    /// predictions.
    #[arg(long, env = "REMOE_PREDICTION_BYTES", value_name = "SIZE", default_value_t = 512 << 20, value_parser = sizes::<u64>(0..=u64::MAX))]
    pub(crate) prediction_bytes: u64,
    /// Access log, one line per request: `text` or `json` on standard error, `off`, or a file that gets JSON.
    #[arg(long, env = "REMOE_ACCESS_LOG", value_name = "off|text|json|FILE", default_value = "off")]
    pub(crate) access_log: AccessLogTarget,
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

/// Which short names of models requests may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum NameScope {
    /// Granted ones, and those of the namespace of the request's key.
    Scoped,
    /// All that one deployment alone has, as up to version 0.1. Every namespace can take a name.
    Any,
}

impl GatewaySettings {
    /// Returns the rule for short names. One watched namespace has one owner: all of its names count.
    pub(crate) fn short_names(&self) -> ShortNames {
        let namespaces: std::collections::BTreeSet<&String> = self.watch_namespaces.iter().collect();
        match self.name_scope {
            NameScope::Scoped if namespaces.len() != 1 => {
                ShortNames::Scoped(self.granted.iter().cloned().collect::<BTreeMap<_, _>>())
            }
            NameScope::Scoped | NameScope::Any => ShortNames::Any,
        }
    }
}

/// Parses `NAME=NAMESPACE`.
fn grant(text: &str) -> Result<(String, String), String> {
    let parts = text.rsplit_once('=').filter(|(name, namespace)| !name.is_empty() && !namespace.is_empty());
    let (name, namespace) = parts.ok_or("expected NAME=NAMESPACE")?;
    Ok((name.to_owned(), namespace.to_owned()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use clap::Parser;

    fn parsed(flags: &[&str]) -> Result<GatewaySettings, String> {
        let arguments = ["remoe-gateway", "--namespace", "n", "--pod", "p", "--uid", "u"];
        let all = [&arguments[..], flags].concat();
        GatewaySettings::try_parse_from(all).map_err(|error| error.to_string())
    }

    #[test]
    fn gateway_without_keys_starts_only_if_it_is_open() {
        let error = parsed(&[]).unwrap_err();
        assert!(error.contains("--keys"), "{error}");
        assert!(parsed(&["--open"]).unwrap().open && !parsed(&["--keys", "k"]).unwrap().open);
        assert!(parsed(&["--open", "--keys", "k"]).is_err());
    }

    #[test]
    fn short_names_are_scoped_unless_one_namespace_is_watched() {
        let short_names =
            |flags: &[&str]| parsed(&[&["--open"], flags].concat()).map(|settings| settings.short_names());
        let scoped = |granted: &[(&str, &str)]| {
            let pair = |(name, namespace): &(&str, &str)| ((*name).to_owned(), (*namespace).to_owned());
            Ok(ShortNames::Scoped(granted.iter().map(pair).collect()))
        };
        assert_eq!(short_names(&[]), scoped(&[]));
        let granted = ["--short-name=org/m=a", "--short-name=n=b"];
        assert_eq!(short_names(&granted), scoped(&[("org/m", "a"), ("n", "b")]));
        assert_eq!(short_names(&["--watch-namespace=a,b"]), scoped(&[]));
        assert_eq!(short_names(&["--watch-namespace=a"]), Ok(ShortNames::Any));
        assert_eq!(short_names(&["--short-names=any"]), Ok(ShortNames::Any));
        assert!(short_names(&["--short-name=a"]).is_err() && short_names(&["--short-name==a"]).is_err());
    }

    #[test]
    fn durations_and_sizes_may_have_units() {
        let parsed_values = |wake: &str, drain: &str, body: &str, history: &str| {
            let arguments = ["remoe-gateway", "--open", "--namespace", "n", "--pod", "p", "--uid", "u"];
            let flags = ["--wake-seconds", wake, "--drain-seconds", drain, "--body-limit", body];
            let flags = [&arguments[..], &flags, &["--experience-bytes", history]].concat();
            let settings = GatewaySettings::try_parse_from(flags).map_err(|error| error.to_string())?;
            Ok::<_, String>((
                settings.wake_seconds,
                settings.drain_seconds,
                settings.body_limit,
                settings.experience_bytes,
            ))
        };
        let expected = Ok((600, 300, 4 << 20, 16 << 20));
        assert_eq!(parsed_values("600", "300", "4194304", "16777216"), expected);
        assert_eq!(parsed_values("10m", "5m", "4MiB", "16MiB"), expected);
        let error = parsed_values("10m", "5m", "4Mi", "16MiB").unwrap_err();
        assert!(error.contains("'4Mi'") && error.contains("MiB"), "{error}");
        assert!(
            parsed_values("2h", "5m", "4MiB", "16MiB").is_err()
                && parsed_values("10m", "5m", "4MiB", "1kB").is_err()
        );
    }
}
