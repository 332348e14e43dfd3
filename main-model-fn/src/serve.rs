//! The life of the function: load, listen, serve, drain.

use crate::backend::Rest;
use crate::control::Control;
use crate::dispatch::{Expected, ExpertMetrics};
use crate::engine::{self, EngineParts, EngineSettings, EngineStop, RequestLimits, Vocabulary};
use crate::http::{self, HttpOptions, HttpState, ModelCard, PlacementView, PrimerSource, TextFrontend};
use crate::memory;
use crate::metrics::EngineMetrics;
use crate::model_text::ModelText;
use crate::placer::{Placer, PlacerParts};
use crate::records::Recorder;
use crate::transformer::{Model, Transformer};
use crate::{Backend, DeviceName, Error, Settings};
use remoe_experts::{checked_experts_class, default_dtype, experts_class};
use remoe_function::{
    Announcement, Role, listen, program_registry, refused_connections, register_one_row_path, serve_metrics,
};
use remoe_http::serve_probes;
use remoe_kernels::{Dtype, NumericsClass, Pool, PoolConfig, wrong_paths};
use remoe_model::{Checkpoint, DenseDtype};
use remoe_predictor::record::RecordHeader;
use remoe_traces::Traces;
use remoe_wire::identity::Trust;
use remoe_wire::v1::MainDescription;
use remoe_wire::v1::main_model_server::MainModelServer;
use remoe_wire::{
    Door, Intake, IntakeLimits, MAX_CONTROL_MESSAGE, MAX_CONTROL_REQUEST, Refusal, WIRE_VERSION,
};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic::server::NamedService;
use tonic_health::ServingStatus;

/// After the drain, for errors to reach clients and for the engine to end.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// What the control interface takes in before a request is complete.
const CONTROL_INTAKE: IntakeLimits = IntakeLimits {
    connections: 128,
    streams: 1024,
    connection_streams: 256,
    message_bytes: MAX_CONTROL_REQUEST,
    unfinished_bytes: 2 * MAX_CONTROL_REQUEST,
};

/// Positions that a sequence is thought to come to soon, when another one asks for room.
const HEADROOM: usize = 128;

/// Most choices of one request.
const MAX_CHOICES: usize = 16;

/// The sockets of the function.
pub struct Listeners {
    /// For users; none when only the control interface is served.
    pub http: Option<TcpListener>,
    /// For probes; none where nobody probes.
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
    listeners: Listeners,
    started: Instant,
    shutdown: CancellationToken,
    traces: Traces,
    ready: impl FnOnce(&Announcement) -> io::Result<()>,
) -> Result<(), Error> {
    let trust = settings.identity_dir.as_deref().zip(settings.operator_identity.clone());
    let trust = trust.map(|(folder, operator)| Trust::of_control(folder, operator)).transpose()?;
    let (loaded, has_loaded) = watch::channel(false);
    let placed = watch::Sender::new(false);
    let health = listeners.health.as_ref().map(TcpListener::local_addr).transpose()?;
    // From the start to the very end, the drain included.
    let ended = CancellationToken::new();
    if let Some(listener) = listeners.health {
        let probes = serve_probes(listener, has_loaded, placed.subscribe(), ended.clone());
        tokio::spawn(async move {
            if let Err(error) = probes.await {
                tracing::error!(%error, "probes are not answered any more");
            }
        });
    }
    let _servers_end_with_this = ended.clone().drop_guard();
    tracing::info!(model = %settings.source.model, "loading");
    // In a thread of its own: signals are heard meanwhile.
    let wanted = settings.clone();
    let parts = tokio::select! {
        loaded = tokio::task::spawn_blocking(move || Loaded::new::<B>(&wanted)) => loaded.map_err(io::Error::other)??,
        () = shutdown.cancelled() => {
            tracing::info!("ended while the model was loading");
            return Ok(());
        }
    };
    let Loaded { checkpoint, class, threads, device_name, text, pool, model, rest, fingerprint } = parts;
    let dtype = class.dtype;
    let instruction_path = pool.paths(class).to_string();
    let registry = program_registry(&[
        ("numerics_class", class.name()),
        ("instruction_path", instruction_path.as_str()),
    ])?;
    let computing = pool.clone();
    register_one_row_path(&registry, move || computing.paths(class).of_rows(1).name())?;
    traces.register(&registry)?;
    let config = checkpoint.config();
    // Rounded up: where so many positions have room, a request of so many has.
    let page_bytes = model.page_bytes().max(1);
    let cache_pages = settings.kv_cache_bytes.div_ceil(page_bytes as u64);
    let cache_pages = usize::try_from(cache_pages).unwrap_or(usize::MAX);
    let limits = RequestLimits {
        vocab_size: config.vocab_size,
        context_length: config.served_context(),
        cache_pages,
        max_choices: MAX_CHOICES.min(settings.max_batch),
        max_requests: settings.max_requests,
    };
    let end_ids = match checkpoint.generation().eos_token_ids.as_slice() {
        [] => config.eos_ids.clone(),
        ids => ids.to_vec(),
    };
    let metrics = EngineMetrics::new(&registry)?;
    metrics.cache_limit.set(i64::try_from(cache_pages.saturating_mul(page_bytes)).unwrap_or(i64::MAX));
    let refused = refused_connections(&registry, Refusal::ALL.map(Refusal::name))?;
    let recorder = match &settings.record_activations {
        None => None,
        Some(path) => {
            Some(Recorder::open(path, record_header(&settings, &checkpoint, &fingerprint, dtype), &registry)?)
        }
    };
    let expert_metrics = ExpertMetrics::new(&registry)?;
    let (activity, arriving) = (expert_metrics.activity.clone(), expert_metrics.arriving.clone());
    let parts = EngineParts {
        model,
        pool,
        checkpoint: checkpoint.clone(),
        class,
        vocabulary: Vocabulary {
            tokenizer: text.as_ref().map(|text| text.tokenizer().clone()),
            end_ids: end_ids.clone(),
        },
        expected: Expected {
            checkpoint: fingerprint.clone(),
            dtype: dtype.to_string(),
            numerics_class: class.name().to_owned(),
            hidden_size: config.hidden_size,
            sets: Vec::new(),
            trust: trust.as_ref().map(Trust::to_remote),
        },
        expert_metrics,
        metrics,
        recorder,
    };
    let engine_settings = EngineSettings {
        limits,
        max_batch: settings.max_batch,
        headroom: HEADROOM,
        iteration_rows: settings.iteration_rows,
        prompt_chunk: settings.iteration_rows,
        fallback_bytes: settings.fallback_bytes,
        poll: Duration::from_micros(settings.poll_us),
    };
    // The engine stops after the servers: they finish what they have accepted.
    let stop = EngineStop::default();
    let (engine, switches, engine_thread) = engine::start(engine_settings, parts, stop.clone())?;
    let announcement = Announcement {
        role: Role::Main,
        grpc: listeners.control.local_addr()?,
        http: listeners.http.as_ref().map(TcpListener::local_addr).transpose()?,
        metrics: listeners.metrics.as_ref().map(TcpListener::local_addr).transpose()?,
        health,
        start_us: u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX),
    };
    let (account, shown) = (watch::Sender::new(None), watch::Sender::default());
    let (lost, mut lost_experts) = mpsc::unbounded_channel();
    let card = ModelCard {
        facts: checkpoint.inspect()?,
        compute_dtype: dtype.to_string(),
        device: device_name.to_string(),
        operations: B::NAME,
        numerics_class: class.name().to_owned(),
    };
    if let Some(listener) = listeners.metrics {
        let pages = serve_metrics(listener, registry.clone(), ended);
        tokio::spawn(async move {
            if let Err(error) = pages.await {
                tracing::error!(%error, "metrics are not served any more");
            }
        });
    }
    let not_ready = placed.clone();
    let http_state = HttpState::new(
        engine.clone(),
        text.clone().map(|text| text as Arc<dyn TextFrontend>),
        HttpOptions {
            // An empty variable in the environment is no key.
            api_key: settings.api_key.clone().filter(|key| !key.is_empty()),
            cors_origins: settings.cors_origins.clone().into(),
            body_limit: settings.body_limit,
            defaults: checkpoint.generation().clone(),
            end_ids,
            primer: settings.primer.then(|| {
                let header = record_header(&settings, &checkpoint, &fingerprint, dtype);
                PrimerSource::new(checkpoint.clone(), header)
            }),
            traces,
            further_names: settings.served_model_name.iter().skip(1).cloned().collect(),
            ..HttpOptions::new(model_name(&settings))
        },
        placed.subscribe(),
        account.subscribe(),
        PlacementView::new(shown.subscribe(), activity.clone(), card),
        registry,
    )?;
    let control = Control {
        engine: engine.clone(),
        placer: Placer::new(PlacerParts {
            switches,
            checkpoint: checkpoint.clone(),
            class,
            threads,
            memory_bytes: memory::limit(settings.memory_bytes),
            placed,
            account,
            shown,
            shutdown: shutdown.clone(),
            arriving,
            rest,
            lost,
            started,
        }),
        text: text.clone(),
        description: MainDescription {
            wire_version: WIRE_VERSION,
            checkpoint: fingerprint,
            dtype: dtype.to_string(),
            numerics_class: class.name().to_owned(),
            device: device_name.to_string(),
            operations: B::NAME.to_owned(),
            generation: 0,
            placement: String::new(),
            local: Vec::new(),
            start_us: announcement.start_us,
            in_flight: 0,
            age_us: 0,
            work: Vec::new(),
            pairs: Vec::new(),
            arriving: 0,
        },
        activity,
        started,
    };
    let (mut health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<MainModelServer<Control>>().await;
    let intake = Intake::new(CONTROL_INTAKE);
    let door = |trust| {
        let refused = refused.clone();
        Door::new(trust, move |refusal: Refusal| refused.with_label_values(&[refusal.name()]).inc())
    };
    let gateways = trust.as_ref().zip(settings.gateway_identity.clone());
    let http_door = gateways.map(|(trust, gateway)| door(trust.of_http(gateway)));
    let control_server = intake
        .server()
        .add_service(health_service)
        .add_service(
            MainModelServer::new(control)
                .max_decoding_message_size(MAX_CONTROL_REQUEST)
                .max_encoding_message_size(MAX_CONTROL_MESSAGE),
        )
        .serve_with_incoming_shutdown(
            intake.listen(listeners.control, trust.map(door)),
            shutdown.clone().cancelled_owned(),
        );
    let control_server = tokio::spawn(control_server);
    let http_stop = shutdown.clone();
    let http_server = tokio::spawn(async move {
        match listeners.http {
            None => Ok(()),
            Some(listener) => http::serve(listener, http_door, http_state, http_stop).await,
        }
    });
    loaded.send_replace(true);
    ready(&announcement)?;
    tracing::info!(control = %announcement.grpc, http = ?announcement.http, start_us = announcement.start_us, "listening");
    let served = async {
        control_server.await.map_err(io::Error::other)??;
        http_server.await.map_err(io::Error::other)??;
        Ok::<_, Error>(())
    };
    let drain = async {
        shutdown.cancelled().await;
        // `/health` and new requests on open connections answer 503 from here on.
        not_ready.send_replace(false);
        // Whoever watches the health would hold the server open.
        for service in ["", MainModelServer::<Control>::NAME] {
            health.set_service_status(service, ServingStatus::NotServing).await;
            health.clear_service_status(service).await;
        }
        tracing::info!(in_flight = engine.in_flight(), "draining");
        tokio::time::sleep(Duration::from_secs(settings.drain_seconds)).await;
    };
    tokio::pin!(served);
    let in_time = tokio::select! {
        served = &mut served => Some(served),
        () = drain => None,
        // Cancelled from inside: the engine's thread has ended without being asked to.
        () = stop.finish.cancelled() => return Err(Error::Engine),
        Some(error) = lost_experts.recv() => return Err(Error::Expert(error)),
    };
    match in_time {
        Some(served) => served?,
        None => {
            tracing::warn!(
                limit_s = settings.drain_seconds,
                in_flight = engine.in_flight(),
                "requests were still running at the end of the drain"
            );
            // Their clients are told, between two iterations.
            stop.halt.cancel();
            if let Ok(served) = tokio::time::timeout(LAST_WORDS, &mut served).await {
                served?;
            }
        }
    }
    stop.finish.cancel();
    let joined = tokio::task::spawn_blocking(move || engine_thread.join());
    match tokio::time::timeout(LAST_WORDS, joined).await {
        Ok(joined) => joined.map_err(io::Error::other)?.map_err(|_| Error::Engine),
        Err(_) => {
            tracing::warn!("the engine was still computing at the end");
            Ok(())
        }
    }
}

/// What takes time to load.
struct Loaded {
    checkpoint: Arc<Checkpoint>,
    /// What experts are computed as; everything else has its dtype.
    class: NumericsClass,
    threads: usize,
    device_name: DeviceName,
    text: Option<Arc<ModelText>>,
    pool: Arc<Pool>,
    model: Box<dyn Model>,
    rest: Vec<Arc<dyn Rest>>,
    fingerprint: String,
}

impl Loaded {
    fn new<B: Backend>(settings: &Settings) -> Result<Self, Error> {
        let mut checkpoint = settings.source.open()?.checkpoint;
        if let Some(positions) = settings.max_model_len {
            checkpoint.set_positions(positions)?;
        }
        let checkpoint = Arc::new(checkpoint);
        let dtype = settings.dtype.map_or_else(|| default_dtype(&checkpoint), |dtype| dtype.0);
        let class = checked_experts_class(&checkpoint, dtype, settings.experts_dtype)?;
        let threads = settings.threads.unwrap_or(PoolConfig::default().threads);
        let text = ModelText::open(&checkpoint)?.map(Arc::new);
        let config = PoolConfig { threads, path: settings.instruction_path, ..PoolConfig::default() };
        let pool = Arc::new(Pool::new(config)?);
        tracing::info!(threads, pinned = pool.is_pinned(), "threads of the kernels");
        let ops = B::open(settings.device, dtype, &pool)?;
        let device_name = ops.device();
        let dense = dense_class(settings, dtype, device_name)?;
        let classes = [dtype.into(), dense, class];
        for (path, class) in wrong_paths(&classes) {
            tracing::warn!(%path, %class, "this CPU computes wrong results by an instruction path, which is not used");
        }
        for class in classes {
            // Asked for now, they are measured now and not within the first request.
            let paths = pool.paths(class);
            tracing::debug!(%class, %paths, "instruction paths");
        }
        let model = Transformer::load(&checkpoint, dense, ops, threads)?;
        tracing::info!(bytes = model.weight_bytes(), class = %dense, "weights outside of experts");
        let (rest, model) = (model.rest(), Box::new(model));
        let fingerprint = checkpoint.fingerprint()?.to_string();
        Ok(Self { checkpoint, class, threads, device_name, text, pool, model, rest, fingerprint })
    }
}

/// What attention, dense layers, shared experts and the head are computed as.
fn dense_class(settings: &Settings, dtype: Dtype, device: DeviceName) -> Result<NumericsClass, Error> {
    let plain = match settings.dense_dtype {
        Some(DenseDtype::Bfloat16) => Some(Dtype::Bf16),
        Some(DenseDtype::Float32) => Some(Dtype::F32),
        Some(DenseDtype::Int8 | DenseDtype::Int4) | None => None,
    };
    if let Some(plain) = plain.filter(|plain| *plain != dtype) {
        return Err(Error::DenseDtype { asked: plain.to_string(), why: format!("this computes in {dtype}") });
    }
    let on_cpu = device == DeviceName::Cpu;
    let name = if on_cpu { "cpu" } else { "cuda" };
    let Some(quantised) = DenseDtype::quantised(settings.dense_dtype, settings.experts_dtype, name) else {
        return Ok(dtype.into());
    };
    if !on_cpu {
        return Err(Error::DenseDtype {
            asked: quantised.name().to_owned(),
            why: format!("{device} has no such products"),
        });
    }
    Ok(experts_class(dtype, quantised.of_experts()))
}

/// What the activation records of this function are of.
fn record_header(
    settings: &Settings,
    checkpoint: &Checkpoint,
    fingerprint: &str,
    dtype: Dtype,
) -> RecordHeader {
    let config = checkpoint.config();
    let layers = config.moe_layers();
    let facts = layers.first().and_then(|&layer| config.moe(layer));
    RecordHeader {
        model: fingerprint.to_owned(),
        layers: layers.iter().map(|&layer| layer as u32).collect(),
        experts: facts.map_or(0, |moe| moe.experts as u32),
        top_k: facts.map_or(0, |moe| moe.top_k as u32),
        dtype: dtype.to_string(),
        tokens: settings.record_tokens,
    }
}

/// The model's name in the API: what the settings say, else that of its folder or repository.
fn model_name(settings: &Settings) -> String {
    settings.served_model_name.first().cloned().unwrap_or_else(|| settings.source.model.name())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use clap::Parser;
    use remoe_kernels::WeightFormat;

    #[test]
    fn other_weights_are_quantised_beside_experts_on_cpus() {
        let class = |arguments: &[&str], device| {
            let arguments = ["main-model-fn", "--model", "m"].iter().chain(arguments);
            let class = dense_class(&Settings::parse_from(arguments), Dtype::Bf16, device);
            class.map(|class| class.weights).map_err(|error| error.to_string())
        };
        let (cpu, cuda) = (DeviceName::Cpu, DeviceName::Cuda(0));
        let (plain, int8) = (Ok(WeightFormat::Plain), Ok(WeightFormat::Int8));
        assert_eq!(class(&[], cpu), plain);
        assert_eq!(class(&["--experts-dtype", "int4"], cpu), int8);
        assert_eq!(class(&["--experts-dtype", "int4"], cuda), plain);
        assert_eq!(class(&["--experts-dtype", "fp8"], cpu), plain);
        assert_eq!(class(&["--experts-dtype", "int4", "--dense-dtype", "bfloat16"], cpu), plain);
        assert_eq!(class(&["--dense-dtype", "int8"], cpu), int8);
        assert_eq!(class(&["--experts-dtype", "int4", "--dense-dtype", "int4"], cpu), Ok(WeightFormat::Int4));
        let refused = class(&["--dense-dtype", "int8"], cuda).unwrap_err();
        assert_eq!(refused, "--dense-dtype int8 cannot be: cuda:0 has no such products");
        let refused = class(&["--dense-dtype", "float32"], cpu).unwrap_err();
        assert_eq!(refused, "--dense-dtype float32 cannot be: this computes in bfloat16");
    }
}
