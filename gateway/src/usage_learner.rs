//! Expert usage of the requests to one deployment, learned as far as its operator asks for it.
//!
//! Files for prediction come from a main function, once: a [`ModelSummary`]. It is kept, so that a gateway that restarts can
//! predict for requests that wake a deployment. If it is kept in a folder, it is in memory only while requests come.

use crate::experience::{forget_past, keep_model_summary, others, others_ended, read_primer};
use crate::mains::uri;
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

/// Pause before a failed start is tried again; doubled each time, up to the longest pause.
const AGAIN: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);
/// A primer arrives within this time.
const PRIMING: Duration = Duration::from_secs(120);
/// Longest wait of an entry for the predictions of waiting requests. They take less than a millisecond each.
const PREDICTIONS: Duration = Duration::from_millis(250);
/// As [`PREDICTIONS`], if the model's files for prediction have to be read first.
const FIRST_PREDICTIONS: Duration = Duration::from_secs(2);
/// A model that no request has come for in this time is let go from memory until the next one.
const IDLE: Duration = Duration::from_secs(3600);
/// Requests that come within this time of the first are planned for with it.
const TOGETHER: Duration = Duration::from_millis(10);
/// Reports of expert usage in the time between two revisions.
const SAID: u32 = 4;
/// Shortest pause between two such reports.
const RARELY: Duration = Duration::from_secs(10);

/// Resources that all deployments share.
#[derive(Clone)]
pub(crate) struct SharedResources {
    /// Memory for predictions, in MiB.
    memory: Arc<Semaphore>,
    /// One primer is fetched and opened at a time: that takes additional memory.
    turn: Arc<Semaphore>,
    /// Bytes of past requests of one deployment.
    experience_bytes: u64,
    /// Between two looks at what other gateways have learned.
    exchanged: Duration,
    metrics: PredictionMetrics,
    /// Credentials shown to main functions that check the caller's identity.
    keyring: Option<Arc<Keyring>>,
}

impl SharedResources {
    /// `memory` bytes for all deployments, of each of which past requests take at most `experience_bytes`; what other
    /// gateways have learned is looked at once in `exchanged`.
    pub(crate) fn new(
        (memory, experience_bytes): (u64, u64),
        exchanged: Duration,
        metrics: PredictionMetrics,
        keyring: Option<Arc<Keyring>>,
    ) -> Self {
        let memory = usize::try_from(memory >> 20).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Self {
            memory: Arc::new(Semaphore::new(memory)),
            turn: Arc::new(Semaphore::new(1)),
            experience_bytes,
            exchanged,
            metrics,
            keyring,
        }
    }
}

/// Has the expert usage of one deployment learned as its operator orders.
pub(crate) struct UsageFollower {
    /// The learner, told of each request; it learns once there is a primer.
    pub(crate) learner: Arc<UsageLearner>,
    /// Order by which it learns.
    order: RwLock<Option<PredictionOrder>>,
    folder: Option<PathBuf>,
    means: SharedResources,
}

/// Why requests of a model are not followed.
#[derive(Debug, thiserror::Error)]
enum SummaryError {
    /// The main function says something else, or nothing.
    #[error("cannot get the model summary of main function {address}: {why}")]
    Main { address: String, why: String },
    /// It is of another model.
    #[error("model mismatch at main function {address}: expected {wanted}, got {found}")]
    OtherModel { address: String, found: String, wanted: String },
    /// The kept one is of another model.
    #[error("cached model summary is of another model: expected {wanted}, got {found}")]
    Kept { found: String, wanted: String },
    /// There is no room.
    #[error("prediction memory exhausted: needs {wanted} MiB, {left} MiB left; raise --prediction-bytes")]
    Memory { wanted: usize, left: usize },
    #[error(transparent)]
    Primer(#[from] ModelSummaryError),
    #[error("{0}")]
    Thread(String),
}

/// Reports if all that is known by one order can be kept for the other.
fn is_same(one: &PredictionOrder, other: &PredictionOrder) -> bool {
    (&one.model, one.counts_only) == (&other.model, other.counts_only)
}

impl UsageFollower {
    /// Makes the follower of the deployment `name`, which keeps in `folder` what it knows.
    pub(crate) fn new(name: &str, folder: Option<PathBuf>, means: SharedResources) -> Arc<Self> {
        let learner = UsageLearner::new(means.metrics.of_model(name));
        Arc::new(Self { learner, order: RwLock::default(), folder, means })
    }

    /// By which order requests are followed.
    fn order(&self) -> Option<PredictionOrder> {
        self.order.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn replace(&self, following: Option<(PredictionService, PredictionOrder)>) {
        let (watch, order) = following.unzip();
        let mut known = self.order.write().unwrap_or_else(PoisonError::into_inner);
        self.learner.set_service(watch);
        *known = order;
    }

    /// Follows what `told` orders, until that ends.
    pub(crate) async fn keep(self: Arc<Self>, mut told: watch::Receiver<MoEDemandSpec>) {
        // What could not be done is said once, and tried again ever less often.
        let (mut said, mut pause, mut attempts) = (String::new(), AGAIN, 0);
        loop {
            let now = told.borrow_and_update().clone();
            let known = self.order();
            let is_known =
                |order: &PredictionOrder| known.as_ref().is_some_and(|known| is_same(known, order));
            let Some(order) = now.prediction.clone().filter(|order| !is_known(order)) else {
                if now.prediction.is_none() && known.is_some() {
                    self.replace(None);
                }
                if told.changed().await.is_err() {
                    return;
                }
                continue;
            };
            if known.is_some() {
                self.replace(None);
            }
            attempts += 1;
            match self.begin(&order, &now, attempts).await {
                Ok(true) => {
                    (pause, attempts) = (AGAIN, 0);
                    continue;
                }
                Ok(false) => {}
                Err(error) => {
                    let error = error.to_string();
                    if error != said {
                        tracing::warn!(error, model = now.served_name, "expert usage prediction disabled");
                        said = error;
                    }
                }
            }
            // Whatever is told meanwhile: a main function reads its whole embedding for an answer. Only another order,
            // or functions that serve, are worth another try at once.
            let is_news = |next: &MoEDemandSpec| {
                let begins = next.phase == DemandPhase::Active && now.phase != DemandPhase::Active;
                begins || next.prediction.as_ref().is_none_or(|next| !is_same(next, &order))
            };
            if let Ok(Err(_over)) = timeout(pause, told.wait_for(is_news)).await {
                return;
            }
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// Begins to follow; false if no primer is available yet.
    async fn begin(
        self: &Arc<Self>,
        order: &PredictionOrder,
        told: &MoEDemandSpec,
        attempt: usize,
    ) -> Result<bool, SummaryError> {
        let Ok(_turn) = self.means.turn.clone().acquire_owned().await else { return Ok(false) };
        let (folder, model, forgets) = (self.folder.clone(), order.model.clone(), order.counts_only);
        let kept = spawn_blocking(move || {
            let Some(folder) = folder else { return Ok(None) };
            if forgets {
                forget_past(&folder, &model)?;
            }
            read_primer(&folder)
        });
        let kept = kept.await.map_err(|error| SummaryError::Thread(error.to_string()))?;
        let kept = kept.map_err(ModelSummaryError::from)?.map(Bytes::from);
        if let Some(summary) = kept.and_then(|bytes| ModelSummary::from_bytes(&bytes).ok())
            && summary.model() == order.model
        {
            match self.follow(summary, order, true).await {
                Ok(()) => return Ok(true),
                Err(error @ SummaryError::Memory { .. }) => return Err(error),
                // Another one may be better: what makes tokens is no part of a model's fingerprint.
                Err(error) => tracing::warn!(%error, "cached model summary unusable"),
            }
        }
        // One that does not answer must not keep the others from it.
        let main = told.mains.get(attempt % told.mains.len().max(1));
        let Some(main) = main.filter(|_| told.phase == DemandPhase::Active) else { return Ok(false) };
        let address = main.address.clone();
        let asked = ask(main, self.means.keyring.clone()).await;
        let bytes = asked.map_err(|why| SummaryError::Main { address: address.clone(), why })?;
        let summary = ModelSummary::from_bytes(&bytes)?;
        if summary.model() != order.model {
            let (found, wanted) = (summary.model().to_owned(), order.model.clone());
            return Err(SummaryError::OtherModel { address, found, wanted });
        }
        let mut is_kept = false;
        if let Some(folder) = self.folder.clone() {
            let model = order.model.clone();
            let kept = spawn_blocking(move || keep_model_summary(&folder, &model, &bytes)).await;
            is_kept = matches!(kept, Ok(Ok(())));
            if let Ok(Err(error)) = kept {
                tracing::warn!(%error, "model summary not cached: fetched again after a restart");
            }
        }
        self.follow(summary, order, is_kept).await?;
        Ok(true)
    }

    /// Follows by `summary`, which is in the folder if it `is_kept`.
    async fn follow(
        self: &Arc<Self>,
        summary: ModelSummary,
        order: &PredictionOrder,
        is_kept: bool,
    ) -> Result<(), SummaryError> {
        let opening = Opening {
            folder: self.folder.clone(),
            order: order.clone(),
            memory: self.means.memory.clone(),
            experience_bytes: self.means.experience_bytes,
        };
        let peers = self.folder.clone().map(|folder| {
            let (here, of) = (folder.clone(), order.model.clone());
            let model = order.model.clone();
            PeerGateways {
                poll_interval: self.means.exchanged,
                files: Box::new(move || others(&folder, &model)),
                for_each_ended: Box::new(move |each| {
                    if let Err(error) = others_ended(&here, &of, each) {
                        tracing::warn!(%error, "cannot read the training history of ended gateways");
                    }
                }),
            }
        });
        let learned = self.learner.publisher(&order.model);
        let opened = spawn_blocking(move || -> Result<PredictionService, SummaryError> {
            let opened = opening.open(summary)?;
            // What is in the folder is opened again when a request comes.
            let watch = match opening.again().filter(|_| is_kept) {
                Some(again) => {
                    drop(opened);
                    PredictionService::start_unloaded(again, IDLE, peers, learned)
                }
                None => PredictionService::start_loaded(opened, peers, learned),
            };
            watch.map_err(|error| SummaryError::Thread(error.to_string()))
        });
        // What a primer makes a library do is contained: it comes from functions in tenants' namespaces.
        let watch = opened.await.map_err(|error| SummaryError::Thread(error.to_string()))??;
        tracing::info!(model = order.model, "expert usage prediction enabled");
        self.replace(Some((watch, order.clone())));
        Ok(())
    }

    /// Returns the expert usage to report while functions are in `phase` and `here` requests wait or run: the
    /// prediction of waiting requests while functions are asleep, else the usage of recent requests and the prediction
    /// of running ones.
    pub(crate) async fn mix(&self, phase: DemandPhase, here: usize) -> Option<RequestMix> {
        let model = self.order()?.model;
        let is_cold = matches!(phase, DemandPhase::Asleep | DemandPhase::Waking);
        // The thread of a model before may have had something left to report.
        let told = self.learner.answered_usage();
        let answered = || {
            let last = told.borrow().clone();
            last.filter(|last| last.model == model).map(|last| last.usage)
        };
        let watch = self.learner.service().filter(|_| here > 0 && (is_cold || answered().is_some()));
        let (expected, took) = match watch {
            Some(watch) => {
                if is_cold {
                    sleep(TOGETHER).await;
                }
                let most = if watch.is_loaded() { PREDICTIONS } else { FIRST_PREDICTIONS };
                let started = Instant::now();
                (self.learner.predict_joint_usage(most).await, started.elapsed())
            }
            None => (None, Duration::ZERO),
        };
        let (of, mix) = match (expected, answered()) {
            (Some(expected), _) if is_cold => (MixOf::Waiting, expected),
            (Some(expected), Some(answered)) => (MixOf::Answered, answered.with(&expected).ok()?),
            (_, answered) => (MixOf::Answered, answered?),
        };
        Some(RequestMix {
            of,
            model,
            requests: mix.requests.round().min(f64::from(u32::MAX)) as u32,
            tokens: mix.tokens.round() as u64,
            shares: mix.shares.to_text(MOST_SHARES)?,
            predicted_us: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
        })
    }
}

/// Opens what is known of a model.
struct Opening {
    folder: Option<PathBuf>,
    order: PredictionOrder,
    memory: Arc<Semaphore>,
    experience_bytes: u64,
}

impl Opening {
    /// Reserves memory for what is known of the model of `summary`, and reads it.
    fn open(&self, summary: ModelSummary) -> Result<LoadedPredictor, SummaryError> {
        let past = self.folder.as_ref().map_or(IN_MEMORY_HISTORY_BYTES, |_| self.experience_bytes);
        let bytes = summary.memory_bytes() + past;
        let wanted = usize::try_from(bytes.div_ceil(1 << 20)).unwrap_or(usize::MAX);
        let permits = u32::try_from(wanted).unwrap_or(u32::MAX);
        let held = self.memory.clone().try_acquire_many_owned(permits);
        let held =
            held.map_err(|_| SummaryError::Memory { wanted, left: self.memory.available_permits() })?;
        let options = PredictorOptions {
            // Another model's is another folder.
            store: self.folder.as_ref().map(|folder| (folder.join(summary.model()), self.experience_bytes)),
            is_history_disabled: self.order.counts_only,
            output_tokens: f64::from(self.order.output_tokens),
        };
        Ok(LoadedPredictor { predictor: summary.open(options)?, guard: Box::new(held) })
    }

    /// Opens it from the folder whenever it is needed; `None` where there is no folder. What cannot be opened is tried
    /// again ever less often.
    fn again(self) -> Option<PredictorLoader> {
        let folder = self.folder.clone()?;
        let (mut next, mut pause) = (Instant::now(), AGAIN);
        Some(Box::new(move || {
            if Instant::now() < next {
                return None;
            }
            let opened =
                read_primer(&folder).map_err(|error| SummaryError::Primer(error.into())).and_then(|bytes| {
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
                    pause = AGAIN;
                    Some(opened)
                }
                Err(error) => {
                    tracing::warn!(%error, model = self.order.model, "expert usage prediction disabled");
                    (next, pause) = (Instant::now() + pause, (2 * pause).min(LONGEST_PAUSE));
                    None
                }
            }
        }))
    }
}

/// Returns the pause between two entries that report expert usage and nothing else; none: the operator does not ask for
/// it.
pub(crate) fn pause(told: &MoEDemandSpec) -> Option<Duration> {
    let order = told.prediction.as_ref()?;
    Some((Duration::from_secs(order.every_seconds.into()) / SAID).max(RARELY))
}

/// Fetches the primer of `main`, to which what is in `keyring` is shown, or returns why there is none.
async fn ask(main: &MainFunction, keyring: Option<Arc<Keyring>>) -> Result<Bytes, String> {
    let uri = uri(main, "/v1/primer").ok_or("invalid address or name")?;
    let client: Client<Connector, Empty<Bytes>> =
        Client::builder(TokioExecutor::new()).build(Connector::new(keyring, PRIMING));
    let asking = async {
        let answer = client.get(uri).await.map_err(|error| error.to_string())?;
        if !answer.status().is_success() {
            return Err(format!("got status {}", answer.status()));
        }
        let body = Limited::new(answer.into_body(), MAX_MODEL_SUMMARY).collect().await;
        body.map(|body| body.to_bytes()).map_err(|error| error.to_string())
    };
    timeout(PRIMING, asking).await.map_err(|_| format!("no model summary within {PRIMING:?}"))?
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
