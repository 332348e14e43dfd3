//! Everything that is known of one model's requests, and what follows for those that are here.

use crate::body::{ObservedPrompt, PredictionInput, Prompts};
use crate::exchange::Exchange;
use crate::joint_usage::JointUsage;
use crate::memory::RequestMemory;
use crate::observed::ObservedUsage;
use crate::opted_out::OptedOutTenants;
use crate::prior::Prior;
use crate::quality::Quality;
use crate::steps::Steps;
use crate::store::{Store, StoreError, StoredRequest};
use crate::tenant::Tenant;
use remoe_predictor::record::RecordHeader;
use remoe_predictor::{
    Activations, ByPhase, Embedding, Experience, Method, Phase, PredictError, Shares, TunedPredictor,
};
use std::collections::HashMap;
use std::path::PathBuf;

/// Requests that wait or run, at most; further ones are served without a prediction.
const MOST_PRESENT: usize = 4096;
/// Tokens of a prompt whose beginning was kept that are learned from, at least.
const LEAST_REST: usize = 8;
/// Memory for the past without a store, in bytes.
pub const MEMORY: u64 = 64 << 20;
/// The error bar that coverage is measured of: the third of the quantiles, the 95th percentile.
const BAR: usize = 2;

/// How a model's requests are remembered.
#[derive(Debug, Clone, Default)]
pub struct PredictorOptions {
    /// Folder of the store and the bytes that it may take; none: nothing survives this process.
    pub store: Option<(PathBuf, u64)>,
    /// Nothing is remembered of any request: predictions come from the trained predictor alone.
    pub forgets: bool,
    /// Tokens that answers have where nothing else is known.
    pub output_tokens: f64,
}

/// How much is kept of a tenant's requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Retention {
    /// Each is remembered, without its text, and the mean of what they used predicts requests of tenants that have no
    /// records of their own.
    Shared,
    /// Each is remembered, without its text, for this tenant's predictions alone.
    #[default]
    Records,
    /// Expert usage is counted together with that of other tenants; no request is remembered.
    Counts,
    /// Nothing.
    Nothing,
}

impl Retention {
    /// Returns true if each request is remembered.
    pub(crate) fn are_records(self) -> bool {
        matches!(self, Self::Shared | Self::Records)
    }
}

/// A request that has come.
#[derive(Debug, Clone, Copy)]
pub struct Arrival<'a> {
    /// No other request has it.
    pub id: u64,
    /// Whose it is.
    pub tenant: Tenant,
    /// How much may be kept of it.
    pub keeps: Retention,
    /// Body of the request.
    pub body: &'a [u8],
}

/// A request that waits or runs.
#[derive(Debug)]
struct TrackedRequest {
    tenant: Tenant,
    keeps: Retention,
    prompt: ObservedPrompt,
    vector: Vec<f32>,
    tokens: ByPhase<f64>,
    /// Prediction of its expert usage; absent if nothing is known.
    prediction: Option<ByPhase<PhasePrediction>>,
}

/// A prediction of one phase.
#[derive(Debug, Clone, PartialEq)]
struct PhasePrediction {
    shares: Shares,
    /// Predictions of the trained predictor and of the tenant's past, if there are both.
    parts: Option<(Shares, Shares)>,
    /// How much of the way from the history's mean to it to go, from 0 to 1.
    trust: f64,
    /// The 95th percentile of its divergence in each layer, where that is known.
    bars: Option<Vec<f64>>,
}

impl TrackedRequest {
    /// Returns the uncached rest of a prompt whose beginning was in the prefix cache: its last `computed` tokens.
    /// Expert usage is known of this rest alone. `None` if all of the prompt was computed.
    ///
    /// The rest of a long prompt may lie beyond the tokens that are kept, and is empty then.
    fn rest(&self, computed: u64) -> Option<&[u32]> {
        let ObservedPrompt { tokens, length, is_estimated } = &self.prompt;
        let computed = usize::try_from(computed).ok()?;
        if *is_estimated {
            // Texts have as many tokens a byte in their beginning as in the whole, or nearly.
            return (computed < length / 4 * 3).then_some(&[]);
        }
        let kept = length.checked_sub(computed).filter(|kept| *kept > 0)?;
        Some(tokens.get(kept..).unwrap_or_default())
    }
}

/// Predictor of one model's requests, with what it has learned.
#[derive(Debug)]
pub struct UsagePredictor {
    header: RecordHeader,
    embedding: Embedding,
    prompts: Prompts,
    trained: Option<Box<dyn TunedPredictor>>,
    memory: Option<RequestMemory>,
    prior: Prior,
    store: Option<Store>,
    present: HashMap<u64, TrackedRequest>,
    observed: ObservedUsage,
    quality: Quality,
    steps: Steps,
    opted_out: OptedOutTenants,
}

impl UsagePredictor {
    /// Creates the predictor of the model of `header`, from what is stored of it.
    ///
    /// # Errors
    /// The store cannot be used.
    pub fn new(
        header: RecordHeader,
        embedding: Embedding,
        prompts: Prompts,
        trained: Option<Box<dyn TunedPredictor>>,
        options: PredictorOptions,
    ) -> Result<Self, StoreError> {
        let (layers, experts, hidden) = (header.layers.len(), header.experts as usize, embedding.hidden());
        let one = 4 * (hidden + 2 * layers * experts) as u64;
        let mut past = Vec::new();
        let store = match options.store.filter(|_| !options.forgets) {
            Some((folder, limit)) => {
                Some(Store::open(&folder, &header, hidden, limit, |stored| past.push(stored))?)
            }
            None => None,
        };
        let capacity = store.as_ref().map_or(usize::try_from(MEMORY / one).unwrap_or(1), Store::capacity);
        let mut memory = RequestMemory::new(embedding.clone(), capacity);
        for stored in past {
            // The file's header is this model's, so that everything in it fits.
            if let Err(error) = memory.restore(stored) {
                tracing::warn!(%error, "stored request skipped");
            }
        }
        if let Err(error) = memory.restored() {
            tracing::warn!(%error, "search tree unavailable: searches are linear");
        }
        Ok(Self {
            observed: ObservedUsage::new(layers, experts, header.top_k as usize),
            memory: (!options.forgets).then_some(memory),
            prior: Prior::default(),
            store,
            present: HashMap::new(),
            quality: Quality::default(),
            steps: Steps::new(options.output_tokens.max(0.0)),
            opted_out: OptedOutTenants::default(),
            header,
            embedding,
            prompts,
            trained,
        })
    }

    /// A request has come: it waits or runs until it has [left](Self::left). Of one of which nothing may be known, and of one of
    /// which nothing may be remembered, the tenant's past is forgotten.
    pub fn came(&mut self, Arrival { id, tenant, keeps, body }: Arrival<'_>) {
        match keeps {
            Retention::Shared => {
                self.opted_out.remove(tenant);
                if let Some(memory) = &self.memory {
                    self.prior.join(tenant, memory.history(tenant));
                }
            }
            Retention::Records => {
                self.opted_out.remove(tenant);
                self.prior.leave(tenant);
            }
            Retention::Counts | Retention::Nothing => self.forget(tenant),
        }
        if keeps == Retention::Nothing {
            return;
        }
        let PredictionInput { prompt, most_output } = self.prompts.read(body);
        let tokens = &prompt.tokens;
        if tokens.is_empty() || self.present.len() >= MOST_PRESENT {
            return;
        }
        // A token that the embedding lacks: the main function refuses it.
        let Ok(vector) = self.embedding.prompt_vector(tokens) else { return };
        let prediction = match self.predict(tenant, tokens, &vector) {
            Ok(prediction) => prediction,
            Err(error) => {
                tracing::warn!(%error, "prediction failed");
                None
            }
        };
        // The first token comes out of the prefill.
        let usual = self.steps.of(tenant);
        let steps = most_output.map_or(usual, |most| usual.min(most.saturating_sub(1) as f64));
        let tokens = ByPhase { prefill: prompt.length as f64, decode: steps };
        self.present.insert(id, TrackedRequest { tenant, keeps, prompt, vector, tokens, prediction });
    }

    /// Learns from the activations that a main function reported at the end of an answer.
    ///
    /// # Errors
    /// The activations are invalid: nothing is learned from them.
    pub fn told(&mut self, id: u64, activations: &str) -> Result<(), PredictError> {
        let activations = Activations::from_text(activations, &self.header)?;
        self.observed.add(&activations);
        let Some(present) = self.present.remove(&id) else { return Ok(()) };
        self.steps.note(present.tenant, activations.positions(Phase::Decode) as f64);
        let truths = ByPhase::try_each(|phase| activations.shares(phase))?;
        let vector = match present.rest(activations.positions(Phase::Prefill)) {
            None => {
                self.judge(&present, &truths);
                present.vector
            }
            Some(rest) if rest.len() < LEAST_REST => return Ok(()),
            Some(rest) => self.embedding.prompt_vector(rest)?,
        };
        // Its tenant may have said so meanwhile.
        if !present.keeps.are_records() || self.opted_out.contains(present.tenant) {
            return Ok(());
        }
        let (Some(memory), Some(prefill)) = (&mut self.memory, truths.prefill) else { return Ok(()) };
        let experience = Experience { vector, prefill, decode: truths.decode };
        if present.keeps == Retention::Shared {
            self.prior.note(present.tenant, &experience);
        }
        let stored = memory.learn(present.tenant, experience)?;
        if let Some(store) = &mut self.store
            && let Err(error) = store.append(&stored, || memory.numbers())
        {
            tracing::warn!(%error, "expert usage not stored");
        }
        Ok(())
    }

    /// Learns the requests in `records`, which another gateway served, unless they are known. Returns how many were
    /// new.
    pub fn share(&mut self, records: &[StoredRequest]) -> usize {
        let Some(memory) = &mut self.memory else { return 0 };
        let welcome = records.iter().filter(|record| !self.opted_out.contains(record.tenant));
        let learned = welcome.filter(|record| match memory.share(record) {
            Ok(is_new) => {
                if is_new {
                    self.prior.note(record.tenant, &record.experience);
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

    /// How what other gateways store of this model is read; none where nothing is remembered or stored.
    #[must_use]
    pub fn exchange(&self) -> Option<Exchange> {
        self.memory.as_ref()?;
        self.store.as_ref().map(|store| Exchange::beside(store, self.opted_out.clone()))
    }

    /// Forgets what is remembered of a tenant's requests, and remembers no more of them.
    fn forget(&mut self, tenant: Tenant) {
        self.prior.leave(tenant);
        if !self.opted_out.insert(tenant) {
            return;
        }
        if let Some(memory) = &mut self.memory {
            memory.forget(tenant);
        }
        // Where there was no room for its past in memory, it may still be there.
        if let Some(store) = &mut self.store
            && let Err(error) = store.forget(tenant)
        {
            tracing::error!(%error, "cannot erase a tenant's training history");
        }
    }

    /// A request is over, whatever became of it.
    pub fn left(&mut self, id: u64) {
        self.present.remove(&id);
    }

    /// Returns true if no request waits or runs.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.present.is_empty()
    }

    /// Predicts the joint usage of all present requests, shrunk towards the history's mean by the known errors; `None`
    /// if nothing is known of any of them.
    ///
    /// # Errors
    /// The model has no experts.
    pub fn mix(&self) -> Result<Option<JointUsage>, PredictError> {
        let (layers, experts) = (self.header.layers.len(), self.header.experts as usize);
        let uniform = Shares::uniform(layers, experts);
        let mean =
            |phase| self.trained.as_ref().map_or(&uniform, |trained| trained.popularity().shares(phase));
        let (mut sum, mut requests, mut all) = (vec![0.0_f64; layers * experts], 0.0, 0.0);
        for present in self.present.values() {
            let Some(prediction) = &present.prediction else { continue };
            requests += 1.0;
            for phase in Phase::ALL {
                let said = prediction.of(phase);
                let shares = mean(phase).towards(&said.shares, said.trust)?;
                let tokens = present.tokens.of(phase);
                all += tokens;
                sum.iter_mut()
                    .zip(shares.values())
                    .for_each(|(sum, share)| *sum += tokens * f64::from(*share));
            }
        }
        if requests == 0.0 {
            return Ok(None);
        }
        let shares = Shares::from_weights(experts, sum.into_iter().map(|value| value as f32).collect())?;
        Ok(Some(JointUsage { shares, requests, tokens: all }))
    }

    /// Returns the mean usage of all remembered requests, weighted for so many tokens in each phase; `None` if none is
    /// remembered.
    ///
    /// # Errors
    /// The model has no experts.
    pub fn mean(&self, tokens: ByPhase<f64>) -> Result<Option<Shares>, PredictError> {
        let mean = match &self.memory {
            Some(memory) => memory.mean()?,
            None => None,
        };
        let part = tokens.decode / (tokens.prefill + tokens.decode).max(f64::MIN_POSITIVE);
        mean.map(|mean| mean.prefill.towards(&mean.decode, part)).transpose()
    }

    /// Recent expert usage.
    #[must_use]
    pub fn observed(&self) -> &ObservedUsage {
        &self.observed
    }

    /// How good predictions have been.
    #[must_use]
    pub fn quality(&self) -> &Quality {
        &self.quality
    }

    /// The model's layers with experts, by their ids.
    #[must_use]
    pub fn layers(&self) -> &[u32] {
        &self.header.layers
    }

    /// Experts of each of them.
    #[must_use]
    pub fn experts(&self) -> usize {
        self.header.experts as usize
    }

    /// Requests that are remembered, and the bytes that they take in memory.
    #[must_use]
    pub fn remembered(&self) -> (usize, u64) {
        self.memory.as_ref().map_or((0, 0), |memory| (memory.len(), memory.bytes()))
    }

    /// Predicts the usage of a request; `None` if nothing is known.
    fn predict(
        &mut self,
        tenant: Tenant,
        tokens: &[u32],
        vector: &[f32],
    ) -> Result<Option<ByPhase<PhasePrediction>>, PredictError> {
        let own = match &self.memory {
            Some(memory) => memory.predict(tenant, vector)?,
            None => None,
        };
        let is_own = own.is_some();
        let past = match own {
            Some(own) => Some(own),
            None => self.prior.shares_for(tenant)?,
        };
        let mut is_unfamiliar = false;
        let mut said = |phase: Phase| -> Result<Option<PhasePrediction>, PredictError> {
            let own = past.as_ref().map(|past| past.of(phase).clone());
            let Some(trained) = &self.trained else {
                return Ok(own.map(|shares| PhasePrediction { shares, parts: None, trust: 0.5, bars: None }));
            };
            let prediction = trained.predict_with_errors(tokens, phase)?;
            let farthest = trained.tuning(phase).classes.last().map(|class| class.disagreement);
            is_unfamiliar |= farthest.is_some_and(|farthest| prediction.disagreement > farthest);
            let bars = prediction.errors.map(|bars| bars.js_quantiles.iter().map(|bars| bars[BAR]).collect());
            // As far off as each was on prompts that nothing was fitted to.
            let trust = match (prediction.errors, trained.errors_of(Method::Dop, phase)) {
                (Some(its), Some(mean)) => mean.js_mean / (mean.js_mean + its.js_mean).max(f64::MIN_POSITIVE),
                _ => 0.5,
            };
            let shares = prediction.shares;
            let Some(own) = own else {
                return Ok(Some(PhasePrediction { shares, parts: None, trust, bars }));
            };
            let weight = match &self.memory {
                Some(memory) if is_own => memory.weight_of_own(tenant, phase),
                _ => self.prior.weight(phase),
            };
            let both = shares.towards(&own, weight)?;
            Ok(Some(PhasePrediction { shares: both, parts: Some((shares, own)), trust, bars }))
        };
        let both = (said(Phase::Prefill)?, said(Phase::Decode)?);
        self.quality.unfamiliar += u64::from(is_unfamiliar);
        Ok(both.0.zip(both.1).map(|(prefill, decode)| ByPhase { prefill, decode }))
    }

    /// Compares what was said of a request with what it used.
    fn judge(&mut self, present: &TrackedRequest, truths: &ByPhase<Option<Shares>>) {
        let Some(prediction) = &present.prediction else { return };
        self.quality.compared += 1;
        if self.trained.is_some() && self.prior.is_shared_by(present.tenant) {
            self.judge_prior(present.tenant, prediction, truths);
        }
        for phase in Phase::ALL {
            let (said, Some(truth)) = (prediction.of(phase), truths.of(phase)) else { continue };
            let quality = self.quality.of_mut(phase);
            quality.note(&said.shares, truth);
            if let Some(bars) = &said.bars {
                quality.bar(&said.shares, truth, bars);
            }
            let balance = self.memory.as_mut().and_then(|memory| memory.balance(present.tenant));
            if let (Some(balance), Some((trained, own))) = (balance, &said.parts) {
                balance.of_mut(phase).note(trained, own, truth);
            }
        }
    }

    /// Compares the prior that `tenant` would have, were it new, with what a request of it used. It shares that.
    fn judge_prior(
        &mut self,
        tenant: Tenant,
        prediction: &ByPhase<PhasePrediction>,
        truths: &ByPhase<Option<Shares>>,
    ) {
        let Ok(Some(prior)) = self.prior.shares_for(tenant) else { return };
        for phase in Phase::ALL {
            let said = prediction.of(phase);
            let trained = said.parts.as_ref().map_or(&said.shares, |(trained, _)| trained);
            if let Some(truth) = truths.of(phase) {
                self.prior.compare(phase, trained, prior.of(phase), truth);
            }
        }
    }
}
