//! The life of the function: load, listen, serve, drain.

use crate::admission::Admission;
use crate::compute::ComputeLoop;
use crate::host::{self, HostedExperts};
use crate::metrics::Metrics;
use crate::service::Service;
use crate::spans::CallerSpans;
use crate::{Error, Listeners, Settings};
use prometheus::Registry;
use remoe_http::Probes;
use remoe_kernels::{NumericsClass, Pool, PoolConfig, wrong_paths};
use remoe_otel::Traces;
use remoe_process::{
    Announcement, Role, function_registry, load_unless_stopped, refused_connections, serve_metrics,
};
use remoe_proto::identity::Trust;
use remoe_proto::v1::FunctionDescription;
use remoe_proto::v1::expert_function_server::ExpertFunctionServer;
use remoe_proto::{
    ConnectionRefusal, Intake, MAX_MESSAGE, STREAM_WINDOW, TlsHandshake, WIRE_VERSION, parse_listing,
};
use remoe_weights::{checked_experts_class, default_dtype};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinHandle};
use tokio_util::sync::CancellationToken;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

/// Timeout of draining, from the signal to the end of the process.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Service names of the gRPC health service.
const HEALTH_SERVICES: [&str; 3] = ["", "readiness", "liveness"];

/// Runs the function with tracing, and sends the remaining spans at the end.
pub(crate) async fn run_traced(
    settings: Settings,
    listeners: Listeners,
    started: Instant,
    shutdown: CancellationToken,
    ready: fn(&Announcement) -> io::Result<()>,
) -> Result<(), Error> {
    let traces = Traces::from_environment("remoe-expert")?;
    let spans = CallerSpans::new(traces.clone());
    let span_task = tokio::spawn(spans.clone().end_silent_spans());
    let outcome = serve(settings, listeners, started, shutdown, &traces, &spans, ready).await;
    span_task.abort();
    spans.end_all();
    traces.shut_down().await;
    outcome
}

async fn serve(
    settings: Settings,
    mut listeners: Listeners,
    started: Instant,
    shutdown: CancellationToken,
    traces: &Traces,
    spans: &CallerSpans,
    ready: fn(&Announcement) -> io::Result<()>,
) -> Result<(), Error> {
    let trust = settings.identity_dir.as_deref().map(Trust::for_experts).transpose()?;
    let serving = watch::Sender::new(false);
    let probes = Probes::start(listeners.health.take(), serving.subscribe())?;
    tracing::debug!(model = %settings.source.model, "loading");
    // Below this limit, not even the threads of the runtime could start.
    host::check_address_space(host::BASE_BYTES).map_err(Error::HostedExperts)?;
    let wanted = settings.clone();
    let Some(loaded) = load_unless_stopped(&shutdown, move || LoadedModel::new(&wanted)).await? else {
        return Ok(());
    };
    let registry = loaded.registry()?;
    traces.register(&registry)?;
    let announcement = Announcement {
        role: Role::Remote,
        grpc: listeners.grpc.local_addr()?,
        http: None,
        metrics: Some(listeners.metrics.local_addr()?),
        health: probes.address(),
        start_us: u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX),
    };
    let description = loaded.description(settings.memory_bytes, announcement.start_us);
    let function = Function::start(&settings, loaded, description, &registry, spans)?;
    let servers = function.listen(listeners, trust, registry).await?;
    probes.has_loaded();
    serving.send_replace(true);
    ready(&announcement)?;
    tracing::info!(address = %announcement.grpc, start_us = announcement.start_us, "ready");
    servers.run(serving, shutdown).await
}

/// Function that computes, before it accepts connections.
struct Function {
    service: Service,
    admission: Arc<Admission>,
    compute_task: JoinHandle<Result<(), JoinError>>,
    closing: CancellationToken,
}

impl Function {
    fn start(
        settings: &Settings,
        loaded: LoadedModel,
        description: FunctionDescription,
        registry: &Registry,
        spans: &CallerSpans,
    ) -> Result<Self, Error> {
        let metrics = Metrics::new(registry)?;
        metrics.memory.set(i64::try_from(loaded.host.memory_bytes()).unwrap_or(i64::MAX));
        metrics.experts.set(description.hosted.iter().map(|set| set.experts.len() as i64).sum());
        metrics.start.set(description.start_us as f64 / 1e6);
        let row_bytes = loaded.hidden * loaded.class.dtype.bytes();
        let host = Arc::new(loaded.host);
        let in_flight_bytes = host.in_flight_bytes(settings.max_in_flight_bytes);
        metrics.in_flight_limit.set(i64::try_from(in_flight_bytes).unwrap_or(i64::MAX));
        let admission = Admission::new(settings.max_in_flight, in_flight_bytes, metrics.in_flight.clone());
        let (admitted_requests, queue) = mpsc::unbounded_channel();
        let compute_loop = ComputeLoop::new(
            host.clone(),
            loaded.pool,
            row_bytes,
            Duration::from_micros(settings.poll_us),
            metrics.clone(),
            spans.clone(),
        );
        let compute_task = tokio::spawn(compute_loop.run(queue));
        let closing = CancellationToken::new();
        let service = Service {
            host,
            description,
            row_bytes,
            admission: admission.clone(),
            admitted_requests,
            metrics,
            spans: spans.clone(),
            closing: closing.clone(),
        };
        Ok(Self { service, admission, compute_task, closing })
    }

    /// Accepts connections of scrapers and of the main functions that `trust` names, or of all clients without trust.
    async fn listen(
        self,
        listeners: Listeners,
        trust: Option<Trust>,
        registry: Registry,
    ) -> Result<Servers, Error> {
        let Self { service, admission, compute_task, closing } = self;
        let (health, health_service) = tonic_health::server::health_reporter();
        for name in HEALTH_SERVICES {
            health.set_service_status(name, ServingStatus::Serving).await;
        }
        let refused = refused_connections(&registry, ConnectionRefusal::ALL.map(ConnectionRefusal::name))?;
        let handshake = trust.map(|trust| {
            TlsHandshake::new(trust, move |refusal| refused.with_label_values(&[refusal.name()]).inc())
        });
        let metrics = tokio::spawn(serve_metrics(listeners.metrics, registry, closing.clone()));
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
            .serve_with_incoming_shutdown(
                intake.listen(listeners.grpc, handshake),
                closing.clone().cancelled_owned(),
            );
        Ok(Servers { grpc: tokio::spawn(server), metrics, health, admission, compute_task, closing })
    }
}

/// Running servers of the function.
struct Servers {
    grpc: JoinHandle<Result<(), tonic::transport::Error>>,
    metrics: JoinHandle<io::Result<()>>,
    health: HealthReporter,
    admission: Arc<Admission>,
    compute_task: JoinHandle<Result<(), JoinError>>,
    closing: CancellationToken,
}

impl Servers {
    /// Serves until `shutdown`, then drains: sets `serving` to false and answers all accepted requests.
    async fn run(self, serving: watch::Sender<bool>, shutdown: CancellationToken) -> Result<(), Error> {
        let Self { grpc, metrics, mut health, admission, compute_task, closing } = self;
        let served = async {
            let served = grpc.await.map_err(io::Error::other)?;
            metrics.await.map_err(io::Error::other)??;
            Ok::<_, Error>(served?)
        };
        let drain = async {
            shutdown.cancelled().await;
            tracing::info!(in_flight = admission.in_flight(), "draining");
            serving.send_replace(false);
            for name in HEALTH_SERVICES {
                // The function stays alive, but is no longer ready.
                if name != "liveness" {
                    health.set_service_status(name, ServingStatus::NotServing).await;
                }
            }
            admission.drain();
            admission.wait_until_idle().await;
            closing.cancel();
            // A client that watches the health would keep the server open.
            for name in HEALTH_SERVICES {
                health.clear_service_status(name).await;
            }
            std::future::pending::<()>().await;
        };
        // The computation ends only with the server, unless it panics.
        let panicked = async {
            match compute_task.await {
                Ok(Ok(())) => std::future::pending().await,
                Ok(Err(_)) | Err(_) => Error::ComputationPanicked,
            }
        };
        let timeout = async {
            shutdown.cancelled().await;
            tokio::time::sleep(DRAIN_TIMEOUT).await;
            tracing::warn!(limit_s = DRAIN_TIMEOUT.as_secs(), "drain timeout: connections open");
        };
        tokio::select! {
            served = served => served,
            () = drain => Ok(()),
            () = timeout => Ok(()),
            error = panicked => Err(error),
        }
    }
}

/// Loaded model parts of the function.
struct LoadedModel {
    /// Hidden size of the model.
    hidden: usize,
    fingerprint: String,
    class: NumericsClass,
    host: HostedExperts,
    pool: Arc<Pool>,
}

impl LoadedModel {
    fn new(settings: &Settings) -> Result<Self, Error> {
        let checkpoint = settings.source.open()?.checkpoint;
        let dtype = settings.dtype.map_or_else(|| default_dtype(&checkpoint), |dtype| dtype.0);
        let class = checked_experts_class(&checkpoint, dtype, settings.experts_dtype)?;
        let threads = settings.threads.unwrap_or(PoolConfig::default().threads);
        let sets = parse_listing(&settings.experts)?;
        let host = HostedExperts::load(&checkpoint, &sets, class, settings.memory_bytes, threads)?;
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

    /// Creates the metrics registry, with the instruction paths of the kernels.
    fn registry(&self) -> Result<Registry, Error> {
        let (pool, class) = (self.pool.clone(), self.class);
        let paths = pool.paths(class).to_string();
        Ok(function_registry(class.name(), &paths, move || pool.paths(class).of_rows(1).name())?)
    }

    fn description(&self, memory_limit: Option<u64>, start_us: u64) -> FunctionDescription {
        FunctionDescription {
            wire_version: WIRE_VERSION,
            checkpoint: self.fingerprint.clone(),
            dtype: self.class.dtype.to_string(),
            numerics_class: self.class.name().to_owned(),
            instruction_path: self.pool.paths(self.class).to_string(),
            hidden_size: u32::try_from(self.hidden).unwrap_or(u32::MAX),
            hosted: self.host.listing(),
            memory_limit_bytes: memory_limit.unwrap_or(0),
            memory_bytes: self.host.memory_bytes(),
            start_us,
            draining: false,
        }
    }
}
