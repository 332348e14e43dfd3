//! Life cycle of the function: load, listen, serve, drain.

use crate::control::Control;
use crate::dispatch::ExpertMetrics;
use crate::engine::{self, EngineHandle, EngineParts, EngineSettings, EngineStop, RequestLimits};
use crate::http::{self, HttpOptions, HttpState, PlacementView, SummarySource, TextFrontend};
use crate::loaded::Loaded;
use crate::memory;
use crate::metrics::EngineMetrics;
use crate::placer::{Placer, PlacerParts};
use crate::records::Recorder;
use crate::{Backend, Error, Settings};
use prometheus::Registry;
use remoe_http::Probes;
use remoe_model::kv_pages;
use remoe_otel::Traces;
use remoe_process::{
    Announcement, Role, beside, function_registry, listen, load_unless_stopped, refused_connections,
    serve_metrics,
};
use remoe_proto::identity::Trust;
use remoe_proto::v1::main_model_server::MainModelServer;
use remoe_proto::{
    ConnectionRefusal, Intake, IntakeLimits, MAX_CONTROL_MESSAGE, MAX_CONTROL_REQUEST, TlsHandshake,
};
use remoe_weights::LoadError;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle as TaskHandle;
use tokio_util::sync::CancellationToken;
use tonic::server::NamedService;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

/// Time after the drain or the end of the engine, in which clients receive errors and the engine ends.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Limits on data that the control interface buffers before a request is complete.
const CONTROL_INTAKE: IntakeLimits = IntakeLimits {
    connections: 128,
    streams: 1024,
    connection_streams: 256,
    message_bytes: MAX_CONTROL_REQUEST,
    unfinished_bytes: 2 * MAX_CONTROL_REQUEST,
};

/// Positions beyond its known tokens that admission expects a sequence to need soon.
const HEADROOM: usize = 128;

/// Sockets of the function.
pub struct Listeners {
    /// Socket of the HTTP API; `None` if only the control interface is served.
    pub http: Option<TcpListener>,
    /// Socket of the health probes; `None` if there are none.
    pub health: Option<TcpListener>,
    /// Socket of the metrics; `None` if they are served with the HTTP API.
    pub metrics: Option<TcpListener>,
    /// Socket of the gRPC control interface, for launchers and the command line.
    pub control: TcpListener,
}

impl Listeners {
    /// Binds the addresses of `settings`. Must be called within a runtime.
    ///
    /// # Errors
    /// Fails if an address is in use or not local.
    pub fn bind(settings: &Settings) -> io::Result<Self> {
        Ok(Self {
            http: match settings.no_http {
                true => None,
                false => Some(listen(settings.http_listen)?),
            },
            health: settings.health_listen.map(listen).transpose()?,
            metrics: settings.metrics_listen.map(listen).transpose()?,
            control: listen(settings.control_listen)?,
        })
    }
}

/// Loads the model of `settings`, serves on `listeners`, and drains when `shutdown` is cancelled.
///
/// Calls `ready` once, when connections are accepted. Requests are accepted once a routing generation is in force.
///
/// # Errors
/// See [`Error`].
pub async fn run<B: Backend>(
    settings: Settings,
    listeners: Listeners,
    started: Instant,
    shutdown: CancellationToken,
    ready: impl FnOnce(&Announcement) -> io::Result<()>,
) -> Result<(), Error> {
    let traces = Traces::from_environment("remoe-main")?;
    let outcome = serve::<B>(settings, listeners, started, shutdown, traces.clone(), ready).await;
    traces.shut_down().await;
    outcome
}

async fn serve<B: Backend>(
    settings: Settings,
    mut listeners: Listeners,
    started: Instant,
    shutdown: CancellationToken,
    traces: Traces,
    ready: impl FnOnce(&Announcement) -> io::Result<()>,
) -> Result<(), Error> {
    let trust = settings.identity_dir.as_deref().zip(settings.operator_identity.clone());
    let trust = trust.map(|(folder, operator)| Trust::for_control(folder, operator)).transpose()?;
    let is_placed = watch::Sender::new(false);
    let probes = Probes::start(listeners.health.take(), is_placed.subscribe())?;
    let process = Process { settings, trust, traces, started, shutdown, is_placed, probes };
    tracing::info!(model = %process.settings.source.model, "loading");
    let load_settings = process.settings.clone();
    let loading = load_unless_stopped(&process.shutdown, move || Loaded::new::<B>(&load_settings));
    let Some(model) = loading.await? else { return Ok(()) };
    let announcement = Announcement {
        role: Role::Main,
        grpc: listeners.control.local_addr()?,
        http: listeners.http.as_ref().map(TcpListener::local_addr).transpose()?,
        metrics: listeners.metrics.as_ref().map(TcpListener::local_addr).transpose()?,
        health: process.probes.address(),
        start_us: u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX),
    };
    let function = process.start(model, announcement.start_us)?;
    let servers = process.listen(function, listeners).await?;
    process.probes.has_loaded();
    ready(&announcement)?;
    tracing::info!(control = %announcement.grpc, http = ?announcement.http, start_us = announcement.start_us, "listening");
    process.run(servers).await
}

/// State of the process before the model is loaded.
struct Process {
    settings: Settings,
    /// Identities of launchers to trust; `None` without identities.
    trust: Option<Trust>,
    traces: Traces,
    started: Instant,
    shutdown: CancellationToken,
    /// True while requests are accepted.
    is_placed: watch::Sender<bool>,
    probes: Probes,
}

/// A function that has loaded its model and does not accept connections yet.
struct Function {
    http: HttpState,
    control: Control,
    registry: Registry,
    engine: RunningEngine,
}

/// The engine's thread and its stop signals.
struct RunningEngine {
    handle: EngineHandle,
    thread: JoinHandle<()>,
    stop: EngineStop,
    failed_loads: mpsc::UnboundedReceiver<LoadError>,
}

/// A function that accepts requests.
struct Servers {
    control: TaskHandle<Result<(), tonic::transport::Error>>,
    http: TaskHandle<io::Result<()>>,
    health: HealthReporter,
    engine: RunningEngine,
}

impl Process {
    /// Starts the engine of `model`, which was loaded `start_us` microseconds after the start of the process.
    fn start(&self, model: Loaded, start_us: u64) -> Result<Function, Error> {
        let settings = &self.settings;
        let registry = process_registry(&model)?;
        self.traces.register(&registry)?;
        let prefill_rows = prefill_rows(&model, settings.iteration_rows);
        let limits = model.limits(settings, prefill_rows);
        let metrics = EngineMetrics::new(&registry)?;
        let cache_bytes = limits.cache_pages.saturating_mul(model.page_bytes());
        metrics.cache_limit.set(i64::try_from(cache_bytes).unwrap_or(i64::MAX));
        for (purpose, bytes) in &model.device_memory {
            let gauge = metrics.device_memory.with_label_values(&[*purpose]);
            gauge.set(i64::try_from(*bytes).unwrap_or(i64::MAX));
        }
        let recorder = match &settings.record_activations {
            None => None,
            Some(path) => Some(Recorder::open(path, model.record_header(settings), &registry)?),
        };
        let expert_metrics = ExpertMetrics::new(&registry)?;
        let (activity, loading) = (expert_metrics.activity.clone(), expert_metrics.loading.clone());
        let (card, description) = (model.card()?, model.description(start_us));
        let (expected, vocabulary) = (model.remote_requirements(self.trust.as_ref()), model.vocabulary());
        let http_options = http_options(settings, &model, self.traces.clone());
        let Loaded { checkpoint, class, threads, text, pool, model, deferred_weights, .. } = model;
        if let Some(name) = http_options
            .template_variables
            .keys()
            .find(|name| text.as_ref().is_none_or(|text| !text.reads(name)))
        {
            return Err(Error::TemplateVariable(name.clone()));
        }
        let parts = EngineParts {
            model,
            pool,
            checkpoint: checkpoint.clone(),
            class,
            vocabulary,
            expected,
            expert_metrics,
            metrics,
            recorder,
        };
        // The engine stops after the servers, so that accepted requests finish.
        let stop = EngineStop::default();
        let (engine, switches, thread) =
            engine::start(engine_settings(settings, limits), parts, stop.clone())?;
        let (account, published) = (watch::Sender::new(None), watch::Sender::default());
        let (failed_loads, received_failures) = mpsc::unbounded_channel();
        let http = HttpState::new(
            engine.clone(),
            text.clone().map(|text| text as Arc<dyn TextFrontend>),
            http_options,
            self.is_placed.subscribe(),
            account.subscribe(),
            PlacementView::new(published.subscribe(), activity.clone(), card),
            registry.clone(),
        )?;
        let control = Control {
            engine: engine.clone(),
            placer: Placer::new(PlacerParts {
                switches,
                checkpoint,
                class,
                threads,
                memory_bytes: memory::limit(settings.memory_bytes),
                is_placed: self.is_placed.clone(),
                account,
                published,
                shutdown: self.shutdown.clone(),
                loading,
                deferred_weights,
                failed_loads,
                started: self.started,
            }),
            text,
            description,
            activity,
            started: self.started,
        };
        let engine = RunningEngine { handle: engine, thread, stop, failed_loads: received_failures };
        Ok(Function { http, control, registry, engine })
    }

    /// Starts the control, HTTP and metrics servers.
    async fn listen(&self, function: Function, listeners: Listeners) -> Result<Servers, Error> {
        let Function { http, control, registry, engine } = function;
        let refused = refused_connections(&registry, ConnectionRefusal::ALL.map(ConnectionRefusal::name))?;
        if let Some(listener) = listeners.metrics {
            beside("metrics server stopped", serve_metrics(listener, registry, self.probes.end()));
        }
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<MainModelServer<Control>>().await;
        let handshake = |trust| {
            let refused = refused.clone();
            TlsHandshake::new(trust, move |refusal: ConnectionRefusal| {
                refused.with_label_values(&[refusal.name()]).inc()
            })
        };
        let gateways = self.trust.as_ref().zip(self.settings.gateway_identity.clone());
        let http_handshake = gateways.map(|(trust, gateway)| handshake(trust.for_http(gateway)));
        let intake = Intake::new(CONTROL_INTAKE);
        let control = intake
            .server()
            .add_service(health_service)
            .add_service(
                MainModelServer::new(control)
                    .max_decoding_message_size(MAX_CONTROL_REQUEST)
                    .max_encoding_message_size(MAX_CONTROL_MESSAGE),
            )
            .serve_with_incoming_shutdown(
                intake.listen(listeners.control, self.trust.clone().map(handshake)),
                self.shutdown.clone().cancelled_owned(),
            );
        let control = tokio::spawn(control);
        let shutdown = self.shutdown.clone();
        let http = tokio::spawn(async move {
            match listeners.http {
                None => Ok(()),
                Some(listener) => http::serve(listener, http_handshake, http, shutdown).await,
            }
        });
        Ok(Servers { control, http, health, engine })
    }

    /// Serves until shutdown, drains, and stops the engine.
    async fn run(self, servers: Servers) -> Result<(), Error> {
        let Servers { control, http, mut health, engine } = servers;
        let RunningEngine { handle: engine, thread, stop, mut failed_loads } = engine;
        let limit_s = self.settings.drain_seconds;
        let served = async {
            control.await.map_err(io::Error::other)??;
            http.await.map_err(io::Error::other)??;
            Ok::<_, Error>(())
        };
        let drain = async {
            self.shutdown.cancelled().await;
            // From here on, `/health` and new requests on open connections answer 503.
            self.is_placed.send_replace(false);
            // A client that watches the health service would keep the server open.
            for service in ["", MainModelServer::<Control>::NAME] {
                health.set_service_status(service, ServingStatus::NotServing).await;
                health.clear_service_status(service).await;
            }
            tracing::info!(in_flight = engine.in_flight(), "draining");
            tokio::time::sleep(Duration::from_secs(limit_s)).await;
        };
        tokio::pin!(served);
        let served_in_time = tokio::select! {
            served = &mut served => Some(served),
            () = drain => None,
            // The engine's thread has ended by itself.
                        () = stop.finish.cancelled() => {
                            // Probes, gateways and clients get an answer before the process ends and is restarted.
                            self.is_placed.send_replace(false);
                            tokio::time::sleep(SHUTDOWN_TIMEOUT).await;
                            let is_device_lost = stop.device_lost.is_cancelled();
                            return Err(if is_device_lost { Error::DeviceLost } else { Error::Engine });
            }
            Some(error) = failed_loads.recv() => return Err(Error::Expert(error)),
        };
        match served_in_time {
            Some(served) => served?,
            None => {
                tracing::warn!(limit_s, in_flight = engine.in_flight(), "drain timeout: requests in flight");
                // Their clients receive an error after the current iteration.
                stop.halt.cancel();
                if let Ok(served) = tokio::time::timeout(SHUTDOWN_TIMEOUT, &mut served).await {
                    served?;
                }
            }
        }
        stop.finish.cancel();
        join_engine(thread).await
    }
}

/// Creates the registry of the process, with the instruction paths of the kernels.
fn process_registry(model: &Loaded) -> Result<Registry, Error> {
    let (pool, class) = (model.pool.clone(), model.class);
    let paths = pool.paths(class).to_string();
    Ok(function_registry(class.name(), &paths, move || pool.paths(class).of_rows(1).name())?)
}

/// Returns the most rows of a layered prefill of `model`, at most `iteration_rows`.
fn prefill_rows(model: &Loaded, iteration_rows: usize) -> usize {
    let config = model.checkpoint.config();
    let moe = config.moe_layers().into_iter().filter_map(|layer| config.moe(layer));
    let top_k = moe.map(|moe| moe.top_k).max().unwrap_or(0);
    kv_pages::prefill_rows(config.hidden_size, model.class.dtype.bytes(), top_k, iteration_rows)
}

/// Returns the settings of the engine.
fn engine_settings(settings: &Settings, limits: RequestLimits) -> EngineSettings {
    EngineSettings {
        limits,
        max_batch: settings.max_batch,
        headroom: HEADROOM,
        target_itl: settings.target_itl,
        fallback_bytes: settings.fallback_bytes,
        poll: Duration::from_micros(settings.poll_us),
    }
}

/// Returns the options of the HTTP API for `model`.
fn http_options(settings: &Settings, model: &Loaded, traces: Traces) -> HttpOptions {
    let name = settings.served_model_name.first().cloned().unwrap_or_else(|| settings.source.model.name());
    HttpOptions {
        // An empty environment variable counts as no key.
        api_key: settings.api_key.clone().filter(|key| !key.is_empty()),
        gateway_key: settings.gateway_key.clone().filter(|key| !key.is_empty()),
        is_only_for_gateways: settings.identity_dir.is_some() && settings.gateway_identity.is_some(),
        cors_origins: settings.cors_origins.clone().into(),
        body_limit: settings.body_limit,
        defaults: model.checkpoint.generation().clone(),
        template_variables: settings.chat_template_kwargs.clone().unwrap_or_default(),
        end_ids: model.end_ids(),
        primer: settings
            .primer
            .then(|| SummarySource::new(model.checkpoint.clone(), model.record_header(settings))),
        traces,
        further_names: settings.served_model_name.iter().skip(1).cloned().collect(),
        ..HttpOptions::new(name)
    }
}

/// Waits for the engine, which was told to finish, to end.
async fn join_engine(engine: JoinHandle<()>) -> Result<(), Error> {
    let joined = tokio::task::spawn_blocking(move || engine.join());
    match tokio::time::timeout(SHUTDOWN_TIMEOUT, joined).await {
        Ok(joined) => joined.map_err(io::Error::other)?.map_err(|_| Error::Engine),
        Err(_) => {
            tracing::warn!("engine did not stop in time");
            Ok(())
        }
    }
}
