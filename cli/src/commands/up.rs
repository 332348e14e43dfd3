//! `remoe up`: models as a service, until it is asked to end.

mod cashier;
mod following;
mod keeper;
mod measuring;
mod replan;
mod report;
mod seer;
mod start;
mod statement;
mod summary;
mod tariff;
mod tiers;

pub(crate) use start::StartTimes;

use crate::args::UpArgs;
use crate::deployment::Wanted;
use crate::exit::CliError;
use crate::output::progress::{Progress, print_warning};
use crate::programs;
use crate::running;
use crate::signals::{EndSignals, Ended};
use axum::http::HeaderValue;
use cashier::Cashier;
use following::Following;
use keeper::{End, Keeper};
use measuring::Measuring;
use remoe_billing::{Ledger, LedgerLimits};
use remoe_gateway_core::{
    AccessLog, AccessLogFormat, AccessLogTarget, Beginnings, Books, BooksError, Gateway, GatewayMetrics,
    GatewayOptions, KeyFile, Keys, Model, ModelOptions, Overhead, ResponseLimits, ResponseStore,
};
use remoe_hardware::Prices;
use remoe_otel::{Traces, TracesError};
use remoe_planner::Pricing;
use remoe_predictor::ByPhase;
use remoe_usage::ForesightMetrics;
use report::{Report, reachable};
use seer::Seer;
use start::{Asked, Started};
use std::io::{IsTerminal, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

/// How long requests may go on after the first signal.
const DRAIN: Duration = Duration::from_secs(30);
/// What functions may take to end after that, at least.
const END: Duration = Duration::from_secs(5);
/// Answers that were given may still be on their way to clients for so long.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Between two looks whether all requests have ended.
const LOOK: Duration = Duration::from_millis(20);

/// Requests that run or wait, where nobody says how many may.
const MAX_REQUESTS: u32 = 256;
/// Bytes of bodies that wait for one model.
const WAITING_BYTES: usize = 64 << 20;

/// Starts everything, reports what changes, and drains at the end.
pub(crate) async fn run(args: &UpArgs, as_json: bool, progress: &Arc<Progress>) -> Result<(), CliError> {
    let (keys, key_file) = keys(args)?;
    let secret = secret()?;
    let asked = ask(args, &secret)?;
    // Models that are fetched until here end with this process, as nothing runs yet.
    let mut signals = EndSignals::catch()?;
    // What will be missing is said before a profile is measured.
    programs::find(args.deployment.backend, args.deployment.device.as_deref())?;
    let listener = listen(SocketAddr::new(args.host, args.port), "--port")?;
    let prices = args.planning.prices()?;
    let pricing = args.planning.pricing_of(&prices)?;
    let traces = traces()?;
    let front = Front::open(args, &asked, (keys, key_file), &prices, listener, (traces.clone(), progress))?;
    let names = front.models.iter().map(|model| model.name().to_owned()).collect();
    let _registered =
        running::register("up", names, Some(format!("http://{}", front.address))).inspect_err(|error| {
            print_warning(&format!("`remoe ps` cannot list this process: {}", error.message));
        });
    let (mut kept, end) = (JoinSet::new(), watch::Sender::new(None));
    let started = tokio::select! {
        started = start(args, asked, &front, (&secret, &pricing), (&mut kept, end.subscribe()), as_json, progress) => Some(started),
        ended = signals.next_kind() => match ended {
            Ended::Interrupted if kept.is_empty() => return Err(CliError::interrupted()),
            _ => None,
        },
    };
    let served = match started {
        // Nobody has been served yet, so there is nothing to drain.
        None if kept.is_empty() => return Ok(()),
        Some(Err(error)) if kept.is_empty() => return Err(error),
        None => Ok(()),
        Some(Err(error)) => Err(error),
        Some(Ok(_measuring)) => tokio::select! {
            Some(ended) = kept.join_next() => ended.unwrap_or_else(|error| Err(CliError::runtime(error.to_string()))),
            () = signals.next() => Ok(()),
        },
    };
    let drained = async {
        let begun = Instant::now();
        front.drain(progress).await;
        end.send_replace(Some((DRAIN + END).saturating_sub(begun.elapsed())));
        while kept.join_next().await.is_some() {}
        front.end().await;
        traces.shut_down().await;
    };
    tokio::select! {
        () = drained => served,
        // Asked twice: dropping the supervisors ends the functions.
        () = signals.next() => Err(CliError::interrupted()),
    }
}

/// Where spans of requests go, as the environment says. Functions have it as well, and look for themselves.
fn traces() -> Result<Traces, CliError> {
    Traces::from_environment("remoe-gateway").map_err(|error| match &error {
        TracesError::Variable { variable, .. } => CliError::arguments(variable, error.to_string()),
        _ => CliError::runtime(error.to_string()),
    })
}

/// Who may ask, and the file that says so.
fn keys(args: &UpArgs) -> Result<(Keys, Option<KeyFile>), CliError> {
    // An empty variable in the environment is no key; an empty flag is a mistake that opens the server.
    if args.api_key.as_deref() == Some("")
        && std::env::var_os("REMOE_API_KEY").is_none_or(|key| !key.is_empty())
    {
        let message =
            "invalid --api-key: expected a key, got an empty string; omit the flag to serve without a key";
        return Err(CliError::arguments("--api-key", message));
    }
    let (file, keys) = match &args.keys {
        None => (None, Keys::none()),
        Some(path) => {
            let (file, keys) = KeyFile::open(path.clone()).map_err(|error| CliError {
                path: Some(path.clone()),
                ..CliError::arguments("--keys", error.to_string())
            })?;
            (Some(file), keys)
        }
    };
    let keys = with_own_key(keys, args.api_key.as_deref());
    Ok((keys.map_err(|message| CliError::arguments("--api-key", message))?, file))
}

/// `keys` and the one of `--api-key`.
fn with_own_key(keys: Keys, own: Option<&str>) -> Result<Keys, String> {
    let Some(own) = own.filter(|key| !key.is_empty()) else { return Ok(keys) };
    // What clients send is read without spaces around it.
    if own.trim() != own {
        return Err("invalid --api-key: expected no whitespace at its ends".to_owned());
    }
    keys.with_key("default", own).ok_or_else(|| {
        "invalid --api-key: --keys already contains this key or a tenant named default; remove one of them"
            .to_owned()
    })
}

/// What main functions let the gateway in by, and nobody else on this machine.
fn secret() -> Result<String, CliError> {
    let mut bytes = [0; 32];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut bytes))
        .map_err(|error| CliError::runtime(format!("cannot read random numbers: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Reads the facts of all models.
fn ask(args: &UpArgs, secret: &str) -> Result<Vec<Asked>, CliError> {
    let locations: Vec<_> = [&args.deployment.source.model].into_iter().chain(&args.further).collect();
    if args.served_model_name.len() > locations.len() {
        let message = format!(
            "invalid --served-model-name: expected one name per model, at most {}, got {}",
            locations.len(),
            args.served_model_name.len()
        );
        return Err(CliError::arguments("--served-model-name", message));
    }
    if locations.len() > 1 && args.deployment.plan.is_some() {
        let message = format!(
            "invalid --plan: a plan places one model, got {} models; serve them separately, or omit the flag",
            locations.len()
        );
        return Err(CliError::arguments("--plan", message));
    }
    let mut asked: Vec<Asked> = Vec::new();
    for (number, location) in locations.into_iter().enumerate() {
        let one = start::ask(args, location, args.served_model_name.get(number).cloned(), secret)?;
        let name = one.wanted.name();
        if asked.iter().any(|other| other.wanted.name() == name) {
            let message = format!(
                "invalid --served-model-name: two models are named {name}; give the flag once per model, in \
                 order"
            );
            return Err(CliError::arguments("--served-model-name", message));
        }
        asked.push(one);
    }
    Ok(asked)
}

fn listen(address: SocketAddr, flag: &str) -> Result<TcpListener, CliError> {
    remoe_process::listen(address).map_err(|error| CliError {
        field: Some(flag.to_owned()),
        ..CliError::runtime(match error.kind() {
            std::io::ErrorKind::AddrInUse => format!(
                "cannot listen on {address}: address in use; see `remoe ps`, or use {flag} 0 for a free port"
            ),
            _ => error.to_string(),
        })
    })
}

/// The gateway, which takes requests from the beginning: they wait until their model answers.
struct Front {
    models: Vec<Arc<Model>>,
    address: SocketAddr,
    has_key: bool,
    stop: CancellationToken,
    server: JoinHandle<std::io::Result<()>>,
    books: Arc<Books>,
    foresight: ForesightMetrics,
    overhead: JoinHandle<()>,
    responses: Arc<ResponseStore>,
}

impl Front {
    fn open(
        args: &UpArgs,
        asked: &[Asked],
        (keys, key_file): (Keys, Option<KeyFile>),
        prices: &Prices,
        listener: TcpListener,
        (traces, progress): (Traces, &Arc<Progress>),
    ) -> Result<Self, CliError> {
        let metrics_listener = args
            .metrics_port
            .map(|port| listen(SocketAddr::new(args.host, port), "--metrics-port"))
            .transpose()?;
        let failed =
            |error: &dyn std::fmt::Display| CliError::runtime(format!("cannot start the gateway: {error}"));
        let metrics = GatewayMetrics::new().map_err(|error| failed(&error))?;
        let books = Arc::new(books(args, prices, &metrics)?);
        let foresight = ForesightMetrics::register(metrics.registry()).map_err(|error| failed(&error))?;
        traces.register(metrics.registry()).map_err(|error| failed(&error))?;
        let max_requests = args.max_requests.unwrap_or(MAX_REQUESTS) as usize;
        let beginnings = Beginnings::default();
        let models: Vec<_> = asked
            .iter()
            .map(|asked| {
                let wanted = &asked.wanted;
                let options = ModelOptions {
                    name: wanted.name(),
                    short_names: Vec::new(),
                    context_length: wanted.inspection.served_context(),
                    max_requests,
                    waiting_bytes: WAITING_BYTES,
                    wake_limit: args.deployment.ready_timeout,
                };
                Model::new(options, &metrics, &beginnings)
            })
            .collect();
        let mut options = GatewayOptions {
            keys,
            cors_origins: args.cors_origins.clone().into(),
            queue_deadline: args.queue_deadline,
            books: Some(books.clone()),
            traces,
            ..GatewayOptions::default()
        };
        if let Some(limit) = args.body_limit {
            options.body_limit = usize::try_from(limit).unwrap_or(usize::MAX);
        }
        options.access_log = access_log(args.access_log.as_ref(), progress)?;
        if let Some(folder) = &args.state {
            options.responses = responses(folder)?;
        }
        let responses = options.responses.clone();
        let has_key = args.api_key.is_some() || args.keys.is_some();
        let address = listener.local_addr().map_err(|error| failed(&error))?;
        let stop = CancellationToken::new();
        let gateway = Gateway::new(options, models.clone(), metrics);
        if let Some(listener) = metrics_listener {
            tokio::spawn(gateway.clone().serve_metrics(listener, stop.clone()));
        }
        if let Some(file) = key_file {
            let own = args.api_key.clone();
            let checked = move |keys| with_own_key(keys, own.as_deref());
            tokio::spawn(file.follow(gateway.clone(), checked));
        }
        let server = tokio::spawn(gateway.serve(listener, stop.clone()));
        let overhead = Overhead::new(books.clone(), prices.cpu_core_hour, prices.memory_gb_hour);
        let overhead = tokio::spawn(overhead.keep());
        Ok(Self {
            models,
            address: reachable(address),
            has_key,
            stop,
            server,
            books,
            foresight,
            overhead,
            responses,
        })
    }

    /// Takes no more requests, and lets those that are there come to their end.
    async fn drain(&self, progress: &Progress) {
        self.stop.cancel();
        self.models.iter().for_each(Model::close);
        let left =
            || self.models.iter().map(|model| model.load()).map(|(waiting, running)| waiting + running).sum();
        let begun = match left() {
            0 => "stopping".to_owned(),
            left => {
                progress.doing("draining");
                format!("draining {} for up to {} s", requests(left), (DRAIN + END).as_secs())
            }
        };
        progress.line(&format!("{begun}; press Ctrl-C again to stop at once"));
        let all_ended = async {
            while left() > 0 {
                tokio::time::sleep(LOOK).await;
            }
        };
        // What has not ended by then is told so when its function is gone.
        let _late = tokio::time::timeout(DRAIN, all_ended).await;
    }

    /// Waits until clients have what they were sent.
    async fn end(self) {
        let mut server = self.server;
        if tokio::time::timeout(LAST_WORDS, &mut server).await.is_err() {
            server.abort();
        }
        // It notes what is left when it is dropped.
        self.overhead.abort();
        let _aborted = self.overhead.await;
        let responses = self.responses;
        // A writer that hangs has said so.
        let _crashed = tokio::task::spawn_blocking(move || responses.flush(LAST_WORDS)).await;
    }
}

/// Opens the access log: by default lines of text, if they go to a terminal.
fn access_log(
    target: Option<&AccessLogTarget>,
    progress: &Arc<Progress>,
) -> Result<Option<AccessLog>, CliError> {
    let by_default = match std::io::stderr().is_terminal() {
        true => AccessLogTarget::StandardError(AccessLogFormat::Text),
        false => AccessLogTarget::Off,
    };
    let target = target.unwrap_or(&by_default);
    let progress = progress.clone();
    // Lines must not cut through a spinner.
    let lines = move |line: &str| {
        progress.line(line);
        Ok(())
    };
    target.open(lines).map_err(|error| match target {
        AccessLogTarget::File(path) => CliError {
            path: Some(path.clone()),
            ..CliError::arguments("--access-log", format!("cannot write {}: {error}", path.display()))
        },
        _ => CliError::runtime(format!("cannot start the access log: {error}")),
    })
}

/// The store of responses in the folder `state`.
fn responses(state: &Path) -> Result<Arc<ResponseStore>, CliError> {
    let path = state.join("responses");
    let store = ResponseStore::open(&path, ResponseLimits::default()).map_err(|error| CliError {
        path: Some(path),
        ..CliError::arguments("--state", error.to_string())
    })?;
    for problem in store.unread() {
        print_warning(&format!("stored response ignored: {problem}"));
    }
    Ok(store)
}

/// Where money is accounted for.
fn books(args: &UpArgs, prices: &Prices, metrics: &GatewayMetrics) -> Result<Books, CliError> {
    let failed = |error: BooksError| CliError::arguments("--ledger", error.to_string());
    let open = |folder: &PathBuf| {
        Ledger::open(folder, LedgerLimits::default()).map_err(|error| CliError {
            path: Some(folder.clone()),
            ..CliError::arguments("--ledger", error.to_string())
        })
    };
    let ledger = args.ledger.as_ref().map(open).transpose()?;
    Books::open(ledger, &named(args, prices), metrics.registry()).map_err(failed)
}

/// Where `prices` stand, for people.
fn named(args: &UpArgs, prices: &Prices) -> String {
    let stated = [&prices.source, &prices.date].into_iter().flatten().cloned().collect::<Vec<_>>();
    match (&args.planning.pricing, stated.is_empty()) {
        (_, false) => stated.join(", "),
        (Some(path), true) => path.display().to_string(),
        (None, true) => format!(
            "defaults (no provider): ${} per core hour, ${} per GB hour",
            prices.cpu_core_hour, prices.memory_gb_hour
        ),
    }
}

fn requests(count: usize) -> String {
    match count {
        1 => "1 request".to_owned(),
        count => format!("{count} requests"),
    }
}

/// Starts the models, one after the other: profiles are measured on a quiet machine. Each is kept by a task
/// of its own from then on, until `end`. What is not measured yet is measured beside them while the result is kept.
async fn start(
    args: &UpArgs,
    asked: Vec<Asked>,
    front: &Front,
    (secret, pricing): (&str, &Pricing),
    (kept, end): (&mut JoinSet<Result<(), CliError>>, End),
    as_json: bool,
    progress: &Arc<Progress>,
) -> Result<Option<Measuring>, CliError> {
    let mut authorization = HeaderValue::from_str(&format!("Bearer {secret}"))
        .map_err(|error| CliError::runtime(format!("cannot create the internal API key: {error}")))?;
    authorization.set_sensitive(true);
    // No two runs begin in the same millisecond and write the same ledger.
    let run: Arc<str> = format!("{:x}", Books::now() / 1_000_000).into();
    let mut unmeasured = Vec::new();
    for (asked, model) in asked.into_iter().zip(&front.models) {
        let (books, name) = (front.books.clone(), model.name().to_owned());
        let cashier = Cashier { books, model: name, run: run.clone() };
        let seer = seer(args, &asked.wanted, front, model)?;
        let remembered = seer.as_ref().and_then(|(seer, _)| seer.remembered.as_ref());
        let Started {
            wanted,
            supervisor,
            status,
            times,
            tariff,
            accounted,
            tell,
            basis,
            choice,
            measurement,
        } = start::start(args, asked, (&cashier, pricing), remembered, as_json, progress).await?;
        let following = seer.map(|(seer, pause)| Following {
            seer,
            pause,
            metrics: front.foresight.of_model(model.name()),
        });
        let (subject, measured) = measurement.unzip();
        let report = Report {
            wanted,
            times,
            address: front.address,
            has_key: front.has_key,
            choice,
            hourly: tariff.hourly(),
            is_one_of_several: front.models.len() > 1,
            is_measured_later: measured.is_some(),
            as_json,
            progress: progress.clone(),
        };
        unmeasured.extend(subject);
        let keeper = Keeper {
            model: model.clone(),
            report,
            supervisor,
            authorization: authorization.clone(),
            idle: args.idle,
            remote_idle: args.planning.remote_idle(args.remote_idle)?,
            cashier,
            tariff,
            accounted,
            basis,
            pricing: *pricing,
            tell,
            following,
            measured,
            next: None,
        };
        kept.spawn(keeper.run(status, end.clone()));
    }
    if unmeasured.is_empty() {
        return Ok(None);
    }
    Ok(Some(Measuring::start(unmeasured, front.models.clone(), progress.clone())))
}

/// Who follows the requests of `model`, and the time between two revisions; none where its placement stays.
fn seer(
    args: &UpArgs,
    wanted: &Wanted,
    front: &Front,
    model: &Model,
) -> Result<Option<(Seer, Duration)>, CliError> {
    let Some(pause) = args.follow.replan.filter(|_| !wanted.moe_layers.is_empty()) else { return Ok(None) };
    let request = args.planning.workload.request(&wanted.inspection, None)?;
    let tokens = ByPhase { prefill: request.input_tokens, decode: request.output_tokens };
    let predictor = args.planning.predictor.as_deref();
    let seer = Seer::open(wanted, &args.follow, predictor, tokens, &front.foresight)?;
    model.tell(seer.witness());
    Ok(Some((seer, pause)))
}
