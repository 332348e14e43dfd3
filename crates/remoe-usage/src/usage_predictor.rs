//! Predictor of one model's requests: predicts expert usage at arrival, learns from it at the end.

use crate::answer_lengths::AnswerLengths;
use crate::history_store::{HistoryStore, HistoryStoreError, StoredRequest};
use crate::joint_usage::JointUsage;
use crate::observed_usage::ObservedUsage;
use crate::opted_out::OptedOutTenants;
use crate::peer_history::PeerHistoryReader;
use crate::prompt_reader::{ObservedPrompt, PredictionInput, PromptReader};
use crate::quality::PredictionQuality;
use crate::shared_prior::SharedPrior;
use crate::tenant::Tenant;
use crate::tenant_histories::TenantHistories;
use remoe_predictor::record::RecordHeader;
use remoe_predictor::{
    Activations, ByPhase, Embedding, Method, Phase, PredictError, TunedPredictor, UsageSample, UsageShares,
};
use std::collections::HashMap;
use std::path::PathBuf;

/// Largest number of active requests; further requests are served without a prediction.
const MAX_ACTIVE_REQUESTS: usize = 4096;
/// Shortest computed rest of a prompt with a cached prefix that the predictor learns from, in tokens.
const MIN_COMPUTED_TOKENS: usize = 8;
/// Memory budget of the training history without a store, in bytes.
pub const IN_MEMORY_HISTORY_BYTES: u64 = 64 << 20;
/// Index of the error bar that coverage is measured against: the third quantile, the 95th percentile.
const COVERAGE_QUANTILE: usize = 2;

/// Options of a predictor's training history.
#[derive(Debug, Clone, Default)]
pub struct PredictorOptions {
    /// Folder of the store and its size limit in bytes. Without a store, the history ends with the process.
    pub store: Option<(PathBuf, u64)>,
    /// True if no request is added to the history: predictions come from the trained predictor alone.
    pub is_history_disabled: bool,
    /// Expected tokens of an answer until answers of the tenant are known.
    pub output_tokens: f64,
}

/// Amount of a tenant's request data that the predictor retains.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Retention {
    /// Keeps a record of each request without its text. Their mean also predicts requests of tenants without records.
    Shared,
    /// Keeps a record of each request without its text, for predictions of this tenant alone.
    #[default]
    Records,
    /// Counts expert usage together with that of other tenants. Keeps no record of a single request.
    Counts,
    /// Keeps nothing.
    Nothing,
}

impl Retention {
    /// Returns true if each request leaves a record.
    pub(crate) fn keeps_records(self) -> bool {
        matches!(self, Self::Shared | Self::Records)
    }
}

/// Request at its arrival.
#[derive(Debug, Clone, Copy)]
pub struct RequestArrival<'a> {
    /// Unique id of the request.
    pub id: u64,
    /// Tenant that sent the request.
    pub tenant: Tenant,
    /// Retention that the tenant allows.
    pub retention: Retention,
    /// Body of the HTTP request.
    pub body: &'a [u8],
}

/// Active request, which waits or runs.
#[derive(Debug)]
struct TrackedRequest {
    tenant: Tenant,
    retention: Retention,
    prompt: ObservedPrompt,
    vector: Vec<f32>,
    tokens: ByPhase<f64>,
    /// Prediction of its expert usage; absent if nothing is known.
    prediction: Option<ByPhase<PhasePrediction>>,
}

/// Prediction for one phase of a request.
#[derive(Debug, Clone, PartialEq)]
struct PhasePrediction {
    shares: UsageShares,
    /// Predictions that were combined, if there were two.
    combined: Option<CombinedPredictions>,
    /// Weight of this prediction against the mean of the history, from 0 to 1.
    weight: f64,
    /// 95th percentile of the divergence in each layer, in nats, if known.
    error_bars: Option<Vec<f64>>,
}

/// Predictions that were combined into one.
#[derive(Debug, Clone, PartialEq)]
struct CombinedPredictions {
    /// Prediction of the trained predictor.
    trained: UsageShares,
    /// Prediction from the tenant's history, or from the prior for a tenant without one.
    own: UsageShares,
}

impl TrackedRequest {
    /// Returns the part of the prompt that was computed, its last `computed` tokens, if a prefix came from the prefix
    /// cache. The reported expert usage covers only this part. Returns `None` if the whole prompt was computed.
    ///
    /// The result is empty if the computed part lies beyond the retained tokens.
    fn rest(&self, computed: u64) -> Option<&[u32]> {
        let ObservedPrompt { tokens, length, is_estimated } = &self.prompt;
        let computed = usize::try_from(computed).ok()?;
        if *is_estimated {
            // The number of tokens per byte is taken to be constant over a text, with a margin of a quarter.
            return (computed < length / 4 * 3).then_some(&[]);
        }
        let cached = length.checked_sub(computed).filter(|cached| *cached > 0)?;
        Some(tokens.get(cached..).unwrap_or_default())
    }
}

/// Size of a training history in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HistorySize {
    /// Requests in the history.
    pub requests: usize,
    /// Memory that they take, in bytes.
    pub bytes: u64,
}

/// Predictor of one model's requests and the training history behind it.
#[derive(Debug)]
pub struct UsagePredictor {
    header: RecordHeader,
    embedding: Embedding,
    prompts: PromptReader,
    trained: Option<Box<dyn TunedPredictor>>,
    histories: Option<TenantHistories>,
    prior: SharedPrior,
    store: Option<HistoryStore>,
    active: HashMap<u64, TrackedRequest>,
    observed: ObservedUsage,
    quality: PredictionQuality,
    answer_lengths: AnswerLengths,
    opted_out: OptedOutTenants,
}

impl UsagePredictor {
    /// Creates a predictor for the model of `header` and restores its stored history.
    ///
    /// # Errors
    /// The store cannot be used.
    pub fn new(
        header: RecordHeader,
        embedding: Embedding,
        prompts: PromptReader,
        trained: Option<Box<dyn TunedPredictor>>,
        options: PredictorOptions,
    ) -> Result<Self, HistoryStoreError> {
        let (layers, experts, hidden) = (header.layers.len(), header.experts as usize, embedding.hidden());
        let request_bytes = 4 * (hidden + 2 * layers * experts) as u64;
        let mut stored_requests = Vec::new();
        let store = match options.store.filter(|_| !options.is_history_disabled) {
            Some((folder, limit)) => Some(HistoryStore::open(&folder, &header, hidden, limit, |stored| {
                stored_requests.push(stored)
            })?),
            None => None,
        };
        let capacity = store.as_ref().map_or(
            usize::try_from(IN_MEMORY_HISTORY_BYTES / request_bytes).unwrap_or(1),
            HistoryStore::capacity,
        );
        let mut histories = TenantHistories::new(embedding.clone(), capacity);
        for stored in stored_requests {
            // The store checked the header, so its records fit the model.
            if let Err(error) = histories.restore(stored) {
                tracing::warn!(%error, "stored request skipped");
            }
        }
        if let Err(error) = histories.finish_restore() {
            tracing::warn!(%error, "search tree unavailable: searches are linear");
        }
        Ok(Self {
            observed: ObservedUsage::new(layers, experts, header.top_k as usize),
            histories: (!options.is_history_disabled).then_some(histories),
            prior: SharedPrior::default(),
            store,
            active: HashMap::new(),
            quality: PredictionQuality::default(),
            answer_lengths: AnswerLengths::new(options.output_tokens.max(0.0)),
            opted_out: OptedOutTenants::default(),
            header,
            embedding,
            prompts,
            trained,
        })
    }

    /// Begins to track a request, which stays active until [`Self::end_request`]. If the retention forbids records,
    /// also forgets the history of the tenant.
    pub fn begin_request(&mut self, RequestArrival { id, tenant, retention, body }: RequestArrival<'_>) {
        match retention {
            Retention::Shared => {
                self.opted_out.remove(tenant);
                if let Some(histories) = &self.histories {
                    self.prior.add_contributor(tenant, histories.history(tenant));
                }
            }
            Retention::Records => {
                self.opted_out.remove(tenant);
                self.prior.remove_contributor(tenant);
            }
            Retention::Counts | Retention::Nothing => self.forget(tenant),
        }
        if retention == Retention::Nothing {
            return;
        }
        let PredictionInput { prompt, max_output_tokens } = self.prompts.read(body);
        let tokens = &prompt.tokens;
        if tokens.is_empty() || self.active.len() >= MAX_ACTIVE_REQUESTS {
            return;
        }
        // A token beyond the vocabulary: the main function rejects the request.
        let Ok(vector) = self.embedding.prompt_vector(tokens) else { return };
        let prediction = match self.predict(tenant, tokens, &vector) {
            Ok(prediction) => prediction,
            Err(error) => {
                tracing::warn!(%error, "prediction failed");
                None
            }
        };
        // The prefill yields the first output token, so decode takes one step less.
        let expected_steps = self.answer_lengths.expected_steps(tenant);
        let steps = max_output_tokens
            .map_or(expected_steps, |limit| expected_steps.min(limit.saturating_sub(1) as f64));
        let tokens = ByPhase { prefill: prompt.length as f64, decode: steps };
        self.active.insert(id, TrackedRequest { tenant, retention, prompt, vector, tokens, prediction });
    }

    /// Learns from the activations that a main function reported at the end of an answer.
    ///
    /// # Errors
    /// The activations are invalid. Nothing is learned from them.
    pub fn record_usage(&mut self, id: u64, activations: &str) -> Result<(), PredictError> {
        let activations = Activations::from_text(activations, &self.header)?;
        self.observed.add(&activations);
        let Some(active) = self.active.remove(&id) else { return Ok(()) };
        self.answer_lengths.record(active.tenant, activations.positions(Phase::Decode) as f64);
        let truths = ByPhase::try_each(|phase| activations.shares(phase))?;
        let vector = match active.rest(activations.positions(Phase::Prefill)) {
            None => {
                self.record_quality(&active, &truths);
                active.vector
            }
            Some(rest) if rest.len() < MIN_COMPUTED_TOKENS => return Ok(()),
            Some(rest) => self.embedding.prompt_vector(rest)?,
        };
        // The tenant may have opted out since the request arrived.
        if !active.retention.keeps_records() || self.opted_out.contains(active.tenant) {
            return Ok(());
        }
        let (Some(histories), Some(prefill)) = (&mut self.histories, truths.prefill) else { return Ok(()) };
        let usage = UsageSample { vector, prefill, decode: truths.decode };
        if active.retention == Retention::Shared {
            self.prior.record(active.tenant, &usage);
        }
        let stored = histories.learn(active.tenant, usage)?;
        if let Some(store) = &mut self.store
            && let Err(error) = store.append(&stored, || histories.numbers())
        {
            tracing::warn!(%error, "expert usage not stored");
        }
        Ok(())
    }

    /// Learns the requests in `records`, which another gateway served, and returns how many were new. Skips known
    /// requests and those of tenants that opted out.
    pub fn learn_shared(&mut self, records: &[StoredRequest]) -> usize {
        let Some(histories) = &mut self.histories else { return 0 };
        let allowed = records.iter().filter(|record| !self.opted_out.contains(record.tenant));
        let learned = allowed.filter(|record| match histories.insert_shared(record) {
            Ok(is_new) => {
                if is_new {
                    self.prior.record(record.tenant, &record.usage);
                }
                is_new
            }
            Err(error) => {
                tracing::warn!(%error, "shared request skipped");
                false
            }
        });
        let learned = learned.count();
        self.quality.shared += learned as u64;
        learned
    }

    /// Returns a reader of the histories that other gateways store for this model. Returns `None` if the history is
    /// disabled or has no store.
    #[must_use]
    pub fn peer_history_reader(&self) -> Option<PeerHistoryReader> {
        self.histories.as_ref()?;
        self.store.as_ref().map(|store| PeerHistoryReader::beside(store, self.opted_out.clone()))
    }

    /// Erases the history of a tenant and ignores its further requests.
    fn forget(&mut self, tenant: Tenant) {
        self.prior.remove_contributor(tenant);
        if !self.opted_out.insert(tenant) {
            return;
        }
        if let Some(histories) = &mut self.histories {
            histories.forget(tenant);
        }
        // The file may hold records that memory had no room for.
        if let Some(store) = &mut self.store
            && let Err(error) = store.forget(tenant)
        {
            tracing::error!(%error, "cannot erase a tenant's training history");
        }
    }

    /// Ends the tracking of a request, successful or not.
    pub fn end_request(&mut self, id: u64) {
        self.active.remove(&id);
    }

    /// Returns true if no request is active.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.active.is_empty()
    }

    /// Predicts the joint usage of all active requests, weighted by their tokens. Each prediction is moved towards
    /// the mean of the history according to its known error. Returns `None` if no active request has a prediction.
    ///
    /// # Errors
    /// The model has no experts.
    pub fn predict_joint_usage(&self) -> Result<Option<JointUsage>, PredictError> {
        let (layers, experts) = (self.header.layers.len(), self.header.experts as usize);
        let uniform = UsageShares::uniform(layers, experts);
        let history_mean =
            |phase| self.trained.as_ref().map_or(&uniform, |trained| trained.popularity().shares(phase));
        let (mut sum, mut requests, mut total_tokens) = (vec![0.0_f64; layers * experts], 0.0, 0.0);
        for active in self.active.values() {
            let Some(prediction) = &active.prediction else { continue };
            requests += 1.0;
            for phase in Phase::ALL {
                let predicted = prediction.get(phase);
                let shares = history_mean(phase).towards(&predicted.shares, predicted.weight)?;
                let tokens = active.tokens.get(phase);
                total_tokens += tokens;
                sum.iter_mut()
                    .zip(shares.values())
                    .for_each(|(sum, share)| *sum += tokens * f64::from(*share));
            }
        }
        if requests == 0.0 {
            return Ok(None);
        }
        let shares = UsageShares::from_weights(experts, sum.into_iter().map(|value| value as f32).collect())?;
        Ok(Some(JointUsage { shares, requests, tokens: total_tokens }))
    }

    /// Returns the mean usage of all requests in the history, for a request with this many tokens in each phase.
    /// Returns `None` if the history is empty.
    ///
    /// # Errors
    /// The model has no experts.
    pub fn mean_usage(&self, tokens: ByPhase<f64>) -> Result<Option<UsageShares>, PredictError> {
        let mean = match &self.histories {
            Some(histories) => histories.mean()?,
            None => None,
        };
        let decode_share = tokens.decode / (tokens.prefill + tokens.decode).max(f64::MIN_POSITIVE);
        mean.map(|mean| mean.prefill.towards(&mean.decode, decode_share)).transpose()
    }

    /// Returns the expert usage of recent requests.
    #[must_use]
    pub fn observed(&self) -> &ObservedUsage {
        &self.observed
    }

    /// Returns the quality of past predictions.
    #[must_use]
    pub fn quality(&self) -> &PredictionQuality {
        &self.quality
    }

    /// Returns the ids of the layers with experts.
    #[must_use]
    pub fn layers(&self) -> &[u32] {
        &self.header.layers
    }

    /// Returns the number of experts per layer.
    #[must_use]
    pub fn experts(&self) -> usize {
        self.header.experts as usize
    }

    /// Returns the size of the history in memory.
    #[must_use]
    pub fn history_size(&self) -> HistorySize {
        let size =
            |histories: &TenantHistories| HistorySize { requests: histories.len(), bytes: histories.bytes() };
        self.histories.as_ref().map_or(HistorySize::default(), size)
    }

    /// Predicts the usage of a request. Returns `None` if there is neither a trained predictor nor a history.
    fn predict(
        &mut self,
        tenant: Tenant,
        tokens: &[u32],
        vector: &[f32],
    ) -> Result<Option<ByPhase<PhasePrediction>>, PredictError> {
        let own = match &self.histories {
            Some(histories) => histories.predict(tenant, vector)?,
            None => None,
        };
        let is_own = own.is_some();
        let history = match own {
            Some(own) => Some(own),
            None => self.prior.shares_for(tenant)?,
        };
        let mut is_unfamiliar = false;
        let mut predict_phase = |phase: Phase| -> Result<Option<PhasePrediction>, PredictError> {
            let own = history.as_ref().map(|history| history.get(phase).clone());
            let Some(trained) = &self.trained else {
                return Ok(own.map(|shares| PhasePrediction {
                    shares,
                    combined: None,
                    weight: 0.5,
                    error_bars: None,
                }));
            };
            let prediction = trained.predict_with_errors(tokens, phase)?;
            let largest = trained.tuning(phase).classes.last().map(|class| class.disagreement);
            is_unfamiliar |= largest.is_some_and(|largest| prediction.disagreement > largest);
            let error_bars = prediction
                .errors
                .map(|bars| bars.js_quantiles.iter().map(|bars| bars[COVERAGE_QUANTILE]).collect());
            // The weight follows the mean errors of both on held-out prompts.
            let weight = match (prediction.errors, trained.errors_of(Method::Dop, phase)) {
                (Some(own), Some(mean)) => mean.js_mean / (mean.js_mean + own.js_mean).max(f64::MIN_POSITIVE),
                _ => 0.5,
            };
            let shares = prediction.shares;
            let Some(own) = own else {
                return Ok(Some(PhasePrediction { shares, combined: None, weight, error_bars }));
            };
            let own_weight = match &self.histories {
                Some(histories) if is_own => histories.own_history_weight(tenant, phase),
                _ => self.prior.weight(phase),
            };
            Ok(Some(PhasePrediction {
                shares: shares.towards(&own, own_weight)?,
                combined: Some(CombinedPredictions { trained: shares, own }),
                weight,
                error_bars,
            }))
        };
        let phases = (predict_phase(Phase::Prefill)?, predict_phase(Phase::Decode)?);
        self.quality.unfamiliar += u64::from(is_unfamiliar);
        Ok(phases.0.zip(phases.1).map(|(prefill, decode)| ByPhase { prefill, decode }))
    }

    /// Compares the prediction of a request with its actual usage.
    fn record_quality(&mut self, active: &TrackedRequest, truths: &ByPhase<Option<UsageShares>>) {
        let Some(prediction) = &active.prediction else { return };
        self.quality.compared += 1;
        if self.trained.is_some() && self.prior.has_contributor(active.tenant) {
            self.record_prior_quality(active.tenant, prediction, truths);
        }
        for phase in Phase::ALL {
            let (predicted, Some(truth)) = (prediction.get(phase), truths.get(phase)) else { continue };
            let quality = self.quality.get_mut(phase);
            quality.record(&predicted.shares, truth);
            if let Some(error_bars) = &predicted.error_bars {
                quality.record_coverage(&predicted.shares, truth, error_bars);
            }
            let comparison =
                self.histories.as_mut().and_then(|histories| histories.comparison(active.tenant));
            if let (Some(comparison), Some(CombinedPredictions { trained, own })) =
                (comparison, &predicted.combined)
            {
                comparison.get_mut(phase).record(trained, own, truth);
            }
        }
    }

    /// Compares the prior that `tenant` would get as a new tenant with its actual usage. The tenant shares its usage.
    fn record_prior_quality(
        &mut self,
        tenant: Tenant,
        prediction: &ByPhase<PhasePrediction>,
        truths: &ByPhase<Option<UsageShares>>,
    ) {
        let Ok(Some(prior)) = self.prior.shares_for(tenant) else { return };
        for phase in Phase::ALL {
            let predicted = prediction.get(phase);
            let trained = predicted.combined.as_ref().map_or(&predicted.shares, |combined| &combined.trained);
            if let Some(truth) = truths.get(phase) {
                self.prior.record_errors(phase, trained, prior.get(phase), truth);
            }
        }
    }
}
