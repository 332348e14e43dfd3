//! The life of the process: a Lease first, then what there is, then clients.

use crate::catalogue::Catalogue;
use crate::experience::Experience;
use crate::lease::{self, Holder};
use crate::settings::{GatewaySettings, NameScope};
use crate::shared_budgets;
use crate::usage_learner::SharedResources;
use kube::{Client, Config};
use remoe_billing::{Ledger, LedgerLimits};
use remoe_gateway_core::{
    CostAccounting, CostAccountingError, Gateway, GatewayMetrics, GatewayOptions, KeyFile, Keys, KeysError,
};
use remoe_otel::{Traces, TracesError};
use remoe_process::listen;
use remoe_proto::TlsHandshake;
use remoe_proto::identity::{IdentityError, Keyring, PublicCertificate};
use remoe_usage::PredictionMetrics;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Connecting to the API server takes longer only where it is gone.
const CONNECT: Duration = Duration::from_secs(5);
/// Between two looks at what other gateways have learned.
const EXCHANGED: Duration = Duration::from_secs(10);
/// Longest time for the last reports when the gateway ends.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Where the prices stand.
const PRICES: &str = "spec.pricing of each MoEDeployment, or prices of the operator's chart";

/// Why the gateway ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// There is no configuration of a cluster.
    #[error("cannot load the cluster configuration: {0}")]
    Config(#[from] kube::config::InferConfigError),
    /// There is no cluster to talk to.
    #[error("cannot connect to the cluster: {0}")]
    Cluster(#[from] kube::Error),
    /// The file with keys.
    #[error("--keys: {0}")]
    Keys(#[from] KeysError),
    /// A limit that would not hold.
    #[error("--keys: {0}")]
    Budget(String),
    /// Where money is accounted for.
    #[error(transparent)]
    Books(#[from] CostAccountingError),
    /// The certificate cannot be used.
    #[error("--identity-dir: {0}")]
    Identity(#[from] IdentityError),
    /// The certificate for clients cannot be used.
    #[error("--tls-dir: {0}")]
    Tls(IdentityError),
    /// Traces are asked for in a way that there is not.
    #[error(transparent)]
    Traces(#[from] TracesError),
    /// A metric is registered twice.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
    /// A socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Serves until `shutdown`, and what is there by then to its end.
///
/// # Errors
/// See [`RunError`].
pub(crate) async fn run(settings: GatewaySettings, shutdown: CancellationToken) -> Result<(), RunError> {
    let traces = Traces::from_environment("remoe-gateway")?;
    let outcome = serve(settings, shutdown, traces.clone()).await;
    traces.shut_down().await;
    outcome
}

async fn serve(
    settings: GatewaySettings,
    shutdown: CancellationToken,
    traces: Traces,
) -> Result<(), RunError> {
    let mut config = Config::infer().await?;
    config.connect_timeout = Some(CONNECT);
    // Callers have a deadline, and retry by themselves.
    config.default_retry = false;
    let client = Client::try_from(config)?;
    let metrics = GatewayMetrics::new()?;
    traces.register(metrics.registry())?;
    let (cost_accounting, unkept) = open_books(&settings, &metrics)?;
    let within_means = move |keys: Keys| within_means(keys, unkept.as_deref());
    let (key_file, keys) = settings.keys.clone().map(KeyFile::open).transpose()?.unzip();
    let keys = within_means(keys.unwrap_or_default()).map_err(RunError::Budget)?;
    let predictions = PredictionMetrics::register(metrics.registry())?;
    let keyring = settings.identity_dir.as_deref().map(Keyring::from_folder).transpose()?;
    warn_of_openness(&settings);
    let handshake =
        settings.tls_dir.as_deref().map(PublicCertificate::from_folder).transpose().map_err(RunError::Tls)?;
    let means = (settings.prediction_bytes, settings.experience_bytes);
    let means = SharedResources::new(means, EXCHANGED, predictions, keyring.clone());
    let predicting = (means, settings.experience.as_deref().and_then(experience));
    let options = GatewayOptions {
        keys,
        short_names: settings.short_names(),
        cors_origins: settings.cors_origins.clone().into(),
        body_limit: settings.body_limit,
        cost_accounting: Some(cost_accounting.clone()),
        access_log: settings.access_log.open_plain()?,
        traces,
        keyring: keyring.clone(),
        handshake: handshake.map(TlsHandshake::public),
        ..GatewayOptions::default()
    };
    let gateway = Gateway::new(options, Vec::new(), metrics.clone());
    let listener = listen(settings.listen)?;
    let pages = listen(settings.metrics_listen)?;
    tracing::info!(address = %listener.local_addr()?, metrics = %pages.local_addr()?, "serving");
    let ended = CancellationToken::new();
    let pages = tokio::spawn(gateway.clone().serve_own_metrics(pages, ended.clone()));

    // Held before anything is read: an operator that tells something later knows which gateways to wait for.
    let (holds, lease) = watch::channel(false);
    let holder = Holder::new(client.clone(), &settings, keyring.clone(), gateway.clone());
    let keeping = tokio::spawn(lease::keep(holder.clone(), holds));
    let (told, mut others_are_known) = watch::channel(false);
    let sharing = shared_budgets::follow(client.clone(), settings.clone(), gateway.clone(), told);
    let sharing = tokio::spawn(sharing);
    let accounts = (metrics, cost_accounting);
    let mut catalogue =
        Catalogue::new(client, &settings, accounts, gateway.clone(), lease.clone(), keyring, predicting);
    let following = key_file.map(|file| tokio::spawn(file.follow(gateway.clone(), within_means)));
    let mut server = tokio::spawn(gateway.serve(listener, shutdown.clone()));
    let mut held = lease;
    let outcome = tokio::select! {
        () = async {
            // Its other end lives as long as the task above. What is waited for keeps that end from writing.
            drop(held.wait_for(|holds| *holds).await);
            // Without it budgets are this gateway's own for a moment.
            drop(timeout(CONNECT, others_are_known.wait_for(|known| *known)).await);
            catalogue.follow().await;
        } => Ok(()),
        served = &mut server => Err(ended_early(served)),
        () = shutdown.cancelled() => Ok(()),
    };
    if outcome.is_ok() {
        let drained = async {
            tokio::select! {
                () = catalogue.follow() => {}
                _ended = &mut server => {}
            }
        };
        if timeout(Duration::from_secs(settings.drain_seconds), drained).await.is_err() {
            tracing::warn!("stopped with requests in flight");
        }
    }
    let farewell = async {
        catalogue.forget().await;
        keeping.abort();
        holder.release().await;
    };
    let _late = timeout(LAST_WORDS, farewell).await;
    sharing.abort();
    if let Some(following) = following {
        following.abort();
    }
    ended.cancel();
    let _late = timeout(LAST_WORDS, pages).await;
    // What was answered last reaches clients.
    sleep(Duration::from_millis(50)).await;
    outcome
}

/// Logs what every tenant of the cluster may do here.
fn warn_of_openness(settings: &GatewaySettings) {
    if settings.open {
        tracing::warn!(
            "open gateway: every client may use and wake all models; set gateway.keysSecretName of the chart"
        );
    }
    if settings.name_scope == NameScope::Any {
        tracing::warn!(
            "short names are not scoped: every namespace can take a name; have clients name NAMESPACE/NAME, \
             grant names by gateway.shortNames, and set gateway.scopedNames of the chart to true"
        );
    }
}

/// A part of `folder` for this gateway; none where it cannot be used, which is no reason not to serve.
fn experience(folder: &Path) -> Option<Experience> {
    let taken = Experience::take(folder);
    let failed = |error: &io::Error| {
        let folder = folder.display();
        tracing::error!(%error, %folder, "training history not persisted: kept in memory only");
    };
    taken.inspect_err(failed).ok()
}

/// The books of this pod, and why they are not kept in the folder of ledgers where that cannot be used: it is no reason
/// not to serve.
fn open_books(
    settings: &GatewaySettings,
    metrics: &GatewayMetrics,
) -> Result<(Arc<CostAccounting>, Option<String>), CostAccountingError> {
    let Some(folder) = &settings.ledger else {
        return Ok((Arc::new(CostAccounting::open(None, PRICES, metrics.registry())?), None));
    };
    let ledger = Ledger::open(&folder.join(&settings.pod), LedgerLimits::default());
    let kept = ledger
        .map_err(|error| CostAccountingError::Ledger(error.into()))
        .and_then(|ledger| CostAccounting::open(Some(ledger), PRICES, metrics.registry()));
    match kept {
        Err(CostAccountingError::Ledger(error)) => {
            tracing::error!(%error, "serving without a ledger: costs are kept in memory only");
            let cost_accounting =
                CostAccounting::open(None, PRICES, metrics.registry())?.that_should_be_kept();
            Ok((Arc::new(cost_accounting), Some(error.to_string())))
        }
        kept => Ok((Arc::new(kept?), None)),
    }
}

/// `keys`, where all of their limits hold here: what was spent today has to be known after a restart. `unkept` says why
/// it would not be.
fn within_means(keys: Keys, unkept: Option<&str>) -> Result<Keys, String> {
    match (keys.with_budget(), unkept) {
        (Some(name), Some(error)) => Err(format!(
            "cannot enforce dollarsPerDay of {name} without a ledger: {error}; make the folder of --ledger writable, \
             or remove the limit"
        )),
        _ => Ok(keys),
    }
}

fn ended_early(served: Result<io::Result<()>, tokio::task::JoinError>) -> RunError {
    RunError::Io(match served {
        Ok(Err(error)) => error,
        Ok(Ok(())) => io::Error::other("the HTTP server ended"),
        Err(error) => io::Error::other(error),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use clap::Parser;
    use remoe_billing::records;

    /// Opens a gateway with this folder of ledgers. Returns its books, its metrics, and which of two keys files it
    /// takes, one without and one with a budget.
    fn opened(folder: &std::path::Path) -> (Arc<CostAccounting>, GatewayMetrics, [bool; 2]) {
        let arguments = ["gateway", "--open", "--namespace=n", "--pod=p", "--uid=u", "--ledger"];
        let arguments = arguments.map(Into::into).into_iter().chain([folder.into()]);
        let settings = GatewaySettings::try_parse_from::<_, std::ffi::OsString>(arguments).unwrap();
        let metrics = GatewayMetrics::new().unwrap();
        let (cost_accounting, unkept) = open_books(&settings, &metrics).unwrap();
        let keys = tempfile::NamedTempFile::new().unwrap();
        let taken = ["", ", dollarsPerDay: 1"].map(|budget| {
            std::fs::write(&keys, format!("tenants: [{{name: t, keys: [k]{budget}}}]")).unwrap();
            let (_, keys) = KeyFile::open(keys.path().to_owned()).unwrap();
            within_means(keys, unkept.as_deref()).is_ok()
        });
        (cost_accounting, metrics, taken)
    }

    fn failures(metrics: &GatewayMetrics) -> f64 {
        let families = metrics.registry().gather();
        let found = families.iter().find(|family| family.name() == "remoe_ledger_failures_total");
        found.unwrap().get_metric()[0].get_counter().get_value()
    }

    #[test]
    fn a_pod_has_a_ledger_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let (cost_accounting, metrics, taken) = opened(folder.path());
        cost_accounting.alive(7);
        assert_eq!((taken, failures(&metrics)), ([true, true], 0.0));
        assert_eq!(records(&folder.path().join("p")).unwrap().count(), 2);
    }

    #[test]
    fn gateway_without_folder_serves_tenants_without_budget() {
        let (cost_accounting, metrics, taken) = opened(std::path::Path::new("/dev/null"));
        cost_accounting.alive(7);
        assert_eq!((taken, failures(&metrics)), ([true, false], 1.0));
        assert_eq!(cost_accounting.added_up().unwrap().overhead, 7, "known as long as this process lives");
    }
}
