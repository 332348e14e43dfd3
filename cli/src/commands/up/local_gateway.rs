//! Gateway of `up`, which serves all of its models at one address.

use super::args::UpArgs;
use super::keys::with_own_key;
use super::report::reachable_address;
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

/// Longest time that requests may continue after the first signal.
pub(super) const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Time that functions have at least to end after the drain.
pub(super) const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time to flush responses to clients and to the response store.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval between checks whether all requests have ended.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Default limit on the running and waiting requests of a model.
const DEFAULT_MAX_REQUESTS: u32 = 256;
/// Limit on the total body size of requests that wait for one model.
const MAX_WAITING_BYTES: usize = 64 << 20;

/// Gateway of all models. It accepts requests from the beginning. They wait until their model is ready.
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
        settings: &[ModelSettings],
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
        let cost_accounting = Arc::new(open_cost_accounting(args, prices, &metrics)?);
        let prediction_metrics =
            PredictionMetrics::register(metrics.registry()).map_err(|error| failed(&error))?;
        traces.register(metrics.registry()).map_err(|error| failed(&error))?;
        let max_requests = args.max_requests.unwrap_or(DEFAULT_MAX_REQUESTS) as usize;
        let prefix_index = PrefixIndex::default();
        let models: Vec<_> = settings
            .iter()
            .map(|settings| {
                let wanted = &settings.wanted;
                let options = ModelOptions {
                    name: wanted.name(),
                    short_names: Vec::new(),
                    context_length: wanted.inspection.served_context(),
                    max_requests,
                    waiting_bytes: MAX_WAITING_BYTES,
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
            options.responses = open_response_store(folder)?;
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
            let own_key = args.api_key.clone();
            let complete = move |keys| with_own_key(keys, own_key.as_deref());
            tokio::spawn(file.follow(gateway.clone(), complete));
        }
        let server = tokio::spawn(gateway.serve(listener, stop.clone()));
        let overhead = Overhead::new(cost_accounting.clone(), prices.cpu_core_hour, prices.memory_gb_hour);
        let overhead = tokio::spawn(overhead.keep());
        Ok(Self {
            models,
            address: reachable_address(address),
            has_key,
            stop,
            server,
            cost_accounting,
            prediction_metrics,
            overhead,
            responses,
        })
    }

    /// Refuses further requests, and waits until the present ones have ended or [`DRAIN_TIMEOUT`] has passed.
    pub(super) async fn drain(&self, progress: &Progress) {
        self.stop.cancel();
        self.models.iter().for_each(Model::close);
        let remaining =
            || self.models.iter().map(|model| model.load()).map(|(waiting, running)| waiting + running).sum();
        let initial = remaining();
        if initial > 0 {
            progress.doing("draining");
        }
        progress.line(&format!("{}; press Ctrl-C again to stop at once", drain_message(initial)));
        let all_ended = async {
            while remaining() > 0 {
                tokio::time::sleep(DRAIN_POLL_INTERVAL).await;
            }
        };
        // Requests that run longer get an error when their function ends.
        let _timeout = tokio::time::timeout(DRAIN_TIMEOUT, all_ended).await;
    }

    /// Flushes responses to clients and to the response store, and ends the gateway.
    pub(super) async fn end(self) {
        let mut server = self.server;
        if tokio::time::timeout(FLUSH_TIMEOUT, &mut server).await.is_err() {
            server.abort();
        }
        // The task records the remaining overhead when it is dropped.
        self.overhead.abort();
        let _aborted = self.overhead.await;
        let responses = self.responses;
        // A writer that hangs has already reported it.
        let _crashed = tokio::task::spawn_blocking(move || responses.flush(FLUSH_TIMEOUT)).await;
    }
}

/// Opens the access log. Without `target`, it is text on standard error if that is a terminal, and off otherwise.
fn access_log(
    target: Option<&AccessLogTarget>,
    progress: &Arc<Progress>,
) -> Result<Option<AccessLog>, CliError> {
    let default = match std::io::stderr().is_terminal() {
        true => AccessLogTarget::StandardError(AccessLogFormat::Text),
        false => AccessLogTarget::Off,
    };
    let target = target.unwrap_or(&default);
    let progress = progress.clone();
    // Print through `progress`, so that lines do not overwrite the spinner.
    let print_line = move |line: &str| {
        progress.line(line);
        Ok(())
    };
    target.open(print_line).map_err(|error| match target {
        AccessLogTarget::File(path) => CliError {
            path: Some(path.clone()),
            ..CliError::arguments("--access-log", format!("cannot write {}: {error}", path.display()))
        },
        _ => CliError::runtime(format!("cannot start the access log: {error}")),
    })
}

/// Opens the response store in the folder `state`.
fn open_response_store(state: &Path) -> Result<Arc<ResponseStore>, CliError> {
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

/// Opens the cost accounting, with a ledger if `--ledger` is set.
fn open_cost_accounting(
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
    CostAccounting::open(ledger, &price_source(args, prices), metrics.registry()).map_err(failed)
}

/// Describes the source of `prices` for the user.
fn price_source(args: &UpArgs, prices: &Prices) -> String {
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

/// Returns the message that announces the drain of `count` requests.
fn drain_message(count: usize) -> String {
    let requests = match count {
        0 => return "stopping".to_owned(),
        1 => "1 request".to_owned(),
        count => format!("{count} requests"),
    };
    format!("draining {requests} for up to {} s", (DRAIN_TIMEOUT + SHUTDOWN_TIMEOUT).as_secs())
}

/// Listens on `address`, whose port comes from `flag`.
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
        assert_eq!(drain_message(0), "stopping");
        assert!(drain_message(1).starts_with("draining 1 request for up to "), "{}", drain_message(1));
        assert!(drain_message(2).starts_with("draining 2 requests for up to "), "{}", drain_message(2));
    }
}
