//! Life of the process: takes a Lease, follows the deployments, serves clients, and drains at shutdown.

use crate::catalogue::Catalogue;
use crate::history_folder::HistoryFolder;
use crate::lease::{self, LeaseHolder};
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

/// Timeout of connecting to the API server, and of reading the spending of other gateways.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two reads of the training history of other gateways.
const HISTORY_READ_INTERVAL: Duration = Duration::from_secs(10);
/// Longest time for withdrawing this gateway's reports at shutdown.
const SHUTDOWN_REPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// Source of the prices, for the ledger.
const PRICE_SOURCE: &str = "spec.pricing of each MoEDeployment, or prices of the operator's chart";

/// Reason why the gateway ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// The cluster configuration cannot be loaded.
    #[error("cannot load the cluster configuration: {0}")]
    Config(#[from] kube::config::InferConfigError),
    /// The API client cannot be made.
    #[error("cannot connect to the cluster: {0}")]
    Cluster(#[from] kube::Error),
    /// The keys file is unreadable or invalid.
    #[error("--keys: {0}")]
    Keys(#[from] KeysError),
    /// A daily budget cannot be enforced.
    #[error("--keys: {0}")]
    Budget(String),
    /// Cost accounting cannot be opened.
    #[error(transparent)]
    CostAccounting(#[from] CostAccountingError),
    /// The certificate cannot be used.
    #[error("--identity-dir: {0}")]
    Identity(#[from] IdentityError),
    /// The certificate for clients cannot be used.
    #[error("--tls-dir: {0}")]
    Tls(IdentityError),
    /// The configuration of traces is invalid or unsupported.
    #[error(transparent)]
    Traces(#[from] TracesError),
    /// A metric cannot be registered.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
    /// A socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Serves until `shutdown`, then completes the requests in flight.
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
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    // The client's own retries are off: callers have deadlines and retry by themselves.
    config.default_retry = false;
    let client = Client::try_from(config)?;
    let metrics = GatewayMetrics::new()?;
    traces.register(metrics.registry())?;
    let (cost_accounting, ledger_error) = open_cost_accounting(&settings, &metrics)?;
    let check_budgets_enforceable =
        move |keys: Keys| check_budgets_enforceable(keys, ledger_error.as_deref());
    let (key_file, keys) = settings.keys.clone().map(KeyFile::open).transpose()?.unzip();
    let keys = check_budgets_enforceable(keys.unwrap_or_default()).map_err(RunError::Budget)?;
    let predictions = PredictionMetrics::register(metrics.registry())?;
    let keyring = settings.identity_dir.as_deref().map(Keyring::from_folder).transpose()?;
    warn_of_open_access(&settings);
    let handshake =
        settings.tls_dir.as_deref().map(PublicCertificate::from_folder).transpose().map_err(RunError::Tls)?;
    let memory_limits = (settings.prediction_bytes, settings.experience_bytes);
    let prediction_resources =
        SharedResources::new(memory_limits, HISTORY_READ_INTERVAL, predictions, keyring.clone());
    let predictions = (prediction_resources, settings.experience.as_deref().and_then(take_history_folder));
    let options = GatewayOptions {
        keys,
        short_names: settings.short_names(),
        cors_origins: settings.cors_origins.clone().into(),
        body_limit: settings.body_limit,
        cost_accounting: Some(cost_accounting.clone()),
        access_log: settings.access_log.open_to_stderr()?,
        traces,
        keyring: keyring.clone(),
        handshake: handshake.map(TlsHandshake::public),
        ..GatewayOptions::default()
    };
    let gateway = Gateway::new(options, Vec::new(), metrics.clone());
    let listener = listen(settings.listen)?;
    let metrics_listener = listen(settings.metrics_listen)?;
    tracing::info!(address = %listener.local_addr()?, metrics = %metrics_listener.local_addr()?, "serving");
    let ended = CancellationToken::new();
    let metrics_server = tokio::spawn(gateway.clone().serve_own_metrics(metrics_listener, ended.clone()));

    // The Lease is taken before any demand is read, so that the operator knows which gateways to wait for.
    let (is_held, lease) = watch::channel(false);
    let holder = LeaseHolder::new(client.clone(), &settings, keyring.clone(), gateway.clone());
    let lease_task = tokio::spawn(lease::keep(holder.clone(), is_held));
    let (spending_read, mut is_spending_read) = watch::channel(false);
    let spending_task =
        shared_budgets::follow(client.clone(), settings.clone(), gateway.clone(), spending_read);
    let spending_task = tokio::spawn(spending_task);
    let accounts = (metrics, cost_accounting);
    let mut catalogue =
        Catalogue::new(client, &settings, accounts, gateway.clone(), lease.clone(), keyring, predictions);
    let key_file_task =
        key_file.map(|file| tokio::spawn(file.follow(gateway.clone(), check_budgets_enforceable)));
    let mut server = tokio::spawn(gateway.serve(listener, shutdown.clone()));
    let mut held = lease;
    let outcome = tokio::select! {
        () = async {
            // Dropped at once: a held guard would block the sender.
            drop(held.wait_for(|is_held| *is_held).await);
            // After the timeout, budgets count only this gateway's spending until the others are read.
            drop(timeout(CONNECT_TIMEOUT, is_spending_read.wait_for(|is_read| *is_read)).await);
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
        catalogue.withdraw().await;
        lease_task.abort();
        holder.release().await;
    };
    let _late = timeout(SHUTDOWN_REPORT_TIMEOUT, farewell).await;
    spending_task.abort();
    if let Some(key_file_task) = key_file_task {
        key_file_task.abort();
    }
    ended.cancel();
    let _late = timeout(SHUTDOWN_REPORT_TIMEOUT, metrics_server).await;
    // Gives the last answers time to reach clients.
    sleep(Duration::from_millis(50)).await;
    outcome
}

/// Warns about settings that let all tenants of the cluster use or name models.
fn warn_of_open_access(settings: &GatewaySettings) {
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

/// Takes a part of `folder` for this gateway. If that fails, logs the error and returns `None`; the gateway serves
/// without it.
fn take_history_folder(folder: &Path) -> Option<HistoryFolder> {
    let taken = HistoryFolder::take(folder);
    let failed = |error: &io::Error| {
        let folder = folder.display();
        tracing::error!(%error, %folder, "training history not persisted: kept in memory only");
    };
    taken.inspect_err(failed).ok()
}

/// Opens the cost accounting of this pod. If the folder of ledgers cannot be used, accounts in memory and returns the
/// error as well; the gateway serves without a ledger.
fn open_cost_accounting(
    settings: &GatewaySettings,
    metrics: &GatewayMetrics,
) -> Result<(Arc<CostAccounting>, Option<String>), CostAccountingError> {
    let Some(folder) = &settings.ledger else {
        return Ok((Arc::new(CostAccounting::open(None, PRICE_SOURCE, metrics.registry())?), None));
    };
    let ledger = Ledger::open(&folder.join(&settings.pod), LedgerLimits::default());
    let opened = ledger
        .map_err(|error| CostAccountingError::Ledger(error.into()))
        .and_then(|ledger| CostAccounting::open(Some(ledger), PRICE_SOURCE, metrics.registry()));
    match opened {
        Err(CostAccountingError::Ledger(error)) => {
            tracing::error!(%error, "serving without a ledger: costs are kept in memory only");
            let cost_accounting =
                CostAccounting::open(None, PRICE_SOURCE, metrics.registry())?.with_unusable_ledger();
            Ok((Arc::new(cost_accounting), Some(error.to_string())))
        }
        opened => Ok((Arc::new(opened?), None)),
    }
}

/// Returns `keys` if their budgets can be enforced: today's spending must survive a restart. `ledger_error` is the
/// reason why it would not.
fn check_budgets_enforceable(keys: Keys, ledger_error: Option<&str>) -> Result<Keys, String> {
    match (keys.first_budget_holder(), ledger_error) {
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

    /// Opens cost accounting with this folder of ledgers. Returns it, its metrics, and which of two keys files is
    /// accepted: one without and one with a budget.
    fn opened(folder: &std::path::Path) -> (Arc<CostAccounting>, GatewayMetrics, [bool; 2]) {
        let arguments = ["gateway", "--open", "--namespace=n", "--pod=p", "--uid=u", "--ledger"];
        let arguments = arguments.map(Into::into).into_iter().chain([folder.into()]);
        let settings = GatewaySettings::try_parse_from::<_, std::ffi::OsString>(arguments).unwrap();
        let metrics = GatewayMetrics::new().unwrap();
        let (cost_accounting, ledger_error) = open_cost_accounting(&settings, &metrics).unwrap();
        let keys = tempfile::NamedTempFile::new().unwrap();
        let taken = ["", ", dollarsPerDay: 1"].map(|budget| {
            std::fs::write(&keys, format!("tenants: [{{name: t, keys: [k]{budget}}}]")).unwrap();
            let (_, keys) = KeyFile::open(keys.path().to_owned()).unwrap();
            check_budgets_enforceable(keys, ledger_error.as_deref()).is_ok()
        });
        (cost_accounting, metrics, taken)
    }

    fn failures(metrics: &GatewayMetrics) -> f64 {
        let families = metrics.registry().gather();
        let found = families.iter().find(|family| family.name() == "remoe_ledger_failures_total");
        found.unwrap().get_metric()[0].get_counter().get_value()
    }

    #[test]
    fn pod_has_its_own_ledger() {
        let folder = tempfile::tempdir().unwrap();
        let (cost_accounting, metrics, taken) = opened(folder.path());
        cost_accounting.record_alive(7);
        assert_eq!((taken, failures(&metrics)), ([true, true], 0.0));
        assert_eq!(records(&folder.path().join("p")).unwrap().count(), 2);
    }

    #[test]
    fn gateway_without_folder_serves_tenants_without_budget() {
        let (cost_accounting, metrics, taken) = opened(std::path::Path::new("/dev/null"));
        cost_accounting.record_alive(7);
        assert_eq!((taken, failures(&metrics)), ([true, false], 1.0));
        assert_eq!(cost_accounting.totals().unwrap().overhead, 7, "kept in the memory of this process");
    }
}
