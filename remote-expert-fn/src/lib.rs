//! A remote-expert function: it hosts a set of (layer, expert) and computes their outputs.
//!
//! Start: read the headers, refuse what does not fit, read and pack exactly the hosted byte ranges,
//! listen. One thread drives the connections and computes small work with the kernel pool; large
//! work is computed on another ([`compute`]). Between reading and computing stands a queue that
//! [`admission`] bounds. It holds no state that outlives a request, so any replica can answer any
//! request, twice if need be.

mod admission;
mod compute;
mod host;
mod metrics;
mod pass;
mod service;
mod settings;
mod spans;

pub use host::{Host, HostError};
#[doc(hidden)]
pub use service::check_work;
pub use settings::Settings;

use admission::Admission;
use compute::Computer;
use metrics::Metrics;
use remoe_http::serve_probes;
use remoe_kernels::{KernelError, NumericsClass, Pool, PoolConfig, wrong_paths};
use remoe_model::CheckpointError;
use remoe_otel::{Traces, TracesError};
use remoe_process::{
    Announcement, Role, beside, function_registry, listen, refused_connections, serve_metrics,
};
use remoe_proto::identity::{IdentityError, Trust};
use remoe_proto::v1::FunctionDescription;
use remoe_proto::v1::expert_function_server::ExpertFunctionServer;
use remoe_proto::{
    Door, Intake, ListingError, MAX_MESSAGE, Refusal, STREAM_WINDOW, WIRE_VERSION, parse_listing,
};
use remoe_weights::{LoadError, checked_experts_class, default_dtype};
use service::Service;
use spans::Spans;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic_health::ServingStatus;

/// From the signal to the end, whatever is still open.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);

/// The health service's names beside the empty one.
const HEALTH_SERVICES: [&str; 3] = ["", "readiness", "liveness"];

/// Why a function cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The checkpoint is unusable.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// `--experts` cannot be read.
    #[error(transparent)]
    Listing(#[from] ListingError),
    /// The experts cannot be hosted.
    #[error(transparent)]
    Host(HostError),
    /// The kernels cannot be used.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The certificate cannot be used.
    #[error("--identity-dir: {0}")]
    Identity(#[from] IdentityError),
    /// Traces are asked for in a way that there is not.
    #[error(transparent)]
    Traces(#[from] TracesError),
    /// A metric is registered twice.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
    /// A socket or thread cannot be had.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A computation panicked.
    #[error("the computation crashed; see the log lines above")]
    Computer,
    /// The gRPC server failed.
    #[error("gRPC server: {0}")]
    Server(#[from] tonic::transport::Error),
}

impl From<HostError> for Error {
    fn from(error: HostError) -> Self {
        match error {
            HostError::Load(LoadError::Checkpoint(error)) => Self::Checkpoint(error),
            error => Self::Host(error),
        }
    }
}

/// The sockets of the function.
pub struct Listeners {
    /// For main functions.
    pub grpc: TcpListener,
    /// For scrapers.
    pub metrics: TcpListener,
    /// For probes; absent if there are none.
    pub health: Option<TcpListener>,
}

impl Listeners {
    /// Binds what `settings` name.
    ///
    /// # Errors
    /// An address is taken or not ours.
    pub fn bind(settings: &Settings) -> io::Result<Self> {
        Ok(Self {
            grpc: listen(settings.listen)?,
            metrics: listen(settings.metrics_listen)?,
            health: match settings.health_listen {
                None => None,
                Some(address) => Some(listen(address)?),
            },
        })
    }
}

/// Loads what `settings` name, serves on `listeners` and drains when `shutdown` is cancelled.
/// `ready` is called once, when connections are accepted.
///
/// The future is boxed, so that the function is compiled here and not once more in its program.
///
/// # Errors
/// See [`Error`].
pub fn run(
    settings: Settings,
    listeners: Listeners,
    started: Instant,
    shutdown: CancellationToken,
    ready: fn(&Announcement) -> io::Result<()>,
) -> Pin<Box<dyn Future<Output = Result<(), Error>>>> {
    Box::pin(serve_traced(settings, listeners, started, shutdown, ready))
}

async fn serve_traced(
    settings: Settings,
    listeners: Listeners,
    started: Instant,
    shutdown: CancellationToken,
    ready: fn(&Announcement) -> io::Result<()>,
) -> Result<(), Error> {
    let traces = Traces::from_environment("remoe-expert")?;
    let spans = Spans::new(traces.clone());
    let keeping = tokio::spawn(spans.clone().keep());
    let outcome = serve(settings, listeners, started, shutdown, (traces.clone(), spans.clone()), ready).await;
    keeping.abort();
    spans.end();
    traces.shut_down().await;
    outcome
}

async fn serve(
    settings: Settings,
    listeners: Listeners,
    started: Instant,
    shutdown: CancellationToken,
    (traces, spans): (Traces, Spans),
    ready: fn(&Announcement) -> io::Result<()>,
) -> Result<(), Error> {
    let trust = settings.identity_dir.as_deref().map(Trust::of_experts).transpose()?;
    let (loaded, has_loaded) = watch::channel(false);
    let (serving, is_serving) = watch::channel(false);
    let health_address = listeners.health.as_ref().map(TcpListener::local_addr).transpose()?;
    // From the start to the very end, the drain included.
    let probing = CancellationToken::new();
    if let Some(listener) = listeners.health {
        let probes = serve_probes(listener, has_loaded, is_serving, probing.clone());
        beside("health server stopped", probes);
    }
    let _probes_end_with_this = probing.drop_guard();
    tracing::debug!(model = %settings.source.model, "loading");
    // Not even the runtime's own threads could start.
    host::within_address_space(host::BASE_BYTES).map_err(Error::Host)?;
    // In a thread of its own: signals are heard meanwhile.
    let wanted = settings.clone();
    let experts = tokio::select! {
        loaded = tokio::task::spawn_blocking(move || Loaded::new(&wanted)) => loaded.map_err(io::Error::other)??,
        () = shutdown.cancelled() => {
            tracing::info!("stopped while loading");
            return Ok(());
        }
    };
    let Loaded { hidden, fingerprint, class, host, pool } = experts;
    let instruction_path = pool.paths(class).to_string();
    let computing = pool.clone();
    let one_row = move || computing.paths(class).of_rows(1).name();
    let registry = function_registry(class.name(), &instruction_path, one_row)?;
    let metrics = Metrics::new(&registry)?;
    traces.register(&registry)?;
    metrics.memory.set(i64::try_from(host.memory_bytes()).unwrap_or(i64::MAX));
    let row_bytes = hidden * class.dtype.bytes();
    let hosted = host.listing();
    metrics.experts.set(hosted.iter().map(|set| set.experts.len() as i64).sum());
    let announcement = Announcement {
        role: Role::Remote,
        grpc: listeners.grpc.local_addr()?,
        http: None,
        metrics: Some(listeners.metrics.local_addr()?),
        health: health_address,
        start_us: u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX),
    };
    metrics.start.set(announcement.start_us as f64 / 1e6);
    let description = FunctionDescription {
        wire_version: WIRE_VERSION,
        checkpoint: fingerprint,
        dtype: class.dtype.to_string(),
        numerics_class: class.name().to_owned(),
        instruction_path,
        hidden_size: u32::try_from(hidden).unwrap_or(u32::MAX),
        hosted,
        memory_limit_bytes: settings.memory_bytes.unwrap_or(0),
        memory_bytes: host.memory_bytes(),
        start_us: announcement.start_us,
        draining: false,
    };
    let host = Arc::new(host);
    let in_flight_bytes = host.in_flight_bytes(settings.max_in_flight_bytes);
    metrics.in_flight_limit.set(i64::try_from(in_flight_bytes).unwrap_or(i64::MAX));
    let admission = Admission::new(settings.max_in_flight, in_flight_bytes, metrics.in_flight.clone());
    let (orders, queue) = mpsc::unbounded_channel();
    let computer = Computer::new(
        host.clone(),
        pool,
        row_bytes,
        Duration::from_micros(settings.poll_us),
        metrics.clone(),
        spans.clone(),
    );
    let computing = tokio::spawn(computer.run(queue));
    let closing = CancellationToken::new();
    let service = Service {
        host,
        description,
        row_bytes,
        admission: admission.clone(),
        orders,
        metrics,
        spans,
        closing: closing.clone(),
    };
    let (mut health, health_service) = tonic_health::server::health_reporter();
    for name in HEALTH_SERVICES {
        health.set_service_status(name, ServingStatus::Serving).await;
    }
    let refused = refused_connections(&registry, Refusal::ALL.map(Refusal::name))?;
    let door = trust
        .map(|trust| Door::new(trust, move |refusal| refused.with_label_values(&[refusal.name()]).inc()));
    let metrics_server = tokio::spawn(serve_metrics(listeners.metrics, registry, closing.clone()));
    let intake = Intake::new(host::INTAKE);
    let server = intake
        .server()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(STREAM_WINDOW)
        .add_service(health_service)
        .add_service(
            ExpertFunctionServer::new(service)
                .max_decoding_message_size(MAX_MESSAGE)
                .max_encoding_message_size(MAX_MESSAGE),
        )
        .serve_with_incoming_shutdown(intake.listen(listeners.grpc, door), closing.clone().cancelled_owned());
    let server = tokio::spawn(server);
    loaded.send_replace(true);
    serving.send_replace(true);
    ready(&announcement)?;
    tracing::info!(address = %announcement.grpc, start_us = announcement.start_us, "ready");
    let served = async {
        let served = server.await.map_err(io::Error::other)?;
        metrics_server.await.map_err(io::Error::other)??;
        Ok::<_, Error>(served?)
    };
    let drain = async {
        shutdown.cancelled().await;
        tracing::info!(in_flight = admission.in_flight(), "draining");
        serving.send_replace(false);
        for name in HEALTH_SERVICES {
            // Alive until the end; only no longer ready.
            if name != "liveness" {
                health.set_service_status(name, ServingStatus::NotServing).await;
            }
        }
        admission.drain();
        admission.idle().await;
        closing.cancel();
        // A client that watches the health would hold the server open.
        for name in HEALTH_SERVICES {
            health.clear_service_status(name).await;
        }
        std::future::pending::<()>().await;
    };
    // It goes on for as long as the server takes orders, unless a computation panics.
    let broken = async {
        match computing.await {
            Ok(Ok(())) => std::future::pending().await,
            Ok(Err(_)) | Err(_) => Error::Computer,
        }
    };
    let limit = async {
        shutdown.cancelled().await;
        tokio::time::sleep(DRAIN_LIMIT).await;
        tracing::warn!(limit_s = DRAIN_LIMIT.as_secs(), "drain timeout: connections open");
    };
    tokio::select! {
        served = served => served,
        () = drain => Ok(()),
        () = limit => Ok(()),
        error = broken => Err(error),
    }
}

/// Parts of the function that take time to load.
struct Loaded {
    /// Elements of a hidden state.
    hidden: usize,
    fingerprint: String,
    class: NumericsClass,
    host: Host,
    pool: Arc<Pool>,
}

impl Loaded {
    fn new(settings: &Settings) -> Result<Self, Error> {
        let checkpoint = settings.source.open()?.checkpoint;
        let dtype = settings.dtype.map_or_else(|| default_dtype(&checkpoint), |dtype| dtype.0);
        let class = checked_experts_class(&checkpoint, dtype, settings.experts_dtype)?;
        let threads = settings.threads.unwrap_or(PoolConfig::default().threads);
        let sets = parse_listing(&settings.experts)?;
        let host = Host::load(&checkpoint, &sets, class, settings.memory_bytes, threads)?;
        let config = PoolConfig { threads, path: settings.instruction_path, ..PoolConfig::default() };
        for (path, class) in wrong_paths(&[class]) {
            tracing::warn!(%path, %class, "instruction path disabled: wrong results on this CPU");
        }
        let pool = Arc::new(Pool::new(config)?);
        tracing::info!(threads, pinned = pool.is_pinned(), "kernel threads started");
        Ok(Self {
            hidden: checkpoint.config().hidden_size,
            fingerprint: checkpoint.fingerprint()?.to_string(),
            class,
            host,
            pool,
        })
    }
}
