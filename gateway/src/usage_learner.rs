//! Learning of the expert usage of a deployment's requests, as its operator orders it.
//!
//! Prediction needs a [`ModelSummary`], which is fetched once from a main function. With a folder it is cached there,
//! so that a restarted gateway can predict for requests that wake a deployment. It is then in memory only while
//! requests come.

use crate::history_folder::{
    delete_history, for_each_ended_usage_file, other_usage_files, read_model_summary, write_model_summary,
};
use crate::main_functions::uri;
use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use remoe_api::{DemandPhase, MOST_SHARES, MainFunction, MixOf, MoEDemandSpec, PredictionOrder, RequestMix};
use remoe_gateway_core::Connector;
use remoe_proto::identity::Keyring;
use remoe_usage::{
    IN_MEMORY_HISTORY_BYTES, LoadedPredictor, MAX_MODEL_SUMMARY, ModelSummary, ModelSummaryError,
    PeerGateways, PredictionMetrics, PredictionService, PredictorLoader, PredictorOptions, UsageLearner,
};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

/// First pause before a failed start is tried again; doubled each time, up to [`MAX_RETRY_PAUSE`].
const FIRST_RETRY_PAUSE: Duration = Duration::from_secs(10);
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(600);
/// Timeout of fetching a model summary.
const FETCH_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest wait of an entry for predictions of waiting requests, which take less than a millisecond each.
const PREDICTION_TIMEOUT: Duration = Duration::from_millis(250);
/// As [`PREDICTION_TIMEOUT`], if the predictor must be loaded from its files first.
const FIRST_PREDICTION_TIMEOUT: Duration = Duration::from_secs(2);
/// Time without requests after which a predictor is unloaded from memory.
const UNLOAD_AFTER: Duration = Duration::from_secs(3600);
/// Time after the first request in which further requests are planned for together with it.
const GROUPING_TIME: Duration = Duration::from_millis(10);
/// Number of reports of expert usage in the time between two revisions.
const REPORTS_PER_REVISION: u32 = 4;
/// Shortest time between two such reports.
const MIN_REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Resources for predictions that all deployments share.
#[derive(Clone)]
pub(crate) struct SharedResources {
    /// Memory for predictions, in MiB.
    memory: Arc<Semaphore>,
    /// Lets one model summary be fetched and opened at a time, because that takes additional memory.
    loading: Arc<Semaphore>,
    /// Largest training history of one deployment, in bytes.
    experience_bytes: u64,
    /// Time between two reads of the training history of other gateways.
    history_read_interval: Duration,
    metrics: PredictionMetrics,
    /// Credentials for main functions that authenticate gateways.
    keyring: Option<Arc<Keyring>>,
}

impl SharedResources {
    /// Makes resources with `memory` bytes for all predictors. The training history of a deployment has at most
    /// `experience_bytes`, and that of other gateways is read every `history_read_interval`.
    pub(crate) fn new(
        (memory, experience_bytes): (u64, u64),
        history_read_interval: Duration,
        metrics: PredictionMetrics,
        keyring: Option<Arc<Keyring>>,
    ) -> Self {
        let memory = usize::try_from(memory >> 20).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Self {
            memory: Arc::new(Semaphore::new(memory)),
            loading: Arc::new(Semaphore::new(1)),
            experience_bytes,
            history_read_interval,
            metrics,
            keyring,
        }
    }
}

/// Learner of one deployment's expert usage, by its operator's orders.
pub(crate) struct UsageFollower {
    /// Learner that observes every request. It learns once there is a model summary.
    pub(crate) learner: Arc<UsageLearner>,
    /// Order that is in force.
    order: RwLock<Option<PredictionOrder>>,
    folder: Option<PathBuf>,
    resources: SharedResources,
}

/// Reason why expert usage is not learned.
#[derive(Debug, thiserror::Error)]
enum SummaryError {
    /// The main function does not send a summary.
    #[error("cannot get the model summary of main function {address}: {why}")]
    Main { address: String, why: String },
    /// The summary is of another model.
    #[error("model mismatch at main function {address}: expected {wanted}, got {found}")]
    OtherModel { address: String, found: String, wanted: String },
    /// The cached summary is of another model.
    #[error("cached model summary is of another model: expected {wanted}, got {found}")]
    Kept { found: String, wanted: String },
    /// The memory for predictions is exhausted.
    #[error("prediction memory exhausted: needs {wanted} MiB, {left} MiB left; raise --prediction-bytes")]
    Memory { wanted: usize, left: usize },
    #[error(transparent)]
    Primer(#[from] ModelSummaryError),
    #[error("{0}")]
    Thread(String),
}

/// Reports if a predictor for one order also suits the other.
fn needs_same_predictor(one: &PredictionOrder, other: &PredictionOrder) -> bool {
    (&one.model, one.counts_only) == (&other.model, other.counts_only)
}

impl UsageFollower {
    /// Makes the learner of the deployment `name`, whose files are in `folder`.
    pub(crate) fn new(name: &str, folder: Option<PathBuf>, resources: SharedResources) -> Arc<Self> {
        let learner = UsageLearner::new(resources.metrics.of_model(name));
        Arc::new(Self { learner, order: RwLock::default(), folder, resources })
    }

    /// Returns the order that is in force.
    fn order(&self) -> Option<PredictionOrder> {
        self.order.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn replace_service(&self, service: Option<(PredictionService, PredictionOrder)>) {
        let (prediction_service, order) = service.unzip();
        let mut known = self.order.write().unwrap_or_else(PoisonError::into_inner);
        self.learner.set_service(prediction_service);
        *known = order;
    }

    /// Follows the orders in `demands`, until its sender is dropped.
    pub(crate) async fn follow_orders(self: Arc<Self>, mut demands: watch::Receiver<MoEDemandSpec>) {
        // Each error is logged once. Retries get rarer.
        let (mut logged_error, mut pause, mut attempts) = (String::new(), FIRST_RETRY_PAUSE, 0);
        loop {
            let now = demands.borrow_and_update().clone();
            let known = self.order();
            let is_in_force = |order: &PredictionOrder| {
                known.as_ref().is_some_and(|known| needs_same_predictor(known, order))
            };
            let Some(order) = now.prediction.clone().filter(|order| !is_in_force(order)) else {
                if now.prediction.is_none() && known.is_some() {
                    self.replace_service(None);
                }
                if demands.changed().await.is_err() {
                    return;
                }
                continue;
            };
            if known.is_some() {
                self.replace_service(None);
            }
            attempts += 1;
            match self.start(&order, &now, attempts).await {
                Ok(true) => {
                    (pause, attempts) = (FIRST_RETRY_PAUSE, 0);
                    continue;
                }
                Ok(false) => {}
                Err(error) => {
                    let error = error.to_string();
                    if error != logged_error {
                        tracing::warn!(error, model = now.served_name, "expert usage prediction disabled");
                        logged_error = error;
                    }
                }
            }
            // Other updates do not cut the pause short, because a main function reads its whole embedding to make a
            // summary. Only another order, or functions that begin to serve, are worth a retry at once.
            let is_worth_retry = |next: &MoEDemandSpec| {
                let becomes_active = next.phase == DemandPhase::Active && now.phase != DemandPhase::Active;
                becomes_active
                    || next.prediction.as_ref().is_none_or(|next| !needs_same_predictor(next, &order))
            };
            if let Ok(Err(_over)) = timeout(pause, demands.wait_for(is_worth_retry)).await {
                return;
            }
            pause = (2 * pause).min(MAX_RETRY_PAUSE);
        }
    }

    /// Starts learning by `order`. Returns false if no model summary is available yet.
    async fn start(
        self: &Arc<Self>,
        order: &PredictionOrder,
        demand: &MoEDemandSpec,
        attempt: usize,
    ) -> Result<bool, SummaryError> {
        let Ok(_loading) = self.resources.loading.clone().acquire_owned().await else { return Ok(false) };
        let (folder, model, counts_only) = (self.folder.clone(), order.model.clone(), order.counts_only);
        let cached = spawn_blocking(move || {
            let Some(folder) = folder else { return Ok(None) };
            if counts_only {
                delete_history(&folder, &model)?;
            }
            read_model_summary(&folder)
        });
        let cached = cached.await.map_err(|error| SummaryError::Thread(error.to_string()))?;
        let cached = cached.map_err(ModelSummaryError::from)?.map(Bytes::from);
        if let Some(summary) = cached.and_then(|bytes| ModelSummary::from_bytes(&bytes).ok())
            && summary.model() == order.model
        {
            match self.start_service(summary, order, true).await {
                Ok(()) => return Ok(true),
                Err(error @ SummaryError::Memory { .. }) => return Err(error),
                // A new summary may be usable: the tokenizer is not part of a model's fingerprint.
                Err(error) => tracing::warn!(%error, "cached model summary unusable"),
            }
        }
        // Each attempt asks another main function, so that one that does not answer does not block the rest.
        let main = demand.mains.get(attempt % demand.mains.len().max(1));
        let Some(main) = main.filter(|_| demand.phase == DemandPhase::Active) else { return Ok(false) };
        let address = main.address.clone();
        let fetched = fetch_summary(main, self.resources.keyring.clone()).await;
        let bytes = fetched.map_err(|why| SummaryError::Main { address: address.clone(), why })?;
        let summary = ModelSummary::from_bytes(&bytes)?;
        if summary.model() != order.model {
            let (found, wanted) = (summary.model().to_owned(), order.model.clone());
            return Err(SummaryError::OtherModel { address, found, wanted });
        }
        let mut is_cached = false;
        if let Some(folder) = self.folder.clone() {
            let model = order.model.clone();
            let cached = spawn_blocking(move || write_model_summary(&folder, &model, &bytes)).await;
            is_cached = matches!(cached, Ok(Ok(())));
            if let Ok(Err(error)) = cached {
                tracing::warn!(%error, "model summary not cached: fetched again after a restart");
            }
        }
        self.start_service(summary, order, is_cached).await?;
        Ok(true)
    }

    /// Starts the prediction service with `summary`, which is in the folder if it `is_cached`.
    async fn start_service(
        self: &Arc<Self>,
        summary: ModelSummary,
        order: &PredictionOrder,
        is_cached: bool,
    ) -> Result<(), SummaryError> {
        let loader = SummaryLoader {
            folder: self.folder.clone(),
            order: order.clone(),
            memory: self.resources.memory.clone(),
            experience_bytes: self.resources.experience_bytes,
        };
        let peers = self.folder.clone().map(|folder| {
            let (own_folder, own_model) = (folder.clone(), order.model.clone());
            let model = order.model.clone();
            PeerGateways {
                poll_interval: self.resources.history_read_interval,
                files: Box::new(move || other_usage_files(&folder, &model)),
                for_each_ended: Box::new(move |each| {
                    if let Err(error) = for_each_ended_usage_file(&own_folder, &own_model, each) {
                        tracing::warn!(%error, "cannot read the training history of ended gateways");
                    }
                }),
            }
        });
        let learned = self.learner.publisher(&order.model);
        let opened = spawn_blocking(move || -> Result<PredictionService, SummaryError> {
            let opened = loader.open(summary)?;
            // A cached summary is loaded again when a request comes.
            let service = match loader.into_opener().filter(|_| is_cached) {
                Some(opener) => {
                    drop(opened);
                    PredictionService::start_unloaded(opener, UNLOAD_AFTER, peers, learned)
                }
                None => PredictionService::start_loaded(opened, peers, learned),
            };
            service.map_err(|error| SummaryError::Thread(error.to_string()))
        });
        // A panic while parsing is contained in the task: the summary comes from functions in tenants' namespaces.
        let service = opened.await.map_err(|error| SummaryError::Thread(error.to_string()))??;
        tracing::info!(model = order.model, "expert usage prediction enabled");
        self.replace_service(Some((service, order.clone())));
        Ok(())
    }

    /// Returns the expert usage to report while functions are in `phase` and `present_requests` wait or run. While
    /// functions are asleep, it is the prediction for waiting requests. Otherwise it is the usage of recent requests
    /// with the prediction for running ones.
    pub(crate) async fn mix(&self, phase: DemandPhase, present_requests: usize) -> Option<RequestMix> {
        let model = self.order()?.model;
        let is_cold = matches!(phase, DemandPhase::Asleep | DemandPhase::Waking);
        // The last report may be one of a previous model.
        let latest_mix = self.learner.answered_usage();
        let answered = || {
            let last = latest_mix.borrow().clone();
            last.filter(|last| last.model == model).map(|last| last.usage)
        };
        let service =
            self.learner.service().filter(|_| present_requests > 0 && (is_cold || answered().is_some()));
        let (expected, took) = match service {
            Some(service) => {
                if is_cold {
                    sleep(GROUPING_TIME).await;
                }
                let limit = if service.is_loaded() { PREDICTION_TIMEOUT } else { FIRST_PREDICTION_TIMEOUT };
                let started = Instant::now();
                (self.learner.predict_joint_usage(limit).await, started.elapsed())
            }
            None => (None, Duration::ZERO),
        };
        let (kind, mix) = match (expected, answered()) {
            (Some(expected), _) if is_cold => (MixOf::Waiting, expected),
            (Some(expected), Some(answered)) => (MixOf::Answered, answered.with(&expected).ok()?),
            (_, answered) => (MixOf::Answered, answered?),
        };
        Some(RequestMix {
            of: kind,
            model,
            requests: mix.requests.round().min(f64::from(u32::MAX)) as u32,
            tokens: mix.tokens.round() as u64,
            shares: mix.shares.to_text(MOST_SHARES)?,
            predicted_us: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
        })
    }
}

/// Loader of a model's predictor.
struct SummaryLoader {
    folder: Option<PathBuf>,
    order: PredictionOrder,
    memory: Arc<Semaphore>,
    experience_bytes: u64,
}

impl SummaryLoader {
    /// Reserves memory for the predictor of `summary`, and opens it.
    fn open(&self, summary: ModelSummary) -> Result<LoadedPredictor, SummaryError> {
        let history_bytes = self.folder.as_ref().map_or(IN_MEMORY_HISTORY_BYTES, |_| self.experience_bytes);
        let bytes = summary.memory_bytes() + history_bytes;
        let wanted = usize::try_from(bytes.div_ceil(1 << 20)).unwrap_or(usize::MAX);
        let permits = u32::try_from(wanted).unwrap_or(u32::MAX);
        let held = self.memory.clone().try_acquire_many_owned(permits);
        let held =
            held.map_err(|_| SummaryError::Memory { wanted, left: self.memory.available_permits() })?;
        let options = PredictorOptions {
            // Each model has its own folder.
            store: self.folder.as_ref().map(|folder| (folder.join(summary.model()), self.experience_bytes)),
            is_history_disabled: self.order.counts_only,
            output_tokens: f64::from(self.order.output_tokens),
        };
        Ok(LoadedPredictor { predictor: summary.open(options)?, guard: Box::new(held) })
    }

    /// Returns a function that loads the predictor from the folder whenever it is needed. Returns `None` if there is
    /// no folder. After failures it retries ever more rarely.
    fn into_opener(self) -> Option<PredictorLoader> {
        let folder = self.folder.clone()?;
        let (mut next_try, mut pause) = (Instant::now(), FIRST_RETRY_PAUSE);
        Some(Box::new(move || {
            if Instant::now() < next_try {
                return None;
            }
            let opened = read_model_summary(&folder)
                .map_err(|error| SummaryError::Primer(error.into()))
                .and_then(|bytes| {
                    let summary = ModelSummary::from_bytes(&bytes.unwrap_or_default().into())?;
                    match summary.model() {
                        found if found == self.order.model => self.open(summary),
                        found => Err(SummaryError::Kept {
                            found: found.to_owned(),
                            wanted: self.order.model.clone(),
                        }),
                    }
                });
            match opened {
                Ok(opened) => {
                    pause = FIRST_RETRY_PAUSE;
                    Some(opened)
                }
                Err(error) => {
                    tracing::warn!(%error, model = self.order.model, "expert usage prediction disabled");
                    (next_try, pause) = (Instant::now() + pause, (2 * pause).min(MAX_RETRY_PAUSE));
                    None
                }
            }
        }))
    }
}

/// Returns the time between two entries that report only expert usage; `None`: the operator does not order it.
pub(crate) fn report_interval(demand: &MoEDemandSpec) -> Option<Duration> {
    let order = demand.prediction.as_ref()?;
    Some((Duration::from_secs(order.every_seconds.into()) / REPORTS_PER_REVISION).max(MIN_REPORT_INTERVAL))
}

/// Fetches the model summary of `main`, with the credentials of `keyring`.
async fn fetch_summary(main: &MainFunction, keyring: Option<Arc<Keyring>>) -> Result<Bytes, String> {
    let uri = uri(main, "/v1/primer").ok_or("invalid address or name")?;
    let client: Client<Connector, Empty<Bytes>> =
        Client::builder(TokioExecutor::new()).build(Connector::new(keyring, FETCH_TIMEOUT));
    let fetch = async {
        let answer = client.get(uri).await.map_err(|error| error.to_string())?;
        if !answer.status().is_success() {
            return Err(format!("got status {}", answer.status()));
        }
        let body = Limited::new(answer.into_body(), MAX_MODEL_SUMMARY).collect().await;
        body.map(|body| body.to_bytes()).map_err(|error| error.to_string())
    };
    timeout(FETCH_TIMEOUT, fetch).await.map_err(|_| format!("no model summary within {FETCH_TIMEOUT:?}"))?
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
