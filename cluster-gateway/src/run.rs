//! The life of the process: a Lease first, then what there is, then clients.

use crate::catalogue::Catalogue;
use crate::lease::{self, Holder};
use crate::settings::Settings;
use kube::{Client, Config};
use remoe_gateway::{Gateway, GatewayMetrics, GatewayOptions, KeyFile, Keys, KeysError};
use std::io;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Connecting to the API server takes longer only where it is gone.
const CONNECT: Duration = Duration::from_secs(5);
/// What is said at the end is said within this time.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Why the gateway ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// There is no configuration of a cluster.
    #[error("cannot tell how to reach the cluster: {0}")]
    Config(#[from] kube::config::InferConfigError),
    /// There is no cluster to talk to.
    #[error("cannot talk to a cluster: {0}")]
    Cluster(#[from] kube::Error),
    /// The file with keys.
    #[error("--keys: {0}")]
    Keys(#[from] KeysError),
    /// A limit that would not hold.
    #[error("--keys: {0}")]
    Budget(String),
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
pub(crate) async fn run(settings: Settings, shutdown: CancellationToken) -> Result<(), RunError> {
    let mut config = Config::infer().await?;
    config.connect_timeout = Some(CONNECT);
    // Whoever calls has a deadline, and tries again by itself.
    config.default_retry = false;
    let client = Client::try_from(config)?;
    let metrics = GatewayMetrics::new()?;
    let (key_file, keys) = settings.keys.clone().map(KeyFile::open).transpose()?.unzip();
    let keys = within_means(keys.unwrap_or_default()).map_err(RunError::Budget)?;
    let options = GatewayOptions {
        keys,
        cors_origins: settings.cors_origins.clone().into(),
        body_limit: settings.body_limit,
        ..GatewayOptions::default()
    };
    let gateway = Gateway::new(options, Vec::new(), metrics.clone());
    let listener = TcpListener::bind(settings.listen).await?;
    let pages = TcpListener::bind(settings.metrics_listen).await?;
    tracing::info!(address = %listener.local_addr()?, metrics = %pages.local_addr()?, "serving");
    let ended = CancellationToken::new();
    let pages = tokio::spawn(remoe_function::serve_metrics(pages, metrics.registry().clone(), ended.clone()));

    // Held before anything is read: an operator that tells something later than that knows whom to wait for.
    let (holds, lease) = watch::channel(false);
    let holder = Holder::new(client.clone(), &settings);
    let keeping = tokio::spawn(lease::keep(holder.clone(), holds));
    let mut catalogue = Catalogue::new(client, &settings, metrics, gateway.clone(), lease.clone());
    let following = key_file.map(|file| tokio::spawn(file.follow(gateway.clone(), within_means)));
    let mut server = tokio::spawn(gateway.serve(listener, shutdown.clone()));
    let mut held = lease;
    let outcome = tokio::select! {
        () = async {
            // Its other end lives as long as the task above. What is waited for keeps that end from writing.
            drop(held.wait_for(|holds| *holds).await);
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
            tracing::warn!("ended with requests under way");
        }
    }
    let farewell = async {
        catalogue.forget().await;
        keeping.abort();
        holder.release().await;
    };
    let _late = timeout(LAST_WORDS, farewell).await;
    if let Some(following) = following {
        following.abort();
    }
    ended.cancel();
    let _late = timeout(LAST_WORDS, pages).await;
    // What was answered last reaches clients.
    sleep(Duration::from_millis(50)).await;
    outcome
}

/// `keys`, where all of their limits hold here.
fn within_means(keys: Keys) -> Result<Keys, String> {
    match keys.with_budget() {
        None => Ok(keys),
        Some(tenant) => Err(format!(
            "dollarsPerDay of the tenant {tenant}: the gateways of a cluster keep no books yet; take it away, or limit \
             tokensPerMinute"
        )),
    }
}

fn ended_early(served: Result<io::Result<()>, tokio::task::JoinError>) -> RunError {
    RunError::Io(match served {
        Ok(Err(error)) => error,
        Ok(Ok(())) => io::Error::other("the HTTP server ended"),
        Err(error) => io::Error::other(error),
    })
}
