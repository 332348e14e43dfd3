//! The life of the operator: serve probes, wait for leadership, work, hand over.

use super::calls::Calls;
use super::collector::UnknownCollector;
use super::controller::control;
use super::conversations::Conversations;
use super::gateways::Gateways;
use super::identity::{SignerName, gateway};
use super::lease::Candidate;
use super::manifests::OperatorEnvironment;
use super::memory::SoftState;
use super::metrics::Metrics;
use super::planning_pool::PlanningPool;
use super::reconcile::Context;
use super::serve::serve;
use super::settings::RunSettings;
use super::starting::Starting;
use super::term::writes_within;
use futures_util::future::BoxFuture;
use kube::runtime::events::{Recorder, Reporter};
use kube::{Api, Client};
use remoe_process::program_registry;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Runs that are under way when the operator is asked to end may take this long.
const DRAIN: Duration = Duration::from_secs(25);

/// Why the operator ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// There is no cluster to talk to.
    #[error("cannot connect to the cluster: {0}")]
    Cluster(#[from] kube::Error),
    /// A metric is registered twice.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
    /// The peers of the collector of traces cannot be derived from its endpoint.
    #[error(transparent)]
    Collector(#[from] UnknownCollector),
    /// A socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Another operator leads now, or the Lease could not be renewed in time.
    #[error("lost the Lease {0}")]
    LeaseLost(String),
}

/// Runs the operator on `client` until `shutdown`; probes and metrics are served on `listener`.
///
/// The future is boxed, so that the operator is compiled here and not once more in its program.
///
/// # Errors
/// See [`RunError`]. After [`RunError::LeaseLost`] nothing was left running: the process may start again.
pub fn run(
    client: Client,
    settings: RunSettings,
    listener: TcpListener,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<(), RunError>> {
    Box::pin(serve_and_work(client, settings, listener, shutdown))
}

async fn serve_and_work(
    client: Client,
    settings: RunSettings,
    listener: TcpListener,
    shutdown: CancellationToken,
) -> Result<(), RunError> {
    // Before anybody leads by it.
    let around = settings.surroundings()?;
    let registry = program_registry(&[])?;
    let metrics = Metrics::new(&registry)?;
    let (ready, is_ready) = watch::channel(false);
    // Probes are answered to the end.
    let served = CancellationToken::new();
    let _stop_serving = served.clone().drop_guard();
    let server = tokio::spawn(serve(listener, registry, is_ready, served));
    let work = work(client, (settings, around), metrics, ready, shutdown);
    tokio::select! {
        done = work => done,
        ended = server => Err(RunError::Io(match ended {
            Ok(Err(error)) => error,
            Ok(Ok(())) => io::Error::other("HTTP server stopped"),
            Err(error) => io::Error::other(error),
        })),
    }
}

async fn work(
    client: Client,
    (settings, around): (RunSettings, OperatorEnvironment),
    metrics: Metrics,
    ready: watch::Sender<bool>,
    shutdown: CancellationToken,
) -> Result<(), RunError> {
    if !settings.leader_election {
        metrics.leads.set(1);
        lead(&client, (&settings, around), metrics, ready, shutdown).await;
        return Ok(());
    }
    let api = Api::namespaced(client.clone(), &settings.namespace);
    let mut candidate = Candidate::new(api, &settings.lease(), &settings.identity, settings.lease_duration());
    // One that waits for its turn does what it should.
    ready.send_replace(true);
    tokio::select! {
        () = candidate.lead() => {}
        () = shutdown.cancelled() => return Ok(()),
    }
    tracing::info!(identity = settings.identity, "leader elected");
    metrics.leads.set(1);
    let client = writes_within(candidate.term(), &client);
    let result = tokio::select! {
        () = lead(&client, (&settings, around), metrics.clone(), ready, shutdown) => Ok(()),
        // What is under way is dropped.
        () = candidate.keep() => Err(RunError::LeaseLost(settings.lease())),
    };
    metrics.leads.set(0);
    if result.is_ok() {
        candidate.release().await;
    }
    result
}

async fn lead(
    client: &Client,
    (settings, around): (&RunSettings, OperatorEnvironment),
    metrics: Metrics,
    ready: watch::Sender<bool>,
    shutdown: CancellationToken,
) {
    let reporter =
        Reporter { controller: "remoe-operator".to_owned(), instance: Some(settings.identity.clone()) };
    let (conversations, news) = Conversations::new();
    let starting = Starting::new(conversations.news());
    let pool = PlanningPool::new(settings.planning_threads.into(), conversations.news());
    let identities = Arc::new(settings.identities(client, metrics.writes.clone()));
    let has_gateways = around.gateway.is_some();
    let leases = Calls::new(client.clone(), &settings.namespace, metrics.writes.clone());
    let shown = (settings.signer != SignerName::Unsigned).then(|| gateway(&settings.namespace));
    let context = Context {
        client: client.clone(),
        gateways: has_gateways.then(|| Gateways::new(leases, &settings.release, shown)),
        around,
        identities: identities.clone(),
        recorder: Recorder::new(client.clone(), reporter),
        metrics,
        conversations,
        starting,
        memory: SoftState::default(),
        pool,
    };
    let working =
        control(context, news, &settings.watch_namespaces, settings.concurrency, ready, shutdown.clone());
    tokio::pin!(working);
    tokio::select! {
        () = &mut working => return,
        () = identities.keep_gateways(), if has_gateways => {}
        () = shutdown.cancelled() => {}
    }
    if timeout(DRAIN, working).await.is_err() {
        tracing::warn!("stopped with reconciles in progress");
    }
}
