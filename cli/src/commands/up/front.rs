//! Gateway of `up` before all of its models.

use super::args::UpArgs;
use super::keys::with_own_key;
use super::report::reachable;
use super::start::ModelSettings;
use crate::exit::CliError;
use crate::output::progress::{Progress, print_warning};
use remoe_billing::{Ledger, LedgerLimits};
use remoe_gateway_core::{
    AccessLog, AccessLogFormat, AccessLogTarget, CostAccounting, CostAccountingError, Gateway,
    GatewayMetrics, GatewayOptions, KeyFile, Keys, Model, ModelOptions, Overhead, PrefixIndex,
    ResponseLimits, ResponseStore,
};
use remoe_hardware::Prices;
use remoe_otel::Traces;
use remoe_usage::PredictionMetrics;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Longest time that requests go on after the first signal.
pub(super) const DRAIN: Duration = Duration::from_secs(30);
/// Shortest time that functions have to end after that.
pub(super) const END: Duration = Duration::from_secs(5);
/// Longest time that answers may be on their way to clients.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Time between two looks if all requests have ended.
const LOOK: Duration = Duration::from_millis(20);

/// Requests of a model that may run or wait, by default.
const MAX_REQUESTS: u32 = 256;
/// Bytes of bodies that may wait for one model.
const WAITING_BYTES: usize = 64 << 20;

/// Gateway of all models. It takes requests from the beginning: they wait until their model answers.
pub(super) struct LocalGateway {
    pub(super) models: Vec<Arc<Model>>,
    pub(super) address: SocketAddr,
    pub(super) has_key: bool,
    stop: CancellationToken,
    server: JoinHandle<std::io::Result<()>>,
    pub(super) cost_accounting: Arc<CostAccounting>,
    pub(super) prediction_metrics: PredictionMetrics,
    overhead: JoinHandle<()>,
    responses: Arc<ResponseStore>,
}

impl LocalGateway {
    pub(super) fn open(
        args: &UpArgs,
        asked: &[ModelSettings],
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
        let cost_accounting = Arc::new(cost_accounting(args, prices, &metrics)?);
        let prediction_metrics =
            PredictionMetrics::register(metrics.registry()).map_err(|error| failed(&error))?;
        traces.register(metrics.registry()).map_err(|error| failed(&error))?;
        let max_requests = args.max_requests.unwrap_or(MAX_REQUESTS) as usize;
        let prefix_index = PrefixIndex::default();
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
                Model::new(options, &metrics, &prefix_index)
            })
            .collect();
        let mut options = GatewayOptions {
            keys,
            cors_origins: args.cors_origins.clone().into(),
            queue_deadline: args.queue_deadline,
            cost_accounting: Some(cost_accounting.clone()),
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
        let overhead = Overhead::new(cost_accounting.clone(), prices.cpu_core_hour, prices.memory_gb_hour);
        let overhead = tokio::spawn(overhead.keep());
        Ok(Self {
            models,
            address: reachable(address),
            has_key,
            stop,
            server,
            cost_accounting,
            prediction_metrics,
            overhead,
            responses,
        })
    }

    /// Takes no more requests, and waits until those that are there have ended.
    pub(super) async fn drain(&self, progress: &Progress) {
        self.stop.cancel();
        self.models.iter().for_each(Model::close);
        let left =
            || self.models.iter().map(|model| model.load()).map(|(waiting, running)| waiting + running).sum();
        let at_first = left();
        if at_first > 0 {
            progress.doing("draining");
        }
        progress.line(&format!("{}; press Ctrl-C again to stop at once", drain_begins(at_first)));
        let all_ended = async {
            while left() > 0 {
                tokio::time::sleep(LOOK).await;
            }
        };
        // What has not ended by then is told so when its function is gone.
        let _late = tokio::time::timeout(DRAIN, all_ended).await;
    }

    /// Waits until clients have what they were sent.
    pub(super) async fn end(self) {
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

/// Opens the store of responses in the folder `state`.
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

/// Opens the books that account for costs.
fn cost_accounting(
    args: &UpArgs,
    prices: &Prices,
    metrics: &GatewayMetrics,
) -> Result<CostAccounting, CliError> {
    let failed = |error: CostAccountingError| CliError::arguments("--ledger", error.to_string());
    let open = |folder: &PathBuf| {
        Ledger::open(folder, LedgerLimits::default()).map_err(|error| CliError {
            path: Some(folder.clone()),
            ..CliError::arguments("--ledger", error.to_string())
        })
    };
    let ledger = args.ledger.as_ref().map(open).transpose()?;
    CostAccounting::open(ledger, &named(args, prices), metrics.registry()).map_err(failed)
}

/// Returns the source of `prices`, for people.
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

/// Announces the drain of `left` requests.
fn drain_begins(left: usize) -> String {
    let requests = match left {
        0 => return "stopping".to_owned(),
        1 => "1 request".to_owned(),
        left => format!("{left} requests"),
    };
    format!("draining {requests} for up to {} s", (DRAIN + END).as_secs())
}

/// Listens on `address`, which `flag` states.
pub(super) fn listen(address: SocketAddr, flag: &str) -> Result<TcpListener, CliError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drain_without_requests_only_stops() {
        assert_eq!(drain_begins(0), "stopping");
        assert!(drain_begins(1).starts_with("draining 1 request for up to "), "{}", drain_begins(1));
        assert!(drain_begins(2).starts_with("draining 2 requests for up to "), "{}", drain_begins(2));
    }
}
