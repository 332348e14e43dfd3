//! The life of the function: load, listen, serve, drain.

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

/// After the drain or the end of the engine, for errors to reach clients and for the engine to end.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Limits on what the control interface takes in before a request is complete.
const CONTROL_INTAKE: IntakeLimits = IntakeLimits {
    connections: 128,
    streams: 1024,
    connection_streams: 256,
    message_bytes: MAX_CONTROL_REQUEST,
    unfinished_bytes: 2 * MAX_CONTROL_REQUEST,
};

/// Positions that a sequence is thought to come to soon, when another one asks for room.
const HEADROOM: usize = 128;

/// The sockets of the function.
pub struct Listeners {
    /// For users; none when only the control interface is served.
    pub http: Option<TcpListener>,
    /// For probes; `None` if there are none.
    pub health: Option<TcpListener>,
    /// For scrapers; none where they ask at the address for users.
    pub metrics: Option<TcpListener>,
    /// For launchers and the command line.
    pub control: TcpListener,
}

impl Listeners {
    /// Binds what `settings` name, within a runtime.
    ///
    /// # Errors
    /// An address is taken or not ours.
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

/// Loads what `settings` name, serves on `listeners` and drains when `shutdown` is cancelled.
/// `ready` is called once, when connections are accepted; requests are taken once a routing
/// generation is in force.
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
    let placed = watch::Sender::new(false);
    let probes = Probes::start(listeners.health.take(), placed.subscribe())?;
    let process = Process { settings, trust, traces, started, shutdown, placed, probes };
    tracing::info!(model = %process.settings.source.model, "loading");
    let wanted = process.settings.clone();
    let loading = load_unless_stopped(&process.shutdown, move || Loaded::new::<B>(&wanted));
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

/// State of the process that is there before the model is.
struct Process {
    settings: Settings,
    /// Trust in launchers; absent without identities.
    trust: Option<Trust>,
    traces: Traces,
    started: Instant,
    shutdown: CancellationToken,
    /// True while requests are taken.
    placed: watch::Sender<bool>,
    probes: Probes,
}

/// A function that has loaded, and has no connections yet.
struct Function {
    http: HttpState,
    control: Control,
    registry: Registry,
    engine: RunningEngine,
}

/// The engine's thread, and how to end it.
struct RunningEngine {
    handle: EngineHandle,
    thread: JoinHandle<()>,
    stop: EngineStop,
    lost_experts: mpsc::UnboundedReceiver<LoadError>,
}

/// A function that takes requests.
struct Servers {
    control: TaskHandle<Result<(), tonic::transport::Error>>,
    http: TaskHandle<io::Result<()>>,
    health: HealthReporter,
    engine: RunningEngine,
}

impl Process {
    /// Starts the engine of `model`, which was loaded `start_us` microseconds after the process began.
    fn start(&self, model: Loaded, start_us: u64) -> Result<Function, Error> {
        let settings = &self.settings;
        let registry = registry_of(&model)?;
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
        let (activity, arriving) = (expert_metrics.activity.clone(), expert_metrics.arriving.clone());
        let (card, description) = (model.card()?, model.description(start_us));
        let (expected, vocabulary) = (model.expected(self.trust.as_ref()), model.vocabulary());
        let http_options = http_options(settings, &model, self.traces.clone());
        let Loaded { checkpoint, class, threads, text, pool, model, rest, .. } = model;
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
        // The engine stops after the servers: they finish what they have accepted.
        let stop = EngineStop::default();
        let (engine, switches, thread) =
            engine::start(engine_settings(settings, limits), parts, stop.clone())?;
        let (account, shown) = (watch::Sender::new(None), watch::Sender::default());
        let (lost, lost_experts) = mpsc::unbounded_channel();
        let http = HttpState::new(
            engine.clone(),
            text.clone().map(|text| text as Arc<dyn TextFrontend>),
            http_options,
            self.placed.subscribe(),
            account.subscribe(),
            PlacementView::new(shown.subscribe(), activity.clone(), card),
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
                placed: self.placed.clone(),
                account,
                shown,
                shutdown: self.shutdown.clone(),
                arriving,
                rest,
                lost,
                started: self.started,
            }),
            text,
            description,
            activity,
            started: self.started,
        };
        let engine = RunningEngine { handle: engine, thread, stop, lost_experts };
        Ok(Function { http, control, registry, engine })
    }

    /// Accepts launchers, users and scrapers.
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

    /// Serves until the shutdown, drains, and ends the engine.
    async fn run(self, servers: Servers) -> Result<(), Error> {
        let Servers { control, http, mut health, engine } = servers;
        let RunningEngine { handle: engine, thread, stop, mut lost_experts } = engine;
        let limit_s = self.settings.drain_seconds;
        let served = async {
            control.await.map_err(io::Error::other)??;
            http.await.map_err(io::Error::other)??;
            Ok::<_, Error>(())
        };
        let drain = async {
            self.shutdown.cancelled().await;
            // `/health` and new requests on open connections answer 503 from here on.
            self.placed.send_replace(false);
            // A client that watches the health would hold the server open.
            for service in ["", MainModelServer::<Control>::NAME] {
                health.set_service_status(service, ServingStatus::NotServing).await;
                health.clear_service_status(service).await;
            }
            tracing::info!(in_flight = engine.in_flight(), "draining");
            tokio::time::sleep(Duration::from_secs(limit_s)).await;
        };
        tokio::pin!(served);
        let in_time = tokio::select! {
            served = &mut served => Some(served),
            () = drain => None,
            // Cancelled from inside: the engine's thread has ended without being asked to.
            () = stop.finish.cancelled() => {
                // Probes and gateways turn away, and clients are told, before the process ends and is started again.
                self.placed.send_replace(false);
                tokio::time::sleep(LAST_WORDS).await;
                let lost = stop.device_lost.is_cancelled();
                return Err(if lost { Error::DeviceLost } else { Error::Engine });
            }
            Some(error) = lost_experts.recv() => return Err(Error::Expert(error)),
        };
        match in_time {
            Some(served) => served?,
            None => {
                tracing::warn!(limit_s, in_flight = engine.in_flight(), "drain timeout: requests in flight");
                // Their clients are told, between two iterations.
                stop.halt.cancel();
                if let Ok(served) = tokio::time::timeout(LAST_WORDS, &mut served).await {
                    served?;
                }
            }
        }
        stop.finish.cancel();
        joined(thread).await
    }
}

/// The registry of the process, with what it says of how `model` is computed.
fn registry_of(model: &Loaded) -> Result<Registry, Error> {
    let (pool, class) = (model.pool.clone(), model.class);
    let paths = pool.paths(class).to_string();
    Ok(function_registry(class.name(), &paths, move || pool.paths(class).of_rows(1).name())?)
}

/// Rows of a prefill of `model`, at most `iteration_rows`.
fn prefill_rows(model: &Loaded, iteration_rows: usize) -> usize {
    let config = model.checkpoint.config();
    let moe = config.moe_layers().into_iter().filter_map(|layer| config.moe(layer));
    let top_k = moe.map(|moe| moe.top_k).max().unwrap_or(0);
    kv_pages::prefill_rows(config.hidden_size, model.class.dtype.bytes(), top_k, iteration_rows)
}

/// How much the engine takes on.
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

/// How the API answers for `model`.
fn http_options(settings: &Settings, model: &Loaded, traces: Traces) -> HttpOptions {
    let name = settings.served_model_name.first().cloned().unwrap_or_else(|| settings.source.model.name());
    HttpOptions {
        // An empty variable in the environment is no key.
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

/// Waits for the end of the engine, which has been asked to finish.
async fn joined(engine: JoinHandle<()>) -> Result<(), Error> {
    let joined = tokio::task::spawn_blocking(move || engine.join());
    match tokio::time::timeout(LAST_WORDS, joined).await {
        Ok(joined) => joined.map_err(io::Error::other)?.map_err(|_| Error::Engine),
        Err(_) => {
            tracing::warn!("engine did not stop in time");
            Ok(())
        }
    }
}
