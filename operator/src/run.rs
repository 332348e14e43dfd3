//! Lifecycle of the operator: serves probes, waits for leadership, runs the controllers, hands over.

use super::api::NamespaceApi;
use super::controller::run_controllers;
use super::gateways::Gateways;
use super::identity::{SignerName, gateway_identity};
use super::lease::Candidate;
use super::main_pollers::MainPollers;
use super::manifests::OperatorEnvironment;
use super::metrics::Metrics;
use super::planning_pool::PlanningPool;
use super::reconcile::Context;
use super::serve::serve;
use super::settings::RunSettings;
use super::soft_state::SoftStateStore;
use super::start_probes::StartProbes;
use super::term::client_for_term;
use super::trace_collector::UnknownCollector;
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

/// Longest time for which running reconciles are awaited at shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(25);

/// Failure of the operator.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The cluster cannot be reached.
    #[error("cannot connect to the cluster: {0}")]
    Cluster(#[from] kube::Error),
    /// A metric is registered twice.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
    /// The peers of the collector of traces cannot be derived from its endpoint.
    #[error(transparent)]
    TraceCollector(#[from] UnknownCollector),
    /// A socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Another operator leads now, or the Lease could not be renewed in time.
    #[error("lost the Lease {0}")]
    LeaseLost(String),
}

/// Runs the operator on `client` until `shutdown`. Serves probes and metrics on `listener`.
///
/// The future is boxed, so that the operator is compiled here and not once more in its program.
///
/// # Errors
/// See [`RunError`]. After [`RunError::LeaseLost`] nothing keeps running: the process may start again.
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
    // Invalid settings fail before leader election.
    let environment = settings.environment()?;
    let registry = program_registry(&[])?;
    let metrics = Metrics::new(&registry)?;
    let (ready, ready_receiver) = watch::channel(false);
    // Probes are answered until the very end.
    let serve_shutdown = CancellationToken::new();
    let _stop_serving = serve_shutdown.clone().drop_guard();
    let server = tokio::spawn(serve(listener, registry, ready_receiver, serve_shutdown));
    let work = work(client, (settings, environment), metrics, ready, shutdown);
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
    (settings, environment): (RunSettings, OperatorEnvironment),
    metrics: Metrics,
    ready: watch::Sender<bool>,
    shutdown: CancellationToken,
) -> Result<(), RunError> {
    if !settings.leader_election {
        metrics.leads.set(1);
        lead(&client, (&settings, environment), metrics, ready, shutdown).await;
        return Ok(());
    }
    let api = Api::namespaced(client.clone(), &settings.namespace);
    let mut candidate = Candidate::new(api, &settings.lease(), &settings.identity, settings.lease_duration());
    // A standby is ready while it waits for leadership.
    ready.send_replace(true);
    tokio::select! {
        () = candidate.acquire() => {}
        () = shutdown.cancelled() => return Ok(()),
    }
    tracing::info!(identity = settings.identity, "leader elected");
    metrics.leads.set(1);
    let client = client_for_term(candidate.term(), &client);
    let result = tokio::select! {
        () = lead(&client, (&settings, environment), metrics.clone(), ready, shutdown) => Ok(()),
        // Running reconciles are dropped.
        () = candidate.renew_until_lost() => Err(RunError::LeaseLost(settings.lease())),
    };
    metrics.leads.set(0);
    if result.is_ok() {
        candidate.release().await;
    }
    result
}

async fn lead(
    client: &Client,
    (settings, environment): (&RunSettings, OperatorEnvironment),
    metrics: Metrics,
    ready: watch::Sender<bool>,
    shutdown: CancellationToken,
) {
    let reporter =
        Reporter { controller: "remoe-operator".to_owned(), instance: Some(settings.identity.clone()) };
    let (main_pollers, reconcile_requests) = MainPollers::new();
    let starting = StartProbes::new(main_pollers.reconcile_requests());
    let pool = PlanningPool::new(settings.planning_threads.into(), main_pollers.reconcile_requests());
    let identities = Arc::new(settings.identities(client, metrics.writes.clone()));
    let has_gateways = environment.gateway.is_some();
    let leases = NamespaceApi::new(client.clone(), &settings.namespace, metrics.writes.clone());
    let gateway_identity_shown =
        (settings.signer != SignerName::Unsigned).then(|| gateway_identity(&settings.namespace));
    let context = Context {
        client: client.clone(),
        gateways: has_gateways.then(|| Gateways::new(leases, &settings.release, gateway_identity_shown)),
        environment,
        identities: identities.clone(),
        recorder: Recorder::new(client.clone(), reporter),
        metrics,
        main_pollers,
        starting,
        memory: SoftStateStore::default(),
        pool,
    };
    let controllers = run_controllers(
        context,
        reconcile_requests,
        &settings.watch_namespaces,
        settings.concurrency,
        ready,
        shutdown.clone(),
    );
    tokio::pin!(controllers);
    tokio::select! {
        () = &mut controllers => return,
        () = identities.keep_gateway_certificate(), if has_gateways => {}
        () = shutdown.cancelled() => {}
    }
    if timeout(DRAIN_TIMEOUT, controllers).await.is_err() {
        tracing::warn!("stopped with reconciles in progress");
    }
}
